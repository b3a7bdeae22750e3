"""The operators as torch functions: results and gradients against torch's own autograd of the literal equations.

With `--backends=numpy` torch computes on the CPU, with `--backends=cupy` on the card that it finds.
"""

import numpy as np
import pytest
from literal_operators import SIZES, VARIANTS, Call, pytest_generate_tests  # noqa: F401  (its cases)
from reference import assert_close, draw, flat

import linattn_np
from linattn_np import ContractError, ContractTypeError, graph_capture
from linattn_np.array_kinds import BFLOAT16, from_native
from linattn_np.declarations import GLA

torch = pytest.importorskip("torch", reason="torch is not installed")
interop = pytest.importorskip("linattn_np.interop.torch")
proxy_tensor = pytest.importorskip("torch.fx.experimental.proxy_tensor")
torch_calls = pytest.importorskip("linattn_np.interop.torch_calls")

HALVES = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


@pytest.fixture
def home(request):
    if request.param == "cupy" and not torch.cuda.is_available():
        pytest.skip("torch sees no card")
    return Home({"numpy": "cpu", "cupy": "cuda"}[request.param])


class Home:
    """A device of torch's; `dtype` is the finest that it computes."""

    def __init__(self, device):
        self.device = device
        self.dtype = torch.float64 if device == "cpu" else torch.float32

    def put(self, arrays, dtype=None):
        return [torch.tensor(x, dtype=dtype or self.dtype, device=self.device, requires_grad=True) for x in arrays]


class Case(Call):
    def ours(self, *inputs, **more):
        """[o, *final state's parts] of the torch function."""
        return flat(self.of(interop, *inputs, **more))

    def literal(self, *inputs):
        return self.equation(torch, loop, *inputs)

    def gradients(self, compute, inputs):
        results = compute(*inputs)
        weighed = zip(results, self.weights, strict=True)
        loss = sum((x.double() * torch.tensor(weights, device=x.device)).sum() for x, weights in weighed)
        return torch.autograd.grad(loss, inputs)


def loop(step, carry, sequences):
    """jax.lax.scan for torch."""
    outputs = []
    for token in zip(*sequences):
        carry, o = step(carry, token)
        outputs.append(o)
    return carry, torch.stack(outputs)


def doubles(inputs):
    """The same values on the CPU in float64."""
    return [x.detach().cpu().double().requires_grad_() for x in inputs]


def compare(found, wanted, dtype, factor=10):
    """A row has few numbers, which may cancel to far below their terms."""
    name = str(dtype).removeprefix("torch.")
    for place, (x, y) in enumerate(zip(found, wanted, strict=True)):
        x, y = (a if isinstance(a, np.ndarray) else a.detach().cpu().double().numpy() for a in (x, y))
        assert_close(f"number {place}", x, y, HALVES.get(name, name), factor=factor, rows=4)


def test_forward(home, variant, rng):
    case = Case(variant, rng)
    inputs = home.put(case.arrays)
    found = case.ours(*inputs)
    assert all(x.device == inputs[0].device and x.requires_grad for x in found)
    compare(found, case.literal(*doubles(inputs)), home.dtype)


def test_gradients(home, variant, rng):
    case = Case(variant, rng)
    inputs = home.put(case.arrays)
    found = case.gradients(case.ours, inputs)
    assert [(x.shape, x.dtype, x.device) for x in found] == [(x.shape, x.dtype, x.device) for x in inputs]
    compare(found, case.gradients(case.literal, doubles(inputs)), home.dtype)


def test_gradients_without_states(home, variant, rng):
    case = Case(variant, rng, stateful=False)
    case.final, case.weights = False, case.weights[:1]
    inputs = home.put(case.arrays)
    wanted = case.gradients(lambda *a: case.literal(*a)[:1], doubles(inputs))
    compare(case.gradients(case.ours, inputs), wanted, home.dtype)


@pytest.mark.pairwise(half="variant")
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant, rng):
    """torch's own finite differences, in float64."""
    case = Case(variant, rng, {"B": 1, "H": 2, "T": 5, "K": 3, "V": 2, "N": 1})
    inputs = [torch.tensor(x, requires_grad=True) for x in case.arrays]
    assert torch.autograd.gradcheck(lambda *inputs: tuple(case.ours(*inputs)), inputs)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["gla", "rwkv6"])
def test_half_precision_gradients(home, name, dtype, rng):
    """Gates and states in float32 beside half-precision inputs; every gradient in the dtype of its tensor."""
    case = Case(name, rng)
    gated = [*(name in case.op.gates for name in case.op.arrays), True]
    half = getattr(torch, dtype)
    inputs = [home.put([x], torch.float32 if gate else half)[0] for x, gate in zip(case.arrays, gated)]
    found = case.gradients(case.ours, inputs)
    assert [x.dtype for x in found] == [x.dtype for x in inputs]
    compare(found, case.gradients(case.literal, doubles(inputs)), half, factor=3)


def test_packed_sequences_and_layout_gradients(home, rng):
    """[B, T, H, ...] views with cu_seqlens, one sequence empty, backwards, against linattn_np.vjp on the host."""
    case = Case("gla", rng, {**SIZES, "B": 1, "N": 3})
    *arrays, start = case.arrays
    case.weights[0] = case.weights[0].swapaxes(1, 2)
    given = {"layout": "bthd", "cu_seqlens": [0, 9, 9, 21], "reverse": True, "state_v_first": True}
    start, case.weights[1] = start.swapaxes(2, 3), case.weights[1].swapaxes(2, 3)
    inputs = home.put([*arrays, start])
    found = case.gradients(lambda *x: case.ours(*(y.transpose(1, 2) for y in x[:-1]), x[-1], **given), inputs)
    turned = [x.swapaxes(1, 2) for x in arrays]
    _, pull = linattn_np.vjp(linattn_np.gla, *turned, initial_state=start, **given)
    *wanted, initial = pull(*case.weights)
    compare(found, [*(x.swapaxes(1, 2) for x in wanted), initial], home.dtype)


def test_gradients_of_some(home, rng):
    """Tensors that need no gradient, results that go nowhere, cotangents without strides."""
    case = Case("gla", rng)
    q, k, v, g, start = home.put(case.arrays)
    fixed = [x.detach() for x in (k, v, g, start)]
    _, final = interop.gla(q, *fixed[:3], initial_state=fixed[3], output_final_state=True)
    final.sum().backward()
    assert not q.grad.any()  # the final state does not depend on q
    q.grad = None
    o = interop.gla(q, *fixed[:3])
    assert o.requires_grad and not interop.gla(q.detach(), *fixed[:3]).requires_grad
    o.sum().backward()
    (wanted,) = torch.autograd.grad(case.literal(q, *fixed[:3])[0].sum(), q)
    compare([q.grad], [wanted], home.dtype)


def test_gradients_on_a_side_stream(home, rng):
    """Work goes to torch's current stream, in the backward pass too."""
    if home.device == "cpu":
        pytest.skip("the CPU has no streams")
    case = Case("gla", rng)
    inputs = home.put(case.arrays)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**8)  # what was enqueued before is not done when the call returns
        late = [x * 1 for x in inputs]
        found = case.gradients(case.ours, late)
        torch.cuda.current_stream().synchronize()
    compare(found, case.gradients(case.literal, doubles(inputs)), home.dtype)


def test_changes_in_place_are_noticed(rng):
    q, k, v, g = (torch.tensor(x) for x in draw(GLA, rng, SIZES))
    o = interop.gla(q, k, v.requires_grad_(), g)
    k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize(
    "name, option, make, change",
    [
        ("gla", "mask", lambda: torch.ones(1, 21, dtype=torch.bool), lambda x: x.fill_(False)),
        ("gla", "mask", lambda: np.ones((1, 21), bool), lambda x: x.fill(False)),
        ("gla", "cu_seqlens", lambda: [0, 3, 21], lambda x: x.__setitem__(1, 9)),
        ("retention", "gamma", lambda: np.array([0.5, 0.9]), lambda x: x.fill(0.1)),
    ],
)
def test_options_that_change_are_copied(name, option, make, change, rng):
    """Between the forward and the backward pass."""
    case = Case(name, rng, {**SIZES, "B": 1, "H": 2, "N": 2}, stateful=False)
    inputs, gradients = [torch.tensor(x, requires_grad=True) for x in case.arrays], []
    for changing in (change, lambda x: None):
        given = make()
        o = getattr(interop, name)(*inputs, **{option: given})
        changing(given)
        gradients.append(torch.autograd.grad(o.sum(), inputs))
    assert all(map(torch.equal, *gradients))


def test_changes_in_place_are_noticed_on_ranks(rng):
    arrays = draw(GLA, rng, SIZES)

    def on_a_rank(comm):
        q, k, v, g = (torch.tensor(x) for x in arrays)
        o = interop.gla(q, k, v.requires_grad_(), g, comm=comm)
        k += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()

    linattn_np.distributed.run_threads(on_a_rank, 1)


@pytest.mark.parametrize("name", ["gla", "rwkv6"])
def test_steps(name, rng):
    """Token by token the results and gradients of the whole sequence; no state is written to."""
    case = Case(name, rng, {**SIZES, "T": 4})
    case.final = True
    inputs = [torch.tensor(x, requires_grad=True) for x in case.arrays]

    def by_steps(*inputs):
        *arrays, state = inputs
        os = []
        for t in range(4):
            o, state = getattr(interop, f"{name}_step")(*(x[:, :, t] if x.ndim == 4 else x for x in arrays), state)
            os.append(o)
        return torch.stack(os, 2), state

    compare(by_steps(*inputs), case.ours(*inputs), torch.float64)
    compare(case.gradients(by_steps, inputs), case.gradients(case.ours, inputs), torch.float64)
    *arrays, state = (x[:, :, 0] if x.ndim == 4 and n < len(inputs) - 1 else x for n, x in enumerate(inputs))
    o, new = getattr(interop, f"{name}_step")(*(x.float() for x in arrays), state.bfloat16())
    assert o.dtype == torch.float32 and new.dtype == torch.bfloat16
    with pytest.raises(ContractError, match=f"{name}_step: k has 4 axes, .*expected .B, H, K."):
        getattr(interop, f"{name}_step")(arrays[0], arrays[1][None], *arrays[2:], state)


@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast(home, gate, rng):
    """What torch's attention casts is cast here; gates stay in float32, gradients have the tensors' dtypes."""
    case = Case("gla", rng)
    inputs = home.put(case.arrays, torch.float32)
    inputs[3] = inputs[3].detach().to(gate).requires_grad_()
    with torch.autocast(home.device, torch.bfloat16):
        found = case.ours(*inputs)
        assert found[0].dtype == torch.nn.functional.scaled_dot_product_attention(*inputs[:3]).dtype
    gradients = torch.autograd.grad([x.sum() for x in found], inputs)
    assert [x.dtype for x in gradients] == [x.dtype for x in inputs]
    q, k, v, g, state = (x.detach() for x in inputs)
    half = [x.bfloat16() for x in (q, k, v)]
    compare(found, case.ours(*half, g if gate == torch.bfloat16 else g.float(), state), torch.bfloat16)
    with torch.autocast(home.device, torch.bfloat16, enabled=False):
        assert case.ours(q, k, v, g.float(), state)[0].dtype == torch.float32


def test_a_negated_cotangent(rng):
    """z.conj().imag, of which memory holds the opposite."""
    q, k, v, g = (torch.tensor(x, requires_grad=True) for x in draw(GLA, rng, SIZES))
    o, do = interop.gla(q, k, v, g), torch.complex(v, v).detach().conj().imag
    assert do.is_neg()
    wanted = torch.autograd.grad(o, q, do.resolve_neg(), retain_graph=True)
    assert torch.equal(*torch.autograd.grad(o, q, do), *wanted)


def test_results_are_in_memory_of_torch(monkeypatch):
    """What CuPy takes from torch's allocator comes back as views of torch's storage, empty ones too."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    with cupy.cuda.using_allocator(lambda size: torch_calls.memory_of_torch(torch.device("cpu"), size)):
        x = cupy.ndarray((3, 4, 5), np.float32)
        empty = cupy.ndarray((0, 4), np.float64)
    part = from_native(x[1:, ::2].transpose(0, 2, 1), "torch", None)
    x.data.mem._owner.view(torch.float32).copy_(torch.arange(60))
    assert torch.equal(part, torch.arange(60.0).view(3, 4, 5)[1:, ::2].transpose(1, 2))
    assert part.untyped_storage().data_ptr() == x.data.ptr and not part._is_view()
    assert from_native(empty, "torch", None).shape == (0, 4)


def test_results_live_as_tensors_do(home):
    """Another stream may read what is dropped, once torch is told: until then its memory is given to nobody."""
    if home.device == "cpu":
        pytest.skip("the CPU has no streams")
    q, k, v, g = (torch.randn(2, 4, 512, 64, device="cuda") for _ in range(4))
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.no_grad():
        wanted = interop.gla(q, k, v, -g.abs()).double().sum()
        torch.cuda.synchronize()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            o = interop.gla(q, k, v, -g.abs())
        main.wait_stream(side)
        torch.cuda._sleep(3 * 10**8)
        found = o.double().sum()
        o.record_stream(main)
        place, was_read = o.data_ptr(), main.record_event()
        del o
        with torch.cuda.stream(side):
            for _ in range(4):
                assert interop.gla(q, k, 3 * v, -g.abs()).data_ptr() != place or was_read.query()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("option", ["gradients", "cu_seqlens", "mask"])
def test_graphs_of_torch(home, option):
    """torch's own idiom: a side stream warms up, another one captures."""
    if home.device == "cpu":
        pytest.skip("the CPU has no graphs")
    q, k, v, g = (torch.randn(1, 4, 300, 64, device="cuda") for _ in range(4))
    given = {"cu_seqlens": {"cu_seqlens": [0, 100, 300]}, "mask": {"mask": torch.arange(300, device="cuda")[None] > 20}}
    learns = option == "gradients"

    def call():
        inputs = [x.detach().requires_grad_(learns) for x in (q, k, v, g)]
        o = interop.gla(*inputs[:3], -inputs[3].abs(), **given.get(option, {}))
        return torch.autograd.grad(o.square().sum(), inputs) if learns else (o,)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    kept = len(graph_capture.in_graphs)
    with torch.cuda.graph(graph):
        results = call()
    assert sum(x.nbytes for x in graph_capture.in_graphs[kept:]) < q.nbytes  # tables; the rest is in the graph's pool
    for x in (q, k, v, g):
        x.copy_(torch.randn_like(x))
    graph.replay()
    compare(results, call(), torch.float32)


def test_training(rng):
    """A few steps with torch's optimizer, through a projection."""
    x = torch.tensor(rng.standard_normal((1, 2, 40, 8)), dtype=torch.float32)
    project = torch.nn.Linear(8, 32)
    optimizer = torch.optim.Adam(project.parameters(), 0.02)
    losses = []
    for _ in range(15):
        q, k, v, g = project(x).chunk(4, dim=-1)
        loss = (interop.gla(q, k, v, torch.nn.functional.logsigmoid(g)) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_misfits_are_refused(rng):
    arrays = draw(GLA, rng, SIZES, np.float32)
    q, k, v, g = map(torch.from_numpy, arrays)
    with pytest.raises(ContractTypeError, match="gla: k is a numpy.ndarray, expected a torch.Tensor: torch.as_tensor"):
        interop.gla(q, arrays[1], v, g)
    with pytest.raises(ContractTypeError, match="gla: g is a builtins.NoneType, expected a torch.Tensor$"):
        interop.gla(q, k, v, None)
    with pytest.raises(ContractTypeError, match="gla: initial_state is a builtins.list, expected a torch.Tensor"):
        interop.gla(q, k, v, g, initial_state=[q])
    with pytest.raises(ContractError, match="gla: v has T=3, but T=21 elsewhere"):
        interop.gla(q, k, v[:, :, :3], g)
    with pytest.raises(TypeError, match="^gla: got an unexpected keyword argument 'out'"):
        interop.gla(q, k, v, g, out=v)


def test_gradients_of_gradients_are_refused(rng):
    q, k, v, g = (torch.tensor(x) for x in draw(GLA, rng, SIZES))
    gradient = torch.func.grad(lambda q: interop.gla(q, k, v, g).square().sum())
    with pytest.raises(NotImplementedError, match="gradients are first-order"):
        torch.func.grad(lambda q: gradient(q).sum())(q)
    q.requires_grad_()
    for loss in (interop.gla(q, k, v, g).square(), interop.gla(q, k, v, g)):  # do needs a gradient, or does not
        (gradient,) = torch.autograd.grad(loss.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="gradients are first-order"):
            (gradient.square().sum() + q.sum()).backward()


def test_tangents_are_refused(rng):
    q, k, v, g = (torch.tensor(x) for x in draw(GLA, rng, SIZES))
    with pytest.raises(NotImplementedError, match="gradients are first-order and reverse-mode"):
        torch.func.jvp(lambda q: interop.gla(q, k, v, g), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, k)
        with pytest.raises(NotImplementedError, match="gradients are first-order and reverse-mode"):
            interop.gla(dual, k, v, g)
        with pytest.raises(ContractTypeError, match="gla: q carries a tangent"):
            linattn_np.gla(dual, k, v, g)


# -- transformations ---------------------------------------------------------------------------------------------------
GIVEN = {
    "gla": {"mode": "chunk", "chunk_size": 16, "state_dtype": np.float64},
    "rwkv6": {"scale": 1.0, "reverse": True},
}


def weighed(case, **given):
    """A sum of all results of a call, with weights that are drawn once."""
    weights = [torch.tensor(x) for x in case.weights]
    return lambda *inputs: sum((x * w).sum() for x, w in zip(case.ours(*inputs, **given), weights, strict=True))


compiles = pytest.mark.skipif(not interop.TRACED, reason="a graph holds a call from torch 2.15 on")


@pytest.mark.skipif(interop.TRACED, reason="of an older torch")
def test_an_older_compiler_leaves_its_graph(rng):
    """With one warning, and with gradients."""
    inputs = [torch.tensor(x, requires_grad=True) for x in draw(GLA, rng, SIZES)]
    interop.warn_of_graph_break.cache_clear()

    def loss(q, k, v, g):
        return interop.gla(2 * q, k, v, g).square().sum()

    compiled = torch.compile(loss, backend="eager")
    with pytest.warns(linattn_np.LinattnWarning, match="torch.compile leaves its graph") as told:
        found = [torch.autograd.grad(compiled(*inputs), inputs) for _ in range(2)]
    assert len(told) == 1
    for gradients in found:
        compare(gradients, torch.autograd.grad(loss(*inputs), inputs), torch.float64)


def test_an_exported_program_holds_the_call(rng):
    """Whatever torch's version: Dynamo has no part in it."""

    class Doubled(torch.nn.Module):
        def forward(self, *inputs):
            return 2 * interop.gla(*inputs)

    given, others = ([*map(torch.tensor, draw(GLA, rng, SIZES))] for _ in range(2))
    program = torch.export.export(Doubled(), tuple(given), strict=False).module()
    assert torch.equal(program(*others), 2 * interop.gla(*others))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["gla", "rwkv6", "softmax_attention"])
def test_a_recorded_graph_holds_the_call(name, tracing_mode, rng):
    """And its gradients: no result is a constant."""
    case, others = Case(name, rng), Case(name, rng)

    def gradients(*inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        results = case.ours(*inputs, **GIVEN.get(name, {}))
        return *results, *torch.autograd.grad(sum(x.square().sum() for x in results), inputs)

    given, new = ([*map(torch.tensor, x.arrays)] for x in (case, others))
    graph = proxy_tensor.make_fx(gradients, tracing_mode=tracing_mode)(*given)
    compare(graph(*new), gradients(*new), torch.float64)


def test_gradients_recorded_later(rng):
    """The graph of a backward pass whose forward pass no graph has."""
    inputs = [torch.tensor(x, requires_grad=True) for x in draw(GLA, rng, SIZES)]
    o = interop.gla(*inputs)
    given, other = torch.randn_like(o), torch.randn_like(o)

    def pull(do):
        return torch.autograd.grad(o, inputs, do, retain_graph=True)

    compare(proxy_tensor.make_fx(pull)(given)(other), pull(other), torch.float64)


def test_a_recorded_mask(rng):
    mask, other = (torch.tensor(rng.random((2, 21)) < 0.7) for _ in range(2))
    arrays = [*map(torch.tensor, draw(GLA, rng, {**SIZES, "B": 2}))]
    graph = proxy_tensor.make_fx(lambda mask: interop.gla(*arrays, mask=mask))(mask)
    assert torch.equal(graph(other), interop.gla(*arrays, mask=other))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_function_holds_the_call(rng):
    given, others = ([*map(torch.tensor, draw(GLA, rng, SIZES))] for _ in range(2))
    traced = torch.jit.trace(interop.gla, tuple(given))
    assert torch.equal(traced(*others), interop.gla(*others))


def record(function, *inputs):
    return proxy_tensor.make_fx(function)(*inputs)


def trace(function, *inputs):
    return torch.jit.trace(function, inputs, check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recorder", [record, trace])
def test_what_a_graph_would_hold_as_a_constant_is_refused(recorder, rng):
    q, k, v, g = map(torch.tensor, draw(GLA, rng, {**SIZES, "B": 1}))
    bounds = torch.tensor([0, 5, SIZES["T"]])
    with pytest.raises(ContractTypeError, match="gla: q is in a graph that torch records, .* from linattn_np.interop"):
        recorder(lambda q: linattn_np.gla(q, k, v, g), q)
    with pytest.raises(ContractTypeError, match="gla: cu_seqlens is a tensor where torch records a graph, expected nu"):
        recorder(lambda bounds: interop.gla(q, k, v, g, cu_seqlens=bounds), bounds)
    with pytest.raises(ContractError, match="gla: comm is given where torch records a graph"):
        recorder(lambda q: interop.gla(q, k, v, g, comm=linattn_np.distributed.connect()), q)


def test_sizes_of_symbols_are_numbers_of_the_call(rng):
    (q, *_), (other, *_) = ([*map(torch.tensor, draw(GLA, rng, {**SIZES, "B": 1}))] for _ in range(2))

    def scaled(q):
        return interop.gla(q, q, q, q, scale=q.shape[2] ** -0.5, cu_seqlens=[0, q.shape[2]])

    graph = proxy_tensor.make_fx(scaled, tracing_mode="symbolic")(q)
    assert torch.equal(graph(other), scaled(other))


@compiles
@pytest.mark.parametrize("name", ["gla", "rwkv6", "simple_gla", "softmax_attention"])
def test_compiled_gradients(name, rng):
    """The graph holds the call whole: nothing falls back to eager code."""
    case = Case(name, rng)
    given = GIVEN.get(name, {})
    inputs = [torch.tensor(x, requires_grad=True) for x in case.arrays]
    loss = weighed(case, **given)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compare(
            torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs), torch.float64
        )


@compiles
def test_compiled_with_masks_and_layouts(rng):
    arrays = [torch.tensor(x.swapaxes(1, 2).copy(), requires_grad=True) for x in draw(GLA, rng, {**SIZES, "B": 3})]
    mask = torch.tensor(rng.random((3, 21)) < 0.7)

    def loss(q, k, v, g, mask):
        return interop.gla(q * 2, k, v, g, mask=mask, layout="bthd").square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    found, wanted = (torch.autograd.grad(f(*arrays, mask), arrays) for f in (compiled, loss))
    compare(found, wanted, torch.float64)
    gated = torch.compile(lambda *x: interop.gla(*x), backend="aot_eager", fullgraph=True)
    five = [x.detach() for x in (*arrays, arrays[2])]
    compare(
        [gated(*(x.transpose(1, 2) for x in five))], [interop.gla(*(x.transpose(1, 2) for x in five))], torch.float64
    )


@pytest.mark.parametrize("name", ["gla", "rwkv6", "retention", "linear_attention"])
def test_functional_gradients(name, rng):
    case = Case(name, rng)
    inputs = [torch.tensor(x, requires_grad=True) for x in case.arrays]
    loss = weighed(case, **GIVEN.get(name, {}))
    found = torch.func.grad(loss, tuple(range(len(inputs))))(*(x.detach() for x in inputs))
    compare(found, torch.autograd.grad(loss(*inputs), inputs), torch.float64)


def test_functional_maps_and_jacobians(rng):
    """Over any axis, of some of the arrays, around and within gradients."""
    q, k, v, g = (torch.tensor(x) for x in draw(GLA, rng, {**SIZES, "T": 5}))
    many = torch.tensor(rng.standard_normal((*q.shape, 3)))
    found = torch.func.vmap(lambda q: interop.gla(q, k, v, g), in_dims=-1)(many)
    compare(found, [interop.gla(many[..., n], k, v, g) for n in range(3)], torch.float64)

    def loss(q):
        return interop.gla(q, k, v, g).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=-1)(many)
    compare(found, [torch.func.grad(loss)(many[..., n]) for n in range(3)], torch.float64)
    first = torch.func.jacrev(lambda q: interop.gla(q, k, v, g)[0, 0, :, 0])(q)
    compare([first[3]], [torch.func.grad(lambda q: interop.gla(q, k, v, g)[0, 0, 3, 0])(q)], torch.float64)
