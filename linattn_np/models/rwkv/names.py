"""What files call the parameters of RWKV models, and what makes the official ones of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from ...array_kinds import FLOATS
from ...errors import ContractTypeError
from ..checkpoint import refuse as refuse_file
from ..number_checks import shown
from .version import NORM_EPS_NAME, Version

BLOCKS = ("rwkv.blocks.", "model.layers.", "blocks.")  # the blocks of Hugging Face, of fla, and the official ones
TRAINERS = ("_forward_module.", "module.", "model.", "_orig_mod.")  # DeepSpeed, DDP, Lightning, torch.compile
ADAPTERS = ("lora_A", "lora_B")  # of PEFT and RWKV-PEFT
FLA = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
FLA_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"}


# -- what makes an official array of a file's -------------------------------------------------------------------------
def same(x):
    return x


def row(x):
    return x.reshape(1, 1, -1)


def transposed(x):
    return x.swapaxes(-1, -2)


# -- from an official name to a file's, and what makes the one's array of the other's ---------------------------------
def unchanged(name):
    return name, same


def hugging_face(name):
    prefix = "" if name == "head.weight" else "rwkv."
    return prefix + ".".join(HUGGING_FACE.get(part, part) for part in name.split(".")), same


def fla(in_block: Callable) -> Callable:
    """fla's naming; `in_block` has it for the name of a parameter in a block that is no norm's."""

    def origin(name):
        if name in FLA:
            return FLA[name], same
        _, i, parameter = name.split(".", 2)
        norm, _, ending = parameter.rpartition(".")
        its_name, make = (f"{FLA_NORMS[norm]}.{ending}", same) if norm in FLA_NORMS else in_block(parameter)
        return f"model.layers.{i}.{its_name}", make

    return origin


def official_first(weights: Mapping, origin: Callable) -> Callable:
    """`origin`, but for official names that `weights` have."""
    return lambda name: (name, same) if name in weights else origin(name)


def blocks_of(weights: Mapping) -> str:
    """The one of BLOCKS that the names have."""
    return next((prefix for prefix in BLOCKS if any(name.startswith(prefix) for name in weights)), "blocks.")


# -- weights ----------------------------------------------------------------------------------------------------------
def official(version: Version, weights: Mapping) -> dict:
    """`weights` under the official names and in the official shapes, in the official order.

    weights : mapping from names to host arrays
        As `version.naming` knows them. Trainers' TRAINERS may stand before all names. A tuned
        `blocks.i.att.time_state` may be there, under its official name whatever the others are.

    Arrays are views, but where a naming orders them. Shapes are the model's to check.

    Raises
    ------
    CheckpointError
        The weights are those of another version, or some are missing or left over.

    Example
    -------
    >>> from linattn_np.models import checkpoint
    >>> from linattn_np.models.rwkv6.names import VERSION
    >>> weights = official(VERSION, checkpoint.read("examples/data/austen-x060/model.safetensors"))
    >>> list(weights)[:2], weights["blocks.0.att.time_maa_w2"].shape
    (['emb.weight', 'blocks.0.ln0.weight'], (5, 32, 256))
    """
    weights = unwrapped(weights)
    refuse_adapters(weights)
    refuse_other_versions(version, weights)
    blocks, origin = version.naming(weights)
    layers = len({name.removeprefix(blocks).split(".")[0] for name in weights if name.startswith(blocks)})
    tuned = any(name.endswith(".time_state") for name in weights)
    origins = {name: origin(name) for name in version.parameter_axes(layers, tuned)}
    origins |= {NORM_EPS_NAME: (NORM_EPS_NAME, same)} if NORM_EPS_NAME in weights else {}
    wanted = dict(origins.values())
    unread = {origin(f"blocks.0.{name}")[0] for name in version.first_layer_lacks}
    missing = [name for name in wanted if name not in weights]
    left_over = [name for name in weights if name not in wanted and name not in unread]
    if missing or left_over:
        refuse_file(
            " and ".join(
                f"{what} {shown(names[0])}" + (f" and {len(names) - 1} more" if names[1:] else "")
                for what, names in (("lacks", missing), ("has an unknown", left_over))
                if names
            ),
            f"the parameters of {version.title} with {layers} blocks",
        )
    return {name: made(weights, its_name, make, name) for name, (its_name, make) in origins.items()}


def unwrapped(weights: Mapping) -> Mapping:
    """`weights` without what trainers put before all names."""
    while weights and not any(name.startswith(BLOCKS) for name in weights):
        prefix = next((word for word in TRAINERS if all(name.startswith(word) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): array for name, array in weights.items()}
    return weights


def parameters(version: Version, weights: Mapping) -> tuple[dict, dict[str, int]]:
    """`weights` under their official names, and the model's sizes, once every shape fits the others."""
    weights = official(version, weights)
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    sizes = {"1": 1, "5": 5, "L": layers}
    declared = version.parameter_axes(layers, has_initial_state="blocks.0.att.time_state" in weights)
    for name, declaration in declared.items():
        axes, shape = declaration.split(), tuple(weights[name].shape)
        if len(shape) == len(axes):
            for axis, size in zip(axes, shape):
                sizes.setdefault(axis, size)
        wanted = tuple(sizes.get(axis, axis) for axis in axes)
        if shape != wanted:
            version.refuse(f"{name} is {shape}, expected [{', '.join(axes)}] = {wanted}")
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
    return weights, sizes


def made(weights, its_name, make, name):
    try:
        return make(weights[its_name])
    except (ValueError, IndexError):
        refuse_file(f"{shown(its_name)} is {weights[its_name].shape}", f"what {name} can be made of")


def refuse_adapters(weights):
    for name in weights:
        if any(part in ADAPTERS for part in name.split(".")):
            refuse_file(
                f"{shown(name)} belongs to a LoRA adapter that is not merged",
                "merged weights: linattn-np merge writes them, and generate --adapter reads it beside its model",
            )


def refuse_other_versions(version, weights):
    others = version.others(weights)
    for name in weights:
        for part in name.split("."):
            if part in others:
                older = others[part] == "RWKV-5" and not any("ln_x" in other for other in weights)
                found = "RWKV-4" if older else others[part]
                refuse_file(f"{shown(name)} belongs to {found}", f"the parameters of {version.title}")
