"""Writes an RWKV checkpoint with its matrices in fewer bits, and measures the loss on a text before and after.

    linattn-np quantise --dtype int4 --out small.safetensors
    linattn-np quantise --dtype int4 --out small.safetensors --text novel.txt
    linattn-np generate --model small.safetensors --prompt "Emma was"

The loss is in nats per token, over the first --tokens of --text. linattn-np generate and models.load read the file. On
the CPU they compute with its bits. On CUDA they convert its matrices, unless these are int8 and --dtype int8 is given.
"""

import os
from pathlib import Path

from ..models import austen, checkpoint, load
from ..models.files import contents, write_arrays
from ..models.matrices import loops
from ..models.versions import kind_of
from .blas_threads import blas_for
from .evaluate import loss
from .first_loops import compiling
from .option_values import tokenizer_of
from .terminal import add_tokenizer, check_out, how_to_write, integer, status, to_stderr


def add_options(parser):
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        help="a checkpoint, .pth, .safetensors or .gguf, or a folder of Hugging Face (default: that "
        "of Jane Austen's novels, which comes with the package)",
    )
    add(
        "--dtype",
        choices=("bfloat16", "int8", "int4"),
        required=True,
        help="of the large matrices: int8 has a scale "
        "for every row, int4 one for 32 neighbours. The embedding and the matrices of low rank become bfloat16",
    )
    add("--out", required=True, metavar="FILE", help="a .safetensors file")
    add("--text", metavar="FILE", help="what the loss is measured on (default: it is not measured)")
    add("--tokens", type=integer(2), default=4096, help="of the text (default: %(default)s)")
    add_tokenizer(add)


def run(options):
    options.model = Path(options.model) if options.model else austen()
    check_out(options, "model", *["text"] if options.text else [])
    if options.dtype != "bfloat16":
        loops()  # an error without Numba, which reading the file needs, before anything is written
    with status("loading ...") as show, compiling(show):
        weights, config = checkpoint.read(options.model), checkpoint.config(options.model)
        model = kind_of(weights)(weights, config=config)
        model.warm_up((), 2)
    tokens = tokens_of(options, model)
    with blas_for(model.device, model.sizes):
        before = loss(model, tokens, "before") if tokens else None
        with status("rounding ..."):
            write_arrays(options.out, model.quantise(weights, options.dtype, config))
        if before:
            after = loss(load(options.out), tokens, "after")
            to_stderr(
                f"loss before {before:.4f}, after {after:.4f} ({after / before - 1:+.2%}) on {len(tokens)} tokens"
            )
    size, old = os.path.getsize(options.out), sum(array.nbytes for array in weights.values())
    to_stderr(f"wrote {options.out}, {size / 1e6:,.1f} MB of {old / 1e6:,.1f}. {how_to_write('--model', options.out)}")


def tokens_of(options, model) -> list:
    """The tokens on which the loss is measured; none without --text."""
    if not options.text:
        return []
    tokens = tokenizer_of(options, model).encode(contents(options.text))[: options.tokens]
    if len(tokens) < 2:
        raise ValueError(f"argument --text: has {len(tokens)} tokens, expected at least 2")
    return tokens
