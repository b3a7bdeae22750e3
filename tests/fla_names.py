"""The names and shapes of flash-linear-attention (fla) of a model with official ones."""

import numpy as np


def rwkv6_to_fla(weights):
    """What fla's own converter makes of an RWKV-6, step by step."""
    made = {"model.embeddings.weight": weights["emb.weight"], "lm_head.weight": weights["head.weight"]}
    for part in ("weight", "bias"):
        made[f"model.norm.{part}"] = weights[f"ln_out.{part}"]
        made[f"model.layers.0.pre_norm.{part}"] = weights[f"blocks.0.ln0.{part}"]
    for i in range(len({name.split(".")[1] for name in weights if name.startswith("blocks.")})):
        att = {
            name: weights[f"blocks.{i}.att.{name}"]
            for name in (
                "time_maa_x",
                "time_maa_w1",
                "time_maa_w2",
                "time_decay",
                "time_decay_w1",
                "time_decay_w2",
                "time_faaaa",
            )
        }
        to = f"model.layers.{i}"
        made[f"{to}.attn.x_proj.0.mu"] = att["time_maa_x"].reshape(-1)
        w, k, v, r, g = np.split(att["time_maa_w1"], 5, axis=1)
        made[f"{to}.attn.x_proj.0.linear.weight"] = np.concatenate((r, w, k, v, g), axis=1).T
        w, k, v, r, g = att["time_maa_w2"]
        made[f"{to}.attn.x_proj.2.weight"] = np.concatenate((r, w, k, v, g)).T
        mixes = [weights[f"blocks.{i}.att.time_maa_{mix}"].reshape(-1) for mix in "rwkvg"]
        made[f"{to}.attn.x_bias"] = np.stack(mixes)
        made[f"{to}.attn.w_proj.linear.lora.0.weight"] = att["time_decay_w1"].T
        made[f"{to}.attn.w_proj.linear.lora.2.weight"] = att["time_decay_w2"].T
        made[f"{to}.attn.w_proj.linear.lora.2.bias"] = att["time_decay"].reshape(-1)
        made[f"{to}.attn.bonus"] = att["time_faaaa"]
        for letter, name in (("r", "receptance"), ("k", "key"), ("v", "value"), ("g", "gate")):
            made[f"{to}.attn.{letter}_proj.linear.weight"] = weights[f"blocks.{i}.att.{name}.weight"]
        made[f"{to}.attn.o_proj.weight"] = weights[f"blocks.{i}.att.output.weight"]
        for new, old in (("attn_norm", "ln1"), ("ffn_norm", "ln2"), ("attn.g_norm", "att.ln_x")):
            for part in ("weight", "bias"):
                made[f"{to}.{new}.{part}"] = weights[f"blocks.{i}.{old}.{part}"]
        for name, mix in (("key", "k"), ("receptance", "r")):
            made[f"{to}.ffn.{name}.mu"] = weights[f"blocks.{i}.ffn.time_maa_{mix}"].reshape(-1)
            made[f"{to}.ffn.{name}.linear.weight"] = weights[f"blocks.{i}.ffn.{name}.weight"]
        made[f"{to}.ffn.value.weight"] = weights[f"blocks.{i}.ffn.value.weight"]
    return made | {name: array for name, array in weights.items() if name.endswith("time_state")}


def named_activation(name):
    """The entry of a model's weights that names the activation of its channel mix."""
    return {"hidden_act": np.frombuffer(name.encode(), np.uint8)}


def with_narrow_keys(weights, K):
    """An RWKV-6's official `weights` with K channels of keys in each head, as fla's `expand_k` makes them. No official
    file has fewer of keys than of values."""
    (H, N), found = weights["blocks.0.att.time_faaaa"].shape, dict(weights)
    channels = np.arange(H * N).reshape(H, N)[:, :K].ravel()
    for name, x in weights.items():
        match name.rpartition(".att.")[2]:
            case "time_faaaa":
                found[name] = x[:, :K]
            case "time_decay" | "time_decay_w2":
                found[name] = x[..., channels]
            case "key.weight" | "receptance.weight":
                found[name] = x[channels]
    return found


def rwkv7_to_fla(weights, packed=False):
    """What fla's converter makes of an RWKV-7, step by step."""
    made = {}
    parts = {"att": "attn", "ffn": "ffn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
    modules = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
    whole = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
    for name, array in weights.items():
        first, *rest = name.split(".")
        if first != "blocks":
            made[f"{whole[first]}.{rest[0]}"] = array
            continue
        i, part, *rest = rest
        to = f"model.layers.{i}.{parts[part]}"
        if part == "att" and len(rest) == 1 and rest[0][0] in "wavg" and rest[0][1:] in "012":
            leaf, array = {"0": ("2.bias", array.ravel()), "1": ("0.weight", array.T), "2": ("2.weight", array.T)}[
                rest[0][1]
            ]
            made[f"{to}.{rest[0][0]}_lora.lora.{leaf}"] = array
        elif part == "att" and rest[0] in modules:
            made[f"{to}.{modules[rest[0]]}.{rest[1]}"] = array
        elif packed and part == "att" and rest[0].startswith("x_"):
            made.setdefault(f"{to}.x_x", np.zeros((6, array.size), np.float32))["rwkvag".index(rest[0][-1])] = array
        else:
            made[".".join([to, *rest])] = array.ravel() if array.shape[:2] == (1, 1) else array
    return made
