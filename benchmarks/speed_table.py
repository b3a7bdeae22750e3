"""Writes the tables of the operators' speed out of the figures in benchmarks/results, and a plot of each file.

    python benchmarks/run.py --out benchmarks/results/<card>.json
    python benchmarks/speed_table.py

docs/performance.md gets all of them, card by card, with errors, estimates for other cards and the worst of
benchmarks/sweep.py. The README gets CARD's claim, a plot of it, a small table, and what is slow. Plots need
matplotlib; without matplotlib the old plots stay.
"""

import json
import statistics
from textwrap import fill

import attention_table
import other_cards
from peers import MOST, TUNED_HEAD
from rwkv6_table import PAGE, README, RESULTS, WIDTH, between, losses, table

BEGIN = "<!-- operators: speed_table.py -->\n"
END = "<!-- end of operators -->\n"
CLAIM = "<!-- claim: speed_table.py -->\n", "<!-- end of claim -->\n"
LED = ("gla", "rwkv6")
OTHERS = ("simple_gla", "retention", "linear_attention"), ("gated_delta_rule", "kda", "rwkv7")
LEAD = ("4, 4096, 64, 128", "8, 4096, 32, 64", "2, 16384, 16, 128")  # shapes of the README's picture
CARD = "nvidia-h200"
GATES = {
    None: "",
    "trained": "trained gates",
    "weak": "weak gates",
    "logsigmoid": "logsigmoid gates",
    "strong": "strong gates",
    "all-20": "gates of -20",
    "reset": "resets",
    "rwkv7": "RWKV-7's gates",
    "model": "a model's gates",
}


def main():
    for path, marks, text in pages():
        path.write_text(between(path.read_text(), *marks, text))
    try:
        import speed_plot
    except ImportError as error:
        print(f"no plot: {error}")
        return
    for path in results():
        speed_plot.draw(json.loads(path.read_text()), path.with_suffix(".png"))
    speed_plot.draw_lead(json.loads((RESULTS / f"{CARD}.json").read_text()), RESULTS / f"{CARD}-lead.png")


def results():
    """The files of benchmarks/run.py on a GPU, CARD's first."""
    files = [path for path in RESULTS.glob("*.json") if "-rwkv" not in path.stem]
    files = [path for path in files if json.loads(path.read_text())["meta"]["cuda"]]
    return sorted(files, key=lambda path: (path.stem != CARD, path.stem))


def pages():
    """(file, the comments around its tables, the tables)"""
    return (
        (README, (BEGIN, END), summary()),
        (README, CLAIM, claim()),
        (PAGE, (BEGIN, END), tables()),
    )


def forced():
    """The files of benchmarks/run.py --kernels portable."""
    return sorted((RESULTS / "portable").glob("*.json"))


def tables() -> str:
    portable = [*map(of_portable_kernels, forced()), *(other_cards.of(path, other_cards.DTYPES) for path in forced())]
    first, *others = results()
    return "\n".join([of_card(first), *portable, *map(titled_card, others)])


def titled_card(path) -> str:
    """A card beside CARD."""
    return f"## On the {json.loads(path.read_text())['meta']['card']}\n\n{of_card(path)}"


def of_portable_kernels(path) -> str:
    """The portable kernels on a card that has its own, with the gates of trained models."""
    result = json.loads(path.read_text())
    meta, rows = result["meta"], [row for row in with_days(result) if row["gate"] == "trained" and row["ours_ms"]]
    said = (
        f"Cards other than Hopper, and float32, take the portable kernels. Here the {meta['card']} took them in place "
        f"of its own (commit {meta['commit']}, `python benchmarks/run.py --kernels portable`); no card but Hopper's "
        f"was measured. Milliseconds as above."
    )
    heads = ["B, T, H, D", "", "floor", "`gla`", "fla", "`rwkv6`", "fla"]
    lines = [
        [shape, ", ".join(filter(None, (kind, what))), figure(floor(pair)), *cells(pair, "gla"), *cells(pair, "rwkv6")]
        for kind in ("forward", "backward")
        for (shape, what), pair in by_label(rows, kind).items()
    ]
    return "\n".join([fill(said, WIDTH), "", *table(heads, lines), ""])


def led(rows):
    """{(operator, pass): {shape: row}} with the gates of trained models, of every shape that fla was timed at."""
    found = {}
    for kind in ("forward", "backward"):
        for (shape, what), pair in by_label(rows, kind).items():
            for op, row in pair.items():
                if not what and row["ours_ms"] and row["peer_ms"]:
                    found.setdefault((op, kind), {})[shape] = row
    return found


def gains(rows):
    """How many times as fast as fla."""
    return [row["peer_ms"] / row["ours_ms"] for row in rows if row["peer_ms"]]


def families(rows):
    """[(operators, pass, rows)] in bfloat16: of LED with the gates of trained models, of others with any."""
    first, halves = led(rows), [row for row in rows if row["dtype"] == "bfloat16" and row["ours_ms"]]
    groups = []
    for kind in ("forward", "backward"):
        groups.append((LED, kind, [row for op in LED for row in first.get((op, kind), {}).values()]))
    for ops in OTHERS:
        for kind in ("forward", "backward"):
            groups.append((ops, kind, [row for row in halves if row["op"] in ops and row["pass"] == kind]))
    return [group for group in groups if group[2]]


def claim() -> str:
    """How many times as fast as fla."""
    result = json.loads(results()[0].read_text())
    found = families(result["rows"])
    led_by, others = ([x for ops, _, its in found if (ops == LED) == first for x in gains(its)] for first in (1, 0))
    said = (
        f"On an {result['meta']['card']} `gla` and `rwkv6` are **{span(led_by, 0)} times as fast as "
        f"flash-linear-attention** (fla), gradients too, the other operators {span(others, 0)} times."
    )
    return fill(said, WIDTH) + "\n"


def summary() -> str:
    """The README's table, a line for each family of operators; then the slowest calls."""
    path = results()[0]
    result = json.loads(path.read_text())
    rows, meta = result["rows"], result["meta"]
    lines = [
        [what, f"{statistics.median(multiples):.1f} in the median, {max(multiples):,.0f} at worst", ""]
        for what, multiples in zip(("random calls", "their gradients"), random_multiples(path))
        if multiples
    ]
    for ops, kind, its in families(rows):
        name = ", ".join(f"`{op}`" for op in ops) if kind == "forward" else "their gradients"
        lines.append([name, span([row["ours_ms"] / row["floor_ms"] for row in its]), span(gains(its))])
    said = (
        "The *floor* of a call is the time that memory needs to read every input once and to write every result once. "
        f"On an {meta['card']}, in bfloat16 ({meta['date']}):"
    )
    lost = losses(found) if (found := faster(rows)) else "fla is faster nowhere that was measured."
    below = f"{of_random(path)} {lost} {worst_of_sweep(path)} {beside_torch(path)}"
    return "\n".join(
        [
            fill(said, WIDTH),
            "",
            *table(["operators", "times the floor", "times as fast as fla"], lines),
            "",
            fill(below.strip(), WIDTH),
            "",
        ]
    )


def span(numbers, digits=1) -> str:
    """From the least to the most of them."""
    return " to ".join(dict.fromkeys(f"{bound(numbers):.{digits}f}" for bound in (min, max))) if numbers else ""


def of_card(path) -> str:
    result = json.loads(path.read_text())
    rows = with_days(result)
    forward, backward, steps = (by_label(rows, kind) for kind in ("forward", "backward", "step"))
    above = [fill(machine(result["meta"], rows), WIDTH), "", fill(worst(rows), WIDTH), ""]
    if path.with_suffix(".png").exists():
        above += [f"![Times of each shape as multiples of the floor](../benchmarks/results/{path.stem}.png)", ""]
    return "\n".join(
        [
            *above,
            fill(
                "Milliseconds on the device; ours with its multiple of the floor, fla's with its multiple of ours, and "
                "with its day where it is not of the same run.",
                WIDTH,
            ),
            "",
            *table(
                ["B, T, H, D", "", "floor", "`gla`", "fla", "`rwkv6`", "fla"],
                [
                    [shape, what, figure(floor(pair)), *cells(pair, "gla"), *cells(pair, "rwkv6")]
                    for (shape, what), pair in forward.items()
                ],
            ),
            "",
            *titled(
                "Backward passes alone; their floor is every input, gradient and the result's gradient once.",
                ["B, T, H, D", "", "floor", "`gla`", "fla", "`rwkv6`", "fla"],
                [
                    [shape, what, figure(floor(pair)), *cells(pair, "gla"), *cells(pair, "rwkv6")]
                    for (shape, what), pair in backward.items()
                ],
            ),
            *titled(
                "The others, forward and backward. Peers are named beside their times; empty cells were not measured.",
                ["B, T, H, D", "", *("floor", "forward", "peer"), *("floor", "backward", "peer")],
                others(rows),
            ),
            fill(
                "One token for so many sequences, 32 heads of 64, states in float32; microseconds of a call in a CUDA "
                "graph / of eager calls that follow one another.",
                WIDTH,
            ),
            "",
            *table(
                ["sequences", "floor", "`gla_step`", "fla", "`rwkv6_step`", "fla"],
                [
                    [shape, figure(floor(pair) * 1e3), *step_cells(pair, "gla_step"), *step_cells(pair, "rwkv6_step")]
                    for (shape, _), pair in steps.items()
                ],
            ),
            "",
            *titled(
                "The same of the delta rules, 64 heads of 128.",
                ["sequences", "", "floor", "ours", "fla"],
                steps_of_delta_rules(rows),
            ),
            fill(" ".join(filter(None, (losses(faster(rows)), errors(rows), older(rows)))), WIDTH),
            "",
            *titled(
                "Relative errors against float64, of the whole / of the worst row, in bfloat16, with fla's on the same "
                "arrays. A row that cancels to below a tenth of the whole's size counts as a tenth.",
                ["B, T, H, D", "", "", "o", "dq", "dk", "dv", "dg"],
                errors_by_name(rows),
            ),
            *titled(
                "The slowest of random calls, with what benchmarks/sweep.py --replay takes; no floor is below 10 us.",
                ["", "times the floor"],
                [[f"`{row['call']}`", f"{row['multiple']:.0f}"] for row in random_calls(path)[1][:12]],
            ),
            *titled(
                f"{worst_of_sweep(path)} The sweep changes one thing at a time; the slowest call of each change:",
                ["", "B, T, H, K, V", "", "times the floor", "of the usual", "of fla"],
                slowest_of_sweep(path),
            ),
        ]
    )


def with_days(result):
    """The rows, with the day of the peer's figures as `peer_day` where they are not of the row's own run."""

    def day(row):
        own = row.get("date", None if mark(row) else result["meta"]["date"])
        return row["peer_date"] if row.get("peer_date") and row["peer_date"] != own else ""

    return [row | {"peer_day": day(row)} for row in result["rows"]]


def titled(title, heads, lines):
    """A table with its title, where there is anything in it."""
    return [fill(title, WIDTH), "", *table(heads, lines), ""] if lines else []


def machine(meta, rows) -> str:
    commit = f", commit {meta['commit']}" if meta["commit"] else ""
    text = f"{meta['card']}, driver {meta['driver']}, {meta['date']}{commit}; CUDA {meta['cuda']}, CuPy {meta['cupy']}"
    if "fla-core" in meta:
        text += f", fla-core {meta['fla-core']} on torch {meta['torch']} and Triton {meta['triton']}"
        text += of_days(meta, rows)
    return (
        f"{text}. Rows are bfloat16 unless they say otherwise. `gla` and `rwkv6` have the gates of trained RWKV-6 "
        f"models (`trained` in benchmarks/gates.py), the delta rules too{of_rwkv7(rows)}, the other operators "
        "logsigmoid's. Weak gates are a 16th of "
        "logsigmoid's, strong ones 20 times as large; resets are gates of -inf at every 64th token. The floor is the "
        "time to read every input once and to write every result once at "
        f"{meta['copy_tb_per_s']:.2f} TB/s, the speed of a copy in the same run.{of_clocks(meta, rows)} Packed "
        "sequences have 24 to 2047 tokens. fla's kernels do the same work whatever the gates are: where a row has "
        "other gates than logsigmoid's, fla's time may be the one with logsigmoid's." + of_few_configurations(rows)
    )


def of_rwkv7(rows) -> str:
    """The gates of its rows, where they are its own."""
    told = ", whose bound fla's kernels are told as by its layer"
    return f" (`rwkv7` those of its own form{told})" if any(row["gate"] == "rwkv7" for row in rows) else ""


def of_few_configurations(rows) -> str:
    """Which of fla's kernels were tuned over a part of their configurations."""
    timed = [row for row in rows if row["peer_ms"]]
    wide = [row for row in timed if row["pass"] == "backward" and max(row["K"], row["V"]) > TUNED_HEAD]
    of = [f"gradients of heads over {TUNED_HEAD}"] * bool(wide)
    of += ["`rwkv7`'s"] * any(row["gate"] == "rwkv7" for row in timed)
    return f" fla's kernels of {' and '.join(of)} were tuned over at most {MOST} configurations each." if of else ""


def of_days(meta, rows) -> str:
    """When the peers were measured, where that was not in this run; and whether without rests, which this one has."""
    dated = [row for row in rows if row.get("peer_date")]
    days = {row["peer_date"] for row in dated}
    if days <= {meta["date"]}:
        return ""
    unrested = {row["peer_date"] for row in dated if meta.get("mhz") and row.get("peer_ms") and not row.get("peer_mhz")}
    parts = [(unrested, ", in longer samples without rests"), (days - unrested, "")]
    said = (f" on {' and '.join(sorted(of))}{how}" for of, how in parts if of)
    return f", measured{', and'.join(said)}"


def of_clocks(meta, rows) -> str:
    """What the multiprocessors ran at, where the file has it."""
    if not meta.get("mhz"):
        return ""
    low = [row["mhz"] for row in rows if row.get("mhz") and row["mhz"] < 0.99 * meta["mhz"]]
    text = f" Samples begin at the full clock of {meta['mhz']:,.0f} MHz"
    of = "one row" if len(low) == 1 else f"{len(low)} rows"
    return text + (f", and end below 99 % of it in {of}, at no less than {min(low):,.0f}." if low else ".")


def worst(rows) -> str:
    """The largest multiples of the floor and of a peer, first of all figures."""
    timed = [row for row in rows if row["ours_ms"] and row["pass"] != "step"]
    floors = max(timed, key=lambda row: row["ours_ms"] / row["floor_ms"])
    text = f"Slowest: {name(floors)} takes {floors['ours_ms'] / floors['floor_ms']:.1f} times its floor"
    beside = [row for row in timed if row["peer_ms"]]
    if not beside:
        return text + "."
    peers = max(beside, key=lambda row: row["ours_ms"] / row["peer_ms"])
    return text + f", and {name(peers)} takes {peers['ours_ms'] / peers['peer_ms']:.2f} times {peers['peer']}'s time."


def errors_by_name(rows):
    """Two lines for each call whose peer's errors are known by name: ours, and the peer's."""
    found, lines = {}, []
    for row in rows:
        if row.get("peer_errors") and row["op"] in ("gla", "rwkv6") and not row["sequences"]:
            found.setdefault((*label(row), row["gate"], row["op"]), {})[row["pass"]] = row
    for (shape, _, gate, op), passes in sorted(found.items(), key=lambda pair: pair[0][2:]):
        if set(passes) == {"forward", "backward"}:
            for whose, field in (("ours", "errors"), ("fla", "peer_errors")):
                pairs = [pair for kind in ("forward", "backward") for pair in passes[kind][field].values()]
                lines.append([shape, f"`{op}`, {GATES[gate]}", whose, *(f"{x:.1e} / {row:.1e}" for x, row in pairs)])
    return lines


def swept(path):
    """Rows of benchmarks/sweep.py on the same card, the slowest first."""
    file = path.parent / "sweep" / path.name
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return sorted((row for row in rows if row["multiple"]), key=lambda row: -row["multiple"])


def random_calls(path):
    """(meta, rows) of `benchmarks/sweep.py --random` on the same card: what was measured, the slowest first."""
    file = path.parent / "random" / path.name
    result = json.loads(file.read_text()) if file.exists() else {"meta": {}, "rows": []}
    rows = [row for row in result["rows"] if "refused" not in row]
    return result["meta"], sorted(rows, key=lambda row: -row["multiple"])


def random_multiples(path):
    """The multiples of random forward calls and steps, and those of random gradients."""
    _, rows = random_calls(path)
    return [
        [row["multiple"] for row in rows if ("backward=True" in row["call"]) == backward] for backward in (False, True)
    ]


def of_random(path) -> str:
    meta, rows = random_calls(path)
    if not rows:
        return ""
    wrong = sum(row["wrong"] for row in rows)
    return (
        f"The {len(rows)} random calls (benchmarks/sweep.py --random, {meta['date']}) have any sizes, dtypes and "
        "options that are accepted; no floor is below 10 us there. Most of the slowest are in single precision or have "
        f"few channels or heads. Beside float64 {wrong or 'none'} of the results "
        f"{'are' if wrong > 1 else 'is'} wrong (commit {meta['commit'][:8]})."
    )


def worst_of_sweep(path) -> str:
    rows = swept(path)
    if not rows:
        return ""
    slowest = {kind: max(row["multiple"] for row in rows if row["pass"] == kind) for kind in ("forward", "backward")}
    beside = [1 / row["of_peer"] for row in rows if row["of_peer"]]
    its = f", and the nearest to fla is {min(beside):.1f} times as fast" if beside else ""
    return (
        f"Of {len(rows)} calls with other sizes and gates (benchmarks/sweep.py) the slowest takes "
        f"{slowest['forward']:.1f} times its floor, the slowest gradient {slowest['backward']:.1f} times{its}."
    )


def beside_torch(path) -> str:
    """How many times as fast as torch softmax attention is on the same card."""
    file = path.parent / "attention" / path.name
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    found = [
        [1 / its for row in rows if row["backward"] == backward and (its := attention_table.multiple(row))]
        for backward in (False, True)
    ]
    if not all(found):
        return ""
    forward, backward = found
    return f"Softmax attention is {span(forward)} times as fast as torch's, its gradients {span(backward)} times."


def slowest_of_sweep(path):
    """A line for each pass and thing that was changed, the slowest dozen."""
    found = {}
    for row in swept(path):
        found.setdefault((row["pass"], row["changed"]), row)
    return [
        [
            pass_of(row),
            place(row),
            changed(row),
            f"{row['multiple']:.2f}",
            f"{row['beside_usual']:.2f}",
            f"{row['of_peer']:.2f}" if row["of_peer"] else "",
        ]
        for row in list(found.values())[:12]
    ]


def place(row) -> str:
    return ", ".join(str(row[axis]) for axis in "BTHKV")


def where(row) -> str:
    return f" {place(row)}" if row["changed"] == "another shape" else f", {changed(row)}"


def changed(row) -> str:
    """What differs from bfloat16, trained gates and aligned rows."""
    return {"bthd": "rows of [B, T, H, K]", "slices": "slices of wider rows", "": "as usual"}.get(
        row["changed"], row["changed"]
    )


def by_label(rows, kind):
    """Rows of one shape side by side: (shape, what else) -> {operator: row}."""
    found = {}
    for row in rows:
        if row["pass"] == kind and row["op"].removesuffix("_step") in ("gla", "rwkv6"):
            found.setdefault(label(row), {})[row["op"]] = row
    return dict(sorted(found.items(), key=lambda pair: pair[0][1] != ""))  # what else is said comes last


def others(rows):
    """A line for each other operator and shape."""
    found = {}
    for row in rows:
        if row["pass"] != "step" and row["op"] not in ("gla", "rwkv6"):
            found.setdefault((row["op"], label(row)[0]), {})[row["pass"]] = row
    return [
        [shape, f"`{op}`", *named_cells(pair, "forward"), *named_cells(pair, "backward")]
        for (op, shape), pair in found.items()
    ]


def steps_of_delta_rules(rows):
    return [
        [label(row)[0], f"`{row['op']}`", figure(row["floor_ms"] * 1e3), *step_cells({row["op"]: row}, row["op"])]
        for row in rows
        if row["pass"] == "step" and row["op"] not in ("gla_step", "rwkv6_step")
    ]


def named_cells(pair, kind):
    """The floor, ours, and the peer's with its name."""
    if kind not in pair:
        return [""] * 3
    ours, its = cells(pair, kind)
    return [figure(pair[kind]["floor_ms"]), ours, its and f"{pair[kind]['peer']} {its}"]


def label(row) -> tuple[str, str]:
    if row["pass"] == "step":
        return str(row["B"]), ""
    usual = "logsigmoid" if row["op"] not in ("gla", "rwkv6") else "trained"
    said = [
        "" if row["gate"] == usual else GATES[row["gate"]],
        f"{row['sequences']} packed sequences" if row["sequences"] else "",
        row["dtype"] if row["dtype"] != "bfloat16" else "",
    ]
    return ", ".join(str(row[axis]) for axis in "BTHK"), ", ".join(filter(None, said))


def floor(pair):
    return next(iter(pair.values()))["floor_ms"]


def cells(pair, op):
    """Ours and the peer's; empty where there is none."""
    row = pair.get(op, {})
    ours, its = row.get("ours_ms"), row.get("peer_ms")
    ratio = f" ({', '.join(filter(None, (f'{its / ours:.1f}x', row.get('peer_day'))))})" if ours and its else ""
    return [
        f"{figure(ours)}{mark(row)} ({ours / row['floor_ms']:.2f}x)" if ours else "",
        figure(its) + ratio if its else "wrong" if row.get("peer_error") else "",
    ]


def step_cells(pair, op):
    row = pair.get(op, {})
    return [
        f"{figure(row[graph] * 1e3)} / {figure(row[eager] * 1e3)}{day}" if row.get(graph) else ""
        for graph, eager, day in (
            ("ours_ms", "wall_ms", mark(row)),
            ("peer_ms", "peer_wall_ms", f" ({row['peer_day']})" if row.get("peer_day") else ""),
        )
    ]


def mark(row) -> str:
    """Of a row that benchmarks/complete.py has taken over."""
    return "†" if row.get("commit") else ""


def older(rows) -> str:
    commits = dict.fromkeys(row["commit"] for row in rows if mark(row))
    return f"† measured at commit {', '.join(commits)}." if commits else ""


def figure(x) -> str:
    """Three digits, zeros at the end too."""
    return f"{x:#.3g}".rstrip(".") if x < 999.5 else f"{x:,.0f}"


def name(row):
    shape, what = label(row)
    return f"{pass_of(row)} {shape}" + f", {what}" * bool(what)


def pass_of(row):
    return row["op"] + " backward" * (row["pass"] == "backward")


def faster(rows):
    """Peers that take less time on the device, or else in eager calls, with how many times less."""
    found = []
    for row in rows:
        times = [
            f"{row[ours] / row[its]:.2f} times{how}"
            for ours, its, how in (("ours_ms", "peer_ms", ""), ("wall_ms", "peer_wall_ms", " eager"))
            if row[ours] and row[its] and row[its] < row[ours]
        ]
        found += [f"{row['peer']} ({name(row)}, {said})" for said in times[:1]]
    return found


def errors(rows) -> str:
    """What of the relative errors against float64 is to be said."""
    halves = [row for row in rows if row["dtype"] == "bfloat16" and row["ours_ms"]]
    text = "Relative errors against float64, in bfloat16: " + "; ".join(
        filter(
            None,
            (
                extents("", [row for row in halves if row["pass"] != "backward"]),
                extents("of gradients ", [row for row in halves if row["pass"] == "backward"]),
            ),
        )
    )
    larger = {}  # how many times at most, by what is computed, whatever the shape
    for row in halves:
        if (
            row["peer_ms"] and row["peer_error"] and row["error"] > 1.02 * row["peer_error"]
        ):  # another order of the sums
            larger[pass_of(row)] = max(row["error"] / row["peer_error"], larger.get(pass_of(row), 0))
    found = ", ".join(f"{what} (up to {times:.2f} times)" for what, times in larger.items())
    wrong = [f"{row['peer']} ({name(row)})" for row in rows if row["peer_error"] and not row["peer_ms"]]
    return (
        text
        + "."
        + (f" Ours are larger than the peers': {found}." if found else "")
        + (f" Wrong, and so not timed: {', '.join(wrong)}." if wrong else "")
    )


def extents(what, rows):
    """Ours, and the peers' where they were timed; empty where there is nothing."""
    timed = [row for row in rows if row["peer_ms"] and row["peer_error"]]
    its = f", the peers' {extent(timed, 'peer_error')}" if timed else ""
    return f"{what}ours {extent(rows, 'error')}{its}" if rows else ""


def extent(rows, field):
    figures = [row[field] for row in rows]
    return f"{min(figures):.1e} to {max(figures):.1e}"


if __name__ == "__main__":
    main()
