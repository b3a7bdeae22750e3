"""Writes kernels_cu/shared_memory.json: the bytes of the structs that blocks have in shared memory, as g++ sees them.

    python tests/shared_memory.py

Planners read the table, since they choose kernels before any compiler runs. Whoever changes such a struct, or adds an
instance to `catalog.py`, runs this. NVRTC and the emulator compare the table with `sizeof` wherever they compile a
kernel.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import catalog
import emulator

from linattn_np.backends.cupy import kernel

TABLE = ROOT / "kernels_cu" / kernel.SHARED_MEMORY


class Asked(defaultdict):
    """A table that has every type, and lists those that it had not."""

    def __init__(self, known):
        super().__init__(lambda: 0, known)
        self.new = []

    def __missing__(self, name):
        self.new.append(name)
        return super().__missing__(name)


def complete(table) -> dict[str, dict[str, int]]:
    """The sizes that instances ask for. A size decides which instance is made, so new ones may ask for others."""
    while True:
        asked = defaultdict(lambda: Asked({}), {file: Asked(sizes) for file, sizes in table.items()})
        kernel.struct_sizes = lambda: asked
        for instance in catalog.kernels():
            for name in ("shared_bytes", *(name for _, name in instance.constants)):
                getattr(instance, name)
        new = {file: sizes.new for file, sizes in asked.items() if sizes.new}
        if not new:
            return table
        for file, types in new.items():
            table = table | {file: table.get(file, {}) | emulator.sizes_of(file, types)}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(complete({}), indent=1, sort_keys=True) + "\n")
