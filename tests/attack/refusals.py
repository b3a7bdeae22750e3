"""Bad arguments: refused in the contract's words, at once, with nothing written."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from reference import same_bits

from attack.calls import DTYPES, Call, calls, flat, given, there
from attack.harness import Fault, Refused, holds_for, require
from linattn_np import ContractError, NotSupported, vjp
from linattn_np.layouts import swap_heads


class Constant(float):
    """A number whose repr says nothing of its value."""

    def __repr__(self):
        return "1.0"


def strided(x, strides):
    return np.lib.stride_tricks.as_strided(x, strides=strides)


# What must be refused: by argument, values by a word for each. A function makes its value of (the call's T, H, and what
# is right for the argument, on the host).
BAD = {
    "scale": {
        "nan": np.nan,
        "inf": np.inf,
        "text": "1",
        "bool": True,
        "huge": 10**400,
        "complex": 1j,
        "list": [1.0],
        "array": np.ones(3),
        "object": object(),
    },
    "layout": {"capitals": "BHTD", "none": None, "number": 3, "list": ["bhtd"], "empty": "", "array": np.ones(2)},
    "mode": {"unknown": "fast", "none": None, "number": 0, "list": ["chunk"], "array": np.ones(2)},
    "chunk_size": {
        "zero": 0,
        "negative": -16,
        "odd": 17,
        "text": "16",
        "bool": True,
        "float": 16.0,
        "list": [16],
        "nan": np.nan,
    },
    "materialize": {"text": "yes", "list": [], "two": 2, "array": np.ones(2)},
    "reverse": {"text": "False", "number": 2, "list": [], "array": np.ones(2)},
    "state_v_first": {"text": "no", "number": 3, "list": [0], "array": np.ones(2)},
    "output_final_state": {"text": "False", "number": 2, "list": [], "array": np.ones(2)},
    "normalize": {"text": "False", "number": 2, "list": [], "array": np.ones(2)},
    "causal": {"text": "False", "number": 2, "list": [], "array": np.ones(2)},
    "feature_map": {"unknown": "gelu", "number": 1, "list": ["elu"], "array": np.ones(2), "function": np.exp},
    "state_dtype": {
        "integers": "int32",
        "unknown": "float33",
        "number": 3.5,
        "object": object(),
        "complex": complex,
        "list": ["float32"],
        "big-endian": ">f4",
    },
    "backend": {"unknown": "torch", "none": None, "number": 0, "list": ["numpy"], "array": np.ones(2)},
    "gamma": {
        "nan": np.nan,
        "above": 1.5,
        "below": -0.1,
        "text": "0.5",
        "list": [0.5] * 99,
        "ragged": [[1], [1, 2]],
        "complex": 1j,
        "bool": True,
        "object": object(),
        "huge": 10**400,
    },
    "cu_seqlens": {
        "wraps": lambda T, H, right: [0, 2**63 - 1, -2, T],
        "wraps twice": lambda T, H, right: np.array([0, 2**63 - 1, -(2**63), T]),
        "unsigned": lambda T, H, right: np.array([0, 2**64 - 1, T], np.uint64),
        "beyond int64": lambda T, H, right: [0, 2**70, T],
        "beyond": lambda T, H, right: [0, T + 1],
        "short": lambda T, H, right: [0, T - 1],
        "back": lambda T, H, right: [0, T + 3, T],
        "from one": lambda T, H, right: [1, T + 1],
        "negative": lambda T, H, right: [0, -1, T],
        "floats": lambda T, H, right: [0.0, float(T)],
        "one entry": lambda T, H, right: [0],
        "empty": [],
        "nested": lambda T, H, right: [[0, T]],
        "ragged": lambda T, H, right: [[0], [0, T]],
        "text": "0",
        "bools": lambda T, H, right: np.array([False, True]) if T != 1 else [False],
        "set": lambda T, H, right: {0, T},
        "iterator": lambda T, H, right: iter([0, T]),
        "number": 7,
        "objects": lambda T, H, right: np.array([0, T], object),
        "times": np.array([0, 5], "m8[s]"),
    },
    "mask": {
        "integers": lambda T, H, right: np.ones((1, T), int),
        "short": lambda T, H, right: np.ones((1, T + 1), bool),
        "flat": lambda T, H, right: np.ones(T, bool),
        "text": "mask",
        "list": lambda T, H, right: [[True] * T],
    },
    "initial_state": {
        "integers": lambda T, H, right: right.astype(np.int64),
        "complex": lambda T, H, right: right.astype(complex),
        "more rows": lambda T, H, right: np.concatenate(
            [right, right, right[:1] * 0, np.zeros_like(right, shape=(1, *right.shape[1:]))]
        ),
        "an axis less": lambda T, H, right: right.reshape(-1),
        "text": "zeros",
        "list": lambda T, H, right: [right],
        "pair of three": lambda T, H, right: (right, right, right),
        "number": 0.0,
        "masked": lambda T, H, right: np.ma.masked_array(right),
        "objects": lambda T, H, right: right.astype(object),
        "empty pair": (),
    },
    "out": {
        "another dtype": lambda T, H, right: right.astype(np.float64 if right.dtype != np.float64 else np.float32),
        "larger": lambda T, H, right: np.zeros((*right.shape[:-1], right.shape[-1] + 1), right.dtype),
        "an axis less": lambda T, H, right: right[0] if len(right) else np.zeros(3, right.dtype),
        "text": "out",
        "list": lambda T, H, right: right.tolist() or [1],
        "true": True,
        "read-only": lambda T, H, right: frozen(right),
        "one row for all": lambda T, H, right: np.broadcast_to(
            right[..., :1], (*right.shape[:-1], right.shape[-1] + 1)
        ),
        "integers": lambda T, H, right: right.astype(int),
        "masked": lambda T, H, right: np.ma.masked_array(right),
        "overlapping itself": lambda T, H, right: overlapping(right),
    },
}
FOR_ARRAYS = {
    "none": lambda x: None,
    "list": lambda x: x.tolist(),
    "number": lambda x: 1.0,
    "text": lambda x: "q",
    "integers": lambda x: np.ones(x.shape, int),
    "complex": lambda x: np.ones(x.shape, complex),
    "objects": lambda x: np.ones(x.shape, object),
    "bools": lambda x: np.ones(x.shape, bool),
    "an axis more": lambda x: x[None],
    "an axis less": lambda x: x[0] if len(x) else x.reshape(-1),
    "scalar array": lambda x: np.array(1.0, x.dtype),
    "big-endian": lambda x: x.astype(">f4"),
    "masked": np.ma.masked_array,
    "record": lambda x: np.zeros(x.shape, [("a", "f4")]),
    "long double": lambda x: x.astype(np.longdouble),
    "more channels": lambda x: np.concatenate([x, x, x[..., :1]], -1),
    "dates": lambda x: np.zeros(x.shape, "M8[s]"),
    "a class": lambda x: np.ndarray,
}
HOST_ONLY = ("masked", "read-only", "overlapping itself", "big-endian", "long double", "record", "objects", "dates")


def frozen(x):
    x = np.array(x)
    x.flags.writeable = False
    return x


def overlapping(x):
    """As many numbers as x in one row's memory; None where x is one row."""
    rows = x.shape[:-1]
    return strided(np.zeros(x.shape, x.dtype), (*(0 for _ in rows), x.itemsize)) if x.size > x.shape[-1] else None


@dataclass(frozen=True)
class Bad:
    """A sound call, and what is wrong with it."""

    call: Call
    argument: str
    value: str
    gradient: bool = False


@st.composite
def bad(draw, machine):
    call = draw(calls(machine, plants=False, edges=False))
    names = [name for name in BAD if name in call.takes]
    argument = draw(st.sampled_from([*names, *call.declared.arrays]))
    value = draw(st.sampled_from([*BAD.get(argument, FOR_ARRAYS)]))
    return Bad(call, argument, value, draw(st.booleans()) and argument not in ("out", "backend"))


@holds_for(bad, seconds=2.0)
def bad_arguments(case, machine):
    """Only ContractError, and neither `out` nor an input is written."""
    call, argument = case.call, case.argument
    if argument in ("cu_seqlens", "mask"):
        call = replace(call, B=1, masked=None, lengths=None)
    if argument == "initial_state":
        call = replace(call, initial="float32")
    if argument in ("chunk_size", "materialize"):
        call = replace(call, mode="chunk")
    arrays, arguments = given(call, machine)
    shape = swap_heads(np.empty(call.shape(call.declared.out)), call.declared.out, call.layout).shape
    out = machine.asarray(np.full(shape, 7, DTYPES[call.dtype]))
    if not case.gradient:
        arguments["out"] = out
    if argument in call.declared.arrays:
        at = list(call.declared.arrays).index(argument)
        right = machine.tohost(arrays[at])
        value = FOR_ARRAYS[case.value](right)
        arrays[at] = value = carried(machine, value, case.value)
        if value is None and argument == "gv":
            raise Refused  # which may be left out
    else:
        value = BAD[argument][case.value]
        if callable(value) and argument != "feature_map" and value is not complex:
            right = (
                np.zeros(shape, DTYPES[call.dtype])
                if argument == "out"
                else flat(call.states())[0]
                if argument == "initial_state"
                else None
            )
            value = value(call.T, call.H, right)
        if value is None and argument not in ("layout", "mode", "backend"):
            raise Refused
        arguments[argument] = carried(machine, value, case.value)
    if fits(call, argument, case.value):
        raise Refused
    before = [machine.tohost(x).copy() if hasattr(x, "strides") and not hasattr(x, "mask") else None for x in arrays]
    function = call.function
    if argument == "backend":  # the machine gives it itself otherwise
        run = function
    else:

        def run(*a, **k):
            return machine.run(*((vjp, function) if case.gradient else (function,)), *a, **k)

    try:
        run(*arrays, **arguments)
    except ContractError:
        pass
    else:
        raise Fault(f"{argument}: {case.value} is accepted", f"by {call.op}")
    require((machine.tohost(out) == 7).all(), f"{argument}: {case.value} is refused, but out was written")
    for x, y in zip(arrays, before):
        require(y is None or y.dtype == object or same_bits(machine.tohost(x), y), "an input was written")
    raise Refused


def carried(machine, value, word):
    """`value` where the machine computes, if it can be there at all."""
    if (
        isinstance(value, np.ndarray)
        and type(value) is np.ndarray
        and value.dtype in DTYPES.values()
        and word not in HOST_ONLY
    ):
        return there(machine, value)
    return value


def fits(call, argument, word):
    """Of the bad values, those that happen to be right for this call."""
    if argument == "cu_seqlens":
        return call.T == 0 or (word == "bools" and call.T == 1)
    if (argument, word) == ("v", "more channels"):
        return True
    return word == "list" and argument == "gamma" and call.H == 99


@dataclass(frozen=True)
class Shared:
    """A call whose `out` is memory that it also reads."""

    call: Call
    argument: str
    shift: int = 0


@st.composite
def shared(draw, machine):
    call = draw(calls(machine, plants=False, edges=False))
    names = [
        *call.declared.arrays,
        *(["initial_state"] if call.declared.state else []),
        *(["mask"] if "mask" in call.takes else []),
    ]
    return Shared(call, draw(st.sampled_from(names)), draw(st.integers(-3, 3)))


@holds_for(shared, machines=("numpy", "emulated", "cupy"), seconds=2.0)
def out_that_is_read(case, machine):
    """Refused, or the same numbers as without the overlap."""
    call = replace(
        case.call,
        memory="plain",
        layout="bhtd",
        initial=case.call.initial or "float32",
        groups=1,
        masked=0.3 if case.argument == "mask" else case.call.masked,
        lengths=None if case.argument == "mask" else case.call.lengths,
    )
    if not call.declared.state:
        call = replace(call, initial=None)
    arrays, arguments = given(call, machine)
    try:
        wanted = flat(machine.run(call.function, *arrays, **arguments))[0].copy()
    except NotSupported as error:
        raise Refused from error
    named = dict(zip(call.declared.arrays, arrays)) | arguments
    x = flat(named[case.argument])[0]
    memory = machine.asarray(np.zeros(128 + max(x.nbytes, wanted.nbytes) * 2, np.uint8))
    start = 64
    inside = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    inside[...] = x
    begin = start + case.shift * wanted.itemsize
    out = memory[begin : begin + wanted.nbytes].view(wanted.dtype).reshape(wanted.shape)
    if case.argument in arguments:
        one = arguments[case.argument]
        arguments[case.argument] = (inside, *one[1:]) if isinstance(one, tuple) else inside
    else:
        arrays[list(call.declared.arrays).index(case.argument)] = inside
    kept = memory.copy()
    try:
        machine.run(call.function, *arrays, out=out, **arguments)
    except ContractError as error:
        require((memory == kept).all(), "overlap: refused, but written")
        raise Refused from error
    apart = max(start, begin) >= min(start + x.nbytes, begin + wanted.nbytes)
    require(
        apart or same_bits(machine.tohost(out), machine.tohost(wanted)),
        f"overlap: {case.argument} and out give wrong numbers",
        call.op,
    )
