"""
What a model expects
====================

The package brings an RWKV-6 of four million parameters that has read Jane Austen's novels, byte by byte. Its logits say
how much each letter of a sentence surprises it.
"""

import matplotlib.pyplot as plt
import numpy as np

from linattn_np.models import RWKV6, austen

model = RWKV6.from_file(austen(), device="cpu", dtype="float32")
text = b"Emma Woodhouse, handsome, clever, and rich, with a quantum computer"
logits, state = model.forward([list(text)])  # [B, T, vocabulary]
p = np.exp(logits[0] - logits[0].max(-1, keepdims=True))
p /= p.sum(-1, keepdims=True)
bits = -np.log2(p[np.arange(len(text) - 1), list(text[1:])])

# %%
# Names and common words are nearly certain after their first letters; the novels had no computers.
figure, axis = plt.subplots(figsize=(11, 3.2), layout="constrained")
axis.bar(range(1, len(text)), bits)
axis.set_xticks(range(len(text)), text.decode(), family="monospace")
axis.set_xlabel("letter")
axis.set_ylabel("surprise, bits")
plt.show()
print(f"{bits.mean():.2f} bits a letter")
