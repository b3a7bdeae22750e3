"""Copies a model's weights to the GPU: an array holds a matrix of all layers; int8 matrices have scales beside them."""

from functools import partial
from types import SimpleNamespace

import numpy as np

from ...array_kinds import BFLOAT16
from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.arithmetic import ceil_div
from ...backends.cupy.kernel import INT8
from ...backends.cupy.plan import Array, Draft
from ..matrices import quantised
from ..quantised import Stored

FLOAT32 = np.dtype(np.float32)
SCALES = "_scales"  # ending of the field that has the scales of an int8 matrix
# Matrices that are (in, out) on the device, as in files: kernels read rows of them. All others are (out, in) there. The
# fields are those of `rwkv6.weights.LAYER`, and of `rwkv7.cuda_decode.STACKS`, by their names.
AS_STORED = ("embedding", "maa_up", "decay_up", "up")


def widened(draft: Draft, q: Array, scales: Array, buffer: Array, dtype) -> Array:
    """Adds a launch that converts int8 matrices [C, M, K] with scales [C, M] to `dtype` for cuBLAS; returns the result.

    The result is written to `buffer`.
    """
    strides = tuple(step * dtype.itemsize for step in q.strides)  # an int8 is a byte
    w = Array(buffer.memory, q.shape, strides, dtype, buffer.offset)
    kernel = kernels.Widen(dtype)
    draft.launch(kernel, kernel.blocks(q.size), q=q, scales=scales, w=w, count=q.size, K=q.shape[-1])
    return w


class WeightCopies:
    """Copies a model's `weights`, by official name, to a device.

    loaded : a function that is called with each array of `weights` once it has been copied, to count what is loaded
    dtype : of matrices; with int8 each has two fields, the numbers and the scales of the rows. Others are float32

    ContractError if numbers are beyond `dtype`'s range.
    """

    def __init__(self, device, version, weights, loaded, dtype):
        self.device, self.version, self.weights, self.loaded, self.dtype = device, version, weights, loaded, dtype

    def of_model(self) -> SimpleNamespace:
        """The arrays outside the layers."""
        return entries(split_scales(self.version.model_arrays(partial(self.array_of, [""]))), 0)

    def of_all_layers(self, count) -> SimpleNamespace:
        """The arrays of `count` layers, which are their first axis."""
        prefixes = [f"blocks.{i}." for i in range(count)]
        return split_scales(self.version.layer_arrays("", partial(self.array_of, prefixes)))

    def array_of(self, prefixes, field, weight, names):
        """One array [len(prefixes), ...], or with int8 a pair, numbers and scales, of the parameters prefix + name.

        field, weight : the array's name in the layers, and its `version.Weight`
        """
        if not weight.matrix:
            return self.stacked(prefixes, FLOAT32, names)
        if field in AS_STORED:
            row_multiple = kernels.DecodeFew.ROWS if names[1:] else 1  # several, of different ranks, get equal counts
            dtype = BFLOAT16 if self.dtype == INT8 else self.dtype
            return self.stacked(prefixes, dtype, names, row_multiple=row_multiple)
        return self.stacked(prefixes, self.dtype, names, weight.inputs_first, kernels.DecodeFew.ROWS)

    def stacked(self, prefixes, dtype, names, transposed=False, row_multiple=1):
        """The parameters in one array [len(prefixes), len(names), rows of a matrix, ...], a view of padded memory.

        row_multiple : the number of each matrix's rows in memory is rounded up to a multiple of this, with zeros, so
            that kernels may read tiles of this many rows. If numbers of rows differ, all matrices have the largest,
            rounded up

        A parameter that a block lacks is zeros. The last block must lack none that another block has.
        """
        device, weights = self.device, self.weights
        of_last_block = [weights.get(prefixes[-1] + name) for name in names]
        shapes = [array.shape[:: -1 if transposed else 1] for array in of_last_block if array is not None]
        most_rows, *columns = max(shapes)  # of a vector the only axis is called rows, too
        assert all(shape[1:] == tuple(columns) for shape in shapes)
        if min(shapes) != max(shapes):
            most_rows = ceil_div(most_rows, row_multiple) * row_multiple

        def buffer(*columns, dtype):
            rows = ceil_div(most_rows, row_multiple) * row_multiple
            return device.zeros((len(prefixes), len(names), rows, *columns), dtype)[:, :, :most_rows]

        stacks = [buffer(*columns, dtype=dtype)]
        if dtype == INT8:
            stacks.append(buffer(dtype=FLOAT32))
        for layer, prefix in enumerate(prefixes):
            for index, name in enumerate(names):
                if (array := weights.get(prefix + name)) is None:
                    continue
                for stack, host_array in zip(stacks, self.on_host(prefix + name, array, dtype, transposed)):
                    # a copy of bytes, which compiles no kernel
                    device.copy(device.upload(host_array), stack[layer, index, : len(host_array)])
                self.loaded(array)
        return tuple(stacks) if dtype == INT8 else stacks[0]

    def on_host(self, name, array, dtype, transposed):
        """`converted` of a parameter, which `name` names in the error if numbers are beyond `dtype`'s range."""
        try:
            with np.errstate(over="raise"):
                return converted(array, dtype, transposed)
        except FloatingPointError:
            self.version.refuse(f"{name} has numbers beyond {dtype}, expected dtype 'bfloat16' or 'float32' for them")


def converted(array, dtype, transposed) -> tuple:
    """A parameter in `dtype`, in C order on the host: (array,), or for int8 the CPU layers' (numbers, scales).

    Raises FloatingPointError if numbers are beyond the range, inside `np.errstate(over="raise")`.
    """
    if dtype == INT8 and isinstance(array, Stored) and array.format == "int8":
        return array.q, array.scales  # (out, in) in files already
    array = np.asarray(array)
    if dtype == np.float16 and array.dtype == BFLOAT16:
        array = array.astype(FLOAT32)  # NumPy detects overflow in casts from float32
    if transposed:
        array = array.T
    if dtype != INT8:
        return (np.ascontiguousarray(array, dtype),)
    return tuple(part[0] for part in quantised(np.ascontiguousarray(array)[None], "int8"))


def split_scales(weights) -> SimpleNamespace:
    """The namespace `weights` with each pair (numbers, scales) as two fields, `name` and `name` + SCALES."""
    fields: dict = {}
    for name, array in vars(weights).items():
        fields |= {name: array[0], f"{name}{SCALES}": array[1]} if isinstance(array, tuple) else {name: array}
    return SimpleNamespace(**fields)


def entries(arrays, index) -> SimpleNamespace:
    """The entry `index` of each array in the namespace `arrays`: of arrays of all layers, those of one layer."""
    return SimpleNamespace(**{name: array[index] for name, array in vars(arrays).items()})
