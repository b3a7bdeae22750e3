"""RWKV-6 as its equations are written, token by token in float64: what the models' logits are held to."""

import numpy as np

EPS = 1e-5, 64e-5  # of the layer norms and of the group norm


def logits_of(weights, tokens):
    """[T, V] after each of `tokens`, for official names."""
    return logits_and_state(weights, tokens)[0]


def moved_by_rounding(weights, tokens, rng, draws=4, literal=None):
    """How far logits, and each array of the state, move when every weight moves by half of float32's last bit: the rms
    of their numbers and of the draws.

    A model whose arithmetic is float32's may be off by some times as much, and by no more: a norm makes the rounding
    of a few tokens larger, those whose values nearly cancel.

    literal : another version's `logits_and_state`
    """
    literal = literal or logits_and_state
    exact, squares = literal(weights, tokens), []
    for _ in range(draws):
        moved = {
            name: np.asarray(x, np.float64) * (1 + 2.0**-24 * rng.choice([-1, 1], x.shape))
            for name, x in weights.items()
        }
        squares.append([np.mean((x - y) ** 2) for x, y in zip(literal(moved, tokens), exact)])
    return np.sqrt(np.mean(squares, axis=0))


def logits_and_state(weights, tokens):
    """Logits [T, V], and the arrays of a model's state, [L, ...], behind the last token."""
    w = {
        name: np.asarray(array, np.float64).squeeze() if "time_maa_w2" not in name else np.asarray(array, np.float64)
        for name, array in weights.items()
    }
    H, K = np.shape(weights["blocks.0.att.time_faaaa"])  # fla's keys may have fewer channels than values
    layers = [
        Layer(w, f"blocks.{i}", H, K, len(w["ln_out.weight"]) // H)
        for i in range(sum(name.endswith("ln1.weight") for name in w))
    ]
    rows = []
    for token in tokens:
        x = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0")
        for layer in layers:
            x = layer(x)
        rows.append(w["head.weight"] @ layer_norm(x, w, "ln_out"))
    return np.array(rows), *(
        np.array([getattr(layer, name) for layer in layers]) for name in ("att_before", "S", "ffn_before")
    )


class Layer:
    def __init__(self, w, name, H, K, N):
        self.w, self.name = w, name
        self.S = np.swapaxes(w.get(f"{name}.att.time_state", np.zeros((H, N, K))), 1, 2)
        self.att_before = self.ffn_before = np.zeros(H * N)

    def __call__(self, x):
        x = x + self.time_mix(layer_norm(x, self.w, f"{self.name}.ln1"))
        return x + self.channel_mix(layer_norm(x, self.w, f"{self.name}.ln2"))

    def time_mix(self, x):
        w, att, (H, K, N) = self.w, f"{self.name}.att", self.S.shape
        d, self.att_before = self.att_before - x, x
        low = np.tanh((x + d * w[f"{att}.time_maa_x"]) @ w[f"{att}.time_maa_w1"].reshape(H * N, -1)).reshape(5, -1)
        mixed = {
            mix: x + d * (w[f"{att}.time_maa_{mix}"] + low[n] @ w[f"{att}.time_maa_w2"][n])
            for n, mix in enumerate("wkvrg")
        }
        r, k, v = (
            (w[f"{att}.{name}.weight"] @ mixed[name[0]]).reshape(H, -1) for name in ("receptance", "key", "value")
        )
        g = w[f"{att}.gate.weight"] @ mixed["g"]
        low = np.tanh(mixed["w"] @ w[f"{att}.time_decay_w1"].reshape(H * N, -1))
        z = w[f"{att}.time_decay"] + low @ w[f"{att}.time_decay_w2"].reshape(-1, H * K)
        decay = np.exp(-np.exp(z)).reshape(H, K)
        kv = k[:, :, None] * v[:, None]
        u = w[f"{att}.time_faaaa"].reshape(H, K)
        o = np.einsum("hk,hkv->hv", r, self.S + u[:, :, None] * kv)
        self.S = decay[:, :, None] * self.S + kv
        o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + w.get("norm_eps", EPS)[1])
        o = o.ravel() * w[f"{att}.ln_x.weight"] + w[f"{att}.ln_x.bias"]
        return w[f"{att}.output.weight"] @ (o * g / (1 + np.exp(-g)))

    def channel_mix(self, x):
        w, ffn = self.w, f"{self.name}.ffn"
        d, self.ffn_before = self.ffn_before - x, x
        k = activation(w)(w[f"{ffn}.key.weight"] @ (x + d * w[f"{ffn}.time_maa_k"]))
        r = w[f"{ffn}.receptance.weight"] @ (x + d * w[f"{ffn}.time_maa_r"])
        return (w[f"{ffn}.value.weight"] @ k) / (1 + np.exp(-r))


def activation(w):
    """Of the channel mix; fla's config may name another than RWKV's own."""
    name = w["hidden_act"].astype(np.uint8).tobytes().decode() if "hidden_act" in w else "sqrelu"
    opening = np.vectorize(lambda x: 1 / (1 + np.exp(-x)))
    return {
        "sqrelu": lambda x: np.maximum(x, 0) ** 2,
        "relu": lambda x: np.maximum(x, 0),
        "gelu": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x * opening(x),
        "swish": lambda x: x * opening(x),
        "sigmoid": opening,
        "logsigmoid": lambda x: np.log(opening(x)),
    }[name]


def layer_norm(x, w, name):
    return (x - x.mean()) / np.sqrt(x.var() + w.get("norm_eps", EPS)[0]) * w[f"{name}.weight"] + w[f"{name}.bias"]
