"""One line where a traceback would be, if the command ends while NumPy and this package are imported: before it takes
signals. OpenBLAS, for one, sends itself a Ctrl-C where it may start no threads, and tells why."""

import os
import signal
import sys


def told(kind, error, trace):
    """`sys.excepthook` of the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one while Python ends has no traceback
    interrupted = issubclass(kind, KeyboardInterrupt)
    why = "interrupted while it was loading" if interrupted else f"cannot be loaded: {kind.__name__}: {error}"
    if sys.stderr is not None:
        print(f"linattn-np: {' '.join(why.split())}", file=sys.stderr)


def is_command(argv, original) -> bool:
    """Whether a process is the command: its script, or `python -m linattn_np`. While a package is imported for -m,
    `argv` [-m, arguments] does not name it; the words of the whole line, `original`, have its name in that place."""
    if argv[:1] == ["-m"]:
        return original[-len(argv)] == "linattn_np"
    return os.path.basename("".join(argv[:1])) == "linattn-np"


OWN_PROCESS = is_command(sys.argv, sys.orig_argv)
if OWN_PROCESS:
    sys.excepthook = told
