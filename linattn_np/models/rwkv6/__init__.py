"""RWKV-6 (x060, "Finch"; Peng et al., "Eagle and Finch", 2024), without torch.

names           what files call the parameters, and their shapes
weights         which arrays the layers take, and the parameters that each holds
state           what sequences carry from token to token
math            the two mixes, once for all that compute them
cpu_layers      which layers run on the CPU
numpy_layers    NumPy's, in float32
numba_layers    those of Numba's loops
cuda_decode     one token on the GPU
cuda_prefill    prompts on the GPU
cuda_layers     both of them, with one set of weights
parameters      what a training changes: all parameters in one vector
grad            the loss and its gradients
model           `RWKV6`
"""

from .model import RWKV6
from .state import State

__all__ = ["RWKV6", "State"]
