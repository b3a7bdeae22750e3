"""Times decoding steps of RWKV-7 (24 layers of 2,048 channels, bfloat16, synthetic weights) from several source trees.

    python decode_trees.py [TREE ...] [--batch 1 8 64 256] [--rounds 3] [--samples 5]

A TREE is a folder with linattn_np and kernels_cu; without one, what PYTHONPATH finds. Every tree has a process of its
own, so that trees load and compile side by side; they are then timed in turns, one at a time: round by round, so that a
drift of the card's clock meets all of them. The first tree is the reference.

Checks, before anything is timed, for every tree and number of sequences:
  races   logits of steps whose launches overlap = logits of the same steps with a wait after every launch, to the bit
  graph   logits of replays of the captured graph = logits of steps, to the bit
  slots   logits of sequences in permuted rows of a larger pool = logits in order, to the bit
  error   median and largest relative error of a sequence's logits against the first tree's

Times are medians of samples; a sample is as many replays of the greedy step's graph as take 8 ms, between two CUDA
events behind a kernel that waits until the host has enqueued them, after a rest of 20 ms. The floor is every byte of
weights and logits once, and of states twice, at 4.2 TB/s. `--dry` runs a tiny model on the tests' emulator.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOOR_BYTES_PER_S = 4.2e12
RANKS = {"W": 96, "A": 96, "Q": 64, "G": 256}
SIZES = {"L": 24, "D": 2048, "V": 65536, "N": 64}
TINY = {"L": 2, "D": 128, "V": 96, "N": 64}
STEPS, COLUMNS = 3, 61  # of checks: steps, and of how many logits one is compared between trees
# Limits of relative errors of a sequence's logits, (median, largest): up to 8 sequences, and more, whose vectors are
# rounded to bfloat16: a rounding that goes the other way may be magnified where a head's output nearly vanishes.
ERROR = {True: (1e-4, 1e-3), False: (2e-2, 0.5)}


# -- a tree's process --------------------------------------------------------------------------------------------------
class Card:
    """CuPy's device."""

    def __init__(self):
        import cupy

        self.cupy, self.device = cupy, None
        self.hold = cupy.RawKernel(
            r"""extern "C" __global__ void hold(long long ns) {
                long long start, now;
                asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
                do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
            }""",
            "hold",
        )

    def host(self, x):
        return self.cupy.asnumpy(x)

    def upload(self, x):
        return self.cupy.asarray(x)

    def wait(self):
        self.cupy.cuda.Device().synchronize()

    def ms(self, call, count):
        """Milliseconds of a call, of `count` calls."""
        events = [self.cupy.cuda.Event() for _ in range(2)]
        self.wait()
        time.sleep(0.02)
        self.hold((1,), (1,), (np.int64(300_000 + 20_000 * count),))
        events[0].record()
        for _ in range(count):
            call()
        events[1].record()
        events[1].synchronize()
        return self.cupy.cuda.get_elapsed_time(*events) / count

    def copy_tb_per_s(self):
        source = self.cupy.zeros(1 << 31, np.uint8)
        target = self.cupy.empty_like(source)
        copy = lambda: target.data.copy_from_device_async(source.data, source.nbytes)
        copy()
        return 2 * source.nbytes / min(self.ms(copy, 3) for _ in range(3)) / 1e9

    def free(self):
        self.cupy.get_default_memory_pool().free_all_blocks()

    def captured(self, decoder, *arguments, greedy):
        decoder.capture(*arguments, greedy=greedy)
        return decoder.replay


class Dry:
    """The tests' emulator."""

    def __init__(self):
        sys.path.append(str(Path(os.environ["PYTHONPATH"].split(":")[0]) / "tests"))
        from emulator import EmulatedDevice

        self.device = EmulatedDevice(90)

    def host(self, x):
        return np.array(x)

    upload = host

    def wait(self):
        pass

    def ms(self, call, count):
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def copy_tb_per_s(self):
        return 0.0

    def free(self):
        pass

    def captured(self, decoder, *arguments, greedy):
        launches = decoder.bind(*arguments, None, greedy)
        return lambda: [launch() for launch in launches] and decoder.logits


def synthetic(sizes):
    """Host weights, matrices in bfloat16; equal in every tree."""
    from linattn_np.models.versions import VERSIONS

    axes_of = {"1": 1, "H": sizes["D"] // sizes["N"], "F": 4 * sizes["D"], **sizes, **RANKS}
    noise = np.random.default_rng(0).standard_normal(1_000_003, np.float32)

    def kind(name, shape):  # (scale, shift, dtype)
        if name[-1] in "12" and name[-2] in "wavg":  # of low rank
            return 0.3 * shape[-2] ** -0.5, 0, BF16
        if name.endswith(".weight") and len(shape) == 2:
            return shape[-1] ** -0.5, 0, BF16
        if ".x_" in name:
            return 0.2, 0.5, np.float32
        if name.endswith("att.w0"):
            return 1.5, -3, np.float32
        return (0.1, int(name.endswith("weight")), np.float32) if len(shape) == 1 else (0.5, 0, np.float32)

    axes = VERSIONS[7].version.parameter_axes(sizes["L"])
    shapes = {name: tuple(axes_of[axis] for axis in names.split()) for name, names in axes.items()}
    kinds, pools, weights = {name: kind(name, shape) for name, shape in shapes.items()}, {}, {}
    for scale, shift, dtype in dict.fromkeys(kinds.values()):
        most = max(int(np.prod(shapes[name])) for name, other in kinds.items() if other == (scale, shift, dtype))
        pools[scale, shift, dtype] = np.resize((scale * noise + shift).astype(dtype), most + len(noise))
    for n, (name, shape) in enumerate(shapes.items()):  # views of the pools, each from another start
        first = 7919 * n % len(noise)
        weights[name] = pools[kinds[name]][first : first + int(np.prod(shape))].reshape(shape)
    return weights


def run_worker(args):
    begun = time.perf_counter()
    card = Dry() if args.dry else Card()
    import linattn_np
    from linattn_np.models.rwkv7.cuda_decode import CudaDecoder

    first = CudaDecoder(synthetic(TINY if args.dry else SIZES), BF16, 1, card.device)
    decoders = {B: first.resized(B) for B in args.batch}
    for decoder in decoders.values():
        plan, _ = decoder.plan_of(zeros(card, decoder), decoder.initial_state(), None, True, 1)
        decoder.device.compile(plan.kernels)
    loaded = time.perf_counter() - begun
    checks, logits = {}, {}
    for B, decoder in decoders.items():
        checks[B], logits[str(B)] = checked(card, decoder)
        card.free()
    np.savez(args.logits, **logits)
    graphs, state = {}, None
    for B, decoder in decoders.items():
        tokens, state = zeros(card, decoder), decoder.initial_state()
        graphs[B] = card.captured(decoder, tokens, state, greedy=True), state, tokens
        graphs[B][0]()
    card.wait()
    floors = {
        B: (decoder.weight_bytes + 2 * sum(x.nbytes for x in graphs[B][1].arrays) + decoder.logits.nbytes)
        / FLOOR_BYTES_PER_S
        * 1e3
        for B, decoder in decoders.items()
    }
    package = str(Path(linattn_np.__file__).resolve().parents[1])
    say(package=package, checks=checks, floors=floors, loaded_s=loaded, ready_s=time.perf_counter() - begun)
    counts = {}
    for line in sys.stdin:
        command, *words = line.split()
        if command == "copy":
            say(copy=card.copy_tb_per_s())
            card.free()
        elif command == "time":
            B, samples = map(int, words)
            replay = graphs[B][0]
            if B not in counts:
                card.ms(replay, 2)
                counts[B] = max(2, round(8 / card.ms(replay, 2)))
            say(ms=[card.ms(replay, counts[B]) for _ in range(samples)])


def zeros(card, decoder):
    return card.upload(np.zeros(decoder.batch, np.int64))


def say(**found):
    print(json.dumps(found), flush=True)


def checked(card, decoder):
    """({check: whether it holds}, every COLUMNS-th logit [steps, B, ...]) of STEPS steps on random tokens."""
    B, V = decoder.batch, decoder.sizes["V"]
    rng = np.random.default_rng(B)
    given = rng.integers(0, V, (STEPS, B))

    def bits(state, slots=None, wait=False, graph=None):
        tokens, found = zeros(card, decoder), []
        if graph:
            graph = card.captured(decoder, tokens, state, greedy=False)
        for row in given:
            tokens[...] = card.upload(row)
            if graph:
                graph()
            else:
                for launch in decoder.bind(tokens, state, slots, False):
                    launch()
                    if wait:
                        card.wait()
            found.append(card.host(decoder.logits).copy())
        return np.stack(found)

    wanted = bits(decoder.initial_state(), wait=True)
    order = rng.permutation(B + 3)[:B]
    return {
        "finite": bool(np.isfinite(wanted).all()),
        "races": same(wanted, *(bits(decoder.initial_state()) for _ in range(2))),
        "graph": same(wanted, bits(decoder.initial_state(), graph=True)),
        "slots": same(wanted, bits(decoder.initial_state(B + 3), card.upload(order))),
        "md5": hashlib.md5(wanted.tobytes()).hexdigest()[:8],
    }, wanted[:, :, ::COLUMNS]


def same(wanted, *others):
    return all(np.array_equal(wanted.view(np.uint32), other.view(np.uint32)) for other in others)


# -- all trees ---------------------------------------------------------------------------------------------------------
class Worker:
    def __init__(self, tree, args, folder, number):
        self.tree, self.logits = tree, Path(folder) / f"{number}.npz"
        paths = [str(Path(tree).resolve())] if tree else []
        path = os.pathsep.join(paths + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p])
        # -P: packages beside this file must not hide the tree's
        command = [
            sys.executable,
            "-P",
            str(Path(__file__).resolve()),
            "--worker",
            "--logits",
            str(self.logits),
            *["--dry"] * args.dry,
        ]
        self.process = subprocess.Popen(
            [*command, "--batch", *map(str, args.batch)],
            env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.tree or 'PYTHONPATH'} failed with {self.process.wait()}")
        return json.loads(line)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.answer()


def run_all(args):
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(tree, args, folder, n) for n, tree in enumerate(args.trees or [""])]
        try:
            compare(workers, args, begun)
        finally:
            for worker in workers:
                worker.process.stdin.close()
                worker.process.terminate()
                worker.process.wait()


def compare(workers, args, begun):
    ready, wrong = [worker.answer() for worker in workers], False
    print(f"ready after {time.perf_counter() - begun:.1f} s: loading {[round(r['loaded_s'], 1) for r in ready]}")
    reference = np.load(workers[0].logits)
    for worker, found in zip(workers, ready):
        if worker.tree and found["package"] != str(Path(worker.tree).resolve()):
            raise SystemExit(f"{worker.tree}: linattn_np came from {found['package']}")
        logits = np.load(worker.logits)
        for B in args.batch:
            wanted, given = reference[str(B)], logits[str(B)]
            error = np.sqrt(((given - wanted) ** 2).mean(-1) / (wanted**2).mean(-1))
            checks = found["checks"][str(B)]
            median, largest = ERROR[B <= 8]
            held = all(checks[name] for name in ("finite", "races", "graph", "slots"))
            held = held and np.median(error) <= median and error.max() <= largest
            wrong |= not held
            print(
                f"{'ok   ' if held else 'WRONG'} {label(worker):24s} {B:4d} sequences: {checks}, error median "
                f"{np.median(error):.1e} largest {error.max():.1e}"
            )
    copy = workers[0].ask("copy")["copy"]
    times = {}
    for _ in range(args.rounds):
        for B in args.batch:
            for n, worker in enumerate(workers):
                times.setdefault((n, B), []).extend(worker.ask("time", B, args.samples)["ms"])
    print(
        f"copy {copy:.2f} TB/s; floors at 4.2. ms a step, median (least .. most), multiples of the floor, of the first"
    )
    print(f"{'':24s}" + "".join(f"{B:>34d}" for B in args.batch))
    for n, worker in enumerate(workers):
        row = f"{label(worker):24s}"
        for B in args.batch:
            ms = statistics.median(times[n, B])
            ratio, gain = ms / ready[n]["floors"][str(B)], ms / statistics.median(times[0, B])
            row += f" {ms:7.3f} ({min(times[n, B]):.3f}..{max(times[n, B]):.3f}) {ratio:4.2f} {gain:5.3f}"
        print(row)
    print(f"{time.perf_counter() - begun:.1f} s")
    if wrong:
        raise SystemExit(1)


def label(worker):
    return Path(worker.tree).resolve().name[-24:] if worker.tree else "PYTHONPATH"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="TREE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--logits", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    run_worker(args) if args.worker else run_all(args)


if __name__ == "__main__":
    main()
