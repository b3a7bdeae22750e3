"""Numba's loops for RWKV-7: a step of a few sequences in one call, and the operations between a prompt's products.

B sequences of a step or tokens of a prompt, D channels, H heads of N. `rwkv.numba_loops` says what callers guarantee.
`w` holds log decays, `icl` in-context learning rates; kappa are the normed removal keys.
"""

import numpy as np

from ...numba_cache import njit
from ..rwkv import numba_loops as loops
from .mixes import DECAY, LEAST_NORM

# The vectors of a layer that `step` takes, {name in `weights.LAYER`: how many of D numbers}: they are the rows of its
# argument `vectors`, in this order, FIRST.name ... END.name - 1.
VECTORS = {"ln1": 2, "ln2": 2, "ln_x": 2, "mix": 6, "ffn_mix": 1}
VECTORS |= dict.fromkeys(("decay", "icl", "value", "removal", "replacement", "bonus"), 1)
FIRST, END = loops.rows_of_vectors(VECTORS)
# The matrices, and the index of each in the argument `matrices`.
MATRICES = tuple(
    "kvr output ffn_key ffn_value decay_down decay_up icl_down icl_up gate_down gate_up value_down value_up".split()
)
INDEX = loops.indices(MATRICES)


# -- elementwise ------------------------------------------------------------------------------------------------------
@njit(**loops.LOOP_OPTIONS)
def sigmoid_in_place(x):
    """x [B, D] becomes sigmoid(x)."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] = loops.sigmoid(x[b, c])


@njit(**loops.LOOP_OPTIONS)
def biased_sigmoid(x, base, factor):
    """x becomes factor sigmoid(base + x). By exp, as `sigmoid` loses the digits of small values; their errors would
    accumulate in the state, token by token."""
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[b, c] = np.float32(factor) / (np.float32(1) + np.exp(-base[c] - x[b, c]))


# -- the mixes' operations --------------------------------------------------------------------------------------------
@njit(**loops.LOOP_OPTIONS)
def residual_value(v, first_v, logits, base):
    """v becomes v + (first_v - v) sigmoid(base + logits)."""
    for b in range(v.shape[0]):
        for c in range(v.shape[1]):
            v[b, c] += (first_v[b, c] - v[b, c]) * loops.sigmoid(base[c] + logits[b, c])


@njit(**loops.LOOP_OPTIONS)
def keys(k, icl, removal, replacement, heads):
    """Returns kappa = k removal / max(|k removal|, LEAST_NORM) by heads; k becomes k (1 + (icl - 1) replacement)."""
    kappa = np.empty_like(k)
    N = k.shape[1] // heads
    for b in range(k.shape[0]):
        for h in range(heads):
            start, squares = h * N, np.float32(0)
            for c in range(start, start + N):
                kappa[b, c] = k[b, c] * removal[c]
                squares += kappa[b, c] * kappa[b, c]
            scale = np.float32(1) / max(np.sqrt(squares), np.float32(LEAST_NORM))
            for c in range(start, start + N):
                kappa[b, c] *= scale
                k[b, c] *= np.float32(1) + (icl[b, c] - np.float32(1)) * replacement[c]
    return kappa


@njit(**loops.LOOP_OPTIONS)
def recurrence(r, w, k, v, kappa, icl, wkv, slots):
    """S <- diag(exp w) S - (kappa icl) (S^T kappa)^T + k v^T, o = r^T S of every head.

    S is the row slots[b] of wkv [P, H, N (keys), N (values)], and is updated in place.
    """
    o = np.zeros_like(v)
    H, N = wkv.shape[1:3]
    removed = np.empty(N, np.float32)
    for b in range(w.shape[0]):
        for h in range(H):
            start, state = h * N, wkv[slots[b], h]
            value, out = v[b, start : start + N], o[b, start : start + N]
            for j in range(N):
                removed[j] = 0
            for i in range(N):
                for j in range(N):
                    removed[j] += kappa[b, start + i] * state[i, j]
            for i in range(N):
                decay, query = np.exp(w[b, start + i]), r[b, start + i]
                key, removal = k[b, start + i], kappa[b, start + i] * icl[b, start + i]
                for j in range(N):
                    state[i, j] = decay * state[i, j] - removal * removed[j] + key * value[j]
                    out[j] += query * state[i, j]
    return o


@njit(**loops.LOOP_OPTIONS)
def bonus_norm(o, r, k, v, gate, norm, bonus, heads, eps):
    """o [B, D] becomes (GroupNorm(o) + (sum r k bonus) v) gate."""
    N = o.shape[1] // heads
    for b in range(o.shape[0]):
        for h in range(heads):
            head = slice(h * N, (h + 1) * N)
            loops.normalize(o[b, head], norm[0, head], norm[1, head], eps, o[b, head])
            score = np.float32(0)
            for c in range(h * N, (h + 1) * N):
                score += r[b, c] * k[b, c] * bonus[c]
            for c in range(h * N, (h + 1) * N):
                o[b, c] = (o[b, c] + score * v[b, c]) * gate[b, c]


# -- a step -----------------------------------------------------------------------------------------------------------
@njit(**loops.LOOP_OPTIONS)
def time_mix(multiply, board, matrices, vectors, eps, layer, first_v, x, shift, wkv, slots):
    """Adds the time mix of layer number `layer` to x, as `mixes.time_mix` does; updates `shift` and `wkv`.

    Returns the first layer's values, which the other layers get as `first_v`. Other arguments: see `step`.
    """
    mixed, _, _ = loops.shift_mix(x, vectors[FIRST.ln1 : END.ln1], eps[0], vectors[FIRST.mix : END.mix], shift, slots)
    down = (
        matrices[INDEX.kvr],
        matrices[INDEX.decay_down],
        matrices[INDEX.icl_down],
        matrices[INDEX.gate_down],
        matrices[INDEX.value_down],
    )
    inputs = mixed[3:], mixed[:1], mixed[1:2], mixed[2:3], mixed[4:5]  # of w a g k v r: k v r, w, a, g, v, as `down`
    low = loops.products(multiply, board, down, inputs)
    k, v, r = low[0][0], low[0][1], low[0][2]
    loops.tanh_in_place(low[1][0])  # the decay's
    sigmoid_in_place(low[3][0])  # the gate's
    up = matrices[INDEX.decay_up], matrices[INDEX.icl_up], matrices[INDEX.gate_up], matrices[INDEX.value_up]
    y = loops.products(multiply, board, up, (low[1], low[2], low[3], low[4]))  # in the order of `down`, without kvr
    w, icl, gate, value_logits = y[0][0], y[1][0], y[2][0], y[3][0]
    biased_sigmoid(w, vectors[FIRST.decay], -DECAY)
    biased_sigmoid(icl, vectors[FIRST.icl], 1.0)
    if layer:
        residual_value(v, first_v, value_logits, vectors[FIRST.value])
    else:
        first_v = v
    kappa = keys(k, icl, vectors[FIRST.removal], vectors[FIRST.replacement], wkv.shape[1])
    o = recurrence(r, w, k, v, kappa, icl, wkv, slots)
    bonus_norm(o, r, k, v, gate, vectors[FIRST.ln_x : END.ln_x], vectors[FIRST.bonus], wkv.shape[1], eps[1])
    loops.add(x, loops.product(multiply, board, matrices[INDEX.output], o.reshape(1, *o.shape))[0])
    return first_v


@njit(**loops.LOOP_OPTIONS)
def channel_mix(multiply, board, matrices, vectors, eps, x, shift, slots):
    """Adds the channel mix of one layer to x; updates `shift`."""
    mixed, _, _ = loops.shift_mix(
        x, vectors[FIRST.ln2 : END.ln2], eps[0], vectors[FIRST.ffn_mix : END.ffn_mix], shift, slots
    )
    k = loops.product(multiply, board, matrices[INDEX.ffn_key], mixed)
    loops.relu_squared(k[0])
    loops.add(x, loops.product(multiply, board, matrices[INDEX.ffn_value], k)[0])


@njit(**loops.LOOP_OPTIONS)
def step(multiply, board, matrices, head, vectors, norms, eps, x, att_shift, wkv, ffn_shift, slots):
    """The logits [B, V] of x [B, D]; arguments as in `rwkv6.numba_loops.step`."""
    x = loops.layer_norm(x, norms[:2], eps[0])
    first_v = x  # any array of its type, which Numba must know; the first layer does not read it
    for layer in range(matrices.shape[0]):
        layer_matrices, layer_vectors = matrices[layer], vectors[layer]
        first_v = time_mix(
            multiply, board, layer_matrices, layer_vectors, eps, layer, first_v, x, att_shift[layer], wkv[layer], slots
        )
        channel_mix(multiply, board, layer_matrices, layer_vectors, eps, x, ffn_shift[layer], slots)
    x = loops.layer_norm(x, norms[2:], eps[0])
    return loops.product(multiply, board, head, x.reshape(1, *x.shape))[0]
