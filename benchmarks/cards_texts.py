"""Times many texts on all cards of a host against one: `linattn-np generate --batch-file`, from its start to its end.

    python benchmarks/cards_texts.py [--cards 2 4] [--texts 10000] [--tokens 64] [--slots 64] [--out ROWS.json]
    python benchmarks/cards_texts.py --size 24x1024 --tokens 128 --out ROWS.json

The model is the package's own, in bfloat16 on cards, or with --size, layers x width, one of bytes with random weights.
Seconds are those of the whole command, with the start of its processes; the rate is what it says itself.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path

import devices
import numpy as np
from rwkv6_synthetic import is_matrix, scaled, shapes

from linattn_np.array_kinds import BFLOAT16
from linattn_np.models.files import write_arrays

MODEL = "model.safetensors"


def write_model(path, size):
    """Random weights, all from the same numbers, matrices in bfloat16."""
    found = shapes(*map(int, size.split("x")), V=256)
    noise = np.random.default_rng(0).standard_normal(max(map(prod, found.values())), np.float32)
    weights = {}
    for name, shape in found.items():
        weight = scaled(name, noise[: prod(shape)].reshape(shape))
        weights[name] = weight.astype(BFLOAT16) if is_matrix(name, shape) else weight
    write_arrays(path, weights)


def timed(source, target, cards, options):
    """(seconds, tokens/s as the command says)."""
    command = [sys.executable, "-m", "linattn_np", "generate", "--batch-file", str(source), "--output", str(target)]
    command += ["--cards", str(cards), "--slots", str(options.slots), "--tokens", str(options.tokens)]
    if options.size:
        command += ["--model", str(source.parent / MODEL)]
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    return seconds, int(re.search(r"at (\d+) tokens/s", done.stderr)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cards", type=int, nargs="+", default=[2])
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--size", help="of a model with random weights, layers x width (default: the package's own)")
    parser.add_argument("--out", type=Path, help="a JSON file, in which rows of the same cases are replaced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, written, times = Path(folder, "in.jsonl"), {}, {}
        lines = ({"prompt": f"Emma was number {number}", "seed": number} for number in range(options.texts))
        source.write_text("\n".join(map(json.dumps, lines)))
        if options.size:
            write_model(Path(folder, MODEL), options.size)
        for cards in (1, *options.cards):
            target = Path(folder, f"{cards}.jsonl")
            times[cards] = timed(source, target, cards, options)
            written[cards] = target.read_bytes()
            print(f"{cards} cards: {times[cards][0]:.1f} s, {times[cards][1]:,} tokens/s", flush=True)
    for cards in options.cards:
        row = row_of(options, cards, times[cards], times[1], written[cards] == written[1])
        if options.out:
            devices.store(options.out, row, ("texts", "tokens_each", "slots", "ranks", "size"))


def row_of(options, cards, times, of_one, same_lines):
    (seconds, tokens_s), (one_seconds, one_tokens_s) = times, of_one
    return {
        "texts": options.texts,
        "tokens_each": options.tokens,
        "slots": options.slots,
        "size": options.size,
        "ranks": cards,
        "seconds": seconds,
        "one_seconds": one_seconds,
        "tokens_s": tokens_s,
        "one_tokens_s": one_tokens_s,
        "efficiency": one_seconds / seconds / cards,
        "same_lines": same_lines,
    }


if __name__ == "__main__":
    main()
