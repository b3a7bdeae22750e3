"""Attacks the library with random calls, arguments and files, for as long as it is told.

    python tests/attack                                         ten minutes on the NumPy backend
    python tests/attack --seconds 300 --backend cupy            on a card
    python tests/attack --backend emulated --only operators     one property, on the CUDA kernels emulated on the CPU
    NUMBA_ENABLE_CUDASIM=1 python tests/attack --backend numba  Numba's simulator
    python tests/attack --replay operators "Call('gla', T=3)"   one example again

Prints what each property tried, refused and found, and the smallest example of every fault as the command that
replays it. Exits with 1 where there was a fault. It needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from attack import names  # noqa: E402
from attack.files import austen
from attack.harness import PROPERTIES, Attack, Line, Refused, told, tried  # noqa: E402
from attack.machines import machine  # noqa: E402

ADDRESSES = 8 << 30  # bytes that the process may ask for: a fault must not take the machine with it
BACKENDS = ("numpy", "cupy", "emulated", "hopper", "numba")


def main(arguments=None) -> int:
    options = parsed(arguments)
    there = machine(options.backend)
    for prompt in (b"It is a truth", b"I"):  # Numba's loops are compiled, and are not what an example takes
        austen().forward([list(prompt)])
    if options.backend != "cupy":  # which reserves far more addresses than it uses
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if options.replay:
        return replay(*options.replay, there)
    line = Line()

    def say(text):
        line.clear()
        print(text, flush=True)

    chosen = [
        p
        for p in PROPERTIES.values()
        if (not options.only or p.name in options.only) and (p.machines is None or options.backend in p.machines)
    ]
    number = options.seed if options.seed is not None else time.time_ns() % (1 << 32)
    say(f"{len(chosen)} properties for {options.seconds:g} s on {options.backend}, --seed {number}")
    counts = Attack(there, chosen, options.seconds, number, say, line).run()
    say(table(counts))
    return int(any(count.faults for count in counts.values()))


def parsed(arguments):
    parser = argparse.ArgumentParser(prog="tests/attack", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="of the whole attack; 600 by default")
    parser.add_argument("--backend", choices=BACKENDS, default="numpy")
    parser.add_argument("--seed", type=int, help="of all that is random; fresh by default, and printed")
    parser.add_argument(
        "--only", nargs="+", choices=list(PROPERTIES), metavar="PROPERTY", help=f"of {', '.join(PROPERTIES)}"
    )
    parser.add_argument("--replay", nargs=2, metavar=("PROPERTY", "EXAMPLE"), help="an example as a fault prints it")
    return parser.parse_args(arguments)


def replay(name, example, there) -> int:
    try:
        tried(PROPERTIES[name], eval(example, vars(names)), there)  # the developer's own words
    except Refused:
        print("refused")
    except Exception as error:
        print(f"FAULT of {name}: {told(error)}")
        return 1
    return 0


def table(counts) -> str:
    """What every property came to."""
    rows = [("property", "tried", "refused", "faults", "kinds")]
    rows += [(name, c.tried, c.refused, c.faults, len(c.kinds)) for name, c in counts.items()]
    rows.append(("all", *(sum(row[i] for row in rows[1:]) for i in range(1, 5))))
    lines = [f"{name:<26}" + "".join(f"{x:>9}" for x in rest) for name, *rest in rows]
    kinds = [f"{found.times:>6} x {name}: {law}" for name, c in counts.items() for law, found in c.kinds.items()]
    return "\n".join(lines + (["", *kinds] if kinds else []))


if __name__ == "__main__":
    sys.exit(main())
