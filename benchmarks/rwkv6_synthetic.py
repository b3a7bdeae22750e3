"""Random RWKV-6 parameters of about a trained model's size, for the benchmarks."""

from linattn_np.models.rwkv6.names import VERSION


def shapes(L, D, V=65536, N=64, A=32, W=64):
    """The shape of every parameter by its official name."""
    sizes = {"1": 1, "5": 5, "V": V, "D": D, "H": D // N, "N": N, "A": A, "5A": 5 * A, "W": W, "F": D * 7 // 2}
    return {name: tuple(sizes[axis] for axis in axes.split()) for name, axes in VERSION.declared(L).items()}


def is_matrix(name, shape):
    """Whether half-precision checkpoints gain by it; the few other parameters may as well be float32."""
    return name[-2:] in ("w1", "w2") or len(shape) == 2 and name.endswith(".weight")


def scaled(name, noise):
    """A parameter made of standard normal noise of its shape."""
    shape = noise.shape
    if name.endswith(("_w1", "_w2")):
        return (0.3 * shape[-2] ** -0.5) * noise
    if is_matrix(name, shape):
        return shape[-1] ** -0.5 * noise  # (out, in)
    if "time_maa" in name:
        return 0.5 + 0.2 * noise
    if name.endswith("time_decay"):
        return 1.5 * noise - 3  # decays from 0.4 to 0.999
    if len(shape) == 1:
        return 0.1 * noise + name.endswith("weight")  # a norm
    return 0.5 * noise
