"""A corpus of hostile checkpoints.

Every case is a file, or a folder of files, that a reader must refuse; code in it would make a file `canary`.
"""

import json
import pickle
import struct
import zlib

import ml_dtypes
import numpy as np
from checkpoint_files import (
    ORDERED_DICT,
    PARAMETER,
    REBUILD,
    SYSTEM,
    Call,
    Persistent,
    Raw,
    archive,
    counted,
    described,
    entries,
    good_safetensors,
    named,
    older,
    older_pth,
    pickled,
    safetensors,
    state_dict,
    storage,
    stored,
    tensor,
    zipped,
    zipped_pth,
)

GOOD = {"emb.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "ln.bias": np.arange(5).astype(ml_dtypes.bfloat16)}
FLOATS = storage(np.float32, "0", 12)
COMMAND = "touch canary"


def roots():
    """What a data.pkl, or the fourth pickle of the older form, may hold; and what must be said of it."""

    def a(*view, **arguments):
        return {"a": tensor(FLOATS, *view, **arguments)}

    yield "os.system", Call(named("os", "system"), COMMAND), "holds an object of 'os system', expected a state d"
    yield "posix.system", Call(named("posix", "system"), COMMAND), "an object of 'posix system'"
    yield "eval", Call(named("builtins", "eval"), f"__import__('os').system('{COMMAND}')"), "'builtins eval'"
    yield "exec of Python 2", Call(named("__builtin__", "exec"), "open('canary', 'w')"), "'__builtin__ exec'"
    yield "subprocess in a value", {"a": Call(named("subprocess", "getoutput"), COMMAND)}, "'subprocess getoutput'"
    yield (
        "hooks",
        {"a": Call(REBUILD, FLOATS, 0, (12,), (1,), False, Call(named("os", "system"), COMMAND))},
        "os system",
    )
    yield "getattr", Call(Call(named("builtins", "getattr"), named("os", "path"), "os"), "x"), "'builtins getattr'"
    yield "attrgetter", Call(named("operator", "attrgetter"), "system"), "'operator attrgetter'"
    yield "a dotted name", Call(named("torch._utils", "_rebuild_tensor_v2.__globals__")), "_v2.__globals__'"
    yield "a dotted storage", Call(named("torch", "FloatStorage.from_file"), "/etc/passwd"), "FloatStorage.from_file"
    yield "a dotted dict", Call(named("collections", "OrderedDict.fromkeys"), "ab"), "OrderedDict.fromkeys'"
    yield "a name in the module", Call(named("collections OrderedDict", "")), "'collections OrderedDict '"
    yield "an empty module", Call(named("", "collections OrderedDict")), "' collections OrderedDict'"
    yield "torch.load", Call(named("torch.serialization", "load"), "other.pth"), "'torch.serialization load'"
    yield "an import", Call(named("torch._utils", "_import_dotted_name"), "os"), "_import_dotted_name"
    yield "a module's storage", Call(named("torch.storage", "FloatStorage")), "'torch.storage FloatStorage'"
    yield "numpy objects", Call(named("numpy.core.multiarray", "_reconstruct"), 0), "numpy.core.multiarray"
    yield (
        "a storage type called",
        Call(named("torch", "FloatStorage"), 10**12),
        "calls a Float32DType, expected a function",
    )
    yield "a string called", Raw(b"X\1\0\0\0a)R"), "calls 'a', expected a function"
    yield "a dict with arguments", Call(ORDERED_DICT, [("a", 1)]), "ordered_dict gets 1 arguments, expected 0"
    yield "too few arguments", {"a": Call(REBUILD, FLOATS, 0, (12,))}, "rebuild_tensor gets 3 arguments, expected 6"
    yield "metadata", {"a": Call(REBUILD, FLOATS, 0, (12,), (1,), False, Call(ORDERED_DICT), {})}, "7 arguments"
    yield "no storage", {"a": tensor("0", (3,))}, "given something else, expected a storage"
    yield (
        "a parameter of nothing",
        {"a": Call(PARAMETER, 5, True, Call(ORDERED_DICT))},
        "'a' is 5, expected tensors alone",
    )
    yield (
        "a state for a tensor",
        {"a": Call(REBUILD, FLOATS, 0, (3,), (1,), False, {}, state={"_data": 1})},
        "sets attributes",
    )
    yield "slots for a dict", Call(ORDERED_DICT, state=(None, {"__class__": 1})), "the pickle sets attributes"
    yield (
        "a class that makes a dict",
        Raw(b"ccollections\nOrderedDict\n)\x81"),
        "makes an object of a function, expected a c",
    )
    yield "a set", Raw(b"\x8f(K\1\x90"), "holds an object of 'builtins set'"
    yield "a frozen set", Raw(b"(K\1\x91"), "holds an object of 'builtins frozenset'"
    yield (
        "a module",
        Call(named("__main__", "RWKV"), state={"_modules": {}}),
        "of '__main__ RWKV', expected .*state_dict()",
    )
    for opcode, text in (
        ("INST", b"(X\1\0\0\0aios\nsystem\n"),
        ("OBJ", b"(cos\nsystem\no"),
        ("EXT1", b"\x82\1"),
        ("POP", b"0"),
        ("DUP", b"2"),
        ("GET", b"g0\n"),
        ("PERSID", b"P0\n"),
        ("STRING", b"S'a'\n"),
        ("FLOAT", b"F1\n"),
        ("INT", b"I1\n"),
        ("NEXT_BUFFER", b"\x97"),
    ):
        yield f"opcode {opcode}", Raw(text), f"the pickle has the opcode {opcode} "
    yield "another protocol", Raw(b"\x80\6}"), "opcode PROTO 6, expected those of a state dict, protocols 2 to 5"
    yield "a name from the stack", Raw(b"\x8c\2os\x8c\6system\x93"), "an object of 'os system', expected a state"
    yield "a name of numbers", Raw(b"K\1K\2\x93"), "asks for 1, expected a module and a name"
    yield "a name of nothing", Raw(b"\x93"), "damaged .IndexError"
    yield "an unknown opcode", Raw(b"\xff"), "damaged .ValueError"
    yield "an unset memo", Raw(b"h\7"), "damaged .KeyError"
    yield "an empty stack", Raw(b"\x87"), "damaged .IndexError"
    yield "no mark", Raw(b"t"), "damaged .IndexError"
    yield "items of a list", Raw(b"](K\1K\1u"), "of a list, expected pairs, of a dict"
    yield "items of a tuple", Raw(b")(K\1e"), "appends to a tuple, expected a list"
    yield "an odd item", Raw(b"}(X\1\0\0\0au"), "sets 1 keys and values"
    yield "a string of 4 GB", Raw(b"X\xff\xff\xff\xffabc"), "damaged .ValueError"
    yield "an integer of 2 GB", Raw(b"\x8b\xff\xff\xff\x7fabc"), "damaged .ValueError"
    yield "bytes of 8 EB", Raw(b"\x8e" + b"\xff" * 7 + b"\x7fabc"), "damaged .ValueError"
    yield "digits without end", Raw(b"L" + b"9" * 100_000 + b"L\n"), "damaged .ValueError"
    yield "no UTF-8", Raw(b"X\2\0\0\0\xff\xfe"), "damaged .UnicodeDecodeError"
    yield "a deep list", Raw(b"]" * 100_000 + b"(" + b"]"), "holds a list"
    yield "a deep tuple", Raw(b")" + b"\x85" * 100_000), "holds a tuple"
    yield (
        "a deep key",
        Raw(b"})" + b"\x85" * 100_000 + b"K\1s"),
        "a key is a tuple, expected a whole number or a string",
    )
    yield "a deep magic number", Raw(b"(" * 100_000), "damaged .IndexError"
    yield "a billion laughs", Raw(b")" + b"q\0h\0\x86" * 1000), "holds a tuple"
    yield "a tuple that doubles", Raw(b"}X\1\0\0\0a)" + b"q\0h\0\x86" * 1000 + b"s"), "'a' is a tuple"
    yield "opcodes without end", Raw(b"}" * 300_000), "more than 262144 opcodes"
    slots = b"".join(b"r" + struct.pack("<I", n << 12) for n in range(270_000))
    yield "memo slots without end", Raw(b"}" + slots), "opcodes"
    yield "itself", Raw(b"}q\0X\1\0\0\0ah\0s"), "'a' is a dict, expected tensors alone"
    yield "a list of itself", Raw(b"}X\1\0\0\0a]q\0h\0as"), "'a' is a list"
    yield "a list", [tensor(FLOATS, (3,))], "holds a list"
    yield "a training state", {"epoch": 3, "model": {}}, "'epoch' is 3, expected tensors alone"
    yield "a number as key", {1: tensor(FLOATS, (3,))}, "1 is a Tensor, expected tensors alone"
    yield "a long key", {"a" * 5000: tensor(FLOATS, (3,))}, "expected a whole number or a string of up to 1024"
    yield "a key twice", Raw(b"}X\1\0\0\0aNsX\1\0\0\0aNs"), "'a' is there twice"
    yield "another kind of reference", {"a": tensor(Persistent("module", "os"), (3,))}, "a persistent id is a tuple"
    yield (
        "a reference to a name",
        {"a": tensor(Persistent("module", ORDERED_DICT, "0", "cpu", 1), (3,))},
        "holds 'module'",
    )
    numbered = Persistent("storage", named("torch", "FloatStorage"), 0, "cpu", 12)
    yield "a number as storage", {"a": tensor(numbered, (3,))}, "holds 'storage', a Float32DType, 0, 12"
    yield (
        "a view of a storage",
        {"a": tensor(storage(np.float32, "0", 12, ("v", 0, 3)), (3,))},
        "a persistent id is a tuple",
    )
    yield (
        "no such storage",
        {"a": tensor(storage(np.float32, "9", 12), (3,))},
        "no storage '9' in the file|belongs to no",
    )
    yield (
        "a path as key",
        {"a": tensor(storage(np.float32, "../../canary", 12), (3,))},
        "no storage '../../canary'|no tensor",
    )
    yield "two dtypes", {"a": tensor(FLOATS, (3,)), "b": tensor(storage(np.int32, "0", 12), (3,))}, "in two ways"
    yield (
        "a storage that is longer",
        {"a": tensor(storage(np.float32, "0", 13), (3,))},
        "of 48 bytes, expected 13 of float32",
    )
    yield "a storage of terabytes", {"a": tensor(storage(np.float32, "0", 1 << 40), (3,))}, "expected 1099511627776 of"
    yield "a storage below nothing", {"a": tensor(storage(np.float32, "0", -12), (3,))}, "expected -12 of float32"
    yield "too many elements", a((13,)), r"takes 13 elements up to the 13th, expected no more than its storage of 12"
    yield "too many rows", a((4, 4)), "takes 16 elements"
    yield "an offset past the end", a((3,), offset=10), "up to the 13th"
    yield "an offset before the start", a((3,), offset=-1), "negative or a huge offset"
    yield "a negative axis", a((-3,), (1,)), "negative or a huge offset"
    yield "two negative axes", a((-3, -4), (4, 1)), "negative or a huge offset"
    yield "a negative stride", a((3,), (-1,), offset=2), "negative or a huge offset"
    yield "a long stride", a((2,), (12,)), "up to the 13th"
    yield "a stride that overflows", a((3,), (1 << 62,)), "up to the"
    yield "a stride that wraps to 4", a((2,), ((1 << 64) + 1,)), "negative or a huge"
    yield "a shape that overflows", a((1 << 32, 1 << 32), (0, 0)), "elements up to the 1th"
    yield "a shape that wraps to 0", a((1 << 31, 1 << 33), (0, 0)), "elements up to the 1th"
    yield "a shape of long integers", a((1 << 2000,), (1,)), "negative or a huge"
    yield "an offset that overflows", a((1,), offset=1 << 61), "up to the"
    yield "one element as terabytes", a((1 << 40,), (0,)), "takes 1099511627776 elements"
    yield (
        "an empty array that overflows",
        a((0, 1 << 62), (1, 1)),
        r"has shape \(0, 4611686018427387904\).*expected an array",
    )
    yield "fewer strides", a((3, 4), (1,)), "2 axes and 1 strides"
    yield "a hundred axes", a((1,) * 100), "100 axes and 100 strides"
    yield "a shape of floats", a((Raw(b"G?\xf0\0\0\0\0\0\0"),), (1,)), "given something else"
    yield "a shape of bools", a((True,), (1,)), "given something else"
    yield "a shape of strings", a(("3",), (1,)), "given something else"
    yield (
        "a shape that is a list",
        {"a": Call(REBUILD, FLOATS, 0, [3], [1], False, Call(ORDERED_DICT))},
        "something else",
    )


def archives():
    """Zips whose parts disagree, or are not what torch writes."""
    good, body = state_dict(GOOD), stored(GOOD)
    members = entries(pickled(good), body)
    deflated = zlib.compress(body[0], wbits=-15)

    def changed(**sections):
        return archive(members, **sections)

    yield (
        "deflated",
        archive([*members[:4], ("model/data/0", deflated), *members[5:]], central={4: {"method": 8, "unpacked": 48}}),
        "compressed or encrypted .method 8",
    )
    yield (
        "deflated in its own header",
        changed(local={4: {"method": 8}}),
        "local header of entry 'model/data/0' disagrees",
    )
    bomb = zlib.compress(bytes(1 << 24), wbits=-15)
    yield (
        "a bomb",
        archive([*members[:4], ("model/data/0", bomb), *members[5:]], central={4: {"method": 8, "unpacked": 1 << 24}}),
        "compressed or encrypted",
    )
    yield "encrypted", changed(central={4: {"flags": 0x809}}), "compressed or encrypted"
    yield "encrypted in its own header", changed(local={4: {"flags": 0x809}}), "disagrees with the zip's directory"
    yield "big-endian", archive(entries(pickled(good), body, order=b"big")), "byte order is b'big', expected little"
    yield "two pickles", archive([*members, ("other/data.pkl", pickled({}))]), "2 entries named <stem>/data.pkl"
    yield "no pickle", archive(members[1:]), "0 entries named"
    yield "a pickle in another place", archive([("data.pkl", members[0][1]), *members[1:]]), "0 entries named"
    script = pickled(Call(named("__torch__", "M")))
    yield "TorchScript", archive([("m/data.pkl", script), ("m/constants.pkl", b").")]), "of '__torch__ M'"
    yield "an entry twice", archive([*members, members[4]]), "'model/data/0' is there twice"
    yield "no storage", archive([*members[:4], *members[5:]]), "no storage '0' in the file"
    yield "an entry under another name", changed(local={4: {"name": b"model/data/7"}}), "'model/data/0' disagrees"
    yield "an entry with another size", changed(local={4: {"unpacked": 4, "packed": 4}}), "disagrees"
    yield "an entry at another's header", changed(central={4: {"at": 0}}), "disagrees"
    yield "an entry outside", changed(central={4: {"at": 1 << 30}}), "cut short or damaged at byte 1073741824"
    yield "entries over each other", overlapping(), "the entries claim .* bytes of a file of .*, expected entries"
    yield "an entry with another checksum", changed(central={4: {"crc": 1}}), "0' is damaged, with the checksum 0x"
    yield (
        "an entry too long",
        changed(
            central={4: {"packed": 1 << 30, "unpacked": 1 << 30}}, local={4: {"packed": 1 << 30, "unpacked": 1 << 30}}
        ),
        "runs to byte",
    )
    yield (
        "an entry of exabytes",
        changed(
            central={
                4: {
                    "packed": 0xFFFFFFFF,
                    "unpacked": 0xFFFFFFFF,
                    "extra": struct.pack("<2H2Q", 1, 16, 1 << 60, 1 << 60),
                }
            }
        ),
        "runs to byte",
    )
    yield (
        "an entry with a cut zip64 field",
        changed(central={4: {"packed": 0xFFFFFFFF, "unpacked": 0xFFFFFFFF, "extra": struct.pack("<2H", 1, 16)}}),
        "runs to byte",
    )
    yield (
        "a storage cut short",
        archive([*members[:4], ("model/data/0", body[0][:-4]), *members[5:]]),
        "of 44 bytes, expected",
    )
    yield (
        "a storage too long",
        archive([*members[:4], ("model/data/0", body[0] + bytes(4)), *members[5:]]),
        "of 52 bytes",
    )
    yield "an empty storage", archive([*members[:4], ("model/data/0", b""), *members[5:]]), "of 0 bytes, expected 12"
    yield "a pickle of megabytes", archive(entries(bytes(1 << 22), body)), "beside the weights has 4194304 bytes"
    yield "bytes after the pickle", archive(entries(pickled(good) + b"xyz", body)), "3 bytes follow the pickle"
    yield "an empty pickle", archive(entries(b"", body)), "damaged .ValueError"
    yield "a cut pickle", archive(entries(pickled(good)[:-9], body)), "damaged"
    yield (
        "a name of kilobytes",
        archive([*members, ("model/" + "n" * 60_000, b"")], central={8: {"name": b"n" * 65_000}}),
        "entry 'n+' disagrees",
    )
    shared = {str(n): tensor(storage(np.float32, "0", 1000), (1000,)) for n in range(50)}
    yield "one storage as fifty", zipped(shared, [bytes(4000)]), "up to '.*' claim .* bytes of a file of"
    yield (
        "bytes after the zip",
        zipped_pth(GOOD) + b"x",
        "cut short or damaged at byte .* end record in the last 22 bytes",
    )
    yield "bytes before the zip", b"PK\3\4" + zipped_pth(GOOD), "end record is at byte|damaged at byte"
    yield "a zip64 end elsewhere", changed(end={"end64": 1 << 62}), "expected a zip64 end record"
    yield "a zip64 end at the start", changed(end={"end64": 0}), "expected a zip64 end record"
    # zipfile takes the zip64 end record right before its locator, and others the one to which the locator points.
    yield "two zip64 ends", changed(end={"before_locator": bytes(56)}), "zip64 end record is at byte"
    yield "two counts", changed(end={"plain": {"count": 7}}), "end records say"
    yield "two directories", changed(end={"plain": {"start": 0}}), "end records say"
    yield "a comment", changed(end={"plain": {"comment": 5}}), "a comment of 5 bytes"
    yield "a directory elsewhere", changed(end={"start": 0}), "right before its end record"
    yield "a directory before the start", changed(end={"start": (1 << 64) - 100}), "right before its end record"
    yield "a directory of exabytes", changed(end={"size": 1 << 60}), "right before its end record"
    yield "more entries than there are", changed(end={"count": 1 << 40}), "expected 1099511627776"
    yield "fewer entries than there are", changed(end={"count": 3}), "8 entries.*expected 3"
    whole = zipped_pth(GOOD)
    for size in (4, 5, 30, 200, 700, *(len(whole) - size for size in (800, 300, 98, 22, 1))):
        yield f"cut to {size} bytes", whole[:size], "cut short or damaged|right before its end record"


def overlapping(count=40):
    """Entries that all run to the end of the last one, whose checksums would take the square of their number."""
    members = [(f"model/{number}", b"") for number in range(count)] + [("model/data.pkl", pickled({}))]
    end = len(archive(members[:-1])) // 2
    sizes = {number: {"packed": end - 200 * number, "unpacked": end - 200 * number} for number in range(count // 4)}
    return archive(members, central=sizes, local=sizes)


def olders():
    good, body = state_dict(GOOD, None), stored(GOOD)
    both = counted(12, body[0]) + counted(5, body[1])
    yield (
        "another magic number",
        older(good, ["0", "1"], both, magic=7),
        "starts with 7 and 1001, expected torch's 0x1950a",
    )
    yield "another protocol number", older(good, ["0", "1"], both, protocol=1002), "and 1002, expected"
    yield (
        "big-endian",
        older(good, ["0", "1"], both, system={**SYSTEM, "little_endian": False}),
        "byte order is not little",
    )
    yield "a list as system", older(good, ["0", "1"], both, system=[]), "byte order is not little"
    yield (
        "code as magic number",
        older(good, ["0", "1"], both, magic=Call(named("os", "system"), COMMAND)),
        "'os system'",
    )
    yield "code as keys", older(good, Call(named("os", "system"), COMMAND), both), "'os system'"
    yield "a dict of keys", older(good, {"0": None}, both), "holds a dict, expected a list of the storages"
    yield "a key twice", older(good, ["0", "0"], both), "'0' is listed twice"
    yield "a key of nothing", older(good, ["0", "1", "2"], both), "'2' is listed twice or belongs to no tensor"
    yield "a key left out", older(good, ["0"], counted(12, body[0])), "no storage '1' in the file"
    yield "a deep key", older(good, [Raw(b")" + b"\x85" * 100_000)], both), "storage a tuple is listed"
    yield "a storage of another count", older(good, ["0", "1"], counted(11, body[0][4:]) + both[56:]), "of 44 bytes"
    yield "a negative count", older(good, ["0", "1"], counted(-1, body[0]) + both[56:]), "has -1 elements"
    yield "a huge count", older(good, ["0", "1"], counted((1 << 63) - 1, body[0]) + both[56:]), "its end before byte"
    yield "bytes after the storages", older(good, ["0", "1"], both + b"x"), "1 bytes follow the last storage"
    whole = older_pth(GOOD)
    for size in (2, 10, 15, 100, 140, 300, len(whole) - 60, len(whole) - 12, len(whole) - 1):
        yield f"cut to {size} bytes", whole[:size], "damaged|expected its end before byte"


def headers():
    """Files of .safetensors."""
    a, body = described([3, 4], 0, 48), bytes(48)
    text = json.dumps({"a": a}).encode()
    yield "overlapping", safetensors({"a": a, "b": described([2], 40, 48)}, body), "is damaged"
    yield "one inside another", safetensors({"a": a, "b": described([2], 0, 8)}, body), "is damaged"
    yield "out of range", safetensors({"a": described([3, 5], 0, 60)}, body), "is damaged"
    yield "exabytes", safetensors({"a": described([1 << 60], 0, 1 << 62)}, body), "is damaged"
    yield "a shape that overflows", safetensors({"a": described([1 << 33, 1 << 33], 0, 0)}, b""), "is damaged"
    yield "a hole", safetensors({"a": a, "b": described([1], 52, 56)}, bytes(56)), "is damaged"
    yield "negative offsets", safetensors({"a": described([3, 4], -48, 0)}, body), "is damaged"
    yield "offsets reversed", safetensors({"a": described([3, 4], 48, 0)}, body), "is damaged"
    yield "a negative axis", safetensors({"a": described([-3, -4], 0, 48)}, body), "is damaged"
    yield "another shape", safetensors({"a": described([3, 3], 0, 48)}, body), "is damaged"
    yield "an unknown dtype", safetensors({"a": described([12], 0, 48, "F31")}, body), "is damaged"
    yield (
        "a dtype NumPy lacks",
        safetensors({"a": described([48], 0, 48, "F8_E4M3")}, body),
        "has dtype 'F8_E4M3', expected",
    )
    yield "a hundred axes", safetensors({"a": described([1] * 100, 0, 4)}, bytes(4)), "100 axes|is damaged"
    yield (
        "values without names",
        safetensors({"a": ["F32", [3, 4], [0, 48]]}, body),
        "is a list in the header|is damaged",
    )
    yield (
        "a dtype that is a dict",
        safetensors({"a": described([3, 4], 0, 48, {"F32": None})}, body),
        "a dict, exp|damaged",
    )
    yield "no offsets", safetensors({"a": {"dtype": "F32", "shape": [3, 4]}}, body), "is damaged"
    yield "a name twice", safetensors(text[:-1] + b", " + text[1:], body), "key twice|is damaged"
    yield (
        "a field twice",
        safetensors(text.replace(b'"shape"', b'"shape": [12], "shape"'), body),
        "key twice|is damaged",
    )
    yield "bytes after the weights", safetensors({"a": a}, body + b"x"), "is damaged"
    yield "a header of exabytes", safetensors({"a": a}, body, size=1 << 62), "header claims 4611686018427387904 bytes"
    yield "a negative header", safetensors({"a": a}, body, size=(1 << 64) - 1), "the header claims"
    yield "no header", safetensors({}, b"", size=0), "the header claims 0 bytes"
    yield "a header of the whole file", safetensors(b"{}" * 10, b"", size=28), "the header claims 28"
    yield "a list", safetensors(b"[]"), "is damaged"
    yield "no JSON", safetensors(b"{a}"), "is damaged"
    yield "a deep header", safetensors(b"[" * 100_000), "is damaged"
    yield "a deep field", safetensors(b'{"a": ' + b"[" * 100_000), "is damaged"
    yield "no UTF-8", safetensors(b'{"\xff": 1}'), "is damaged"
    yield "a zip", zipped_pth(GOOD), "the header claims|is damaged"
    whole = good_safetensors(GOOD)
    for size in (1, 7, 8, 9, 40, len(whole) - 60, len(whole) - 10, len(whole) - 1):
        yield f"cut to {size} bytes", whole[:size], "is damaged|the header claims"


def indices():
    """Indices beside a sound shard for each weight, one with both, and a damaged one."""

    def index(*shards):
        """The index of GOOD with these shards, in the order of the weights."""
        return index_of(dict(zip(GOOD, shards)))

    def index_of(weight_map):
        return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()

    yield "a path out of the folder", index("../outside.safetensors", "2.safetensors"), "a shard is '../outside"
    yield "a path from the root", index("/etc/passwd", "2.safetensors"), "a shard is '/etc/passwd'"
    yield "a path through the folder", index("./1.safetensors", "2.safetensors"), "in the same folder"
    yield "a path of Windows", index("..\\1.safetensors", "2.safetensors"), "in the same folder"
    yield "a drive of Windows", index("C:1.safetensors", "2.safetensors"), "in the same folder"
    yield "a byte of nothing", index("1.safetensors\0.safetensors", "2.safetensors"), "in the same folder"
    yield "a pickle", index("1.pth", "2.safetensors"), "a shard is '1.pth', expected the name of a .safetens"
    yield "the index itself", index("model.safetensors.index.json"), "expected the name of a .safetensors file"
    yield "a shard that is not there", index("1.safetensors", "3.safetensors"), "'3.safetensors' is not there"
    yield (
        "a name that no file can have",
        index("1.safetensors", "x" * 300 + ".safetensors"),
        "the shard 'x+' is not there",
    )
    yield "a name that is no text", index("1.safetensors", "\ud800.safetensors"), "is not there"
    yield "a folder as shard", index("1.safetensors", "folder.safetensors"), "is not there"
    yield "a number as shard", index(1, "2.safetensors"), "a shard is 1, expected"
    yield "a list as shard", index(["1.safetensors"]), "a shard is a list"
    yield "a name too many", index_of(dict.fromkeys((*GOOD, "x"), "both.safetensors")), "disagree on 'x'"
    yield "a name in the other shard", index("2.safetensors", "1.safetensors"), "disagree on 'emb.weight'"
    yield "a name left out", index("1.safetensors", "1.safetensors"), "disagree on 'ln.bias'"
    yield "a name that only the shard has", index("both.safetensors"), "disagree on 'ln.bias'"
    yield "a damaged shard", index("damaged.safetensors"), "damaged.safetensors: is damaged"
    yield "nothing", index(), "weight_map is a dict, expected"
    yield "a list", index_of([*GOOD]), "weight_map is a list"
    yield "no weight_map", b"{}", "weight_map is a NoneType"
    yield "a list alone", b"[]", "the JSON is a list, expected an object"
    yield "a key twice", b'{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}', "the JSON has a key twice"
    yield "no JSON", b"{a", "the JSON is damaged"
    yield "no UTF-8", b'{"\xff\xff": 1}', "the JSON is damaged"
    yield "a deep one", b"[" * 1_000_000, "the JSON is damaged"
    yield "digits without end", b"[" + b"9" * 100_000 + b"]", "the JSON is damaged"
    yield "megabytes", b" " * (1 << 21) + b"{}", "the index has 2097154 bytes"


def others():
    yield "empty", b"", "is empty, expected a checkpoint"
    yield "text", b"not a checkpoint", "starts with b'not a ch', expected a .pth that torch wrote"
    yield "a pickle of protocol 0", pickle.dumps({}, 0), "starts with b"
    yield "a pickle of protocol 4", pickle.dumps({}, 4), "damaged|starts with a dict"
    yield "a bare pickle", pickle.dumps({}, 2), "damaged|starts with a dict"
    yield "a pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "pointer of Git LFS.*git lfs pull"
    yield "gzip", b"\x1f\x8b" + bytes(50), "starts with b"
    yield "tar", b"storages" + bytes(600), "starts with b'storages'"
    yield "an empty zip", struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0), "starts with b'PK"
    yield "the start of a zip", b"PK\3\4", "cut short or damaged"


def corpus():
    """(case, file name, its bytes, what must be said)."""
    bodies = stored(GOOD)
    for case, root, complaint in roots():
        yield f"zip: {case}", "model.pth", zipped(root, bodies), complaint
        yield f"older: {case}", "model.pth", older(root, ["0"], counted(12, bodies[0])), complaint
    for kind, name, cases in (
        ("zip", "model.pth", archives()),
        ("older", "model.pth", olders()),
        ("safetensors", "model.safetensors", headers()),
        ("index", "model.safetensors.index.json", indices()),
        ("other", "model.pth", others()),
    ):
        for case, text, complaint in cases:
            yield f"{kind}: {case}", name, text, complaint
