"""Training of an RWKV model on NumPy or CuPy, with our own gradients: AdamW, and checkpoints that outlive a kill.

All that is random comes from the seed and the number of the step, so a training that goes on from a checkpoint does
what it would have done; on the CPU to the last bit.
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

from ..errors import ContractError
from . import checkpoint, pth_files
from .devices import check_device
from .files import FileError, json_object, write_arrays
from .locks import Lock, one_at_a_time
from .number_checks import real, whole
from .protocols import Trainable
from .rwkv6 import RWKV6
from .single_process import OneProcess
from .training_steps import CudaSteps, HostSteps

HELD_OUT = 0.05  # of the text, its end
MAX_BYTES = 1 << 24  # of a step, far more than any machine has the memory for
WARM_UP = 0.02  # of the training
VECTORS = ("weights", "first", "second")  # of the steps: the model, and AdamW's two moments


@dataclass(frozen=True)
class Settings:
    """What a training does; two with the same settings, text and device do the same.

    layers, width, head_size : of the model
    batch, context : sequences in a step, and tokens that each of them predicts
    steps, minutes : how long, one of the two; learning rate and warm-up follow the part that is done
    lr : the greatest learning rate, at the end of the warm-up; half a cosine leads from it to 0
    weight_decay : of the matrices, a step, times the learning rate
    dropout : the share of elements that the embedding and every mix's output lose while training
    seed : of the first weights, of the order of the text and of the dropout
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
        for name in ("layers", "width", "head_size", "batch", "context", "seed"):
            self.check(whole, name, int(name != "seed"), (1 << 31) - 1)
        self.check(real, "lr", "a number above 0", lambda x: x > 0)
        self.check(real, "weight_decay", "a number from 0 up", lambda x: x >= 0)
        self.check(real, "dropout", "a number from 0 up and below 1", lambda x: 0 <= x < 1)
        if self.batch * self.context > MAX_BYTES:
            refuse(f"batch x context is {self.batch} x {self.context}, expected at most {MAX_BYTES} bytes in a step")
        if (self.steps is None) == (self.minutes is None):
            refuse("expected either steps or minutes")
        if self.minutes is None:
            self.check(whole, "steps", 1, (1 << 62) - 1)
        else:
            self.check(real, "minutes", "a number above 0", lambda x: x > 0)

    def check(self, gate, name, *wanted):
        """A field as a plain int or float, which a checkpoint can hold."""
        object.__setattr__(self, name, gate("Training", name, getattr(self, name), *wanted))


class Training:
    """A model, its optimiser and its text. Several threads may call it: its methods wait for each other.

    Parameters
    ----------
    text : bytes, or token ids [T]
        The last 5 % are held out: `held_out_loss` reads them, and nothing learns from them.
    settings : Settings
    device : "cpu" or "cuda"
    dtype : of the matrices in products and of activations, on CUDA; sums, the weights and the optimiser are float32
    kind : a class with the face of `Trainable`
        What is trained.
    recompute : bool
        On CUDA, whether a layer's activations are computed again for its gradients: a quarter less speed for two fifths
        of the memory.
    ranks : as `single_process.OneProcess`
        Who learns from a part of each batch: of several processes `linattn_np.distributed.DataParallel`, or
        `SequenceParallel` for contexts that are cut.

    Raises
    ------
    ContractError
        Too short a text; on CUDA, sizes that its kernels do not take. NotSupported: `device` cannot be had.

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
        self.fingerprint = fingerprint(as_tokens(text), kind.beside)
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
        self.text = Text(text, settings)
        if (most := int(self.text.tokens.max())) >= self.layout.sizes["V"]:
            refuse(f"the text has token {most}, but the vocabulary has {self.layout.sizes['V']} tokens")
        loss: Callable = kind.loss
        if recompute:
            loss = partial(loss, recompute=True)
        what = self.layout, loss, settings.dropout, settings.seed, self.ranks
        self.steps: HostSteps | CudaSteps
        if device == "cuda":
            self.steps = CudaSteps(*what, rows, context + 1, dtype)
        else:
            self.steps = HostSteps(*what)
        self.step_number, self.seconds, self.latest, self.lock = 0, 0.0, None, Lock()
        self.steps.load(weights=self.layout.initial(settings.seed))

    def __repr__(self):
        return f"Training({self.layout.size:,} parameters, {self.steps.dtype} on {self.device}, {self.done:.0%} done)"

    def change(self, **how):
        """From here on `steps`, `minutes` or `lr` of the settings are others; steps and minutes replace each other."""
        if how.keys() & {"steps", "minutes"}:
            how = {"steps": None, "minutes": None, **how}
        self.settings = replace(self.settings, **how)

    @property
    def done(self) -> float:
        """The part of the training that is done, from 0 to 1."""
        steps, minutes = self.settings.steps, self.settings.minutes
        part = self.seconds / (60 * minutes) if minutes else self.step_number / (steps or 1)
        return min(1.0, part)

    @property
    def tokens_read(self) -> int:
        """By all steps so far."""
        return self.step_number * self.settings.batch * self.settings.context

    @one_at_a_time
    @np.errstate(all="ignore")  # a loss that is not finite is what tells
    def step(self):
        """One step of AdamW (Loshchilov and Hutter, 2019, algorithm 2); the loss before it, on the device."""
        self.count_time()
        tokens, rate = self.ranks.part(self.text.batch(self.step_number)), self.learning_rate()
        value = self.steps(tokens, self.step_number, rate, 1 - rate * self.settings.weight_decay)
        self.step_number += 1
        return value

    @one_at_a_time
    @np.errstate(all="ignore")
    def warm_up(self):
        """Computes the first batch's loss, so that what is compiled for it takes nothing of `minutes`. All ranks do."""
        self.steps.value(self.ranks.part(self.text.batch(0)))

    def learning_rate(self):
        done = max(self.done, 1 / self.settings.steps) if self.settings.steps else self.done
        return self.settings.lr * min(1, done / WARM_UP) * (1 + math.cos(math.pi * self.done)) / 2

    def count_time(self):
        """Adds what has passed since the last step, whatever was done meanwhile."""
        now = time.perf_counter()
        self.seconds += now - self.latest if self.latest else 0
        self.latest = now
        self.seconds = self.ranks.clock(self.step_number, self.seconds)

    @one_at_a_time
    @np.errstate(all="ignore")
    def held_out_loss(self) -> float:
        """Nats a token of the held-out end, read in rows of `context` tokens, each from an empty state."""
        nats, count = 0.0, 0
        for tokens in self.text.held_out():
            predicted = tokens[:, 1:].size
            nats, count = nats + float(self.steps.value(tokens)) * predicted, count + predicted
        return nats / count

    # -- files -------------------------------------------------------------------------------------------------------
    @one_at_a_time
    def save(self, path):
        """All that `restore` needs, in one file, which is there whole or not at all; ContractError, and the file stays
        as it was, where a number is not finite."""
        about = np.frombuffer(json.dumps(asdict(self.settings)).encode(), np.uint8)
        vectors = {name: self.steps.on_host(name) for name in VECTORS}
        self.check_finite(vectors)
        write_arrays(
            path,
            {
                **vectors,
                "settings": about,
                "text": self.fingerprint,
                "step": np.array([self.step_number]),
                "seconds": np.array([self.seconds]),
            },
        )

    @one_at_a_time
    def save_model(self, path):
        """The weights under the model's names for files, matrices in the dtype of products; ContractError as `save`.

        path : of a `.safetensors`, or of a `.pth`, which is float32
        """
        named = self.layout.named(self.steps.on_host("weights"))
        arrays = {
            name: array.astype(self.steps.dtype) if array.squeeze().ndim > 1 else array for name, array in named.items()
        }
        self.check_finite(arrays)
        (pth_files.write if str(path).endswith(".pth") else write_arrays)(path, arrays)

    def check_finite(self, arrays):
        if lost := first_not_finite(arrays):
            refuse(f"{lost} at step {self.step_number} has numbers that are not finite, which no file shall hold")

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
        """A training as `save` left it; CheckpointError for a file that holds none, or one of another text.

        Of several ranks the first reads the file.
        """
        stored = (ranks or OneProcess()).from_first(lambda: checkpoint.read(path))
        try:
            settings = checked(stored, kind)
        except ContractError as error:
            raise checkpoint.CheckpointError(f"{path}: {error}") from None
        self = cls(text, settings, device, dtype, kind, recompute, ranks)
        if bytes(stored["text"]) != bytes(self.fingerprint):
            beside = ", from this model with this alpha" if kind.beside else ""
            raise checkpoint.CheckpointError(f"{path}: is the training on another text, expected one on this{beside}")
        self.steps.load(**{name: stored[name] for name in VECTORS})
        self.step_number, self.seconds = int(stored["step"][0]), float(stored["seconds"][0])
        return self


def first_not_finite(arrays) -> str | None:
    """Its name. A sum of finite float32 numbers in float64 is finite, and takes no array of answers."""
    return next((name for name, x in arrays.items() if not np.isfinite(x.sum(dtype=np.float64))), None)


class Text:
    """The tokens to learn, in rows of a context and the token behind it; each epoch has them in another order.

    unit : what errors and reports call the tokens
    """

    def __init__(self, text, settings):
        self.tokens, self.settings = as_tokens(text), settings
        self.unit = "bytes" if self.tokens.dtype == np.uint8 else "tokens"
        held = int(len(self.tokens) * HELD_OUT)
        self.learned, self.held = self.tokens[: len(self.tokens) - held], self.tokens[len(self.tokens) - held :]
        least = 2 * settings.context + 1  # a row from any of an epoch's starts
        if len(self.learned) < least or len(self.held) < 2:
            refuse(
                f"the text has {len(self.tokens)} {self.unit}, {len(self.learned)} of them to learn, "
                f"expected at least {least} for a context of {settings.context}"
            )
        self.rows = (len(self.learned) - settings.context) // settings.context

    def batch(self, step) -> np.ndarray:
        """int64 [batch, context + 1], the rows of a step."""
        first, size = step * self.settings.batch, self.settings.batch
        return self.cut(self.learned, [self.start(row) for row in range(first, first + size)])

    def start(self, row):
        epoch, row = divmod(row, self.rows)
        shift, order = order_of(self.settings.seed, epoch, self.rows, self.settings.context)
        return shift + order[row] * self.settings.context

    def cut(self, text, starts):
        return np.stack([text[start : start + self.settings.context + 1] for start in starts]).astype(np.int64)

    def held_out(self):
        """Batches that hold every token of the held-out end but the first once; a rest comes as a short row."""
        context, batch = self.settings.context, self.settings.batch
        whole = (len(self.held) - 1) // context
        for first in range(0, whole, batch):
            yield self.cut(self.held, [row * context for row in range(first, min(first + batch, whole))])
        if len(rest := self.held[whole * context :]) > 1:
            yield rest[None].astype(np.int64)


def as_tokens(text) -> np.ndarray:
    tokens = np.frombuffer(text, np.uint8) if isinstance(text, bytes) else np.asarray(text)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size and tokens.min() < 0:
        refuse(f"text is {tokens.dtype} {tokens.shape}, expected bytes, or token ids [T] from 0 up")
    return tokens


def fingerprint(tokens, beside: bytes) -> np.ndarray:
    """Of what is learnt, and of what is not trained beside it."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens).data)
    digest.update(beside)
    return np.frombuffer(digest.digest(), np.uint8)


@lru_cache(2)
def order_of(seed, epoch, rows, context):
    """Where the first row of an epoch starts, and the order of its rows."""
    rng = np.random.default_rng([seed, epoch, 1])
    return int(rng.integers(context)), rng.permutation(rows)


# -- files ------------------------------------------------------------------------------------------------------------
def checked(stored, kind) -> Settings:
    """The settings of a checkpoint, once all that it holds fits them."""
    kinds = {
        **dict.fromkeys(VECTORS, np.float32),
        "settings": np.uint8,
        "text": np.uint8,
        "step": np.int64,
        "seconds": np.float64,
    }
    if stored.keys() != kinds.keys():
        refuse(f"holds {', '.join(sorted(stored)[:9])}, expected a training: {', '.join(sorted(kinds))}")
    for name, dtype in kinds.items():
        if stored[name].dtype != dtype or stored[name].ndim != 1:
            refuse(
                f"has {name} in {stored[name].dtype} with {stored[name].ndim} axes, expected {np.dtype(dtype)} with one"
            )
    try:
        about = json_object(stored["settings"].tobytes())
    except FileError as error:
        refuse(f"has settings that are none of a training: {error}")
    if about.keys() != {field.name for field in fields(Settings)}:
        refuse("has settings that are none of a training")
    settings, size = Settings(**about), len(stored["weights"])
    if settings.layers * settings.width > size:  # before a table of so many layers is made
        refuse(f"has {size} weights for {settings.layers} layers of {settings.width}")
    wanted = kind.trainable(settings.layers, settings.width, settings.head_size).size
    for name, count in (*((name, wanted) for name in VECTORS), ("text", 32), ("step", 1), ("seconds", 1)):
        if len(stored[name]) != count:
            refuse(f"has {len(stored[name])} elements of {name}, expected {count}")
    if lost := first_not_finite({name: stored[name] for name in VECTORS}):
        refuse(f"has numbers in {lost} that are not finite")
    if stored["step"][0] < 0 or not 0 <= stored["seconds"][0] < math.inf:
        refuse(f"is at step {stored['step'][0]} after {stored['seconds'][0]} seconds")
    return settings


def refuse(complaint: str) -> NoReturn:
    raise ContractError(f"Training: {complaint}")
