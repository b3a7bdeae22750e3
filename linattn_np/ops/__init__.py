"""The operators. `OPS` is the list that tests, benchmarks and docs walk."""

from importlib import import_module

from ..array_kinds import kind
from ..declarations import OPERATORS
from ..messages import shown

OPS = {op: getattr(import_module(f"{__name__}.{op.name}"), op.name) for op in OPERATORS}  # a module each, of its name


def declaration(function, caller: str):
    """The declaration behind a public operator, for functions that take the operator as an argument."""
    for op, public in OPS.items():
        if function is public:
            return op
    given = f"is {shown(function)}"
    if kind(function) is not None:
        given = f"is missing, as in {caller}(linattn_np.gla, q, k, v, g): the first argument {given}"
    raise TypeError(
        f"{caller}: op {given}, expected one of linattn_np's operators: " + ", ".join(op.name for op in OPS)
    )
