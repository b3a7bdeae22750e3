"""The RWKV-7 language model on NumPy or CuPy arrays."""

from __future__ import annotations

from ..rwkv.model import Model
from .names import VERSION
from .numpy_layers import NumpyLayers
from .parameters import Layout


class RWKV7(Model):
    """An RWKV-7 language model (Peng et al., "RWKV-7 'Goose'", 2025, arXiv:2503.14456, section 4).

        x = LN(emb[token]; ln0)
        every layer, with xx = LN(x; ln1) and the token shift d = xx_{t-1} - xx_t:
            xr = xx + d x_r, and xw, xk, xv, xa, xg likewise
            r = W_r xr,   k = W_k xk,   v = W_v xv
            w = -exp(-1/2) sigmoid(w0 + tanh(xw w1) w2)                              the log of the decay
            icl = sigmoid(a0 + xa a1 a2),   g = sigmoid(xg g1) g2
            v = v + (v of the first layer - v) sigmoid(v0 + xv v1 v2)                in all layers but the first
            kappa = k k_k / |k k_k| head by head,   k = k (1 + (icl - 1) k_a)
            S <- diag(exp w) S - (kappa icl) (S^T kappa)^T + k v^T,   o = r^T S      `linattn_np.rwkv7`, scale 1
            x = x + W_o ((GroupNorm_H(o; ln_x) + (sum_N r k r_k) v) g)               sum_N over a head's N channels
        with xx = LN(x; ln2) and d again:
            x = x + W_v' relu(W_k' (xx + d x_k'))^2
        logits = head LN(x; ln_out)

    Parameters
    ----------
    weights : mapping from names ("blocks.0.att.r_k", ... or those of fla) to host arrays
        Any float dtype. All sizes and ranks come from names and shapes. A tuned `time_state` is where sequences start.
    device, dtype, progress, state_dtype : as of `RWKV6`
    config : mapping
        The contents of `config.json` beside weights with fla's names; `from_file` reads it.

    Raises
    ------
    ContractError
        As `RWKV6` does; RWKV-7a, 7b and 8 are other versions, too.
    NotSupported
        As `RWKV6` does.

    Example
    -------
    >>> from linattn_np.models import RWKV7
    >>> layout = RWKV7.trainable(layers=2, width=32, head_size=8)      # what a training starts from
    >>> model = RWKV7(layout.named(layout.initial(seed=0)))
    >>> logits, state = model.forward([list(b"Elizabeth Benne")])
    >>> logits.shape, state.wkv.shape
    ((1, 15, 256), (2, 1, 4, 8, 8))
    """

    # `Model` says what each is.
    version, title = VERSION, VERSION.title
    numpy_layers, layout, package = NumpyLayers, Layout, __package__
