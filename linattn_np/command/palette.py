"""The colours of all pictures, which are seen on white and on black: one for each library, and one for each operator
where all lines are ours.
"""

INK, GRID = "#6e7781", "#6e778155"  # of words and axes, and of what lies behind
OURS, FLA, TORCH, OTHER = "#0f86a5", "#d9822b", "#9a5fb4", "#5f9a4e"
SOFTMAX, GLA, RWKV6, RETENTION = "#c2483d", OURS, "#74bfd3", "#3d6fb6"
STYLE = {  # matplotlib's rcParams
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "axes.prop_cycle": f"cycler('color', {[OURS, SOFTMAX, OTHER, RWKV6]})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "savefig.transparent": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "legend.frameon": False,
}


def label_ends(axis, ends, gap=13):
    """Names lines of a picture at their ends, of which no two names lie on each other.

    ends : (name, colour, x, y) of each
    gap : points between the middles of two names
    """
    axis.figure.draw_without_rendering()  # which says where the axes are
    scale = axis.figure.dpi / 72
    heights = [axis.transData.transform((x, y))[1] / scale for *_, x, y in ends]
    ordered = sorted(zip(heights, ends), key=lambda one: one[0])
    places, place = [], -float("inf")
    for height, _ in ordered:  # upwards from each line's end, then back down where the axes end
        places.append(place := max(height, place + gap))
    highest = axis.bbox.ymax / scale
    for n in reversed(range(len(places))):
        places[n] = min(places[n], highest)
        highest = places[n] - gap
    for (height, (name, colour, x, y)), place in zip(ordered, places, strict=True):
        where = {"xytext": (9, place - height), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, (x, y), color=colour, fontsize=9, annotation_clip=False, **where)
