"""Checks of numbers that come from a user, a command line or a file."""

import math

import numpy as np

from ..argument_checks import is_int, is_real
from ..errors import ContractError


def checked_int(owner: str, name: str, value, least: int, most: int | None = None) -> int:
    """`value` as an int, after checking that it is a whole number from `least` to `most`; `owner` and `name` are for
    the error, a ContractError."""
    if not is_int(value) or value < least or (most is not None and value > most):
        to = "up" if most is None else f"to {most}"
        raise ContractError(f"{owner}: {name} is {shown(value)}, expected a whole number from {least} {to}")
    return int(value)


def checked_number(owner: str, name: str, value, wanted: str, fits) -> float:
    """`value` as a float, after checking that it is a finite real number and that `fits(value)`; else ContractError,
    which says that `wanted` was expected."""
    try:
        number = float(value) if is_real(value) else math.nan
    except OverflowError:  # an int beyond float64
        number = math.inf
    if not math.isfinite(number) or not fits(number):
        raise ContractError(f"{owner}: {name} is {shown(value)}, expected {wanted}")
    return number


def shown(value) -> str:
    """A value as short text for an error. Its repr is avoided: that of a nested value may never end, and that of a
    number may fill pages."""
    if isinstance(value, str):
        return ascii(value[:80])
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return str(value)[:80] if isinstance(value, (int, float, np.number)) else f"a {type(value).__name__}"
