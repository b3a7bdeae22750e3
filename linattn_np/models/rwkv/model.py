"""A language model on NumPy or CuPy arrays: the prompt in chunks, then token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from types import ModuleType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ... import varlen
from ...array_kinds import BFLOAT16
from ...errors import ContractError, ContractTypeError, NotSupported
from ...typing import Integers, Result
from .. import checkpoint
from ..devices import check_device, on_host
from ..prompt_reading import read
from ..quantised import collected, of_bits
from ..sampling import Sampling
from ..training_products import HostProducts
from . import names
from .config import completed
from .cpu_layers import cpu_layers
from .numpy_layers import NumpyLayers
from .parameters import Layout
from .state import STATE, Rows, State, check_state
from .version import NORM_EPS_NAME, Version

Device = Literal["cpu", "cuda"]


class Model:
    """What models of all versions do; a version's class says how its parameters and its equations are.

    version : its tables
    numpy_layers : its layers by NumPy alone
    layout : of its parameters in a training
    beside : as `protocols.Trainable` has it: nothing, as all is trained
    folder : the name of its package, which has `numba_layers`, `cuda_decode`, `grad` and `cuda_grad`
    """

    version: ClassVar[Version]
    numpy_layers: ClassVar[type[NumpyLayers]]
    layout: ClassVar[type[Layout]]
    folder: ClassVar[str]
    beside: ClassVar[bytes] = b""

    def __init__(
        self,
        weights: Mapping,
        device: Device = "cpu",
        dtype: DTypeLike | None = None,
        progress: Callable[[int, int], object] | None = None,
        state_dtype: DTypeLike = np.float32,
        config: Mapping | None = None,
    ):
        weights, self.sizes = self.parameters(weights, config)
        self.device = device
        loaded = counted(weights, progress or (lambda *_: None))
        self.layers = self.layers_on(device)(weights, self.sizes, dtype, state_dtype, loaded)

    @classmethod
    def module(cls, name: str) -> ModuleType:
        """A module of the version's folder, imported when it is first needed: Numba and CuPy take a while to import."""
        return import_module(f"{cls.folder}.{name}")

    @classmethod
    def cuda_layers(cls) -> Callable:
        """What makes the layers on the GPU."""
        from .cuda_layers import CudaLayers

        return partial(CudaLayers, cls.module("cuda_decode").CudaDecoder)

    @classmethod
    def trainable(cls, layers: int, width: int, head_size: int) -> Layout:
        """The parameters of a byte-level model of this size, to be trained."""
        return cls.layout(cls.layout.sizes_of(layers, width, head_size))

    @staticmethod
    def model_weights(layout: Layout, vector) -> dict:
        """Of the vector of a training the weights, by official name."""
        return layout.named(vector)

    @classmethod
    def loss(cls, weights, tokens, products, drop, **how) -> tuple[Any, Callable]:
        """The loss of a trainable model and its pullback, as the version's `grad.loss` has them; on a device, as its
        `cuda_grad.loss`."""
        module = cls.module("grad" if isinstance(products, HostProducts) else "cuda_grad")
        return module.loss(weights, tokens, products, drop, **how)

    @classmethod
    def layers_on(cls, device) -> Callable:
        """What makes what runs the layers there; NotSupported says why the GPU cannot be used."""
        if device == "cpu":
            return partial(cpu_layers, cls)
        # Imported first, as another thread may still be opening the device: see `open_beside`.
        layers = cls.cuda_layers() if find_spec("cupy") else None
        check_device(cls.version.owner, device)
        assert layers
        return layers

    @classmethod
    def parameters(cls, weights: Mapping, config: Mapping | None) -> tuple[dict, dict[str, int]]:
        """`weights` under their official names, matrices with their scales as one, and the model's sizes."""
        return names.parameters(cls.version, completed(cls.version, collected(weights), config))

    def __repr__(self):
        sizes = "{L} layers, {D} channels, {H} heads of {N}, {V:,} tokens".format(**self.sizes)
        return f"{self.version.owner}({sizes}, {self.layers.dtype} on {self.device})"

    @classmethod
    def from_file(
        cls,
        path: str | PathLike,
        device: Device = "cpu",
        dtype: DTypeLike | None = None,
        progress: Callable[[int, int], object] | None = None,
        state_dtype: DTypeLike = np.float32,
    ) -> Self:
        """The model in a checkpoint; OSError when the file cannot be read, CheckpointError when it is refused.

        path : `.pth` (torch's zip or its older form, read without torch), `.safetensors`, or the index
            `model.safetensors.index.json` of a sharded one, or a folder of Hugging Face with one of these; with the
            official, Hugging Face's or fla's names. Of the latter two a `config.json` beside it is read.
        """
        return cls.of_file(
            path, checkpoint.read(path), device=device, dtype=dtype, progress=progress, state_dtype=state_dtype
        )

    @classmethod
    def of_file(cls, path, weights, **how) -> Self:
        """The model of `weights`, which `path` holds."""
        try:
            return cls(weights, **how, config=checkpoint.config(path))
        except NotSupported:
            raise
        except ContractError as error:
            raise type(error)(f"{path}: {error}") from None

    @classmethod
    def by_numpy(cls, weights: Mapping) -> Self:
        """A model of `weights` by NumPy alone, for which Numba's loops need not be compiled."""
        self = cls.__new__(cls)
        weights, self.sizes = cls.parameters(weights, None)
        self.device, self.layers = "cpu", cls.numpy_layers(weights, self.sizes, "float32", lambda array: None)
        return self

    @classmethod
    def quantise(cls, weights: Mapping, dtype: str, config: Mapping | None = None) -> dict:
        """`weights` as a file of a quantised checkpoint holds them, which `from_file` reads: a dict of host arrays.

        dtype : "int8" or "int4", of the large matrices; or "bfloat16". The embedding and the matrices of low rank are
            bfloat16 in all of them, the vectors as they are.

        config : as the model takes it.
        """
        weights, sizes = cls.parameters(weights, config)
        large = cls.version.linears(sizes["L"])
        matrices = {*large, *(name for name in weights if cls.version.is_matrix(name))}
        rest = matrices if dtype == "bfloat16" else matrices.difference(large)
        weights = {
            name: np.asarray(array).astype(BFLOAT16) if name in rest else array for name, array in weights.items()
        }
        return weights if dtype == "bfloat16" else of_bits(weights, large, dtype)

    def initial_state(self, batch: int = 1) -> State:
        """The state before the first token of `batch` sequences: zeros, or the tuned one that the weights bring."""
        with self.turn():
            state = State.made(self.layers.zeros, self.sizes, batch, self.layers.state_dtype)
            for wkv, start in zip(state.wkv, self.layers.tuned):  # [H, N, N] of each layer, or none
                wkv[...] = start
        return state

    def forward(
        self,
        tokens: ArrayLike,
        state: State | None = None,
        *,
        cu_seqlens: Integers | None = None,
        slots: Integers | None = None,
        last: bool = False,
        hidden: bool = False,
    ) -> tuple[Result, State]:
        """The logits of the next tokens, and the state after `tokens`.

        T tokens in one call, or in any number of calls, give the same logits: a call with T > 1 runs
        the operator in chunks, with T = 1 its step or, on CUDA, a decoder, whose step is captured in a graph as soon as
        the same state comes with the same number of sequences again.

        Parameters
        ----------
        tokens : integers [B, T], on the host
        state : State, optional
            Of B sequences; it is updated in place and handed back, so that the next call goes on where this one
            ended. Without one the sequences start here.
        cu_seqlens : integers [N + 1], optional
            Prompts of different lengths packed into one row, B = 1: sequence n is tokens
            ``cu_seqlens[n]:cu_seqlens[n + 1]``, none of them empty. The state has N rows.
        slots : integers [N], optional
            The row of `state`, then a pool of any size, that each of the sequences has; all different.
        last : bool
            Logits after each sequence's last token alone.
        hidden : bool
            On the CPU, what the head makes logits of in their place: LN(x; ln_out).

        Returns
        -------
        logits : float32 [B, T, V], or [N, V] with `last`; with `hidden` D for V
        state : State

        Raises
        ------
        ContractError
            Tokens outside the vocabulary, or a state, bounds or slots that do not fit; nothing has changed then.
        """
        ids = self.checked(tokens)
        rows = self.rows(ids, cu_seqlens, slots)
        if state is None and slots is not None:
            self.version.refuse("slots needs a state to be rows of")
        state = self.initial_state(len(rows.first)) if state is None else self.updatable(state, rows)
        compute = self.layers.hidden if hidden else self.layers.logits
        logits = compute(ids.ravel(), state, rows, last)
        return (logits if last else logits.reshape(*ids.shape, -1)), state

    def warm_up(self, batches: Integers = (1,), prompt: int = 64) -> None:
        """Runs a prompt and steps on zeros, so that no kernel and no library has to be loaded in a server's first call.

        batches : numbers of sequences whose steps will be asked for
        prompt : tokens of the prompt that is run; none with 0

        Example
        -------
        >>> from linattn_np.models import RWKV6
        >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
        >>> model.warm_up(batches=(1, 8))
        """
        if prompt:
            self.forward(np.zeros((1, prompt), np.int64), last=True)
        for batch in batches:
            self.forward(np.zeros((batch, 1), np.int64))

    def generate(self, prompt: bytes | Integers, *, seed: Any = None, **how: Any) -> Iterator[int]:
        """Tokens that continue `prompt` (host integers [T]), one by one and without end.

        The prompt is read `prompt_reading.PIECE` tokens at a time, so that a long one takes no more memory than a
        short one.

        `seed` and everything else are those of `Sampling`: temperature, top_p, top_k, penalties.

        Example
        -------
        >>> from itertools import islice
        >>> from linattn_np.models import RWKV6
        >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
        >>> bytes(islice(model.generate(b"Captain Went", temperature=0), 5))
        b'worth'
        """
        sampler = Sampling(seed=seed, **how).sampler()
        prompt = list(prompt)
        self.checked([prompt])
        return self.stream(prompt, sampler)

    def stream(self, prompt, sampler):
        rest, state = read(self, prompt)
        tokens = [rest]
        while True:
            logits, state = self.forward(tokens, state, last=True)
            token = sampler(self.to_host(logits)[0])
            yield token
            tokens = [[token]]

    def turn(self):
        """A context that does with arrays of the model's device what another thread or stream may have begun.

        On the GPU a thread at a time is inside, and its stream works behind what was enqueued there before. `forward`
        and all other methods enter it by themselves.
        """
        return self.layers.turn()

    def to_host(self, array):
        with self.turn():
            pass  # the current stream comes behind the one that has computed it
        return on_host(array)

    def on_device(self, state: State, rows: int | None = None) -> State:
        """`state` where this model computes, in its `state_dtype`.

        It must be one of this model's, with `rows` rows (None: any number).
        """
        check_state(state, self.state_sizes(rows), wkv=None, refuse=self.version.refuse)
        with self.turn():
            wkv = state.wkv.astype(self.layers.state_dtype, copy=False)
            return State(*map(self.layers.asarray, (state.att_shift, wkv, state.ffn_shift)))

    # -- checks ------------------------------------------------------------------------------------------------------
    def checked(self, tokens):
        """`tokens` as int64 [B, T] on the host, each within the vocabulary."""
        try:
            ids = np.asarray(tokens)
        except ValueError:
            lengths = [len(row) for row in tokens]
            self.version.refuse(f"tokens is ragged, with rows of {lengths} tokens; expected [B, T]")
        if ids.ndim != 2 or not ids.size:
            self.version.refuse(f"tokens is {ids.shape}, expected [B, T] with at least one token")
        if ids.dtype.kind not in "iu":
            self.version.refuse(f"tokens has dtype {ids.dtype}, expected integers", ContractTypeError)
        V = self.sizes["V"]
        if not (0 <= ids.min() and ids.max() < V):
            self.version.refuse(f"tokens runs from {ids.min()} to {ids.max()}, but the vocabulary has {V} tokens")
        return ids.astype(np.int64)

    def rows(self, tokens, cu_seqlens, slots) -> Rows:
        B, T = tokens.shape
        bounds = np.arange(B + 1) * T
        if cu_seqlens is not None:
            if B != 1:
                self.version.refuse(f"cu_seqlens packs all prompts into one row, so B must be 1, got B={B}")
            try:
                bounds = varlen.parse(cu_seqlens, T).bounds
            except ValueError as error:
                self.version.refuse(f"cu_seqlens {error}")
            if (np.diff(bounds) == 0).any():
                self.version.refuse(f"cu_seqlens has an empty prompt at index {int(np.argmin(np.diff(bounds)))}")
        if slots is None:
            return Rows(bounds, None)
        slots = np.asarray(slots)
        if slots.shape != (len(bounds) - 1,) or slots.dtype.kind not in "iu":
            self.version.refuse(f"slots is {slots.shape} {slots.dtype}, expected integers [N] = ({len(bounds) - 1},)")
        if len(set(slots.tolist())) < len(slots):
            self.version.refuse("slots names a row twice; two sequences cannot update one state")
        return Rows(bounds, slots.astype(np.int64))

    def updatable(self, state, rows):
        """`state`, once it is one of this model's, on its device, with a row for each of the call's sequences."""
        check_state(
            state,
            self.state_sizes(len(rows.first) if rows.slots is None else None),
            (self.layers.Array,),
            self.layers.state_dtype,
            self.version.refuse,
        )
        for name in STATE:
            if not getattr(getattr(state, name).flags, "writeable", True):
                self.version.refuse(f"state.{name} is read-only, expected an array to update: `copy` gives one")
        P = state.wkv.shape[1]
        if rows.slots is not None and not (0 <= rows.slots.min() and rows.slots.max() < P):
            self.version.refuse(f"slots runs from {rows.slots.min()} to {rows.slots.max()}, but the state has {P} rows")
        return state

    def state_sizes(self, rows):
        """The sizes of a state's axes, of the rows only where they are given."""
        return {axis: self.sizes[axis] for axis in "LDHN"} | ({} if rows is None else {"B": rows})


def counted(weights, progress):
    """A function to call with every array that is loaded: tells `progress` the bytes so far, and those in all."""
    done, total = 0, sum(array.nbytes for name, array in weights.items() if name != NORM_EPS_NAME)

    def loaded(array):
        nonlocal done
        done += array.nbytes
        progress(done, total)

    return loaded
