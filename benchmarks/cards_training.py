"""Times RWKV-6's training on several cards against one.

    torchrun --nproc-per-node 2 benchmarks/cards_training.py [--size 12x768@16x1024] [--steps 20] [--out ROWS.json]
    mpiexec -n 2 python benchmarks/cards_training.py --device cpu --size 2x64@8x64 --steps 4

A size is layers x width @ batch x context, as in `rwkv_training.py`. The first rank trains it alone while the others
rest; then all train

    same batch      the same batch, of which each has a part
    more batch      as many times the batch as there are ranks
    more context    as many times the context, which they cut: `SequenceParallel`

A row has tokens/s, the median of `SAMPLES` samples of so many steps, and its efficiency: of one rank's rate, times the
ranks. A step is all that a training does. `apart` is how far losses are from those of one rank, where they should be
the same.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import devices
import numpy as np
from rwkv_training import settings_of, text

from linattn_np import distributed
from linattn_np.models.training import Training

SAMPLES, WARM = 3, 4  # before the samples: kernels are compiled, captured
CASES = {
    "same batch": (distributed.DataParallel, lambda settings, ranks: settings),
    "more batch": (distributed.DataParallel, lambda settings, ranks: replace(settings, batch=settings.batch * ranks)),
    "more context": (
        distributed.SequenceParallel,
        lambda settings, ranks: replace(settings, context=settings.context * ranks),
    ),
}


def rate(settings, device, steps, **how):
    """(tokens/s, the losses)."""
    training, clock = Training(text(), settings, device, **how), devices.Cpu() if device == "cpu" else devices.Gpu()
    losses, seconds = [training.step() for _ in range(WARM)], []
    for _ in range(SAMPLES):
        clock.wait()
        start = time.perf_counter()
        losses += [training.step() for _ in range(steps)]
        clock.wait()
        seconds.append(time.perf_counter() - start)
    losses = np.array([float(loss) for loss in losses])
    assert np.isfinite(losses).all()
    return settings.batch * settings.context * steps / statistics.median(seconds), losses


def rows(comm, options):
    def everyones(number):
        return comm.all_gather(np.array([float(number)]))().ravel()

    settings = settings_of(options.size, WARM + SAMPLES * options.steps)
    one, wanted = rate(settings, options.device, options.steps) if comm.rank == 0 else (0, None)
    one = everyones(one)[0]
    for case in options.cases:
        kind, grown = CASES[case]
        found, losses = rate(grown(settings, comm.size), options.device, options.steps, ranks=kind(comm))
        found = everyones(found).min()
        same = case == "same batch" and wanted is not None
        yield {
            "training": case,
            "size": options.size,
            "ranks": comm.size,
            "tokens_s": found,
            "one_tokens_s": one,
            "efficiency": found / one / comm.size,
            "apart": float(np.abs(losses / wanted - 1).max()) if same else None,
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", default="12x768@16x1024")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="a JSON file, in which rows like these are replaced")
    options = parser.parse_args()
    comm = distributed.connect(options.device)
    for row in rows(comm, options):
        if comm.rank == 0:
            print(
                f"{row['training']:13} {row['size']} on {row['ranks']}: {row['tokens_s']:11,.0f} tokens/s, "
                f"one {row['one_tokens_s']:11,.0f}, {row['efficiency']:6.1%}, apart {row['apart']}",
                flush=True,
            )
            if options.out:
                devices.store(options.out, row, ("training", "size", "ranks"))


if __name__ == "__main__":
    main()
