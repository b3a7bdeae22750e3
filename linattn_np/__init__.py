"""linattn_np: linear attention for arrays. GLA, delta rules and RWKV on NumPy and CuPy, without torch."""

from .command import loading  # noqa: F401  # isort: skip  # before NumPy is imported
from . import layers, ops, stages
from .autodiff import vjp
from .errors import ContractError, ContractTypeError, NotSupported
from .explanation import Explanation, explain, warm_up
from .gates import gdn_gate, kda_gate, rwkv7_gate
from .ops import OPS
from .ops.functions import *  # noqa: F403
from .ops.steps import *  # noqa: F403
from .precisions import precision
from .warnings_of_misuse import LinattnWarning

__version__ = "0.2.0"
__all__ = [
    "vjp",
    "explain",
    "warm_up",
    "precision",
    "gdn_gate",
    "kda_gate",
    "rwkv7_gate",
    "layers",
    "stages",
    "OPS",
    "Explanation",
    "ContractError",
    "ContractTypeError",
    "NotSupported",
    "LinattnWarning",
]
__all__ += ops.functions.__all__
__all__ += ops.steps.__all__


def __dir__():
    """The public names alone; modules are imported by their own."""
    return [*__all__, "__doc__", "__version__"]
