"""Draws time and memory of softmax attention, GLA, RWKV-6 and retention against the length of the sequence.

    linattn-np compare                                            compare.png, on the GPU where there is one
    linattn-np compare --device cpu --longest 8192 --out cpu.png

One sequence, the same heads and widths for all; bfloat16 on a GPU, float32 on the CPU. Time is a call's, the median of
a few; memory is what a call takes beside its arrays. The floor is q, k, v, a gate and o once, at the bandwidth of a
copy. Where a line ends before the others, the picture says why.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ..backends.numpy.cores import workers
from ..ops import OPS
from .blas_threads import blas_threads
from .first_loops import compiling
from .measuring import Cpu, chosen, declare_device, drawn, median_ms, ms_of_a_byte
from .terminal import bar, put, status, whole

# Colour, width and size of the markers: a line that another covers is wider, and shows on both sides of it.
LINES = {
    "softmax_attention": ("softmax attention", "#b5442e", 6.5, 11),
    "gla": ("GLA", "#0b6e8a", 4.8, 9),
    "rwkv6": ("RWKV-6", "#b39ddb", 3, 7),
    "retention": ("retention", "#2f6b1e", 1.2, 4),
}
COMPARED = {op.name: (op, function) for op, function in OPS.items() if op.name in LINES}
SHORTEST = 512


@dataclass
class Curve:
    """What was measured of one operator, length by length, and why there is no longer one."""

    T: list = field(default_factory=list)
    ms: list = field(default_factory=list)
    bytes: list = field(default_factory=list)
    end: str = ""


def declare(parser):
    add = parser.add_argument
    declare_device(add)
    add(
        "--longest",
        type=whole(SHORTEST),
        metavar="TOKENS",
        help=f"from {SHORTEST} doubled up to here (default: 131072, on the CPU 16384)",
    )
    add("--heads", type=whole(1), default=16, help="(default: 16)")
    add("--width", type=whole(8), default=64, help="K and V, a head's (default: 64)")
    add("--seconds", type=float, default=2.0, help="calls that would take longer are left out (default: 2)")
    add("--out", type=Path, default=Path("compare.png"), help="(default: compare.png)")


def run(options):
    if not options.out.absolute().parent.is_dir():
        raise ValueError(f"argument --out: there is no folder {options.out.absolute().parent}")
    if not options.seconds > 0:
        raise ValueError(f"argument --seconds: is {options.seconds}, expected a number above 0")
    check_plots()  # before minutes of measuring
    device = chosen(options.device)
    # The operators share their work out to the cores themselves.
    with blas_threads("cpu" if isinstance(device, Cpu) else "cuda", 0, "operators are faster with one thread of BLAS"):
        curves = measured(device, options)
    draw(curves, ms_of_a_byte(device), device, options)
    put(options.out)


def check_plots():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError(
            "the picture is drawn by matplotlib, which is not installed: pip install 'linattn-np[plot]' brings it"
        ) from None


def measured(device, options) -> dict:
    longest = options.longest or device.longest
    lengths = [SHORTEST << n for n in range((longest // SHORTEST).bit_length())]
    curves = {op: Curve() for op in LINES}
    steps = [(T, op) for T in lengths for op in LINES]
    with status(bar(0)) as show, compiling(show):
        for done, (T, op) in enumerate(steps):
            show(f"{bar(done / len(steps))} {LINES[op][0]}, {T:,} tokens")
            go_on(curves[op], device, op, T, options)
    return curves


def go_on(curve, device, op, T, options):
    """One more point of a line that has not ended."""
    if curve.end:
        return
    expected = expected_ms(curve) / 1e3
    if expected > options.seconds:
        curve.end = f"{T:,} tokens would take {expected:.2g} s, more than --seconds {options.seconds:g}"
        return
    try:
        add_point(curve, device, op, T, options)
    except MemoryError:
        curve.end = f"{T:,} tokens take more memory than there is"


def expected_ms(curve) -> float:
    """Of twice the tokens: as much longer as the last doubling was, but at least twice."""
    if not curve.T:
        return 0
    growth = curve.ms[-1] / curve.ms[-2] if len(curve.T) > 1 else 2
    return curve.ms[-1] * max(2, growth)


def add_point(curve, device, op, T, options):
    declared, function = COMPARED[op]
    sizes = dict(B=1, H=options.heads, T=T, K=options.width, V=options.width)
    call = partial(function, *drawn(device, declared, **sizes))
    call()  # compiles, and warms up
    (_, taken), ms = device.with_peak(call), median_ms(device, call)
    curve.bytes.append(taken)
    curve.ms.append(ms)
    curve.T.append(T)


def draw(curves, floor, device, options):
    """`floor` is the milliseconds of a byte."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, (above, below) = plt.subplots(2, 1, figsize=(8, 8.5), sharex=True, layout="constrained")
    for op, curve in curves.items():
        name, colour, width, size = LINES[op]
        how = dict(
            color=colour, linewidth=width, marker="o", markersize=size, markeredgecolor="white", markeredgewidth=0.6
        )
        above.plot(curve.T, curve.ms, label=name, **how)
        below.plot(curve.T, np.divide(curve.bytes, 2**20), **how)
        if curve.end and curve.T:
            for axis, values in ((above, curve.ms), (below, np.divide(curve.bytes, 2**20))):
                axis.plot(curve.T[-1], values[-1], color="black", marker="x", markersize=10, markeredgewidth=2)
    T = np.array(max((curve.T for curve in curves.values()), key=len), np.int64)
    nbytes = 5 * T * options.heads * options.width * device.dtype.itemsize
    above.plot(T, nbytes * floor, color="#333333", linewidth=1.2, linestyle="--", label="floor of GLA")
    below.plot(T, nbytes / 5 / 2**20, color="#333333", linewidth=1.2, linestyle="--", label="the result alone")
    for axis, what in ((above, "milliseconds a call"), (below, "MiB beside the arrays")):
        axis.set_ylabel(what)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, fontsize="small")
    below.set_xticks(T, [f"{t:,}" for t in T], rotation=30)
    below.set_xlabel("tokens")
    title = f"One sequence, {options.heads} heads of {options.width}, {device.dtype} on {device.name}"
    title += f"; load of the machine {os.getloadavg()[0]:.1f} on {workers()} cores"
    image.suptitle("\n".join([title, *ends(curves)]), x=0.01, ha="left", fontsize="medium")
    image.savefig(options.out, dpi=130)


def ends(curves) -> list[str]:
    """Why lines end at their ×."""
    return [f"× {LINES[op][0]} ends: {curve.end}" for op, curve in curves.items() if curve.end]
