"""What HGRN2 has beside GLA: a key made of the gate, exact where the gate is weak, and a gradient by two ways."""

import numpy as np
import pytest
from reference import exact, exact_vjp, rms

from linattn_np import explain, hgrn2, vjp
from linattn_np.declarations import HGRN2
from linattn_np.derived import inner_call, inner_call_layout


def test_the_key_of_a_weak_gate_keeps_its_digits(rng):
    """1 - exp(-1e-6) in float32 has two digits; every mode is as good as float32 can be."""
    q, v = rng.standard_normal((2, 1, 2, 40, 8)).astype(np.float32)
    g = (-1e-6 * rng.random((1, 2, 40, 8))).astype(np.float32)
    k = inner_call(HGRN2.bind((q, g, v)))["k"]
    np.testing.assert_allclose(k, -np.expm1(g.astype(np.float64)), rtol=3e-7)
    for mode in HGRN2.modes:
        wanted = exact(hgrn2, [q, g, v])[0]
        assert rms(hgrn2(q, g, v, mode=mode) - wanted) <= 1e-5 * rms(wanted), mode


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_gate_in_single_precision_has_a_gradient_in_it(dtype, rng):
    q, v, do = rng.standard_normal((3, 2, 2, 33, 8)).astype(dtype)
    g = -rng.random((2, 2, 33, 8)).astype(np.float32)
    before = g.copy()
    _, pull = vjp(hgrn2, q, g, v, reverse=True)
    dq, dg, dv = pull(do)
    *_, (_, wanted, _) = exact_vjp(hgrn2, [q, g, v], do, reverse=True)
    assert dq.dtype == dv.dtype == dtype and dg.dtype == np.float32 and np.array_equal(g, before)
    assert rms(dg - wanted) <= 4e-3 * rms(wanted)


def test_explain_names_the_copy():
    x = np.zeros((1, 2, 64, 16), np.float32)
    assert "k: computed from the gate" in explain(hgrn2, x, x, x).copies


@pytest.mark.parametrize("cut", ["whole", "columns", "shared heads", "heads inside", "backwards", "one row"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_backend_plans_with_the_keys_strides(cut, dtype):
    """They are compact where the gate's are not."""
    g = -np.ones((2, 3, 40, 16), dtype)
    g = {
        "whole": g,
        "columns": g[..., ::2],
        "shared heads": np.broadcast_to(g[:, :1], g.shape),
        "heads inside": g.swapaxes(1, 2).copy().swapaxes(1, 2),
        "backwards": g[:, :, ::-1],
        "one row": np.broadcast_to(g[:1, :1, :1], g.shape),
    }[cut]
    problem = HGRN2.bind((g, g, g))
    planned, computed = inner_call_layout(problem)["k"], inner_call(problem)["k"]
    assert (planned.strides, planned.dtype) == (computed.strides, computed.dtype)
