"""Trains a byte-level RWKV-6 on a text, as `linattn-np train` does, with the package's own gradients. No torch, no JAX.

    python examples/train_rwkv6.py --text novel.txt --out novel
    mpiexec -n 4 python examples/train_rwkv6.py --text novel.txt --out novel        four processes, with a card each
    torchrun --nproc-per-node 4 examples/train_rwkv6.py --text novel.txt --out novel
    python examples/rwkv6_decode.py --model novel/model.safetensors --prompt "Emma was"

In a program of your own it is as short:

    from linattn_np.models.training import Settings, Training

    training = Training(open("novel.txt", "rb").read(), Settings(steps=500))
    while training.done < 1:
        loss = training.step()
    training.save_model("model.safetensors")
"""

import sys

from linattn_np.command.terminal import run

if __name__ == "__main__":
    sys.exit(run("train", "train_rwkv6.py"))
