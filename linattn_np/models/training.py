"""Trains an RWKV model with AdamW on NumPy or CuPy, with this package's gradients, and writes checkpoints.

All random numbers depend only on the seed and the number of the step. Therefore a training that is restored from a
checkpoint continues as if it had never been interrupted; on the CPU with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from typing import NoReturn

import numpy as np

from ..argument_checks import array_on_host
from ..errors import ContractError
from . import checkpoint, pth_files
from .devices import check_device
from .files import FileError, json_object, write_arrays
from .locks import Lock, one_at_a_time
from .number_checks import checked_int, checked_number, shown
from .protocols import Trainable
from .rwkv6 import RWKV6
from .single_process import OneProcess
from .training_steps import CudaSteps, HostSteps

HELD_OUT = 0.05  # share of the text, at its end, that is held out, up to the tokens of HELD_OUT_STEPS steps
HELD_OUT_STEPS = 32  # their loss takes as long as about 11 training steps
MAX_TOKENS = 1 << 24  # the most tokens of a step: no machine's memory holds the activations of so many
MAX_LAYERS = 1 << 10  # the most layers; without it, a file could ask for a table of 10^9 layers
WARM_UP = 0.02  # share of the training in which the learning rate rises
VECTORS = ("weights", "first", "second")  # the state of a training: the model's weights and AdamW's two moments


@dataclass(frozen=True)
class Settings:
    """The settings of a training. With `steps`, the same settings, text and device give the same training.

    layers, width, head_size : the model's sizes
    batch, context : sequences per step, and tokens that each of them predicts
    steps, minutes : the length of the training, one of the two; it determines the learning rate's schedule
    lr : the learning rate is half a cosine that leads from `lr` to 0, times a warm-up from 0 to 1
    weight_decay : a step multiplies matrices by 1 - weight_decay * learning rate
    dropout : the probability with which an element of the embedding's or a mix's output is set to 0 in training
    seed : of the initial weights, the order of the text and the dropout
    """

    layers: int = 2
    width: int = 128
    head_size: int = 32
    batch: int = 8
    context: int = 128
    steps: int | None = None
    minutes: float | None = None
    lr: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self.check(checked_int, "layers", 1, MAX_LAYERS)
        for name in ("width", "head_size", "batch", "context", "seed"):
            self.check(checked_int, name, int(name != "seed"), (1 << 31) - 1)
        self.check(checked_number, "lr", "a number above 0", lambda x: x > 0)
        self.check(checked_number, "weight_decay", "a number from 0 up", lambda x: x >= 0)
        self.check(checked_number, "dropout", "a number from 0 up and below 1", lambda x: 0 <= x < 1)
        if self.batch * self.context > MAX_TOKENS:
            refuse(f"batch x context is {self.batch} x {self.context}, expected at most {MAX_TOKENS} tokens in a step")
        if (self.steps is None) == (self.minutes is None):
            refuse("expected either steps or minutes")
        if self.minutes is None:
            self.check(checked_int, "steps", 1, (1 << 62) - 1)
        else:
            self.check(checked_number, "minutes", "a number above 0", lambda x: x > 0)

    def check(self, checked, name, *wanted):
        """Replaces a field by the plain int or float that `checked`, checked_int or checked_number, returns for it."""
        object.__setattr__(self, name, checked("Training", name, getattr(self, name), *wanted))


class Training:
    """A model, its optimiser and its text. Several threads may call its methods, which run one at a time.

    Parameters
    ----------
    text : bytes, or token ids [T]
        Its last 5 % are held out, but at most as many tokens as 32 steps read: only `held_out_loss` reads them.
    settings : Settings
    device : "cpu" or "cuda"
    dtype : of the matrices in products and of activations, on CUDA; sums, the weights and the optimiser are float32
    kind : a `protocols.Trainable`
        What is trained: a model class, or an object of `fine_tuning`.
    recompute : bool
        On CUDA, whether a layer's activations are computed again for its gradients, instead of being stored: training
        takes two fifths of the memory and is a quarter slower.
    ranks : an object with the methods of `single_process.OneProcess`
        The processes that share each batch: `linattn_np.distributed.DataParallel` divides its sequences,
        `linattn_np.distributed.SequenceParallel` its contexts. By default this process computes all.

    Raises
    ------
    ContractError
        The text is too short; on CUDA, the kernels do not support the sizes. NotSupported: `device` is not available.

    Example
    -------
    >>> training = Training(b"It is a truth universally acknowledged, " * 50, Settings(
    ...     layers=1, width=16, head_size=8, batch=4, context=40, steps=60, lr=2e-2))
    >>> losses = [float(training.step()) for _ in range(60)]
    >>> training.done, losses[0] > 5.5, losses[-1] < 1
    (1.0, True, True)
    """

    def __init__(
        self,
        text: bytes | np.ndarray,
        settings: Settings,
        device: str = "cpu",
        dtype="bfloat16",
        kind: Trainable = RWKV6,
        recompute: bool = False,
        ranks=None,
    ):
        check_device("Training", device)
        if recompute and device == "cpu":
            refuse("recompute is for device 'cuda'")
        self.ranks = ranks or OneProcess()
        tokens = as_tokens(text)
        self.title, self.fingerprint = getattr(kind, "title", ""), fingerprint(tokens, kind.beside)
        self.ranks.agree(
            {
                "the settings": settings,
                "the text, or the model that it goes on from": self.fingerprint.tobytes().hex()[:16],
                "the device": device,
                "dtype": dtype,
            }
        )
        rows, context = self.ranks.share(settings.batch, settings.context)
        self.settings, self.device = settings, device
        self.layout = kind.trainable(settings.layers, settings.width, settings.head_size)
        self.text = Text(tokens, settings)
        if (largest := int(self.text.tokens.max())) >= self.layout.sizes["V"]:
            refuse(f"the text has token {largest}, but the vocabulary has {self.layout.sizes['V']} tokens")
        loss: Callable = kind.loss
        if recompute:
            loss = partial(loss, recompute=True)
        arguments = self.layout, loss, settings.dropout, settings.seed, self.ranks
        self.steps: HostSteps | CudaSteps
        if device == "cuda":
            self.steps = CudaSteps(*arguments, rows, context + 1, dtype)
        else:
            self.steps = HostSteps(*arguments)
        self.step_number, self.seconds, self.latest, self.lock = 0, 0.0, None, Lock()
        self.steps.load(weights=self.layout.initial(settings.seed))

    def __repr__(self):
        return f"Training({self.layout.size:,} parameters, {self.steps.dtype} on {self.device}, {self.done:.0%} done)"

    @one_at_a_time
    def change(self, *, steps: int | None = None, minutes: float | None = None, lr: float | None = None):
        """Changes the settings that are given, for the next steps. A new `steps` removes `minutes`, and vice versa. All
        ranks call it alike."""
        if steps is minutes is None:
            steps, minutes = self.settings.steps, self.settings.minutes
        self.settings = replace(self.settings, steps=steps, minutes=minutes, lr=self.settings.lr if lr is None else lr)

    @property
    def done(self) -> float:
        """The fraction of the training that is done, from 0 to 1."""
        settings = self.settings
        part = self.seconds / (60 * settings.minutes) if settings.minutes else self.step_number / (settings.steps or 1)
        return min(1.0, part)

    @property
    def tokens_read(self) -> int:
        """The number of tokens that all steps so far have read."""
        return self.step_number * self.settings.batch * self.settings.context

    @one_at_a_time
    @np.errstate(all="ignore")  # callers see an overflow in the loss
    def step(self):
        """Makes a step of AdamW (Loshchilov and Hutter, 2019, algorithm 2); returns the loss before it."""
        self.count_time()
        tokens, rate = self.ranks.part(self.text.batch(self.step_number)), self.learning_rate()
        value = self.steps(tokens, self.step_number, rate, 1 - rate * self.settings.weight_decay)
        self.step_number += 1
        return value

    @one_at_a_time
    @np.errstate(all="ignore")
    def warm_up(self):
        """Computes the first batch's loss, so that compiling what a loss takes does not count towards `minutes`. All
        ranks call it."""
        self.steps.value(self.ranks.part(self.text.batch(0)))

    def learning_rate(self):
        """The next step's learning rate: linear warm-up times half a cosine."""
        settings, done = self.settings, self.done
        risen = max(done, 1 / settings.steps) if settings.steps else done
        return settings.lr * min(1, risen / WARM_UP) * (1 + math.cos(math.pi * done)) / 2

    def count_time(self):
        """Adds the time since the last call to `seconds`, which is the first rank's on all of them."""
        now = time.perf_counter()
        self.seconds += now - self.latest if self.latest else 0
        self.latest = now
        self.seconds = self.ranks.clock(self.step_number, self.seconds)

    @one_at_a_time
    @np.errstate(all="ignore")
    def held_out_loss(self, progress: Callable[[float], object] | None = None) -> float:
        """The mean loss, in nats per token, on the held-out text; each row of `context` tokens has an empty state.

        progress : is called with the fraction of the text that is read, from 0 to 1, after each batch
        """
        nats, count = 0.0, 0
        for tokens in self.text.held_out():
            predicted = tokens[:, 1:].size
            nats, count = nats + float(self.steps.value(tokens)) * predicted, count + predicted
            if progress:
                progress(count / (len(self.text.held) - 1))
        return nats / count

    # -- files -------------------------------------------------------------------------------------------------------
    @one_at_a_time
    def save(self, path):
        """Writes all that `restore` needs to one file.

        ContractError if a number is not finite. After this and any other error an older file at `path` is unchanged.
        """
        arrays = {name: self.steps.on_host(name) for name in VECTORS}
        self.check_finite(arrays)
        texts = {"settings": json.dumps(asdict(self.settings)), "of": self.title}
        arrays |= {name: np.frombuffer(text.encode(), np.uint8) for name, text in texts.items()}
        arrays |= {"text": self.fingerprint, "step": np.array([self.step_number]), "seconds": np.array([self.seconds])}
        write_arrays(path, arrays)

    @one_at_a_time
    def save_model(self, path):
        """Writes the weights under the model's official names, matrices in the dtype of products.

        path : if it ends in `.pth`, an official file, whose arrays are float32; else a safetensors file

        ContractError as in `save`.
        """
        named = self.layout.named(self.steps.on_host("weights"))
        arrays = {
            name: array.astype(self.steps.dtype) if array.squeeze().ndim > 1 else array for name, array in named.items()
        }
        self.check_finite(arrays)
        (pth_files.write if str(path).endswith(".pth") else write_arrays)(path, arrays)

    def check_finite(self, arrays):
        """ContractError if one of `arrays`, {name: array}, has a number that is not finite."""
        if name := first_not_finite(arrays):
            refuse(f"{name} at step {self.step_number} has numbers that are not finite, which no file shall hold")

    @classmethod
    def restore(
        cls,
        path,
        text: bytes | np.ndarray,
        device: str = "cpu",
        dtype="bfloat16",
        kind: Trainable = RWKV6,
        recompute: bool = False,
        ranks=None,
    ) -> Training:
        """The training that `save` wrote to `path`. If there are several ranks, only the first reads the file.

        CheckpointError if the file holds no training, or one on another text.
        """
        stored = (ranks or OneProcess()).from_first(lambda: checkpoint.read(path))
        wanted = getattr(kind, "title", "")
        title = stored.pop("of", np.zeros(0, np.uint8)).tobytes().decode(errors="replace")
        if title not in ("", wanted):  # older files have no title
            raise checkpoint.CheckpointError(
                f"{path}: is a training of {shown(title)[1:-1]}, expected one of {wanted}: it goes on as what it began "
                "as (linattn-np train: the same --version, --from, --lora, --state)"
            )
        try:
            settings = checked_settings(stored, kind)
        except ContractError as error:
            raise checkpoint.CheckpointError(f"{path}: {error}") from None
        self = cls(text, settings, device, dtype, kind, recompute, ranks)
        if bytes(stored["text"]) != bytes(self.fingerprint):
            same_model = ", from this model with this alpha and these matrices" if kind.beside else ""
            raise checkpoint.CheckpointError(
                f"{path}: is the training on another text, expected one on this{same_model}"
            )
        self.steps.load(**{name: stored[name] for name in VECTORS})
        self.step_number, self.seconds = int(stored["step"][0]), float(stored["seconds"][0])
        return self


def first_not_finite(arrays) -> str | None:
    """The name of the first array with a number that is not finite, or None.

    The float64 sum of numbers of at most 32 bits is finite if they are, and summing needs no temporary array.
    """
    return next((name for name, x in arrays.items() if not np.isfinite(x.sum(dtype=np.float64))), None)


class Text:
    """The tokens [T] to learn, cut into rows of `context` + 1 tokens; each epoch has its own cuts and order of rows.

    learned, held : the tokens for steps, and those that are held out
    rows : the number of rows of an epoch
    unit : "bytes" or "tokens", for messages
    """

    def __init__(self, tokens, settings):
        self.tokens, self.settings = tokens, settings
        self.unit = "bytes" if self.tokens.dtype == np.uint8 else "tokens"
        held = min(int(len(self.tokens) * HELD_OUT), HELD_OUT_STEPS * settings.batch * settings.context)
        self.learned, self.held = self.tokens[: len(self.tokens) - held], self.tokens[len(self.tokens) - held :]
        least = 2 * settings.context + 1  # enough for one row, from any of the first `context` tokens on
        if len(self.learned) < least or len(self.held) < 2:
            refuse(
                f"the text has {len(self.tokens)} {self.unit}, {len(self.learned)} of them to learn and "
                f"{len(self.held)} held out, expected at least {least} and 2 for a context of {settings.context}"
            )
        self.rows = (len(self.learned) - settings.context) // settings.context

    def batch(self, step) -> np.ndarray:
        """The rows of a step, int64 [batch, context + 1]."""
        first, size = step * self.settings.batch, self.settings.batch
        return self.cut(self.learned, [self.start(row) for row in range(first, first + size)])

    def start(self, row):
        """The index of the first token of row number `row`, counted over all epochs."""
        epoch, row = divmod(row, self.rows)
        shift, order = order_of(self.settings.seed, epoch, self.rows, self.settings.context)
        return shift + order[row] * self.settings.context

    def cut(self, text, starts):
        """The rows of `text` that begin at these indices, int64 [starts, context + 1]."""
        return np.stack([text[start : start + self.settings.context + 1] for start in starts]).astype(np.int64)

    def held_out(self):
        """Yields batches in which every held-out token but the first is predicted once; the last row may be shorter."""
        context, batch = self.settings.context, self.settings.batch
        rows = (len(self.held) - 1) // context
        for first in range(0, rows, batch):
            yield self.cut(self.held, [row * context for row in range(first, min(first + batch, rows))])
        if len(rest := self.held[rows * context :]) > 1:
            yield rest[None].astype(np.int64)


def as_tokens(text) -> np.ndarray:
    """The tokens [T] in memory that no other code can change: a copy, unless they are `bytes`."""
    tokens = np.frombuffer(text, np.uint8) if isinstance(text, bytes) else array_on_host("text", text, refuse)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size and tokens.min() < 0:
        refuse(f"text is {tokens.dtype} {tokens.shape}, expected bytes, or token ids [T] from 0 up")
    owner: object = tokens
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return tokens if isinstance(owner, bytes) else tokens.copy()


def fingerprint(tokens, beside: bytes) -> np.ndarray:
    """The SHA-256 digest, uint8 [32], of the tokens and of `beside`, which describes weights that are not trained."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens).data)
    digest.update(beside)
    return np.frombuffer(digest.digest(), np.uint8)


@lru_cache(2)
def order_of(seed, epoch, rows, context):
    """(first token of an epoch's first row, permutation of its rows)."""
    rng = np.random.default_rng([seed, epoch, 1])
    return int(rng.integers(context)), rng.permutation(rows)


# -- files -----------------------------------------------------------------------------------------------------------
def checked_settings(stored, kind) -> Settings:
    """The settings in the arrays `stored` of a checkpoint; ContractError unless all arrays are there and fit them."""
    dtypes: dict[str, type] = {**dict.fromkeys(VECTORS, np.float32), "settings": np.uint8, "text": np.uint8}
    dtypes |= {"step": np.int64, "seconds": np.float64}
    if stored.keys() != dtypes.keys():
        refuse(f"holds {', '.join(sorted(stored)[:9])}, expected a training: {', '.join(sorted(dtypes))}")
    for name, dtype in dtypes.items():
        if stored[name].dtype != dtype or stored[name].ndim != 1:
            refuse(
                f"has {name} in {stored[name].dtype} with {stored[name].ndim} axes, expected {np.dtype(dtype)} with one"
            )
    try:
        options = json_object(stored["settings"].tobytes())
    except FileError as error:
        refuse(f"has settings that are none of a training: {error}")
    if options.keys() != {field.name for field in fields(Settings)}:
        refuse("has settings that are none of a training")
    settings, size = Settings(**options), len(stored["weights"])
    if settings.layers * settings.width > size:  # checked first, because the next line builds a table of all layers
        refuse(f"has {size} weights for {settings.layers} layers of {settings.width}")
    parameters = kind.trainable(settings.layers, settings.width, settings.head_size).size
    for name, count in (*((name, parameters) for name in VECTORS), ("text", 32), ("step", 1), ("seconds", 1)):
        if len(stored[name]) != count:
            refuse(f"has {len(stored[name])} elements of {name}, expected {count}")
    if name_not_finite := first_not_finite({name: stored[name] for name in VECTORS}):
        refuse(f"has numbers in {name_not_finite} that are not finite")
    if stored["step"][0] < 0 or not 0 <= stored["seconds"][0] < math.inf:
        refuse(f"is at step {stored['step'][0]} after {stored['seconds'][0]} seconds")
    return settings


def refuse(complaint: str, error=ContractError) -> NoReturn:
    raise error(f"Training: {complaint}")
