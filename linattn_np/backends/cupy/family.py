"""simple_gla, retention and linear_attention as gla, whose plans and kernels they share.

A gate that all channels share goes to Hopper's own kernels as it is, and is spread over the channels for others.
Feature maps are passes over q and k. The normaliser is one more column of v, all ones, so that the state is S | z and o is
y | z, in float32 as sums over many tokens need it, padded with zeros; a last pass divides. `device` is where, as in `plans`.
"""

from __future__ import annotations

import numpy as np

from ...contract import Op
from . import tiles
from .build import pack
from .gradients import in_pieces
from .operands import FLOAT32, ceil_div, contiguous, give_back, has_rows, in_rows, one_gate, output, rows

WHOLE = 4               # columns of float32 that a piece of 16 bytes has: S | z is padded to them
# What all of them become, declared here since the public operators stand above the backends.
GLA = Op("gla", {"q": "B H T K", "k": "B H T K", "v": "B H T V", "g": "B H T K"}, gates=("g",))
NAMES = ("simple_gla", "retention", "linear_attention")


def feature_map(problem) -> str | None:
    return problem.options.get("feature_map")


def normalized(problem) -> bool:
    return bool(problem.options.get("normalize"))


def with_channel(problem):
    """simple_gla's gate as [B, H, T, 1]."""
    if problem.op.name != "simple_gla" or problem["g"].ndim == 4:
        return problem
    return problem.but(arrays=problem.arrays | {"g": problem["g"][..., None]})


# -- there --------------------------------------------------------------------------------------------------------------
class Maker:
    """Makes arrays from those of a call on a device."""

    def __init__(self, device):
        self.device = device

    def upload(self, host):
        return self.device.upload(host)

    def joined(self, parts, shape, dtype, phi=None):
        """`phi` of the parts, (array, columns) each, side by side; an axis of 1 is as long as it is to be.

        In the memory order of the first part, where that is all and has rows.
        """
        like, first = parts[0][0], 0
        ordered = like.shape == shape and has_rows(like)
        room = self.device.empty_like(like, shape, dtype) if ordered else self.device.empty(shape, dtype)
        for x, columns in parts:
            fill(self.device, room[..., first:first + columns], in_rows(x), phi)
            first += columns
        return room


class Sketcher:
    """Makes rooms of one row for them, and notes what would be launched. Only a gate has all of its shape: it says who shares it."""

    def __init__(self, device):
        self.device, self.kernels = device, []

    def upload(self, host):
        return host

    def joined(self, parts, shape, dtype, phi=None):
        self.kernels += [tiles.feature_map(phi, x.dtype, dtype) for x, _ in parts]
        return self.device.empty(shape if shape[-1] == 1 else (1, 1, 1, shape[-1]), dtype)


def as_gla(problem, maker, reads_one_gate=None):
    """The problem of gla's; `reads_one_gate` says of which dtypes its kernels take a gate that all channels share."""
    B, N, H, T, K, V = problem.shape("B N H T K V")
    q, k, v = (problem[name] for name in "qkv")
    fields = {"scale": problem.scale, "dtype": problem.dtype, "sizes": problem.sizes}
    phi = feature_map(problem)
    if normalized(problem):
        columns = ceil_div(V + 1, WHOLE) * WHOLE
        one = maker.upload(np.ones((1, 1, 1, 1), np.float32))
        v = with_last(maker, v, one, (B, H, T, columns))
        fields = {"scale": 1.0, "dtype": FLOAT32, "sizes": problem.sizes | {"V": columns}, "out": None, "state_dtype": FLOAT32}
        if problem.initial_state:
            fields["initial_state"] = (state(problem, maker, problem.initial_state),)
    if phi or fields["dtype"] != q.dtype:
        q, k = (maker.joined([(x, K)], x.shape, fields["dtype"], phi) for x in (q, k))
    gla = problem.but(op=GLA, arrays={"q": q, "k": k, "v": v, "g": gate(problem, maker)}, options={}, memo=None, **fields)
    g, read = gla["g"], reads_one_gate(gla, maker.device) if reads_one_gate else ()
    if g.dtype in read:
        return gla
    columns = 1 if read else K
    return gla.but(arrays=gla.arrays | {"g": maker.joined([(g, columns)], (B, H, T, columns), FLOAT32)})


def gate(problem, maker):
    """The gate with a size of 1 for the axes along which it is the same."""
    if problem.op.name == "simple_gla":
        return with_channel(problem)["g"]
    gamma = np.asarray(problem.options.get("gamma", [1.0]))
    with np.errstate(divide="ignore"):          # gamma = 0 forgets: -inf
        return maker.upload(np.log(gamma).astype(np.float32).reshape(1, -1, 1, 1))


def state(problem, maker, parts):
    """S | z."""
    N, H, K, V = problem.shape("N H K V")
    S, z = map(contiguous, parts)
    return with_last(maker, S, z[..., None], (N, H, K, ceil_div(V + 1, WHOLE) * WHOLE))


def with_last(maker, x, last, shape):
    """x | last | 0, as wide as `shape`."""
    V, rest = x.shape[-1], shape[-1] - x.shape[-1] - 1
    zeros = [(maker.upload(np.zeros((1, 1, 1, 1), np.float32)), rest)] if rest else []
    return maker.joined([(x, V), (last, 1), *zeros], shape, FLOAT32)


# -- and back -----------------------------------------------------------------------------------------------------------
def run(problem, device, run_gla, reads_one_gate):
    y, final = run_gla(as_gla(problem, Maker(device), reads_one_gate), device)
    if not normalized(problem):
        return y, final
    o = output(problem, device)
    by_token(problem, device, tiles.divide(problem.dtype), dict(yz=y, o=o), V=problem.sizes["V"])
    return give_back(problem, o), None if final is None else split(problem, final[0], (problem.state_dtype,) * 2)


def split(problem, joined, dtypes):
    """S and z of S | z."""
    V = problem.sizes["V"]
    return tuple(x.astype(dtype, copy=False) for x, dtype in zip((joined[..., :V], joined[..., V]), dtypes))


def pullback(problem, device, do, dht, run_gla, pull_gla, reads_one_gate):
    """Gradients as `gradients.pullback` gives them."""
    gla = as_gla(problem, Maker(device), reads_one_gate)
    if normalized(problem):
        (y, _), do = run_gla(gla, device), in_rows(do.astype(problem.dtype, copy=False))
        dyz = device.empty(y.shape, FLOAT32)
        by_token(problem, device, tiles.divide_gradient(problem.dtype), dict(yz=y, do=do, dyz=dyz), V=problem.sizes["V"],
                 columns=y.shape[-1])
        do, dht = dyz, dht and (state(problem, Maker(device), dht),)
    (dq, dk, dv, dg), dh0 = pull_gla(gla, device, do, dht)
    if phi := feature_map(problem):
        dq, dk = (through(device, phi, problem[name], x) for name, x in (("q", dq), ("k", dk)))
    if normalized(problem):
        dv, dh0 = dv[..., :problem.sizes["V"]], dh0 and split(problem, dh0[0], [part.dtype for part in problem.initial_state])
    found = tuple(x.astype(problem.dtype, copy=False) for x in (dq, dk, dv))
    return (*found, shared(problem, device, dg)) if problem.op.gates else found, dh0


def shared(problem, device, dg):
    """The gradient of a gate that all channels share, from [B, H, T, K] or in float32."""
    if dg.ndim == 3 and dg.dtype == problem["g"].dtype:
        return dg
    found = device.empty(problem.shape("B H T"), problem["g"].dtype)
    if dg.ndim == 3:
        fill(device, found[:, :, None], dg[:, :, None], None)          # its tokens side by side as channels are
    else:
        by_token(problem, device, tiles.gate_gradient(found.dtype), dict(x=dg, y=found[..., None]), C=dg.shape[-1])
    return found


def through(device, phi, x, dy):
    """dx of y = phi(x)."""
    (B, H, T, C), dx, x = x.shape, device.empty(x.shape, x.dtype), in_rows(x)
    kernel = tiles.feature_gradient(phi, x.dtype, dy.dtype)
    device.launch(kernel, ceil_div(B * H * T * C, kernel.threads), pack(**rows(device, x=x, dy=dy, dx=dx), B=B, H=H, T=T, C=C))
    return dx


# -- launches -----------------------------------------------------------------------------------------------------------
def by_token(problem, device, kernel, arrays, **columns):
    """A warp for each token."""
    B, H, T = problem.shape("B H T")
    device.launch(kernel, ceil_div(32 * B * H * T, kernel.threads), pack(**rows(device, **arrays), B=B, H=H, T=T, **columns))


def fill(device, y, x, phi):
    """y = phi(x), `x` read again and again along the axes of which it has one."""
    B, H, T, C = y.shape
    step = int(x.shape[-1] > 1)
    vectors = C % tiles.PIECE == 0 and in_pieces(y, device) and (not step or in_pieces(x, device))
    kernel = tiles.feature_map(phi, x.dtype, y.dtype)
    threads = B * H * T * C // (tiles.PIECE if vectors else 1)
    device.launch(kernel, ceil_div(threads, kernel.threads), pack(**rows(device, x=x, y=y), B=B, H=H, T=T, C=C, step=step,
                                                                    vectors=int(vectors)))


def unsupported(problem) -> str | None:
    """Why there is no backward although there is a forward."""
    if problem.op.name in NAMES and normalized(problem) and problem.gradient and problem.sizes["V"] >= tiles.CHANNELS[-1]:
        return f"V={problem.sizes['V']} and the normaliser are over {tiles.CHANNELS[-1]}, the columns its gradients hold at once"
    return None


# -- what explain says --------------------------------------------------------------------------------------------------
def outline(problem, device, reads_one_gate=None):
    """The problem of gla's with small stand-ins for what would be made, and the kernels that would make it."""
    sketcher = Sketcher(device)
    return as_gla(problem, sketcher, reads_one_gate), tuple(sketcher.kernels)


def kernels(problem, device, of_gla, reads_one_gate):
    """What `run` launches, in order."""
    gla, before = outline(problem, device, reads_one_gate)
    return (*before, *of_gla(gla, device), *([tiles.divide(problem.dtype)] if normalized(problem) else []))


def sweeps(problem, device, of_gla, of_gradients, reads_one_gate):
    """What `pullback` launches, in order."""
    gla, before = outline(problem, device, reads_one_gate)
    phi, T = feature_map(problem), gla.dtype
    quotient = (*of_gla(gla, device), tiles.divide_gradient(problem.dtype)) if normalized(problem) else ()
    after = 2 * (tiles.feature_gradient(phi, problem.dtype, T),) if phi else ()
    if problem.op.gates and not one_gate(gla):
        after += (tiles.gate_gradient(problem["g"].dtype),)
    elif problem.op.gates and problem["g"].dtype != FLOAT32:
        after += (tiles.feature_map(None, FLOAT32, problem["g"].dtype),)
    return (*before, *quotient, *of_gradients(gla, device), *after)


def copies_of(problem, device, reads_one_gate) -> tuple[str, ...]:
    """What is made for the kernels besides."""
    if problem.op.name not in NAMES:
        return ()
    gla, _ = outline(problem, device, reads_one_gate)
    gates = {"simple_gla": "g: spread over the channels", "retention": "log gamma: spread over tokens and channels"}
    found = [] if one_gate(gla) else [gates.get(problem.op.name, "a gate of 0: spread over tokens and channels")]
    if one_gate(gla) and problem.op.gates and gla["g"].dtype != problem["g"].dtype:
        found.append("g: in float32")
    if feature_map(problem) or normalized(problem) and problem.dtype != FLOAT32:
        found.append("q and k: mapped to their features" + (" in float32" if normalized(problem) else ""))
    if normalized(problem):
        found.append("v: in float32 beside a column of ones for the normaliser")
    return tuple(found)


def scratch(problem, gla) -> int:
    """Bytes that the arrays made take, besides what gla's own gradients need."""
    B, N, H, T, K = problem.shape("B N H T K")
    tokens, V, size = B * H * T, gla.sizes["V"], gla.dtype.itemsize
    converted = bool(problem.op.gates) and problem["g"].dtype != FLOAT32
    found = 2 * tokens * FLOAT32.itemsize * (converted if one_gate(gla) else K)             # g and dg
    if feature_map(problem) or gla.dtype != problem.dtype:
        found += 4 * tokens * K * size                                          # q, k and their gradients
    if normalized(problem):
        found += 4 * tokens * V * size + 2 * N * H * K * V * size               # v | 1 and y | z and theirs; S | z and its
    return found
