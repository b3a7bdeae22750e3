"""Sequences and arrays that are cut over ranks or devices, against one that has them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


# -- JAX's shard_map ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sharded_jax():
    """The lines that tests/sharded_jax.py printed."""
    pytest.importorskip("jax", reason="jax is not installed")
    done = subprocess.run([sys.executable, "sharded_jax.py"], cwd=HERE, capture_output=True, text=True, timeout=120,
                          env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("axis", ["batch", "heads"])
@pytest.mark.parametrize("name", ["gla", "rwkv6", "simple_gla", "retention", "linear_attention"])
def test_shard_map_gradients(name, axis, sharded_jax):
    assert f"{name} over {axis}" in sharded_jax


def test_shard_map_gradients_unchecked(sharded_jax):
    assert "rwkv6 over batch unchecked" in sharded_jax
