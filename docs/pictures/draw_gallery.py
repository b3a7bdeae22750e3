"""Draws the pictures of the gallery's pages that need torch, or that take times, so that the documentation is built
without torch, and on a busy machine: python docs/pictures/draw_gallery.py [PAGE ...]
"""

import runpy
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from linattn_np.backends.numpy.cores import workers
from linattn_np.command.measuring import cpu
from linattn_np.command.palette import STYLE

HERE = Path(__file__).parent
matplotlib.use("Agg")
matplotlib.rcParams.update(STYLE)
for page in sys.argv[1:] or ("torch", "decoding", "speed_against_length"):
    runpy.run_path(str(HERE.parent / "gallery" / f"plot_{page}.py"))
    if page != "torch":
        plt.gcf().suptitle(
            f"{cpu()}, {workers()} cores", x=0.01, ha="left", fontsize=10
        )
    plt.savefig(HERE / f"gallery_{page}.png", dpi=120)
    plt.close()
