"""RWKV-6 or RWKV-7 on the CPU in float32, bfloat16, int8 and int4, beside the `rwkv` package and rwkv.cpp.

    python benchmarks/rwkv6_cpu.py [--version 7] [--threads 2] [--rounds 15] [--seconds 150] [--rwkv-cpp LIBRARY]
        [--out FILE]

The models are synthetic ones. The floor is every weight but the embedding once, in float32, at the speed at which one
large matrix is read, by the loops of this package: BLAS takes up to twice the time.
Everything takes turns, so that a busy machine is busy for all, and a ratio is the median of the ratios within a round.
Times are medians, the best beside them. Logits are compared before anything is timed. No round of a model begins after
`--seconds`. The `rwkv` package, which needs torch, and rwkv.cpp, which has to be built, are optional.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

MODELS = ({"L": 12, "D": 768}, {"L": 24, "D": 1024})
PREFILL = 256
PROMPTS_EVERY = 6  # rounds: a prompt takes as long as many tokens
SAMPLE = 8  # tokens decoded between two looks at the clock
A_CALL = {"decode": SAMPLE, "prefill": PREFILL}
WARM = 32  # tokens of a prompt that is not timed
DTYPES = ("float32", "bfloat16", "int8", "int4")
TYPES = ("FP32", "FP16", "Q8_0", "Q4_0", "Q5_1")  # of rwkv.cpp's models
STRATEGIES = ("cpu fp32", "cpu bf16")  # of the `rwkv` package's
BANDWIDTH_BYTES = 1 << 28  # several times any cache
REST = 0.15  # seconds in which one library's threads stop spinning and leave the cores to another's


def main():
    args = arguments()
    cpus = sorted(os.sched_getaffinity(0))[: args.threads]
    os.sched_setaffinity(0, cpus)  # before NumPy is loaded: its BLAS counts the CPUs once
    import numpy as np

    from linattn_np.command.measuring import cpu

    print(f"RWKV-{args.version}, {len(cpus)} threads, NumPy {np.__version__}; milliseconds are the median (the best)")
    about = {"version": args.version, "device": cpu(), "numpy": np.__version__, "threads": len(cpus)}
    about |= {"prefill": PREFILL, "note": args.note}
    about["kernels"] = kernels()
    print(about["kernels"])
    rows = []
    for sizes in MODELS:
        rows.append(measure(np, sizes, len(cpus), args))
        if args.out:
            Path(args.out).write_text(json.dumps({**about, "rows": rows}, indent=1))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", type=int, default=6, choices=(6, 7), help="of RWKV")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of each model's rounds")
    parser.add_argument("--rwkv-cpp", metavar="LIBRARY", help="its librwkv.so, to be measured too")
    parser.add_argument("--note", default="", help="a sentence for the table: what was unusual while this was measured")
    parser.add_argument("--out", help="a JSON file for the same figures, as benchmarks/results has them")
    return parser.parse_args()


def kernels():
    """Whose instructions run: environment variables such as OPENBLAS_CORETYPE can hide those of the CPU."""
    from threadpoolctl import threadpool_info

    found = [
        f"NumPy's {its['internal_api']} {its['architecture']}" for its in threadpool_info() if "architecture" in its
    ]
    try:
        import torch
    except ImportError:
        return ", ".join(found)
    return ", ".join([*found, f"torch's {torch.backends.cpu.get_cpu_capability()}"])


def measure(np, sizes, threads, args):
    from linattn_np.models.versions import VERSIONS

    weights = synthetic(np, sizes, args.version)
    weight_bytes = sum(x.nbytes for name, x in weights.items() if name != "emb.weight")
    models = {dtype: VERSIONS[args.version](weights, dtype=dtype) for dtype in DTYPES}
    model, peers = models["float32"], rwkv_package(weights, threads, args.version)
    if args.rwkv_cpp:
        import rwkv_cpp

        in_cpp = rwkv_cpp.models(args.rwkv_cpp, weights, threads, TYPES)
        peers |= {f"rwkv.cpp {type}": model for type, model in in_cpp.items()}
    del weights
    tokens = np.random.default_rng(1).integers(0, model.sizes["V"], PREFILL).tolist()
    print(f"\n{sizes['L']} x {sizes['D']}, {weight_bytes / 1e6:.0f} MB of weights a token in float32")
    for name in ("rwkv cpu fp32", "rwkv.cpp FP32"):
        if name in peers:
            found = difference(np, model, tokens[:70], peers[name].prompt, peers[name].step)
            print(f"{name}: logits differ by {found:.1e} of their size")

    def calls_of(step, prompt):
        """(what warms up, what is timed) by what is timed."""
        decode = decoding(step, tokens)
        return {"decode": (decode, decode), "prefill": (lambda: prompt(tokens[:WARM]), lambda: prompt(tokens))}

    calls = {"floor": {"decode": (reading(np),) * 2}}
    calls |= {
        dtype: calls_of(
            lambda token, state, model=model: model.forward([[token]], state, last=True),
            lambda tokens, model=model: model.forward([tokens], last=True),
        )
        for dtype, model in models.items()
    }
    calls |= {name: calls_of(peer.step, peer.prompt) for name, peer in peers.items()}
    calls = {(name, what): pair for name, both in calls.items() for what, pair in both.items()}
    times = interleaved(calls, args.rounds, args.seconds)
    seconds = {
        key: [t / (BANDWIDTH_BYTES / weight_bytes if key[0] == "floor" else A_CALL[key[1]]) for t in samples]
        for key, samples in times.items()
    }
    row = {**sizes, "weight_bytes": weight_bytes, "results": {}}
    for (name, what), samples in seconds.items():
        median, best = statistics.median(samples), min(samples)
        its = row["results"].setdefault(name, {})
        base = seconds["float32", what]
        its[what] = {
            "ms": median * 1e3,
            "best_ms": best * 1e3,
            "tokens_per_s": 1 / median,
            "times_float32": statistics.median(a / b for a, b in zip(base, samples)),
        }
        print(
            f"{name + ' ' + what:24s}{median * 1e3:8.3f} ({best * 1e3:.3f}) ms a token {1 / median:9.1f} tokens/s, "
            f"{its[what]['times_float32']:.2f} times float32's"
        )
    for name, one in {**models, **peers}.items():
        if not name.startswith("rwkv cpu"):
            row["results"][name]["bytes"] = memory(one)
    return row


def memory(model):
    """Bytes of the weights; rwkv.cpp's are those of its file."""
    layers = getattr(model, "layers", None)
    if layers is None:
        return model.bytes
    if hasattr(layers, "nbytes"):
        return layers.nbytes
    arrays = [*vars(layers.model_weights).values(), *(x for layer in layers.layers for x in vars(layer).values())]
    return sum(array.nbytes for array in arrays)


def synthetic(np, sizes, version):
    from rwkv6_synthetic import scaled, shapes

    rng = np.random.default_rng(0)
    named = shapes(**sizes, version=version)
    return {name: scaled(name, rng.standard_normal(shape, np.float32)) for name, shape in named.items()}


def rwkv_package(weights, threads, version):
    """The same model in the `rwkv` package, by strategy."""
    os.environ["RWKV_V7_ON"] = str(int(version == 7))  # which the package reads when it is imported
    try:
        import torch
        from rwkv import model as package
    except ImportError as error:
        print(f"the rwkv package is not measured: {error}")
        return {}
    torch.set_num_threads(threads)

    def peer(strategy, path):
        model = package.RWKV(path, strategy, **({} if version == 7 else {"verbose": False}))
        dtype = getattr(package, "DTYPE", None)  # of new states of RWKV-7: the dtype of the model that was loaded last

        def forward(tokens, state):
            package.DTYPE = dtype
            return model.forward(tokens, state)

        return SimpleNamespace(
            step=lambda token, state: forward([token], state), prompt=lambda tokens: forward(tokens, None)
        )

    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: torch.from_numpy(x) for name, x in weights.items()}, f"{folder}/model.pth")
        return {f"rwkv {strategy}": peer(strategy, f"{folder}/model") for strategy in STRATEGIES}


def difference(np, model, tokens, prompt, step):
    """Largest difference between logits over the largest logit: a prefill, then a token."""
    logits, state = model.forward([tokens[:-1]], last=True)
    peer_logits, peer_state = prompt(tokens[:-1])
    found, wanted = [logits[0]], [np.asarray(peer_logits)]
    found.append(model.forward([tokens[-1:]], state, last=True)[0][0])
    wanted.append(np.asarray(step(tokens[-1], peer_state)[0]))
    relative = float(np.abs(np.subtract(found, wanted)).max() / np.abs(wanted).max())
    assert relative < 5e-5, f"the logits differ by {relative:.1e} of their size"
    return relative


def reading(np):
    """One pass over memory: a product of a matrix that no cache holds."""
    from linattn_np.models.helper_threads import Board
    from linattn_np.models.matrices import pack

    matrix = pack(np.ones((BANDWIDTH_BYTES >> 12, 1 << 10), np.float32), "float32")
    x, board = np.ones((1, 1 << 10), np.float32), Board()
    return lambda: matrix(x, board)


def decoding(step, tokens):
    """A call that decodes the next SAMPLE tokens; `step` is (token, state) -> (logits, state)."""
    tokens, state = iter(tokens * 100), None

    def call():
        nonlocal state
        for _ in range(SAMPLE):
            _, state = step(next(tokens), state)

    return call


def interleaved(calls, rounds, seconds):
    """Seconds of every call in every round, prompts in some, each after what warms it up."""
    from linattn_np.command.measuring import Cpu

    times, begun, clock = {name: [] for name in calls}, time.perf_counter(), Cpu()
    for n in range(rounds):
        if n and time.perf_counter() - begun > seconds:
            break
        for name, (warm, call) in calls.items():
            if n % PROMPTS_EVERY and name[1] == "prefill":
                continue
            time.sleep(REST)
            warm()
            times[name].append(clock.ms(call) / 1e3)
    return times


if __name__ == "__main__":
    main()
