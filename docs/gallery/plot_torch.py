"""
A layer in torch
================

`linattn_np.interop.torch.gla` is `gla` with autograd. A layer learns to add up numbers since the last reset, so that it
has to forget at once: the gate has to depend on the input.
"""

import matplotlib.pyplot as plt
import torch

from linattn_np.interop.torch import gla

torch.manual_seed(0)
B, T, K = 8, 48, 8


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = torch.nn.Linear(2, 4 * K)
        self.output = torch.nn.Linear(K, 1)

    def forward(self, x):  # [B, T, 2]
        q, k, v, g = (
            y[:, None] for y in self.inputs(x).chunk(4, -1)
        )  # one head
        self.gates = torch.nn.functional.logsigmoid(g + 4)
        return self.output(gla(q, k, v, self.gates)[:, 0])[..., 0]


def draw():
    """Numbers and resets [B, T, 2], and the sums [B, T] since a reset."""
    numbers, resets = torch.randn(B, T) / 3, (torch.rand(B, T) < 0.1).float()
    sums, total = [], torch.zeros(B)
    for t in range(T):
        total = total * (1 - resets[:, t]) + numbers[:, t]
        sums.append(total)
    return torch.stack([numbers, resets], -1), torch.stack(sums, -1)


layer = Layer()
adam = torch.optim.Adam(layer.parameters(), 0.03)
for _ in range(250):
    x, wanted = draw()
    loss = (layer(x) - wanted).square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
print(f"the loss is {loss:.4f}, and {wanted.square().mean():.2f} for zeros")

# %%
# The sums of one sequence, and the decay that the layer has learnt: near 1, and small at the resets, which are the
# dotted lines.
figure, (above, below) = plt.subplots(
    2, 1, figsize=(7, 4.4), sharex=True, layout="constrained"
)
with torch.no_grad():
    answer = layer(x)[0]
    (exact,) = above.plot(wanted[0], linewidth=4, color="C1")
    (found,) = above.plot(answer, color="C0")
    for line, name, place in (exact, "exact", 0.2), (found, "the layer's", 0.4):
        above.annotate(
            name,
            (place, 1.03),
            xycoords="axes fraction",
            color=line.get_color(),
        )
    above.set_ylabel("sum since the reset")
    below.plot(layer.gates[0, 0].exp().mean(-1))
    below.set_ylabel("mean decay")
for axis in (above, below):
    for reset in x[0, :, 1].nonzero():
        axis.axvline(reset.item(), linestyle=":", color="0.5")
below.set_xlabel("token")
plt.show()
# sphinx_gallery_thumbnail_path = "pictures/gallery_torch.png"

# %%
# The loss is 0.0097, and 0.80 for zeros.
#
# .. image:: /pictures/gallery_torch.png
#    :alt: Exact and learnt sums against the token, and the mean decay
