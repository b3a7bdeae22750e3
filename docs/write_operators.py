"""Writes what follows from the declarations of the operators: python docs/write_operators.py

These are the stubs that tell type checkers and editors the signatures of the generated functions, and the lists of
operators in docs/operators.md.
"""

import re
import subprocess
import sys
from pathlib import Path

from linattn_np.declarations import OPERATORS, STEPS

ROOT = Path(__file__).resolve().parents[1]
HEAD = '''"""Written by docs/write_operators.py: {what}."""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from ..contract import Op
from ..typing import {types}

'''
OVERLOADS = (("Literal[False] = False", "A"), ("Literal[True]", "tuple[A, Any]"), ("bool", "A | tuple[A, Any]"))


def positional(op) -> list[str]:
    """The arrays of a call; the first one's type is the result's."""
    first, *others = op.arrays
    return [f"{first}: A", *(f"{x}: Array" for x in others), *(f"{x}: Array | None = None" for x in op.optional_arrays)]


def defined(op, parameters, result) -> str:
    return f"def {op.name}({', '.join(parameters)}, **options: Unpack[{op.keywords.__name__}]) -> {result}: ..."


def overloads(op):
    """An operator's three signatures: by its second result's argument it returns o, a pair, or either."""
    for asked, result in OVERLOADS:
        yield "@overload\n" + defined(op, [*positional(op), "*", f"{op.second_result}: {asked}"], result)


def types(ops) -> str:
    return ", ".join(sorted({"A", "Array", *(op.keywords.__name__ for op in ops)}))


def formatted(text) -> str:
    command = [sys.executable, "-m", "ruff"]
    for arguments in (["check", "--fix", "--quiet", "--exit-zero"], ["format"]):
        done = [*command, *arguments, "--stdin-filename", "linattn_np/ops/stub.pyi", "-"]
        text = subprocess.run(done, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def operators() -> str:
    head = HEAD.format(what="the operators", types=types(OPERATORS))
    names = f"__all__ = {[op.name for op in OPERATORS]}\n"
    return "\n".join([head, names, *(text for op in OPERATORS for text in overloads(op))])


def steps() -> str:
    head = HEAD.format(what="the steps", types=types(STEPS))
    names = f"__all__ = {[op.name for op in STEPS]}\n"
    return "\n".join([head, names, *(defined(op, [*positional(op), "state: Array"], "A") for op in STEPS)])


def on_ranks() -> str:
    ops = [op for op in OPERATORS if op.state]
    head = HEAD.format(what="the operators on ranks", types=types(ops)) + "from .engine import Engine\n"
    names = f"__all__ = {[*(op.name for op in ops), 'vjp']}\nOPERATORS: dict[Callable[..., Any], Op]\n"
    own = ["*", "comm: Engine", "segment_size: int | None = None", "output_final_state: bool = False"]
    vjp = "def vjp(op: Callable[..., Any], *arrays: Array, **options: Any) -> tuple[Any, Callable[..., Any]]: ..."
    return "\n".join([head, names, *(defined(op, [*positional(op), *own], "Any") for op in ops), vjp])


def page() -> str:
    """docs/operators.md with all operators and steps in its lists."""
    text = (ROOT / "docs/operators.md").read_text()
    for prefix, ops in (("", OPERATORS), ("linattn_np.", STEPS)):
        listed = "".join(f".. autofunction:: {prefix}{op.name}\n" for op in ops)
        first = f".. autofunction:: {prefix}{ops[0].name}\n"
        text = re.sub(rf"^{re.escape(first)}(\.\. autofunction:: .*\n)*", listed, text, flags=re.MULTILINE)
    return text


def written() -> dict[Path, str]:
    """{path: text} of every file that is written."""
    return {
        ROOT / "linattn_np/ops/functions.pyi": formatted(operators()),
        ROOT / "linattn_np/ops/steps.pyi": formatted(steps()),
        ROOT / "linattn_np/distributed/operators.pyi": formatted(on_ranks()),
        ROOT / "docs/operators.md": page(),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
