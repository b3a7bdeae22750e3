"""The peer of `rwkv6_training.py`: RWKV-6 in torch as flash-linear-attention builds it, with torch's AdamW.

fla's own model stands in a package beside its kernels; this one takes the same kernels in the same places (norms with
their residual, token shift, group norm, squared relu, the chunked recurrence, cross entropy), and the names of official
checkpoints, so that it starts from any weights. Parameters and activations are bfloat16, AdamW's are float32 and are
copied to and fro, as sharded trainings do.
"""

from functools import partial

import torch
import torch.nn.functional as F
from fla.modules import FusedCrossEntropyLoss
from fla.modules.activations import sqrelu, swish
from fla.modules.norm.layernorm import group_norm, layer_norm
from fla.modules.token_shift import token_shift
from fla.ops.rwkv6 import chunk_rwkv6

EPS, GROUP_EPS = 1e-5, 64e-5


class Peer:
    """A model with its optimiser; `weights` are host arrays by official name.

    matrices : the names that weight decay is for
    """

    def __init__(self, weights, matrices, layers, decay, betas, clip):
        self.layers, self.clip = layers, clip
        self.masters = {name: torch.tensor(array, device="cuda", requires_grad=True) for name, array in weights.items()}
        self.weights = {
            name: master.detach().to(torch.bfloat16).requires_grad_() for name, master in self.masters.items()
        }
        groups = [
            {"params": [self.masters[name] for name in weights if name in matrices], "weight_decay": decay},
            {"params": [self.masters[name] for name in weights if name not in matrices], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=1e-8, fused=True)
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
        torch.nn.utils.clip_grad_norm_(masters, self.clip, foreach=True)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    def loss(self, tokens):
        read, wanted = tokens[:, :-1], tokens[:, 1:]
        x = F.embedding(read, self.weights["emb.weight"])
        x, change = self.norm("blocks.0.ln0", x), None
        for i in range(self.layers):
            block = Block(self.weights, f"blocks.{i}.")
            xx, x = block.norm("ln1", x, change)
            xx, x = block.norm("ln2", x, block.time_mix(xx))
            change = block.channel_mix(xx)
        logits = F.linear(self.norm("ln_out", x + change), self.weights["head.weight"])
        return self.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def norm(self, name, x):
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps=EPS)


class Block:
    """A layer's two mixes; `get` finds its parameters."""

    def __init__(self, weights, prefix):
        self.get = lambda name: weights[prefix + name]

    def norm(self, name, x, change):
        """LN(x + change), and the sum."""
        norm = partial(layer_norm, weight=self.get(f"{name}.weight"), bias=self.get(f"{name}.bias"), eps=EPS)
        return (norm(x), x) if change is None else norm(change, residual=x, prenorm=True)

    def time_mix(self, xx):
        get = self.get
        d = token_shift(xx)
        low = torch.tanh((xx + d * get("att.time_maa_x").flatten()) @ get("att.time_maa_w1"))
        m = torch.einsum("btna,nad->btnd", low.unflatten(-1, (5, -1)), get("att.time_maa_w2"))
        maa = torch.stack([get(f"att.time_maa_{name}").flatten() for name in "wkvrg"])
        w, k, v, r, g = (xx + d * share for share in m.add_(maa).unbind(-2))
        w = torch.tanh(w @ get("att.time_decay_w1")) @ get("att.time_decay_w2") + get("att.time_decay").flatten()
        k, v, r, g = (
            F.linear(x, get(f"att.{name}.weight"))
            for x, name in ((k, "key"), (v, "value"), (r, "receptance"), (g, "gate"))
        )
        u = get("att.time_faaaa")
        k, v, r, w = (x.unflatten(-1, u.shape) for x in (k, v, r, -torch.exp(w)))
        o, _ = chunk_rwkv6(r=r, k=k, v=v, w=w, u=u, scale=1.0)
        o = group_norm(o.flatten(-2), get("att.ln_x.weight"), get("att.ln_x.bias"), eps=GROUP_EPS, num_groups=len(u))
        return F.linear(o * swish(g), get("att.output.weight"))

    def channel_mix(self, xx):
        get = self.get
        d = token_shift(xx)
        k = sqrelu(F.linear(xx + d * get("ffn.time_maa_k").flatten(), get("ffn.key.weight")))
        gate = F.linear(xx + d * get("ffn.time_maa_r").flatten(), get("ffn.receptance.weight"))
        return gate.sigmoid() * F.linear(k, get("ffn.value.weight"))
