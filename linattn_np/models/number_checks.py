"""Numbers from outside, checked in one place: a user's, a command line's or a file's."""

import math

import numpy as np

from ..argument_checks import is_int, is_real
from ..errors import ContractError


def whole(owner: str, name: str, value, least: int, most: int | None = None) -> int:
    """`value` as an int from `least` up to `most`; ContractError says what `owner`'s `name` is and what was wanted."""
    if not is_int(value) or value < least or (most is not None and value > most):
        to = "up" if most is None else f"to {most}"
        raise ContractError(f"{owner}: {name} is {shown(value)}, expected a whole number from {least} {to}")
    return int(value)


def real(owner: str, name: str, value, wanted: str, fits) -> float:
    """`value` as a float, once it is a real number, not infinite as one, and `fits`; else ContractError."""
    try:
        number = float(value) if is_real(value) else math.nan
    except OverflowError:  # an int beyond float64
        number = math.inf
    if not math.isfinite(number) or not fits(number):
        raise ContractError(f"{owner}: {name} is {shown(value)}, expected {wanted}")
    return number


def shown(value) -> str:
    """A value from outside, short and harmless: the repr of a nested one could run for ever, a number's fill pages."""
    if isinstance(value, str):
        return ascii(value[:80])
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return str(value)[:80] if isinstance(value, (int, float, np.number)) else f"a {type(value).__name__}"
