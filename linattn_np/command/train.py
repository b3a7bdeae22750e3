"""Trains a byte-level RWKV-6 on a text, with NumPy or CuPy and the package's own gradients. No torch, no JAX.

    linattn-np train --text novel.txt --out novel
    linattn-np train --text novel.txt --out novel --resume
    linattn-np generate --model novel/model.safetensors --prompt "Emma was"
    mpiexec -n 4 linattn-np train --text novel.txt --out novel      four processes, with a card each where there are any

The last 5 % of the text are held out: the loss on them is what is printed, in nats a byte. Ctrl-C, SIGTERM and SIGHUP
finish the step, write both files and tell the command that goes on; a second one ends at once.
"""

import math
import shlex
import time
from dataclasses import fields
from itertools import islice
from pathlib import Path

from .. import ContractError, NotSupported
from ..distributed import DataParallel, RankLost, SequenceParallel, connect
from ..models import RWKV6
from ..models.checkpoint import read
from ..models.devices import check_device, on_host
from ..models.files import check_writable, same_file
from ..models.single_process import OneProcess
from ..models.training import Settings, Training
from .blas_threads import blas_for, where
from .signals import Ended, deferred
from .terminal import add_device, bar, details, say, status, told, whole

# What is trained where nothing else is said: a small model on the CPU, one of 4 million parameters on the GPU.
DEFAULTS = {
    "cpu": dict(layers=2, width=128, head_size=32, batch=8, context=128, minutes=2, lr=3e-3, dropout=0.0),
    "cuda": dict(layers=4, width=256, head_size=64, batch=64, context=512, minutes=2, lr=2e-3, dropout=0.2),
}
SHARES = {"batch": DataParallel, "context": SequenceParallel}
CHECKPOINT, MODEL = "training.safetensors", "model.safetensors"
CHANGES = ("steps", "minutes", "lr")  # settings that --resume may change
HOW = {"device": "auto", "dtype": "bfloat16", "share": "batch", "every": 60}  # the default of what no file holds
SAMPLE, SAMPLED = 72, 1.0  # bytes of text with a report, and the seconds after which there are fewer
SHOWN = 0.2  # seconds between two states of the progress bar


def run(options):
    device = device_of(options.device)
    comm = connect(device)
    ranks = SHARES[options.share](comm) if comm.size > 1 else OneProcess()
    if ranks.rank == 0:
        say(where(device, "NumPy") + (f", {ranks.size} ranks" if ranks.size > 1 else ""))
    try:
        training = start(options, device, ranks)
        with blas_for(training.device, training.layout.sizes):
            train(training, Path(options.out), options.every, command(options))
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
        f"read, and {CHECKPOINT}, from which --resume goes on, before the first step and with every report; both are "
        "whole whenever the program ends, and however",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the training in --out; on the CPU it ends with the same bits "
        "as one that was never interrupted. --steps, --minutes and --lr may differ from what it had, the others not",
    )
    add_device(add)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=HOW["dtype"],
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
        default=HOW["share"],
        help="what several processes share out: the sequences of each step (default), or every sequence's context",
    )
    add(
        "--every",
        type=float,
        default=HOW["every"],
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
    """A new training, which is in the folder already, or the one in the folder."""
    if not options.every >= 0:
        raise ValueError(f"argument --every: is {options.every}, expected a number from 0 up")
    text, folder = Path(options.text).read_bytes(), Path(options.out)
    for name in (CHECKPOINT, MODEL):
        if same_file(options.text, folder / name):
            raise ValueError(f"argument --text: is {name} in --out, which the training would replace")
    given = {field.name: value for field in fields(Settings) if (value := getattr(options, field.name)) is not None}
    how = device, options.dtype
    if options.resume:
        training = Training.restore(folder / CHECKPOINT, text, *how, recompute=options.recompute, ranks=ranks)
        resume(training, given, options.out)
        check_writable(folder / CHECKPOINT)
        check_writable(folder / MODEL)
        return training
    if ranks.rank == 0:
        check_free(folder)
    defaults = {name: value for name, value in DEFAULTS[device].items() if name != "minutes" or "steps" not in given}
    training = Training(text, Settings(**defaults | given), *how, recompute=options.recompute, ranks=ranks)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save(training, folder)
    return training


def check_free(folder):
    """Nothing in the folder is lost; a training without a step is nothing."""
    if (folder / CHECKPOINT).exists():
        if read(folder / CHECKPOINT).get("step", [1])[0]:
            raise ValueError(f"argument --out: {folder} holds a training; --resume goes on with it")
    elif (folder / MODEL).exists():
        raise ValueError(f"argument --out: {folder} holds a {MODEL}, which the training would replace")


def resume(training, given, folder):
    """The settings that were given take effect, if --resume may change them."""
    for name, value in given.items():
        if (own := getattr(training.settings, name)) != value and name not in CHANGES:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"argument {flag}: is {value}, but the training in {folder} has {own}")
    training.change(**{name: value for name, value in given.items() if name in CHANGES})


def command(options) -> str:
    """What goes on with this training, to be typed."""
    words = ["linattn-np", "train", "--text", options.text, "--out", options.out]
    for name, usual in HOW.items():
        if (value := getattr(options, name)) != usual:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, *["--recompute"] * options.recompute, "--resume"])


def device_of(wanted) -> str:
    if wanted == "cpu":
        return "cpu"
    try:
        check_device("Training", "cuda")
        return "cuda"
    except NotSupported as why:
        if wanted == "cuda":
            raise
        details(str(why))
        return "cpu"


def train(training, folder, every, again):
    """Until it is done, or a signal comes: `again` is the command that goes on then.

    Of several ranks the first one reports, and the others wait for it at their next step. A rank that is lost costs
    the step that it was in: on the CPU the first saves what all had before it. A card may have begun to use numbers
    that never came.
    """
    with deferred() as ended:
        try:
            if training.ranks.rank:
                while training.done < 1:
                    training.step()
            else:
                steps(training, folder, every, ended)
        except RankLost:
            if training.ranks.rank == 0 and training.device == "cpu":
                training.save(folder / CHECKPOINT)
            if training.ranks.rank and ended():
                raise Ended(ended()) from None
            raise
    if training.ranks.rank == 0 and (number := ended()):
        say(f"stopped at step {training.step_number}. To go on: {again}")
        raise Ended(number)


def steps(training, folder, every, ended):
    """The training steps of the rank that reports progress."""
    if training.done >= 1:
        say(f"{folder} holds a training that is done, of {training.step_number} steps; --steps or --minutes extends it")
        return
    say(
        f"{training.layout.size:,} parameters; {len(training.text.learned):,} bytes to learn, "
        f"{len(training.text.held):,} held out"
    )
    begun = training.done, time.perf_counter()
    with status("training ...") as show:
        interval = Interval(training)
        while training.done < 1 and not ended():
            interval.step()
            if interval.since_shown > SHOWN:
                show(f"training {bar(training.done)} {left(training, begun)} left, {interval.latest()}")
            if interval.seconds > every and training.done < 1:
                interval.report(folder, show, last=False)
                interval = Interval(training)
        interval.report(folder, show, last=True)
    model = folder / MODEL
    say(f"wrote {model}. To write with it: linattn-np generate --model {shlex.quote(str(model))} 'The '")


def left(training, begun) -> str:
    """The time until it is done, as `begun`, (the part that was done, when), tells."""
    done, seconds = training.done - begun[0], time.perf_counter() - begun[1]
    minutes, seconds = divmod(round(seconds * (1 - training.done) / done) if done else 0, 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


class Reader(RWKV6):
    """A model by NumPy alone, as Numba's loops would first be compiled."""

    def __init__(self, weights):
        weights, self.sizes = self.parameters(weights, None)
        self.device, self.layers = "cpu", self.numpy_layers(weights, self.sizes, "float32", lambda array: None)


def sample(training) -> str:
    """What the model writes by now, on a line: as much of SAMPLE bytes as takes no longer than a report may."""
    until, written = time.perf_counter() + SAMPLED, []
    model = Reader(training.layout.named(on_host(training.steps.weights)))
    for token in islice(model.generate(b"\n", temperature=0.8, top_p=0.9, seed=0), SAMPLE):
        written.append(token)
        if time.perf_counter() > until:
            break
    words = bytes(written).decode("utf-8", "replace").split()
    return "".join(character for character in " ".join(words) if character.isprintable())


def save(training, folder):
    training.save(folder / CHECKPOINT)
    training.save_model(folder / MODEL)


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

    def report(self, folder, show, last):
        """The mean loss, the held-out loss and the files; nothing is written once the weights are lost.

        Where there is no room for the files the training goes on with the older ones, unless it is the `last` report.
        """
        training, line = self.training, f"step {self.training.step_number}"
        if self.losses:
            mean = finite(math.fsum(map(float, self.losses)) / len(self.losses), "the loss", training, folder)
            line += f", loss {mean:.3f}, {self.speed():,.0f} bytes/s"
        show(f"{line} ...")
        held_out = finite(training.held_out_loss(), "the loss on what is held out", training, folder)
        try:
            save(training, folder)
        except OSError as error:
            if last:
                raise
            say(f"step {training.step_number} is not saved, and the training goes on: {told(error)}")
        show("")
        say(f"{line}, held out {held_out:.4f}")
        if last or self.seconds > SAMPLED:
            say(f"  it writes: {sample(training)}")


def finite(loss, what, training, folder):
    if not math.isfinite(loss):
        raise ContractError(
            f"{what} is {loss} by step {training.step_number}; {folder} keeps the files of the report before, from "
            "which --resume goes on. A lower --lr may help"
        )
    return loss
