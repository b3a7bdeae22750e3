"""What every backend must obey, no reference asked. Bitwise where a law says bits."""

from dataclasses import dataclass

import numpy as np
import pytest
from reference import assert_close, double, draw, draw_states, parts, same_bits, stated, whole

from linattn_np import gla, linear_attention, retention, rwkv6, simple_gla
from linattn_np.backends.cupy.delta_kernels import Walk
from linattn_np.contract import CHUNK
from linattn_np.declarations import DELTA_RULES, RETENTION
from linattn_np.ops import OPS

pytestmark = pytest.mark.pairwise
NORMALIZED = {"feature_map": "elu", "normalize": True}
SIZES = {
    "tiny": {"B": 1, "H": 1, "T": 18, "K": 4, "V": 3},
    "small": {"B": 2, "H": 2, "T": 140, "K": 20, "V": 12},
    "large": {"B": 2, "H": 3, "T": 333, "K": 64, "V": 128},
}


@dataclass
class Subject:
    """An operator in one mode on one backend: host arrays in, host arrays out, float32."""

    op: object
    mode: str
    options: dict
    backend: object
    rng: object

    @property
    def tiny(self):
        return self.backend.sizes == ("tiny",)

    @property
    def sizes(self):
        return SIZES[self.backend.sizes[-1]]

    @property
    def cuts(self):
        """Tokens to split a sequence at."""
        T = self.sizes["T"]
        return (T - 1,) if self.tiny else (1, T // 3, T - 1)

    def draw(self, gate="logsigmoid", **sizes):
        return draw(self.op, self.rng, {**self.sizes, **sizes}, np.float32, gate)

    def draw_state(self, count):
        parts = draw_states(stated(self.op, self.options), self.rng, {**self.sizes, "N": count}, np.float32)
        return parts if len(parts) > 1 else parts[0]

    def __call__(self, arrays, **arguments):
        """o, or (o, final state) when asked for."""
        there = [self.backend.asarray(np.ascontiguousarray(x)) for x in arrays]
        state = arguments.pop("initial_state", None)
        if self.tiny and self.mode == "staged":
            arguments.setdefault("chunk_size", 16)
        if state is not None:
            arguments["initial_state"] = whole(tuple(map(self.backend.asarray, parts(state))))
        result = self.backend.run(OPS[self.op], *there, **{"mode": self.mode, **self.options, **arguments})
        return self.home(result)

    def home(self, result):
        return tuple(map(self.home, result)) if isinstance(result, tuple) else self.backend.tohost(result)


def subjects(backends, speaks_of):
    for name, backend in backends.items():
        for op in OPS:
            for mode in backend.modes[op.name]:
                for options in ({}, NORMALIZED) if op.name == "linear_attention" else ({},):
                    if speaks_of(op, mode, options):
                        label = f"{op.name}{'-normalized' if options else ''}-{name}-{mode}"
                        yield pytest.param((op, mode, options), name, id=label)


def law_of(speaks_of):
    """A law of those (op, mode, options) only."""

    def mark(test):
        test.speaks_of = speaks_of
        return test

    return mark


def pytest_generate_tests(metafunc):
    if "subject" in metafunc.fixturenames:
        speaks_of = getattr(metafunc.function, "speaks_of", lambda op, mode, options: True)
        metafunc.parametrize("subject, backend", list(subjects(metafunc.config.backends, speaks_of)), indirect=True)
    elif "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.backends, indirect=True)


@pytest.fixture
def subject(request, backend, rng):
    return Subject(*request.param, backend, rng)


def tokens(arrays, op, start, stop):
    return [x[:, :, start:stop] if "T" in axes.split() else x for x, axes in zip(arrays, op.arrays.values())]


recurrent_operators = law_of(lambda op, mode, options: op.state)
chunked_modes = law_of(lambda op, mode, options: mode in ("chunk", "staged") and op not in DELTA_RULES)
products = law_of(lambda op, mode, options: op.state and not options and op not in DELTA_RULES)
averages = law_of(lambda op, mode, options: options or not op.state)


@recurrent_operators
def test_split_equals_one_pass(subject):
    T = subject.sizes["T"]
    arrays, start = subject.draw("spikes-40"), subject.draw_state(subject.sizes["B"])
    whole, end = subject(arrays, initial_state=start, output_final_state=True)
    for at in subject.cuts:
        first, half = subject(tokens(arrays, subject.op, 0, at), initial_state=start, output_final_state=True)
        rest, last = subject(tokens(arrays, subject.op, at, T), initial_state=half, output_final_state=True)
        assert_close(f"split at {at}", np.concatenate([first, rest], axis=2), whole, np.float32)
        for part, wanted in zip(parts(last), parts(end), strict=True):
            assert_close(f"state, split at {at}", part, wanted, np.float32)


def test_packing_equals_one_by_one(subject):
    T = subject.sizes["T"]
    bounds = [0, 0, 1, T, T] if subject.tiny else [0, 0, 1, 3, 3, T // 2, T, T]
    arrays, stateful = subject.draw(B=1), bool(subject.op.state)
    start = subject.draw_state(len(bounds) - 1) if stateful else None
    given = {"initial_state": start, "output_final_state": True} if stateful else {}
    packed = subject(arrays, cu_seqlens=bounds, **given)
    o, end = packed if stateful else (packed, ())
    for n, (a, b) in enumerate(zip(bounds[:-1], bounds[1:])):
        if stateful:
            mine = tuple(part[n : n + 1] for part in parts(start))
            given["initial_state"] = mine if isinstance(start, tuple) else mine[0]
        alone = subject(tokens(arrays, subject.op, a, b), **given)
        o_alone, end_alone = alone if stateful else (alone, ())
        assert_close(f"sequence {n}", o[:, :, a:b], o_alone, np.float32)
        for part, wanted in zip(parts(end), parts(end_alone)):
            assert_close(f"state of sequence {n}", part[n : n + 1], wanted, np.float32)


@pytest.mark.parametrize("gate", ["logsigmoid", "some-inf", "all-20"])
def test_the_future_changes_no_bit_of_the_past(subject, gate):
    arrays = subject.draw()
    before = subject(arrays)
    for at in subject.cuts:
        other = [
            np.concatenate([x[:, :, :at], y[:, :, at:]], axis=2) if "T" in axes.split() else x
            for x, y, axes in zip(arrays, subject.draw(gate), subject.op.arrays.values())
        ]
        after, same = subject(other)[:, :, :at], at
        block = subject.backend.tokens_that_share_bits
        if subject.op.gates and subject.mode in block:
            same = at // block[subject.mode] * block[subject.mode]
            assert_close(f"tokens before {at}", after, before[:, :, :at], np.float32)
        assert same_bits(after[:, :, :same], before[:, :, :same]), f"tokens before {at} changed"


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_stays_out_of_the_past(subject, poison):
    """On tensor cores, out of earlier blocks: a weight of 0 within one meets every value of the block. A delta rule's
    matrices of tokens have keys, gates and strengths in all tokens of a chunk, too."""
    arrays = subject.draw()
    before = subject(arrays)
    for which, (name, axes) in enumerate(subject.op.arrays.items()):
        for at in subject.cuts if "T" in axes.split() else ():
            other = [x.copy() for x in arrays]
            other[which][:, :, at] = poison
            after = subject(other)
            on_tensor_cores = subject.backend.device is not None and subject.mode != "recurrent"
            on_tensor_cores &= name == "v" or subject.op in DELTA_RULES and name not in ("q", "r")
            block = Walk.CHUNK if subject.op in DELTA_RULES else CHUNK
            first = at // block * block if on_tensor_cores else at
            assert_close(f"tokens before {first}", after[:, :, :first], before[:, :, :first], np.float32)
            assert np.isnan(after[:, :, at]).all() or np.isinf(after[:, :, at]).any() or name in subject.op.gates, name


def test_linear_in_v(subject):
    first, second = subject.draw(), subject.draw()
    q, k, v, *rest = first
    o = [subject([q, k, values, *rest]) for values in (v, second[2], 2 * v - 3 * second[2])]
    assert_close("linearity", o[2], 2 * o[0] - 3 * o[1], np.float32)


@products
def test_no_decay_is_a_masked_product(subject):
    arrays = subject.draw("zero")
    no_decay = {"gamma": 1.0} if subject.op.name == "retention" else {}
    q, k, v = (double(x) for x in arrays[:3])
    scores = np.tril(q @ k.swapaxes(-1, -2))
    if subject.op.reads_before_write:
        present = np.einsum("bhtk,hk,bhtk->bht", q, double(arrays[4]), k)
        scores = np.tril(scores, -1) + present[..., None] * np.eye(q.shape[2])
    assert_close("tril(q k^T) v", subject(arrays, scale=0.5, **no_decay), 0.5 * scores @ v, np.float32)


@chunked_modes
def test_any_chunk_size_agrees(subject):
    arrays = subject.draw("by_channel")
    wanted = subject(arrays)
    for chunk_size in (48,) if subject.tiny else (16, 32, 128):
        assert_close(f"chunk_size {chunk_size}", subject(arrays, chunk_size=chunk_size), wanted, np.float32)


@pytest.mark.parametrize("axis", ["B", "H"])
def test_permuting_rows_permutes_bits(subject, axis):
    rows = {axis: max(3, subject.sizes[axis])}
    arrays, decays = subject.draw(**rows), {}
    order = subject.rng.permutation(rows[axis])
    moved = [
        np.take(x, order, axes.split().index(axis)) if axis in axes.split() else x
        for x, axes in zip(arrays, subject.op.arrays.values())
    ]
    if subject.op.name == "retention":
        gamma = subject.rng.uniform(0.5, 1, arrays[0].shape[1])
        decays = {"gamma": gamma}, {"gamma": gamma[order] if axis == "H" else gamma}
    before, after = decays or ({}, {})
    assert same_bits(subject(moved, **after), np.take(subject(arrays, **before), order, "BH".index(axis)))


def test_same_call_twice_same_bits(subject):
    arrays = subject.draw()
    given = {"output_final_state": True} if subject.op.state else {}
    first, second = subject(arrays, **given), subject(arrays, **given)
    for x, y in zip(parts(first), parts(second)):
        for part, again in zip(parts(x), parts(y)):
            assert same_bits(part, again)


@law_of(lambda op, mode, options: "materialize" in op.signature.parameters and mode == "recurrent")
def test_keeping_states_changes_nothing(subject):
    arrays = subject.draw()
    wanted = subject(arrays)
    for materialize in subject.backend.materialize:
        assert_close(
            f"materialize={materialize}", subject(arrays, mode="auto", materialize=materialize), wanted, np.float32
        )


# -- operators against each other --------------------------------------------------------------------------------------
def each_way(backend, rng, *functions):
    """Subjects of the operators in each mode that all of them have on the backend."""
    ops = [op for function in functions for op, public in OPS.items() if public is function]
    for mode in backend.modes[ops[0].name]:
        if all(mode in backend.modes[op.name] for op in ops):
            yield [Subject(op, mode, {}, backend, rng) for op in ops]


def test_rwkv6_with_a_constant_gate_is_gla(backend, rng):
    """GLA(q, k, v, g) = RWKV-6(q e^g, k, v, g, u = e^-g)."""
    for gated, receptive in each_way(backend, rng, gla, rwkv6):
        q, k, v, _ = gated.draw()
        gate = -rng.random((q.shape[1], q.shape[3])).astype(np.float32)
        g = np.broadcast_to(gate[:, None], q.shape)
        assert_close(gated.mode, receptive([q * np.exp(g), k, v, g, np.exp(-gate)]), gated([q, k, v, g]), np.float32)


def test_a_scalar_decay_is_a_gate_for_each_channel(backend, rng):
    for plain, full in each_way(backend, rng, simple_gla, gla):
        q, k, v, g = plain.draw("some-inf")
        every = np.broadcast_to(g[..., None], q.shape)
        assert_close(plain.mode, plain([q, k, v, g]), full([q, k, v, every]), np.float32)


def test_retention_is_a_constant_gate(backend, rng):
    gamma = np.array([0.0, 0.5, 1.0])
    for kept, plain in each_way(backend, rng, retention, simple_gla):
        arrays = kept.draw(H=3)
        with np.errstate(divide="ignore"):
            g = np.broadcast_to(np.log(gamma)[:, None], arrays[0].shape[:3]).astype(np.float32)
        assert_close(kept.mode, kept(arrays, gamma=gamma), plain([*arrays, g]), np.float32)


@pytest.mark.parametrize("mode", ["chunk", "staged"])
def test_a_decay_next_to_1_decays(backend, mode, rng):
    """RetNet's default of head 20, 1 - 2^-25, is 1 in float32; its log is not. Products of the log are taken in one
    exp, whose rounding is two units in the last place of a state in every chunk of at least 16 tokens."""
    log_decay = RETENTION.log_decay(None, 60)
    assert (log_decay < 0).all() and np.allclose(log_decay, -(2.0 ** (-5.0 - np.arange(60))), rtol=0.02)
    T, nothing = 512, np.zeros((1, 1, 512, 8), np.float32)
    if backend.sizes == ("tiny",) or not backend.takes(RETENTION, mode, np.dtype(np.float32)):
        return
    arguments = {"gamma": np.exp(log_decay[20:21]), "mode": mode, "output_final_state": True}
    start = backend.asarray(np.ones((1, 1, 8, 8), np.float32))
    there = [backend.asarray(nothing)] * 3
    _, final = backend.run(retention, *there, initial_state=start, **arguments)
    np.testing.assert_allclose(1 - backend.tohost(final), -np.expm1(T * log_decay[20]), rtol=0.2)


def test_linear_attention_has_no_gate(backend, rng):
    for plain, gated in each_way(backend, rng, linear_attention, simple_gla):
        arrays = plain.draw()
        assert_close(plain.mode, plain(arrays), gated([*arrays, np.zeros(arrays[0].shape[:3], np.float32)]), np.float32)


@averages
def test_normalised_weights_sum_to_one(subject):
    q, k, v = subject.draw()
    assert_close("o of ones", subject([q, k, np.ones_like(v)]), np.ones_like(v), np.float32)
    if subject.op.name == "softmax_attention":
        assert_close("o of ones", subject([q, k, np.ones_like(v)], causal=False), np.ones_like(v), np.float32)
