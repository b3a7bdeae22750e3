"""Writes an RWKV-6 checkpoint with its matrices in fewer bits, and what that costs on a text. No torch.

    python examples/quantise.py --dtype int4 --out small.safetensors --text novel.txt
    python examples/rwkv6_decode.py --model small.safetensors --prompt "Emma was"

The loss is in nats a token, before and after, over the first --tokens of the text; rwkv6_decode.py and RWKV6.from_file
read the file on the CPU as it is, and on CUDA widened.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from rwkv6_decode import MODEL, Parser, bar, say, status, tokenizer_of, whole

from linattn_np.models import RWKV6, checkpoint
from linattn_np.models.files import check_writable, same_file, write_arrays

PIECE = 512             # tokens that are read at a time


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=MODEL, help="a checkpoint as rwkv6_decode.py takes it (default: Austen's, in data/)")
    add("--dtype", choices=("bfloat16", "int8", "int4"), required=True, help="of the large matrices: int8 has a scale "
        "for every row, int4 one for 32 neighbours. The embedding and the matrices of low rank become bfloat16")
    add("--out", required=True, metavar="FILE", help="a .safetensors file")
    add("--text", required=True, metavar="FILE", help="what the loss is measured on")
    add("--tokens", type=whole(2), default=4096, help="of the text (default: %(default)s)")
    add("--tokenizer", choices=("auto", "bytes", "world"), default="auto",
        help="auto: bytes for a vocabulary of 256, world for 65536 (default)")
    add("--vocab", metavar="PATH", help="World's vocabulary file")
    options = parser.parse_args()
    try:
        quantise(options)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except MemoryError as error:
        parser.error(f"out of memory: {error}")


def quantise(options):
    if not options.out.endswith(".safetensors"):
        raise ValueError(f"argument --out: is {options.out}, expected the ending .safetensors")
    for name in ("model", "text"):
        if same_file(options.out, checkpoint.located(getattr(options, name))):
            raise ValueError(f"argument --out: is the file of --{name}, which would be lost")
    check_writable(options.out)
    weights = checkpoint.read(options.model)
    model = RWKV6(weights)
    tokens = tokenizer_of(options, model).encode(Path(options.text).read_bytes())[:options.tokens]
    if len(tokens) < 2:
        raise ValueError(f"argument --text: has {len(tokens)} tokens, expected at least 2")
    before = loss(model, tokens, "before")
    with status("rounding ..."):
        write_arrays(options.out, RWKV6.quantise(weights, options.dtype))
    after = loss(RWKV6.from_file(options.out), tokens, "after")
    size, old = os.path.getsize(options.out), sum(array.nbytes for array in weights.values())
    say(f"loss before {before:.4f}, after {after:.4f} ({after / before - 1:+.2%}) on {len(tokens)} tokens")
    say(f"wrote {options.out}, {size / 1e6:,.1f} MB of {old / 1e6:,.1f}")


def loss(model, tokens, when) -> float:
    """Nats a token, the first not counted."""
    state, total = None, 0.0
    with status(f"reading {when} ...") as show:
        for start in range(0, len(tokens) - 1, PIECE):
            show(f"reading {when} {bar(start / len(tokens))}")
            part = tokens[start:start + PIECE + 1]
            logits, state = model.forward([part[:-1]], state)
            logits = logits[0].astype(np.float64)
            logits -= logits.max(-1, keepdims=True)
            total += (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), part[1:]]).sum()
    return total / (len(tokens) - 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
