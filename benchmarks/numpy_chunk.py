"""The chunked NumPy path against recurrent loops, and against the same algorithm in torch on the CPU.

    python benchmarks/numpy_chunk.py [--shape B H T D] [--threads N] [--runs N]

Two loops: the equation a head at a time, as the README opens with it, and `mode="recurrent"`, which takes all heads at
once. Every path gets the same N threads, is checked against the float64 recurrence, and is timed after a warm-up; the
figure is the median, the range stands beside it. torch is optional, and takes the chunk size that suits it best.
"""

import argparse
import os
import statistics
import time


def main():
    args = arguments()
    cpus = sorted(os.sched_getaffinity(0))[:args.threads]
    os.sched_setaffinity(0, cpus)               # before NumPy is loaded: its BLAS counts the CPUs once
    import numpy as np

    import linattn_np

    rng = np.random.default_rng(0)
    q, k, v, gate = rng.standard_normal((4, *args.shape), dtype=np.float32)
    g = -np.logaddexp(0, -gate)                 # logsigmoid
    reference = linattn_np.gla(*(x[:, :, :args.checked].astype(np.float64) for x in (q, k, v, g)), mode="recurrent")

    def check(o):
        error = np.sqrt(np.mean((o[:, :, :args.checked] - reference) ** 2) / np.mean(reference ** 2))
        assert error < 2e-5, f"relative error {error:.1e}"

    def plain_loop():
        return np.stack([[one_head(np, *head) for head in zip(*row)] for row in zip(q, k, v, g)])

    print(f"gla forward, B,H,T,D = {args.shape}, float32, {len(cpus)} threads, NumPy {np.__version__}")
    loop = measure("loop, a head at a time", plain_loop, check, min(args.runs, 3))
    recurrent = measure("recurrent, all heads", lambda: linattn_np.gla(q, k, v, g, mode="recurrent"), check, args.runs)
    chunk = measure("chunk", lambda: linattn_np.gla(q, k, v, g), check, args.runs)
    print(f"chunk is {loop / chunk:.1f} times as fast as the loop, {recurrent / chunk:.1f} times as recurrent")
    peer = measure_torch((q, k, v, g), check, args.runs, len(cpus))
    if peer is not None:
        print(f"chunk is {peer / chunk:.1f} times as fast as torch")


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
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--checked", type=int, default=512, help="tokens compared with the reference")
    return parser.parse_args()


def measure(name, call, check, runs):
    """Median milliseconds of `runs` calls, after one that is checked and one more to warm up."""
    check(call())
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    print(f"{name:24s} {statistics.median(times):8.2f} ms   ({min(times):.2f} - {max(times):.2f})")
    return statistics.median(times)


def measure_torch(arrays, check, runs, threads):
    try:
        import torch
    except ImportError:
        print("torch is absent: not compared")
        return None
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(x) for x in arrays]
    print(f"torch {torch.__version__}")
    with torch.inference_mode():
        return min(measure(f"torch, chunks of {C}", lambda: torch_chunk(torch, *tensors, C).numpy(), check, runs)
                   for C in (16, 32, 64))


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
