"""Draws the pictures of kernels_cu/README.md beside those of `draw.py`: python docs/pictures/draw_kernels.py"""

from draw import BLUE, GREEN, ORANGE, PALE, box, svg, words

ARROW = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" class="tip"/></marker></defs>'
)


def arrow(*points, dashed=False):
    path = " ".join(f"{x},{y}" for x, y in points)
    dashes = ' stroke-dasharray="5,4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" class="line" stroke-width="1.5" marker-end="url(#tip)"{dashes}/>'


def labelled(x, y, width, height, color, *lines):
    """A box with lines of text, the first of them bold."""
    parts = [box(x, y, width, height, color, 1 if color == PALE else 0.35)]
    for n, line in enumerate(lines):
        weight = ' font-weight="bold"' if n == 0 else ""
        parts.append(f'<text x="{x + 10}" y="{y + 20 + 18 * n}"{weight}>{line}</text>')
    return parts


def roles():
    """A block of Hopper's forward kernel: who reads what, who makes what, and the barriers between them."""
    parts = [ARROW]
    parts += [
        words(10, 72, "q, k, g in memory"),
        words(10, 308, "v in memory"),
        words(10, 332, "o in memory"),
    ]
    parts += labelled(
        200, 40, 230, 52, PALE, "inputs[0], inputs[1]", "a chunk's q, k, g as they came"
    )
    parts += labelled(
        200,
        130,
        230,
        106,
        ORANGE,
        "producer groups 0 and 1",
        "take chunks in turn:",
        "decay q and k,",
    )
    parts += [
        words(210, 204, "score pairs (mma.sync)"),
        words(210, 222, "a warp for every 8 tokens"),
    ]
    parts += labelled(
        500, 112, 190, 124, GREEN, "stages[0], stages[1]", "q from the chunk's start"
    )
    parts += [
        words(510, 168, "k to the chunk's end"),
        words(510, 186, "scores A"),
        words(510, 204, "decay of the chunk"),
    ]
    parts += labelled(
        200,
        290,
        230,
        52,
        PALE,
        "v[warpgroup][slot]",
        "v as it came, then o in its place",
    )
    parts += labelled(
        500,
        278,
        290,
        100,
        BLUE,
        "consumer warpgroups 0 and 1",
        "64 columns of V each (wgmma):",
    )
    parts += [
        words(510, 334, "o = A v + q S,  S = decay S + kᵀ v"),
        words(510, 352, "S stays in registers, float32"),
    ]
    parts += [
        arrow((136, 68), (198, 68)),
        words(166, 60, "TMA", "middle"),
        arrow((310, 92), (310, 128)),
        words(318, 114, "gates, rows"),
        arrow((430, 170), (498, 170)),
        words(463, 162, "make", "middle"),
        arrow((560, 236), (560, 276)),
        words(568, 260, "full"),
        arrow((720, 278), (720, 96), (416, 96), (416, 128), dashed=True),
        words(728, 190, "empty: the stage"),
        words(728, 207, "may be overwritten"),
        arrow((100, 304), (198, 304)),
        words(150, 298, "TMA", "middle"),
        arrow((198, 328), (102, 328)),
        words(150, 345, "TMA", "middle"),
        arrow((430, 304), (498, 304)),
        words(463, 298, "values", "middle"),
        arrow((498, 328), (432, 328)),
        words(463, 345, "o", "middle"),
        words(
            10,
            398,
            "Grey and green: shared memory. Orange and blue: warps. Solid arrows are data, with who moves it or the",
        ),
        words(
            10,
            416,
            "mbarrier that says it is there. The dashed arrow is no data: the mbarrier that permits to write again.",
        ),
    ]
    svg("roles.svg", 870, 428, parts)


def turns():
    """When the roles work: chunk n + 2 is made while chunk n is multiplied."""
    parts, left, width = [ARROW], 200, 150
    rows = (
        ("TMA", 40),
        ("producer group 0", 80),
        ("consumer warpgroups", 120),
        ("producer group 1", 160),
    )
    parts += [words(left - 12, y + 19, name, "end") for name, y in rows]

    def work(y, start, length, color, text):
        return [
            box(left + start * width, y, length * width - 2, 28, color, 0.45),
            words(left + (start + length / 2) * width, y + 19, text, "middle"),
        ]

    for n in range(4):
        parts += work(40, 0.5 * n, 0.48, PALE, f"load {n}")
        parts += work(80 + 80 * (n % 2), 0.5 + 0.5 * n, 0.98, ORANGE, f"make chunk {n}")
        parts += work(120, 1.5 + 0.5 * n, 0.48, BLUE, f"chunk {n}")
    for n in range(4):
        x = left + (1.5 + 0.5 * n) * width
        made, read = (160, 150) if n % 2 else (108, 118)
        parts.append(arrow((x - 4, made), (x + 6, read)))
    parts += [
        words(
            10,
            216,
            "Time runs to the right. An arrow: a chunk's operands stand in shared memory (full); consumers multiply",
        ),
        words(
            10,
            234,
            "them. Here a group makes a chunk in twice the time that consumers need for it: two groups keep them busy.",
        ),
    ]
    svg("turns.svg", 800, 246, parts)


def splitting():
    """Three ways to give one head's work to several blocks."""
    parts = [
        ARROW,
        words(10, 24, "Segments: the sequence is cut, the states between are joined"),
    ]
    left, width = 150, 150
    for n, name in enumerate(("1. summarise", "2. scan", "3. compute")):
        parts.append(words(left - 12, 62 + 42 * n, name, "end"))
    for p in range(4):
        x = left + p * width
        if p < 3:
            parts += [
                box(x, 44, width - 8, 28, ORANGE, 0.45),
                words(x + 71, 62, f"D{p}, S{p} of segment {p}", "middle"),
            ]
            parts.append(arrow((x + 71, 72), (x + 71, 86)))
        parts += [
            box(x, 128, width - 8, 28, BLUE, 0.45),
            words(x + 71, 147, f"o of segment {p}", "middle"),
        ]
        parts.append(arrow((x + 71, 114), (x + 71, 126)))
    parts += [box(left, 88, 4 * width - 8, 26, GREEN, 0.45)]
    parts += [
        words(
            left + 2 * width,
            106,
            "state before segment p + 1  =  Dp (state before segment p) + Sp",
            "middle",
        )
    ]
    for x, name, first, second in (
        (10, "ClusterSplitK: K of 129 to 256", "channels 0-127", "channels 128-255"),
        (400, "ClusterSplitV: few heads", "chunks 0, 2, 4 ...", "chunks 1, 3, 5 ..."),
    ):
        parts.append(words(x, 196, name))
        for rank, made in enumerate((first, second)):
            at = x + rank * 190
            parts += [
                box(at, 210, 170, 44, ORANGE, 0.4),
                words(at + 85, 229, f"block {rank} makes", "middle"),
            ]
            parts.append(words(at + 85, 246, made, "middle"))
            parts += [
                box(at, 290, 170, 44, BLUE, 0.4),
                words(at + 85, 309, "all of it times", "middle"),
            ]
            parts.append(words(at + 85, 326, f"columns of V of block {rank}", "middle"))
            parts.append(arrow((at + 85, 254), (at + 85, 288)))
        parts += [
            arrow((x + 110, 254), (x + 250, 288)),
            arrow((x + 250, 254), (x + 110, 288)),
        ]
    parts.append(
        words(10, 362, "Crossing arrows: copies to the other block's shared memory.")
    )
    svg("splitting.svg", 790, 376, parts)


if __name__ == "__main__":
    roles()
    turns()
    splitting()
