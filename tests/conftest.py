"""Which backends are tested, one object a backend, and random numbers that can be had again.

pytest                                              numpy, and the CUDA kernels emulated on the CPU, those of Hopper too
pytest --backends=cupy,numba                        on a card
NUMBA_ENABLE_CUDASIM=1 pytest --backends=numba      Numba's simulator
pytest -m quick                                     one minute: every operator, by its kernels too
pytest --exhaustive                                 every case of every product, where else are some of `pairs.py`
"""

import functools
import gc
import os
import random
import sys
import zlib
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pairs
import pytest
import reference

from linattn_np import dispatch
from linattn_np.array_kinds import BFLOAT16
from linattn_np.contract import CHUNK
from linattn_np.declarations import DELTA_RULES, GLA_VALUE_GATE
from linattn_np.ops import OPS

DOUBLE, SINGLE, HALF = (np.dtype(t) for t in ("float64", "float32", "float16"))
QUICK = "quick"  # the mark, and what -m says for it
PATIENCE = 600  # seconds after which a process or thread of a test hangs, even on a core ten times slower than CI's
SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
if SIMULATOR:
    from turns import take_turns

    take_turns()


class Backend:
    """A backend as the tests see it: what it can do, how arrays get there and back, how a function runs on it."""

    modes = {op.name: op.modes for op in (*OPS, GLA_VALUE_GATE)}
    dtypes = (DOUBLE, SINGLE, HALF, BFLOAT16)
    gradients = False
    materialize = (True, False)
    gates_choose_the_route = False  # by chunk: how it is computed depends on its gates
    tokens_that_share_bits = {}  # by mode: of so many a later one's gate may move an earlier one's last bit
    sizes = ("tiny", "small")  # of the cases that run in reasonable time
    device = None  # what launches kernels of our own, where there is such a thing
    rows = {}  # reference.ROWS here
    gradient_rows = {"bfloat16": 4}  # the same of gradients: sums by rounded scores, which cancel

    def __init__(self, name):
        self.name = name

    @classmethod
    def takes(cls, op, mode, dtype):
        return mode in cls.modes[op.name] and dtype in cls.dtypes

    def asarray(self, host):
        return host

    def tohost(self, x):
        return np.asarray(x)

    def run(self, function, *arrays, **arguments):
        """`function` on native arrays; an operator, a step, a stage, or explain and vjp with an operator first."""
        return function(*arrays, backend=self.name, **arguments)


class Numpy(Backend):
    gradients = True
    gates_choose_the_route = True
    tokens_that_share_bits = dict.fromkeys(("auto", "chunk", "staged", "parallel"), CHUNK)


# Forward kernels round all operands of scores to bfloat16. On Hopper, in float16, scores and what states are read with
# are tf32: a row that cancels to a tenth has shown 4.2e-3 on an H200, where the limit of other kernels is 4e-3.
KERNEL_ROWS = {"bfloat16": 2}
HOPPER_ROWS, HOPPER_GRADIENT_ROWS = KERNEL_ROWS | {"float16": 1.5}, {"bfloat16": 4, "float16": 4}


class Kernels(Backend):
    """What the CUDA kernels can do, wherever they run."""

    modes = {op.name: ("recurrent", "chunk", "staged") for op in OPS}
    modes |= {op.name: ("recurrent", "chunk") for op in (GLA_VALUE_GATE, *DELTA_RULES)} | {"softmax_attention": ()}
    gradients = True
    rows = KERNEL_ROWS
    tokens_that_share_bits = {"chunk": 8, "staged": 8}  # which meet in their middle

    @classmethod
    def takes(cls, op, mode, dtype):
        """test_softmax_attention tests that operator."""
        return op.name == "softmax_attention" or super().takes(op, mode, dtype)


class Emulated(Kernels):
    """The CuPy backend's host plans and kernels, on NumPy arrays."""

    capability = 80

    def __init__(self, name):
        super().__init__(name)
        from emulator import EmulatedDevice

        from linattn_np.backends import cupy

        self.device = EmulatedDevice(self.capability)
        sys.modules[f"linattn_np.backends.{name}"] = SimpleNamespace(
            why_not=cupy.unsupported,
            run=lambda problem, summaries=(): self.results(problem, summaries)[0],
            vjp=self.vjp,
            summarise=self.summarise,
            SAVES_SUMMARIES=True,
            OWN=cupy.OWN,
        )

    def results(self, problem, summaries=()):
        """(results, what the pullback needs besides), of a plan of this call alone."""
        from planned import run_and_save

        return run_and_save(problem.replace(memo=None), self.device, summaries=summaries)

    def summarise(self, problem):
        from planned import executed

        return executed("plan_summary", problem.replace(memo=None), self.device)

    def vjp(self, problem, summaries=()):
        import planned

        result, saved = self.results(problem, summaries)
        alone = problem.replace(memo=None)

        def pull(do, dht, summaries=()):
            return planned.pull(alone, self.device, do, dht, saved, summaries)

        pull.summarise = lambda do: planned.executed("plan_summary_vjp", alone, self.device, do=do, saved=saved)
        return result, pull

    def run(self, function, *arrays, **arguments):
        with self.in_dispatch():
            return super().run(function, *arrays, **arguments)

    @contextmanager
    def in_dispatch(self):
        """The public functions know this backend by name for the length of a call."""
        order = dispatch.ORDER
        dispatch.ORDER = (*order, self.name)
        try:
            yield
        finally:
            dispatch.ORDER = order


class Hopper(Emulated):
    """The same as a card of compute capability 9.0 computes it."""

    capability = 90
    rows, gradient_rows = HOPPER_ROWS, HOPPER_GRADIENT_ROWS


class OnCard:
    """Arrays on the current CUDA device; all memory that CuPy hands out holds NaN until it is written."""

    sizes = ("tiny", "small", "large")

    def __init__(self, name):
        super().__init__(name)
        import cupy

        assert cupy.cuda.Device().compute_capability  # raises where there is no device
        self.cupy = cupy
        cupy.cuda.set_allocator(self.poisoned)

    def poisoned(self, size):
        memory = self.cupy.get_default_memory_pool().malloc(size)
        memory.memset_async(0xFF, size)
        return memory

    def asarray(self, host):
        return self.cupy.asarray(host)

    def tohost(self, x):
        return self.cupy.asnumpy(x)


class Cupy(OnCard, Kernels):
    def __init__(self, name):
        super().__init__(name)
        from linattn_np.backends.cupy.device import CupyDevice

        self.device = CupyDevice()
        if self.device.capability == 90:
            self.rows, self.gradient_rows = HOPPER_ROWS, HOPPER_GRADIENT_ROWS


class NumbaKernels(Backend):
    modes = {
        op.name: ("recurrent", "staged") if op.name in ("gla", "rwkv6", "hgrn2") else ()
        for op in (*OPS, GLA_VALUE_GATE)
    } | {op.name: ("recurrent",) for op in DELTA_RULES}
    materialize = (True,)


class Numba(OnCard, NumbaKernels):
    pass


class NumbaSimulated(NumbaKernels):
    sizes = ("tiny",)


CLASSES = {
    "numpy": Numpy,
    "emulated": Emulated,
    "hopper": Hopper,
    "cupy": Cupy,
    "numba": NumbaSimulated if SIMULATOR else Numba,
}

PART = 1 / 5  # of the cases that have all pairs of values: in it every value occurs
# Axes of which every value occurs in each run, in a third of that part; those of other axes occur in some runs.
WHOLE = {"op", "operator", "variant", "kind", "mode", "dtype", "backend", "kernel_backend", "device", "folder"}

# Fixtures for kernels of some cards alone, and the backend that has no cases of theirs: a case that is skipped would
# stand for its pairs of values.
ELSEWHERE = {"hopper": "emulated", "portable": "hopper"}


def pytest_addoption(parser):
    parser.addoption(
        "--backends",
        default="numpy,emulated,hopper",
        help=f"which to test, of {', '.join(CLASSES)}; one that cannot run is a failure",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="every case of a product, and every kernel for every card; else a part, which --seed draws",
    )
    parser.addoption("--seed", type=int, help="of the random inputs; fresh by default and printed at the top")


def pytest_configure(config):
    names = config.getoption("--backends").split(",")
    if unknown := set(names) - set(CLASSES):
        raise pytest.UsageError(f"--backends: {', '.join(sorted(unknown))} unknown, expected {', '.join(CLASSES)}")
    config.backends = {name: CLASSES[name] for name in names}
    if not any(
        issubclass(cls, OnCard) for cls in config.backends.values()
    ):  # most of JAX's time on a CPU is compilation
        os.environ.setdefault(
            "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
    if hasattr(config, "workerinput"):  # one of pytest-xdist's processes
        config.option.seed = config.workerinput["seed"]
    elif config.option.seed is None:
        config.option.seed = int.from_bytes(os.urandom(4))


def kept(name, cases, mark, config):
    """The numbers of the cases that run, of a test marked `pairwise`: first those with all pairs of its axes' values,
    where axes that are joined count as one; of these a part that the seed draws, with every value; and of the part a
    third, with every value of the axes WHOLE. Where the mark has an axis `half`, of half of its values, which the seed
    draws.
    NumPy's cases take less time, and `pytest -m quick` has few: all pairs and all of these stay.
    """
    seed = f"{config.option.seed} {name}"
    axes = functools.cache(lambda n: (*pairs.axes_of(cases[n].params, mark.args),))
    quick = [n for n, case in enumerate(cases) if any(mark.name == "quick" for mark in case.marks)]
    value = lambda n: repr(cases[n].params[mark.kwargs["half"]]) if mark.kwargs else ""
    values = sorted({*map(value, range(len(cases)))})
    values = random.Random(seed).sample(values, -(-len(values) // 2))
    of_numpy, costly = [], []
    for n, case in enumerate(cases):
        if value(n) in values:
            (of_numpy if case.params.get("backend") == "numpy" else costly).append(n)
    random.Random(seed).shuffle(of_numpy)
    whole = lambda n: [("", ""), *(place for place in axes(n) if WHOLE.intersection(place[0]))]
    costly = pairs.part(pairs.part(pairs.choose(costly, axes), axes, PART, seed), whole, 1 / 3, seed)
    return {*pairs.choose(of_numpy, axes), *costly, *quick}


@functools.cache
def is_quick(path):
    return f"mark.{QUICK}" in path.read_text()


def pytest_ignore_collect(collection_path, config):
    """`pytest -m quick` imports only the files that have such cases: the others take longer than the cases do."""
    if config.option.markexpr == QUICK and collection_path.suffix == ".py" and not is_quick(collection_path):
        return True


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without Python's search for cycles, which looks at all cases again and again while more are made, and takes a
    third of the time. Nor does it look at them afterwards.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def thins_at_once(config):
    """Before there are items, which take longer; where -k, or a name, chooses some, pairs are of what is left."""
    named = config.option.keyword or any("::" in name for name in config.args)
    return not named and not config.getoption("--exhaustive")


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(config, items):
    if not config.getoption("--exhaustive") and not any("::" in name for name in config.args):
        costly = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=costly)
        items[:] = [item for item in items if item not in costly]
    if config.getoption("--exhaustive") or thins_at_once(config):
        return
    products = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("pairwise")
        if mark and hasattr(item, "callspec"):
            products[item.function].append(item)
    left_out = set()
    for cases in products.values():
        mark = cases[0].get_closest_marker("pairwise")
        runs = kept(cases[0].originalname, [item.callspec for item in cases], mark, config)
        left_out |= {item for n, item in enumerate(cases) if n not in runs}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config):
    chosen = config.option.markexpr or config.option.keyword or config.args != config.getini("testpaths")
    takes = [] if chosen else ["all tests take 10 minutes on two cores; pytest -m quick takes one"]
    return [f"backends: {', '.join(config.backends)}; --seed={config.option.seed}", *takes]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    parametrize(metafunc)
    yield  # to what modules have of this name
    mark = metafunc.definition.get_closest_marker("pairwise")
    if mark and metafunc._calls and thins_at_once(metafunc.config):
        runs = kept(metafunc.definition.originalname, metafunc._calls, mark, metafunc.config)
        metafunc._calls[:] = [case for n, case in enumerate(metafunc._calls) if n in runs]


def parametrize(metafunc):
    """A test that asks for `backend` runs on every listed one, or on those of the class or classes BACKENDS of its
    module, unless its module generates its own cases."""
    if "backend" in metafunc.fixturenames and not hasattr(metafunc.module, "pytest_generate_tests"):
        classes = getattr(metafunc.module, "BACKENDS", Backend)
        names = [name for name, cls in metafunc.config.backends.items() if issubclass(cls, classes)]
        with_variants(metafunc, "backend", names)
    if "card" in metafunc.fixturenames:
        cards = {name: cls for name, cls in metafunc.config.backends.items() if issubclass(cls, OnCard)}
        if "mode" in metafunc.fixturenames:
            modes = [(name, mode) for name, cls in cards.items() for mode in cls.modes["gla"]]
            metafunc.parametrize("card, mode", modes, indirect=["card"])
        else:
            metafunc.parametrize("card", cards, indirect=True)
    if "device" in metafunc.fixturenames:
        elsewhere = {own: other for own, other in ELSEWHERE.items() if own in metafunc.fixturenames}
        launching = [name for name in launches_kernels(metafunc.config.backends) if name not in elsewhere.values()]
        metafunc.parametrize("device", launching, indirect=True)
    if "kernel_backend" in metafunc.fixturenames:
        metafunc.parametrize("kernel_backend", launches_kernels(metafunc.config.backends), indirect=True)


def launches_kernels(backends):
    """The names of those that launch kernels_cu's kernels."""
    return [name for name, cls in backends.items() if issubclass(cls, Kernels)]


def with_variants(metafunc, fixture, names):
    """Each of these backends; of a test that asks for `variant` too, with each of its module's VARIANTS that it has."""
    if "variant" in metafunc.fixturenames:
        cases = [
            (name, variant)
            for name in names
            for variant, (op, *_) in metafunc.module.VARIANTS.items()
            if CLASSES[name].modes[op.name]
        ]
        metafunc.parametrize(f"{fixture}, variant", cases, indirect=[fixture])
    else:
        metafunc.parametrize(fixture, names, indirect=True)


@pytest.fixture(scope="session")
def backends():
    """Backend objects by name, made when first asked for; one that cannot be made fails its tests."""
    return {}


@pytest.fixture(autouse=True)
def rows_of_the_backend(request, backends, monkeypatch):
    """What `reference.assert_close` allows, on the backend that the test asks for."""
    for asked in {"backend", "kernel_backend", "card", "device"} & set(request.fixturenames):
        name = request.node.callspec.params.get(asked)
        if name in CLASSES:
            monkeypatch.setattr(reference, "ROWS", made(name, backends).rows)


@pytest.fixture
def backend(request, backends):
    return made(request.param, backends)


@pytest.fixture
def kernel_backend(request, backends):
    """A backend that launches kernels_cu's kernels."""
    return made(request.param, backends)


@pytest.fixture
def card(request, backends):
    """A backend whose arrays are on a card."""
    return made(request.param, backends)


@pytest.fixture
def device(request, backends):
    """Where kernels of the tests' own are launched."""
    return made(request.param, backends).device


every_version = functools.partial(pytest.fixture, params=[6, 7], ids="RWKV{}".format)


@every_version()
def kind(request):
    """The class of a version's models: a test that asks for it runs with every version."""
    from linattn_np.models.versions import VERSIONS

    return VERSIONS[request.param]


@every_version(scope="module")
def austen(request):
    """A version's small model of Jane Austen's novels."""
    from linattn_np import models

    return models.load(models.austen(request.param))


@pytest.fixture
def hopper(device):
    """Where plans take Hopper's own kernels."""
    if device.capability != 90:
        pytest.skip("kernels for Hopper alone")
    return device


def made(name, backends):
    if name not in backends:
        backends[name] = CLASSES[name](name)
    return backends[name]


@pytest.fixture
def seed(request):
    return request.config.option.seed


@pytest.fixture
def rng(request, seed):
    """Fresh numbers for every test; the same ones again with the seed that the header prints."""
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])
