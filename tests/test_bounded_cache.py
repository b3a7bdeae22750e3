"""What is kept from call to call is bounded in bytes, and the least asked for goes first."""

import tracemalloc
from threading import Thread

import numpy as np
import pytest

import linattn_np
from linattn_np.backends.numpy import scores
from linattn_np.bounded_cache import Cache
from linattn_np.checked_calls import MEMOS
from linattn_np.ops.gla import GLA


def test_entries_and_bytes_are_bounded():
    cache = Cache(most=100, entries=4)
    for key in range(10):
        assert cache.keep(key, str(key), 10) == str(key)
    assert list(cache.kept) == [6, 7, 8, 9] and cache.bytes == 40
    assert cache.get(3) is None and cache.get(9) == "9"
    cache.keep("wide", "x", 95)  # leaves no room for others
    assert list(cache.kept) == ["wide"] and cache.bytes == 95
    cache.keep("wider", "x", 1000)  # one that is wanted is kept, whatever it takes
    assert list(cache.kept) == ["wider"] and cache.bytes == 1000


def test_what_is_asked_for_stays():
    cache = Cache(most=100, entries=3)
    cache.keep("often", 1, 1)
    for key in range(20):
        assert cache.get("often") == 1
        cache.keep(key, key, 1)


def test_the_first_one_kept_is_everyones():
    cache = Cache(most=100, entries=3)
    assert cache.keep("key", "first", 1) == "first" == cache.keep("key", "second", 1)
    assert cache.bytes == 1


def test_threads_leave_the_sum_right():
    cache = Cache(most=500, entries=40)

    def work(seed):
        for n in range(2000):
            key = (seed * 7919 + n * 104729) % 100
            if cache.get(key) is None:
                cache.keep(key, key, key)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.bytes == sum(entry[1] for entry in cache.kept.values()) <= 500 and len(cache.kept) <= 40


def kept_after(calls):
    """Bytes that are still held once `calls` have run."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for call in calls:
            call()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_many_lists_of_sequences(rng, monkeypatch):
    """300 packings of 100,000 sequences once kept 468 MB."""
    memos = Cache(MEMOS.most, MEMOS.entries)
    monkeypatch.setattr("linattn_np.checked_calls.MEMOS", memos)
    x = np.zeros((1, 1, 100_000, 1), np.float32)

    def packing():
        problem = GLA.bind((x, x, x, x), cu_seqlens=np.sort(np.r_[0, rng.integers(0, 100_000, 99_999), 100_000]))
        return problem.spans.lengths

    held = kept_after([packing] * 60)
    assert held < memos.most and memos.bytes <= memos.most
    assert held < memos.bytes + (1 << 20)  # what is counted is no less than what is kept on the host


@pytest.mark.parametrize("mode", ["chunk", "staged"])
def test_many_chunk_sizes(mode, rng):
    """Constants of 17 chunk sizes once took 635 MB, however few tokens there were."""
    q, k, v, g = rng.standard_normal((4, 1, 1, 100, 4))
    wanted = linattn_np.gla(q, k, v, -abs(g), mode="recurrent")
    for size in [16 << n for n in range(14)] + [1 << 30]:
        np.testing.assert_allclose(linattn_np.gla(q, k, v, -abs(g), mode=mode, chunk_size=size), wanted, atol=1e-9)
    assert scores.CONSTANTS.bytes <= scores.CONSTANTS.most
    assert max(entry[0].nbytes for entry in scores.CONSTANTS.kept.values()) <= scores.CONSTANTS.most
