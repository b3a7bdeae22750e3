"""One line where a traceback would be, if the command ends while NumPy and this package are imported: before it takes
signals. OpenBLAS, for one, sends itself a Ctrl-C where it may start no threads, and tells why."""

import os
import sys


def told(kind, error, trace):
    """`sys.excepthook` of the command."""
    interrupted = issubclass(kind, KeyboardInterrupt)
    why = "interrupted while it was loading" if interrupted else f"cannot be loaded: {kind.__name__}: {error}"
    if sys.stderr is not None:
        print(f"linattn-np: {' '.join(why.split())}", file=sys.stderr)


if os.path.basename("".join(sys.argv[:1])) in ("linattn-np", "-m"):  # of Python's -m, whose file is not known as yet
    sys.excepthook = told
