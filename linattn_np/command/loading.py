"""Prints one line in place of a traceback if the command ends while NumPy and this package are imported. OpenBLAS, for
example, sends its process a Ctrl-C if the system gives it no threads, and prints why. The command imports this module
first; its import sets the hook and the handler.
"""

import os
import signal
import sys

INTERRUPTED = "interrupted while it was loading"


def print_load_error(kind, error, trace):
    """`sys.excepthook` of the command."""
    interrupt = issubclass(kind, KeyboardInterrupt)
    say(INTERRUPTED if interrupt else f"cannot be loaded: {kind.__name__}: {error}")


def interrupted(number, frame):
    """The handler of Ctrl-C, which ends the process. Python's own raises KeyboardInterrupt. Where nothing can catch
    that, as in a callback of a weak reference during an import, Python prints it with its traceback, and goes on."""
    signal.signal(number, signal.SIG_DFL)
    say(INTERRUPTED)
    os.kill(os.getpid(), number)


def say(why):
    """Prints a line on stderr, if the process has one."""
    if sys.stderr is not None:
        print(f"linattn-np: {' '.join(why.split())}", file=sys.stderr, flush=True)


def is_command(argv, original) -> bool:
    """Whether a process is the command: its script, or `python -m linattn_np`. While Python imports a package for -m,
    `argv` is [-m, arguments], without the package's name, which the whole command line, `original`, has."""
    if argv[:1] == ["-m"]:
        return original[-len(argv)] == "linattn_np"
    return os.path.basename("".join(argv[:1])) == "linattn-np"


OWN_PROCESS = is_command(sys.argv, sys.orig_argv)
if OWN_PROCESS:
    sys.excepthook = print_load_error
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # neither ignored, as by nohup, nor another's
        signal.signal(signal.SIGINT, interrupted)
