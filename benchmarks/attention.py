"""Times softmax attention on a GPU beside both of torch's backends, cuDNN and FlashAttention.

    python benchmarks/attention.py --out benchmarks/results/attention/<card>.json
    python benchmarks/attention_table.py        writes the tables out of those files

Arrays are bfloat16 and lie as [B, T, H, D]. Times are medians of the device's, as benchmarks/run.py has them. A row's
`error` is that of 512 queries of two heads against float64. A row whose error is over LIMIT has no time. A backend that
refuses a call has none either. torch gets packed sequences padded to the longest one.
"""

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import devices
import numpy as np
import run
from cases import DTYPES, lengths

import linattn_np

LIMIT = run.LIMITS["bfloat16"]
ROWS, SETS, SAMPLES = 512, 3, 9  # queries that are checked; sets of arrays that take turns; samples of a median


@dataclass(frozen=True)
class Case:
    """H heads of T queries, HK heads of S keys; `sequences` packed ones of T tokens in all."""

    B: int
    T: int
    H: int
    K: int
    causal: bool = True
    HK: int | None = None
    V: int | None = None
    S: int | None = None
    sequences: int | None = None
    backward: bool = False

    @property
    def shapes(self) -> dict:
        """Of q, k, v and o, heads before tokens."""
        HK, V, S = self.HK or self.H, self.V or self.K, self.S or self.T
        return {
            "q": (self.B, self.H, self.T, self.K),
            "k": (self.B, HK, S, self.K),
            "v": (self.B, HK, S, V),
            "o": (self.B, self.H, self.T, V),
        }

    @property
    def bounds(self) -> list[int] | None:
        return [0, *np.cumsum(lengths(self.sequences, self.T)).tolist()] if self.sequences else None


FORWARD = (
    Case(4, 2048, 16, 128),
    Case(2, 8192, 16, 128),
    Case(1, 16384, 16, 128),
    Case(1, 32768, 4, 128),
    Case(2, 8192, 16, 128, causal=False),
    Case(4, 4096, 32, 64),
    Case(8, 1024, 16, 128),
    Case(16, 512, 16, 128),
    Case(4, 2048, 32, 128),
    Case(4, 2048, 32, 128, HK=8),
    Case(4, 4096, 16, 192, V=128),
    Case(1, 8192, 16, 128, sequences=64),
    Case(64, 1, 32, 128, causal=False, HK=8, S=8192),
)
BACKWARD = tuple(
    Case(**(asdict(case) | {"backward": True})) for case in FORWARD if case.T > 1 and not case.sequences and not case.V
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file, as benchmarks/results/attention has them")
    parser.add_argument("--commit", help="what to say of the sources where git cannot")
    args = parser.parse_args()
    device = devices.current()
    if device.xp is np:
        raise SystemExit("attention.py wants a GPU")
    meta = run.described(device, run.copy_bandwidth(device), "auto", args.commit)
    rows = []
    for case in (*FORWARD, *BACKWARD):
        rows.append(measure(case, device))
        run.say(said(rows[-1]))
        if args.out:  # after every row: a run that is cut short leaves what it has
            run.write(args.out, meta | {"mhz": device.highest}, rows)


def said(row) -> str:
    times = ", ".join(f"{name[:-3]} {run.number(row[name])}" for name in row if name.endswith("_ms"))
    return f"{what(row)}: {times}; error {row['error']:.1e}"


def what(row) -> str:
    """The call in words."""
    heads = f"{row['H']}/{row['HK']}" if row["HK"] else f"{row['H']}"
    width = f"{row['K']}/{row['V']}" if row["V"] else f"{row['K']}"
    keys = f", {row['S']} keys" if row["S"] else "" if row["causal"] else ", full"
    packed = f", {row['sequences']} packed sequences" if row["sequences"] else ""
    return f"{row['B']}, {row['T']}, {heads}, {width}{keys}{packed}{' backward' * row['backward']}"


def measure(case, device):
    sets = [draw(case, device.xp, seed) for seed in range(SETS)]
    calls = [ours(case, arrays, do) for arrays, do in sets]
    row = asdict(case) | {"mhz": None, "error": error(case, *sets[0], calls[0](), device.xp), "ours_ms": None}
    if row["error"] < LIMIT:
        row["ours_ms"], row["mhz"] = device.device_ms(run.in_turn(calls), SAMPLES)
    for backend in ("cudnn", "flash"):
        row[f"{backend}_ms"] = None
        if device.xp is np:
            continue
        try:
            theirs = [torch_call(backend, case, arrays, do) for arrays, do in sets]
            row[f"{backend}_ms"] = device.device_ms(run.in_turn(theirs), SAMPLES)[0]
        except RuntimeError as problem:  # a backend that has no kernel for the call
            run.say(f"  {backend}: {str(problem).partition(chr(10))[0][:100]}")
    device.free()
    return row


def draw(case, xp, seed):
    """([q, k, v], do), heads before tokens, whose memory is [B, T, H, D]."""
    rng = xp.random.default_rng(seed)

    def normal(shape):
        B, H, T, D = shape
        return rng.standard_normal((B, T, H, D), np.float32).astype(DTYPES["bfloat16"]).swapaxes(1, 2)

    *arrays, do = map(normal, case.shapes.values())
    return arrays, do


def ours(case, arrays, do):
    """The call without arguments: its o, or its three gradients."""
    keywords = {"causal": case.causal, "cu_seqlens": case.bounds}
    if not case.backward:
        return partial(linattn_np.softmax_attention, *arrays, **keywords)
    _, pullback = linattn_np.vjp(linattn_np.softmax_attention, *arrays, **keywords)
    return partial(pullback, do)


def torch_call(backend, case, arrays, do):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    arrays = [padded(torch.from_dlpack(x), case) for x in arrays]
    only = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    def attend():
        with sdpa_kernel(only):
            return scaled_dot_product_attention(*arrays, is_causal=case.causal, enable_gqa=case.HK is not None)

    def forward():
        with torch.inference_mode():
            return attend()

    if not case.backward:
        return forward
    arrays = [x.requires_grad_() for x in arrays]
    return partial(torch.autograd.grad, attend(), arrays, torch.from_dlpack(do), retain_graph=True)


def padded(x, case):
    """The packed sequences of x side by side in a batch, zeros behind each."""
    import torch

    if not case.sequences:
        return x
    pieces = [x[0, :, start:end].transpose(0, 1) for start, end in zip(case.bounds, case.bounds[1:])]
    return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).transpose(1, 2)


# -- the exact answer -------------------------------------------------------------------------------------------------
def error(case, arrays, do, found, xp) -> float:
    """The larger relative error of o, or of dq, over some queries of the first and of the last head.

    dk and dv of one key take all queries of all its heads: tests hold these to the reference.
    """
    found = found[0] if case.backward else found
    return max(head_error(case, arrays, do, found, *head, xp) for head in ((0, 0), (case.B - 1, case.H - 1)))


def head_error(case, arrays, do, found, batch, head, xp) -> float:
    begin, end = (case.bounds or [0, None])[:2]
    shared = head // (case.H // (case.HK or case.H))
    heads = {"q": head, "k": shared, "v": shared, "do": head, "found": head}
    x = {
        name: array[batch, heads[name], begin:end].astype(np.float64)
        for name, array in zip(heads, (*arrays, do, found), strict=True)
    }
    rows = xp.unique(xp.linspace(0, len(x["q"]) - 1, ROWS).astype(int))
    scores = case.K**-0.5 * x["q"][rows] @ x["k"].T
    if case.causal:
        scores[xp.arange(len(x["k"])) > rows[:, None]] = -np.inf
    p = xp.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    wanted = p @ x["v"]
    if case.backward:
        dp = x["do"][rows] @ x["v"].T
        wanted = case.K**-0.5 * (p * (dp - (p * dp).sum(-1, keepdims=True))) @ x["k"]
    size, off = (float((y**2).mean() ** 0.5) for y in (wanted, x["found"][rows] - wanted))
    return off / size


if __name__ == "__main__":
    main()
