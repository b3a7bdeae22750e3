"""Kernel classes of Hopper's kernels for scalar decays, gates that all channels share. `gated_kernels` explains the
classes and has the other kernels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .gated_kernels import tile_for
from .kernel import SM90, HopperKernel, TiledKernel

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.

# Of one sum: q, k, v and o are roles: the sum dq, for one, has do, v, k and dq in them. partner: the array with which o
# is multiplied for the gate's gradient, q for dq and k for dk. K, V: the widths of q and of v; state_k, state_v: the
# state's strides; output_scale, value_scale: factors of o and of v; backwards: whether later tokens are added up;
# adds_to_o: whether the sum is added to what o holds.
WEIGHTED_SUM = members(
    "tensor_maps q k v o partner, strided q_rows k_rows v_rows partner_rows o_rows, pointers initial final, "
    "int64s K V state_k state_v, float64s output_scale value_scale, int64s backwards adds_to_o"
)
# Of a launch of WeightedSums: `sums`, its structs WEIGHTED_SUM. A segment is a run of chunks of a sequence; its summary
# is the state after it, from a state of 0 (`final`), and the product of its `decays`. segments: of each sequence;
# computed: how many of them "Summary" computes, from the first on. For the gate's gradient dg: stretch_states, a state
# for every STRETCH tokens; token_sums, each token's q . dq over each tile of columns of dq; dq_tiles, how many tiles dq
# has. Threads: 128 for every 64 columns of BV, 128 for the scores, 4 warps that move chunks and sum gates. "GatedKeys"
# at 128 x 128: the blocks of dk and of dv are a cluster, so that the second one finds the chunks in the L2 cache.
#
# WeightedSums.what -> how many sums one launch computes
SUMS_AT_ONCE = {"Whole": 1, "Summary": 1, "Gradients": 3, "Queries": 1, "Keys": 2, "GatedQueries": 1, "GatedKeys": 2}


class WeightedSums(HopperKernel):
    """Sums of values weighted by decayed products of queries with keys: o, dq, dk and dv are such sums.

    `what` says which a launch computes: "Whole": o; "Summary": the summaries of segments; "Gradients": dq, dk and dv;
    "Queries": dq; "Keys": dk and dv; "GatedQueries" and "GatedKeys": as the last two, and the gate's gradient.
    """

    file = "scalar_decay/sm90/weighted_sums"
    shared_memory = ("Shared<{what}, {BK}, {BV}>",)
    CHUNK: ClassVar[int] = 64
    STRETCH: ClassVar[int] = 256  # tokens between the states that are stored for the gate's gradient
    what: str
    gate: np.dtype
    BK: int
    BV: int

    @classmethod
    def fitting(cls, what, gate, K, V):
        return cls(what, gate, tile_for(K), tile_for(V))

    @property
    def arguments(self):
        return (
            *structs("sums", SUMS_AT_ONCE[self.what], WEIGHTED_SUM),
            *members(
                "strided g, shape, pointers? decays, int64s segments computed, pointers? stretch_states token_sums dg, "
                "int64s dq_tiles"
            ),
        )

    @property
    def gives_gate(self) -> bool:
        """Whether the launch is one of the two that compute the gate's gradient together."""
        return self.what.startswith("Gated")

    @property
    def threads(self):
        return 2 * self.BV + 256

    @property
    def blocks_per_cluster(self):
        return 2 if self.what == "GatedKeys" and self.BK + self.BV == 256 else 1


# dht: the gradient of the final state; P: the segments of each sequence. Threads: 128 multiply, 32 copy.
class ScalarBackwardSegments(TiledKernel):
    """The summaries of segments, `states` and `decays`, forwards and backwards in time (see `gated_backward`)."""

    file = "scalar_decay/sm90/backward_segments"
    arguments = members(
        "tensor_maps+strided q k v do_, strided g, pointers initial dht states decays, shape, float64s scale, int64s P"
    )
    shared_memory = ("Shared<{BV}>",)
    arch = SM90
    threads = 160
    CHUNK: ClassVar[int] = 32
    BK: ClassVar[int] = 64
    BV: int

    @classmethod
    def fitting(cls, V):
        return cls(tile_for(V))
