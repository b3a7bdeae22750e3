"""Draws time and memory of softmax attention, GLA, RWKV-6 and retention by tokens, as `linattn-np compare` does.

python examples/compare_attention.py                                    compare.png, on the GPU where there is one
python examples/compare_attention.py --device cpu --longest 8192 --out cpu.png
"""

import sys

from linattn_np.command.terminal import run

if __name__ == "__main__":
    sys.exit(run("compare", "compare_attention.py"))
