"""The RWKV-6 language model on NumPy or CuPy arrays."""

from __future__ import annotations

from ..rwkv.model import Model
from .names import VERSION
from .numpy_layers import NumpyLayers
from .parameters import Layout


class RWKV6(Model):
    """An RWKV-6 language model (Peng et al., "Eagle and Finch", 2024, sections 3 and 4).

        x = LN(emb[token]; ln0)
        every layer, with xx = LN(x; ln1) and the token shift d = xx_{t-1} - xx_t:
            m  = tanh((xx + d maa_x) maa_w1) maa_w2                                  one m for each of w k v r g
            xw = xx + d (maa_w + m_w), and xk, xv, xr, xg likewise
            r = W_r xr,   k = W_k xk,   v = W_v xv,   g = silu(W_g xg)
            w = -exp(time_decay + tanh(xw decay_w1) decay_w2)                        the log of the decay
            o = r^T (S + diag(u) k v^T),   S <- diag(exp w) S + k v^T                `linattn_np.rwkv6`, scale 1
            x = x + W_o (GroupNorm_H(o; ln_x) g)
        with xx = LN(x; ln2) and d again:
            x = x + sigmoid(W_r' (xx + d maa_r')) (W_v' relu(W_k' (xx + d maa_k'))^2)
        logits = head LN(x; ln_out)

    Parameters
    ----------
    weights : mapping from names ("blocks.0.att.time_maa_x", ... or those of Hugging Face or fla) to host arrays
        Any float dtype. All sizes come from names and shapes. A tuned `time_state` is where sequences start.
    device : "cpu" or "cuda"
        Where the weights, and with them every array of the model, live: NumPy or CuPy.
    dtype : "float32", "bfloat16", "int8" or "int4" on the CPU; float32, float16, bfloat16 or int8 on CUDA
        Of the matrices on `device`; norms, mixes, decays and sums are float32. The default is the dtype of `weights`
        if it has fewer than 32 bits: decoding takes as long as reading the matrices, and a wider copy has the same
        numbers. Otherwise the default is float32, and nothing is rounded. On the CPU a default of float16 becomes
        float32; so does one of bfloat16 without Numba, because all dtypes but float32 need Numba there.
        int8 has a scale for every row of a matrix, int4 one for 32 neighbours in a row; int4 keeps the matrices of
        low rank in int8. On CUDA vectors are rounded to the dtype of the half-precision matrix that multiplies them
        (int8: to bfloat16), but not in steps of up to eight sequences; on the CPU no vectors are rounded. int8 on CUDA
        needs a Hopper card. Integers and scales are the same as on the CPU; but the second matrices of low rank are
        bfloat16. In prompts, and in steps of more than 128 sequences, integers times scales are rounded to bfloat16.
    progress : function of (bytes of the weights that are on the device, bytes in all)
        Called while they are loaded.
    state_dtype : float32, on CUDA also bfloat16 or float16
        Of the recurrent state, which is rounded to it after every decoded token, and after every prompt.
    config : mapping
        The contents of `config.json` beside weights with Hugging Face's or fla's names: the norms' eps, whether norms
        have biases, whether embedding and head are tied. `from_file` reads it.

    Raises
    ------
    ContractError
        A parameter is missing, has another shape or belongs to another version of RWKV; a field of `config` asks for
        an operation that is not computed; `device` does not take the `dtype`; on CUDA, sizes are beyond the kernels'
        limits. The text says what was expected.
    NotSupported
        `device` cannot be used, with the reason; `dtype` needs Numba, which is missing.

    Example
    -------
    >>> from linattn_np.models import RWKV6
    >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
    >>> logits, state = model.forward([list(b"Elizabeth Benne")])
    >>> logits.shape, chr(logits[0, -1].argmax())
    ((1, 15, 256), 't')
    >>> logits, state = model.forward([[ord("t")]], state)
    >>> chr(logits[0, -1].argmax())
    ' '
    """

    # `Model` says what each is.
    version, title = VERSION, VERSION.title
    numpy_layers, layout, package = NumpyLayers, Layout, __package__
