"""Prompts of any length, read in pieces: what is in flight stays small, and progress shows."""

from __future__ import annotations

from collections.abc import Callable

from ..typing import Integers
from .protocols import Model, State

PIECE = 512  # tokens that are read at a time


def read(
    model: Model,
    prompt: Integers,
    state: State | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> tuple[list[int], State | None]:
    """``(rest, state)``: the last tokens of `prompt`, `PIECE` at most, and a new state that has read those before.

    None for the state where nothing has been read.
    """
    prompt = list(prompt)
    model.checked([prompt])
    if state is not None:
        state = model.on_device(state, rows=1).copy()
    elif len(prompt) > PIECE:
        state = model.initial_state()
    start = 0
    while len(prompt) - start > PIECE:
        model.forward([prompt[start : start + PIECE]], state, last=True)
        start += PIECE
        progress(start)
    return prompt[start:], state
