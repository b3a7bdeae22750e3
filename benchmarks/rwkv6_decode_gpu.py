"""Decoding with RWKV-6 on the GPU, captured in a CUDA graph, beside the time its weights and states take.

    python benchmarks/rwkv6_decode_gpu.py [--batch 1 8 64 256] [--runs 50] [--out FILE]

The model is a synthetic one of 1.6 billion parameters in bfloat16. A smaller twin is first decoded by NumPy
in float32 too, and must agree. The floor is every byte of the weights once, and of the states twice, over the
copy bandwidth of the same run; times are between GPU events, the median of `--runs` samples of ten tokens.
"""

import argparse
import json
import statistics
from collections.abc import Mapping

import cupy
import ml_dtypes
import numpy as np

from linattn_np.models import RWKV6
from linattn_np.models.names import BLOCK, EMBEDDING, HEAD
from linattn_np.models.rwkv6_cuda import CudaDecoder

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGE = {"L": 24, "D": 2048, "H": 32, "N": 64, "F": 7168, "A": 32, "W": 64, "V": 65536}
TWIN = {"L": 3, "D": 512, "H": 8, "N": 64, "F": 1792, "A": 32, "W": 64, "V": 1024}
TOKENS = 10             # a sample


class Synthetic(Mapping):
    """Random weights on the device, each made when it is asked for; equal names have equal values."""

    def __init__(self, sizes):
        blocks = {f"blocks.{i}.{name}": axes for i in range(sizes["L"]) for name, axes in BLOCK.items()}
        self.axes = {**EMBEDDING, **blocks, **HEAD}
        self.sizes = {**sizes, "1": 1, "5": 5, "5A": 5 * sizes["A"]}
        self.noise = cupy.asarray(np.random.default_rng(0).standard_normal(1_000_003, np.float32))

    def __getitem__(self, name):
        shape = [self.sizes[axis] for axis in self.axes[name].split()]
        count = int(np.prod(shape))
        values = cupy.resize(cupy.roll(self.noise, sum(name.encode()) * 7919), count).reshape(shape)
        lora, linear = name[-2:] in ("w1", "w2"), name.endswith(".weight") and len(shape) == 2
        if not (lora or linear):
            return 0.5 * values
        return (values * shape[-2 if lora else -1] ** -0.5).astype(BFLOAT16)

    def __iter__(self):
        return iter(self.axes)

    def __len__(self):
        return len(self.axes)


def main():
    args = arguments()
    bandwidth = copy_bandwidth()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    name = properties["name"].decode()
    print(f"{name}, CuPy {cupy.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    twin = [check_twin(batch) for batch in args.batch]
    print("batch  ms/token  tokens/s weights GB  states GB  floor ms  ratio  eager ms  memory GB twin error")
    rows = []
    for batch, error in zip(args.batch, twin):
        row = {"batch": batch, **measure(batch, args.runs, bandwidth), "twin_error": error}
        rows.append(row)
        print("{batch:5d} {ms:9.3f} {tokens_per_s:9.0f} {weight_gb:10.3f} {state_gb:10.3f} {floor_ms:9.3f}"
              " {ratio:6.2f} {eager_ms:9.3f} {memory_gb:10.2f} {twin_error:10.1e}".format(**row), flush=True)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": name, "cupy": cupy.__version__, "copy_tb_per_s": bandwidth / 1e12,
                       "model": LARGE, "dtype": "bfloat16", "rows": rows}, file, indent=1)


def arguments():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--batch", type=int, nargs="+", default=(1, 8, 64, 256))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--out", help="a JSON file for the same figures")
    return parser.parse_args()


def copy_bandwidth():
    """Bytes read and written a second."""
    source = cupy.ones(1 << 30, np.uint8)
    target = cupy.empty_like(source)
    ms = median_ms(lambda: cupy.copyto(target, source), 20)
    return 2 * source.nbytes / ms * 1e3


def check_twin(batch, steps=4):
    """Relative error of the twin's logits, from a captured graph, against the float32 NumPy model."""
    weights = Synthetic(TWIN)
    model = RWKV6({name: cupy.asnumpy(array).astype(np.float32) for name, array in weights.items()})
    decoder = CudaDecoder(weights, BFLOAT16, batch)
    ids = np.random.default_rng(1).integers(0, TWIN["V"], (batch, steps))
    tokens, state, wanted_state = cupy.empty(batch, np.int64), decoder.initial_state(), None
    tokens.fill(0)
    decoder.capture(tokens, state)
    errors = []
    for t in range(steps):
        tokens.set(ids[:, t])
        found = decoder.replay().get()
        wanted, wanted_state = model.forward(ids[:, t:t + 1], wanted_state)
        errors.append(np.sqrt(np.mean((found - wanted[:, 0]) ** 2) / np.mean(wanted ** 2)))
    limit = 1e-4 if decoder.few else 5e-2
    assert max(errors) < limit, f"batch {batch}: relative errors {errors}, expected below {limit}"
    return float(max(errors))


def measure(batch, runs, bandwidth):
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    decoder = CudaDecoder(Synthetic(LARGE), BFLOAT16, batch)
    pool.free_all_blocks()                      # what making the weights took
    tokens, state = cupy.zeros(batch, np.int64), decoder.initial_state()
    eager_ms = median_ms(lambda: decoder.step(tokens, state, greedy=True), 10)
    decoder.capture(tokens, state, greedy=True)
    ms = median_ms(lambda: [decoder.replay() for _ in range(TOKENS)], runs) / TOKENS
    assert cupy.isfinite(decoder.logits).all()
    state_bytes = 2 * sum(array.nbytes for array in vars(state).values())
    floor_ms = (decoder.weight_bytes + state_bytes) / bandwidth * 1e3
    return {"ms": ms, "tokens_per_s": batch / ms * 1e3, "weight_gb": decoder.weight_bytes / 1e9,
            "state_gb": state_bytes / 1e9, "floor_ms": floor_ms, "ratio": ms / floor_ms, "eager_ms": eager_ms,
            "memory_gb": pool.total_bytes() / 1e9}


def median_ms(call, runs):
    """Median GPU milliseconds of a call, after three that do not count."""
    for _ in range(3):
        call()
    times = []
    for _ in range(runs):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop))
    return statistics.median(times)


if __name__ == "__main__":
    main()
