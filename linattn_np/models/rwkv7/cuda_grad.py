"""RWKV-7's two mixes and their gradients on the GPU. `rwkv.cuda_grad.loss` calls `forward`, and later `pull`.

Arrays are [tokens, D], or [n, tokens, D] for n mixes or products; H heads have N channels each. ``step.product(x, w)``
is x w, and ``step.product_backward(dy, x, w, dw)`` its pullback, which writes the gradient of w to `dw`. A name with d,
such as dk, is the gradient of the loss with respect to k. `grads` has the fields of `layer`, for the weights'
gradients. A kernel that sums over tokens writes partial sums, `parts`, which ``step.sum`` has added up before the layer
is done.

From `rwkv.cuda_grad`: `step` is the `TrainingStep`, which launches kernels; a `Change` is what a mix adds to the
residual, of the kind "Added" an array as it is; `site` is the index of its dropout. xx is a mix's normed input, and
`InputGradients` are those of xx, of d = (previous token's xx) - xx, and of the mixes xx + d maa. `previous_xx`: of the
tokens before each sequence's first ones, [sequences, D], if another rank has computed them, else None.
"""

from functools import partial
from itertools import accumulate

from ...backends.cupy import rwkv6_training_kernels as kernels
from ...backends.cupy.arithmetic import ceil_div
from ...backends.cupy.plan import FLOAT32
from ...backends.cupy.rwkv7_model_kernels import Keys
from ...ops.functions import rwkv7
from ..rwkv import cuda_grad
from ..rwkv.cuda_grad import Change, InputGradients, Mix, transposed
from ..rwkv.grad import vjp_from_start
from ..rwkv.version import unit_of_squares
from .names import VERSION

# A product of low rank is activation(mix down) up, with two matrices. Its place is that of its mix among the six mixes
# w a g k v r. icl: the in-context learning rate
LOW_RANKS = {"decay": 0, "icl": 1, "gate": 2, "value": 4}
# The place of the first of the mixes k v r, which are computed as arrays, `mixed`. Those that products of low rank take
# are not: their weights are part of `TimeMix.joint`, by which xx and d are multiplied.
FIRST_OF_KVR = 3
GATE = ("gate",)  # a group, see `TimeMix`


class TimeMix(Mix):
    """`mixes.time_mix` and its pullback.

    mixed : the mixes k v r [3, tokens, D]
    k, v, r : their products with the matrix `kvr`
    normed : xx and d of each token [tokens, 2 D]
    joint : the matrices `down` of all products of low rank, side by side, for xx and for d [2, D, all_ranks]
    low : the products with `joint` [tokens, all_ranks], after their activation
    columns : by the names of LOW_RANKS, (first, end) of their columns in `low` and `joint`
    groups : tuples of one or two of these names. A group's products with `up` are one product: of arrays, or of stacks
        [2, ...] for two names
    high : by the names of LOW_RANKS, results of `up`. Those of "decay", "icl" and "value" are the kernels' `*_logits`,
        of which a sigmoid is taken; the first layer has no "value"
    key, mixed_v : the recurrence's key and value, made of k and v
    gated : the input of the output matrix
    inputs : `mixed` and `gated`, what `kvr` and `output` are multiplied with, in one array [4, tokens, D]
    """

    NORM, MIX, TAKES = "ln1", "mix", 2  # 2: `forward` needs xx and d, side by side in `normed`
    STACK = (4,)  # the first axis of `inputs`, and of the gradients of what is made of them

    def __init__(self, step, layer):
        super().__init__(step, layer)
        self.H, self.N = layer.bonus.shape
        ranks = {name: getattr(layer, f"{name}_down").shape[1] for name in LOW_RANKS if hasattr(layer, f"{name}_down")}
        ends = list(accumulate(ranks.values()))
        self.columns, self.all_ranks = dict(zip(ranks, zip([0, *ends], ends))), ends[-1]
        # a single product of a small rank leaves multiprocessors idle; those of published models are equal
        equal = layer.decay_down.shape == layer.icl_down.shape
        self.groups = [("decay", "icl")] if equal else [("decay",), ("icl",)]
        self.groups += [GATE, ("value",)] if "value" in ranks else [GATE]

    @property
    def maa(self):
        return self.layer.mix[FIRST_OF_KVR:]

    def empty_mixes(self):
        self.inputs = self.step.empty(*self.STACK, self.step.tokens, self.step.D)
        return self.inputs[:-1]

    def forward(self, mixed, normed, previous_xx, site):
        step, layer = self.step, self.layer
        self.previous_xx, self.mixed, self.normed = previous_xx, mixed, normed
        self.k, self.v, self.r = step.product(self.mixed, layer.kvr)
        if step.first_v is None:
            step.first_v = self.v
        self.joint, self.high = self.joint_matrix(), {}
        self.low = step.product(self.normed, self.joint.reshape(-1, self.all_ranks))
        self.activate(self.low)
        for group in self.groups:
            self.high |= named(group, step.product(self.columns_of(group, self.low), self.up_of(group, layer)))
        w, self.key, self.mixed_v, a, b = self.recurrence_arguments()
        heads = -1, step.context, self.H, self.N
        arrays = (x.reshape(heads) for x in (self.r, w, self.key, self.mixed_v, a, b))
        # From a trained initial state, `layer.start`, if there is one. cut: how ranks share the tokens of sequences.
        o, self.pull_recurrence = vjp_from_start(step.cut, layer, rwkv7, *arrays, scale=1.0)
        self.o = o.reshape(step.tokens, step.D)
        gated = step.gated_norm(*self.norm_arguments(), bonus=self.bonus_arguments(), y=self.inputs[-1])
        return Change("Added", step.product(gated, layer.output), site=site, stack=self.STACK)

    def pull(self, dchange, grads):
        # doutputs: the gradients of k, v and r, which are written below, and that of the change
        step, layer, (doutputs,) = self.step, self.layer, dchange
        dkvr, dgated = doutputs[:-1], step.product(doutputs[-1], transposed(layer.output))
        do, dgate, scores = step.gated_norm_backward(
            dgated, *self.norm_arguments(), grads.ln_x, self.bonus_arguments(), grads.bonus
        )
        pulled = self.pull_recurrence(do.reshape(-1, step.context, self.H, self.N), grads)
        pulled = [gradient.reshape(step.tokens, step.D) for gradient in pulled]
        dhigh = {GATE: dgate}  # the gradients of `high`, by group
        for group in self.groups:
            if group != GATE:
                dhigh[group] = step.empty(*((2,) if group[1:] else ()), *dgate.shape)
        self.recurrence_arguments_backward(dgated, scores, pulled, dhigh, dkvr, grads)
        step.products.matmul(transposed(self.inputs), doutputs, self.kvr_and_output(grads))
        dmixed = step.product(dkvr, transposed(layer.kvr))
        dlow = step.empty(*self.low.shape)
        for group in self.groups:
            x, dx = self.columns_of(group, self.low), self.columns_of(group, dlow)
            step.product_backward(dhigh[group], x, self.up_of(group, layer), self.up_of(group, grads), out=dx)
        self.activate(self.low, dlow)
        djoint = step.empty(*self.joint.shape, dtype=FLOAT32)
        step.products.matmul(transposed(self.normed), dlow, djoint.reshape(-1, self.all_ranks))
        self.joint_matrix_backward(djoint, grads)
        dlow_twice = step.device.view(dlow, (2, *dlow.shape), (0, *dlow.strides), dlow.dtype, 0)
        dxx, dd = step.product(dlow_twice, transposed(self.joint))
        # adds: joint_matrix_backward has written terms of the gradient of all mixes' weights; others are added to them.
        return InputGradients(dxx, dd, dmixed, self.maa, grads.mix[FIRST_OF_KVR:], self.previous_xx, adds=True)

    def columns_of(self, group, low):
        """The columns of a group in `low`, or in an array of its shape: of one product, or a stack of two."""
        parts = [low[:, slice(*self.columns[name])] for name in group]
        return self.stack_of_two(*parts) if parts[1:] else parts[0]

    def kvr_and_output(self, grads):
        """The gradients of these matrices [4, D, D]: neighbours in the vector of `Layout`."""
        device, kvr, output = self.step.device, grads.kvr, grads.output
        assert (device.pointer(output), output.strides) == (device.pointer(kvr) + kvr.nbytes, kvr.strides[1:])
        return device.view(kvr, (*self.STACK, *kvr.shape[1:]), kvr.strides, kvr.dtype, 0)

    def up_of(self, group, weights):
        """The matrices `up` of a group in `weights`, a layer or its gradients: one, or a stack of two."""
        matrices = [getattr(weights, f"{name}_up") for name in group]
        return self.stack_of_two(*matrices) if matrices[1:] else matrices[0]

    def stack_of_two(self, x, y):
        """A view [2, ...] of two arrays in one allocation, such as two columns or two weights of a `Layout.tree`."""
        assert (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype)
        device = self.step.device
        distance = device.pointer(y) - device.pointer(x)
        return device.view(x, (2, *x.shape), (distance, *x.strides), x.dtype, 0)

    # -- launches --
    def low_ranks(self, grads=None):
        """The argument `kernels.LowRanks.LOW_RANK`: a struct for each product; of no rank where the layer lacks it."""
        structs = []
        for name, mix_row in LOW_RANKS.items():
            first, end = self.columns.get(name, (0, 0))
            down, ddown = (
                kernels.address(self.step.device, getattr(of, f"{name}_down", None)) for of in (self.layer, grads)
            )
            structs.append({"down": down, "ddown": ddown, "R": end - first, "mix_row": mix_row})
        return structs

    def joint_matrix(self):
        """`joint`: the matrices `down` of all products of low rank side by side, and the same times their mixes'
        weights: xx joint[0] + d joint[1] has the products of the mixes."""
        step, kernel = self.step, kernels.LowRanks(self.step.dtype)
        joint, blocks = step.empty(2, step.D, self.all_ranks), ceil_div(step.D, kernel.CHANNELS)
        step.run_kernel(kernel, blocks, products=self.low_ranks(), mix=self.layer.mix, joint=joint)
        return joint

    def joint_matrix_backward(self, djoint, grads):
        """Writes the gradients of the matrices `down`, and those of all mixes' weights through them."""
        step, kernel = self.step, kernels.LowRanksBackward(self.step.dtype)
        step.run_kernel(
            kernel,
            ceil_div(step.D, kernel.CHANNELS),
            products=self.low_ranks(grads),
            mix=self.layer.mix,
            dmix=grads.mix,
            djoint=djoint,
        )

    def activate(self, y, dy=None):
        """Applies the activations of all products of low rank to `y` [tokens, all_ranks], in place; or to `dy` their
        pullback, for which `y` has their results."""
        self.step.low_activations(y, dy, self.columns["decay"][1], self.columns["gate"])

    def recurrence_arguments(self):
        """The recurrence's w, key, value, a and b [tokens, D]."""
        step, kernel = self.step, Keys.fitting(self.step.dtype, self.N)
        w, key, a, b = (step.empty(*self.k.shape) for _ in range(4))
        mixed_v = step.empty(*self.v.shape) if "value" in self.high else None
        results = {"w": w, "key": key, "mixed_v": mixed_v, "a": a, "b": b}
        blocks = kernel.blocks(step.tokens, self.H)
        self.run_kernel(kernel, blocks, **self.keys(), **results, token_heads=step.tokens * self.H)
        return w, key, self.v if mixed_v is None else mixed_v, a, b

    def recurrence_arguments_backward(self, dgated, scores, pulled, dhigh, dkvr, grads):
        """Writes the gradients of k, v and r to dkvr [3, tokens, D], those of `high` to `dhigh`, but for the gate's.

        dgated, scores : what `step.gated_norm_backward` takes and returns, for the gradients through the bonus
        pulled : the gradients of r, w, key, mixed_v, a and b through the recurrence
        dhigh : {group: its array, or stack of two}; that of "gate" is not used
        """
        step, kernel = self.step, kernels.KeysBackward.fitting(self.step.dtype, self.N)
        parameter_gradients, (dr, dw, dkey, dmixed_v, da, db) = self.parameters_of(grads), pulled
        parts = step.partial_sums(kernel, len(parameter_gradients), self.H)
        by_name = dict.fromkeys(("decay", "icl", "value"))  # the first layer's "value" stays None
        for group, gradient in dhigh.items():
            if group != GATE:
                by_name |= named(group, gradient)
        self.run_kernel(
            kernel,
            kernel.blocks(len(parts) * self.H),
            **self.keys(),
            r=self.r,
            gate=self.high["gate"],
            dgated=dgated,
            bonus=self.layer.bonus,
            scores=scores,
            r_gradient=dr,
            w_gradient=dw,
            key_gradient=dkey,
            v_gradient=dmixed_v,
            a_gradient=da,
            b_gradient=db,
            first_v_gradients=self.first_v_gradients(),
            later_layers=step.later_layers,
            dk=dkvr[0],
            dv=dkvr[1],
            dr=dkvr[2],
            **{f"{name}_logits_gradient": gradient for name, gradient in by_name.items()},
            parts=parts,
        )
        step.sum(parts, parameter_gradients)

    def parameters_of(self, weights):
        """A view [5, D] of the parameters PARAMETERS of `weights`, a layer or its gradients: neighbours in the vector
        of `Layout`, in this order. The first layer has no "value", and its view is [4, D]."""
        device, D = self.step.device, self.step.D
        arrays = [getattr(weights, name) for name in kernels.KeysBackward.PARAMETERS if hasattr(weights, name)]
        first, *others = map(device.pointer, arrays)
        assert others == [first + 4 * D * n for n in range(1, len(arrays))]
        return device.view(arrays[0], (len(arrays), D), (4 * D, 4), FLOAT32, 0)

    def first_v_gradients(self):
        """The gradients of the first layer's v: the array for this layer's, or all of them for the first layer. It is
        called once a layer, from the last one to the first: `layers_pulled` counts the calls."""
        step = self.step
        if step.first_v_gradients is None:
            step.first_v_gradients = step.empty(step.later_layers, step.tokens, step.D)
        if "value" not in self.high:
            return step.first_v_gradients
        step.layers_pulled += 1
        return step.first_v_gradients[step.layers_pulled - 1]

    def norm_arguments(self):
        """The arguments of `TrainingStep.gated_norm`: o, gate, norm, eps and N."""
        return self.o, self.high["gate"], self.layer.ln_x, self.step.group_eps, self.N

    def bonus_arguments(self):
        """Its `bonus`."""
        return self.r, self.key, self.mixed_v, self.layer.bonus

    def keys(self) -> dict:
        """What the kernels `Keys` and `KeysBackward` read of the forward pass, by their arguments' names."""
        layer, arrays = self.layer, {f"{name}_logits": array for name, array in self.high.items() if name != "gate"}
        arrays |= {"k": self.k, "v": self.v, "first_v": self.step.first_v if "value" in self.high else None}
        arrays |= {"removal": layer.removal, "replacement": layer.replacement}
        return arrays | {"bases": self.parameters_of(layer)}  # which begin with the bases of decay, icl and value

    def run_kernel(self, kernel, blocks, **args):
        """`TrainingStep.run_kernel`, with the sizes of heads."""
        self.step.run_kernel(kernel, blocks, H=self.H, N=self.N, **args)


def named(group, result):
    """[(name, array)] of a group's result: an array for one name, a stack for two."""
    return zip(group, result if group[1:] else [result])


class ChannelMix(Mix):
    """`mixes.channel_mix` and its pullback; `hidden` is relu(k)^2 divided by `unit_of_squares`."""

    NORM, MIX = "ln2", "ffn_mix"

    def forward(self, mixed, normed, previous_xx, site):
        step, layer = self.step, self.layer
        self.previous_xx, self.mixed = previous_xx, mixed
        self.hidden = step.squared_product(self.mixed, layer.ffn_key)
        return Change("Added", self.times_unit(step.product(self.hidden, layer.ffn_value)), site=site)

    def pull(self, dchange, grads):
        step, layer, dvalue = self.step, self.layer, self.times_unit(dchange[0])
        dhidden = step.product_backward(dvalue, self.hidden, layer.ffn_value, grads.ffn_value)
        step.relu_squared(self.hidden, dhidden)
        dmixed = step.product_backward(dhidden, self.mixed, layer.ffn_key, grads.ffn_key)
        return InputGradients(dmixed=dmixed, maa=layer.ffn_mix, maa_out=grads.ffn_mix, previous_xx=self.previous_xx)

    def times_unit(self, x):
        """Multiplies `x` in place by `unit_of_squares`, by which kernels have divided the hidden layer."""
        if (unit := unit_of_squares(x.dtype)) != 1:
            x *= x.dtype.type(unit)
        return x


loss = partial(cuda_grad.loss, VERSION, (TimeMix, ChannelMix))
