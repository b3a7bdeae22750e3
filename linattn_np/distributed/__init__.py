"""The operators on a sequence that is cut over ranks: processes, hosts or cards, each with a part of the tokens."""

from .agreement import Disagreement
from .engine import Alone, Engine, RankLost
from .operators import gla, linear_attention, retention, rwkv6, simple_gla, vjp
from .threads import run_threads

__all__ = ["gla", "rwkv6", "simple_gla", "retention", "linear_attention", "vjp", "run_threads", "Engine", "Alone",
           "RankLost", "Disagreement"]
