"""flash-linear-attention's own test files on `linattn_np.interop.fla`: a plugin of pytest.

    git clone https://github.com/fla-org/flash-linear-attention peer; cd peer/tests/ops
    PYTHONPATH=.../tests pytest -p peer_suite --noconftest test_{gla,rwkv6,simple_gla,retention,linear_attn}.py

It wants a card, torch and flash-linear-attention (fla). A test of a recurrent kernel compares it with literal torch,
and here compares ours with that; every other test compares a kernel with the recurrent one, which stays fla's. The end
of the run names the tests that called nothing of ours.
"""

import pytest

CALLS = pytest.StashKey[int]()


def ours(name):
    """What stands for a function of fla's, or None."""
    from linattn_np.interop import fla

    return getattr(fla, name, None) if name.startswith(("fused_", "chunk_", "parallel_")) else None


# -- the plugin -------------------------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def replaced(request, monkeypatch):
    """fla's functions in a test's module and among its parameters replaced by ours, but for its reference."""
    recurrent = request.function.__name__.startswith("test_fused_recurrent")
    for name in vars(request.module).copy():
        if ours(name) and (recurrent or not name.startswith("fused_recurrent_")):
            monkeypatch.setattr(request.module, name, counting(request.node, name))
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if "fn" in parameters:
        monkeypatch.setitem(parameters, "fn", counting(request.node, parameters["fn"].__name__))


def counting(item, name):
    def call(*arrays, **options):
        item.stash[CALLS] = item.stash.get(CALLS, 0) + 1
        return ours(name)(*arrays, **options)

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
