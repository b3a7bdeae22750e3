"""Times the operators on sequences that are cut over ranks, against one rank's own: weak and strong scaling.

    mpiexec -n 4 python benchmarks/cards.py --device cuda [--graphs] [--out benchmarks/results/cards/NAME.json]
    torchrun --nproc-per-node 4 benchmarks/cards.py --device cuda
    python benchmarks/cards.py --threads 4 --device cuda                            one process with four cards
    mpiexec -n 2 python benchmarks/cards.py --tokens 2048 --total 4096 --dim 32     NumPy ranks

A row's figures:

    ms          of a call, on the slowest rank: the median of several times a few calls in a row, all ranks beginning
                together. Of a backward pass the pullback's alone
    one_ms      the same of `linattn_np`'s operator on one rank, the others at rest: with as many tokens as a rank has
                (weak), or with all tokens (strong)
    efficiency  one_ms / ms (weak), or one_ms / ms / ranks (strong)
    sent        bytes that a rank sends to each other rank in a call
    error       relative, of all ranks' results, or gradients, of two heads at 512 tokens a rank, against float64 token
                by token

With `--graphs` a call is the launch of a CUDA graph of it, on one rank too: what the host does, the ranks' agreement
with it, was done when the graph was made.

Gates are as trained RWKV-6 models have them: a channel's own strength, a median of 0.05 nats a token and one in a
hundred above 3. Efficiency says something of cards, where every rank has its own; NumPy ranks share a host's cores.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import devices
import numpy as np

import linattn_np
from linattn_np import distributed
from linattn_np.array_kinds import BFLOAT16

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": BFLOAT16}
OPERATORS = ("gla", "rwkv6", "simple_gla", "retention", "linear_attention")
SAMPLES = 5
CALLS = 4  # one after another in a sample: the host may run ahead, as it does in a model
CASE = ("op", "pass", "scaling", "ranks", "tokens", "H", "D", "dtype", "engine", "graphs")  # what a row is of
CHECKED = 512  # tokens a rank: enough that Hopper's kernels cut them into segments
DRAWN = 4096  # tokens of random numbers, repeated in longer sequences: 10^10 of them would take minutes


class Counted:
    """An engine that counts what it sends."""

    def __init__(self, comm):
        self.comm, self.sent = comm, 0
        self.rank, self.size, self.homes = comm.rank, comm.size, comm.homes

    def all_gather(self, x):
        self.sent += x.nbytes
        return self.comm.all_gather(x)

    def send(self, x, to):
        self.comm.send(x, to)

    def recv(self, x, source):
        self.comm.recv(x, source)

    def together(self, number):
        """The numbers of all ranks, once all are here."""
        return self.comm.all_gather(np.array([float(number)]))().ravel()


def trained(rng, shape):
    """Log decays of such a spread, most of it between channels."""
    channels, tokens = rng.standard_normal((*shape[:2], 1, *shape[3:])), rng.standard_normal(shape)
    return -0.05 * np.exp(1.76 * (0.9 * channels + np.sqrt(1 - 0.9**2) * tokens))


def draw(op, rng, tokens, heads, dim):
    """Arrays of a call in float32, [B, T, H, ...] as models have them, in views [B, H, T, ...]."""

    def normal(*shape):
        return rng.standard_normal((1, tokens, heads, *shape), dtype=np.float32).swapaxes(1, 2)

    arrays = [normal(dim), normal(dim), normal(dim)]
    if op in ("gla", "rwkv6", "simple_gla"):
        shape = (1, heads, tokens, dim)[: 3 if op == "simple_gla" else 4]
        arrays.append(trained(rng, shape).astype(np.float32))
    return [*arrays, rng.standard_normal((heads, dim), dtype=np.float32)] if op == "rwkv6" else arrays


class Bench:
    def __init__(self, comm, options):
        self.comm, self.options = Counted(comm), options
        self.device = devices.Cpu() if options.device == "cpu" else devices.Gpu()
        self.dtype, self.drawn = DTYPES[options.dtype], {}

    def put(self, arrays):
        return [self.device.xp.asarray(x.astype(self.dtype)) for x in arrays]

    def long(self, op, seed, tokens):
        """Arrays of a call in the benchmark's dtype, where it computes: `DRAWN` tokens again and again."""
        key = op, seed, min(tokens, DRAWN)
        if key not in self.drawn:
            self.drawn = {key: draw(op, np.random.default_rng(seed), key[2], self.options.heads, self.options.dim)}
        return [self.repeated(x, tokens) if x.ndim > 2 else x for x in self.put(self.drawn[key])]

    def repeated(self, x, tokens):
        block = self.device.xp.ascontiguousarray(x.swapaxes(1, 2))
        whole = self.device.xp.empty((1, tokens, *block.shape[2:]), block.dtype)
        for start in range(0, tokens, DRAWN):
            part = whole[:, start : start + DRAWN]
            part[...] = block[:, : part.shape[1]]
        return whole.swapaxes(1, 2)

    def rows(self):
        for op in self.options.ops:
            errors = self.errors(op)
            tokens_of = {
                "weak": (self.options.tokens, self.options.tokens),
                "strong": (self.options.total // self.comm.size, self.options.total),
            }
            for scaling in self.options.scaling:
                tokens, of_one = tokens_of[scaling]
                times = self.times(op, tokens, of_one)
                for kind, (ms, one_ms, sent) in times.items():
                    shared = self.comm.size if scaling == "strong" else 1
                    yield {
                        "op": op,
                        "pass": kind,
                        "scaling": scaling,
                        "ranks": self.comm.size,
                        "tokens": tokens,
                        "H": self.options.heads,
                        "D": self.options.dim,
                        "dtype": self.options.dtype,
                        "engine": type(self.comm.comm).__name__,
                        "graphs": self.options.graphs,
                        "ms": ms,
                        "one_ms": one_ms,
                        "efficiency": one_ms / ms / shared,
                        "sent": sent,
                        "error": errors[kind],
                    }

    def times(self, op, tokens, of_one):
        """{pass: (ms on all ranks, ms on one, bytes sent)}."""
        own = self.long(op, self.comm.rank, tokens)
        if op == "rwkv6":  # u is everyone's
            own[4] = self.put([np.ones(own[4].shape)])[0]
        function, single = getattr(distributed, op), getattr(linattn_np, op)
        found = {}
        for kind in ("forward", "backward"):
            if kind == "forward":
                call = partial(function, *own, comm=self.comm)
            else:
                o, pullback = distributed.vjp(function, *own, comm=self.comm)
                call = partial(pullback, o)
            before = self.comm.sent
            call()
            sent = self.comm.sent - before
            ms = self.comm.together(self.median(self.repeatable(call, self.comm.comm))).max()
            self.comm.together(0)
            one_ms = self.one(single, op, of_one, kind) if self.comm.rank == 0 else 0.0
            found[kind] = float(ms), float(self.comm.together(one_ms)[0]), sent
        return found

    def one(self, single, op, tokens, kind):
        arrays = self.long(op, 0, tokens)
        if kind == "forward":
            call = partial(single, *arrays)
        else:
            o, pullback = linattn_np.vjp(single, *arrays)
            call = partial(pullback, o)
        call()
        return self.median(self.repeatable(call), together=False)

    def repeatable(self, call, engine=None):
        """The call, or the launch of a CUDA graph of it, which holds messages of an `engine`."""
        if not self.options.graphs:
            return call
        stream = self.device.xp.cuda.Stream(non_blocking=True)
        self.device.wait()
        with stream:
            call()  # once there: what the host makes ready for a queue is no part of a graph
            stream.synchronize()
            stream.begin_capture()
            results = call()
            graph = stream.end_capture()

        def launch(results=results):  # which live as long: the graph writes there
            with stream:
                graph.launch(stream)
                if engine is not None:
                    engine.launched()

        return launch

    def median(self, call, together=True):
        times = []
        for _ in range(SAMPLES):
            self.device.wait()
            if together:
                self.comm.together(0)
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            self.device.wait()
            times.append((time.perf_counter() - start) * 1e3 / CALLS)
        return statistics.median(times)

    def errors(self, op):
        """{pass: the largest relative error of any rank}."""
        heads = min(self.options.heads, 2)
        whole = draw(op, np.random.default_rng(0), CHECKED * self.comm.size, heads, self.options.dim)
        part = slice(CHECKED * self.comm.rank, CHECKED * (self.comm.rank + 1))
        own = self.put([x[:, :, part] if x.ndim > 2 else x for x in whole])
        o, pullback = distributed.vjp(getattr(distributed, op), *own, comm=self.comm)
        exact = [np.asarray(x.astype(self.dtype), np.float64) for x in whole]
        wanted, exact_pullback = linattn_np.vjp(getattr(linattn_np, op), *exact, mode="recurrent")
        do = np.cos(np.arange(wanted.size)).reshape(wanted.shape)
        found, gradients = (
            pullback(self.put([do[:, :, part]])[0]),
            exact_pullback(np.asarray(do.astype(self.dtype), np.float64)),
        )
        backward = max(self.error(x, y[:, :, part] if y.ndim > 2 else y) for x, y in zip(found, gradients))
        return {
            "forward": float(self.comm.together(self.error(o, wanted[:, :, part])).max()),
            "backward": float(self.comm.together(backward).max()),
        }

    def error(self, x, wanted):
        return np.linalg.norm(np.asarray(self.device.host(x), np.float64) - wanted) / np.linalg.norm(wanted)


def show(row):
    print(
        f"{row['op']:17} {row['pass']:9} {row['scaling']:7} {row['ranks']} x {row['tokens']:<8} {row['ms']:9.3f} ms "
        f"one {row['one_ms']:9.3f} ms  {row['efficiency']:6.1%}  sent {row['sent']:>9,} B  error {row['error']:.1e}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="ranks that are threads of this process, on a card each")
    parser.add_argument("--graphs", action="store_true", help="time CUDA graphs of the calls, on cards")
    parser.add_argument("--ops", nargs="+", choices=OPERATORS, default=["gla", "rwkv6"])
    parser.add_argument("--scaling", nargs="+", choices=("weak", "strong"), default=["weak", "strong"])
    parser.add_argument("--tokens", type=int, default=131_072, help="a rank, for weak scaling")
    parser.add_argument("--total", type=int, default=1_048_576, help="of all ranks, for strong scaling")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128, help="K and V")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on cards, float32 on the CPU by default")
    parser.add_argument("--out", type=Path, help="a JSON file, in which rows of the same cases are replaced")
    options = parser.parse_args()
    if options.graphs and (options.device == "cpu" or options.threads):
        parser.error("--graphs takes --device cuda and ranks that are processes")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")

    def work(comm):
        for row in Bench(comm, options).rows():
            if comm.rank == 0:
                show(row)
                if options.out:
                    devices.store(options.out, row, CASE)

    if options.threads:
        distributed.run_threads(work, options.threads, device=options.device)
    else:
        work(distributed.connect(options.device))


if __name__ == "__main__":
    main()
