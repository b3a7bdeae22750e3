"""linattn_np: linear attention for arrays. GLA, RWKV-6 and their family on NumPy and CuPy, without torch."""

from . import layers, stages
from .autodiff import vjp
from .errors import ContractError, ContractTypeError, NotSupported
from .explanation import Explanation, explain, warm_up
from .ops import (
    OPS,
    gla,
    gla_step,
    hgrn2,
    linear_attention,
    retention,
    rwkv6,
    rwkv6_step,
    simple_gla,
    softmax_attention,
)
from .precisions import precision
from .warnings_of_misuse import LinattnWarning

__version__ = "0.1.0"
__all__ = [
    "gla",
    "rwkv6",
    "hgrn2",
    "simple_gla",
    "retention",
    "linear_attention",
    "softmax_attention",
    "gla_step",
    "rwkv6_step",
    "vjp",
    "explain",
    "warm_up",
    "precision",
    "layers",
    "stages",
    "OPS",
    "Explanation",
    "ContractError",
    "ContractTypeError",
    "NotSupported",
    "LinattnWarning",
]


def __dir__():
    """The public names alone; modules are imported by their own."""
    return [*__all__, "__doc__", "__version__"]
