"""Completes the figures of a run that ended early: rows that it lacks come from an earlier file of the same card and
versions.

    python benchmarks/complete.py NEW.json EARLIER.json --changed "retention backward"

Each of them says at which commit and on which day it was measured; those of what has changed since, as --changed names
it, are left out.
"""

import argparse
import json
from pathlib import Path

from run import key, write
from speed_table import pass_of

SAME = ("card", "driver", "cuda", "cupy", "torch", "triton", "fla-core")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, help="completed in place")
    parser.add_argument("earlier", type=Path)
    parser.add_argument("--changed", nargs="+", default=[], metavar="WHAT", help="operators, or their backward passes")
    args = parser.parse_args()
    result = completed(*(json.loads(path.read_text()) for path in (args.new, args.earlier)), args.changed)
    write(args.new, result["meta"], result["rows"])


def completed(new, earlier, changed=()):
    differing = [name for name in SAME if new["meta"].get(name) != earlier["meta"].get(name)]
    if differing:
        raise SystemExit(f"the two files differ in {', '.join(differing)}")
    measured = set(map(whole_key, new["rows"]))
    taken = [
        {name: earlier["meta"][name] for name in ("commit", "date")} | row
        for row in earlier["rows"]
        if whole_key(row) not in measured and pass_of(row) not in changed
    ]
    return new | {"rows": new["rows"] + taken}


def whole_key(row):
    """With how the arrays lie, which rows of a sweep say."""
    return *key(row), row.get("memory")


if __name__ == "__main__":
    main()
