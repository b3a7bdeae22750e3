"""What the portable kernels may take on cards that were not measured: estimates from their times on one that was.

    python benchmarks/run.py --kernels portable --out benchmarks/results/portable/<card>.json
    python benchmarks/other_cards.py            prints the tables that benchmarks/speed_table.py writes

A time on the measured card is taken to be bound by memory alone, and then by the tensor cores alone: scaled by the
cards' published bandwidths, and by their published rates of the dtype's products, dense and summed in float32. The
estimate is the longer of the two. Clocks, caches and the number of multiprocessors are left out. The published rate of
an H200 is that of wgmma, which these kernels do not use: it makes the others' estimates longer.
"""

import json
from dataclasses import dataclass
from textwrap import fill

from rwkv6_table import RESULTS, WIDTH, table

OPERATOR = "gla"
DTYPES = ("bfloat16", "float32", "tf32", "float16")


@dataclass(frozen=True)
class Card:
    name: str
    bandwidth: float  # GB/s
    halves: float  # bfloat16 and float16, TFLOP/s
    tf32: float
    source: str

    def times_slower(self, measured, dtype) -> float:
        """How many times as long as on the card `measured`."""
        rate = "halves" if dtype in ("bfloat16", "float16") else "tf32"
        return max(measured.bandwidth / self.bandwidth, getattr(measured, rate) / getattr(self, rate))


MEASURED = {"NVIDIA H200": Card("H200", 4800, 989, 494.5, "NVIDIA H200 datasheet")}  # by the driver's name
CARDS = (
    Card("A100 80 GB", 2039, 312, 156, "NVIDIA A100 datasheet"),
    Card("L40S", 864, 362, 183, "NVIDIA L40S datasheet"),
    Card("RTX 4090", 1008, 165.2, 82.6, "NVIDIA Ada GPU architecture whitepaper"),
    Card("RTX 5090", 1792, 209.5, 104.8, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
)


def main():
    for path in sorted((RESULTS / "portable").glob("*.json")):
        print(of(path, DTYPES))


def of(path, dtypes) -> str:
    """Measured and estimated milliseconds of each shape in these dtypes."""
    result = json.loads(path.read_text())
    measured = MEASURED[result["meta"]["card"]]
    said = (
        f"`{OPERATOR}` with the portable kernels and trained gates, milliseconds forward / backward. The "
        f"{measured.name} took them in place of its own; other cards' times are **estimated** (~), scaled by the "
        "published bandwidth or rate of tensor cores, whichever gives more."
    )
    rates = "; ".join(
        f"{card.name} {card.bandwidth:,.0f} GB/s, {card.halves:g} and {card.tf32:g} TFLOP/s ({card.source})"
        for card in (measured, *CARDS)
    )
    said += f" None of the others was measured. Bandwidths, dense rates of half and tf32 products: {rates}."
    heads = ["B, T, H, D", "", f"{measured.name}, measured", *(f"{card.name}, estimated" for card in CARDS)]
    return "\n".join([fill(said, WIDTH), "", *table(heads, estimates(result["rows"], measured, dtypes)), ""])


def estimates(rows, measured, dtypes):
    """A line for each dtype and shape."""
    times = {}
    for row in rows:
        if row["op"] == OPERATOR and row["gate"] == "trained" and row["ours_ms"] and row["dtype"] in dtypes:
            shape = ", ".join(str(row[axis]) for axis in "BTHK")
            times.setdefault((row["dtype"], shape), {})[row["pass"]] = row["ours_ms"]
    return [
        [shape, dtype, *(cell(passes, card.times_slower(measured, dtype)) for card in (measured, *CARDS))]
        for (dtype, shape), passes in sorted(times.items(), key=lambda pair: dtypes.index(pair[0][0]))
    ]


def cell(passes, factor) -> str:
    """Two digits of an estimate, three of what was measured."""
    digits = 3 if factor == 1 else 2
    mark = "" if factor == 1 else "~"
    return mark + " / ".join(
        f"{float(f'{passes[kind] * factor:.{digits}g}'):g}" if kind in passes else "-"
        for kind in ("forward", "backward")
    )


if __name__ == "__main__":
    main()
