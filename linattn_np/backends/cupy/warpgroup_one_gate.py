"""Plans of Hopper's kernel for a gate that all channels share, as it is given: outputs, and gradients where none is of the gate.

The kernel computes sums of values over the tokens so far, or from a token on, weighted by products of queries with keys:
o is one, and so are dq, dk and dv. `device` is where, as in `plans`.
"""

from __future__ import annotations

from ...arrays import BFLOAT16
from . import tiles
from .build import pack, with_maps
from .operands import FLOAT32, ceil_div, one_gate, pointer, rows

NAME = "warpgroup_one_gate"


def computes(problem) -> bool:
    """Whether it is this kernel that computes a problem which Hopper's own can; bfloat16 alone has the range of states."""
    return one_gate(problem) and problem.dtype == BFLOAT16 and problem.sizes["K"] <= tiles.WARPGROUP_TILES[-1]


def segments(problem, longest) -> int:
    """Into how many its gradients cut a sequence."""
    return tiles.segments(len(SWEEPS) * blocks(problem, tiles.PANEL), longest)


def gradient_kernels(problem, longest) -> tuple[tiles.Kernel, ...]:
    """One for all three, of blocks as wide as the channels, or of half as many, which take three quarters of the time; or one
    for dq of such and one for dk and dv of wide ones: whatever needs the least time for its waves of blocks."""
    K, V = problem.shape("K V")
    widest, P = max(K, V), segments(problem, longest)

    def waves(sweeps, BV):
        return (3 if BV < widest else 4) * ceil_div(sweeps * P * blocks(problem, BV), tiles.MULTIPROCESSORS)

    whole = {BV: waves(3, BV) for BV in (widest, tiles.PANEL)}
    if P == 1 and waves(1, tiles.PANEL) + waves(2, widest) < min(whole.values()):
        return tiles.warpgroup_one_gate("Queries", FLOAT32, V, tiles.PANEL), tiles.warpgroup_one_gate("Keys", FLOAT32, widest, widest)
    return (tiles.warpgroup_one_gate("Gradients", FLOAT32, widest, min(whole, key=whole.get)),)


def blocks(problem, BV) -> int:
    """Of one sweep of uncut sequences."""
    N, H, K, V = problem.shape("N H K V")
    return N * H * ceil_div(max(K, V), BV)


def outputs(problem, device, kernel, arrays, o, initial, final, where, **summary):
    """o, or the states that `Summary` keeps, of the sequences or segments that `where` names."""
    q, k, v, g = arrays
    given = sweep(device, (q, k, v, o), initial, final, read=problem.scale, write=1.0)
    launch(problem, device, kernel, (given,), g, where, ceil_div(problem.sizes["V"], int(kernel.template[-1])), **summary)


# -- gradients ----------------------------------------------------------------------------------------------------------
# Of which arrays each is the sum, as queries, keys and values.
SWEEPS = {"dq": ("do", "v", "k"), "dk": ("v", "do", "q"), "dv": ("k", "q", "do")}


def gradients(problem, device, kernels, arrays, found, initial, dht, dh0, where, P):
    """dq, dk and dv into `found`, and dh0 where there is room, of P segments a sequence; `arrays` and `found` by name."""
    scale, given = problem.scale, []
    for name, parts in SWEEPS.items():
        of = (*(arrays[part] for part in parts), found[name])
        if name == "dq":
            given.append(sweep(device, of, initial, None, read=scale, write=1.0, turned=True))
        else:
            given.append(sweep(device, of, dht, dh0 if name == "dv" else None, read=1.0, write=scale, turned=name == "dk", backwards=True))
    for kernel in kernels:
        part = {"Queries": given[:1], "Keys": given[1:], "Gradients": given}[kernel.template[0]]
        widest = problem.sizes["K"] if kernel.template[0] == "Queries" else max(problem.shape("K V"))
        launch(problem, device, kernel, part, arrays["g"], where, ceil_div(widest, int(kernel.template[-1])), of=P)


def sweep(device, parts, initial, final, *, read, write, turned=False, backwards=False):
    """The kernel's `Sweep`; states are [K, V], and `turned` where the values are as wide as K."""
    q, k, v, o = parts
    maps = [device.tensor_map(x, tiles.PANEL, tiles.TOKENS[NAME]["chunk"], True) for x in parts]
    K, V = k.shape[-1], v.shape[-1]
    fields = pack(**rows(device, q=q, k=k, v=v, o=o), initial=pointer(device, initial), final=pointer(device, final), K=K, V=V,
                  state_k=1 if turned else V, state_v=K if turned else 1, read=read, write=write, backwards=int(backwards))
    return with_maps(maps, fields).tobytes()


def launch(problem, device, kernel, given, g, where, tiles_of_V, decays=None, of=1, needed=1):
    fields = pack(**rows(device, g=g), **where.shape, decays=decays, of=of, needed=needed)
    count = problem.sizes["B"] * where.shape["count"] * problem.sizes["H"] * tiles_of_V * len(given)
    device.launch(kernel, count, with_maps(given, fields), tiles.shared_bytes(kernel))
