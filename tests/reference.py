"""What results are held to: random inputs, the exact answer in float64, error figures, and guarded memory.

The exact answer of a recurrent operator is the NumPy backend's mode "recurrent" on the same values in float64;
`literal` holds that one to the papers' equations, written here once more, a head and a token at a time.
"""

from dataclasses import dataclass

import numpy as np

from linattn_np import gla, hgrn2, simple_gla, softmax_attention, vjp
from linattn_np.declarations import DELTA_RULES, LINEAR_ATTENTION, NORMALIZED, SharedHeadsOp
from linattn_np.layouts import swap_heads
from linattn_np.ops import declaration
from linattn_np.summary import Transition

DECAYS = ("g", "gv", "w")


# -- random inputs -----------------------------------------------------------------------------------------------------
def logsigmoid(x):
    return -np.logaddexp(0, -x)


def scattered(value, every):
    """Ordinary gates with `value` at one in `every` places."""

    def draw(rng, shape):
        return np.where(rng.random(shape) < 1 / every, value, logsigmoid(rng.standard_normal(shape)))

    return draw


def spikes(rng, shape):
    """-40 at every 64th token."""
    g = logsigmoid(rng.standard_normal(shape))
    np.atleast_3d(g)[:, :, 7::64] = -40
    return g


def by_channel(rng, shape):
    """Each channel its own strength, from none to a factor e**-30 a token."""
    channels = rng.uniform(-6, 1.5, (*shape[:2], 1, *shape[3:])[: len(shape)])
    return -(10.0**channels) * rng.uniform(0.5, 1, shape)


def trained(rng, shape):
    """As trained RWKV-6 models have them: medians of the channels from weak to ordinary, and a heavy tail over the
    tokens.
    """
    medians = np.linspace(-4.2, -2.5, shape[3]) if len(shape) > 3 else -3.3
    return -np.exp(medians + 2 * rng.standard_normal(shape))


GATES = {
    "trained": trained,
    "logsigmoid": lambda rng, shape: logsigmoid(rng.standard_normal(shape)),
    "weak": lambda rng, shape: logsigmoid(rng.standard_normal(shape)) / 16,
    "zero": lambda rng, shape: np.zeros(shape),
    "minus_zero": lambda rng, shape: np.full(shape, -0.0),
    "all-20": lambda rng, shape: np.full(shape, -20.0),
    "spikes-40": spikes,
    "by_channel": by_channel,
    "all-1e4": lambda rng, shape: np.full(shape, -1e4),
    "all-1e30": lambda rng, shape: np.full(shape, -1e30),
    "some-1e30": scattered(-1e30, 20),
    "some-inf": scattered(-np.inf, 20),
    "all-inf": lambda rng, shape: np.full(shape, -np.inf),
    "positive": lambda rng, shape: rng.uniform(0, 0.02, shape),
}


def draw(op, rng, sizes, dtype=np.float64, gate="logsigmoid", gate_dtype=None):
    """Fresh signed arrays for a declared operator, step or stage, in the order of its call."""
    values = {}
    for name, axes in op.arrays.items():
        shape = tuple(sizes[axis] for axis in axes.split())
        values[name] = np.asarray(GATES[gate](rng, shape) if name in DECAYS else rng.standard_normal(shape))
    with np.errstate(over="ignore"):  # -1e30 is -inf in float16
        return [
            x.astype(gate_dtype if gate_dtype and name in op.gates else dtype)
            for name, x in contracting(op, values).items()
        ]


def contracting(op, arrays):
    """The arrays by name, those of a delta rule so that its transitions do not enlarge a state: keys of length 1, and
    strengths between 0 and 1."""
    if op.strengths:
        return arrays | {"k": unit(arrays["k"]), "beta": np.exp(logsigmoid(arrays["beta"]))}
    if op.name.startswith("rwkv7"):
        removed = unit(arrays["a"])
        return arrays | {"a": -removed, "b": removed * np.exp(logsigmoid(arrays["b"]))}
    return arrays


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw_states(op, rng, sizes, dtype=np.float64):
    """One state part for each that the operator declares; a normaliser's is positive."""
    parts = tuple(rng.standard_normal([sizes[axis] for axis in axes.split()]).astype(dtype) for axes in op.state)
    return parts if len(parts) < 2 else (parts[0], abs(parts[1]))


def with_value_heads(op):
    """The names of the arrays of which every head of v has its own, where groups of them share a key."""
    if isinstance(op, SharedHeadsOp):
        return [name for name in op.arrays if name not in op.shared]
    return [name for name, axes in op.arrays.items() if axes.endswith("V")]


def stated(op, options):
    """The declaration whose state a call with these options carries."""
    return NORMALIZED if op is LINEAR_ATTENTION and options.get("normalize") else op


# -- results and states, of one part or of several ---------------------------------------------------------------------
def flat(result):
    """The arrays of a result, or of gradients, as one list."""
    return [x for part in result for x in flat(part)] if isinstance(result, tuple) else [result]


def parts(state):
    """A state as a tuple."""
    return state if isinstance(state, tuple) else (state,)


def whole(parts):
    """A state as calls take it: its only part, or the tuple of several."""
    return parts if len(parts) > 1 else parts[0]


def turned(part):
    """S with its two axes exchanged; a normaliser has but one."""
    return np.ascontiguousarray(part.swapaxes(2, 3)) if part.ndim == 4 else part


# -- the exact answer --------------------------------------------------------------------------------------------------
def double(x):
    return tuple(map(double, x)) if isinstance(x, tuple) else None if x is None else np.asarray(x, np.float64)


def exact(function, arrays, *, layout="bhtd", **arguments):
    """(o, final state or None) of host arrays in float64, o in the layout asked for."""
    op = declaration(function, "exact")
    arrays = [swap_heads(double(x), axes, layout) for x, axes in zip(arrays, op.arrays.values())]
    if function is softmax_attention:
        o, final = literal_attention(*arrays, **arguments)[:2]
    else:
        arguments |= {"initial_state": double(arguments.get("initial_state")), "output_final_state": True}
        o, final = function(*arrays, mode="recurrent", backend="numpy", **arguments)
    return swap_heads(o, op.out, layout), final


def size_of_terms(function, arrays, **arguments):
    """Root of the sum of the squares of what each number of o is a sum of: its size, had nothing cancelled.

    The same recurrence of squares. None of an operator that is no such sum.
    """
    return sizes_of_terms(function, arrays, **arguments)[0]


def sizes_of_terms(function, arrays, **arguments):
    """The same of o and of the final state."""
    op, arrays = declaration(function, "sizes_of_terms"), [double(x) for x in arrays]
    sums = op.transition is not Transition.RANK_ONE and function is not softmax_attention
    if not sums or arguments.get("feature_map") or arguments.get("normalize"):
        return None, None
    if function is hgrn2:
        q, g, v = arrays
        return sizes_of_terms(gla, [q, -np.expm1(g), v, g], **arguments)
    squares = [2 * x if name in DECAYS else x**2 for name, x in zip(op.arrays, arrays)]
    scale, start = arguments.get("scale"), double(arguments.get("initial_state"))
    arguments |= {"scale": 1 / arrays[0].shape[-1] if scale is None else scale**2}
    arguments |= {"initial_state": None if start is None else start**2}
    if op.name == "retention":
        gamma = arguments.get("gamma")
        arguments["gamma"] = (1 - 2.0 ** (-5 - np.arange(arrays[0].shape[1])) if gamma is None else double(gamma)) ** 2
    return tuple(map(np.sqrt, exact(function, squares, **arguments)))


def size_of_gradients_terms(function, arrays, do):
    """The same of the gradient of each array, which o is linear in; None of gates, whose gradient is no such sum."""
    op, arrays = declaration(function, "size_of_gradients_terms"), [double(x) for x in arrays]
    squares = [2 * x if name in DECAYS else x**2 for name, x in zip(op.arrays, arrays)]
    _, pull = vjp(function, *squares, scale=1 / arrays[0].shape[-1], mode="recurrent", backend="numpy")
    of_squares = pull(double(do) ** 2)
    return [None if name in DECAYS else np.sqrt(x) for name, x in zip(op.arrays, of_squares)]


def exact_vjp(function, arrays, do, dht=None, **arguments):
    """(o, final state or None, gradients) of host arrays [B, H, T, ...] in float64, back through every token."""
    arguments |= {"initial_state": double(arguments.get("initial_state")), "output_final_state": True}
    (o, final), pull = vjp(function, *map(double, arrays), mode="recurrent", backend="numpy", **arguments)
    return o, final, pull(double(do), double(dht))


def size_of_gate_terms(rng, arrays, do, dht=None, **options):
    """The root of the sum of the squares of what dg of simple_gla is a sum of, over channels and columns: the state
    before a token, decayed, times the gradient of the state. It is the rms of dg under random signs of channels and of
    columns."""
    (q, k, v, g), squares = map(double, arrays), []
    for _ in range(8):
        channels, columns = (rng.choice([-1.0, 1.0], x.shape[-1]) for x in (k, v))
        end = None if dht is None else dht * channels[:, None] * columns
        *_, found = exact_vjp(simple_gla, (q * channels, k, v, g), double(do) * columns, end, **options)
        squares.append(found[3] ** 2)
    return np.sqrt(np.mean(squares, axis=0))


def deviation_of_dg(T):
    """The standard deviation of Hopper's dg of simple_gla over its terms. At a border of chunks of 64 tokens the state,
    its gradient and the rows that they are sums of are rounded to bfloat16: three errors of 2^-9 / 3^.5. All tokens of
    a stretch of 256 share those of its borders; pairs of tokens of one chunk cancel to float32."""
    borders = 1 + min(-(-T // 64), 4)
    return borders**0.5 * 2**-9


def literal(
    op,
    arrays,
    *,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    gamma=None,
    feature_map=None,
    normalize=False,
):
    """(o, final state) from the equations as the papers have them, float64."""
    given = dict(zip(op.arrays, arrays))
    if op in DELTA_RULES:
        return literal_delta_rule(op, given, scale, initial_state, cu_seqlens)
    if op.name == "hgrn2":
        given["k"] = 1 - np.exp(given["g"])
    q, k, v = (given[name] for name in ("r" if op.name == "rwkv6" else "q", "k", "v"))
    B, H, T, K = q.shape
    V = v.shape[-1]
    scale = K**-0.5 if scale is None else scale
    phi = {
        None: lambda x: x,
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "relu": lambda x: np.maximum(x, 0),
        "exp": np.exp,
    }[feature_map]
    q, k = phi(q), phi(k)
    gamma = 1 - 2.0 ** (-5 - np.arange(H)) if gamma is None else np.broadcast_to(gamma, H)
    bounds = [0, T] if cu_seqlens is None else list(cu_seqlens)
    rows = [(b, start, stop) for b in range(B) for start, stop in zip(bounds[:-1], bounds[1:])]
    parts = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    S = np.zeros((len(rows), H, K, V)) if parts[0] is None else parts[0].copy()
    z = np.zeros((len(rows), H, K)) if parts[1] is None else parts[1].copy()
    o = np.empty((B, H, T, V))
    for n, (b, start, stop) in enumerate(rows):
        for h in range(H):
            for t in range(start, stop):
                decay = {
                    "hgrn2": lambda: np.exp(given["g"][b, h, t])[:, None],
                    "gla": lambda: np.exp(given["g"][b, h, t])[:, None],
                    "gla with gv": lambda: np.outer(np.exp(given["g"][b, h, t]), np.exp(given["gv"][b, h, t])),
                    "rwkv6": lambda: np.exp(given["w"][b, h, t])[:, None],
                    "simple_gla": lambda: np.exp(given["g"][b, h, t]),
                    "retention": lambda: gamma[h],
                    "linear_attention": lambda: 1.0,
                }[op.name]()
                new = np.outer(k[b, h, t], v[b, h, t])
                if op.name == "rwkv6":
                    o[b, h, t] = scale * q[b, h, t] @ (S[n, h] + given["u"][h][:, None] * new)
                S[n, h] = decay * S[n, h] + new
                z[n, h] = z[n, h] + k[b, h, t]
                if normalize:
                    read, seen = q[b, h, t] @ S[n, h], q[b, h, t] @ z[n, h]
                    o[b, h, t] = read / seen if seen or read.any() else 0  # 0 / 0 is 0, as the docstring has it
                elif op.name != "rwkv6":
                    o[b, h, t] = scale * q[b, h, t] @ S[n, h]
    return o, (S, z) if normalize else S


def literal_delta_rule(op, given, scale, initial_state, cu_seqlens):
    """The same of the delta rules, whose transitions are matrices here."""
    q, k, v, g, beta = (given.get(name) for name in ("r" if op.name == "rwkv7" else "q", "k", "v", "g", "beta"))
    B, H, T, V = v.shape
    K = q.shape[-1]
    scale = K**-0.5 if scale is None else scale
    bounds = [0, T] if cu_seqlens is None else list(cu_seqlens)
    rows = [(b, start, stop) for b in range(B) for start, stop in zip(bounds[:-1], bounds[1:])]
    S = np.zeros((len(rows), H, K, V)) if initial_state is None else initial_state.copy()
    o = np.empty((B, H, T, V))
    for n, (b, start, stop) in enumerate(rows):
        for h, t in ((h, t) for h in range(H) for t in range(start, stop)):
            at, strength = (b, h, t), 1.0
            if op.name == "rwkv7":
                transition = np.diag(np.exp(given["w"][at])) + np.outer(given["b"][at], given["a"][at])
            else:
                decay = np.ones(K) if g is None else np.exp(g[at]) * np.ones(K)
                strength = beta[at]
                transition = (np.eye(K) - strength * np.outer(k[at], k[at])) @ np.diag(decay)
            S[n, h] = transition @ S[n, h] + strength * np.outer(k[at], v[at])
            o[at] = scale * q[at] @ S[n, h]
    return o, S


def literal_attention(
    q,
    k,
    v,
    sinks=None,
    *,
    causal=True,
    scale=None,
    window=None,
    softcap=None,
    return_lse=False,
    cu_seqlens=None,
    cu_seqlens_k=None,
    do=None,
    dlse=None,
):
    """(o, L or None, gradients of q, k, v and the sinks) of softmax attention, every score of a head at once."""
    (B, H, T, K), (_, HK, S, V) = q.shape, v.shape
    scale = K**-0.5 if scale is None else scale
    left, right = window or (-1, -1)
    o, L = np.zeros((B, H, T, V)), np.empty((B, H, T))
    do, dlse = (np.zeros(x.shape) if given is None else given for x, given in ((o, do), (L, dlse)))
    dq, dk, dv, dsinks = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), np.zeros(H)
    bounds = [0, T] if cu_seqlens is None else list(cu_seqlens)
    bounds_k = [0, S] if cu_seqlens is None else bounds if cu_seqlens_k is None else list(cu_seqlens_k)
    for b, h, n in np.ndindex(B, H, len(bounds) - 1):
        rows, keys, hk = slice(bounds[n], bounds[n + 1]), slice(bounds_k[n], bounds_k[n + 1]), h // (H // HK)
        own_q, own_k, own_v = q[b, h, rows], k[b, hk, keys], v[b, hk, keys]
        place = np.arange(len(own_q))[:, None] + len(own_k) - len(own_q)
        beyond = np.arange(len(own_k)) - place
        seen = (beyond <= 0) | (not causal)
        seen &= (beyond >= -left) | (left < 0)
        seen &= (beyond <= right) | (right < 0)
        scores, slope = scale * own_q @ own_k.T, 1.0
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
            slope = 1 - (scores / softcap) ** 2
        scores[~seen] = -np.inf
        if sinks is not None:
            scores = np.append(scores, np.full((len(own_q), 1), sinks[h]), axis=1)
        m = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(m == -np.inf, 0, m))
        total = weights.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            L[b, h, rows] = (m + np.log(total))[:, 0]
        p = weights / np.where(total == 0, 1, total)
        o[b, h, rows] = p[:, : len(own_k)] @ own_v
        ds = -p * (np.vecdot(do[b, h, rows], o[b, h, rows]) - dlse[b, h, rows])[:, None]
        if sinks is not None:
            dsinks[h] += ds[:, -1].sum()
            p, ds = p[:, :-1], ds[:, :-1]
        ds = slope * (ds + p * (do[b, h, rows] @ own_v.T))
        dq[b, h, rows] = scale * ds @ own_k
        dk[b, hk, keys] += scale * ds.T @ own_q
        dv[b, hk, keys] += p.T @ do[b, h, rows]
    return o, L if return_lse else None, [dq, dk, dv, *([] if sinks is None else [dsinks])]


# -- error figures -----------------------------------------------------------------------------------------------------
# (whole tensor, worst row) by dtype, finest first. The whole-tensor ones are what the project promises for half and
# single precision. Measured over all cases of test_contract: float64 1.4e-15 and 1.2e-14; float32 5e-7 and 2e-6 in the
# CUDA kernels, 2.4e-6 and 2.2e-5 in NumPy's factored blocks; float16 3.6e-4 and 1e-3; bfloat16 1.9e-3 and 3.1e-3
# where products take tf32. Where all operands are bfloat16, on Hopper, 3.3e-3 and 2.5e-2 over 6,000 rows a gate: a row
# that cancels to a tenth carries ten times the error, so conftest gives that backend's rows a factor.
LIMITS = {"float64": (1e-13, 1e-12), "float32": (2e-5, 1e-4), "float16": (2e-3, 4e-3), "bfloat16": (6e-3, 2e-2)}
ROWS = {}  # by dtype, how many times its limit a row may be off on the backend that a test runs on: conftest sets it


def limits(dtype, rows=1):
    """(whole tensor, worst row), the latter `rows` times or what the backend needs."""
    name = np.dtype(dtype).name
    whole, row = LIMITS[name]
    return whole, max(rows, ROWS.get(name, 1)) * row


def rms(x, **axes):
    return np.sqrt(np.mean(np.square(x), **axes)) if np.size(x) else np.float64(0)


def errors(x, wanted, terms=None):
    """(whole tensor, worst row): rms of x - wanted over rms of wanted.

    A whole-tensor figure misses one row that is zeroed, so every last-axis row is judged too, against its own rms.
    A row that cancels to far below the others carries their rounding, up to 4e-3 of the tensor's rms in bfloat16, a
    fifth of what `limits` allow a row: its rms counts as a fifth of the tensor's at least. Where `terms` say what
    numbers are sums of (`size_of_terms`), it counts as half of that: of the first tokens a whole row is one value times
    one sum over channels, and cancels with it. So may a whole tensor of a few numbers.
    """
    x, wanted = double(x), double(wanted)
    assert x.shape == wanted.shape, f"shape {x.shape}, expected {wanted.shape}"
    size = max(rms(wanted), 0 if terms is None else rms(terms) / 2) or 1.0
    if not x.size:
        return 0.0, 0.0
    least = size / 5 if terms is None else np.maximum(size / 10, rms(terms, axis=-1) / 2)
    rows = rms(x - wanted, axis=-1) / np.maximum(rms(wanted, axis=-1), least)
    return float(rms(x - wanted) / size), float(rows.max())


def assert_close(what, x, wanted, dtype, *, factor=1, rows=1, terms=None):
    """Both figures within `limits`, times `factor`; NaN anywhere fails."""
    found, (whole, row) = errors(x, wanted, terms), limits(dtype, rows)
    assert found[0] <= factor * whole and found[1] <= factor * row, (
        f"{what}: whole tensor {found[0]:.2e} (limit {factor * whole:.1e}), "
        f"worst row {found[1]:.2e} (limit {factor * row:.1e})"
    )


def assert_results(function, arrays, found, dtype, **arguments):
    """o, or o and the final state, of host arrays, by their terms: what has few of them may cancel as a whole."""
    wanted, terms = exact(function, arrays, **arguments), sizes_of_terms(function, arrays, **arguments)
    for what, x, y, of in zip(("o", "state"), found, wanted, terms):
        assert_close(what, x, y, dtype, terms=of)


def same_bits(x, y):
    """Equal to the last bit, NaN and signed zeros too."""
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


# -- guarded memory ----------------------------------------------------------------------------------------------------
@dataclass
class Guarded:
    """An array of NaN inside a larger buffer whose rest must not change."""

    view: object
    buffer: object
    backend: object
    before: np.ndarray
    pad: int

    def assert_rest_untouched(self):
        after = self.backend.tohost(self.buffer)
        for side in (slice(None, self.pad), slice(-self.pad, None)):
            assert same_bits(after[side], self.before[side]), "wrote outside the array"

    def assert_untouched(self):
        assert same_bits(self.backend.tohost(self.buffer), self.before), "wrote into an array of a refused call"


def guarded(backend, shape, dtype, pad=256):
    """`view` of `shape` to write into, all NaN, with `pad` sentinels before and behind."""
    before = np.full(int(np.prod(shape)) + 2 * pad, np.nan).astype(dtype)
    before[:pad], before[-pad:] = 777, -777
    buffer = backend.asarray(before.copy())
    return Guarded(buffer[pad : before.size - pad].reshape(shape), buffer, backend, before, pad)
