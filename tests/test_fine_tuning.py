"""Training that goes on from a model: gradients of adapters and states, files, and the commands."""

import json
import re
import shlex
import shutil
import struct

import numpy as np
import pytest
from fla_names import named_activation, rwkv6_to_fla, rwkv7_to_fla
from safetensors.numpy import load_file, save_file

from linattn_np import ContractError
from linattn_np.__main__ import main
from linattn_np.models import RWKV6, RWKV7, Bytes, State, checkpoint, corpus, load, pth_files
from linattn_np.models.checkpoint import CheckpointError
from linattn_np.models.fine_tuning import Base, LowRank, States, Whole
from linattn_np.models.rwkv.adapters import merged
from linattn_np.models.training import Settings, Training
from linattn_np.models.training_products import HostProducts
from linattn_np.models.training_steps import keep

PAIR = {"blocks.0.att.key.lora_A": (2, 16), "blocks.0.att.key.lora_B": (16, 2)}
TEXT = b"It is a truth universally acknowledged, that a single man in possession of a good fortune... " * 30


@pytest.fixture(params=[RWKV6, RWKV7], ids=lambda kind: kind.__name__)
def base(request, rng):
    layout = request.param.trainable(layers=2, width=16, head_size=8)
    vector = layout.initial(0) + 0.1 * rng.standard_normal(layout.size).astype(np.float32)
    return Base.of(layout.named(vector))


def few(**changes):
    return Settings(**{"layers": 2, "width": 16, "head_size": 8, "batch": 2, "context": 16, "steps": 3, **changes})


MADE = {"adapter": lambda base: LowRank(base, 3, alpha=6), "state": States, "model": Whole}


def started(base, rng):
    """The same model with norms of another eps, and with a tuned state."""
    states = {f"blocks.{i}.att.time_state": rng.standard_normal((2, 8, 8), np.float32) for i in range(2)}
    return Base.of(base.weights | states | {"norm_eps": np.array([1e-3, 1e-2])})


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "eps and state"])
@pytest.mark.parametrize("made", MADE)
def test_gradients_are_finite_differences(made, begins, base, rng):
    kind, tokens = MADE[made](started(base, rng) if begins else base), rng.integers(0, 256, (2, 10))
    if made != "model":
        kind.vector = kind.vector.astype(np.float64)
    layout = kind.trainable(2, 16, 8)
    vector = layout.initial(0) + 0.1 * rng.standard_normal(layout.size)
    direction, gradient = rng.standard_normal(layout.size), np.full(layout.size, np.nan)

    def loss(vector):
        return kind.loss(layout.tree(vector), tokens, HostProducts(), keep)

    loss(vector)[1](layout.tree(gradient))
    ends = [loss(vector + h * direction)[0] for h in (1e-6, -1e-6)]
    assert gradient @ direction == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("begins", [False, True], ids=["plain", "eps and state"])
def test_a_new_adapter_and_a_new_state_are_the_model(begins, base, rng):
    tokens, plain = [list(b"It is a truth")], base.kind(base.weights)
    base = started(base, rng) if begins else base
    wanted, _ = base.kind(base.weights).forward(tokens)
    assert begins != np.array_equal(plain.forward(tokens)[0], wanted)
    for kind in (Whole(base), LowRank(base, 2), States(base)):
        layout = kind.trainable(2, 16, 8)
        found, _ = base.kind(kind.model_weights(layout, layout.initial(1))).forward(tokens)
        np.testing.assert_array_equal(found, wanted)


def test_a_base_does_not_change_with_its_file(base, tmp_path):
    """Nor with the arrays that it was made of."""
    save_file(base.weights, tmp_path / "model.safetensors")
    given = {name: array.copy() for name, array in base.weights.items()}
    found = Base.from_file(tmp_path / "model.safetensors"), Base.of(given)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    for array in given.values():
        array[...] = 0
    for name, wanted in base.weights.items():
        assert all(np.array_equal(one.weights[name], wanted) for one in found)


def test_an_adapter_is_merged_as_it_was_trained(base, tmp_path):
    kind = LowRank(base, 2, alpha=8)
    training = Training(TEXT, few(lr=0.05), kind=kind)
    for _ in range(3):
        training.step()
    training.save_model(tmp_path / "adapter.safetensors")
    save_file(base.weights, tmp_path / "model.safetensors")
    adapter, trained = (
        load_file(tmp_path / "adapter.safetensors"),
        kind.model_weights(training.layout, training.steps.weights),
    )
    assert adapter["blocks.1.att.key.lora_A"].shape == (2, 16) and adapter["lora_alpha"] == 8
    peft = {f"base_model.model.{name}.weight": array for name, array in adapter.items() if name != "lora_alpha"}
    for found in (
        merged(base.kind, base.weights, adapter),
        merged(base.kind, base.weights, peft, alpha=8),
        load(tmp_path / "model.safetensors", dtype="float32", adapter=tmp_path / "adapter.safetensors"),
    ):
        if not isinstance(found, dict):
            logits, _ = found.forward([[1, 2, 3]])
            wanted, _ = base.kind(trained).forward([[1, 2, 3]])
            np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5)
            continue
        for name, array in trained.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({}, "is empty"),
        ({"blocks.0.att.key.lora_A": (2, 16)}, "has 'blocks.0.att.key.lora_A', expected lora_A and lora_B of matrices"),
        ({"blocks.7.att.key.lora_A": (2, 16), "blocks.7.att.key.lora_B": (16, 2)}, "has 'blocks.7.att.key.lora_A'"),
        ({"blocks.0.att.key.lora_A": (2, 8), "blocks.0.att.key.lora_B": (16, 2)}, r".*\(16, 16\) of two matrices"),
        ({"blocks.0.att.key.lora_A": (3, 16), "blocks.0.att.key.lora_B": (16, 2)}, r".*\(16, 16\) of two matrices"),
        ({"blocks.0.att.key.lora_A": (0, 16), "blocks.0.att.key.lora_B": (16, 0)}, r".*\(16, 16\) of two matrices"),
        ({"blocks.0.ln1.lora_A": (2, 16), "blocks.0.ln1.lora_B": (16, 2)}, r".*\(16,\) of two matrices"),
        (
            {**PAIR, "blocks.0.att.key.lora_magnitude_vector": (16,)},
            "has 'blocks.0.att.key.lora_magnitude_vector', exp",
        ),
        ({**PAIR, "model.blocks.0.att.key.lora_A.weight": (2, 16)}, "has 'blocks.0.att.key.lora_A' twice"),
        ({**PAIR, "lora_alpha": (0,)}, "alpha is a ndarray, expected a number above 0"),
        ({**PAIR, "lora_alpha": ()}, "alpha is 0.0, expected a number above 0"),
    ],
    ids=range(11),
)
def test_adapters_that_fit_no_model_are_refused(change, complaint, base):
    with pytest.raises(ContractError, match=f"the adapter:? {complaint}"):
        merged(base.kind, base.weights, {name: np.zeros(shape, np.float32) for name, shape in change.items()})


@pytest.mark.parametrize("number, alpha", [(np.nan, 1), (3e38, 1), (1, np.nan), (1, 1e39)])
def test_an_adapter_that_gives_no_numbers_is_refused(number, alpha, base):
    adapter = {name: np.full(shape, number, np.float32) for name, shape in PAIR.items()}
    with pytest.raises(ContractError, match="the adapter.*(not finite in float32|expected a number above 0)"):
        merged(base.kind, base.weights, adapter, alpha)


@pytest.mark.parametrize("made", MADE)
def test_the_first_loss_is_the_models(made, base, rng):
    """With norms of any eps, and from a tuned state, which are trained on or kept."""
    base, tokens = started(base, rng), rng.integers(0, 256, (1, 10))
    logits = base.kind(base.weights).forward(tokens[:, :-1])[0][0].astype(np.float64)
    picked = logits[np.arange(9), tokens[0, 1:]]
    kind = MADE[made](base)
    layout = kind.trainable(2, 16, 8)
    value, _ = kind.loss(layout.tree(layout.initial(0)), tokens, HostProducts(), keep)
    assert value == pytest.approx(np.mean(np.log(np.exp(logits).sum(-1)) - picked), rel=1e-5)


def test_a_model_keeps_its_eps_and_trains_its_state(base, rng, tmp_path):
    base = started(base, rng)
    training = Training(TEXT, few(lr=0.05), kind=Whole(base))
    training.step()
    training.save_model(tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(found["norm_eps"], np.float32([1e-3, 1e-2]))
    moved = np.abs(found["blocks.1.att.time_state"] - base.weights["blocks.1.att.time_state"]).max()
    assert 0 < moved < 0.1
    assert load(tmp_path / "model.safetensors").layers.group_eps == pytest.approx(1e-2)
    again = Base.from_file(tmp_path / "model.safetensors")
    training.save(tmp_path / "training.safetensors")
    Training.restore(tmp_path / "training.safetensors", TEXT, kind=Whole(base))
    with pytest.raises(CheckpointError, match="is a training of"):
        Training.restore(tmp_path / "training.safetensors", TEXT, kind=Whole(again))


def test_a_folder_of_fla_is_trained_on(base, command, tmp_path):
    """Its norms have their own eps, the group norm's 8 times as large for RWKV-7's heads of 8 channels."""
    folder, to_fla = tmp_path / "fla", {RWKV6: rwkv6_to_fla, RWKV7: rwkv7_to_fla}[base.kind]
    folder.mkdir()
    save_file(contiguous(to_fla(base.weights)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"norm_eps": 1e-3, "hidden_size": 16, "hidden_act": "sqrelu"}))
    where = ["--text", tmp_path / "text", "--out", tmp_path / "out", "--device", "cpu", "--context", 16]
    code, _, said = command("train", "--from", folder, *where, "--steps", 1, "--lr", 1e-9)
    assert code == 0, said
    tokens = [list(b"It is a truth")]
    found, wanted = (load(path).forward(tokens)[0] for path in (tmp_path / "out" / "model.safetensors", folder))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    eps = load_file(tmp_path / "out" / "model.safetensors")["norm_eps"]
    np.testing.assert_allclose(eps, [1e-3, 8e-3 if base.kind is RWKV7 else 1e-3], rtol=1e-6)


def contiguous(weights):
    return {name: np.ascontiguousarray(array) for name, array in weights.items()}


def test_another_activation_has_no_gradients_here(base):
    with pytest.raises(
        ContractError, match="channel mix has gelu .hidden_act., expected sqrelu: gradients of no other"
    ):
        Base.of(base.weights | named_activation("gelu"))


def test_usual_eps_is_in_no_file(base):
    again = Base.of(base.weights | {"norm_eps": np.array([1e-5, 64e-5])})
    assert again.weights.keys() == base.weights.keys() and Whole(again).title == Whole(base).title


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantised_models_are_trained_in_float32(format, base, command, tmp_path):
    file, adapter = tmp_path / "model.safetensors", tmp_path / "out" / "adapter.safetensors"
    save_file(base.kind.quantise(base.weights, format), file)
    base = Base.from_file(file)
    assert base.quantised == format and all(array.dtype == np.float32 for array in base.weights.values())
    wanted, _ = load(file, dtype="float32").forward([[1, 2, 3]])
    np.testing.assert_array_equal(base.kind(base.weights).forward([[1, 2, 3]])[0], wanted)
    code, _, said = command(*train(tmp_path, "--lora", 2, "--steps", 1))
    assert code == 0 and f"{file} has {format} matrices, which become float32 for the training\n" in said
    assert command("merge", "--model", file, "--adapter", adapter, "--out", tmp_path / "whole.safetensors")[0] == 0
    wanted, _ = load(file, adapter=adapter).forward([[1, 2, 3]])
    np.testing.assert_array_equal(load(tmp_path / "whole.safetensors").forward([[1, 2, 3]])[0], wanted)


# -- what is learnt ---------------------------------------------------------------------------------------------------
def binidx(folder, tokens):
    tokens = np.asarray(tokens, np.uint16)
    (folder / "data.bin").write_bytes(tokens.tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1, 2)
    sizes = struct.pack("<iqqq", len(tokens), 0, 0, 1)
    (folder / "data.idx").write_bytes(head + sizes)
    return folder / "data.bin"


class Words(Bytes):
    """Bytes, and an id that ends a text."""

    end = 300

    def __init__(self):
        super().__init__()
        self.tokens[self.end] = b""
        self.size = 301


def test_texts_json_lines_and_binidx(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    lines = json.dumps({"text": "né"}), "", json.dumps({"text": "b", "more": 1}), ""
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert corpus.read(tmp_path / "a.txt", Bytes()).tolist() == [97, 98, 255]
    assert corpus.read(tmp_path / "a.jsonl", Bytes()).tolist() == [*"né".encode(), 10, 98, 10]
    assert corpus.read(tmp_path / "a.jsonl", Words()).tolist() == [*"né".encode(), 300, 98, 300]
    assert corpus.read(binidx(tmp_path, [5, 65535, 0]), Words()).tolist() == [5, 65535, 0]


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("a.jsonl", b'{"text": 1}\n', "line 1: its text is 1, expected"),
        ("a.jsonl", b"{", "line 1: "),
        ("data.idx", b"MMIDIDX", "its .idx starts with"),
        ("data.idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 7, 1, 2), "its .idx has the dtype 7"),
        (
            "data.idx",
            b"MMIDIDX\0\0" + struct.pack("<QBQQ2s", 1, 8, 1, 2, b"cut"),
            "its .idx of 36 bytes claims 1 texts",
        ),
        ("data.bin", b"123", "its .bin has 3 bytes, expected a multiple of 2"),
        ("data.bin", b"1234", "its .bin has 2 ids, expected the 1 of its .idx"),
        ("data.idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1 << 62, 1), "its .idx of 34 bytes claims 46.* texts"),
        (
            "data.idx",
            b"MMIDIDX\0\0" + struct.pack("<QBQQi2q", 1, 8, 1, 1, -1, 0, 0),
            "its .idx of 54 bytes claims 1 texts",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud800"}', "line 2: .* which UTF-8 cannot hold"),
    ],
)
def test_damaged_texts_are_refused(name, content, complaint, tmp_path):
    binidx(tmp_path, [1])
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name.replace(".idx", ".bin")
    with pytest.raises(ContractError, match=f"{path}: {complaint}"):
        corpus.read(path, Bytes())


def test_tokens_beyond_the_vocabulary_are_refused():
    with pytest.raises(ContractError, match="the text has token 300, but the vocabulary has 256 tokens"):
        Training(np.full(999, 300), few())


# -- the command line --------------------------------------------------------------------------------------------------
@pytest.fixture
def command(base, tmp_path, capsys):
    save_file(base.weights, tmp_path / "model.safetensors")
    (tmp_path / "text").write_bytes(TEXT)

    def run(name, *words):
        try:
            code = main([name, *map(str, words)])
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def train(tmp_path, *words):
    where = ["--from", tmp_path / "model.safetensors", "--text", tmp_path / "text", "--out", tmp_path / "out"]
    return ["train", *where, "--device", "cpu", "--context", 16, *words]


def test_the_command_at_the_end_has_the_tokenizer(command, base, tmp_path):
    code, _, said = command(*train(tmp_path, "--tokenizer", "bytes", "--steps", 1))
    file = tmp_path / "out" / "model.safetensors"
    assert code == 0 and said.endswith(f"linattn-np generate --model {file} --tokenizer bytes 'The '\n")


def test_an_adapter_is_trained_extended_and_merged(command, base, tmp_path):
    chosen = "--lora", 2, "--matrices", "ffn.key,att.output"
    code, _, said = command(*train(tmp_path, *chosen, "--steps", 2))
    file = tmp_path / "out" / "adapter.safetensors"
    generate = f"linattn-np generate --model {tmp_path / 'model.safetensors'} --adapter {file} 'The '"
    assert code == 0 and said.splitlines()[-1] == f"wrote {file}. To write with it: {generate}"
    content = load_file(file)
    assert content.pop("rwkv_version") == [base.kind.version.number]
    places = {name.split(".", 2)[2] for name in content if name != "lora_alpha"}
    assert places == {f"{place}.lora_{part}" for place in ("ffn.key", "att.output") for part in "AB"}
    code, _, said = command(*train(tmp_path, *chosen, "--resume", "--steps", 4))
    assert code == 0 and "step 4, " in said
    of_folder = "--model", tmp_path / "model.safetensors", "--adapter", file.parent
    code, _, said = command("merge", *of_folder, "--out", file)
    assert code == 2 and "is the file of --adapter, which would be lost" in said
    code, _, said = command("generate", *of_folder, "--save-state", file, "--prompt", "It")
    assert code == 2 and "is the file of --adapter, which would be lost" in said
    model, whole = tmp_path / "model.safetensors", tmp_path / "whole.safetensors"
    assert command("merge", "--model", model, "--adapter", file, "--out", whole)[0] == 0
    how = ["--device", "cpu", "--dtype", "float32", "--temperature", 0, "--tokens", 5, "--prompt", "It"]
    shutil.copy(model, file.parent / "model.safetensors")  # what the folder of an adapter may hold, too
    adapted = command("generate", "--model", model, "--adapter", file.parent, *how)
    assert adapted[:2] == command("generate", "--model", whole, *how)[:2] and adapted[0] == 0


def test_a_state_is_trained_and_written_with(command, base, tmp_path):
    code, _, said = command(*train(tmp_path, "--state", "--steps", 3, "--lr", 0.5))
    file = tmp_path / "out" / "state.pth"
    assert code == 0 and f"--load-state {file}" in said.splitlines()[-1]
    tuned = dict(checkpoint.read(file))
    np.testing.assert_array_equal(State.load(file).wkv, State.load(file.parent).wkv)
    assert list(tuned) == [*(f"blocks.{i}.att.time_state" for i in range(2)), "rwkv_version"]
    wanted, _ = base.kind(base.weights | tuned).forward([[1, 2]])
    model = base.kind(base.weights)
    found, _ = model.forward([[1, 2]], model.on_device(State.load(file.parent)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("words", [[], ["--lora", 2], ["--state"]], ids=["whole", "lora", "state"])
def test_every_report_has_a_sample_and_the_time_left_and_the_end_a_command(words, command, tmp_path):
    """Of a training of all weights, of an adapter and of a state; begun, extended, and asked again when it is done."""
    ends = []
    for count, *length in ((2, "--steps", 2), (1, "--steps", 3, "--resume"), (0, "--resume")):
        code, _, said = command(*train(tmp_path, *words, "--every", 0, *length))
        report = r"step \d+, .*, held out \d+\.\d{4}, \d+ s left\n  it writes: .*\n"
        assert code == 0 and len(re.findall(report, said)) == said.count("held out ") == count, said
        ends.append(said.splitlines()[-1])
        assert count == 0 or ", 0 s left\n  it writes: " in said
    assert len({end[end.index("To write with it: linattn-np generate --model ") :] for end in ends}) == 1
    generate = shlex.split(ends[0].split("To write with it: linattn-np ")[1])
    assert command(*generate, "--device", "cpu", "--tokens", 3)[0] == 0


def test_a_training_by_minutes_tells_the_time_left_from_its_first_report(command, tmp_path):
    code, _, said = command(*train(tmp_path, "--every", 0, "--minutes", 0.01))
    first, *_, last = re.findall(r"held out .*, (\d) s left\n  it writes: ", said)
    assert (code, first, last) == (0, "1", "0")


def test_a_training_goes_on_from_the_same_model(base, tmp_path):
    moved = Base.of(base.weights | {"emb.weight": base.weights["emb.weight"] + 1})
    for kind, other in (
        (LowRank(base, 2), LowRank(base, 2, alpha=3)),
        (LowRank(base, 2, matrices=["att.key"]), LowRank(base, 2, matrices=["att.value"])),
        (States(base), States(moved)),
    ):
        Training(TEXT, few(), kind=kind).save(tmp_path / "training.safetensors")
        Training.restore(tmp_path / "training.safetensors", TEXT, kind=kind)
        with pytest.raises(
            CheckpointError, match="another text, expected one on this, from this model with this alpha"
        ):
            Training.restore(tmp_path / "training.safetensors", TEXT, kind=other)


def other_version(base):
    """A base of another version and equal sizes."""
    kind = {RWKV6: RWKV7, RWKV7: RWKV6}[base.kind]
    layout = kind.trainable(2, 16, 8)
    return Base.of(layout.named(layout.initial(0)))


def test_what_was_trained_belongs_to_a_version(command, base, tmp_path):
    """Adapters and states of one were read by another of equal sizes without a word."""
    other = other_version(base)
    number = base.kind.version.number
    save_file(other.weights, tmp_path / "other.safetensors")
    kinds = {"adapter.safetensors": LowRank(base, 2, matrices=["att.key"]), "state.pth": States(base)}
    for file, kind in kinds.items():
        Training(TEXT, few(), kind=kind).save_model(tmp_path / file)
    adapter, state = (tmp_path / file for file in kinds)
    generate = "generate", "--device", "cpu", "--tokens", 1, "--prompt", "It"
    for words in (
        (*generate, "--adapter", adapter),
        (*generate, "--load-state", state),
        ("merge", "--adapter", adapter, "--out", tmp_path / "merged.safetensors"),
        ("evaluate", tmp_path / "text", "--tokens", 2, "--device", "cpu", "--adapter", adapter),
    ):
        for model, code in (("model.safetensors", 0), ("other.safetensors", 2)):
            its = [tmp_path / model] if words[0] == "evaluate" else ["--model", tmp_path / model]
            found, _, said = command(words[0], *its, *words[1:])
            assert found == code, said
            assert not code or f"is of RWKV-{number}, expected RWKV-{13 - number}: it goes with" in said
    older = {name: array for name, array in load_file(adapter).items() if name != "rwkv_version"}
    assert merged(other.kind, other.weights, older).keys() == other.weights.keys()
    with pytest.raises(ContractError, match=f"RWKV{13 - number}: what is merged into the model is of RWKV-{number}"):
        other.kind(other.weights | checkpoint.read(state))


def test_a_training_goes_on_as_what_it_began_as(base, tmp_path):
    """Of all weights it went on from another model, or as a new one, without a word."""
    path, number = tmp_path / "training.safetensors", base.kind.version.number
    kinds = [base.kind, Whole(base), Whole(Base.of(base.weights | {"emb.weight": base.weights["emb.weight"] + 1}))]
    kinds += [LowRank(base, 2), States(base), other_version(base).kind]
    for kind in kinds[:5]:
        Training(TEXT, few(), kind=kind).save(path)
        Training.restore(path, TEXT, kind=kind)
        for other in kinds:
            if other is not kind:
                with pytest.raises(
                    CheckpointError, match=f"is a training of .*RWKV-{number} .*, expected one of .*: it go"
                ):
                    Training.restore(path, TEXT, kind=other)
    Training(TEXT, few(), kind=Whole(base)).save(path)
    save_file({name: array for name, array in load_file(path).items() if name != "of"}, path)
    Training.restore(path, TEXT, kind=Whole(base))  # an older file


def test_no_file_of_another_kind_is_read(command, base, tmp_path):
    """Each file that the commands write or read, where each other one is wanted: a line, or what the file is."""
    kinds = {"adapter.safetensors": LowRank(base, 2), "state.pth": States(base), "x.pth": base.kind}
    for file, kind in kinds.items():
        Training(TEXT, few(), kind=kind).save_model(tmp_path / file)
    Training(TEXT, few(), kind=base.kind).save(tmp_path / "training.safetensors")
    base.kind(base.weights).forward([[1]])[1].save(tmp_path / "state.npz")
    save_file(base.kind.quantise(base.weights, "int8"), tmp_path / "int8.safetensors")
    (tmp_path / "vocab.txt").write_text("1 'a' 1\n")
    (tmp_path / "lines.jsonl").write_text('{"prompt": "It"}\n')
    files, generate = sorted(tmp_path.iterdir()), ["generate", "--device", "cpu", "--tokens", 1]
    model = ["--model", tmp_path / "model.safetensors"]
    tuned = ("state.npz", "state.pth")
    wanted = {
        ("model.safetensors", "x.pth", "int8.safetensors"): [*generate, "--prompt", "It", "--model"],
        ("adapter.safetensors",): [*generate, *model, "--prompt", "It", "--adapter"],
        tuned: [*generate, *model, "--prompt", "It", "--load-state"],
        ("lines.jsonl",): [*generate, *model, "--output", tmp_path / "out", "--batch-file"],
        (): [*generate, *model, "--prompt", "It", "--tokenizer", "world", "--vocab"],
    }
    for sound, words in wanted.items():
        for file in files:
            code, _, said = command(*words, file)
            assert code == (0 if file.name in sound else 2), (words[-1], file.name, said)
            assert code == 0 or file.name in said or "adapter" in said, said
    for file in files:
        if file.name not in ("model.safetensors", "x.pth"):
            assert (
                command(*train(tmp_path, "--steps", 1)[:1], "--from", file, *train(tmp_path, "--steps", 1)[3:])[0] == 2
            )
        (tmp_path / "out2").mkdir(exist_ok=True)
        (tmp_path / "out2" / "training.safetensors").write_bytes(file.read_bytes())
        words = ["--text", tmp_path / "text", "--out", tmp_path / "out2", "--device", "cpu", "--resume", "--steps", 3]
        code, _, said = command("train", "--version", base.kind.version.number, *words)
        assert code == (0 if file.name == "training.safetensors" else 2), (file.name, said)


def test_tuned_states_that_are_none_are_refused(tmp_path):
    for shapes in ((), ((2, 8, 4),)):
        arrays = {f"blocks.{i}.att.time_state": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
        save_file(arrays, tmp_path / "s.safetensors", {"of": "x.time_state"})
        with pytest.raises(
            ContractError, match="State: .*s.safetensors is no saved state, or a damaged one: has 'blocks"
        ):
            State.load(tmp_path / "s.safetensors")


def test_a_pth_is_what_was_written(rng, tmp_path):
    arrays = {
        "a": rng.standard_normal((3, 4), np.float32).T,
        "b.c": np.float32(rng.random(5)),
        "né": np.zeros((2, 0, 1)),
    }
    pth_files.write(tmp_path / "x.pth", arrays)
    found = checkpoint.read(tmp_path / "x.pth")
    assert list(found) == list(arrays) and {x.dtype for x in found.values()} == {np.dtype(np.float32)}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_all_weights_are_trained_from_a_model(command, base, tmp_path):
    assert command(*train(tmp_path, "--steps", 2))[0] == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    moved = max(np.abs(found[name] - array).max() for name, array in base.weights.items())
    assert found.keys() == base.weights.keys() and 0 < moved < 1e-3


def test_evaluate_tells_the_loss(command, base, tmp_path):
    (tmp_path / "short").write_bytes(TEXT[:600])
    code, told, _ = command("evaluate", tmp_path / "model.safetensors", tmp_path / "short", "--device", "cpu")
    logits = base.kind(base.weights).forward([list(TEXT[:599])])[0][0].astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -logits[np.arange(599), list(TEXT[1:600])].mean()
    wanted = f"loss {nats:.4f} nats a token, perplexity {np.exp(nats):.4f}, {nats / np.log(2):.4f} bits a byte"
    assert code == 0 and told == f"{wanted}, on 600 tokens\n"


def test_a_model_without_numbers_has_no_loss(command, base, tmp_path):
    save_file(base.weights | {"head.weight": base.weights["head.weight"] * np.nan}, tmp_path / "nan.safetensors")
    for name, *words in (
        ("evaluate", tmp_path / "nan.safetensors", tmp_path / "text"),
        ("quantise", "--model", tmp_path / "nan.safetensors", "--text", tmp_path / "text", "--dtype", "int8", "--out")
        + (tmp_path / "few.safetensors",),
    ):
        code, told, said = command(name, *words, "--tokens", 9)
        assert code == 2 and not told and "the loss is nan by token 9: the model is damaged" in said
    assert not (tmp_path / "few.safetensors").exists()


def test_a_loss_beyond_any_perplexity(command, base, tmp_path):
    save_file(base.weights | {"ln_out.weight": base.weights["ln_out.weight"] * 1e6}, tmp_path / "big.safetensors")
    code, told, _ = command("evaluate", tmp_path / "big.safetensors", tmp_path / "text", "--tokens", 9)
    assert code == 0 and "perplexity inf" in told


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--lora", 999], "LowRank: rank is 999, expected a whole number from 1 to 16"),
        (["--layers", 2], "argument --layers: does not go with --from, whose model says it"),
        (["--version", 7], "argument --version: does not go with --from"),
        (["--lora", 2, "--state"], "not allowed with argument"),
        (["--alpha", 2.0], "argument --alpha: goes with --lora only"),
        (["--matrices", "att.key"], "argument --matrices: goes with --lora only"),
        (["--lora", 2, "--matrices", "att.kye"], "LowRank: matrices is 'att.kye', expected some of att."),
        (["--out", "."], None),
    ],
)
def test_wrong_arguments_are_one_line(words, complaint, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, said = command(*train(tmp_path, "--steps", 1, *words))
    complaint = complaint or "argument --from: is model.safetensors in --out, which the training would replace"
    assert code == 2 and complaint in said.splitlines()[-1]


def test_an_adapter_alone_is_no_model(base, tmp_path):
    save_file({"blocks.0.att.key.lora_A": np.zeros((2, 16), np.float32)}, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match="LoRA adapter that is not merged, expected .* linattn-np merge"):
        load(tmp_path / "adapter.safetensors")
