"""flash-linear-attention's functions by their names, with their arguments and results: change one import.

    from fla.ops.gla import chunk_gla           becomes         from linattn_np.interop.fla import chunk_gla

Tensors are torch's, [B, T, H, ...], and every function returns a pair: o with the final state or None, or with the
attentions where the name begins with `parallel_`. The functions are those of `linattn_np.interop.torch`, with its
gradients, errors and devices; `chunk_`, `fused_chunk_`, `fused_recurrent_` and `parallel_` name one computation.

`cu_seqlens` may be a tensor on any device; one on a card is waited for unless `cu_seqlens_cpu` is given too.
`transpose_state_layout` is the older name of `state_v_first`, and `head_first=True`, which flash-linear-attention has
removed, is refused.

Example
-------
>>> import torch
>>> from linattn_np.interop.fla import chunk_gla
>>> q, k, v, g = torch.randn(4, 1, 50, 2, 8).unbind()
>>> o, state = chunk_gla(q, k, v, torch.nn.functional.logsigmoid(g), output_final_state=True)
>>> o.shape, state.shape
(torch.Size([1, 50, 2, 8]), torch.Size([1, 2, 8, 8]))
"""

from __future__ import annotations

import warnings
from functools import partial
from inspect import Parameter, Signature

import torch

from ..errors import ContractError
from . import torch as operators
from .calls import named_function

STATES = "scale initial_state output_final_state"
ANYWHERE = ("reverse", "state_v_first", "transpose_state_layout", "head_first", "chunk_size", "cu_seqlens_cpu")
OPTIONAL = ("gk", "gv", "g_gamma")
DEFAULTS = dict.fromkeys(("output_final_state", "output_attentions", "reverse", "state_v_first", "head_first"), False)


def fla_function(name: str, operator: str, arguments: str, **defaults):
    """The function `name` of flash-linear-attention, computed by ours; `arguments` in the order of theirs."""
    positional = arguments.split()
    required = positional[: positional.index("scale")]
    defaults = DEFAULTS | {x: Parameter.empty for x in required if x not in OPTIONAL} | defaults
    signature = Signature(
        [Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(x)) for x in positional]
        + [Parameter(x, Parameter.KEYWORD_ONLY, default=defaults.get(x)) for x in ANYWHERE if x not in positional]
    )

    def public(*positional, **named):
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        return compute_pair(name, operator, given.arguments)

    doc = f"""flash-linear-attention's `{name}`, by `linattn_np.interop.torch.{operator}`.

    Its equation, errors and gradients are those of `linattn_np.{operator}`; see `linattn_np.interop.fla`.
    """
    return named_function(public, name, doc, signature)


def compute_pair(name, operator, given):
    """(o, the final state or None), or (o, the attentions or None)."""
    options = {
        x: value for x, value in given.items() if value is not None and x not in ("head_first", "cu_seqlens_cpu")
    }
    if given["head_first"]:
        raise ContractError(f"{name}: head_first is True, expected tensors [B, T, H, ...]: x.transpose(1, 2) is one")
    if options.pop("transpose_state_layout", None) is not None:
        if given["state_v_first"]:
            raise ContractError(f"{name}: state_v_first and transpose_state_layout name one option")
        warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=3)
        options["state_v_first"] = given["transpose_state_layout"]
    bounds = given.get("cu_seqlens") if given["cu_seqlens_cpu"] is None else given["cu_seqlens_cpu"]
    if bounds is not None:
        options["cu_seqlens"] = bounds.tolist() if isinstance(bounds, torch.Tensor) else bounds
    ARRAYS.get(operator, dict)(options)
    if isinstance(state := options.get("initial_state"), tuple):  # the sum of the keys is [N, 1, H, K]
        options["initial_state"] = state[0], state[1][:, 0]
    attentions, final = options.pop("output_attentions", False), options.pop("output_final_state", False)
    call = partial(getattr(operators, operator), layout="bthd", **options)
    if not final:
        return call(), scores(call) if attentions else None
    o, state = call(output_final_state=True)
    return o, (state[0], state[1][:, None]) if isinstance(state, tuple) else state


def scores(call):
    """[B, H, T, T], with their decays: what an operator makes of the unit matrix as values."""
    q = call.keywords["q"]
    unit = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)[None, :, None].expand(*q.shape[:3], -1)
    return call(v=unit).transpose(1, 2)


# -- arrays that theirs may be without --------------------------------------------------------------------------------
def gates_of_gla(options):
    if (g := options.pop("gk", None)) is not None:
        options["g"] = g
    if "g" not in options:
        options["g"] = torch.zeros_like(options["k"])


def gates_of_simple_gla(options):
    gates = [x for x in (options.get("g"), options.pop("g_gamma", None)) if x is not None]
    k = options["k"]
    options["g"] = sum(
        gates, torch.zeros(k.shape[:3], dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    )


ARRAYS = {"gla": gates_of_gla, "simple_gla": gates_of_simple_gla}


# -- theirs -----------------------------------------------------------------------------------------------------------
chunk_gla = fla_function("chunk_gla", "gla", f"q k v g {STATES} state_v_first cu_seqlens cu_seqlens_cpu")
fused_chunk_gla = fla_function("fused_chunk_gla", "gla", f"q k v g {STATES} state_v_first cu_seqlens cu_seqlens_cpu")
fused_recurrent_gla = fla_function(
    "fused_recurrent_gla", "gla", f"q k v gk gv {STATES} reverse state_v_first cu_seqlens"
)

chunk_rwkv6 = fla_function("chunk_rwkv6", "rwkv6", f"r k v w u {STATES} cu_seqlens cu_seqlens_cpu")
fused_recurrent_rwkv6 = fla_function("fused_recurrent_rwkv6", "rwkv6", f"r k v w u {STATES} reverse cu_seqlens")

scalar = partial(fla_function, operator="simple_gla", g=None)
chunk_simple_gla = scalar(
    "chunk_simple_gla", arguments=f"q k v g g_gamma {STATES} state_v_first cu_seqlens cu_seqlens_cpu"
)
fused_chunk_simple_gla = scalar("fused_chunk_simple_gla", arguments=f"q k v g g_gamma {STATES} cu_seqlens")
fused_recurrent_simple_gla = scalar(
    "fused_recurrent_simple_gla", arguments=f"q k v g g_gamma {STATES} reverse state_v_first cu_seqlens"
)
parallel_simple_gla = scalar(
    "parallel_simple_gla", arguments="q k v g scale output_attentions cu_seqlens cu_seqlens_cpu"
)

chunk_retention = fla_function("chunk_retention", "retention", f"q k v {STATES} cu_seqlens")
fused_chunk_retention = fla_function("fused_chunk_retention", "retention", f"q k v {STATES} cu_seqlens")
fused_recurrent_retention = fla_function(
    "fused_recurrent_retention", "retention", f"q k v {STATES} reverse state_v_first cu_seqlens"
)
parallel_retention = fla_function("parallel_retention", "retention", "q k v scale output_attentions cu_seqlens")

summed = partial(fla_function, operator="linear_attention")
chunk_linear_attn = summed("chunk_linear_attn", arguments=f"q k v {STATES} normalize cu_seqlens", normalize=True)
fused_chunk_linear_attn = summed(
    "fused_chunk_linear_attn", arguments=f"q k v {STATES} normalize cu_seqlens", normalize=True
)
fused_recurrent_linear_attn = summed(
    "fused_recurrent_linear_attn", arguments=f"q k v {STATES} reverse normalize cu_seqlens", normalize=False
)
