"""RWKV-7 (x070, "Goose"; Peng et al., 2025, arXiv 2503.14456), without torch; `rwkv` has what all versions share.

names           what files call the parameters, and their shapes
weights         which arrays the layers take, and the parameters that each holds
math            the two mixes, once for all that compute them
numpy_layers    NumPy's, in float32
numba_layers    those of Numba's loops, which are in numba_loops
parameters      the first values of a training's parameters
grad            the loss and its gradients
model           `RWKV7`
"""

from .model import RWKV7

__all__ = ["RWKV7"]
