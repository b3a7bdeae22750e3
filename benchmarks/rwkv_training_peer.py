"""The peer of `rwkv_training.py`: RWKV-6 or RWKV-7 in torch as flash-linear-attention builds it, with torch's AdamW.

fla's own models stand in a package beside its kernels; these take the same kernels in the same places (norms with their
residual, token shift, group norm, squared relu, the chunked recurrence, what RWKV-7 has around it, cross entropy), and
the names of official checkpoints, so that they start from any weights. Parameters and activations are bfloat16, AdamW's
are float32 and are copied to and fro, as sharded trainings do.
"""

from functools import partial

import torch
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss
from fla.modules.activations import sqrelu, swish
from fla.modules.norm.l2norm import l2_norm
from fla.modules.norm.layernorm import group_norm, layer_norm
from fla.modules.token_shift import token_shift
from fla.ops.rwkv6 import chunk_rwkv6
from fla.ops.rwkv7 import chunk_rwkv7
from fla.ops.rwkv7.fused_addcmul import fused_addcmul_rwkv7
from fla.ops.rwkv7.fused_k_update import fused_k_rwkv7
from fla.ops.rwkv7.gate_output_correction import gate_output_correction

from linattn_np.models.training_steps import BETAS, CLIP, EPS

NORM_EPS, GROUP_EPS = 1e-5, 64e-5
LEAST_DECAY = -0.6065306597126334  # -exp(-0.5), the log that RWKV-7's decays stay above


class Peer:
    """A model with its optimiser; `weights` are host arrays by official name.

    kind : the class of linattn_np.models that these weights are of
    """

    def __init__(self, kind, weights, settings, device="cuda", dtype=torch.bfloat16):
        self.block, self.layers = BLOCKS[kind.version.number], settings.layers
        self.masters = {name: torch.tensor(array, device=device, requires_grad=True) for name, array in weights.items()}
        self.weights = {name: master.detach().to(dtype).requires_grad_() for name, master in self.masters.items()}
        matrices = {name for name in weights if kind.version.is_matrix(name)}
        decays = (matrices, settings.weight_decay), (weights.keys() - matrices, 0.0)
        groups = [{"params": [self.masters[name] for name in names], "weight_decay": decay} for names, decay in decays]
        self.optimiser = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS, fused=True)
        self.cross_entropy = FusedCrossEntropyLoss()
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)

    def step(self, tokens, rate):
        """The loss before the step, of tokens [B, T + 1] on the device; `rate` is the learning rate."""
        loss = self.loss(tokens)
        loss.backward()
        masters, weights = list(self.masters.values()), list(self.weights.values())
        with torch.no_grad():
            torch._foreach_copy_([master.grad for master in masters], [weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    def loss(self, tokens):
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        x = F.embedding(read, self.weights["emb.weight"])
        x, change, first_v = self.norm("blocks.0.ln0", x), None, None
        for i in range(self.layers):
            block = self.block(self.weights, f"blocks.{i}.")
            xx, x = block.norm("ln1", x, change)
            change, first_v = block.time_mix(xx, first_v)
            xx, x = block.norm("ln2", x, change)
            change = block.channel_mix(xx)
        logits = F.linear(self.norm("ln_out", x + change), self.weights["head.weight"])
        return self.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def norm(self, name, x):
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps=NORM_EPS)


class Block:
    """A layer's two mixes; `get` finds its parameters, `vector` those that are [1, 1, D], as [D]."""

    def __init__(self, weights, prefix):
        self.get = lambda name: weights[prefix + name]
        self.vector = lambda name: self.get(name).flatten()

    def norm(self, name, x, change):
        """LN(x + change), and the sum."""
        norm = partial(layer_norm, weight=self.get(f"{name}.weight"), bias=self.get(f"{name}.bias"), eps=NORM_EPS)
        return (norm(x), x) if change is None else norm(change, residual=x, prenorm=True)

    def linear(self, name, x):
        return F.linear(x, self.get(f"{name}.weight"))

    def group_norm(self, o, heads):
        gain, bias = self.get("att.ln_x.weight"), self.get("att.ln_x.bias")
        return group_norm(o.flatten(-2), gain, bias, eps=GROUP_EPS, num_groups=heads)


class Block6(Block):
    def time_mix(self, xx, first_v):
        """The mix; `first_v` is RWKV-7's alone."""
        get, vector = self.get, self.vector
        d = token_shift(xx)
        low = torch.tanh((xx + d * vector("att.time_maa_x")) @ get("att.time_maa_w1"))
        m = torch.einsum("btna,nad->btnd", low.unflatten(-1, (5, -1)), get("att.time_maa_w2"))
        maa = torch.stack([vector(f"att.time_maa_{name}") for name in "wkvrg"])
        w, k, v, r, g = (xx + d * share for share in m.add_(maa).unbind(-2))
        w = torch.tanh(w @ get("att.time_decay_w1")) @ get("att.time_decay_w2") + vector("att.time_decay")
        names = ("key", "value", "receptance", "gate")
        k, v, r, g = (self.linear(f"att.{name}", x) for name, x in zip(names, (k, v, r, g)))
        u = get("att.time_faaaa")
        k, v, r, w = (x.unflatten(-1, u.shape) for x in (k, v, r, -torch.exp(w)))
        o, _ = chunk_rwkv6(r=r, k=k, v=v, w=w, u=u, scale=1.0)
        return self.linear("att.output", self.group_norm(o, len(u)) * swish(g)), first_v

    def channel_mix(self, xx):
        d, vector = token_shift(xx), self.vector
        k = sqrelu(self.linear("ffn.key", xx + d * vector("ffn.time_maa_k")))
        gate = self.linear("ffn.receptance", xx + d * vector("ffn.time_maa_r"))
        return gate.sigmoid() * self.linear("ffn.value", k)


class Block7(Block):
    def time_mix(self, xx, first_v):
        """The mix, and the first layer's values, which later layers mix theirs with."""
        get, vector = self.get, self.vector
        mixes = (vector(f"att.x_{name}") for name in "rwkvag")
        r, w, k, v, a, g = fused_addcmul_rwkv7(xx, token_shift(xx), *mixes)
        share = None if first_v is None else self.low_rank("v", v).sigmoid()
        r, k, v = (self.linear(f"att.{name}", x) for name, x in (("receptance", r), ("key", k), ("value", v)))
        first_v, v = (v, v) if share is None else (first_v, torch.lerp(v, first_v, share))
        w = LEAST_DECAY * self.low_rank("w", w, torch.tanh).sigmoid()
        a, g = self.low_rank("a", a).sigmoid(), torch.sigmoid(g @ get("att.g1")) @ get("att.g2")
        r_k = get("att.r_k")
        removed = l2_norm((k * vector("att.k_k")).unflatten(-1, r_k.shape))
        k = fused_k_rwkv7(k, a, vector("att.k_a"))
        r, w, k, v, a = (x.unflatten(-1, r_k.shape) for x in (r, w, k, v, a))
        safe = dict(safe_gate=True, lower_bound=LEAST_DECAY, chunk_size=64)
        o, _ = chunk_rwkv7(r=r, w=w, k=k, v=v, a=-removed, b=removed * a, scale=1.0, **safe)
        return self.linear("att.output", gate_output_correction(self.group_norm(o, len(r_k)), r, k, r_k, v, g)), first_v

    def low_rank(self, name, x, between=None):
        low = x @ self.get(f"att.{name}1")
        return F.linear(between(low) if between else low, self.get(f"att.{name}2").T, self.vector(f"att.{name}0"))

    def channel_mix(self, xx):
        k = self.linear("ffn.key", xx.addcmul(token_shift(xx), self.vector("ffn.x_k")))
        return self.linear("ffn.value", sqrelu(k))


BLOCKS = {6: Block6, 7: Block7}
