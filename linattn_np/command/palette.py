"""The colours of all pictures, which are visible on white and on black. One for each library, OTHER for those that are
not named here; and, in pictures of this package's operators alone, one for each operator that they show.
"""

INK, GRID = "#6e7781", "#6e778155"  # of text and axes; of the grid
OURS, FLA, TORCH, OTHER = "#0f86a5", "#d9822b", "#9a5fb4", "#5f9a4e"
SOFTMAX, GLA, RWKV6, RETENTION = "#c2483d", OURS, "#74bfd3", "#3d6fb6"
INKED = "text.color axes.labelcolor axes.edgecolor axes.titlecolor xtick.color ytick.color".split()
STYLE = {  # matplotlib's rcParams
    **dict.fromkeys(INKED, INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.axisbelow", "savefig.transparent"), True),
    "axes.prop_cycle": f"cycler('color', {[OURS, SOFTMAX, OTHER, RWKV6]})",
    "grid.color": GRID,
}


def label_ends(axis, ends):
    """Writes the names of a picture's lines beside their ends, without overlaps. It measures the picture as it is: call
    it last.

    ends : [(name, colour, x, y)] of the lines
    """
    # heights, places, highest: in points from the picture's lower edge
    gap = 13  # the least distance of two names, in points
    axis.figure.draw_without_rendering()  # computes the positions of the axes
    scale = axis.figure.dpi / 72
    heights = [axis.transData.transform((x, y))[1] / scale for *_, x, y in ends]
    ordered = sorted(zip(heights, ends), key=lambda one: one[0])
    places, place = [], -float("inf")
    for height, _ in ordered:  # names are moved upwards, then downwards again if they are above the axes
        places.append(place := max(height, place + gap))
    highest = axis.bbox.ymax / scale
    for n in reversed(range(len(places))):
        places[n] = min(places[n], highest)
        highest = places[n] - gap
    for (height, (name, colour, x, y)), place in zip(ordered, places, strict=True):
        where = {"xytext": (9, place - height), "textcoords": "offset points", "va": "center"}
        axis.annotate(name, (x, y), color=colour, fontsize=9, annotation_clip=False, **where)
