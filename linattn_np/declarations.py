"""The declarations of all operators, their one-token steps and the stages of the chunked form.

A declaration is an `Op`: the arrays with their axes, the gates, the state, the options, and the checks of arguments.
Public functions, the backends' equations and the planners refer to an operator by its declaration. The classes here
override checks of `contract.Op`, which describes them. Axes: batch B, heads H, heads of shared arrays HK, tokens T,
keys S of softmax attention, channels K of keys and V of values, sequences N.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from . import array_kinds, varlen
from .accepted_arrays import host_array
from .argument_checks import is_int, is_real
from .contract import CHUNK, Op
from .derived import KeyFromGate, RepeatedKeyHeads
from .errors import ContractTypeError, NotSupported
from .messages import kind_of, shown
from .summary import Transition
from .typing import (
    AttentionOptions,
    CombineOptions,
    DeltaRuleOptions,
    DeltaRuleStepOptions,
    GatedQkOptions,
    InterChunkOptions,
    LinearAttentionOptions,
    RetentionOptions,
    Rwkv7Options,
    StageOptions,
    StepOptions,
)

MEMBERS: list[Op] = []  # the gated family, complete where OPERATORS is made
GATED: list[Op] = []  # the members that backends compute; the other members are derived from these


def gated(op: Op) -> Op:
    """Registers a member of the gated family: S_t = diag(exp g_t) S_{t-1} + k_t v_t^T.

    A member's output reads S_{t-1} (`reads_before_write`) or S_t.
    """
    op = replace(op, transition=Transition.DIAGONAL)
    MEMBERS.append(op)
    if op.derived is None:
        GATED.append(op)
    return op


# The axes of an array with channels of keys, and {array: axes} of the arrays that several operators have.
TOKENS = "B H T K"
KEYS = {"q": TOKENS, "k": TOKENS}
QGV = {"q": TOKENS, "g": TOKENS, "v": "B H T V"}
QKV = KEYS | {"v": "B H T V"}


# -- arrays with fewer heads than the others ---------------------------------------------------------------------------
class SharedHeadsOp(Op):
    """The declaration of an operator whose arrays named in `shared` may have HK heads, a divisor of the others' H.

    Head h of the others reads head ``h // (H // HK)`` of the shared arrays. A derived class has `refuse_heads(H, HK)`,
    which raises the error for an H that HK does not divide.
    """

    shared: ClassVar[tuple[str, ...]]

    def groups(self, views, layout):
        return 1  # heads are never folded into the columns of v

    def callers_axes(self, name, groups):
        caller_axes = super().callers_axes(name, groups)
        return caller_axes.replace("H", "HK") if name in self.shared else caller_axes

    def sizes(self, views, layout, groups=1):
        sizes = super().sizes(views, layout, groups)
        H, HK = sizes["H"], sizes["HK"]
        if H % HK if HK else H:
            self.refuse_heads(H, HK)
        return sizes


# -- gated operators ---------------------------------------------------------------------------------------------------
class ValueGateOp(Op):
    """The declaration of `gla` with `gv`, a gate of the value channels beside that of the key channels."""

    def route(self, mode, chunk_size, materialize):
        if materialize is not None:
            self.refuse("materialize", "has no meaning with gv")
        return super().route(mode, chunk_size, materialize)


GLA_VALUE_GATE = ValueGateOp(
    "gla with gv",
    QKV | {"g": "B H T K", "gv": "B H T V"},
    gates=("g", "gv"),
    modes=("recurrent", "chunk"),
    transition=Transition.DIAGONAL,
)
GLA = gated(Op("gla", QKV | {"g": "B H T K"}, gates=("g",), with_more=GLA_VALUE_GATE))
RWKV6 = gated(
    Op(
        "rwkv6",
        {"r": "B H T K", "k": "B H T K", "v": "B H T V", "w": "B H T K", "u": "H K"},
        gates=("w", "u"),
        reads_before_write=True,
    )
)
KEY_OF_HGRN2 = KeyFromGate(GLA, key=lambda g: -np.expm1(g), slope=lambda g: -np.exp(g))  # 1 - exp g
HGRN2 = gated(Op("hgrn2", QGV, gates=("g",), derived=KEY_OF_HGRN2))


class SimpleGlaOp(SharedHeadsOp):
    """The declaration of an operator with one decay per token and head.

    q and k may have fewer heads than v and g, as in Mamba-2; or q, k and g may have fewer heads than v.
    """

    shared = ("q", "k")
    groups = Op.groups  # folds value heads that share q, k and g into the columns of v

    def check(self, inputs, **arguments):
        problem = super().check(inputs, **arguments)
        H, HK = problem.shape("H HK")
        return problem if H == HK else problem.replace(op=SIMPLE_GLA_SHARED)

    def refuse_heads(self, H, HK):
        self.refuse("g", f"and v have {H} heads, expected as many as q and k, {HK}, or a multiple of it")


SIMPLE_GLA = SimpleGlaOp("simple_gla", QKV | {"g": "B H T"}, gates=("g",), transition=Transition.SCALAR)
SIMPLE_GLA_SHARED = replace(SIMPLE_GLA, derived=RepeatedKeyHeads(SIMPLE_GLA))


class RetentionOp(Op):
    """The declaration of retention, whose decay is a constant of each head: an option of the problem, `log_decay`, and
    no array."""

    def check(self, inputs, *, gamma=None, **arguments):
        problem = super().check(inputs, **arguments)
        return problem.replace(options=problem.options | {"log_decay": self.log_decay(gamma, problem.sizes["H"])})

    def log_decay(self, gamma, heads) -> np.ndarray:
        """log(gamma), [H] float64 on the host; -inf where gamma is 0.

        RetNet's decays 1 - 2^(-5 - h) of heads h >= 20 round to 1 in float32; their logarithms keep all digits.
        """
        if gamma is None:
            return np.log1p(-(2.0 ** (-5.0 - np.arange(heads))))
        if not isinstance(gamma, (int, float, list, tuple, np.ndarray, np.floating)) or isinstance(gamma, bool):
            self.refuse("gamma", f"is a {kind_of(gamma)}, expected host numbers", ContractTypeError)
        decays = host_array(gamma)
        if decays is None:
            self.refuse("gamma", f"is {shown(gamma)}, expected host numbers", ContractTypeError)
        decays = decays.astype(np.float64)
        if decays.shape not in ((), (heads,)):
            self.refuse("gamma", f"is {decays.shape}, expected [H] = ({heads},) or one number")
        if not ((decays >= 0) & (decays <= 1)).all():
            self.refuse("gamma", f"is {shown(gamma)}, expected decays between 0 and 1")
        with np.errstate(divide="ignore"):
            return np.broadcast_to(np.log(decays), (heads,))

    @staticmethod
    def decay_over(log_decay, tokens):
        """gamma^tokens, [H] float64; 1 over no tokens, also where gamma is 0."""
        return np.exp(tokens * log_decay) if tokens else np.ones_like(log_decay)


RETENTION = RetentionOp("retention", QKV, transition=Transition.SCALAR, keywords=RetentionOptions)
FEATURE_MAPS = (None, "elu", "relu", "exp")


class LinearAttentionOp(Op):
    """The declaration of linear attention. With `normalize` its state has a second part, the keys' sum z [N, H, K].

    Options of the problem: `feature_map`, a name in FEATURE_MAPS, and `normalize`.
    """

    def check(self, inputs, *, feature_map=None, normalize=False, **arguments):
        self.one_of("feature_map", feature_map, FEATURE_MAPS)
        normalize = self.flag("normalize", normalize)
        declared = NORMALIZED if normalize and self.state == ("N H K V",) else self
        return super(LinearAttentionOp, declared).check(  # `Op.check` of `declared`
            inputs, feature_map=feature_map, normalize=normalize, **arguments
        )


LINEAR_ATTENTION = LinearAttentionOp("linear_attention", QKV, keywords=LinearAttentionOptions)
NORMALIZED = replace(LINEAR_ATTENTION, state=("N H K V", "N H K"))


# -- the delta rule ----------------------------------------------------------------------------------------------------
class DeltaRuleOp(SharedHeadsOp):
    """The declaration of a delta rule: S_t = S' + beta k (v - S'^T k)^T, where S' is S_{t-1} times the decay, if any.

    Option of the problem: `qk_l2norm`, whether queries and keys are divided by their L2 norms.
    """

    shared = ("q", "k")

    def check(self, inputs, *, qk_l2norm=False, **arguments):
        problem = super().check(inputs, **arguments)
        return problem.replace(options=problem.options | {"qk_l2norm": self.flag("qk_l2norm", qk_l2norm)})

    def refuse_heads(self, H, HK):
        self.refuse("v", f"has {H} heads, expected as many as q and k, {HK}, or a multiple of it")


LEAST_SQUARE = 1e-6  # it is added to the square of a length that `qk_l2norm` divides by; in lengths.cuh, too
DELTA_RULES: list[Op] = []


def rank_one(op: Op) -> Op:
    """Registers an operator whose transition is a diagonal matrix plus a matrix of rank one."""
    op = replace(op, modes=("recurrent", "chunk"), transition=Transition.RANK_ONE)
    DELTA_RULES.append(op)
    return op


def delta_rule(name, **gates) -> Op:
    """Declares a delta rule whose arguments are q, k, v, `gates` (name to axes) and beta, the strength of a write."""
    arrays, keywords = QKV | gates | {"beta": "B H T"}, DeltaRuleOptions
    return rank_one(DeltaRuleOp(name, arrays, gates=(*gates, "beta"), strengths=("beta",), keywords=keywords))


DELTA_RULE = delta_rule("delta_rule")
GATED_DELTA_RULE = delta_rule("gated_delta_rule", g="B H T")
KDA = delta_rule("kda", g="B H T K")
RWKV7 = rank_one(
    Op(
        "rwkv7",
        {"r": TOKENS, "w": TOKENS, "k": TOKENS, "v": "B H T V", "a": TOKENS, "b": TOKENS},
        gates=("w",),
        keywords=Rwkv7Options,
    )
)


# -- softmax attention -------------------------------------------------------------------------------------------------
class SoftmaxAttentionOp(SharedHeadsOp):
    """The declaration of softmax attention: H heads of T queries attend to HK heads of S keys and values.

    With `return_lse` the log-sum-exp of each query's scores is a second result, declared as a part of the state.
    Options of the problem: `causal`; `window`, (left, right): how many keys a query sees on either side of its own
    position, -1 for no bound; `softcap`, 0 for none; `key_spans`, the keys of each sequence.
    """

    shared = ("k", "v")

    def check(
        self,
        inputs,
        *,
        causal=True,
        window=None,
        softcap=None,
        return_lse=False,
        cu_seqlens=None,
        cu_seqlens_k=None,
        dropout_p=0.0,
        block_table=None,
        **arguments,
    ):
        self.refuse_missing(dropout_p, block_table)
        declared = WITH_LSE.get(self, self) if self.flag("return_lse", return_lse) else self
        problem = super(SoftmaxAttentionOp, declared).check(  # `Op.check` of `declared`
            inputs, cu_seqlens=cu_seqlens, output_final_state=return_lse, **arguments
        )
        causal = self.flag("causal", causal)
        return problem.replace(
            options={
                "causal": causal,
                "window": self.window(window, causal, *problem.shape("T S")),
                "softcap": self.softcap(softcap),
                "key_spans": self.key_spans(cu_seqlens_k, problem),
            }
        )

    def refuse_missing(self, dropout_p, block_table):
        """Refuses FlashAttention's dropout and paged caches, which no backend supports."""
        if not is_real(dropout_p) or dropout_p != 0:
            self.refuse("dropout_p", f"is {shown(dropout_p)}, but there is no dropout: it must be 0", NotSupported)
        if block_table is not None:
            self.refuse(
                "block_table",
                "is given, but there are no paged caches: gather the pages, as in k_cache[block_table], and pack "
                "sequences of their own lengths with cu_seqlens_k",
                NotSupported,
            )

    def callers_axes(self, name, groups):
        axes = super().callers_axes(name, groups)
        return axes.replace("T", "S") if name in self.shared else axes

    def refuse_heads(self, H, HK):
        self.refuse("k", f"and v have {HK} heads, expected as many as q, H={H}, or a divisor of it")

    def window(self, window, causal, T, S):
        """The argument `window` as (left, right) integers; -1 also for a bound that excludes no key."""
        left, right = (-1, -1) if window is None else self.pair(window)
        if causal:
            right = 0
        return -1 if left >= S - 1 else left, -1 if right >= T - 1 else right

    def pair(self, window):
        """The checked argument `window` as two integers."""
        if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(is_int(x) and x >= -1 for x in window):
            self.refuse(
                "window",
                f"is {shown(window)}, expected (left, right), the keys seen on both sides of a query's own place, "
                "-1 for no bound",
            )
        return tuple(map(int, window))

    def softcap(self, softcap) -> float:
        if softcap is None:
            return 0.0
        if not is_real(softcap) or not 0 <= softcap < float("inf"):
            self.refuse("softcap", f"is {shown(softcap)}, expected a finite number above 0, or 0 or None for no cap")
        return float(softcap)

    def key_spans(self, cu_seqlens_k, problem) -> varlen.Spans:
        """The keys of each sequence. Without `cu_seqlens_k`: those at its queries' positions; all S if dense."""
        S = problem.sizes["S"]
        if not problem.varlen:
            if cu_seqlens_k is not None:
                self.refuse("cu_seqlens_k", "is given without cu_seqlens, which says where the queries' sequences are")
            return varlen.dense(S)
        if cu_seqlens_k is None:
            if problem.sizes["T"] != S:
                self.refuse("cu_seqlens_k", f"is missing: q has {problem.sizes['T']} tokens, k and v have {S}")
            return problem.spans
        try:
            spans = varlen.parse(cu_seqlens_k, S)
        except ValueError as error:
            self.refuse("cu_seqlens_k", str(error).replace("T=", "S="))
        if spans.count != problem.spans.count:
            self.refuse("cu_seqlens_k", f"has {spans.count} sequences, but cu_seqlens has {problem.spans.count}")
        return spans


SOFTMAX_SINKS = SoftmaxAttentionOp(
    "softmax_attention",
    QKV | {"sinks": "H"},
    gates=("sinks",),
    modes=("chunk",),
    state=(),
    keywords=AttentionOptions,
    second_result="return_lse",
)
SOFTMAX_ATTENTION = replace(SOFTMAX_SINKS, arrays=QKV, gates=(), with_more=SOFTMAX_SINKS)
WITH_LSE = {op: replace(op, state=("B H T",)) for op in (SOFTMAX_ATTENTION, SOFTMAX_SINKS)}
SOFTMAX = (*WITH_LSE, *WITH_LSE.values())  # with or without sinks, with or without the log-sum-exp


OPERATORS = (*MEMBERS, SIMPLE_GLA, RETENTION, LINEAR_ATTENTION, *DELTA_RULES, SOFTMAX_ATTENTION)


# -- one token, or a few -----------------------------------------------------------------------------------------------
MOST_PENDING = 8  # tokens, at most, that a step keeps beside the state until they are accepted


class StepOp(Op):
    """The declaration of a step, which updates the state in place.

    The state may be a pool; `slots` then names each sequence's row. With `pending` (speculative decoding) the arrays
    have an axis of tokens. These are kept in `pending`; the next call writes the first `accepted` of them to the state.
    All four are options of the problem.
    """

    @classmethod
    def of(cls, op: Op, keywords: type = StepOptions) -> StepOp:
        """The step of an operator: its arrays without their axis of tokens."""
        arrays = {name: axes.replace(" T", "") for name, axes in op.arrays.items()}
        return cls(
            f"{op.name}_step",
            arrays,
            out=op.out.replace(" T", ""),
            gates=op.gates,
            strengths=op.strengths,
            modes=("recurrent",),
            reads_before_write=op.reads_before_write,
            keywords=keywords,
            second_result="",
        )

    @cached_property
    def of_several(self) -> StepOp:
        """The declaration of a step of several tokens."""
        arrays = {name: axes.replace("B H", "B H T") for name, axes in self.arrays.items()}
        return replace(self, arrays=arrays, out=self.out.replace("B H", "B H T"))

    @cached_property
    def signature(self) -> inspect.Signature:
        arrays, state = len(self.arrays), inspect.Parameter("state", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(super().signature.parameters.values())
        return inspect.Signature([*parameters[:arrays], state, *parameters[arrays:]])

    def check(self, inputs, *, state=None, slots=None, pending=None, accepted=None, **arguments):
        declared = self if pending is None else self.of_several
        problem = super(StepOp, declared).check(inputs, mode="recurrent", **arguments)
        B = problem.sizes["B"]
        pool_sizes = problem.sizes | {"N": B if slots is None else size_of_axis(state, 0)}  # N: rows of the state
        (axes,) = self.state
        state = self.placed("state", state, axes, pool_sizes, problem.home, use="written")
        self.writable("state", state, problem.home)
        slots = self.slots(slots, B, pool_sizes["N"], problem.home)
        pending = self.pending(pending, problem, pool_sizes, state.dtype)
        accepted = self.accepted(accepted, pending, problem)
        options = {"state": state, "slots": slots, "pending": pending, "accepted": accepted}
        return problem.replace(options=problem.options | options)

    def groups(self, views, layout):
        return 1  # every head has a state of its own

    def numbers(self, K, V) -> tuple[int, ...]:
        """How many numbers `pending` keeps of a token, part by part: decays (K or 1), written keys, written values.

        The other operators write one key and one value a token. RWKV-7 writes two: (k, v) and (b, S^T a).
        """
        keys = 2 if "a" in self.arrays else 1
        gates = K if any(self.arrays[name].endswith("K") for name in self.decays) else 1
        return gates, *keys * (K,), *keys * (V,)

    def pending(self, pending, problem, pool_sizes, state_dtype):
        """The checked argument `pending` [N, H, M, W]: M tokens of W numbers each, N rows as the state has; or None."""
        if pending is None:
            return None
        T, K, V = problem.shape("T K V")
        sizes = pool_sizes | {"M": size_of_axis(pending, 2), "W": sum(self.numbers(K, V))}
        double = np.dtype(np.float64)
        dtype = double if double in (problem.dtype, state_dtype) else np.dtype(np.float32)
        pending = self.placed("pending", pending, "N H M W", sizes, problem.home, (dtype,), use="written")
        self.writable("pending", pending, problem.home)
        if not 1 <= sizes["M"] <= MOST_PENDING:
            self.refuse("pending", f"has room for {sizes['M']} tokens, expected 1 to {MOST_PENDING}")
        if T > sizes["M"]:
            self.refuse("pending", f"has room for {sizes['M']} tokens, but the arrays have T={T}")
        return pending

    def accepted(self, accepted, pending, problem):
        """The checked argument `accepted`: [B] int64 on the state's device; or None, which accepts no token."""
        if accepted is None:
            return None
        if pending is None:
            self.refuse("accepted", "is given without pending, the memory of the tokens that it counts")
        return self.placed("accepted", accepted, "B", problem.sizes, problem.home, (np.dtype(np.int64),))

    def check_contents(self, problem):
        """Refuses counts in `accepted` below 0 or above M; counts on a device are not read."""
        accepted = problem.options["accepted"]
        if accepted is None or problem.home != "host" or not accepted.size:
            return
        M = problem.options["pending"].shape[2]
        if accepted.min() < 0 or accepted.max() > M:
            self.refuse("accepted", f"runs from {accepted.min()} to {accepted.max()}, expected 0 to {M} pending tokens")

    def slots(self, slots, count, rows_of_state, home):
        """The argument `slots` as [B] int64, B = `count`, or None. Host values are checked; values on a device are not
        read."""
        if slots is None:
            return None
        if array_kinds.kind(slots) == "cupy":
            if home == "host" or slots.shape != (count,) or slots.dtype != np.int64:
                self.refuse(
                    "slots",
                    f"is a CuPy array {slots.shape} {slots.dtype}, expected int64 [B] = ({count},) "
                    "beside device arrays",
                    ContractTypeError,
                )
            return slots
        rows = host_array(slots)
        if rows is None:
            self.refuse("slots", f"is {shown(slots)}, expected host integers [B] = ({count},)", ContractTypeError)
        if rows.shape != (count,) or (rows.dtype.kind not in "iu" and count):
            self.refuse("slots", f"is {rows.shape} {rows.dtype}, expected integers [B] = ({count},)")
        rows = rows.astype(np.int64)
        if count and not (0 <= rows.min() and rows.max() < rows_of_state):
            self.refuse(
                "slots", f"runs from {rows.min()} to {rows.max()}, but the state pool has {rows_of_state} slots"
            )
        if len(np.unique(rows)) != count:
            self.refuse("slots", "names a slot twice; two sequences cannot update one state")
        return rows


def size_of_axis(x, axis) -> int:
    """The size of an axis of x; 0 if x has no such axis."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return int(shape[axis]) if len(shape) > axis else 0


class DeltaRuleStepOp(StepOp, DeltaRuleOp):
    """The declaration of a step of the delta rule."""


GLA_STEP = StepOp.of(GLA)
RWKV6_STEP = StepOp.of(RWKV6)
GATED_STEPS = (GLA_STEP, RWKV6_STEP)
DELTA_RULE_STEP, GATED_DELTA_RULE_STEP, KDA_STEP = (
    DeltaRuleStepOp.of(op, DeltaRuleStepOptions) for op in (DELTA_RULE, GATED_DELTA_RULE, KDA)
)
RWKV7_STEP = StepOp.of(RWKV7)
DELTA_RULE_STEPS = (DELTA_RULE_STEP, GATED_DELTA_RULE_STEP, KDA_STEP, RWKV7_STEP)
STEPS = (*GATED_STEPS, *DELTA_RULE_STEPS)
STEPS_OF_SEVERAL = tuple(op.of_several for op in STEPS)


# -- the stages of the chunked form ------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class StageOp(Op):
    """The declaration of a stage. `chunk_size` and the sequences fix the axes C (a chunk's tokens) and NC (chunks)."""

    state: tuple[str, ...] = ()
    keywords: type = StageOptions
    second_result: str = ""
    pair: bool = False  # two results with the axes of `out`
    differentiable = False

    @cached_property
    def signature(self) -> inspect.Signature:
        parameters = super().signature.parameters
        return inspect.Signature(
            [x.replace(default=CHUNK) if x.name == "chunk_size" else x for x in parameters.values()]
        )

    def check(self, inputs, *, chunk_size=CHUNK, **arguments):
        if "exclusive" in arguments:
            arguments["exclusive"] = self.flag("exclusive", arguments["exclusive"])
        if chunk_size is None:
            self.refuse("chunk_size", "is None, expected a positive multiple of 16")
        problem = super().check(inputs, mode="staged", chunk_size=chunk_size, **arguments)
        fixed = {"C": problem.chunk_size, "NC": len(problem.spans.chunks(problem.chunk_size))}
        for axis, size in fixed.items():
            if problem.sizes.get(axis, size) != size:
                name = next(n for n, axes in self.arrays.items() if axis in axes.split())
                message = f"has {axis}={problem.sizes[axis]}, but chunk_size={problem.chunk_size} makes it {size}"
                self.refuse(name, message)
        return problem.replace(sizes=problem.sizes | fixed)


CHUNK_CUMSUM = StageOp("chunk_cumsum", {"g": TOKENS}, out=TOKENS, pair=True)
GATED_QK = StageOp(
    "gated_qk",
    {"q": TOKENS, "k": TOKENS, "b": TOKENS, "e": TOKENS},
    out=TOKENS,
    computed=("b", "e"),
    keywords=GatedQkOptions,
    pair=True,
)
INTER_CHUNK = StageOp(
    "inter_chunk",
    {"kg": TOKENS, "v": "B H T V", "b": TOKENS},
    out="B H NC K V",
    computed=("kg", "b"),
    state=("N H K V",),
    keywords=InterChunkOptions,
    second_result="output_final_state",
)
INTRA_CHUNK_BONUS = StageOp(
    "intra_chunk", KEYS | {"g": TOKENS, "u": "H K"}, out="B H T C", gates=("g", "u"), reads_before_write=True
)
INTRA_CHUNK = StageOp("intra_chunk", KEYS | {"g": TOKENS}, out="B H T C", gates=("g",), with_more=INTRA_CHUNK_BONUS)
COMBINE = StageOp(
    "combine",
    {"qg": TOKENS, "h": "B H NC K V", "A": "B H T C", "v": "B H T V"},
    computed=("qg", "h", "A"),
    keywords=CombineOptions,
)
STAGES = (CHUNK_CUMSUM, GATED_QK, INTER_CHUNK, INTRA_CHUNK, INTRA_CHUNK_BONUS, COMBINE)
