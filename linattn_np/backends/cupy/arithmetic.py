"""Rounding up."""


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def padded(size: int, to: int) -> int:
    """`size` rounded up to a multiple of `to`."""
    return ceil_div(size, to) * to
