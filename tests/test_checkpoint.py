"""Reading checkpoints: every dtype and form, views without copies; hostile and damaged files are refused."""

import argparse
import os
import time
import tracemalloc
import zipfile
from collections import defaultdict
from pathlib import Path

import checkpoint_files
import hostile
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import Call, pickled, tensor
from hostile import GOOD

from linattn_np.models import checkpoint
from linattn_np.models.checkpoint import CheckpointError, read

AUSTEN = Path(__file__).parents[1] / "examples" / "data" / "austen-x060"
FORMS = {
    "zip": ("model.pth", checkpoint_files.zipped_pth),
    "older": ("model.pth", checkpoint_files.older_pth),
    "safetensors": ("model.safetensors", checkpoint_files.good_safetensors),
}
CORPUS = list(hostile.corpus())


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content)
    return path


def assert_same(found, wanted):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


# -- what is read --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", checkpoint_files.TYPES, ids=str)
def test_every_dtype_in_every_form(form, dtype, rng, tmp_path):
    name, write = form
    weights = {
        "matrix": rng.integers(0, 100, (3, 5)).astype(dtype),
        "scalar": np.ones((), dtype),
        "none": np.zeros((0, 4), dtype),
        "axes": rng.integers(0, 2, (2, 1, 3, 2)).astype(dtype),
    }
    assert_same(read(written(tmp_path, name, write(weights))), weights)


def test_arrays_are_views_that_cannot_be_written(form, tmp_path):
    name, write = form
    big = {"big": np.zeros(1 << 22, np.float32)}
    path = written(tmp_path, name, write(big))
    read(path)
    tracemalloc.start()
    array = read(path)["big"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * checkpoint.MAX_INDEX < array.nbytes / 2
    assert not array.flags.writeable and not array.flags.owndata
    with pytest.raises(ValueError):
        array.flags.writeable = True


def test_arrays_outlive_the_file(form, tmp_path):
    name, write = form
    weights = read(written(tmp_path, name, write(GOOD)))
    (tmp_path / name).unlink()
    assert_same(weights, GOOD)


def test_transposed_sliced_and_tied_weights(tmp_path):
    base = np.arange(12, dtype=np.float32)
    root = {
        "transposed": tensor(hostile.FLOATS, (4, 3), (1, 4)),
        "slice": tensor(hostile.FLOATS, (2, 2), (4, 1), 5),
        "strange": tensor(hostile.FLOATS, (3, 1), (4, 1 << 40), 3),
    }
    found = read(written(tmp_path, "model.pth", checkpoint_files.zipped(root, [base.tobytes()])))
    assert_same(
        found,
        {
            "transposed": base.reshape(3, 4).T,
            "slice": base.reshape(3, 4)[1:, 1:3],
            "strange": base.reshape(3, 4)[:, 3:],
        },
    )


def test_parameters_and_the_versions_of_modules(tmp_path):
    weight = Call(checkpoint_files.PARAMETER, tensor(hostile.FLOATS, (3, 4)), True, Call(checkpoint_files.ORDERED_DICT))
    versions = Call(checkpoint_files.ORDERED_DICT, items=[("", {"version": 1})])
    root = Call(checkpoint_files.ORDERED_DICT, items=[("emb.weight", weight)], state={"_metadata": versions})
    bodies = checkpoint_files.stored(GOOD)
    for content in (
        checkpoint_files.zipped(root, bodies),
        checkpoint_files.older(root, ["0"], checkpoint_files.counted(12, bodies[0])),
    ):
        assert_same(read(written(tmp_path, "model.pth", content)), {"emb.weight": GOOD["emb.weight"]})


@pytest.mark.parametrize("limit", [None, 8], ids=["zip32", "zip64"])
def test_zips_of_another_writer(limit, tmp_path, monkeypatch):
    if limit:
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    path = tmp_path / "model.pth"
    with zipfile.ZipFile(path, "w") as file:
        for name, body in checkpoint_files.entries(
            pickled(checkpoint_files.state_dict(GOOD)), checkpoint_files.stored(GOOD)
        ):
            with file.open(zipfile.ZipInfo(name), "w", force_zip64=bool(limit)) as entry:
                entry.write(body)
    assert_same(read(path), GOOD)


def test_files_of_older_torch_do_not_tell_their_byte_order(tmp_path):
    members = checkpoint_files.entries(pickled(checkpoint_files.state_dict(GOOD)), checkpoint_files.stored(GOOD))
    content = checkpoint_files.archive([(name, body) for name, body in members if not name.endswith("byteorder")])
    assert_same(read(written(tmp_path, "model.pth", content)), GOOD)


@pytest.mark.parametrize("writer", [checkpoint_files.zipped_pth, checkpoint_files.older_pth])
def test_a_trained_model_is_the_same_in_every_form(writer, tmp_path):
    weights = read(AUSTEN / "model.safetensors")
    assert len(weights) == 118 and sum(array.size for array in weights.values()) == 4_015_104
    assert_same(read(written(tmp_path, "model.pth", writer(weights))), weights)


def test_shards(tmp_path):
    shards_in(tmp_path)
    index = '{"weight_map": {"emb.weight": "1.safetensors", "ln.bias": "2.safetensors"}}'
    assert_same(read(written(tmp_path, "model.safetensors.index.json", index.encode())), GOOD)


def shards_in(folder):
    for number, (name, array) in enumerate(GOOD.items(), 1):
        written(folder, f"{number}.safetensors", checkpoint_files.good_safetensors({name: array}))
    written(folder, "both.safetensors", checkpoint_files.good_safetensors(GOOD))
    written(folder, "damaged.safetensors", checkpoint_files.good_safetensors(GOOD)[:-1])
    (folder / "folder.safetensors").mkdir()


# -- what is refused -----------------------------------------------------------------------------------------
@pytest.mark.pairwise
@pytest.mark.parametrize("name, content, complaint", [case[1:] for case in CORPUS], ids=[case[0] for case in CORPUS])
def test_hostile_files_are_refused(name, content, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name.endswith(".json"):
        shards_in(tmp_path)
    path = written(tmp_path, name, content)
    files = sorted(os.listdir(tmp_path))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=complaint) as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ") and ", expected " in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert peak < (1 << 20) + 110 * len(content)
    assert sorted(os.listdir(tmp_path)) == files


def test_the_corpus_would_make_its_canary(tmp_path, monkeypatch):
    import pickle

    monkeypatch.chdir(tmp_path)
    pickle.loads(pickled(Call(checkpoint_files.named("os", "system"), hostile.COMMAND)))
    assert (tmp_path / "canary").exists()


def test_axes_without_end_are_refused_at_once(tmp_path):
    """A header of 200 KB, whose products of axes took minutes."""
    header = {"a": checkpoint_files.described([1] * 100_000, 0, 4)}
    path = written(tmp_path, "model.safetensors", checkpoint_files.safetensors(header, bytes(4)))
    start = time.process_time()
    with pytest.raises(CheckpointError, match="'a' has 100000 axes, expected up to 8"):
        read(path)
    assert time.process_time() - start < 1


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.pth")
    for path in (tmp_path / "model.pth", "/dev/zero"):
        with pytest.raises(CheckpointError, match=f"{path}: is a folder or a device, expected a file"):
            read(path)
    with pytest.raises(
        CheckpointError,
        match=f"{tmp_path}: is a folder without a checkpoint, expected a file, or a folder with model.safetensors or ",
    ):
        read(tmp_path)
    (tmp_path / "one.pth").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"one.pth: starts with b'\\x80', expected a .pth"):
        read(tmp_path / "one.pth")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere.pth")


# -- damage at random ----------------------------------------------------------------------------------------
def damaged(content, rng):
    """`content` with some bytes changed, cut off, doubled or taken out."""
    content = bytearray(content)
    first, last = sorted(rng.integers(0, len(content), 2))
    match rng.integers(6):
        case 0:
            return content[:last]
        case 1:
            return content[:first] + content[last:]
        case 2:
            return content[:last] + content[first:]
        case _:
            for at in rng.integers(0, len(content), rng.integers(1, 9)):
                content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
            return content


def test_damage_anywhere_is_refused_or_stays_in_the_file(form, rng, tmp_path):
    name, write = form
    good = write(GOOD)
    for _ in range(400):
        content = damaged(good, rng)
        path = written(tmp_path, name, content)
        try:
            weights = read(path)
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            assert sum(len(array.tobytes()) for array in weights.values()) <= 2 * len(content)
        path.unlink()


@pytest.mark.parametrize("form", ["older", "safetensors"])
def test_damaged_weights_keep_their_names_and_shapes(form, rng, tmp_path):
    name, write = FORMS[form]
    good = write(GOOD)
    starts = [good.index(array.tobytes()) for array in GOOD.values()]
    for _ in range(100):
        content = bytearray(good)
        for start, array in zip(starts, GOOD.values()):
            content[start + rng.integers(array.nbytes)] = rng.integers(256)
        path = written(tmp_path, name, content)
        found = read(path)
        assert {key: found[key].shape for key in found} == {key: GOOD[key].shape for key in GOOD}
        path.unlink()


def test_flipped_bits_of_a_zip_are_seen(rng, tmp_path):
    good = checkpoint_files.zipped_pth(GOOD)
    for array in GOOD.values():
        start = good.index(array.tobytes())
        for at in rng.integers(start, start + array.nbytes, 20):
            content = bytearray(good)
            content[at] ^= 1 << rng.integers(8)
            with pytest.raises(
                CheckpointError, match=r"'model/data/.' is damaged, with the checksum 0x\w{8}, expected"
            ):
                read(written(tmp_path, "model.pth", content))


def test_zips_without_checksums_are_read(tmp_path):
    members = checkpoint_files.entries(pickled(checkpoint_files.state_dict(GOOD)), checkpoint_files.stored(GOOD))
    content = checkpoint_files.archive(members, central={number: {"crc": 0} for number in range(len(members))})
    assert_same(read(written(tmp_path, "model.pth", content)), GOOD)


# -- folders -------------------------------------------------------------------------------------------------
def test_a_folder_of_hugging_face(tmp_path):
    index = '{"weight_map": {"emb.weight": "%s", "ln.bias": "%s"}}'
    shards_in(tmp_path)
    for number, (name, array) in enumerate(GOOD.items(), 1):
        written(tmp_path, f"{number}.bin", checkpoint_files.zipped_pth({name: array}))
    for name, content in (
        ("pytorch_model.bin.index.json", (index % ("1.bin", "2.bin")).encode()),
        ("pytorch_model.bin", checkpoint_files.zipped_pth(GOOD)),
        ("model.safetensors.index.json", (index % ("1.safetensors", "2.safetensors")).encode()),
        ("model.safetensors", checkpoint_files.good_safetensors(GOOD)),
    ):
        path = written(tmp_path, name, content)  # each goes before those that are there
        assert checkpoint.located(tmp_path) == path
        assert_same(read(tmp_path), GOOD)
        assert_same(read(str(tmp_path)), GOOD)


# -- torch ---------------------------------------------------------------------------------------------------
@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch, whose files these are, is not installed")


@pytest.fixture
def model(torch):
    """A state dict with weights of every dtype, as a module gives it."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    for name, dtype in (
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("double", torch.float64),
        ("long", torch.int64),
        ("bool", torch.bool),
        ("byte", torch.uint8),
    ):
        module.register_buffer(f"buffer_{name}", torch.arange(6).reshape(2, 3).to(dtype))
    return module.state_dict()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_later_protocols_and_what_trainers_leave(torch, model, protocol, zipped, tmp_path):
    path, wanted = tmp_path / "model.pth", {name: as_numpy(torch, value) for name, value in model.items()}
    others = {"epoch": 3, "lr": 1e-4, "optimizer": {"state": {0: {"step": torch.zeros(())}}}, "size": torch.Size([2])}
    others |= {"args": argparse.Namespace(lr=1e-4, folder=Path("out")), "names": {"a"}, "key": b"\0\xff", 2.5: None}
    others |= {"dtype": torch.float32, "loss": np.float64(0.5), "random": np.random.RandomState(0).get_state()}
    others |= {"frozen": frozenset([1]), "sizes": defaultdict(list, a=[1])}
    others |= {"complex": torch.zeros(1, dtype=torch.cfloat)} if zipped else {}  # the older form has its size inside
    for value in (
        model,
        {"state_dict": model, **others},
        {**others, "module": model},
        {"model_state_dict": model, **others},
        {"module": {**others, "state_dict": model}},
    ):
        torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
        assert_same(read(path), wanted)


@pytest.mark.parametrize("writer", ["zip", "older"])
def test_what_stands_beside_the_weights_is_never_made(writer, tmp_path, monkeypatch):
    """Calls in it would make the canary."""
    monkeypatch.chdir(tmp_path)
    call = Call(checkpoint_files.named("os", "system"), hostile.COMMAND, state={"a": 1}, items=[("b", 2)])
    names = Call(checkpoint_files.named("builtins", "set"), [1])
    new = checkpoint_files.Raw(b"cargparse\nNamespace\n)\x81}X\1\0\0\0aK\1sb")
    beside = {"args": new, "hook": call, "names": names, "list": [call, names]}
    for keys in ["model_state_dict"], ["module", "state_dict"], ["state_dict", "module", "model"]:
        root, *bodies = checkpoint_files.state_dict(GOOD), *checkpoint_files.stored(GOOD)
        for key in reversed(keys):
            root = {**beside, key: root}
        content = checkpoint_files.zipped(root, bodies)
        if writer == "older":
            counted = b"".join(map(checkpoint_files.counted, (12, 5), bodies))
            content = checkpoint_files.older(root, ["0", "1"], counted)
        assert_same(read(written(tmp_path, "model.pth", content)), GOOD)
    assert not (tmp_path / "canary").exists()


def test_safetensors_of_any_ending(tmp_path):
    from safetensors.numpy import save_file

    weights = {"a": np.arange(3, dtype=np.float32)}
    for ending in ("st", "bin", "safetensors"):
        save_file(weights, tmp_path / f"model.{ending}")
        assert_same(read(tmp_path / f"model.{ending}"), weights)


def as_numpy(torch, value):
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])
def test_what_torch_writes_is_read(torch, model, zipped, tmp_path):
    model["transposed"] = model["0.weight"].T
    model["slice"] = model["0.weight"][1:, ::2]
    model["parameter"] = torch.nn.Parameter(torch.ones(2))
    torch.save(model, tmp_path / "model.pth", _use_new_zipfile_serialization=zipped)
    wanted = {name: as_numpy(torch, value.detach()) for name, value in model.items()}
    assert_same(read(tmp_path / "model.pth"), wanted)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older"])
def test_the_writer_of_these_tests_is_torchs_to_the_byte(torch, model, zipped, tmp_path):
    path, plain = tmp_path / "model.pth", dict(model)
    torch.save(plain, path, _use_new_zipfile_serialization=zipped)
    weights = {name: as_numpy(torch, value) for name, value in plain.items()}
    if zipped:
        with zipfile.ZipFile(path) as file:
            serialization_id = file.read("model/.data/serialization_id").decode()
        assert checkpoint_files.zipped_pth(weights, serialization_id=serialization_id) == path.read_bytes()
    else:
        keys = [value.untyped_storage()._cdata for value in plain.values()]
        assert checkpoint_files.older_pth(weights, keys) == path.read_bytes()
