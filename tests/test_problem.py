"""A problem never changes: calls alike share what was found out of the first one."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from reference import draw

from linattn_np import ContractError
from linattn_np.declarations import CHUNK_CUMSUM, COMBINE, GLA_STEP, RETENTION, RWKV6_STEP, STAGES
from linattn_np.ops import OPS
from linattn_np.problem import Problem

SIZES = {"B": 1, "H": 2, "T": 40, "K": 8, "V": 4, "C": 16, "NC": 3, "N": 1}
DECLARED = (*OPS, GLA_STEP, RWKV6_STEP, *STAGES)


def bound(op, **arguments):
    if op in (GLA_STEP, RWKV6_STEP):
        arguments = {"state": np.zeros((5, 2, 8, 4), np.float32), "slots": [3], **arguments}
    if op in STAGES:
        arguments = {"chunk_size": 16, **arguments}
    return op.bind(draw(op, np.random.default_rng(0), SIZES, np.float32), **arguments)


@pytest.mark.parametrize("op", DECLARED, ids=lambda op: "-".join((op.name, *op.arrays)))
def test_problems_are_read_only(op):
    for problem in (bound(op), bound(op), Problem(**vars(bound(op)))):
        for name in vars(problem):
            with pytest.raises(FrozenInstanceError):
                setattr(problem, name, None)
        for name in ("arrays", "sizes", "options"):
            with pytest.raises(TypeError):
                getattr(problem, name)["T"] = 1
        with pytest.raises(ValueError, match="read-only"):
            problem.spans.bounds[0] = 1


@pytest.mark.parametrize("op", DECLARED, ids=lambda op: "-".join((op.name, *op.arrays)))
def test_a_first_and_a_later_call_agree(op):
    first, later = bound(op), bound(op)
    assert first.memo is later.memo is not None
    assert first.sizes == later.sizes and first.options.keys() == later.options.keys()


def test_what_calls_alike_share_is_read_only():
    for shared in (
        bound(RETENTION).options["log_decay"],
        bound(RETENTION, gamma=[0.5, 0.9]).options["log_decay"],
        bound(GLA_STEP).options["slots"],
    ):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 0
    bound(GLA_STEP).options["state"][0] = 1  # the caller's


def test_another_problem_leaves_the_first():
    problem = bound(RETENTION)
    other = problem.replace(sizes=problem.sizes | {"T": 1}, scale=2.0)
    assert (problem.sizes["T"], other.sizes["T"], other.scale) == (40, 1, 2.0) and problem.scale != 2.0
    with pytest.raises(TypeError):
        other.sizes["T"] = 2


def test_a_stage_settles_its_chunks():
    for _ in range(2):
        problem = bound(CHUNK_CUMSUM)
        assert (problem.sizes["C"], problem.sizes["NC"]) == (16, 3)
        with pytest.raises(ContractError, match="chunk_cumsum: chunk_size is None"):
            bound(CHUNK_CUMSUM, chunk_size=None)
        with pytest.raises(ContractError, match="combine: h has NC=3, but chunk_size=32 makes it 2"):
            draw_of = draw(COMBINE, np.random.default_rng(0), SIZES | {"C": 32}, np.float32)
            COMBINE.bind(draw_of, chunk_size=32)
