"""The message of a rank about its tokens: their final state from zero, and behind it the product of their decays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .arguments import integers, pointers
from .kernel import Kernel
from .plan import FLOAT32, Array, ceil_div


@dataclass(frozen=True)
class Message(Kernel):
    file = "gated/message"
    arguments = (
        *pointers("state decays message"),
        *integers("state_stride decays_stride parts factors N H K V channels"),
    )
    threads = 256


class MessageDraft:
    """A message in one buffer while its plan is drawn, with so many `channels` of decays, or without any."""

    def __init__(self, draft, problem, channels):
        self.draft, self.sizes = draft, problem.shape("N H K V")
        N, H, K, V = self.sizes
        self.whole = draft.empty((N * H * (K * V + channels),), FLOAT32)
        self.state = self.part((N, H, K, V), 0)
        self.total = self.part((N, H, channels), self.state.nbytes) if channels else None

    def part(self, shape, offset) -> Array:
        strides = tuple(prod(shape[axis + 1 :]) * FLOAT32.itemsize for axis in range(len(shape)))
        return Array(self.whole.memory, shape, strides, FLOAT32, offset)

    def finish(self, decays, state=None):
        """((the state,), the product of `decays`) in the message; a given `state` [N, H, K, V] is copied there.

        decays : [N, parts, H, factors, K], or with the parts in one axis with the sequences
        """
        if self.total is None and state is None:
            return (self.state,), None
        (N, H, K, V), factors = self.sizes, decays.shape[-2]
        parts = decays.size // (N * H * factors * K)
        channels = 0 if self.total is None else self.total.shape[-1]
        self.draft.launch(
            Message(),
            ceil_div(N * H * (channels + (0 if state is None else K * V)), Message.threads),
            state=state,
            decays=decays,
            message=self.whole,
            state_stride=0 if state is None else state.strides[0] // FLOAT32.itemsize,
            decays_stride=decays.strides[0] // FLOAT32.itemsize * (parts if decays.ndim == 4 else 1),
            parts=parts,
            factors=factors,
            N=N,
            H=H,
            K=K,
            V=V,
            channels=channels,
        )
        return (self.state,), self.total
