"""Draws time and memory of softmax attention, GLA, RWKV-6 and retention against the length of the sequence.

    python examples/compare_attention.py                                    compare.png, on the GPU where there is one
    python examples/compare_attention.py --device cpu --longest 8192 --out cpu.png

One sequence, the same heads and widths for all; bfloat16 on a GPU, float32 on the CPU. Time is a call's, the median of a
few; memory is what a call takes beside its arrays. The floor is q, k, v, a gate and o once, at the bandwidth of a copy.
"""

import argparse
import statistics
import time
import tracemalloc
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from rwkv6_decode import Parser, bar, status, whole

import linattn_np
from linattn_np.arrays import BFLOAT16

LINES = {"softmax_attention": ("softmax attention", "qkv", "#b5442e"), "gla": ("GLA", "qkvg", "#0b6e8a"),
         "rwkv6": ("RWKV-6", "qkvgu", "#6a4c93"), "retention": ("retention", "qkv", "#4f8a3c")}
SHORTEST = 512
CALLS = 5
COPIED = 1 << 28                # bytes of the copy that gives the floor


@dataclass
class Curve:
    """What was measured of one operator, length by length."""

    T: list = field(default_factory=list)
    ms: list = field(default_factory=list)
    bytes: list = field(default_factory=list)


class Cpu:
    xp, name, dtype, longest = np, "the CPU", np.dtype(np.float32), 16384

    def ms(self, call):
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3

    def taken(self, call):
        """Bytes that a call holds at most, its result among them."""
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak


class Cuda:
    dtype, longest = BFLOAT16, 131072

    def __init__(self):
        import cupy

        self.xp, self.name = cupy, cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def ms(self, call):
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop)

    def taken(self, call):
        pool = self.xp.cuda.MemoryPool()
        with self.xp.cuda.using_allocator(pool.malloc):
            call()
            return pool.total_bytes()


def main():
    parser = declared()
    options = parser.parse_args()
    if not options.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.absolute().parent}")
    try:
        import matplotlib  # noqa: F401  (before minutes of measuring)
        device = chosen(options.device)
    except ImportError as error:
        parser.error(str(error))
    curves = measured(device, options)
    draw(curves, copy_ms(device) / (2 * COPIED), device, options)
    print(options.out)


def declared():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where CuPy can use it, else cpu (default)")
    add("--longest", type=whole(SHORTEST), help="tokens, from 512 doubled up to here (default: 131072, on the CPU 16384)")
    add("--heads", type=whole(1), default=16, help="(default: 16)")
    add("--width", type=whole(8), default=64, help="K and V, a head's (default: 64)")
    add("--seconds", type=float, default=2., help="calls that would take longer are left out (default: 2)")
    add("--out", type=Path, default=Path("compare.png"), help="(default: compare.png)")
    return parser


def chosen(name):
    """ImportError where the device that was asked for is not there, or what drives it."""
    if name == "cpu":
        return Cpu()
    try:
        import cupy

        found = cupy.cuda.is_available()
    except ImportError:
        if name == "cuda":
            raise
        found = False
    if name == "cuda" and not found:
        raise ImportError("--device cuda: CuPy finds no GPU")
    return Cuda() if found else Cpu()


def measured(device, options) -> dict:
    longest = options.longest or device.longest
    lengths = [SHORTEST << n for n in range((longest // SHORTEST).bit_length())]
    curves = {op: Curve() for op in LINES}
    steps = [(T, op) for T in lengths for op in LINES]
    with status(bar(0)) as show:
        for done, (T, op) in enumerate(steps):
            show(f"{bar(done / len(steps))} {LINES[op][0]}, {T:,} tokens")
            if expected_ms(curves[op], T) < options.seconds * 1e3:
                add_point(curves[op], device, op, T, options)
    return curves


def expected_ms(curve, T):
    """As much longer as the last doubling was, but at least twice."""
    if not curve.T:
        return 0
    if T != 2 * curve.T[-1]:
        return np.inf                       # one was left out already
    growth = curve.ms[-1] / curve.ms[-2] if len(curve.T) > 1 else 2
    return curve.ms[-1] * max(2, growth)


def add_point(curve, device, op, T, options):
    call = partial(getattr(linattn_np, op), *drawn(device, op, T, options))
    call()                                                  # compiles, and warms up
    curve.bytes.append(device.taken(call))
    curve.ms.append(statistics.median(device.ms(call) for _ in range(CALLS)))
    curve.T.append(T)


def drawn(device, op, T, options):
    """q, k, v, g, u as far as an operator takes them."""
    rng = device.xp.random.default_rng(0)
    normal = partial(rng.standard_normal, dtype=np.float32)
    shape = (1, options.heads, T, options.width)
    make = {name: partial(normal, shape) for name in "qkv"}
    make["g"] = lambda: -device.xp.log1p(device.xp.exp(-normal(shape)))
    arrays = [make[name]().astype(device.dtype) for name in LINES[op][1] if name != "u"]
    return [*arrays, normal(shape[1::2])] if "u" in LINES[op][1] else arrays


def copy_ms(device):
    source = device.xp.ones(COPIED, np.uint8)
    target = device.xp.empty_like(source)
    return statistics.median(device.ms(lambda: device.xp.copyto(target, source)) for _ in range(CALLS))


def draw(curves, ms_of_a_byte, device, options):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    image, (above, below) = plt.subplots(2, 1, figsize=(8, 8.5), sharex=True, layout="constrained")
    for op, curve in curves.items():
        name, _, colour = LINES[op]
        above.plot(curve.T, curve.ms, color=colour, marker="o", markersize=4, label=name)
        below.plot(curve.T, np.divide(curve.bytes, 2**20), color=colour, marker="o", markersize=4)
    T = np.array(max((curve.T for curve in curves.values()), key=len))
    nbytes = 5 * T * options.heads * options.width * device.dtype.itemsize
    above.plot(T, nbytes * ms_of_a_byte, color="#333333", linewidth=1.2, linestyle="--", label="floor of GLA")
    below.plot(T, nbytes / 5 / 2**20, color="#333333", linewidth=1.2, linestyle="--", label="the result alone")
    for axis, what in ((above, "milliseconds a call"), (below, "MiB beside the arrays")):
        axis.set_ylabel(what)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(color="#e4e4e4")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    below.set_xticks(T, [f"{t:,}" for t in T], rotation=30)
    below.set_xlabel("tokens")
    image.suptitle(f"One sequence, {options.heads} heads of {options.width}, {device.dtype} on {device.name}", x=0.01, ha="left")
    image.savefig(options.out, dpi=130)


if __name__ == "__main__":
    main()
