"""Draws the pictures of docs/mathematics.md, SVG files without any library: python docs/pictures/draw.py"""

from pathlib import Path

from linattn_np.command.palette import FLA as ORANGE
from linattn_np.command.palette import OTHER as GREEN
from linattn_np.command.palette import OURS as BLUE

HERE = Path(__file__).parent
PALE = "#8c959f"  # drawn at a third of its strength
CELL = 14
ON_COLOR = ' style="fill: #1f2328"'  # words on a full colour, in both themes
LIGHT, DARK = (
    f"text, .tip {{ fill: {ink} }} .line {{ stroke: {ink} }} .box {{ stroke: {paper} }}"
    for ink, paper in (("#333333", "#ffffff"), ("#d0d7de", "#0d1117"))
)
STYLE = f"<style>{LIGHT} @media (prefers-color-scheme: dark) {{ {DARK} }}</style>"


def svg(name, width, height, parts):
    text = "\n".join(parts)
    (HERE / name).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13">\n{STYLE}\n{text}\n</svg>\n'
    )


def box(x, y, width, height, color, opacity=1.0):
    shown = opacity / 3 if color == PALE else opacity
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" fill-opacity="{shown:.3g}" '
        'class="box"/>'
    )


def words(x, y, text, anchor="start", style=""):
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{style}>{text}</text>'


def label(x, y, mark, *lines):
    """Lines of text, the first at height y, beside a line to its mark (x, y): those left of it end at x."""
    right, middle = mark[0] < x, y - 4 + 8 * (len(lines) - 1)
    start = f'<line x1="{mark[0]}" y1="{mark[1]}" x2="{x - 6 if right else x + 6}" y2="{middle}" class="line"/>'
    dot = f'<circle cx="{mark[0]}" cy="{mark[1]}" r="2.5" class="tip"/>'
    return [
        start,
        dot,
        *(
            words(x, y + 16 * n, line, "start" if right else "end")
            for n, line in enumerate(lines)
        ),
    ]


def chunk():
    """Two chunks of 8 tokens: which part of an output comes from the state, which from the chunk itself."""
    parts, left, top, C = [], 190, 40, 8
    for n in range(2):
        x0, y0 = left + n * C * CELL, top + n * C * CELL
        for i in range(C):
            for j in range(C):
                x, y = x0 + j * CELL, y0 + i * CELL
                parts.append(box(x, y, CELL, CELL, BLUE if j <= i else PALE))
        if n:
            parts.append(box(left, y0, C * CELL, C * CELL, ORANGE))
    side = C * CELL
    parts += [
        words(left, 28, "keys and values, chunk after chunk"),
        words(180, top + 60, "queries of chunk 1", "end"),
        words(180, top + 60 + side, "queries of chunk 2", "end"),
        *label(
            left + 2 * side + 24, 64, (left + side - 20, 60), "the future: never read"
        ),
        *label(
            left + 2 * side + 24,
            252,
            (left + 2 * side - 30, 248),
            "scores A of the chunk's own tokens",
        ),
        words(
            left + side / 2, top + 1.5 * side - 4, "earlier chunks,", "middle", ON_COLOR
        ),
        words(
            left + side / 2, top + 1.5 * side + 12, "by the state S", "middle", ON_COLOR
        ),
    ]
    svg("chunk.svg", 780, 290, parts)


def subchunks():
    """A chunk of 32 tokens in sub-chunks of 8: the three kinds of pairs."""
    parts, left, top, size = [], 270, 30, 8
    for i in range(32):
        for j in range(32):
            if j > i:
                color = PALE
            elif i // size == j // size:
                color = BLUE
            elif i // 16 == j // 16:
                color = GREEN
            else:
                color = ORANGE
            parts.append(box(left + j * 8, top + i * 8, 8, 8, color))
    right = left + 32 * 8 + 24
    parts += [
        *label(
            left - 24,
            122,
            (left + 20, 126),
            "same half of 16: they meet at",
            "the border of the two sub-chunks",
        ),
        *label(
            left - 24,
            222,
            (left + 20, 222),
            "different halves:",
            "they meet at token 16",
        ),
        *label(right, 84, (left + 220, 80), "the future"),
        *label(
            right,
            260,
            (left + 232, 270),
            "same sub-chunk of 8:",
            "factors meet in its middle",
        ),
    ]
    svg("subchunks.svg", 780, 310, parts)


if __name__ == "__main__":
    chunk()
    subchunks()
