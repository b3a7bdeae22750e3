"""The delta rule by Hopper's own kernels: a gate for all channels of a token, or none."""

from __future__ import annotations

from ...declarations import DELTA_RULE, GATED_DELTA_RULE
from .delta_hopper_kernels import DeltaScalarForwardSm90
from .delta_segments import Cut
from .gated_kernels import PANEL, TILES
from .kernel import HALF
from .plan import FLOAT32, Draft, TensorMap, ceil_div, mappable, mappable_once_copied


def why_no_chunks(problem) -> str | None:
    """Why no card computes a call in chunks, whatever its gates are; None where one may."""
    if problem.mode == "recurrent":
        return "mode='recurrent' is token by token"
    if problem.dtype not in HALF:
        return f"the data are {problem.dtype}, and tensor cores multiply half precision"
    if problem.sizes["K"] > TILES[-1]:
        return f"K={problem.sizes['K']} is over {TILES[-1]}"
    return None


class ScalarOnHopper:
    """A call in half precision whose tensor maps Hopper's kernel can have."""

    name = "by Hopper's own kernel"
    CHUNK_TIME = 1.45  # microseconds of a chunk, one after the other, where each block has a multiprocessor of an H200

    @staticmethod
    def why_not(problem, device) -> str | None:
        if device.capability != 90:
            return "the card is another, or kernels of every card are asked for"
        if problem.op not in (DELTA_RULE, GATED_DELTA_RULE):
            return "every channel has a gate of its own"
        if reason := why_no_chunks(problem):
            return reason
        if not mappable_once_copied([problem[name] for name in "qkv"]):
            return "rows are no whole pieces of 16 bytes, or there are none"
        (N, H, V), cut = problem.shape("N H V"), Cut(problem, device)
        few = N * H * ceil_div(V, PANEL) <= device.multiprocessors
        if few and cut.segments > 1 and cut.chunks * ScalarOnHopper.CHUNK_TIME > cut.whole_time:
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
    """With 64 columns a block where all of these have a multiprocessor each."""
    few = heads_of(shape) * ceil_div(shape.V, PANEL) <= multiprocessors
    return DeltaScalarForwardSm90(dtype, TILES[shape.K > PANEL], TILES[shape.V > PANEL and not few])


def heads_of(shape) -> int:
    """Of all sequences."""
    return shape.B * shape.count * shape.H


def launch_forward(draft, kernel, tokens, o, shape, scale, initial, final, turned=False, normalized=False):
    """o of `tokens` q, k, v, g or None, and beta; `shape` has the heads of v. States are [N, H, K, V] in float32, or
    `turned` [N, H, V, K]."""
    q, k, v, g, beta = tokens
    boxes = {name: TensorMap(x, PANEL, kernel.CHUNK, True) for name, x in zip("qkvo", (q, k, v, o))}
    rows = {f"{name}_rows": box.array for name, box in boxes.items()}
    draft.launch(
        kernel,
        heads_of(shape) * ceil_div(shape.V, kernel.BV),
        **{**boxes, **rows, "shape": shape, "scale": scale, "initial": initial, "final": final},
        g=None if g is None else g[..., None],
        beta=beta[..., None],
        group=shape.H // q.shape[1],
        state_k=1 if turned else shape.V,
        state_v=shape.K if turned else 1,
        wide_gate=g is None or g.dtype == FLOAT32,
        wide_beta=beta.dtype == FLOAT32,
        normalized=normalized,
    )
