"""What models of every version of RWKV do alike, from one body: logits, states, text, files, fewer bits, gradients."""

import json
import tracemalloc
from itertools import islice

import golden
import literal_rwkv6
import literal_rwkv7
import numpy as np
import pytest
from checkpoint_files import zipped_pth
from fla_names import named_activation, rwkv6_to_fla, rwkv7_to_fla
from reference import rms
from safetensors.numpy import save_file

from linattn_np import ContractError, ContractTypeError
from linattn_np.command import evaluate
from linattn_np.models import (
    RWKV6,
    RWKV7,
    Batch,
    Bytes,
    Sampling,
    State,
    array_math,
    austen,
    checkpoint,
    load,
    matrices,
)
from linattn_np.models.checkpoint import CheckpointError
from linattn_np.models.rwkv import cpu_layers, names
from linattn_np.models.rwkv.version import name_in_block
from linattn_np.models.rwkv7 import mixes
from linattn_np.models.text import Request, complete
from linattn_np.models.training import Settings, Training
from linattn_np.models.training_products import HostProducts
from linattn_np.models.training_steps import apply_dropout, keep

V = 23
LITERAL = {RWKV6: literal_rwkv6, RWKV7: literal_rwkv7}
TO_FLA = {RWKV6: rwkv6_to_fla, RWKV7: rwkv7_to_fla}
TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune... " * 30


def layout_of(kind, vocabulary=V, **sizes):
    return kind.layout(
        kind.layout.sizes_of(**{"layers": 3, "width": 32, "head_size": 8, **sizes}, vocabulary=vocabulary)
    )


@pytest.fixture(params=[RWKV6, RWKV7], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture
def weights(kind, rng):
    """Random parameters, away from the many zeros of first ones."""
    layout = layout_of(kind)
    return layout.named((layout.initial(0) + 0.2 * rng.standard_normal(layout.size)).astype(np.float32))


@pytest.fixture
def begun(weights, rng):
    """The same, whose sequences start from a tuned state.

    From zeros, a head's first output is v times one number. If that nearly cancels, the head's norm multiplies its
    rounding alone, and a few draws of rounded weights may miss how much.
    """
    return weights | tuned_state(rng)


def tuned_state(rng):
    return {f"blocks.{i}.att.time_state": rng.standard_normal((4, 8, 8), np.float32) for i in range(3)}


def test_the_loss_of_a_text_takes_no_memory_for_a_large_vocabulary(kind, monkeypatch):
    layout, tokens = layout_of(kind, vocabulary=1 << 18, layers=1, width=8), np.arange(65)
    model = kind.by_numpy(layout.named(layout.initial(0)))
    monkeypatch.setattr(evaluate, "MOST_LOGITS", 1 << 19)
    tracemalloc.start()
    try:
        found = evaluate.loss(model, tokens.tolist(), "a text")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * (1 << 19)  # bytes: float32 and float64 logits, and what exp gives of these
    assert 4 * 64 * (1 << 18) > 4 * peak  # of all tokens' logits in float32
    logits = model.forward(tokens[None, :-1])[0][0].astype(np.float64)
    wanted = np.log(np.exp(logits).sum(-1)) - logits[np.arange(64), tokens[1:]]
    assert found == pytest.approx(wanted.mean(), rel=1e-6)


# -- logits ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("loops", [True, False], ids=["Numba", "NumPy"])
@pytest.mark.parametrize("lengths", [[20], [1] * 8, [9, 1, 1, 5]], ids=str)
def test_logits_and_states_are_the_literal_ones(kind, begun, lengths, loops, rng, monkeypatch):
    """Within 6 times what rounding the weights to float32 does. In 265 draws the ratio's logarithm was -.05 +- .25, and
    the ratio 2.2 at most."""
    monkeypatch.setattr(cpu_layers, "has_loops", lambda: loops and bool(matrices.loops()))
    model, tokens, state, found = kind(begun), rng.integers(0, V, sum(lengths)), None, []
    for part in np.split(tokens, np.cumsum(lengths)[:-1]):
        logits, state = model.forward(part[None], state)
        found.append(logits[0])
    literal = LITERAL[kind].logits_and_state
    wanted = literal(begun, tokens)
    moved = literal_rwkv6.moved_by_rounding(begun, tokens, rng, literal=literal)
    for x, y, of in zip((np.concatenate(found), *(part[:, 0] for part in state.arrays)), wanted, moved, strict=True):
        assert rms(x - y) <= 6 * of


@pytest.mark.parametrize("by_loops", [False, True])
def test_decays_of_rwkv7_near_1_have_all_digits(by_loops):
    """A state meets them at every token: of 65,536 a decay of exp(-7e-8) that is 1 leaves 4.5e-3."""
    base = np.linspace(-80, 10, 64, dtype=np.float32)
    wanted = -mixes.DECAY / (1 + np.exp(-base.astype(float)))
    if by_loops:
        numba_loops = pytest.importorskip("linattn_np.models.rwkv7.numba_loops")
        found = np.zeros((1, 64), np.float32)
        numba_loops.biased_sigmoid(found, base, -mixes.DECAY)
    else:
        found = -mixes.DECAY * array_math.sigmoid(base)
    assert (abs(found / wanted - 1) < 2e-6).all()


def test_packed_prompts_and_slots_are_each_alone(kind, begun, rng):
    """Both within 6 times what rounding the weights does to the same token's logits, as above."""

    def of_two_tokens(weights, tokens):
        return LITERAL[kind].logits_of(weights, tokens)[-2:]

    model, lengths = kind(begun), [5, 1, 12]
    tokens, pool = rng.integers(0, V, sum(lengths)), model.initial_state(5)
    bounds, slots = np.cumsum([0, *lengths]), [4, 0, 2]
    together, _ = model.forward(tokens[None], pool, cu_seqlens=bounds, slots=slots, last=True)
    step, _ = model.forward([[1], [2], [3]], pool, slots=slots)
    for n, (first, end) in enumerate(zip(bounds, bounds[1:])):
        own = [*tokens[first:end], n + 1]
        of_prompt, of_step = literal_rwkv6.moved_by_rounding(begun, own, rng, literal=of_two_tokens)
        alone, state = model.forward(tokens[None, first:end], last=True)
        assert rms(together[n] - alone[0]) <= 2 * 6 * of_prompt
        alone, _ = model.forward([[n + 1]], state)
        assert rms(step[n] - alone[0]) <= 2 * 6 * of_step


@pytest.mark.parametrize("dtype, times", [("bfloat16", 5), ("int8", 5), ("int4", 50)])
def test_fewer_bits_are_float32_arithmetic_on_the_rounded_weights(kind, begun, dtype, times, rng, tmp_path):
    """Products may be off by so many times what float32's are: see `LIMIT` of test_few_bits."""
    save_file(kind.quantise(begun, dtype), tmp_path / "small.safetensors")
    model = load(tmp_path / "small.safetensors")
    assert type(model) is kind and str(model.layers.dtype) == dtype
    tokens, state, found = rng.integers(0, V, 14), None, []
    for part in np.split(tokens, [9, 10, 11, 12, 13]):
        logits, state = model.forward(part[None], state)
        found.append(logits[0])
    wide, literal = widened(model, begun, dtype), LITERAL[kind].logits_and_state
    moved, *_ = literal_rwkv6.moved_by_rounding(wide, tokens, rng, literal=literal)
    assert rms(np.concatenate(found) - literal(wide, tokens)[0]) <= 6 * times * moved


def widened(model, weights, dtype):
    """The numbers that a model computes with, by official name."""
    stored, _ = model.parameters(model.quantise(weights, dtype), None)
    found = {name: np.array(array, np.float32) for name, array in stored.items()}
    for i, layer in enumerate(model.layers.layers):
        for field, weight in model.version.layer.items():
            if weight.inputs_first and hasattr(layer, field):  # a matrix of low rank, which has more bits in int4
                found[f"blocks.{i}.{weight.names[0]}"] = getattr(layer, field).widened().swapaxes(-1, -2)
    return found


@pytest.mark.parametrize("loops", [True, False], ids=["Numba", "NumPy"])
def test_hidden_states_are_what_the_head_reads(kind, weights, loops, rng, monkeypatch):
    monkeypatch.setattr(cpu_layers, "has_loops", lambda: loops and bool(matrices.loops()))
    model, tokens = kind(weights), rng.integers(0, V, (2, 7))
    logits, after = model.forward(tokens)
    hidden, state = model.forward(tokens, hidden=True)
    assert hidden.shape == (2, 7, 32) and all((x == y).all() for x, y in zip(state.arrays, after.arrays))
    np.testing.assert_allclose(hidden @ weights["head.weight"].T, logits, rtol=0, atol=1e-5)
    rows = hidden[:, ::2]  # not contiguous
    assert model.head(rows).shape == (2, 4, V)
    np.testing.assert_allclose(model.head(rows), logits[:, ::2], rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.head(hidden[1, 3]), logits[1, 3], rtol=0, atol=1e-5)
    for wrong, what in (
        (hidden[..., :3], r"float32 \(2, 7, 3\)"),
        (hidden[:0], r"float32 \(0, 7, 32\)"),
        (hidden.astype(np.float64), "float64 "),
        (hidden.tolist(), "a list"),
        (np.float32(1), "a float32"),
    ):
        with pytest.raises(ContractError, match=f"{kind.version.owner}: hidden is {what}.*, expected rows of what"):
            model.head(wrong)
    step, _ = model.forward([[1], [2]], state, hidden=True, last=True)
    np.testing.assert_allclose(step @ weights["head.weight"].T, model.forward([[1], [2]], after)[0][:, 0], atol=1e-5)


@pytest.fixture(scope="module")
def packaged():
    """What comes with the package, by kind: the model's path, 160 bytes, the float64 logits after each of them."""
    found = {}
    for kind, version in ((RWKV6, 6), (RWKV7, 7)):
        with np.load(austen(version).with_name("golden.npz")) as file:
            found[kind] = austen(version), file["prompt"], file["logits"]
    return found


@pytest.mark.parametrize(
    "lengths",
    [[160], [1] * 160, [1, 159], [159, 1], [15, 17, 128], [64, 96], [65, 1, 94]],
    ids=lambda lengths: f"{len(lengths)} calls from {lengths[0]}",
)
def test_logits_are_the_golden_ones(kind, packaged, lengths):
    path, prompt, wanted = packaged[kind]
    model, state, logits = kind.from_file(path), None, []
    for part in np.split(prompt[None], np.cumsum(lengths)[:-1], axis=1):
        found, state = model.forward(part, state)
        logits.append(found[0])
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.concatenate(logits), wanted, rtol=0, atol=1e-4)


def test_the_literal_logits_are_the_golden_ones(kind, packaged):
    path, prompt, wanted = packaged[kind]
    found = LITERAL[kind].logits_of(checkpoint.read(path), bytes(prompt))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_golden_logits_are_written_beside_a_model(kind, rng, tmp_path):
    layout = layout_of(kind, vocabulary=256, layers=2)
    weights = layout.named(layout.initial(0) + np.float32(0.05))
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "text").write_bytes(b"Captain Wentworth")
    golden.main(tmp_path / "model.safetensors", tmp_path / "text", 7)
    with np.load(tmp_path / "golden.npz") as file:
        assert bytes(file["prompt"]) == b"Captain"
        np.testing.assert_array_equal(file["logits"], LITERAL[kind].logits_of(weights, b"Captain"))


# -- text -----------------------------------------------------------------------------------------------------------
def test_text_batches_and_states_are_the_same_text(kind, tmp_path):
    layout = layout_of(kind, vocabulary=256)
    model = kind(layout.named(layout.initial(3) + np.float32(0.05)))
    prompt = b"Captain Went"
    alone = bytes(islice(model.generate(prompt, temperature=0), 12))
    requests = [Request(prompt, Sampling(temperature=0), length=12), Request(b"Anne", Sampling(seed=1), length=5)]
    texts = {number: (text, how) for number, text, how in complete(model, Bytes(), requests, slots=2)}
    assert texts[0][0] == alone.decode("utf-8", "replace")
    batch = Batch(model, 2)
    (slot,) = batch.join([prompt], Sampling(temperature=0))
    assert bytes(batch.step()[slot] for _ in range(5)) == alone[:5]
    batch.state(slot).save(tmp_path / "state.npz")
    again, _ = model.forward([[0]], model.on_device(State.load(tmp_path / "state.npz")))
    whole, _ = model.forward([list(prompt + alone[:5]) + [0]])
    np.testing.assert_allclose(again[0, 0], whole[0, -1], rtol=0, atol=2e-5)


def test_a_tuned_state_is_where_sequences_start(kind, weights, rng, tmp_path):
    tuned = tuned_state(rng)
    found, _ = kind(weights | tuned).forward([[1, 2, 3]])
    (tmp_path / "state.pth").write_bytes(zipped_pth(tuned))
    model = kind(weights)
    again, _ = model.forward([[1, 2, 3]], model.on_device(State.load(tmp_path / "state.pth")))
    np.testing.assert_array_equal(again, found)
    np.testing.assert_allclose(found[0], LITERAL[kind].logits_of(weights | tuned, [1, 2, 3]), rtol=0, atol=1e-4)


def test_a_state_belongs_to_a_version(tmp_path):
    """An RWKV-7 of equal sizes read on from an RWKV-6's state without a word."""
    models = {}
    for kind in (RWKV6, RWKV7):
        layout = layout_of(kind)
        models[kind] = kind(layout.named(layout.initial(0)))
    for kind, other in ((RWKV6, models[RWKV7]), (RWKV7, models[RWKV6])):
        batch = Batch(models[kind], 1)
        (slot,) = batch.join([[1, 2, 3]], Sampling(temperature=0))
        state = batch.state(slot)
        state.save(tmp_path / "state.npz")
        for found in (state, state.copy(), State.load(tmp_path / "state.npz")):
            models[kind].forward([[1]], models[kind].on_device(found).copy())
            for use in (
                lambda: other.forward([[1]], found),
                lambda: other.on_device(found),
                lambda: Batch(other, 1).join([[1]], Sampling(), [found]),
            ):
                number = kind.version.number
                with pytest.raises(ContractError, match=f"state is of RWKV-{number}, expected RWKV-{13 - number}: it"):
                    use()


def test_a_state_that_names_no_version_enters_any(weights, kind, tmp_path):
    """Such are older files, and states of a caller's own arrays."""
    model = kind(weights)
    wanted, state = model.forward([[1, 2, 3]])
    np.savez(tmp_path / "older.npz", **{name: getattr(state, name) for name in ("att_shift", "wkv", "ffn_shift")})
    older = State.load(tmp_path / "older.npz")
    assert older.version is None and model.on_device(older).version == kind.version.number
    again, _ = model.forward([[4]], older)
    np.testing.assert_array_equal(again, model.forward([[4]], State(*state.copy().arrays))[0])


@pytest.mark.parametrize("version", [np.float32([np.nan]), np.float32([6.5]), np.float32([6, 7]), np.float32(6)])
def test_a_version_that_is_none_is_refused(version, kind, weights, tmp_path):
    path = tmp_path / "state.npz"
    kind(weights).forward([[1]])[1].save(path)
    np.savez(path, **dict(np.load(path)) | {"rwkv_version": version})
    with pytest.raises(ContractError, match="rwkv_version is float32 .*, expected the number of a version"):
        State.load(path)
    with pytest.raises(ContractError, match="State: version is .*, expected a whole number from 1 to 99"):
        State(*kind(weights).initial_state().arrays, version=version).save(path)


@pytest.mark.parametrize("how", [{"batches": (-1,)}, {"batches": ("1",)}, {"prompt": -1}, {"prompt": 1.5}])
def test_what_is_warmed_up_is_counted(how, kind, weights):
    with pytest.raises(ContractError, match="warm_up's .* is .*, expected a whole number from [01] up"):
        kind(weights).warm_up(**how)


# -- files ----------------------------------------------------------------------------------------------------------
def to_web_rwkv(weights):
    turned = ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2")
    return {name: array.T if name.endswith(turned) else array for name, array in weights.items()}


NAMINGS = {
    "official": dict,
    "trainers": lambda weights: {f"module.{name}": array for name, array in weights.items()},
    "without axes of 1": lambda weights: {
        name: x.reshape(-1) if x.shape[:2] == (1, 1) else x for name, x in weights.items()
    },
    "with what nothing reads": lambda weights: (
        weights | {f"blocks.0.att.{name}": np.zeros(3, np.float32) for name in ("v0", "v1", "v2")}
    ),
    "web-rwkv": to_web_rwkv,
    "fla": rwkv7_to_fla,
    "fla, packed": lambda weights: rwkv7_to_fla(weights, packed=True),
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_of_rwkv7_gives_the_same_arrays(naming, rng):
    weights = layout_of(RWKV7).named(rng.standard_normal(layout_of(RWKV7).size, np.float32))
    found, sizes = names.parameters(RWKV7.version, NAMINGS[naming](weights))
    assert list(found) == list(weights) and sizes["N"] == 8
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array)


def test_the_file_tells_which_version_it_is(kind, weights, tmp_path):
    (tmp_path / "model.pth").write_bytes(zipped_pth(weights))
    save_file(weights, tmp_path / "model.st")
    for file in ("model.pth", "model.st"):
        assert type(load(tmp_path / file)) is kind


PARTS_OF_TRAINERS = {
    "all": lambda name: f"_forward_module._orig_mod.model.{name}",
    "some": lambda name: f"module.{name}" if ".att." in name else name,
    "several": lambda name: f"module.{name}" if ".att." in name else f"model._orig_mod.{name}",
    "within": lambda name: name.replace(".att.", "._fsdp_wrapped_module._checkpoint_wrapped_module.att."),
}


@pytest.mark.parametrize("parts", PARTS_OF_TRAINERS)
@pytest.mark.parametrize("fla", [False, True], ids=["official", "fla"])
def test_what_trainers_add_to_names_and_files_is_removed(kind, weights, parts, fla, tmp_path):
    """Of a tuned state alone, too."""
    added, tuned = PARTS_OF_TRAINERS[parts], tuned_state(np.random.default_rng(0))
    config = {"norm_eps": 1e-5} if fla else None
    named = TO_FLA[kind](weights) if fla else weights
    wanted, _ = kind(named, config=config).forward([[1, 2, 3]])
    (tmp_path / "model.pth").write_bytes(
        zipped_pth({added(name): x for name, x in named.items()}, around=["module", "state_dict"])
    )
    if fla:
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "model.pth")
    np.testing.assert_array_equal(model.forward([[1, 2, 3]])[0], wanted)
    (tmp_path / "state.pth").write_bytes(
        zipped_pth({added(name): x for name, x in tuned.items()}, around=["model_state_dict"])
    )
    state = State.load(tmp_path / "state.pth")
    np.testing.assert_array_equal(state.wkv[1, 0], tuned["blocks.1.att.time_state"].swapaxes(1, 2))


def test_a_parameter_by_two_names_is_refused(kind, weights):
    with pytest.raises(CheckpointError, match="'module.emb.weight' is there with another prefix, or with none, too"):
        kind(weights | {"module.emb.weight": weights["emb.weight"]})


@pytest.mark.parametrize("loops", [True, False], ids=["Numba", "NumPy"])
@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "swish", "sigmoid", "logsigmoid"])
def test_flas_config_says_the_activation(kind, act, loops, rng, monkeypatch, tmp_path):
    """No published model has another than the square of relu; fla makes any. Of 1,000 draws a logit is about 2e-6 off
    at most, of 10,000 1.4e-5. Another activation moves one by 0.08 or more (120 models)."""
    monkeypatch.setattr(cpu_layers, "has_loops", lambda: loops)
    weights = layout_of(kind).named(rng.standard_normal(layout_of(kind).size, np.float32) * 0.3)
    config, named = {"norm_eps": 1e-2, "hidden_act": act}, TO_FLA[kind](weights)
    eps = np.array([1e-2, 8e-2 if kind is RWKV7 else 1e-2])  # fla's group norm has 8 times the eps for heads of 8
    wanted = LITERAL[kind].logits_of(weights | named_activation(act) | {"norm_eps": eps}, [1, 2, 3, 4])
    model = kind(named, config=config)
    whole, state = model.forward([[1, 2, 3]])
    step, _ = model.forward([[4]], state)
    np.testing.assert_allclose(np.concatenate([whole, step], 1)[0], wanted, rtol=0, atol=1e-3)
    save_file(kind.quantise(named, "bfloat16", config), tmp_path / "model.safetensors")
    wanted = LITERAL[kind].logits_of(checkpoint.read(tmp_path / "model.safetensors"), [1, 2, 3])
    again, _ = load(tmp_path / "model.safetensors", dtype="float32").forward([[1, 2, 3]])
    np.testing.assert_allclose(again[0], wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("act", ["mish", 1, None])
def test_an_activation_that_fla_lacks_is_refused(kind, weights, act):
    with pytest.raises(ContractError, match="config.json has hidden_act .*, expected one of sqrelu, relu, gelu, silu"):
        kind(TO_FLA[kind](weights), config={"hidden_act": act})
    for array in (named_activation("mish")["hidden_act"], np.ones(1, np.float32)):
        with pytest.raises(ContractError, match="hidden_act is .*, expected a name: sqrelu, relu, gelu"):
            kind(weights | {"hidden_act": array})


def test_config_of_flas_rwkv7_says_the_eps(tmp_path, rng):
    weights = layout_of(RWKV7).named(rng.standard_normal(layout_of(RWKV7).size, np.float32) * 0.3)
    wanted = literal_rwkv7.logits_of(weights | {"norm_eps": np.array([1e-3, 8e-3])}, [1, 2, 3])
    found, _ = RWKV7(rwkv7_to_fla(weights), config={"norm_eps": 1e-3}).forward([[1, 2, 3]])
    np.testing.assert_allclose(found[0], wanted, rtol=0, atol=1e-4)
    with pytest.raises(ContractError, match="RWKV7: config.json has attn"):
        RWKV7(rwkv7_to_fla(weights), config={"attn": {"layers": [1]}})


def test_biases_that_config_of_flas_rwkv7_excludes_are_not_read(rng):
    named = rwkv7_to_fla(layout_of(RWKV7).named(rng.standard_normal(layout_of(RWKV7).size, np.float32) * 0.3))
    without = {name: x * 0 if "norm.bias" in name and "g_norm" not in name else x for name, x in named.items()}
    found, wanted = (
        RWKV7(weights, config={"norm_bias": bias}).forward([[1, 2, 3]])[0]
        for weights, bias in ((named, False), (without, True))
    )
    np.testing.assert_array_equal(found, wanted)


def test_config_of_flas_rwkv7_says_the_sizes(rng):
    """As fla reads them: num_heads beside head_dim has no meaning, value_dim is a number a layer."""
    layout = layout_of(RWKV7)
    named = rwkv7_to_fla(layout.named(rng.standard_normal(layout.size, np.float32)))
    _, sizes = names.parameters(RWKV7.version, named)
    fields = {
        "hidden_size": "D",
        "num_hidden_layers": "L",
        "vocab_size": "V",
        "intermediate_size": "F",
        "head_dim": "N",
    }
    ranks = {"decay_low_rank_dim": "W", "a_low_rank_dim": "A", "v_low_rank_dim": "Q", "gate_low_rank_dim": "G"}
    config = {field: sizes[axis] for field, axis in (fields | ranks).items()} | {"norm_eps": 1e-5}
    RWKV7(named, config=config | {"num_heads": 999, "value_dim": [sizes["D"]] * sizes["L"]})
    others = {field: size + 1 for field, size in config.items() if field != "norm_eps"}
    for field, value in (others | {"value_dim": [sizes["D"]] * (sizes["L"] - 1) + [1]}).items():
        with pytest.raises(ContractError, match=f"RWKV7: config.json has {field} .*, but the weights have"):
            RWKV7(named, config=config | {field: value})
    with pytest.raises(ContractError, match="RWKV7: config.json has num_heads 999, but the weights have"):
        RWKV7(named, config={"num_heads": 999})
    first = {name: array for name, array in named.items() if name.split(".")[2:3] not in (["1"], ["2"])}
    RWKV7(first, config=config | {"num_hidden_layers": 1})  # whose rank of values is nowhere


@pytest.mark.parametrize(
    "added, version",
    [
        ("blocks.0.ffn.s_emb.weight", "RWKV-7a"),
        ("blocks.1.qkv.qq.weight", "RWKV-7b"),
        ("blocks.0.ffn.enn.weight", "RWKV-8"),
    ],
)
def test_rwkv7_refuses_other_versions_by_name(added, version, rng, tmp_path):
    weights = layout_of(RWKV7).named(np.zeros(layout_of(RWKV7).size, np.float32))
    save_file(weights | {added: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"'{added}' belongs to {version}.*, expected the parameters of RWKV-7 x070"
    ):
        load(tmp_path / "model.safetensors")


def test_rwkv7b_which_has_the_names_of_rwkv7a_too_is_named():
    added = {name: np.zeros(1, np.float32) for name in ("blocks.0.ffn.s_emb.weight", "blocks.0.qkv.qq.weight")}
    weights = layout_of(RWKV7).named(np.zeros(layout_of(RWKV7).size, np.float32))
    with pytest.raises(ContractError, match="'blocks.0.qkv.qq.weight' belongs to RWKV-7b"):
        RWKV7(added | weights)


def test_each_version_refuses_the_other(kind, weights):
    other = {RWKV6: RWKV7, RWKV7: RWKV6}[kind]
    with pytest.raises(
        CheckpointError, match=f"belongs to {kind.version.title.split()[0]}, expected the parameters of"
    ):
        other(weights)


# -- gradients ------------------------------------------------------------------------------------------------------
def test_gradients_are_finite_differences(kind, rng):
    layout = layout_of(kind, vocabulary=11, width=16, head_size=4, layers=2)
    vector, tokens = layout.initial(0) + 0.1 * rng.standard_normal(layout.size), rng.integers(0, 11, (2, 8))
    gradient = np.full(layout.size, np.nan)

    def loss(vector, drop=keep):
        return kind.loss(layout.tree(vector), tokens, HostProducts(), drop)

    loss(vector)[1](layout.tree(gradient))
    for part in dict.fromkeys(map(name_in_block, layout.spans)):
        direction = np.zeros(layout.size)
        for name, (first, end) in layout.spans.items():
            if name_in_block(name) == part:
                direction[first:end] = rng.standard_normal(end - first)
        ends = [loss(vector + h * direction)[0] for h in (1e-6, -1e-6)]
        assert gradient @ direction == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=2e-5, abs=1e-7), part


def test_gradients_through_dropout(kind, rng):
    layout = layout_of(kind, vocabulary=11, width=16, head_size=4, layers=2)
    vector, tokens = layout.initial(0) + 0.1 * rng.standard_normal(layout.size), rng.integers(0, 11, (2, 8))
    direction, gradient = rng.standard_normal(layout.size), np.empty(layout.size)

    def loss(vector):
        drawn = np.random.default_rng(1)
        return kind.loss(layout.tree(vector), tokens, HostProducts(), lambda x: apply_dropout(drawn, 0.3, x))

    loss(vector)[1](layout.tree(gradient))
    ends = [loss(vector + h * direction)[0] for h in (1e-6, -1e-6)]
    assert gradient @ direction == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_it_learns_and_the_file_writes_the_text(kind, tmp_path):
    settings = Settings(layers=1, width=24, head_size=8, batch=4, context=20, steps=90, lr=3e-2)
    training = Training(TEXT, settings, kind=kind)
    losses = [float(training.step()) for _ in range(90)]
    assert losses[0] > 5.4 and losses[-1] < 0.7
    training.save_model(tmp_path / "model.safetensors")
    model = load(tmp_path / "model.safetensors")
    assert type(model) is kind
    assert bytes(islice(model.generate(b"It is a truth univ", temperature=0), 8)) == b"ersally "


def test_tokens_of_other_libraries(kind, weights):
    """Those on the host are read; those without numbers there are named."""
    torch = pytest.importorskip("torch")
    model, tokens = kind(weights), [[1, 2, 3], [4, 5, 6]]
    wanted, state = model.forward(tokens)
    for read in (torch.tensor(tokens), np.array(tokens, np.uint16)):
        np.testing.assert_array_equal(model.forward(read)[0], wanted)
    for unread, words in (
        (torch.zeros((2, 3), dtype=torch.int64, device="meta"), "is on torch's device meta"),
        (np.ma.masked_array(tokens, mask=True), "is a numpy.ma.MaskedArray, whose mask would be ignored"),
    ):
        with pytest.raises(ContractTypeError, match=f"{kind.__name__}: tokens {words}"):
            model.forward(unread)
    with pytest.raises(ContractTypeError, match=f"{kind.__name__}: slots is on torch's device meta"):
        model.forward(tokens, state, slots=torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(ContractTypeError, match="Training: text is on torch's device meta"):
        Training(torch.zeros(900, dtype=torch.uint8, device="meta"), Settings(steps=1), kind=kind)


def test_weights_of_other_libraries(kind, weights):
    """What memory alone does not say is resolved or refused."""
    torch = pytest.importorskip("torch")
    wanted, _ = kind(weights).forward([[1, 2, 3]])
    for read in (torch.tensor, lambda x: torch._neg_view(-torch.tensor(x)), lambda x: x.tolist()):
        found, _ = kind({name: read(array) for name, array in weights.items()}).forward([[1, 2, 3]])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    for unread, words in (
        (lambda x: torch.tensor(x, device="meta"), "is on torch's device meta"),
        (lambda x: np.ma.masked_array(x, mask=True), "is a numpy.ma.MaskedArray, whose mask would be ignored"),
    ):
        with pytest.raises(ContractTypeError, match=f"{kind.__name__}: ln_out.weight {words}"):
            kind(weights | {"ln_out.weight": unread(weights["ln_out.weight"])})
