"""The names of RWKV models' parameters in files, and their conversion to the official names and shapes."""

from collections.abc import Callable, Mapping
from math import inf

from ...array_kinds import FLOATS
from ...errors import ContractTypeError
from ..checkpoint import refuse as refuse_file
from ..number_checks import shown
from .version import NORM_EPS_NAME, VERSION_NAME, Version, number_in

BLOCKS = ("rwkv.blocks.", "model.layers.", "blocks.")  # prefixes of a block: Hugging Face's, fla's, the official one
TRAINERS = ("_forward_module.", "module.", "model.", "_orig_mod.")  # prefixes: DeepSpeed, DDP, Lightning, torch.compile
ADAPTERS = ("lora_A", "lora_B")  # parts of names in adapters of PEFT and RWKV-PEFT
# {official name, or a part of one: flash-linear-attention's, or Hugging Face's}
FLA = {
    "emb.weight": "model.embeddings.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
FLA_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm", "att.ln_x": "attn.g_norm"}
HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"}


# -- conversions of a file's array to the official one ----------------------------------------------------------------
def same(x):
    return x


def row(x):
    return x.reshape(1, 1, -1)


def transposed(x):
    return x.swapaxes(-1, -2)


# -- namings: functions from an official name to (the name in the file, the conversion of its array) ------------------
def unchanged(name):
    return name, same


def hugging_face(name):
    prefix = "" if name == "head.weight" else "rwkv."
    return prefix + ".".join(HUGGING_FACE.get(part, part) for part in name.split(".")), same


def fla(in_block: Callable) -> Callable:
    """flash-linear-attention's naming. ``in_block(parameter)`` is a version's naming of the parameters of a block that
    belong to no norm."""

    def origin(name):
        if name in FLA:
            return FLA[name], same
        _, i, parameter = name.split(".", 2)
        norm, _, ending = parameter.rpartition(".")
        file_name, convert = (f"{FLA_NORMS[norm]}.{ending}", same) if norm in FLA_NORMS else in_block(parameter)
        return f"model.layers.{i}.{file_name}", convert

    return origin


def official_first(weights: Mapping, origin: Callable) -> Callable:
    """The naming `origin`, except for official names that are in `weights` as they are."""
    return lambda name: (name, same) if name in weights else origin(name)


def blocks_of(weights: Mapping) -> str:
    """The first prefix of BLOCKS with which a name in `weights` begins; by default the official one."""
    return next((prefix for prefix in BLOCKS if any(name.startswith(prefix) for name in weights)), "blocks.")


# -- weights ----------------------------------------------------------------------------------------------------------
def official(version: Version, weights: Mapping) -> dict:
    """`weights` under the official names and in the official shapes, in the official order.

    weights : mapping from names to host arrays
        The names are those that `version.naming` accepts; all may have prefixes of TRAINERS. A trained initial state,
        `blocks.i.att.time_state`, always has its official name.

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
    refuse_adapters(weights)
    refuse_other_versions(version, weights)
    version.check_number(number_in(weights), "what is merged into the model")
    blocks, origin = version.naming(weights)
    layers = len({name.removeprefix(blocks).split(".")[0] for name in weights if name.startswith(blocks)})
    has_initial_state = any(name.endswith(".time_state") for name in weights)
    origins = {name: origin(name) for name in version.parameter_axes(layers, has_initial_state)}
    origins |= {NORM_EPS_NAME: (NORM_EPS_NAME, same)} if NORM_EPS_NAME in weights else {}
    conversions = dict(origins.values())
    unread = {VERSION_NAME, *(origin(f"blocks.0.{name}")[0] for name in version.first_layer_lacks)}
    missing = [name for name in conversions if name not in weights]
    left_over = [name for name in weights if name not in conversions and name not in unread]
    if missing or left_over:
        refuse_file(
            " and ".join(
                f"{what} {shown(names[0])}" + (f" and {len(names) - 1} more" if names[1:] else "")
                for what, names in (("lacks", missing), ("has an unknown", left_over))
                if names
            ),
            f"the parameters of {version.title} with {layers} blocks",
        )
    return {name: converted(weights, file_name, convert, name) for name, (file_name, convert) in origins.items()}


def unwrapped(weights: Mapping) -> Mapping:
    """`weights` without the prefixes that trainers put before all names."""
    while weights and not any(name.startswith(BLOCKS) for name in weights):
        prefix = next((word for word in TRAINERS if all(name.startswith(word) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): array for name, array in weights.items()}
    return weights


def parameters(version: Version, weights: Mapping) -> tuple[dict, dict[str, int]]:
    """(the weights by official name, {axis: size}), after checking that all shapes fit each other."""
    weights = official(version, weights)
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    sizes = {"1": 1, "5": 5, "L": layers}
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
    return weights, sizes


def converted(weights, file_name, convert, name):
    """The official array `name`, converted by `convert` from the file's array `file_name`."""
    try:
        return convert(weights[file_name])
    except (ValueError, IndexError):
        refuse_file(f"{shown(file_name)} is {weights[file_name].shape}", f"what {name} can be made of")


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
                found = others[part]
                if found == "RWKV-5" and not any("ln_x" in other for other in weights):
                    found = "RWKV-4"  # it has the same names, but no group norm
                refuse_file(f"{shown(name)} belongs to {found}", f"the parameters of {version.title}")
