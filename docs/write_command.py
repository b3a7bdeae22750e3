"""Writes docs/command.md, what every subcommand's --help tells: python docs/write_command.py"""

from pathlib import Path

from linattn_np.__main__ import CODES
from linattn_np.command import COMMANDS
from linattn_np.command.terminal import module_and_parser

PAGE = Path(__file__).parent / "command.md"
HEAD = """# The command line

`linattn-np COMMAND ...`, or `python -m linattn_np COMMAND ...`. Errors are one line on stderr, with the file and a way
out. {}.

| command | |
| --- | --- |
{}
"""


def page() -> str:
    rows = [f"| [`{name}`](#{name}) | {what} |" for name, what in COMMANDS.items()]
    codes = CODES[0].upper() + CODES[1:]
    return "\n".join([HEAD.format(codes, "\n".join(rows)), *map(section, COMMANDS)])


def section(name) -> str:
    module, parser = module_and_parser(name, f"linattn-np {name}")
    lines = [f"## {name}", "", *in_markdown(module.__doc__)]
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if not actions:
            continue
        title = (
            group.title
            if group.title not in ("options", "positional arguments")
            else "option"
        )
        lines += [f"| {title} | |", "| --- | --- |"]
        lines += [
            f"| `{words(action)}` | {escaped(formatter._expand_help(action))} |"
            for action in actions
        ]
        lines += [""]
    return "\n".join(lines)


def in_markdown(text):
    """Indented lines of a docstring as blocks of code."""
    inside = False
    for line in text.strip().splitlines():
        code = line.startswith("    ")
        if code != inside and (code or line):
            yield "```sh" if code else "```"
            if not code:
                yield ""
            inside = code
        if code or line or not inside:
            yield line.removeprefix("    ") if code else line
    if inside:
        yield "```"
    yield ""


def words(action) -> str:
    if action.nargs == 0:
        return ", ".join(action.option_strings)
    value = action.metavar or (
        ",".join(action.choices) if action.choices else action.dest.upper()
    )
    return (
        ", ".join(action.option_strings) + f" {value}"
        if action.option_strings
        else value
    )


def escaped(text) -> str:
    return (
        " ".join(text.split())
        .replace("|", "\\|")
        .replace("<", "\\<")
        .replace("*", "\\*")
    )


if __name__ == "__main__":
    PAGE.write_text(page())
