"""What benchmarks/run.py and benchmarks/sweep.py measure: calls by operator, sizes, dtype, gate and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import peers

import linattn_np
from linattn_np.array_kinds import BFLOAT16
from linattn_np.declarations import GLA_VALUE_GATE, STEPS
from linattn_np.ops import OPS

DECLARED = {op.name: op for op in (*OPS, GLA_VALUE_GATE, *STEPS)}
SINGLE = np.dtype(np.float32)
DTYPES = {"float32": SINGLE, "tf32": SINGLE, "float16": np.dtype(np.float16), "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Case:
    op: str
    B: int
    T: int
    H: int
    D: int  # K and V
    dtype: str = "bfloat16"  # one of DTYPES; tf32 is float32 with precision="tf32"
    gate: str = "logsigmoid"
    sequences: int = 0  # packed into the row, where it is a row of packed sequences
    backward: bool = False  # the pullback alone, after a forward pass that is not timed
    V: int | None = None  # where it is not D
    memory: str = "aligned"  # how the arrays lie, one of MEMORY

    @property
    def columns(self) -> int:
        return self.D if self.V is None else self.V

    @property
    def options(self) -> dict:
        """Keywords of a call that say how it is computed."""
        return {"precision": self.dtype} if self.dtype == "tf32" else {}

    @property
    def function(self):
        return getattr(linattn_np, self.op.split()[0])  # of "gla with gv" too

    @property
    def step(self) -> bool:
        return self.op.endswith("_step")

    @property
    def kind(self) -> str:
        return "step" if self.step else "backward" if self.backward else "forward"

    @property
    def fields(self) -> dict:
        """What a row says of it."""
        return {
            "op": self.op,
            "pass": self.kind,
            "B": self.B,
            "T": self.T,
            "H": self.H,
            "K": self.D,
            "V": self.columns,
            "dtype": self.dtype,
            "gate": self.gate if DECLARED[self.op].decays else None,
            "sequences": self.sequences,
            "peer": peers.name(self.op),
        }

    def __str__(self):
        packed = f" in {self.sequences} sequences" * bool(self.sequences)
        gate = f" {self.gate}" * bool(DECLARED[self.op].decays)
        wide = f"x{self.V}" if self.V else ""
        lies = "" if self.memory == "aligned" else f" {self.memory}"
        return (
            f"{self.op} {self.B},{self.T},{self.H},{self.D}{wide}{packed} {self.dtype}{gate}{lies}"
            f"{' backward' * self.backward}"
        )


SHAPES = (
    (4, 4096, 64, 128),
    (8, 4096, 32, 64),
    (1, 8192, 96, 128),
    (2, 16384, 16, 128),
    (1, 131072, 16, 128),
    (4, 2048, 16, 128),
    (8, 1024, 8, 64),
)
WIDE = (8, 2048, 32, 256)
FEW = (1, 32768, 16, 128)  # heads: sequences are cut
HEADLINE = (*SHAPES[:4], FEW, SHAPES[-2])  # shapes of the gates that models have, forward and backward
MEMORY = ("aligned", "bthd", "off by 8 bytes", "slices")


def cases_of_gpu(quick):
    """In the order in which fla has least to tune anew."""
    gated = ("gla", "rwkv6")
    for B in (1, 32) if quick else (1, 32, 256, 1024):
        yield from (Case(f"{op}_step", B, 1, 32, 64) for op in gated)
    if quick:
        yield from (Case(op, *shape) for shape in SHAPES[-2:] for op in gated)
        return
    headline = [Case(op, *shape, gate=gate) for gate in ("trained", "weak") for shape in HEADLINE for op in gated]
    yield from headline
    yield from (replace(case, dtype="float16") for case in headline if case.gate == "trained")
    yield Case("rwkv6", 8, 4096, 32, 64, gate="model")
    yield from (Case(op, *shape) for shape in SHAPES for op in gated)
    yield from (Case(op, *SHAPES[0], gate=gate) for gate in ("strong", "all-20", "reset") for op in gated)
    single = [Case(op, *SHAPES[0], dtype=dtype, gate="trained") for dtype in ("float32", "tf32") for op in gated]
    yield from single
    yield from (Case(op, 1, 32768, 32, 128, sequences=64) for op in gated)
    yield from (Case(op, 64, 512, 32, 128) for op in gated)  # as many tokens, without packing
    family = ("simple_gla", "retention", "linear_attention")
    others = (*family, GLA_VALUE_GATE.name)
    yield from (Case(op, *SHAPES[0]) for op in family)
    yield from (Case(op, *SHAPES[-2]) for op in others)
    yield from (replace(case, dtype=dtype, backward=True) for dtype in ("bfloat16", "float16") for case in headline)
    yield from (replace(case, backward=True) for case in single)
    yield Case("rwkv6", 8, 4096, 32, 64, gate="model", backward=True)
    yield from (Case(op, *SHAPES[0], gate=gate, backward=True) for gate in ("logsigmoid", "reset") for op in gated)
    yield from (Case(op, *WIDE) for op in gated)
    yield from (Case(op, *WIDE, backward=True) for op in gated)
    yield from (Case(op, *SHAPES[-2], backward=True) for op in reversed(others))
    yield from (Case(op, *SHAPES[0], backward=True) for op in family)
    delta = {"gated_delta_rule": "trained", "kda": "trained", "rwkv7": "rwkv7"}  # with their gates
    shapes = (*SHAPES[:3], FEW, SHAPES[-2])
    for backward in (False, True):
        yield from (Case(op, *shape, gate=delta[op], backward=backward) for shape in shapes for op in delta)
    yield from (Case(f"{op}_step", B, 1, 64, 128, gate=delta[op]) for B in (1, 32, 512) for op in delta)


def cases_of_portable(quick):
    """What other cards than Hopper compute in the same way: every dtype, with the gates that models have."""
    shapes = HEADLINE[-1:] if quick else (SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[-2])
    dtypes = ("bfloat16",) if quick else ("bfloat16", "float32", "tf32", "float16")
    for backward in (False, True):
        for dtype in dtypes:
            yield from (Case(op, *shape, dtype, "trained", 0, backward) for shape in shapes for op in ("gla", "rwkv6"))
        yield from (Case("gla", *shape, gate="weak", backward=backward) for shape in shapes)


def cases_of_cpu(quick):
    T = 512 if quick else 2048
    yield from (Case(op.name, 1, T, 8, 64, dtype="float32") for op in (*OPS, GLA_VALUE_GATE))
    for B in (1, 32):
        yield from (Case(op.name, B, 1, 8, 64, dtype="float32") for op in STEPS)


def lengths(count, tokens, shortest=24, longest=2048):
    """Lengths of `count` sequences, many short and few long ones, in a random order."""
    more = tokens - count * shortest
    power = (count - 1) / (more / (longest - shortest) - 0.5) - 1  # so that the last one is the longest
    weights = np.linspace(0, 1, count) ** power
    bounds = np.round(more * np.cumsum(weights) / weights.sum()).astype(int)
    return np.random.default_rng(0).permutation(shortest + np.diff(bounds, prepend=0)).tolist()
