"""What only the NumPy backend has: its routes by gate, packing, cuts that change no bit, and bounded memory."""

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from reference import assert_close, exact, exact_vjp, same_bits

import linattn_np
from linattn_np import varlen
from linattn_np.backends.numpy import casts, chunked, cores, loop_choice, scores
from linattn_np.backends.numpy.packing import MOST_BYTES, Scratch, Segment, row_blocks, thread_scratch

rng = np.random.default_rng(7)


def gates(shape):
    weak = -np.logaddexp(0, -rng.standard_normal(shape)) / 16
    resets = weak.copy()
    resets[..., 5::16, :] = -np.inf
    mixed = weak.copy()
    mixed[1] = -30.0
    mixed[2, 10] = -1e30
    return {
        "weak": weak,
        "strong": np.full(shape, -20.0),
        "resets": resets,
        "mixed": mixed,
        "positive": -weak,
        "forget": np.full(shape, -np.inf),
        "tall": np.where(rng.random(shape) < 0.1, 20.0, weak),
    }


def literal_scores(q, k, g, exclusive):
    """A_ij by its definition, one pair at a time."""
    A = np.zeros((*q.shape[:-1], q.shape[-2]))
    for i in range(q.shape[-2]):
        for j in range(i if exclusive else i + 1):
            between = g[..., j + 1 : i if exclusive else i + 1, :].sum(-2)
            A[..., i, j] = (q[..., i, :] * k[..., j, :] * np.exp(between)).sum(-1)
    return A


def gated(q, k, g, exclusive):
    scratch = Scratch(g.dtype)
    decay = np.empty((*g.shape[:-2], g.shape[-1]))
    with np.errstate(all="ignore"):
        known = scores.Gates(g, scratch)
        return (*scores.gated_scores(q, k, known, exclusive, decay, scratch, keep=True), decay, known)


KINDS = ["weak", "strong", "resets", "mixed", "positive", "forget", "tall"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("width", [6, 1])
@pytest.mark.parametrize("C", [16, 48])
def test_scores_are_exact_for_every_gate(kind, exclusive, width, C):
    q, k = rng.standard_normal((2, 4, C, 6))
    g = gates((4, C, width))[kind]
    qg, kg, A, decay, _ = gated(q, k, g, exclusive)
    before = np.concatenate([np.zeros((4, 1, width)), g], axis=1)
    b = np.stack([before[:, : i + 1].sum(1) for i in range(C + 1)], axis=1)
    e = np.stack([g[:, j + 1 :].sum(1) for j in range(C)], axis=1)
    for got, expected in (
        (A, literal_scores(q, k, g, exclusive)),
        (kg, k * np.exp(e)),
        (decay, np.exp(b[:, -1])),
        (qg, q * np.exp(b[:, :-1] if exclusive else b[:, 1:])),
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13 * max(1.0, np.abs(expected).max()))


def test_each_gate_takes_its_route():
    q = rng.standard_normal((4, 32, 6))
    known = {kind: gated(q, q + 1, g, False)[-1] for kind, g in gates((4, 32, 6)).items()}
    assert known["weak"].strong is None and known["positive"].strong is None
    assert known["mixed"].any_weak and known["mixed"].strong[0].tolist() == [1, 2]
    for kind in ("strong", "resets", "forget", "tall"):
        assert not known[kind].any_weak


def test_gradients_of_scores_are_their_transpose():
    for kind, g in gates((4, 32, 6)).items():
        for exclusive in (False, True):
            q, k, dq, dk, dqg, dkg = rng.standard_normal((6, 4, 32, 6))
            dA = np.tril(rng.standard_normal((4, 32, 32)), -1)
            known = gated(q, k, g, exclusive)[-1]
            with np.errstate(all="ignore"):
                gq, gk, gg = np.empty_like(q), np.empty_like(k), np.empty_like(g)
                scores.gated_scores_vjp(
                    known, exclusive, dA, dqg.copy(), dkg.copy(), np.zeros((4, 6)), (gq, gk, gg), Scratch(g.dtype)
                )
            of_q, of_k = gated(dq, k, g, exclusive), gated(q, dk, g, exclusive)
            for direction, gradient, A, x, dx in ((dq, gq, of_q[2], of_q[0], dqg), (dk, gk, of_k[2], of_k[1], dkg)):
                forward = (dA * A).sum((1, 2)) + (dx * x).sum((1, 2))
                np.testing.assert_allclose(
                    (direction * gradient).sum((1, 2)),
                    forward,
                    rtol=1e-9,
                    atol=1e-11 * max(1.0, np.abs(A).max()),
                    err_msg=kind,
                )


def test_prefix_and_suffix_sums_know_no_differences():
    g = np.array([-1.0, -np.inf, -2.0, -3.0])[:, None]
    b, e = scores.prefix_suffix_sums(g)
    assert b.ravel().tolist() == [-1, -np.inf, -np.inf, -np.inf]
    assert e.ravel().tolist() == [-np.inf, -5, -3, 0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_mask_clears_whatever_stands_there(dtype):
    A = np.full((2, 4, 4), np.inf, dtype)
    A[0] = np.nan
    A[:, np.tri(4, dtype=bool)] = 3
    scores.mask_future(A, exclusive=False)
    assert (A == 3 * np.tri(4)).all()


@pytest.mark.parametrize("bounds", [[0, 64], [0, 50], [0, 0, 7, 7, 39, 71, 100, 100], [0, 32, 64, 96], [0, 0]])
def test_packing_there_and_back(bounds):
    x = rng.standard_normal((1, 3, bounds[-1], 5))
    table = varlen.parse(bounds, bounds[-1]).chunks(16)
    for cut in range(1, len(table) + 1):
        back = np.full_like(x, np.nan)
        for first in range(0, len(table), cut):
            segment = Segment(table[first : first + cut], 16)
            packed = segment.pack(x, x.dtype)
            for c, (start, stop) in enumerate(table[first : first + cut]):
                assert np.array_equal(packed[:, :, c, : stop - start], x[:, :, start:stop])
                assert not packed[:, :, c, stop - start :].any()
            segment.unpack_into(back, packed)
        assert np.array_equal(back, x)


def test_packing_full_chunks_is_a_view_in_either_layout():
    x = np.zeros((2, 64, 3, 8)).swapaxes(1, 2)
    segment = Segment(varlen.dense(64).chunks(16)[1:3], 16)
    assert np.shares_memory(segment.pack(x, x.dtype), x)


@pytest.mark.parametrize("B, H", [(1, 1), (1, 7), (3, 4), (5, 1), (0, 3), (3, 0)])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_row_blocks_cover_every_row_once(B, H, rows):
    seen = np.zeros((B, H), int)
    for block in row_blocks(B, H, rows):
        seen[block] += 1
        assert seen[block].size <= max(rows, H)
    assert (seen == 1).all()


@pytest.mark.parametrize("bounds", [None, [0, 0, 100, 133, 133, 400, 416, 500]])
@pytest.mark.parametrize("op", [linattn_np.gla, linattn_np.rwkv6])
def test_threads_segments_and_materialize_change_no_bit(op, bounds, monkeypatch):
    B, H, T, K, V = (2 if bounds is None else 1), 3, 500, 20, 12
    q, k, g = rng.standard_normal((3, B, H, T, K), dtype=np.float32)
    v = rng.standard_normal((B, H, T, V), dtype=np.float32)
    g = -np.exp(g)
    g[rng.random(g.shape) < 0.002] = -np.inf
    arrays = (q, k, v, g) if op is linattn_np.gla else (q, k, v, g, k[0, :, 0])
    initial = rng.standard_normal((B if bounds is None else len(bounds) - 1, H, K, V), dtype=np.float32)
    results = []
    for workers in (1, 3):
        for elements in (1 << 10, 1 << 14):
            for materialize in (True, False, None):
                monkeypatch.setattr(chunked, "workers", lambda: workers)
                monkeypatch.setattr(chunked, "SEGMENT_ELEMENTS", elements)
                (o, final), pull = linattn_np.vjp(
                    op,
                    *arrays,
                    initial_state=initial,
                    output_final_state=True,
                    cu_seqlens=bounds,
                    materialize=materialize,
                )
                results.append((o, final, *pull(v, initial)))
    for result in results[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(result, results[0], strict=True))


@pytest.mark.parametrize("op", [linattn_np.gla, linattn_np.rwkv6, linattn_np.simple_gla])
def test_long_calls_go_through_compiled_loops(op, monkeypatch):
    """All rows but those with a strong gate, or with results that are not finite."""
    if loop_choice.module() is None:
        pytest.skip("Numba is not here")
    monkeypatch.setattr(loop_choice, "LEAST_ELEMENTS", 1)
    streamed, left = chunked.streamed, []
    monkeypatch.setattr(
        chunked, "streamed", lambda schedule, rows, *a: left.append(rows) or streamed(schedule, rows, *a)
    )
    H, T, K, bounds = 5, 170, 20, [0, 3, 3, 90, 170]
    q, k, v, g = rng.standard_normal((4, 1, H, T, K)).astype(np.float32)
    q, v, g = q.swapaxes(1, 2).copy().swapaxes(1, 2), v[..., :12], -np.exp(g) / 4
    g[:, 2, 100], v[:, 3, 100] = -np.inf, np.inf
    arrays = {linattn_np.rwkv6: (q, k, v, g, k[0, :, 0]), linattn_np.gla: (q, k, v, g)}.get(op, (q, k, v, g[..., 0]))
    how = {"cu_seqlens": bounds, "initial_state": rng.standard_normal((4, H, K, 12)).astype(np.float32)}
    found = op(*arrays, **how, output_final_state=True)
    assert sorted(rows[1].start for rows in left) == [2, 3]
    for what, x, y in zip(("o", "final"), found, exact(op, arrays, **how, output_final_state=True)):
        fine = np.isfinite(y)
        assert (np.isfinite(x) == fine).all()
        assert_close(what, np.where(fine, x, 0), np.where(fine, y, 0), np.float32)
    for workers in (1, 3):
        monkeypatch.setattr(chunked, "workers", lambda: workers)
        again = op(*arrays, **how, output_final_state=True)
        assert all(same_bits(x, y) for x, y in zip(found, again))
    v[:, 3, 100] = 1
    do = rng.standard_normal(v.shape).astype(np.float32)
    for i, (x, y) in enumerate(zip(linattn_np.vjp(op, *arrays, **how)[1](do), exact_vjp(op, arrays, do, **how)[2])):
        assert_close(f"gradient {i}", x, y, np.float32)


def peak_bytes(call):
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_streaming_never_holds_every_state():
    q, k, v, g = rng.standard_normal((4, 1, 1, 32768, 64), dtype=np.float32)
    states = 32768 // 32 * 64 * 64 * 4
    g = -np.abs(g)
    assert peak_bytes(lambda: linattn_np.gla(q, k, v, g, materialize=True)) > states
    assert peak_bytes(lambda: linattn_np.gla(q, k, v, g, materialize=False)) - q.nbytes < states / 2


@pytest.mark.parametrize(
    "call", [linattn_np.softmax_attention, lambda *a: linattn_np.simple_gla(*a, -np.abs(a[0][..., 0]), mode="parallel")]
)
def test_quadratic_forms_never_hold_the_square(call):
    q, k, v = rng.standard_normal((3, 1, 1, 4096, 8), dtype=np.float32)
    call(q, k, v)  # loads Numba's loops
    assert peak_bytes(lambda: call(q, k, v)) < 4096**2 * 4 / 8


def test_hard_gates_have_finite_gradients_and_none_through_a_reset():
    q, k, v, g = rng.standard_normal((4, 1, 2, 70, 8), dtype=np.float32)
    for hard in (-np.inf, -1e30):
        reset = -np.exp(g)
        reset[:, :, 33] = hard
        o, pull = linattn_np.vjp(linattn_np.gla, q, k, v, reset)
        do = np.zeros_like(o)
        do[:, :, 33:] = v[:, :, 33:]
        dq, dk, dv, dg = pull(do)
        assert all(np.isfinite(gradient).all() for gradient in (dq, dk, dv, dg))
        assert not dk[:, :, :33].any() and not dv[:, :, :33].any() and np.abs(dg[:, :, 33]).max() < 1e-5


def test_a_thread_keeps_no_large_arrays():
    B, H, N = 80, 4, 128
    x, state = rng.standard_normal((B, H, N), np.float32), np.zeros((B, H, N, N), np.float32)
    assert state.nbytes > MOST_BYTES
    linattn_np.gla_step(x, x, x, -abs(x), state)
    linattn_np.gla(*(x[:, :, None] for x in (x, x, x, -abs(x))), chunk_size=64)
    assert all(array.nbytes <= MOST_BYTES for array in thread_scratch(state.dtype).buffers.values())


def test_segments_are_as_long_as_those_of_the_longest_sequence():
    spans = varlen.parse([0, 0, 70, 102, 300], 300)
    assert list(spans.segments(3, 32)) == [
        (0, 0),
        (0, 0),
        (0, 0),
        (0, 70),
        (70, 70),
        (70, 70),
        (70, 102),
        (102, 102),
        (102, 102),
        (102, 198),
        (198, 294),
        (294, 300),
    ]
    assert list(varlen.dense(64).segments(2, 32)) == [(0, 32), (32, 64)]


@pytest.mark.parametrize("tasks", [0, 1, 4])
@pytest.mark.parametrize("caller", [False, True])
def test_tasks_leave_the_settings_as_they_were(tasks, caller):
    before = np.geterr(), np.getbufsize()
    inside = cores.in_parallel(lambda task: (set(np.geterr().values()), np.getbufsize()), range(tasks), caller=caller)
    assert inside == [({"ignore"}, cores.BUFFER)] * tasks
    assert (np.geterr(), np.getbufsize()) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_threads_of_its_own():
    program = """
import os, signal, numpy as np, linattn_np
x = np.ones((1, 8, 4096, 16), np.float32)
o = linattn_np.gla(x, x, x, -x)
child = os.fork()
if not child:
    signal.alarm(600)                   # without threads it would wait for ever
    os._exit(not np.array_equal(linattn_np.gla(x, x, x, -x), o))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("op", [linattn_np.gla, linattn_np.rwkv6, linattn_np.retention])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("strong", [False, True])  # a gate whose chunk goes another way backward than forward
def test_kept_scores_give_the_bits_of_those_made_again(op, layout, strong, monkeypatch):
    made, Scores = [], chunked.Scores
    monkeypatch.setattr(chunked, "Scores", lambda *a, **k: made.append(k) or Scores(*a, **k))
    q, k, v, do = rng.standard_normal((4, 1, 2, 70, 8))
    g = np.where(np.arange(70)[:, None] == 40, -7.0 if strong else 0.0, -rng.random((1, 2, 70, 8)))
    rest = {linattn_np.gla: (g,), linattn_np.rwkv6: (g, rng.standard_normal((2, 8))), linattn_np.retention: ()}[op]
    arrays = [np.swapaxes(x, 1, 2) if layout == "bthd" and x.ndim == 4 else x for x in (q, k, v, *rest)]
    found = []
    for most in (chunked.SCORES_BYTES, 0):
        monkeypatch.setattr(chunked, "SCORES_BYTES", most)
        o, pull = linattn_np.vjp(op, *arrays, layout=layout)
        made.clear()
        found.append((o, *pull(do.reshape(o.shape))))
        assert len(made) == (not most or (strong and bool(rest)))
        found.append((o, *pull(do.reshape(o.shape))))  # nothing was spent
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def same_numbers(found, wanted):
    """To the bit, but for those of NaN."""
    nan = np.isnan(wanted)
    return (np.isnan(found) == nan).all() and same_bits(found[~nan], wanted[~nan])


def test_casts_of_half_precision_are_numpys():
    """With every float16, and every border between two of them."""
    pytest.importorskip("numba", reason="NumPy casts without Numba")
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        wide = halves.astype(np.float32)
        turned = halves.reshape(2, -1, 64)[:, ::-1]
        assert same_numbers(casts.cast(turned, np.dtype(np.float32)), turned.astype(np.float32))
        near = wide.view(np.uint32)[:, None] + np.arange(0, 1 << 13, 1 << 10, dtype=np.uint32)
        for bits in (near - np.uint32(1), near, near + np.uint32(1)):
            x = bits.view(np.float32)
            found = np.empty(x.shape[::-1], np.float16).T
            casts.assign(found, x)
            assert same_numbers(found, x.astype(np.float16))
