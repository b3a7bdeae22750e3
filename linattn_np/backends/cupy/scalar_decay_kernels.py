"""Kernel classes of Hopper's kernels for scalar decays, gates that all channels share. `gated_kernels` explains the
classes and has the other kernels.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .arguments import members, structs
from .gated_kernels import tile_for
from .kernel import HopperKernel

# A class describes a kernel: its annotated fields are the template's arguments, in order; `arguments` the members of
# struct Args, which the compiler checks, with `?` if they may be null.

# One sum. q, k, v and o are roles: the sum dq, for one, has do, v, k and dq in them.
#     q k v, o             read, written: boxes of a chunk
#     partner              read: the array with which o is multiplied for the gate's gradient, q for dq and k for dk
#     q_rows ... o_rows    the same arrays with strides, for chunks that boxes cannot copy
#     initial              read: the states at which the sum begins, or null; for dk and dv, gradients of final states
#     final                written: the states at which it ends, or null; for dv, gradients of initial states. By
#                          "BothSummaries": the states with which segments start (weighted_sums.cu)
#     K, V                 the widths of q and of v, as roles: for dq and dk the operator's V and K
#     state_k, state_v     the strides of `initial` and `final` along K and V
#     output_scale, value_scale: factors of o, and of v where it is added to the state
#     backwards            whether later tokens are added up, not earlier ones
#     adds_to_o            whether the sum is added to what o holds
#     q_group ...          how many heads of o share a head of q, of k, of v, of partner
WEIGHTED_SUM = members(
    "tensor_maps q k v o partner, strided q_rows k_rows v_rows partner_rows o_rows, pointers initial final, "
    "int64s K V state_k state_v, float64s output_scale value_scale, int64s backwards adds_to_o q_group k_group v_group "
    "partner_group"
)
# A launch of WeightedSums. A segment is a run of chunks of a sequence; its summary is the state after it, from a state
# of 0 (the sum's `final`), and the decay over it.
#     sums                 SUMS_AT_ONCE[what] structs of the members WEIGHTED_SUM
#     g                    read: the log gates [B, H, T]
#     segments, computed   how many each sequence has, and of how many of these there are summaries, from the first on
#     decays               the decay over each of N segments: "Summary" writes [N, H, 2, K], with ones, "BothSummaries"
#                          [2, N, H, K], in each direction. Else null
#     stretch_states       "GatedQueries" writes, "GatedKeys" reads a state for every STRETCH tokens. Else null
#     token_sums           the same: [B, H, dq_tiles, T], each token's q . dq over each of the dq_tiles tiles of dq
#     dg                   "GatedKeys" writes: the gate's gradient [B, H, T], or [B, H, T, tiles], of each tile of dk
# BK, BV: BK is at least the K of each sum, and a block computes BV columns of the V of one; both are roles' widths.
# Threads: 128 for every 64 columns of BV, 128 for the scores, 4 warps that move chunks and sum gates. "GatedKeys" at
# 128 x 128: the blocks of dk and of dv are a cluster, so that the second one finds the chunks in the L2 cache.
#
# WeightedSums.what -> how many sums one launch computes
SUMS_AT_ONCE = {"Whole": 1, "Summary": 1, "BothSummaries": 2, "Gradients": 3}
SUMS_AT_ONCE |= {"Queries": 1, "Keys": 2, "GatedQueries": 1, "GatedKeys": 2}


class WeightedSums(HopperKernel):
    """Sums of values weighted by decayed products of queries with keys: o, dq, dk and dv are such sums.

    `what` says which a launch computes: "Whole": o; "Summary": the summaries of segments; "BothSummaries": those
    forwards and backwards in time, for gradients; "Gradients": dq, dk and dv; "Queries": dq; "Keys": dk and dv;
    "GatedQueries" and "GatedKeys": as the last two, and the gate's gradient.
    """

    file = "scalar_decay/sm90/weighted_sums"
    shared_memory = ("Shared<{what}, {BK}, {BV}>",)
    CHUNK: ClassVar[int] = 64
    STRETCH: ClassVar[int] = 256  # tokens between the states that are stored for the gate's gradient
    constants = (
        ("CHUNK", "CHUNK"),
        ("STRETCH", "STRETCH"),
        ("1 + IN_CLUSTER<{what}, {BK}, {BV}>", "blocks_per_cluster"),
        ("Registers<{BK}, {BV}>::BLOCKS", "blocks_per_multiprocessor"),
    )
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
