"""Fits the constants by which Hopper's kernels cut sequences (linattn_np/backends/cupy/segments.py) to a card.

    python benchmarks/fit_segments.py [--passes forward backward] [--samples 5]

Every shape is measured with whole sequences and in each number of segments that is forced. Whole sequences tell the
milliseconds of a token. In these units the time of a cut is what segments.py calls its cost, which is linear in the
constants: least squares fit them. The last lines say how much slower the cut with the least cost is than the fastest
cut, on average and at worst. Gates are weak, so that a summary reads all tokens of a segment.
"""

import argparse
from dataclasses import replace
from unittest import mock

import cases
import devices
import numpy as np
import run

from linattn_np import checked_calls
from linattn_np.backends.cupy import gated_kernels, segments
from linattn_np.bounded_cache import Cache

SHAPES = [
    cases.Case("gla", 1, T, H, D, gate="weak")
    for D in (64, 128)
    for H in (1, 4, 16, 32, 64)
    for T in (512, 1024, 2048, 4096, 16384)
]
SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
FITTED = {
    "forward": ("CUT_SMALL", "CUT_LARGE", "CUT_TOKEN", "CUT_JOINED", "CUT_STATE", "CUT_HEAD", "CUT_SHARED", "UNSAVED"),
    "backward": ("SUMMARY", "JOIN_START", "JOINED", "STATE"),
}


def cost(name, P, case, multiprocessors):
    """As segments.py has it, of a batch of 1."""
    if name == "forward":
        return segments.forward_cost(P, case.H, case.H, case.T, case.D, multiprocessors)
    return segments.backward_cost(P, case.H, case.T, multiprocessors, case.D, case.D)


def with_constants(name, values):
    return mock.patch.multiple(segments, **dict(zip(FITTED[name], values, strict=True)))


def fit(name, rows, multiprocessors):
    """The constants with the least squares of relative errors, of rows (case, P, milliseconds).

    A cost is linear in the constants, so that its coefficients are its differences between 1 and 0 of each.
    """
    whole = {case: ms for case, P, ms in rows if P == 1}
    zero, unit = np.zeros(len(FITTED[name])), np.eye(len(FITTED[name]))
    coefficients, wanted = [], []
    for case, P, ms in rows:
        if P == 1 or case not in whole:
            continue
        with with_constants(name, zero):
            known = cost(name, P, case, multiprocessors)
            tokens = cost(name, 1, case, multiprocessors) * ms / whole[case]
        changes = []
        for one in unit:
            with with_constants(name, one):
                changes.append(cost(name, P, case, multiprocessors) - known)
        coefficients.append(np.array(changes) / tokens)
        wanted.append(1 - known / tokens)
    return np.linalg.lstsq(np.array(coefficients), np.array(wanted), rcond=None)[0]


def losses(name, values, rows, multiprocessors):
    """Of every case the time of the cut with the least cost, as a multiple of the least time."""
    found = []
    with with_constants(name, values):
        for case in dict.fromkeys(case for case, _, _ in rows):
            times = {P: ms for of, P, ms in rows if of == case}
            chosen = min(times, key=lambda P, case=case: cost(name, P, case, multiprocessors))
            found.append(times[chosen] / min(times.values()))
    return found


def measured(name, device, samples):
    """Rows (case, P, milliseconds) of all shapes in all numbers of segments that they can have."""
    unequal = {"forward": "short_first_segment", "backward": "short_segment"}[name]
    for case in (replace(case, backward=name == "backward") for case in SHAPES):
        device.free()
        arrays, keywords = run.draw(case, device.xp, 0)
        for P in (P for P in SEGMENTS if P <= case.T // gated_kernels.GatedForwardSm90.CHUNK):
            forced = {f"{name}_segments": lambda *_, P=P: P, unequal: lambda *_: 0, "split_columns": lambda *_: False}
            no_plans = Cache(1 << 20, 16)  # no plan of another cut of the same call is taken
            with mock.patch.multiple(segments, **forced), mock.patch.object(checked_calls, "MEMOS", no_plans):
                call = run.prepared(case, arrays, keywords)
                ms, _ = device.device_ms([call] * run.CALLS, samples)
            yield case, P, ms


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", nargs="+", default=list(FITTED), choices=list(FITTED))
    parser.add_argument("--samples", type=int, default=5)
    args = parser.parse_args()
    device = devices.current()
    multiprocessors = device.xp.cuda.Device().attributes["MultiProcessorCount"]
    for name in args.passes:
        rows = list(measured(name, device, args.samples))
        now = [getattr(segments, constant) for constant in FITTED[name]]
        for title, values in (("now", now), ("fitted", fit(name, rows, multiprocessors))):
            print(name, title, ", ".join(f"{what} = {x:.3g}" for what, x in zip(FITTED[name], values, strict=True)))
            found = losses(name, values, rows, multiprocessors)
            print(
                f"    the chosen cut takes {np.mean(found) - 1:.1%} longer than the best, at worst {max(found) - 1:.1%}"
            )


if __name__ == "__main__":
    main()
