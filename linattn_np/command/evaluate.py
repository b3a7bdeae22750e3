"""Prints the loss and the perplexity of a model on a text.

    linattn-np evaluate model.pth novel.txt
    linattn-np evaluate model.pth novel.txt --adapter mine/adapter.safetensors --dtype int8

The loss is in nats per token, without the first token, and in bits per byte. The text is one sequence.
"""

from math import exp, inf, isfinite, log
from pathlib import Path
from sys import float_info

import numpy as np

from ..models import corpus
from ..models.prompt_reading import PIECE
from .blas_threads import blas_for
from .option_values import DTYPES, load, tokenizer_of
from .terminal import add_device, add_tokenizer, bar, integer, status, to_stdout

MOST_LOGITS = 1 << 21  # at a time


def add_options(parser):
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint, .pth, .safetensors or .gguf, or a folder of Hugging Face")
    add("text", metavar="TEXT", help="any bytes, a .jsonl of texts, or a .bin of token ids with its .idx")
    add("--adapter", metavar="FILE", help="a low-rank adapter, which is merged into the model while it is loaded")
    add("--tokens", type=integer(2), help="of the text (default: all)")
    add("--dtype", choices=("auto", *dict.fromkeys(sum(DTYPES.values(), ()))), default="auto", help="of the matrices")
    add_device(add)
    add_tokenizer(add)


def run(options):
    options.model = Path(options.model)
    model, _ = load(options)
    tokenizer = tokenizer_of(options, model)
    tokens = corpus.read(options.text, tokenizer)[: options.tokens].tolist()
    if len(tokens) < 2:
        raise ValueError(f"argument TEXT: has {len(tokens)} tokens, expected at least 2")
    size = len(tokenizer.decode_bytes(tokens[1:]))
    with blas_for(model.device, model.sizes):
        nats = loss(model, tokens, options.text)
    bits = f", {nats * (len(tokens) - 1) / log(2) / size:.4f} bits a byte" if size else ""
    perplexity = exp(nats) if nats < log(float_info.max) else inf
    to_stdout(f"loss {nats:.4f} nats a token, perplexity {perplexity:.4f}{bits}, on {len(tokens):,} tokens")


@np.errstate(all="ignore")  # errors show as a loss that is not finite
def loss(model, tokens, what) -> float:
    """The loss in nats per token, without the first token; ValueError if it is not finite. Few tokens have their logits
    at the same time: a large vocabulary costs no memory."""
    rows = max(1, MOST_LOGITS // model.sizes["V"])
    state, total = None, 0.0
    with status(f"reading {what} ...") as show:
        for start in range(0, len(tokens) - 1, PIECE):
            show(f"reading {what} {bar(start / len(tokens))}")
            part = tokens[start : start + PIECE + 1]
            (hidden,), state = model.forward([part[:-1]], state, hidden=True)
            for first in range(0, len(hidden), rows):
                logits = model.to_host(model.head(hidden[first : first + rows])).astype(np.float64)
                logits -= logits.max(-1, keepdims=True)
                likely = logits[np.arange(len(logits)), part[1 + first : 1 + first + rows]]
                total += (np.log(np.exp(logits).sum(-1)) - likely).sum()
            if not isfinite(total):
                raise ValueError(f"the loss is {total} by token {start + len(part)}: the model is damaged")
    return total / (len(tokens) - 1)
