"""RWKV-7 as its equations are written, token by token in float64: what the models' logits are held to."""

import numpy as np
from literal_rwkv6 import EPS, activation, layer_norm


def logits_of(weights, tokens):
    """[T, V] after each of `tokens`, for official names."""
    return logits_and_state(weights, tokens)[0]


def logits_and_state(weights, tokens):
    """Logits [T, V], and the arrays of a model's state, [L, ...], behind the last token."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    w = {name: array if name.endswith("r_k") else array.squeeze() for name, array in w.items()}
    layers = [Layer(w, f"blocks.{i}") for i in range(sum(name.endswith("ln1.weight") for name in w))]
    rows = []
    for token in tokens:
        x, first = layer_norm(w["emb.weight"][token], w, "blocks.0.ln0"), None
        for layer in layers:
            x, first = layer(x, first)
        rows.append(w["head.weight"] @ layer_norm(x, w, "ln_out"))
    return np.array(rows), *(np.array([getattr(layer, name) for layer in layers]) for name in STATE)


STATE = "att_before", "S", "ffn_before"


class Layer:
    def __init__(self, w, name):
        self.w, self.name = w, name
        H, N = w[f"{name}.att.r_k"].shape
        self.S = np.swapaxes(w.get(f"{name}.att.time_state", np.zeros((H, N, N))), 1, 2)
        self.att_before = self.ffn_before = np.zeros(H * N)

    def __call__(self, x, first):
        y, first = self.time_mix(layer_norm(x, self.w, f"{self.name}.ln1"), first)
        x = x + y
        return x + self.channel_mix(layer_norm(x, self.w, f"{self.name}.ln2")), first

    def time_mix(self, x, first):
        H, N, _ = self.S.shape
        own = {key.split(".")[-1]: self.w[key] for key in self.w if key.startswith(f"{self.name}.att.")}
        W = {part: self.w[f"{self.name}.att.{part}.weight"] for part in ("receptance", "key", "value", "output")}
        d, self.att_before = self.att_before - x, x
        x_r, x_w, x_k, x_v, x_a, x_g = (x + d * own[f"x_{mix}"] for mix in "rwkvag")
        r, k, v = W["receptance"] @ x_r, W["key"] @ x_k, W["value"] @ x_v
        decay = np.exp(-np.exp(-0.5) * sigmoid(own["w0"] + np.tanh(x_w @ own["w1"]) @ own["w2"]))
        icl = sigmoid(own["a0"] + x_a @ own["a1"] @ own["a2"])
        gate = sigmoid(x_g @ own["g1"]) @ own["g2"]
        if first is None:
            first = v
        else:
            v = v + (first - v) * sigmoid(own["v0"] + x_v @ own["v1"] @ own["v2"])
        y = np.zeros((H, N))
        for h in range(H):
            head = slice(h * N, (h + 1) * N)
            kappa = k[head] * own["k_k"][head]
            kappa = kappa / max(np.sqrt((kappa * kappa).sum()), 1e-12)
            key = k[head] * (1 + (icl[head] - 1) * own["k_a"][head])
            removed = np.outer(kappa * icl[head], kappa @ self.S[h])
            self.S[h] = decay[head][:, None] * self.S[h] - removed + np.outer(key, v[head])
            o = r[head] @ self.S[h]
            o = (o - o.mean()) / np.sqrt(o.var() + self.w.get("norm_eps", EPS)[1])
            o = o * self.w[f"{self.name}.att.ln_x.weight"][head] + self.w[f"{self.name}.att.ln_x.bias"][head]
            y[h] = o + (r[head] * key * own["r_k"][h]).sum() * v[head]
        return W["output"] @ (y.ravel() * gate), first

    def channel_mix(self, x):
        w, ffn = self.w, f"{self.name}.ffn"
        d, self.ffn_before = self.ffn_before - x, x
        return w[f"{ffn}.value.weight"] @ activation(w)(w[f"{ffn}.key.weight"] @ (x + d * w[f"{ffn}.x_k"]))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))
