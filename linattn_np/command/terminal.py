"""How a subcommand talks with whoever started it: options, one line an error, progress, and a quiet end."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import contextmanager

from ..models.checks import shown


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, where argparse would print its usage too."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def run(command, name, arguments=None) -> int:
    """The exit code of a subcommand's module, called `name` in its messages; by default on the process's arguments."""
    parser = Parser(prog=name, description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.declare(parser)
    options = parser.parse_args(arguments)
    utf8_written()
    try:
        command.run(options)
    except KeyboardInterrupt:
        eval("0")  # where it came in a string that was run, CPython would end by the signal, until it runs another
        return 130
    except BrokenPipeError:  # whoever read has left: leave too, and let Python flush into nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    except MemoryError as error:
        parser.error(f"out of memory: {error}")
    return 0


def utf8_written():
    """stdout takes any character, whatever the locale; what a test or a notebook has put there is left alone."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


# -- options ----------------------------------------------------------------------------------------------------------
def some_text(text):
    if not text:
        raise argparse.ArgumentTypeError("is empty, expected some text")
    return text


def whole(least):
    def number(text):
        if not (text.isascii() and text.isdecimal() and len(text) <= 18) or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {shown(text)}, expected a whole number from {least} up")
        return int(text)

    return number


def add_device(add):
    """--device, of what computes a model."""
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where CuPy can use it, else cpu (default)",
    )


def add_tokenizer(add):
    """--tokenizer and --vocab, which `generate.tokenizer_of` reads."""
    add(
        "--tokenizer",
        choices=("auto", "bytes", "world"),
        default="auto",
        help="auto: bytes for a vocabulary of 256, world for 65536 (default)",
    )
    add(
        "--vocab",
        metavar="PATH",
        help="World's vocabulary file (default: that in the folder of --model, or of an installed package)",
    )


# -- messages ---------------------------------------------------------------------------------------------------------
@contextmanager
def status(first):
    """A function that shows how far things are, on a terminal's last line, which is blank again in the end."""

    def show(line):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    show(first)
    try:
        yield show
    finally:
        show("")


def bar(share, width=30):
    return f"[{'#' * round(share * width):<{width}}]"


def say(line):
    print(line, file=sys.stderr, flush=True)
