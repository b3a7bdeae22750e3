"""Writes the documentation's tables of RWKV's speed out of the figures in benchmarks/results, and draws a picture.

python benchmarks/rwkv6_gpu.py --out benchmarks/results/nvidia-h200-rwkv6.json
python benchmarks/rwkv6_gpu.py --version 7 --out benchmarks/results/nvidia-h200-rwkv7.json
python benchmarks/rwkv6_cpu.py --out benchmarks/results/<cpu>-rwkv6.json
python benchmarks/rwkv6_cpu.py --version 7 --out benchmarks/results/<cpu>-rwkv7.json
python benchmarks/rwkv6_table.py
"""

import json
from math import prod
from pathlib import Path
from textwrap import fill

import rwkv6_synthetic
from rwkv_training import RATES

ROOT = Path(__file__).parents[1]
README, PAGE, RESULTS = ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "decoding.png"
CARD, WIDTH = "nvidia-h200", 120
EQUAL_BITS = {"float32": "rwkv.cpp FP32", "bfloat16": "rwkv.cpp FP16", "int8": "rwkv.cpp Q8_0", "int4": "rwkv.cpp Q4_0"}
WHAT = {"decode": "decode", "prefill": "prompt"}
OTHERS = {
    "float32": ["rwkv cpu fp32"],
    "bfloat16": ["rwkv cpu bf16"],
    "int4": ["rwkv.cpp Q5_1"],
}  # further peers of a row
BEGIN, END = "<!-- models: rwkv6_table.py -->\n", "<!-- end of models -->\n"


def main():
    from rwkv6_plot import draw

    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, tables()))
    README.write_text(between(README.read_text(), BEGIN, END, summary()))
    for result in results():
        if "peers" in result:
            draw(result, PICTURE)


def between(text, begin, end, new) -> str:
    """`text` with something else between two comments."""
    before, rest = text.split(begin)
    return before + begin + new + end + rest.split(end)[1]


def tables() -> str:
    found = results() + results(7)
    return "\n".join(on_a_gpu(result) if "peers" in result else on_a_cpu(result) for result in found)


def results(version=6) -> list:
    """The files' figures of a version, those of GPUs first."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"*-rwkv{version}.json"))]
    return sorted(found, key=lambda result: "peers" not in result)


def summary() -> str:
    """The README's sentences: tokens a second beside the fastest peer that decodes, reads a prompt, or trains alike."""
    (gpu,), (cpu,) = ([result for result in results() if ("peers" in result) == on_gpu] for on_gpu in (True, False))
    training = json.loads((RESULTS / "training" / f"{CARD}.json").read_text())
    peers = {name: peer for name, peer in gpu["peers"].items() if "skipped" not in peer}
    decoding = []
    for row in gpu["rows"]:
        ms = {name: its["ms"] for name, peer in peers.items() for its in peer["rows"] if its["batch"] == row["batch"]}
        decoding.append(f"{count(row['batch'] / row['ms'] * 1e3)} with {row['batch']} ({beside(ms, row['ms'])})")
    prompt = gpu["prefill"]
    of_prompt = beside({name: peer["prefill"]["ms"] for name, peer in peers.items()}, prompt["ms"])
    steps = {(row["size"], row["who"]): row["tokens_per_s"] for row in training["rows"]}
    trained = [steps[size, "linattn-np"] / steps[size, "fla"] for size in dict.fromkeys(size for size, _ in steps)]
    decoded = [
        row["results"][dtype]["decode"]["tokens_per_s"] / row["results"][peer]["decode"]["tokens_per_s"]
        for dtype, peer in EQUAL_BITS.items()
        for row in cpu["rows"]
    ]
    said = (
        f"RWKV-6 of 1.6 billion parameters on an {gpu['device']} writes, in tokens/s and beside the fastest peer, "
        f"{', '.join(decoding)} sequences. It reads a prompt of {count(prompt['tokens'])} tokens in "
        f"{prompt['ms']:.1f} ms ({of_prompt}) and trains {between_bounds(trained)} times as fast as fla. On two "
        f"threads of an {cpu['device']} it writes {between_bounds(decoded)} times as fast as rwkv.cpp at equal bits. "
        f"{losses([name for row in cpu['rows'] for name in faster_on_cpu(row)])}"
    )
    return fill(said, WIDTH) + "\n"


def beside(times, ours) -> str:
    """How many times the fastest of the peers' milliseconds is."""
    best = min(times, key=times.get)
    return f"{times[best] / ours:.1f} times {best}"


def between_bounds(numbers) -> str:
    low, high = f"{min(numbers):.1f}", f"{max(numbers):.1f}"
    return low if low == high else f"{low} to {high}"


def on_a_gpu(result) -> str:
    measured = {name: peer for name, peer in result["peers"].items() if "skipped" not in peer}
    rows, faster = [], []

    def add(what, tokens, ours, ratio, theirs):
        rate = tokens / ours["ms"] * 1e3
        rates = {name: tokens / row["ms"] * 1e3 for name, row in theirs.items()}
        rows.append(
            [
                what,
                f"{ours['ms']:.2f}",
                count(rate),
                ratio,
                f"{ours['memory_gb']:.1f}",
                *(count(rates[name]) if name in rates else "" for name in measured),
            ]
        )
        faster.extend(f"{name} ({what}, {its / rate:.1f} times)" for name, its in rates.items() if its > rate)

    for row in (*result["rows"], *result["others"]):
        usual = row in result["rows"]
        theirs = {name: its for name, peer in measured.items() for its in peer["rows"] if its["batch"] == row["batch"]}
        what = f"decode, {row['batch']} sequence{'s' * (row['batch'] > 1)}{kept_in(row)}"
        add(what, row["batch"], row, f"{row['ratio']:.2f}", theirs if usual else {})
    prompt = result["prefill"]
    rate = RATES[result["device"].split()[-1]]
    add(
        f"prompt, {prompt['tokens']} tokens",
        prompt["tokens"],
        prompt,
        f"{operations(result) / (prompt['ms'] / 1e3 * rate):.0%} of the rate",
        {name: peer["prefill"] for name, peer in measured.items()},
    )
    model, name = result["model"], f"RWKV{result.get('version', 6)}"
    text = (
        f"{name[:4]}-{name[4:]}, {result['device']}, {result['date']}, {model['L']} layers of {model['D']} channels "
        "(1.6 billion parameters), "
        f"in {result['dtype']} where a row says nothing else. Decoding is a token for each sequence, captured in a "
        "CUDA graph; its floor is the time to read the weights once, to read and write the states, and to write the "
        f"logits, at the {result['copy_tb_per_s']:.1f} TB/s of a copy. A prompt has its share of the matrix rate: of "
        f"{rate / 1e12:.0f} TFLOP/s, with 2 operations a token for every number of the layers' matrices."
    )
    errors = ", ".join(f"{name} {its['error']:.1e}" for name, its in {"ours": result, **measured}.items())
    below = (
        f"{losses(faster)} `{name}.forward`, which takes tokens from the host, has "
        f"{1e3 / result['forward_ms']:,.0f} tokens/s with one sequence. "
        f"Relative errors of a prompt's logits against float32: {errors}. " + " ".join(versions(measured))
    )
    skipped = "".join(
        f" {name} was not measured: {peer['skipped']}." for name, peer in result["peers"].items() if "skipped" in peer
    )
    head = [
        "",
        "ms",
        "tokens/s",
        "times the floor, share of the rate",
        "memory, GB",
        *(f"{name}, {its['date']}, tokens/s".replace(f", {result['date']}", "") for name, its in measured.items()),
    ]
    return "\n".join([fill(text, WIDTH), "", *table(head, rows), "", fill(below + skipped, WIDTH), ""])


def operations(result) -> int:
    """The operations of a prompt in the matrices of the layers; only the last token has logits."""
    shapes = rwkv6_synthetic.shapes(**result["model"], version=result["version"]).items()
    sizes = [prod(shape) for name, shape in shapes if name[:7] == "blocks." and rwkv6_synthetic.is_matrix(name, shape)]
    return 2 * sum(sizes) * result["prefill"]["tokens"]


def kept_in(row) -> str:
    """What a row has in another type than the others."""
    matrices, state = (row[name] for name in ("matrices", "state"))
    return f", {matrices}" * (matrices != "bfloat16") + f", states in {state}" * (state != "float32")


def versions(measured):
    """A sentence a package."""
    return dict.fromkeys(
        f"{name.split()[0]} is version {peer['version']}{how_built(peer)}." for name, peer in measured.items()
    )


def how_built(peer) -> str:
    tuned = f", tuned over at most {peer.get('tuned_over')} configurations a kernel" * ("tuned_over" in peer)
    return ", with its own CUDA kernels" * peer.get("own_kernels", False) + tuned


def at_equal_bits(found, dtype) -> dict:
    return {name: found[name] for name in (EQUAL_BITS[dtype], *OTHERS.get(dtype, ())) if name in found}


def faster_on_cpu(row) -> list[str]:
    """Peers that are, at equal bits, and what in."""
    found = row["results"]
    return [
        f"{name} ({row['L']} x {row['D']}, {dtype}, {word}, {found[dtype][what]['ms'] / its[what]['ms']:.2f} times)"
        for dtype in EQUAL_BITS
        for name, its in at_equal_bits(found, dtype).items()
        for what, word in WHAT.items()
        if what in its and its[what]["ms"] < found[dtype][what]["ms"]
    ]


def on_a_cpu(result) -> str:
    rows = []
    for row in result["rows"]:
        found = row["results"]
        for dtype in EQUAL_BITS:
            ours, model = found[dtype], f"{row['L']} x {row['D']}, {dtype}"
            theirs = at_equal_bits(found, dtype)
            cells = [
                name + " " + ", ".join(count(its[what]["tokens_per_s"]) for what in WHAT if what in its)
                for name, its in theirs.items()
            ]
            rows.append(
                [
                    model,
                    f"{ours['bytes'] / 1e6:,.0f}",
                    f"{ours['decode']['ms']:.2f}",
                    count(ours["decode"]["tokens_per_s"]),
                    f"{ours['decode']['times_float32']:.2f}",
                    count(ours["prefill"]["tokens_per_s"]),
                    f"{ours['prefill']['times_float32']:.2f}",
                    "; ".join(cells),
                ]
            )
    floors = " and ".join(
        f"{row['results']['floor']['decode']['ms']:.1f} ms at {row['L']} x {row['D']}" for row in result["rows"]
    )
    text = (
        f"RWKV-{result.get('version', 6)}, {result['device']}, {result['threads']} threads, one sequence, models of "
        "layers x channels. Decoding "
        f"in float32 takes at least the time to read the weights as one matrix, {floors}; a prompt has "
        f"{result['prefill']} tokens. "
        "Factors are medians of pairs within a round, figures medians of all rounds. rwkv.cpp keeps the head in 16 "
        f"bits in its quantised models. Kernels are {result['kernels']}. {result['note']}".rstrip()
    )
    head = [
        "",
        "MB",
        "decode, ms",
        "tokens/s",
        "times float32",
        "prompt, tokens/s",
        "times float32",
        "peers at equal bits: decode, prompt, tokens/s",
    ]
    said = losses([name for row in result["rows"] for name in faster_on_cpu(row)])
    return "\n".join([fill(text, WIDTH), "", *table(head, rows), "", fill(said, WIDTH), ""])


def losses(faster):
    return f"Peers that are faster: {', '.join(faster)}." if faster else "No peer that was measured is faster."


def count(number):
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def table(head, rows):
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()
