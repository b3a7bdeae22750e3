"""A plan drawn up once for all calls that differ in nothing but where their arrays are.

`plans.run` or `plans.pullback` on a `Recorder` launches nothing: it notes what is to be made and launched, with marks
where addresses belong. Playing the `Recording` puts a call's addresses in their place, in a tenth of the plan's time.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ...arrays import signature
from . import family, plans

ADDRESS, MAP = 0x7FFA << 48, 0x7FFB << 48       # marks: too large for an integer of a plan, and as doubles no numbers
MAP_BYTES = 128
OFFSET = 40                                     # bits of a mark that count bytes; those above name the array
RECORDINGS = 16                                 # of calls alike: one for every stream, each with its own tables, and for
                                                # every kind of gradients that a pullback is given
PLACES = 64                                     # sets of addresses whose arguments are kept: the layers of a model
in_graphs = []                                  # what captured graphs use for as long as they live, which nobody tells


class NotRepeatable(Exception):
    """The plan uses an array besides the caller's and those that the device made for it: a copy."""


def run(problem, device):
    """`plans.run`, by the recording of the first call alike on the same queue where there can be one."""
    return by_recording(plans.run, problem, device)


def pullback(problem, device, do, dht):
    """`plans.pullback`, likewise."""
    return by_recording(plans.pullback, problem.but(out=None), device, do, dht)


def by_recording(plan, problem, device, *cotangents):
    """`plan(problem, device, *cotangents)`; these are nothing or (do, dht), which may be of other kinds at every call."""
    kinds = [signature(x) for x in arrays_in(cotangents)]
    if problem.memo is None or None in kinds:
        return plan(problem, device, *cotangents)
    problem = family.with_channel(problem)
    recordings, alike = problem.memo.setdefault("recordings", {}), (device, device.queue, *kinds)
    if alike not in recordings:
        if len(recordings) >= RECORDINGS:
            recordings.clear()
        recordings[alike] = record(plan, problem, device, cotangents)
    recording = recordings.get(alike)
    return recording.play([*given(problem), *arrays_in(cotangents)]) if recording else plan(problem, device, *cotangents)


def record(plan, problem, device, cotangents) -> Recording | None:
    """None for a plan that copies."""
    if problem.out is not None and not plans.has_rows(problem.out):
        return None
    problem, cotangents = seen_apart(problem), view(cotangents)
    recorder = Recorder(device, [*given(problem), *arrays_in(cotangents)])
    try:
        return Recording(recorder, recorder.numbers(plan(problem, recorder, *cotangents)))
    except NotRepeatable:
        return None


def given(problem) -> list:
    """The caller's arrays on the device."""
    arrays = [*problem.arrays.values(), *(problem.initial_state or ())]
    state, slots = problem.options.get("state"), problem.options.get("slots")
    arrays += [x for x in (problem.out, state) if x is not None]
    return arrays if slots is None or isinstance(slots, np.ndarray) else [*arrays, slots]


def seen_apart(problem):
    """The problem on views of its arrays, so that one given twice goes by two names."""
    options = {name: view(x) if name == "state" or name == "slots" and not isinstance(x, np.ndarray) else x
               for name, x in problem.options.items()}
    return problem.but(arrays={name: view(x) for name, x in problem.arrays.items()}, out=view(problem.out), options=options,
                       initial_state=view(problem.initial_state))


def view(x):
    """A view of an array, or of each in a tuple."""
    if isinstance(x, tuple):
        return tuple(map(view, x))
    return None if x is None else x.view()


class Recorder:
    """A device on which a plan is drawn up instead of run. Arrays go by numbers: the caller's, then the plan's own."""

    def __init__(self, device, given):
        self.device, self.arrays = device, list(given)
        self.makers, self.maps, self.launches = [], [], []

    @property
    def capability(self) -> int:
        return self.device.capability

    def empty(self, shape, dtype):
        return self.made(self.device.empty(shape, dtype))

    def zeros(self, shape, dtype):
        """Cleared whenever the plan is played, before its first launch."""
        return self.later(self.device.zeros(shape, dtype), partial(self.device.zeros, shape, dtype))

    def empty_like(self, prototype, shape, dtype):
        return self.made(self.device.empty_like(prototype, shape, dtype))

    def made(self, x):
        """`x`, of which every call makes its own, with the axes in memory in the same order."""
        empty, dtype, order = self.device.empty, x.dtype, sorted(range(x.ndim), key=lambda axis: -x.strides[axis])
        if order == list(range(x.ndim)):
            return self.later(x, partial(empty, x.shape, dtype))
        shape, back = tuple(x.shape[axis] for axis in order), tuple(map(order.index, range(x.ndim)))
        return self.later(x, lambda: empty(shape, dtype).transpose(back))

    def upload(self, host):
        table = self.device.upload(host)
        return self.later(table, lambda: table)

    def later(self, x, make):
        self.arrays.append(x)
        self.makers.append(make)
        return x

    def number(self, x) -> int:
        for number, array in enumerate(self.arrays):
            if array is x:
                return number
        raise NotRepeatable

    def pointer(self, x) -> int:
        """A mark for the address of `x`, a known array or a view of one; as far from 16 bytes as the address is."""
        known = x if x.base is None or any(x is array for array in self.arrays) else x.base
        start = self.device.pointer(known)
        return ADDRESS | self.number(known) << OFFSET | start % 16 + self.device.pointer(x) - start

    def tensor_map(self, x, *box) -> bytes:
        self.maps.append((self.number(x), box))
        return (MAP | len(self.maps) - 1).to_bytes(8, "little").ljust(MAP_BYTES, b"\0")

    def launch(self, *launch):
        self.launches.append(launch)

    def numbers(self, result):
        """A plan's result with numbers for its arrays."""
        if isinstance(result, tuple):
            return tuple(map(self.numbers, result))
        return None if result is None else self.number(result)


class Recording:
    """What a plan makes and launches."""

    def __init__(self, recorder, result):
        self.device, self.makers, self.launches, self.result = recorder.device, recorder.makers, recorder.launches, result
        starts = np.array([recorder.device.pointer(x) % 16 for x in recorder.arrays])
        self.words = np.frombuffer(b"".join(args.tobytes() for _, _, args, *_ in self.launches), np.int64)
        kinds = self.words >> 48
        self.marked = np.flatnonzero(kinds == ADDRESS >> 48)
        self.numbers, offsets = np.divmod(self.words[self.marked] - ADDRESS, 1 << OFFSET)
        self.offsets = offsets - starts[self.numbers]
        self.maps = [(at, *recorder.maps[self.words[at] - MAP]) for at in np.flatnonzero(kinds == MAP >> 48).tolist()]
        own = range(len(recorder.arrays) - len(self.makers), len(recorder.arrays))
        self.hidden = [number for number in own if number not in flat(result)]
        self.filled = {}

    def play(self, given):
        arrays = [*given, *[make() for make in self.makers]]
        addresses = tuple(map(self.device.pointer, arrays))
        launches = self.filled.get(addresses)
        if launches is None:
            if len(self.filled) >= PLACES:
                self.filled.clear()
            launches = self.filled[addresses] = list(self.fill(arrays, addresses))
        for launch in launches:
            self.device.launch(*launch)
        if self.hidden and self.device.capturing:
            in_graphs.extend(arrays[number] for number in self.hidden)
        return collect(arrays, self.result)

    def fill(self, arrays, addresses):
        """The launches with addresses and maps for their marks."""
        words = self.words.copy()
        words[self.marked] = np.array(addresses)[self.numbers] + self.offsets
        for at, number, box in self.maps:
            words[at:at + MAP_BYTES // 8] = np.frombuffer(self.device.tensor_map(arrays[number], *box), np.int64)
        first = 0
        for kernel, blocks, marked, *smem in self.launches:
            end = first + marked.nbytes // 8
            yield kernel, blocks, words[first:end].copy().view(marked.dtype), *smem
            first = end


def collect(arrays, result):
    """`result` with arrays for their numbers."""
    if isinstance(result, tuple):
        return tuple([collect(arrays, part) for part in result])
    return None if result is None else arrays[result]


def flat(tree) -> list:
    return [x for part in tree for x in flat(part)] if isinstance(tree, tuple) else [tree]


def arrays_in(tree) -> list:
    return [x for x in flat(tree) if x is not None]
