"""Writes an RWKV-6 checkpoint with its matrices in fewer bits, as `linattn-np quantise` does. No torch.

    python examples/quantise.py --dtype int4 --out small.safetensors --text novel.txt
    python examples/rwkv6_decode.py --model small.safetensors --prompt "Emma was"

In a program of your own it is as short:

    from linattn_np.models import RWKV6, austen, checkpoint
    from linattn_np.models.files import write_arrays

    write_arrays("small.safetensors", RWKV6.quantise(checkpoint.read(austen()), "int4"))
"""

import sys

from linattn_np.command.terminal import run

if __name__ == "__main__":
    sys.exit(run("quantise", "quantise.py"))
