"""What subcommands have in common: options, messages, one line for an error, progress, and exit codes."""

import argparse
import errno
import os
import re
import shlex
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module

from .. import NotSupported
from ..argument_checks import whole_of
from ..models.checkpoint import located
from ..models.devices import check_device
from ..models.files import check_writable, same_file
from ..models.number_checks import shown
from .signals import Ended, handled

PACKAGE = os.path.dirname(os.path.dirname(__file__))
TICK = 0.5  # seconds between two states of a progress line
FAULT, REFUSED = 1, 2  # exit codes besides 0 and those of signals
NO_ROOM = "free some room, or name another place"
WAYS_OUT = {  # {error of the system: what the user may do}
    errno.ENOENT: "name a file, or a folder, that is there",
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EFBIG: "the limit on files is reached (ulimit -f)",
    errno.EACCES: "change its permissions, or name another place",
    errno.EPERM: "change its permissions, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name another place",
    errno.ENOTDIR: "name a folder before the last /",
    errno.EMFILE: "too many files are open (ulimit -n)",
    errno.EAGAIN: "there are too many processes or threads (ulimit -u)",
    errno.EBUSY: "another process writes there: wait for it, or name another place",
    errno.EBADF: "it is closed: send it to a file, a pipe or a terminal",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the option that was probably meant."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.arguments = []

    def parse_known_args(self, args=None, namespace=None):
        self.arguments = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message):
        """Prints the error, where argparse would print its usage, too."""
        self.exit(REFUSED, f"{self.prog}: {' '.join(message.split())}{self.suggestion_for(message)}\n")

    def suggestion_for(self, message) -> str:
        """The end of an error `message` of argparse: what was probably meant, or ""."""
        if unknown := re.match(r"unrecognized arguments: (--[^ =]+)", message):
            word, known = unknown[1], list(self._option_string_actions)
        elif unknown := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            word, known = unknown[1], re.findall(r"[\w-]+", unknown[2])
        elif message.startswith("the following arguments are required"):  # one of them may be misspelt
            options, known = self._option_string_actions, re.findall(r"--[\w-]+", message)
            words = [word for word in self.arguments if word.startswith("--") and word.partition("=")[0] not in options]
            return next((end for word in words if (end := suggestion(word, known))), "")
        else:
            return ""
        return suggestion(word, known)

    def _print_message(self, message, file=None):
        """Prints and flushes. argparse does not flush, so Python would report a full disk only when it ends."""
        (to_stdout if file is sys.stdout else to_stderr)(message, end="")


SYNONYMS = {"gpu": "cuda"}


def suggestion(word, known, before="") -> str:
    """The end of an error about an unknown `word`: "; did you mean NAME?", with `before` and one of the names `known`,
    or ""."""
    names = [name for name in known if name == SYNONYMS.get(word) or name.startswith(word)]
    names = names or get_close_matches(word, known, 1)
    return f"; did you mean {before}{names[0]}?" if names else ""


def run(command, name, arguments=None) -> int:
    """Runs the module `command` of this package; returns its exit code.

    name : the subcommand's name in messages
    arguments : None for those of the process
    """

    def work():
        module, parser = module_and_parser(command, name)
        options = parser.parse_args(arguments)
        details.enabled = options.verbose
        utf8_written()
        module.run(options)
        return 0

    return guarded(name, work)


def module_and_parser(command, name) -> tuple:
    """A subcommand's module and parser."""
    module = import_module(f"{__package__}.{command}")
    parser = Parser(prog=name, description=module.__doc__)
    module.add_options(parser)
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="tell why a device is not used, and where a fault came from"
    )
    return module, parser


def guarded(name, work) -> int:
    """The result of `work()`, an exit code. If it raises an error, prints one line and returns the error's exit code: 1
    for a fault of this program, 2 if something was refused or is missing, 128 + n if signal n has ended it."""
    usable_streams()
    details.enabled = False
    hooks = threading.excepthook, sys.unraisablehook, warnings.showwarning
    threading.excepthook = sys.unraisablehook = report_fault
    warnings.showwarning = lambda message, *_, **__: to_stderr(f"{name}: {str(message).strip().partition(chr(10))[0]}")
    try:
        with handled():
            return work()
    except Ended as end:
        return end.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has ended, so this ends, too
        silence(sys.stdout)
        return 0
    except Exception as error:
        if ended := signal_in(error):
            return ended.code
        if isinstance(error, (ValueError, ImportError, OSError)):
            return complain(name, error_line(error), REFUSED)
        if isinstance(error, MemoryError):
            return complain(name, f"out of memory: {error}".removesuffix(": "), REFUSED)
        return complain(name, f"{fault(error)}. Please report it, with what `linattn-np info` prints", FAULT)
    finally:
        threading.excepthook, sys.unraisablehook, warnings.showwarning = hooks


def signal_in(error) -> Ended | None:
    """The signal that has caused an error, or None. Python replaces an exception, such as a signal's, by a RuntimeError
    if it is raised while a class is built."""
    while error is not None and not isinstance(error, Ended):
        error = error.__cause__
    return error


def complain(name, message, code) -> int:
    """Prints an error; returns its exit code."""
    to_stderr(f"{name}: {' '.join(message.split())}")
    return code


def error_line(error) -> str:
    """An error as one line; for an error of the system: the file, the error, and what the user may do."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error) or type(error).__name__
    words = [error.strerror]
    if error.filename is not None:
        file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
        words.insert(0, file)
        if error.errno == errno.ENOENT and (near := file_suggestion(file)):
            return ": ".join(words) + near
    way_out = WAYS_OUT.get(error.errno or 0)
    return ": ".join(words) + (f"; {way_out}" if way_out else "")


def file_suggestion(file) -> str:
    """The end of an error about a file that does not exist: the file that was probably meant, or ""."""
    folder, name = os.path.split(file)
    with suppress(OSError):
        return suggestion(name, os.listdir(folder or "."), os.path.join(folder, ""))
    return ""


def fault(error) -> str:
    """The line for an unexpected error: its text and its place in this package; with --verbose those of all calls."""
    frames = traceback.extract_tb(error.__traceback__)
    in_package = [frame for frame in frames if frame.filename.startswith(PACKAGE)] or frames
    shown = reversed(frames) if details.enabled else in_package[-1:]
    where = " from".join(f" in {os.path.basename(frame.filename)}, line {frame.lineno}" for frame in shown)
    return f"a fault of linattn-np: {type(error).__name__}{where}: {error}".removesuffix(": ")


def report_fault(what):
    """Prints a line in place of the traceback of a thread or of a library's callback. Nothing is printed for a signal,
    which `signals` notes, nor for Python's message that it ignores a signal because its handler is being replaced."""
    if isinstance(what.exc_value, Exception) and "due to race condition" not in str(what.exc_value):
        to_stderr(fault(what.exc_value))


# -- streams ----------------------------------------------------------------------------------------------------------
def usable_streams():
    """Replaces standard streams that were closed when the process began: stdin by an empty file, stdout by a file that
    cannot be written, stderr by one that discards. Otherwise a file that is opened later would get a stream's number,
    and libraries that write to the stream would write to the file."""
    for number, name, mode, flags in (
        (0, "stdin", "r", os.O_RDONLY),
        (1, "stdout", "w", os.O_RDONLY),
        (2, "stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is not None:
            continue
        descriptor = os.open(os.devnull, flags)
        with suppress(OSError):
            os.fstat(number)
            number = descriptor  # another file has the stream's number already
        if descriptor != number:
            os.dup2(descriptor, number)
            os.close(descriptor)
        setattr(sys, name, open(number, mode, closefd=False))


def utf8_written():
    """Makes stdout accept any character, whatever the locale is. Streams of tests or notebooks are not changed."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")


def to_stdout(text="", end="\n"):
    """Prints text on stdout, at once. An OSError names stdout."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise OSError(error.errno, error.strerror, "stdout") from None


class Details:
    """Prints messages for --verbose. enabled : whether it is given; `run` sets this."""

    enabled = False

    def __call__(self, line):
        if self.enabled:
            to_stderr(line)


details = Details()


def to_stderr(line, end="\n"):
    """Prints a message on stderr. If this fails, the work goes on without messages."""
    try:
        print(line, end=end, file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream):
    """Discards the stream's buffer and all later output to the stream."""
    with suppress(OSError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


# -- options ----------------------------------------------------------------------------------------------------------
def some_text(text):
    """The type of an option whose text must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("is empty, expected some text")
    return text


def integer(least, most=10**18):
    """The type of an option that is a whole number from `least` to `most`."""

    def number(text):
        value = whole_of(text)
        if value is None or not least <= value <= most:
            to = "up" if most == 10**18 else f"to {most}"
            raise argparse.ArgumentTypeError(f"is {shown(text)}, expected a whole number from {least} {to}")
        return value

    return number


def check_out(options, *inputs):
    """ValueError if --out is no .safetensors or an input, the file of an option; OSError if it cannot be written."""
    if not options.out.endswith(".safetensors"):
        raise ValueError(f"argument --out: is {options.out}, expected the ending .safetensors")
    for name in inputs:
        if same_file(options.out, located(getattr(options, name), name)):
            raise ValueError(f"argument --out: is the file of --{name}, which would be lost")
    check_writable(options.out)


def how_to_write(*options) -> str:
    """The message with the command that writes text with a result."""
    return "To write with it: " + shlex.join(["linattn-np", "generate", *map(str, options), "The "])


def add_device(add):
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where CuPy can use it, else cpu (default)",
    )


def device_of(wanted, owner) -> str:
    """The device for the option --device, "cpu" or "cuda". NotSupported if "cuda" is `wanted` and cannot be used; its
    text begins with `owner`."""
    if wanted == "cpu":
        return "cpu"
    try:
        check_device(owner, "cuda")
    except NotSupported as why:
        if wanted == "cuda":
            raise
        details(str(why))
        return "cpu"
    return "cuda"


def add_tokenizer(add):
    """Adds the options --tokenizer and --vocab, which `option_values.tokenizer_of` reads."""
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


# -- progress ---------------------------------------------------------------------------------------------------------
@contextmanager
def status(first):
    """A context with a function that shows a text on the terminal's last line, which is blank again afterwards. The
    text `first` is shown at once. Nothing is shown if stderr is no terminal."""
    shown = ""

    def show(line):
        nonlocal shown
        if line != shown and sys.stderr.isatty():
            to_stderr(f"\r\x1b[K{line}", end="")
            shown = line

    show(first)
    try:
        yield show
    finally:
        show("")


@contextmanager
def ticking(draw):
    """A context in which another thread, if the system gives one, calls `draw` every TICK seconds."""
    ended = threading.Event()

    def tick():
        while not ended.wait(TICK):
            draw()

    thread = threading.Thread(target=tick, daemon=True)
    with suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident:
            thread.join()


def bar(fraction, width=30):
    """A progress bar as text; `fraction` of the work is done."""
    return f"[{'#' * round(min(1, fraction) * width):<{width}}]"
