"""Files that were damaged or made to hurt: read, or refused in our words, in bounded time and memory."""

from __future__ import annotations

import functools
import io
import json
import os
import struct
import tempfile
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import checkpoint_files
import hostile
import numpy as np
from hypothesis import strategies as st
from reference import same_bits

from attack.harness import Fault, Refused, holds_for, require
from linattn_np import ContractError
from linattn_np.__main__ import main
from linattn_np.models import RWKV6, Bytes, State, World, checkpoint, corpus, tokenizers
from linattn_np.models.fine_tuning import Base, LowRank, States, Whole
from linattn_np.models.rwkv.adapters import merged
from linattn_np.models.training import Settings, Training
from linattn_np.models.versions import VERSIONS

ROOT = Path(__file__).parents[2]
AUSTEN = ROOT / "examples" / "data" / "austen-x060" / "model.safetensors"
ON_HOST = ("numpy",)
SMALL = 64 << 20


# -- damage ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Edit:
    """One change of some bytes; `at` is a share of the file, so that it means something in any file."""

    kind: str  # "flip", "put", "insert", "cut", "end", "double"
    at: float
    data: bytes = b""
    size: int = 1

    def __call__(self, text: bytes) -> bytes:
        at = min(int(self.at * len(text)), max(len(text) - 1, 0))
        if self.kind == "flip":
            return text[:at] + bytes([text[at] ^ (1 << self.size % 8)]) + text[at + 1 :] if text else text
        if self.kind == "put":
            return text[:at] + self.data + text[at + len(self.data) :]
        if self.kind == "insert":
            return text[:at] + self.data + text[at:]
        if self.kind == "cut":
            return text[:at] + text[at + self.size :]
        if self.kind == "end":
            return text[:at]
        return text[:at] + text[at : at + self.size] * 2 + text[at + self.size :]


NUMBERS = [
    struct.pack(f"<{kind}", n)
    for kind, n in (
        ("B", 0),
        ("B", 255),
        ("H", 0xFFFF),
        ("I", 0xFFFFFFFF),
        ("I", 0x7FFFFFFF),
        ("I", 1 << 31),
        ("Q", (1 << 64) - 1),
        ("q", -1),
        ("Q", 1 << 62),
        ("Q", 1 << 40),
        ("I", 1 << 24),
    )
]
EDITS = st.builds(
    Edit,
    st.sampled_from(("flip", "flip", "put", "put", "insert", "cut", "end", "double")),
    st.floats(0, 1, exclude_max=True),
    st.one_of(st.sampled_from(NUMBERS), st.binary(max_size=6)),
    st.integers(1, 200),
)
JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        (
            0,
            -1,
            1,
            1 << 31,
            1 << 63,
            1 << 64,
            10**400,
            0.5,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "F32",
            "F4",
            "a" * 2000,
            [],
            {},
            [[]],
            [-1],
            [1 << 62],
            [1] * 100_000,
            [1 << 40, 1 << 40],
            [0, 1 << 62],
            [48, 0],
            [0, 48],
        )
    ),
    st.lists(st.integers(-2, 50), max_size=4),
    st.text(max_size=5),
)


@dataclass(frozen=True)
class Damaged:
    """A sound file of a kind, and what was done to its bytes and, where it has one, its JSON."""

    kind: str
    edits: tuple = ()
    fields: tuple = ()  # ((tensor or None, field or None, value), ...)


KINDS = ("safetensors", "zip", "older", "index")
FILES = st.builds(
    Damaged,
    st.sampled_from(KINDS),
    st.lists(EDITS, max_size=3).map(tuple),
    st.lists(
        st.tuples(
            st.sampled_from((*hostile.GOOD, "__metadata__", "x", None)),
            st.sampled_from(("dtype", "shape", "data_offsets", "more", None)),
            JSON_VALUES,
        ),
        max_size=2,
    ).map(tuple),
)


def write(folder, damaged) -> Path:
    """The file, with shards beside it where it is an index."""
    weights = hostile.GOOD
    if damaged.kind == "index":
        for n, (name, x) in enumerate(weights.items()):
            (folder / f"{n}.safetensors").write_bytes(checkpoint_files.good_safetensors({name: x}))
        text = json.dumps(
            changed(
                {"metadata": {}, "weight_map": {name: f"{n}.safetensors" for n, name in enumerate(weights)}},
                damaged.fields,
            )
        ).encode()
        path = folder / "model.safetensors.index.json"
    elif damaged.kind == "safetensors":
        whole = checkpoint_files.good_safetensors(weights)
        size = struct.unpack("<Q", whole[:8])[0]
        header = changed(json.loads(whole[8 : 8 + size]), damaged.fields)
        text, path = checkpoint_files.safetensors(header, whole[8 + size :]), folder / "model.safetensors"
    else:
        text = checkpoint_files.zipped_pth(weights) if damaged.kind == "zip" else checkpoint_files.older_pth(weights)
        path = folder / "model.pth"
    for edit in damaged.edits:
        text = edit(text)
    path.write_bytes(text)
    return path


def changed(tree, fields):
    for name, field, value in fields:
        inner = tree.get("weight_map", tree)
        if name is None:
            inner.clear()
        elif field is None or not isinstance(inner.get(name), dict):
            inner[name] = value
        else:
            inner[name][field] = value
    return tree


@holds_for(lambda machine: FILES, machines=ON_HOST, memory=SMALL, seconds=1.0)
def checkpoints(damaged, machine):
    """Read or refused; what is read lies in the file, and in a zip, which has sums, it is what was written."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), damaged)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        try:
            weights = checkpoint.read(path)
        except ContractError as error:
            raise Refused from error
        require(sum(x.nbytes for x in weights.values()) <= 8 * size, "checkpoints: more than the file holds")
        for x in weights.values():
            x.tobytes()
        if damaged.kind == "zip" or not damaged.edits and not damaged.fields:
            same = weights.keys() == hostile.GOOD.keys() and all(
                same_bits(np.asarray(x), hostile.GOOD[name]) for name, x in weights.items()
            )
            require(same, "checkpoints: damaged weights load", damaged.kind)


# -- saved states ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Npz:
    """A saved state: members as (dtype, shape) that the header claims and numbers that are there, and its damage."""

    compressed: bool = False
    members: tuple = ()  # ((name, dtype, shape, numbers), ...) beyond or instead of the sound ones
    edits: tuple = ()


SHAPES = st.sampled_from(((2, 1, 4), (2, 1, 2, 2, 2), (0,), (), (1 << 40,), (1 << 62, 4), (-1,), (2,) * 70, (3, 3)))
HEADERS = ("<f4", ">f4", "<f8", "<i4", "|O", "<U9", "|V8", "<c8", "<M8[s]", "[('a', '<f4')]", "junk")
MEMBERS = st.tuples(
    st.sampled_from(("att_shift", "wkv", "ffn_shift", "more", "", "../x")),
    st.sampled_from(HEADERS),
    SHAPES,
    st.sampled_from((0, 8, 16, 1 << 25)),
)
STATE_FILES = st.builds(
    Npz, st.booleans(), st.lists(MEMBERS, max_size=2).map(tuple), st.lists(EDITS, max_size=3).map(tuple)
)


def npz(file) -> bytes:
    sound = {
        "att_shift": ("<f4", (2, 1, 4), 8),
        "wkv": ("<f4", (2, 1, 2, 2, 2), 16),
        "ffn_shift": ("<f4", (2, 1, 4), 8),
    }
    for name, *rest in file.members:
        sound[name] = tuple(rest)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if file.compressed else zipfile.ZIP_STORED) as archive:
        for name, (dtype, shape, numbers) in sound.items():
            descr = repr(dtype) if not dtype.startswith("[") else dtype
            header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
            header += b" " * (-(len(header) + 11) % 64) + b"\n"
            count = numbers * 4 if numbers < 1 << 20 or file.compressed else 64
            with archive.open(f"{name}.npy", "w") as member:
                member.write(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header)
                for start in range(0, count, 1 << 20):
                    member.write(bytes(min(count - start, 1 << 20)))
    text = out.getvalue()
    for edit in file.edits:
        text = edit(text)
    return text


@holds_for(lambda machine: STATE_FILES, machines=ON_HOST, memory=96 << 20, seconds=2.5)
def saved_states(file, machine):
    """A state or a refusal; one that loads is of float32 and as large as its file says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"
        path.write_bytes(npz(file))
        try:
            state = State.load(path)
        except ContractError as error:
            raise Refused from error
    for name in ("att_shift", "wkv", "ffn_shift"):
        x = getattr(state, name)
        require(type(x) is np.ndarray and x.dtype == np.float32, "saved-states: of another dtype", f"{name}: {x.dtype}")
        require(x.ndim == (5 if name == "wkv" else 3), "saved-states: of another shape", f"{name}: {x.shape}")


# -- vocabularies ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Vocabulary:
    """Lines of a small vocabulary, some replaced."""

    lines: tuple = ()  # ((share of the file, line), ...)
    edits: tuple = ()


LINES = st.one_of(
    st.sampled_from(
        (
            "",
            "1",
            "1 'a' 1",
            "300 '' 0",
            "5 b'\\xff\\xfe' 2",
            "9 '\u00e9' 2",
            "9 9 1",
            "9 'a'*9 9",
            "9 __import__('os') 1",
            "9 '" + "a" * 100_000 + "' 100000",
            "9 " + "(" * 5000 + " 1",
            "9 {'a'} 1",
            "-9 'a' 1",
            "9 'a' -1",
            "9 f'{1}' 1",
            "9 '\\ud800' 3",
            "9 'a' 1 1",
            "9999999999999999999999 'a' 1",
            "9 'a' " + "9" * 5000,
            "9 u'a' 1",
            "9 'a' 'b' 2",
        )
    ),
    st.text(max_size=12),
)
PLACED = st.tuples(st.floats(0, 1, exclude_max=True), LINES)
VOCABULARIES = st.builds(Vocabulary, st.lists(PLACED, max_size=2).map(tuple), st.lists(EDITS, max_size=2).map(tuple))


@holds_for(lambda machine: VOCABULARIES, machines=ON_HOST, memory=SMALL, seconds=1.0)
def vocabularies(file, machine):
    """Read or refused; what is read encodes every text and gives it back."""
    lines = [f"{n} {bytes([byte])!r} 1" for n, byte in enumerate(range(256), 1)]
    lines += [f"{n} {word!r} {len(word)}" for n, word in enumerate((b"the", b"he ", b"abcd", b"xab"), 257)]
    count = len(lines)
    for share, line in file.lines:
        lines[int(share * count)] = line
    text = "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"
    for edit in file.edits:
        text = edit(text)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tokenizers, "TOKENS", count):
        path = Path(folder) / "vocabulary.txt"
        path.write_bytes(text)
        try:
            world = World.from_file(path)
        except ContractError as error:
            raise Refused from error
    for words in (b"the cat \xff\x00 abcdx", bytes(range(256))):
        require(
            b"".join(world.decode_bytes([id]) for id in world.encode(words)) == words,
            "vocabularies: a text does not come back",
        )


# -- what fine-tuning reads ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Brought:
    """A sound file of a kind, and what was done to its bytes; for binidx to those of its .idx or its .bin."""

    kind: str = "gguf"
    edits: tuple = ()
    index: bool = True


@functools.cache
def base():
    layout = RWKV6.trainable(2, 16, 8)
    return layout.named(layout.initial(0))


def brought() -> dict[str, dict[str, bytes]]:
    """The files of each kind by name; the first one is read."""
    q = np.arange(64, dtype=np.float32).tobytes()
    fields = [(b"rwkv6.wkv.head_size", 4, struct.pack("<I", 8)), (b"rwkv6.rescale_every_n_layers", 4, bytes(4))]
    fields += [(b"words", 9, struct.pack("<IQ", 8, 3) + checkpoint_files.gguf_text(b"ab") * 3)]
    tensors = [(b"output.weight", (8, 4), 0, 0), (b"blk.0.time_mix_output.weight", (4, 8), 0, 128)]
    parts = {"blocks.0.att.key.lora_A": (2, 16), "blocks.0.att.key.lora_B": (16, 2), "lora_alpha": (1,)}
    states = {f"blocks.{i}.att.time_state": np.ones((2, 8, 8), np.float32) for i in range(2)}
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    good = checkpoint_files.good_safetensors
    return {
        "gguf": {"model.gguf": checkpoint_files.gguf_file(fields, tensors, data=q)},
        "adapter": {"adapter.safetensors": good({name: np.ones(axes, np.float32) for name, axes in parts.items()})},
        "tuned": {"state.safetensors": good(states)},
        "tuned as pth": {"state.pth": checkpoint_files.zipped_pth(states)},
        "binidx": {
            "a.bin": bytes(range(20)),
            "a.idx": head + struct.pack("<2i5q", 4, 6, 0, 8, 0, 1, 2),
        },
        "lines": {"a.jsonl": b'{"text": "Emma was"}\n\n{"text": "n\\u00e9", "more": [1, {}]}\n' * 3},
    }


BROUGHT = st.builds(Brought, st.sampled_from(list(brought())), st.lists(EDITS, max_size=3).map(tuple), st.booleans())


@holds_for(lambda machine: BROUGHT, machines=ON_HOST, memory=SMALL, seconds=1.0)
def files_of_fine_tuning(file, machine):
    """Read or refused; what is read is finite, or lies in the file."""
    with tempfile.TemporaryDirectory() as folder:
        found = brought()[file.kind]
        damaged = list(found)[-1 if file.index else 0]
        for edit in file.edits:
            found[damaged] = edit(found[damaged])
        for name, content in found.items():
            (Path(folder) / name).write_bytes(content)
        path, size = Path(folder) / next(iter(found)), sum(map(len, found.values()))
        try:
            if file.kind == "gguf":
                read = sum(x.astype(np.float32).nbytes for x in checkpoint.read(path).values())
            elif file.kind == "adapter":
                merged_weights = merged(RWKV6, base(), checkpoint.read(path))
                require(all(np.isfinite(x).all() for x in merged_weights.values()), "fine-tuning: merged not finite")
                read = 0
            elif file.kind.startswith("tuned"):
                state = State.load(path)
                require(state.wkv.ndim == 5 and state.wkv.shape[3] == state.wkv.shape[4], "fine-tuning: no state")
                read = state.wkv.nbytes
            else:
                read = corpus.read(path, Bytes()).nbytes
        except ContractError as error:
            raise Refused from error
    require(read <= 64 * size, "fine-tuning: more than the file holds", f"{read} of {size} bytes")


# -- files of another kind ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Foreign:
    """A sound file, and where it is read: for a model of a version, whose sizes are the same."""

    made: str = "state"
    of: int = 6
    older: bool = False  # it says nothing of itself
    place: str = "state"
    version: int = 7


TEXT = b"It is a truth universally acknowledged, " * 30
SETTINGS = Settings(layers=2, width=16, head_size=8, batch=2, context=16, steps=2)
SAYS = "rwkv_version", "of"  # names of what a file says of itself


@functools.cache
def small(version):
    kind = VERSIONS[version]
    layout = kind.trainable(2, 16, 8)
    return Base.of(layout.named(layout.initial(0)))


@functools.cache
def trainings(version):
    base = small(version)
    return {
        "training": base.kind,
        "training of all weights": Whole(base),
        "training of an adapter": LowRank(base, 2, matrices=["att.key"]),
        "training of a state": States(base),
    }


@functools.cache
def sound_file(made, version) -> dict[str, np.ndarray]:
    """Its arrays by name."""
    base = small(version)
    if made == "model":
        return base.weights
    if made == "int8":
        return base.kind.quantise(base.weights, "int8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        if made == "state":
            base.kind(base.weights).forward([list(b"It is")])[1].save(path)
            return dict(np.load(path))
        name = {"adapter": "training of an adapter", "tuned state": "training of a state"}.get(made, made)
        training = Training(TEXT, SETTINGS, kind=trainings(version)[name])
        (training.save if made.startswith("training") else training.save_model)(path)
        return {name: np.array(x) for name, x in checkpoint.read(path).items()}


MADE = ("model", "int8", "state", "tuned state", "adapter", *trainings(6))


def placed(case, path):
    """Reads the file."""
    base = small(case.version)
    if case.place == "model":
        base.kind.from_file(path)
    elif case.place == "state":
        base.kind(base.weights).on_device(State.load(path))
    elif case.place == "adapter":
        merged(base.kind, base.weights, checkpoint.read(path))
    elif case.place == "among the weights":
        base.kind(base.weights | checkpoint.read(path))
    else:
        Training.restore(path, TEXT, kind=trainings(case.version)[case.place])


FITS = {
    "model": ("model", "int8"),
    "state": ("state", "tuned state"),
    "adapter": ("adapter",),
    "among the weights": ("model", "int8", "tuned state"),
}


@holds_for(
    lambda machine: st.builds(
        Foreign,
        st.sampled_from(MADE),
        st.sampled_from((6, 7)),
        st.booleans(),
        st.sampled_from((*FITS, *trainings(6))),
        st.sampled_from((6, 7)),
    ),
    machines=ON_HOST,
)
def files_of_another_kind(case, machine):
    """Read where they belong, and refused elsewhere; older ones say less."""
    arrays = dict(sound_file(case.made, case.of))
    if case.older:
        arrays = {name: x for name, x in arrays.items() if name not in SAYS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        if case.made == "state":
            with open(path, "wb") as file:
                np.savez(file, **arrays)
        else:
            path.write_bytes(checkpoint_files.good_safetensors(arrays))
        belongs = case.made in FITS.get(case.place, (case.place,)) and case.of == case.version
        try:
            placed(case, path)
        except ContractError as error:
            require(not belongs, "foreign: a file is refused where it belongs", str(error))
            raise Refused from error
    require(belongs or case.older, "foreign: a file of another kind is read")


# -- batches of texts --------------------------------------------------------------------------------------------------
@functools.cache
def austen():
    return RWKV6.from_file(AUSTEN)


@dataclass(frozen=True)
class Batch:
    """Lines of a JSONL file, each JSON or text as it is, and damage to its bytes."""

    lines: tuple = ()
    edits: tuple = ()


FIELDS = st.dictionaries(
    st.sampled_from(("prompt", "tokens", "temperature", "top_p", "top_k", "seed", "stop", "more")),
    st.one_of(JSON_VALUES, st.sampled_from((0, 1, 2, 0.5, 1e-300, 1e-45, "a", ["a"]))),
    max_size=4,
)
LINE = FIELDS.map(lambda fields: json.dumps({"prompt": "Miss", "tokens": 2} | fields)).filter(
    lambda line: len(line) < 3000
)
BATCHES = st.builds(
    Batch,
    st.lists(
        st.one_of(
            LINE,
            LINE,
            LINE,
            st.sampled_from(
                (
                    "",
                    "null",
                    "[]",
                    "{",
                    '{"prompt": "a", "prompt": "b"}',
                    '{"prompt": 1e999}',
                    "[" * 5000,
                    '"' + "a" * 5000,
                    '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
                    '{"prompt": "\\ud800", "tokens": 1}',
                )
            ),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.lists(EDITS, max_size=1).map(tuple),
)


@holds_for(lambda machine: BATCHES, machines=ON_HOST, memory=SMALL, round=15)
def batches_of_texts(batch, machine):
    """A text for every line, or a refusal by its number before anything is written."""
    text = "\n".join(batch.lines).encode() + b"\n"
    for edit in batch.edits:
        text = edit(text)
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_bytes(text)
        model = austen()
        words = ["generate", "--batch-file", str(source), "--output", str(target), "--tokens", "2", "--slots", "2"]
        code = 0
        with redirect_stdout(said), redirect_stderr(said), mock.patch.object(RWKV6, "from_file", lambda *a, **k: model):
            try:
                code = main(words)
            except SystemExit as error:
                code = error.code
        left = sorted(os.listdir(folder))
        require(source.read_bytes() == text, "batches: the input is changed")
        if code not in (0, None):
            require("Traceback" not in said.getvalue() and said.getvalue() + str(code), "batches: no reason is given")
            require(left == ["in.jsonl"] or target.exists(), "batches: something is left", str(left))
            raise Refused
        require(left == ["in.jsonl", "out.jsonl"], "batches: something is left", str(left))
        written = [json.loads(line) for line in target.read_text().splitlines()]
    wanted = [line for line in text.splitlines() if line.strip()]
    require(len(written) == len(wanted), "batches: lines are lost", f"{len(written)} of {len(wanted)}")
    for line in wanted:
        names = [name for name, _ in json.loads(line, object_pairs_hook=list)]
        if len(set(names)) < len(names):
            raise Fault("batches: a key twice is accepted", line.decode(errors="replace"))
