"""Properties, the rounds that try them, what they count, and the smallest example of a fault.

A property is a check of one example that a hypothesis strategy draws. What a check may end in:

    nothing         the example held
    Refused         the library refused it, in its contract's words
    Fault(law, ..)  a law that does not hold
    anything else   a fault as well: an error that is none of the library's
"""

from __future__ import annotations

import hashlib
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings

ROUND = 150  # examples of a property before the next one has its turn
SHRINKING = 4  # seconds that a new fault may take to become small
KINDS = 60  # faults of a property that are told apart; the others are only counted
PATIENCE = 20  # seconds after which an example hangs, or what is said; twenty times that where kernels are built first
MEMORY = 256 << 20  # bytes by which an example may raise what the process had at most


class Fault(AssertionError):
    """A law that does not hold; two faults of a property with the same `law` count as one."""

    def __init__(self, law: str, text: str = ""):
        super().__init__(f"{law}: {text}" if text else law)
        self.law = law


class Refused(Exception):
    """The library refused the example, as it may."""


class Hang(Exception):
    """Raised into an example that takes too long."""


class Enough(BaseException):
    """The time is up; hypothesis lets it through."""


@dataclass
class Property:
    """`check(example, machine)` of what `examples(machine)` draws."""

    name: str
    check: Callable
    examples: Callable
    machines: tuple[str, ...] | None  # those that it speaks of, None for all
    round: int  # examples in a round
    memory: int  # bytes, as MEMORY; this and the next where no kernels are built
    seconds: float | None  # of the thread's own time that an example may take
    patience: float  # seconds, as PATIENCE


@dataclass
class Count:
    tried: int = 0
    refused: int = 0
    faults: int = 0
    kinds: dict = field(default_factory=dict)  # law -> Found


@dataclass
class Found:
    """A fault and the smallest example that is known of it."""

    text: str
    example: object
    times: int = 1


PROPERTIES: dict[str, Property] = {}


def holds_for(examples, *, machines=None, round=ROUND, memory=MEMORY, seconds=None, patience=PATIENCE):
    """Makes a check a property, under its own name."""

    def mark(check):
        name = check.__name__.replace("_", "-")
        PROPERTIES[name] = Property(name, check, examples, machines, round, memory, seconds, patience)
        return check

    return mark


def require(holds, law, text=""):
    if not holds:
        raise Fault(law, text)


class Attack:
    """Goes round the properties until the time is up."""

    def __init__(self, machine, properties, seconds, number, say=print, show=lambda line: None):
        self.machine, self.properties, self.number = machine, properties, number
        self.start, self.seconds = time.monotonic(), seconds
        self.say, self.show = say, show
        self.counts = {p.name: Count() for p in properties}

    @property
    def left(self):
        return self.start + self.seconds - time.monotonic()

    def run(self):
        turn = 0
        while self.left > 0:
            for p in self.properties:
                self.round(p, turn)
                if self.left <= 0:
                    break
            turn += 1
        return self.counts

    def round(self, p: Property, turn):
        """Up to p.round examples, and a new fault made small."""
        count, new, until = self.counts[p.name], [], None

        def body(example):
            nonlocal until
            if self.left <= 0 and not new or until is not None and time.monotonic() > until:
                raise Enough
            count.tried += not new
            self.show(self.progress(p))
            try:
                tried(p, example, self.machine)
            except Refused:
                count.refused += not new
            except Exception as error:  # hypothesis sees those alone that are new
                law = law_of(error)
                count.faults += not new
                if not new and law in count.kinds:
                    count.kinds[law].times += 1
                elif not new and len(count.kinds) >= KINDS:
                    pass
                elif not new or law == new[0]:
                    if not new:
                        new.append(law)
                        until = time.monotonic() + SHRINKING
                    count.kinds[law] = Found(told(error), example)
                    raise

        how = settings(
            max_examples=p.round,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        number = int.from_bytes(hashlib.sha256(f"{self.number} {p.name} {turn}".encode()).digest()[:8])
        try:
            how(seed(number)(given(p.examples(self.machine))(body)))()
        except Enough:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not new:
                count.faults += 1
                count.kinds[f"the attack itself: {error!r:.200}"] = Found(told(error), None)
                new.append(f"the attack itself: {error!r:.200}")
        for law in new:
            self.say(self.report(p, count.kinds[law]))

    def report(self, p, found):
        return (
            f"\nFAULT of {p.name}: {found.text}\n  python tests/attack --backend {self.machine.name} "
            f"--replay {p.name} {shell(repr(found.example))}\n"
        )

    def progress(self, p):
        spent = time.monotonic() - self.start
        totals = [sum(getattr(c, name) for c in self.counts.values()) for name in ("tried", "refused")]
        kinds = sum(len(c.kinds) for c in self.counts.values())
        done = min(1.0, spent / self.seconds)
        return (
            f"[{'#' * int(20 * done):<20}] {spent:4.0f} of {self.seconds:.0f} s  {totals[0]} tried, "
            f"{totals[1]} refused, {kinds} kinds of fault  {p.name}"
        )


def tried(p: Property, example, machine):
    """The check, within its time and memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    own = time.thread_time()
    with alarm(p.patience if machine.ready else 20 * p.patience), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p.check(example, machine)
    if not machine.ready:
        return
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - peak
    require(grown <= p.memory, "memory", f"the process grew by {grown >> 20} MB")
    own = time.thread_time() - own
    require(p.seconds is None or own <= p.seconds, "time", f"took {own:.1f} s, expected {p.seconds} at most")


@contextmanager
def alarm(seconds):
    """Raises Hang into what takes longer."""

    def ring(*_):
        raise Hang(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def law_of(error) -> str:
    """What tells a fault from others: its law, or the error's type and the line that raised it."""
    if isinstance(error, Fault):
        return error.law
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "linattn_np" in f.filename] or frames
    return f"{type(error).__name__} in {re.sub('.*/', '', own[-1].filename)} {own[-1].name}"


def told(error) -> str:
    if isinstance(error, Fault):
        return str(error)
    return f"{law_of(error)}\n" + "".join(traceback.format_exception(error, limit=-6)).rstrip()


def shell(text):
    return "'" + text.replace("'", "'\\''") + "'"


class Line:
    """A line that is written over on a terminal; elsewhere one every half minute."""

    def __init__(self, stream=sys.stderr):
        self.stream, self.terminal = stream, stream.isatty()
        self.next, self.length = 0.0, 0

    def __call__(self, line):
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + (0.2 if self.terminal else 30)
        self.stream.write(f"\r{line:<{self.length}}" if self.terminal else f"{line}\n")
        self.length = len(line)
        self.stream.flush()

    def clear(self):
        if self.terminal and self.length:
            self.stream.write(f"\r{'':<{self.length}}\r")
