"""Decodes one token of an RWKV model for B sequences on the GPU, nearly as fast as memory delivers the weights.

With up to eight sequences a step reads each weight once and multiplies it by float32 vectors. With more than eight, or
on Hopper more than 256 (int8: 128), cuBLAS computes the products. All arrays of a step are allocated in advance, and a
step does not synchronise, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np

from ...array_kinds import BFLOAT16
from ...backends.cupy import model_products
from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.execute import CompiledPlan
from ...backends.cupy.kernel import INT8
from ...backends.cupy.model_products import ADD, PARTS, RELU_SQUARED, WRITE
from ...backends.cupy.plan import Array, Draft, Plan, caller_array, ceil_div, describe_parts
from ...errors import ContractTypeError, NotSupported
from ..devices import NotCopied
from . import names
from .cuda_prompts import Pieces
from .cuda_weights import FLOAT32, SCALES, apart, array_of, first_of, stacked, widened
from .state import DTYPES as STATE_DTYPES
from .state import STATE, State, check_state, shapes_and_dtypes
from .version import Version

INT64 = np.dtype(np.int64)
DTYPES = (FLOAT32, np.dtype(np.float16), BFLOAT16, INT8)


class CudaDecoder(NotCopied):
    """Decodes token after token on the current CUDA device, by the equations of an RWKV version's model.

    A decoder must be used by one caller at a time, on one stream.

    Matrices are kept in `dtype`; norms, mixes, decay and bonus in float32. Sums, and numbers that one kernel writes for
    the next, are float32. With more than eight sequences the vectors of a product are rounded to `dtype` (int8: to
    bfloat16). An int8 matrix has a scale for every row; with more than 128 sequences the scaled rows are rounded to
    bfloat16. Beside int8 matrices the embedding and the second matrices of low rank are bfloat16.

    Parameters
    ----------
    weights : mapping from official names to arrays, on the host or on the device
    dtype : float32, float16, bfloat16 or int8
        The dtype of the matrices on the device.
    batch : int
        B, the number of sequences that every step advances.
    device
        The device that allocates and launches; the current CUDA device by default.
    loaded : function of an array of `weights`
        Called with each array once it has been copied to the device.
    state_dtype : float32, bfloat16 or float16
        The dtype to which the recurrent state is rounded after every token.

    Raises
    ------
    ContractError
        A parameter that the version refuses; D or F that is no multiple of 8, or of 16 with int8; sizes beyond the
        kernels' limits.
    NotSupported
        int8 on a card other than Hopper.

    Example
    -------
    >>> decoder = CudaDecoder(weights, np.float16)                          # doctest: +SKIP
    >>> tokens, state = cupy.array([510]), decoder.initial_state()          # doctest: +SKIP
    >>> decoder.capture(tokens, state, greedy=True)                         # doctest: +SKIP
    >>> for _ in range(100):                                                # doctest: +SKIP
    ...     decoder.replay()
    """

    version: ClassVar[Version]  # the RWKV version
    most: ClassVar[dict[str, int]]  # axis -> the largest size for which registers and shared memory suffice
    drawing: ClassVar[type[Step]]  # makes the plan of a step
    pieces: ClassVar[type[Pieces]]  # makes the plan of a layer for prompts

    def __init__(
        self,
        weights: Mapping,
        dtype,
        batch: int = 1,
        device=None,
        loaded=lambda array: None,
        state_dtype=FLOAT32,
    ):
        self.device = device = device or current_device()
        version, (weights, sizes) = self.version, names.parameters(self.version, weights)
        self.matrices = version.checked_dtype(dtype, DTYPES)
        self.state_dtype = version.checked_dtype(state_dtype, STATE_DTYPES, " for the state")
        self.dtype = (
            BFLOAT16 if self.matrices == INT8 else self.matrices
        )  # of embeddings, and of vectors in products that round them
        if self.matrices == INT8 and device.capability != 90:
            raise NotSupported(f"{version.owner}: dtype int8 on the GPU needs a Hopper card (compute capability 9.0)")
        self.sizes = fitting(version, sizes, self.matrices, self.most)
        self.layer_eps, self.group_eps = version.norm_eps(weights)
        load = partial(stacked, device, version, weights, loaded)
        self.whole = apart(version.model_arrays(lambda *weight: first_of(array_of(load, self.matrices, *weight))))
        self.all_layers = apart(
            version.layer_arrays("", partial(array_of, partial(load, blocks=sizes["L"]), self.matrices))
        )
        self.layers = [
            SimpleNamespace(**{name: array[i] for name, array in vars(self.all_layers).items()})
            for i in range(sizes["L"])
        ]
        self.make_room(batch)
        self.bound, self.launches, self.graph = None, (), None

    def resized(self, batch: int) -> CudaDecoder:
        """A decoder of `batch` sequences with the same weights."""
        other = self.beside()
        other.make_room(batch)
        return other

    def beside(self) -> CudaDecoder:
        """A decoder with the same weights and buffers, but launches and a graph of its own, for another state."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.bound, other.launches, other.graph = None, (), None
        return other

    def make_room(self, batch):
        """Allocates the arrays of a step for `batch` sequences and chooses how products are computed."""
        self.batch, self.kernel = batch, self.kernel_of_layers(batch)
        few = batch <= model_products.Matvec.COLUMNS
        widens_int8 = self.matrices == INT8 and batch > model_products.BatchProduct.MOST
        on_tensors = self.device.capability == 90 and self.matrices in model_products.BatchProduct.DTYPES
        self.split = few and not self.kernel and on_tensors
        self.by_rows = few and not self.split
        terms = model_products.FLOAT_TERMS if self.split else 1
        X = FLOAT32 if self.by_rows else self.dtype  # the dtype of vectors in products
        B, (D, F, V), buffer = batch, (self.sizes[axis] for axis in "DFV"), self.buffer
        self.buffers = SimpleNamespace(
            x=buffer(1, B, D),
            y=buffer(terms, 1, B, D, dtype=X),
            activated=buffer(terms, 1, B, F, dtype=X),
            hidden=None if few else buffer(1, B, F),
            wide=buffer(self.widest(self.whole, self.layers[0]), dtype=self.dtype) if widens_int8 else None,
            added=buffer(1 if self.by_rows else kernels.NormShift.PARTS_AT_MOST[-1], 1, B, D),
            normed=buffer(terms, 1, B, D, dtype=X),
            logits=buffer(1, B, V),
        )
        vars(self.buffers).update(self.own_room(terms, X))

    @staticmethod
    def widest(*weights) -> int:
        """The number of elements of the largest int8 matrix in `weights`; int8 matrices are those that have scales."""
        return max(getattr(of, name.removesuffix(SCALES)).size for of in weights for name in vars(of) if SCALES in name)

    def buffer(self, *shape, dtype=FLOAT32):
        return self.device.empty(shape, dtype)

    def own_room(self, terms, X) -> dict:
        """The further buffers of a version. A vector in products is the sum of `terms` vectors of dtype X."""
        raise NotImplementedError

    def kernel_of_layers(self, batch) -> tuple | None:
        """(the kernel that computes all layers in one launch, bytes of its stages), or None if there is none."""

    @property
    def logits(self):
        """The logits of the latest step, [B, V] float32."""
        return self.buffers.logits[0]

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads: B rows of the embedding, and all other weights."""
        arrays = [*vars(self.whole).values(), *vars(self.all_layers).values()]
        return (
            sum(array.nbytes for array in arrays) - (self.sizes["V"] - self.batch) * self.whole.embedding[0, 0].nbytes
        )

    def initial_state(self, rows: int | None = None) -> State:
        """The state before the first token, with `rows` rows for a pool; by default one row per sequence."""
        return State.made(self.device.zeros, self.sizes, self.batch if rows is None else rows, self.state_dtype)

    def step(self, tokens, state: State, slots=None, greedy: bool = False):
        """Enqueues a step on the current stream; returns ``logits`` [B, V]. `state` is updated in place.

        tokens : int64 [B] on the device, each below V; with `greedy` they are replaced by the most likely next tokens.
        state : P rows on the device, contiguous, float32 except for `wkv`, which has `state_dtype`.
        slots : int64 [B] on the device, all different, or None
            The row of the state that belongs to each sequence; without slots P = B and sequence b has row b.

        The result is the decoder's own buffer, which the next step overwrites. ContractError for arrays of
        another shape or dtype; the values of tokens and slots are not checked.
        """
        for launch in self.bind(tokens, state, slots, greedy):
            launch()
        return self.logits

    def capture(self, tokens, state: State, slots=None, greedy: bool = False):
        """Captures `step` in a CUDA graph for `replay`, without running it; returns the buffer of `logits`.

        Every replay reads and writes these very arrays: keep them, and write new values into them.
        """
        import cupy

        zeros = self.device.zeros
        one_layer_state = State.made(zeros, self.sizes | {"L": 1}, self.batch, self.state_dtype)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:  # loads libraries and kernels, which a capture cannot; one layer needs all of them
            for launch in self.launches_of(zeros((self.batch,), INT64), one_layer_state, None, greedy, 1):
                launch()
            stream.synchronize()
            stream.begin_capture()
            self.step(tokens, state, slots, greedy)
            self.graph = stream.end_capture()
        return self.logits

    def replay(self):
        """Runs the captured step on the current stream."""
        self.graph.launch()
        return self.logits

    def bind(self, tokens, state, slots, greedy):
        """The launches of a step on these arrays; those of the last call if all addresses are the same."""
        key = greedy, self.place(tokens, *state.arrays, *(() if slots is None else (slots,)))
        if key != self.bound:
            self.check(tokens, state, slots)
            self.launches = self.launches_of(tokens, state, slots, greedy, self.sizes["L"])
            self.bound = key
        return self.launches

    def place(self, *arrays):
        """Address, shape and strides of each array, on which alone launches depend."""
        return tuple([(self.device.pointer(array), array.shape, array.strides) for array in arrays])

    def launches_of(self, tokens, state, slots, greedy, layers) -> list:
        """Functions, one per launch, that enqueue a step through the first `layers` layers on these arrays."""
        plan, arrays = self.plan_of(tokens, state, slots, greedy, layers)
        return [partial(command, None) for command in CompiledPlan(plan, self.device).commands(arrays)]

    def plan_of(self, tokens, state, slots, greedy, layers) -> tuple[Plan, list]:
        """The plan of a step, and the arrays that its launches take."""
        seen, given, arrays = describe_parts(
            self.device,
            model=vars(self.whole),
            layers=vars(self.all_layers),
            buffers=vars(self.buffers),
            state=vars(state),
            call={"tokens": tokens, "slots": slots},
        )
        return Plan((), self.drawing(self, seen).steps(greedy, layers), None, given=given), arrays

    def compile(self):
        """Starts to compile the kernels of a step in the background."""
        parts = shapes_and_dtypes(self.sizes | {"L": 1}, 1, self.state_dtype)
        state = State(**{name: caller_array(name, *how) for name, how in parts.items()})
        plan, _ = self.plan_of(caller_array("tokens", (self.batch,), INT64), state, None, False, 1)
        self.device.compile(plan.kernels)

    def check(self, tokens, state, slots):
        B = self.batch
        rows = {} if slots is not None else {"B": B}
        check_state(state, {axis: self.sizes[axis] for axis in "LDHN"} | rows, wkv=self.state_dtype)
        for name, array in (("tokens", tokens), ("slots", slots)):
            if array is not None and array.dtype != INT64:
                self.version.refuse(f"{name} has dtype {array.dtype}, expected {INT64}", ContractTypeError)
            if array is not None and array.shape != (B,):
                self.version.refuse(f"{name} is {array.shape}, expected contiguous {(B,)}")
        states = {f"state.{name}": getattr(state, name) for name in STATE}
        for name, array in {"tokens": tokens, "slots": slots, **states}.items():
            if array is not None and not array.flags.c_contiguous:
                self.version.refuse(f"{name} is {array.shape}, not contiguous, expected contiguous {array.shape}")


class Step:
    """Makes the plan of a decoding step; `seen`: the descriptions of the decoder's and the caller's arrays."""

    def __init__(self, decoder, seen):
        self.my, self.device = decoder, decoder.device
        self.draft = Draft(**decoder.sizes, B=decoder.batch, tokens=decoder.batch)
        self.model, self.layers, self.buffers, self.state = seen.model, seen.layers, seen.buffers, seen.state
        self.tokens, self.slots = seen.call.tokens, seen.call.slots
        self.gate = getattr(self.buffers, "gate", None)  # the channel mix's gate, in versions that have one

    def steps(self, greedy, layers) -> tuple:
        """The steps of the plan, in order."""
        my, buffers = self.my, self.buffers
        norm = self.model.ln0
        kernels.ChosenNorm.launch(self.draft, self.tokens, self.model.embedding, norm, buffers.x, my.layer_eps)
        if my.kernel:
            self.all_at_once(layers, greedy)
        else:
            self.every_product(layers)
        if greedy and not my.kernel:
            self.draft.launch(kernels.Argmax(), my.batch, logits=buffers.logits, tokens=self.tokens)
        return tuple(self.draft.steps)

    def every_product(self, layers):
        """Adds the steps of all layers and the head, each product by a kernel of its own."""
        buffers, added = self.buffers, None  # the previous layer's product that the next norm adds to x
        for i in range(layers):
            layer = SimpleNamespace(**{name: array[i] for name, array in vars(self.layers).items()})
            added = self.time_mix(layer, self.state.att_shift[i], self.state.wkv[i], added)
            added = self.channel_mix(layer, self.state.ffn_shift[i], added)
        self.norm_shift(self.model.ln_out, buffers.normed, added=added, squares=True)
        self.matmul(self.model, ("head", buffers.normed, buffers.logits, WRITE))

    # -- what a version defines --------------------------------------------------------------------------------------
    def time_mix(self, layer, shift, wkv, added) -> Array | None:
        """Adds the steps of a time mix; returns what the next norm must add to the residual x, or None.

        `added` is the same of the previous mix: the first norm here adds it to x.
        """
        raise NotImplementedError

    def channel_mix(self, layer, shift, added) -> Array | None:
        """As `time_mix`, for the channel mix."""
        raise NotImplementedError

    def all_at_once(self, layers, greedy):
        """Adds the launch of `kernel_of_layers`: all layers, the head and, if `greedy`, the most likely token."""
        raise NotImplementedError

    # -- products and norms ------------------------------------------------------------------------------------------
    def in_parts(self, layer, most, *named, early=False) -> int:
        """Adds products (name of w [C, M, K], x [terms, C, B, K], y [P, C, B, M]); returns their number of parts.

        Each product is the sum of the first so many of the P parts of y; the kernel that reads y adds up to `most`.
        `early`: see `BatchProduct.fitting`.
        """
        matrices, (_, _, B, K) = [getattr(layer, name) for name, *_ in named], named[0][1].shape
        kernel = self.batch_product(matrices, B, K, early) if most > 1 else None
        if kernel and kernel.SPLIT <= most:
            products = [(*matrix_of(layer, name), x, y[: kernel.SPLIT], PARTS) for name, x, y in named]
            kernel.launch(self.draft, products, B, K)
            return kernel.SPLIT
        self.matmul(layer, *((name, x, y[0], WRITE) for name, x, y in named), early=early)
        return 1

    def addend(self, layer, name, vectors, x=None) -> Array | None:
        """Adds a product that changes the residual x.

        Returns its parts [P, B, D], which the next norm must add to x; or None if the product itself adds to `x`.
        """
        w, (_, _, B, K) = getattr(layer, name), vectors.shape
        found = None if self.my.by_rows else self.product_of_batch([w], B, K, in_parts=True)
        if found:
            launch, parts = found
            added = self.buffers.added[:parts]
            launch(self.draft, [(*matrix_of(layer, name), vectors, added, PARTS)], B, K)
            return added[:, 0]
        added = self.buffers.added[0]
        self.matmul(layer, (name, vectors, *((added, WRITE) if x is None else (x, ADD))))
        return added if x is None else None

    def norm_shift(self, norm, mixed, maa=None, shift=None, added=None, squares=False, xx=None):
        """Adds the kernel that adds `added` to x, normalises x and mixes it with the previous token's by shares `maa`.

        `squares`: whether `added` is the channel mix's product, which is multiplied by that mix's gate, if there is
        one.
        """
        buffers, (terms, C, B, D) = self.buffers, mixed.shape
        parts = 0 if added is None else added.shape[0]
        self.draft.launch(
            kernels.NormShift.fitting(mixed.dtype, D, C, parts, terms),
            B,
            x=buffers.x,
            value=added,
            gate=self.gate if squares and parts else None,
            **kernels.affine(norm),
            maa=maa,
            shift=shift,
            slots=self.slots,
            xx=xx,
            d=None if xx is None else buffers.d,
            mixed=mixed,
            C=C,
            P=parts,
            squares=squares,
            eps=self.my.layer_eps,
        )

    def matmul(self, weights, *named, early=False):
        """Adds products (name of w [C, M, K], x [terms, C, B, K], y [C, B, M], finish) with the same B and K.

        finish: WRITE to y, ADD to y, or RELU_SQUARED (write the squared ReLU). early: see
        `BatchProduct.fitting`.
        """
        products = [(*matrix_of(weights, name), *product) for name, *product in named]
        *_, B, K = named[0][1].shape
        if self.my.by_rows:
            self.by_rows(products, K)
        elif found := self.product_of_batch([w for w, *_ in products], B, K, early=early):
            launch, _ = found
            launch(self.draft, products, B, K)
        elif len(named) > 1:
            for product in named:
                self.matmul(weights, product)
        else:
            self.by_library(*products[0])

    def product_of_batch(self, matrices, B, K, in_parts=False, early=False) -> tuple | None:
        """What launches products with these matrices on one of Hopper's kernels, and their number of parts where they
        have PARTS (only WideProduct asks whether they do, `in_parts`). None on other cards, or if cuBLAS is faster."""
        my, rows = self.my, [w.shape[:2] for w in matrices]
        if wide := model_products.WideProduct.fitting(my.matrices, B, K, rows, in_parts, my.device, early):
            kernel, parts = wide
            return partial(kernel.launch, parts=parts), parts
        kernel = self.batch_product(matrices, B, K, early)
        return kernel and (kernel.launch, kernel.SPLIT)

    def batch_product(self, matrices, B, K, early=False):
        rows = [w.shape[:2] for w in matrices]
        return model_products.BatchProduct.fitting(self.my.matrices, B, K, rows, self.my.device, early)

    def by_rows(self, products, K):
        """Adds one launch of the matrix-vector kernel, for all matrices of all products."""
        entries = [
            {"w": w, "x": x, "y": y, "M": w.shape[0], "finish": finish}
            for stack, _, vectors, sums, finish in products
            for w, x, y in zip(stack, vectors[0], sums)
        ]
        no_entry = {"w": None, "x": None, "y": None, "M": 0, "finish": WRITE}
        blocks = sum(w.shape[0] * ceil_div(w.shape[1], model_products.Matvec.ROWS) for w, *_ in products)
        self.draft.launch(
            model_products.Matvec.fitting(self.my.dtype, blocks, self.my.device),
            blocks,
            products=entries + [no_entry] * (model_products.PRODUCTS - len(entries)),
            K=K,
        )

    def by_library(self, w, scales, x, y, finish):
        """Adds a product by cuBLAS; int8 matrices are first scaled to `dtype`."""
        if scales is not None:
            w = widened(self.draft, w, scales, self.buffers.wide, self.my.dtype)
        product = self.buffers.hidden if finish == RELU_SQUARED else y
        self.draft.product(w, x[0], product, finish == ADD)
        if finish == RELU_SQUARED:
            kernel = kernels.Activation("ReluSquared", product.dtype, y.dtype)
            self.draft.launch(kernel, kernel.blocks(y.size), x=product, y=y, count=y.size)


def matrix_of(weights, name) -> tuple:
    """(a matrix, its int8 scales or None)."""
    return getattr(weights, name), getattr(weights, f"{name}{SCALES}", None)


def fitting(version, sizes, dtype, limits):
    """Returns `sizes`; refuses sizes that the kernels do not support."""
    multiple = 16 if dtype == INT8 else 8
    for axis in "DF":
        if sizes[axis] % multiple:
            version.refuse(
                f"{axis} is {sizes[axis]}, expected a multiple of {multiple} on the GPU"
                + " with int8" * (multiple == 16)
            )
    if sizes["N"] % 4:
        version.refuse(f"N is {sizes['N']}, expected a multiple of 4 on the GPU")
    for axis, most in limits.items():
        if sizes[axis] > most:
            version.refuse(f"{axis} is {sizes[axis]}, expected at most {most} on the GPU")
    return sizes


def current_device():
    from ...backends.cupy.device import best_device

    return best_device()
