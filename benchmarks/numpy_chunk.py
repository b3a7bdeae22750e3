"""The chunked NumPy path against recurrent loops, and against the same algorithm in torch on the CPU.

    python benchmarks/numpy_chunk.py [--shape B H T D] [--threads N] [--rounds N]

Two loops: the equation a head at a time, as the README opens with it, and `mode="recurrent"`, which takes all heads at
once. torch is optional, and is tried with several chunk sizes. Every path gets the same N threads and is checked
against the float64 recurrence. Then they take turns, a call to warm up and one that is timed, so that a machine whose
speed drifts drifts for all of them: a ratio is of two times of the same round. Figures are medians, with the quartiles
beside them.

Most of the chunked path's time is in BLAS. NumPy's OpenBLAS does not know every processor's vector units: where
it takes AVX2 kernels (`Haswell` in `np.show_runtime()`) on a machine with AVX-512, OPENBLAS_CORETYPE=SkylakeX in the
environment has the path run up to half as fast again.
"""

import argparse
import os
import statistics
from functools import partial


def main():
    args = arguments()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cpus)  # before NumPy is loaded: its BLAS counts the CPUs once
    import numpy as np

    import linattn_np
    from linattn_np.command.measuring import Cpu

    clock = Cpu()
    rng = np.random.default_rng(0)
    q, k, v, gate = rng.standard_normal((4, *args.shape), dtype=np.float32)
    g = -np.logaddexp(0, -gate)  # logsigmoid
    reference = linattn_np.gla(*(x[:, :, : args.checked].astype(np.float64) for x in (q, k, v, g)), mode="recurrent")

    def check(o):
        error = np.sqrt(np.mean((o[:, :, : args.checked] - reference) ** 2) / np.mean(reference**2))
        assert error < 2e-5, f"relative error {error:.1e}"

    def plain_loop():
        return np.stack([[one_head(np, *head) for head in zip(*row)] for row in zip(q, k, v, g)])

    paths = {
        "loop, a head at a time": plain_loop,
        "recurrent, all heads": lambda: linattn_np.gla(q, k, v, g, mode="recurrent"),
        "chunk": lambda: linattn_np.gla(q, k, v, g),
        **torch_paths((q, k, v, g), len(cpus)),
    }
    for call in paths.values():
        check(call())
    times = {name: [] for name in paths}
    for _ in range(args.rounds):
        for name, call in paths.items():
            call()
            times[name].append(clock.ms(call))

    print(
        f"gla forward, B,H,T,D = {args.shape}, float32, {len(cpus)} threads, NumPy {np.__version__}, "
        f"{args.rounds} rounds"
    )
    for name, own in times.items():
        ratios = [t / chunk for t, chunk in zip(own, times["chunk"])]
        print(f"{name:24s} {spread(own)} ms    {spread(ratios)} times chunk's")


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:7.2f} ({low:.2f} - {high:.2f})"


def one_head(np, q, k, v, g):
    """The equation as it stands: q k g [T, K], v [T, V]."""
    S, o = np.zeros((k.shape[1], v.shape[1]), q.dtype), np.empty_like(v)
    for t in range(len(q)):
        S = np.exp(g[t])[:, None] * S + np.outer(k[t], v[t])
        o[t] = q[t] @ S
    return o * k.shape[1] ** -0.5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=(1, 8, 4096, 64), metavar=("B", "H", "T", "D"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--checked", type=int, default=512, help="tokens compared with the reference")
    return parser.parse_args()


def torch_paths(arrays, threads):
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(x) for x in arrays]

    def path(C):
        with torch.inference_mode():
            return torch_chunk(torch, *tensors, C).numpy()

    return {f"torch {torch.__version__.split('+')[0]}, chunks of {C}": partial(path, C) for C in (16, 32, 64)}


def torch_chunk(torch, q, k, v, g, C):
    """The factored chunk form with torch's batched products; T a multiple of C, gates weak over a chunk."""
    B, H, T, K = q.shape
    q, k, v, g = (x.reshape(B * H, T // C, C, -1) for x in (q, k, v, g))
    decay = torch.exp(torch.cumsum(g, dim=2))
    qg, kg = q * decay, k / decay
    A = torch.tril(qg @ kg.transpose(-1, -2))
    last = decay[:, :, -1:, :]
    added = (kg * last).transpose(-1, -2) @ v
    h = torch.zeros_like(added)
    for c in range(1, T // C):
        torch.addcmul(added[:, c - 1], last[:, c - 1].transpose(-1, -2), h[:, c - 1], out=h[:, c])
    return ((qg @ h + A @ v) * K**-0.5).reshape(B, H, T, -1)


if __name__ == "__main__":
    main()
