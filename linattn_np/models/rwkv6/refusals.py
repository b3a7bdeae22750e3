"""How RWKV-6 refuses what does not fit."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ...errors import ContractError, ContractTypeError


def refuse(complaint: str, error=ContractError) -> NoReturn:
    raise error(f"RWKV6: {complaint}")


def one_of(dtype, accepted, where=""):
    """`dtype` as NumPy's, once it is one of those `accepted`."""
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = repr(dtype)
    if not any(found == one for one in accepted):
        refuse(f"dtype is {found}, expected {', '.join(map(str, accepted))}{where}", ContractTypeError)
    return found
