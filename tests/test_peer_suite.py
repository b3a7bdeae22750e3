"""What stands for flash-linear-attention's functions in its own test files takes and gives what they do."""

import numpy as np
import peer_suite
import pytest

import linattn_np

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("linattn_np.interop.torch")


@pytest.fixture
def qkv(rng):
    """[B, T, H, K], twice, and [B, T, H, V]."""
    return [torch.tensor(rng.standard_normal((2, 9, 3, size)), requires_grad=True) for size in (4, 4, 6)]


def ours(function, *tensors, **options):
    return function(*(x.detach().numpy() for x in tensors), layout="bthd", **options)


def test_names():
    assert peer_suite.operator("fused_chunk_linear_attn") == ("fused_chunk_", "linear_attention")
    assert peer_suite.operator("parallel_simple_gla") == ("parallel_", "simple_gla")
    assert peer_suite.operator("naive_recurrent_gla") is peer_suite.operator("chunk_gated_delta_rule") is None


def test_states_and_gradients(qkv):
    g = torch.full_like(qkv[0], -0.5).requires_grad_()
    o, state = peer_suite.compute("fused_recurrent_gla", *qkv, gk=g, output_final_state=True)
    (o.sum() + state.sum()).backward()
    wanted = ours(linattn_np.gla, *qkv, g, output_final_state=True)
    for found, array in zip((o, state), wanted, strict=True):
        np.testing.assert_allclose(found.detach(), array)
    assert g.grad[:, 1:].abs().min() > 0
    resumed, none = peer_suite.compute("chunk_gla", q=qkv[0], k=qkv[1], v=qkv[2], g=g, initial_state=state)
    assert resumed.shape == o.shape and none is None


def test_packed_sequences(qkv):
    q, k, v = (x[:1] for x in qkv)
    o, _ = peer_suite.compute("chunk_retention", q, k, v, cu_seqlens=torch.tensor([0, 4, 9]))
    np.testing.assert_allclose(o.detach(), ours(linattn_np.retention, q, k, v, cu_seqlens=[0, 4, 9]))


def test_the_normaliser_is_on_where_theirs_is(qkv):
    o, (_, keys) = peer_suite.compute("chunk_linear_attn", *qkv, output_final_state=True)
    np.testing.assert_allclose(o.detach(), ours(linattn_np.linear_attention, *qkv, normalize=True))
    np.testing.assert_allclose(keys.detach(), qkv[1].detach().sum(1, keepdim=True))
    halves = [peer_suite.compute("chunk_linear_attn", *(x[:, :5] for x in qkv), output_final_state=True)]
    halves.append(peer_suite.compute("chunk_linear_attn", *(x[:, 5:] for x in qkv), initial_state=halves[0][1]))
    torch.testing.assert_close(torch.cat([half for half, _ in halves], 1), o)
    o, _ = peer_suite.compute("fused_recurrent_linear_attn", *qkv)
    np.testing.assert_allclose(o.detach(), ours(linattn_np.linear_attention, *qkv))


def test_attentions(qkv):
    q, k, v = qkv
    g = -torch.rand(2, 9, 3, dtype=q.dtype)
    o, scores = peer_suite.compute("parallel_simple_gla", q=q, k=k, v=v, g=g, output_attentions=True)
    assert scores.shape == (2, 3, 9, 9) and scores.triu(1).abs().max() == 0
    torch.testing.assert_close(torch.einsum("bhts,bshv->bthv", scores, v), o)


def test_the_older_name_of_an_option(qkv):
    with pytest.warns(DeprecationWarning):
        _, state = peer_suite.compute("chunk_retention", *qkv, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (2, 3, 6, 4)
    with pytest.raises(ValueError, match="same option"):
        peer_suite.compute("chunk_retention", *qkv, state_v_first=True, transpose_state_layout=True)
