"""Reads the texts of a training as token ids.

novel.txt       any bytes, which the tokenizer encodes
texts.jsonl     a line {"text": "..."} for each text. Behind each text comes the id that ends texts, or a line feed if
                the tokenizer has none
data.bin        token ids, with data.idx beside it: the format "binidx" of Megatron and RWKV-LM
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NoReturn

import numpy as np

from ..errors import ContractError
from .files import contents, json_object, lines, mapped, opened
from .number_checks import shown
from .tokenizers import Tokenizer

LONGEST_LINE = 1 << 26  # bytes of a line of JSON
MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")  # MAGIC, the version, the dtype, and the numbers of texts and of documents
VERSION = 1
# By Megatron's numbers; 6 and 7 are floats.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read(path, tokenizer: Tokenizer) -> np.ndarray:
    """The ids [T] in a file; its ending determines the format. ContractError, with its name, if it is damaged."""
    path = Path(path)
    try:
        if path.suffix == ".jsonl":
            return read_lines(path, tokenizer)
        if path.suffix in (".bin", ".idx"):
            return read_binidx(path)
        text = contents(path)
        # A tokenizer of 256 ids is `Bytes`: every byte is its own id.
        return np.frombuffer(text, np.uint8) if tokenizer.size == 256 else ids(tokenizer.encode(text), tokenizer)
    except ContractError as error:
        raise ContractError(f"{path}: {error}") from None


def ids(tokens, tokenizer) -> np.ndarray:
    """The ids as an array of the smallest unsigned dtype that holds the tokenizer's ids."""
    return np.array(tokens, np.min_scalar_type(tokenizer.size - 1))


def read_lines(path, tokenizer):
    """The ids in a file of JSON lines."""
    texts = [ids([], tokenizer)]
    end = [tokenizer.end] if tokenizer.end is not None else tokenizer.encode("\n")
    with opened(path) as file:
        for number, line in lines(file, LONGEST_LINE):
            if line.strip():
                try:
                    text = json_object(line).get("text")
                    if not isinstance(text, str):
                        refuse(f'its text is {shown(text)}, expected {{"text": "..."}}')
                    texts.append(ids(tokenizer.encode(text) + end, tokenizer))
                except ContractError as error:
                    refuse(f"line {number}: {error}")
    return np.concatenate(texts)


def read_binidx(path):
    """The ids in a .bin, after checking its .idx. Models and trainings refuse ids beyond their vocabulary."""
    index = mapped(path.with_suffix(".idx"), "an index of token ids")
    head = index[: HEAD.size]
    magic, version, number, texts, documents = HEAD.unpack(head.ljust(HEAD.size, b"\0"))
    if len(head) < HEAD.size or magic != MAGIC or version != VERSION:
        refuse(f"its .idx starts with {head[: len(MAGIC)]!r}, expected {MAGIC!r} and version {VERSION}")
    if number not in DTYPES:
        refuse(f"its .idx has the dtype {number}, expected one of {', '.join(map(str, DTYPES))}")
    with opened(path.with_suffix(".bin")) as file:
        data = file.read()
    dtype = np.dtype(DTYPES[number])
    if len(data) % dtype.itemsize:
        refuse(f"its .bin has {len(data)} bytes, expected a multiple of {dtype.itemsize}")
    # A text has a size of four bytes and a place of eight, a document a number of eight.
    has_right_size = len(index) == HEAD.size + 12 * texts + 8 * documents
    sizes = np.frombuffer(index, "<i4", texts if has_right_size else 0, HEAD.size)  # of the texts, in ids
    if not has_right_size or (sizes < 0).any():
        refuse(f"its .idx of {len(index)} bytes claims {texts} texts and {documents} documents, expected a sound one")
    if (count := int(sizes.sum(dtype=np.int64))) != len(data) // dtype.itemsize:
        refuse(f"its .bin has {len(data) // dtype.itemsize} ids, expected the {count} of its .idx")
    return np.frombuffer(data, dtype)


def refuse(complaint: str) -> NoReturn:
    raise ContractError(complaint)
