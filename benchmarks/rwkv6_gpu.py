"""RWKV-6 on the GPU: decode beside the time its weights and states take, prefill, memory, and two peers; or RWKV-7.

    python benchmarks/rwkv6_gpu.py [--version 7] [--batch 1 8 64 256] [--runs 50] [--peers rwkv fla]
                                   [--keep-peers FILE] [--out FILE]

The model is a synthetic one of 1.6 billion parameters in bfloat16. A smaller twin is first computed by NumPy in
float32 too, and must agree. The floor of a step is every byte of the weights and of the logits once, and of the states
twice, over the copy bandwidth of the same run; times are between GPU events, medians, a step's of `--runs` samples of
ten, which begin at the card's full clock (see devices.py; `mhz` is the clock as they end). Memory is what the libraries
had taken from the device at most. On Hopper there are rows of matrices in int8 (for as many sequences as have kernels
of their own), and of a recurrent state in bfloat16, too.

The peers have the same weights, and need torch: the `rwkv` package (one sequence; its own CUDA kernels where it can
build them) and flash-linear-attention's model. One that is absent, or fails, is left out with the reason; one
that an earlier file of the same card has is taken from there, with the day on which it was measured.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
from functools import cache, partial
from pathlib import Path

import cupy
import devices
import ml_dtypes
import numpy as np
import peers
import run
from rwkv6_synthetic import RANKS, is_matrix, scaled, shapes

from linattn_np.backends.cupy.model_products import BatchProduct
from linattn_np.models.versions import VERSIONS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGE, TWIN = {"L": 24, "D": 2048}, {"L": 3, "D": 512, "V": 1024}
STEPS = 10  # a sample of decoding
ENQUEUED = 500_000  # nanoseconds in which the host has enqueued as many graphs
PREFILL = 2048
PROMPTS = [512], [PREFILL], [8192], np.random.default_rng(2).integers(16, 96, 64).tolist()
PROMPT = list(range(1000, 1040))  # whose last logits are compared
FLA_RANKS = {"decay": "W", "a": "A", "v": "Q", "gate": "G"}  # of RWKV-7: fla's names, those of rwkv6_synthetic


def synthetic(sizes, version):
    """Host weights, the matrices in bfloat16; equal names have equal values."""
    noise = cupy.asarray(np.random.default_rng(0).standard_normal(1_000_003, np.float32))

    def parameter(name, shape):
        values = cupy.resize(cupy.roll(noise, sum(name.encode()) * 7919), int(np.prod(shape))).reshape(shape)
        values = scaled(name, values)
        return cupy.asnumpy(values.astype(BFLOAT16) if is_matrix(name, shape) else values)

    return {name: parameter(name, shape) for name, shape in shapes(**sizes, version=version).items()}


def main():
    args = arguments()
    card = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    bandwidth = run.copy_bandwidth(gpu())
    print(f"{card}, CuPy {cupy.__version__}, copy {bandwidth / 1e12:.2f} TB/s")
    twins = [check_twin(batch, args.version) for batch in args.batch]
    weights, kind = synthetic(LARGE, args.version), VERSIONS[args.version]
    exact = kind(weights, "cuda", np.float32).forward([PROMPT], last=True)[0].get()[0]
    result = {
        "device": card,
        "date": run.today(),
        "commit": args.commit or run.commit(),
        "cupy": cupy.__version__,
        "copy_tb_per_s": bandwidth / 1e12,
        "model": LARGE,
        "version": args.version,
        "dtype": "bfloat16",
        **measure(weights, exact, args, bandwidth, twins),
        "others": others(weights, args, bandwidth),
        "peers": {},
    }
    store(result, args.out)  # before the peers, and after each: a run that is cut short leaves what it has
    kept = kept_peers(args.keep_peers, card)
    for name in args.peers:
        if its := {peer: found for peer, found in kept.items() if peer.split()[0] == name}:
            result["peers"] |= its
            continue
        free()
        try:
            for peer, found in PEERS[name](weights, exact, args):
                result["peers"][peer] = found | {"date": run.today()}
                show(peer, found)
                store(result, args.out)
        except Exception as error:  # whatever a peer fails with: ours are measured, and the reason is said
            result["peers"][name] = {"skipped": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}
            print(f"{name} is not measured: {result['peers'][name]['skipped']}")
        store(result, args.out)
    store(result, args.out)


def store(result, path):
    """Writes the file, if one is asked for."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", type=int, choices=VERSIONS, default=6, help="of RWKV (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--keep-peers", type=Path, metavar="FILE", help="an earlier file, whose peers to use")
    parser.add_argument("--out", type=Path, help="a JSON file for the same figures, as benchmarks/results has them")
    parser.add_argument("--commit", help="what to say of the sources where git cannot")
    return parser.parse_args()


def kept_peers(path, card) -> dict:
    """Those that an earlier file of the same card has measured."""
    earlier = json.loads(path.read_text()) if path else {"peers": {}}
    if path and earlier["device"] != card:
        print(f"{path} is of another card: not used")
        return {}
    return {peer: found for peer, found in earlier["peers"].items() if "skipped" not in found}


# -- ours -------------------------------------------------------------------------------------------------------------
def check_twin(batch, version, steps=4):
    """Relative error of the twin's logits, a prompt and then steps, against the float32 NumPy model."""
    weights, kind = synthetic(TWIN, version), VERSIONS[version]
    model, wanted_by = kind(weights, "cuda", BFLOAT16), kind(weights)
    tokens = np.random.default_rng(1).integers(0, TWIN["V"], (batch, steps))
    state, wanted_state, errors = model.initial_state(batch), wanted_by.initial_state(batch), []
    for t in range(steps):
        found, _ = model.forward(tokens[:, t : t + 1], state)
        wanted, _ = wanted_by.forward(tokens[:, t : t + 1], wanted_state)
        errors.append(relative_error(found.get(), wanted))
    limit = 1e-4 if batch <= 8 else 5e-2
    assert max(errors) < limit, f"batch {batch}: relative errors {errors}, expected below {limit}"
    prompt = tokens.reshape(1, -1)
    errors.append(relative_error(model.forward(prompt)[0].get(), wanted_by.forward(prompt)[0]))
    assert errors[-1] < 5e-2, f"a prompt's relative error is {errors[-1]}"
    return max(errors)


def relative_error(found, wanted):
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def measure(weights, exact, args, bandwidth, twins):
    pool = cupy.get_default_memory_pool()
    free()  # what making the weights took
    model = VERSIONS[args.version](weights, "cuda", BFLOAT16)
    free()
    decoder = model.layers.steps_of(1).decoder
    print("matrices    state batch  ms/token  tokens/s weights GB  states GB  floor ms  ratio  eager ms  memory GB")
    rows = [row(decoder.resized(batch), args, bandwidth) for batch in args.batch]
    for found, error in zip(rows, twins):
        found["twin_error"] = error
    free()
    state, token = model.initial_state(), [[1]]
    forward_ms = median_ms(lambda: [model.forward(token, state, last=True) for _ in range(STEPS)], args.runs) / STEPS
    print(f"{type(model).__name__}.forward of a token, the token from the host: {forward_ms:.3f} ms")
    free()
    prompts = []
    for lengths in PROMPTS:
        prompts.append(prompt(model, lengths, args.runs // 5) | {"memory_gb": pool.total_bytes() / 1e9})
        print(
            "{prompts} prompts of {tokens} tokens: {ms:.2f} ms ({least:.2f} to {most:.2f}), {tokens_per_s:.0f} "
            "tokens/s, {memory_gb:.2f} GB".format(**prompts[-1])
        )
        free()
    prefill = next(row for row in prompts if (row["prompts"], row["tokens"]) == (1, PREFILL))
    error = relative_error(model.forward([PROMPT], last=True)[0].get()[0], exact)
    print(f"relative error of the logits after {len(PROMPT)} tokens, against float32: {error:.1e}", flush=True)
    return {
        "rows": rows,
        "forward_ms": forward_ms,
        "prefill": prefill,
        "prompts": prompts,
        "error": error,
    }


def others(weights, args, bandwidth) -> list:
    """Rows of states in bfloat16, and of matrices in int8."""
    if cupy.cuda.Device().compute_capability != "90":
        return []
    rows = []
    for kept_in, batches in (
        ({"dtype": BFLOAT16, "state_dtype": BFLOAT16}, [batch for batch in args.batch if batch > 8]),
        ({"dtype": np.int8}, [batch for batch in args.batch if batch <= BatchProduct.MOST]),
    ):
        decoder = VERSIONS[args.version](weights, "cuda", **kept_in).layers.decoder
        free()
        rows += [row(decoder.resized(batch), args, bandwidth) for batch in batches]
        del decoder
        free()
    return rows


def prompt(model, lengths, runs):
    """Packed prompts of these lengths."""
    bounds = np.cumsum([0, *lengths])
    tokens = np.random.default_rng(1).integers(0, model.sizes["V"], (1, bounds[-1]))
    sample = sampling(lambda: model.forward(tokens, cu_seqlens=bounds, last=True))
    times = [sample()[0] for _ in range(runs)]
    ms = statistics.median(times)
    return {
        "prompts": len(lengths),
        "tokens": int(bounds[-1]),
        "ms": ms,
        "least": min(times),
        "most": max(times),
        "tokens_per_s": bounds[-1] / ms * 1e3,
    }


def row(decoder, args, bandwidth):
    """Figures of a step, printed."""
    found = {
        "matrices": str(decoder.matrix_dtype),
        "state": str(decoder.state_dtype),
        "batch": decoder.batch,
        **decode(decoder, args.runs, bandwidth),
    }
    print(
        "{matrices:8s} {state:>8s} {batch:5d} {ms:9.3f} {tokens_per_s:9.0f} {weight_gb:10.3f} {state_gb:10.3f}"
        " {floor_ms:9.3f} {ratio:6.2f} {eager_ms:9.3f} {memory_gb:10.2f}".format(**found),
        flush=True,
    )
    free()
    return found


def decode(decoder, runs, bandwidth):
    batch = decoder.batch
    tokens, state = cupy.zeros(batch, np.int64), decoder.initial_state()
    eager_ms = median_ms(lambda: decoder.step(tokens, state), 10)
    decoder.capture(tokens, state)
    ms, mhz = devices.medians(sampling(lambda: [decoder.replay() for _ in range(STEPS)], ENQUEUED), runs)
    ms /= STEPS
    assert cupy.isfinite(decoder.logits).all()
    state_bytes = 2 * sum(array.nbytes for array in state.arrays)
    floor_ms = (decoder.weight_bytes + state_bytes + decoder.logits.nbytes) / bandwidth * 1e3
    return {
        "ms": ms,
        "mhz": mhz,
        "tokens_per_s": batch / ms * 1e3,
        "weight_gb": decoder.weight_bytes / 1e9,
        "state_gb": state_bytes / 1e9,
        "floor_ms": floor_ms,
        "ratio": ms / floor_ms,
        "eager_ms": eager_ms,
        "memory_gb": cupy.get_default_memory_pool().total_bytes() / 1e9,
    }


# -- the peers --------------------------------------------------------------------------------------------------------
def rwkv_package(weights, exact, args):
    """The `rwkv` package, by strategy."""
    os.environ["RWKV_CUDA_ON"], os.environ["RWKV_V7_ON"] = "1", str(int(args.version == 7))  # read at import
    try:
        from rwkv.model import RWKV
    except ImportError:
        raise
    except Exception as error:  # its kernels want nvcc, ninja and a compiler
        print(f"the rwkv package runs without its CUDA kernels: {str(error).splitlines()[0]}")
        os.environ["RWKV_CUDA_ON"] = "0"
        from rwkv.model import RWKV
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: to_torch(array) for name, array in weights.items()}, f"{folder}/model.pth")
        for strategy in ("cuda fp16", "cuda bf16"):
            free()
            torch.cuda.reset_peak_memory_stats()
            model, state = RWKV(f"{folder}/model", strategy, **({} if args.version == 7 else {"verbose": False})), None

            def step():
                nonlocal state
                _, state = model.forward([1], state)

            error = relative_error(model.forward(PROMPT, None)[0].float().cpu().numpy(), exact)
            rows = [{"batch": 1, **timed(step, STEPS, args.runs)}]
            prefill = timed(lambda: model.forward([1] * PREFILL, None), 1, args.runs)
            yield (
                f"rwkv {strategy}",
                {
                    "version": version("rwkv"),
                    "own_kernels": os.environ["RWKV_CUDA_ON"] == "1",
                    "error": error,
                    "rows": rows,
                    "prefill": prefill,
                },
            )
            del model, state, step


def fla_of(weights, version, device):
    """flash-linear-attention's model with these weights, in bfloat16."""
    import torch
    from fla import models

    L = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    V, D = weights["emb.weight"].shape
    only = {
        6: {"num_heads": D // 64, "expand_k": 1.0, "expand_v": 1.0},
        7: {f"{rank}_low_rank_dim": RANKS[7][axis] for rank, axis in FLA_RANKS.items()},
    }[version]
    config = getattr(models, f"RWKV{version}Config")(
        hidden_size=D,
        num_hidden_layers=L,
        vocab_size=V,
        intermediate_size=len(weights["blocks.0.ffn.key.weight"]),
        fuse_cross_entropy=False,
        **only,
    )
    with torch.device("meta"):  # without values, whose initial ones take minutes
        model = getattr(models, f"RWKV{version}ForCausalLM")(config).eval()
    wanted = model.state_dict()
    named = fla_weights(weights, L) if version == 6 else fla_weights_of_7(weights)
    on_device = {name: to_torch(array).to(device, torch.bfloat16) for name, array in named.items()}
    model.load_state_dict({name: x.reshape(wanted[name].shape) for name, x in on_device.items()}, assign=True)
    for layer in model.model.layers:
        layer.attn.g_norm.eps = 64e-5  # RWKV-6's config has one eps for all norms
    return model


def fla_model(weights, exact, args):
    """fla's model, by batch."""
    import torch

    peers.tune_over(peers.MOST)
    model = fla_of(weights, args.version, "cuda")
    free()
    torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        prompt = torch.tensor([PROMPT], device="cuda")
        error = relative_error(model(prompt).logits[0, -1].float().cpu().numpy(), exact)
        rows = []
        for batch in args.batch:
            tokens, cache = torch.ones(batch, 1, dtype=torch.int64, device="cuda"), None

            def step():
                nonlocal cache
                cache = model(tokens, past_key_values=cache, use_cache=True).past_key_values

            rows.append({"batch": batch, **timed(step, STEPS, args.runs)})
        prompt = torch.ones(1, PREFILL, dtype=torch.int64, device="cuda")
        prefill = timed(lambda: model(prompt, use_cache=True, logits_to_keep=1), 1, args.runs)
    about = {"version": version("flash-linear-attention"), "tuned_over": peers.MOST, "error": error}
    yield "fla", about | {"rows": rows, "prefill": prefill}


PEERS = {"rwkv": rwkv_package, "fla": fla_model}


def timed(call, calls, runs):
    """Milliseconds of a call, of so many in a sample, and the memory that torch took at most."""
    import torch

    ms = median_ms(lambda: [call() for _ in range(calls)], max(runs // 5, 1)) / calls
    return {"ms": ms, "memory_gb": torch.cuda.max_memory_reserved() / 1e9}


def show(name, found):
    for row in (*found["rows"], {"batch": PREFILL, **found["prefill"]}):
        print(
            "{}: {batch:5d} tokens {ms:9.3f} ms {rate:9.0f} tokens/s {memory_gb:6.2f} GB".format(
                name, rate=row["batch"] / row["ms"] * 1e3, **row
            )
        )
    print(f"{name}: relative error of the logits {found['error']:.1e}", flush=True)


def fla_weights_of_7(weights):
    """RWKV-7's `weights` under fla's names, without axes of 1."""
    from linattn_np.models.rwkv.names import fla_naming, transposed
    from linattn_np.models.rwkv7.names import fla_block_naming

    naming, found = fla_naming(partial(fla_block_naming, weights)), {}
    for name, array in weights.items():
        its_name, make = naming(name)
        found[its_name] = array.T if make is transposed else np.squeeze(array)
    return found


def fla_weights(weights, L):
    """RWKV-6's `weights` under fla's names: mixes in the order r w k v g, LoRAs as Linear layers have them."""
    from linattn_np.models.rwkv6.names import FLA_ORDER, NAMINGS

    plain = {name: array for name, array in weights.items() if ".att.time_" not in name}
    found = {NAMINGS["model.layers."](name)[0]: np.squeeze(array) for name, array in plain.items()}
    for i in range(L):
        its, att = (
            f"model.layers.{i}.attn.",
            {
                name: weights[f"blocks.{i}.att.time_{name}"]
                for name in (
                    "maa_x",
                    *(f"maa_{mix}" for mix in FLA_ORDER),
                    "maa_w1",
                    "maa_w2",
                    "decay",
                    "decay_w1",
                    "decay_w2",
                    "faaaa",
                )
            },
        )
        order = ["wkvrg".index(mix) for mix in FLA_ORDER]
        D, ranks = att["maa_w1"].shape
        found |= {
            f"{its}x_proj.0.mu": att["maa_x"].ravel(),
            f"{its}bonus": att["faaaa"],
            f"{its}x_bias": np.stack([att[f"maa_{mix}"].ravel() for mix in FLA_ORDER]),
            f"{its}x_proj.0.linear.weight": att["maa_w1"].T.reshape(5, -1, D)[order].reshape(ranks, D),
            f"{its}x_proj.2.weight": att["maa_w2"][order].transpose(2, 0, 1).reshape(D, ranks),
            f"{its}w_proj.linear.lora.2.bias": att["decay"].ravel(),
            f"{its}w_proj.linear.lora.0.weight": att["decay_w1"].T,
            f"{its}w_proj.linear.lora.2.weight": att["decay_w2"].T,
        }
    return found


def to_torch(array):
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def version(package):
    from importlib.metadata import version as installed

    return installed(package)


# -- measuring --------------------------------------------------------------------------------------------------------
def free():
    """Gives the device what no array holds: the next figure of memory is its own."""
    gc.collect()
    gpu().free()


def median_ms(call, runs):
    return devices.medians(sampling(call), runs)[0]


def sampling(call, held=0):
    """A function that gives milliseconds of a call between GPU events, and the clock then; three calls do not count.
    The GPU is `held` for so many nanoseconds before, in which the host enqueues."""
    for _ in range(3):
        call()

    return lambda: gpu().ms_and_clock(call, held)


@cache
def gpu():
    return devices.Gpu()


if __name__ == "__main__":
    main()
