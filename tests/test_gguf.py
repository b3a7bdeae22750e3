"""GGUF files, written as llama.cpp's converter writes them: the same models as under their official names."""

import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import gguf_file, gguf_text

from linattn_np import NotSupported
from linattn_np.models import RWKV6, RWKV7, gguf_files, load
from linattn_np.models.checkpoint import CheckpointError, read
from linattn_np.models.rwkv import version

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType


def test_the_eps_of_norms_are_those_of_models():
    wanted = version.LAYER_NORM_EPS, version.GROUP_NORM_EPS, version.NORM_EPS_NAME
    assert (gguf_files.EPS, gguf_files.GROUP_EPS, gguf_files.EPS_NAME) == wanted


def converted(kind, weights):
    """GGUF's names and shapes, step by step."""
    whole = {"emb": "token_embd", "ln_out": "output_norm", "head": "output"}
    norms = {"ln0": "token_embd_norm", "ln1": "attn_norm", "ln2": "attn_norm_2"}
    found, mixes = {}, {}
    for name, array in weights.items():
        first, *rest = name.split(".")
        if first != "blocks":
            found[f"{whole[first]}.{rest[0]}"] = array
            continue
        i, part, *rest = rest
        if part in norms:
            found[f"{norms[part]}.{rest[0]}" if part == "ln0" else f"blk.{i}.{norms[part]}.{rest[0]}"] = array
            continue
        to, leaf = f"blk.{i}.{'channel' if part == 'ffn' else 'time'}_mix", rest[0]
        if leaf == "ln_x":
            found[f"{to}_ln.{rest[1]}"] = array
        elif len(rest) == 2:
            found[f"{to}_{leaf}.weight"] = array
        elif leaf.startswith(("x_", "time_maa_")) and len(leaf.split("_")[-1]) == 1:
            mix = leaf[-1]
            if part == "ffn" or kind is RWKV6 and mix == "x":
                found[f"{to}_lerp_{mix}.weight"] = array.ravel()
            else:
                mixes.setdefault(f"{to}_lerp_fused.weight", {})[mix] = array.ravel()
        elif leaf == "time_faaaa":
            found[f"{to}_first.weight"] = array
        elif leaf == "r_k":
            found[f"{to}_r_k.weight"] = array.ravel()
        else:
            array = array.squeeze() if array.shape[0] == 1 else array.swapaxes(-1, -2)
            found[f"{to}_{leaf.removeprefix('time_').removeprefix('maa_')}.weight"] = array
    order = {RWKV6: "wkvrg", RWKV7: "rwkvag"}[kind]
    return found | {name: np.stack([its[mix] for mix in order])[:, None, None] for name, its in mixes.items()}


def write(path, arch, tensors, formats=None, **numbers):
    writer = gguf.GGUFWriter(path, arch)
    for name, number in numbers.items():
        writer.add_uint32(f"{arch}.{name.replace('__', '.')}", number)
    for name, array in tensors.items():
        format = (formats or {}).get(name)
        data = (
            np.ascontiguousarray(array) if format is None else gguf.quants.quantize(np.ascontiguousarray(array), format)
        )
        writer.add_tensor(name, data, raw_dtype=format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=[RWKV6, RWKV7], ids=lambda kind: kind.__name__)
def kind(request):
    return request.param


@pytest.fixture
def weights(kind, rng):
    layout = kind.layout(kind.layout.sizes_of(layers=3, width=32, head_size=8, vocabulary=20))
    return layout.named(rng.standard_normal(layout.size, np.float32) * 0.3)


def test_names_and_shapes_are_the_official_ones(kind, weights, tmp_path):
    arch = kind.__name__.lower()
    write(tmp_path / "model.gguf", arch, converted(kind, weights), wkv__head_size=8)
    found, _ = kind.parameters(read(tmp_path / "model.gguf"), None)
    assert list(found) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], array)
    assert type(load(tmp_path / "model.gguf")) is kind


def test_formats_and_halved_layers(kind, weights, tmp_path):
    tensors = converted(kind, weights)
    formats = {"blk.0.time_mix_key.weight": Type.Q8_0, "blk.1.time_mix_key.weight": Type.Q4_0}
    formats |= {"output.weight": Type.BF16, "blk.2.time_mix_key.weight": Type.F16}
    for i in range(3):
        for name in (f"blk.{i}.time_mix_output.weight", f"blk.{i}.channel_mix_value.weight"):
            tensors[name] = tensors[name] / 2 ** (i // 2)
    write(tmp_path / "m.gguf", kind.__name__.lower(), tensors, formats, wkv__head_size=8, rescale_every_n_layers=2)
    found = read(tmp_path / "m.gguf")
    for name in ("blocks.2.att.output.weight", "blocks.2.ffn.value.weight", "blocks.1.att.output.weight"):
        np.testing.assert_array_equal(found[name], weights[name])
    assert found["head.weight"].dtype == ml_dtypes.bfloat16 and found["blocks.2.att.key.weight"].dtype == np.float16
    np.testing.assert_array_equal(found["head.weight"], weights["head.weight"].astype(ml_dtypes.bfloat16))
    for i, limit in ((0, 1 / 127), (1, 1 / 7)):  # half a step of the largest number, and its rounding to float16
        key = weights[f"blocks.{i}.att.key.weight"]
        assert np.abs(found[f"blocks.{i}.att.key.weight"] - key).max() <= limit * np.abs(key).max()


def test_other_files_are_refused(kind, weights, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write(path, "llama", {"token_embd.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(CheckpointError, match=f"{path}: is a GGUF file of the architecture 'llama', expected rwkv6 or"):
        load(path)
    whole = path.read_bytes()
    for size in (4, 20, 60):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"{path}: is damaged: .* expected a sound GGUF file"):
            load(path)
    write(path, kind.__name__.lower(), {"output.weight": np.zeros((4, 32), np.float32)}, {"output.weight": Type.Q8_0})
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    with pytest.raises(NotSupported, match=rf"{path}: 'output.weight' is quantised, .* 'linattn-np\[gguf\]'"):
        load(path)


# -- hostile files ----------------------------------------------------------------------------------------------------
ONE = (b"output.weight", (4, 4), 0, 0)
HUGE = (1 << 64) - 1
NESTED = struct.pack("<IQ", 9, 1)
HOSTILE = [
    (gguf_file(counts=(HUGE, 1), data=b""), "is damaged: its header has .* more bytes"),
    (gguf_file(counts=(0, HUGE), data=b""), "has '' twice|is damaged: its header has .* more bytes"),
    (
        gguf_file([(b"a", 9, struct.pack("<IQ", 4, 1 << 62))]),
        "is damaged: its header has 18446744073709551616 more bytes",
    ),
    (gguf_file([(b"a", 9, struct.pack("<IQ", 8, 1 << 62))]), "is damaged: its header has .* more bytes"),
    (gguf_file([(b"a", 9, NESTED * 5000)]), "has a value of type 9 at byte"),
    (gguf_file([(b"a", 13, b"")]), "has a value of type 13"),
    (gguf_file([(b"a" * 2000, 0, b"1")]), "has a text of 2000 bytes, expected up to 1024"),
    (gguf_file([(b"a", 0, b"1")] * 2), "has 'a' twice"),
    (gguf_file(tensors=[ONE, ONE]), "has 'output.weight' twice"),
    (gguf_file(tensors=[ONE, (b"head.weight", (4,), 0, 0)]), "has tensors of 80 bytes up to 'head.weight'|twice"),
    (gguf_file(version=1 << 24), "is a GGUF file of version 16777216, expected 2 or 3, little-endian"),
    (gguf_file([(b"general.alignment", 4, struct.pack("<I", 24))]), "general.alignment 24, expected a power of 2"),
    (gguf_file([(b"general.architecture", 4, struct.pack("<I", 1))]), "twice"),
    (gguf_file([(b"rwkv6.wkv.head_size", 8, gguf_text(b"64"))]), "head_size '64', expected a whole number from 1 up"),
    (gguf_file([(b"rwkv6.wkv.head_size", 4, bytes(4))]), "head_size 0, expected a whole number from 1 up"),
    (gguf_file([(b"rwkv6.rescale_every_n_layers", 5, b"\xff" * 4)]), "rescale_every_n_layers -1, expected"),
    (gguf_file([(b"rwkv6.attention.layer_norm_epsilon", 6, b"\0\0\xc0\x7f")]), "layer_norm_epsilon nan, expected"),
    (gguf_file(tensors=[(b"a", (1,) * 9, 0, 0)]), "has a tensor of 9 axes, expected up to 8"),
    (gguf_file(tensors=[(b"a", (1 << 63, 1 << 63), 0, 0)]), "is damaged: 'a' has .* bytes from byte"),
    (gguf_file(tensors=[(b"a", (0, 1 << 63), 0, 0)]), "is damaged: 'a' has 0 bytes"),
    (gguf_file(tensors=[(b"a", (4, 4), 0, HUGE)]), "is damaged: 'a' has 64 bytes from byte 18"),
    (gguf_file(tensors=[(b"a", (4,), 99, 0)]), "'a' has the type 99, expected one that the package gguf knows"),
    (gguf_file(tensors=[(b"a", (4,), 8, 0)]), "'a' has rows of 4 numbers, expected a multiple of 32"),
    (
        gguf_file(tensors=[(f"{n}".encode(), (4, 4), 0, 0) for n in range(99)]),
        "has tensors of .* bytes up to .*at most the .* of the file",
    ),
    (
        gguf_file(tensors=[(b"blk.0.time_mix_lerp_fused.weight", (4, 4), 0, 0)]),
        "lerp_fused.weight' is .4, 4., expected the",
    ),
    (
        gguf_file(
            [(b"rwkv6.rescale_every_n_layers", 4, struct.pack("<I", 1))],
            [(b"blk.99.time_mix_output.weight", (4,), 0, 0)],
        ),
        "has a residual that is halved 99 times",
    ),
]


@pytest.mark.parametrize("content, complaint", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files_are_refused_at_once(content, complaint, tmp_path):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"m.gguf: .*({complaint})"):
        read(tmp_path / "m.gguf")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = gguf_file([(b"a", 9, struct.pack("<IQ", 8, 2) + gguf_text(b"b") * 2)], [ONE])
    for size in range(0, len(whole), 5):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(whole)
    assert read(tmp_path / "m.gguf")["head.weight"].shape == (4, 4)
