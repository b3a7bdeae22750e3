"""Parameter names: a random model under every naming gives the same official arrays; others are refused."""

import json
import re

import numpy as np
import pytest
from fla_names import rwkv6_to_fla as to_fla
from fla_names import with_narrow_keys
from literal_rwkv6 import logits_of
from safetensors.numpy import save_file

from linattn_np import ContractError
from linattn_np.models import RWKV6, checkpoint, matrices
from linattn_np.models.checkpoint import CheckpointError
from linattn_np.models.fine_tuning import Base, Whole
from linattn_np.models.rwkv import cpu_layers
from linattn_np.models.rwkv import names as rwkv_names
from linattn_np.models.rwkv6 import names
from linattn_np.models.training import Settings, Training

SIZES = {"1": 1, "5": 5, "V": 11, "D": 16, "H": 2, "N": 8, "5A": 15, "A": 3, "W": 4, "F": 24}
LAYERS = 3
SMALL = {"layers": LAYERS, "width": 16, "head_size": 8, "batch": 2, "context": 8, "steps": 3}  # of a training


@pytest.fixture(params=[False, True], ids=["plain", "tuned"])
def weights(request, rng):
    """Random official parameters; Fortran order and other strides must not matter."""
    return {
        name: np.asfortranarray(rng.standard_normal([SIZES[axis] for axis in axes.split()], np.float32))
        for name, axes in names.VERSION.parameter_axes(LAYERS, request.param).items()
    }


def to_hugging_face(weights):
    renamed = {}
    for name, array in weights.items():
        for old, new in (
            ("emb.", "embeddings."),
            (".att.", ".attention."),
            (".ffn.", ".feed_forward."),
            ("ln0", "pre_ln"),
        ):
            name = name.replace(old, new)
        renamed[name if name == "head.weight" else f"rwkv.{name}"] = array
    return renamed


def shuffled(weights, rng):
    keys = list(weights)
    return {keys[i]: weights[keys[i]] for i in rng.permutation(len(keys))}


def to_web_rwkv(weights):
    """What web-rwkv's converter makes of a model: names by replacement, and six kinds of matrices transposed."""
    found = {}
    for name, array in weights.items():
        name = name.replace("time_faaaa", "time_first").replace("time_maa", "time_mix")
        kinds = ("time_mix_w1", "time_mix_w2", "time_decay_w1", "time_decay_w2", "time_state")
        found[name] = array.swapaxes(-1, -2) if name.endswith(kinds) else array
    return found


def to_trainers(weights):
    return {f"_forward_module._orig_mod.model.{name}": array for name, array in weights.items()}


NAMINGS = {
    "web-rwkv": to_web_rwkv,
    "trainers": to_trainers,
    "official": dict,
    "Hugging Face": to_hugging_face,
    "fla": to_fla,
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_gives_the_same_arrays(naming, weights, rng):
    found = rwkv_names.official(names.VERSION, shuffled(NAMINGS[naming](weights), rng))
    assert list(found) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("naming", NAMINGS)
def test_only_flas_mix_is_copied(naming, weights):
    copied = {
        name
        for name, array in rwkv_names.official(names.VERSION, NAMINGS[naming](weights)).items()
        if not np.shares_memory(array, weights[name])
    }
    parts = {name.split(".")[-1] for name in copied}
    assert parts == ({f"time_maa_{x}" for x in ("w1", "w2", *"rwkvg")} if naming == "fla" else set())


def test_a_tuned_state_keeps_its_official_name(weights):
    state = {f"blocks.{i}.att.time_state": np.ones((2, 8, 8)) for i in range(LAYERS)}
    plain = {name: array for name, array in weights.items() if "time_state" not in name}
    for naming in (dict, to_hugging_face, to_fla):
        found = rwkv_names.official(names.VERSION, naming(plain) | state)
        assert all(found[name] is array for name, array in state.items())


# -- config.json -----------------------------------------------------------------------------------------------
HF_CONFIG, FLA_CONFIG = {"layer_norm_epsilon": 1e-3, "head_size_divisor": 30}, {"norm_eps": 1e-3}


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(
    "naming, config, eps", [(to_hugging_face, HF_CONFIG, [1e-3, 9e-3]), (to_fla, FLA_CONFIG, [1e-3, 1e-3])]
)
def test_eps_tied_heads_and_absent_biases(naming, config, eps, loops, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_layers, "has_loops", lambda: loops and bool(matrices.loops()))
    shapes = {
        name: [SIZES[axis] for axis in axes.split()] for name, axes in names.VERSION.parameter_axes(LAYERS).items()
    }
    plain = {name: rng.standard_normal(shape, np.float32) * 0.3 for name, shape in shapes.items()}
    plain["head.weight"], absent = plain["emb.weight"], {"head.weight", "lm_head.weight"}
    if naming is to_fla:
        plain |= {name: 0 * plain[name] for name in plain if name.endswith(".bias") and "ln_x" not in name}
        absent |= {name for name, array in to_fla(plain).items() if not array.any()}
    weights = {name: array for name, array in naming(plain).items() if name not in absent}
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, tmp_path / "model.safetensors")
    config = config | {"tie_word_embeddings": True, "norm_bias": False, "expand_k": 1.0, "hidden_act": "sqrelu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens, official = [1, 2, 3, 4], plain | {"norm_eps": np.array(eps)}
    wanted = logits_of(official, tokens)
    quantised = RWKV6.quantise(checkpoint.read(tmp_path), "bfloat16", checkpoint.config(tmp_path))
    np.testing.assert_allclose(quantised["norm_eps"], eps, rtol=1e-15)
    for model in RWKV6.from_file(tmp_path), RWKV6(official), RWKV6(weights, config=config):
        whole, state = model.forward([tokens[:3]])
        step, _ = model.forward([tokens[3:]], state)
        np.testing.assert_allclose(np.concatenate([whole, step], 1)[0], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_act", "mish"),
        ("expand_k", 0.5),  # of other keys than the weights have
        ("expand_k", "1"),
        ("expand_v", 2),
        ("norm_first", False),
        ("attn", {"layers": [1]}),
        ("norm_eps", 0),
        ("norm_eps", "1e-5"),
    ],
)
def test_a_config_that_asks_for_what_is_not_computed(weights, field, value):
    with pytest.raises(ContractError, match=f"RWKV6: config.json.*{field}"):
        RWKV6(to_fla(weights), config={"norm_eps": 1e-5, field: value})
    RWKV6(weights, config={field: value})  # official names have no config


@pytest.fixture
def narrow(weights):
    """Smaller ones, with 3 channels of keys in each head, for 8 of values. Of 10,000 draws of these the logits of a
    model are at most 2e-6 off; weights of 1 magnify rounding errors up to 1e-3."""
    return with_narrow_keys({name: 0.3 * x for name, x in weights.items() if "time_state" not in name}, 3)


@pytest.mark.parametrize("loops", [True, False], ids=["Numba", "NumPy"])
@pytest.mark.parametrize("expand_k", [0.375, None])
def test_flas_keys_with_fewer_channels_than_values(expand_k, loops, narrow, monkeypatch):
    """fla's `expand_k` below 1, as is its default; without it in the config the shapes tell."""
    monkeypatch.setattr(cpu_layers, "has_loops", lambda: loops)
    tokens = [1, 2, 3, 4]
    wanted = logits_of(narrow | {"norm_eps": np.array([1e-3, 1e-3])}, tokens)
    config = FLA_CONFIG | FIELDS | FLA_FIELDS | ({} if expand_k is None else {"expand_k": expand_k})
    model = RWKV6(to_fla(narrow), config=config)
    whole, state = model.forward([tokens[:3]])
    step, _ = model.forward([tokens[3:]], state)
    np.testing.assert_allclose(np.concatenate([whole, step], 1)[0], wanted, rtol=0, atol=1e-4)
    assert not state.wkv[..., 3:, :].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_channels_that_keys_lack_stay_0_in_fewer_bits(dtype, narrow):
    wide, _ = RWKV6.parameters(to_fla(narrow), FLA_CONFIG)
    model = RWKV6(wide, dtype=dtype)
    _, state = model.forward([[1, 2, 3]])
    logits, _ = model.forward([[4]], state)
    assert np.isfinite(logits).all() and state.wkv[..., :3, :].all() and not state.wkv[..., 3:, :].any()


def test_a_training_keeps_the_channels_that_keys_lack_at_0(narrow, tmp_path):
    base = Base.of(to_fla(narrow), FLA_CONFIG)
    training = Training(np.arange(200) % 11, Settings(**SMALL), kind=Whole(base))
    for _ in range(3):
        training.step()
    training.save_model(tmp_path / "model.safetensors")
    trained = checkpoint.read(tmp_path / "model.safetensors")
    for part, heads in (("key.weight", (2, 8, 16)), ("receptance.weight", (2, 8, 16)), ("time_faaaa", (2, 8))):
        found = trained[f"blocks.1.att.{part}"].reshape(heads)
        assert found[:, :3].all() and not found[:, 3:].any()
    RWKV6.from_file(tmp_path / "model.safetensors").forward([[1, 2]])


@pytest.mark.parametrize("expand_k, complaint", [(0.5, "6 channels of keys for 16"), (0, "a number above 0")])
def test_keys_of_other_sizes_than_the_config_says(expand_k, complaint, weights, narrow):
    with pytest.raises(ContractError, match=f"RWKV6.*config.json.* expand_k .*{complaint}"):
        RWKV6(to_fla(narrow), config=FLA_CONFIG | {"expand_k": expand_k})
    more = to_fla(weights) | {f"model.layers.{i}.attn.bonus": np.ones((2, 9), np.float32) for i in range(LAYERS)}
    with pytest.raises(ContractError, match="expand_k 1.125, expected at most 1: keys have as many channels as values"):
        RWKV6(more, config=FLA_CONFIG)


FIELDS = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS}
FLA_FIELDS = {"num_heads": 2, "proj_low_rank_dim": 3, "gate_low_rank_dim": 4}


@pytest.mark.parametrize(
    "naming, config",
    [
        (to_fla, FLA_CONFIG | FIELDS | FLA_FIELDS),
        (to_hugging_face, FIELDS | {"head_size": 8, "num_attention_heads": 64}),
    ],
)
def test_a_config_of_other_sizes(naming, config, weights):
    """Null is no size; published files of Hugging Face have another number of heads, which no model reads."""
    named = naming(weights)
    RWKV6(named, config=config)
    RWKV6(named, config=dict.fromkeys(FIELDS))
    for field in config.keys() - {"norm_eps", "num_attention_heads"}:
        for value in (config[field] + 1, str(config[field]), 1 << 200):
            with pytest.raises(ContractError, match=f"RWKV6: config.json has {field} .*, but the weights have"):
                RWKV6(named, config=config | {field: value})
            with pytest.raises(ContractError, match=f"RWKV6: config.json has {field} .*, but the weights have"):
                RWKV6.quantise(
                    {f"module.{name}": array for name, array in named.items()}, "int8", config | {field: value}
                )


def test_flas_names_need_its_config(weights):
    """Its group norm has another eps; under a trainer's prefix, too."""
    with pytest.raises(ContractError, match="RWKV6: the weights have fla's names, expected its config.json"):
        RWKV6(to_fla(weights))
    found = [
        RWKV6({before + name: array for name, array in to_fla(weights).items()}, config=FLA_CONFIG | {"norm_eps": 1})
        for before in ("", "module.")
    ]
    assert np.array_equal(*(model.forward([[1, 2]])[0] for model in found))


@pytest.mark.parametrize("eps", [[1e-5], [1e-5, 0], [np.nan, 1], [np.inf, 1]])
def test_an_eps_that_is_none(weights, eps):
    with pytest.raises(ContractError, match="RWKV6: norm_eps is .* expected two numbers above 0"):
        RWKV6(weights | {"norm_eps": np.array(eps)})


def test_an_adapter_is_named(weights):
    with pytest.raises(CheckpointError, match="'blocks.0.att.key.lora_A' belongs to a LoRA .* expected merged weights"):
        rwkv_names.official(names.VERSION, weights | {"blocks.0.att.key.lora_A": np.zeros((2, 16))})


# -- what is refused -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "version, found",
    [
        ("RWKV-4", ["blocks.0.att.time_decay", "blocks.0.att.time_first", "blocks.0.att.time_mix_k"]),
        ("RWKV-4", ["rwkv.blocks.0.attention.time_first", "rwkv.blocks.0.attention.time_mix_key"]),
        ("RWKV-5", ["blocks.0.att.ln_x.weight", "blocks.0.att.time_decay", "blocks.0.att.time_first"]),
        ("RWKV-5", ["blocks.0.att.time_mix_k", "blocks.0.att.ln_x.weight", "blocks.0.att.time_faaaa"]),
        ("RWKV-5", ["rwkv.blocks.0.attention.time_mix_key", "rwkv.blocks.0.attention.ln_x.weight"]),
        ("RWKV-6 x060a", ["blocks.0.att.time_maa_w1", "blocks.0.att.gate_w1", "blocks.0.att.gate_w2"]),
        ("RWKV-6 x060b or x060c", ["blocks.0.att.time_maa_rkvw_w1", "blocks.0.att.time_maa_rkvw_w2"]),
        ("RWKV-7", ["blocks.0.att.x_r", "blocks.0.att.w0", "blocks.0.att.a0", "blocks.0.att.k_k"]),
        ("RWKV-7", ["blocks.0.att.a0", "blocks.0.att.w0"]),
        ("RWKV-7", ["model.layers.0.attn.k_k", "model.layers.0.attn.w_lora.lora.0.weight"]),
    ],
)
def test_other_versions_are_refused(version, found):
    with pytest.raises(CheckpointError, match=f"' belongs to {version}, expected the parameters of RWKV-6"):
        rwkv_names.official(names.VERSION, dict.fromkeys(found))


@pytest.mark.parametrize(
    "naming, gone, complaint",
    [
        ("official", "head.weight", "lacks 'head.weight', expected the parameters of RWKV-6 x060 with 3 blocks"),
        ("official", "att.time_maa_w1", "lacks 'blocks.0.att.time_maa_w1' and 2 more, expected"),
        ("official", "blocks.2.ffn.", "lacks 'blocks.2.ffn.time_maa_k' and 4 more, expected"),
        ("official", "blocks.1.", r"lacks 'blocks.1.ln1.weight' and \d+ more and has an unknown 'blocks.2."),
        ("official", "blocks.", r"lacks 'blocks.0.ln0.weight' and 1 more, expected .* with 0 blocks"),
        ("Hugging Face", "pre_ln.bias", "lacks 'rwkv.blocks.0.pre_ln.bias', expected"),
        ("Hugging Face", "head.weight", "lacks 'head.weight', expected"),
        ("Hugging Face", "forward.key", "lacks 'rwkv.blocks.0.feed_forward.key.weight' and 2 more, expected"),
        ("fla", "x_bias", "lacks 'model.layers.0.attn.x_bias' and 2 more, expected"),
        ("fla", "lm_head", "lacks 'lm_head.weight', expected"),
        ("fla", "lora.2.bias", "lacks 'model.layers.0.attn.w_proj.linear.lora.2.bias' and 2 more"),
    ],
)
def test_incomplete_models_are_refused(naming, gone, complaint, weights):
    rest = {
        name: array for name, array in NAMINGS[naming](weights).items() if gone not in name and "time_state" not in name
    }
    with pytest.raises(CheckpointError, match=complaint):
        rwkv_names.official(names.VERSION, rest)


@pytest.mark.parametrize(
    "added, complaint",
    [
        ("blocks.0.att.time_state", "lacks 'blocks.1.att.time_state' and 1 more, expected"),
        ("blocks.0.att.extra", "has an unknown 'blocks.0.att.extra', expected"),
        ("rwkv.embeddings.weight", "has an unknown 'rwkv.embeddings.weight', expected"),
        ("blocks.00.ln1.weight", r"lacks 'blocks.3.ln1.weight' and \d+ more and has an unknown 'blocks.00.ln1"),
        ("model.layers.0.attn.bonus", "lacks 'model.layers.0.pre|has an unknown 'blocks.1"),
        ("blocks.x", r"and has an unknown 'blocks.x', expected"),
        ("\ud800" * 10_000, r"has an unknown '(\\ud800)+'"),
    ],
)
def test_names_left_over_are_refused(added, complaint):
    weights = dict.fromkeys(names.VERSION.parameter_axes(LAYERS), np.zeros(3))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        rwkv_names.official(names.VERSION, weights | {added: np.zeros((2, 8, 8))})
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "name, shape, official",
    [
        ("attn.x_bias", (3, 16), "att.time_maa_w"),
        ("attn.x_proj.0.linear.weight", (16, 16), "att.time_maa_w1"),
        ("attn.x_proj.0.linear.weight", (), "att.time_maa_w1"),
        ("attn.x_proj.2.weight", (16, 16), "att.time_maa_w2"),
        ("attn.w_proj.linear.lora.0.weight", (16,), "att.time_decay_w1"),
    ],
)
def test_shapes_that_cannot_be_official_are_refused(name, shape, official, weights):
    changed = to_fla(weights) | {f"model.layers.1.{name}": np.zeros(shape)}
    complaint = f"'model.layers.1.{name}' is {shape}, expected what blocks.1.{official} can be made of"
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        rwkv_names.official(names.VERSION, changed)


def test_nothing_is_refused():
    with pytest.raises(CheckpointError, match="lacks 'emb.weight' and 5 more, expected .* with 0 blocks"):
        rwkv_names.official(names.VERSION, {})
