"""A model's loss and its gradients on the GPU, with fused kernels; `grad` computes the same with array operations.

Activations, and gradients that matrices multiply, have the dtype of products. The residual and its gradient, norms,
decays and all sums are float32. Nothing synchronises with the device, so that a step can be captured in a CUDA graph.
Functions write the gradients of weights to arrays that the caller allocates: `out`, or the fields of a layer's `grads`,
which are named as those of the layer. Shapes are not checked: all arrays are `Layout.tree`'s, or made here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...backends.cupy import rwkv6_training_kernels as kernels
from ...backends.cupy.arithmetic import ceil_div
from ...backends.cupy.model_products import SquaredProduct
from ...backends.cupy.plan import FLOAT32
from ...backends.cupy.rwkv6_model_kernels import GatedNorm, LowActivations, ReluSquared, affine
from ..single_process import WHOLE
from .grad import layer_norm
from .version import output_scale


def loss(version, mix_classes, weights, tokens, products, dropout, recompute=False, cut=WHOLE):
    """``(value, pull)`` as `grad.loss` describes them and its other arguments, for arrays on a device.

    version, mix_classes : the RWKV version, and its subclasses of `Mix` in the order of a layer
    products : a `CudaProducts`, which multiplies matrices
    dropout : a `training_steps.Dropout`, or None for no dropout
    recompute : whether a layer stores only its residuals and computes its other activations again for the gradients
    """
    step = TrainingStep(version, weights, tokens, products, dropout, cut)
    embedding = weights.embedding[None].astype(FLOAT32, copy=False)
    table, pull_table = layer_norm(embedding, weights.ln0, step.layer_eps)
    x, change = None, Change("Embedded", table)  # the residual is x + change, or the change alone at first
    blocks: list[Block] = []
    for i, layer in enumerate(weights.layers):
        for mix_class in mix_classes:
            block = Block(step, mix_class(step, layer), i, 1 + len(blocks))
            x, change = block.forward(x, change)
            if recompute and blocks:
                blocks[-1].forget()
            blocks.append(block)
    x, moments, (xx, _) = step.add_norm(x, change, weights.ln_out)
    logits = step.product(xx, weights.head)
    value = step.cross_entropy(logits)

    def pull(gradients, layer_done=lambda i: None):
        # `cross_entropy` wrote their gradient to `logits`.
        head_gradients = InputGradients(dxx=step.product_backward(logits, xx, weights.head, gradients.head))
        dx, dchange = step.norm_backward(x, moments, head_gradients, None, change, weights.ln_out, gradients.ln_out)
        while blocks:  # a block's arrays are freed after its pullback; dchange: the gradients of its result
            block = blocks.pop()
            pulled = block.pull_mix(dchange, gradients)
            if recompute and blocks:
                blocks[-1].forward_again()
            added = blocks[-1].change if blocks else Change("Embedded")  # what the block's norm has added
            dx, dchange = block.pull_norm(pulled, dx, added, gradients)
            if not blocks or blocks[-1].layer < block.layer:
                step.add_up()
                if blocks:
                    layer_done(block.layer)
        # The embedding's gradient is a product with one-hot rows, which sums in a fixed order; atomic additions do not.
        one_hot = (tokens[:, :-1].reshape(-1, 1) == np.arange(step.V, like=tokens)).astype(step.dtype)
        dtable = products.matmul(one_hot.T, dchange[0])
        gradients.embedding[...] = pull_table(dtable[None], gradients.ln0)[0]
        layer_done(0)

    return value, pull


@dataclass(frozen=True)
class Change:
    """A term of the residual, which the kernel of the next norm adds.

    kind : "Added": ``first``; "Gated": ``sigmoid(first) * value``; "Embedded": the tokens' rows of the table ``first``;
        "Kept": nothing
    site : the index of the dropout that applies to the term: 0 for the embedding's, then one for each mix
    stack : () or (n,): the gradient of `first` is the last one of so many arrays, of which the mix needs the others
    """

    kind: str
    first: Any = None
    value: Any = None
    site: int = 0
    stack: tuple = ()


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
    maa_out: Any = None  # the array to which the gradient of maa is written
    previous_xx: Any = None  # xx of the token before each sequence's first, if another rank has computed it
    adds: bool = False  # whether `maa_out` has terms of that gradient already, to which the others are added


class Mix:
    """The time mix or channel mix of a layer. `forward` stores the arrays that `pull`, called later, needs.

    NORM, MIX : the names of the layer norm before the mix, and of the weights of the plain mixes that follow it
    TAKES : what `forward` needs of the normed input itself: 0 for nothing, 1 for xx, 2 for xx and d, see
        `InputGradients`
    layer : a layer of `Layout.tree`, a namespace of weights
    """

    NORM: str
    MIX: str
    TAKES = 0

    def __init__(self, step: TrainingStep, layer):
        self.step, self.layer = step, layer

    @property
    def maa(self):
        """The weights of the plain mixes."""
        return getattr(self.layer, self.MIX)

    def empty_mixes(self):
        """An array for the plain mixes."""
        return self.step.empty(*self.maa.shape[:-1], self.step.tokens, self.step.D)

    def forward(self, mixed, normed, previous_xx, site) -> Change:
        """The term of the residual, from the plain mixes [n, tokens, D] (of one mix [tokens, D]), what it `TAKES` of
        the normed input [tokens, TAKES D] or None, and `TrainingStep.previous_rank_xx`."""
        raise NotImplementedError

    def pull(self, dchange, grads) -> InputGradients:
        """The gradients of the inputs; those of the layer's weights are written to `grads`.

        dchange : the gradients of the arrays of `forward`'s result, a list of one, or of two for a "Gated" change; or
            a list of the change's `stack`
        """
        raise NotImplementedError


class Block:
    """A mix and the norm before it, with the arrays that are stored for their pullback.

    layer, site : the layer's index; the index of the dropout, see `Change`
    """

    def __init__(self, step, mix, layer, site):
        self.step, self.mix, self.layer, self.site = step, mix, layer, site
        self.norm = getattr(mix.layer, mix.NORM)

    def forward(self, x, change):
        """(the residual x + `change`, the mix's `Change`, which the next norm adds)."""
        step, maa, takes = self.step, self.mix.maa, max(self.mix.TAKES, self.step.cut is not WHOLE)
        self.x, self.moments, (normed, mixed) = step.add_norm(x, change, self.norm, maa, takes, self.mix.empty_mixes())
        if not hasattr(self, "previous_xx"):  # else what another rank has sent before
            self.previous_xx = step.previous_rank_xx(normed[:, : step.D]) if takes else None
        if self.previous_xx is not None:
            step.mix_first_tokens(mixed, normed, self.previous_xx, maa)
        self.change = self.mix.forward(mixed, normed, self.previous_xx, self.site)
        return self.x, self.change

    def pull_mix(self, dchange, gradients) -> InputGradients:
        """The pullback of the mix, whose weights' gradients go to `gradients`, those of the model."""
        pulled = self.mix.pull(dchange, gradients.layers[self.layer])
        return self.step.with_gradient_of_next_rank(pulled)

    def pull_norm(self, pulled, dx, added, gradients):
        """The pullback of the norm, which has added the change `added`: as `TrainingStep.norm_backward`."""
        out = getattr(gradients.layers[self.layer], self.mix.NORM)
        return self.step.norm_backward(self.x, self.moments, pulled, dx, added, self.norm, out)

    def forget(self):
        """Drops the arrays that `forward_again` computes from the residual: the change, and those in the mix."""
        self.change = None
        self.mix = type(self.mix)(self.step, self.mix.layer)

    def forward_again(self):
        """Computes again the arrays that `forget` has dropped."""
        if self.change is None:
            self.forward(self.x, Change("Kept"))


def transposed(w):
    """w with its last two axes swapped."""
    return w.swapaxes(-1, -2)


# -- launches ---------------------------------------------------------------------------------------------------------
class TrainingStep:
    """The sizes of a training step, and its kernels. ContractError for a width that kernels do not take.

    Arrays are [tokens, D], or [n, tokens, D] for n mixes; `tokens` is batch * context. Sums over tokens, such as
    gradients of vectors, are not there before `add_up` is called.
    """

    def __init__(self, version, weights, token_ids, products, dropout, cut):
        self.products, self.device, self.dtype, self.dropout = products, products.device, products.dtype, dropout
        self.cut, self.scale = cut, output_scale(self.dtype)
        self.layer_eps, self.group_eps = weights.eps
        self.V, self.D = weights.embedding.shape
        self.token_ids, (batch, length) = token_ids, token_ids.shape
        self.context, self.tokens = length - 1, batch * (length - 1)  # the last token is a target alone
        if self.D % 8 or self.D > kernels.MOST_CHANNELS:
            wanted = f"expected a multiple of 8 up to {kernels.MOST_CHANNELS} for training on cuda"
            version.refuse(f"width is {self.D}, {wanted}")
        self.threads = kernels.width(self.D)  # of a block, which computes all channels of a token
        largest = kernels.NormBackward(self.dtype, self.threads, "Added", kernels.NormBackward.MIXES[-1])
        if largest.shared_bytes > self.device.shared_per_block:
            wanted = f"expected at most {self.device.shared_per_block}: a narrower model, or dtype bfloat16"
            version.refuse(f"width {self.D} takes {largest.shared_bytes} bytes of this card's shared memory, {wanted}")
        N, most = weights.layers[0].bonus.shape[1], kernels.OfHeads.MOST_CHANNELS
        if N % 2 or N > most:
            version.refuse(f"head size is {N}, expected an even number up to {most} for training on cuda")
        self.first_v: Any = None  # RWKV-7's v of the first layer, which the others mix into theirs
        self.first_v_gradients: Any = None  # those layers' gradients of it [layers, tokens, D], the last layer's first
        self.later_layers, self.layers_pulled = len(weights.layers) - 1, 0
        self.sums: list = []  # what `add_up` has to sum

    # -- products --
    def product(self, x, w, out=None, add=False):
        """x w, in `out` if it is given; `add`: out + x w."""
        out = self.empty(*x.shape[:-1], w.shape[-1]) if out is None else out
        return self.products.matmul(x, w, out, add)

    def product_backward(self, dy, x, w, dw, out=None):
        """The pullback of `product`: the gradient of x, in `out` if it is given; that of w goes to `dw`."""
        self.products.matmul(transposed(x), dy, dw)
        return self.product(dy, transposed(w), out)

    # -- forwards --
    def add_norm(self, x, change, norm, maa=None, takes=1, mixed=None):
        """(y, moments, (normed, mixed)).

        y : the residual x + change
        moments : mean and 1 / deviation of the rows of y [tokens, 2]
        normed : what `takes`, a `Mix.TAKES`, says: None, the layer norm xx of y, or xx and d side by side
        mixed : the mixes [n, tokens, D] by the weights maa [n, D] (of one mix [tokens, D], by [D]), in the array that
            is given; None without maa
        """
        y = x if change.kind == "Kept" else self.empty(self.tokens, self.D, dtype=FLOAT32)
        moments = self.empty(self.tokens, 2, dtype=FLOAT32)
        normed = self.empty(self.tokens, takes * self.D) if takes else None
        embedded = change.kind == "Embedded"
        self.run_kernel(
            kernels.AddNorm(self.dtype, self.threads, change.kind, self.count_of_mixes(maa)),
            ceil_div(self.tokens, kernels.AddNorm.TOKENS),
            x=x,
            first=None if embedded else change.first,
            value=change.value,
            table=change.first if embedded else None,
            token_ids=self.token_ids,
            **affine(norm),  # its weight and bias
            y=None if y is x else y,
            moments=moments,
            xx=normed,
            d=normed[:, self.D :] if takes == 2 else None,
            maa=maa,
            mixed=mixed,
            normed_row=takes * self.D,
            drop=self.dropout_argument(change),
            eps=self.layer_eps,
        )
        return y, moments, (normed, mixed)

    def count_of_mixes(self, maa):
        """n for the weights maa [n, D], 1 for [D], 0 for None."""
        return 0 if maa is None else maa.size // self.D

    def mix(self, xx, previous_xx, maa, m):
        """xx + d (maa + m) [5, tokens, D] for maa [5, D], m [5, tokens, D] and d = (previous token's xx) - xx.
        `previous_xx` is the result of `previous_rank_xx`."""
        mixed = self.empty(*maa.shape[:-1], self.tokens, self.D)
        kernel = kernels.MixForward(self.dtype)
        self.run_kernel(kernel, self.blocks_of(kernel), xx=xx, maa=maa, m=m, mixed=mixed)
        if previous_xx is not None:
            self.mix_first_tokens(mixed, xx, previous_xx, maa, self.first_tokens(m))
        return mixed

    def mix_first_tokens(self, mixed, normed, previous_xx, maa, m=0):
        """Writes the mixes of sequences' first tokens again, and their d if `normed` has it: the kernels have computed
        them with 0 in place of `previous_xx`."""
        first_xx = self.first_tokens(normed)[:, : self.D]
        d = previous_xx - first_xx
        self.tokens_at(0, mixed)[...] = first_xx + d * (maa[..., None, :] + m)
        if normed.shape[1] > self.D:
            self.tokens_at(0, normed)[:, self.D :] = d

    def relu_squared(self, y, dy=None):
        """relu(y)^2, in place. With `dy` the pullback, in place, too: y is then what `relu_squared` has returned.
        Returns the array that it overwrites."""
        kernel = ReluSquared(self.dtype, self.dtype)
        self.run_kernel(kernel, kernel.blocks(y.size), x=y, y=y, dy=dy, count=y.size)
        return y if dy is None else dy

    def squared_product(self, x, w):
        """relu(x w)^2, in the units of `relu_squared`; on Hopper by one kernel, if it keeps the card busy."""
        y, rows = self.empty(*x.shape[:-1], w.shape[-1]), transposed(w)
        if squares := SquaredProduct.fitting(rows, x, self.device):
            self.run_kernel(squares, squares.blocks(rows, x, self.device), **squares.args(rows, x, y))
            return y
        return self.relu_squared(self.product(x, w, y))

    def low_activations(self, y, dy=None, tanh_end=None, sigmoid=(0, 0)):
        """The activations between both matrices of products of low rank, in place, of y [tokens, columns]: tanh of the
        columns before `tanh_end` (None: of all), the sigmoid of the columns sigmoid[0] ... sigmoid[1] - 1. `dy` and the
        result are as in `relu_squared`."""
        kernel, columns = LowActivations(self.dtype), y.shape[1]
        tanh_end = columns if tanh_end is None else tanh_end
        ends = dict(zip(("tanh_end", "sigmoid_begin", "sigmoid_end"), (tanh_end, *sigmoid)))
        self.run_kernel(kernel, kernel.blocks(y.size), y=y, dy=dy, count=y.size, columns=columns, **ends)
        return y if dy is None else dy

    def log_decay(self, low, decay):
        """The log decays w = -exp(decay + low), float32."""
        w, kernel = self.empty(*low.shape, dtype=FLOAT32), kernels.LogDecayForward(self.dtype)
        self.run_kernel(kernel, self.blocks_of(kernel), low=low, decay=decay, w=w, count=low.size)
        return w

    def gated_norm(self, o, gate, norm, eps, N, bonus=(), y=None):
        """The group norm of o over each head of N channels, times silu(gate); or with `bonus`, the arrays (r, key, v,
        weights of the bonus), (GroupNorm(o) + (sum r key weights) v) gate, the sum over a head. In y if it is given."""
        y = self.empty(*o.shape) if y is None else y
        kernel, heads = GatedNorm.fitting(self.dtype, N, BONUS=bool(bonus)), self.D // N
        arrays = {"o": o, "gate": gate, "y": y, **affine(norm), **dict(zip(("r", "k", "v", "bonus"), bonus))}
        rows = self.tokens * heads
        self.run_kernel(kernel, kernel.blocks(self.tokens, heads), **arrays, rows=rows, H=heads, N=N, eps=eps)
        return y

    def cross_entropy(self, logits):
        """The mean cross entropy over all tokens; `logits` are overwritten with their gradient."""
        losses, kernel = self.empty(self.tokens, dtype=FLOAT32), kernels.CrossEntropy(self.dtype)
        self.run_kernel(
            kernel,
            ceil_div(self.tokens, kernel.TOKENS),
            logits=logits,
            token_ids=self.token_ids,
            losses=losses,
            V=self.V,
            share=1 / self.tokens,  # of a token's loss in the mean
        )
        return losses.mean()

    # -- backwards --
    def norm_backward(self, x, moments, pulled, dy, change, norm, out):
        """The pullback of `add_norm`: (the residual's gradient, those of the change's arrays).

        x, moments : the results of `add_norm`
        pulled : the `InputGradients` of xx
        dy : the terms of the residual's gradient that do not pass through the norm, or None; it is overwritten with the
            residual's gradient
        out : the array for the gradients of the norm's weight and bias; that of maa goes to `pulled.maa_out`
        """
        mixes = self.count_of_mixes(pulled.maa)
        dx = self.empty(self.tokens, self.D, dtype=FLOAT32) if dy is None else dy
        gated = change.kind == "Gated"
        dchange = [self.empty(*change.stack, self.tokens, self.D) for _ in range(1 + gated)]
        kernel = kernels.NormBackward(self.dtype, self.threads, "Gated" if gated else "Added", mixes)
        parts = self.partial_sums(kernel, 2 + mixes)  # weight, bias, maa
        self.run_kernel(
            kernel,
            len(parts),
            dxx=pulled.dxx,
            dd=pulled.dd,
            dmixed=pulled.dmixed,
            maa=pulled.maa,
            x=x,
            moments=moments,
            **affine(norm),
            dy=dy,
            dx=dx,
            first=change.first if gated else None,
            value=change.value,
            dfirst=dchange[0][-1] if change.stack else dchange[0],
            dvalue=dchange[1] if gated else None,
            parts=parts,
            drop=self.dropout_argument(change),
        )
        self.sum(parts, out, pulled.maa_out, pulled.adds)
        if pulled.previous_xx is not None:
            self.add_up()
            pulled.maa_out[...] += (self.first_tokens(pulled.dmixed) * pulled.previous_xx).sum(-2)
        return dx, dchange

    def mix_backward(self, dmixed, m, maa, xx, previous_xx, maa_out):
        """The pullback of `mix`: the gradients of m (in its memory), xx and d; that of maa goes to `maa_out`."""
        dxx, dd, kernel = self.empty(*xx.shape), self.empty(*xx.shape), kernels.MixBackward.fitting(self.dtype, self.D)
        pieces = kernel.pieces(self.D)
        parts = self.partial_sums(kernel, kernel.MIXES, pieces=pieces)
        arrays = {"dmixed": dmixed, "m": m, "maa": maa, "xx": xx, "dxx": dxx, "dd": dd, "parts": parts}
        self.run_kernel(kernel, len(parts) * pieces, **arrays)
        self.sum(parts, maa_out)
        if previous_xx is not None:
            self.add_up()
            self.tokens_at(0, m)[...] = self.first_tokens(dmixed) * (previous_xx - self.first_tokens(xx))
            maa_out += (self.first_tokens(dmixed) * previous_xx).sum(1)
        return m, dxx, dd

    def log_decay_backward(self, dw, w, out):
        """The pullback of `log_decay`: the gradient of `low`; that of `decay` goes to `out`."""
        kernel = kernels.LogDecayBackward(self.dtype, self.threads)
        dlow, parts = self.empty(*w.shape), self.partial_sums(kernel, 1)
        self.run_kernel(kernel, len(parts), dw=dw, w=w, dlow=dlow, parts=parts)
        self.sum(parts, out)
        return dlow

    def gated_norm_backward(self, dy, o, gate, norm, eps, N, norm_out, bonus=(), bonus_out=None):
        """The pullback of `gated_norm`: (the gradient of o, that of the gate, scores). The gradients of the norm's
        weights go to `norm_out`, those of the bonus's to `bonus_out`.

        scores : with `bonus` [tokens, heads, 2]: the sum r key weights over a head, and its gradient, in float32, of
            which `KeysBackward` makes the gradients of r, key and v; else None
        """
        do, dgate, heads = self.empty(*o.shape), self.empty(*o.shape), self.D // N
        kernel = kernels.GatedNormBackward.fitting(self.dtype, N, BONUS=bool(bonus))
        parts = self.partial_sums(kernel, kernel.parameters, heads)
        scores = self.empty(self.tokens, heads, 2, dtype=FLOAT32) if bonus else None
        arrays = {"dy": dy, "o": o, "gate": gate, **affine(norm), **dict(zip(("r", "key", "v", "bonus"), bonus))}
        arrays |= {"do_": do, "dgate": dgate, "scores": scores, "parts": parts}
        self.run_kernel(kernel, kernel.blocks(len(parts) * heads), **arrays, H=heads, N=N, eps=eps)
        self.sum(parts, norm_out, bonus_out)
        return do, dgate, scores

    # -- tokens shared with other ranks --
    def tokens_at(self, position, x):
        """A view [..., batch, D] of x [..., tokens, D]: the token at `position` of every sequence."""
        return x.reshape(*x.shape[:-2], -1, self.context, x.shape[-1])[..., position, :]

    def first_tokens(self, x):
        """The first token of every sequence, in float32."""
        return self.tokens_at(0, x).astype(FLOAT32)

    def previous_rank_xx(self, xx):
        """xx of the token before each sequence's first, float32 [batch, D], if another rank has it; else None."""
        if self.cut is WHOLE:
            return None
        return self.cut.from_previous_rank(self.tokens_at(-1, xx).astype(FLOAT32))

    def with_gradient_of_next_rank(self, pulled):
        """`pulled` plus the gradient of this rank's last tokens through the next rank's token shift.

        The sum overwrites `pulled.dxx`, unless that is None.
        """
        if self.cut is WHOLE:
            return pulled
        shifted = 0 if pulled.dd is None else self.first_tokens(pulled.dd)
        if pulled.dmixed is not None:
            through_mixes = self.first_tokens(pulled.dmixed) * pulled.maa[..., None, :]
            shifted = shifted + (through_mixes if through_mixes.ndim == 2 else through_mixes.sum(0))
        gradient_of_next_rank = self.cut.from_next_rank(shifted)
        if gradient_of_next_rank is None:
            return pulled
        dxx = self.device.zeros((self.tokens, self.D), self.dtype) if pulled.dxx is None else pulled.dxx
        last_tokens = self.tokens_at(-1, dxx)
        last_tokens[...] = last_tokens.astype(FLOAT32) + gradient_of_next_rank
        return replace(pulled, dxx=dxx)

    # -- arrays and launches --
    def partial_sums(self, kernel, n, heads=None, pieces=1):
        """Memory for partial sums: a row of n vectors of D numbers for each block of tokens of a kernel. There are as
        many as run at the same time: more would be written and added up, fewer would leave multiprocessors idle.
        `pieces`: how many blocks of the kernel compute one row."""
        tokens_per_block = ceil_div(self.tokens, max(1, self.at_once(kernel, heads) // pieces))
        return self.empty(ceil_div(self.tokens, tokens_per_block), n * self.D, dtype=FLOAT32)

    def at_once(self, kernel, heads):
        """The blocks of tokens that run at the same time: blocks of a kernel, or, with `heads`, of some lanes for each
        head."""
        blocks = self.device.multiprocessors * kernel.blocks_per_multiprocessor
        return blocks * kernel.threads // kernel.LANES // heads if heads else blocks

    def sum(self, parts, first_out, rest_out=None, add=False):
        """Has `add_up` sum over the rows of `parts`: the first `first_out.size` go to `first_out`, the others to
        `rest_out`, or are added to it if `add`."""
        self.sums.append((parts, first_out, rest_out, add))

    def add_up(self):
        """Computes the sums that `sum` was called for, in one launch: a launch takes longer than most of them."""
        if not self.sums:
            return  # they are added up already
        kernel, sums, blocks = kernels.ColumnSums(), [], 0
        assert len(self.sums) <= kernel.MOST
        for parts, first, rest, add in self.sums:
            arrays = {"parts": parts, "first": first, "rest": rest}
            sizes = {"P": len(parts), "columns": parts.shape[1], "split": first.size, "add": add, "first_block": blocks}
            sums.append({name: kernels.address(self.device, array) for name, array in arrays.items()} | sizes)
            blocks += ceil_div(parts.shape[1], kernel.COLUMNS)
        unused = sums[-1:] * (kernel.MOST - len(sums))
        self.run_kernel(kernel, blocks, sums=sums + unused, count=len(sums))
        self.sums.clear()

    def dropout_argument(self, change):
        """The kernel argument that describes the dropout of a change."""
        seeds, rate = (None, 0.0) if self.dropout is None else (self.dropout.seeds, self.dropout.rate)
        return [{"seeds": kernels.address(self.device, seeds), "site": change.site, "rate": rate}]

    def blocks_of(self, kernel):
        """The number of blocks for tokens * D elements, at 8 elements per thread."""
        return ceil_div(self.tokens * self.D, 8 * kernel.threads)

    def empty(self, *shape, dtype=None):
        """A new array, by default in the dtype of products."""
        return self.device.empty(shape, self.dtype if dtype is None else dtype)

    def run_kernel(self, kernel, blocks, **args):
        """Launches a kernel; `args` are the members of its argument struct, except for the step's sizes."""
        # T_: tokens of a sequence; a kernel gets those of the sizes that it has as arguments
        sizes = {"tokens": self.tokens, "T_": self.context, "D": self.D}
        if "tokens_per_block" in kernel.names:
            sizes["tokens_per_block"] = ceil_div(self.tokens, len(args["parts"]))
        step_sizes = {name: sizes[name] for name in kernel.names & sizes.keys()}
        kernels.launch(self.device, kernel, blocks, **(step_sizes | args))
