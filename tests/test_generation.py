"""Batches that sequences join and leave, states on disk, and how tokens are drawn."""

import io
import os
import re
import tracemalloc
import zipfile
from itertools import islice

import numpy as np
import pytest
from checkpoint_files import zipped_pth
from safetensors.numpy import save_file

from linattn_np import ContractError
from linattn_np.models import Batch, Sampling, State
from linattn_np.models.prompt_reading import read
from linattn_np.models.sampling import complaints, draw_each, likeliest

PROMPTS = [
    b"It is a truth universally",
    b"E",
    b"Mr. Knightley, a sensible man about seven or eight-and-thirty, was not only",
]


# -- packed prompts and slots -----------------------------------------------------------------------------------------
def test_packed_prompts_equal_one_by_one(austen):
    bounds = np.cumsum([0, *map(len, PROMPTS)])
    packed, state = austen.forward([list(b"".join(PROMPTS))], cu_seqlens=bounds)
    last, _ = austen.forward([list(b"".join(PROMPTS))], cu_seqlens=bounds, last=True)
    assert last.shape == (3, 256)
    for n, prompt in enumerate(PROMPTS):
        alone, alone_state = austen.forward([list(prompt)])
        np.testing.assert_allclose(packed[0, bounds[n] : bounds[n + 1]], alone[0], rtol=0, atol=1e-4)
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


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({"cu_seqlens": [0, 2, 2, 3]}, "cu_seqlens has an empty prompt at index 1"),
        ({"cu_seqlens": [0, 4]}, "cu_seqlens must run from 0 to T=3, got 0 to 4"),
        ({"slots": [0]}, "slots needs a state"),
        ({"slots": [0, 1], "state": State}, r"slots is \(2,\) int64, expected integers \[N\] = \(1,\)"),
        ({"slots": [2], "state": State}, "slots runs from 2 to 2, but the state has 2 rows"),
        ({"slots": [0.0], "state": State}, r"slots is \(1,\) float64, expected integers"),
        ({"slots": [1, 1], "cu_seqlens": [0, 1, 3], "state": State}, "slots names a row twice"),
    ],
)
def test_rows_that_are_refused(austen, arguments, complaint):
    if "state" in arguments:
        arguments = {**arguments, "state": austen.initial_state(2)}
    with pytest.raises(ContractError, match=f"{austen.version.owner}: {complaint}"):
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
    assert c == a  # the slot that was left
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


@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            lambda batch: batch.join([b"a", b"b", b"c"], Sampling()),
            "3 prompts want to join, but only 2 of 2 slots are free",
        ),
        (lambda batch: batch.join([], Sampling()), "prompts is empty"),
        (lambda batch: batch.join([b"a"], [Sampling()] * 2), "1 prompts come with 2 ways of sampling"),
        (lambda batch: batch.join([b"a", b""], Sampling()), "prompts holds an empty one"),
        (lambda batch: batch.join([b"a", 7], Sampling()), "prompts holds a int that is no sequence of tokens"),
        (lambda batch: batch.join([[[1, 2], [3]]], Sampling()), "prompts holds a list that is no sequence of tokens"),
        (lambda batch: batch.join([[[1, 2]]], Sampling()), "prompts holds a list that is no sequence of tokens"),
        (lambda batch: batch.leave(0), "slot is 0, expected one in use: none is"),
    ],
)
def test_what_a_batch_refuses(austen, change, complaint):
    batch = Batch(austen, 2)
    with pytest.raises(ContractError, match=complaint):
        change(batch)
    assert batch.free == 2 and batch.step() == {}


# -- states on disk ----------------------------------------------------------------------------------------------------
def test_saving_and_loading_changes_no_bit(austen, tmp_path):
    _, state = austen.forward([list(PROMPTS[2])])
    state.save(tmp_path / "state.npz")
    loaded = austen.on_device(State.load(tmp_path / "state.npz"))
    uninterrupted, _ = austen.forward([list(b" married")], state)
    resumed, _ = austen.forward([list(b" married")], loaded)
    np.testing.assert_array_equal(resumed, uninterrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


def npz(**changes):
    """The arrays of a sound state of two layers, or with changes."""
    arrays = {
        "att_shift": np.zeros((2, 3, 6), np.float32),
        "wkv": np.zeros((2, 3, 2, 3, 3), np.float32),
        "ffn_shift": np.zeros((2, 3, 6), np.float32),
    }
    return {name: array for name, array in {**arrays, **changes}.items() if array is not None}


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(wkv=None), "holds att_shift, ffn_shift, expected att_shift, ffn_shift, wkv"),
        (dict(more=np.zeros(1)), "holds att_shift, ffn_shift, more, wkv, expected"),
        (dict(wkv=np.zeros((2, 3, 2, 3, 3))), "has wkv in float64, expected float32"),
        (dict(att_shift=np.zeros((2, 3, 6), np.int32)), "has att_shift in int32, expected float32"),
        (dict(att_shift=np.zeros((2, 3, 6), ">f4")), "has att_shift in >f4, expected float32"),
        (dict(ffn_shift=np.array([{}], object)), "has ffn_shift in object, expected float32"),
        (
            dict(ffn_shift=np.zeros(3, [("a", "f4")])),
            "has ffn_shift with another header, expected that of a plain array",
        ),
        (dict(ffn_shift=np.float32(1)), "state.ffn_shift is .., expected .2, 3, 6."),
        (dict(ffn_shift=np.zeros((2, 2, 6), np.float32)), "state.ffn_shift is .2, 2, 6., expected .2, 3, 6."),
        (dict(wkv=np.zeros((2, 3, 2, 3, 4), np.float32)), "state.wkv is .2, 3, 2, 3, 4., expected .2, 3, 2, 3, 3."),
        (dict(wkv=np.zeros((2, 3, 2, 4, 4), np.float32)), "state.wkv has H=2 heads of N=4, expected H x N = D = 6"),
        (dict(wkv=np.zeros((1,) * 20, np.float32)), "has wkv in 4 bytes, expected as many as an array of 20 axes has"),
    ],
    ids=range(12),
)
def test_every_part_of_a_saved_state_is_checked(changes, complaint, tmp_path):
    path = tmp_path / "state.npz"
    np.savez(path, **npz())
    assert State.load(path).wkv.shape == (2, 3, 2, 3, 3)
    np.savez(path, **npz(**changes))
    with pytest.raises(ContractError, match=f"^State: {path} is no saved state, or a damaged one: {complaint}"):
        State.load(path)


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path):
    with pytest.raises(ContractError, match="state.wkv has dtype float64, expected float32"):
        State(**npz(wkv=np.zeros((2, 3, 2, 3, 3)))).save(tmp_path / "state.npz")
    assert not list(tmp_path.iterdir())


def test_a_state_in_fortrans_order_comes_back(rng, tmp_path):
    arrays = {name: np.asfortranarray(rng.standard_normal(array.shape, np.float32)) for name, array in npz().items()}
    State(**arrays).save(tmp_path / "state.npz")
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(State.load(tmp_path / "state.npz"), name), array)


def test_a_small_file_does_not_become_a_large_state(tmp_path):
    """A megabyte that unpacks to a gigabyte, and headers that claim what the file does not hold."""
    path, big = tmp_path / "state.npz", np.zeros((2, 1 << 24), np.float32)
    np.savez_compressed(path, **npz(wkv=big))
    tracemalloc.start()
    with pytest.raises(ContractError, match="entry 'att_shift.npy' is compressed or encrypted"):
        State.load(path)
    for shape, wanted in (((1 << 40, 1 << 40), "1099511"), ((0, 10**20), "0 x 1000000")):
        claims = io.BytesIO()
        np.lib.format.write_array_header_1_0(claims, {"descr": "<f4", "fortran_order": False, "shape": shape})
        with zipfile.ZipFile(path, "w") as file:
            for name in npz():
                file.writestr(f"{name}.npy", claims.getvalue())
        with pytest.raises(ContractError, match=f"has att_shift in 0 bytes, expected as many as an array of {wanted}"):
            State.load(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_dtype_that_ends_numpy_s_process_is_only_quoted(tmp_path):
    """np.dtype("m8[s/0]") divides by zero: a file with it must not reach NumPy."""
    path = tmp_path / "state.npz"
    for dtype in ("m8[s/0]", "<M8[D/0]"):
        header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': (1,), }}\n".encode()
        with zipfile.ZipFile(path, "w") as file:
            for name in npz():
                file.writestr(f"{name}.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header)
        with pytest.raises(ContractError, match=re.escape(f"has att_shift in '{dtype}', expected float32")):
            State.load(path)


def test_a_tuned_state_is_a_state(rng, tmp_path):
    tuned = {f"blocks.{i}.att.time_state": rng.standard_normal((2, 3, 3), np.float32) for i in range(3)}
    save_file(tuned, tmp_path / "state.st")
    (tmp_path / "state.pth").write_bytes(zipped_pth(tuned))
    for path in sorted(tmp_path.iterdir()):
        state = State.load(path)
        assert [*map(np.shape, state.arrays)] == [(3, 1, 6), (3, 1, 2, 3, 3), (3, 1, 6)]
        for found, wanted in zip(state.wkv[:, 0], tuned.values()):
            np.testing.assert_array_equal(found, wanted.swapaxes(1, 2))
    save_file(tuned | {"emb.weight": np.zeros(1)}, tmp_path / "state.st")
    with pytest.raises(ContractError, match="state.st .* has 'blocks.3.att.time_state', expected att.time_state of"):
        State.load(tmp_path / "state.st")


def test_a_text_as_state_is_said_in_our_words(tmp_path):
    path = tmp_path / "state.npz"
    path.write_text("It is a truth universally acknowledged")
    with pytest.raises(ContractError, match="starts with b'It is a ', expected what State.save has written$") as caught:
        State.load(path)
    assert "pickle" not in str(caught.value)
    os.mkfifo(tmp_path / "fifo")
    for odd in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(ContractError, match="is a folder or a device, expected a file"):
            State.load(odd)


def test_damage_anywhere_is_refused_with_our_error(rng, tmp_path):
    path = tmp_path / "state.npz"
    State(**{name: rng.standard_normal(array.shape, np.float32) for name, array in npz().items()}).save(path)
    whole, refused = path.read_bytes(), 0
    wanted = State.load(path)
    for _ in range(1500):
        content = bytearray(whole)
        if rng.integers(4) == 0:
            content = content[: rng.integers(len(content))]
        for at in rng.integers(0, len(content) or 1, rng.integers(1, 4))[: len(content)]:
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        path.write_bytes(content)
        try:
            found = State.load(path)
        except ContractError:
            refused += 1
        else:  # a byte that means nothing here, such as an entry's date
            for name in npz():
                np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))
    assert refused > 1000


# -- states that enter ------------------------------------------------------------------------------------------------
class Unlike(np.ndarray):
    pass


def part(change):
    def changed(state):
        state.att_shift = change(state.att_shift)
        return state

    return changed


@pytest.mark.parametrize(
    "change, complaint",
    [
        (part(lambda x: x.astype(np.int32)), "state.att_shift has dtype int32, expected float32"),
        (part(lambda x: x.astype(np.float16)), "state.att_shift has dtype float16, expected float32"),
        (part(lambda x: x.astype(np.float64)), "state.att_shift has dtype float64, expected float32"),
        (part(lambda x: np.ma.masked_array(x)), "state.att_shift is a numpy.ma.*MaskedArray, expected a plain array"),
        (part(lambda x: x.view(Unlike)), "state.att_shift is a test_generation.Unlike, expected a plain array"),
        (part(lambda x: x.tolist()), "state.att_shift is a builtins.list, expected a plain array"),
        (part(lambda x: x[:, :, :-1]), r"state.att_shift is \(4, 1, 255\), expected \(4, 1, 256\)"),
        (part(lambda x: x[:, 0]), r"state.att_shift is \(4, 256\), expected \(4, .*, 256\)"),
        (lambda state: {"wkv": state.wkv}, "state is a dict, expected a State"),
        (lambda state: None, "state is a NoneType, expected a State"),
    ],
    ids=range(10),
)
def test_a_state_is_checked_wherever_it_enters(austen, change, complaint):
    state = change(austen.initial_state())
    enters = [austen.on_device]
    if state is not None:  # which means a fresh one here
        enters += [lambda state: austen.forward([[1]], state), lambda state: read(austen, b"a", state)]
        enters += [lambda state: Batch(austen, 2).join([b"a"], Sampling(), [state])]
    for enter in enters:
        with pytest.raises(ContractError, match=f"{austen.version.owner}: {complaint}"):
            enter(state)


def test_some_go_on_from_a_state_and_some_begin(austen):
    """Whatever the slots' last sequences have left."""
    batch, how = Batch(austen, 3), Sampling(temperature=0)
    for slot in batch.join(PROMPTS[:3], how):
        batch.leave(slot)
    _, state = austen.forward([list(b"Miss Wood")])
    slots = batch.join([b"Captain Went", b"h", b"Miss Woodh"], how, [None, state, None])
    written = [batch.step() for _ in range(5)]
    found = [bytes(tokens[slot] for tokens in written) for slot in slots]
    assert found == [b"worth", b"ouse,", b"ouse,"]


def test_a_sequence_goes_on_from_one_sequence(austen):
    batch = Batch(austen, 2)
    for enter in (
        lambda state: batch.join([b"a", b"b"], Sampling(), [austen.initial_state(), state]),
        lambda state: read(austen, b"a", state),
    ):
        with pytest.raises(ContractError, match=r"state.att_shift is \(4, 3, 256\), expected \(4, 1, 256\)"):
            enter(austen.initial_state(3))
    assert batch.free == 2 and not batch.pool.wkv.any()


def test_a_state_to_update_is_not_read_only(austen):
    state = austen.initial_state()
    state.ffn_shift.flags.writeable = False
    with pytest.raises(ContractError, match="state.ffn_shift is read-only, expected an array to update: `copy`"):
        austen.forward([[1]], state)
    assert not state.wkv.any()
    austen.forward([[1]], austen.on_device(state).copy())


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


# -- drawing -----------------------------------------------------------------------------------------------------------
def test_top_k_keeps_the_likeliest():
    draw = Sampling(top_k=2, seed=0).sampler()
    assert {draw(np.log([0.3, 0.12, 0.5, 0.08])) for _ in range(300)} == {0, 2}


def test_few_are_sorted_of_many_and_nothing_changes(rng):
    """The likeliest of all logits, sorted as a whole, against what `likeliest` finds first; equals by their ids."""
    for top_k, top_p in ((0, 0.5), (0, 0.99), (3, 1.0), (40, 0.9), (500, 0.3), (10**30, 0.9)):
        rows = rng.dirichlet(np.full(300, 0.1), 5).astype(np.float32)
        rows[1, ::2], rows[2] = rows[1, 1::2], 1 / 300
        ids, chosen, counts = likeliest(rows, top_k, top_p)
        assert top_k > 300 or (counts < 300).any()
        for p, found, probabilities, count in zip(rows, ids, chosen, counts):
            wanted = np.argsort(-p, kind="stable")[: top_k or None]
            cumulated = np.cumsum(p[wanted], dtype=np.float64)
            kept = min(np.searchsorted(cumulated, top_p * cumulated[-1]) + 1, len(wanted))
            assert kept <= count
            np.testing.assert_array_equal(found[:kept], wanted[:kept])
            np.testing.assert_array_equal(probabilities[:count], p[found[:count]])
            assert not probabilities[count:].any()


def test_penalties_follow_their_equation():
    how = Sampling(temperature=0, presence=0.5, frequency=0.25, fading=0.5)
    sampler = how.sampler()
    logits = np.array([1.0, 0.6, 0.0])
    assert sampler(logits) == 0  # counts {0: 1}
    assert sampler(logits) == 1  # 1 - 0.5 - 0.25 = 0.25 < 0.6; counts {0: 0.5, 1: 1}
    np.testing.assert_allclose(sampler.adjusted(logits), [1 - 0.5 - 0.125, 0.6 - 0.5 - 0.25, 0.0])


@pytest.mark.parametrize(
    "how, complaint",
    [
        ({"top_k": -1}, "top_k is -1, expected a whole number from 0 up"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"presence": float("inf")}, "presence is inf, expected a finite number"),
        ({"frequency": "much"}, "frequency is 'much'"),
        ({"fading": 1.5}, "fading is 1.5, expected a number from 0 to 1"),
        ({"temperature": 10**400}, "temperature is a whole number of 1329 bits, expected a number from 0 up"),
        ({"top_p": 10**400}, "top_p is a whole number of 1329 bits"),
        ({"frequency": -(10**400)}, "frequency is a whole"),
        ({"presence": 1e31}, "presence is 1e.31, expected a finite number from -1e30 to 1e30"),
        ({"seed": -1}, "seed is -1, expected None, a whole number from 0 up, or"),
        ({"seed": 1.5}, "seed is 1.5, expected"),
        ({"seed": "1"}, "seed is '1', expected None"),
        ({"min_p": 2}, "min_p is 2, expected a number from 0 to 1"),
        ({"repetition": 0}, "repetition is 0, expected a number from 0.001 to 1000"),
        ({"temperature_last": [1]}, "temperature_last is a list, expected True or False"),
        ({"logprobs": 1}, "logprobs is 1, expected True or False"),
        ({"bias": [1]}, "bias is a list, expected a mapping"),
        ({"bias": {-1: 0.0}}, "an id of bias is -1"),
        ({"bias": {1: np.inf}}, r"bias\[1\] is inf, expected -inf, or a finite number"),
    ],
)
def test_ways_of_drawing_that_are_refused(how, complaint):
    with pytest.raises(ContractError, match=f"Sampling: {complaint}"):
        Sampling(**how)


@pytest.mark.parametrize("temperature", [1e-39, 1e-46, 5e-324], ids=str)
@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_the_least_temperatures_are_greedy(temperature, how):
    draw = Sampling(temperature=temperature, seed=0, **how).sampler()
    assert {draw(np.float32([-1, 0, 3, 2.5, -np.inf])) for _ in range(20)} == {2}


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "logits, complaint",
    [
        ([0, 1, np.nan, np.nan], "logits are nan for token 2, expected numbers below inf"),
        ([0, 1, np.inf, 3], "logits are inf for token 2, expected numbers below inf"),
        ([-np.inf] * 4, "logits are -inf for all 4 tokens, expected one that can be drawn"),
    ],
    ids=range(3),
)
def test_logits_that_cannot_be_drawn_from(temperature, logits, complaint):
    with pytest.raises(ContractError, match=f"Sampling: {complaint}"):
        Sampling(temperature=temperature, top_p=0.9).sampler()(np.float32(logits))
    assert Sampling(temperature=temperature, vocabulary=2).sampler()(np.float32([-np.inf, 0, np.nan])) == 1


def test_who_cannot_join_takes_no_slot(austen):
    batch = Batch(austen, 2)
    for arguments in (([b"a", b"b"], [Sampling(), "hot"]), ([b"a", [256]], Sampling()), ([b"a", ["b"]], Sampling())):
        with pytest.raises(ContractError):
            batch.join(*arguments)
        assert batch.free == 2
    for slots in (0, -1, 1.5, True):
        with pytest.raises(ContractError, match="Batch: slots is .*, expected a whole number from 1 up"):
            Batch(austen, slots)


def test_nothing_is_drawn_where_one_cannot_go_on(austen):
    batch = Batch(austen, 2)
    a, b = batch.join([b"Miss Woodh", b"Captain Went"], [Sampling(seed=1), Sampling(seed=2)])
    batch.sequences[b].logits[7] = np.nan
    assert batch.complaint(a) is None
    with pytest.raises(ContractError, match=f"slot {b} cannot go on: logits are nan for token 7, expected"):
        batch.step()
    batch.leave(b)
    assert [batch.step()[a] for _ in range(5)] == list(alone(austen, b"Miss Woodh", 5, Sampling(seed=1)))


@pytest.mark.parametrize("vocabulary", [1, 5, 256, 40_000, 70_000])
def test_many_draw_what_each_draws_alone(vocabulary, rng):
    ways = [
        {},
        {"temperature": 0},
        {"temperature": 0.7},
        {"temperature": 1e-3},
        {"top_k": 2},
        {"top_p": 0.9},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.8},
        {"presence": 3.0, "fading": 0.5},
        {"repetition": 1.3, "min_p": 0.1},
        {"temperature": 2.0, "top_p": 0.7, "temperature_last": True},
        {"bias": {0: 1.5}, "temperature": 0},
        {"presence": 1.0, "top_p": 0.9},
        {"vocabulary": max(1, vocabulary - 2)},
        {"fading": 0.5},
    ]
    hows = [Sampling(seed=seed, **how) for seed, how in enumerate(2 * ways)]
    many, alone = ([how.sampler() for how in hows] for _ in range(2))
    for turn in range(4):
        logits = 4 * rng.standard_normal((len(hows), vocabulary), dtype=np.float32)
        logits[4:6] = logits[4:6].round()  # many are equal
        logits = logits if turn % 2 else list(logits)
        before = np.array(logits)
        assert draw_each(many, logits) == [draw(row) for draw, row in zip(alone, logits)]
        np.testing.assert_array_equal(logits, before)
    assert [draw.counts for draw in many] == [draw.counts for draw in alone]
    logits[3][0], logits[5][:], logits[8][-1] = np.nan, -np.inf, np.inf
    found = {number: why for number, draw in enumerate(alone) if (why := draw.complaint(logits[number]))}
    assert complaints(many, logits) == found and {3, 5, 8} <= set(found)


def drawn_literally(how, random, logits):
    """One token, by sorting all of a sequence's probabilities."""
    first, last = (1, how.temperature) if how.temperature_last else (how.temperature, 1)
    p = np.exp(((logits - logits.max()).astype(np.float64) / first).astype(np.float32))
    p /= p.sum()
    some = how.top_k or how.top_p < 1 or how.min_p
    order = np.argsort(-p, kind="stable")[: how.top_k or None] if some else np.arange(len(p))
    cumulated = np.cumsum(p[order], dtype=np.float64)
    bound = how.top_p * (cumulated[-1] if how.top_k else 1)
    order = order[: cumulated.searchsorted(bound) + 1]
    order = order[p[order] >= np.float32(how.min_p) * p.max()]
    cumulated = np.cumsum(
        (p[order] / p.max()).astype(np.float64) ** (1 / last) if last != 1 else p[order], dtype=np.float64
    )
    return order[cumulated.searchsorted(random.random() * cumulated[-1], side="right")]


@pytest.mark.parametrize("order, drawn", [(False, {0, 1}), (True, {0})], ids=["before top_p", "after top_p"])
def test_the_temperature_is_before_or_after_top_p(order, drawn):
    """0.64 is more than 0.6 at temperature 1, and less once temperature 2 has flattened it."""
    logits = np.log([0.64, 0.24, 0.09, 0.03])
    draw = Sampling(temperature=2, top_p=0.6, temperature_last=order, seed=0).sampler()
    assert {draw(logits) for _ in range(300)} == drawn


def test_min_p_and_a_late_temperature_follow_the_distribution():
    p = np.array([0.5, 0.3, 0.15, 0.05])
    draw = Sampling(temperature=0.5, min_p=0.25, temperature_last=True, seed=0).sampler()
    counts = np.bincount([draw(np.log(p)) for _ in range(20_000)], minlength=4) / 20_000
    wanted = np.where(p >= 0.125, p, 0) ** 2
    np.testing.assert_allclose(counts, wanted / wanted.sum(), atol=0.02)


def test_repetition_bias_and_bans_follow_their_equations():
    sampler = Sampling(temperature=0, repetition=2.0, bias={3: -np.inf, 1: 0.5}, logprobs=True).sampler()
    logits = np.float32([-1.0, 2.0, 1.6, 9.0])
    assert [sampler(logits) for _ in range(3)] == [1, 2, 1]  # 2.5; 1.5 for 1.6; 1.5 for 0.8
    shares = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    np.testing.assert_allclose(sampler.logprobs, np.log(shares[[1, 2, 1]]), rtol=1e-12)
    assert sampler.adjusted(np.float32([-1.0, -2.0, -2.0, 0.0])).tolist() == [-1.0, -3.5, -4.0, -np.inf]


def test_a_bias_beyond_the_vocabulary_and_a_ban_of_all_are_refused():
    with pytest.raises(ContractError, match="bias has the id 7, expected one below 4"):
        Sampling(bias={7: 1.0}).sampler()(np.zeros(4))
    with pytest.raises(ContractError, match="bias has the id 7, expected one below 4"):
        Sampling(bias={0: 1.0, 7: 1.0}, vocabulary=4)
    both = [Sampling().sampler(), Sampling(bias={7: 1.0}).sampler()]
    assert complaints(both, np.zeros((2, 4))) == {
        1: "bias has the id 7, expected one below 4"
    }  # of a batch, that alone
    banned = Sampling(bias=dict.fromkeys(range(4), -np.inf)).sampler()
    assert complaints([banned], np.zeros((1, 4)))[0].startswith("logits are -inf for all 4 tokens")


@pytest.mark.parametrize("vocabulary", [5, 256, 40_000])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"top_p": 0.9},
        {"top_k": 3},
        {"top_k": 40, "top_p": 0.5},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"top_p": 0.8, "temperature_last": True},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_likeliest(how, vocabulary, rng):
    hows = [Sampling(temperature=0.8, seed=seed, **how) for seed in range(6)]
    samplers, randoms = [how.sampler() for how in hows], [np.random.default_rng(seed) for seed in range(6)]
    for _ in range(10):
        logits = 4 * rng.standard_normal((6, vocabulary), dtype=np.float32)
        logits[::2] = logits[::2].round()  # many are equal
        assert draw_each(samplers, logits) == [*map(drawn_literally, hows, randoms, logits)]
