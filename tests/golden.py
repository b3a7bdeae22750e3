"""Writes the golden logits of a model: float64, token by token, as its equations are written, without the package.

    python tests/golden.py MODEL TEXT [COUNT]

MODEL is a `.safetensors` file of RWKV-6 or RWKV-7 that reads bytes, TEXT a file of whose beginning COUNT bytes are read
(160). `golden.npz` beside MODEL then has them as `prompt`, and the logits after each of them as `logits` [COUNT, 256].
"""

import sys
from pathlib import Path

import literal_rwkv6
import literal_rwkv7
import ml_dtypes  # noqa: F401, tells NumPy of bfloat16
import numpy as np
from safetensors.numpy import load_file


def main(model, text, count=160):
    weights, prompt = load_file(model), Path(text).read_bytes()[: int(count)]
    literal = literal_rwkv7 if "blocks.0.att.r_k" in weights else literal_rwkv6
    golden = {"prompt": np.frombuffer(prompt, np.uint8), "logits": literal.logits_of(weights, prompt)}
    np.savez_compressed(Path(model).with_name("golden.npz"), **golden)


if __name__ == "__main__":
    main(*sys.argv[1:])
