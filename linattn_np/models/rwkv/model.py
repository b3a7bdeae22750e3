"""The base class of RWKV language models on NumPy or CuPy arrays; prompts are computed in chunks."""

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
from ...argument_checks import array_on_host
from ...array_kinds import BFLOAT16
from ...errors import ContractError, ContractTypeError, NotSupported
from ...signals import signals_held
from ...typing import Integers, Result
from .. import checkpoint
from ..devices import check_device, on_host
from ..number_checks import checked_int
from ..prompt_reading import read
from ..quantised import Stored, file_arrays, with_stored_matrices
from ..sampling import Sampling
from ..training_products import HostProducts
from . import names
from .config import check_sizes, completed
from .cpu_layers import cpu_layers
from .numpy_layers import NumpyLayers
from .parameters import Layout
from .state import STATE, CallSequences, State, check_state
from .version import HIDDEN_ACT_NAME, NORM_EPS_NAME, Version

Device = Literal["cpu", "cuda"]


class Model:
    """What models of all RWKV versions have in common. A version's subclass defines:

    version : its tables of parameters
    numpy_layers : the class of its layers in NumPy
    layout : the class of its parameters' names and shapes in a training
    package : the name of its package, in which `module` finds `numba_layers`, `cuda_decode`, `grad` and `cuda_grad`
    title : what is trained, in words, as in `protocols.Trainable`
    beside : a digest of the weights that are not trained; empty, as all are trained

    Of its `layers`, such as `NumpyLayers`, it uses logits, hidden, head, turn, zeros, asarray, Array, dtype,
    state_dtype, initial_wkv and makes_states: whether calls with several tokens make a state's arrays themselves.
    """

    version: ClassVar[Version]
    numpy_layers: ClassVar[type[NumpyLayers]]
    layout: ClassVar[type[Layout]]
    package: ClassVar[str]
    title: ClassVar[str]
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
        loaded = byte_counter(weights, progress or (lambda *_: None))
        self.layers = self.layers_on(device)(weights, self.sizes, dtype, state_dtype, loaded)

    @classmethod
    @signals_held()
    def module(cls, name: str) -> ModuleType:
        """A module of the version's package, imported when it is first needed, as Numba and CuPy import slowly.

        Signals wait, as a handler's exception could leave half of an import behind.
        """
        return import_module(f"{cls.package}.{name}")

    @classmethod
    def cuda_layers(cls) -> Callable:
        """The function that makes the layers on the GPU; it takes the arguments that `layers_on` describes."""
        from .cuda_layers import CudaLayers

        return partial(CudaLayers, cls.module("cuda_decode").CudaDecoder)

    @classmethod
    def trainable(cls, layers: int, width: int, head_size: int) -> Layout:
        """The layout of the parameters of a byte-level model of this size, to be trained."""
        return cls.layout(cls.layout.sizes_of(layers, width, head_size))

    @staticmethod
    def model_weights(layout: Layout, vector) -> dict:
        """The weights by official name, from the parameter vector of a training."""
        return layout.named(vector)

    @classmethod
    def loss(cls, weights, tokens, products, dropout, **options) -> tuple[Any, Callable]:
        """The loss and its pullback, by the version's `grad.loss`, or on a GPU by its `cuda_grad.loss`.

        products : the matrix products, of `training_products`
        """
        module = cls.module("grad" if isinstance(products, HostProducts) else "cuda_grad")
        return module.loss(weights, tokens, products, dropout, **options)

    @classmethod
    def layers_on(cls, device) -> Callable:
        """The function that makes the layers on `device`, from (weights by official name, `sizes`, dtype, state_dtype,
        `byte_counter`'s function); NotSupported, with the reason, if the GPU cannot be used."""
        if device == "cpu":
            return partial(cpu_layers, cls)
        # Imports come before the check to gain time: another thread may open the device meanwhile
        # (`devices.open_beside`).
        layers = cls.cuda_layers() if find_spec("cupy") else None
        check_device(cls.version.owner, device)
        assert layers
        return layers

    @classmethod
    def parameters(cls, weights: Mapping, config: Mapping | None) -> tuple[dict, dict[str, int]]:
        """(the weights by official name; the sizes {axis of `Version.parameter_axes`: size}), after all checks.

        A quantised matrix and its scales are one `Stored`. ContractError if names, shapes or the config do not fit.
        """
        weights = {
            name: array if isinstance(array, Stored) else array_on_host(name, array, cls.version.refuse)
            for name, array in with_stored_matrices(weights).items()
        }
        official_weights, sizes = names.parameters(cls.version, completed(cls.version, weights, config))
        check_sizes(cls.version, weights, config, sizes)
        return official_weights, sizes

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
        """The model in a checkpoint; OSError if the file cannot be read, CheckpointError if it is refused.

        path : `.pth` (torch's zip or its older form, read without torch), `.safetensors`, the index
            `model.safetensors.index.json` of a sharded one, or a folder of Hugging Face with one of these. Parameters
            have the official, Hugging Face's or fla's names; for the latter two, `config.json` is read, too.
        """
        return cls.of_file(
            path, checkpoint.read(path), device=device, dtype=dtype, progress=progress, state_dtype=state_dtype
        )

    @classmethod
    def of_file(cls, path, weights, **options) -> Self:
        """The model of `weights`, which the caller has read from `path`; errors begin with the path."""
        try:
            return cls(weights, **options, config=checkpoint.config(path))
        except NotSupported:  # a ContractError about the GPU, not about the file
            raise
        except ContractError as error:
            raise type(error)(f"{path}: {error}") from None

    @classmethod
    def by_numpy(cls, weights: Mapping) -> Self:
        """A model that computes in NumPy alone, without compiling Numba's loops."""
        self = cls.__new__(cls)
        weights, self.sizes = cls.parameters(weights, None)
        self.device, self.layers = "cpu", cls.numpy_layers(weights, self.sizes, "float32", lambda array: None)
        return self

    @classmethod
    def quantise(cls, weights: Mapping, dtype: str, config: Mapping | None = None) -> dict:
        """The arrays of a quantised checkpoint, a dict of host arrays, which `from_file` reads once they are in a file.

        Parameters
        ----------
        dtype : "int8", "int4" or "bfloat16"
            Of the large matrices. The embedding and the matrices of low rank become bfloat16 in each case; vectors keep
            their dtype.
        config
            As the model takes it.
        """
        weights, sizes = cls.parameters(weights, config)
        large = cls.version.large_matrices(sizes["L"])
        matrices = {*large, *(name for name in weights if cls.version.is_matrix(name))}
        to_bfloat16 = matrices if dtype == "bfloat16" else matrices.difference(large)
        weights = {
            name: np.asarray(array).astype(BFLOAT16) if name in to_bfloat16 else array
            for name, array in weights.items()
        }
        return weights if dtype == "bfloat16" else file_arrays(weights, large, dtype)

    def initial_state(self, batch: int = 1) -> State:
        """The state before the first token of `batch` sequences: zeros, or the trained state among the weights."""
        with self.turn():
            state = State.made(self.layers.zeros, self.sizes, batch, self.layers.state_dtype)
            for wkv, initial_wkv in zip(state.wkv, self.layers.initial_wkv):  # an empty list if there is no trained one
                wkv[...] = initial_wkv
        state.version = self.version.number
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

        T tokens give the same logits in one call or in several. A call with T > 1 runs the operator in chunks, one with
        T = 1 its step; on CUDA a step is captured in a graph when a call repeats a state and a number of sequences.

        Parameters
        ----------
        tokens : integers [B, T], on the host
        state : State, optional
            The state of B sequences. It is updated in place and returned, for a call that continues the sequences.
            Without it the sequences start here.
        cu_seqlens : integers [N + 1], optional
            Prompts of different lengths packed into one row, B = 1: sequence n is tokens
            ``cu_seqlens[n]:cu_seqlens[n + 1]``, none of them empty. The state has N rows.
        slots : integers [N], optional
            The row of `state`, a pool of any size, that belongs to each sequence; all different.
        last : bool
            Returns logits after each sequence's last token only.
        hidden : bool
            Returns the head's input, LN(x; ln_out), in place of logits. On a GPU a token is then read as a prompt.
            `head` makes logits of as many of its rows at a time as there is memory for.

        Returns
        -------
        logits : float32 [B, T, V], or [N, V] with `last`; with `hidden` D for V
        state : State

        Raises
        ------
        ContractError
            Tokens are outside the vocabulary, or the state, bounds or slots do not fit; the state is unchanged then.
        """
        ids = self.checked(tokens)
        sequences = self.sequences(ids, cu_seqlens, slots)
        if state is None and slots is not None:
            self.version.refuse("slots needs a state to be rows of")
        if state is not None:
            state = self.updatable(state, sequences)
        elif self.layers.makes_states and not sequences.one_token_each:
            state = State.without_arrays(self.version.number)
        else:
            state = self.initial_state(len(sequences.first_tokens))
        compute = self.layers.hidden if hidden else self.layers.logits
        logits = compute(ids.ravel(), state, sequences, last)
        return (logits if last else logits.reshape(*ids.shape, -1)), state

    def head(self, hidden: Result) -> Result:
        """The logits, float32 [..., V], of rows of ``forward(tokens, hidden=True)``, [..., D], on the model's device.

        Example
        -------
        >>> from linattn_np.models import RWKV6
        >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
        >>> hidden, _ = model.forward([list(b"Captain Wentworth")], hidden=True)
        >>> bytes(model.head(row).argmax() for row in hidden[0, -6:-1])  # one token's logits at a time
        b'worth'
        """
        D, Array = self.sizes["D"], self.layers.Array
        if not isinstance(hidden, Array) or hidden.dtype != np.float32 or hidden.shape[-1:] != (D,) or not hidden.size:
            what = f"{hidden.dtype} {hidden.shape}" if isinstance(hidden, Array) else f"a {type(hidden).__name__}"
            self.version.refuse(f"hidden is {what}, expected rows of what forward(..., hidden=True) gives, [..., {D}]")
        with self.turn():
            rows = hidden.reshape(-1, D).astype(np.float32, "C", copy=False)
            return self.layers.head(rows).reshape(*hidden.shape[:-1], -1)

    def warm_up(self, batches: Integers = (1,), prompt: int = 64) -> None:
        """Runs a prompt and steps on token 0, so that kernels and libraries are loaded before a server's first call.

        batches : the numbers of sequences for which a step is run
        prompt : the number of tokens of the prompt; 0 for no prompt

        Example
        -------
        >>> from linattn_np.models import RWKV6
        >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
        >>> model.warm_up(batches=(1, 8))
        """
        owner = self.version.owner
        batches = [checked_int(owner, "warm_up's batch", batch, 1) for batch in batches]
        if prompt := checked_int(owner, "warm_up's prompt", prompt, 0):
            self.forward(np.zeros((1, prompt), np.int64), last=True)
        for batch in batches:
            self.forward(np.zeros((batch, 1), np.int64))

    def generate(self, prompt: bytes | Integers, *, seed: Any = None, **options: Any) -> Iterator[int]:
        """Yields tokens that continue `prompt` (host integers [T]), without end.

        The prompt is read `prompt_reading.PIECE` tokens at a time, which bounds the memory that it takes.

        `seed` and `options` are the fields of `Sampling`: temperature, top_p, top_k, penalties.

        Example
        -------
        >>> from itertools import islice
        >>> from linattn_np.models import RWKV6
        >>> model = RWKV6.from_file("examples/data/austen-x060/model.safetensors")
        >>> bytes(islice(model.generate(b"Captain Went", temperature=0), 5))
        b'worth'
        """
        sampler = Sampling(seed=seed, **options).sampler()
        prompt = list(prompt)
        self.checked([prompt])
        return self.stream(prompt, sampler)

    def stream(self, prompt, sampler):
        """The generator of `generate`, which has checked the prompt before the first token is asked for."""
        rest, state = read(self, prompt)  # rest: the prompt's last tokens, which the state does not contain yet
        tokens = [rest]
        while True:
            logits, state = self.forward(tokens, state, last=True)
            token = sampler(self.to_host(logits)[0])
            yield token
            tokens = [[token]]

    def turn(self):
        """A context manager for work on arrays of the model's device, which other threads or streams may use, too.

        On the GPU one thread at a time can be in it, and its stream first waits for the work that other threads have
        enqueued in theirs. All other methods enter it by themselves, or those of `layers` that they call do: so several
        threads may call them.
        """
        return self.layers.turn()

    def to_host(self, array):
        """An array of the model's device, such as logits, as a NumPy array; waits until it is computed."""
        with self.turn():
            pass  # the current stream now waits for the one that computes `array`
        return on_host(array)

    def on_device(self, state: State, rows: int | None = None) -> State:
        """`state` on this device, in this `state_dtype`; its sizes must be the model's, with `rows` rows if given."""
        # wkv=None: of any dtype that a state may have
        check_state(state, self.state_sizes(rows), wkv=None, refuse=self.version.refuse)
        self.version.check_number(state.version, "state")
        with self.turn():
            wkv = state.wkv.astype(self.layers.state_dtype, copy=False)
            arrays = map(self.layers.asarray, (state.att_shift, wkv, state.ffn_shift))
            return State(*arrays, version=self.version.number)

    # -- checks ------------------------------------------------------------------------------------------------------
    def checked(self, tokens):
        """`tokens` as int64 [B, T] on the host, after checking that each is within the vocabulary."""
        try:
            ids = array_on_host("tokens", tokens, self.version.refuse)
        except ContractError:  # a ValueError, too, but it says what is wrong
            raise
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

    def sequences(self, tokens, cu_seqlens, slots) -> CallSequences:
        """The `CallSequences` of `forward`'s arguments, after checking `cu_seqlens` and that slots are different."""
        B, T = tokens.shape
        if cu_seqlens is None:
            bounds = np.arange(B + 1) * T
        else:
            if B != 1:
                self.version.refuse(f"cu_seqlens packs all prompts into one row, so B must be 1, got B={B}")
            try:
                bounds = varlen.parse(cu_seqlens, T).bounds
            except ValueError as error:
                self.version.refuse(f"cu_seqlens {error}")
            if (bounds[1:] == bounds[:-1]).any():
                self.version.refuse(f"cu_seqlens has an empty prompt at index {int(np.argmin(np.diff(bounds)))}")
        if slots is None:
            return CallSequences(bounds, None)
        slots = array_on_host("slots", slots, self.version.refuse)
        if slots.shape != (len(bounds) - 1,) or slots.dtype.kind not in "iu":
            self.version.refuse(f"slots is {slots.shape} {slots.dtype}, expected integers [N] = ({len(bounds) - 1},)")
        if len(set(slots.tolist())) < len(slots):
            self.version.refuse("slots names a row twice; two sequences cannot update one state")
        return CallSequences(bounds, slots.astype(np.int64))

    def updatable(self, state, sequences):
        """`state`, after checking its sizes, its device, that it is writable and has the rows of the call."""
        check_state(
            state,
            self.state_sizes(len(sequences.first_tokens) if sequences.slots is None else None),
            (self.layers.Array,),
            self.layers.state_dtype,
            self.version.refuse,
        )
        self.version.check_number(state.version, "state")
        for name in STATE:
            if not getattr(getattr(state, name).flags, "writeable", True):
                self.version.refuse(f"state.{name} is read-only, expected an array to update: `copy` gives one")
        P = state.wkv.shape[1]
        slots = sequences.slots
        if slots is not None and not (0 <= slots.min() and slots.max() < P):
            self.version.refuse(f"slots runs from {slots.min()} to {slots.max()}, but the state has {P} rows")
        return state

    def state_sizes(self, rows):
        """{axis: size} of the model's states; without the axis of rows, "B", if `rows` is None."""
        return {axis: self.sizes[axis] for axis in "LDHN"} | ({} if rows is None else {"B": rows})


def byte_counter(weights, progress):
    """A function that must be called with each array once it is loaded; it calls progress(bytes so far, all bytes).

    Norms' eps and an activation's name, which may be among the weights, are not loaded as arrays.
    """
    not_loaded = (NORM_EPS_NAME, HIDDEN_ACT_NAME)
    done, total = 0, sum(array.nbytes for name, array in weights.items() if name not in not_loaded)

    def loaded(array):
        nonlocal done
        done += array.nbytes
        progress(done, total)

    return loaded
