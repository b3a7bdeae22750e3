"""The parameters of RWKV-6 (x060), and the names and shapes that they have in files."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from ...array_kinds import FLOATS
from ...errors import ContractTypeError
from ..checkpoint import refuse as refuse_file
from ..number_checks import shown
from .refusals import refuse

# Every parameter and its axes; an axis gets its size where it is first named. D n_embd, V vocabulary,
# H heads, N head size, A and W the ranks of the mix and decay LoRA, F the channel mix's width. Linear weights
# are (out, in).
EMBEDDING = {"emb.weight": "V D", "blocks.0.ln0.weight": "D", "blocks.0.ln0.bias": "D"}
BLOCK = {
    "ln1.weight": "D",
    "ln1.bias": "D",
    "ln2.weight": "D",
    "ln2.bias": "D",
    "att.time_maa_x": "1 1 D",
    "att.time_maa_w": "1 1 D",
    "att.time_maa_k": "1 1 D",
    "att.time_maa_v": "1 1 D",
    "att.time_maa_r": "1 1 D",
    "att.time_maa_g": "1 1 D",
    "att.time_maa_w1": "D 5A",
    "att.time_maa_w2": "5 A D",
    "att.time_decay": "1 1 D",
    "att.time_decay_w1": "D W",
    "att.time_decay_w2": "W D",
    "att.time_faaaa": "H N",
    "att.receptance.weight": "D D",
    "att.key.weight": "D D",
    "att.value.weight": "D D",
    "att.gate.weight": "D D",
    "att.output.weight": "D D",
    "att.ln_x.weight": "D",
    "att.ln_x.bias": "D",
    "ffn.time_maa_k": "1 1 D",
    "ffn.time_maa_r": "1 1 D",
    "ffn.key.weight": "F D",
    "ffn.receptance.weight": "D D",
    "ffn.value.weight": "D F",
}
HEAD = {"ln_out.weight": "D", "ln_out.bias": "D", "head.weight": "V D"}
TUNED = {"att.time_state": "H N N"}  # in every block or in none: a tuned initial state, value by key
EPS = "norm_eps"  # may be there, [2]: the eps of layer norms and of the group norm, where they are no official ones

# The last part of a name that gives another version away. x060b and x060c have the same names; RWKV-4 has
# those of RWKV-5 but no ln_x.
OTHER_VERSIONS = {
    "gate_w1": "RWKV-6 x060a",
    "time_maa_rkvw_w1": "RWKV-6 x060b or x060c",
    **dict.fromkeys(("x_r", "w0", "a0", "k_k", "k_a", "r_k"), "RWKV-7"),
    **dict.fromkeys(("time_mix_k", "time_mix_key", "time_first"), "RWKV-5"),
}

TRAINERS = ("_forward_module.", "module.", "model.", "_orig_mod.")  # DeepSpeed, DDP, Lightning, torch.compile
ADAPTERS = ("lora_A", "lora_B")  # of PEFT and RWKV-PEFT

HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"}


def same(x):
    return x


def row(x):
    return x.reshape(1, 1, -1)


def transposed(x):
    return x.swapaxes(-1, -2)


# fla orders the five mixes r w k v g, and keeps the LoRA's weights as those of Linear layers, (out, in).
FLA_ORDER = "rwkvg"
OFFICIAL_ORDER = [FLA_ORDER.index(mix) for mix in "wkvrg"]


def mix_of(mix):
    return lambda x: row(x.reshape(5, -1)[FLA_ORDER.index(mix)])  # [5, D] -> [1, 1, D]


def mix_down(x):
    return x.reshape(5, -1, x.shape[-1])[OFFICIAL_ORDER].reshape(x.shape).T  # [5A, D] -> [D, 5A]


def mix_up(x):
    return x.reshape(len(x), 5, -1)[:, OFFICIAL_ORDER].transpose(1, 2, 0)  # [D, 5A] -> [5, A, D]


# Official name -> fla's, and what makes the one's array of the other's.
FLA = {
    "emb.weight": ("model.embeddings.weight", same),
    "ln_out.weight": ("model.norm.weight", same),
    "ln_out.bias": ("model.norm.bias", same),
    "head.weight": ("lm_head.weight", same),
}
FLA_BLOCK = {
    **{
        f"{name}.{part}": (f"{its_name}.{part}", same)
        for part in ("weight", "bias")
        for name, its_name in (
            ("ln0", "pre_norm"),
            ("ln1", "attn_norm"),
            ("ln2", "ffn_norm"),
            ("att.ln_x", "attn.g_norm"),
        )
    },
    "att.time_maa_x": ("attn.x_proj.0.mu", row),
    **{f"att.time_maa_{mix}": ("attn.x_bias", mix_of(mix)) for mix in FLA_ORDER},
    "att.time_maa_w1": ("attn.x_proj.0.linear.weight", mix_down),
    "att.time_maa_w2": ("attn.x_proj.2.weight", mix_up),
    "att.time_decay": ("attn.w_proj.linear.lora.2.bias", row),
    "att.time_decay_w1": ("attn.w_proj.linear.lora.0.weight", transposed),
    "att.time_decay_w2": ("attn.w_proj.linear.lora.2.weight", transposed),
    "att.time_faaaa": ("attn.bonus", same),
    "att.receptance.weight": ("attn.r_proj.linear.weight", same),
    "att.key.weight": ("attn.k_proj.linear.weight", same),
    "att.value.weight": ("attn.v_proj.linear.weight", same),
    "att.gate.weight": ("attn.g_proj.linear.weight", same),
    "att.output.weight": ("attn.o_proj.weight", same),
    "ffn.time_maa_k": ("ffn.key.mu", row),
    "ffn.time_maa_r": ("ffn.receptance.mu", row),
    "ffn.key.weight": ("ffn.key.linear.weight", same),
    "ffn.receptance.weight": ("ffn.receptance.linear.weight", same),
    "ffn.value.weight": ("ffn.value.weight", same),
}


def official(weights: Mapping) -> dict:
    """`weights` under the official names and in the official shapes, in the official order.

    weights : mapping from names to host arrays
        With the official names, with Hugging Face's (`rwkv.blocks.0.attention.*`, which rename only), with
        fla's (`model.layers.0.attn.*`, which also orders the mixes r w k v g and transposes the LoRAs) or with
        web-rwkv's (`blocks.0.att.time_mix_w1`, which transposes them). Trainers' TRAINERS may stand before them all.
        A tuned `blocks.i.att.time_state` may be there, under its official name whatever the others are.

    Arrays are views, but for fla's mixes. Shapes are the model's to check; what fla's config says is `config`'s.

    Raises
    ------
    CheckpointError
        The weights are those of another version, or some are missing or left over.

    Example
    -------
    >>> from linattn_np.models import checkpoint
    >>> from linattn_np.models.rwkv6 import names
    >>> weights = names.official(checkpoint.read("examples/data/austen-x060/model.safetensors"))
    >>> list(weights)[:2], weights["blocks.0.att.time_maa_w2"].shape
    (['emb.weight', 'blocks.0.ln0.weight'], (5, 32, 256))
    """
    weights = unwrapped(weights)
    refuse_other_versions(weights)
    blocks, origin = next(
        ((prefix, origin) for prefix, origin in NAMINGS.items() if any(name.startswith(prefix) for name in weights)),
        ("blocks.", unchanged),
    )
    layers = len({name.removeprefix(blocks).split(".")[0] for name in weights if name.startswith(blocks)})
    tuned = any(name.endswith(".time_state") for name in weights)
    if of_web_rwkv(weights):
        origins = {name: web_rwkv(name) for name in declared(layers, tuned)}
    else:
        origins = {name: (name, same) if name in weights else origin(name) for name in declared(layers, tuned)}
    origins |= {EPS: (EPS, same)} if EPS in weights else {}
    wanted = dict(origins.values())
    missing = [name for name in wanted if name not in weights]
    left_over = [name for name in weights if name not in wanted]
    if missing or left_over:
        refuse_file(
            " and ".join(
                f"{what} {shown(names[0])}" + (f" and {len(names) - 1} more" if names[1:] else "")
                for what, names in (("lacks", missing), ("has an unknown", left_over))
                if names
            ),
            f"the parameters of RWKV-6 x060 with {layers} blocks",
        )
    return {name: made(weights, its_name, make, name) for name, (its_name, make) in origins.items()}


def unwrapped(weights: Mapping) -> Mapping:
    """`weights` without what trainers put before all names."""
    while weights and not any(name.startswith(tuple(NAMINGS)) for name in weights):
        prefix = next((word for word in TRAINERS if all(name.startswith(word) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): array for name, array in weights.items()}
    return weights


def parameters(weights: Mapping) -> tuple[dict, dict[str, int]]:
    """`weights` under their official names, and the model's sizes, once every shape fits the others."""
    weights = official(weights)
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    sizes = {"1": 1, "5": 5, "L": layers}
    for name, declaration in declared(layers, tuned="blocks.0.att.time_state" in weights).items():
        axes, shape = declaration.split(), tuple(weights[name].shape)
        if len(shape) == len(axes):
            for axis, size in zip(axes, shape):
                sizes.setdefault(axis, size)
        wanted = tuple(sizes.get(axis, axis) for axis in axes)
        if shape != wanted:
            refuse(f"{name} is {shape}, expected [{', '.join(axes)}] = {wanted}")
        if weights[name].dtype not in FLOATS:
            refuse(f"{name} has dtype {weights[name].dtype}, expected floats", ContractTypeError)
    if sizes["H"] * sizes["N"] != sizes["D"]:
        refuse(f"att.time_faaaa has H={sizes['H']} heads of N={sizes['N']}, expected H x N = D = {sizes['D']}")
    if EPS in weights and (weights[EPS].shape != (2,) or not all(0 < number < inf for number in weights[EPS])):
        refuse(f"{EPS} is {weights[EPS].dtype} {weights[EPS].shape}, expected two numbers above 0")
    if 5 * sizes["A"] != sizes["5A"]:
        refuse(
            f"att.time_maa_w1 has {sizes['5A']} columns, expected 5 x A = {5 * sizes['A']} as att.time_maa_w2 has it"
        )
    return weights, sizes


def in_block(name: str) -> str:
    """A name without its block's prefix."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def declared(layers, tuned=False) -> dict[str, str]:
    """Official names of all the parameters of a model, and their axes."""
    block = BLOCK | TUNED if tuned else BLOCK
    blocks = {f"blocks.{i}.{name}": axes for i in range(layers) for name, axes in block.items()}
    return EMBEDDING | blocks | HEAD


def unchanged(name):
    return name, same


def hugging_face(name):
    prefix = "" if name == "head.weight" else "rwkv."
    return prefix + ".".join(HUGGING_FACE.get(part, part) for part in name.split(".")), same


def fla(name):
    if not name.startswith("blocks."):
        return FLA[name]
    _, i, name_in_block = name.split(".", 2)
    if name_in_block not in FLA_BLOCK:
        return name, same
    its_name, make = FLA_BLOCK[name_in_block]
    return f"model.layers.{i}.{its_name}", make


def web_rwkv(name):
    part = name.split(".")[-1]
    make = transposed if part.endswith(("_w1", "_w2")) or part == "time_state" else row if "maa" in part else same
    make = row if part == "time_decay" else make
    return name.replace("time_maa", "time_mix").replace("time_faaaa", "time_first"), make


def of_web_rwkv(weights) -> bool:
    return any(name.endswith(".time_mix_w1") for name in weights)


NAMINGS = {"rwkv.blocks.": hugging_face, "model.layers.": fla, "blocks.": unchanged}


def made(weights, its_name, make, name):
    try:
        return make(weights[its_name])
    except (ValueError, IndexError):
        refuse_file(f"{shown(its_name)} is {weights[its_name].shape}", f"what {name} can be made of")


def refuse_other_versions(weights):
    if of_web_rwkv(weights):
        return
    for name in weights:
        if any(part in ADAPTERS for part in name.split(".")):
            refuse_file(
                f"{shown(name)} belongs to a LoRA adapter that is not merged",
                "merged weights: the program that trained it merges it into its model",
            )
    for name in weights:
        version = OTHER_VERSIONS.get(name.split(".")[-1])
        if version == "RWKV-5" and not any("ln_x" in other for other in weights):
            version = "RWKV-4"
        if version:
            refuse_file(f"{shown(name)} belongs to {version}", "the parameters of RWKV-6 x060")
