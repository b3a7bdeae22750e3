"""What a type checker sees of the functions that `interop.jax` and `interop.torch` make of the declarations."""

from collections.abc import Callable
from typing import Any

from ..gates import gdn_gate as gdn_gate
from ..gates import kda_gate as kda_gate
from ..gates import rwkv7_gate as rwkv7_gate
from ..ops.functions import *  # noqa: F403

gla_step: Callable[..., tuple[Any, Any]]
rwkv6_step: Callable[..., tuple[Any, Any]]
delta_rule_step: Callable[..., tuple[Any, Any]]
gated_delta_rule_step: Callable[..., tuple[Any, Any]]
kda_step: Callable[..., tuple[Any, Any]]
rwkv7_step: Callable[..., tuple[Any, Any]]
