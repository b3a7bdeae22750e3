"""The delta rule by Hopper's own kernel: without gates, or with one that the channels of a token share."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ...declarations import DELTA_RULE, GATED_DELTA_RULE
from .arguments import members
from .delta_segments import CutInChunks
from .gated_kernels import PANEL, SM90, TILES
from .kernel import DOUBLE, TiledKernel
from .plan import FLOAT32, Draft, TensorMap, ceil_div, mappable, mappable_once_copied


class DeltaScalarForwardSm90(TiledKernel):
    """o and the final state, by a block for BV columns of every (sequence, head of values). In `arguments`, "maps+rows"
    are arrays both as tensor maps and as pointers with strides; `?` marks those that may be null. group: heads of
    values that share a head of q and k; state_k, state_v: strides of the states; wide_gate, wide_beta: whether g and
    beta are float32; normalized: whether q and k are to be divided by their lengths."""

    file = "delta/sm90/scalar_forward"
    arguments = members(
        "maps+rows q k v o, rows? g, rows beta, shape, pointers? initial final, "
        "integers group state_k state_v wide_gate wide_beta normalized, reals scale"
    )
    shared = ("Shared<{dtype}, {BK}, {BV}>",)
    arch = SM90
    CHUNK: ClassVar[int] = 32
    dtype: np.dtype
    BK: int
    BV: int

    @property
    def threads(self):
        return 2 * self.BV + 256

    @property
    def resident(self):
        return 2 if self.BK + self.BV == 128 else 1


def why_no_chunks(problem) -> str | None:
    """Why no card can compute a call in chunks, whatever its gates are; None if some can."""
    if problem.mode == "recurrent":
        return "mode='recurrent' is token by token"
    if problem.dtype == DOUBLE:
        return "the data are float64, and kernels in chunks compute in float32"
    if problem.sizes["K"] > TILES[-1]:
        return f"K={problem.sizes['K']} is over {TILES[-1]}"
    return None


class ScalarOnHopper:
    """Plans a call by Hopper's own kernel, for half-precision data that tensor maps can describe. Cuts no sequences."""

    name = "by Hopper's own kernel"
    CHUNK_TIME = 1.45  # microseconds per chunk of a block that has a multiprocessor of an H200 for itself

    @staticmethod
    def why_not(problem, device) -> str | None:
        if device.capability != 90:
            return "the card is another, or kernels of every card are asked for"
        if problem.op not in (DELTA_RULE, GATED_DELTA_RULE):
            return "every channel has a gate of its own"
        if problem.dtype == FLOAT32:
            return "the data are float32, and it multiplies half precision"
        if reason := why_no_chunks(problem):
            return reason
        if not mappable_once_copied([problem[name] for name in "qkv"]):
            return "rows are no whole pieces of 16 bytes, or there are none"
        (N, H, V), cut = problem.shape("N H V"), CutInChunks(problem, device)
        few_blocks = N * H * ceil_div(V, PANEL) <= device.multiprocessors
        if few_blocks and cut.segments > 1 and cut.chunks * ScalarOnHopper.CHUNK_TIME > cut.pass_time:
            return f"few heads of long sequences are faster in {cut.segments} segments"
        return None

    @staticmethod
    def plan(problem, device):
        draft = Draft()
        tokens = [draft.mapped(problem[name], name) for name in "qkv"] + [problem.arrays.get("g"), problem["beta"]]
        o, final, initial = draft.output(problem, mappable), draft.final(problem), draft.initial(problem)
        shape = draft.shape(problem, chunk=DeltaScalarForwardSm90.CHUNK)
        kernel = forward_kernel(problem.dtype, shape, device.multiprocessors)
        normalized = problem.options.get("qk_l2norm", False)
        launch_forward(draft, kernel, tokens, o, shape, problem.scale, initial, final, normalized=normalized)
        return draft.plan(draft.results(problem, o, final), mode="chunk", tiles=kernel.tiles)


def forward_kernel(dtype, shape, multiprocessors) -> DeltaScalarForwardSm90:
    """The instance with PANEL = 64 columns per block if V is no more, or if each of these blocks has a multiprocessor
    for itself; else with 128. TILES are the sizes 64 and 128."""
    few_blocks = all_heads(shape) * ceil_div(shape.V, PANEL) <= multiprocessors
    return DeltaScalarForwardSm90(dtype, TILES[shape.K > PANEL], TILES[shape.V > PANEL and not few_blocks])


def all_heads(shape) -> int:
    """The heads of all sequences."""
    return shape.B * shape.count * shape.H


def launch_forward(draft, kernel, tokens, o, shape, scale, initial, final, transposed=False, normalized=False):
    """Launches the kernel on `tokens`: (q, k, v, g or None, beta). The heads of `shape` are those of v. initial, final:
    float32 states [N, H, K, V], or [N, H, V, K] if `transposed`; None for zeros, and for a state that is not wanted."""
    q, k, v, g, beta = tokens
    maps = {name: TensorMap(x, PANEL, kernel.CHUNK, swizzled=True) for name, x in zip("qkvo", (q, k, v, o))}
    rows = {f"{name}_rows": tensor_map.array for name, tensor_map in maps.items()}
    draft.launch(
        kernel,
        all_heads(shape) * ceil_div(shape.V, kernel.BV),
        **{**maps, **rows, "shape": shape, "scale": scale, "initial": initial, "final": final},
        g=None if g is None else g[..., None],
        beta=beta[..., None],
        group=shape.H // q.shape[1],
        state_k=1 if transposed else shape.V,
        state_v=shape.K if transposed else 1,
        wide_gate=g is None or g.dtype == FLOAT32,
        wide_beta=beta.dtype == FLOAT32,
        normalized=normalized,
    )
