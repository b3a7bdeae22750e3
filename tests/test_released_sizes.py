"""Decoding kernels at the widths of released models, one layer and a small vocabulary, against the CPU.

Limits of staging areas, grids and registers differ from those of small models: for example, int8's digits had a wrong
unit in models of more than 2048 channels."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from test_decode_kernels import DTYPES, LIMIT, begun, close, decoded, decoder_of, uploaded

from linattn_np.models import RWKV6, RWKV7
from linattn_np.models.rwkv import cuda_decoder

OF_ALL = {"1": 1, "5": 5, "V": 50, "N": 64}
SIZES = {
    "RWKV-6 3B": {"D": 2560, "H": 40, "F": 8960, "A": 32, "5A": 160, "W": 64},
    "RWKV-6 7B": {"D": 4096, "H": 64, "F": 14336, "A": 64, "5A": 320, "W": 128},
    "RWKV-7 2.9B": {"D": 2560, "H": 40, "F": 10240, "W": 96, "A": 96, "G": 320, "Q": 64},
    "RWKV-7 7.2B": {"D": 4096, "H": 64, "F": 16384, "W": 128, "A": 128, "G": 480, "Q": 96},
}
MULTIPROCESSORS = 132  # of an H200: the blocks of the kernel of all layers


def weights_of_any_dtype(version, sizes, rng):
    """Random weights of one layer that int8 holds exactly, and so do float16 and bfloat16: a matrix is whole numbers up
    to 127 times a power of two, and 127 is the first number of each row on the device."""

    def made(name, axes, rng):
        shape = [(OF_ALL | sizes)[axis] for axis in axes.split()]
        low_rank = name[-1] in "12"
        if not low_rank and not (name.endswith(".weight") and len(shape) == 2):
            return 0.5 * rng.standard_normal(shape, np.float32)
        numbers = rng.integers(-127, 128, shape, np.int8)
        numbers[(..., 0, slice(None)) if low_rank else (..., 0)] = 127
        inputs = shape[-2] if low_rank else shape[-1]
        return numbers * np.float32(2.0 ** -round(np.log2(73 * inputs**0.5)))  # 73: the numbers' deviation

    parameters = version.parameter_axes(1)
    with ThreadPoolExecutor() as pool:
        return dict(zip(parameters, pool.map(made, parameters, parameters.values(), rng.spawn(len(parameters)))))


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.exhaustive] * name.endswith(("7B", "7.2B"))) for name in SIZES]
)
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.int8)], ids=str)
@pytest.mark.parametrize("B", [1, 8])
def test_a_step_is_the_cpus(hopper, monkeypatch, model, dtype, B, rng):
    monkeypatch.setattr(cuda_decoder, "PHASE_BLOCKS", MULTIPROCESSORS)
    kind = RWKV6 if model.startswith("RWKV-6") else RWKV7
    weights, tokens = weights_of_any_dtype(kind.version, SIZES[model], rng), rng.integers(0, OF_ALL["V"], (B, 1))
    reference, decoder = kind(weights), decoder_of(kind, weights, dtype, B, hopper)
    state = begun(reference, B, rng)
    found = decoded(decoder, hopper, tokens, uploaded(state, hopper))
    close(found, reference.forward(tokens, state)[0], LIMIT)
