"""Writes what follows from the declarations of the operators: python docs/write_operators.py

These are the stubs that tell type checkers and editors the signatures of the generated functions, and the lists of
operators in docs/operators.md.
"""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import linattn_np
from linattn_np.declarations import OPERATORS, STAGES, STEPS

ROOT = Path(__file__).resolve().parents[1]
HEAD = '''"""Written by docs/write_operators.py: {what}."""

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from ..contract import Op
from ..typing import {types}

'''


def positional(op) -> list[str]:
    """The arrays of a call; the first one's type is the result's."""
    required = [
        name for name, x in op.signature.parameters.items() if x.default is x.empty
    ]
    optional = [f"{name}: Array | None = None" for name in op.optional_arrays]
    return [
        f"{required[0]}: A",
        *(f"{name}: Array" for name in required[1:]),
        *optional,
    ]


def defined(op, parameters, result) -> str:
    return f"def {op.name}({', '.join(parameters)}, **options: Unpack[{op.keywords.__name__}]) -> {result}: ..."


def signatures(op, result="A"):
    """The function's signatures: o alone, or by the argument that asks for a second result also a pair, or either."""
    if not op.second_result:
        return [defined(op, positional(op), result)]
    results = {
        "Literal[False] = False": result,
        "Literal[True]": f"tuple[{result}, Any]",
    }
    results["bool"] = " | ".join(results.values())
    return [
        "@overload\n"
        + defined(op, [*positional(op), "*", f"{op.second_result}: {asked}"], found)
        for asked, found in results.items()
    ]


def types(ops) -> str:
    return ", ".join(sorted({"A", "Array", *(op.keywords.__name__ for op in ops)}))


def formatted(text) -> str:
    command = [sys.executable, "-m", "ruff"]
    for arguments in (["check", "--fix", "--quiet", "--exit-zero"], ["format"]):
        done = [
            *command,
            *arguments,
            "--stdin-filename",
            "linattn_np/ops/stub.pyi",
            "-",
        ]
        text = subprocess.run(
            done, input=text, capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout
    return text


def operators() -> str:
    head = HEAD.format(what="the operators", types=types(OPERATORS))
    names = f"__all__ = {[op.name for op in OPERATORS]}\n"
    return "\n".join(
        [head, names, *(text for op in OPERATORS for text in signatures(op))]
    )


def steps() -> str:
    head = HEAD.format(what="the steps", types=types(STEPS))
    names = f"__all__ = {[op.name for op in STEPS]}\n"
    return "\n".join([head, names, *(text for op in STEPS for text in signatures(op))])


def stages() -> str:
    with_more = [op.with_more for op in STAGES]
    ops = [op for op in STAGES if op not in with_more]
    head = HEAD.format(what="the stages", types=types(ops)).replace("from ..", "from .")
    texts = (
        text
        for op in ops
        for text in signatures(op, "tuple[Any, Any]" if op.pair else "Any")
    )
    return "\n".join([head, *texts])


def on_ranks() -> str:
    ops = [op for op in OPERATORS if op.state]
    head = HEAD.format(what="the operators on ranks", types=types(ops)).replace(
        "Unpack", "Required, TypedDict, Unpack"
    )
    classes = sorted({op.keywords.__name__ for op in ops})
    lines = [
        head + "from .engine import Engine\n",
        f"__all__ = {[*(op.name for op in ops), 'vjp']}\nOPERATORS: dict[Callable[..., Any], Op]\n",
        "class OnRanks(TypedDict, total=False):",
        "    comm: Required[Engine]\n    segment_size: int | None\n    output_final_state: bool\n",
        *(f"class {name}OnRanks({name}, OnRanks): ...\n" for name in classes),
        *(
            defined(op, positional(op), "Any").replace("]) ->", "OnRanks]) ->")
            for op in ops
        ),
        "def vjp(op: Callable[..., Any], *arrays: Array | None, **options: Any) -> tuple[Any, Callable[..., Any]]: ...",
    ]
    return "\n".join(lines)


def page() -> str:
    """docs/operators.md with all operators and steps in its lists."""
    text = (ROOT / "docs/operators.md").read_text()
    for ops, file in ((OPERATORS, "{}"), (STEPS, "steps")):
        listed = "".join(listed_link(op.name, file.format(op.name)) for op in ops)
        first = f"- [`linattn_np.{ops[0].name}`]"
        text = re.sub(
            rf"^{re.escape(first)}.*\n(- \[.*\n|  .*\n)*",
            lambda _: listed,
            text,
            flags=re.MULTILINE,
        )
    return text


def listed_link(name, file) -> str:
    """A line, and where it is long another one, with the first sentence of a function's docstring."""
    what = getattr(linattn_np, name).__doc__.strip().split("\n\n")[0]
    line = f"- [`linattn_np.{name}`](../linattn_np/ops/{file}.py): {' '.join(what.split())}"
    return (
        "\n".join(
            textwrap.wrap(line, 120, subsequent_indent="  ", break_long_words=False)
        )
        + "\n"
    )


def written() -> dict[Path, str]:
    """{path: text} of every file that is written."""
    return {
        ROOT / "linattn_np/ops/functions.pyi": formatted(operators()),
        ROOT / "linattn_np/ops/steps.pyi": formatted(steps()),
        ROOT / "linattn_np/stages.pyi": formatted(stages()),
        ROOT / "linattn_np/distributed/operators.pyi": formatted(on_ranks()),
        ROOT / "docs/operators.md": page(),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text)
