"""Sequences of at most 16 tokens: their gradients by one kernel, for any sizes, states and gates."""

import planned
import pytest
from planned import host
from reference import same_bits
from test_gradient_kernels import Call, Case

from linattn_np.backends.cupy.gated_kernels import GatedShortBackward

TOKENS = GatedShortBackward.TOKENS
LENGTHS = (0, 1, TOKENS, 7, 0)  # of packed sequences


def pulled(call, device):
    """(the plan of a call's pullback, its results twice), on a device."""
    options = {name: x for name, x in call.options.items() if name in ("cu_seqlens", "scale")}
    start, final = (x is not None and (device.upload(x),) for x in (call.options.get("initial_state"), call.dht))
    problem = call.op.bind(
        [device.upload(x) for x in call.arrays], gradient=True, initial_state=start[0] if start else None, **options
    )
    do, dht = device.upload(call.do), final or None
    results = [planned.pull(problem, device, do, dht) for _ in range(2)]
    return planned.plan_of_pullback(problem, device, do, dht), [
        [host(x) for x in (*gradients, *(first or ()))] for gradients, first in results
    ]


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [(), LENGTHS], ids=["dense", "packed"])
@pytest.mark.parametrize("initial", ["float32", None], ids=["initial", ""])
@pytest.mark.parametrize("dht", [True, False], ids=["dht", ""])
@pytest.mark.parametrize("gate", ["trained", "weak", "some-inf", "all-20", "by_channel", "positive", "zero"])
@pytest.mark.parametrize("K, V", [(20, 24), (1, 3), (128, 64), (64, 33), (130, 140), (60, 300)])
@pytest.mark.parametrize("T", [1, 2, 4, 5, 8, 13, TOKENS])
@pytest.mark.parametrize(
    "dtype, gate_dtype",
    [("float32", None), ("float16", None), ("bfloat16", None), ("float16", "float32"), ("bfloat16", "float32")],
)
@pytest.mark.parametrize("op", ["gla", "rwkv6"])
def test_gradients(device, rng, op, dtype, gate_dtype, T, K, V, gate, dht, initial, lengths):
    case = Case(
        T=T, K=K, V=V, B=2 - bool(lengths), H=2, dtype=dtype, gate=gate, gate_dtype=gate_dtype, lengths=lengths,
        initial=initial, dht=dht,
    )  # fmt: skip
    call = Call(op, case, rng)
    plan, (found, again) = pulled(call, device)
    assert planned.names(plan)[0] == "gated_short_backward"
    call.assert_close("short", found, call.exact[1])
    assert all(map(same_bits, found, again))


@pytest.mark.parametrize("T, kernel", [(TOKENS, "gated_short_backward"), (TOKENS + 1, "gated_backward_states")])
def test_the_longest_sequence_decides(device, rng, T, kernel):
    call = Call("gla", Case(lengths=(1, T, 2), V=20, gate="weak"), rng)
    plan, _ = pulled(call, device)
    assert planned.names(plan)[0] == kernel
