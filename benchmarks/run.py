"""Times every operator on the current device: CuPy on a GPU, NumPy where there is none.

    python benchmarks/run.py [--quick] [--ops gla rwkv6_step ...] [--out benchmarks/results/<card>.json]
    python benchmarks/speed_table.py            writes the README's tables and the plots out of those files

A row's figures, every one a median, in milliseconds:

    ours_ms     device time of a call, between events around several calls that the host has enqueued before the device
                begins; of a step, whose calls are captured in a CUDA graph. Samples are short and begin at the card's
                full clock, since work at its limit of power lowers it (see devices.py): in a long loop the same call
                may take longer
    mhz         the multiprocessors' clock as these calls end; the highest that was seen stands in `meta`
    wall_ms     host time of a call, Python included, when calls follow one another and the last is waited for
    floor_ms    the bytes of every input, result and state once, over the bandwidth of a copy in the same run
    peer_ms     the peer's device time, measured in the same way, and peer_wall_ms: of a backward pass
                torch.autograd.grad's, after a forward pass that is not timed either; `peer` says whose (see peers.py),
                and peer_date when, as an earlier file's figures may be kept; peer_mhz is the clock then
    errors      of o (and of a step's state; of a backward pass of all gradients but u's) at the first and the last
                head, all tokens, against the recurrence in float64 on the same values: by name, rms of the difference
                over rms of what is right, and the same of the worst row. A row that cancels to below a tenth of the
                whole's rms counts as a tenth, and a gate's gradient as the terms of its sum. peer_errors likewise
    error       the largest of them, rows aside; peer_error likewise
    peak_mib    memory of the arrays, the result and what the call needs beside them

Sets of arrays take turns so that a call finds none of its own in the cache. A result is checked before it is timed: a
wrong one has its error in the row and no time.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import metadata
from pathlib import Path

import devices
import gates
import numpy as np
import peers
from cases import DECLARED, DTYPES, Case, cases_of_cpu, cases_of_gpu, cases_of_portable, lengths
from devices import wall_ms

import linattn_np
from linattn_np.command.measuring import contracting
from linattn_np.kernel_choice import KERNELS, choose_kernels

ROOT = Path(__file__).parents[1]
LIMITS = {"float32": 2e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 6e-3}  # of `error`, as the tests have them
NOT_FINITE = 1e30  # the error of a result with NaN or Inf in it: JSON has no name for those
CALLS, SAMPLES = 10, 9
PEER_FIGURES = ("peer_ms", "peer_mhz", "peer_wall_ms", "peer_error", "peer_errors", "peer_date")
CACHED = 1 << 28  # bytes of arrays that no cache holds


def draw(case, xp, seed):
    """The arrays of a call and its keywords; with no seed whatever memory holds."""
    rng = None if seed is None else xp.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    sizes = {"B": case.B, "T": case.T, "H": case.H, "K": case.D, "V": case.columns}

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32) if rng else xp.empty(shape, np.float32)

    arrays = {}
    for name, axes in DECLARED[case.op].arrays.items():
        shape = tuple(sizes[axis] for axis in axes.split())
        gate = name in ("g", "gv", "w") and rng
        if case.step and gate:  # of one token: [B, H, K], or [B, H]
            x = gates.draw(case.gate, rng, xp, (*shape[:2], 1, *shape[2:]))[:, :, 0]
        else:
            x = gates.draw(case.gate, rng, xp, shape) if gate else normal(*shape)
        arrays[name] = x
    if rng:
        arrays = contracting(arrays, xp)
    for name, x in arrays.items():
        arrays[name] = laid(x.astype(np.float32 if name == "u" else dtype), case.memory, xp)
    keywords = dict(case.options)
    if case.step:
        keywords |= {
            "state": normal(case.B, case.H, case.D, case.columns),
            "out": xp.empty((case.B, case.H, case.columns), dtype),
        }
    if case.op == "retention":
        keywords["gamma"] = 1 - 2.0 ** (-5 - np.arange(case.H))
    if case.backward:
        keywords["do"] = normal(*arrays["v"].shape).astype(dtype)
    if case.sequences:
        keywords["cu_seqlens"] = [0, *np.cumsum(lengths(case.sequences, case.T)).tolist()]
    return arrays, keywords


def laid(x, memory, xp):
    """The same array as users may have it: of [B, T, H, ..] in memory, off the 16 bytes, or a part of wider rows."""
    if memory == "aligned" or x.ndim < 4:
        return x
    if memory == "bthd":
        return xp.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if memory == "slices":
        wide = xp.zeros((*x.shape[:3], 4 * x.shape[3]), x.dtype)[..., : x.shape[3]]
    else:
        shift = 8 // x.itemsize
        wide = xp.empty(x.size + shift, x.dtype)[shift:].reshape(x.shape)
    wide[...] = x
    return wide


def copy_bandwidth(device):
    """Bytes read and written a second."""
    source = device.xp.ones(CACHED, np.uint32)
    target = device.xp.empty_like(source)
    ms, _ = device.device_ms([lambda: device.xp.copyto(target, source)], SAMPLES)
    return 2 * source.nbytes / ms * 1e3


def bytes_moved(case, arrays, keywords):
    state = 2 * keywords["state"].nbytes if case.step else 0
    given = sum(x.nbytes for x in arrays.values())
    return (2 if case.backward else 1) * given + arrays["v"].nbytes + state


# -- the exact answer -------------------------------------------------------------------------------------------------
def two_heads(x, host):
    """[1, 2, ..] in float64: the first head of the first sequence and the last of the last."""
    return np.stack([host(x[0, 0]), host(x[-1, -1])]).astype(np.float64)[None]


def exact(case, arrays, keywords, device):
    """What a call must give for `two_heads`: (o,), of a step (o, state), of a backward pass gradients, without u's.

    NumPy's recurrence in float64; on a GPU its kernels that go token by token, where there are any: see `doubles`.
    """
    of_two = {
        "state": lambda x: two_heads(x, device.host),
        "gamma": lambda x: x[[0, -1]],
        "cu_seqlens": list,
        "do": lambda x: two_heads(x, device.host),
    }
    keywords = {name: of_two[name](x) for name, x in keywords.items() if name in of_two}
    arrays = {
        name: device.host(x[[0, -1]]).astype(np.float64) if name == "u" else two_heads(x, device.host)
        for name, x in arrays.items()
    }
    if not case.step and doubles(device, case.op, case.backward):
        return by_recurrence(case, arrays, keywords, device.xp)
    return by_recurrence(case, arrays, keywords, np)


def by_recurrence(case, arrays, keywords, xp):
    """The same of arrays in float64, computed where `xp` has its arrays."""
    arrays = {name: xp.asarray(x) for name, x in arrays.items()}
    keywords = {name: xp.asarray(x) if name in ("state", "do") else x for name, x in keywords.items()}
    if not case.step and "recurrent" in DECLARED[case.op].modes:
        keywords["mode"] = "recurrent"
    found = prepared(case, arrays, keywords)()
    if case.backward:
        found = by_head(arrays, found)
    else:
        found = (found, keywords["state"]) if case.step else (found,)
    return found if xp is np else tuple(map(xp.asnumpy, found))


@cache
def doubles(device, op, backward) -> bool:
    """Whether the device computes an operator in float64; it is held to NumPy on a short sequence first."""
    if device.xp is np:
        return False
    case = Case(op, 1, 130, 2, 24, "float32", backward=backward, V=40)
    arrays, keywords = draw(case, np, 0)
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    if backward:
        keywords["do"] = np.asarray(keywords["do"], np.float64)
    try:
        found = by_recurrence(case, arrays, keywords, device.xp)
    except linattn_np.NotSupported:
        return False
    wanted = by_recurrence(case, arrays, keywords, np)
    whole = largest(errors(case, found, wanted, next(iter(arrays.values()))))
    if not whole < 1e-11:
        raise SystemExit(f"{op} in float64 on the device is {whole:.0e} from NumPy's: nothing can be held to it")
    return True


def by_head(arrays, gradients):
    """Without u's, in which all sequences are summed."""
    return tuple(gradient for name, gradient in zip(arrays, gradients) if name != "u")


def names(case):
    """Of what is held to the exact answer."""
    if case.backward:
        return tuple(f"d{name}" for name in DECLARED[case.op].arrays if name != "u")
    return ("o", "state") if case.step else ("o",)


def errors(case, found, wanted, q):
    """{name: [relative error, the same of the worst row]}"""
    return {
        name: relative(x, y, terms(case, name, q, wanted))
        for name, x, y in zip(names(case), found, wanted, strict=True)
    }


def terms(case, name, q, wanted) -> float:
    """The size of the terms whose sum a gate's gradient is: with gates that forget all it is far below them."""
    gate = case.backward and name[1:] in ("g", "gv", "w")
    return rms(q * wanted[0] if wanted[-1].ndim == q.ndim else (q * wanted[0]).sum(-1)) if gate else 0.0


def rms(x, axis=None):
    return np.sqrt(np.mean(np.square(x), axis=axis))


def relative(x, wanted, least=0.0):
    """To no less than `least`; where all that is right is 0, as it is."""
    size, difference = max(rms(wanted), least) or 1.0, x - wanted
    rows = rms(difference, -1) / np.maximum(rms(wanted, -1), size / 10)
    figures = float(rms(difference) / size), float(rows.max())
    return [figure if math.isfinite(figure) else NOT_FINITE for figure in figures]


def largest(errors):
    return max(whole for whole, _ in errors.values())


# -- measuring --------------------------------------------------------------------------------------------------------
def prepared(case, arrays, keywords):
    """What is to be timed: a call without arguments."""
    if not case.backward:
        return partial(case.function, *arrays.values(), **keywords)
    others = {name: x for name, x in keywords.items() if name != "do"}
    _, pullback = linattn_np.vjp(case.function, *arrays.values(), **others)
    return partial(pullback, keywords["do"])


def measure(case, device, bandwidth, peer, samples):
    """A row. `peer` is a function that times the peer, or gives its figures of another run."""
    row = case.fields
    row |= dict.fromkeys(("ours_ms", "mhz", "wall_ms", *PEER_FIGURES, "floor_ms", "error", "errors", "peak_mib"))
    device.free()
    arrays, keywords = draw(case, device.xp, 0)
    wanted = exact(case, arrays, keywords, device)
    nbytes = bytes_moved(case, arrays, keywords)
    row["floor_ms"] = nbytes / bandwidth * 1e3
    row |= peer(case, arrays, keywords, wanted)  # before ours has written the state

    call = prepared(case, arrays, keywords)
    found, taken = device.with_peak(call)
    results = (found, keywords["state"]) if case.step else by_head(arrays, found) if case.backward else (found,)
    q = two_heads(next(iter(arrays.values())), device.host)
    row["errors"] = errors(case, [two_heads(x, device.host) for x in results], wanted, q)
    row["error"] = largest(row["errors"])
    row["peak_mib"] = (taken + sum(getattr(x, "nbytes", 0) for x in (*arrays.values(), *keywords.values()))) / 2**20
    if not (row["error"] < LIMITS[case.dtype] and all(map(device.finite, results))):
        return row
    del found, results
    calls = in_turn([call, *(prepared(case, *its) for its in others(case, device.xp, nbytes))])
    row["ours_ms"], row["mhz"] = timed(device, case, calls, device.captured, samples)
    row["wall_ms"] = wall_ms(device, calls, samples)
    return row


def others(case, xp, nbytes):
    """More sets of arrays: as many as no cache holds."""
    return [draw(case, xp, seed) for seed in range(1, min(CALLS, math.ceil(CACHED / nbytes)))]


def in_turn(calls):
    return [calls[i % len(calls)] for i in range(CALLS)]


def timed(device, case, calls, captured, samples):
    """(device milliseconds of a call, the clock in MHz); steps are captured in a graph."""
    if case.step:
        ms, mhz = device.device_ms([captured(calls)], samples)
        return ms / len(calls), mhz
    return device.device_ms(calls, samples)


class Peers:
    """The peers' figures, from `kept` where it has them, else measured until `limit_s` seconds have gone: of calls that
    differ in their gates alone once.

    `absent` has the reason of each that cannot be measured.
    """

    def __init__(self, device, absent, kept, limit_s, samples):
        self.device, self.absent, self.kept, self.samples = device, absent, kept, samples
        self.ends = time.monotonic() + limit_s

    def __call__(self, case, arrays, keywords, wanted):
        for kept in (key(case.fields), key(case.fields | {"gate": None})):
            if kept in self.kept:
                return self.kept[kept]
        if not peers.has(case) or self.absent.get(peers.name(case.op)):
            return {}
        if time.monotonic() > self.ends:
            say(f"  {peers.name(case.op)} is not measured: its time is up")
            return {}
        try:
            figures = self.measure(case, arrays, keywords, wanted)
            if "peer_ms" in figures:
                self.kept |= of_any_gate(case.fields, figures)
            return figures
        except Exception as problem:  # whatever a peer fails with: ours is measured, and the reason is said
            reason = str(problem).partition("\n")[0][:150]
            say(f"  {peers.name(case.op)} fails: {type(problem).__name__}: {reason}")
            return {}
        finally:
            self.device.free()

    def measure(self, case, arrays, keywords, wanted):
        call = peers.bound(case, arrays, keywords)
        results = by_head(arrays, call.results()) if case.backward else call.results()
        q = two_heads(next(iter(arrays.values())), self.device.host)
        found = errors(case, [two_heads(x, peers.host) for x in results], wanted, q)
        figures = {"peer_error": largest(found), "peer_errors": found}
        del results
        if figures["peer_error"] < LIMITS[case.dtype]:
            nbytes = bytes_moved(case, arrays, keywords)
            more = [peers.bound(case, *its) for its in others(case, self.device.xp, nbytes)]
            calls = in_turn([call, *more])
            figures["peer_ms"], figures["peer_mhz"] = timed(self.device, case, calls, peers.captured, self.samples)
            figures["peer_wall_ms"] = wall_ms(self.device, calls, self.samples)
            figures["peer_date"] = today()
        return figures


def key(row):
    return tuple(row[name] for name in ("op", "pass", "B", "T", "H", "K", "V", "dtype", "gate", "sequences"))


def kept_figures(paths, meta):
    """The peers' figures by `key` out of those earlier files that speak of the same card and versions; times of other
    gates are those with logsigmoid's. `meta` gets the versions of peers that this run does not have itself.
    """
    same, kept = ("card", "fla-core", "torch", "triton"), {}
    for path in paths:
        earlier = json.loads(path.read_text())
        its = {name: earlier["meta"].get(name) for name in same}
        if its != its | {name: meta[name] for name in same if name in meta}:
            say(f"{path} is of another card or other versions: not used")
            continue
        meta |= {name: version for name, version in its.items() if version}
        for row in earlier["rows"]:
            if row["peer_ms"] is not None:
                figures = {name: row.get(name) for name in PEER_FIGURES}
                figures["peer_date"] = figures["peer_date"] or earlier["meta"].get("date")
                kept[key(row)] = figures
                if row["gate"] == "logsigmoid":
                    kept |= of_any_gate(row, figures)
    return kept


def of_any_gate(row, figures):
    """fla's kernels do the same work for every gate: by a key without one stand its times, without an error."""
    return {key(row | {"gate": None}): figures | {"peer_error": None, "peer_errors": None}}


# -- the whole --------------------------------------------------------------------------------------------------------
def main():
    args = arguments()
    device = devices.current()
    samples = 5 if args.quick else SAMPLES
    absent = {name: peers.absent(name) if args.peers else "not asked for" for name in ("fla",)}
    bandwidth = copy_bandwidth(device)
    meta = described(device, bandwidth, args.kernels, args.commit)
    say(
        f"{meta['card']}, copy {bandwidth / 1e12:.2f} TB/s"
        + "".join(f"; without {name}: {reason}" for name, reason in absent.items() if reason)
    )
    peer = Peers(device, absent, kept_figures(args.keep_peers, meta), args.limit_s, samples)
    wanted = cases_of_cpu if not meta["cuda"] else cases_of_portable if args.kernels == "portable" else cases_of_gpu
    cases = [case for case in wanted(args.quick) if not args.ops or case.op in args.ops]
    compile_all(cases, device, args.kernels)
    rows, failed = [], []
    for case in cases:
        begun = time.monotonic()
        try:
            with choose_kernels(args.kernels):
                row = measure(case, device, bandwidth, peer, samples)
        except linattn_np.NotSupported:
            say(f"{case}: no backend for it on this device")
            continue
        rows.append(row)
        if row["ours_ms"] is None:
            failed.append(f"{case}: relative error {row['error']:.1e}, expected below {LIMITS[case.dtype]:.0e}")
        its = f", {row['peer']} {number(row['peer_ms'])}" if row["peer"] else ""
        clock = f" at {row['mhz']:.0f} MHz" if row["mhz"] else ""
        say(f"{case}: {number(row['ours_ms'])} ms{clock}{its}  [{time.monotonic() - begun:.1f} s]")
        if args.out:  # after every row: a run that is cut short leaves what it has
            write(args.out, meta | {"mhz": device.highest}, rows)
    show(rows)
    sys.exit("\n".join(["wrong results:", *failed]) if failed else 0)


def described(device, bandwidth, kernels, of_commit):
    """What a file says of its run."""
    return (
        device.meta()
        | versions()
        | {
            "date": today(),
            "commit": of_commit or commit(),
            "kernels": kernels,
            "copy_tb_per_s": bandwidth / 1e12,
        }
    )


def compile_all(cases, device, kernels):
    """Compiles what the cases launch, many at a time: one after the other the first calls would take minutes."""
    if device.xp is np:
        return

    def of(case):
        arrays, keywords = draw(case, device.xp, None)
        others = {name: x for name, x in keywords.items() if name != "do"}
        with choose_kernels(kernels):
            linattn_np.warm_up(case.function, *arrays.values(), gradient=case.backward, **others)

    compile_side_by_side(of, [case for case in cases if not case.step], device)


def compile_side_by_side(of, calls, device):
    begun = time.monotonic()

    def compiled(call):
        try:
            of(call)
        except linattn_np.NotSupported:
            pass  # the call says so in its turn

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(compiled, calls))
    device.free()
    say(f"compiled in {time.monotonic() - begun:.1f} s")


def write(path, meta, rows):
    """A row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, few samples")
    parser.add_argument("--ops", nargs="+", choices=DECLARED, help="these operators alone")
    parser.add_argument("--kernels", choices=KERNELS, default="auto", help="portable: not a card's own")
    parser.add_argument("--out", type=Path, help="a JSON file, as benchmarks/results has them")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="measure fla too")
    parser.add_argument(
        "--keep-peers",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="earlier JSON files whose figures of peers to use: only what they lack is measured",
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which no peer is measured")
    parser.add_argument("--commit", help="what to say of the sources where git cannot")
    return parser.parse_args()


def versions():
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("numpy", "cupy-cuda12x", "cupy-cuda13x", "torch", "triton", "fla-core"):
        try:
            found[name.split("-cuda")[0]] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def today():
    return time.strftime("%Y-%m-%d", time.gmtime())


def commit():
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None


def say(line):
    print(line, file=sys.stderr, flush=True)


def number(x, form=".4f"):
    return "-" if x is None else format(x, form)


def show(rows):
    heads = ("floor", "ours", "x floor", "wall", "peer", "x ours", "error", "peer", "MiB")
    print(" " * 56 + "".join(f"{head:>9s}" for head in heads))
    for row in rows:
        case = Case(
            row["op"],
            *(row[axis] for axis in "BTHK"),
            row["dtype"],
            row["gate"],
            row["sequences"],
            row["pass"] == "backward",
        )
        ours, its = row["ours_ms"], row["peer_ms"]
        figures = (
            number(row["floor_ms"]),
            number(ours),
            number(ours and ours / row["floor_ms"], ".2f"),
            number(row["wall_ms"]),
            number(its),
            number(ours and its and its / ours, ".1f"),
            number(row["error"], ".1e"),
            number(row["peer_error"], ".1e"),
            number(row["peak_mib"], ".0f"),
        )
        print(f"{str(case):56s}" + "".join(f"{text:>9s}" for text in figures))


if __name__ == "__main__":
    main()
