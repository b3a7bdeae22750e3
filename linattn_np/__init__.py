"""linattn_np: linear attention for arrays. GLA, delta rules and RWKV on NumPy and CuPy, without torch."""

# First: while NumPy and this package are imported, it has the command linattn-np print one line for an error or Ctrl-C.
from .command import loading  # noqa: F401  # isort: skip
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
    "layers",  # modules whose functions callers reach as linattn_np.layers.f; those of `ops` are names of this module
    "stages",
    "OPS",  # {the declaration of an operator: its function}
    "Explanation",
    "ContractError",
    "ContractTypeError",
    "NotSupported",
    "LinattnWarning",
]
__all__ += ops.functions.__all__
__all__ += ops.steps.__all__


def __dir__():
    """The public names alone. Other modules, such as linattn_np.models, are imported by their names."""
    return [*__all__, "__doc__", "__version__"]
