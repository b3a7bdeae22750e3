"""Random RWKV-6 or RWKV-7 parameters of about a trained model's size, for the benchmarks."""

from linattn_np.models.versions import VERSIONS

RANKS = {6: {"A": 32, "5A": 160, "W": 64}, 7: {"W": 96, "A": 96, "Q": 64, "G": 256}}
WIDER = {6: 3.5, 7: 4}  # the channel mix


def shapes(L, D, V=65536, N=64, version=6):
    """The shape of every parameter by its official name."""
    sizes = {"1": 1, "5": 5, "V": V, "D": D, "H": D // N, "N": N, "F": int(D * WIDER[version]), **RANKS[version]}
    declared = VERSIONS[version].version.parameter_axes(L)
    return {name: tuple(sizes[axis] for axis in axes.split()) for name, axes in declared.items()}


def is_matrix(name, shape):
    """Whether half-precision checkpoints gain by it; the few other parameters may as well be float32."""
    return name[-1] in "12" or len(shape) == 2 and name.endswith(".weight")


def scaled(name, noise):
    """A parameter made of standard normal noise of its shape."""
    shape = noise.shape
    if name[-1] in "12":  # of low rank
        return (0.3 * shape[-2] ** -0.5) * noise
    if is_matrix(name, shape):
        return shape[-1] ** -0.5 * noise  # (out, in)
    if "time_maa" in name or ".x_" in name:
        return 0.5 + 0.2 * noise
    if name.endswith(("time_decay", "att.w0")):
        return 1.5 * noise - 3  # decays from 0.4 to 0.999
    if len(shape) == 1:
        return 0.1 * noise + name.endswith("weight")  # a norm
    return 0.5 * noise
