"""The steps of a training on the CPU and on the GPU: the loss, its gradients, and AdamW (Loshchilov and Hutter, 2019,
algorithm 2) with the gradient clipped by its norm.

Both have `weights`, `first` and `second`, float32 vectors of the model and of AdamW's two moments.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from threading import Lock

import numpy as np

from ..graph_capture import in_graphs
from .devices import NotCopied
from .dropout import Dropout, dropout, keep
from .training_products import CudaProducts, HostProducts

CLIP = 1.0  # the gradient's greatest norm
BETAS, EPS = (0.9, 0.99), 1e-8
STEPS_BEFORE_GRAPH = 2  # the first compiles kernels and plans calls, the second finds all memory that a step takes
CAPTURING = Lock()  # of several trainings in threads, who may add to what graphs keep
AHEAD = 2  # steps that the host may be ahead of the device
BLOCKS = 4  # of a multiprocessor, in the kernels that go over all parameters


class HostSteps:
    """On the CPU, in float32.

    layout, loss : of the model, as `protocols.Trainable` has them
    rate, seed : of the dropout
    ranks : who learns from other parts of a batch, as `single_process.OneProcess`
    """

    def __init__(self, layout, loss, rate, seed, ranks):
        self.layout, self.loss, self.products, self.ranks = layout, loss, HostProducts(), ranks
        self.rate, self.seed, self.dtype = rate, seed, self.products.dtype
        self.weights, self.first, self.second = np.zeros((3, layout.size), np.float32)
        self.sums = np.zeros(layout.size + 1, np.float32)  # what the ranks put together: the gradient, then the loss

    @property
    def gradient(self):
        return self.sums[:-1]  # not kept: in a copy it would be no part of the sums

    def on_host(self, name):
        """One of the three vectors."""
        return getattr(self, name)

    def load(self, **vectors):
        for name, vector in vectors.items():
            setattr(self, name, np.array(vector))

    def __call__(self, tokens, number, rate, kept):
        """The loss before step `number`, counted from 0; `rate` is the learning rate, `kept` the share that weight
        decay leaves of the matrices."""
        gradient_and_loss(self, self.layout.tree(self.weights), tokens, self.drop(number))
        norm = np.sqrt((self.gradient * self.gradient).sum())
        matrices = self.weights[: self.layout.matrices]
        matrices *= kept
        self.weights, self.first, self.second = adam(
            self.weights,
            self.gradient,
            self.first,
            self.second,
            CLIP / np.maximum(norm, CLIP),
            rate,
            *corrections(number),
        )
        return self.sums[-1]

    def value(self, tokens):
        """The loss of whole sequences without a step, and without dropout."""
        return self.loss(self.layout.tree(self.weights), tokens, self.products, keep)[0]

    def drop(self, number):
        if not self.rate:
            return keep
        own = [self.ranks.rank] if self.ranks.rank else []
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, number, *own]))
        return partial(dropout, np.random.Generator(bits), self.rate)


def gradient_and_loss(steps, weights, tokens, drop):
    """Fills the `sums` of steps with the means over all ranks: those of a layer travel while the next are computed."""
    layout, ranks, sums = steps.layout, steps.ranks, steps.sums
    how = {} if ranks.cut is None else {"cut": ranks.cut}
    value, pull = steps.loss(weights, tokens, steps.products, drop, **how)
    sums[-1] = value
    pull(layout.tree(steps.gradient), lambda layer: ranks.begin(sums[slice(*layout.parts[layer])]))
    ranks.begin(sums[layout.matrices :])
    ranks.finish()


def adam(weights, gradient, first, second, clip, rate, correction, correction_of_second):
    gradient = gradient * clip
    first = BETAS[0] * first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * second + (1 - BETAS[1]) * gradient * gradient
    change = first / correction / (np.sqrt(second / correction_of_second) + EPS)
    return weights - rate * change, first, second


def corrections(number):
    """The factors that correct the two moments for their start from zero."""
    return [1 - beta ** (number + 1) for beta in BETAS]


class StepInputs:
    """A step's inputs on the current CUDA device: tokens [batch, length], two seeds, four numbers of the schedule.

    A call copies new ones there in one asynchronous copy from pinned memory, so that the host does not wait for the
    end of the previous step.
    """

    def __init__(self, batch, length):
        import cupy

        count = batch * length
        self.device = cupy.zeros(count + 4, np.int64)
        self.tokens, self.seeds = self.device[:count].reshape(batch, length), self.device[count : count + 2]
        self.schedule = self.device[count + 2 :].view(np.float32)
        self.hosts = [
            np.frombuffer(cupy.cuda.alloc_pinned_memory(self.device.nbytes), np.int64, count + 4) for _ in range(AHEAD)
        ]
        self.copied = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(AHEAD)]
        self.next = 0

    def __call__(self, tokens, seeds, schedule):
        host, copied = self.hosts[self.next], self.copied[self.next]
        copied.synchronize()
        host[: tokens.size], host[tokens.size :][:2] = tokens.reshape(-1), seeds
        host[tokens.size + 2 :].view(np.float32)[...] = schedule
        self.device.data.copy_from_host_async(host.ctypes.data, host.nbytes)
        copied.record()
        self.next = (self.next + 1) % AHEAD


class CudaSteps(NotCopied):
    """On the current CUDA device: a CUDA graph, messages included, as soon as `STEPS_BEFORE_GRAPH` steps were made.

    ranks : as in `HostSteps`
    batch, length : of the tokens of a step, one more a sequence than it predicts
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
        self.drop = Dropout(self.inputs.seeds, rate) if rate else None
        # What the graph's launches read and write stands in a pool that nobody else takes memory from.
        self.stream, self.pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        self.graph, self.scratch, self.steps = None, [], 0

    def load(self, **vectors):
        with self.queue():
            for name, vector in vectors.items():
                getattr(self, name)[...] = self.cupy.asarray(vector)
            if self.rounded is not None:
                self.rounded[...] = self.weights[: self.layout.matrices]

    def on_host(self, name):
        """One of the three vectors."""
        with self.queue():
            return getattr(self, name).get()

    def __call__(self, tokens, number, rate, kept):
        """As `HostSteps` has it; the host is a few steps ahead of the device at most."""
        with self.queue():
            self.inputs(tokens, [self.seed, number], [rate, kept, *corrections(number)])
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
        with self.queue():
            return self.loss(self.tree(), self.cupy.asarray(tokens), self.products, None)[0]

    @contextmanager
    def queue(self):
        """On the stream that the graph is captured from, in order with the caller's."""
        current = self.cupy.cuda.get_current_stream()
        self.stream.wait_event(current.record())
        with self.stream:
            yield
        current.wait_event(self.stream.record())

    def tree(self):
        return self.layout.tree(self.weights, self.rounded)

    def capture(self):
        """Makes the graph of a step, and runs nothing."""
        with CAPTURING:
            others = len(in_graphs)
            self.stream.begin_capture()
            try:
                self.run()
            finally:
                graph = self.stream.end_capture()
            self.graph, self.scratch = graph, in_graphs[others:]  # theirs ends with this object
            del in_graphs[others:]

    def run(self):
        with self.cupy.cuda.using_allocator(self.pool.malloc):
            gradient_and_loss(self, self.tree(), self.inputs.tokens, self.drop)
            self.optimise()

    def optimise(self):
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
