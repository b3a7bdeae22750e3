"""RWKV's training on the GPU: tokens/s, the share of the card's matrix rate, memory, and the peer's in the same run.

    python benchmarks/rwkv_training.py [--version 7] [--sizes 12x768@16x1024 ...] [--steps 20] [--curve 300]
                                       [--curve-size 4x256@64x512] [--no-peer] [--tuned-over 6] [--keep FILE]
                                       [--out FILE]

A size is layers x width @ batch x context. A step is all that a training does: the batch from the text, loss,
gradients, clipping, AdamW; times are between GPU events, the median of five samples of `--steps` steps each. The share
is of 6 operations a parameter and token over the card's dense bfloat16 rate. Memory is what the libraries have taken
from the device. The text is this package's own source. The peer (`rwkv_training_peer.py`) starts from the same weights,
reads the same batches and has the same learning rates, so that the losses can be laid over each other. Its first step
tunes its kernels for minutes, with `--tuned-over` over so many of their configurations.
"""

import argparse
import gc
import json
import re
import statistics
import sys
from pathlib import Path

import peers
import run

from linattn_np.models.devices import on_host
from linattn_np.models.training import Settings, Training
from linattn_np.models.versions import VERSIONS

RATES = {"H100": 790e12, "H200": 790e12}  # operations a second in bfloat16 that cuBLAS has been seen to reach at best
SIZES = ("4x256@64x512", "12x768@16x1024", "24x1024@8x2048")
CURVE, RECOMPUTED = "4x256@64x512", "12x768@16x1024"
SAMPLES, WARM = 5, 4  # before the samples: kernels are compiled, tuned, captured
HEAD_SIZE, SEED = 64, 0


def main():
    args = arguments()
    import cupy

    card = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    rate = next((rate for name, rate in RATES.items() if name in card), None)
    if rate is None:
        sys.exit(f"{card}: its matrix rate is not known here, expected one of {', '.join(RATES)}")
    print(f"RWKV-{args.version}, {card}, CuPy {cupy.__version__}", flush=True)
    kind, peer = VERSIONS[args.version], not args.no_peer
    result = {"version": args.version, "device": card, "date": run.today(), "matrix_rate": rate, "note": args.note}
    result |= kept(args.keep, card, args.sizes)
    if peer and args.tuned_over:
        result["tuned_over"] = args.tuned_over
        peers.tune_over(args.tuned_over)
    if args.curve:  # before any row: what does not learn alike is not worth a time
        result["curve"] = {"size": args.curve_size}
        for name, losses in curves(kind, args.curve_size, args.curve, peer):
            result["curve"][name] = losses
            print("loss", name, losses[:: len(losses) // 4] if isinstance(losses, list) else losses, flush=True)
            store(result, args.out)
    for size in args.sizes:
        for name, row in rows(kind, size, args.steps, rate, peer):
            result["rows"].append(row := {"size": size, "who": name, **row})
            print(row, flush=True)
            store(result, args.out)


def kept(path, card, sizes) -> dict:
    """The rows of other sizes in an earlier file of this card, each with its day, and the curve."""
    earlier = json.loads(Path(path).read_text()) if path else {"device": None}
    if earlier["device"] != card:
        return {"rows": [], "curve": {}}
    rows = [{"date": earlier["date"]} | row for row in earlier["rows"] if row["size"] not in sizes]
    return {"rows": rows, "curve": earlier["curve"]}


def store(result, path):
    """What there is so far."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--version", type=int, choices=VERSIONS, default=6, help="of RWKV (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--curve", type=int, default=300, help="steps whose losses are kept, 0 for none")
    parser.add_argument("--curve-size", default=CURVE, help="what they are losses of (default: %(default)s)")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--tuned-over", type=int, metavar="N", help="configurations of a kernel that the peer tries")
    parser.add_argument("--note", default="", help="a sentence for the table: what was unusual while this was measured")
    parser.add_argument("--keep", metavar="FILE", help="an earlier file, whose rows of other sizes to keep")
    parser.add_argument("--out")
    return parser.parse_args()


def text() -> bytes:
    import linattn_np

    return b"".join(path.read_bytes() for path in sorted(Path(linattn_np.__file__).parent.rglob("*.py")))


def settings_of(size, steps):
    layers, width, batch, context = map(int, re.fullmatch(r"(\d+)x(\d+)@(\d+)x(\d+)", size).groups())
    sizes = dict(layers=layers, width=width, head_size=HEAD_SIZE, batch=batch, context=context)
    return Settings(**sizes, steps=steps, lr=1e-3, seed=SEED)


class Ours:
    def __init__(self, kind, settings, recompute=False):
        import cupy

        self.cupy, self.training = cupy, Training(text(), settings, "cuda", kind=kind, recompute=recompute)
        self.start = on_host(self.training.steps.weights)

    def step(self):
        return self.training.step()

    def timed(self, run):
        first, last = (self.cupy.cuda.Event() for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return self.cupy.cuda.get_elapsed_time(first, last) / 1e3

    def memory(self):
        return self.cupy.get_default_memory_pool().total_bytes() + self.training.steps.pool.total_bytes()

    def free(self):
        self.training.steps, self.training.step_number = None, 0
        gc.collect()
        self.cupy.get_default_memory_pool().free_all_blocks()


class Theirs:
    """From the weights, with the batches and the learning rates of `ours`, which is at its start and freed."""

    def __init__(self, kind, ours):
        import torch
        from rwkv_training_peer import Peer

        self.torch, self.training = torch, ours.training
        torch.cuda.reset_peak_memory_stats()
        self.peer = Peer(kind, self.training.layout.named(ours.start), self.training.settings)

    def step(self):
        one = self.training
        tokens = self.torch.from_numpy(one.text.batch(one.step_number)).cuda(non_blocking=True)
        loss = self.peer.step(tokens, one.learning_rate())
        one.step_number += 1
        return loss

    def timed(self, run):
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def memory(self):
        return self.torch.cuda.max_memory_reserved()

    def free(self):
        self.peer = None
        gc.collect()
        self.torch.cuda.empty_cache()


def rows(kind, size, steps, rate, peer):
    """(who, row) of a size."""
    settings = settings_of(size, WARM + SAMPLES * steps)
    ours = Ours(kind, settings)
    yield "linattn-np", measured(ours, steps, rate)
    if peer:
        yield "fla", attempted(lambda: measured(Theirs(kind, ours), steps, rate))
    if size == RECOMPUTED:
        yield "linattn-np, recomputed", measured(Ours(kind, settings, recompute=True), steps, rate)


def curves(kind, size, steps, peer):
    """(who, the losses of every step)."""
    ours = Ours(kind, settings_of(size, steps))
    yield "linattn-np", learned(ours, steps)
    if peer:
        yield "fla", attempted(lambda: learned(Theirs(kind, ours), steps))


def attempted(measure):
    """What `measure` finds of the peer, or why it fails."""
    try:
        return measure()
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def measured(one, steps, rate) -> dict:
    settings, parameters = one.training.settings, one.training.layout.size
    for _ in range(WARM):
        loss = one.step()
    float(loss)
    seconds = [one.timed(lambda: [one.step() for _ in range(steps)]) / steps for _ in range(SAMPLES)]
    memory, step = one.memory(), statistics.median(seconds)
    one.free()
    tokens = settings.batch * settings.context
    return {
        "parameters": parameters,
        "ms": round(1e3 * step, 3),
        "tokens_per_s": round(tokens / step),
        "matrix_rate_share": round(6 * parameters * tokens / step / rate, 4),
        "memory_gib": round(memory / 2**30, 2),
    }


def learned(one, steps) -> list:
    losses = [round(float(one.step()), 5) for _ in range(steps)]
    one.free()
    return losses


if __name__ == "__main__":
    main()
