"""Times KDA and RWKV-7 by Hopper's own kernels and by those of every card, once both are right.

    python benchmarks/channels_on_hopper.py [B,T,H,D ...]

A line: the operator, B, T, H and D (K and V); the kernels; the error of o (whole, relative, as in run.py); milliseconds
of a call, "-" if it is wrong; and how often that is the floor, the bytes of inputs and result over the bandwidth of a
copy.
"""

import sys
from itertools import product

import devices
import run
from cases import Case

from linattn_np.kernel_choice import KERNELS, choose_kernels

SIZES = ("4,4096,64,128", "8,4096,32,64", "1,8192,96,128", "4,2048,16,128")
SAMPLES = 9


def main():
    device = devices.current()
    bandwidth = run.copy_bandwidth(device)
    for sizes, op, dtype in product(sys.argv[1:] or SIZES, ("kda", "rwkv7"), ("bfloat16", "float16")):
        case = Case(op, *map(int, sizes.split(",")), dtype=dtype, gate="trained")
        for kernels in KERNELS:
            with choose_kernels(kernels):
                row = run.measure(case, device, bandwidth, lambda *_: {}, SAMPLES)
            ms, floor = row["ours_ms"], row["floor_ms"]
            time = "-" if ms is None else f"{ms:.3f} ms, {ms / floor:.2f} floors"
            print(f"{op} {sizes} {dtype}, {kernels}: error {row['error']:.1e}, {time}", flush=True)


if __name__ == "__main__":
    main()
