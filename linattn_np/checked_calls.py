"""The cached results of checking a call, shared by all calls that differ only in the addresses of their arrays."""

import numpy as np

from . import array_kinds, precisions
from .accepted_arrays import host_array
from .bounded_cache import Cache
from .layouts import swap_heads
from .problem import Problem

# Names of arguments, by what a key has of them. Of an argument that is named nowhere the key has the exact value; if
# its type has none (`exact_key`), the call has no key, and is checked every time.
ARRAYS = ("initial_state", "state", "pending", "accepted", "out", "mask")  # arrays: their signatures
# {name: kinds of dtypes}: numbers on the host of these kinds: their values, else the signature
NUMBERS = dict.fromkeys(("cu_seqlens", "cu_seqlens_k", "window", "slots"), "iu") | {"gamma": "iuf"}
EXACT = frozenset({int, type})  # hashable types whose equal values are interchangeable
SCALARS = frozenset(np.sctypeDict.values())  # NumPy's scalar types, without a caller's subclasses
# By the key of a call: the memo of all calls with this key, a dictionary. "problem" is the checked call without arrays;
# backends add entries of their own, such as plans.
MEMOS = Cache(most=1 << 26, entries=256)


def checked(op, inputs, arguments):
    """(the checked call, the addresses of its arrays on a device). Checks that an earlier call with the same key has
    passed are not repeated."""
    key, addresses = call_key(op, inputs, arguments)
    if key is None:
        return op.check(inputs, **arguments), addresses
    memo = MEMOS.get(key)
    if memo is None:
        problem = without_arrays(op.check(inputs, **arguments))
        memo = MEMOS.keep(key, {"problem": problem}, memo_bytes(problem))
    return with_arrays(memo["problem"], inputs, arguments, memo), addresses


def call_key(op, inputs, arguments):
    """(key, addresses) of a call.

    The key is a hashable of everything that the checks read: calls with equal keys pass or fail alike. It is None if an
    argument has an unknown type. `addresses` are those of the device arrays, in the order of the call.
    """
    signature, addresses = array_kinds.signature, []
    parts = [signature(x, addresses) for x in inputs]
    if None in parts:
        return None, addresses
    for name, x in arguments.items():
        if x is None:
            parts.append(())
            continue
        argument_type = type(x)
        if argument_type is str or argument_type is bool:  # True differs from the key of the number 1, (int, 1)
            parts.append(x)
            continue
        if name in ARRAYS:
            part = signature(x, addresses)
        elif name in NUMBERS:
            part = contents(x, NUMBERS[name]) or signature(x, addresses)
        else:
            part = exact_key(x)
        if part is None:
            return None, addresses
        parts.append(part)
    return (op, precisions.current(), *arguments, *parts), addresses


def contents(numbers, kinds):
    """A hashable of numbers on the host (one, or a list, tuple or array of them) if their dtype is one of `kinds`; else
    None."""
    array = None if array_kinds.kind(numbers) in ("cupy", "cuda") else host_array(numbers)
    return None if array is None or array.dtype.kind not in kinds else (array.dtype, array.shape, array.tobytes())


def exact_key(x):
    """A hashable that equals only those of values interchangeable with `x`: 1 differs from 1.0, and 0.0 from -0.0.

    It is made by the exact type, never by a repr or hash that a subclass could define; None for unknown types.
    """
    exact_type = type(x)
    if exact_type is float:
        return exact_type, x.hex()
    if exact_type in EXACT:
        return exact_type, x
    if exact_type in SCALARS:
        return exact_type, x.tobytes()
    return (np.dtype, x) if isinstance(x, np.dtype) else None


def memo_bytes(problem: Problem) -> int:
    """About how many bytes the memo of calls with the key of `problem` takes, together with the key."""
    nbytes = 4096  # the key, the problem and plans, without arrays
    # An array among the options three times: its bytes in the key, the array, and a copy on the device.
    nbytes += 3 * sum(x.nbytes for x in problem.options.values() if type(x) is np.ndarray)
    # Softmax attention's tables: 48 bytes for every 64 to 192 tokens of a head, counted as one byte a token.
    if "S" in problem.sizes:
        nbytes += problem.sizes["B"] * problem.sizes["H"] * (problem.sizes["T"] + problem.sizes["S"])
    if problem.varlen:  # tables of sequences and of chunks: 8 int64 for a sequence, 2 for a chunk of 64 tokens
        nbytes += 8 * problem.spans.bounds.nbytes + max(problem.shape("T S" if "S" in problem.sizes else "T")) // 4
    return nbytes


def without_arrays(problem: Problem) -> Problem:
    """The problem without the caller's arrays, so that a cache keeps none of their memory alive.

    The NumPy arrays that stay among the options, such as the logarithms of `gamma`, were made by the checks. All calls
    with the key share them, so they become read-only.
    """
    options = {
        name: None if name in ARRAYS or array_kinds.kind(x) == "cupy" else x for name, x in problem.options.items()
    }
    for x in options.values():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return problem.replace(arrays={}, initial_state=None, out=None, mask=None, example=None, options=options)


def with_arrays(problem: Problem, inputs, arguments, memo) -> Problem:
    """The cached `problem` with the arrays of this call; `memo`: that of the call's key.

    Of the options only a step's are arrays of the caller: `state`, `pending`, `accepted`, and `slots` on a device.
    """
    op, layout, initial_state, out = problem.op, problem.layout, arguments.get("initial_state"), arguments.get("out")
    arrays = dict(zip(op.arrays, inputs))
    if layout != "bhtd":
        arrays = {name: swap_heads(x, op.arrays[name], layout) for name, x in arrays.items()}
        out = None if out is None else swap_heads(out, op.out, layout)
    if "state" in problem.options:  # the operator is a step: None where `without_arrays` left out an array
        options = {name: arguments.get(name) if x is None else x for name, x in problem.options.items()}
        return problem.replace(arrays=arrays, options=options, out=out, example=inputs[0], memo=memo)
    return problem.replace(
        arrays=arrays,
        # One part: a state of several parts is a tuple, and a call with a tuple has no key.
        initial_state=None if initial_state is None else (initial_state,),
        out=out,
        example=inputs[0],
        mask=arguments.get("mask"),
        memo=memo,
    )
