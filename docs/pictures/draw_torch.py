"""Draws the picture of the gallery's page on torch, so that the documentation is built without torch:
python docs/pictures/draw_torch.py
"""

import runpy
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from linattn_np.command.palette import STYLE

HERE = Path(__file__).parent
matplotlib.use("Agg")
matplotlib.rcParams.update(STYLE)
runpy.run_path(str(HERE.parent / "gallery" / "plot_torch.py"))
plt.savefig(HERE / "torch.png", dpi=120)
