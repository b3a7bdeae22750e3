"""A model's loss and its gradients on the GPU, with fused kernels; `grad` computes the same with array operations.

Activations, and gradients that matrices multiply, have the dtype of products. The residual and its gradient, norms,
decays and all sums are float32. Nothing synchronises with the device, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...backends.cupy import rwkv6_training_kernels as kernels
from ...backends.cupy.plan import FLOAT32, ceil_div
from ...backends.cupy.rwkv6_model_kernels import Activation, GatedNorm, affine
from ..array_math import library_of
from ..single_process import WHOLE
from .grad import layer_norm
from .version import GROUP_NORM_EPS, LAYER_NORM_EPS, output_scale

# Threads per multiprocessor in kernels that sum over tokens. More blocks would hide latency better, but each block
# writes a row of partial sums, which another kernel must add up.
THREADS_PER_MULTIPROCESSOR = 1024


def loss(version, mixes, weights, tokens, products, drop, recompute=False, cut=WHOLE):
    """``(value, pull)`` as `grad.loss` returns them, for arrays on a device.

    version, mixes : the RWKV version, and its subclasses of `Mix` in the order of a layer
    products : a `CudaProducts`, which multiplies matrices
    drop : a `dropout.Dropout`, or None for no dropout
    recompute : whether a layer stores only its residuals and computes its other activations again for the gradients
    cut : how ranks share the tokens of sequences; WHOLE if they do not
    """
    step = TrainingStep(version, weights, tokens, products, drop, cut)
    table, pull_table = layer_norm(weights.embedding[None].astype(FLOAT32, copy=False), weights.ln0)
    x, change = None, Change("Embedded", table)
    blocks: list[Block] = []
    for i, layer in enumerate(weights.layers):
        for mix in mixes:
            block = Block(step, mix(step, layer), i, 1 + len(blocks))
            x, change = block.forward(x, change)
            if recompute and blocks:
                blocks[-1].forget()
            blocks.append(block)
    x, moments, xx = step.add_norm(x, change, weights.ln_out)
    logits = step.product(xx, weights.head)
    value = step.cross_entropy(logits)

    def pull(gradients, done=lambda part: None):
        step.gradient(xx, logits, gradients.head)
        of_head = InputGradients(dxx=step.product(logits, transposed(weights.head)))
        dx, dchange = step.norm_backward(x, moments, None, of_head, None, change, weights.ln_out, gradients.ln_out)
        while blocks:  # a block's arrays are freed after its pullback
            block = blocks.pop()
            layer_gradients = gradients.layers[block.layer]
            pulled = step.with_gradient_of_next_rank(block.mix.pull(dchange, layer_gradients))
            if recompute and blocks:
                blocks[-1].forward_again()
            previous_change = blocks[-1].change if blocks else Change("Embedded")
            dx, dchange = step.norm_backward(
                block.x,
                block.moments,
                block.xx,
                pulled,
                dx,
                previous_change,
                block.norm,
                getattr(layer_gradients, block.mix.NORM),
            )
            if blocks and blocks[-1].layer < block.layer:
                done(block.layer)
        # The embedding's gradient is a product with one-hot rows, which sums in a fixed order; atomic additions do not.
        one_hot = (tokens[:, :-1].reshape(-1, 1) == library_of(tokens).arange(step.V)).astype(step.T)
        dtable = products.matmul(one_hot.T, dchange[0])
        gradients.embedding[...] = pull_table(dtable[None], gradients.ln0)[0]
        done(0)

    return value, pull


@dataclass(frozen=True)
class Change:
    """A term of the residual, which the kernel of the next norm adds.

    kind : "Added": ``first``; "Gated": ``sigmoid(first) * value``; "Embedded": the tokens' rows of the table ``first``;
        "Kept": nothing
    site : the number of the dropout that applies to the term
    """

    kind: str
    first: Any = None
    value: Any = None
    site: int = 0


@dataclass(frozen=True)
class InputGradients:
    """The gradients that a mix's pullback has computed; the pullback of the norm before it takes them.

    The normed input is xx, d = (previous token's xx) - xx, and the mixes are xx + d maa. The norm's pullback computes
    the terms of xx and maa that come through the mixes.
    """

    dxx: Any = None  # of xx, without the terms through d and the mixes; None for 0
    dd: Any = None  # of d, without the terms through the mixes; None for 0
    dmixed: Any = None  # of the mixes
    maa: Any = None  # the weights of the mixes, in the order of `dmixed`
    to: Any = None  # the array to which the gradient of maa is written
    before: Any = None  # xx of the token before each sequence's first, if another rank has computed it


class Mix:
    """The time mix or channel mix of a layer, with the arrays that its pullback needs.

    NORM : the name of the layer norm before it
    """

    NORM: str

    def __init__(self, ops: TrainingStep, layer):
        self.ops, self.layer = ops, layer

    def forward(self, xx, before, site) -> Change:
        """The term of the residual, from the normed input `xx` and the previous rank's last tokens `before` or None."""
        raise NotImplementedError

    def pull(self, dchange, to) -> InputGradients:
        """The gradients of the inputs from `dchange`, that of the term; those of the layer's weights go to `to`."""
        raise NotImplementedError


class Block:
    """A mix and the norm before it, with the arrays that are stored for their pullback."""

    def __init__(self, ops, mix, layer, site):
        self.ops, self.mix, self.layer, self.site = ops, mix, layer, site
        self.norm = getattr(mix.layer, mix.NORM)

    def forward(self, x, change):
        """(the residual after adding `change`, the change that the mix adds next)."""
        self.x, self.moments, self.xx = self.ops.add_norm(x, change, self.norm)
        self.before = self.ops.before(self.xx)
        return self.x, self.run_mix()

    def run_mix(self):
        """Runs the mix; returns its `Change` of the residual."""
        self.change = self.mix.forward(self.xx, self.before, self.site)
        return self.change

    def forget(self):
        """Drops what can be computed again from the residual: xx, the change, and what the mix has stored."""
        self.xx = self.change = None
        self.mix = type(self.mix)(self.ops, self.mix.layer)

    def forward_again(self):
        """Computes again the arrays that `forget` has dropped."""
        if self.xx is None:
            _, self.moments, self.xx = self.ops.add_norm(self.x, Change("Kept"), self.norm)
            self.run_mix()


def transposed(w):
    """w with its last two axes swapped."""
    return w.swapaxes(-1, -2)


# -- launches ---------------------------------------------------------------------------------------------------------
class TrainingStep:
    """The sizes of a training step, and its kernels.

    A method that computes launches one kernel, and a second one where sums over tokens are needed. Arrays are
    [tokens, D], or [n, tokens, D] for n mixes.
    """

    def __init__(self, version, weights, tokens, products, drop, cut):
        self.products, self.device, self.T, self.drop = products, products.device, products.dtype, drop
        self.cut, self.scale = cut, output_scale(self.T)
        self.V, self.D = weights.embedding.shape
        self.read, (batch, length) = tokens, tokens.shape
        self.context, self.tokens = length - 1, batch * (length - 1)
        if self.D % 8 or self.D > kernels.MOST_CHANNELS:
            wanted = f"expected a multiple of 8 up to {kernels.MOST_CHANNELS} for training on cuda"
            version.refuse(f"width is {self.D}, {wanted}")
        self.shared: Any = None  # arrays that all layers of a version share
        self.threads = kernels.width(self.D)
        most_blocks = self.device.multiprocessors * max(1, THREADS_PER_MULTIPROCESSOR // self.threads)
        self.tokens_per_block = ceil_div(self.tokens, most_blocks)  # in kernels that sum over tokens
        self.blocks = ceil_div(self.tokens, self.tokens_per_block)

    # -- products --
    def product(self, x, w, out=None):
        """x w, in `out` if it is given."""
        out = self.empty(*x.shape[:-1], w.shape[-1]) if out is None else out
        return self.products.matmul(x, w, out)

    def gradient(self, x, dy, to):
        """Writes x^T dy, the gradient of w in the product x w, to `to`."""
        self.products.matmul(transposed(x), dy, to)

    # -- forwards --
    def add_norm(self, x, change, norm):
        """(the residual y = x + change, mean and 1 / deviation of its rows, its layer norm)."""
        y = x if change.kind == "Kept" else self.empty(self.tokens, self.D, dtype=FLOAT32)
        moments, xx = self.empty(self.tokens, 2, dtype=FLOAT32), self.empty(self.tokens, self.D)
        embedded = change.kind == "Embedded"
        self.run_kernel(
            kernels.AddNorm(self.T, self.threads, change.kind),
            self.tokens,
            x=x,
            first=None if embedded else change.first,
            value=change.value,
            table=change.first if embedded else None,
            read=self.read,
            **affine(norm),
            y=None if y is x else y,
            moments=moments,
            xx=xx,
            drop=self.dropped(change),
            eps=LAYER_NORM_EPS,
        )
        return y, moments, xx

    def mix(self, xx, before, maa, m=None):
        """xx + d (maa + m) [n, tokens, D] for maa [n, D]; `before`: xx of the tokens before each sequence's first."""
        mixed = self.empty(*maa.shape[:-1], self.tokens, self.D)
        kernel = kernels.MixForward(self.T, maa.size // self.D)
        self.run_kernel(kernel, self.elementwise(kernel), xx=xx, maa=maa, m=m, mixed=mixed)
        if before is not None:
            x, share = self.first(xx), maa[..., None, :] + (0 if m is None else self.first(m))
            self.tokens_at(0, mixed)[...] = x + (before - x) * share
        return mixed

    def activated(self, kind, x):
        """Applies the activation `kind` to `x`, in place."""
        kernel = Activation(kind, self.T, self.T)
        self.run_kernel(kernel, kernel.blocks(x.size), x=x, y=x, count=x.size)
        return x

    def log_decay(self, low, decay):
        """The log decays w = -exp(decay + low), float32."""
        w, kernel = self.empty(*low.shape, dtype=FLOAT32), kernels.LogDecayForward(self.T)
        self.run_kernel(kernel, self.elementwise(kernel), low=low, decay=decay, w=w, count=low.size)
        return w

    def gated_norm(self, o, gate, norm, N):
        """The group norm of o over each head of N channels, times silu(gate)."""
        y, kernel, heads = self.empty(*o.shape), GatedNorm.fitting(self.T, N, BONUS=False), self.D // N
        arrays, rows = {"o": o, "gate": gate, "y": y, **affine(norm)}, self.tokens * heads
        eps = GROUP_NORM_EPS * self.scale**2
        self.run_kernel(kernel, kernel.blocks(rows), **arrays, rows=rows, H=heads, N=N, eps=eps)
        return y

    def cross_entropy(self, logits):
        """The mean cross entropy over all tokens; `logits` are overwritten with its gradient."""
        losses, kernel = self.empty(self.tokens, dtype=FLOAT32), kernels.CrossEntropy(self.T)
        self.run_kernel(
            kernel,
            ceil_div(self.tokens, kernel.TOKENS),
            logits=logits,
            read=self.read,
            losses=losses,
            V=self.V,
            share=1 / self.tokens,
        )
        return losses.mean()

    # -- backwards --
    def norm_backward(self, x, moments, xx, pulled, dy, change, norm, to):
        """The pullback of `add_norm`: (the residual's gradient, those of the change's arrays).

        `dy`: the gradient of the residual after the norm, or None; the residual's gradient is written over it. The
        gradients of the norm's weights go to `to`.
        """
        mixes = 0 if pulled.maa is None else pulled.maa.size // self.D
        dx = self.empty(self.tokens, self.D, dtype=FLOAT32) if dy is None else dy
        gated = change.kind == "Gated"
        dchange = [self.empty(self.tokens, self.D) for _ in range(1 + gated)]
        parts = self.parts(2 + mixes)
        self.run_kernel(
            kernels.NormBackward(self.T, self.threads, "Gated" if gated else "Added", mixes),
            self.blocks,
            dxx=pulled.dxx,
            dd=pulled.dd,
            dmixed=pulled.dmixed,
            maa=pulled.maa,
            xx=xx,
            x=x,
            moments=moments,
            weight=norm[0],
            dy=dy,
            dx=dx,
            first=change.first if gated else None,
            value=change.value,
            dfirst=dchange[0],
            dvalue=dchange[1] if gated else None,
            parts=parts,
            drop=self.dropped(change),
        )
        self.sum(parts, to, pulled.to)
        if pulled.before is not None:
            pulled.to[...] += (self.first(pulled.dmixed) * pulled.before).sum(-2)
        return dx, dchange

    def mix_backward(self, dmixed, m, maa, xx, before, to):
        """The pullback of `mix`: the gradients of m (in its memory), xx and d; that of maa goes to `to`."""
        dxx, dd, parts = self.empty(*xx.shape), self.empty(*xx.shape), self.parts(5)
        self.run_kernel(
            kernels.MixBackward(self.T, self.threads),
            self.blocks,
            dmixed=dmixed,
            m=m,
            maa=maa,
            xx=xx,
            dxx=dxx,
            dd=dd,
            parts=parts,
        )
        self.sum(parts, to)
        if before is not None:
            self.tokens_at(0, m)[...] = self.first(dmixed) * (before - self.first(xx))
            to += (self.first(dmixed) * before).sum(1)
        return m, dxx, dd

    def activation_backward(self, kind, dy, y):
        """The pullback of `activated`: dy becomes the gradient of the input; y is the output."""
        kernel = kernels.ActivationBackward(kind, self.T)
        self.run_kernel(kernel, self.elementwise(kernel, y.size), dy=dy, y=y, count=y.size)
        return dy

    def log_decay_backward(self, dw, w, to):
        """The pullback of `log_decay`: the gradient of `low`; that of `decay` goes to `to`."""
        dlow, parts = self.empty(*w.shape), self.parts(1)
        kernel = kernels.LogDecayBackward(self.T, self.threads)
        self.run_kernel(kernel, self.blocks, dw=dw, w=w, dlow=dlow, parts=parts)
        self.sum(parts, to)
        return dlow

    def gated_norm_backward(self, dy, o, gate, norm, N, to):
        """The pullback of `gated_norm`: the gradients of o and gate; those of the norm's weights go to `to`."""
        dout, dgate, parts = self.empty(*o.shape), self.empty(*o.shape), self.parts(2)
        self.run_kernel(
            kernels.GatedNormBackward(self.T, self.threads),
            self.blocks,
            dy=dy,
            o=o,
            gate=gate,
            **affine(norm),
            do_=dout,
            dgate=dgate,
            parts=parts,
            N=N,
            eps=GROUP_NORM_EPS * self.scale**2,
        )
        self.sum(parts, to)
        return dout, dgate

    # -- tokens shared with other ranks --
    def tokens_at(self, place, x):
        """A view [..., batch, D] of x [..., tokens, D]: the token at position `place` of every sequence."""
        return x.reshape(*x.shape[:-2], -1, self.context, x.shape[-1])[..., place, :]

    def first(self, x):
        """The first token of every sequence, in float32."""
        return self.tokens_at(0, x).astype(FLOAT32)

    def before(self, xx):
        """xx of the previous rank's last tokens, [batch, D], or None."""
        return self.cut.from_previous_rank(self.tokens_at(-1, xx).astype(FLOAT32))

    def with_gradient_of_next_rank(self, pulled):
        """`pulled` plus the gradient that the next rank's token shift gives this rank's last tokens.

        It is added in the memory of `pulled.dxx`, where there is one.
        """
        if self.cut is WHOLE:
            return pulled
        shifted = 0 if pulled.dd is None else self.first(pulled.dd)
        if pulled.dmixed is not None:
            through_mixes = self.first(pulled.dmixed) * pulled.maa[..., None, :]
            shifted = shifted + (through_mixes if through_mixes.ndim == 2 else through_mixes.sum(0))
        gradient_of_next_rank = self.cut.from_next_rank(shifted)
        if gradient_of_next_rank is None:
            return pulled
        dxx = pulled.dxx
        if dxx is None:
            dxx = self.empty(self.tokens, self.D)
            dxx[...] = 0
        last_tokens = self.tokens_at(-1, dxx)
        last_tokens[...] = last_tokens.astype(FLOAT32) + gradient_of_next_rank
        return replace(pulled, dxx=dxx)

    # -- arrays and launches --
    def parts(self, n):
        """Memory for partial sums: a row of n vectors of D numbers for each block of a kernel."""
        return self.empty(self.blocks, n * self.D, dtype=FLOAT32)

    def sum(self, parts, first, rest=None):
        """Writes the sums over the rows of `parts` to `first`, as many as it holds, and the others to `rest`."""
        columns, kernel = parts.shape[1], kernels.ColumnSums()
        self.run_kernel(
            kernel,
            ceil_div(columns, kernel.COLUMNS),
            parts=parts,
            first=first,
            rest=rest,
            P=self.blocks,
            columns=columns,
            split=first.size,
        )

    def dropped(self, change):
        """The kernel argument that describes the dropout of a change."""
        seeds, rate = (None, 0.0) if self.drop is None else (self.drop.seeds, self.drop.rate)
        return [{"seeds": kernels.address(self.device, seeds), "site": change.site, "rate": rate}]

    def elementwise(self, kernel, count=None):
        """The number of blocks for `count` elements, by default tokens * D, at 8 elements per thread."""
        return ceil_div(self.tokens * self.D if count is None else count, 8 * kernel.threads)

    def empty(self, *shape, dtype=None):
        """A new array, by default in the dtype of products."""
        return self.device.empty(shape, self.T if dtype is None else dtype)

    def run_kernel(self, kernel, blocks, **args):
        """Launches a kernel; `args` are the members of its argument struct, except for the step's sizes."""
        sizes = {"tokens": self.tokens, "T_": self.context, "D": self.D, "each": self.tokens_per_block}
        step_sizes = {name: sizes[name] for name in kernel.names & sizes.keys()}
        kernels.launch(self.device, kernel, blocks, **(step_sizes | args))
