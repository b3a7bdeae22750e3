"""Writes the table of softmax attention's speed out of the figures in benchmarks/results/attention.

python benchmarks/attention.py --out benchmarks/results/attention/<card>.json
python benchmarks/attention_table.py
"""

import json
from textwrap import fill

from attention import what
from rwkv6_table import PAGE, RESULTS, WIDTH, between, table

MARKS = (
    "<!-- softmax attention's speed, written by benchmarks/attention_table.py -->\n",
    "<!-- end of softmax attention's speed -->\n",
)


def main():
    PAGE.write_text(between(PAGE.read_text(), *MARKS, tables()))


def results() -> list:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / "attention").glob("*.json"))]


def tables() -> str:
    return "\n".join(map(of_card, results()))


def of_card(result) -> str:
    meta, rows = result["meta"], result["rows"]
    calls = {}
    for row in rows:
        calls.setdefault(what(row | {"backward": False}), {})[row["backward"]] = row
    lines = [[name, *cells(passes.get(False)), *cells(passes.get(True))] for name, passes in calls.items()]
    said = (
        f"{meta['card']}, {meta['date']}, commit {meta['commit']}, torch {meta['torch']}; bfloat16, causal where "
        "nothing else is said. Milliseconds; ours with its multiple of the faster of torch's two backends."
    )
    heads = ["B, T, H, D", *("forward", "cuDNN", "flash"), *("backward", "cuDNN", "flash")]
    return "\n".join([fill(said, WIDTH), "", fill(claim(rows), WIDTH), "", *table(heads, lines), ""])


def claim(rows) -> str:
    """The slowest calls of both passes."""
    said = []
    for backward, kind in ((False, "forward"), (True, "backward")):
        found = [(multiple(row), row) for row in rows if row["backward"] == backward and multiple(row)]
        if found:
            most, row = max(found, key=lambda pair: pair[0])
            least = min(its for its, _ in found)
            said.append(f"{least:.2f} to {most:.2f} times torch's time {kind} (most at {what(row)})")
    return f"Softmax attention takes {', and '.join(said)}." if said else ""


def multiple(row) -> float | None:
    """Ours over the faster backend."""
    theirs = [row[name] for name in ("cudnn_ms", "flash_ms") if row[name]]
    return row["ours_ms"] / min(theirs) if theirs and row["ours_ms"] else None


def cells(row) -> list:
    if row is None:
        return [""] * 3
    its = multiple(row)
    ours = "wrong" if row["ours_ms"] is None else f"{row['ours_ms']:.3f}" + (f" ({its:.2f}x)" if its else "")
    return [ours, *(f"{row[name]:.3f}" if row[name] else "" for name in ("cudnn_ms", "flash_ms"))]


if __name__ == "__main__":
    main()
