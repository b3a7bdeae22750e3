"""RWKV-7's two mixes and their gradients on the GPU. `rwkv.cuda_grad.loss` calls `forward`, and later `pull`.

Arrays are [tokens, D], or [n, tokens, D] for n mixes or products; H heads have N channels each. ``step.product(x, w)``
is x w, and ``step.weight_gradient(x, dy, out)`` writes the gradient of w to `out`. A name with d, such as dk, is the
gradient of the loss with respect to k. `grads` has the fields of `layer`, for the weights' gradients. A kernel that
sums over tokens writes partial sums, `parts`, which ``step.sum`` adds up.

From `rwkv.cuda_grad`: `step` is the `TrainingStep`, which launches kernels; a `Change` is what a mix adds to the
residual, "Added" an array; `site` is the index of its dropout. `InputGradients` are those of a mix's inputs: of xx, of
d = (previous token's xx) - xx, and of the mixes xx + d maa.
"""

from functools import partial

from ...backends.cupy import rwkv6_training_kernels as kernels
from ...backends.cupy.plan import FLOAT32
from ...backends.cupy.rwkv6_model_kernels import GatedNorm, affine
from ...ops.functions import rwkv7
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, InputGradients, Mix, transposed
from ..rwkv.grad import vjp_from_start
from ..rwkv.version import GROUP_NORM_EPS, unit_of_squares
from .names import VERSION

MOST_IN_A_HEAD = 8 * kernels.OfHeads.WIDTHS[-1]  # a lane has eight channels
# Products of low rank, and which of the six mixes w a g k v r each takes. icl: the in-context learning rate
LOW_RANKS = {"decay": 0, "icl": 1, "gate": 2, "value": 4}
GATE = ("gate",)  # a group of one product
ACTIVATIONS = {"decay": "Tanh", "gate": "Sigmoid"}  # between the two matrices of a product of low rank


class TimeMix(Mix):
    """`math.time_mix` and its pullback.

    mixed : the six mixes [6, tokens, D]; k, v, r are the products of the last three
    groups : tuples of the names of LOW_RANKS whose products are computed together, as stacks
    low : by group, the results of the first matrices, after their activation
    high : by the names of LOW_RANKS, results of the second matrix. Those of "decay", "icl" and "value" are the kernels'
        `*_logits`, of which a sigmoid is taken; the first layer has no "value"
    key, mixed_v : the recurrence's key and value, made of k and v
    gated : the input of the output matrix
    """

    NORM, MIX = "ln1", "mix"

    def __init__(self, step, layer):
        super().__init__(step, layer)
        self.H, self.N = layer.bonus.shape
        if self.N % 2 or self.N > MOST_IN_A_HEAD:
            wanted = f"expected an even number up to {MOST_IN_A_HEAD} for training on cuda"
            VERSION.refuse(f"head size is {self.N}, {wanted}")
        # a single product of a small rank leaves multiprocessors idle; those of published models are equal
        equal = layer.decay_down.shape == layer.icl_down.shape
        self.groups = [("decay", "icl")] if equal else [("decay",), ("icl",)]
        self.groups += [GATE, ("value",)] if hasattr(layer, "value_down") else [GATE]

    def forward(self, mixed, xx, previous_xx, site):
        step, layer = self.step, self.layer
        self.previous_xx, self.mixed = previous_xx, mixed
        self.k, self.v, self.r = step.product(self.mixed[3:], layer.kvr)
        if step.first_v is None:
            step.first_v, step.first_v_gradient = self.v, step.empty(*self.v.shape, dtype=FLOAT32)
            step.first_v_gradient[...] = 0
        self.low, self.high = {}, {}
        for group in self.groups:
            self.low[group] = low = step.product(self.inputs_of(group, self.mixed), self.matrices(layer, group, "down"))
            if group[0] in ACTIVATIONS:
                step.activated(ACTIVATIONS[group[0]], low[0] if group[1:] else low)  # in place
            high = step.product(low, self.matrices(layer, group, "up"))
            self.high |= zip(group, high if group[1:] else [high])
        w, self.key, self.mixed_v, a, b = self.recurrence_arguments()
        heads = -1, step.context, self.H, self.N
        arrays = (x.reshape(heads) for x in (self.r, w, self.key, self.mixed_v, a, b))
        o, self.pull_recurrence = vjp_from_start(step.cut, layer, rwkv7, *arrays, scale=1.0)
        self.o = o.reshape(step.tokens, step.D)
        self.gated = self.gated_norm()
        return Change("Added", step.product(self.gated, layer.output), site=site)

    def pull(self, dchange, grads):
        step, layer, (dchange,) = self.step, self.layer, dchange
        step.weight_gradient(self.gated, dchange, grads.output)
        dgated = step.product(dchange, transposed(layer.output))
        do, dgate, scores = self.gated_norm_backward(dgated, grads)
        pulled = self.pull_recurrence(do.reshape(-1, step.context, self.H, self.N), grads)
        pulled = [gradient.reshape(step.tokens, step.D) for gradient in pulled]
        dhigh = {GATE: dgate}
        for group in self.groups:
            if group != GATE:
                dhigh[group] = step.empty(*[2] * (len(group) - 1), *dgate.shape)
        dkvr = self.recurrence_arguments_backward(dgated, scores, pulled, dhigh, grads)
        dmixed = step.empty(6, step.tokens, step.D)
        step.weight_gradient(self.mixed[3:], dkvr, grads.kvr)
        step.product(dkvr, transposed(layer.kvr), dmixed[3:])
        for group, low in self.low.items():
            step.weight_gradient(low, dhigh[group], self.matrices(grads, group, "up"))
            dlow = step.product(dhigh[group], transposed(self.matrices(layer, group, "up")))
            if group[0] in ACTIVATIONS:
                first = 0 if group[1:] else slice(None)
                step.activation_backward(ACTIVATIONS[group[0]], dlow[first], low[first])
            step.weight_gradient(self.inputs_of(group, self.mixed), dlow, self.matrices(grads, group, "down"))
            of_mixes, adds = self.inputs_of(group, dmixed), group == ("value",)  # the mix of v has two products
            step.product(dlow, transposed(self.matrices(layer, group, "down")), of_mixes, add=adds)
        return InputGradients(dmixed=dmixed, maa=layer.mix, maa_out=grads.mix, previous_xx=self.previous_xx)

    def inputs_of(self, group, mixed):
        """The mixes of a group: a stack of its two, which are neighbours, or its one."""
        first = LOW_RANKS[group[0]]
        return mixed[first : first + 2] if group[1:] else mixed[first]

    def matrices(self, weights, group, end):
        """The matrices of a group, "down" or "up", in `weights`, a layer or its gradients: one, or a view of two, which
        lie in one vector."""
        w, *others = (getattr(weights, f"{name}_{end}") for name in group)
        if not others:
            return w
        device = self.step.device
        distance = device.pointer(others[0]) - device.pointer(w)
        return device.view(w, (2, *w.shape), (distance, *w.strides), w.dtype, 0)

    # -- launches --
    def recurrence_arguments(self):
        """The recurrence's w, key, value, a and b [tokens, D]."""
        step, kernel = self.step, kernels.KeysForward.fitting(self.step.dtype, self.N)
        w, key, a, b = (step.empty(*self.k.shape) for _ in range(4))
        mixed_v = step.empty(*self.v.shape) if "value" in self.high else None
        results = {"w": w, "key": key, "mixed_v": mixed_v, "a": a, "b": b}
        self.run_kernel(kernel, kernel.blocks(step.tokens * self.H), keys=self.keys(), **results)
        return w, key, self.v if mixed_v is None else mixed_v, a, b

    def recurrence_arguments_backward(self, dgated, scores, pulled, dhigh, grads):
        """The gradients of k, v and r [3, tokens, D]; those of `high`, but for the gate's, are written to `dhigh`.

        dgated, scores : what `gated_norm_backward` takes and returns, for the gradients through the bonus
        pulled : the gradients of r, w, key, mixed_v, a and b through the recurrence
        dhigh : by group, an array, or a stack of two
        """
        step, kernel = self.step, kernels.KeysBackward.fitting(self.step.dtype, self.N)
        summed = [name for name in kernel.PARAMETERS if hasattr(grads, name)]  # the first layer has no "value"
        parts, (dr, dw, dkey, dv, da, db) = step.partial_sums(kernel, len(summed), self.H), pulled
        dkvr = step.empty(3, *dv.shape)
        by_name = dict.fromkeys(("decay", "icl", "value"))
        for group, gradient in dhigh.items():
            by_name |= zip(group, gradient if group[1:] else [gradient])
        del by_name["gate"]
        self.run_kernel(
            kernel,
            kernel.blocks(len(parts) * self.H),
            keys=self.keys(),
            r=self.r,
            gate=self.high["gate"],
            dgated=dgated,
            bonus=self.layer.bonus,
            scores=scores,
            r_gradient=dr,
            w_gradient=dw,
            key_gradient=dkey,
            v_gradient=dv,
            a_gradient=da,
            b_gradient=db,
            first_v_gradient=step.first_v_gradient,
            dk=dkvr[0],
            dv=dkvr[1],
            dr=dkvr[2],
            **{f"{name}_logits_gradient": gradient for name, gradient in by_name.items()},
            parts=parts,
        )
        # the gradients of these parameters are neighbours in one vector
        out = step.device.view(grads.decay, (len(summed), step.D), (4 * step.D, 4), FLOAT32, 0)
        step.sum(parts, out)
        return dkvr

    def gated_norm(self):
        """(GroupNorm(o) + (sum r key bonus) v) gate, the sum over a head."""
        step, kernel = self.step, GatedNorm.fitting(self.step.dtype, self.N, BONUS=True)
        y, rows = step.empty(*self.o.shape), step.tokens * self.H
        arrays = {"r": self.r, "k": self.key, "v": self.mixed_v, "bonus": self.layer.bonus, "y": y}
        self.run_kernel(kernel, kernel.blocks(rows), rows=rows, **arrays, **self.norm_arguments())
        return y

    def gated_norm_backward(self, dy, grads):
        """(The gradient of o, that of the gate, scores): scores [tokens, H, 2] are the sum r key bonus over a head, and
        its gradient, in float32."""
        step, kernel = self.step, kernels.BonusNormBackward.fitting(self.step.dtype, self.N)
        do, dgate = step.empty(*dy.shape), step.empty(*dy.shape)
        parts = step.partial_sums(kernel, 3, self.H)  # weight, bias, bonus
        scores = step.empty(step.tokens, self.H, 2, dtype=FLOAT32)
        arrays = {"dy": dy, "r": self.r, "key": self.key, "v": self.mixed_v, "bonus": self.layer.bonus}
        results = {"do_": do, "dgate": dgate, "scores": scores, "parts": parts}
        blocks = kernel.blocks(len(parts) * self.H)
        self.run_kernel(kernel, blocks, **arrays, **results, **self.norm_arguments())
        step.sum(parts, grads.ln_x, grads.bonus)
        return do, dgate, scores

    def norm_arguments(self):
        """The arguments that `gated_norm` and its pullback share."""
        return {"o": self.o, "gate": self.high["gate"], **affine(self.layer.ln_x), "eps": GROUP_NORM_EPS}

    def keys(self):
        """The argument `kernels.KEYS`: one struct of addresses, null where the layer has no such array."""
        step, layer, first_v = self.step, self.layer, self.step.first_v if "value" in self.high else None
        arrays = {"k": self.k, "v": self.v, "first_v": first_v}
        arrays |= {"removal": layer.removal, "replacement": layer.replacement}
        for name in ("decay", "icl", "value"):
            arrays |= {f"{name}_logits": self.high.get(name), f"{name}_base": getattr(layer, name, None)}
        return [{name: kernels.address(step.device, array) for name, array in arrays.items()}]

    def run_kernel(self, kernel, blocks, **args):
        """`TrainingStep.run_kernel`, with the sizes of heads."""
        self.step.run_kernel(kernel, blocks, H=self.H, N=self.N, **args)


class ChannelMix(Mix):
    """`math.channel_mix` and its pullback; `hidden` is relu(k)^2 divided by `unit_of_squares`."""

    NORM, MIX = "ln2", "ffn_mix"

    def forward(self, mixed, xx, previous_xx, site):
        step, layer = self.step, self.layer
        self.previous_xx, self.mixed = previous_xx, mixed
        self.hidden = step.activated("ReluSquared", step.product(self.mixed, layer.ffn_key))
        return Change("Added", self.times_unit(step.product(self.hidden, layer.ffn_value)), site=site)

    def pull(self, dchange, grads):
        step, layer, dvalue = self.step, self.layer, self.times_unit(dchange[0])
        step.weight_gradient(self.hidden, dvalue, grads.ffn_value)
        dhidden = step.product(dvalue, transposed(layer.ffn_value))
        step.activation_backward("ReluSquared", dhidden, self.hidden)
        step.weight_gradient(self.mixed, dhidden, grads.ffn_key)
        dmixed = step.product(dhidden, transposed(layer.ffn_key))
        return InputGradients(dmixed=dmixed, maa=layer.ffn_mix, maa_out=grads.ffn_mix, previous_xx=self.previous_xx)

    def times_unit(self, x):
        """Multiplies `x` in place by `unit_of_squares`, by which kernels have divided the hidden layer."""
        if (unit := unit_of_squares(x.dtype)) != 1:
            x *= x.dtype.type(unit)
        return x


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
