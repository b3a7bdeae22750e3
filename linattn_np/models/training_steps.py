"""The steps of a training on the CPU and on the GPU: loss, gradients, and AdamW with the gradient clipped by its norm
(Loshchilov and Hutter, 2019, algorithm 2).

Both classes have float32 vectors `weights` (all parameters of the model), `first` and `second` (AdamW's two moments).
`Training` calls `load` first and lets one thread in at a time.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np

from ..graph_capture import in_graphs
from .devices import NotCopied
from .training_products import CudaProducts, HostProducts

CLIP = 1.0  # the gradient's largest norm
BETAS, EPS = (0.9, 0.99), 1e-8
STEPS_BEFORE_GRAPH = 2  # step 0 compiles kernels and plans calls, step 1 allocates all memory that a step takes
CAPTURING = Lock()  # held by the training that captures a graph, as captures append to the global list `in_graphs`
AHEAD = 2  # the most steps by which the host is ahead of the device
BLOCKS = 4  # blocks per multiprocessor, in the kernels that read all parameters


# -- dropout: on the host a function, on a GPU the arguments of kernels that apply it ----------------------------------
def keep(x):
    """(x without any dropout, the pullback)."""
    return x, lambda dy: dy


def apply_dropout(rng, rate, x):
    """(x with a share `rate` of its elements set to 0 and the others scaled up, the pullback)."""
    mask, scale = rng.random(x.shape, dtype=np.float32) >= rate, 1 / (1 - rate)
    return x * mask * scale, lambda dy: dy * mask * scale


@dataclass(frozen=True)
class Dropout:
    """The arguments of kernels: `seeds`, two integers on the device that determine which elements become 0; `rate`, the
    share of these."""

    seeds: Any
    rate: float


# -- on the CPU -------------------------------------------------------------------------------------------------------
class HostSteps:
    """Training steps on the CPU, in float32.

    layout, loss : the model's parameter layout and loss function, as in `protocols.Trainable`
    rate, seed : the dropout's probability and seed
    ranks : the processes that share each batch, an object with the methods of `single_process.OneProcess`
    """

    def __init__(self, layout, loss, rate, seed, ranks):
        self.layout, self.loss, self.products, self.ranks = layout, loss, HostProducts(), ranks
        self.rate, self.seed, self.dtype = rate, seed, self.products.dtype
        self.weights, self.first, self.second = np.zeros((3, layout.size), np.float32)
        self.sums = np.zeros(layout.size + 1, np.float32)  # the gradient, then the loss: means over the ranks

    @property
    def gradient(self):
        """A view of `sums`; a property, so that a copy of this object has a view of the copy's `sums`."""
        return self.sums[:-1]

    def on_host(self, name):
        """The vector `name` ("weights", "first" or "second") on the host."""
        return getattr(self, name)

    def load(self, **vectors):
        """Replaces the named vectors by copies of the arguments."""
        for name, vector in vectors.items():
            setattr(self, name, np.array(vector))

    def __call__(self, tokens, number, rate, decay):
        """Makes step `number`, counted from 0; returns the loss before it.

        rate : the learning rate
        decay : the factor by which weight decay multiplies the matrices
        """
        gradient_and_loss(self, self.layout.tree(self.weights), tokens, self.dropout(number))
        norm = np.sqrt((self.gradient * self.gradient).sum())
        decayed = self.weights.copy()  # so that Ctrl-C leaves the vectors before the step, or those after it
        decayed[: self.layout.matrices] *= decay
        self.weights, self.first, self.second = adam(
            decayed, self.gradient, self.first, self.second, CLIP / np.maximum(norm, CLIP), rate, *corrections(number)
        )
        return self.sums[-1]

    def value(self, tokens):
        """The loss without dropout; no step is made."""
        return self.loss(self.layout.tree(self.weights), tokens, self.products, keep)[0]

    def dropout(self, number):
        """The function that applies dropout in a step. Ranks draw different numbers."""
        if not self.rate:
            return keep
        rank = [self.ranks.rank] if self.ranks.rank else []  # the first rank draws those of a training by one process
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, number, *rank]))
        return partial(apply_dropout, np.random.Generator(bits), self.rate)


def gradient_and_loss(steps, weights, tokens, dropout):
    """Writes the means of gradient and loss over all ranks to `steps.sums`. The ranks exchange a layer's gradient while
    they compute the next layer's.

    steps : a `HostSteps` or `CudaSteps`
    weights, tokens, dropout : the arguments of the loss
    """
    layout, ranks, sums = steps.layout, steps.ranks, steps.sums
    options = {} if ranks.cut is None else {"cut": ranks.cut}
    value, pull = steps.loss(weights, tokens, steps.products, dropout, **options)
    sums[-1] = value
    pull(layout.tree(steps.gradient), lambda layer: ranks.begin(sums[slice(*layout.parts[layer])]))
    ranks.begin(sums[layout.matrices :])  # all parameters but matrices, and the loss
    ranks.finish()


def adam(weights, gradient, first, second, clip, rate, first_correction, second_correction):
    """AdamW's update without weight decay: new (weights, first moment, second moment).

    clip : the factor of the gradient, 1 or less
    first_correction, second_correction : the `corrections` of the step
    """
    gradient = gradient * clip
    first = BETAS[0] * first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    change = first / first_correction / (np.sqrt(second / second_correction) + EPS)
    return weights - rate * change, first, second


def corrections(number):
    """The divisors, in step `number`, that correct the two moments' bias towards their initial value 0."""
    return [1 - beta ** (number + 1) for beta in BETAS]


# -- on the GPU -------------------------------------------------------------------------------------------------------
class StepInputs:
    """The inputs of a step on the current CUDA device: tokens [batch, length], two seeds, and the `schedule`, which is
    (learning rate, factor of weight decay, the two `corrections`).

    A call of the object writes new inputs by one asynchronous copy from pinned memory, so that the host does not wait
    for the previous step.
    """

    def __init__(self, batch, length):
        import cupy

        count = batch * length
        self.device = cupy.zeros(count + 4, np.int64)  # the last two have the bytes of the schedule's four float32
        self.tokens, self.seeds = self.device[:count].reshape(batch, length), self.device[count : count + 2]
        self.schedule = self.device[count + 2 :].view(np.float32)
        self.pinned = [
            np.frombuffer(cupy.cuda.alloc_pinned_memory(self.device.nbytes), np.int64, count + 4) for _ in range(AHEAD)
        ]
        self.copied = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(AHEAD)]
        self.next = 0  # the index of the pinned buffer for the next step

    def __call__(self, tokens, seeds, schedule):
        host, copied = self.pinned[self.next], self.copied[self.next]
        copied.synchronize()  # until the copy from this buffer, AHEAD steps ago, is done
        host[: tokens.size], host[tokens.size :][:2] = tokens.reshape(-1), seeds
        host[tokens.size + 2 :].view(np.float32)[...] = schedule
        self.device.data.copy_from_host_async(host.ctypes.data, host.nbytes)
        copied.record()
        self.next = (self.next + 1) % AHEAD


class CudaSteps(NotCopied):
    """Training steps on the current CUDA device, from step STEPS_BEFORE_GRAPH on as one CUDA graph, which also contains
    the communication of ranks.

    layout, loss, rate, seed, ranks : as in `HostSteps`
    batch, length : the shape of a step's tokens; each sequence has one token more than it predicts
    dtype : of the matrices in products and of activations; sums, weights and the optimiser are float32
    """

    def __init__(self, layout, loss, rate, seed, ranks, batch, length, dtype):
        import cupy

        self.cupy, self.layout, self.loss, self.ranks = cupy, layout, loss, ranks
        self.seed = int(np.random.SeedSequence([seed, ranks.rank]).generate_state(1)[0]) if ranks.rank else seed
        self.products = CudaProducts(dtype)
        self.dtype, self.device = self.products.dtype, self.products.device
        self.weights, self.first, self.second = cupy.zeros((3, layout.size), np.float32)
        self.sums = cupy.zeros(layout.size + 1, np.float32)  # as in `HostSteps`
        self.gradient = self.sums[:-1]
        self.rounded = None if self.dtype == np.float32 else cupy.zeros(layout.matrices, self.dtype)
        self.inputs = StepInputs(batch, length)
        self.dropout = Dropout(self.inputs.seeds, rate) if rate else None
        # The arrays of captured launches are in a memory pool of their own, so that no other code reuses their memory.
        self.stream, self.pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        self.graph, self.graph_arrays, self.steps = None, [], 0  # steps: the number of steps made by this object

    def load(self, **vectors):
        """As in `HostSteps`."""
        with self.queue():
            for name, vector in vectors.items():
                getattr(self, name)[...] = self.cupy.asarray(vector)
            if self.rounded is not None:
                self.rounded[...] = self.weights[: self.layout.matrices]

    def on_host(self, name):
        """As in `HostSteps`."""
        with self.queue():
            return getattr(self, name).get()

    def __call__(self, tokens, number, rate, decay):
        """As in `HostSteps`; the host may be at most AHEAD steps ahead of the device."""
        with self.queue():
            self.inputs(tokens, [self.seed, number], [rate, decay, *corrections(number)])
            if self.graph is None and self.steps >= STEPS_BEFORE_GRAPH:
                self.capture()
            if self.graph is None:
                self.run()
            else:
                self.graph.launch()
                self.ranks.launched()
            self.steps += 1
            return self.sums[-1].copy()

    def value(self, tokens):
        """As in `HostSteps`."""
        with self.queue():
            return self.loss(self.tree(), self.cupy.asarray(tokens), self.products, None)[0]

    @contextmanager
    def queue(self):
        """Makes this object's stream current; its work runs after the caller's earlier and before the later work."""
        current = self.cupy.cuda.get_current_stream()
        self.stream.wait_event(current.record())
        with self.stream:
            yield
        current.wait_event(self.stream.record())

    def tree(self):
        """The weights as the loss takes them."""
        return self.layout.tree(self.weights, self.rounded)

    def capture(self):
        """Captures the graph of a step without running it."""
        with CAPTURING:
            count = len(in_graphs)
            self.stream.begin_capture()
            try:
                self.run()
            finally:
                graph = self.stream.end_capture()
            self.graph, self.graph_arrays = graph, in_graphs[count:]  # arrays that the graph uses live as long as this
            del in_graphs[count:]

    def run(self):
        """Enqueues a step on `inputs`, by launches."""
        with self.cupy.cuda.using_allocator(self.pool.malloc):
            gradient_and_loss(self, self.tree(), self.inputs.tokens, self.dropout)
            self.optimise()

    def optimise(self):
        """Launches AdamW's two kernels: the gradient's squared norm, then the update of all parameters."""
        from ..backends.cupy import rwkv6_training_kernels as kernels

        launch = partial(kernels.launch, self.device)
        blocks, squares = BLOCKS * self.device.multiprocessors, kernels.SquareSums()
        parts = self.device.empty((blocks,), np.float32)
        launch(squares, blocks, x=self.gradient, parts=parts, count=self.layout.size, blocks=blocks)
        launch(
            kernels.AdamW(self.dtype),
            blocks,
            weights=self.weights,
            gradient=self.gradient,
            first=self.first,
            second=self.second,
            copy=self.rounded,
            squares=parts,
            schedule=self.inputs.schedule,
            count=self.layout.size,
            matrices=self.layout.matrices,
            P=blocks,
            blocks=blocks,
            clip=CLIP,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPS,
        )
