"""Trains a byte-level RWKV-6 on a text, with NumPy or CuPy and the package's own gradients. No torch, no JAX.

    linattn-np train --text novel.txt --out novel
    linattn-np train --text novel.txt --out novel --resume
    linattn-np generate --model novel/model.safetensors --prompt "Emma was"
    mpiexec -n 4 linattn-np train --text novel.txt --out novel      four processes, with a card each where there are any

The last 5 % of the text are held out: the loss on them is what is printed, in nats a byte.
"""

import math
import time
from dataclasses import fields
from pathlib import Path

from .. import NotSupported
from ..distributed import DataParallel, RankLost, SequenceParallel, connect
from ..models.devices import check_device
from ..models.files import same_file
from ..models.ranks import OneProcess
from ..models.training import Settings, Training
from .terminal import add_device, bar, say, status, whole
from .threads import blas_for

# What is trained where nothing else is said: a small model on the CPU, one of 4 million parameters on the GPU.
DEFAULTS = {
    "cpu": dict(layers=2, width=128, head_size=32, batch=8, context=128, minutes=2, lr=3e-3, dropout=0.0),
    "cuda": dict(layers=4, width=256, head_size=64, batch=64, context=512, minutes=2, lr=2e-3, dropout=0.2),
}
SHARES = {"batch": DataParallel, "context": SequenceParallel}
CHECKPOINT, MODEL = "training.safetensors", "model.safetensors"
SHOWN = 0.2  # seconds between two states of the progress bar


def run(options):
    device, message = device_of(options.device)
    comm = connect(device)
    ranks = SHARES[options.share](comm) if comm.size > 1 else OneProcess()
    if ranks.rank == 0:
        say(f"device {device}{message}" + (f", {ranks.size} ranks" if ranks.size > 1 else ""))
    try:
        training = start(options, device, ranks)
        with blas_for(training.device, training.layout.sizes):
            train(training, Path(options.out), options.every)
    except RankLost as lost:
        comm.abandon()
        raise OSError(f"rank {ranks.rank}: {lost}; --resume goes on with what {options.out} holds") from lost
    except BaseException:
        comm.abandon()  # the other ranks would wait
        raise


def declare(parser):
    add = parser.add_argument
    add("--text", required=True, metavar="FILE", help="what to learn, any bytes")
    add(
        "--out",
        required=True,
        metavar="FOLDER",
        help=f"gets {MODEL}, which linattn-np generate and RWKV6.from_file "
        f"read, and {CHECKPOINT}, from which --resume goes on; both are whole whenever the program ends, and however",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the training in --out; on the CPU it ends with the same bits "
        "as one that was never interrupted",
    )
    add_device(add)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of activations and of the matrices in products on cuda "
        "(default: %(default)s); sums, weights and the optimiser are float32, as is the cpu",
    )
    add(
        "--recompute",
        action="store_true",
        help="on cuda, compute activations again for the gradients: slower, for models beyond the memory",
    )
    add(
        "--share",
        choices=SHARES,
        default="batch",
        help="what several processes share out: the sequences of each step (default), or every sequence's context",
    )
    add(
        "--every",
        type=float,
        default=60,
        metavar="SECONDS",
        help="between held-out losses and checkpoints (default: %(default)s)",
    )

    add = parser.add_argument_group("the training", "Defaults are those of the cpu / of cuda.").add_argument

    def setting(name, type, what):
        values = [defaults.get(name, getattr(Settings, name)) for defaults in DEFAULTS.values()]
        add(f"--{name.replace('_', '-')}", type=type, help=f"{what} ({' / '.join(map(str, values))})")

    setting("layers", whole(1), "of the model")
    setting("width", whole(1), "channels of the model")
    setting("head_size", whole(1), "channels of a head")
    setting("batch", whole(1), "sequences in a step")
    setting("context", whole(1), "bytes of each that are predicted in a step")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=whole(1), help="how many, instead of --minutes")
    length.add_argument(
        "--minutes", type=float, help="how long to train, held-out losses and checkpoints included (2 / 2)"
    )
    setting("lr", float, "the learning rate after the warm-up, from where it falls to 0 as a cosine")
    setting("weight_decay", float, "AdamW's, of matrices")
    setting("dropout", float, "share of elements that are dropped")
    setting("seed", whole(0), "equal seeds train alike")


def start(options, device, ranks) -> Training:
    """A new training, or the one in the folder."""
    if not options.every >= 0:
        raise ValueError(f"argument --every: is {options.every}, expected a number from 0 up")
    text, path = Path(options.text).read_bytes(), Path(options.out) / CHECKPOINT
    for name in (CHECKPOINT, MODEL):
        if same_file(options.text, Path(options.out) / name):
            raise ValueError(f"argument --text: is {name} in --out, which the training would replace")
    given = {field.name: value for field in fields(Settings) if (value := getattr(options, field.name)) is not None}
    if options.resume:
        training = Training.restore(path, text, device, options.dtype, recompute=options.recompute, ranks=ranks)
        for name, value in given.items():
            if (own := getattr(training.settings, name)) != value:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"argument {flag}: is {value}, but the training in {options.out} has {own}")
        return training
    if ranks.rank == 0 and path.exists():
        raise ValueError(f"argument --out: {options.out} holds a training; --resume goes on with it")
    defaults = {name: value for name, value in DEFAULTS[device].items() if name != "minutes" or "steps" not in given}
    training = Training(
        text, Settings(**defaults | given), device, options.dtype, recompute=options.recompute, ranks=ranks
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    return training


def device_of(wanted) -> tuple[str, str]:
    """The device, and why it is not another one."""
    if wanted == "cpu":
        return "cpu", ""
    try:
        check_device("Training", "cuda")
        return "cuda", ""
    except NotSupported as why:
        if wanted == "cuda":
            raise
        return "cpu", f": {why}"


def train(training, folder, every):
    """Until it is done; what an interrupt loses are the steps since the last report.

    Of several ranks the first one reports, and the others wait for it at their next step. A rank that is lost costs
    the step that it was in: on the CPU the first saves what all had before it. A card may have begun to use numbers
    that never came.
    """
    if training.ranks.rank:
        while training.done < 1:
            training.step()
        return
    try:
        steps(training, folder, every)
    except RankLost:
        if training.device == "cpu":
            training.save(folder / CHECKPOINT)
        raise


def steps(training, folder, every):
    """Those of the rank that reports."""
    say(
        f"{training.layout.size:,} parameters; {len(training.text.learned):,} bytes to learn, "
        f"{len(training.text.held):,} held out"
    )
    with status("training ...") as show:
        interval = Interval(training)
        while training.done < 1:
            interval.step()
            if interval.since_shown > SHOWN:
                show(f"training {bar(training.done)} {interval.latest()}")
            if interval.seconds > every and training.done < 1:
                interval.report(folder, show)
                interval = Interval(training)
        interval.report(folder, show)
    say(f"wrote {folder / MODEL}")


class Interval:
    """The steps from one report to the next."""

    def __init__(self, training):
        self.training, self.losses, self.first = training, [], training.bytes
        self.start = self.shown = time.perf_counter()

    def step(self):
        self.losses.append(self.training.step())

    @property
    def seconds(self):
        return time.perf_counter() - self.start

    @property
    def since_shown(self):
        return time.perf_counter() - self.shown

    def latest(self) -> str:
        loss = float(self.losses[-1])  # waits for the device, so it comes before the speed
        self.shown = time.perf_counter()
        return f"loss {loss:.3f}, {self.speed():,.0f} bytes/s"

    def speed(self):
        return (self.training.bytes - self.first) / self.seconds

    def report(self, folder, show):
        """The mean loss, the held-out loss and the files; nothing is written once the weights are lost."""
        training, line = self.training, f"step {self.training.step_number}"
        if self.losses:
            mean = math.fsum(map(float, self.losses)) / len(self.losses)
            if not math.isfinite(mean):
                raise ValueError(f"the loss is {mean} by step {training.step_number}; a lower --lr may help")
            line += f", loss {mean:.3f}, {self.speed():,.0f} bytes/s"
        show(f"{line} ...")
        held_out = training.held_out_loss()
        training.save(folder / CHECKPOINT)
        training.save_model(folder / MODEL)
        show("")
        say(f"{line}, held out {held_out:.4f}")
