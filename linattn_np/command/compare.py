"""Draws time and memory of softmax attention, GLA, RWKV-6 and retention against the length of the sequence.

    linattn-np compare                                      # on the GPU where there is one
    linattn-np compare --device cpu --longest 8192 --out cpu.png

All operators have one sequence and the same heads and widths, in bfloat16 on a GPU and in float32 on the CPU. Time is
the median of a few calls; memory is what a call takes besides its arrays. The floor is the time of moving q, k, v, a
gate and o once, at the bandwidth of a copy. On the CPU torch's softmax attention is measured, too, if torch is
installed. If a line ends before the others, the picture says why.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..backends.numpy.cores import workers
from ..models.files import check_writable, replaced
from ..ops import OPS
from .blas_threads import blas_threads
from .first_loops import compiling
from .measuring import Cpu, chosen, drawn, median_ms, ms_of_a_byte
from .palette import GLA, INK, RETENTION, RWKV6, SOFTMAX, STYLE, TORCH, label_ends
from .terminal import add_device, bar, integer, status, to_stdout

# {operator: (name, colour, width of the line, size of its markers)}. Lines that others cover are wider, so that they
# are visible beside them.
LINES = {
    "softmax_attention": ("softmax attention", SOFTMAX, 6.5, 11),
    "gla": ("GLA", GLA, 4.8, 9),
    "rwkv6": ("RWKV-6", RWKV6, 3, 7),
    "retention": ("retention", RETENTION, 1.2, 4),
}
PEER = "torch"
PEERS_LINE = ("torch's softmax attention", TORCH, 1.2, 5)
COMPARED = {op.name: (op, function) for op, function in OPS.items() if op.name in LINES}
SHORTEST = 512


@dataclass
class Curve:
    """The measurements of one operator by length, and why there are none of greater lengths."""

    T: list = field(default_factory=list)
    ms: list = field(default_factory=list)
    bytes: list = field(default_factory=list)
    end: str = ""  # the reason, once there is one


def add_options(parser):
    add = parser.add_argument
    add_device(add)
    add(
        "--longest",
        type=integer(SHORTEST),
        metavar="TOKENS",
        help=f"from {SHORTEST} doubled up to here (default: 131072, on the CPU 16384)",
    )
    add("--heads", type=integer(1), default=16, help="(default: 16)")
    add("--width", type=integer(8), default=64, help="K and V, a head's (default: 64)")
    add("--seconds", type=float, default=2.0, help="calls that would take longer are left out (default: 2)")
    add("--out", type=Path, default=Path("compare.png"), help="(default: compare.png)")


def run(options):
    check_writable(options.out)
    if not options.seconds > 0:
        raise ValueError(f"argument --seconds: is {options.seconds}, expected a number above 0")
    check_plots(options.out)  # before minutes of measuring
    device = chosen(options.device)
    # The operators divide their work among the cores themselves.
    with blas_threads("cpu" if isinstance(device, Cpu) else "cuda", 0, "operators are faster with one thread of BLAS"):
        curves = measured(device, options)
    draw(curves, ms_of_a_byte(device), device, options)
    to_stdout(options.out)


def check_plots(out):
    """An error if matplotlib is missing, or does not write files with the ending of `out`."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ImportError(
            "the picture is drawn by matplotlib, which is not installed: pip install 'linattn-np[plot]' brings it"
        ) from None
    endings = FigureCanvasBase.get_supported_filetypes()
    if out.suffix.removeprefix(".").lower() not in endings:
        raise ValueError(f"argument --out: is {out}, expected one of the endings {', '.join(sorted(endings))}")


def measured(device, options) -> dict:
    """{operator: its `Curve`}."""
    longest = options.longest or device.longest
    lengths = [SHORTEST << n for n in range((longest // SHORTEST).bit_length())]
    calls: dict[str, Callable] = {op: partial(our_call, op) for op in LINES}
    if isinstance(device, Cpu) and find_spec("torch"):
        calls[PEER] = call_of_torch
    curves = {op: Curve() for op in calls}
    steps = [(T, op) for T in lengths for op in calls]
    with status(bar(0)) as show, compiling(show):
        for done, (T, op) in enumerate(steps):
            show(f"{bar(done / len(steps))} {line(op)[0]}, {T:,} tokens")
            sizes = dict(B=1, H=options.heads, T=T, K=options.width, V=options.width)
            go_on(curves[op], device, partial(calls[op], device, sizes), T, options)
    return curves


def line(op):
    """The entry of LINES for an operator, or that of the peer."""
    return PEERS_LINE if op == PEER else LINES[op]


def our_call(op, device, sizes):
    """A function that computes an operator on random arrays."""
    declared, function = COMPARED[op]
    return partial(function, *drawn(device, declared, **sizes))


def call_of_torch(device, sizes):
    """A function that computes torch's softmax attention on random arrays."""
    import torch

    arrays = drawn(device, COMPARED["softmax_attention"][0], **sizes)
    attention = torch.nn.functional.scaled_dot_product_attention
    return partial(attention, *map(torch.from_numpy, arrays), is_causal=True)


def go_on(curve, device, make, T, options):
    """Adds the measurement of T tokens to a curve that has not ended, or ends the curve. `make()` returns the call."""
    if curve.end:
        return
    expected = expected_ms(curve) / 1e3
    if expected > options.seconds:
        curve.end = f"{T:,} tokens would take {expected:.2g} s, more than --seconds {options.seconds:g}"
        return
    try:
        add_point(curve, device, make(), T)
    except MemoryError:
        curve.end = f"{T:,} tokens take more memory than there is"


def expected_ms(curve) -> float:
    """The expected time of twice the tokens: the last one times the growth of the last doubling, or at least 2."""
    if not curve.T:
        return 0
    growth = curve.ms[-1] / curve.ms[-2] if len(curve.T) > 1 else 2
    return curve.ms[-1] * max(2, growth)


def add_point(curve, device, call, T):
    """Measures a call."""
    call()  # compiles, and warms up
    (_, nbytes), ms = device.with_peak(call), median_ms(device, call)
    curve.bytes.append(nbytes)
    curve.ms.append(ms)
    curve.T.append(T)


def draw(curves, floor, device, options):
    """Draws the picture. `floor`: the milliseconds to move a byte."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    T = np.array(max((curve.T for curve in curves.values()), key=len), np.int64)
    nbytes = 5 * T * options.heads * options.width * device.dtype.itemsize
    ours = {op: curve for op, curve in curves.items() if op != PEER}  # torch's memory is not NumPy's
    title = f"One sequence, {options.heads} heads of {options.width}, {device.dtype} on {device.name}"
    title += f"; load of the machine {os.getloadavg()[0]:.1f} on {workers()} cores"
    with plt.rc_context(STYLE):
        image, (above, below) = plt.subplots(2, 1, figsize=(9, 8.5), sharex=True, layout="constrained")
        below.set_xscale("log", base=2)
        panel(above, "milliseconds a call, log scale", curves, "ms", 1, (T, nbytes * floor, "floor of GLA"))
        panel(
            below, "MiB beside the arrays, log scale", ours, "bytes", 2**20, (T, nbytes / 5 / 2**20, "the result alone")
        )
        below.set_xticks(T, [f"{t:,}" for t in T], rotation=30)
        below.set_xlabel("tokens, log scale")
        image.suptitle("\n".join([title, *ends(curves)]), x=0.01, ha="left", fontsize="medium")
        with replaced(options.out) as file:
            image.savefig(file, dpi=130, format=options.out.suffix[1:])


def panel(axis, what, curves, measured, unit, floor):
    """Draws one of the two panels.

    what : the label of its y axis
    measured, unit : the field of `Curve` that is drawn, and by what it is divided
    floor : (tokens, values, name) of the floor's line
    """
    axis.set_ylabel(what)
    from matplotlib.ticker import LogFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter())
    axis.grid()
    *points, name = floor
    axis.plot(*points, color=INK, linewidth=1.2, linestyle="--")
    names = [(name, INK, points[0][-1], points[1][-1])]
    for op, curve in curves.items():
        if not curve.T:
            continue
        name, colour, width, size = line(op)
        values = np.divide(getattr(curve, measured), unit)
        axis.plot(curve.T, values, color=colour, linewidth=width, marker="o", markersize=size)
        if curve.end:
            axis.plot(curve.T[-1], values[-1], color=INK, marker="x", markersize=12, markeredgewidth=2)
        names.append((name, colour, curve.T[-1], values[-1]))
    label_ends(axis, names)


def ends(curves) -> list[str]:
    """Why lines end at their ×."""
    return [f"× {line(op)[0]} ends: {curve.end}" for op, curve in curves.items() if curve.end]
