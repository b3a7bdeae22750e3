"""The public function of an operator, made from its declaration and a docstring."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from .contract import Op
from .dispatch import call
from .shared_documentation import NOTES, PARAMETERS, RAISES, RETURNS, RETURNS_OF_STEP

SECTION = re.compile(r"^(\w+)\n-+\n", re.MULTILINE)  # a heading of a docstring, underlined


def public_function(op: Op, compute: Callable[..., Any] = call):
    """Decorates an empty function of the operator's name that has the operator's docstring.

    The decorated function has the signature of `op` and returns ``compute(op, arrays, **options)``. Its docstring also
    describes the parameters that operators share.
    """

    def decorate(documented):
        function = defined(op, op.signature, compute, documented.__globals__)
        doc, names, is_step = Docstring(documented.__doc__), list(op.signature.parameters), op.out == "B H V"
        if is_step:
            doc.sections.setdefault("Parameters", entry_of_arrays(op))
        doc.replace_entries(PARAMETERS, [name for name in names if name not in doc.entries()])
        doc.add("Raises", RAISES)
        if op.state and op.out == "B H T V":  # an operator with a state, not a step or a stage
            doc.add("Returns", RETURNS)
            doc.add("Notes", NOTES)
        elif is_step:
            doc.add("Returns", RETURNS_OF_STEP)
        function.__doc__ = doc.text()
        return function

    return decorate


def entry_of_arrays(op: Op) -> str:
    """The entry of a step's arrays in a docstring: their axes, and the operator that describes them."""
    names_by_axes: dict[str, list[str]] = {}
    for name in op.arrays:
        names_by_axes.setdefault(op.callers_axes(name, groups=1), []).append(name)
    shapes = ", ".join(f"{', '.join(names)} : [{', '.join(axes.split())}]" for axes, names in names_by_axes.items())
    gates = f"; {' and '.join(op.decays)} is the natural log of the decay" if op.decays else ""
    return f"{shapes}\n    As in `{op.name.removesuffix('_step')}`, without the time axis{gates}."


def defined(op: Op, signature, compute, namespace) -> Callable[..., Any]:
    """A function with this signature that returns ``compute(op, arrays, **options)``, in the module of that namespace.

    It is made from source text: a call then costs no more than if the text were in a file. So the text of every default
    and annotation must be an expression that the namespace can evaluate.
    """
    positional = [x.name for x in signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    keywords = [f"{name}={name}" for name in signature.parameters if name not in positional]
    source = (
        f"def maker(op, compute):\n"
        f"    def {op.name}{signature}:\n"
        f"        return compute(op, ({', '.join(positional)},), {', '.join(keywords)})\n"
        f"    return {op.name}\n"
    )
    made: dict[str, Any] = {}
    exec(compile(source, f"<the signature of {op.name}>", "exec"), namespace, made)  # a traceback shows this name
    function = made["maker"](op, compute)
    function.__qualname__ = op.name
    return function


class Docstring:
    """A docstring in parts: `head` has summary and equation, `sections` the text of each title in ORDER.

    `python -OO` leaves out docstrings: the text is None, and what is added is all there is.
    """

    ORDER = ("Parameters", "Returns", "Raises", "Notes", "Example")

    def __init__(self, text: str | None):
        self.head, *parts = SECTION.split(inspect.cleandoc(text or ""))
        self.sections = {title: text.strip("\n") for title, text in zip(parts[::2], parts[1::2])}

    def entries(self) -> dict[str, str]:
        """{name: entry} of the parameters. An entry that describes several has the first one's name."""
        return entries_of(self.sections.get("Parameters", ""))

    def replace_entries(self, text: str, names):
        """Replaces the entries of parameters `names`, or adds them, by those that `text` has."""
        known = entries_of(text)
        described = self.entries() | {name: known[name] for name in names if name in known}
        self.sections["Parameters"] = "\n".join(described.values())

    def add(self, title: str, text: str):
        """Adds to the text of a section, which may not be there yet."""
        self.sections[title] = "\n\n".join(filter(None, [self.sections.get(title), text.strip()]))

    def text(self) -> str:
        titles = sorted(self.sections, key=self.ORDER.index)
        shown = [f"{title}\n{'-' * len(title)}\n{self.sections[title]}" for title in titles]
        return "\n\n".join([self.head.strip(), *shown]) + "\n"


def entries_of(text: str) -> dict[str, str]:
    """{name: entry} of the section Parameters; an entry starts with "q, k : what they are" at the left edge."""
    return {re.split("[, ]", entry, maxsplit=1)[0]: entry for entry in re.split(r"\n(?=\w)", text.strip()) if entry}
