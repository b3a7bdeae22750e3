"""Host plans: what to allocate and what to launch for a problem. `device` is where: build.CupyDevice, or in tests the
CPU emulator of the same interface, so nothing here touches CuPy itself."""

from __future__ import annotations

import numpy as np

from ...arrays import BFLOAT16
from ...contract import CHUNK, SUB_CHUNK
from . import attention, family, gradients, tiles, two_gates, warpgroup_one_gate
from .build import pack, with_maps
from .operands import (FLOAT32, bonus, ceil_div, contiguous, gate, give_back, has_rows, in_pieces, in_rows,
                       inputs, is_plain, mappable, one_gate, output, place, pointer, rows, states, stored)

MODES = ("auto", "recurrent", "chunk", "staged")
OPERATORS = ("gla", "rwkv6", *family.NAMES)
OWN = {attention.NAME: attention, two_gates.NAME: two_gates}        # operators with plans and kernels of their own


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem, wherever its arrays are; None when they can."""
    name = problem.op.name
    if name == attention.NAME:
        return attention.unsupported(problem)
    if name == two_gates.NAME and (reason := two_gates.unsupported(problem)):
        return reason
    if reason := family.unsupported(problem):
        return reason
    if name not in OPERATORS and name not in PLANS:
        return f"no kernel for {name}; it has {', '.join(OPERATORS)}, gla's and rwkv6's steps, {attention.NAME} and the stages"
    if problem.dtype not in tiles.CTYPES:
        return f"no {problem.dtype} kernels; it has {', '.join(map(str, tiles.CTYPES))}"
    if name in OPERATORS and problem.mode not in MODES:
        return f"no mode {problem.mode!r}; it has {', '.join(map(repr, MODES))}"
    if mode_of(problem) == "chunk" and problem.materialize:
        return "mode 'chunk' is one pass that keeps no chunk's state; mode 'staged' keeps them"
    if problem.sizes.get("K", 0) > tiles.CHANNELS[-1] and name not in UNLIMITED:
        return f"K={problem.sizes['K']} is over {tiles.CHANNELS[-1]}"
    state = problem.options.get("state")
    if state is not None and state.dtype not in tiles.CTYPES:
        return f"the state is {state.dtype}; it takes {', '.join(map(str, tiles.CTYPES))}"
    if state is not None and not has_rows(state):
        return "the state's last axis is not contiguous, so it cannot be updated in place"
    return None


def mode_of(problem) -> str:
    """The mode that runs: "auto" is the one-pass kernel, or the stages when every chunk's state is to be kept."""
    if problem.mode != "auto":
        return problem.mode
    if problem.op.name == two_gates.NAME:
        return "recurrent"
    return "staged" if problem.materialize else "chunk"


def run(problem, device):
    """Results as dispatch asks for them, all work enqueued, nothing waited for."""
    if problem.op.name in PLANS:
        return PLANS[problem.op.name](problem, device)
    if problem.op.name in family.NAMES:
        return family.run(problem, device, run, reads_one_gate)
    o = output(problem, device)
    initial, final = states(problem, device)
    {"chunk": chunk, "recurrent": recurrent, "staged": staged}[mode_of(problem)](problem, device, o, initial, final)
    return give_back(problem, o), stored(problem, final)


def pullback(problem, device, do, dht):
    """`gradients.pullback`, of these operators too."""
    if problem.op.name == two_gates.NAME:
        return two_gates.pullback(problem, device, do, dht)
    if problem.op.name in family.NAMES:
        return family.pullback(problem, device, do, dht, run, gradients.pullback, gradients.reads_one_gate)
    return gradients.pullback(problem, device, do, dht)


def kernels_of(problem, device) -> tuple[tiles.Kernel, ...]:
    """What `run` launches, in order."""
    if problem.op.name in OWN:
        return OWN[problem.op.name].kernels_of(problem, device)
    if problem.op.name in family.NAMES:
        return family.kernels(problem, device, kernels_of, reads_one_gate)
    policy, T, K = tiles.policy(problem.op), problem.dtype, problem.sizes.get("K")
    G = gate(problem).dtype if problem.op.gates else T
    stages = {"chunk_cumsum": tiles.chunk_cumsum(G), "gated_qk": tiles.gated_qk(policy, T),
              "inter_chunk": tiles.inter_chunk(T), "intra_chunk": tiles.intra_chunk(policy, T, G, K or 1),
              "combine": tiles.combine(T)}
    if problem.op.name in stages:
        return (stages[problem.op.name],)
    if "state" in problem.options:
        return (tiles.step(policy, T, G, problem.options["state"].dtype),)
    mode = mode_of(problem)
    if mode == "chunk":
        return one_pass_kernels(problem, device)[0]
    return (tiles.recurrent_forward(policy, T, G, K),) if mode == "recurrent" else tuple(stages.values())


def sweeps_of(problem, device) -> tuple[tiles.Kernel, ...]:
    """What `pullback` launches, in order."""
    if problem.op.name in OWN:
        return OWN[problem.op.name].sweeps(problem, device)
    if problem.op.name in family.NAMES:
        return family.sweeps(problem, device, kernels_of, gradients.sweeps, gradients.reads_one_gate)
    return gradients.sweeps(problem, device)


def scratch(problem, device) -> int:
    """Bytes that `pullback` takes besides the gradients."""
    if problem.op.name in OWN:
        return OWN[problem.op.name].scratch(problem)
    if problem.op.name in family.NAMES:
        gla, _ = family.outline(problem, device, gradients.reads_one_gate)
        return gradients.scratch(gla, device) + family.scratch(problem, gla)
    return gradients.scratch(problem, device)


def tiles_of(problem, device) -> dict:
    """The sizes that the kernels work in."""
    if problem.op.name in OWN:
        return OWN[problem.op.name].tiles_of(problem, device)
    if problem.op.name in family.NAMES:
        return tiles_of(family.outline(problem, device, reader_of(problem))[0], device)
    if problem.gradient:
        return gradients.tiles_of(problem, device)
    BK = {} if problem.op.name in UNLIMITED else {"BK": tiles.channels(problem.sizes["K"])}
    if problem.op.name in PLANS and "state" not in problem.options:
        return BK | {"chunk": problem.chunk_size}
    if "state" in problem.options:
        return BK | {"BV": tiles.STEP_COLUMNS}
    if mode_of(problem) == "recurrent":
        return BK | {"BV": tiles.TOKEN_COLUMNS}
    if mode_of(problem) == "staged":
        return BK | {"BV": tiles.STAGE_COLUMNS, "chunk": problem.chunk_size or CHUNK, "sub_chunk": SUB_CHUNK}
    kernels, columns, P = one_pass_kernels(problem, device)
    segments = {"segments": P} if P > 1 else {}
    return {"BK": int(kernels[0].template[-2]), "BV": columns} | tiles.TOKENS[kernels[0].name] | segments


def copies_of(problem, device) -> tuple[str, ...]:
    """The arrays that are copied before the kernels can read them."""
    problem = family.with_channel(problem)
    strided = [f"{name}: its last axis is not contiguous" for name, x in problem.arrays.items()
               if name != "u" and not has_rows(x)]
    small = {"u": problem.arrays.get("u"), "initial_state": problem.initial_state and problem.initial_state[0]}
    return (*strided, *(f"{name}: the kernels read it as contiguous float32" for name, x in small.items()
                        if x is not None and not is_plain(x)), *family.copies_of(problem, device, reader_of(problem)),
            *two_gates.copies_of(problem))


# -- operators --------------------------------------------------------------------------------------------------------
def chunk(problem, device, o, initial, final):
    kernels, columns, P = one_pass_kernels(problem, device)
    arrays = inputs(problem)
    if kernels[0].name == "chunk_forward":
        one_pass(problem, device, kernels[0], columns, arrays, o, initial, final,
                 vectors=int(in_pieces(problem, device)))
    elif P == 1:
        on_warpgroups(problem, device, kernels, arrays, o, initial, final, place(problem, device))
    else:
        in_segments(problem, device, kernels, P, arrays, o, initial, final)


def one_pass_kernels(problem, device) -> tuple[tuple[tiles.Kernel, ...], int, int]:
    """Of mode "chunk": what is launched, its columns of V a block, the segments a sequence; Hopper's own where it can."""
    policy, T, G = tiles.policy(problem.op), problem.dtype, tiles.ONE if one_gate(problem) else gate(problem).dtype
    N, H, K, V = problem.shape("N H K V")
    if not on_hopper(problem, device):
        return (tiles.chunk_forward(policy, T, G, K, V),), tiles.columns(V), 1
    BK = tiles.WARPGROUP_TILES[-1]
    longest, one = int(problem.spans.lengths.max()), warpgroup_one_gate.computes(problem)
    widest = tiles.WARPGROUP_TILES[not (G is tiles.ONE and tiles.narrow_blocks(N * H, V, longest))]

    def of_pass(only, V):
        if one:
            only = {"SinglePass": "Whole", "SegmentState": "Summary"}[only]
            return tiles.warpgroup_one_gate(only, gate(problem).dtype, K, V)
        return tiles.warpgroup_forward("Gla" if only == "SegmentState" else policy, T, G, K, V, only)

    whole = of_pass("SinglePass", min(V, widest)) if K <= BK else of_pass("ClusterSplitK", V)
    if K <= BK and G is not tiles.ONE and tiles.split_columns(N * H, V, longest):
        whole = of_pass("ClusterSplitV", V)
    columns = int(whole.template[-1])
    blocks = blocks_of(problem, whole)
    P = tiles.segments(blocks, longest, tiles.room(whole))
    if P == 1:
        return (whole,), columns, 1
    return (*ceil_div(K, BK) * (of_pass("SegmentState", V),), tiles.scan_segments(), whole), columns, P


def blocks_of(problem, kernel) -> int:
    """Blocks of a kernel for uncut sequences."""
    N, H, V = problem.shape("N H V")
    return N * H * tiles.blocks(kernel, V)


def on_hopper(problem, device) -> bool:
    """Whether Hopper's own kernel can compute a problem."""
    return device.capability == 90 and problem.dtype.itemsize == 2 and mappable(problem, device)


def reads_one_gate(problem, device) -> tuple[np.dtype, ...]:
    """Of which dtypes what runs takes a gate that all channels share as it is."""
    if mode_of(problem) != "chunk" or not on_hopper(problem, device):
        return ()
    return (BFLOAT16, FLOAT32) if warpgroup_one_gate.computes(problem) else (FLOAT32,)


def reader_of(problem):
    """What says so of the direction that is asked for."""
    return gradients.reads_one_gate if problem.gradient else reads_one_gate


def in_segments(problem, device, kernels, P, arrays, o, initial, final):
    """Sequences cut into P segments: what each of their parts leaves behind, the states between, then all at once."""
    *summaries, scan, whole = kernels
    N, H, K, V = problem.shape("N H K V")
    R = tiles.parts(summaries[0], N * H, V, P, int(problem.spans.lengths.max()), final is not None)
    segments = problem.spans.segments(P, tiles.TOKENS[whole.name]["chunk"])
    left, decays = device.empty((N * P * R, H, K, V), FLOAT32), device.empty((N * P * R, H, 2, K), FLOAT32)
    starts, where = device.empty((N * P, H, K, V), FLOAT32), place(problem, device, segments)
    parts = place(problem, device, segments.segments(R, tiles.WARPGROUP_CHUNK)) if R > 1 else where
    on_warpgroups(problem, device, summaries, arrays, o, None, left, parts, device.pointer(decays), of=P * R,
                  needed=(P - (final is None)) * R)
    args = pack(left=device.pointer(left), decays=device.pointer(decays), initial=pointer(device, initial),
                starts=device.pointer(starts), final=pointer(device, final), P=P, R=R, H=H, K=K, V=V)
    device.launch(scan, N * H * ceil_div(K * V, 4 * scan.threads), args)
    on_warpgroups(problem, device, (whole,), arrays, o, starts, None, where)


def on_warpgroups(problem, device, kernels, arrays, o, initial, final, where, decays=None, of=1, needed=1):
    """Hopper's kernels on the sequences or segments that `where` names, a launch for every BK channels that one takes."""
    if warpgroup_one_gate.computes(problem):
        return warpgroup_one_gate.outputs(problem, device, *kernels, arrays, o, initial, final, where,
                                          decays=decays, of=of, needed=needed)
    q, k, v, g = arrays
    u = bonus(problem)                          # may be a copy, which must live until the launch
    B, H, V = problem.shape("B H V")
    BK = int(kernels[0].template[-2])
    one = g if one_gate(problem) else None
    maps = [device.tensor_map(x, BK, tiles.WARPGROUP_CHUNK, False) for x in (q, k, k if one is g else g)]
    maps += [device.tensor_map(x, tiles.PANEL, tiles.WARPGROUP_CHUNK, True) for x in (v, o)]
    one_rows = rows(device, one=g) if one is g else dict.fromkeys(("one", "one_b", "one_h", "one_t"))
    for n, kernel in enumerate(kernels):
        fields = pack(**rows(device, o=o), **one_rows, u=pointer(device, u), initial=pointer(device, initial),
                      final=pointer(device, final), **where.shape, scale=problem.scale, decays=decays,
                      channel=n * BK, of=of, needed=needed)
        device.launch(kernel, B * H * where.shape["count"] * tiles.blocks(kernel, V), with_maps(maps, fields), tiles.shared_bytes(kernel))


def recurrent(problem, device, o, initial, final):
    kernel = tiles.recurrent_forward(tiles.policy(problem.op), problem.dtype, gate(problem).dtype, problem.sizes["K"])
    one_pass(problem, device, kernel, tiles.TOKEN_COLUMNS, inputs(problem), o, initial, final)


def one_pass(problem, device, kernel, columns, arrays, o, initial, final, **more):
    """A kernel that takes a (sequence, head, so many columns of V) a block."""
    q, k, v, g = arrays
    u = bonus(problem)
    N, H, V = problem.shape("N H V")
    where = place(problem, device)
    args = pack(**rows(device, q=q, k=k, v=v, g=g, o=o), u=pointer(device, u), initial=pointer(device, initial),
                final=pointer(device, final), **where.shape, scale=problem.scale, **more)
    device.launch(kernel, N * H * ceil_div(V, columns), args, tiles.shared_bytes(kernel))


def staged(problem, device, o, initial, final):
    q, k, v, g = inputs(problem)
    B, H, T, K, V = problem.shape("B H T K V")
    where = place(problem, device)
    b, e, qg, kg = (device.empty((B, H, T, K), FLOAT32) for _ in range(4))
    A = device.empty((B, H, T, where.shape["chunk"]), FLOAT32)
    h = device.empty((B, H, where.shape["NC"], K, V), FLOAT32)
    policy = tiles.policy(problem.op)
    launch_chunk_cumsum(device, where, g, b, e)
    launch_gated_qk(device, where, policy, q, k, b, e, qg, kg)
    launch_inter_chunk(device, where, kg, v, b, h, initial, final)
    launch_intra_chunk(device, where, policy, q, k, g, bonus(problem), A)
    launch_combine(device, where, qg, h, A, v, o, problem.scale)


def step(problem, device):
    q, k, v, g = inputs(problem)
    state, slots = problem.options["state"], problem.options["slots"]
    B, H, K, V = problem.shape("B H K V")
    if isinstance(slots, np.ndarray):
        slots = device.upload(slots)
    o = output(problem, device)
    u = bonus(problem)
    kernel = tiles.step(tiles.policy(problem.op), problem.dtype, g.dtype, state.dtype)
    pieces = not any(x % 16 for x in (V * state.dtype.itemsize, device.pointer(state), *state.strides[:-1]))
    args = pack(**rows(device, q=q, k=k, v=v, g=g, o=o), u=pointer(device, u), **rows(device, state=state),
                slots=pointer(device, slots), H=H, K=K, V=V, scale=problem.scale, pieces=int(pieces))
    device.launch(kernel, B * H * ceil_div(V, tiles.STEP_COLUMNS), args, tiles.shared_bytes(kernel))
    return give_back(problem, o)


# -- stages -----------------------------------------------------------------------------------------------------------
def stage_chunk_cumsum(problem, device):
    g, = inputs(problem)
    b, e = (device.empty_like(g, g.shape, FLOAT32) for _ in range(2))
    launch_chunk_cumsum(device, place(problem, device), g, b, e)
    return b, e


def stage_gated_qk(problem, device):
    q, k, b, e = inputs(problem)
    qg, kg = (device.empty_like(x, x.shape, FLOAT32) for x in (q, k))
    policy = "Rwkv6" if problem.options["exclusive"] else "Gla"
    launch_gated_qk(device, place(problem, device), policy, q, k, b, e, qg, kg)
    return qg, kg


def stage_inter_chunk(problem, device):
    kg, v, b = inputs(problem)
    h = device.empty(problem.shape("B H NC K V"), FLOAT32)
    initial, final = states(problem, device)
    launch_inter_chunk(device, place(problem, device), kg, v, b, h, initial, final)
    return h, stored(problem, final)


def stage_intra_chunk(problem, device):
    q, k, g = inputs(problem)
    A = device.empty_like(q, problem.shape("B H T C"), FLOAT32)
    launch_intra_chunk(device, place(problem, device), tiles.policy(problem.op), q, k, g, bonus(problem), A)
    return A


def stage_combine(problem, device):
    qg, A, v = (in_rows(problem[name]) for name in ("qg", "A", "v"))
    o = output(problem, device)
    launch_combine(device, place(problem, device), qg, problem["h"], A, v, o, problem.scale)
    return give_back(problem, o)


PLANS = {attention.NAME: attention.run, two_gates.NAME: two_gates.run, "gla_step": step, "rwkv6_step": step,
         "chunk_cumsum": stage_chunk_cumsum, "gated_qk": stage_gated_qk, "inter_chunk": stage_inter_chunk,
         "intra_chunk": stage_intra_chunk, "combine": stage_combine}
UNLIMITED = ("gla_step", "rwkv6_step", "chunk_cumsum", "gated_qk", "inter_chunk", "combine")     # in K


def launch_chunk_cumsum(device, where, g, b, e):
    kernel = tiles.chunk_cumsum(g.dtype)
    device.launch(kernel, where.chunks, pack(**rows(device, g=g, b=b, e=e), **where.shape))


def launch_gated_qk(device, where, policy, q, k, b, e, qg, kg):
    kernel = tiles.gated_qk(policy, q.dtype)
    device.launch(kernel, where.chunks, pack(**rows(device, q=q, k=k, b=b, e=e, qg=qg, kg=kg), **where.shape))


def launch_inter_chunk(device, where, kg, v, b, h, initial, final):
    kernel = tiles.inter_chunk(v.dtype)
    tiled = ceil_div(kg.shape[-1], tiles.STAGE_COLUMNS) * ceil_div(v.shape[-1], tiles.STAGE_COLUMNS)
    blocks = where.shape["B"] * where.shape["count"] * where.shape["H"] * tiled
    args = pack(**rows(device, kg=kg, b=b, v=v), h=device.pointer(h), initial=pointer(device, initial),
                final=pointer(device, final), **where.shape)
    device.launch(kernel, blocks, args, tiles.shared_bytes(kernel))


def launch_intra_chunk(device, where, policy, q, k, g, u, A):
    kernel = tiles.intra_chunk(policy, q.dtype, g.dtype, where.shape["K"])
    args = pack(**rows(device, q=q, k=k, g=g), u=pointer(device, u), **rows(device, A=A), **where.shape)
    device.launch(kernel, where.chunks * (where.shape["chunk"] // SUB_CHUNK), args, tiles.shared_bytes(kernel))


def launch_combine(device, where, qg, h, A, v, o, scale):
    kernel = tiles.combine(v.dtype)
    B, H, NC, K, V = h.shape
    states = in_rows(h).reshape(B, H, NC * K, V)
    blocks = where.chunks * ceil_div(where.shape["chunk"], tiles.STAGE_COLUMNS) * ceil_div(V, tiles.STAGE_COLUMNS)
    args = pack(**rows(device, qg=qg, h=states, A=A, v=v, o=o), **where.shape, scale=scale)
    device.launch(kernel, blocks, args, tiles.shared_bytes(kernel))
