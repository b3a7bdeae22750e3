"""What a call writes is none of what it reads, whatever the strides, and it takes no time to see."""

import time

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from reference import draw, same_bits

from linattn_np import ContractError, aliasing, gla, gla_step, linear_attention, rwkv6, simple_gla, stages
from linattn_np.ops import OPS
from linattn_np.ops.gla import GLA
from linattn_np.ops.steps import GLA_STEP

SIZES = {"B": 2, "H": 3, "T": 8, "K": 4, "V": 4, "N": 2}
FLOAT = np.dtype(np.float32)
HARD = (  # strides of two arrays, how far apart
    (85128, 107004, 121172, 125796),
    (80232, 111776, 121408, 154636),
    1207,
)


def inputs(op=GLA):
    return draw(op, np.random.default_rng(0), SIZES, FLOAT)


@pytest.mark.parametrize("function", [gla, rwkv6, simple_gla, linear_attention])
def test_out_over_the_mask(function):
    """It is read again when o is written."""
    (op,) = (op for op, public in OPS.items() if public is function)
    memory = np.ones(2 * 3 * 8 * 4, FLOAT)
    mask = memory.view(bool)[:16].reshape(2, 8)
    out, before = memory.reshape(2, 3, 8, 4), memory.copy()
    for _ in range(2):  # the second one is like the first
        with pytest.raises(ContractError, match=f"{op.name}: out shares memory with mask"):
            function(*inputs(op), mask=mask, out=out)
    assert same_bits(memory, before)


def test_out_over_arrays_that_are_copied():
    """A call with a mask works on copies; that it would be right is no reason to take it."""
    q, k, v, g = inputs()
    with pytest.raises(ContractError, match="gla: out shares memory with v"):
        gla(q, k, v, g, mask=np.ones((2, 8), bool), out=v)


def test_a_stage_out_over_its_input():
    q, k, v, g = inputs()
    A = np.zeros((2, 3, 8, 64), FLOAT)
    with pytest.raises(ContractError, match="combine: out shares memory with v"):
        stages.combine(q, np.zeros((2, 3, 1, 4, 4), FLOAT), A, v, out=v)


def overlapping(shape):
    """Writable arrays of which two elements are one."""
    memory = np.zeros(2 * np.prod(shape), FLOAT)
    dense = memory[: np.prod(shape)].reshape(shape).strides
    strides = {
        "stride-0": (0, *dense[1:]),
        "all-one": (0,) * len(shape),
        "windows": (*dense[:-2], 4, 4),
        "backwards": (*dense[:-2], -8, 4),
        "shifted": (*dense[:-2], 2, 4),
    }
    return {kind: as_strided(memory[40:], shape, steps) for kind, steps in strides.items()}


@pytest.mark.parametrize("kind", overlapping((2, 3, 8, 4)))
def test_out_that_overlaps_itself(kind):
    out = overlapping((2, 3, 8, 4))[kind]
    with pytest.raises(ContractError, match="gla: out has strides .* elements may share memory"):
        gla(*inputs(), out=out)
    assert not out.any()


@pytest.mark.parametrize("kind", overlapping((2, 3, 4, 4)))
def test_a_state_that_overlaps_itself(kind):
    state = overlapping((2, 3, 4, 4))[kind]
    with pytest.raises(ContractError, match="gla_step: state has strides .* elements may share memory"):
        gla_step(*inputs(GLA_STEP), state)
    assert not state.any()


def test_slices_have_their_elements_apart(rng):
    """Of any ordinary array, however it is cut and turned."""
    for _ in range(200):
        x = np.empty(rng.integers(1, 6, 4))
        steps = rng.choice([-3, -2, -1, 1, 2, 3], 4)
        assert aliasing.elements_apart(
            x[tuple(slice(None, None, step) for step in steps)].transpose(rng.permutation(4))
        )
    assert aliasing.elements_apart(np.broadcast_to(np.empty(1), (0, 5))) and aliasing.elements_apart(np.empty(()))


def test_interleaved_arrays_are_taken():
    """The columns of one buffer, as a fused projection has them."""
    q, k, v, g = inputs()
    fused = np.concatenate([q, k, v, g, v], axis=-1)
    parts = [fused[..., 4 * n : 4 * n + 4] for n in range(5)]
    assert gla(*parts[:4], out=parts[4]) is parts[4]
    np.testing.assert_array_equal(parts[4], gla(q, k, v, g))


def test_crafted_strides_take_no_time():
    """Whether arrays share memory can be as hard as any problem; here NumPy would try for minutes."""
    memory = np.zeros(1 << 22, FLOAT)
    shape = (12, 13, 12, 13)
    q = as_strided(memory, shape, HARD[0])
    out = as_strided(memory[HARD[2] :], shape, HARD[1])
    start = time.process_time()
    assert aliasing.share(q, out)
    assert time.process_time() - start < 0.5


# -- on a device -------------------------------------------------------------------------------------------------------
@pytest.fixture
def place():
    """Arrays of CuPy at addresses that nobody looks at."""
    cupy = pytest.importorskip("cupy")

    def array(at, shape, dtype=np.float32, strides=None):
        memory = cupy.cuda.UnownedMemory(at, 1 << 20, None, 0)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)

    return array


def test_device_arrays_are_compared_too(place):
    """By their addresses alone; a call alike at the same addresses is not looked at again."""
    shape, at = (2, 3, 8, 4), [n << 20 for n in range(1, 6)]
    for _ in range(2):
        arrays = [place(where, shape) for where in at[:4]]
        problem = GLA.bind(arrays, out=place(at[4], shape))
        assert len(problem.memo["apart"]) == 1
        for n, name in enumerate("qkvg"):
            with pytest.raises(ContractError, match=f"gla: out shares memory with {name}"):
                GLA.bind(arrays, out=place(at[n] + 32, shape))
        assert len(problem.memo["apart"]) == 1
        with pytest.raises(ContractError, match="gla: out shares memory with mask"):
            GLA.bind(arrays, mask=place(at[4] + 16, (2, 8), bool), out=place(at[4], shape))
    fused = (2 * 3 * 8 * 4 * 5 // 2 * 4, 8 * 20 * 4, 20 * 4, 4)
    columns = [place(at[0] + 16 * n, shape, strides=fused) for n in range(5)]
    GLA.bind(columns[:4], out=columns[4])
    with pytest.raises(ContractError, match="gla: out has strides"):
        GLA.bind(arrays, out=place(at[4], shape, strides=(0, 128, 16, 4)))


def test_device_states_are_compared_too(place):
    at = [n << 20 for n in range(1, 8)]
    arrays = [place(where, (2, 3, 4)) for where in at[:4]]
    state = place(at[4], (2, 3, 4, 4))
    GLA_STEP.bind(arrays, state=state)
    GLA_STEP.bind(arrays, state=state, slots=place(at[5], (2,), np.int64))
    with pytest.raises(ContractError, match="gla_step: state shares memory with q"):
        GLA_STEP.bind([place(at[4] + 64, (2, 3, 4)), *arrays[1:]], state=state)
    with pytest.raises(ContractError, match="gla_step: state shares memory with slots"):
        GLA_STEP.bind(arrays, state=state, slots=place(at[4] + 64, (2,), np.int64))
    with pytest.raises(ContractError, match="gla_step: out shares memory with state"):
        GLA_STEP.bind(arrays, state=state, out=place(at[4] + 64, (2, 3, 4)))
