"""Gates above 0, which let a state grow: how tests draw them, one call with all its results, and how these are judged.

What grows hides all else, so each number is held to the size of what it is a sum of: the same recurrence of |q|, |k|,
|v|, |do| and the states' magnitudes.
"""

import numpy as np
import planned
from reference import double, draw, draw_states, exact_vjp

from linattn_np import OPS

GATE = 3  # where an operator's arrays have its gates


# -- gates -------------------------------------------------------------------------------------------------------------
def bounded(gates, most):
    """No run of tokens grows by more than `most`: gates that would do so are 0. One that decays by more than 80 nats
    ends in a reset: float32 knows nothing of what is left, and it would show if that grew again.
    """
    grown, decayed = np.zeros((2, *gates.shape[:2], *gates.shape[3:]), gates.dtype)  # T may be 0
    for t in range(gates.shape[2]):
        gate = gates[:, :, t]
        gate[grown + gate > most] = 0
        gate[decayed + gate < -80] = -np.inf
        grown, decayed = np.maximum(grown + gate, 0), np.where(np.isinf(gate), 0, np.minimum(decayed + gate, 0))
    return gates


def anywhere(rng, shape, most=80.0):
    """+50, -60 and resets beside weak gates, in any order."""
    return bounded(rng.choice([50.0, -60, -np.inf, 0, -0.1], shape, p=[0.1, 0.1, 0.05, 0.5, 0.25]), most)


def ramps(rng, shape, most=80.0):
    """+1 to +30 at every third token, -25 at every fifth."""
    others = rng.choice([-25, -0.5, -np.inf], shape, p=[0.3, 0.65, 0.05])
    return bounded(np.where(rng.random(shape) < 0.3, rng.uniform(1, 30, shape), others), most)


def bursts(rng, shape):
    """One +50 in a while, and before the next one a -60 or a reset; every channel on its own."""
    g = np.zeros(shape)
    for b, h, c in np.ndindex(shape[0], shape[1], shape[3]):
        at = rng.integers(0, 9)
        while at + 8 < shape[2]:
            g[b, h, at, c] = 50
            at += rng.integers(1, 7)
            g[b, h, at, c] = (-60, -np.inf)[rng.integers(2)]
            at += rng.integers(1, 9)
    return g


def pairs(one, other, at=0, apart=1):
    """A gate, and another behind it; in sub-chunks of 8, from token `at` of each on."""

    def gates(rng, shape):
        g = rng.uniform(-0.1, 0, shape)
        g[:, :, at::16] += one
        g[:, :, at + apart :: 16] += other
        return g

    return gates


def moderate(rng, shape):
    """+1 to +30 beside -25, often in the same 8 tokens."""
    g = rng.uniform(-0.5, 0, shape)
    up = rng.random(shape) < 0.06
    up[:, :, 1:] &= ~up[:, :, :-1]
    down = np.zeros(shape, bool)
    down[:, :, 1:] = up[:, :, :-1]
    g[up] = rng.uniform(1, 30, up.sum())
    g[down] = -25
    g[:, :, ::8][rng.random(g[:, :, ::8].shape) < 0.5] = -25
    return g


def gentle(rng, shape):
    """+6 beside decays: float16 holds what there is."""
    return np.clip(bursts(rng, shape), -20, 6)


def scattered(rng, shape):
    """+1.5 in one gate of 100 beside weak ones: few channels grow by more than one of them in a chunk."""
    return np.where(rng.random(shape) < 0.01, 1.5, rng.uniform(-0.1, 0, shape))


def one_channel(rng, shape):
    return np.where(np.arange(shape[3]) == 21, bursts(rng, shape), -0.1)


# -- a call ------------------------------------------------------------------------------------------------------------
class Call:
    """A call with states at both ends: its results and gradients, on a device and in float64."""

    def __init__(self, op, rng, gates, dtype, gate_dtype=None, lengths=(70,), H=1, K=64, V=64, scale=None):
        sizes = {"B": 1, "H": H, "T": sum(lengths), "K": K, "V": V, "N": len(lengths)}
        self.op, self.scale = op, K**-0.5 if scale is None else scale
        self.packed = {"cu_seqlens": np.cumsum([0, *lengths])} if len(lengths) > 1 else {}
        self.arrays = draw(op, rng, sizes, dtype, gate_dtype=gate_dtype)
        self.arrays[GATE] = gates(rng, self.arrays[GATE].shape).astype(self.arrays[GATE].dtype)
        self.do = rng.standard_normal((1, H, sizes["T"], V)).astype(dtype)
        self.initial, self.dht = (draw_states(op, rng, sizes, np.float32)[0] for _ in range(2))

    def problem(self, device):
        return self.op.bind(
            list(map(device.upload, self.arrays)),
            gradient=True,
            scale=self.scale,
            initial_state=device.upload(self.initial),
            output_final_state=True,
            **self.packed,
        )

    def results(self, device):
        o, final = planned.run(self.problem(device), device)
        return {"o": double(planned.host(o)), "final state": double(planned.host(final[0]))}

    def gradients(self, device):
        found, (dh0,) = planned.pull(self.problem(device), device, device.upload(self.do), (device.upload(self.dht),))
        names = [*(f"d{name}" for name in self.op.arrays), "dh0"]
        return {name: double(planned.host(x)) for name, x in zip(names, (*found, dh0), strict=True)}

    def exact(self, of=double):
        """All of them, of what `of` makes of each array but the gates."""
        arrays = [double(x) if n == GATE else of(x) for n, x in enumerate(self.arrays)]
        with np.errstate(all="ignore"):
            o, final, gradients = exact_vjp(
                OPS[self.op],
                arrays,
                of(self.do),
                of(self.dht),
                scale=self.scale,
                initial_state=of(self.initial),
                **self.packed,
            )
        names = ["o", "final state", *(f"d{name}" for name in self.op.arrays), "dh0"]
        return dict(zip(names, (o, final, *gradients), strict=True))

    def sizes(self):
        """What each number is a sum of, without signs."""
        return self.exact(magnitude)


def magnitude(x):
    return abs(double(x))


def magnitudes(arrays):
    """Of all arrays but the gates."""
    return [double(x) if n == GATE else magnitude(x) for n, x in enumerate(arrays)]


def assert_near(found, wanted, off):
    """No number of `found` is off by more than `off` has for it: where that is inf it is not judged; NaN fails."""
    wrong = {}
    for name, x in found.items():
        y = wanted[name]
        over = np.divide(abs(x - y), off[name], out=np.zeros(y.shape), where=~np.isinf(off[name]))
        if not over.max(initial=0) <= 1:
            at = tuple(map(int, np.unravel_index(np.argmax(np.where(np.isnan(over), np.inf, over)), over.shape)))
            share, times = np.mean(~(over <= 1)), over[at]
            wrong[name] = f"{share:.1%}, the worst {times:.2g} times the limit: {x[at]:.3g} for {y[at]:.3g} at {at}"
    assert not wrong, wrong
