"""What enters a model: states, prompts, ways of drawing, logits."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from hypothesis import strategies as st
from reference import same_bits

from attack.files import AUSTEN, austen
from attack.harness import Fault, Refused, holds_for, require
from linattn_np import ContractError
from linattn_np.models import RWKV6, Batch, Sampling, State
from linattn_np.models.training import Settings, Training

ON_HOST = ("numpy",)


# -- drawing -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Drawing:
    """Ways of drawing, and logits."""

    how: dict
    logits: tuple = (0.0,)
    times: int = 1


HOSTILE = (float("nan"), float("inf"), -1, 10**400, "1", None, True, [1], 1j)


def mostly(*sound):
    return st.sampled_from(sound * (16 // len(sound)) + HOSTILE)


WAYS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": mostly(0, 0.0, 1, 1e-45, 1e-300, 5e-324, 1e-3, 1e30, 1.7e308, np.float16(0.5)),
        "top_k": mostly(0, 1, 2, 10**30, np.int8(3)),
        "top_p": mostly(1, 0.5, 1e-300, 1e-9, 5e-324, 1 - 1e-16),
        "min_p": mostly(0, 0.5, 1, 1e-300, 5e-324),
        "presence": mostly(0.0, 1.0, -1e38, 1e39, 1e308),
        "frequency": mostly(0.0, 1.0, 1e39, -1e308),
        "fading": mostly(0, 0.5, 1),
        "repetition": mostly(1, 2.0, 1e-3, 1e3),
        "bias": mostly({}, {0: 1e30}, {0: -np.inf}, {1: 1.0}, {0: np.nan}, {-1: 1.0}, {True: 1.0}),
        "temperature_last": mostly(False, True),
        "logprobs": mostly(False, True),
        "seed": mostly(0, 7, 2**200),
        "vocabulary": mostly(None, 1, 2, 10**30),
    },
)
LOGITS = st.lists(
    st.one_of(
        st.floats(-5, 5), st.sampled_from((0.0, -0.0, 1e38, -1e38, 1e30, float("nan"), float("inf"), -float("inf")))
    ),
    min_size=1,
    max_size=6,
).map(tuple)


@holds_for(lambda machine: st.builds(Drawing, WAYS, LOGITS, st.integers(1, 4)), machines=ON_HOST, seconds=1.0)
def drawing(case, machine):
    """A token that may be drawn, or a refusal; never a token of probability nothing."""
    try:
        sampler = Sampling(**case.how).sampler()
        tokens = [sampler(np.array(case.logits, np.float32)) for _ in range(case.times)]
    except ContractError as error:
        raise Refused from error
    logits = np.array(case.logits, np.float32)[: case.how.get("vocabulary")]
    require(not np.isnan(logits).any(), "drawing: a token out of NaN", str(tokens))
    for token in tokens:
        require(0 <= token < len(logits), "drawing: a token that is none", str(token))
        require((case.how.get("bias") or {}).get(token) != -np.inf, "drawing: a token that is banned", str(token))
        changing = ("presence", "frequency", "bias")
        penalised = any(map(case.how.get, changing)) or case.how.get("repetition", 1) != 1
        require(
            np.isneginf(logits).all() or not np.isneginf(logits[token]) or penalised,
            "drawing: a token of probability 0",
            str(token),
        )
        sure = case.how.get("temperature", 1.0) < 1e-30 and not penalised
        require(
            not sure or logits[token] == logits.max(),
            "drawing: not the likeliest token at no temperature",
            f"{token} of {case.logits}",
        )


# -- states ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entering:
    """A state that is not quite the model's, and where it enters."""

    where: str = "forward"
    part: str = "wkv"
    change: str = "int32"


CHANGES = {
    "nothing": lambda x: x,
    "int32": lambda x: x.astype(np.int32),
    "float16": lambda x: x.astype(np.float16),
    "float64": lambda x: x.astype(np.float64),
    "bool": lambda x: x.astype(bool),
    "complex": lambda x: x.astype(complex),
    "list": lambda x: x.tolist(),
    "none": lambda x: None,
    "more rows": lambda x: np.concatenate([x, x, x], axis=1),
    "no rows": lambda x: x[:, :0],
    "an axis less": lambda x: x[0],
    "more layers": lambda x: np.concatenate([x, x]),
    "masked": np.ma.masked_array,
    "objects": lambda x: x.astype(object),
    "big-endian": lambda x: x.astype(">f4"),
    "read-only": lambda x: frozen(x),
    "backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "one number for all": lambda x: np.broadcast_to(x[..., :1], x.shape),
}
SOUND = ("nothing", "backwards")
SAME_NUMBERS = (*SOUND, "read-only", "one number for all", "float64", "masked", "objects", "big-endian")


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@functools.cache
def prompted():
    """The model's state after a prompt, not to be written."""
    return austen().forward([list(b"Miss Woodhouse, h")])[1]


ENTERING = st.builds(
    Entering,
    st.sampled_from(("forward", "a step", "pool", "join", "on_device", "all parts join")),
    st.sampled_from(("att_shift", "wkv", "ffn_shift")),
    st.sampled_from(list(CHANGES)),
)


@holds_for(lambda machine: ENTERING, machines=ON_HOST, seconds=2.0)
def states_that_enter(case, machine):
    """Refused, or the numbers that the sound state gives."""
    model = austen()
    parts = {name: getattr(prompted(), name).copy() for name in ("att_shift", "wkv", "ffn_shift")}
    changed = parts if case.where == "all parts join" else {case.part: parts[case.part]}
    state = State(**(parts | {name: CHANGES[case.change](x) for name, x in changed.items()}))
    same = {name: np.array(getattr(state, name), np.float32) for name in changed if case.change in SAME_NUMBERS}
    sound = State(**{name: same.get(name, x) for name, x in parts.items()})
    wanted, _ = model.forward([list(b"and")], sound.copy(), last=True)
    try:
        if case.where == "forward":
            found, _ = model.forward([list(b"and")], state, last=True)
        elif case.where == "a step":
            wanted, _ = model.forward([[97]], sound.copy(), last=True)
            found, _ = model.forward([[97]], state, last=True)
        elif case.where == "pool":
            found, _ = model.forward([list(b"and")], state, slots=[0], last=True)
        elif case.where == "on_device":
            found, _ = model.forward([list(b"and")], model.on_device(state).copy(), last=True)
        else:
            batch = Batch(model, 2)
            (slot,) = batch.join([list(b"and")], Sampling(temperature=0), [state])
            found = batch.sequences[slot].logits[None]
    except ContractError as error:
        require(case.change not in SOUND, "states: a sound one is refused", str(error))
        raise Refused from error
    error = float(abs(np.asarray(found, np.float64) - wanted).max())
    require(error < 1e-3, f"states: {case.change} gives wrong logits", f"{case.where}: off by {error:.1e}")
    if case.where in ("join", "all parts join"):
        require(case.change != "more rows", "states: a state of several rows joins", case.where)


# -- batches -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Joining:
    """Prompts that join a batch, one of them bad."""

    prompts: tuple = ((97,),)
    how: dict = field(default_factory=dict)
    slots: int = 2


PROMPTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 255), min_size=1, max_size=5).map(tuple),
        st.sampled_from(
            ((), (256,), (-1,), (0.5,), ("a",), (None,), (2**70,), ((1, 2), (3,)), (float("nan"),), "abc", None, 7)
        ),
    ),
    max_size=3,
).map(tuple)


@holds_for(lambda machine: st.builds(Joining, PROMPTS, WAYS, st.integers(1, 3)), machines=ON_HOST, seconds=2.0)
def joining(case, machine):
    """Joined, or refused with every slot as free as before."""
    batch = Batch(austen(), case.slots)
    (other,) = batch.join([[97, 98]], Sampling(temperature=0)) if case.slots > 1 else (None,)
    free, before = batch.free, None if other is None else batch.state(other).wkv
    try:
        slots = batch.join(list(case.prompts), Sampling(**case.how))
        batch.step()
        for slot in slots:
            batch.leave(slot)
    except ContractError as error:
        require(batch.free == free, "joining: a refused prompt takes a slot")
        require(
            other is None or same_bits(batch.state(other).wkv, before), "joining: a refused prompt moves a neighbour"
        )
        raise Refused from error
    except TypeError as error:
        raise Fault(f"joining: TypeError, {error!s:.60}", repr(case.prompts)) from error
    require(batch.free == free, "joining: a slot is lost")


# -- copies and threads ------------------------------------------------------------------------------------------------
DTYPES = ("float32", "bfloat16", "int8", "int4")
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy of a copy": lambda model: copy.deepcopy(copy.copy(model)),
    "spawned": lambda model: Spawned(pickle.dumps(model)),
    "twice pickled": lambda model: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model)))),
}
WORDS = st.lists(st.integers(0, 255), min_size=1, max_size=40).map(tuple)


class Spawned:
    """A model in a process that a spawn starts: it reads, and gives the bits back."""

    def __init__(self, content):
        self.content = content

    def read(self, words):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(read_of, (self.content, words))


def read_of(content, words):
    return read(pickle.loads(content), words)


@dataclass(frozen=True)
class Copied:
    """A model, how it is copied, whether the first one lives on, and what the copy reads."""

    dtype: str = "float32"
    how: str = "deepcopy"
    lives: bool = False
    used: bool = True  # before it is copied
    words: tuple = (97,)


COPIED = st.builds(Copied, st.sampled_from(DTYPES), st.sampled_from(list(COPIES)), st.booleans(), st.booleans(), WORDS)


@holds_for(lambda machine: COPIED, machines=ON_HOST, round=15)
def copies_of_a_model(case, machine):
    """A copy gives the bits of its model when that one's memory holds something else, or is refused."""
    wanted = read(of_dtype(case.dtype), case.words)
    model = RWKV6.from_file(AUSTEN, dtype=case.dtype)
    if case.used:
        read(model, case.words)
    try:
        twin = COPIES[case.how](model)
    except (ContractError, TypeError) as error:
        raise Refused from error
    if not case.lives:
        del model
        gc.collect()
    junk = [np.full(1 << 16, 7.5, np.float32) for _ in range(40)]
    law = f"copies: {case.how} of {case.dtype} reads other numbers"
    found = twin.read(case.words) if isinstance(twin, Spawned) else read(twin, case.words)
    require(same_bits(found, wanted), law, f"beside {len(junk)} arrays")


@functools.cache
def of_dtype(dtype):
    return RWKV6.from_file(AUSTEN, dtype=dtype)


def read(model, words, steps=3):
    """The logits behind a prompt, and behind the likeliest tokens that follow."""
    logits, state = model.forward([list(words)], last=True)
    found = [np.asarray(logits, np.float32).reshape(-1)]
    for _ in range(steps):
        logits, state = model.forward([[int(found[-1].argmax())]], state, last=True)
        found.append(np.asarray(logits, np.float32).reshape(-1))
    return np.concatenate(found)


@dataclass(frozen=True)
class Sharers:
    """Threads that join one batch, each with its own words, and step it as often."""

    words: tuple = ((97,), (98,))
    steps: int = 5


SHARERS = st.builds(Sharers, st.lists(WORDS, min_size=2, max_size=6).map(tuple), st.integers(1, 8))


@holds_for(lambda machine: SHARERS, machines=ON_HOST, round=15)
def threads_on_a_batch(case, machine):
    """Whichever thread steps it, each sequence gets the tokens that it gets alone."""
    model, threads = of_dtype("float32"), len(case.words)
    batch, start = Batch(model, threads), threading.Barrier(threads)

    def work(words):
        start.wait()
        (slot,) = batch.join([list(words)], Sampling(temperature=0))
        return slot, [batch.step() for _ in range(case.steps)]

    with ThreadPoolExecutor(threads) as pool:
        slots, steps = zip(*pool.map(work, case.words))
    require(sorted(slots) == list(range(threads)), "threads: two sequences in one slot", str(slots))
    for slot, words in zip(slots, case.words):
        found = [step[slot] for of_thread in steps for step in of_thread if slot in step]
        alone = islice(model.generate(list(words), temperature=0), len(found))
        same = sorted(found) == sorted(alone)  # no thread knows the order of the others' steps
        require(same, "threads: a batch gives other tokens than a sequence alone", f"{threads} threads")


@dataclass(frozen=True)
class Readers:
    """Threads that use one model, each with its own words and in its own way."""

    dtype: str = "float32"
    words: tuple = ((97,), (98,))
    ways: tuple = ("read",)


def generated(model, words):
    return np.array(list(islice(model.generate(list(words), temperature=0), 6)))


def in_a_batch(model, words):
    batch = Batch(model, 3)
    slots = batch.join([list(words), [97, 98]], Sampling(temperature=0))
    return np.array([[batch.step()[slot] for slot in slots] for _ in range(5)])


def trained(model, words):
    """The losses of a training; `model` plays no part in it."""
    settings = Settings(layers=1, width=16, head_size=8, batch=2, context=8, steps=3, seed=len(words))
    training = Training(bytes(words) * 60, settings)
    return np.array([training.step() for _ in range(3)])


WAYS_TO_USE = {
    "read": lambda model, words: read(model, words, 8),
    "prompt": lambda model, words: read(model, words * 40, 1),
    "generate": generated,
    "batch": in_a_batch,
    "train": trained,
}
READERS = st.builds(
    Readers,
    st.sampled_from(DTYPES),
    st.lists(WORDS, min_size=2, max_size=6).map(tuple),
    st.lists(st.sampled_from(list(WAYS_TO_USE)), min_size=1, max_size=3).map(tuple),
)


@holds_for(lambda machine: READERS, machines=ON_HOST, round=15)
def threads_on_a_model(case, machine):
    """Each thread gets what it gets alone; in a batch, too, beside the others."""
    model = of_dtype(case.dtype)
    ways = [case.ways[n % len(case.ways)] for n in range(len(case.words))]
    alone = [WAYS_TO_USE[way](model, words) for way, words in zip(ways, case.words)]
    start = threading.Barrier(len(case.words))

    def work(way, words):
        start.wait()
        return [WAYS_TO_USE[way](model, words) for _ in range(3)]

    with ThreadPoolExecutor(len(case.words)) as pool:
        for way, found, wanted in zip(ways, pool.map(work, ways, case.words), alone):
            same = all(same_bits(x, wanted) for x in found)
            require(same, f"threads: {case.dtype}, {way} gives other numbers than alone", f"{len(case.words)} threads")
