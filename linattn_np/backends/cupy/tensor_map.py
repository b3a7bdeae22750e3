"""Descriptors for Hopper's tensor copies, made by the driver."""

import ctypes
from functools import cache, lru_cache

TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}         # of CUtensorMapDataType
SIZES = {"float16": 2, "float32": 4, "bfloat16": 2}
SWIZZLE_128B, PROMOTE_256B = 3, 3                           # of CUtensorMapSwizzle and CUtensorMapL2promotion


@lru_cache(1024)                # what a call costs is half of a small call's time; arrays come back to the same places
def tensor_map(pointer: int, shape, strides, dtype: str, columns: int, tokens: int, swizzled: bool) -> bytes:
    """CUtensorMap of [B, H, T, D] with the strides in bytes, multiples of 16 but the last."""
    room = ctypes.create_string_buffer(128 + 64)            # it must begin on 64 bytes
    start = -ctypes.addressof(room) % 64
    def array(ctype, values):
        return (ctype * len(values))(*values)

    sizes = array(ctypes.c_uint64, shape[::-1])
    steps = array(ctypes.c_uint64, [max(16, step) for step in strides[-2::-1]])     # 0 where there is one element
    box, ones = array(ctypes.c_uint32, [columns, tokens, 1, 1]), array(ctypes.c_uint32, [1] * 4)
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + start), TYPES[dtype], 4, ctypes.c_void_p(pointer), sizes, steps, box,
        ones, 0, SWIZZLE_128B if swizzled else 0, PROMOTE_256B, 0)
    if status:
        raise RuntimeError(f"the driver makes no tensor map of {shape} with strides {strides}: CUresult {status}")
    return room.raw[start:start + 128]


@cache
def driver():
    return ctypes.CDLL("libcuda.so.1")
