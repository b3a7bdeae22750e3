"""A plot of RWKV-6's decoding on a GPU: tokens/s against sequences, beside the floor and the peers.

python benchmarks/rwkv6_table.py        # draws it beside its tables, out of benchmarks/results
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of its backend)

OURS, INK = "#0b6e8a", "#333333"
PEERS = ("#d9822b", "#7a5195", "#6a994e", "#bc4749")


def draw(result, path):
    rows = result["rows"]
    sequences = [row["batch"] for row in rows]
    image, axis = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.plot(sequences, [floor(row) for row in rows], color=INK, linewidth=1.2, linestyle="--", label="the floor's")
    axis.plot(sequences, [rate(row) for row in rows], color=OURS, marker="o", label="linattn_np")
    for row in rows:
        put(axis, row, f"{rate(row):,.0f}\n{row['ms'] / row['floor_ms']:.2f} x the floor's time", OURS)
    for (name, peer), color in zip(measured(result), PEERS):
        its = peer["rows"]
        axis.plot([row["batch"] for row in its], [rate(row) for row in its], "s-", color=color, label=named(name, its))
        if its[1:]:
            put(axis, its[-1], f"{rate(its[-1]):,.0f}", color)
    axis.set_xticks(sequences, [str(batch) for batch in sequences])
    axis.minorticks_off()
    axis.set_xlim(sequences[0] / 1.5, sequences[-1] * 3)  # the last one's text stands beside it
    axis.grid(color="#e4e4e4")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("sequences")
    axis.set_ylabel("tokens/s")
    axis.legend(frameon=False)
    model = result["model"]
    what = f"RWKV-6, {model['L']} x {model['D']}, {result['dtype']}: decoding on {result['device']}"
    image.suptitle(what, x=0.01, ha="left", fontsize=12)
    image.savefig(path, dpi=130)
    plt.close(image)


def measured(result):
    return [(name, peer) for name, peer in result["peers"].items() if "skipped" not in peer]


def named(name, rows):
    """A peer's name, with its figure where it has but one point."""
    return name if rows[1:] else f"{name}: {rate(rows[0]):,.0f} with {rows[0]['batch']}"


def rate(row):
    """Tokens a second."""
    return row["batch"] / row["ms"] * 1e3


def floor(row):
    return row["batch"] / row["floor_ms"] * 1e3


def put(axis, row, text, color):
    axis.annotate(text, (row["batch"], rate(row)), textcoords="offset points", xytext=(6, -22), fontsize=8, color=color)
