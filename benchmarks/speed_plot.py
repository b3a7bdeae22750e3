"""Plots of one file of benchmarks/results: ours and fla as multiples of the memory floor, a line for each shape."""

import matplotlib
from speed_table import LEAD, by_label, figure, led

from linattn_np.command.palette import FLA, GRID, INK, OURS, STYLE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of its backend)

PASSES = (
    ("forward", ("gla", "rwkv6"), "B, T, H, D"),
    ("backward", ("gla", "rwkv6"), "B, T, H, D"),
)
PANELS = (*PASSES, ("step", ("gla_step", "rwkv6_step"), "sequences"))


@plt.rc_context(STYLE)
def draw(result, path):
    """All of it."""
    draw_panels(result, path, PANELS, headline, "bfloat16 and gates of trained models, or what a row says")


@plt.rc_context(STYLE)
def draw_lead(result, path):
    """The README's: how many times as fast as fla, a bar for each operator and pass at each shape of LEAD."""
    found = led(result["rows"])
    image, axes = plt.subplots(1, len(found), figsize=(11, 2.1), sharey=True, layout="constrained")
    for axis, ((op, kind), rows) in zip(axes, found.items()):
        bars = [rows[shape] for shape in LEAD]
        times = [row["peer_ms"] / row["ours_ms"] for row in bars]
        shown = axis.barh(LEAD, times, 0.62, color=OURS)
        axis.bar_label(shown, [f"{x:.1f}x" for x in times], label_type="center", color="white", fontweight="bold")
        axis.bar_label(shown, [f" {time(row['ours_ms'])}" for row in bars], color=INK, fontsize=8)
        axis.axvline(1, color=FLA, linewidth=2.5)
        axis.set_title(op + " gradient" * (kind == "backward"), loc="left", fontsize=11, fontweight="bold", color=INK)
        axis.set_xlim(0, 1.35 * max(times))
        axis.set_xticks([1], ["fla"], color=FLA)
        axis.tick_params(axis="both", length=0)
        axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[0].set_ylabel("B, T, H, D", rotation=0, ha="right", va="center", color=INK)
    image.suptitle(f"Times as fast as flash-linear-attention, {result['meta']['card']}", x=0.01, ha="left", color=INK)
    image.savefig(path, dpi=130)
    plt.close(image)


def draw_panels(result, path, panels, chosen, words):
    rows = result["rows"]
    shown = [(*across, group) for across in panels if (group := chosen(by_label(rows, across[0])))]
    heights = [len(group) + 1.5 for *_, group in shown]
    image, axes = plt.subplots(
        len(shown),
        2,
        figsize=(8.5, 0.38 * sum(heights)),
        sharex="row",
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for (kind, ops, sizes, group), across in zip(shown, axes):
        for axis, op in zip(across, ops):
            panel(
                axis,
                op + " backward" * (kind == "backward"),
                {y: pair[op] for y, pair in enumerate(group.values()) if op in pair},
            )
        names = ["   ".join(filter(None, (what, shape))) for shape, what in group]
        across[0].set_yticks(range(len(names)), names)
        above = {"xycoords": "axes fraction", "xytext": (-14, 6), "textcoords": "offset points", "ha": "right"}
        across[0].annotate(sizes, (0, 1), fontsize=9, color=INK, **above)
        across[0].set_ylim(len(names) - 0.1, -0.6)
        limit_x(across[0], [pair[op] for pair in group.values() for op in ops if op in pair])
    for axis in axes.flat:
        axis.set_xlabel("times the memory floor, log scale", fontsize=9)
    label_points(axes[0, 0], next(iter(shown[0][3].values()))[shown[0][1][0]])
    meta = result["meta"]
    title = f"Times on {meta['card']}, {meta['date']}\n{words}"
    image.suptitle(title, x=0.01, ha="left", fontsize=12)
    image.savefig(path, dpi=130)
    plt.close(image)


def label_points(axis, row):
    """Names the points of a panel above its first row."""
    for field, name, color in (("ours_ms", "linattn_np", OURS), ("peer_ms", "fla", FLA)):
        where = {"xytext": (0, 42), "textcoords": "offset points", "ha": "center"}
        place = row[field] / row["floor_ms"], 0
        axis.annotate(name, place, color=color, fontsize=9, fontweight="bold", annotation_clip=False, **where)


def headline(group):
    """Without what the tables have besides: weak gates' rows in float16, and logsigmoid's of shapes that are there."""
    shapes = {shape for shape, what in group if not what}
    return {
        (shape, what): pair
        for (shape, what), pair in group.items()
        if what != "weak gates, float16" and not (what == "logsigmoid gates" and shape in shapes)
    }


def panel(axis, title, rows):
    """`rows` by their place from the top."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.set_xscale("log")
    axis.axvline(1, color=INK, linewidth=1.2)
    axis.grid(axis="x", which="major")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    for y, row in rows.items():
        found = [row[field] / row["floor_ms"] for field in ("ours_ms", "peer_ms") if row[field]]
        axis.hlines(y, 1, max(found, default=1), color=GRID, linewidth=1.5, zorder=1)
    for field, color, beside in (("ours_ms", OURS, {"xytext": (2, 5)}), ("peer_ms", FLA, {"xytext": (2, -12)})):
        points = [(row[field] / row["floor_ms"], y, row[field]) for y, row in rows.items() if row[field]]
        axis.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=42, color=color, zorder=3)
        for x, y, ms in points:
            axis.annotate(time(ms), (x, y), textcoords="offset points", fontsize=8, color=color, **beside)


def limit_x(axis, rows):
    longest = max(
        (row[field] / row["floor_ms"] for row in rows for field in ("ours_ms", "peer_ms") if row[field]), default=1
    )
    axis.set_xlim(0.8, longest * 1.6)
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100) if tick < longest * 1.6]
    axis.set_xticks(ticks, ["floor", *(f"{tick}x" for tick in ticks[1:])])
    axis.minorticks_off()


def time(ms):
    return f"{figure(ms)} ms" if ms >= 0.1 else f"{figure(ms * 1e3)} µs"
