"""Linear attention at the command line: write text with a model, train one, time and draw the operators."""

import argparse
import sys

from . import __version__
from .command import COMMANDS
from .command.terminal import Parser, guarded, run

NAME = "linattn-np"
CODES = "exit codes: 0 done, 1 a fault of this program, 2 refused or missing, 128 + n ended by signal n (Ctrl-C: 130)"


def main(arguments=None) -> int:
    """The exit code of ``linattn-np ARGUMENTS``; by default those of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments

    def work():
        top_level = parser()
        command = top_level.parse_args(arguments[:1] or ["--help"]).command
        if command is None:  # the argument is "--", which argparse drops
            top_level.error(f"{arguments[0]} is no command, expected one of {', '.join(COMMANDS)}")
        return run(command, f"{NAME} {command}", arguments[1:])

    return guarded(NAME, work)  # the code that `work` returns, or that of the error or signal that ends it


def parser() -> Parser:
    """The parser of the first argument, a command; a command has a parser of its own for the rest."""
    lines = [f"  {name:<10}{what}" for name, what in COMMANDS.items()]
    result = Parser(
        prog=NAME,
        usage=f"{NAME} COMMAND ...",
        description="\n".join([__doc__ or "", "", "commands:", *lines]),
        epilog=f"{NAME} COMMAND --help tells a command's options.\n{CODES}",
    )
    result.add_argument(
        "--version", action="version", version=f"{NAME} {__version__}", help="tell the version, and end"
    )
    result.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    return result


if __name__ == "__main__":
    sys.exit(main())
