"""RWKV-6 (x060, "Finch"; Peng et al., "Eagle and Finch", 2024), without torch; `rwkv` has what all versions share.

names           what files call the parameters, and their shapes
weights         which arrays the layers take, and the parameters that each holds
math            the two mixes, once for all that compute them
numpy_layers    NumPy's, in float32
numba_layers    those of Numba's loops, which are in numba_loops
cuda_decode     one token on the GPU
cuda_prefill    prompts on the GPU
cuda_layers     both of them, with one set of weights
parameters      the first values of a training's parameters
grad            the loss and its gradients
model           `RWKV6`
"""

from ..rwkv.state import State
from .model import RWKV6

__all__ = ["RWKV6", "State"]
