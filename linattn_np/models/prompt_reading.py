"""Reads prompts of any length in pieces, which bounds the memory that this takes, and reports progress."""

from __future__ import annotations

from collections.abc import Callable

from ..typing import Integers
from .protocols import Model, State

PIECE = 512  # tokens that are read at a time


def read(
    model: Model, prompt: Integers, state: State | None = None, progress: Callable[[int], object] = lambda done: None
) -> tuple[list[int], State | None]:
    """``(rest, state)``: the last tokens of `prompt`, `PIECE` at most, and a new state after the tokens before them.

    state : the state before the prompt; None starts a sequence. The new state is also None then, if `rest` is all
    progress : called with the number of tokens that are read, after each piece
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
