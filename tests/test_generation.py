"""Batches that sequences join and leave, states on disk, and how tokens are drawn."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from linattn_np import ContractError
from linattn_np.models import RWKV6, Batch, Sampling, State
from linattn_np.models.sampling import likeliest

AUSTEN = Path(__file__).parents[1] / "examples" / "data" / "austen-x060" / "model.safetensors"
PROMPTS = [b"It is a truth universally", b"E", b"Mr. Knightley, a sensible man about seven or eight-and-thirty, was not only"]


@pytest.fixture(scope="module")
def austen():
    return RWKV6.from_file(AUSTEN)


# -- packed prompts and slots -----------------------------------------------------------------------------------------
def test_packed_prompts_equal_one_by_one(austen):
    bounds = np.cumsum([0, *map(len, PROMPTS)])
    packed, state = austen.forward([list(b"".join(PROMPTS))], cu_seqlens=bounds)
    last, _ = austen.forward([list(b"".join(PROMPTS))], cu_seqlens=bounds, last=True)
    assert last.shape == (3, 256)
    for n, prompt in enumerate(PROMPTS):
        alone, alone_state = austen.forward([list(prompt)])
        np.testing.assert_allclose(packed[0, bounds[n]:bounds[n + 1]], alone[0], rtol=0, atol=1e-4)
        np.testing.assert_allclose(last[n], alone[0, -1], rtol=0, atol=1e-4)
        np.testing.assert_allclose(state.wkv[:, n], alone_state.wkv[:, 0], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(state.ffn_shift.shape, (4, 3, 256))


def test_slots_touch_their_rows_only(austen):
    pool = austen.initial_state(5)
    for part in (pool.att_shift, pool.wkv, pool.ffn_shift):
        part[:, [0, 2, 3]] = 7
    austen.forward([[1, 2, 3], [4, 5, 6]], pool, slots=[4, 1])
    austen.forward([[7], [8]], pool, slots=[4, 1])
    alone = austen.initial_state(2)
    austen.forward([[1, 2, 3], [4, 5, 6]], alone)
    austen.forward([[7], [8]], alone)
    for part, wanted in ((pool.att_shift, alone.att_shift), (pool.wkv, alone.wkv), (pool.ffn_shift, alone.ffn_shift)):
        assert (part[:, [0, 2, 3]] == 7).all()
        np.testing.assert_allclose(part[:, [4, 1]], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("arguments, complaint", [
    ({"cu_seqlens": [0, 2, 2, 3]}, "cu_seqlens has an empty prompt at index 1"),
    ({"cu_seqlens": [0, 4]}, "cu_seqlens must run from 0 to T=3, got 0 to 4"),
    ({"slots": [0]}, "slots needs a state"),
    ({"slots": [0, 1], "state": State}, r"slots is \(2,\) int64, expected integers \[N\] = \(1,\)"),
    ({"slots": [2], "state": State}, "slots runs from 2 to 2, but the state has 2 rows"),
    ({"slots": [0.0], "state": State}, r"slots is \(1,\) float64, expected integers"),
    ({"slots": [1, 1], "cu_seqlens": [0, 1, 3], "state": State}, "slots names a row twice"),
])
def test_rows_that_are_refused(austen, arguments, complaint):
    if "state" in arguments:
        arguments = {**arguments, "state": austen.initial_state(2)}
    with pytest.raises(ContractError, match=f"RWKV6: {complaint}"):
        austen.forward([[1, 2, 3]], **arguments)


# -- batches -----------------------------------------------------------------------------------------------------------
def alone(model, prompt, count, how):
    batch = Batch(model, 1)
    (slot,) = batch.join([prompt], how)
    return bytes(batch.step()[slot] for _ in range(count))


def test_joining_and_leaving_equals_alone(austen):
    how = [Sampling(temperature=0), Sampling(temperature=0.7, seed=3), Sampling(temperature=0.9, top_p=0.8, seed=4)]
    wanted = [alone(austen, prompt, 30, one) for prompt, one in zip(PROMPTS, how)]
    batch, written = Batch(austen, 2), [b"", b"", b""]

    def run(steps, **who):
        for _ in range(steps):
            drawn = batch.step()
            for n, slot in who.items():
                written[int(n[1])] += bytes([drawn[slot]])

    (a,) = batch.join(PROMPTS[:1], how[0])
    run(5, n0=a)
    (b,) = batch.join(PROMPTS[1:2], [how[1]])
    run(10, n0=a, n1=b)
    batch.leave(a)
    (c,) = batch.join(PROMPTS[2:], how[2:])
    assert c == a                                       # the slot that was left
    run(20, n1=b, n2=c)
    assert [len(text) for text in written] == [15, 30, 20]
    assert written == [wanted[0][:15], wanted[1], wanted[2][:20]]


def test_generate_equals_a_batch(austen):
    how = dict(temperature=0.8, top_p=0.9, top_k=20, presence=0.2, frequency=0.2, fading=0.99, seed=5)
    assert bytes(islice(austen.generate(PROMPTS[0], **how), 40)) == alone(austen, PROMPTS[0], 40, Sampling(**how))


def test_a_sequence_goes_on_from_a_state(austen):
    batch = Batch(austen, 3)
    (slot,) = batch.join([PROMPTS[0]], Sampling(temperature=0))
    first = bytes(batch.step()[slot] for _ in range(10))
    state, logits = batch.state(slot), batch.sequences[slot].logits
    rest = bytes(batch.step()[slot] for _ in range(10))
    (other,) = batch.join([[int(logits.argmax())]], Sampling(temperature=0), [state])
    assert first + rest == alone(austen, PROMPTS[0], 20, Sampling(temperature=0))
    assert rest[1:] == bytes(batch.step()[other] for _ in range(9))


@pytest.mark.parametrize("change, complaint", [
    (lambda batch: batch.join([b"a", b"b", b"c"], Sampling()), "3 prompts want to join, but only 2 of 2 slots are free"),
    (lambda batch: batch.join([], Sampling()), "prompts is empty"),
    (lambda batch: batch.join([b"a"], [Sampling()] * 2), "1 prompts come with 2 ways of sampling"),
    (lambda batch: batch.join([b"a", b""], Sampling()), "prompts holds an empty one"),
    (lambda batch: batch.leave(0), "slot is 0, expected one in use: none is"),
])
def test_what_a_batch_refuses(austen, change, complaint):
    batch = Batch(austen, 2)
    with pytest.raises(ContractError, match=complaint):
        change(batch)
    assert batch.free == 2 and batch.step() == {}


# -- states on disk ------------------------------------------------------------------------------------------------------
def test_saving_and_loading_changes_no_bit(austen, tmp_path):
    _, state = austen.forward([list(PROMPTS[2])])
    state.save(tmp_path / "state.npz")
    loaded = austen.on_device(State.load(tmp_path / "state.npz"))
    uninterrupted, _ = austen.forward([list(b" married")], state)
    resumed, _ = austen.forward([list(b" married")], loaded)
    np.testing.assert_array_equal(resumed, uninterrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


def test_states_that_are_refused(austen, tmp_path):
    path = tmp_path / "state.npz"
    austen.initial_state().save(path)
    whole = path.read_bytes()
    for damaged in (b"", b"not a zip", whole[:-30], whole[:200], whole[:400] + b"damage" + whole[406:]):
        path.write_bytes(damaged)
        with pytest.raises(ContractError, match="no saved state, or a damaged one"):
            State.load(path)
    np.savez(path, wkv=np.zeros(1, np.float32))
    with pytest.raises(ContractError, match="holds wkv, expected att_shift, ffn_shift, wkv"):
        State.load(path)
    np.savez(path, att_shift=np.zeros(1), wkv=np.zeros(1), ffn_shift=np.zeros(1))
    with pytest.raises(ContractError, match="att_shift in float64, expected float32"):
        State.load(path)
    np.savez(path, **{name: np.array([{}], object) for name in ("att_shift", "wkv", "ffn_shift")})
    with pytest.raises(ContractError, match="no saved state"):
        State.load(path)
    with pytest.raises(ContractError, match="state.att_shift is"):
        austen.on_device(State(*(np.zeros((1, 1, 1), np.float32) for _ in range(3))))


# -- drawing ---------------------------------------------------------------------------------------------------------------
def test_top_k_keeps_the_likeliest():
    draw = Sampling(top_k=2, seed=0).sampler()
    assert {draw(np.log([0.3, 0.12, 0.5, 0.08])) for _ in range(300)} == {0, 2}


def test_few_are_sorted_of_many_and_nothing_changes(rng):
    """The likeliest of all logits, sorted as a whole, against what `likeliest` finds first."""
    for top_k, top_p in ((0, 0.5), (0, 0.99), (3, 1.0), (40, 0.9), (500, 0.3)):
        p = rng.dirichlet(np.full(300, 0.1))
        wanted = np.argsort(-p, kind="stable")[:top_k or None]
        cumulated = np.cumsum(p[wanted])
        wanted = wanted[:np.searchsorted(cumulated, top_p * cumulated[-1]) + 1]
        found = likeliest(p, top_k, top_p)
        np.testing.assert_array_equal(found[:len(wanted)], wanted)
        assert top_k > 300 or len(found) < 300


def test_penalties_follow_their_equation():
    how = Sampling(temperature=0, presence=0.5, frequency=0.25, fading=0.5)
    sampler = how.sampler()
    logits = np.array([1.0, 0.6, 0.0])
    assert sampler(logits) == 0                                     # counts {0: 1}
    assert sampler(logits) == 1                                     # 1 - 0.5 - 0.25 = 0.25 < 0.6; counts {0: 0.5, 1: 1}
    np.testing.assert_allclose(sampler.penalized(logits), [1 - 0.5 - 0.125, 0.6 - 0.5 - 0.25, 0.0])


@pytest.mark.parametrize("how, complaint", [
    ({"top_k": -1}, "top_k is -1, expected a whole number from 0 up"), ({"top_k": 2.5}, "top_k is 2.5"),
    ({"presence": float("inf")}, "presence is inf, expected a finite number"), ({"frequency": "much"}, "frequency is 'much'"),
    ({"fading": 1.5}, "fading is 1.5, expected a number from 0 to 1"),
])
def test_ways_of_drawing_that_are_refused(how, complaint):
    with pytest.raises(ContractError, match=f"Sampling: {complaint}"):
        Sampling(**how)
