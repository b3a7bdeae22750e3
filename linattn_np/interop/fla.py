"""flash-linear-attention's functions under their own names, with their arguments and results: change one import.

    from fla.ops.gla import chunk_gla           becomes         from linattn_np.interop.fla import chunk_gla

Arrays are torch tensors [B, T, H, ...]. Every function returns (o, final state or None); functions whose names begin
with `parallel_` return (o, attention matrix or None). All call the functions of `linattn_np.interop.torch`, with their
gradients, errors and devices. The prefixes `chunk_`, `fused_chunk_`, `fused_recurrent_` and `parallel_` make no
difference to the computation.

`cu_seqlens` may be a tensor on any device; reading it from a GPU synchronises, unless `cu_seqlens_cpu` is given, too.
`transpose_state_layout` is the older name of `state_v_first`. `head_first=True`, which flash-linear-attention has
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

from ..contract import bound_arguments
from ..errors import ContractError, NotSupported
from . import torch as operators
from .calls import named_function

# Arguments that several functions have, by flash-linear-attention's names.
STATES = "scale initial_state output_final_state"
COMMON_KEYWORDS = ("reverse", "state_v_first", "transpose_state_layout", "head_first", "chunk_size", "cu_seqlens_cpu")
OPTIONAL = ("gk", "gv", "g_gamma", "A_log", "dt_bias")
EMPTY = Parameter.empty
DEFAULTS = dict.fromkeys(("output_final_state", "output_attentions", "reverse", "state_v_first", "head_first"), False)


def fla_function(name: str, operator: str, arguments: str, more: str = "", **defaults):
    """The function `name` of flash-linear-attention, computed by our function `operator`.

    arguments : the names of its positional arguments, in their order; those before `scale` are arrays
    more : the names of keyword-only arguments beside COMMON_KEYWORDS
    defaults : default values, where they are not those of DEFAULTS or None
    """
    positional = arguments.split()
    arrays = positional[: positional.index("scale")]
    keyword_only = [option for option in (*COMMON_KEYWORDS, *more.split()) if option not in positional]
    defaults = DEFAULTS | {array: EMPTY for array in arrays if array not in OPTIONAL} | defaults
    signature = Signature(
        [Parameter(option, Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(option)) for option in positional]
        + [Parameter(option, Parameter.KEYWORD_ONLY, default=defaults.get(option)) for option in keyword_only]
    )

    def public(*positional, **named):
        call = bound_arguments(name, signature, positional, named)
        call.apply_defaults()
        return compute_pair(name, operator, call.arguments)

    doc = f"""flash-linear-attention's `{name}`, by `linattn_np.interop.torch.{operator}`.

    Its equation, errors and gradients are those of `linattn_np.{operator}`; see `linattn_np.interop.fla`.
    """
    return named_function(public, name, doc, signature)


def compute_pair(name, operator, given):
    """Computes a call of `name`: (o, final state or None), or (o, attention matrix or None).

    given : {name: value} of all its arguments, with defaults
    """
    options = our_options(name, operator, given)
    if operator in CONVERSIONS:
        operator = CONVERSIONS[operator](options) or operator
    attentions, wants_state = options.pop("output_attentions", False), options.pop("output_final_state", False)
    call = partial(getattr(operators, operator), layout="bthd", **options)
    if not wants_state:
        return call(), attention_matrix(call) if attentions else None
    o, state = call(output_final_state=True)
    return o, (state[0], state[1][:, None]) if isinstance(state, tuple) else state  # see `our_options`


def our_options(name, operator, given) -> dict:
    """The given arguments that are not None, those that all functions have by our names; ContractError for values that
    flash-linear-attention refuses."""
    if given["head_first"]:
        raise ContractError(f"{name}: head_first is True, expected tensors [B, T, H, ...]: x.transpose(1, 2) is one")
    unread = ("head_first", "cu_seqlens_cpu")
    options = {argument: x for argument, x in given.items() if x is not None and argument not in unread}
    if options.pop("transpose_state_layout", None) is not None:
        if given["state_v_first"]:
            raise ContractError(f"{name}: state_v_first and transpose_state_layout name one option")
        warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=4)
        options["state_v_first"] = given["transpose_state_layout"]
    bounds = given.get("cu_seqlens") if given["cu_seqlens_cpu"] is None else given["cu_seqlens_cpu"]
    if bounds is not None:
        options["cu_seqlens"] = bounds.tolist() if isinstance(bounds, torch.Tensor) else bounds
    size = given.get("chunk_size")
    if size is not None and size not in (sizes := CHUNK_SIZES.get(operator, (size,))):
        raise ContractError(
            f"{name}: `chunk_size` must be either {' or '.join(map(str, sizes))}, got {size}: results are the same"
        )
    if isinstance(state := options.get("initial_state"), tuple):  # flash-linear-attention's sum of keys is [N, 1, H, K]
        options["initial_state"] = state[0], state[1][:, 0]
    return options


def attention_matrix(call):
    """The attention matrix [B, H, T, T], decays included: the operator's output for the identity matrix as values."""
    q = call.keywords["q"]
    unit = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)[None, :, None].expand(*q.shape[:3], -1)
    return call(v=unit).transpose(1, 2)


# -- conversions of the arguments, a dict, to our function's, in place; they return the operator's name if it changes --
def gla_arguments(options):
    """Renames gk to g; without a gate, log decays are 0."""
    if (g := options.pop("gk", None)) is not None:
        options["g"] = g
    if "g" not in options:
        options["g"] = torch.zeros_like(options["k"])


def simple_gla_arguments(options):
    """Adds the heads' constant gates g_gamma to g; without a gate, log decays are 0."""
    k, g, constants = options["k"], options.get("g"), options.pop("g_gamma", None)
    dtype = torch.promote_types(k.dtype, torch.float32)
    g = torch.zeros(k.shape[:3], dtype=dtype, device=k.device) if g is None else torch.as_tensor(g, dtype=dtype)
    options["g"] = g if constants is None else g + constants


def delta_rule_arguments(options):
    """Computes beta and g from raw ones, if asked to; without beta, the raw one is 1."""
    for name in KERNEL_OPTIONS:
        options.pop(name, None)
    if options.pop("use_qk_l2norm_in_kernel", False):
        options["qk_l2norm"] = True
    beta, largest_beta = options.get("beta"), 2 if options.pop("allow_neg_eigval", False) else 1
    options["beta"] = beta = torch.ones_like(options["v"][..., 0]) if beta is None else beta
    if options.pop("use_beta_sigmoid_in_kernel", False):
        options["beta"] = largest_beta * beta.float().sigmoid()
    of_gate = ("use_gate_in_kernel", "A_log", "dt_bias", "lower_bound")
    uses_raw_gate, A_log, dt_bias, lower_bound = (options.pop(argument, None) for argument in of_gate)
    g = options.get("g")
    if uses_raw_gate and g is not None:
        A_log = torch.zeros(g.shape[2], dtype=torch.float32, device=g.device) if A_log is None else A_log.reshape(-1)
        options["g"] = (
            operators.gdn_gate(g, A_log, dt_bias) if g.ndim == 3 else operators.kda_gate(g, A_log, dt_bias, lower_bound)
        )


def gated_delta_rule_arguments(options):
    """As `delta_rule_arguments`; with gates per channel the operator is `kda`, without any gate `delta_rule`."""
    if options.pop("gv", None) is not None:
        raise NotSupported("fused_recurrent_gated_delta_rule: gv is given, but the delta rule has no gates of values")
    delta_rule_arguments(options)
    g, gk = options.get("g"), options.pop("gk", None)
    if gk is not None:
        options["g"] = gk if g is None else gk + g[..., None]
        return "kda"
    return None if g is not None else "delta_rule"


def rwkv7_arguments(options):
    """Renames q and gk. If `kk` is given, `a` is the in-context learning rate, and our arrays are -kk and kk a."""
    for name in (*KERNEL_OPTIONS, "lower_bound"):
        options.pop(name, None)
    for their_name, our_name in (("q", "r"), ("gk", "w")):
        if their_name in options:
            options[our_name] = options.pop(their_name)
    if (kk := options.pop("kk", None)) is not None:
        options["a"], options["b"] = -kk, kk * options["a"]


# Chunk sizes that flash-linear-attention accepts.
CHUNK_SIZES = {"delta_rule": (16, 32, 64), "gated_delta_rule": (16, 32, 64), "kda": (32, 64)}
KERNEL_OPTIONS = ("chunk_size", "safe_gate", "disable_recompute")  # options of their kernels, without effect on results
CONVERSIONS = {
    "gla": gla_arguments,
    "simple_gla": simple_gla_arguments,
    "delta_rule": delta_rule_arguments,
    "gated_delta_rule": gated_delta_rule_arguments,
    "kda": delta_rule_arguments,
    "rwkv7": rwkv7_arguments,
}


# -- the functions ----------------------------------------------------------------------------------------------------
chunk_gla = fla_function("chunk_gla", "gla", f"q k v g {STATES} state_v_first cu_seqlens cu_seqlens_cpu")
fused_chunk_gla = fla_function("fused_chunk_gla", "gla", f"q k v g {STATES} state_v_first cu_seqlens cu_seqlens_cpu")
fused_recurrent_gla = fla_function(
    "fused_recurrent_gla", "gla", f"q k v gk gv {STATES} reverse state_v_first cu_seqlens"
)

chunk_rwkv6 = fla_function("chunk_rwkv6", "rwkv6", f"r k v w u {STATES} cu_seqlens cu_seqlens_cpu")
fused_recurrent_rwkv6 = fla_function("fused_recurrent_rwkv6", "rwkv6", f"r k v w u {STATES} reverse cu_seqlens")

simple_gla_function = partial(fla_function, operator="simple_gla", g=None)
chunk_simple_gla = simple_gla_function(
    "chunk_simple_gla", arguments=f"q k v g g_gamma {STATES} state_v_first cu_seqlens cu_seqlens_cpu"
)
fused_chunk_simple_gla = simple_gla_function("fused_chunk_simple_gla", arguments=f"q k v g g_gamma {STATES} cu_seqlens")
fused_recurrent_simple_gla = simple_gla_function(
    "fused_recurrent_simple_gla", arguments=f"q k v g g_gamma {STATES} reverse state_v_first cu_seqlens"
)
parallel_simple_gla = simple_gla_function(
    "parallel_simple_gla", arguments="q k v g scale output_attentions cu_seqlens cu_seqlens_cpu"
)

chunk_retention = fla_function("chunk_retention", "retention", f"q k v {STATES} cu_seqlens")
fused_chunk_retention = fla_function("fused_chunk_retention", "retention", f"q k v {STATES} cu_seqlens")
fused_recurrent_retention = fla_function(
    "fused_recurrent_retention", "retention", f"q k v {STATES} reverse state_v_first cu_seqlens"
)
parallel_retention = fla_function("parallel_retention", "retention", "q k v scale output_attentions cu_seqlens")

linear_function = partial(fla_function, operator="linear_attention")
chunk_linear_attn = linear_function(
    "chunk_linear_attn", arguments=f"q k v {STATES} normalize cu_seqlens", normalize=True
)
fused_chunk_linear_attn = linear_function(
    "fused_chunk_linear_attn", arguments=f"q k v {STATES} normalize cu_seqlens", normalize=True
)
fused_recurrent_linear_attn = linear_function(
    "fused_recurrent_linear_attn", arguments=f"q k v {STATES} reverse normalize cu_seqlens", normalize=False
)

L2_NORM, BETA = "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel allow_neg_eigval"
GATE = "use_gate_in_kernel A_log dt_bias"
chunk_delta_rule = fla_function(
    "chunk_delta_rule", "delta_rule", f"q k v beta {STATES} {L2_NORM} cu_seqlens cu_seqlens_cpu"
)
fused_recurrent_delta_rule = fla_function(
    "fused_recurrent_delta_rule", "delta_rule", f"q k v beta {STATES} {L2_NORM} cu_seqlens", beta=None
)

chunk_gated_delta_rule = fla_function(
    "chunk_gated_delta_rule",
    "gated_delta_rule",
    f"q k v g beta {STATES} {L2_NORM} {BETA} state_v_first cu_seqlens cu_seqlens_cpu",
    GATE,
)
fused_recurrent_gated_delta_rule = fla_function(
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule",
    f"q k v g gk gv beta {STATES} {L2_NORM} {GATE} {BETA} state_v_first cu_seqlens",
    g=None,
    beta=None,
)

chunk_kda = fla_function(
    "chunk_kda",
    "kda",
    f"q k v g beta {STATES} {L2_NORM} use_gate_in_kernel {BETA} safe_gate lower_bound disable_recompute",
    "cu_seqlens A_log dt_bias",
)
fused_recurrent_kda = fla_function(
    "fused_recurrent_kda",
    "kda",
    f"q k v g beta A_log dt_bias {STATES} {L2_NORM} use_gate_in_kernel {BETA} lower_bound state_v_first cu_seqlens",
)

DPLR = "safe_gate chunk_size disable_recompute"
chunk_rwkv7 = fla_function(
    "chunk_rwkv7", "rwkv7", f"r w k v a b {STATES} cu_seqlens cu_seqlens_cpu {DPLR}", "lower_bound", scale=1.0
)
fused_recurrent_rwkv7 = fla_function(
    "fused_recurrent_rwkv7", "rwkv7", f"r w k v a b {STATES} cu_seqlens", output_final_state=True
)
fused_mul_recurrent_rwkv7 = fla_function(
    "fused_mul_recurrent_rwkv7", "rwkv7", f"r w k v kk a {STATES} reverse cu_seqlens", scale=1.0
)
chunk_dplr_delta_rule = fla_function(
    "chunk_dplr_delta_rule", "rwkv7", f"q k v a b gk {STATES} cu_seqlens cu_seqlens_cpu {DPLR}", "lower_bound", gk=EMPTY
)
fused_recurrent_dplr_delta_rule = fla_function(
    "fused_recurrent_dplr_delta_rule", "rwkv7", f"q k v a b gk {STATES} reverse cu_seqlens", gk=EMPTY
)
