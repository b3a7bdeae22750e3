"""Times every operator on this machine, forwards and backwards, and compares with the time of moving its arrays once.

    linattn-np bench
    linattn-np bench --device cpu --tokens 4096 --heads 16 gla rwkv6

A time is the median of a few calls. The floor is the time of reading every array and writing every result once, at the
bandwidth of a copy; for gradients, of reading the arrays and the result's gradient and writing theirs. Arrays are
bfloat16 on a GPU, float32 on the CPU. benchmarks/run.py in a checkout measures many shapes, errors and other libraries.
"""

from functools import partial

from .. import NotSupported, vjp
from ..ops import OPS
from .first_loops import compiling
from .measuring import chosen, drawn, median_ms, ms_of_a_byte
from .terminal import add_device, bar, integer, status, suggestion, to_stderr, to_stdout

TIMED = {op.name: (op, function) for op, function in OPS.items() if "T" in op.out.split()}  # no single steps


def add_options(parser):
    add = parser.add_argument
    add("operators", nargs="*", metavar="OPERATOR", help=f"which (default: all, {', '.join(TIMED)})")
    add_device(add)
    add("--batch", type=integer(1), default=1, help="sequences (default: 1)")
    add("--heads", type=integer(1), default=8, help="(default: 8)")
    add("--tokens", type=integer(1), help="of a sequence (default: 1024 on the CPU, 4096 on a GPU)")
    add("--width", type=integer(1), default=64, help="K and V, a head's (default: 64)")


def run(options):
    for name in options.operators:
        if name not in TIMED:
            raise ValueError(
                f"there is no operator {name!r}, expected one of {', '.join(TIMED)}{suggestion(name, TIMED)}"
            )
    device = chosen(options.device)
    sizes = dict(B=options.batch, H=options.heads, T=options.tokens or device.tokens, K=options.width, V=options.width)
    shape = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    to_stderr(f"{device.dtype} on {device.name}; {shape}; the floor is every array read and every result written once")
    floor = ms_of_a_byte(device)
    to_stdout(f"memory {1e-6 / floor:,.0f} GB/s")
    row("operator", "forward ms", "x floor", "backward ms", "x floor")
    names = options.operators or list(TIMED)
    with status("") as show, compiling(show):
        for done, name in enumerate(names):
            show(f"{bar(done / len(names))} {name}")
            columns = timed(device, *TIMED[name], sizes, floor)
            show("")
            row(name, *columns)


def timed(device, op, function, sizes, floor) -> list[str]:
    """The columns of an operator's row: times, or words if no backend computes a pass or if memory does not suffice."""
    arrays = drawn(device, op, **sizes)
    read = sum(x.nbytes for x in arrays)
    try:
        o = function(*arrays)  # compiles, and warms up
        forward = compared(median_ms(device, partial(function, *arrays)), floor * (read + o.nbytes))
    except (NotSupported, MemoryError) as why:
        return [word_for(why), ""] * 2
    try:
        pullback = vjp(function, *arrays)[1]
        pullback(o)
        backward = compared(median_ms(device, partial(pullback, o)), floor * (2 * read + o.nbytes))
    except (NotSupported, MemoryError) as why:
        backward = [word_for(why), ""]
    return forward + backward


def compared(ms, floor) -> list[str]:
    """The two columns of a time."""
    return [f"{ms:.4g}", f"{ms / floor:.1f}x"]


def word_for(why) -> str:
    return "no memory" if isinstance(why, MemoryError) else "not there"


def row(name, *columns):
    """Prints a row of the table."""
    to_stdout(f"{name:<18}" + "".join(f"{column:>13}" for column in columns))
