"""Looks for cliffs: one thing at a time is changed in calls that are fast, and whatever becomes slow is said first.

    python benchmarks/sweep.py [--keep-peers benchmarks/results/<card>.json] [--limit-s 60]
                               [--out benchmarks/results/sweep/<card>.json]
    python benchmarks/speed_table.py            writes the worst of them into the documentation
    python benchmarks/sweep.py --random 400 --seed 1 [--limit-s 300] [--out benchmarks/results/random/<card>.json]
                                                             calls from the whole space, of which the table speaks, too
    python benchmarks/sweep.py --replay 'op=gla B=4 T=4096 H=32 K=128 V=128 reverse=True'     one of these again

Changed are the gates, dtypes, memory (strides, alignment), heads, lengths, and K and V on both sides of every tile.
Times are those of benchmarks/run.py, whose results it has checked too; a call is judged by its multiple of the floor
(or of 5 us, which launches take), by how much larger that is than the multiple of the call from which it differs in
one thing, and by its multiple of a peer's time, where an earlier file has it.
"""

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import cases
import devices
import gates
import numpy as np
import random_calls
import run

LARGE, FEW, SMALL = (
    cases.Case("gla", 4, 4096, 64, 128),
    cases.Case("gla", 2, 16384, 16, 128),
    cases.Case("gla", 8, 4096, 32, 64),
)
BASES = tuple(replace(case, gate="trained") for case in (SMALL, LARGE, FEW))
COLUMNS = ((8, 8), (32, 32), (60, 64), (64, 65), (64, 128), (72, 200), (120, 128), (128, 136))
COLUMNS += ((200, 64), (256, 256), (320, 64), (256, 512))  # of K and V
SHAPES = ((1, 65536, 4, 128), (2, 1024, 512, 64), (64, 37, 64, 128), (1, 513, 8, 128), (1, 64, 1, 64))
LAUNCHES = 5e-3  # ms that a call's launches take: no floor is lower
WORST = 25
SAMPLES = 5


def variations(base):
    """(what is changed, the case), that of nothing first."""
    yield "", base
    yield from (
        (f"{gate} gates", replace(base, gate=gate))
        for gate in gates.NAMES
        if cases.DECLARED[base.op].decays and gate != base.gate and (gate != "model" or base.D == 64)
    )
    yield from ((dtype, replace(base, dtype=dtype)) for dtype in ("float16", "float32", "tf32"))
    yield from ((memory, replace(base, memory=memory)) for memory in cases.MEMORY[1:])
    if base.D == SMALL.D:
        tokens = base.B * base.T * base.H * base.D
        for K, V in COLUMNS:  # as many elements in all, on as many heads
            yield f"K={K}, V={V}", replace(base, D=K, V=V, T=max(64, 2 * tokens // (base.B * base.H * (K + V))))
        yield from (("another shape", replace(base, B=B, T=T, H=H, D=D)) for B, T, H, D in SHAPES)


def wanted(ops, passes):
    """{what the others differ from in one thing: [(what is changed, the case)]}"""
    return {
        base: list(variations(base))
        for base in (
            replace(base, op=op, backward=name == "backward") for base in BASES for name in passes for op in ops
        )
    }


def swept(groups, limit_s, device, bandwidth, peer):
    """Rows of benchmarks/run.py with what was changed, and the multiples."""
    ends = time.monotonic() + limit_s
    for group in groups.values():
        usual = None
        for what, case in group:
            if time.monotonic() > ends:
                run.say(f"time is up: {case} and what follows were not measured")
                return
            try:
                row = run.measure(case, device, bandwidth, peer, SAMPLES)
            except run.linattn_np.NotSupported as refusal:
                run.say(f"{case}: refused: {str(refusal).splitlines()[0]}")
                continue
            multiple = row["ours_ms"] and row["ours_ms"] / max(row["floor_ms"], LAUNCHES)
            usual = usual or multiple
            yield row | {
                "changed": what,
                "case": str(case),
                "memory": case.memory,
                "multiple": multiple,
                "beside_usual": multiple and multiple / usual,
                "of_peer": row["peer_ms"] and multiple and row["ours_ms"] / row["peer_ms"],
            }


def line(row) -> str:
    if row["multiple"] is None:
        return f"WRONG  {row['case']}: relative error {row['error']:.1e}"
    its = f", {row['of_peer']:.2f}x of {row['peer']}" if row["of_peer"] else ""
    multiples = f"{row['multiple']:7.2f}x of the floor, {row['beside_usual']:5.2f}x of usual{its}"
    return f"{multiples}, error {row['error']:.1e}  {row['case']}"


def random_sweep(calls, limit_s, device, bandwidth, meta, out):
    """Times and checks random calls until the limit, and prints the worst with what ran; whether one was wrong."""
    ends = time.monotonic() + limit_s
    if device.xp is not np:
        run.compile_side_by_side(lambda call: random_calls.warm_up(call, device), calls, device)
    rows = []
    for call in calls:
        if time.monotonic() > ends:
            run.say(f"time is up: {len(rows)} of {len(calls)} calls were measured")
            break
        rows.append(random_calls.measure(call, device, bandwidth))
        run.say(random_calls.line(rows[-1]))
        if out:
            run.write(out, meta, rows)
    measured = [row for row in rows if "refused" not in row]
    print(f"{len(measured)} calls measured, {len(rows) - len(measured)} refused; the worst first:")
    for row in sorted(measured, key=lambda row: (-row["wrong"], -row["multiple"]))[:WORST]:
        print(random_calls.line(row))
        print(*(f"    {what}" for what in row["ran"]), sep="\n")
    return any(row["wrong"] for row in measured)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=["gla", "rwkv6"], choices=["gla", "rwkv6", *random_calls.RANK_ONE])
    parser.add_argument("--passes", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--limit-s", type=float, default=math.inf, help="after which no further call is measured")
    parser.add_argument(
        "--keep-peers", type=Path, nargs="+", default=[], metavar="FILE", help="as in benchmarks/run.py"
    )
    parser.add_argument("--random", type=int, metavar="N", help="time and check N random calls instead")
    parser.add_argument("--seed", type=int, default=0, help="which random calls")
    parser.add_argument("--replay", metavar="LINE", help="time and check one call, as --random prints it")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--commit", help="what to say of the sources where git cannot")
    args = parser.parse_args()
    device = devices.current()
    bandwidth = run.copy_bandwidth(device)
    meta = run.described(device, bandwidth, "auto", args.commit)
    if args.random or args.replay:
        rng = np.random.default_rng(args.seed)
        calls = (
            [random_calls.read(args.replay)]
            if args.replay
            else [random_calls.draw_call(rng) for _ in range(args.random)]
        )
        sys.exit(random_sweep(calls, args.limit_s, device, bandwidth, meta | {"seed": args.seed}, args.out))
    peer = run.Peers(device, dict.fromkeys(("fla", "torch"), "kept"), run.kept_figures(args.keep_peers, meta), 0, 0)
    groups = wanted(args.ops, args.passes)
    run.compile_all([case for group in groups.values() for _, case in group], device, "auto")
    rows = []
    for row in swept(groups, args.limit_s, device, bandwidth, peer):
        rows.append(row)
        run.say(line(row))
        if args.out:  # after every row: a run that is cut short leaves what it has
            run.write(args.out, meta | {"mhz": device.highest}, rows)
    print("the worst first:")
    for row in sorted(rows, key=lambda row: -(row["multiple"] or math.inf))[:WORST]:
        print(line(row))
    sys.exit(any(row["multiple"] is None for row in rows))


if __name__ == "__main__":
    main()
