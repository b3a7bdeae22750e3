"""A model in rwkv.cpp, as a peer: its library built from https://github.com/RWKV/rwkv.cpp, its file written here.

The file is a header (magic, 101, V, D, L, 0 for float32), then every parameter: rank, length of the name, 0 for float32,
the sizes last axis first, the name, the values; see FILE_FORMAT.md there, which is for all versions of RWKV.
"""

import ctypes
import struct
import tempfile

import numpy as np

CHUNK = 64              # tokens of a prompt at once, the most that is recommended


class RwkvCpp:
    """`weights` by their official names, float32; `library` is the path of librwkv."""

    def __init__(self, library, weights, threads):
        self.rwkv = ctypes.CDLL(library)
        for name, restype in (("init_from_file", ctypes.c_void_p), ("get_state_len", ctypes.c_size_t),
                              ("get_logits_len", ctypes.c_size_t), ("eval", ctypes.c_bool),
                              ("eval_sequence_in_chunks", ctypes.c_bool)):
            getattr(self.rwkv, f"rwkv_{name}").restype = restype
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            write(file, weights)
            file.flush()
            self.context = ctypes.c_void_p(self.rwkv.rwkv_init_from_file(file.name.encode(), threads, 0))
        if not self.context:
            raise RuntimeError(f"{library} refuses the model")
        self.state_size, self.logits_size = (getattr(self.rwkv, f"rwkv_get_{name}_len")(self.context)
                                             for name in ("state", "logits"))

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


def write(file, weights):
    vocabulary, channels = weights["emb.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    file.write(struct.pack("=6i", 0x67676D66, 101, vocabulary, channels, layers, 0))
    for name, x in weights.items():
        x = np.ascontiguousarray(arranged(name, x, weights["blocks.0.att.time_faaaa"].shape[0]), np.float32)
        encoded = name.encode()
        file.write(struct.pack(f"={3 + x.ndim}i", x.ndim, len(encoded), 0, *x.shape[::-1]))
        file.write(encoded + x.tobytes())


def arranged(name, x, heads):
    """A parameter as rwkv.cpp wants RWKV-6's."""
    kind = name.rsplit(".", 1)[-1]
    if kind.startswith("time_"):
        x = x.squeeze()
    if kind == "time_faaaa":
        return x[..., None]
    if kind in ("time_maa_w1", "time_decay_w1", "time_decay_w2"):
        return x.T
    if kind == "time_maa_w2":
        return x.swapaxes(1, 2)
    return x.reshape(heads, -1, 1) if kind == "time_decay" else x
