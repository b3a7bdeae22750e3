"""RWKV-7's two mixes and their gradients on the GPU."""

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

# A lane has up to WIDTHS[-1] pairs of its head's channels, of a warp's 32 lanes.
MOST_IN_A_HEAD = 64 * kernels.OfHeads.WIDTHS[-1]
# Products of low rank, and which of the six mixes w a g k v r each takes. icl: the in-context learning rate
LOW_RANKS = {"decay": 0, "icl": 1, "gate": 2, "value": 4}
ACTIVATIONS = {"decay": "Tanh", "gate": "Sigmoid"}  # between the two matrices of a product of low rank


class TimeMix(Mix):
    """`math.time_mix` and its pullback.

    mixed : the six mixes [6, tokens, D]; k, v, r are the products of the last three
    low, high : by the names of LOW_RANKS, results of the first and of the second matrix. Those of "decay", "icl" and
        "value" are the kernels' `*_logits`, of which a sigmoid is taken; the first layer has no "value"
    key, mixed_v : the recurrence's key and value, made of k and v
    """

    NORM = "ln1"

    def __init__(self, ops, layer):
        super().__init__(ops, layer)
        self.H, self.N = layer.bonus.shape
        if self.N % 2 or self.N > MOST_IN_A_HEAD:
            wanted = f"expected an even number up to {MOST_IN_A_HEAD} for training on cuda"
            VERSION.refuse(f"head size is {self.N}, {wanted}")

    def forward(self, xx, previous_xx, site):
        ops, layer = self.ops, self.layer
        self.previous_xx, self.mixed = previous_xx, ops.mix(xx, previous_xx, layer.mix)
        self.k, self.v, self.r = ops.product(self.mixed[3:], layer.kvr)
        if ops.first_v is None:
            ops.first_v, ops.first_v_gradient = self.v, ops.empty(*xx.shape, dtype=FLOAT32)
            ops.first_v_gradient[...] = 0
        self.low, self.high = {}, {}
        for name, n in LOW_RANKS.items():
            if hasattr(layer, f"{name}_down"):
                low = ops.product(self.mixed[n], getattr(layer, f"{name}_down"))
                if name in ACTIVATIONS:
                    ops.activated(ACTIVATIONS[name], low)  # in place
                self.low[name], self.high[name] = low, ops.product(low, getattr(layer, f"{name}_up"))
        w, self.key, self.mixed_v, a, b = self.recurrence_arguments()
        heads = -1, ops.context, self.H, self.N
        arrays = (x.reshape(heads) for x in (self.r, w, self.key, self.mixed_v, a, b))
        o, self.pull_recurrence = vjp_from_start(ops.cut, layer, rwkv7, *arrays, scale=1.0)
        self.o = o.reshape(ops.tokens, ops.D)
        self.gated = self.gated_norm()
        return Change("Added", ops.product(self.gated, layer.output), site=site)

    def pull(self, dchange, grads):
        ops, layer, (dchange,) = self.ops, self.layer, dchange
        ops.gradient(self.gated, dchange, grads.output)
        dgated = ops.product(dchange, transposed(layer.output))
        do, dgate, scores = self.gated_norm_backward(dgated, grads)
        pulled = self.pull_recurrence(do.reshape(-1, ops.context, self.H, self.N), grads)
        pulled = [gradient.reshape(ops.tokens, ops.D) for gradient in pulled]
        dkvr, dhigh = self.recurrence_arguments_backward(dgated, scores, pulled, grads)
        dhigh["gate"] = dgate
        dmixed = ops.empty(6, ops.tokens, ops.D)
        ops.gradient(self.mixed[3:], dkvr, grads.kvr)
        ops.product(dkvr, transposed(layer.kvr), dmixed[3:])
        for name, low in self.low.items():
            up, down, n = getattr(layer, f"{name}_up"), getattr(layer, f"{name}_down"), LOW_RANKS[name]
            ops.gradient(low, dhigh[name], getattr(grads, f"{name}_up"))
            dlow = ops.product(dhigh[name], transposed(up))
            if name in ACTIVATIONS:
                ops.activation_backward(ACTIVATIONS[name], dlow, low)
            ops.gradient(self.mixed[n], dlow, getattr(grads, f"{name}_down"))
            ops.product(dlow, transposed(down), dmixed[n], add=name == "value")  # the mix of v has two products
        return InputGradients(dmixed=dmixed, maa=layer.mix, maa_out=grads.mix, previous_xx=self.previous_xx)

    # -- launches --
    def recurrence_arguments(self):
        """The recurrence's w, key, value, a and b [tokens, D]."""
        ops, kernel = self.ops, kernels.KeysForward.fitting(self.ops.dtype, self.N)
        w, key, a, b = (ops.empty(*self.k.shape, dtype=dtype) for dtype in (FLOAT32, None, None, None))
        mixed_v = ops.empty(*self.v.shape) if "value" in self.high else None
        results = {"w": w, "key": key, "mixed_v": mixed_v, "a": a, "b": b}
        self.run_kernel(kernel, kernel.blocks(ops.tokens * self.H), keys=self.keys(), **results)
        return w, key, self.v if mixed_v is None else mixed_v, a, b

    def recurrence_arguments_backward(self, dgated, scores, pulled, grads):
        """The gradients of k, v and r [3, tokens, D], and those of `high` by name, but for the gate's.

        dgated, scores : what `gated_norm_backward` takes and returns, for the gradients through the bonus
        pulled : the gradients of r, w, key, mixed_v, a and b through the recurrence. Those of "decay" and "icl"
            overwrite the gradients of a and b: a thread reads its channels of all arrays before it writes them
        """
        ops, kernel = self.ops, kernels.KeysBackward.fitting(self.ops.dtype, self.N)
        parts, (dr, dw, dkey, dv, da, db) = ops.partial_sums(len(kernel.PARAMETERS)), pulled
        dkvr = ops.empty(3, *dv.shape)
        dhigh = {"decay": da, "icl": db, "value": ops.empty(*dv.shape) if "value" in self.high else None}
        self.run_kernel(
            kernel,
            kernel.blocks(ops.blocks * self.H),
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
            first_v_gradient=ops.first_v_gradient,
            dk=dkvr[0],
            dv=dkvr[1],
            dr=dkvr[2],
            **{f"{name}_logits_gradient": gradient for name, gradient in dhigh.items()},
            parts=parts,
        )
        sums = ops.empty(len(kernel.PARAMETERS), ops.D, dtype=FLOAT32)
        ops.sum(parts, sums)
        for name, gradient in zip(kernel.PARAMETERS, sums):
            if hasattr(grads, name):  # the first layer has no "value"
                getattr(grads, name)[...] = gradient
        return dkvr, dhigh

    def gated_norm(self):
        """(GroupNorm(o) + (sum r key bonus) v) gate, the sum over a head."""
        ops, kernel = self.ops, GatedNorm.fitting(self.ops.dtype, self.N, BONUS=True)
        y, rows = ops.empty(*self.o.shape), ops.tokens * self.H
        arrays = {"r": self.r, "k": self.key, "v": self.mixed_v, "bonus": self.layer.bonus, "y": y}
        self.run_kernel(kernel, kernel.blocks(rows), rows=rows, **arrays, **self.norm_arguments())
        return y

    def gated_norm_backward(self, dy, grads):
        """(The gradient of o, that of the gate, scores): scores [tokens, H, 2] are the sum r key bonus over a head, and
        its gradient, in float32."""
        ops, kernel = self.ops, kernels.BonusNormBackward.fitting(self.ops.dtype, self.N)
        do, dgate, parts = ops.empty(*dy.shape), ops.empty(*dy.shape), ops.partial_sums(3)  # weight, bias, bonus
        scores = ops.empty(ops.tokens, self.H, 2, dtype=FLOAT32)
        arrays = {"dy": dy, "r": self.r, "key": self.key, "v": self.mixed_v, "bonus": self.layer.bonus}
        results = {"do_": do, "dgate": dgate, "scores": scores, "parts": parts}
        blocks = kernel.blocks(ops.blocks * self.H)
        self.run_kernel(kernel, blocks, **arrays, **results, **self.norm_arguments())
        ops.sum(parts, grads.ln_x, grads.bonus)
        return do, dgate, scores

    def norm_arguments(self):
        """The arguments that `gated_norm` and its pullback share."""
        return {"o": self.o, "gate": self.high["gate"], **affine(self.layer.ln_x), "eps": GROUP_NORM_EPS}

    def keys(self):
        """The argument `kernels.KEYS`: one struct of addresses, null where the layer has no such array."""
        ops, layer, first_v = self.ops, self.layer, self.ops.first_v if "value" in self.high else None
        arrays = {"k": self.k, "v": self.v, "first_v": first_v}
        arrays |= {"removal": layer.removal, "replacement": layer.replacement}
        for name in ("decay", "icl", "value"):
            arrays |= {f"{name}_logits": self.high.get(name), f"{name}_base": getattr(layer, name, None)}
        return [{name: kernels.address(ops.device, array) for name, array in arrays.items()}]

    def run_kernel(self, kernel, blocks, **args):
        """`TrainingStep.run_kernel`, with the sizes of heads."""
        self.ops.run_kernel(kernel, blocks, H=self.H, N=self.N, **args)


class ChannelMix(Mix):
    """`math.channel_mix` and its pullback."""

    NORM = "ln2"

    def forward(self, xx, previous_xx, site):
        ops, layer = self.ops, self.layer
        self.previous_xx, self.mixed = previous_xx, ops.mix(xx, previous_xx, layer.ffn_mix)
        self.hidden = ops.activated("ReluSquared", ops.product(self.mixed, layer.ffn_key))
        return Change("Added", self.times_unit(ops.product(self.hidden, layer.ffn_value)), site=site)

    def pull(self, dchange, grads):
        ops, layer, dvalue = self.ops, self.layer, self.times_unit(dchange[0])
        ops.gradient(self.hidden, dvalue, grads.ffn_value)
        dhidden = ops.product(dvalue, transposed(layer.ffn_value))
        ops.activation_backward("ReluSquared", dhidden, self.hidden)
        ops.gradient(self.mixed, dhidden, grads.ffn_key)
        dmixed = ops.product(dhidden, transposed(layer.ffn_key))
        return InputGradients(dmixed=dmixed, maa=layer.ffn_mix, maa_out=grads.ffn_mix, previous_xx=self.previous_xx)

    def times_unit(self, x):
        """Multiplies `x` in place by `unit_of_squares`, by which kernels have divided the hidden layer."""
        if (unit := unit_of_squares(x.dtype)) != 1:
            x *= x.dtype.type(unit)
        return x


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
