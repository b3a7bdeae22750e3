"""GGUF files, written as llama.cpp's converter writes them: the same models as under their official names."""

import ml_dtypes
import numpy as np
import pytest

from linattn_np import NotSupported
from linattn_np.models import RWKV6, RWKV7, gguf_files, load
from linattn_np.models.checkpoint import CheckpointError, read

gguf = pytest.importorskip("gguf")
Type = gguf.GGMLQuantizationType


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
    for size in (4, 20, 60, len(whole) - 20):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=f"{path}: is damaged .* expected a sound GGUF file"):
            load(path)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(NotSupported, match=r"read by the package gguf, pip install 'linattn-np\[gguf\]'"):
        gguf_files.read(path)
