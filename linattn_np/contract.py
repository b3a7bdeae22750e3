"""What an operator takes: declared once as an `Op`, checked once by `Op.bind`, trusted afterwards as a `Problem`.

This is the only room that looks at shapes, dtypes, strides and layouts. A declaration names each array's axes,
`{"q": "B H T K", "v": "B H T V"}`; validation, output shapes, random test inputs and the docs read it from there.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from . import arrays as array_kinds
from . import doubts, foreign, grouped, masked, overlap, varlen
from .call_cache import MEMOS, likeness, weight
from .wording import kind_of, shown

LAYOUTS = ("bhtd", "bthd")
SUB_CHUNK = 16              # chunks are made of sub-chunks of 16 tokens (GLA paper, section 4.3: secondary chunking)
CHUNK = 64
MOST_CHUNK = 1 << 30        # tokens, so that no product of a table of chunks can wrap


class ContractError(ValueError):
    """An argument does not fit the operator's declaration; raised before anything runs."""


class ContractTypeError(ContractError, TypeError):
    """An argument is of a type, dtype or array library that the operator does not take."""


class NotSupported(ContractError):
    """No backend, or not the one named, can compute this problem; the message gives every reason."""


@dataclass(frozen=True, eq=False)
class Op:
    """The declaration of an operator: its name, its arrays with their axes, and what else it takes."""

    name: str
    arrays: Mapping[str, str]                   # {"q": "B H T K", ...} in the order of the call
    out: str = "B H T V"
    gates: tuple[str, ...] = ()                 # may stay float32 beside half-precision inputs
    computed: tuple[str, ...] = ()              # results of an earlier stage: float32, or float64 beside float64
    modes: tuple[str, ...] = ("recurrent", "chunk", "staged", "parallel")
    state: tuple[str, ...] = ("N H K V",)       # axes of each part of the recurrent state, N sequences
    reads_before_write: bool = False            # RWKV-6: o_t sees S_{t-1} and a bonus; GLA: o_t sees S_t
    feature: str = "K"                          # the axis that sets the default scale, K**-0.5
    with_more: Op | None = None                 # the declaration of a call with one more array, which may be left out

    def bind(self, inputs, **arguments) -> Problem:
        """A call as a `Problem` that can be trusted; the checks of a call like an earlier one are not repeated."""
        key = likeness(self, inputs, arguments)
        if key is None:
            problem = self.check(inputs, **arguments)
        else:
            memo = MEMOS.get(key)
            if memo is None:
                problem = self.check(inputs, **arguments).without_arrays()
                memo = MEMOS.keep(key, {"problem": problem}, weight(problem))
            problem = memo["problem"].with_arrays(inputs, arguments, memo)
        if problem.out is not None or problem.options:
            overlap.keep_apart(problem)
        if problem.doubts or problem.home == "host":
            doubts.tell(problem)
        return problem.taken() if problem.differs else problem

    def check(self, inputs, *, layout="bhtd", mode="auto", scale=None, initial_state=None, output_final_state=False,
             state_dtype=None, cu_seqlens=None, mask=None, reverse=False, state_v_first=False, chunk_size=None,
             materialize=None, out=None, gradient=False, **options) -> Problem:
        """All checks of a call that calls alike share, in one pass."""
        self.one_of("layout", layout, LAYOUTS)
        views, whose = self.native_views(inputs, layout)
        groups = self.groups(views, layout)
        sizes = self.sizes(views, layout, groups)
        dtype = self.dtype(views)
        spans = self.spans(cu_seqlens, sizes)
        sizes["N"] = sizes["B"] * spans.count if "T" in sizes else sizes["B"]
        mode, chunk_size = self.route(mode, chunk_size, materialize)
        state_dtype = self.state_dtype(state_dtype, dtype)
        home = array_kinds.home(next(iter(views.values())))
        state_v_first = self.flag("state_v_first", state_v_first)       # before it is asked: an array is no answer
        initial_state = self.initial_state(initial_state, sizes, home, state_v_first, groups)
        out = self.output(out, sizes, dtype, layout, home, groups)
        mask = self.mask(mask, sizes, home, cu_seqlens)
        if groups > 1:
            sizes["V"] *= groups
        spans = spans.backwards() if self.flag("reverse", reverse) else spans
        problem = Problem(
            op=self, arrays=views, sizes=sizes, dtype=dtype, spans=spans,
            varlen=cu_seqlens is not None, layout=layout, reverse=bool(reverse),
            state_v_first=state_v_first, mode=mode, chunk_size=chunk_size,
            materialize=materialize, scale=self.scale(scale, sizes, dtype), initial_state=initial_state,
            output_final_state=self.flag("output_final_state", output_final_state), state_dtype=state_dtype,
            out=out, options=options, home=home, kind=whose, example=next(iter(inputs)), gradient=gradient,
            groups=groups, mask=mask)
        return problem.but(refolded=problem.copied_to_fold(), doubts=doubts.of_layout(problem))

    def taken_apart(self, given):
        """(declaration, arrays, everything else) of a call's arguments by name."""
        op, rest = self, dict(given)
        if self.with_more is not None:
            *_, last = self.with_more.arrays
            if rest.get(last) is None:
                rest.pop(last, None)
            else:
                op = self.with_more
        return op, tuple(rest.pop(name) for name in op.arrays), rest

    def refuse(self, argument: str, complaint: str, error=ContractError):
        raise error(f"{self.name}: {argument} {complaint}")

    def one_of(self, argument: str, x, choices):
        """`x`, one of these words (or None)."""
        if not (x is None or isinstance(x, str)) or x not in choices:
            self.refuse(argument, f"is {shown(x)}, expected one of {', '.join(map(repr, choices))}")
        return x

    def flag(self, argument: str, x) -> bool:
        """`x`, True or False: the text 'False' is neither."""
        if not isinstance(x, (bool, np.bool_)):
            self.refuse(argument, f"is {shown(x)}, expected True or False", ContractTypeError)
        return bool(x)

    # -- arrays -----------------------------------------------------------------------------------------------------
    def native_views(self, inputs, layout):
        """The caller's arrays as [B, H, T, ...] views; all of one library and one device."""
        views, kinds, homes = {}, {}, {}
        for name, x in zip(self.arrays, inputs, strict=True):
            native, kinds[name] = self.native(name, x)
            homes[name] = array_kinds.home(native)
            views[name] = self.logical(name, native, self.arrays[name], layout)
        for found, what in ((kinds, "library"), (homes, "device")):
            if len(set(found.values())) > 1:
                self.refuse("arrays", f"must share one {what}, got "
                            + ", ".join(f"{n}: {f}" for n, f in found.items()), ContractTypeError)
        return views, next(iter(kinds.values()))

    def native(self, name, x):
        """`x` as a NumPy or CuPy array over the same memory, and whose it was."""
        whose = array_kinds.kind(x)
        if whose is None:
            self.refuse(name, f"is a {kind_of(x)}, expected an array", ContractTypeError)
        if obstacle := foreign.obstacle(x, whose, self.name):
            self.refuse(name, obstacle, ContractTypeError)
        try:
            return array_kinds.to_native(x, whose), whose
        except (TypeError, BufferError, ImportError, RuntimeError) as error:
            self.refuse(name, f"cannot be read: {error}", ContractTypeError)

    def logical(self, name, array, axes, layout):
        """`array` with its axes in the order `axes`; only arrays that have both H and T come in another layout."""
        if array.ndim != len(axes.split()):
            self.refuse(name, f"has {array.ndim} axes, shape {tuple(array.shape)}, expected {in_layout(axes, layout)}")
        return swap_heads(array, axes, layout)

    def groups(self, views, layout) -> int:
        """How many heads of v share each head of the other arrays, which agree on theirs; 1 where v is as they are."""
        if not self.state or self.out != "B H T V":
            return 1
        heads = {view.shape[self.arrays[name].split().index("H")] for name, view in views.items()
                 if not grouped.has_columns(self.arrays[name])}
        H, HV = next(iter(heads)), views["v"].shape[1]
        if len(heads) > 1 or H == 0 or HV <= H:
            return 1
        if HV % H:
            shape = tuple(swap_heads(views["v"], self.arrays["v"], layout).shape)
            self.refuse("v", f"has {HV} heads, expected H={H} or a multiple of it; v is {shape}, "
                             f"expected {in_layout(self.arrays['v'], layout)}")
        return HV // H

    def sizes(self, views, layout, groups=1) -> dict[str, int]:
        """The size of every axis, on which all arrays must agree."""
        sizes: dict[str, int] = {}
        for name, view in views.items():
            for axis, size in zip(grouped.callers(self.arrays[name], groups).split(), view.shape):
                if sizes.setdefault(axis, size) != size:
                    self.refuse_sizes(views, layout, axis, groups)
        for axis in ("K", "V"):
            if sizes.get(axis) == 0:
                name = next(name for name, axes in self.arrays.items() if axis in axes.split())
                self.refuse(name, f"has {axis}=0, expected at least 1")
        return sizes

    def refuse_sizes(self, views, layout, axis, groups):
        """Names the array that differs from what most have."""
        axes = {name: grouped.callers(self.arrays[name], groups).split() for name in views}
        found = {name: view.shape[axes[name].index(axis)] for name, view in views.items() if axis in axes[name]}
        usual = Counter(found.values()).most_common(1)[0][0]
        name = next(name for name, size in found.items() if size != usual)
        shape = tuple(swap_heads(views[name], self.arrays[name], layout).shape)
        self.refuse(name, f"has {axis}={found[name]}, but {axis}={usual} elsewhere; {name} is {shape}, "
                          f"expected {in_layout(self.arrays[name], layout)}")

    def dtype(self, views):
        for name, view in views.items():
            if view.dtype not in array_kinds.FLOATS:
                self.refuse(name, f"has dtype {view.dtype}, expected one of "
                            + ", ".join(str(f) for f in array_kinds.FLOATS), ContractTypeError)
        dtype = next(view.dtype for name, view in views.items() if name not in self.gates + self.computed)
        single = np.dtype(np.float32)
        for name, view in views.items():
            allowed = {dtype} | ({single} if name in self.gates and dtype.itemsize == 2 else set())
            if name in self.computed:
                allowed = {dtype if dtype == np.float64 else single}
            if view.dtype not in allowed:
                self.refuse(name, f"has dtype {view.dtype}, expected " + " or ".join(sorted(map(str, allowed))),
                            ContractTypeError)
        return dtype

    # -- the rest of a call -------------------------------------------------------------------------------------------
    def spans(self, cu_seqlens, sizes) -> varlen.Spans:
        if cu_seqlens is None:
            return varlen.dense(sizes.get("T", 1))
        if sizes["B"] != 1:
            self.refuse("cu_seqlens", f"packs all sequences into one row, so B must be 1, got B={sizes['B']}")
        try:
            return varlen.parse(cu_seqlens, sizes["T"])
        except ValueError as error:
            self.refuse("cu_seqlens", str(error))

    def route(self, mode, chunk_size, materialize):
        self.one_of("mode", mode, ("auto", *self.modes))
        chunked = mode in ("auto", "chunk", "staged")
        if chunk_size is not None:
            if not chunked:
                self.refuse("chunk_size", f"has no meaning in mode {mode!r}")
            if not is_int(chunk_size) or not SUB_CHUNK <= chunk_size <= MOST_CHUNK or chunk_size % SUB_CHUNK:
                self.refuse("chunk_size", f"is {shown(chunk_size)}, expected a positive multiple of {SUB_CHUNK}, "
                                          f"at most {MOST_CHUNK}")
            chunk_size = int(chunk_size)
        if materialize is None:
            return mode, chunk_size
        if not isinstance(materialize, (bool, np.bool_)):
            self.refuse("materialize", f"is {shown(materialize)}, expected True, False or None")
        if not chunked:
            self.refuse("materialize", f"has no meaning in mode {mode!r}")
        if not materialize and mode == "staged":
            self.refuse("materialize", "is False, but mode 'staged' keeps every chunk's state")
        return mode, chunk_size

    def scale(self, scale, sizes, dtype) -> float:
        if scale is None:
            return sizes[self.feature] ** -0.5 if self.feature in sizes else 1.0
        if not is_real(scale):
            self.refuse("scale", f"is {shown(scale)}, expected a finite number or None", ContractTypeError)
        computed = np.finfo(compute_dtype(dtype))
        if not abs(scale) <= float(computed.max):           # nor is NaN
            self.refuse("scale", f"is {shown(scale)}, expected a finite number in {computed.dtype}, or None")
        return float(scale)

    def initial_state(self, state, sizes, home, v_first, groups):
        """None, or a tuple with one array for each declared part, as the caller has it."""
        if state is None:
            return None
        parts = state if isinstance(state, tuple) else (state,)
        if len(parts) != len(self.state):
            self.refuse("initial_state", f"has {len(parts)} parts, expected {len(self.state)}", ContractTypeError)
        return self.placed_states("initial_state", parts, sizes, home, v_first, groups)

    def placed_states(self, name, parts, sizes, home, v_first, groups):
        """The state's parts, or their gradients, of exactly the sizes of the call and in the caller's order."""
        wanted = [grouped.callers(axes, groups) for axes in self.state]
        if v_first:
            wanted = [axes.replace("K V", "V K") for axes in wanted]
        return tuple(self.placed(name, part, axes, sizes, home) for part, axes in zip(parts, wanted))

    def placed(self, name, x, axes, sizes, home, dtypes=array_kinds.FLOATS):
        """`x` as a native array of exactly the sizes and the device of the call."""
        native, _ = self.native(name, x)
        wanted = tuple(sizes[axis] for axis in axes.split())
        if tuple(native.shape) != wanted:
            self.refuse(name, f"is {tuple(native.shape)}, expected [{', '.join(axes.split())}] = {wanted}")
        if native.dtype not in dtypes:
            self.refuse(name, f"has dtype {native.dtype}, expected "
                        + ("one of " if len(dtypes) > 1 else "") + ", ".join(map(str, dtypes)),
                        ContractTypeError)
        if array_kinds.home(native) != home:
            self.refuse(name, f"lives on {array_kinds.home(native)}, but the other arrays on {home}", ContractTypeError)
        return native

    def state_dtype(self, wanted, dtype):
        if wanted is None:
            return np.dtype(np.float64 if dtype == np.float64 else np.float32)
        try:
            wanted = np.dtype(wanted)
        except TypeError:
            self.refuse("state_dtype", f"is {shown(wanted)}, expected a float dtype", ContractTypeError)
        if wanted not in array_kinds.FLOATS:
            self.refuse("state_dtype", f"is {wanted}, expected one of "
                        + ", ".join(str(f) for f in array_kinds.FLOATS), ContractTypeError)
        return wanted

    def output(self, out, sizes, dtype, layout, home, groups):
        if out is None:
            return None
        if array_kinds.kind(out) not in ("numpy", "cupy"):
            self.refuse("out", f"is a {kind_of(out)}, expected a NumPy or CuPy array", ContractTypeError)
        native, _ = self.native("out", out)
        view = self.logical("out", native, self.out, layout)
        view = self.placed("out", view, grouped.callers(self.out, groups), sizes, home)
        if view.dtype != dtype:
            self.refuse("out", f"has dtype {view.dtype}, expected {dtype}", ContractTypeError)
        self.writable("out", view, home)
        return view

    def writable(self, name, x, home):
        if home == "host" and not x.flags.writeable:
            self.refuse(name, "is read-only, but it is written")
        if not overlap.elements_apart(x):
            self.refuse(name, f"has strides {x.strides} for shape {tuple(x.shape)}, by which elements may share memory")

    def mask(self, mask, sizes, home, cu_seqlens):
        """[B, T] bool where the arrays live, or None."""
        if mask is None:
            return None
        if cu_seqlens is not None:
            self.refuse("mask", "cannot be combined with cu_seqlens, whose sequences have no padding")
        return self.placed("mask", mask, "B T", sizes, home, (np.dtype(bool),))


@dataclass(frozen=True, eq=False)
class Problem:
    """One checked call. Arrays are [B, H, T, ...] views of the caller's memory, whatever layout they came in."""

    op: Op
    arrays: dict
    sizes: dict[str, int]                   # B, H, T, K, V as declared, and N, the number of sequences
    dtype: np.dtype                         # of q, k, v and o
    spans: varlen.Spans                     # token ranges; dense: the one range that all B rows share
    varlen: bool
    layout: str
    reverse: bool                           # arrays and spans run backwards in time, as the recurrence does
    state_v_first: bool                     # the caller's states are [N, H, V, K]
    mode: str
    chunk_size: int | None
    materialize: bool | None
    scale: float
    initial_state: tuple | None
    output_final_state: bool
    state_dtype: np.dtype
    out: object | None
    home: str                               # 'host' or 'cuda:<ordinal>'
    kind: str                               # the library whose arrays came in
    example: object = None                  # one of the arrays as the caller gave it
    gradient: bool = False                  # a vjp is asked for
    groups: int = 1                         # heads of v as the caller has them for each of ours, whose V is all theirs
    refolded: tuple[str, ...] = ()          # the caller's arrays for which that takes a copy
    mask: object | None = None              # [B, T], True for a token, False for padding
    doubts: tuple[str, ...] = ()            # what shapes alone make unlikely to be meant
    options: dict = field(default_factory=dict)
    memo: dict | None = None                # what backends remember for calls like this one, None where none is known

    def without_arrays(self) -> Problem:
        """What calls alike have in common; keeps no memory of the caller's alive."""
        own = {name: None if name == "state" or array_kinds.kind(x) == "cupy" else x for name, x in self.options.items()}
        return self.but(arrays={}, initial_state=None, out=None, mask=None, example=None, options=own)

    def with_arrays(self, inputs, arguments, memo) -> Problem:
        """A call like this one on arrays of its own, which need no conversion; `memo` is what all of them share."""
        out, initial_state, options = arguments.get("out"), arguments.get("initial_state"), self.options
        arrays = dict(zip(self.op.arrays, inputs))
        if self.layout != "bhtd":
            arrays = {name: swap_heads(x, self.op.arrays[name], self.layout) for name, x in arrays.items()}
            out = None if out is None else swap_heads(out, self.op.out, self.layout)
        if "state" in options:
            slots = options["slots"]
            options = {"state": arguments["state"], "slots": arguments.get("slots") if slots is None else slots}
        return self.but(arrays=arrays, initial_state=None if initial_state is None else (initial_state,), out=out,
                        example=inputs[0], options=options, mask=arguments.get("mask"), memo=memo)

    def but(self, **fields) -> Problem:
        """`dataclasses.replace` in a tenth of its time."""
        problem = object.__new__(Problem)
        vars(problem).update(vars(self), **fields)
        return problem

    def __getitem__(self, name):
        return self.arrays[name]

    @property
    def compute_dtype(self) -> np.dtype:
        return compute_dtype(self.dtype)

    def shape(self, axes: str) -> tuple[int, ...]:
        return tuple(self.sizes[axis] for axis in axes.split())

    def as_caller(self, native):
        """A native result in the caller's kind of array; few libraries have arrays that run backwards."""
        if self.kind not in ("numpy", "cupy") and any(stride < 0 for stride in native.strides):
            native = native.copy()
        return array_kinds.from_native(native, self.kind, self.example)

    def states_as_caller(self, parts):
        """State parts, or their gradients, as the caller has them: one array, or a tuple."""
        parts = tuple(map(self.as_caller, map(self.given_state, parts, self.op.state)))
        return parts if len(parts) > 1 else parts[0]

    def with_room(self) -> Problem:
        """Where time is reversed, this problem with memory for o as the caller goes through it, not as a backend does."""
        if not self.reverse or self.out is not None:
            return self
        like = next(self.backwards(x, axes) for x, axes in zip(self.arrays.values(), self.op.arrays.values()))
        o = np.empty_like(like, shape=self.shape(self.op.out), dtype=self.dtype)        # CuPy's for CuPy's
        return self.but(out=self.backwards(o, self.op.out))

    @property
    def differs(self) -> bool:
        """Whether the caller's arrays are others than a backend's."""
        return self.reverse or self.state_v_first or self.groups > 1 or self.mask is not None

    def taken(self) -> Problem:
        """This problem with the caller's arrays as a backend has them; without an `out` that only a copy can fill."""
        arrays = {name: self.taken_array(x, self.op.arrays[name], masked.nothing(self, name))
                  for name, x in self.arrays.items()}
        initial_state = self.initial_state and tuple(map(self.taken_state, self.initial_state, self.op.state))
        out = None
        if self.out is not None and "out" not in self.refolded:
            out = self.folded(self.backwards(self.out, self.op.out), self.op.out)
        mask = self.mask.copy() if self.mask is not None and self.gradient else self.mask   # a pullback reads it again
        return self.but(arrays=arrays, initial_state=initial_state, out=out, mask=mask)

    def taken_array(self, x, axes: str, nothing=0.0):
        """The caller's [B, H, T, ...] in the direction of `reverse`, with grouped heads as one, without its padding."""
        x = self.folded(self.backwards(x, axes), axes)
        if self.mask is None or "T" not in axes.split():
            return x
        return masked.without(x, self.padding, nothing)

    def copied_to_fold(self) -> tuple[str, ...]:
        """Of the caller's arrays with grouped heads, those whose memory has them apart."""
        if self.groups == 1:
            return ()
        state = self.initial_state and self.turned_state(self.initial_state[0])
        grown = [(name, x) for name, x in self.arrays.items() if grouped.has_columns(self.op.arrays[name])]
        return tuple(name for name, x in (*grown, ("initial_state", state), ("out", self.out))
                     if x is not None and not grouped.folds_in_place(x))

    def folded(self, x, axes: str):
        return grouped.fold(x, self.groups) if self.groups > 1 and grouped.has_columns(axes) else x

    def unfolded(self, x, axes: str):
        return grouped.unfold(x, self.groups) if self.groups > 1 and grouped.has_columns(axes) else x

    @property
    def padding(self):
        """[B, T], in the direction of `reverse`."""
        return ~(self.mask[:, ::-1] if self.reverse else self.mask)

    def backwards(self, array, axes: str):
        """`array` in the other direction of time, if that is what the caller asked for; a view, its own inverse."""
        return array[:, :, ::-1] if self.reverse and axes.split()[:3] == ["B", "H", "T"] else array

    def taken_state(self, part, axes: str):
        """A state's part, or its gradient, from the caller's order of sequences, axes and heads."""
        return self.folded(self.turned_state(part), axes)

    def given_state(self, part, axes: str):
        """The inverse."""
        return self.turned_state(self.unfolded(part, axes))

    def turned_state(self, part):
        """[N, H, K, V] <-> the caller's order of sequences and axes; a view, its own inverse."""
        part = part[::-1] if self.reverse and self.varlen else part
        return part.swapaxes(2, 3) if self.state_v_first and part.ndim == 4 else part

    def in_layout(self, native, axes: str):
        """An array of the problem as the caller has it; of padding nothing but 0 is handed out."""
        if self.mask is not None and "T" in axes.split():
            native = masked.overwrite(native, self.padding)
        return swap_heads(self.unfolded(self.backwards(native, axes), axes), axes, self.layout)

    def callers_sizes(self) -> dict[str, int]:
        """As `sizes`, but V as the caller has it."""
        return self.sizes | {"V": self.sizes["V"] // self.groups}

    def shares(self, count: int) -> list[Problem]:
        """The problem in so many, each with as many heads of every group."""
        if count == 1:
            return [self]
        V = self.sizes["V"] // count
        sizes, starts = self.sizes | {"V": V}, range(0, count * V, V)
        return [self.but(arrays={name: grouped.columns(x, axes, at, V) for (name, axes), x in
                                 zip(self.op.arrays.items(), self.arrays.values())},
                         initial_state=self.initial_state and tuple(
                             grouped.columns(part, axes, at, V) for part, axes in zip(self.initial_state, self.op.state)),
                         sizes=sizes, out=None, memo=None) for at in starts]


def compute_dtype(dtype) -> np.dtype:
    """What arrays of `dtype` are computed in."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def swap_heads(array, axes: str, layout: str):
    """[B, H, T, ...] <-> [B, T, H, ...] for arrays that have both axes; a view, its own inverse."""
    return array.swapaxes(1, 2) if layout == "bthd" and axes.split()[:3] == ["B", "H", "T"] else array


def in_layout(axes: str, layout: str) -> str:
    names = axes.split()
    if layout == "bthd" and names[:3] == ["B", "H", "T"]:
        names[1:3] = names[2], names[1]
    return f"[{', '.join(names)}]"


def is_int(x) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, (bool, np.bool_))


def is_real(x) -> bool:
    return isinstance(x, (numbers.Real, np.floating)) and not isinstance(x, (bool, np.bool_))
