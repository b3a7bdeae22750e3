"""Property tests that go on for as long as they are told: `python tests/attack`, which `__main__` describes."""
