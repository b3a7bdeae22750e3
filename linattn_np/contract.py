"""The checks of a call: `Op.bind` checks it against the operator's declaration and returns a `Problem`.

Only this module and `argument_checks` read the caller's shapes, dtypes, strides and layouts. All other modules trust
the problem. The methods named like an argument check that argument and return what the problem has of it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter
from types import MappingProxyType

import numpy as np

from . import aliasing, array_kinds, value_heads, varlen, warnings_of_misuse
from .argument_checks import Declaration, is_int, is_real
from .checked_calls import checked
from .conversions import copied_arrays, to_backend
from .errors import ContractTypeError
from .layouts import LAYOUTS, in_layout, swap_heads
from .messages import cast, kind_of, shown
from .precisions import PRECISIONS, current
from .problem import Problem
from .typing import DEFAULTS

SUB_CHUNK = 16  # chunks are made of sub-chunks of 16 tokens (GLA paper, section 4.3: secondary chunking)
CHUNK = 64  # tokens of a chunk by default
MOST_CHUNK = 1 << 30  # the most tokens of a chunk: sizes computed from it then stay in 64 bits


@dataclass(frozen=True, eq=False)
class Op(Declaration):
    """The declaration of an operator, with the checks of a whole call."""

    with_more: Op | None = None  # if the last array is optional: the declaration of a call that has it

    @cached_property
    def signature(self) -> inspect.Signature:
        """The signature of its public function."""
        keywords = [*filter(None, [self.second_result]), *self.keywords.__annotations__]
        return inspect.Signature(
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in self.arrays]
            + [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=None) for name in self.optional_arrays]
            + [Parameter(name, Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name)) for name in keywords]
        )

    @property
    def optional_arrays(self) -> list[str]:
        """The names of the arrays that a call may leave out."""
        return [] if self.with_more is None else [name for name in self.with_more.arrays if name not in self.arrays]

    def bind(self, inputs, as_given=False, **arguments) -> Problem:
        """The checked call, with arrays as backends take them (see `conversions`), or `as_given` by the caller."""
        problem, addresses = checked(self, inputs, arguments)
        if problem.out is not None or problem.options:  # a step's state and `pending`, which it writes, are options
            aliasing.check_aliasing(problem, addresses)
            self.check_contents(problem)
        if problem.warnings or problem.home == "host":
            warnings_of_misuse.warn_of_call(problem)
        return problem if as_given or not problem.is_transformed else to_backend(problem)

    def check(
        self,
        inputs,
        *,
        layout="bhtd",
        mode="auto",
        scale=None,
        initial_state=None,
        output_final_state=False,
        state_dtype=None,
        cu_seqlens=None,
        mask=None,
        reverse=False,
        state_v_first=False,
        chunk_size=None,
        materialize=None,
        precision=None,
        out=None,
        gradient=False,
        **options,
    ) -> Problem:
        """The checks that are the same for all calls with a key; returns the checked call. `options` are those of some
        operators alone, which a derived class has checked: they become the problem's."""
        self.one_of("layout", layout, LAYOUTS)
        views, library = self.native_views(inputs, layout)
        groups = self.groups(views, layout)
        sizes = self.sizes(views, layout, groups)
        dtype = self.dtype(views, library)
        spans = self.spans(cu_seqlens, sizes)
        sizes["N"] = sizes["B"] * spans.count if "T" in sizes else sizes["B"]
        mode, chunk_size = self.route(mode, chunk_size, materialize)
        computed = np.dtype(np.float64 if dtype == np.float64 else np.float32)  # the dtype of the arithmetic
        state_dtype = self.state_dtype(state_dtype, computed)
        home = array_kinds.home(next(iter(views.values())))
        state_v_first = self.flag("state_v_first", state_v_first)  # before it is used: an array has no truth value
        initial_state = self.initial_state(initial_state, sizes, home, state_v_first, groups)
        out = self.output(out, sizes, dtype, layout, home, groups)
        mask = self.mask(mask, sizes, home, cu_seqlens)
        # Backends compute the heads of a group as one head with the columns of all; above, V is the caller's.
        if groups > 1:
            sizes["V"] *= groups
        spans = spans.backwards() if self.flag("reverse", reverse) else spans
        problem = Problem(
            op=self,
            arrays=MappingProxyType(views),
            sizes=MappingProxyType(sizes),
            options=MappingProxyType(options),
            dtype=dtype,
            spans=spans,
            varlen=cu_seqlens is not None,
            layout=layout,
            reverse=bool(reverse),
            state_v_first=state_v_first,
            mode=mode,
            chunk_size=chunk_size,
            materialize=materialize,
            precision=self.one_of("precision", precision, (None, *PRECISIONS)) or current(),
            scale=self.scale(scale, sizes, computed),
            initial_state=initial_state,
            output_final_state=self.flag("output_final_state", output_final_state),
            state_dtype=state_dtype,
            out=out,
            home=home,
            kind=library,
            example=next(iter(inputs)),
            gradient=gradient,
            groups=groups,
            mask=mask,
        )
        return problem.replace(
            copied_arrays=copied_arrays(problem), warnings=warnings_of_misuse.layout_warnings(problem)
        )

    def check_contents(self, problem):
        """The checks of values in which calls with the same key may differ; derived classes override it."""

    def taken_apart(self, positional, named, signature=None):
        """(the declaration, the arrays, {name: value} of the other arguments) of a call with these arguments.

        signature : of the function that was called, by default the public function's

        TypeError for a missing or unknown argument, as Python has it.
        """
        arguments = bound_arguments(self.name, signature or self.signature, positional, named).arguments
        optional = [arguments.pop(name, None) for name in self.optional_arrays]
        op, arrays = self.fitting((*(arguments.pop(name) for name in self.arrays), *optional))
        return op, arrays, arguments

    def fitting(self, arrays):
        """(the declaration of a call with these arrays, the arrays without an optional one that is None)."""
        if len(arrays) == len(self.arrays):
            return self, arrays
        return (self, arrays[:-1]) if arrays[-1] is None else (self.with_more, arrays)

    def native_views(self, inputs, layout):
        """({name: the caller's array as a view [B, H, T, ...]}, the library of all arrays); all must be of one library
        and on one device."""
        views, kinds, homes = {}, {}, {}
        for name, x in zip(self.arrays, inputs, strict=True):
            native, kinds[name] = self.native(name, x)
            homes[name] = array_kinds.home(native)
            views[name] = self.logical(name, native, self.arrays[name], layout)
        for by_name, what in ((kinds, "library"), (homes, "device")):
            if len(set(by_name.values())) > 1:
                values = ", ".join(f"{name}: {value}" for name, value in by_name.items())
                self.refuse("arrays", f"must share one {what}, got {values}", ContractTypeError)
        return views, next(iter(kinds.values()))

    def groups(self, views, layout) -> int:
        """The number of heads of v that share each head of the other arrays. It is 1 if v has as many heads, and if the
        others differ in theirs: `sizes` then raises the error."""
        if not self.state or self.out != "B H T V":
            return 1
        heads = {
            view.shape[self.arrays[name].split().index("H")]
            for name, view in views.items()
            if not value_heads.has_columns(self.arrays[name])
        }
        v = self.value
        H, HV = next(iter(heads)), views[v].shape[1]
        if len(heads) > 1 or H == 0 or HV <= H:
            return 1
        if HV % H:
            shape = tuple(swap_heads(views[v], self.arrays[v], layout).shape)
            expected = in_layout(self.arrays[v], layout)
            self.refuse(v, f"has {HV} heads, expected H={H} or a multiple of it; {v} is {shape}, expected {expected}")
        return HV // H

    def sizes(self, views, layout, groups=1) -> dict[str, int]:
        """The size of every axis, on which all arrays must agree."""
        sizes: dict[str, int] = {}
        for name, view in views.items():
            for axis, size in zip(self.callers_axes(name, groups).split(), view.shape):
                if sizes.setdefault(axis, size) != size:
                    self.refuse_sizes(views, layout, axis, groups)
        for axis in ("K", "V"):
            if sizes.get(axis) == 0:
                name = next(name for name, axes in self.arrays.items() if axis in axes.split())
                self.refuse(name, f"has {axis}=0, expected at least 1")
        return sizes

    def callers_axes(self, name, groups) -> str:
        """The axes of the caller's array `name`, in which the heads of grouped values are HV."""
        return value_heads.grouped_axes(self.arrays[name], groups)

    def refuse_sizes(self, views, layout, axis, groups):
        """Raises the error for an axis on which arrays differ: about an array whose size most others do not have."""
        axes = {name: self.callers_axes(name, groups).split() for name in views}
        axis_sizes = {name: view.shape[axes[name].index(axis)] for name, view in views.items() if axis in axes[name]}
        usual = Counter(axis_sizes.values()).most_common(1)[0][0]
        name = next(name for name, size in axis_sizes.items() if size != usual)
        shape = tuple(swap_heads(views[name], self.arrays[name], layout).shape)
        self.refuse(
            name,
            f"has {axis}={axis_sizes[name]}, but {axis}={usual} elsewhere; {name} is {shape}, "
            f"expected {in_layout(self.callers_axes(name, 1), layout)}",
        )

    def dtype(self, views, library):
        """The dtype of the call: the most frequent one of the arrays that are neither gates nor results of stages. All
        other arrays must have that dtype or one that fits it. `library`: the caller's, for the advice in errors."""
        single = np.dtype(np.float32)
        for name, view in views.items():
            if view.dtype not in array_kinds.FLOATS:
                floats = ", ".join(str(f) for f in array_kinds.FLOATS)
                way_out = f": {cast(name, single, library)} is one" if view.dtype.kind in "biuf" else ""
                self.refuse(name, f"has dtype {view.dtype}, expected one of {floats}{way_out}", ContractTypeError)
        main_dtypes = [view.dtype for name, view in views.items() if name not in self.gates + self.computed]
        dtype = Counter(main_dtypes).most_common(1)[0][0]
        for name, view in views.items():
            allowed = {dtype} | ({single} if name in self.gates and dtype.itemsize == 2 else set())
            if name in self.computed:
                allowed = {dtype if dtype == np.float64 else single}
            if view.dtype not in allowed:
                way_out = cast(name, dtype if dtype in allowed else single, library)
                expected = " or ".join(sorted(map(str, allowed)))
                self.refuse(name, f"has dtype {view.dtype}, expected {expected}: {way_out} is one", ContractTypeError)
        return dtype

    def spans(self, cu_seqlens, sizes) -> varlen.Spans:
        """The token range of each sequence; without `cu_seqlens` the one range of all B rows."""
        if cu_seqlens is None:
            return varlen.dense(sizes.get("T", 1))
        if sizes["B"] != 1:
            self.refuse("cu_seqlens", f"packs all sequences into one row, so B must be 1, got B={sizes['B']}")
        try:
            return varlen.parse(cu_seqlens, sizes["T"])
        except ValueError as error:
            self.refuse("cu_seqlens", str(error))

    def route(self, mode, chunk_size, materialize):
        """(mode, chunk_size), after the checks of these three arguments, which depend on each other."""
        self.one_of("mode", mode, ("auto", *self.modes))
        if len(self.modes) == 1:
            (mode,) = self.modes
        chunked = mode in ("auto", "chunk", "staged")
        if chunk_size is not None:
            if not chunked:
                self.refuse("chunk_size", f"has no meaning in mode {mode!r}")
            if not is_int(chunk_size) or not SUB_CHUNK <= chunk_size <= MOST_CHUNK or chunk_size % SUB_CHUNK:
                self.refuse(
                    "chunk_size",
                    f"is {shown(chunk_size)}, expected a positive multiple of {SUB_CHUNK}, at most {MOST_CHUNK}",
                )
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

    def scale(self, scale, sizes, computed) -> float:
        """The scale; by default K ** -0.5, or 1.0 for an operator without such an axis."""
        if scale is None:
            return sizes[self.feature] ** -0.5 if self.feature in sizes else 1.0
        if not is_real(scale):
            self.refuse("scale", f"is {shown(scale)}, expected a finite number or None", ContractTypeError)
        if not abs(scale) <= float(np.finfo(computed).max):  # nor is NaN
            self.refuse("scale", f"is {shown(scale)}, expected a finite number in {computed}, or None")
        return float(scale)

    def initial_state(self, state, sizes, home, v_first, groups):
        """A tuple with an array for each part of the state, as the caller gave them, or None."""
        if state is None:
            return None
        parts = state if isinstance(state, tuple) else (state,)
        if len(parts) != len(self.state):
            self.refuse("initial_state", f"has {len(parts)} parts, expected {len(self.state)}", ContractTypeError)
        return self.placed_states("initial_state", parts, sizes, home, v_first, groups)

    def state_dtype(self, wanted, computed):
        """The dtype of the final state; by default that of the arithmetic."""
        if wanted is None:
            return computed
        try:
            wanted = np.dtype(wanted)
        except TypeError:
            self.refuse("state_dtype", f"is {shown(wanted)}, expected a float dtype", ContractTypeError)
        if wanted not in array_kinds.FLOATS:
            self.refuse(
                "state_dtype",
                f"is {wanted}, expected one of " + ", ".join(str(f) for f in array_kinds.FLOATS),
                ContractTypeError,
            )
        return wanted

    def output(self, out, sizes, dtype, layout, home, groups):
        """The caller's array `out` as [B, H, T, V], or None."""
        if out is None:
            return None
        if array_kinds.kind(out) not in ("numpy", "cupy"):
            self.refuse("out", f"is a {kind_of(out)}, expected a NumPy or CuPy array", ContractTypeError)
        native, _ = self.native("out", out)
        view = self.logical("out", native, self.out, layout)
        view = self.placed("out", view, value_heads.grouped_axes(self.out, groups), sizes, home)
        if view.dtype != dtype:
            self.refuse("out", f"has dtype {view.dtype}, expected {dtype}", ContractTypeError)
        self.writable("out", view, home)
        return view

    def mask(self, mask, sizes, home, cu_seqlens):
        """The mask [B, T] of bools on the device of the arrays, or None."""
        if mask is None:
            return None
        if cu_seqlens is not None:
            self.refuse("mask", "cannot be combined with cu_seqlens, whose sequences have no padding")
        return self.placed("mask", mask, "B T", sizes, home, (np.dtype(bool),))


def bound_arguments(name, signature, positional, named) -> inspect.BoundArguments:
    """The call's bound arguments; a TypeError begins with the function's name, as Python's own do."""
    try:
        return signature.bind(*positional, **named)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
