"""What a rank sends about its tokens to the other ranks of a sequence: one buffer with a state, and the product of the
tokens' decays.
"""

from __future__ import annotations

from math import prod

from .arguments import members
from .arithmetic import ceil_div
from .kernel import Kernel
from .plan import FLOAT32, Array

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.
#
# Arguments: state_stride, decays_stride: numbers from a sequence's state, or decays, to the next one's; parts: those
# into which a sequence was cut; factors: rows of `decays` for a part, whose product is its decay; channels: of the
# message's product of decays, the first ones of K: all K, 1 if all channels of a head have one gate, 0 if none decays


class Message(Kernel):
    """Writes the buffer `message`: `state`, unless it is null, and the product of `decays` over parts and factors."""

    file = "gated/message"
    arguments = members(
        "pointers state decays message, int64s state_stride decays_stride parts factors N H K V channels"
    )
    threads = 256


class RankSummary:
    """The buffer of a plan that is being written (`draft`). A planner has kernels write the state, or takes it from
    another array, and then calls `finish`.

    channels : of the product of decays: K; or 1 if all channels of a head have one gate; or 0 if nothing decays
    state : the buffer's state [N, H, K, V]
    decay : its product of decays [N, H, channels]; None if `channels` is 0
    """

    def __init__(self, draft, problem, channels):
        self.draft, self.sizes = draft, problem.shape("N H K V")
        N, H, K, V = self.sizes
        self.message = draft.empty((N * H * (K * V + channels),), FLOAT32)
        self.state = self.part((N, H, K, V), 0)
        self.decay = self.part((N, H, channels), self.state.nbytes) if channels else None

    def part(self, shape, offset) -> Array:
        """A contiguous part of the buffer from byte `offset` on."""
        strides = tuple(prod(shape[axis + 1 :]) * FLOAT32.itemsize for axis in range(len(shape)))
        return Array(self.message.memory, shape, strides, FLOAT32, offset)

    def finish(self, decays, state=None):
        """Launches the kernel that completes the buffer; returns ((its state,), its product of decays).

        decays : of the parts of every sequence, [N, parts, H, factors, K] or [N * parts, H, factors, K]: a part's decay
            is the product of its factors. Of the K channels the first `channels` are read
        state : the state [N, H, K, V], which is copied to the buffer; None if kernels have written it there
        """
        if self.decay is None and state is None:
            return (self.state,), None  # a tuple: of some operators the state has two parts
        (N, H, K, V), factors = self.sizes, decays.shape[-2]
        parts = decays.size // (N * H * factors * K)
        sizes = {"parts": parts, "factors": factors, "N": N, "H": H, "K": K, "V": V}
        sizes["channels"] = channels = 0 if self.decay is None else self.decay.shape[-1]
        strides = {  # from a sequence to the next, in numbers
            "state_stride": 0 if state is None else state.strides[0] // FLOAT32.itemsize,
            "decays_stride": decays.strides[0] // FLOAT32.itemsize * (parts if decays.ndim == 4 else 1),
        }
        blocks = ceil_div(N * H * (channels + (0 if state is None else K * V)), Message.threads)
        self.draft.launch(Message(), blocks, state=state, decays=decays, message=self.message, **strides, **sizes)
        return (self.state,), self.decay
