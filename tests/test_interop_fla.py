"""The functions with flash-linear-attention's names take and give what its own do."""

import inspect

import numpy as np
import peer_suite
import pytest

import linattn_np
from linattn_np import ContractError, NotSupported

torch = pytest.importorskip("torch", reason="torch is not installed")
fla = pytest.importorskip("linattn_np.interop.fla")
there = pytest.importorskip("linattn_np.interop.torch")


@pytest.fixture
def qkv(rng):
    """[B, T, H, K], twice, and [B, T, H, V]."""
    return [torch.tensor(rng.standard_normal((2, 9, 3, size)), requires_grad=True) for size in (4, 4, 6)]


def ours(function, *tensors, **options):
    return function(*(x.detach().numpy() for x in tensors), layout="bthd", **options)


def test_names():
    assert peer_suite.ours("fused_chunk_linear_attn") is fla.fused_chunk_linear_attn
    assert peer_suite.ours("naive_recurrent_gla") is peer_suite.ours("chunk_comba") is None
    assert str(inspect.signature(fla.chunk_rwkv6)).startswith(
        "(r, k, v, w, u, scale=None, initial_state=None, output_f"
    )


def test_states_and_gradients(qkv):
    g = torch.full_like(qkv[0], -0.5).requires_grad_()
    o, state = fla.fused_recurrent_gla(*qkv, gk=g, output_final_state=True)
    (o.sum() + state.sum()).backward()
    wanted = ours(linattn_np.gla, *qkv, g, output_final_state=True)
    for found, array in zip((o, state), wanted, strict=True):
        np.testing.assert_allclose(found.detach(), array)
    assert g.grad[:, 1:].abs().min() > 0
    resumed, none = fla.chunk_gla(q=qkv[0], k=qkv[1], v=qkv[2], g=g, initial_state=state)
    assert resumed.shape == o.shape and none is None


def test_packed_sequences(qkv):
    q, k, v = (x[:1] for x in qkv)
    o, _ = fla.chunk_retention(q, k, v, cu_seqlens=torch.tensor([0, 4, 9]))
    np.testing.assert_allclose(o.detach(), ours(linattn_np.retention, q, k, v, cu_seqlens=[0, 4, 9]))


def test_the_normaliser_is_on_where_theirs_is(qkv):
    o, (_, keys) = fla.chunk_linear_attn(*qkv, output_final_state=True)
    np.testing.assert_allclose(o.detach(), ours(linattn_np.linear_attention, *qkv, normalize=True))
    np.testing.assert_allclose(keys.detach(), qkv[1].detach().sum(1, keepdim=True))
    halves = [fla.chunk_linear_attn(*(x[:, :5] for x in qkv), output_final_state=True)]
    halves.append(fla.chunk_linear_attn(*(x[:, 5:] for x in qkv), initial_state=halves[0][1]))
    torch.testing.assert_close(torch.cat([half for half, _ in halves], 1), o)
    o, _ = fla.fused_recurrent_linear_attn(*qkv)
    np.testing.assert_allclose(o.detach(), ours(linattn_np.linear_attention, *qkv))


def test_attentions(qkv):
    q, k, v = qkv
    g = -torch.rand(2, 9, 3, dtype=q.dtype)
    o, scores = fla.parallel_simple_gla(q=q, k=k, v=v, g=g, output_attentions=True)
    assert scores.shape == (2, 3, 9, 9) and scores.triu(1).abs().max() == 0
    torch.testing.assert_close(torch.einsum("bhts,bshv->bthv", scores, v), o)


def test_the_older_name_of_an_option(qkv):
    with pytest.warns(DeprecationWarning):
        _, state = fla.chunk_retention(*qkv, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (2, 3, 6, 4)
    with pytest.raises(ContractError, match="name one option"):
        fla.chunk_retention(*qkv, state_v_first=True, transpose_state_layout=True)


def test_gates_that_are_left_out(qkv):
    """Of gla: none. Of simple_gla: none, one a token, one a head, or their sum."""
    q, k, v = (x.detach() for x in qkv)
    decays, gates = torch.tensor([-0.1, -0.2, -0.3]), -torch.rand(2, 9, 3)
    plain = torch.tensor(ours(linattn_np.linear_attention, q, k, v))
    torch.testing.assert_close(fla.fused_recurrent_gla(q, k, v)[0], plain)
    torch.testing.assert_close(fla.chunk_simple_gla(q, k, v)[0], plain)
    for given, g in (
        ({"g": gates}, gates),
        ({"g_gamma": decays}, decays),
        ({"g": gates, "g_gamma": decays}, gates + decays),
    ):
        wanted = ours(linattn_np.simple_gla, q, k, v, g.expand(2, 9, 3).double().contiguous())
        torch.testing.assert_close(fla.chunk_simple_gla(q, k, v, **given)[0], torch.tensor(wanted))


def test_a_gate_of_another_shape_is_refused(qkv):
    with pytest.raises(ContractError, match="simple_gla: g has 4 axes"):
        fla.chunk_simple_gla(*qkv, qkv[0])


def test_heads_first_are_refused(qkv):
    assert fla.chunk_retention(*qkv, head_first=False)[1] is None
    with pytest.raises(ContractError, match="chunk_retention: head_first is True, expected tensors .B, T, H, ...."):
        fla.chunk_retention(*qkv, head_first=True)


def test_bounds_on_the_host_spare_a_wait(qkv):
    """`cu_seqlens_cpu` is read in place of a tensor on a device."""
    q, k, v = (x[:1] for x in qkv)
    o, _ = fla.chunk_rwkv6(
        q, k, v, -k.abs(), k[0, 0], cu_seqlens=torch.empty(3, device="meta"), cu_seqlens_cpu=torch.tensor([0, 2, 9])
    )
    assert torch.equal(o, fla.chunk_rwkv6(q, k, v, -k.abs(), k[0, 0], cu_seqlens=[0, 2, 9])[0])


# -- the delta rules ---------------------------------------------------------------------------------------------------
@pytest.fixture
def delta():
    """q, k, v, a gate a channel, and strengths; twice as many heads of values."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 20, 2, 8).unbind()
    v, g = torch.randn(2, 2, 20, 4, 8).unbind()
    return q, k, v, torch.nn.functional.logsigmoid(g), torch.rand(2, 20, 4)


def test_delta_rules(delta):
    q, k, v, g, beta = delta
    normed = {"use_qk_l2norm_in_kernel": True}
    o, state = fla.chunk_kda(q, k, v, g, beta, None, None, True, True)
    assert state.shape == (2, 4, 8, 8)
    wanted = there.kda(q, k, v, g, beta, qk_l2norm=True, layout="bthd")
    assert torch.equal(o, wanted)
    assert torch.equal(fla.fused_recurrent_kda(q, k, v, g, beta, **normed)[0], wanted)
    assert torch.equal(fla.fused_recurrent_gated_delta_rule(q, k, v, gk=g, beta=beta, **normed)[0], wanted)
    o, none = fla.chunk_gated_delta_rule(q, k, v, g[..., 0], beta, **normed)
    assert none is None
    assert torch.equal(o, there.gated_delta_rule(q, k, v, g[..., 0], beta, qk_l2norm=True, layout="bthd"))
    ones = torch.ones_like(beta)
    for o in (
        fla.fused_recurrent_delta_rule(q, k, v, **normed)[0],
        fla.fused_recurrent_gated_delta_rule(q, k, v, **normed)[0],
        fla.chunk_delta_rule(q, k, v, ones, **normed)[0],
    ):
        assert torch.equal(o, there.delta_rule(q, k, v, ones, qk_l2norm=True, layout="bthd"))
    with pytest.raises(NotSupported, match="gv is given"):
        fla.fused_recurrent_gated_delta_rule(q, k, v, g[..., 0], gv=v, beta=beta)


def test_gates_and_strengths_in_the_kernel(delta):
    """With the gradients of what they are made of."""
    q, k, v, x, beta = delta
    rates, bias = torch.randn(4, requires_grad=True), torch.randn(32, requires_grad=True)
    how = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True}
    for bound in (None, -5.0):
        o, _ = fla.chunk_kda(
            q, k, v, x, beta, A_log=rates, dt_bias=bias, lower_bound=bound, safe_gate=True, allow_neg_eigval=True, **how
        )
        g = there.kda_gate(x, rates, bias, bound)
        wanted = there.kda(q, k, v, g, 2 * beta.sigmoid(), qk_l2norm=True, layout="bthd")
        found = torch.autograd.grad(o.square().sum(), (rates, bias))
        torch.testing.assert_close(o, wanted)
        torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), (rates, bias)))
    o, _ = fla.chunk_gated_delta_rule(q, k, v, x[..., 0], beta, A_log=rates, dt_bias=bias[:4], **how)
    g = there.gdn_gate(x[..., 0], rates, bias[:4])
    torch.testing.assert_close(o, there.gated_delta_rule(q, k, v, g, beta.sigmoid(), qk_l2norm=True, layout="bthd"))
    without_beta, _ = fla.fused_recurrent_gated_delta_rule(q, k, v, g, use_beta_sigmoid_in_kernel=True)
    ones = torch.ones_like(beta).sigmoid()  # of raw ones
    torch.testing.assert_close(without_beta, there.gated_delta_rule(q, k, v, g, ones, layout="bthd"))


def test_rwkv7(delta):
    _, _, v, w, _ = delta
    r, k = torch.randn(2, *w.shape).unbind()
    kk, icl = torch.nn.functional.normalize(torch.randn_like(w), dim=-1), torch.rand_like(w)
    wanted, state = there.rwkv7(r, w, k, v, -kk, kk * icl, scale=1.0, layout="bthd", output_final_state=True)
    assert torch.equal(fla.chunk_rwkv7(r, w, k, v, -kk, kk * icl)[0], wanted)
    assert torch.equal(fla.fused_mul_recurrent_rwkv7(r, w, k, v, kk, icl)[0], wanted)
    o, final = fla.chunk_dplr_delta_rule(r, k, v, -kk, kk * icl, w, 1.0, None, True, chunk_size=16, safe_gate=True)
    assert torch.equal(o, wanted) and torch.equal(final, state)
    o, final = fla.fused_recurrent_rwkv7(r, w, k, v, -kk, kk * icl, scale=1.0)
    assert torch.equal(o, wanted) and torch.equal(final, state)


def test_chunk_sizes_are_those_that_they_have(delta):
    q, k, v, w, g = delta
    with pytest.raises(ContractError, match="chunk_kda: `chunk_size` must be either 32 or 64, got 16"):
        fla.chunk_kda(q, k, v, w, g, chunk_size=16)
    o = fla.chunk_kda(q, k, v, w, g, chunk_size=32)[0]
    assert torch.equal(o, fla.chunk_kda(q, k, v, w, g)[0])
