"""The names of RWKV models' parameters in files, and their conversion to the official names and shapes."""

from collections.abc import Callable, Mapping
from math import inf

import numpy as np

from ...array_kinds import FLOATS
from ...errors import ContractTypeError
from ..array_math import ACTIVATIONS
from ..checkpoint import refuse as refuse_file
from ..number_checks import shown
from .adapters import LORA_A, LORA_B
from .version import HIDDEN_ACT_NAME, NORM_EPS_NAME, VERSION_NAME, Version, hidden_act, number_in

BLOCK_PREFIXES = ("rwkv.blocks.", "model.layers.", "blocks.")  # Hugging Face's, flash-linear-attention's, the official
TRAINER_PREFIXES = ("module.", "model.")  # DDP's, Lightning's
TRAINER_PARTS = {  # of names, anywhere: DeepSpeed's, torch.compile's, FSDP's, and of checkpointed activations
    "_forward_module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}
# The beginnings of names, without a trainer's prefix.
BEGINNINGS = (
    *("blocks.", "emb.", "ln_out.", "head.", "rwkv."),
    *("model.layers.", "model.embeddings.", "model.norm.", "lm_head."),
)
# {official name, or a part of one: that of flash-linear-attention (fla), or of Hugging Face}
FLA_NAMES = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
FLA_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"}


# -- conversions of a file's array to the official one ----------------------------------------------------------------
def identity(x):
    return x


def as_row(x):
    """A vector as [1, 1, D]."""
    return x.reshape(1, 1, -1)


def transposed(x):
    return x.swapaxes(-1, -2)


# -- namings: functions from an official name to (the name in the file, the conversion of its array) ------------------
def official_naming(name):
    return name, identity


def hugging_face_naming(name):
    prefix = "" if name == "head.weight" else "rwkv."
    return prefix + ".".join(HUGGING_FACE.get(part, part) for part in name.split(".")), identity


def fla_naming(in_block: Callable) -> Callable:
    """fla's naming. ``in_block(parameter)`` is the version's naming of a block's parameters, other than norms', without
    the prefix of the block."""

    def naming(name):
        if name in FLA_NAMES:
            return FLA_NAMES[name], identity
        _, i, parameter = name.split(".", 2)
        norm, _, ending = parameter.rpartition(".")
        file_name, convert = (f"{FLA_NORMS[norm]}.{ending}", identity) if norm in FLA_NORMS else in_block(parameter)
        return f"model.layers.{i}.{file_name}", convert

    return naming


def official_names_first(weights: Mapping, naming: Callable) -> Callable:
    """The naming `naming`, except for official names that are in `weights` as they are."""
    return lambda name: (name, identity) if name in weights else naming(name)


def block_prefix(weights: Mapping) -> str:
    """The first prefix of BLOCK_PREFIXES with which a name in `weights` begins; by default the official one."""
    return next((prefix for prefix in BLOCK_PREFIXES if any(name.startswith(prefix) for name in weights)), "blocks.")


# -- weights ----------------------------------------------------------------------------------------------------------
def official(version: Version, weights: Mapping) -> dict:
    """`weights` under the official names and in the official shapes, in the official order.

    weights : mapping from names to host arrays
        The names are those that `version.naming` accepts; any may have prefixes of trainers, see `unwrapped`. A trained
        initial state, `blocks.i.att.time_state`, always has its official name.

    Arrays are views, unless a naming's conversion copies them. Shapes are not checked.

    Raises
    ------
    CheckpointError
        The weights are those of another version, or some are missing or unknown.

    Example
    -------
    >>> from linattn_np.models import checkpoint
    >>> from linattn_np.models.rwkv6.names import VERSION
    >>> weights = official(VERSION, checkpoint.read("examples/data/austen-x060/model.safetensors"))
    >>> list(weights)[:2], weights["blocks.0.att.time_maa_w2"].shape
    (['emb.weight', 'blocks.0.ln0.weight'], (5, 32, 256))
    """
    weights = unwrapped(weights)
    refuse_unmerged_adapters(weights)
    refuse_other_versions(version, weights)
    version.check_number(number_in(weights), "what is merged into the model")
    prefix, naming = version.naming(weights)
    layers = len({name.removeprefix(prefix).split(".")[0] for name in weights if name.startswith(prefix)})
    has_initial_state = any(name.endswith(".time_state") for name in weights)
    sources = {name: naming(name) for name in version.parameter_axes(layers, has_initial_state)}
    sources |= {name: (name, identity) for name in (NORM_EPS_NAME, HIDDEN_ACT_NAME) if name in weights}
    conversions = dict(sources.values())
    unread = {VERSION_NAME, *(naming(f"blocks.0.{name}")[0] for name in version.first_layer_lacks)}
    missing = [name for name in conversions if name not in weights]
    unknown = [name for name in weights if name not in conversions and name not in unread]
    if missing or unknown:
        refuse_file(
            " and ".join(
                f"{what} {shown(names[0])}" + (f" and {len(names) - 1} more" if names[1:] else "")
                for what, names in (("lacks", missing), ("has an unknown", unknown))
                if names
            ),
            f"the parameters of {version.title} with {layers} blocks",
        )
    return {name: converted(weights, file_name, convert, name) for name, (file_name, convert) in sources.items()}


def unwrapped(weights: Mapping) -> Mapping:
    """`weights` by names without what trainers add to any of them; CheckpointError if two names become one."""
    plain: dict = {}
    for name, array in weights.items():
        if without_trainers(name) in plain:
            refuse_file(f"{shown(name)} is there with another prefix, or with none, too", "every parameter once")
        plain[without_trainers(name)] = array
    return plain


def without_trainers(name: str) -> str:
    """A name without TRAINER_PARTS, and without TRAINER_PREFIXES before one of BEGINNINGS."""
    plain = ".".join(part for part in name.split(".") if part not in TRAINER_PARTS)
    while not plain.startswith(BEGINNINGS):
        prefix = next((prefix for prefix in TRAINER_PREFIXES if plain.startswith(prefix)), None)
        if prefix is None:
            return name
        plain = plain.removeprefix(prefix)
    return plain


def parameters(version: Version, weights: Mapping) -> tuple[dict, dict[str, int]]:
    """(the weights by official name, {axis: size}), after checking that all shapes fit each other.

    The first array with an axis gives the axis its size. CheckpointError as in `official`, ContractError for the rest.
    """
    weights = official(version, weights)
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    sizes = {"1": 1, "5": 5, "L": layers}  # an axis that a version names by a digit has that size
    declared = version.parameter_axes(layers, has_initial_state="blocks.0.att.time_state" in weights)
    for name, axes_text in declared.items():
        axes, shape = axes_text.split(), tuple(weights[name].shape)
        if len(shape) == len(axes):
            for axis, size in zip(axes, shape):
                sizes.setdefault(axis, size)
        expected = tuple(sizes.get(axis, axis) for axis in axes)
        if shape != expected:
            version.refuse(f"{name} is {shape}, expected [{', '.join(axes)}] = {expected}")
        if weights[name].dtype not in FLOATS:
            version.refuse(f"{name} has dtype {weights[name].dtype}, expected floats", ContractTypeError)
    H, N, D, bonus = *(sizes[axis] for axis in "HND"), version.layer["bonus"].names[0]
    if H * N != D:
        version.refuse(f"{bonus} has H={H} heads of N={N}, expected H x N = D = {D}")
    if "5A" in sizes and sizes["5A"] != 5 * sizes["A"]:
        version.refuse(f"att.time_maa_w1 has {sizes['5A']} columns, expected 5 x A = {5 * sizes['A']}")
    eps = weights.get(NORM_EPS_NAME)
    if eps is not None and (eps.shape != (2,) or not all(0 < number < inf for number in eps)):
        version.refuse(f"{NORM_EPS_NAME} is {eps.dtype} {eps.shape}, expected two numbers above 0")
    if (act := weights.get(HIDDEN_ACT_NAME)) is not None:
        if act.dtype != np.uint8 or act.ndim != 1 or hidden_act(weights) not in ACTIVATIONS:
            version.refuse(f"{HIDDEN_ACT_NAME} is {act.dtype} {act.shape}, expected a name: {', '.join(ACTIVATIONS)}")
    return weights, sizes


def converted(weights, file_name, convert, name):
    """The official array `name`, converted by `convert` from the file's array `file_name`."""
    try:
        return convert(weights[file_name])
    except (ValueError, IndexError):
        refuse_file(f"{shown(file_name)} is {weights[file_name].shape}", f"what {name} can be made of")


def refuse_unmerged_adapters(weights):
    """CheckpointError if a name is that of an adapter's matrix."""
    for name in weights:
        if any(part in (LORA_A, LORA_B) for part in name.split(".")):
            refuse_file(
                f"{shown(name)} belongs to a LoRA adapter that is not merged",
                "merged weights: linattn-np merge writes them, and generate --adapter reads it beside its model",
            )


def refuse_other_versions(version, weights):
    """CheckpointError if a name is that of another version's parameter."""
    for part, other_version in version.foreign_parts(weights).items():
        name = next((name for name in weights if part in name.split(".")), None)
        if name is not None:
            if other_version == "RWKV-5" and not any("ln_x" in other for other in weights):
                other_version = "RWKV-4"  # RWKV-4 has RWKV-5's names, but no group norm
            refuse_file(f"{shown(name)} belongs to {other_version}", f"the parameters of {version.title}")
