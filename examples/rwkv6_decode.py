"""Writes text with an RWKV-6 model, token by token, as `linattn-np generate` does. No torch.

    python examples/rwkv6_decode.py --prompt "Emma was" --tokens 500 --temperature 0.8

In a program of your own it is as short:

    from itertools import islice
    from linattn_np.models import RWKV6, austen

    model = RWKV6.from_file(austen())
    print(bytes(islice(model.generate(b"Emma was", temperature=0.8, top_p=0.9), 100)).decode())
"""

import sys

from linattn_np.command.terminal import run

if __name__ == "__main__":
    sys.exit(run("generate", "rwkv6_decode.py"))
