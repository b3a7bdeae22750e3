"""Writes the documentation's tables of RWKV-6's speed out of the figures in benchmarks/results.

    python benchmarks/rwkv6_gpu.py --out benchmarks/results/nvidia-h200-rwkv6.json
    python benchmarks/rwkv6_cpu.py --out benchmarks/results/<cpu>-rwkv6.json
    python benchmarks/rwkv6_table.py
"""

import json
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
README, PAGE, RESULTS = ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
WIDTH = 120
BEGIN, END = "<!-- RWKV-6's speed, written by benchmarks/rwkv6_table.py -->\n", "<!-- end of RWKV-6's speed -->\n"


def main():
    PAGE.write_text(between(PAGE.read_text(), BEGIN, END, tables()))


def between(text, begin, end, new) -> str:
    """`text` with something else between two comments."""
    before, rest = text.split(begin)
    return before + begin + new + end + rest.split(end)[1]


def tables() -> str:
    results = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*-rwkv6.json"))]
    return "\n".join(on_a_gpu(result) if "peers" in result else on_a_cpu(result)
                     for result in sorted(results, key=lambda result: "peers" not in result))


def on_a_gpu(result) -> str:
    measured = {name: peer for name, peer in result["peers"].items() if "skipped" not in peer}
    rows, faster = [], []

    def add(what, tokens, ours, ratio, theirs):
        rate = tokens / ours["ms"] * 1e3
        rates = {name: tokens / row["ms"] * 1e3 for name, row in theirs.items()}
        rows.append([what, f"{ours['ms']:.2f}", count(rate), ratio, f"{ours['memory_gb']:.1f}",
                     *(count(rates[name]) if name in rates else "" for name in measured)])
        faster.extend(f"{name} ({what}, {its / rate:.1f} times)" for name, its in rates.items() if its > rate)

    for row in result["rows"]:
        theirs = {name: its for name, peer in measured.items() for its in peer["rows"] if its["batch"] == row["batch"]}
        what = f"decode, {row['batch']} sequence{'s' * (row['batch'] > 1)}"
        add(what, row["batch"], row, f"{row['ratio']:.2f}", theirs)
    prompt = result["prefill"]
    add(f"prompt, {prompt['tokens']} tokens", prompt["tokens"], prompt, "",
        {name: peer["prefill"] for name, peer in measured.items()})
    model = result["model"]
    text = (f"{result['device']}, {model['L']} layers of {model['D']} channels (1.6 billion parameters) in "
            f"{result['dtype']}. Decoding is a token for each sequence, captured in a CUDA graph; its floor is the time "
            "to read the weights once, and to read and write the states, at the "
            f"{result['copy_tb_per_s']:.1f} TB/s of a copy.")
    errors = ", ".join(f"{name} {its['error']:.1e}" for name, its in {"ours": result, **measured}.items())
    below = (f"{losses(faster)} `RWKV6.forward`, which takes tokens from the host, has "
             f"{1e3 / result['forward_ms']:,.0f} tokens/s with one sequence. "
             f"Relative errors of a prompt's logits against float32: {errors}. {' '.join(versions(measured))}")
    skipped = "".join(f" {name} was not measured: {peer['skipped']}."
                      for name, peer in result["peers"].items() if "skipped" in peer)
    head = ["", "ms", "tokens/s", "times the floor", "memory, GB", *(f"{name}, tokens/s" for name in measured)]
    return "\n".join([fill(text, WIDTH), "", *table(head, rows), "", fill(below + skipped, WIDTH), ""])


def versions(measured):
    """A sentence a package."""
    kernels = ", with its own CUDA kernels"
    return dict.fromkeys(f"{name.split()[0]} is version {peer['version']}{kernels * peer.get('own_kernels', False)}."
                         for name, peer in measured.items())


def on_a_cpu(result) -> str:
    rows, faster = [], []
    peers = [name for name in ("rwkv", "rwkv.cpp") if f"{name} decode" in result["rows"][0]]
    for row in result["rows"]:
        model = f"{row['L']} x {row['D']}"
        for what, ours, ratio in (("decode", "decode", f"{row['decode / floor']:.2f}"), ("prompt", "prefill", "")):
            rate, theirs = (row[ours]["tokens_per_s"],
                            {name: row[f"{name} {ours}"]["tokens_per_s"] for name in peers})
            rows.append([f"{model}, {what}", f"{row[ours]['ms']:.2f}", count(rate), ratio, *map(count, theirs.values())])
            faster += [f"{name} ({model}, {what}, {its / rate:.2f} times)" for name, its in theirs.items() if its > rate]
    text = (f"{result['device']}, {result['threads']} threads, models of layers x channels in float32, one sequence. "
            f"The floor of decoding is the time to read the weights once; a prompt has {result['prefill']} tokens.")
    head = ["", "ms a token", "tokens/s", "times the floor", *(f"{name}, tokens/s" for name in peers)]
    return "\n".join([fill(text, WIDTH), "", *table(head, rows), "", fill(losses(faster), WIDTH), ""])


def losses(faster):
    return f"Faster than ours: {', '.join(faster)}." if faster else "No peer that was measured is faster."


def count(number):
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def table(head, rows):
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()
