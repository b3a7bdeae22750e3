"""A model in rwkv.cpp, as a peer: its library built from https://github.com/RWKV/rwkv.cpp, its file written here.

The file is a header (magic, 101, V, D, L, the type: 0 for float32, 1 for float16), then every parameter: rank, length
of the name, its type, the sizes last axis first, the name, the values; see FILE_FORMAT.md there, which is for all
versions of RWKV. Its own function makes other types of the file in float16.
"""

import ctypes
import os
import struct
import tempfile

import numpy as np

CHUNK = 64  # tokens of a prompt at once, the most that is recommended
PER_CHANNEL = ("w0", "a0", "v0", "k_k", "k_a", "x_k")  # of RWKV-7


def models(library, weights, threads, types) -> dict:
    """RwkvCpp by type, FP32, FP16, Q8_0, Q4_0, ...; `weights` by their official names, float32."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for type in types:
            path = f"{folder}/{'FP32' if type == 'FP32' else 'FP16'}.bin"
            if not os.path.exists(path):
                with open(path, "wb") as file:
                    write(file, weights, type != "FP32")
            found[type] = RwkvCpp(library, path, threads, type)
    return found


class RwkvCpp:
    """The model in a file in FP32 or FP16, which is quantised first for other types; `library` is librwkv's path."""

    def __init__(self, library, path, threads, type):
        self.rwkv = ctypes.CDLL(library)
        for name, restype in (
            ("init_from_file", ctypes.c_void_p),
            ("get_state_len", ctypes.c_size_t),
            ("get_logits_len", ctypes.c_size_t),
            ("eval", ctypes.c_bool),
            ("eval_sequence_in_chunks", ctypes.c_bool),
            ("quantize_model_file", ctypes.c_bool),
        ):
            getattr(self.rwkv, f"rwkv_{name}").restype = restype
        with tempfile.TemporaryDirectory() as folder:
            if type not in ("FP32", "FP16"):
                whole, path = path, f"{folder}/quantised.bin"
                if not self.rwkv.rwkv_quantize_model_file(whole.encode(), path.encode(), type.encode()):
                    raise RuntimeError(f"{library} cannot make a model in {type}")
            self.bytes = os.path.getsize(path)
            self.context = ctypes.c_void_p(self.rwkv.rwkv_init_from_file(path.encode(), threads, 0))
        if not self.context:
            raise RuntimeError(f"{library} refuses the model")
        self.state_size, self.logits_size = (
            getattr(self.rwkv, f"rwkv_get_{name}_len")(self.context) for name in ("state", "logits")
        )

    def step(self, token, state):
        """(logits, state) after one more token."""
        return self.call("eval", (ctypes.c_uint32(token),), state)

    def prompt(self, tokens):
        values = (ctypes.c_uint32 * len(tokens))(*tokens)
        sizes = ctypes.c_size_t(len(tokens)), ctypes.c_size_t(CHUNK)
        return self.call("eval_sequence_in_chunks", (values, *sizes), None)

    def call(self, name, arguments, state):
        after, logits = np.empty(self.state_size, np.float32), np.empty(self.logits_size, np.float32)
        pointers = (None if x is None else x.ctypes.data_as(ctypes.c_void_p) for x in (state, after, logits))
        if not getattr(self.rwkv, f"rwkv_{name}")(self.context, *arguments, *pointers):
            raise RuntimeError(f"rwkv.cpp's rwkv_{name} failed")
        return logits, after


def write(file, weights, half):
    vocabulary, channels = weights["emb.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    file.write(struct.pack("=6i", 0x67676D66, 101, vocabulary, channels, layers, int(half)))
    arranged = of_rwkv7 if "blocks.0.att.r_k" in weights else of_rwkv6
    for name, x, matrix in arranged(weights):
        short = half and matrix
        x, encoded = np.ascontiguousarray(x, np.float16 if short else np.float32), name.encode()
        file.write(struct.pack(f"={3 + x.ndim}i", x.ndim, len(encoded), int(short), *x.shape[::-1]))
        file.write(encoded + x.tobytes())


def of_rwkv6(weights):
    """(name, values, whether in 16 bits) of every parameter as rwkv.cpp wants RWKV-6's."""
    heads = weights["blocks.0.att.time_faaaa"].shape[0]
    for name, x in weights.items():
        kind, matrix = name.rsplit(".", 1)[-1], x.ndim > 1 and ".time_" not in name
        if kind.startswith("time_"):
            x = x.squeeze()
        if kind == "time_faaaa":
            x = x[..., None]
        elif kind in ("time_maa_w1", "time_decay_w1", "time_decay_w2"):
            x = x.T
        elif kind == "time_maa_w2":
            x = x.swapaxes(1, 2)
        elif kind == "time_decay":
            x = x.reshape(heads, -1, 1)
        yield name, x, matrix


def of_rwkv7(weights):
    """The same of RWKV-7's: the six mixes of a layer as one, no gate of values in the first layer."""
    for name, x in weights.items():
        layer, kind = name.rsplit(".", 1)
        if kind == "x_r":
            mixes = (weights[f"{layer}.x_{which}"].reshape(1, -1) for which in "rwkvag")
            yield f"{layer}.x_rwkvag", np.stack([*mixes]), False
        elif kind in ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"):
            if not name.startswith("blocks.0.att.v"):
                yield name, x.T, True
        elif ".att.x_" not in name and name != "blocks.0.att.v0":
            yield name, x.reshape(-1) if kind in PER_CHANNEL else x, kind == "weight" and x.ndim > 1
