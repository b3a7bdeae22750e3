"""flash-linear-attention's own test files on this package's torch functions: a plugin of pytest.

    git clone https://github.com/fla-org/flash-linear-attention peer; cd peer/tests/ops
    PYTHONPATH=.../tests pytest -p peer_suite --noconftest test_{gla,rwkv6,simple_gla,retention,linear_attn}.py

It wants a card, torch and flash-linear-attention (fla). A test of a recurrent kernel compares it with literal torch,
and here compares ours with that; every other test compares a kernel with the recurrent one, which stays fla's. The end
of the run names the tests that called nothing of ours.
"""

import warnings
from functools import partial

import pytest

OPERATORS = {"linear_attn": "linear_attention"}  # whose name is another here
KINDS = ("fused_recurrent_", "fused_chunk_", "chunk_", "parallel_")
CALLS = pytest.StashKey[int]()


def operator(name):
    """(kind, our operator's name) of a function of fla's, or None."""
    for kind in KINDS:
        op = name.removeprefix(kind)
        if op != name:
            op = OPERATORS.get(op, op)
            return (kind, op) if op in ("gla", "rwkv6", "simple_gla", "retention", "linear_attention") else None
    return None


def compute(name, *arrays, output_final_state=False, output_attentions=False, **options):
    """What fla's function `name` returns."""
    from linattn_np.interop import torch as ours

    kind, op = operator(name)
    if op == "linear_attention":
        options.setdefault("normalize", kind != "fused_recurrent_")
    options = renamed(options)
    if options.get("cu_seqlens") is not None:
        options["cu_seqlens"] = options["cu_seqlens"].tolist()
    if isinstance(state := options.get("initial_state"), tuple):  # its sum of keys is [N, 1, H, K]
        options["initial_state"] = state[0], state[1][:, 0]
    call = partial(getattr(ours, op), *arrays, layout="bthd", **options)
    if output_attentions:
        return call(), attentions(call)
    if not output_final_state:
        return call(), None
    o, state = call(output_final_state=True)
    return o, (state[0], state[1][:, None]) if isinstance(state, tuple) else state


def renamed(options):
    """Options by our names."""
    if "transpose_state_layout" in options:
        if "state_v_first" in options:
            raise ValueError("state_v_first and transpose_state_layout are the same option")
        warnings.warn("transpose_state_layout is state_v_first", DeprecationWarning, stacklevel=3)
        options["state_v_first"] = options.pop("transpose_state_layout")
    if "gk" in options:
        options["g"] = options.pop("gk")
    return options


def attentions(call):
    """The scores [B, H, T, T] with their decays: what an operator makes of the unit matrix as values."""
    import torch

    q = call.keywords["q"]
    unit = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)[None, :, None].expand(*q.shape[:3], -1)
    return partial(call.func, *call.args, **{**call.keywords, "v": unit})().transpose(1, 2)


# -- the plugin -------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def replaced(request, monkeypatch):
    """fla's functions in a test's module and among its parameters replaced by ours, but for its reference."""
    recurrent = request.function.__name__.startswith("test_fused_recurrent")
    for name in vars(request.module).copy():
        if operator(name) and (recurrent or not name.startswith("fused_recurrent_")):
            monkeypatch.setattr(request.module, name, counting(request.node, name))
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "fn" in parameters:
        monkeypatch.setitem(parameters, "fn", counting(request.node, parameters["fn"].__name__))


def counting(item, name):
    def call(*arrays, **options):
        item.stash[CALLS] = item.stash.get(CALLS, 0) + 1
        return compute(name, *arrays, **options)

    return call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    finally:
        item.user_properties.append(("calls of linattn_np", item.stash.get(CALLS, 0)))


def pytest_terminal_summary(terminalreporter):
    idle = [
        report.nodeid
        for report in terminalreporter.getreports("passed")
        if report.when == "call" and not dict(report.user_properties)["calls of linattn_np"]
    ]
    terminalreporter.section(f"{len(idle)} passed without a call of linattn_np")
    for name in idle:
        terminalreporter.write_line(name)
