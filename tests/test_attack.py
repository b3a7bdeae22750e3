"""The attack itself: every property runs, and a fault is found, made small and found again by its example."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hypothesis")  # of the `dev` extra
from attack import __main__ as command  # noqa: E402
from attack import harness, names  # noqa: E402
from attack.harness import PROPERTIES, Attack, tried  # noqa: E402
from attack.machines import machine  # noqa: E402

from linattn_np.errors import NotSupported  # noqa: E402


def attacked(there, name, examples):
    """What a round of so many examples counts and says."""
    said = []
    attack = Attack(there, [PROPERTIES[name]], 60, 1, said.append)
    attack.round(replace(PROPERTIES[name], round=examples), 0)
    return attack.counts[name], said


@pytest.mark.exhaustive
def test_every_property_runs(monkeypatch):
    """Whatever it finds, it finds in the library: no error is the attack's own."""
    monkeypatch.setattr(harness, "SHRINKING", 0)
    there, own = machine("numpy"), {file.name for file in Path(harness.__file__).parent.iterdir()}
    for name, p in PROPERTIES.items():
        if (p.machines is None or "numpy" in p.machines) and p.round > 10:
            count, _ = attacked(there, name, 2)
            assert count.tried
            assert not [law for law in count.kinds if "attack itself" in law or own & set(law.split())]


def test_a_fault_is_found_and_made_small(monkeypatch):
    monkeypatch.setattr(harness, "SHRINKING", 60)  # a busy machine takes longer
    there, right = machine("numpy"), machine("numpy").run

    def wrong(function, *arrays, **arguments):
        result = right(function, *arrays, **arguments)
        o = result[0] if isinstance(result, tuple) else result
        if o.shape[-1] >= 3 and arguments.get("out") is None:
            o[..., 0] += 1
        return result

    there.run = wrong
    count, said = attacked(there, "operators", 40)
    ((law, found),) = count.kinds.items()
    assert "wrong" in law
    assert found.example.V == 3 and found.example.B * found.example.H * found.example.T <= 2
    assert any("--replay operators 'Call(" in line for line in said)
    with pytest.raises(AssertionError, match="wrong"):
        tried(PROPERTIES["operators"], eval(repr(found.example), vars(names)), there)


def test_refusals_are_counted():
    there = machine("numpy")

    def never(*arrays, **arguments):
        raise NotSupported("nothing is")

    there.run = never
    count, _ = attacked(there, "operators", 10)
    assert count.refused == count.tried == 10 and not count.faults


def test_the_command(capsys):
    assert command.replay("operators", "Call('gla', T=3, V=2)", machine("numpy")) == 0
    assert command.replay("bad-arguments", "Bad(Call('gla'), 'layout', 'capitals')", machine("numpy")) == 0
    assert capsys.readouterr().out == "refused\n"
    assert np.isnan(eval("Call('gla', scale=nan)", vars(names)).scale)
