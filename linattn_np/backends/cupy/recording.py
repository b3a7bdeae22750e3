"""A plan drawn up once for all calls that differ in nothing but where their arrays are.

`plans.run` on a `Recorder` launches nothing: it notes what is to be made and launched, with marks where addresses
belong. Playing the `Recording` puts a call's addresses in their place, which takes a tenth of the plan's time.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from . import family, plans

ADDRESS, MAP = 0x7FFA << 48, 0x7FFB << 48       # marks: too large for an integer of a plan, and as doubles no numbers
MAP_BYTES = 128
OFFSET = 40                                     # bits of a mark that count bytes; those above name the array
QUEUES = 16                                     # streams for which calls alike are recorded, each with its own tables
PLACES = 64                                     # sets of addresses whose arguments are kept: the layers of a model
in_graphs = []                                  # what captured graphs use for as long as they live, which nobody tells


class NotRepeatable(Exception):
    """The plan uses an array besides the caller's and those that the device made for it: a copy."""


def run(problem, device):
    """`plans.run`, by the recording of the first call alike on the same queue where there can be one."""
    if problem.memo is None:
        return plans.run(problem, device)
    problem = family.with_channel(problem)
    recordings, queue = problem.memo.setdefault("recordings", {}), (device, device.queue)
    if queue not in recordings:
        if len(recordings) >= QUEUES:
            recordings.clear()
        recordings[queue] = record(problem, device)
    recording = recordings.get(queue)
    return recording.play(given(problem)) if recording else plans.run(problem, device)


def record(problem, device) -> Recording | None:
    """None for a plan that copies."""
    if problem.out is not None and not plans.has_rows(problem.out):
        return None
    problem = seen_apart(problem)
    recorder = Recorder(device, given(problem))
    try:
        return Recording(recorder, recorder.numbers(plans.run(problem, recorder)))
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
    def view(x):
        return None if x is None else x.view()

    options = {name: view(x) if name == "state" or name == "slots" and not isinstance(x, np.ndarray) else x
               for name, x in problem.options.items()}
    return problem.but(arrays={name: view(x) for name, x in problem.arrays.items()}, out=view(problem.out), options=options,
                       initial_state=problem.initial_state and tuple(map(view, problem.initial_state)))


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
        self.device, self.makers, self.maps, self.result = recorder.device, recorder.makers, recorder.maps, result
        self.starts = [recorder.device.pointer(x) % 16 for x in recorder.arrays]
        self.launches = [(kernel, blocks, np.frombuffer(args.tobytes(), np.int64), args.dtype, *smem)
                         for kernel, blocks, args, *smem in recorder.launches]
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
            launches = self.filled[addresses] = [self.fill(arrays, addresses, *launch) for launch in self.launches]
        for launch in launches:
            self.device.launch(*launch)
        if self.hidden and self.device.capturing:
            in_graphs.extend(arrays[number] for number in self.hidden)
        return collect(arrays, self.result)

    def fill(self, arrays, addresses, kernel, blocks, marked, dtype, *smem):
        """A launch with addresses and maps for their marks."""
        words, kinds = marked.copy(), marked >> 48
        for at in np.flatnonzero(kinds == ADDRESS >> 48).tolist():
            number, offset = divmod(int(marked[at]) - ADDRESS, 1 << OFFSET)
            words[at] = addresses[number] + offset - self.starts[number]
        for at in np.flatnonzero(kinds == MAP >> 48).tolist():
            number, box = self.maps[int(marked[at]) - MAP]
            words[at:at + MAP_BYTES // 8] = np.frombuffer(self.device.tensor_map(arrays[number], *box), np.int64)
        return kernel, blocks, words.view(dtype), *smem


def collect(arrays, result):
    """`result` with arrays for their numbers."""
    if isinstance(result, tuple):
        return tuple([collect(arrays, part) for part in result])
    return None if result is None else arrays[result]


def flat(numbers) -> list:
    return [x for part in numbers for x in flat(part)] if isinstance(numbers, tuple) else [numbers]
