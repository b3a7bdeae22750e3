"""Arrays of other libraries: read where they lie, answered in kind; libraries and devices do not mix."""

import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from reference import assert_close, draw, same_bits

from linattn_np import ContractTypeError, explain, gla, gla_step, stages, vjp
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA
from linattn_np.errors import ContractError
from linattn_np.layers import GatedLinearAttention, random_weights

SIZES = {"B": 1, "H": 2, "T": 20, "K": 8, "V": 6, "N": 1}


class Foreign:
    """An array of a library of its own that speaks DLPack and nothing else."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **arguments):
        return self.x.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class Standard(Foreign):
    """The same with the array API's namespace, through which it makes new arrays."""

    def __array_namespace__(self, api_version=None):
        return Standard

    @classmethod
    def from_dlpack(cls, x):
        return cls(np.from_dlpack(x))


class Elsewhere(Foreign):
    def __dlpack_device__(self):
        return (7, 0)  # Vulkan


@pytest.fixture
def arrays(rng):
    return draw(GLA, rng, SIZES, np.float32)


def test_dlpack_in_numpy_out(arrays):
    o = gla(*map(Foreign, arrays))
    assert isinstance(o, np.ndarray) and same_bits(o, gla(*arrays))


def test_dlpack_with_a_namespace_comes_back_in_kind(arrays):
    o, state = gla(*map(Standard, arrays), output_final_state=True)
    wanted, final = gla(*arrays, output_final_state=True)
    assert isinstance(o, Standard) and same_bits(o.x, wanted)
    assert isinstance(state, Standard) and same_bits(state.x, final)


def test_dlpack_is_read_where_it_lies(arrays, rng):
    """A step's state is updated through the foreign array's memory."""
    step = [np.ascontiguousarray(x[:, :, 0]) for x in arrays]
    mine = rng.standard_normal((1, 2, 8, 6)).astype(np.float32)
    foreign = mine.copy()
    gla_step(*step, mine)
    gla_step(*map(Foreign, step), Foreign(foreign))
    assert same_bits(foreign, mine)


def test_initial_states_and_gradients_of_dlpack(arrays, rng):
    start = rng.standard_normal((1, 2, 8, 6)).astype(np.float32)
    do = rng.standard_normal((1, 2, 20, 6)).astype(np.float32)
    wanted = vjp(gla, *arrays, initial_state=start)[1](do)
    found = vjp(gla, *map(Standard, arrays), initial_state=Standard(start))[1](Standard(do))
    assert all(isinstance(x, Standard) and same_bits(x.x, y) for x, y in zip(found, wanted, strict=True))


def test_libraries_do_not_mix(arrays):
    q, k, v, g = arrays
    with pytest.raises(
        ContractTypeError, match="gla: arrays must share one library, got q: numpy, k: dlpack, v: numpy"
    ):
        gla(q, Foreign(k), v, g)


def test_other_devices_are_refused(arrays):
    with pytest.raises(ContractTypeError, match="gla: q cannot be read: .*neither the host nor CUDA"):
        gla(*map(Elsewhere, arrays))
    with pytest.raises(ContractTypeError, match="gla: initial_state cannot be read: .*neither the host nor CUDA"):
        gla(*arrays, initial_state=Elsewhere(np.zeros((1, 2, 8, 6), np.float32)))
    with pytest.raises(ContractTypeError, match="gla: do cannot be read: .*neither the host nor CUDA"):
        vjp(gla, *arrays)[1](Elsewhere(np.zeros((1, 2, 20, 6), np.float32)))


def test_objects_and_foreign_byte_orders(arrays):
    with pytest.raises(ContractError, match="q has dtype object"):
        gla(arrays[0].astype(object), *arrays[1:])
    with pytest.raises(ContractError, match="q has dtype >f4|q has dtype float32"):
        gla(arrays[0].astype(">f4"), *arrays[1:])


def test_importing_and_calling_imports_no_other_library():
    """Not even where they are installed."""
    code = (
        "import sys, numpy as np, linattn_np; x = np.zeros((1, 1, 3, 4)); linattn_np.gla(x, x, x, x);"
        "linattn_np.explain(linattn_np.gla, x, x, x, x);"
        "print([name for name in ('cupy', 'numba', 'torch', 'jax') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# -- libraries that may be installed -----------------------------------------------------------------------------------
@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="jax is not installed")


def test_torch_on_the_host(torch, arrays):
    there = [torch.from_numpy(x.copy()) for x in arrays]
    o, state = gla(*there, output_final_state=True)
    wanted, final = gla(*arrays, output_final_state=True)
    assert isinstance(o, torch.Tensor) and same_bits(o.numpy(), wanted)
    assert isinstance(state, torch.Tensor) and same_bits(state.numpy(), final)
    memory = torch.zeros(1, 2, 8, 6)
    gla_step(*(x[:, :, 0].detach() for x in there), memory)
    assert memory.abs().sum() > 0


def test_torch_gradients_are_never_cut(torch, arrays):
    """Silently, that is: the operators of this package compute, those of interop.torch differentiate."""
    for turn in range(4):
        there = [torch.from_numpy(x.copy()).requires_grad_(n == turn) for n, x in enumerate(arrays)]
        name = "qkvg"[turn]
        for call in (gla, lambda *x: vjp(gla, *x), lambda *x: explain(gla, *x)):
            with pytest.raises(
                ContractTypeError, match=f"gla: {name} requires grad, .* import gla from linattn_np.interop.torch"
            ):
                call(*there)
        with torch.no_grad():
            assert same_bits(gla(*there).numpy(), gla(*arrays))
        assert same_bits(gla(*(x.detach() for x in there)).numpy(), gla(*arrays))
    plain, state = [x.detach() for x in there], torch.zeros(1, 2, 8, 6, requires_grad=True)
    with pytest.raises(ContractTypeError, match="gla: initial_state requires grad"):
        gla(*plain, initial_state=state)
    with pytest.raises(ContractTypeError, match="gla_step: state requires grad"):
        gla_step(*(x[:, :, 0] for x in plain), state)


def test_torch_transformations_are_refused(torch, arrays):
    q, k, v, g = map(torch.from_numpy, arrays)
    with pytest.raises(
        ContractTypeError, match="gla: q is a tensor under a transformation of torch.func.*interop.torch"
    ):
        torch.func.grad(lambda q: gla(q, k, v, g).sum())(q)
    with pytest.raises(
        ContractTypeError, match="gla: k is a tensor under a transformation of torch.func.*interop.torch"
    ):
        torch.func.vmap(lambda k: gla(q, k, v, g))(k[None])


def strange_tensors(torch):
    """Tensors whose memory does not hold their numbers, with what the error says of them."""
    plain = torch.zeros(1, 2, 20, 8)
    freed = plain.clone()
    freed.untyped_storage().resize_(16)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = torch.zeros(1, 2, 20, 8)
    return {
        "a subclass": (plain.as_subclass(type("Wrapped", (torch.Tensor,), {})), "Wrapped, expected a torch.Tensor or"),
        "fake": (fake, "FakeTensor, expected a torch.Tensor or torch.nn.Parameter itself"),
        "meta": (plain.to("meta"), "is on torch's device meta, expected the CPU or CUDA"),
        "sparse": (plain.to_sparse(), "is a tensor of layout torch.sparse_coo, expected torch.strided"),
        "mkldnn": (plain.to_mkldnn(), "is a tensor of layout torch._mkldnn"),
        "quantised": (torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8), "is a quantised tensor"),
        "nested": (torch.nested.nested_tensor([plain[0]]), "is a nested tensor"),
        "functional": (torch._to_functional_tensor(plain), "is a tensor that torch functionalises"),
        "freed": (freed, "is a tensor whose memory was freed"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch's, of old kinds
def test_strange_tensors_are_refused(torch, arrays):
    """By every way in."""
    interop = pytest.importorskip("linattn_np.interop.torch")
    plain = [torch.from_numpy(x) for x in arrays]
    weights = random_weights(np.random.default_rng(0), hidden_size=32, num_heads=2)
    for strange, message in strange_tensors(torch).values():
        for call in (gla, interop.gla, partial(vjp, gla)):
            with pytest.raises(ContractTypeError, match=f"gla: k .*{message}"):
                call(plain[0], strange, *plain[2:])
        with pytest.raises(ContractTypeError, match=f"gla: mask .*{message}"):  # torch would crash on one that is freed
            interop.gla(*plain, mask=strange)
        with pytest.raises(ContractTypeError, match=f"gla: k .*{message}"), torch.autocast("cpu"):
            interop.gla(plain[0], strange, *plain[2:])
        with pytest.raises(ContractTypeError, match=f"gla: do .*{message}"):
            vjp(gla, *plain)[1](strange)
        with pytest.raises(ContractTypeError, match=f"GatedLinearAttention: q_proj.weight .*{message}"):
            GatedLinearAttention(weights | {"q_proj.weight": strange}, 2)


def test_tensors_that_are_computed_when_they_are_read(torch, arrays):
    """Negated or zero: their memory does not say so, and cannot be written to."""
    q, k, v, g = map(torch.from_numpy, arrays)
    negated = torch.complex(k, k).conj().imag
    assert negated.is_neg() and torch.equal(gla(q, negated, v, g), gla(q, -k, v, g))
    zero = torch._efficientzerotensor(k.shape)
    assert torch.equal(gla(q, k, v, zero), gla(q, k, v, torch.zeros_like(g)))
    token, ones = [x[:, :, 0] for x in (q, k, v, g)], torch.ones(1, 2, 8, 6)
    for state in (torch.complex(ones, ones).conj().imag, torch._efficientzerotensor(ones.shape)):
        with pytest.raises(ContractTypeError, match="gla_step: state is a view that torch computes.*x.clone()"):
            gla_step(*token, state)


def test_arrays_of_jax_that_are_gone_or_written(jax, arrays):
    interop = pytest.importorskip("linattn_np.interop.jax")
    q, k, v, g = map(jax.numpy.asarray, arrays)
    k.delete()
    for call in (gla, interop.gla):
        with pytest.raises(ContractTypeError, match="gla: k is a JAX array that was deleted"):
            call(q, k, v, g)
    with pytest.raises(ContractTypeError, match="gla_step: state is a JAX array, which nobody may write to"):
        gla_step(*(x[:, :, 0] for x in (q, q, v, g)), jax.numpy.zeros((1, 2, 8, 6)))


def test_integers_of_other_libraries_are_host_integers(torch, jax, rng):
    """cu_seqlens and slots, by value."""
    arrays = draw(GLA, rng, SIZES, np.float32)
    step, pool = [np.ascontiguousarray(x[:, :, 0]) for x in arrays], np.zeros((3, 2, 8, 6), np.float32)
    wanted = gla(*arrays, cu_seqlens=[0, 7, 20])
    interop_torch, interop_jax = (pytest.importorskip(f"linattn_np.interop.{x}") for x in ("torch", "jax"))
    for integers in (torch.tensor, jax.numpy.asarray, lambda x: Foreign(np.array(x))):
        bounds = integers([0, 7, 20])
        assert same_bits(gla(*arrays, cu_seqlens=bounds), wanted)
        gla_step(*step, pool, slots=integers([1]))
        assert same_bits(np.asarray(interop_jax.gla(*arrays, cu_seqlens=bounds)), wanted)
        assert same_bits(interop_torch.gla(*map(torch.tensor, arrays), cu_seqlens=bounds).numpy(), wanted)
    assert pool[1].any() and not pool[::2].any()
    with pytest.raises(ContractError, match="cu_seqlens must be integers, got float32"):
        gla(*arrays, cu_seqlens=torch.tensor([0.0, 7.0, 20.0]))
    with pytest.raises(ContractError, match="cu_seqlens must be host integers .*torch.Tensor.*would synchronise"):
        gla(*arrays, cu_seqlens=torch.tensor([0, 7, 20], device="meta"))
    with pytest.raises(ContractError, match="cu_seqlens must be host integers"):
        jax.jit(lambda x: interop_jax.gla(*arrays, cu_seqlens=x))(jax.numpy.asarray([0, 7, 20]))


def test_mixed_dtypes_name_the_odd_one_out(torch, jax, arrays):
    """With the words of the caller's library."""
    interop_torch, interop_jax = (pytest.importorskip(f"linattn_np.interop.{x}") for x in ("torch", "jax"))
    of_torch = [torch.tensor(x).bfloat16() for x in arrays]
    of_jax = [jax.numpy.asarray(x, jax.numpy.bfloat16) for x in arrays]
    for odd, name in ((0, "q"), (2, "v")):
        for call in (gla, interop_torch.gla):
            given = [x.float() if n == odd else x for n, x in enumerate(of_torch)]
            with pytest.raises(
                ContractTypeError, match=rf"{name} has dtype float32, .*{name}.to\(torch.bfloat16\) is one"
            ):
                call(*given)
        for call in (gla, interop_jax.gla, jax.jit(interop_jax.gla)):
            given = [x.astype(np.float32) if n == odd else x for n, x in enumerate(of_jax)]
            with pytest.raises(ContractTypeError, match=rf"{name} has .*: {name}.astype\(jnp.bfloat16\) is one"):
                call(*given)
    with pytest.raises(ContractTypeError, match=r"k has dtype int64, .*: k.to\(torch.float32\) is one"):
        gla(of_torch[0], of_torch[1].long(), *of_torch[2:])


def test_errors_name_imports_that_exist(torch, arrays):
    q, k, v, g = (torch.from_numpy(x).requires_grad_() for x in arrays)
    interop = pytest.importorskip("linattn_np.interop.torch")
    stage = partial(stages.intra_chunk, q, k, g)
    step = partial(gla_step, *(x[:, :, 0] for x in (q, k, v, g)), torch.zeros(1, 2, 8, 6))
    for call in (stage, step, partial(gla, q, k, v, g), partial(gla, q, k, v, g, v)):
        with pytest.raises(ContractTypeError, match="requires grad, .*pass x.detach()") as refusal:
            call()
        named = re.search(r"import (.*) from linattn_np.interop.torch", str(refusal.value))
        assert named is None or hasattr(interop, named[1])


def test_torch_compile_is_refused(torch, arrays):
    with pytest.raises(ContractTypeError, match="gla: q is traced by torch.compile.*interop.torch"):
        torch.compile(lambda *x: gla(*x), backend="eager")(*map(torch.from_numpy, arrays))


def test_jax_tracers_are_refused(jax, arrays):
    for transformed in (
        jax.jit(gla),
        jax.grad(lambda *x: gla(*x).sum()),
        lambda *x: jax.vmap(gla)(*(y[None] for y in x)),
    ):
        with pytest.raises(ContractTypeError, match="gla: q is a .*Tracer.* import gla from linattn_np.interop.jax"):
            transformed(*map(jax.numpy.asarray, arrays))


def test_torch_bfloat16_on_the_host(torch, rng):
    arrays = draw(GLA, rng, SIZES, BFLOAT16)
    there = [torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) for x in arrays]
    o = gla(*there)
    assert o.dtype == torch.bfloat16
    assert same_bits(o.view(torch.int16).numpy().view(BFLOAT16), gla(*arrays))


def test_torch_and_numpy_do_not_mix(torch, arrays):
    with pytest.raises(ContractTypeError, match="gla: arrays must share one library, got q: torch, k: numpy"):
        gla(torch.from_numpy(arrays[0]), *arrays[1:])


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_jax_on_the_host(jax, rng, dtype):
    arrays = draw(GLA, rng, SIZES, dtype)
    host = jax.devices("cpu")[0]
    o = gla(*(jax.device_put(x, host) for x in arrays))
    assert isinstance(o, jax.Array) and same_bits(np.asarray(o), gla(*arrays))


def test_torch_on_the_card(torch, card, arrays):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no card")
    there = [torch.from_numpy(x.copy()).cuda() for x in arrays]
    o, state = card.run(gla, *there, output_final_state=True)
    assert o.is_cuda and state.is_cuda
    assert_close("o", o.cpu().numpy(), gla(*(x.astype(np.float64) for x in arrays), mode="recurrent"), np.float32)
    half = card.run(gla, *(x.bfloat16() for x in there))
    assert half.dtype == torch.bfloat16 and half.is_cuda
    memory = torch.zeros(1, 2, 8, 6, device="cuda")
    card.run(gla_step, *(x[:, :, 0] for x in there), memory)
    assert memory.abs().sum() > 0
    with pytest.raises(ContractTypeError, match="arrays must share one library"):
        gla(there[0], *map(card.asarray, arrays[1:]))


def test_jax_on_the_card(jax, card, arrays):
    if jax.default_backend() != "gpu":
        pytest.skip("jax sees no card")
    o = card.run(gla, *map(jax.numpy.asarray, arrays))
    assert isinstance(o, jax.Array) and next(iter(o.devices())).platform == "gpu"
    assert_close("o", np.asarray(o), gla(*(x.astype(np.float64) for x in arrays), mode="recurrent"), np.float32)


def test_cuda_array_interface(card, arrays):
    class Interface:
        def __init__(self, x):
            self.x = x

        @property
        def __cuda_array_interface__(self):
            return self.x.__cuda_array_interface__

    there = [card.asarray(x) for x in arrays]
    assert same_bits(card.tohost(card.run(gla, *map(Interface, there))), card.tohost(card.run(gla, *there)))
