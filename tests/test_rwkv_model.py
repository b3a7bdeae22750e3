"""RWKV models of every version: states and parameters, files that must be refused, sampling."""

from itertools import islice

import numpy as np
import pytest
from checkpoint_files import zipped_pth
from safetensors.numpy import save_file

from linattn_np import ContractError, NotSupported
from linattn_np.models import RWKV6
from linattn_np.models.sampling import Sampling

SIZES = {"1": 1, "5": 5, "V": 11, "D": 16, "H": 2, "N": 8, "5A": 15, "A": 3, "W": 4, "F": 24, "G": 5, "Q": 2}


@pytest.fixture
def weights(kind, rng):
    """Random parameters of a model with two layers."""
    names = kind.version.parameter_axes(2)
    return {
        name: rng.standard_normal([SIZES[axis] for axis in axes.split()], np.float32) * 0.3
        for name, axes in names.items()
    }


# -- states and parameters -------------------------------------------------------------------------------------------
def test_state_is_updated_in_place_and_a_copy_is_not(austen):
    _, state = austen.forward([[1, 2, 3]])
    before = state.copy()
    _, after = austen.forward([[4]], state)
    assert after is state
    assert not any(np.array_equal(old, new) for old, new in zip(before.arrays, state.arrays))


def test_sizes_come_from_the_parameters(kind, weights):
    found = kind(weights).sizes
    assert found == {axis: size for axis, size in {**SIZES, "L": 2}.items() if axis in found}
    assert set(found) >= set(" ".join(kind.version.parameter_axes(2).values()).split())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_any_float_dtype_is_kept_as_float32(kind, weights, dtype, tmp_path):
    stored = {name: array.astype(dtype) for name, array in weights.items()}
    save_file(stored, tmp_path / "model.safetensors")
    from_file, _ = kind.from_file(tmp_path / "model.safetensors", dtype="float32").forward([[1, 2]])
    rounded, _ = kind({name: array.astype(np.float32) for name, array in stored.items()}).forward([[1, 2]])
    assert from_file.dtype == np.float32
    np.testing.assert_array_equal(from_file, rounded)


# -- what is refused ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "tokens, complaint",
    [
        ([[1, 2, 3], [1, 2]], r"ragged, with rows of \[3, 2\] tokens; expected \[B, T\]"),
        ([1, 2], r"is \(2,\), expected \[B, T\]"),
        ([[]], r"is \(1, 0\), expected \[B, T\] with at least one token"),
        ([[0.5]], "dtype float64, expected integers"),
        ([[True]], "dtype bool, expected integers"),
        ([[0, 256]], "from 0 to 256, but the vocabulary has 256 tokens"),
        ([[-1]], "from -1 to -1, but the vocabulary has 256 tokens"),
    ],
)
def test_tokens_that_are_refused(austen, tokens, complaint):
    with pytest.raises(ContractError, match=f"{austen.version.owner}: tokens .*{complaint}"):
        austen.forward(tokens)


def test_state_of_another_batch_is_refused(austen):
    with pytest.raises(ContractError, match=r"state.att_shift is \(4, 2, 256\), expected \(4, 1, 256\)"):
        austen.forward([[1]], austen.initial_state(2))
    with pytest.raises(TypeError, match="state is a dict, expected a State"):
        austen.forward([[1]], {})


def renamed(old, new):
    def change(weights):
        return {name.replace(old, new): array for name, array in weights.items()}

    return change


def without(part):
    def change(weights):
        return {name: array for name, array in weights.items() if part not in name}

    return change


def having(**added):
    def change(weights):
        return {**weights, **{name.replace("__", "."): np.zeros(shape, np.float32) for name, shape in added.items()}}

    return change


def cast(name, dtype):
    def change(weights):
        return {**weights, name: weights[name].astype(dtype)}

    return change


@pytest.mark.parametrize(
    "change, complaint",
    [
        (renamed("att.", "attention."), r"lacks '{first}' and \d+ more and has an unknown 'blocks.0.attention"),
        (renamed("blocks.1.", "blocks.2."), r"lacks 'blocks.1.ln1.weight' and \d+ more and has an unknown 'blocks.2."),
        (without("blocks."), r"lacks 'blocks.0.ln0.weight' and \d+ more"),
        (without("head.weight"), "lacks 'head.weight', expected the parameters of {title} with 2 blocks"),
        (having(blocks__1__att__time_state=(2, 8, 8)), "lacks 'blocks.0.att.time_state', expected"),
        (having(head__weight=(11, 15)), r"head.weight is \(11, 15\), expected \[V, D\] = \(11, 16\)"),
        (having(blocks__1__ffn__key__weight=(20, 16)), r"ffn.key.weight is \(20, 16\), expected \[F, D\] = \(24, 16\)"),
        (having(emb__weight=()), r"emb.weight is \(\), expected \[V, D\] = \('V', 'D'\)"),
        (cast("emb.weight", np.int32), "emb.weight has dtype int32, expected floats"),
    ],
    ids=range(9),
)
def test_files_of_other_models_are_refused(kind, weights, change, complaint, tmp_path):
    first = next(name for name in kind.version.parameter_axes(2) if ".att." in name)
    refused(kind, change(weights), complaint.format(first=first, title=kind.version.title), tmp_path)


def refused(kind, weights, complaint, folder):
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ContractError, match=f"{folder}/model.safetensors: .*{complaint}"):
        kind.from_file(folder / "model.safetensors")


def test_heads_of_another_width_are_refused(kind, weights, tmp_path):
    name = {6: "att__time_faaaa", 7: "att__r_k"}[kind.version.number]
    change = having(**{f"blocks__{i}__{name}": (4, 8) for i in range(2)})
    refused(kind, change(weights), "H=4 heads of N=8, expected H x N = D = 16", tmp_path)


@pytest.mark.parametrize("kind", [RWKV6])
@pytest.mark.parametrize(
    "change, complaint",
    [
        (
            having(blocks__0__att__gate_w1=(16, 4)),
            "gate_w1' belongs to RWKV-6 x060a, expected the parameters of RWKV-6 x060",
        ),
        (renamed("att.time_maa_w1", "att.time_maa_rkvw_w1"), "belongs to RWKV-6 x060b or x060c, expected"),
        (having(blocks__0__att__x_r=(1, 1, 16)), "belongs to RWKV-7, expected"),
        (renamed("time_maa_k", "time_mix_k"), "belongs to RWKV-5, expected"),
        (without("time_maa"), r"lacks 'blocks.0.att.time_maa_x' and \d+ more"),
        (having(blocks__1__att__time_faaaa=(16,)), r"time_faaaa is \(16,\), expected \[H, N\] = \(2, 8\)"),
        (
            having(blocks__0__att__time_maa_w2=(5, 4, 16), blocks__1__att__time_maa_w2=(5, 4, 16)),
            "time_maa_w1 has 15 columns, expected 5 x A = 20",
        ),
    ],
    ids=range(7),
)
def test_files_that_rwkv6_refuses(kind, weights, change, complaint, tmp_path):
    refused(kind, change(weights), complaint, tmp_path)


@pytest.mark.parametrize("size", [0, 7, 1000, 20_000, -1])
def test_truncated_files_are_refused(kind, weights, size, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ContractError, match=f"{path}: .*(empty|header|damaged).*, expected"):
        kind.from_file(path)


def test_other_paths_are_refused(kind, tmp_path):
    with pytest.raises(FileNotFoundError):
        kind.from_file(tmp_path / "nowhere.safetensors")
    with pytest.raises(ContractError, match=f"{tmp_path}: is a folder without a checkpoint, expected a file"):
        kind.from_file(tmp_path)


@pytest.mark.parametrize("kind", [RWKV6])
def test_other_names_and_forms_of_rwkv6_are_the_same_model(kind, weights, tmp_path):
    """The mapping itself is tested with names.py, the files with checkpoint.py: here that the model goes through
    both.
    """
    wanted, _ = kind(weights).forward([[1, 2, 3]])
    (tmp_path / "model.pth").write_bytes(zipped_pth(weights))
    renamed = {
        "rwkv."
        + name.replace("att.", "attention.")
        .replace("ffn.", "feed_forward.")
        .replace("emb.", "embeddings.")
        .replace("ln0", "pre_ln")
        if name != "head.weight"
        else name: array
        for name, array in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors")
    for file in ("model.pth", "model.safetensors"):
        found, _ = kind.from_file(tmp_path / file).forward([[1, 2, 3]])
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype, found", [("float16", "float16"), (np.float64, "float64"), ("q4", "'q4'")])
def test_the_cpu_refuses_other_dtypes(kind, weights, dtype, found, tmp_path):
    with pytest.raises(
        TypeError, match=f"{kind.version.owner}: dtype is {found}, expected float32, bfloat16, int8, int4 on the CPU"
    ):
        kind(weights, dtype=dtype)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ContractError, match=f"{tmp_path}.*dtype is {found}"):
        kind.from_file(tmp_path / "model.safetensors", dtype=dtype)
    kind(weights, dtype="float32")


def test_progress_counts_the_bytes_of_the_weights(kind, weights, tmp_path):
    half, seen = {name: array.astype(np.float16) for name, array in weights.items()}, []
    save_file(half, tmp_path / "model.safetensors")
    kind.from_file(tmp_path / "model.safetensors", progress=lambda *bytes_: seen.append(bytes_))
    total = sum(array.nbytes for array in half.values())
    assert {of for _, of in seen} == {total} and seen[-1][0] == total
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) > 20


def test_a_rounded_state_is_refused_on_the_cpu(kind, weights):
    with pytest.raises(
        TypeError, match=f"{kind.version.owner}: dtype is float16, expected float32 for the state on the CPU"
    ):
        kind(weights, state_dtype=np.float16)


def test_devices_that_are_refused(kind, weights):
    with pytest.raises(ContractError, match="device is 'gpu', expected 'cpu' or 'cuda'"):
        kind(weights, "gpu")
    try:
        kind(weights, "cuda")
    except NotSupported as error:
        assert str(error).startswith(f"{kind.version.owner}: device 'cuda' cannot be used: ")


def sample(logits, temperature, top_p, rng) -> int:
    return Sampling(temperature=temperature, top_p=top_p, seed=rng).sampler()(logits)


# -- text -----------------------------------------------------------------------------------------------------------
def text(model, count=40, **arguments):
    return bytes(islice(model.generate(b"It is a truth", **arguments), count))


def test_greedy_text_is_the_argmax_of_the_logits(austen):
    prompt = list(b"It is a truth")
    written = text(austen, temperature=0)
    logits, _ = austen.forward([prompt + list(written)])
    assert bytes(logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()) == written


def test_a_seed_can_be_had_again(austen):
    assert text(austen, seed=1) == text(austen, seed=1) != text(austen, seed=2)


def test_a_small_top_p_is_greedy(austen):
    assert text(austen, top_p=1e-9, seed=1) == text(austen, temperature=0)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({"temperature": -1}, "temperature is -1, expected a number from 0 up"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0 and up to 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_sampling_that_is_refused_before_the_first_token(austen, arguments, complaint):
    with pytest.raises(ContractError, match=complaint):
        austen.generate(b"It", **arguments)


@pytest.mark.parametrize(
    "top_p, drawn", [(1.0, {0, 1, 2, 3}), (0.85, {0, 1, 2}), (0.75, {0, 2}), (0.5, {2}), (0.1, {2})]
)
def test_top_p_keeps_the_likeliest(top_p, drawn, rng):
    logits = np.log(np.float32([0.3, 0.12, 0.5, 0.08]))
    assert {sample(logits, 1.0, top_p, rng) for _ in range(400)} == drawn


def test_sampling_follows_the_distribution(rng):
    p = np.array([0.1, 0.2, 0.3, 0.4])
    for temperature in (1.0, 2.0):
        wanted = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        counts = np.bincount([sample(np.log(p), temperature, 1.0, rng) for _ in range(20_000)], minlength=4)
        np.testing.assert_allclose(counts / 20_000, wanted, atol=0.02)


def test_impossible_tokens_are_never_drawn(rng):
    logits = np.float32([-np.inf, 0, -np.inf])
    assert {sample(logits, temperature, 1.0, rng) for temperature in (0, 1e-3, 1, 10) for _ in range(50)} == {1}
