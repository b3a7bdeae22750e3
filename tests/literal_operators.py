"""The operators' equations, a token at a time, in what jax.numpy and torch share: for their own autodiff.

And calls to compare with them.
"""

from conftest import with_variants
from reference import draw, draw_states, stated

from linattn_np.declarations import GLA_VALUE_GATE
from linattn_np.ops import OPS

# An operator of every kind, and what else it is called with.
VARIANTS = {op.name: (op, {"gamma": 0.8} if op.name == "retention" else {}) for op in (*OPS, GLA_VALUE_GATE)}
VARIANTS["linear_attention-elu-normalized"] = (
    VARIANTS["linear_attention"][0],
    {"feature_map": "elu", "normalize": True},
)
SIZES = {"B": 2, "H": 2, "T": 21, "K": 8, "V": 6, "N": 2}


def literal(xp, scan, name, arrays, state=(), *, gamma=None, feature_map=None, normalize=False, causal=True):
    """(o, *final state's parts) of dense [B, H, T, ...] arrays; `state` has the initial one's parts, or nothing.

    `scan` is jax.lax.scan, or for torch a loop that does the same.
    """
    if name in ("delta_rule", "gated_delta_rule", "kda", "rwkv7"):
        return literal_delta_rule(xp, scan, name, arrays, state)
    if name == "hgrn2":
        q, g, v = arrays
        name, arrays = "gla", (q, 1 - xp.exp(g), v, g)
    q, k, v, *gates = arrays
    scale = q.shape[-1] ** -0.5
    q, k = phi(xp, feature_map, q), phi(xp, feature_map, k)
    if name == "softmax_attention":
        weights = xp.exp(scale * q @ k.swapaxes(-1, -2))
        weights = xp.tril(weights) if causal else weights
        return (weights @ v / weights.sum(-1)[..., None],)
    start = tuple(state) or (outer(k[:, :, 0], v[:, :, 0]) * 0, *([k[:, :, 0] * 0] if normalize else []))
    u = gates.pop() if name == "rwkv6" else None

    def step(carry, token):
        (S, *z), (q, k, v, *gate) = carry, token
        new = outer(k, v)
        if name == "rwkv6":
            return (xp.exp(gate[0])[..., None] * S + new,), scale * read(q, S + u[:, :, None] * new)
        decay = {
            "gla": lambda: xp.exp(gate[0])[..., None],
            "simple_gla": lambda: xp.exp(gate[0])[..., None, None],
            "gla with gv": lambda: outer(xp.exp(gate[0]), xp.exp(gate[1])),
            "retention": lambda: gamma,
            "linear_attention": lambda: 1.0,
        }[name]()
        S = decay * S + new
        if not normalize:
            return (S,), scale * read(q, S)
        return (S, z[0] + k), read(q, S) / (q * (z[0] + k)).sum(-1)[..., None]

    final, o = scan(step, start, tuple(xp.moveaxis(x, 2, 0) for x in (q, k, v, *gates)))
    return xp.moveaxis(o, 0, 2), *final


def literal_delta_rule(xp, scan, name, arrays, state):
    """The same of the delta rules."""
    q, k, v = (arrays[n] for n in ((0, 2, 3) if name == "rwkv7" else (0, 1, 2)))
    start = tuple(state) or (outer(k[:, :, 0], v[:, :, 0]) * 0,)

    def step(carry, token):
        (S,) = carry
        if name == "rwkv7":
            q, w, k, v, a, b = token
            S = xp.exp(w)[..., None] * S + outer(b, read(a, S)) + outer(k, v)
        else:
            q, k, v, *gates, beta = token
            decay = [xp.exp(g).reshape(*g.shape, *(1,) * (4 - g.ndim)) for g in gates]
            S = decay[0] * S if decay else S
            S = S + outer(k, beta[..., None] * (v - read(k, S)))
        return (S,), q.shape[-1] ** -0.5 * read(q, S)

    final, o = scan(step, start, tuple(xp.moveaxis(x, 2, 0) for x in arrays))
    return xp.moveaxis(o, 0, 2), *final


def outer(k, v):
    return k[..., None] * v[..., None, :]


def read(q, S):
    return (q[..., None] * S).sum(-2)


def phi(xp, feature_map, x):
    if feature_map == "elu":
        return xp.where(x > 0, x + 1, xp.exp(xp.clip(x, max=0)))
    return {None: lambda: x, "relu": lambda: xp.clip(x, min=0), "exp": lambda: xp.exp(x)}[feature_map]()


def pytest_generate_tests(metafunc):
    """`home` is the backend that computes; for the modules that import this."""
    if "home" in metafunc.fixturenames:
        with_variants(metafunc, "home", [name for name in metafunc.config.backends if name in ("numpy", "cupy")])


class Call:
    """A call with all that it may have, and random weights that make a number of its results."""

    def __init__(self, variant, rng, sizes=SIZES, stateful=True):
        self.op, self.options = VARIANTS[variant]
        declared = stated(self.op, self.options)
        self.count = len(declared.arrays)
        self.arrays = [*draw(self.op, rng, sizes), *(draw_states(declared, rng, sizes) if stateful else ())]
        self.final = bool(declared.state)
        shapes = [[sizes[axis] for axis in axes.split()] for axes in (declared.out, *declared.state)]
        self.weights = [rng.standard_normal(shape) for shape in shapes]

    def of(self, library, *inputs, **more):
        """What the function of one of linattn_np.interop's modules gives."""
        arrays, state = inputs[: self.count], inputs[self.count :]
        if state:
            more["initial_state"] = state if len(state) > 1 else state[0]
        if self.final:
            more["output_final_state"] = True
        return getattr(library, self.op.name.split()[0])(*arrays, **self.options, **more)

    def equation(self, xp, scan, *inputs):
        return list(literal(xp, scan, self.op.name, inputs[: self.count], inputs[self.count :], **self.options))
