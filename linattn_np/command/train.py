"""Trains an RWKV model on a text: a new one, or a published one. It needs neither torch nor JAX.

    linattn-np train --text novel.txt --out novel
    linattn-np train --text novel.txt --out novel --resume
    linattn-np generate --model novel/model.safetensors --prompt "Emma was"
    linattn-np train --from model.pth --lora 16 --text texts.jsonl --out mine
    linattn-np train --from model.pth --state --text texts.jsonl --out begun
    mpiexec -n 4 linattn-np train --text novel.txt --out shared    # four processes

The last 5 % of the text are held out, but at most as much as 32 steps read. The loss on this part is printed, in nats
per byte, or per token with --from. Ctrl-C, SIGTERM and SIGHUP end the training after the step: it writes both files,
and prints the command that continues it. A second Ctrl-C ends it at once.
"""

import errno
import math
import os
import shlex
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from .. import ContractError
from ..distributed import DataParallel, RankLost, SequenceParallel, connect
from ..models import Bytes, corpus
from ..models.checkpoint import located, read
from ..models.devices import on_host
from ..models.files import check_writable, lock, same_file
from ..models.fine_tuning import Base, LowRank, States, Whole
from ..models.rwkv.model import Model
from ..models.single_process import OneProcess
from ..models.tokenizers import Tokenizer
from ..models.training import Settings, Training
from ..models.versions import VERSIONS
from .blas_threads import blas_for, computes_on
from .first_loops import before_compiling, compiling
from .option_values import tokenizer_of
from .signals import Ended, deferred
from .terminal import add_device, add_tokenizer, bar, device_of, error_line, how_to_write, integer, status, to_stderr

# The default settings: those of a small model on the CPU, and of one with 4 million parameters on the GPU.
DEFAULTS = {
    "cpu": dict(layers=2, width=128, head_size=32, batch=8, context=128, minutes=2, lr=3e-3, dropout=0.0),
    "cuda": dict(layers=4, width=256, head_size=64, batch=64, context=512, minutes=2, lr=2e-3, dropout=0.2),
}
# The defaults with --from that differ; the learning rate depends on what is trained.
FROM = dict(batch=2, dropout=0.0)
FROM_LR = {"model": 1e-4, "adapter": 1e-3, "state": 1e-2}
SHARES = {"batch": DataParallel, "context": SequenceParallel}
CHECKPOINT = "training.safetensors"
CHANGEABLE = ("steps", "minutes", "lr")  # settings that --resume may change
# All options that are neither settings, which the checkpoint has, nor flags, with their defaults, as a test compares;
# `resume_command` has those with other values, and the flags that it names.
OPTION_DEFAULTS = {
    **{"device": "auto", "dtype": "bfloat16", "share": "batch", "every": 60, "version": None},
    **{"from": None, "lora": None, "alpha": None, "matrices": None, "tokenizer": "auto", "vocab": None},
}
SAMPLE, SAMPLE_S = 72, 1.0  # the most tokens of a report's sample of text, and the most seconds for writing it
SHOWN = 0.2  # seconds between two states of the progress bar


@dataclass
class Trained:
    """What is trained, and the files of the results.

    kind : the argument of `Training`, a `protocols.Trainable`
    model : the class of the model
    tokenizer : of the text
    name : "model", "adapter" or "state", for the name of the file in --out
    """

    kind: Any
    model: type[Model]
    tokenizer: Tokenizer
    name: str

    @property
    def file(self) -> str:
        """The name of the file in --out."""
        return "state.pth" if self.name == "state" else f"{self.name}.safetensors"

    def weights(self, training) -> dict:
        """The current weights of the whole model, by official name."""
        return self.kind.model_weights(training.layout, on_host(training.steps.weights))

    def options_to_write(self, options, file) -> list:
        """The options of linattn-np generate that write text with the result."""
        tokenizer = ["--tokenizer", options.tokenizer] if options.tokenizer != "auto" else []
        vocabulary = ["--vocab", options.vocab] if options.vocab else []
        result = {
            "model": ["--model", file],
            "adapter": ["--model", options.base, "--adapter", file],
            "state": ["--model", options.base, "--load-state", file],
        }
        return [*result[self.name], *tokenizer, *vocabulary]


def trained_of(options) -> Trained:
    """What the options train; ValueError for options that do not go together."""
    if not options.base:
        for name in ("lora", "state", "vocab"):
            if getattr(options, name):
                raise ValueError(f"argument --{name}: wants --from, the model that it is for")
        model = VERSIONS[options.version or 6]
        return Trained(model, model, Bytes(), "model")
    for name in ("version", "layers", "width", "head_size"):
        if getattr(options, name) is not None:
            raise ValueError(f"argument --{name.replace('_', '-')}: does not go with --from, whose model says it")
    for name in ("alpha", "matrices"):
        if getattr(options, name) is not None and not options.lora:
            raise ValueError(f"argument --{name}: goes with --lora only")
    options.model = Path(options.base)  # for tokenizer_of: a vocabulary may be beside it
    base = Base.from_file(options.model)
    tokenizer = tokenizer_of(options, base)
    if options.lora:
        matrices = options.matrices and options.matrices.split(",")
        return Trained(LowRank(base, options.lora, options.alpha, matrices), base.kind, tokenizer, "adapter")
    if options.state:
        return Trained(States(base), base.kind, tokenizer, "state")
    return Trained(Whole(base), base.kind, tokenizer, "model")


def run(options):
    trained = trained_of(options)
    device = device_of(options.device, "Training")
    try:
        comm = connect(device)
    except RankLost as lost:
        raise OSError(str(lost)) from lost
    ranks = SHARES[options.share](comm) if comm.size > 1 else OneProcess()
    if ranks.rank == 0:
        to_stderr(computes_on(device, "NumPy") + (f", {ranks.size} ranks" if ranks.size > 1 else ""))
        if (base := getattr(trained.kind, "base", None)) and base.quantised:
            to_stderr(f"{options.base} has {base.quantised} matrices, which become float32 for the training")
    try:
        with ExitStack() as lock_scope:
            training = start(options, trained, device, ranks, lock_scope)
            with blas_for(training.device, training.layout.sizes):
                train(training, trained, options)
    except RankLost as lost:
        comm.abandon()
        raise OSError(f"rank {ranks.rank}: {lost}; --resume goes on with what {options.out} holds") from lost
    except BaseException:
        comm.abandon()  # otherwise the other ranks would wait
        raise


def add_options(parser):
    add = parser.add_argument
    add(
        "--text",
        required=True,
        metavar="FILE",
        help='what to learn: any bytes; a .jsonl with a line {"text": ...} for each text; or a .bin of token ids with '
        "its .idx (RWKV's binidx)",
    )
    add(
        "--out",
        required=True,
        metavar="FOLDER",
        help="gets model.safetensors, which linattn-np generate and models.load read, or with --lora "
        f"adapter.safetensors, with --state state.pth; and {CHECKPOINT}, from which --resume goes on, before "
        "the first step and with every report; both are whole whenever the program ends, and however",
    )
    add(
        "--resume",
        action="store_true",
        help="go on with the training in --out; on the CPU it ends with the same bits "
        "as one that was never interrupted. --steps, --minutes and --lr may differ from what it had, the others not",
    )
    add("--version", type=int, choices=VERSIONS, metavar="6,7", help="of RWKV, of a new model (default: 6)")
    add(
        "--from",
        dest="base",
        metavar="MODEL",
        help="go on from this model, with all of its weights unless --lora or --state is given: what --model of "
        "linattn-np generate takes, but none of fla's with another hidden_act than sqrelu. Its norms keep their eps, a "
        "tuned state is trained with it, and matrices in int8 or int4 become float32",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument(
        "--lora",
        type=integer(1),
        metavar="RANK",
        help="a low-rank adapter of every large matrix, which generate --adapter reads and linattn-np merge puts into "
        "the model",
    )
    only.add_argument("--state", action="store_true", help="the state before the first token alone")
    add("--alpha", type=float, help="of --lora: the adapter counts alpha / RANK (default: RANK)")
    add("--matrices", metavar="NAMES", help="of --lora: which matrices, as att.key,att.value (default: all large ones)")
    add_tokenizer(add)
    add_device(add)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=OPTION_DEFAULTS["dtype"],
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
        default=OPTION_DEFAULTS["share"],
        help="what several processes share out: the sequences of each step (default), or every sequence's context",
    )
    add(
        "--every",
        type=float,
        default=OPTION_DEFAULTS["every"],
        metavar="SECONDS",
        help="between held-out losses and checkpoints (default: %(default)s)",
    )
    add_settings(parser)


def add_settings(parser):
    """Adds the options that are fields of `Settings`."""
    add = parser.add_argument_group("the training", "Defaults are those of the cpu / of cuda.").add_argument

    def setting(name, type, what, add=add):
        values = [defaults.get(name, getattr(Settings, name)) for defaults in DEFAULTS.values()]
        add(f"--{name.replace('_', '-')}", type=type, help=f"{what} ({' / '.join(map(str, values))})")

    setting("layers", integer(1), "of the model")
    setting("width", integer(1), "channels of the model")
    setting("head_size", integer(1), "channels of a head")
    setting("batch", integer(1), "sequences in a step")
    setting("context", integer(1), "bytes, or tokens, of each that are predicted in a step")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=integer(1), help="how many, instead of --minutes")
    setting("minutes", float, "how long to train, held-out losses and checkpoints included", length.add_argument)
    setting("lr", float, "the learning rate after the warm-up, from where it falls to 0 as a cosine")
    setting("weight_decay", float, "AdamW's, of matrices")
    setting("dropout", float, "share of elements that are dropped")
    setting("seed", integer(0), "equal seeds train alike")


def start(options, trained, device, ranks, lock_scope) -> Training:
    """The training of this rank: a new one, which has been saved to --out, or with --resume the one that --out holds.

    lock_scope : an ExitStack; the folder is locked until it ends
    """
    if not options.every >= 0:
        raise ValueError(f"argument --every: is {options.every}, expected a number from 0 up")
    folder = Path(options.out)
    for name in (CHECKPOINT, trained.file):
        for flag, path in (("text", options.text), ("from", options.base and located(options.base))):
            if path and same_file(path, folder / name):
                raise ValueError(f"argument --{flag}: is {name} in --out, which the training would replace")
    text = corpus.read(options.text, trained.tokenizer)
    chosen = {field.name: value for field in fields(Settings) if (value := getattr(options, field.name)) is not None}
    arguments = dict(device=device, dtype=options.dtype, kind=trained.kind, recompute=options.recompute, ranks=ranks)
    if options.resume:
        if not (folder / CHECKPOINT).exists():
            raise ValueError(f"argument --resume: {folder} holds no training; without --resume one begins there")
        if ranks.rank == 0:
            lock_folder(folder, lock_scope)
        training = Training.restore(folder / CHECKPOINT, text, **arguments)
        resume(training, chosen, options.out)
        check_writable(folder / CHECKPOINT)
        check_writable(folder / trained.file)
        return training
    if ranks.rank == 0:
        check_free(folder, trained.file)
    settings = defaults(options, trained, device, chosen) | chosen
    training = Training(text, Settings(**settings), **arguments)
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        lock_folder(folder, lock_scope)  # after what may fail, since it needs the folder
        check_free(folder, trained.file)  # which another training may have filled meanwhile
        save(training, folder, trained.file)
    return training


def lock_folder(folder, lock_scope):
    """Locks the folder until `lock_scope`, an ExitStack, ends; ValueError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    lock_scope.callback(os.close, descriptor)
    try:
        lock(descriptor, folder)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise ValueError(
            f"argument --out: another process trains into {folder}; name another folder. Processes share a training if "
            "mpiexec with mpi4py, or torchrun, has started them"
        ) from None


def defaults(options, trained, device, chosen) -> dict:
    """The default settings. `chosen`: the settings that options give."""
    found = {name: value for name, value in DEFAULTS[device].items() if name != "minutes" or "steps" not in chosen}
    if options.base:
        sizes = trained.kind.base.sizes
        found |= FROM | dict(layers=sizes["L"], width=sizes["D"], head_size=sizes["N"], lr=FROM_LR[trained.name])
    return found


def check_free(folder, file):
    """ValueError if the folder holds a training that has made a step, or `file` without a training: a new one would
    replace it. A training without a step, which loses nothing, may be replaced, with its `file`."""
    if (folder / CHECKPOINT).exists():
        if read(folder / CHECKPOINT).get("step", [1])[0]:
            raise ValueError(f"argument --out: {folder} holds a training; --resume goes on with it")
    elif (folder / file).exists():
        raise ValueError(f"argument --out: {folder} holds {file}, which the training would replace")


def resume(training, chosen, folder):
    """Changes the training's settings to those `chosen`; ValueError for one that --resume may not change."""
    for name, value in chosen.items():
        if (stored := getattr(training.settings, name)) != value and name not in CHANGEABLE:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"argument {flag}: is {value}, but the training in {folder} has {stored}")
    training.change(**{name: value for name, value in chosen.items() if name in CHANGEABLE})


def resume_command(options) -> str:
    """The command that continues this training."""
    words = ["linattn-np", "train", "--text", options.text, "--out", options.out]
    for name, usual in OPTION_DEFAULTS.items():
        if (value := getattr(options, {"from": "base"}.get(name, name))) != usual:
            words += [f"--{name}", str(value)]
    flags = [f"--{name}" for name in ("state", "recompute") if getattr(options, name)]
    return shlex.join([*words, *flags, "--resume"])


def train(training, trained, options):
    """Trains until the training is done, or until a signal comes; then it prints the command that continues it.

    If there are several ranks, the first one reports, and the others wait for it at their next step. If a rank is lost,
    the present step is lost. On the CPU the first rank then saves the training before this step; on a GPU it does not,
    since kernels may already have used numbers that did not arrive.
    """
    if training.device == "cpu" and training.done < 1:
        try:
            # Only the first rank tells of compiling; `str` does nothing, and keeps the others from it.
            with status("training ...") as show, before_compiling(str) if training.ranks.rank else compiling(show):
                training.warm_up()
        except Ended:
            if training.ranks.rank == 0:
                save(training, Path(options.out), trained.file)  # its files may have been removed meanwhile
                tell_how_to_go_on(training, options)
            raise
    with deferred() as ended:
        try:
            if training.ranks.rank:
                while training.done < 1:
                    training.step()
            else:
                report_steps(training, trained, options, ended)
        except RankLost:
            if training.ranks.rank == 0 and training.device == "cpu":
                training.save(Path(options.out) / CHECKPOINT)
            if training.ranks.rank and ended():  # the first rank ended by the same signal, which is no error
                raise Ended(ended()) from None
            raise
    if training.ranks.rank == 0 and (number := ended()):
        tell_how_to_go_on(training, options)
        raise Ended(number)


def tell_how_to_go_on(training, options):
    """Prints the command that continues the training."""
    to_stderr(f"stopped at step {training.step_number}. To go on: {resume_command(options)}")


def report_steps(training, trained, options, ended):
    """The training steps of the rank that reports progress."""
    folder, file = Path(options.out), Path(options.out) / trained.file
    next_command = how_to_write(*trained.options_to_write(options, file))
    if training.done >= 1:
        length = f"{training.step_number} steps in {training.seconds / 60:.2g} minutes"
        done = f"{folder} holds a training that is done, of {length}; more --steps or --minutes extend it"
        to_stderr(f"{done}. {next_command}")
        return
    text = training.text
    to_stderr(
        f"{training.layout.size:,} parameters; {len(text.learned):,} {text.unit} to learn, {len(text.held):,} held out"
    )
    begun = training.done, time.perf_counter()
    with status("training ...") as show:
        interval = Interval(training, trained)
        while training.done < 1 and not ended():
            interval.step()
            if time.perf_counter() - interval.shown > SHOWN:
                show(f"training {bar(training.done)} {interval.latest()}{time_left(training, begun)}")
            if interval.seconds > options.every and training.done < 1:
                interval.report(folder, show, time_left(training, begun), last=False)
                interval = Interval(training, trained)
        interval.report(folder, show, time_left(training, begun), last=True)
    to_stderr(f"wrote {file}. {next_command}")


def time_left(training, begun) -> str:
    """The time that the training still takes, as the end of a line: the rest of its minutes, or estimated from the
    progress since `begun`: (the fraction done, the time) then; "" before the first step.
    """
    done = training.done - begun[0]
    if training.settings.minutes:
        whole = 60 * training.settings.minutes
    elif done:
        whole = (time.perf_counter() - begun[1]) / done
    else:
        return ""
    minutes, seconds = divmod(round(whole * (1 - training.done)), 60)
    return f", {minutes} min {seconds} s left" if minutes else f", {seconds} s left"


def sample(training, trained) -> str:
    """A line of text that the model writes now: at most SAMPLE tokens, which take at most SAMPLE_S seconds."""
    until, written, tokenizer = time.perf_counter() + SAMPLE_S, [], trained.tokenizer
    model = trained.model.by_numpy(trained.weights(training))
    arguments = dict(temperature=0.8, top_p=0.9, seed=0, vocabulary=tokenizer.size)
    for token in islice(model.generate(tokenizer.encode("\n"), **arguments), SAMPLE):
        if token == tokenizer.end:
            break
        written.append(token)
        if time.perf_counter() > until:
            break
    words = tokenizer.decode(written).split()
    return "".join(character for character in " ".join(words) if character.isprintable())


def save(training, folder, file):
    """Writes the training and its result to the folder."""
    folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed the folder
    training.save(folder / CHECKPOINT)
    training.save_model(folder / file)


class Interval:
    """The steps from one report to the next, on the rank that reports. shown : the time of the last `latest`."""

    def __init__(self, training, trained):
        self.training, self.trained, self.losses, self.tokens_before = training, trained, [], training.tokens_read
        self.start = self.shown = time.perf_counter()

    def step(self):
        """Makes a step."""
        self.losses.append(self.training.step())

    @property
    def seconds(self):
        """Seconds since the interval began."""
        return time.perf_counter() - self.start

    def latest(self) -> str:
        """The latest loss and the speed, for the progress bar."""
        loss = float(self.losses[-1])  # waits for the device, so it comes before the speed
        self.shown = time.perf_counter()
        return f"loss {loss:.3f}, {self.speed()}"

    def speed(self):
        """The speed in this interval."""
        rate = (self.training.tokens_read - self.tokens_before) / self.seconds
        return f"{rate:,.0f} {self.training.text.unit}/s"

    def report(self, folder, show, left, last):
        """Prints the mean loss and the held-out loss, and writes the files, unless a loss is not finite.

        If the files cannot be written, the training goes on, and the older files stay; but the `last` report raises the
        error. show : a function that shows the progress; left : `time_left`, the end of the line
        """
        training, line = self.training, f"step {self.training.step_number}"
        if self.losses:
            mean = checked_finite(math.fsum(map(float, self.losses)) / len(self.losses), "the loss", training, folder)
            line += f", loss {mean:.3f}, {self.speed()}"
        show(f"{line} ...")
        held_out = training.held_out_loss(lambda read: show(f"{line}, held out {bar(read)}"))
        checked_finite(held_out, "the loss on what is held out", training, folder)
        try:
            save(training, folder, self.trained.file)
        except OSError as error:
            if last:
                raise
            to_stderr(f"step {training.step_number} is not saved, and the training goes on: {error_line(error)}")
        show("")
        to_stderr(f"{line}, held out {held_out:.4f}{left}")
        to_stderr(f"  it writes: {sample(training, self.trained)}")


def checked_finite(loss, what, training, folder):
    """`loss`; ContractError, which calls it `what`, if it is not finite."""
    if not math.isfinite(loss):
        raise ContractError(
            f"{what} is {loss} by step {training.step_number}; {folder} keeps the files of the report before, from "
            "which --resume goes on. A lower --lr may help"
        )
    return loss
