"""Packed calls in which one sequence has most of the tokens: it is planned by itself. And calls without the sequences
that have none.

With many sequences there are enough blocks for the card, so that none is cut into segments. But all wait for the block
of a sequence that is as long as all others together. By itself it is one of few, and is cut.

Sizes: N sequences, H heads, T tokens.
"""

from __future__ import annotations

import numpy as np

from ...varlen import Spans
from .plan import Draft

LEAST = 2048  # tokens: a shorter sequence takes less time than the additional launches
FEWEST_SEGMENTS = 4  # of the sequence alone: the card must have multiprocessors for so many of each head


def parts(problem, device) -> list[tuple[int, int]]:
    """The sequences that are planned together: ranges (first, last + 1), one of which is the long sequence alone; or an
    empty list, if all are planned together."""
    lengths, (N, H, T) = problem.spans.lengths, problem.shape("N H T")
    apart = problem.mode in ("auto", "chunk") and "final_state" not in problem.options and problem.mask is None
    if not (problem.varlen and problem.sizes["B"] == 1 and problem.op.state and apart and min(problem.sizes.values())):
        return []
    if any("T" not in axes.split() for axes in problem.op.arrays.values()):
        return []  # the gradient of such an array is a sum over all tokens
    # With so few sequences and heads, all are cut into segments together.
    cut_anyway = 2 * N * H <= device.multiprocessors
    if cut_anyway or FEWEST_SEGMENTS * H > device.multiprocessors or problem.spans.longest < max(LEAST, T / 2):
        return []
    n = int(lengths.argmax())
    ranges = ((0, n), (n, n + 1), (n + 1, N))
    return [(first, stop) for first, stop in ranges if first < stop]


def without_empty_ones(problem):
    """The call without its sequences of no tokens, for each of which kernels would start blocks; the call itself, if
    it has states of them."""
    bounds, lengths = problem.spans.bounds, problem.spans.lengths
    states = problem.initial_state or problem.output_final_state or "final_state" in problem.options
    if states or not (problem.varlen and problem.op.state and lengths.any()) or lengths.all():
        return problem
    spans = Spans(np.append(bounds[:-1][lengths > 0], bounds[-1]))
    return problem.replace(sizes=dict(problem.sizes) | {"N": spans.count}, spans=spans)


def tokens(problem, first, stop) -> slice:
    """The tokens of sequences first ... stop - 1."""
    return slice(int(problem.spans.bounds[first]), int(problem.spans.bounds[stop]))


def part_of(problem, first, stop, out):
    """The call of sequences first ... stop - 1 alone."""
    bounds, at = problem.spans.bounds[first : stop + 1], tokens(problem, first, stop)
    return problem.replace(
        arrays={name: x[:, :, at] for name, x in problem.arrays.items()},
        sizes=dict(problem.sizes) | {"N": stop - first, "T": at.stop - at.start},
        spans=Spans(bounds - bounds[0]),
        initial_state=problem.initial_state and tuple(x[first:stop] for x in problem.initial_state),
        out=out,
        gradient=False,
    )


def plan(ranges, planner, problem, device):
    """The plan of a call: that of one part after the other, for the `ranges` of `parts`. `explain` shows the mode of
    the last one."""
    draft, mode, tiles = Draft(), None, {}
    o, axes = draft.output(problem), problem.op.state
    final = None
    if problem.output_final_state:
        final = tuple(draft.empty(problem.shape(part), problem.state_dtype) for part in axes)
    for first, stop in ranges:
        part = planner.plan(part_of(problem, first, stop, o[:, :, tokens(problem, first, stop)]), device)
        _, states = draft.include(part)
        for all_states, of_part in zip(final or (), states or ()):
            draft.copy(of_part, all_states[first:stop])
        mode, tiles = part.mode, tiles | part.tiles
    return draft.plan((draft.give_back(problem, o), final), mode=mode, tiles=tiles)


def plan_vjp(ranges, planner, problem, device, do, dht):
    """The plan of a pullback: that of one part after the other, for the `ranges` of `parts`."""
    draft, tiles = Draft(), {}
    gradients = tuple(map(draft.like, problem.arrays.values()))
    dh0 = problem.initial_state and tuple(draft.empty(x.shape, x.dtype) for x in problem.initial_state)
    for first, stop in ranges:
        at, dht_of_part = tokens(problem, first, stop), dht and tuple(x[first:stop] for x in dht)
        part = planner.plan_vjp(part_of(problem, first, stop, None), device, do[:, :, at], dht_of_part)
        of_part, states = draft.include(part)
        for dx, dx_of_part in zip(gradients, of_part, strict=True):
            draft.copy(dx_of_part, dx[:, :, at])
        for all_states, states_of_part in zip(dh0 or (), states or ()):
            draft.copy(states_of_part, all_states[first:stop])
        tiles |= part.tiles
    return draft.plan((gradients, dh0), tiles=tiles)
