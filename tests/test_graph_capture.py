"""What a CUDA graph that CuPy captures would lose is refused; a card is played by a module of CuPy's names."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from linattn_np import NotSupported, graph_capture
from linattn_np.conversions import array_to_backend
from linattn_np.declarations import GLA, HGRN2, SIMPLE_GLA
from linattn_np.derived import inner_call
from linattn_np.graph_capture import lasting_memory


class Cupy:
    """CuPy's names that are asked for, with a stream that is capturing or not."""

    def __init__(self, capturing):
        self.pools, self.cuda = (
            [],
            SimpleNamespace(
                get_current_stream=lambda: SimpleNamespace(is_capturing=lambda: capturing),
                get_allocator=lambda: self.pools[-1].malloc,
                Device=lambda ordinal: nullcontext(),
                MemoryPool=self.pool,
                using_allocator=self.using,
            ),
        )
        self.default = self.pool()
        self.pools.append(self.default)

    def pool(self):
        return SimpleNamespace(malloc=object())

    def get_default_memory_pool(self):
        return self.default

    def using(self, malloc):
        self.pools.append(SimpleNamespace(malloc=malloc))
        return nullcontext()


@pytest.fixture(params=[True, False], ids=["capturing", "not capturing"])
def capturing(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", Cupy(request.param))
    return request.param


def calls(rng):
    q, k, v, g = rng.standard_normal((4, 1, 2, 20, 8))
    masked = GLA.bind((q, k, v, g), mask=np.ones((1, 20), bool)).replace(home="cuda:0")
    derived = HGRN2.bind((q, g, v)).replace(home="cuda:0")
    gradients = [x.copy() for x in (q, k, v, g)]
    yield "gla: mask cannot be captured", lambda: array_to_backend(masked, q, "B H T K")
    yield "hgrn2: g cannot be captured", lambda: inner_call(derived)
    yield "hgrn2: g cannot be captured", lambda: HGRN2.derived.gradients(derived, gradients)
    shared = SIMPLE_GLA.bind((q[:, :1], k[:, :1], v, g[..., 0])).replace(home="cuda:0")
    yield "simple_gla: q cannot be captured", lambda: inner_call(shared)
    yield "simple_gla: q cannot be captured", lambda: shared.op.derived.gradients(shared, [q, k, v, g[..., 0]])


@pytest.mark.parametrize("number", range(5))
def test_copies_that_a_graph_would_lose(number, capturing, rng):
    message, call = list(calls(rng))[number]
    with pytest.raises(NotSupported, match=message) if capturing else nullcontext():
        call()


@pytest.mark.parametrize("number", range(5))
def test_copies_in_a_pool_that_lasts(number, capturing, rng, monkeypatch):
    """As `linattn_np.distributed` calls; torch's allocator is another of the kind."""
    kept = []
    monkeypatch.setattr(graph_capture, "in_graphs", kept)
    with lasting_memory("cuda:0"):
        list(calls(rng))[number][1]()
    assert len(kept) == capturing
