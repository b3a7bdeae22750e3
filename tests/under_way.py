"""What warpgroup products under way read, in PTX.

A product (wgmma.mma_async) whose first operand is in registers reads them until a wgmma.wait_group ends its group, and
nothing may write to them before (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). In C++ the operand is
dead behind the product, so the compiler may give its registers to the next operand. Neither an emulator nor a race
check sees that; `wgmma_fence_operand` behind the wait mends it.
"""

import re
from typing import NamedTuple

FUNCTION = re.compile(r"\.(?:entry|func)\b[^;{]*?(\w+)\s*\([^;{]*\{")
LABEL = re.compile(r"([$\w]+):")
OPERANDS = re.compile(r"\{[^}]*\},\s*(?:\{([^}]*)\})?")  # of a product: the second one, if it is in registers
FIRST = re.compile(r"\{[^}]*\}|[^,]*")
REGISTER = re.compile(r"%\w+")
WRITES_NOTHING = {"bar", "barrier", "bra", "call", "exit", "nanosleep", "red", "ret", "setmaxnreg", "st", "stmatrix"}
GROUPS = 8  # no wait_group leaves as many under way


class Instruction(NamedTuple):
    text: str
    writes: frozenset  # registers
    follow: tuple  # the instructions that may be next


class Overwritten(NamedTuple):
    function: str
    product: str
    by: str

    def __str__(self):
        return f"{self.function}: '{self.by}' writes to what {self.product} may still read"


def overwritten(code) -> list[Overwritten]:
    """Every product and instruction that may run before the product has ended, and writes to what it reads."""
    functions = [*FUNCTION.finditer(code)]
    ends = [function.start() for function in functions[1:]] + [len(code)]
    found = []
    for function, end in zip(functions, ends, strict=True):
        body = code[function.end() : end]
        if "wgmma.mma_async" not in body:
            continue
        instructions = _instructions(body)
        for product in instructions:
            read = _operand(product.text)
            for by in _before_the_end(instructions, product) if read else ():
                if not read.isdisjoint(by.writes):
                    found.append(Overwritten(function[1], product.text.split()[0], by.text))
    return found


def _operand(text):
    """The registers of a product's first operand; none of one in memory, and of other instructions."""
    if not text.startswith("wgmma.mma_async"):
        return frozenset()
    return frozenset(REGISTER.findall(OPERANDS.search(text)[1] or ""))


def _before_the_end(instructions, product):
    """The instructions that may run before the group of a product has ended, in the program's order."""
    waiting = [(following, None) for following in product.follow]  # groups committed behind its own, which None is not
    seen = set()
    while waiting:
        here, behind = waiting.pop()
        if (here, behind) in seen:
            continue
        seen.add((here, behind))
        text = instructions[here].text
        if text.startswith("wgmma.wait_group") and behind is not None and behind >= int(text.split()[1]):
            continue
        if text.startswith("wgmma.commit_group"):
            behind = 0 if behind is None else min(behind + 1, GROUPS)
        waiting += [(following, behind) for following in instructions[here].follow]
    return [instructions[here] for here in sorted({here for here, _ in seen})]


def _instructions(body):
    texts, labels = [], {}
    for piece in re.sub(r"//[^\n]*", "", body).split(";"):
        text = piece.lstrip("{} \t\n")  # braces of scopes; those of vectors are never first
        while label := LABEL.match(text):
            assert label[1] not in labels, f"two scopes have {label[1]}"
            labels[label[1]] = len(texts)
            text = text[label.end() :].lstrip("{} \t\n")
        if text and not text.startswith("."):
            texts.append(text.rstrip())
    return [_instruction(text, following, labels) for following, text in enumerate(texts, 1)]


def _instruction(text, following, labels):
    conditional = text.startswith("@")
    operation, *operands = (text.split(None, 1)[1] if conditional else text).split(None, 1)
    name, operands = operation.split(".")[0], "".join(operands)
    assert name != "brx", "jumps by tables are not followed"
    follow = (labels[operands],) if name == "bra" else ()
    if conditional or name not in {"bra", "exit", "ret", "trap"}:
        follow += (following,)
    nothing = name in WRITES_NOTHING or operands.startswith("[")
    return Instruction(text, frozenset(() if nothing else REGISTER.findall(FIRST.match(operands)[0])), follow)
