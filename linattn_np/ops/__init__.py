"""The operators. `OPS` is the list that tests, benchmarks and docs walk."""

from importlib import import_module

from ..array_kinds import kind
from ..declarations import OPERATORS
from ..messages import shown
from .gla import GLA, gla
from .hgrn2 import HGRN2, hgrn2
from .linear_attention import LINEAR_ATTENTION, linear_attention
from .retention import RETENTION, retention
from .rwkv6 import RWKV6, rwkv6
from .simple_gla import SIMPLE_GLA, simple_gla
from .softmax_attention import SOFTMAX_ATTENTION, softmax_attention
from .steps import GLA_STEP, RWKV6_STEP, gla_step, rwkv6_step

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
