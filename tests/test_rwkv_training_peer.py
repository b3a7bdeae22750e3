"""The peer of benchmarks/rwkv_training.py learns what ours learns: here with torch's definitions of fla's kernels."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from linattn_np.models.training import Settings, Training
from linattn_np.models.versions import VERSIONS

torch = pytest.importorskip("torch", reason="torch is not installed")
F = torch.nn.functional


def layer_norm(x, weight, bias, eps, residual=None, prenorm=False):
    x = x if residual is None else x + residual
    y = F.layer_norm(x, weight.shape, weight, bias, eps)
    return (y, x) if prenorm else y


def group_norm(x, weight, bias, eps, num_groups):
    return F.group_norm(x.flatten(0, 1), num_groups, weight, bias, eps).view_as(x)


def token_shift(x):
    return F.pad(x, (0, 0, 1, -1)) - x


def chunk_rwkv6(r, k, v, w, u, scale):
    state, outputs = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1]), []
    for t in range(r.shape[1]):
        pair = k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append(scale * r[:, t, :, None] @ (state + u[..., None] * pair))
        state = w[:, t].exp()[..., None] * state + pair
    return torch.stack(outputs, 1)[:, :, :, 0], state


def chunk_rwkv7(r, w, k, v, a, b, scale, safe_gate, lower_bound, chunk_size):
    state, outputs = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1]), []
    for t in range(r.shape[1]):
        change = b[:, t, :, :, None] * (a[:, t, :, None] @ state) + k[:, t, :, :, None] * v[:, t, :, None]
        state = w[:, t].exp()[..., None] * state + change
        outputs.append(scale * r[:, t, :, None] @ state)
    assert w.min() >= lower_bound
    return torch.stack(outputs, 1)[:, :, :, 0], state


FLA = {
    "modules": {"FusedCrossEntropyLoss": torch.nn.CrossEntropyLoss},
    "modules.activations": {"sqrelu": lambda x: x.relu() ** 2, "swish": F.silu},
    "modules.norm.l2norm": {"l2_norm": lambda x: F.normalize(x, dim=-1)},
    "modules.norm.layernorm": {"layer_norm": layer_norm, "group_norm": group_norm},
    "modules.token_shift": {"token_shift": token_shift},
    "ops.rwkv6": {"chunk_rwkv6": chunk_rwkv6},
    "ops.rwkv7": {"chunk_rwkv7": chunk_rwkv7},
    "ops.rwkv7.fused_addcmul": {"fused_addcmul_rwkv7": lambda x, d, *mixes: [x + d * mix for mix in mixes]},
    "ops.rwkv7.fused_k_update": {"fused_k_rwkv7": lambda k, a, k_a: k * (1 + (a - 1) * k_a)},
    "ops.rwkv7.gate_output_correction": {
        "gate_output_correction": lambda o, r, k, r_k, v, g: (
            (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(-2)) * g
        )
    },
}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_peer_learns_what_ours_learns(version, monkeypatch):
    for name in ("", "ops", "modules.norm"):
        monkeypatch.setitem(sys.modules, f"fla.{name}".rstrip("."), ModuleType(name))
    for name, functions in FLA.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"fla.{name}", module)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.delitem(sys.modules, "rwkv_training_peer", raising=False)
    peers = import_module("rwkv_training_peer")
    monkeypatch.delitem(sys.modules, "rwkv_training_peer")  # which has these kernels

    settings = Settings(layers=2, width=32, head_size=16, batch=2, context=24, steps=6, lr=1e-2)
    ours = Training(Path(__file__).read_bytes(), settings, kind=VERSIONS[version])
    peer = peers.Peer(VERSIONS[version], ours.layout.named(ours.steps.weights), settings, "cpu", torch.float32)
    for n in range(6):
        loss = peer.step(torch.from_numpy(ours.text.batch(n)), ours.learning_rate())
        assert abs(float(loss) - float(ours.step())) < 1e-5  # a loss of 6 in float32 is exact to 4.8e-7
