"""A plot of one file of benchmarks/results: ours and fla as multiples of the memory floor, a line for each shape."""

import matplotlib
from speed_table import by_label, figure

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of its backend)

OURS, FLA, INK = "#0b6e8a", "#d9822b", "#333333"
PANELS = (("gla", "rwkv6"), ("gla_step", "rwkv6_step"))


def draw(result, path):
    rows = result["rows"]
    groups = [by_label(rows, "forward"), by_label(rows, "step")]
    image, axes = plt.subplots(2, 2, figsize=(11, 8), sharex="row", sharey="row", layout="constrained",
                                height_ratios=[len(group) + 1.2 for group in groups])
    for group, across, ops in zip(groups, axes, PANELS):
        for axis, op in zip(across, ops):
            panel(axis, op, {label: pair[op] for label, pair in group.items() if op in pair})
        names = ["   ".join(filter(None, (what, shape))) for shape, what in group]
        across[0].set_yticks(range(len(names)), names)
        across[0].set_ylim(len(names) - 0.4, -0.6)
        limit_x(across[0], rows, ops)
    for axis in axes.flat:
        axis.set_xlabel("times the memory floor", fontsize=9)
    axes[0, 0].set_ylabel("B, T, H, D")
    axes[1, 0].set_ylabel("sequences")
    handles, names = axes[0, 0].get_legend_handles_labels()
    image.legend(handles, names, loc="outside upper right", ncols=3, frameon=False)
    meta = result["meta"]
    image.suptitle(f"Forward passes and steps on {meta['card']}, {meta['date']}", x=0.01, ha="left", fontsize=12)
    image.savefig(path, dpi=130)
    plt.close(image)


def panel(axis, op, rows):
    axis.set_title(op, loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.set_xscale("log")
    axis.axvline(1, color=INK, linewidth=1.2, label="floor")
    axis.grid(axis="x", which="major", color="#e4e4e4")
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    for y, row in enumerate(rows.values()):
        found = [row[field] / row["floor_ms"] for field in ("ours_ms", "fla_ms") if row[field]]
        axis.hlines(y, 1, max(found, default=1), color="#c8c8c8", linewidth=1.5, zorder=1)
    for field, color, name, beside in (("ours_ms", OURS, "linattn_np", {"xytext": (-4, 5)}),
                                       ("fla_ms", FLA, "flash-linear-attention", {"xytext": (-4, -12)})):
        points = [(row[field] / row["floor_ms"], y, row[field]) for y, row in enumerate(rows.values()) if row[field]]
        axis.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=42, color=color, label=name, zorder=3)
        for x, y, ms in points:
            axis.annotate(time(ms), (x, y), textcoords="offset points", fontsize=7.5, color=color, **beside)


def limit_x(axis, rows, ops):
    longest = max((row[field] / row["floor_ms"] for row in rows if row["op"] in ops
                   for field in ("ours_ms", "fla_ms") if row[field]), default=1)
    axis.set_xlim(0.8, longest * 1.6)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick < longest * 1.6]
    axis.set_xticks(ticks, [f"{tick}x" for tick in ticks])
    axis.minorticks_off()


def time(ms):
    return f"{figure(ms)} ms" if ms >= 0.1 else f"{figure(ms * 1e3)} µs"
