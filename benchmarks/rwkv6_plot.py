"""A plot of RWKV-6's decoding on a GPU: tokens/s against sequences, beside the floor and the peers.

python benchmarks/rwkv6_table.py        # draws it beside its tables, out of benchmarks/results
"""

import matplotlib

from linattn_np.command.palette import FLA, INK, OTHER, OURS, STYLE, TORCH

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of its backend)

PEERS = {"fla": FLA, "rwkv cuda bf16": TORCH}  # and OTHER; the package rwkv computes with torch


@plt.rc_context(STYLE)
def draw(result, path):
    rows = result["rows"]
    sequences = [row["batch"] for row in rows]
    image, axis = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.plot(sequences, [floor(row) for row in rows], color=INK, linewidth=1.2, linestyle="--")
    where = {"xytext": (-60, 6), "textcoords": "offset points"}
    axis.annotate("the floor", (sequences[-2], floor(rows[-2])), color=INK, **where)
    axis.plot(sequences, [rate(row) for row in rows], color=OURS, marker="o")
    for row in rows:
        name = "linattn_np: " if row is rows[0] else ""
        put(axis, row, f"{name}{rate(row):,.0f}\n{row['ms'] / row['floor_ms']:.2f} x the floor's time", OURS)
    single = 0  # peers of one row: their marks stand side by side
    for name, peer in measured(result):
        its, color = peer["rows"], PEERS.get(name, OTHER)
        shift = 1 if its[1:] else 1.15**single
        axis.plot([shift * row["batch"] for row in its], [rate(row) for row in its], "s-", color=color)
        if its[1:]:
            put(axis, its[-1], f"{rate(its[-1]):,.0f}", color)
            put(axis, its[1], f"{name}: {rate(its[1]):,.0f}", color)
        else:
            beside = {"xytext": (-4, 10 + 11 * single), "textcoords": "offset points", "fontsize": 8}
            axis.annotate(f"{name}: {rate(its[0]):,.0f}", (its[0]["batch"], rate(its[0])), color=color, **beside)
            single += 1
    axis.set_xticks(sequences, [str(batch) for batch in sequences])
    axis.minorticks_off()
    axis.set_xlim(sequences[0] / 1.5, sequences[-1] * 4)  # the last one's text stands beside it
    axis.grid()
    axis.set_xlabel("sequences, log scale")
    axis.set_ylabel("tokens/s, log scale")
    model = result["model"]
    what = f"RWKV-6, {model['L']} x {model['D']}, {result['dtype']}: decoding on {result['device']}"
    image.suptitle(what, x=0.01, ha="left", fontsize=12)
    image.savefig(path, dpi=130)
    plt.close(image)


def measured(result):
    return [(name, peer) for name, peer in result["peers"].items() if "skipped" not in peer]


def rate(row):
    """Tokens a second."""
    return row["batch"] / row["ms"] * 1e3


def floor(row):
    return row["batch"] / row["floor_ms"] * 1e3


def put(axis, row, text, color):
    axis.annotate(text, (row["batch"], rate(row)), textcoords="offset points", xytext=(6, -22), fontsize=8, color=color)
