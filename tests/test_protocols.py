"""Batches, text and training take any model with the face that they ask for; what models and layers say of
themselves.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest

from linattn_np.layers import GatedLinearAttention, random_weights
from linattn_np.models import Batch, Bytes, Sampling, austen, load
from linattn_np.models.text import Request, complete
from linattn_np.models.training import Settings, Training

GREEDY = Sampling(temperature=0)


@dataclass
class Sums:
    """A state: the sum of a sequence's tokens."""

    total: np.ndarray

    def copy(self):
        return Sums(self.total.copy())

    def row(self, slot):
        return Sums(self.total[slot : slot + 1])

    def put(self, slot, state):
        self.total[slot] = state.total[0]


class Adder:
    """A model of another kind: the next token is the sum of all tokens before it, within the vocabulary."""

    sizes = {"V": 256}

    def checked(self, tokens):
        return np.asarray(tokens, np.int64)

    def initial_state(self, batch=1):
        return Sums(np.zeros(batch, np.int64))

    def on_device(self, state, rows=None):
        return state

    def turn(self):
        return nullcontext()

    def to_host(self, array):
        return array

    def forward(self, tokens, state=None, *, cu_seqlens=None, slots=None, last=False):
        assert last
        tokens = self.checked(tokens)
        state = self.initial_state(len(tokens)) if state is None else state
        rows = tokens if cu_seqlens is None else np.split(tokens[0], cu_seqlens[1:-1])
        slots = range(len(rows)) if slots is None else slots
        for slot, row in zip(slots, rows, strict=True):
            state.total[slot] += sum(row)
        return np.eye(256, dtype=np.float32)[state.total[list(slots)] % 256], state


def test_a_batch_of_another_model():
    batch = Batch(Adder(), slots=3)
    a, b = batch.join([[1, 2], [7]], GREEDY)
    assert [batch.step() for _ in range(3)] == [{a: 3, b: 7}, {a: 6, b: 14}, {a: 12, b: 28}]
    (c,) = batch.join([[1]], GREEDY, [batch.state(a)])
    batch.leave(b)
    assert batch.step() == {a: 24, c: 25}


def test_a_step_does_not_wait_for_the_logits_that_follow_it():
    class Late(Adder):
        fetched = 0

        def to_host(self, array):
            self.fetched += 1
            return array

    model = Late()
    batch = Batch(model, slots=2)
    (a,) = batch.join([[1, 2]], GREEDY)
    assert model.fetched == 0 and batch.step() == {a: 3}
    assert model.fetched == 1
    assert batch.sequences[a].logits.argmax() == 6 and batch.step() == {a: 6}
    assert model.fetched == 2


def test_text_of_another_model():
    requests = [Request([16, 16], GREEDY, length=3), Request([300], GREEDY, length=1), Request([33], GREEDY, length=1)]
    written = {number: text for number, text, _ in complete(Adder(), Bytes(), requests, slots=2)}
    assert written == {0: " @\x80".replace("\x80", "�"), 1: ",", 2: "!"}


class Frequencies:
    """Another kind of model to train: logits that are the parameters, whatever was read."""

    beside = b""

    @staticmethod
    def trainable(layers, width, head_size):
        return Table()

    @staticmethod
    def loss(weights, tokens, products, drop):
        wanted = tokens[:, 1:]
        p = np.exp(weights - weights.max())
        p /= p.sum()

        def pull(gradients, leaves):
            gradients[...] = p - np.bincount(wanted.ravel(), minlength=256) / wanted.size

        return -np.log(p[wanted]).mean(), pull


class Table:
    size, matrices, sizes = 256, 0, {"V": 256}

    def initial(self, seed):
        return np.zeros(256, np.float32)

    def named(self, vector):
        return {"logits": vector}

    def tree(self, vector, matrices=None):
        return vector


def test_training_of_another_model(tmp_path):
    text, settings = b"aab" * 200, Settings(layers=1, width=8, head_size=8, batch=4, context=30, steps=200, lr=0.3)
    training = Training(text, settings, kind=Frequencies)
    for _ in range(200):
        training.step()
    entropy = -(2 * np.log(2 / 3) + np.log(1 / 3)) / 3
    read = []
    assert training.held_out_loss(read.append) == pytest.approx(entropy, abs=0.02)
    assert len(read) == 1 and read[-1] == 1
    training.save(tmp_path / "training.safetensors")
    again = Training.restore(tmp_path / "training.safetensors", text, kind=Frequencies)
    assert again.held_out_loss() == training.held_out_loss()


def test_what_they_say_of_themselves(kind, rng):
    model = load(austen(kind.version.number), dtype="float32")
    assert repr(model) == f"{kind.__name__}(4 layers, 256 channels, 4 heads of 64, 256 tokens, float32 on cpu)"
    batch = Batch(model, 2)
    batch.join([b"a"], GREEDY)
    assert repr(batch) == f"Batch({model!r}, 1 of 2 slots in use)"
    layer = GatedLinearAttention(random_weights(rng, hidden_size=32, num_heads=2), num_heads=2)
    assert repr(layer) == "GatedLinearAttention(32 channels, 2 heads of 8 by 16, float32 on cpu)"
    training = Training(b"abc" * 50, Settings(layers=1, width=8, head_size=8, batch=1, context=8, steps=4), kind=kind)
    assert repr(training) == f"Training({training.layout.size:,} parameters, float32 on cpu, 0% done)"
