"""Writes a checkpoint of a model with a low-rank adapter merged into it.

    linattn-np merge --model model.pth --adapter mine/adapter.safetensors \\
        --out mine.safetensors

Every matrix W with an adapter becomes W + (alpha / rank) B A, in its own dtype; int8 and int4 become float32, and
linattn-np quantise makes them small again. Names are the official ones.
"""

from ..models import checkpoint
from ..models.files import write_arrays
from ..models.rwkv.adapters import merged, read
from ..models.versions import kind_of
from .terminal import check_out, how_to_write, status, to_stderr


def add_options(parser):
    add = parser.add_argument
    add("--model", required=True, metavar="PATH", help="the model that the adapter was trained on")
    add("--adapter", required=True, metavar="FILE", help="of linattn-np train --lora, or of RWKV-PEFT")
    add("--alpha", type=float, help="where the adapter does not say it (default: its rank)")
    add("--out", required=True, metavar="FILE", help="a .safetensors file")


def run(options):
    check_out(options, "model", "adapter")
    with status("merging ..."):
        weights, adapter = checkpoint.read(options.model), read(options.adapter)
        config = checkpoint.config(options.model)
        write_arrays(options.out, merged(kind_of(weights), weights, adapter, options.alpha, config))
    to_stderr(f"wrote {options.out}. {how_to_write('--model', options.out)}")
