"""The public functions of the operators, by their names.

functions.pyi tells a type checker their signatures; `python docs/write_operators.py` writes it.
"""

from . import OPS

__all__ = [op.name for op in OPS]
globals().update({op.name: function for op, function in OPS.items()})
