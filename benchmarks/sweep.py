"""Looks for cliffs: one thing at a time is changed in calls that are fast, and whatever becomes slow is said first.

    python benchmarks/sweep.py [--ops gla rwkv6] [--passes forward backward] [--seconds 300] [--out FILE.json]

Changed are the gates, dtypes, memory (strides, alignment), heads, lengths, and K and V on both sides of every tile.
Times are those of benchmarks/run.py, whose results it has checked too; a call is judged by its multiple of the floor,
and by how much larger that is than the multiple of the call from which it differs in one thing.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import devices
import gates
import run

LARGE, FEW, SMALL = (
    run.Case("gla", 4, 4096, 64, 128),
    run.Case("gla", 2, 16384, 16, 128),
    run.Case("gla", 8, 4096, 32, 64),
)
BASES = tuple(replace(case, gate="trained") for case in (LARGE, FEW, SMALL))
COLUMNS = ((60, 64), (64, 65), (64, 128), (72, 200), (120, 128), (128, 136), (200, 64), (256, 256), (320, 64))
SHAPES = ((1, 131072, 4, 128), (2, 1024, 512, 64), (64, 37, 64, 128), (1, 513, 8, 128), (1, 64, 1, 64))


def variations(base):
    """(what is changed, the case), that of nothing first."""
    yield "", base
    yield from (
        (f"{gate} gates", replace(base, gate=gate))
        for gate in gates.NAMES
        if gate != base.gate and (gate != "model" or base.D == 64)
    )
    yield from ((dtype, replace(base, dtype=dtype)) for dtype in ("float16", "float32"))
    yield from ((memory, replace(base, memory=memory)) for memory in run.MEMORY[1:])
    if base.D == SMALL.D:
        tokens = base.B * base.T * base.H * base.D
        for K, V in COLUMNS:  # as many elements in all, on as many heads
            yield f"K={K}, V={V}", replace(base, D=K, V=V, T=max(64, 2 * tokens // (base.B * base.H * (K + V))))
        yield from (("another shape", replace(base, B=B, T=T, H=H, D=D)) for B, T, H, D in SHAPES)


def swept(ops, passes, seconds, device):
    """Rows of benchmarks/run.py with what was changed, and the multiples."""
    bandwidth, ends, rows = run.copy_bandwidth(device), time.monotonic() + seconds, []
    for backward in (name == "backward" for name in passes):
        for op in ops:
            for base in BASES:
                usual = None
                for what, case in variations(replace(base, op=op, backward=backward)):
                    if time.monotonic() > ends:
                        run.say(f"time is up: {case} and what follows were not measured")
                        return rows
                    try:
                        row = run.measure(case, device, bandwidth, lambda *_: {}, 5)
                    except run.linattn_np.NotSupported as refusal:
                        run.say(f"{case}: refused: {str(refusal).splitlines()[0]}")
                        continue
                    multiple = row["ours_ms"] and row["ours_ms"] / row["floor_ms"]
                    usual = usual or multiple
                    rows.append(
                        row
                        | {
                            "changed": what,
                            "case": str(case),
                            "multiple": multiple,
                            "beside_usual": multiple and multiple / usual,
                        }
                    )
                    run.say(line(rows[-1]))
    return rows


def line(row) -> str:
    if row["multiple"] is None:
        return f"WRONG  {row['case']}: relative error {row['error']:.1e}"
    multiples = f"{row['multiple']:7.2f}x of the floor, {row['beside_usual']:5.2f}x of usual"
    return f"{multiples}, error {row['error']:.1e}  {row['case']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=["gla", "rwkv6"], choices=["gla", "rwkv6"])
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--seconds", type=float, default=600, help="after which no further call is measured")
    parser.add_argument("--out", type=Path, help="a JSON file")
    args = parser.parse_args()
    rows = swept(args.ops, args.passes, args.seconds, devices.current())
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print("the worst first:")
    for row in sorted(rows, key=lambda row: -(row["multiple"] or float("inf")))[:25]:
        print(line(row))
    sys.exit(any(row["multiple"] is None for row in rows))


if __name__ == "__main__":
    main()
