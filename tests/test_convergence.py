"""`convergence.py` finds a copying thread that comes to what its warp does as a whole by itself, and nothing else."""

import convergence
import pytest
from convergence import ALWAYS, BEGIN, BRANCH, CALL, END_OF_COLLECTIVE, EXIT, MEET, RETURN, Instruction

COPY, BARRIER = 0x5B4, 0xB1D


def instruction(operation, jump=1, register=0, predicate=ALWAYS, divides=False):
    return Instruction(operation, predicate, register, jump, divides)


def found(*code):
    """What a thread behind the first copy comes to."""
    code = [one if isinstance(one, Instruction) else instruction(one) for one in code]
    return convergence.comes_to(code, [one.operation for one in code].index(COPY) + 1)


BEGUN, MET = instruction(BEGIN, register=1), instruction(MEET, register=1)
PAST_THE_COPY = instruction(BRANCH, jump=2, predicate=0)


def test_a_branch_that_ends_behind_the_barrier_is_found():
    assert found(BEGIN, PAST_THE_COPY, COPY, MEET, BARRIER, EXIT) is None
    assert found(BEGIN, PAST_THE_COPY, COPY, BARRIER, MEET, EXIT) == 3
    for meets in convergence.MEET_ALL:
        assert found(BEGIN, PAST_THE_COPY, COPY, meets, BARRIER, MEET, EXIT) is None
    assert found(COPY, EXIT, BARRIER) is None
    assert found(COPY, instruction(EXIT, predicate=3), BARRIER) == 2


def test_only_a_branch_begun_before_the_copy_ends_with_its_warp():
    assert found(BEGIN, PAST_THE_COPY, COPY, BEGUN, MET, BARRIER, MEET, EXIT) == 5
    assert found(BEGIN, PAST_THE_COPY, COPY, BEGUN, MET, MEET, BARRIER, EXIT) is None


def test_every_way_is_followed():
    over_the_end = instruction(BRANCH, jump=2, predicate=8)
    assert found(BEGIN, COPY, over_the_end, MEET, BARRIER, EXIT) == 4
    assert found(BARRIER, COPY, instruction(BRANCH, jump=-2)) == 0


def test_a_function_returns_behind_its_calls():
    call = instruction(CALL, jump=4)
    assert found(BEGIN, call, MEET, BARRIER, EXIT, COPY, RETURN) is None
    assert found(BEGIN, call, BARRIER, MEET, EXIT, COPY, RETURN) == 2


def test_what_threads_apart_do_in_turn_is_no_barrier():
    """The branch that is for threads apart leads to a collective: they take what follows one after the other."""
    divided = instruction(BRANCH, jump=3, divides=True)
    for begins in convergence.MEET_ALL:
        collective = instruction(begins, jump=4), BARRIER, END_OF_COLLECTIVE
        assert found(BEGIN, COPY, divided, BARRIER, EXIT, *collective, MEET, BARRIER, EXIT) is None
        assert found(BEGIN, COPY, divided, BARRIER, EXIT, *collective, BARRIER, MEET, EXIT) == 8


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((0x000001C000B47944, 0x000FEA0003C00000), instruction(CALL, (0x1D930 - 0x1650) // 16, register=4)),
        ((0xFFFFFFE000EC0947, 0x000FEA000083FFFF), instruction(BRANCH, (0xAD30 - 0xC970) // 16, 12, predicate=0)),
        ((0x000000C608547947, 0x000FEA000B800000), instruction(BRANCH, (0xF4B0 - 0x2F50) // 16, 4, divides=True)),
        ((0x0000000000017941, 0x000FEA0003800000), instruction(MEET, register=1)),
    ],
)
def test_words_of_machine_code(words, expected):
    """As nvdisasm reads them."""
    decoded = Instruction.of(*words)
    assert decoded == expected
