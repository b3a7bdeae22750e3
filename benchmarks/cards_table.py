"""Writes the figures of docs/cards.md and of README's "More than one card", and draws them, out of
benchmarks/results/cards.

    torchrun --nproc-per-node 2 benchmarks/cards.py --device cuda --out benchmarks/results/cards/nvidia-h200.json
    torchrun --nproc-per-node 2 benchmarks/cards.py --device cuda --graphs --scaling weak --out ...
    torchrun --nproc-per-node 2 benchmarks/cards_training.py --out benchmarks/results/cards/nvidia-h200.json
    python benchmarks/cards_texts.py --out benchmarks/results/cards/nvidia-h200.json
    python benchmarks/cards_texts.py --size 24x1024 --tokens 128 --out ...
    python benchmarks/cards_table.py
"""

import json
from textwrap import fill

from rwkv6_table import README, ROOT, WIDTH, between, count, table

from linattn_np.command.palette import INK, OURS, STYLE

PAGE, RESULTS = ROOT / "docs" / "cards.md", ROOT / "benchmarks" / "results" / "cards"
PICTURE = ROOT / "docs" / "pictures" / "cards.png"
BEGIN, END = "<!-- written by benchmarks/cards_table.py -->\n", "<!-- end of what it writes -->\n"
IN_README = "<!-- cards_table.py -->\n", "<!-- end -->\n"


def main():
    results = read()
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, "\n".join(map(speeds, results))))
    README.write_text(between(README.read_text(), *IN_README, summary(results[0])))
    draw(results[0])


def read():
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def of_kind(result, key):
    return [row for row in result["rows"] if key in row]


def place(row):
    return row["scaling"] != "weak", row["graphs"], row["op"], row["pass"] != "forward", row["ranks"]


def name(row):
    return f"{row['pass']}, as a graph" if row["graphs"] else row["pass"]


def operators(result):
    return sorted(of_kind(result, "op"), key=place)


def summary(result) -> str:
    """A sentence: of the fewest cards, and of more in brackets."""
    weak = [row for row in operators(result) if (row["scaling"], row["op"], row["graphs"]) == ("weak", "gla", True)]
    said: dict[str, dict] = {}
    for row in weak:
        said.setdefault(row["pass"], {})[row["ranks"]] = f"{row['efficiency']:.0%}"
    trained: dict[int, list] = {}
    for row in of_kind(result, "training"):
        if row["training"] != "more context":
            trained.setdefault(row["ranks"], []).append(row["efficiency"])
    for ranks, found in trained.items():
        of_ranks = dict.fromkeys(f"{bound:.0%}" for bound in bounds(found))
        said.setdefault("training", {})[ranks] = " to ".join(of_ranks)

    def in_order(values):
        fewest, *more = (values[ranks] for ranks in sorted(values))
        return " ".join([fewest, *(f"({other})" for other in more)])

    counts = in_order({row["ranks"]: str(row["ranks"]) for row in weak})
    parts = ", ".join(f"{what} {in_order(values)}" for what, values in said.items())
    said = f"Efficiency on {counts} {result['meta']['card']} in CUDA graphs: `gla` {parts}."
    return fill(said, WIDTH) + "\n"


def speeds(result) -> str:
    card, blocks = result["meta"]["card"], []
    if rows := operators(result):
        shape = {(row["H"], row["D"], row["dtype"]) for row in rows}
        ((H, D, dtype),) = shape
        text = (
            f"{card}, one process a card, {H} heads of {D}, {dtype}, gates of trained models: milliseconds of a call, "
            "four in a row, and of one card in the same run. Weak scaling gives one card what each of the others has, "
            "strong scaling all of it. Efficiency is one card's time over all cards' (weak), shared by the cards "
            "(strong). As a graph both are launches of CUDA graphs of the call. A call sends "
            f"{least(row['sent'] for row in rows)} MB to each other card. The largest error "
            f"against float64 is {max(row['error'] for row in rows):.1e}."
        )
        cells = [
            [
                f"`{row['op']}` {name(row)}",
                row["scaling"],
                f"{row['ranks']} x {row['tokens']:,}",
                f"{row['ms']:.2f}",
                f"{row['one_ms']:.2f}",
                f"{row['efficiency']:.0%}",
            ]
            for row in rows
        ]
        head = ["", "scaling", "tokens", "all cards, ms", "one card, ms", "efficiency"]
        blocks += [fill(text, WIDTH), "", *table(head, cells), ""]
    if rows := of_kind(result, "training"):
        text = (
            "Training of RWKV-6, layers x channels, sequences x bytes a step on one card: bytes/s of all cards with "
            "the same batch, with a batch for each card, and with contexts as many times as long, which they cut."
        )
        cells = [
            [
                row["size"].replace("@", ", "),
                row["training"],
                str(row["ranks"]),
                count(row["tokens_s"]),
                count(row["one_tokens_s"]),
                f"{row['efficiency']:.0%}",
            ]
            for row in sorted(rows, key=lambda row: row["ranks"])
        ]
        head = ["", "", "cards", "all cards", "one card", "efficiency"]
        blocks += [fill(text, WIDTH), "", *table(head, cells), ""]
    for row in of_kind(result, "texts"):
        model = "the package's own model" if row["size"] is None else f"random weights of {row['size']} in bfloat16"
        text = (
            f"{row['texts']:,} texts of {row['tokens_each']} tokens by `--batch-file`, {row['slots']} slots a card, "
            f"{model}: {row['seconds']:.1f} s on {row['ranks']} cards, {row['one_seconds']:.1f} s on "
            "one, the start of all processes included; the same lines "
            + ("to the byte." if row["same_lines"] else "up to rounding.")
        )
        blocks += [fill(text, WIDTH), ""]
    return "\n".join([*blocks, "![Efficiency by operator, pass and scaling](pictures/cards.png)", ""])


def least(counts):
    low, high = (f"{bound / 1e6:.2f}" for bound in bounds(counts))
    return low if low == high else f"{low} to {high}"


def bounds(numbers):
    numbers = list(numbers)
    return min(numbers), max(numbers)


def draw(result, picture=PICTURE):
    """Efficiency of operators and trainings, a bar for each count of cards."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases: dict[str, dict] = {}
    for row in operators(result):
        cases.setdefault(f"{row['op']} {name(row)}, {row['scaling']}", {})[row["ranks"]] = row
    for row in of_kind(result, "training"):
        cases.setdefault(f"training, {row['training']}", {})[row["ranks"]] = row
    counts = sorted({ranks for rows in cases.values() for ranks in rows})
    with plt.rc_context(STYLE):
        size = 8, 1.2 + 0.28 * len(counts) * len(cases)
        image, axis = plt.subplots(figsize=size, layout="constrained")
        for n, ranks in enumerate(counts):
            rows = {place: rows[ranks] for place, rows in enumerate(cases.values()) if ranks in rows}
            places = [place + 0.8 * (n + 0.5) / len(counts) - 0.4 for place in rows]
            found = [100 * row["efficiency"] for row in rows.values()]
            shown = axis.barh(places, found, 0.76 / len(counts), color=OURS)
            labels = [f"{ranks} cards: {x:.0f} %" for x in found]
            axis.bar_label(shown, labels, label_type="center", color="white", fontsize=8)
        axis.axvline(100, color=INK, linewidth=1)
        axis.set_yticks(range(len(cases)), cases)
        axis.set_ylim(len(cases) - 0.4, -0.6)
        axis.set_xlabel(f"efficiency against one {result['meta']['card']}, %")
        image.savefig(picture, dpi=120)
        plt.close(image)


if __name__ == "__main__":
    main()
