"""RWKV-6's mixes for prompts on the GPU, as steps of a plan.

Sizes: T tokens, D channels, F channels of the channel mix, H heads of N channels, A and W the ranks of the low-rank
products for the mixes and for the decay. X is the matrices' dtype, that of their inputs. `draft` collects the launches.
"""

from ...backends.cupy import rwkv6_model_kernels as kernels
from ...backends.cupy.plan import FLOAT32
from ...declarations import RWKV6
from ..rwkv import cuda_prompts
from . import mixes


class MixOperations(cuda_prompts.MixOperations):
    """The operations of `mixes.MixOperations`, each as launches in a plan; x and the state are `plan.Array`s.

    From the base class, which describes them: `T`, `dtype` (X) and `sizes`; the tables `mixes` and `results`;
    `recurrent`, which adds an operator, and `gated_norm_to`, a group norm and its gate.
    """

    time_mix, channel_mix = mixes.time_mix, mixes.channel_mix

    def __init__(self, *arguments):
        super().__init__(*arguments)
        T, X, (D, F, A, W), empty = self.T, self.dtype, (self.sizes[axis] for axis in "DFAW"), self.draft.empty
        self.xx, self.d, self.w = (empty((T, D), FLOAT32) for _ in range(3))
        self.o, self.mixed, self.normed = empty((T, D), X), empty((5, T, D), X), empty((1, T, D), X)
        # self.mixed: w k v r g; the channel mix's k r take the memory of the first two
        self.mixes = {"ln1": (self.normed, self.xx, self.d), "ln2": (self.mixed[:2], None, None)}
        self.results = {  # the channel mix reuses memory of the time mix
            "maa_down": empty((1, T, 5 * A), FLOAT32),
            "decay_down": empty((1, T, W), FLOAT32),
            "kvrg": empty((4, T, D), X),
            "ffn_key": empty((1, T, F), X),
            "ffn_receptance": self.xx[None],
            "ffn_value": self.d[None],
        }

    def data_mix(self, layer, low, xx, d):
        """The five mixes w k v r g: xx + d (maa + tanh(low) maa_up); xx are the normed x, d the previous ones less
        xx."""
        kernel, (T, D) = kernels.DataMix.of_prompt(self.dtype), xx.shape
        self.draft.launch(
            kernel, kernel.blocks(T, D), low=low, up=layer.maa_up, maa=layer.maa, xx=xx, d=d, mixed=self.mixed, P=1
        )
        return self.mixed

    def log_decay(self, layer, low):
        """w = -exp(decay + tanh(low) decay_up)."""
        kernel, arrays = kernels.Openings.of_prompt(self.dtype), {"low": low, "up": layer.decay_up}
        arrays |= {"bases": layer.decay, "w": self.w}
        # R: the rank; ranks of other products, which RWKV-7's steps have, are 0
        self.draft.launch(kernel, kernel.blocks(*self.w.shape), **arrays, R=low.shape[-1], G=0, Q=0)
        return self.w

    def recurrence(self, layer, kvr, w, wkv):
        k, v, r = kvr
        self.recurrent(RWKV6, {"r": r, "k": k, "v": v, "w": w}, wkv, self.o, {"u": layer.bonus[0]})
        return self.o

    def gated_norm(self, layer, o, gate):
        """The group norm of o over each head, times silu(gate)."""
        return self.gated_norm_to(self.normed[0], layer, o, gate)
