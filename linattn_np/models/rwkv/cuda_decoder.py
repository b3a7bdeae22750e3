"""Decodes one token of an RWKV model for B sequences on the GPU, nearly as fast as memory delivers the weights.

With up to eight sequences a step reads each weight once and multiplies it by float32 vectors. cuBLAS computes the
products of more than eight sequences; on Hopper, but for float32, `BatchProduct` and `WideProduct` do up to 256 (int8:
128) where they are faster. All arrays of a step are allocated in advance, and a step does not synchronise, so that it
can be captured in a CUDA graph.

Sizes: L layers, D channels, F channels of the channel mix, H heads of N channels, V tokens of the vocabulary. Terms:

    product     y = x w^T of a stack w [C, M, K] of C matrices with vectors x [terms, C, B, K]
    X, terms    a vector of a product is the sum of `terms` arrays of dtype X
    parts       arrays whose sum is a product: a kernel may divide the K columns among blocks. P is the number of
                parts; in the shape of a state's array P is the number of rows
    added       the parts [P, B, D] of a mix's product, which the next norm adds to the residual x
    pool        states with more rows than sequences
    draft       the plan that is being written: the launches of a step in their order; "adds" means to this plan
    fitting     (of a kernel's class) the best instance of its template for the arguments, or None if there is none
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
from ...backends.cupy.arithmetic import ceil_div
from ...backends.cupy.execute import CompiledPlan, describe_parts
from ...backends.cupy.kernel import INT8
from ...backends.cupy.model_products import ADD, PARTS, RELU_SQUARED, WRITE
from ...backends.cupy.plan import Array, Draft, Plan, caller_array
from ...errors import ContractTypeError, NotSupported
from ..devices import NotCopied
from . import names
from .cuda_prompts import MixOperations
from .cuda_weights import FLOAT32, SCALES, WeightCopies, entries, widened
from .state import DTYPES as STATE_DTYPES
from .state import STATE, State, check_state, shapes_and_dtypes
from .version import SQRELU, Version, hidden_act

INT64, UINT32 = np.dtype(np.int64), np.dtype(np.uint32)
PHASE_BLOCKS = 16  # blocks that compute a phase of the kernel of all layers, where each phase is a launch of its own
DTYPES = (FLOAT32, np.dtype(np.float16), BFLOAT16, INT8)  # of matrices
HOPPER = 90  # the compute capability, times ten, of Hopper cards


class CudaDecoder(NotCopied):
    """Decodes token after token on the current CUDA device, by the equations of an RWKV version's model.

    A decoder must be used by one caller at a time, on one stream.

    Matrices are kept in `dtype`; norms, mixes, decay and bonus in float32. Sums, and numbers that one kernel writes for
    the next, are float32. With more than eight sequences the vectors of a product are rounded to `dtype` (int8: to
    bfloat16). An int8 matrix has a scale for every row; with more than 128 sequences the scaled rows are rounded to
    bfloat16. Beside int8 matrices the embedding and the second matrices of low rank are bfloat16.

    weights : mapping from official names to arrays, on the host or on the device
    dtype : of the matrices on the device: float32, float16, bfloat16, or int8 on Hopper cards
    batch : B, the number of sequences that every step advances
    device : the device that allocates and launches; the current CUDA device by default
    loaded : a function that is called with each array of `weights` once it has been copied to the device
    state_dtype : float32, bfloat16 or float16, to which the recurrent state is rounded after every token

    ContractError for a parameter that the version refuses, for D or F that is no multiple of 8, or of 16 with int8, and
    for sizes beyond the kernels' limits; NotSupported for int8 on other cards.
    """

    # Each version sets these, and defines the methods that raise NotImplementedError.
    version: ClassVar[Version]
    size_limits: ClassVar[dict[str, int]]  # axis -> the largest size that the kernels' registers and memory can hold
    step_limits: ClassVar[dict[str, int]] = {}  # axis -> the largest size that the kernels of steps can, if it is less
    default_sizes: ClassVar[dict[str, int]] = {}  # axis -> the size that kernels take where no parameter has the axis
    step_class: ClassVar[type[DecodingStep]]  # makes the plan of a step
    operations: ClassVar[type[MixOperations]]  # makes the plan of a layer for prompts
    one_launch: ClassVar[type[kernels.DecodeFew]]  # the kernel that computes all layers of one sequence on Hopper

    def __init__(
        self, weights: Mapping, dtype, batch: int = 1, device=None, loaded=lambda array: None, state_dtype=FLOAT32
    ):
        self.device = device = device or current_device()
        version, (weights, sizes) = self.version, names.parameters(self.version, weights)
        self.matrix_dtype = version.checked_dtype(dtype, DTYPES)
        self.state_dtype = version.checked_dtype(state_dtype, STATE_DTYPES, " for the state")
        # the dtype of embeddings, and of vectors in products that round them
        self.dtype = BFLOAT16 if self.matrix_dtype == INT8 else self.matrix_dtype
        if self.matrix_dtype == INT8 and device.capability != HOPPER:
            raise NotSupported(f"{version.owner}: dtype int8 on the GPU needs a Hopper card (compute capability 9.0)")
        self.sizes = checked_sizes(version, self.default_sizes | sizes, self.matrix_dtype, self.size_limits)
        self.layer_eps, self.group_eps = version.norm_eps(weights)
        self.hidden_act = hidden_act(weights)
        if self.hidden_act != SQRELU and self.dtype == np.float16:
            version.refuse(f"dtype is float16, expected bfloat16 or float32 beside hidden_act {self.hidden_act!r}")
        small = all(self.sizes[axis] <= most for axis, most in self.step_limits.items())
        # whether kernels of steps compute the model; else its tokens are read as prompts
        self.has_steps = small and self.hidden_act == SQRELU
        copies = WeightCopies(device, version, weights, loaded, self.matrix_dtype)
        self.model_weights, self.all_layers = copies.of_model(), copies.of_all_layers(sizes["L"])
        self.layers = [entries(self.all_layers, i) for i in range(sizes["L"])]
        self.allocate_buffers(batch)
        self.bound_key, self.launches, self.graph = None, (), None  # of the latest `bind`, and of `capture`

    def resized(self, batch: int) -> CudaDecoder:
        """A decoder of `batch` sequences with the same weights."""
        other = self.with_own_graph()
        other.allocate_buffers(batch)
        return other

    def with_own_graph(self) -> CudaDecoder:
        """A decoder with the same weights and buffers, and with launches and a graph of its own, for another state."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.bound_key, other.launches, other.graph = None, (), None
        return other

    def allocate_buffers(self, batch):
        """Allocates the arrays of a step for `batch` sequences."""
        self.batch = batch
        terms, X = self.choose_products()
        uses_cublas = batch > model_products.Matvec.COLUMNS
        widens_int8 = self.matrix_dtype == INT8 and batch > model_products.BatchProduct.MOST  # for cuBLAS
        B, (D, F, V), buffer = batch, (self.sizes[axis] for axis in "DFV"), self.buffer
        self.buffers = SimpleNamespace(
            x=buffer(1, B, D),  # the residual
            sum=buffer(1, B, D),  # its next value, by turns with x
            y=buffer(terms, 1, B, D, dtype=X),  # the time mix's, the input of `output`
            activated=buffer(terms, 1, B, F, dtype=X),  # the channel mix's, the input of `ffn_value`
            # cuBLAS's product, of which `activated` is the squared relu
            hidden=buffer(1, B, F) if uses_cublas else None,
            # one int8 matrix at a time, scaled
            wide=buffer(self.widest(self.model_weights, self.layers[0]), dtype=self.dtype) if widens_int8 else None,
            # as many parts as the norm can add
            added=buffer(1 if self.by_rows else kernels.NormShift.PARTS_AT_MOST[-1], 1, B, D),
            normed=buffer(terms, 1, B, D, dtype=X),  # the head's input
            logits=buffer(1, B, V),
        )
        vars(self.buffers).update(self.version_buffers(terms, X))

    def choose_products(self) -> tuple[int, np.dtype]:
        """Chooses how the products of a step are computed: sets `kernel` and `by_rows`, and returns (terms, X), the
        form of their vectors.

        kernel : (the instance of `one_launch`, bytes of shared memory for it besides its own); None if there is no such
            instance: then each product has a kernel of its own
        by_rows : whether `Matvec`, or the kernel of all layers, computes the products, from float32 vectors
        """
        on_hopper = self.device.capability == HOPPER
        dtypes, is_one = (self.matrix_dtype, self.state_dtype), self.batch == 1
        self.kernel = self.one_launch.fitting(*dtypes, self.sizes, self.device) if is_one and on_hopper else None
        few = self.batch <= model_products.Matvec.COLUMNS
        has_batch_product = on_hopper and self.matrix_dtype in model_products.BatchProduct.DTYPES
        in_terms = few and not self.kernel and has_batch_product  # `BatchProduct` takes float32 vectors as terms
        self.by_rows = few and not in_terms
        return model_products.FLOAT_TERMS if in_terms else 1, FLOAT32 if self.by_rows else self.dtype

    @staticmethod
    def widest(*weights) -> int:
        """The number of elements of the largest int8 matrix in the namespaces `weights`. Int8 matrices are those that
        have scales."""
        return max(
            getattr(arrays, name.removesuffix(SCALES)).size
            for arrays in weights
            for name in vars(arrays)
            if SCALES in name
        )

    def buffer(self, *shape, dtype=FLOAT32):
        """A new array on the device."""
        return self.device.empty(shape, dtype)

    def version_buffers(self, terms, X) -> dict:
        """The further buffers that a version needs, by name. An input of a product is the sum of `terms` vectors of
        dtype X."""
        raise NotImplementedError

    def word_buffers(self, **shapes) -> dict:
        """The buffers, by argument, through which the blocks of the kernel of all layers exchange numbers: those of
        these shapes and those of every version; none if each product has a kernel of its own. They replace the buffers
        of the same names that other kernels take.

        A number is in a *word*, which also holds its epoch: the count of layers when it was written, over all steps, 0
        at first. A block that wants the number of an epoch loads the word until it is of this epoch.

        xx : the normed x of both mixes, x after each mix, and x after the last layer, whose words have 8 bytes each
        arrived : each block's epoch
        """
        if not self.kernel:
            return {}
        shapes |= {"xx": (6, self.sizes["D"]), "y": (self.sizes["D"],), "activated": (self.sizes["F"],)}
        # as `Handed` in rwkv6/decode_tiles.cuh; a word of 4 bytes holds only the epoch's last bit
        word = INT64 if self.dtype == FLOAT32 else UINT32
        buffers = {name: self.device.zeros(shape, word) for name, shape in shapes.items()}
        blocks = max(self.device.multiprocessors, PHASE_BLOCKS)
        return buffers | {"arrived": self.device.zeros((blocks,), UINT32)}

    @property
    def logits(self):
        """The logits of the latest step, [B, V] float32."""
        return self.buffers.logits[0]

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a step reads: B rows of the embedding, and all other weights."""
        arrays = [*vars(self.model_weights).values(), *vars(self.all_layers).values()]
        unread_rows = self.sizes["V"] - self.batch
        return sum(array.nbytes for array in arrays) - unread_rows * self.model_weights.embedding[0, 0].nbytes

    def initial_state(self, rows: int | None = None) -> State:
        """The state before the first token, with `rows` rows for a pool; by default one row per sequence."""
        return State.made(self.device.zeros, self.sizes, self.batch if rows is None else rows, self.state_dtype)

    def step(self, tokens, state: State, slots=None):
        """Enqueues a step on the current stream; returns ``logits`` [B, V]. `state` is updated in place.

        tokens : int64 [B] on the device, each below V
        state : P rows on the device, contiguous, float32 except for `wkv`, which has `state_dtype`.
        slots : int64 [B] on the device, all different, or None
            The row of the state that belongs to each sequence; without slots P = B and sequence b has row b.

        The result is the decoder's own buffer, which the next step overwrites. ContractError for arrays of
        another shape or dtype; the values of tokens and slots are not checked.
        """
        for launch in self.bind(tokens, state, slots):
            launch()
        return self.logits

    def capture(self, tokens, state: State, slots=None):
        """Captures `step` in a CUDA graph for `replay`, without running it; returns the buffer of `logits`.

        Every replay reads and writes these very arrays: keep them, and write new values into them.
        """
        import cupy

        zeros = self.device.zeros
        one_layer_state = State.made(zeros, self.sizes | {"L": 1}, self.batch, self.state_dtype)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        with stream:  # loads libraries and kernels, which a capture cannot; one layer needs all of them
            for launch in self.launches_of(zeros((self.batch,), INT64), one_layer_state, None, 1):
                launch()
            stream.synchronize()
            stream.begin_capture()
            self.step(tokens, state, slots)
            self.graph = stream.end_capture()
        return self.logits

    def replay(self):
        """Runs the captured step on the current stream."""
        self.graph.launch()
        return self.logits

    def bind(self, tokens, state, slots):
        """The launches of a step on these arrays: those of the last call if all addresses are the same."""
        key = self.addresses_of(tokens, *state.arrays, *(() if slots is None else (slots,)))
        if key != self.bound_key:
            self.check(tokens, state, slots)
            self.launches = self.launches_of(tokens, state, slots, self.sizes["L"])
            self.bound_key = key
        return self.launches

    def addresses_of(self, *arrays):
        """The address, shape and strides of each array. Launches depend on nothing else."""
        return tuple([(self.device.pointer(array), array.shape, array.strides) for array in arrays])

    def launches_of(self, tokens, state, slots, layers) -> list:
        """Functions, one per launch, that enqueue a step through the first `layers` layers on these arrays."""
        plan, arrays = self.plan_of(tokens, state, slots, layers)
        # None in place of arrays, which only copies and fills read: a decoder's plan has neither
        return [partial(command, None) for command in CompiledPlan(plan, self.device).commands(arrays)]

    def plan_of(self, tokens, state, slots, layers) -> tuple[Plan, list]:
        """The plan of a step, and the arrays that its launches take; ContractError unless `has_steps`."""
        if not self.has_steps:
            limits = "".join(f", {axis} up to {most}" for axis, most in self.step_limits.items())
            self.version.refuse(f"no kernel computes a step, expected hidden_act {SQRELU}{limits}: `CudaLayers` does")
        parts, descriptions, arrays = describe_parts(
            self.device,
            model=vars(self.model_weights),
            layers=vars(self.all_layers),
            buffers=vars(self.buffers),
            state={name: getattr(state, name) for name in STATE},
            call={"tokens": tokens, "slots": slots},
        )
        steps = self.step_class(self, parts).steps(layers)
        return Plan(buffers=(), steps=steps, results=None, given=descriptions), arrays

    def compile(self):
        """Starts to compile the kernels of a step in the background."""
        parts = shapes_and_dtypes(self.sizes | {"L": 1}, 1, self.state_dtype)  # one layer has all kernels
        state = State(**{name: caller_array(name, *shape_and_dtype) for name, shape_and_dtype in parts.items()})
        plan, _ = self.plan_of(caller_array("tokens", (self.batch,), INT64), state, None, 1)
        self.device.compile(plan.kernels)

    def check(self, tokens, state, slots):
        """ContractError or ContractTypeError for arguments of `step` with a wrong shape, dtype or strides."""
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


class DecodingStep:
    """Makes the plan of a decoding step.

    arrays : namespaces of `plan.Array`: the weights `model` and `layers`, `buffers`, `state`, and `call` (tokens,
    slots)
    """

    def __init__(self, decoder, arrays):
        self.decoder, self.device = decoder, decoder.device
        self.draft = Draft(**decoder.sizes, B=decoder.batch, tokens=decoder.batch)
        self.model, self.layers, self.buffers, self.state = arrays.model, arrays.layers, arrays.buffers, arrays.state
        self.tokens, self.slots = arrays.call.tokens, arrays.call.slots
        self.x, self.sum = self.buffers.x, self.buffers.sum  # the residual, and the array for its next sum
        self.gate = getattr(self.buffers, "gate", None)  # the channel mix's gate, in versions that have one

    def steps(self, layers) -> tuple:
        """The steps of the plan, in order."""
        model, decoder = self.model, self.decoder
        # x = the layer norms of the tokens' rows of the embedding
        kernels.ChosenNorm.launch(self.draft, self.tokens, model.embedding, model.ln0, self.x, decoder.layer_eps)
        if decoder.kernel:
            self.launch_all_layers(layers)
        else:
            self.launch_each_product(layers)
        return tuple(self.draft.steps)

    def launch_each_product(self, layers):
        """Adds the steps of all layers and the head, each product by a kernel of its own."""
        buffers, added = self.buffers, None  # added: see `time_mix`
        for i in range(layers):
            layer = entries(self.layers, i)
            added = self.time_mix(layer, self.state.att_shift[i], self.state.wkv[i], added)
            added = self.channel_mix(layer, self.state.ffn_shift[i], added)
        self.norm_shift(self.model.ln_out, buffers.normed, added=added, after_channel_mix=True)
        self.matmul(self.model, ("head", buffers.normed, buffers.logits, WRITE))

    def launch_all_layers(self, layers):
        """Adds all layers and the head by the decoder's `kernel`: in one launch if all blocks can run at the same time,
        else in one per phase."""
        kernel, more_shared = self.decoder.kernel  # more_shared: bytes of shared memory for the inputs of products
        # if weights have a buffer's name, the kernel's argument for the buffer ends in _out, as kvrg_out
        outputs = {f"{name}_out": array for name, array in vars(self.buffers).items()}
        arrays = outputs | vars(self.buffers) | vars(self.layers) | vars(self.state) | vars(self.model)
        arrays["slots"] = self.slots
        pointer_names = [member.name for member in kernel.arguments if member.kind == "pointer"]
        # scales are null if matrices are not int8
        pointers = {name: arrays.get(name) if name.endswith(SCALES) else arrays[name] for name in pointer_names}
        phases = layers * kernel.PHASES + 1  # the head is the last phase
        # cooperative: the device can run all blocks of a launch at the same time
        for first, last in [(0, phases)] if self.device.cooperative else [(n, n + 1) for n in range(phases)]:
            self.draft.launch(
                kernel,
                self.device.multiprocessors if self.device.cooperative else PHASE_BLOCKS,
                more_shared=more_shared,
                together=self.device.cooperative,
                **pointers,
                L=layers,
                P=self.state.wkv.shape[1],
                staged=kernel.staged(more_shared),  # numbers of an input that fit in it at a time
                first=first,
                last=last,
                eps=self.decoder.layer_eps,
                group_eps=self.decoder.group_eps,
            )

    # -- what a version defines --------------------------------------------------------------------------------------
    def time_mix(self, layer, shift, wkv, added) -> Array | None:
        """Adds the steps of a time mix; returns what the next norm must add to the residual x, or None.

        `added` is the same of the previous mix: the first norm here adds it to x.
        """
        raise NotImplementedError

    def channel_mix(self, layer, shift, added) -> Array | None:
        """As `time_mix`, for the channel mix."""
        raise NotImplementedError

    # -- products and norms ------------------------------------------------------------------------------------------
    def products_in_parts(self, layer, most, *named, early=False) -> int:
        """Adds products that may leave parts; returns the number of parts of each, at most `most`.

        Each product is named as (the name of w, x, y [P, C, B, M]). Its parts are the first of the P arrays of y, and
        the kernel that reads y adds them up. `early` is as in `matmul`.
        """
        matrices, (_, _, B, K) = [getattr(layer, name) for name, *_ in named], named[0][1].shape
        kernel = self.batch_product(matrices, B, K, early) if most > 1 else None
        if kernel and kernel.SPLIT <= most:
            products = [(*matrix_of(layer, name), x, y[: kernel.SPLIT], PARTS) for name, x, y in named]
            kernel.launch(self.draft, products, B, K)
            return kernel.SPLIT
        self.matmul(layer, *((name, x, y[0], WRITE) for name, x, y in named), early=early)
        return 1

    def product_for_residual(self, layer, name, vectors, x=None) -> Array | None:
        """Adds the product of `vectors` with matrix `name`, which the residual must gain. Returns its parts [P, B, D]
        for the next norm to add; or None if the product itself is added to `x`, the residual, where that is given."""
        w, (_, _, B, K) = getattr(layer, name), vectors.shape
        launch_and_parts = None if self.decoder.by_rows else self.product_of_batch([w], B, K, in_parts=True)
        if launch_and_parts:
            launch, parts = launch_and_parts
            added = self.buffers.added[:parts]
            launch(self.draft, [(*matrix_of(layer, name), vectors, added, PARTS)], B, K)
            return added[:, 0]
        added = self.buffers.added[0]
        self.matmul(layer, (name, vectors, *((added, WRITE) if x is None else (x, ADD))))
        return added if x is None else None

    def launch_time_mix(self, kernel, blocks, layer, wkv, more_shared=0, **args):
        """Adds the kernel that updates the recurrent state `wkv` and computes the time mix's y, and then the product
        of y with the output's matrix; returns what `product_for_residual` returns. `args`: the kernel's arguments
        besides those that every version's has."""
        y, norm = self.buffers.y, kernels.affine(layer.ln_x)
        args |= {"state": wkv, "slots": self.slots, "y": y, "eps": self.decoder.group_eps}
        self.draft.launch(kernel, blocks, more_shared=more_shared, **norm, **args)
        return self.product_for_residual(layer, "output", y, self.x)

    def norm_shift(self, norm, mixed, maa=None, shift=None, added=None, after_channel_mix=False, xx=None):
        """Adds the kernel that adds `added` [P, B, D] (or None) to x, normalises x, and writes the C mixes of the
        normed x with the previous token's, by the weights `maa` [C, D].

        mixed : the array of the mixes, [terms, C, B, D]; without `maa` and `shift` the normed x itself
        shift : the previous token's normed x, replaced by this one's
        after_channel_mix : whether `added` is the channel mix's product: the kernel multiplies it by that mix's gate,
            if there is one, and by `version.unit_of_squares`, by which kernels have divided the mix's squares
        xx : the array for the normed x, or None if only the mixes are needed; with xx the kernel also writes the
            previous token's less xx to the buffer `d`
        """
        buffers, (terms, C, B, D) = self.buffers, mixed.shape
        parts = 0 if added is None else added.shape[0]
        shares = kernels.NormShift.SHARES if B <= kernels.NormShift.FEW else 1  # blocks per sequence
        self.draft.launch(
            kernels.NormShift.fitting(mixed.dtype, D, C, parts, terms),
            B * shares,
            x=self.x,
            sum=self.sum if parts else None,
            value=added,
            gate=self.gate if after_channel_mix and parts else None,
            **kernels.affine(norm),  # its weight and bias
            maa=maa,
            shift=shift,
            slots=self.slots,
            xx=xx,
            d=None if xx is None else buffers.d,
            mixed=mixed,
            C=C,
            P=parts,
            squares=after_channel_mix,  # whether `value` is in that unit
            shares=shares,
            eps=self.decoder.layer_eps,
        )
        if parts:  # the kernel has written the new residual to `sum`
            self.x, self.sum = self.sum, self.x

    def matmul(self, weights, *named, early=False):
        """Adds products with the same B and K, each named as (the name of w, x, y [C, B, M], finish). finish is WRITE,
        ADD or RELU_SQUARED: y = x w^T, y += x w^T, or y = relu(x w^T)^2. `early`: whether small kernels run just
        before; the product's kernel can copy weights meanwhile.
        """
        products = [(*matrix_of(weights, name), *product) for name, *product in named]
        *_, B, K = named[0][1].shape
        if self.decoder.by_rows:
            self.launch_matvec(products, K)
        elif launch_and_parts := self.product_of_batch([w for w, *_ in products], B, K, early=early):
            launch, _ = launch_and_parts
            launch(self.draft, products, B, K)
        elif len(named) > 1:  # no kernel serves them together: each may have another
            for product in named:
                self.matmul(weights, product)
        else:
            self.launch_cublas(*products[0])

    def product_of_batch(self, matrices, B, K, in_parts=False, early=False) -> tuple | None:
        """(a function that adds the launch of products with these matrices by one of Hopper's kernels, how many parts
        they leave), or None on other cards and if cuBLAS is faster. `in_parts`: whether they may leave parts.
        `WideProduct` serves half precision and 56 to 64, or 129 to 256, vectors."""
        decoder, rows = self.decoder, [w.shape[:2] for w in matrices]
        wide = model_products.WideProduct.fitting(decoder.matrix_dtype, B, K, rows, in_parts, decoder.device, early)
        if wide:
            kernel, parts = wide
            return partial(kernel.launch, parts=parts), parts
        kernel = self.batch_product(matrices, B, K, early)
        return kernel and (kernel.launch, kernel.SPLIT)

    def batch_product(self, matrices, B, K, early=False):
        """The `BatchProduct` for products with these matrices, or None."""
        rows = [w.shape[:2] for w in matrices]
        return model_products.BatchProduct.fitting(self.decoder.matrix_dtype, B, K, rows, self.decoder.device, early)

    def launch_matvec(self, products, K):
        """Adds one launch of the matrix-vector kernel, for all matrices of all products."""
        filled = [
            {"w": w, "x": x, "y": y, "M": w.shape[0], "finish": finish}
            for stack, _, vectors, sums, finish in products
            for w, x, y in zip(stack, vectors[0], sums)
        ]
        unused = {"w": None, "x": None, "y": None, "M": 0, "finish": WRITE}  # the kernel takes PRODUCTS structs
        blocks = sum(w.shape[0] * ceil_div(w.shape[1], model_products.Matvec.ROWS) for w, *_ in products)
        self.draft.launch(
            model_products.Matvec.fitting(self.decoder.dtype, blocks, self.decoder.device),
            blocks,
            products=filled + [unused] * (model_products.PRODUCTS - len(filled)),
            K=K,
        )

    def launch_cublas(self, w, scales, x, y, finish):
        """Adds a product by cuBLAS; int8 matrices are first scaled to `dtype`."""
        if scales is not None:
            w = widened(self.draft, w, scales, self.buffers.wide, self.decoder.dtype)
        product = self.buffers.hidden if finish == RELU_SQUARED else y
        self.draft.product(w, x[0], product, finish == ADD)
        if finish == RELU_SQUARED:
            kernel = kernels.ReluSquared(product.dtype, y.dtype)
            self.draft.launch(kernel, kernel.blocks(y.size), x=product, y=y, count=y.size)


def matrix_of(weights, name) -> tuple:
    """(the matrix `name` of the namespace `weights`, its scales if it is int8, else None)."""
    return getattr(weights, name), getattr(weights, f"{name}{SCALES}", None)


def checked_sizes(version, sizes, dtype, limits):
    """Returns `sizes`; ContractError if the kernels do not support them. `limits`: {axis: the largest size}."""
    columns = 16 if dtype == INT8 else 8  # which kernels load at a time
    for axis, multiple in (("D", columns), ("F", columns), ("N", 4)):
        if sizes[axis] % multiple:
            gpu = "the GPU with int8" if multiple == 16 else "the GPU"
            version.refuse(f"{axis} is {sizes[axis]}, expected a multiple of {multiple} on {gpu}")
    for axis, most in limits.items():
        if sizes[axis] > most:
            version.refuse(f"{axis} is {sizes[axis]}, expected at most {most} on the GPU; the CPU takes any")
    return sizes


def current_device():
    from ...backends.cupy.device import best_device

    return best_device()
