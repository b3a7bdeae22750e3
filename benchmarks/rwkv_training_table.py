"""Writes docs/training.md's table of speeds, and draws its picture, out of benchmarks/results/training.

python benchmarks/rwkv_training.py --out benchmarks/results/training/nvidia-h200.json
python benchmarks/rwkv_training.py --version 7 --out benchmarks/results/training/nvidia-h200-rwkv7.json
python benchmarks/rwkv_training_table.py
"""

import json
from pathlib import Path
from textwrap import fill

import numpy as np
from rwkv6_table import ROOT, WIDTH, between, count, table

from linattn_np.command.palette import FLA, INK, STYLE
from linattn_np.command.palette import OURS as OURS_COLOR

PAGE, RESULTS = ROOT / "docs" / "training.md", ROOT / "benchmarks" / "results" / "training"
PICTURE = ROOT / "docs" / "pictures" / "training.png"
BEGIN, END = "<!-- written by benchmarks/rwkv_training_table.py -->\n", "<!-- end of what it writes -->\n"
OURS, PEER = "linattn-np", "fla"


def main():
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, "\n".join(map(speeds, results))))
    draw([result for result in results if isinstance(result["curve"].get(PEER), list)], PICTURE)


def speeds(result) -> str:
    rows = {(row["size"], row["who"]): row for row in result["rows"]}
    cells, slower = [], []

    def earlier(row):
        return f", {day}" if (day := row.get("date", result["date"])) != result["date"] else ""

    for (size, who), row in rows.items():
        if "skipped" in row:
            cells.append([shown(size), who, "", "", "", "", f"not measured: {row['skipped']}"])
            continue
        ours = rows[size, OURS]["tokens_per_s"]
        ratio = "" if who == OURS else f"{row['tokens_per_s'] / ours:.2f}"
        if who == PEER and row["tokens_per_s"] > ours:
            slower.append(f"{PEER} ({shown(size)}, {ratio} times)")
        cells.append(
            [
                shown(size),
                who + earlier(row),
                f"{row['ms']:.1f}",
                count(row["tokens_per_s"]),
                f"{row['matrix_rate_share']:.0%}",
                f"{row['memory_gib']:.1f}",
                ratio,
            ]
        )
    rate = f"{result['matrix_rate'] / 1e12:.0f} TFLOP/s"
    days = " Rows with a date are of that day's run." if any(map(earlier, result["rows"])) else ""
    text = (
        f"RWKV-{result.get('version', 6)}, {result['device']}, {result['date']}, bfloat16, heads of 64; layers x "
        f"channels, sequences x bytes a step. The share is of 6 operations a parameter and byte over {rate}.{days}"
    )
    if any(who == PEER for _, who in rows):
        text += (
            f" {PEER} is a model of flash-linear-attention's kernels with torch's fused AdamW, in the same run"
            f"{of_configurations(result)}. "
            + (f"Peers that are faster: {', '.join(slower)}." if slower else "It is not faster in any row.")
        )
    text = f"{text} {result.get('note', '')}".rstrip()
    head = ["", "", "ms a step", "bytes/s", "share of the matrix rate", "memory, GiB", "times ours"]
    return "\n".join([fill(text, WIDTH), "", *table(head, cells), ""])


def of_configurations(result) -> str:
    tried = result.get("tuned_over")
    return f", its kernels tuned over at most {tried} of their configurations each" if tried else ""


def shown(size) -> str:
    """ "4x256@64x512" in words."""
    model, step = size.split("@")
    return f"{model}, {step}"


def draw(results, image: Path):
    """Both losses of each version against the bytes read, and their difference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        how = dict(figsize=(7.5, 5), sharex="col", sharey="row", height_ratios=(3, 1), layout="constrained")
        figure, axes = plt.subplots(2, len(results), squeeze=False, **how)
        for result, (above, below) in zip(results, axes.T):
            curve = result["curve"]
            batch, context = map(int, curve["size"].split("@")[1].split("x"))
            ours, theirs = np.array(curve[OURS]), np.array(curve[PEER])
            read = np.arange(len(ours)) * batch * context / 1e6
            for name, losses, color, width, height in (
                (PEER, theirs, FLA, 3.5, 0.8),
                (OURS, ours, OURS_COLOR, 1.2, 0.7),
            ):
                above.plot(read, losses, color=color, linewidth=width)
                where = dict(transform=above.transAxes, fontweight="bold")
                above.text(0.4, height, name.replace("-", "_"), color=color, **where)
            above.set_title(f"RWKV-{result.get('version', 6)}, {shown(curve['size'])}")
            below.plot(read, ours - theirs, color=INK, linewidth=1)
            below.set_xlabel("bytes read, millions")
        axes[0, 0].set_ylabel("loss, nats a byte")
        axes[1, 0].set_ylabel("ours - fla's")
        for axis in axes.flat:
            axis.grid()
        figure.suptitle("bfloat16: the same weights, batches and learning rates")
        figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()
