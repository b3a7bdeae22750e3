"""Writes the table of published models into docs/rwkv.md: python docs/write_models.py

What is computed, from the sizes of a model: the numbers of its parameters, of its file's
bytes, two a parameter, and of those that it takes in memory.
"""

from math import prod
from pathlib import Path

from linattn_np.models.versions import VERSIONS

PAGE = Path(__file__).parent / "rwkv.md"
BEGIN, END = "<!-- models: write_models.py -->\n", "<!-- end of models -->\n"
HUB = "https://huggingface.co/BlinkDL"
FORMATS = ("float32", "bfloat16", "int8", "int4")
WIDER = {6: 3.5, 7: 4}  # the channel mix
# (version, layers, channels, ranks of the low-rank matrices, file of G1, file of World)
MODELS = [
    (7, 12, 768, dict(W=64, A=64, Q=32, G=128), "g1d-0.1b-20260129-ctx8192", "0.1B-v2.8-20241210"),
    (7, 24, 1024, dict(W=64, A=64, Q=32, G=128), "g1d-0.4b-20260210-ctx8192", "0.4B-v2.9-20250107"),
    (7, 24, 2048, dict(W=96, A=96, Q=64, G=256), "g1k-1.5b-20260930-ctx25600", "1.5B-v3-20250127"),
    (7, 32, 2560, dict(W=96, A=96, Q=64, G=320), "g1k-2.9b-20260930-ctx25600", "2.9B-v3-20250211"),
    (7, 32, 4096, dict(W=128, A=128, Q=96, G=480), "g1k-7.2b-20260930-ctx25600", ""),
    (7, 61, 4096, dict(W=192, A=192, Q=128, G=384), "g1k-13.3b-20260930-ctx25600", ""),
    (6, 24, 2048, {"W": 64, "A": 32, "5A": 160}, "", "1B6-v2.1-20240328"),
    (6, 32, 2560, {"W": 64, "A": 32, "5A": 160}, "", "3B-v2.1-20240417"),
    (6, 32, 4096, {"W": 128, "A": 64, "5A": 320}, "", "7B-v3-20241112"),
    (6, 61, 4096, {"W": 128, "A": 64, "5A": 320}, "", "14B-v2.1-20240719"),
]  # fmt: skip


def main():
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


def table() -> str:
    head = ["", "layers x channels", "parameters, billions", "`.pth`, GB"]
    head += [f"memory in {name}, GB" for name in FORMATS] + ["G1", "World"]
    rows = [row(*model) for model in MODELS]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def row(version, layers, channels, ranks, g1, world) -> list[str]:
    sizes = sizes_of(version, layers, channels, ranks)
    count = parameters(version, sizes)
    memory = [gigabytes(nbytes(version, sizes, name)) for name in FORMATS]
    sizes_in_words = [f"{layers} x {channels}", f"{count / 1e9:.2f}"]
    world = world and link(
        f"rwkv-{version}-world", f"RWKV-x0{version}0-World-{world}-ctx4096", world
    )
    g1 = g1 and link("rwkv7-g1", f"rwkv7-{g1}", g1)
    return [
        f"RWKV-{version}",
        *sizes_in_words,
        gigabytes(2 * count),
        *memory,
        g1,
        world,
    ]


def sizes_of(version, layers, channels, ranks, vocabulary=65536) -> dict:
    """{axis: size} as in `Version.parameter_axes`, with heads of 64 channels."""
    sizes = {"1": 1, "5": 5, "L": layers, "D": channels, "V": vocabulary, "N": 64}
    sizes |= {"H": channels // 64, "F": int(WIDER[version] * channels)}
    return sizes | ranks


def shapes(version, sizes) -> dict[str, tuple[int, ...]]:
    """{official name: shape} of all parameters."""
    axes = VERSIONS[version].version.parameter_axes(sizes["L"])
    return {name: tuple(sizes[x] for x in axes[name].split()) for name in axes}


def parameters(version, sizes) -> int:
    """The number of all parameters."""
    return sum(map(prod, shapes(version, sizes).values()))


def nbytes(version, sizes, format) -> int:
    """The bytes of all weights in memory, with matrices in `format`."""
    tables, bits = VERSIONS[version].version, 0
    large = set(tables.large_matrices(sizes["L"]))
    for name, shape in shapes(version, sizes).items():
        size, inputs = prod(shape), shape[-1 if name in large else -2 :][0]
        if format == "float32" or not tables.is_matrix(name):
            bits += 32 * size
        elif format == "bfloat16" or name == "emb.weight":
            bits += 16 * size
        elif format == "int4" and name in large:
            bits += 4 * size + 16 * size // 32  # a scale for 32 numbers
        else:
            bits += 8 * size + 32 * size // inputs  # a scale for a row
    return bits // 8


def gigabytes(count) -> str:
    return f"{count / 1e9:.{1 if count >= 1e9 else 2}f}"


def link(repository, file, text) -> str:
    return f"[{text}]({HUB}/{repository}/resolve/main/{file}.pth)"


if __name__ == "__main__":
    main()
