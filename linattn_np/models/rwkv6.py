"""RWKV-6 (x060, "Finch") on NumPy or CuPy, without torch: the prompt in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from .. import varlen
from ..arrays import FLOATS
from ..contract import ContractError, ContractTypeError, NotSupported
from ..ops import rwkv6, rwkv6_step
from . import checkpoint, stored_zip
from .checks import shown
from .files import mapped, replaced
from .names import declared, official
from .sampling import Sampling

LAYER_NORM_EPS = 1e-5
GROUP_NORM_EPS = 64e-5      # whatever the head size is


@dataclass
class State:
    """What B sequences carry from token to token, or a pool of P such rows; `RWKV6.forward` updates it in place.

    Example
    -------
    >>> import tempfile
    >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
    >>> _, state = model.forward([list(b"a long prompt")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state.save(f"{folder}/prompt.npz")
    ...     again = State.load(f"{folder}/prompt.npz")
    >>> bool((again.wkv == state.wkv).all())
    True
    """

    att_shift: np.ndarray       # [L, B, D], the last input of each time mix
    wkv: np.ndarray             # [L, B, H, N, N], the recurrent state, key by value
    ffn_shift: np.ndarray       # [L, B, D], the last input of each channel mix

    def copy(self) -> State:
        return State(self.att_shift.copy(), self.wkv.copy(), self.ffn_shift.copy())

    def save(self, path):
        """Writes a `.npz` file, whole or not at all, in host memory's bits: `load` gives the same numbers back."""
        check_state(self, {})
        arrays = {name: on_host(getattr(self, name)) for name in STATE}
        with replaced(path) as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path) -> State:
        """The state in a file of `save`, on the host; `RWKV6.on_device` moves it to a model's device.

        ContractError for every other file, OSError for one that cannot be read.
        """
        try:
            data = mapped(path, "what State.save has written")
            if data[:4] != b"PK\3\4":
                refuse(f"starts with {data[:8]!r}, expected what State.save has written")
            places = stored_zip.directory(data)
            if places.keys() != {f"{name}.npy" for name in STATE}:
                found = ", ".join(sorted(name.removesuffix(".npy") for name in places))
                refuse(f"holds {shown(found)[1:-1] or 'nothing'}, expected {', '.join(sorted(STATE))}")
            state = cls(*(stored_zip.floats(data, places[f"{name}.npy"], name) for name in STATE))
            check_state(state, {})
            return state
        except ContractError as error:
            why = str(error).removeprefix("RWKV6: ")
            raise ContractError(f"RWKV6: {path} is no saved state, or a damaged one: {why}") from None


# The axes of a state's parts: L layers, B sequences (or rows of a pool), D channels, H heads of N.
STATE = {"att_shift": "L B D", "wkv": "L B H N N", "ffn_shift": "L B D"}


def check_state(state, sizes, kinds=None):
    """Wherever a state enters: float32 arrays whose axes fit each other and `sizes`, of one of `kinds` (None: any).

    An axis that `sizes` lacks gets its size where it is first met. ContractError names what does not fit.
    """
    if not isinstance(state, State):
        refuse(f"state is a {type(state).__qualname__}, expected a State", ContractTypeError)
    sizes = dict(sizes)
    for name, axes in STATE.items():
        found, axes = getattr(state, name), axes.split()
        # A mask, or the products of a matrix, would be lost: a subclass of NumPy's array means something of its own.
        if isinstance(found, np.ndarray) and type(found) not in (np.ndarray, np.memmap) or not hasattr(found, "dtype"):
            refuse(f"state.{name} is a {type(found).__module__}.{type(found).__qualname__}, expected a plain array",
                   ContractTypeError)
        if kinds is not None and type(found) not in kinds:
            refuse(f"state.{name} is a {type(found).__module__}.{type(found).__qualname__}, expected one of the "
                   "model's device: `on_device` moves it", ContractTypeError)
        if found.dtype != np.float32:
            refuse(f"state.{name} has dtype {found.dtype}, expected float32", ContractTypeError)
        if len(found.shape) == len(axes):
            for axis, size in zip(axes, found.shape):
                sizes.setdefault(axis, size)
        wanted = tuple(sizes.get(axis, axis) for axis in axes)
        if tuple(found.shape) != wanted:
            refuse(f"state.{name} is {tuple(found.shape)}, expected {wanted}")
    if sizes["H"] * sizes["N"] != sizes["D"]:
        refuse(f"state.wkv has H={sizes['H']} heads of N={sizes['N']}, expected H x N = D = {sizes['D']}")


def on_host(array) -> np.ndarray:
    """`array`, copied there from a device if it is not on the host."""
    return array.get() if hasattr(array, "get") else np.asarray(array)


class Rows:
    """Where a call's sequences lie among its rows of tokens, and which rows of the state are theirs."""

    def __init__(self, bounds, slots):
        self.bounds, self.slots = bounds, slots                     # host: [N + 1]; [N] or None
        self.first, self.last = bounds[:-1], bounds[1:] - 1
        self.single = len(self.first) == bounds[-1]                 # a token each: a step
        self.states = slice(None) if slots is None else slots       # what a state is indexed with


class RWKV6:
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
            x = x + sigmoid(W_r' (xx + d maa_r)) (W_v' relu(W_k' (xx + d maa_k))^2)
        logits = head LN(x; ln_out)

    Parameters
    ----------
    weights : mapping from names ("blocks.0.att.time_maa_x", ... or those of Hugging Face or fla) to host arrays
        Any float dtype. All sizes come from names and shapes. A tuned `time_state` is where sequences start.
    device : "cpu" or "cuda"
        Where the weights, and with them every array of the model, live: NumPy or CuPy.
    dtype : float32 on the CPU, where NumPy multiplies nothing else fast; float32, float16 or bfloat16 on CUDA
        Of the matrices there; norms, mixes and decays are float32, and so are the state and every sum. By default
        that of `weights` if they are in half precision, as decoding takes as long as the matrices take to be read
        and a wider copy holds nothing more; else float32, as rounding them is the caller's to decide.
        What meets a half-precision matrix is rounded to its dtype, but not in steps of up to eight sequences.
    progress : function of (bytes of the weights that are on the device, bytes in all)
        Called while they are loaded.

    Raises
    ------
    ContractError
        A parameter that is missing, of another shape or of another version of RWKV, with what was wanted; a
        `dtype` that `device` does not take; on CUDA, sizes beyond the kernels'.
    NotSupported
        `device` cannot be had, with the reason.

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

    def __init__(self, weights: Mapping, device: str = "cpu", dtype=None,
                 progress: Callable[[int, int], object] | None = None):
        weights, self.sizes = parameters(weights)
        self.layers = layers_on(device)(weights, self.sizes, dtype, progress or (lambda done, total: None))

    @classmethod
    def from_file(cls, path, device: str = "cpu", dtype=None,
                  progress: Callable[[int, int], object] | None = None) -> RWKV6:
        """The model in a checkpoint; OSError when the file cannot be read, CheckpointError when it is refused.

        path : `.pth` (torch's zip or its older form, read without torch), `.safetensors`, or the index
            `model.safetensors.index.json` of a sharded one, or a folder of Hugging Face with one of these; with the
            official, Hugging Face's or fla's names.
        """
        weights = checkpoint.read(path)
        try:
            return cls(weights, device, dtype, progress)
        except NotSupported:
            raise
        except ContractError as error:
            raise type(error)(f"{path}: {error}") from None

    def initial_state(self, batch: int = 1) -> State:
        """The state before the first token of `batch` sequences: zeros, or the tuned one that the weights bring."""
        L, D, H, N = (self.sizes[axis] for axis in "LDHN")
        zeros = self.layers.zeros
        state = State(*(zeros((L, batch, *axes), np.float32) for axes in ((D,), (H, N, N), (D,))))
        for wkv, start in zip(state.wkv, self.layers.tuned):        # [H, N, N] of each layer, or none
            wkv[...] = start
        return state

    def forward(self, tokens, state: State | None = None, *, cu_seqlens=None, slots=None, last: bool = False):
        """``(logits [B, T, V] float32, state)`` for `tokens` [B, T], host integers.

        `state` is updated in place and handed back, so that the next call goes on where this one ended; without one
        the sequences start here. T tokens in one call, or in any number of calls, give the same logits: a call with
        T > 1 runs `linattn_np.rwkv6` in chunks, with T = 1 `linattn_np.rwkv6_step` or, on CUDA, a `CudaDecoder`,
        whose step is captured in a graph as soon as the same state comes with the same number of sequences again.

        cu_seqlens : prompts of different lengths packed into one row, B = 1: sequence n is tokens
            ``cu_seqlens[n]:cu_seqlens[n + 1]``, none of them empty. The state has N rows.
        slots : the row of `state`, then a pool of any size, that each of the sequences has; all different.
        last : logits after each sequence's last token alone, [N, V].
        """
        tokens = self.checked(tokens)
        rows = self.rows(tokens, cu_seqlens, slots)
        if state is None and slots is not None:
            refuse("slots needs a state to be rows of")
        state = self.initial_state(len(rows.first)) if state is None else self.updatable(state, rows)
        logits = self.layers.logits(tokens.ravel(), state, rows, last)
        return (logits if last else logits.reshape(*tokens.shape, -1)), state

    def generate(self, prompt, *, seed=None, **how) -> Iterator[int]:
        """Tokens that continue `prompt` (host integers [T]), one by one and without end.

        `seed` and everything else are those of `Sampling`: temperature, top_p, top_k, penalties.

        Example
        -------
        >>> from itertools import islice
        >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
        >>> bytes(islice(model.generate(b"Captain Went", temperature=0), 5))
        b'worth'
        """
        sampler = Sampling(seed=seed, **how).sampler()
        return self.stream(self.checked([list(prompt)]), sampler)

    def stream(self, tokens, sampler):
        state = self.initial_state()
        while True:
            logits, state = self.forward(tokens, state, last=True)
            token = sampler(self.to_host(logits)[0])
            yield token
            tokens = [[token]]

    def to_host(self, array):
        return on_host(array)

    def on_device(self, state: State, rows: int | None = None) -> State:
        """`state` where this model computes; it must be one of this model's, with `rows` rows (None: any number)."""
        check_state(state, self.state_sizes(rows))
        return State(*(self.layers.asarray(getattr(state, name)) for name in STATE))

    # -- checks ------------------------------------------------------------------------------------------------------
    def checked(self, tokens):
        """`tokens` as int64 [B, T] on the host, each within the vocabulary."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            lengths = [len(row) for row in tokens]
            refuse(f"tokens is ragged, with rows of {lengths} tokens; expected [B, T]")
        if ids.ndim != 2 or not ids.size:
            refuse(f"tokens is {ids.shape}, expected [B, T] with at least one token")
        if ids.dtype.kind not in "iu":
            refuse(f"tokens has dtype {ids.dtype}, expected integers", ContractTypeError)
        V = self.sizes["V"]
        if not (0 <= ids.min() and ids.max() < V):
            refuse(f"tokens runs from {ids.min()} to {ids.max()}, but the vocabulary has {V} tokens")
        return ids.astype(np.int64)

    def rows(self, tokens, cu_seqlens, slots) -> Rows:
        B, T = tokens.shape
        bounds = np.arange(B + 1) * T
        if cu_seqlens is not None:
            if B != 1:
                refuse(f"cu_seqlens packs all prompts into one row, so B must be 1, got B={B}")
            try:
                bounds = varlen.parse(cu_seqlens, T).bounds
            except ValueError as error:
                refuse(f"cu_seqlens {error}")
            if (np.diff(bounds) == 0).any():
                refuse(f"cu_seqlens has an empty prompt at index {int(np.argmin(np.diff(bounds)))}")
        if slots is None:
            return Rows(bounds, None)
        slots = np.asarray(slots)
        if slots.shape != (len(bounds) - 1,) or slots.dtype.kind not in "iu":
            refuse(f"slots is {slots.shape} {slots.dtype}, expected integers [N] = ({len(bounds) - 1},)")
        if len(np.unique(slots)) < len(slots):
            refuse("slots names a row twice; two sequences cannot update one state")
        return Rows(bounds, slots.astype(np.int64))

    def updatable(self, state, rows):
        """`state`, once it is one of this model's, on its device, with a row for each of the call's sequences."""
        check_state(state, self.state_sizes(len(rows.first) if rows.slots is None else None), (self.layers.Array,))
        for name in STATE:
            if not getattr(getattr(state, name).flags, "writeable", True):
                refuse(f"state.{name} is read-only, expected an array to update: `copy` gives one")
        P = state.wkv.shape[1]
        if rows.slots is not None and not (0 <= rows.slots.min() and rows.slots.max() < P):
            refuse(f"slots runs from {rows.slots.min()} to {rows.slots.max()}, but the state has {P} rows")
        return state

    def state_sizes(self, rows):
        """The sizes of a state's axes, of the rows only where they are given."""
        return {axis: self.sizes[axis] for axis in "LDHN"} | ({} if rows is None else {"B": rows})


class CpuLayers:
    """The layers in NumPy and float32, on rows of tokens [B * T, D]."""

    Array, asarray, zeros = np.ndarray, staticmethod(on_host), staticmethod(np.zeros)

    def __init__(self, weights, sizes, dtype, progress):
        one_of(dtype or np.float32, [np.dtype(np.float32)], " on the CPU, where NumPy multiplies nothing else fast")
        loaded = counted(weights, progress)

        def load(*names):
            """float32 [..., D], contiguous; several names are stacked along a first axis."""
            stack = np.stack([np.asarray(weights[name], np.float32) for name in names])
            for name in names:
                loaded(weights[name])
            return stack[0] if len(names) == 1 else stack

        self.embedding, self.head = load("emb.weight"), product(load("head.weight"))
        self.ln0, self.ln_out = (load(f"{norm}.weight", f"{norm}.bias") for norm in ("blocks.0.ln0", "ln_out"))
        self.blocks = [Block(f"blocks.{i}", load) for i in range(sizes["L"])]
        # Stored value by key; the state is key by value.
        self.tuned = [load(name).swapaxes(1, 2) for name in weights if name.endswith("time_state")]

    def logits(self, tokens, state, rows, last):
        """[B * T, V], or [N, V] of each sequence's last token."""
        x = layer_norm(self.embedding[tokens], self.ln0)
        for i, block in enumerate(self.blocks):
            x += time_mix(block, layer_norm(x, block.ln1), state.att_shift[i], state.wkv[i], rows)
            x += channel_mix(block, layer_norm(x, block.ln2), state.ffn_shift[i], rows)
        return self.head(layer_norm(x[rows.last] if last else x, self.ln_out))


class Block:
    """One layer's weights, those that meet one product stacked; a matrix W is the function from x to x W^T."""

    def __init__(self, name, load):
        att, ffn = f"{name}.att", f"{name}.ffn"
        self.ln1, self.ln2, self.ln_x = (load(f"{norm}.weight", f"{norm}.bias")             # [2, D]
                                         for norm in (f"{name}.ln1", f"{name}.ln2", f"{att}.ln_x"))
        self.maa_x = load(f"{att}.time_maa_x")[0]                                           # [1, D]
        self.maa = load(*(f"{att}.time_maa_{x}" for x in "wkvrg"))[:, 0]                    # [5, 1, D]
        self.maa_down = product(load(f"{att}.time_maa_w1").T)
        self.maa_up = product(load(f"{att}.time_maa_w2").swapaxes(1, 2))                    # five
        self.decay = load(f"{att}.time_decay")[0]                                           # [1, D]
        self.decay_down, self.decay_up = (product(load(f"{att}.time_decay_{w}").T) for w in ("w1", "w2"))
        self.bonus = load(f"{att}.time_faaaa")                                              # [H, N]
        self.kvrg = product(load(*(f"{att}.{x}.weight" for x in ("key", "value", "receptance", "gate"))))
        self.output = product(load(f"{att}.output.weight"))
        self.ffn_maa = load(f"{ffn}.time_maa_k", f"{ffn}.time_maa_r")[:, 0]                 # [2, 1, D]
        self.ffn_key, self.ffn_receptance, self.ffn_value = (
            product(load(f"{ffn}.{x}.weight")) for x in ("key", "receptance", "value"))


def product(w):
    """The function from x [..., K] to x W^T [..., M], for w [..., M, K]."""
    transposed = w.swapaxes(-1, -2)
    return lambda x: x @ transposed


def time_mix(block, x, shift, wkv, rows):
    """x [tokens, D], shift [P, D], wkv [P, H, N, N]; the last two are updated in place."""
    _, H, N, _ = wkv.shape
    past = token_shift(x, shift, rows)
    low = np.tanh(block.maa_down(x + past * block.maa_x))
    low = low.reshape(len(x), 5, -1).swapaxes(0, 1)                             # [5, tokens, A]
    mixed = x + past * (block.maa + block.maa_up(low))                          # [5, tokens, D]
    k, v, r, gate = block.kvrg(mixed[1:])
    w = -np.exp(block.decay + block.decay_up(np.tanh(block.decay_down(mixed[0]))))

    r, k, v, w = (array.reshape(-1, H, N) for array in (r, k, v, w))
    if rows.single:
        o = rwkv6_step(r, k, v, w, block.bonus, wkv, scale=1.0, slots=rows.slots)
    else:
        o, wkv[rows.states] = rwkv6(r[None], k[None], v[None], w[None], block.bonus, scale=1.0, layout="bthd",
                                    cu_seqlens=rows.bounds, initial_state=wkv[rows.states], output_final_state=True)
    weight, bias = block.ln_x
    o = normalize(o.reshape(-1, H, N), GROUP_NORM_EPS).reshape(x.shape) * weight + bias
    return block.output(o * gate * sigmoid(gate))


def channel_mix(block, x, shift, rows):
    past, (maa_k, maa_r) = token_shift(x, shift, rows), block.ffn_maa
    k = np.maximum(block.ffn_key(x + past * maa_k), 0)
    return sigmoid(block.ffn_receptance(x + past * maa_r)) * block.ffn_value(k * k)


def token_shift(x, shift, rows):
    """x_{t-1} - x_t within every sequence of x [tokens, D]; `shift` [P, D] has each one's x_{-1}, afterwards its last."""
    if rows.single:
        before = shift[rows.states] - x
        shift[rows.states] = x
        return before
    before = np.empty_like(x)
    before[1:] = x[:-1]
    before[rows.first] = shift[rows.states]
    shift[rows.states] = x[rows.last]
    before -= x
    return before


def layer_norm(x, weight_and_bias):
    weight, bias = weight_and_bias
    return normalize(x, LAYER_NORM_EPS) * weight + bias


def normalize(x, eps):
    size = x.shape[-1]          # sums, as NumPy's mean is slow on a single token
    x = x - x.sum(axis=-1, keepdims=True) / size
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) / size + eps)


def sigmoid(x):
    """1 / (1 + exp(-x)) without its overflow."""
    return 0.5 * np.tanh(0.5 * x) + 0.5


def counted(weights, progress):
    """A function to call with every array that is loaded: tells `progress` the bytes so far, and those in all."""
    done, total = 0, sum(array.nbytes for array in weights.values())

    def loaded(array):
        nonlocal done
        done += array.nbytes
        progress(done, total)
    return loaded


def parameters(weights) -> tuple[dict, dict[str, int]]:
    """`weights` under their official names, and the model's sizes, once every shape fits the others."""
    weights = official(weights)
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    sizes = {"1": 1, "5": 5, "L": layers}
    for name, axes in declared(layers, tuned="blocks.0.att.time_state" in weights).items():
        axes, shape = axes.split(), tuple(weights[name].shape)
        if len(shape) == len(axes):
            for axis, size in zip(axes, shape):
                sizes.setdefault(axis, size)
        wanted = tuple(sizes.get(axis, axis) for axis in axes)
        if shape != wanted:
            refuse(f"{name} is {shape}, expected [{', '.join(axes)}] = {wanted}")
        if weights[name].dtype not in FLOATS:
            refuse(f"{name} has dtype {weights[name].dtype}, expected floats", ContractTypeError)
    if sizes["H"] * sizes["N"] != sizes["D"]:
        refuse(f"att.time_faaaa has H={sizes['H']} heads of N={sizes['N']}, expected H x N = D = {sizes['D']}")
    if 5 * sizes["A"] != sizes["5A"]:
        refuse(f"att.time_maa_w1 has {sizes['5A']} columns, expected 5 x A = {5 * sizes['A']} as att.time_maa_w2 has it")
    return weights, sizes


def layers_on(device) -> type:
    """What runs the layers there; NotSupported says why the GPU cannot be used."""
    if device == "cpu":
        return CpuLayers
    if device != "cuda":
        refuse(f"device is {device!r}, expected 'cpu' or 'cuda'")
    try:
        import cupy
        if not cupy.cuda.is_available():
            raise ImportError("CuPy finds no CUDA device")
        from cupy.cuda import cublas            # noqa: F401  the model's matrix products are cuBLAS's
    except ImportError as error:
        raise NotSupported(f"RWKV6: device 'cuda' cannot be used: {str(error).splitlines()[0]}") from None
    from .cuda_layers import CudaLayers
    return CudaLayers


def one_of(dtype, taken, where=""):
    """`dtype` as NumPy's, once it is one of those `taken`."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = repr(dtype)
    if not any(found == one for one in taken):
        refuse(f"dtype is {found}, expected {', '.join(map(str, taken))}{where}", ContractTypeError)
    return found


def refuse(complaint: str, error=ContractError):
    raise error(f"RWKV6: {complaint}")
