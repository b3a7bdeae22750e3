"""What a type checker sees of the public functions; `mypy` reads this file, nothing runs it.

A line with `type: ignore` is an error that mypy must find: without one the comment itself is refused.
"""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import linattn_np
from linattn_np import (
    delta_rule,
    distributed,
    explain,
    gated_delta_rule,
    gated_delta_rule_step,
    gla,
    gla_step,
    hgrn2,
    kda,
    linear_attention,
    retention,
    rwkv6,
    rwkv6_step,
    rwkv7,
    simple_gla,
    softmax_attention,
    stages,
    vjp,
)
from linattn_np.interop.jax import gla as gla_of_jax
from linattn_np.interop.torch import gla as gla_of_torch
from linattn_np.layers import GatedDeltaNet, GatedLinearAttention, random_weights
from linattn_np.models import RWKV6, Batch, Sampling, State
from linattn_np.typing import Pullback

Half = NDArray[np.float16]
Single = NDArray[np.float32]


def results(x: Half, gate: Single, flag: bool) -> None:
    assert_type(gla(x, x, x, gate), Half)
    assert_type(gla(x, x, x, gate, output_final_state=False), Half)
    assert_type(gla(x, x, x, gate, gate, output_final_state=True), tuple[Half, Any])
    assert_type(gla(x, x, x, gate, output_final_state=flag), Half | tuple[Half, Any])
    assert_type(hgrn2(x, gate, x, output_final_state=True), tuple[Half, Any])
    assert_type(rwkv6(x, x, x, gate, gate, scale=1.0, output_final_state=True), tuple[Half, Any])
    assert_type(simple_gla(x, x, x, gate, mask=np.ones((2, 7), bool)), Half)
    assert_type(retention(x, x, x, gamma=[0.5, 0.9], cu_seqlens=[0, 7]), Half)
    assert_type(linear_attention(x, x, x, feature_map="elu", normalize=True, output_final_state=True), tuple[Half, Any])
    assert_type(delta_rule(x, x, x, gate, qk_l2norm=True), Half)
    assert_type(gated_delta_rule(x, x, x, gate, gate, output_final_state=True), tuple[Half, Any])
    assert_type(kda(x, x, x, gate, gate, mask=np.ones((2, 7), bool)), Half)
    assert_type(rwkv7(x, gate, x, x, x, x, scale=1.0, output_final_state=True), tuple[Half, Any])
    assert_type(softmax_attention(x, x, x, causal=False, out=x), Half)
    assert_type(softmax_attention(x, x, x, window=(8, 0), sinks=x, return_lse=True), tuple[Half, Any])
    assert_type(gla_step(x, x, x, gate, gate, slots=[0, 1]), Half)
    assert_type(gla_step(x, x, x, gate, gate, pending=gate, accepted=np.array([1])), Half)
    assert_type(rwkv6_step(x, x, x, gate, gate, gate), Half)
    assert_type(gated_delta_rule_step(x, x, x, gate, gate, gate, qk_l2norm=True), Half)


def mistakes(x: Single) -> None:
    gla(x, x, x)  # type: ignore[call-overload]
    gla([1.0], x, x, x)  # type: ignore[call-overload]
    gla(x, x, x, x, scale="1")  # type: ignore[call-overload]
    gla(x, x, x, x, layout="btdh")  # type: ignore[call-overload]
    gla(x, x, x, x, mode="fast")  # type: ignore[call-overload]
    gla(x, x, x, x, no_such=1)  # type: ignore[call-overload]
    kda(x, x, x, x, x, materialize=True)  # type: ignore[call-overload]
    retention(x, x, x, mask=x)  # type: ignore[call-overload]
    softmax_attention(x, x, x, mode="recurrent")  # type: ignore[call-overload]
    gla_step(x, x, x, x)  # type: ignore[call-arg]
    print(gla(x, x, x, x).no_such)  # type: ignore[attr-defined]
    print(linattn_np.no_such)  # type: ignore[attr-defined]


def gradients(x: Single) -> None:
    o, pullback = vjp(gla, x, x, x, x, output_final_state=True)
    assert_type(pullback, Pullback)
    dq, dk, dv, dg = pullback(x, x)
    assert_type(explain(gla, x, x, x, x, gradient=True).backend, str | None)
    explain(gla, x, x, x, x, kernels="portable")
    explain(gla, x, x, x, x, kernels="hopper")  # type: ignore[arg-type]
    assert_type(linattn_np.explain(gla, x, x, x, x).kernels, tuple[str, ...])


def in_stages(x: Single, flag: bool) -> None:
    b, e = stages.chunk_cumsum(x, chunk_size=16)
    qg, kg = stages.gated_qk(x, x, b, e, exclusive=flag)
    h, final = stages.inter_chunk(kg, x, b, output_final_state=True)
    stages.combine(qg, h, stages.intra_chunk(x, x, x), x)
    stages.inter_chunk(kg, x, b, no_such=1)  # type: ignore[call-overload]


def layers(x: Single) -> None:
    layer = GatedLinearAttention(random_weights(np.random.default_rng(0), hidden_size=64, num_heads=4), num_heads=4)
    y, state = layer(x)
    assert_type(y, np.ndarray)
    assert_type(layer.step(x, state), np.ndarray)
    (y, state), pullback = layer.vjp(x, cu_seqlens=[0, 100])
    weights = GatedDeltaNet.random_weights(np.random.default_rng(0), 64, 4, head_dim=16)
    y, states = GatedDeltaNet(weights, num_heads=4, allow_neg_eigval=True)(x)
    assert_type(states, tuple[np.ndarray, np.ndarray])


def on_ranks(x: Half, gate: Single) -> None:
    distributed.gla(x, x, x, gate, comm=distributed.Alone(), output_final_state=True)
    distributed.retention(x, x, x, comm=distributed.connect(), gamma=0.5, segment_size=64)
    distributed.gla(x, x, x, gate)  # type: ignore[call-arg]
    distributed.retention(x, x, x, comm=distributed.Alone(), mask=x)  # type: ignore[call-arg]


def frameworks(x: Half, gate: Single) -> None:
    assert_type(gla_of_jax(x, x, x, gate, output_final_state=True), tuple[Half, Any])
    assert_type(gla_of_torch(x, x, x, gate), Half)


def models(path: str) -> None:
    model = RWKV6.from_file(path, device="cuda", dtype=np.float16)
    logits, state = model.forward([list(b"Emma")], cu_seqlens=[0, 4])
    assert_type(state, State)
    for token in model.generate(b"Emma was", temperature=0.8, seed=1):
        assert_type(token, int)
    assert_type(Batch(model, 4).join([b"Emma"], Sampling(temperature=0)), list[int])
    RWKV6.from_file(path, device="gpu")  # type: ignore[arg-type]
