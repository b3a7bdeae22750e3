"""The two orders in which a caller's arrays may have their heads and their tokens."""

LAYOUTS = ("bhtd", "bthd")


def swap_heads(array, axes: str, layout: str):
    """[B, H, T, ...] <-> [B, T, H, ...] for arrays that have both axes; a view, its own inverse."""
    return array.swapaxes(1, 2) if layout == "bthd" and axes.split()[:3] == ["B", "H", "T"] else array


def in_layout(axes: str, layout: str) -> str:
    """The axes of the caller's array, for errors: "B H T K" as "[B, T, H, K]" in layout "bthd"."""
    names = axes.split()
    if layout == "bthd" and names[1:3] in (["H", "T"], ["HK", "T"], ["HK", "S"]):
        names[1:3] = names[2], names[1]
    return f"[{', '.join(names)}]"
