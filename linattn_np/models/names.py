"""The parameters of RWKV-6 (x060), and the names and shapes that they have in files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .checkpoint import CheckpointError, shown

# Every parameter and its axes; an axis gets its size where it is first named. D n_embd, V vocabulary, H heads,
# N head size, A and W the ranks of the mix and decay LoRA, F the channel mix's width. Linear weights are (out, in).
EMBEDDING = {"emb.weight": "V D", "blocks.0.ln0.weight": "D", "blocks.0.ln0.bias": "D"}
BLOCK = {
    "ln1.weight": "D", "ln1.bias": "D", "ln2.weight": "D", "ln2.bias": "D",
    "att.time_maa_x": "1 1 D", "att.time_maa_w": "1 1 D", "att.time_maa_k": "1 1 D", "att.time_maa_v": "1 1 D",
    "att.time_maa_r": "1 1 D", "att.time_maa_g": "1 1 D", "att.time_maa_w1": "D 5A", "att.time_maa_w2": "5 A D",
    "att.time_decay": "1 1 D", "att.time_decay_w1": "D W", "att.time_decay_w2": "W D", "att.time_faaaa": "H N",
    "att.receptance.weight": "D D", "att.key.weight": "D D", "att.value.weight": "D D", "att.gate.weight": "D D",
    "att.output.weight": "D D", "att.ln_x.weight": "D", "att.ln_x.bias": "D",
    "ffn.time_maa_k": "1 1 D", "ffn.time_maa_r": "1 1 D",
    "ffn.key.weight": "F D", "ffn.receptance.weight": "D D", "ffn.value.weight": "D F",
}
HEAD = {"ln_out.weight": "D", "ln_out.bias": "D", "head.weight": "V D"}
TUNED = {"att.time_state": "H N N"}         # in every block or in none: a tuned initial state, value by key

# The last part of a name that gives another version away. RWKV-4 has no ln_x, x060b and x060c have the same names.
OTHER_VERSIONS = {"gate_w1": "RWKV-6 x060a", "time_maa_rkvw_w1": "RWKV-6 x060b or x060c",
                  **dict.fromkeys(("x_r", "w0", "a0", "k_k", "k_a", "r_k"), "RWKV-7"),
                  **dict.fromkeys(("time_mix_k", "time_mix_key", "time_first"), "RWKV-5")}

HUGGING_FACE = {"emb": "embeddings", "ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"}


def same(x):
    return x


def row(x):
    return x.reshape(1, 1, -1)


def transposed(x):
    return x.swapaxes(-1, -2)


# fla keeps the five mixes in the order r w k v g, and weights of the LoRA as those of Linear layers, (out, in).
FLA_ORDER = "rwkvg"
OFFICIAL_ORDER = [FLA_ORDER.index(mix) for mix in "wkvrg"]


def mix_of(mix):
    return lambda x: row(x.reshape(5, -1)[FLA_ORDER.index(mix)])                            # of [5, D]


def mix_down(x):
    return x.reshape(5, -1, x.shape[-1])[OFFICIAL_ORDER].reshape(x.shape).T                 # [5A, D] -> [D, 5A]


def mix_up(x):
    return x.reshape(len(x), 5, -1)[:, OFFICIAL_ORDER].transpose(1, 2, 0)                   # [D, 5A] -> [5, A, D]


# Official name -> fla's, below "model.", and what makes the one's array of the other's.
FLA = {"emb.weight": ("embeddings.weight", same), "ln_out.weight": ("norm.weight", same),
       "ln_out.bias": ("norm.bias", same)}
FLA_BLOCK = {
    **{f"{name}.{part}": (f"{its_name}.{part}", same) for part in ("weight", "bias") for name, its_name in (
        ("ln0", "pre_norm"), ("ln1", "attn_norm"), ("ln2", "ffn_norm"), ("att.ln_x", "attn.g_norm"))},
    "att.time_maa_x": ("attn.x_proj.0.mu", row),
    **{f"att.time_maa_{mix}": ("attn.x_bias", mix_of(mix)) for mix in FLA_ORDER},
    "att.time_maa_w1": ("attn.x_proj.0.linear.weight", mix_down), "att.time_maa_w2": ("attn.x_proj.2.weight", mix_up),
    "att.time_decay": ("attn.w_proj.linear.lora.2.bias", row),
    "att.time_decay_w1": ("attn.w_proj.linear.lora.0.weight", transposed),
    "att.time_decay_w2": ("attn.w_proj.linear.lora.2.weight", transposed),
    "att.time_faaaa": ("attn.bonus", same),
    "att.receptance.weight": ("attn.r_proj.linear.weight", same), "att.key.weight": ("attn.k_proj.linear.weight", same),
    "att.value.weight": ("attn.v_proj.linear.weight", same), "att.gate.weight": ("attn.g_proj.linear.weight", same),
    "att.output.weight": ("attn.o_proj.weight", same),
    "ffn.time_maa_k": ("ffn.key.mu", row), "ffn.time_maa_r": ("ffn.receptance.mu", row),
    "ffn.key.weight": ("ffn.key.linear.weight", same), "ffn.receptance.weight": ("ffn.receptance.linear.weight", same),
    "ffn.value.weight": ("ffn.value.weight", same),
}


def official(weights: Mapping) -> dict:
    """`weights` under the official names and in the official shapes, in the official order.

    weights : mapping from names to host arrays
        With the official names, with Hugging Face's (`rwkv.blocks.0.attention.*`, which rename only) or with fla's
        (`model.layers.0.attn.*`, which also orders the mixes r w k v g and transposes the LoRAs). A tuned
        `blocks.i.att.time_state` may be there as well, under its official name whatever the others are.

    Arrays are views, but for fla's mix LoRA. Shapes are the model's to check; fla's norm eps is in its config.

    Raises
    ------
    CheckpointError
        The weights are those of another version, some are missing or left over: what was found and what was wanted.

    Example
    -------
    >>> import numpy as np
    >>> from linattn_np.models import names
    >>> names.official({"rwkv.embeddings.weight": np.zeros((11, 16))})
    Traceback (most recent call last):
    linattn_np.models.checkpoint.CheckpointError: no block is there, expected the parameters of RWKV-6 x060
    """
    refuse_other_versions(weights)
    prefix, source = naming(weights)
    layers = len({match[1] for name in weights if (match := re.match(rf"{re.escape(prefix)}(\d+)\.", name))})
    if not layers:
        raise CheckpointError("no block is there, expected the parameters of RWKV-6 x060")
    tuned = any(name.endswith(".time_state") for name in weights)
    origins = {name: source(name) for name in declared(layers, tuned)}
    origins.update({name: (name, same) for name in origins if name in weights})
    wanted = {origin for origin, _ in origins.values()}
    missing = sorted(wanted - weights.keys(), key=list(map(first, origins.values())).index)
    left_over = [name for name in weights if name not in wanted]
    if missing or left_over:
        raise CheckpointError(" and ".join(
            f"{what} {shown(names[0])}" + (f" and {len(names) - 1} more" if names[1:] else "")
            for what, names in (("lacks", missing), ("has an unknown", left_over)) if names)
            + f", expected the parameters of RWKV-6 x060 with {layers} blocks")
    return {name: made(weights[origin], make, origin, name) for name, (origin, make) in origins.items()}
