"""The operators' equations, a token at a time, in what jax.numpy and torch share: for their own autodiff."""


def literal(xp, scan, name, arrays, state=(), *, gamma=None, feature_map=None, normalize=False, causal=True):
    """(o, *final state's parts) of dense [B, H, T, ...] arrays; `state` has the initial one's parts, or nothing.

    `scan` is jax.lax.scan, or for torch a loop that does the same.
    """
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
        decay = {"gla": lambda: xp.exp(gate[0])[..., None], "simple_gla": lambda: xp.exp(gate[0])[..., None, None],
                 "gla with gv": lambda: outer(xp.exp(gate[0]), xp.exp(gate[1])),
                 "retention": lambda: gamma, "linear_attention": lambda: 1.0}[name]()
        S = decay * S + new
        if not normalize:
            return (S,), scale * read(q, S)
        return (S, z[0] + k), read(q, S) / (q * (z[0] + k)).sum(-1)[..., None]

    final, o = scan(step, start, tuple(xp.moveaxis(x, 2, 0) for x in (q, k, v, *gates)))
    return xp.moveaxis(o, 0, 2), *final


def outer(k, v):
    return k[..., None] * v[..., None, :]


def read(q, S):
    return (q[..., None] * S).sum(-2)


def phi(xp, feature_map, x):
    if feature_map == "elu":
        return xp.where(x > 0, x + 1, xp.exp(xp.clip(x, max=0)))
    return {None: lambda: x, "relu": lambda: xp.clip(x, min=0), "exp": lambda: xp.exp(x)}[feature_map]()


# An operator of every kind: its name and what else it is called with.
VARIANTS = {
    "gla": ("gla", {}),
    "gla with gv": ("gla with gv", {}),
    "rwkv6": ("rwkv6", {}),
    "simple_gla": ("simple_gla", {}),
    "retention": ("retention", {"gamma": 0.8}),
    "linear_attention": ("linear_attention", {}),
    "linear_attention-elu-normalized": ("linear_attention", {"feature_map": "elu", "normalize": True}),
    "softmax_attention": ("softmax_attention", {}),
}
