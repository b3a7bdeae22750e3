"""Linear attention with feature maps and the normaliser (Katharopoulos et al., 2020, eq. 10-12)."""

import numpy as np

from ...declarations import GLA
from .family import Member
from .recurrent import outer, read, read_vjp, write_vjp


def exp_below_0(x):
    """exp(x) where x is below 0, else 1."""
    return np.exp(np.minimum(x, 0))


FEATURES = {  # {a feature map: (phi, its derivative)}
    None: (lambda x: x, lambda x: 1),
    "elu": (lambda x: np.where(x > 0, x + 1, exp_below_0(x)), exp_below_0),
    "relu": (lambda x: np.maximum(x, 0), lambda x: x > 0),
    "exp": (np.exp, np.exp),
}


def divide(numerator, z):
    """numerator / z over the last axis, with 0 / 0 = 0."""
    z = z[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((z == 0) & (numerator == 0), 0, numerator / z)


def divide_vjp(o, z, do):
    """Gradients of numerator and z in o = numerator / z; 0 where z is 0."""
    dnumerator = np.divide(do, z[..., None], out=np.zeros_like(do), where=z[..., None] != 0)
    return dnumerator, -(dnumerator * np.where(dnumerator != 0, o, 0)).sum(-1)


def step(problem, state, q, k, v):
    """S_t = S_{t-1} + phi(k_t) v_t^T,     o_t = scale phi(q_t)^T S_t;

    normalised, z_t = z_{t-1} + phi(k_t),   o_t = phi(q_t)^T S_t / phi(q_t)^T z_t.
    """
    phi, _ = FEATURES[problem.options["feature_map"]]
    q, k = phi(q), phi(k)
    S = state[0] + outer(k, v)
    if not problem.options["normalize"]:
        return (S,), problem.scale * read(q, S)
    z = state[1] + k
    return (S, z), divide(read(q, S), (q * z).sum(-1))


def step_vjp(problem, state, q, k, v, dstate, do):
    """The gradients of `step`: (those of the state before it, that of each array)."""
    phi, slope = FEATURES[problem.options["feature_map"]]
    phi_q, phi_k = phi(q), phi(k)
    S = state[0] + outer(phi_k, v)
    if problem.options["normalize"]:
        z = state[1] + phi_k
        numerator, denominator = read(phi_q, S), (phi_q * z).sum(-1)
        do, ddenominator = divide_vjp(divide(numerator, denominator), denominator, do)
        dz = dstate[1] + ddenominator[..., None] * phi_q
    else:
        do = problem.scale * do
    dS = dstate[0] + outer(phi_q, do)
    dphi_q, (dphi_k, dv) = read_vjp(S, do), write_vjp(phi_k, v, dS)
    dstate = (dS,)
    if problem.options["normalize"]:
        dphi_q, dphi_k, dstate = dphi_q + ddenominator[..., None] * z, dphi_k + dz, (dS, dz)
    return dstate, dphi_q * slope(q), dphi_k * slope(k), dv


class LinearAttention(Member):
    """Linear attention as a member without gates. The normaliser is computed as one more column of v, all ones, so that
    the state is [S | z]. Methods: see `Member`."""

    def __init__(self, problem):
        (phi, _), dtype = FEATURES[problem.options["feature_map"]], problem.compute_dtype
        self.normalize = problem.options["normalize"]
        v = problem["v"]
        if self.normalize:
            v = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)
        g = np.broadcast_to(dtype.type(0), (*problem.shape("B H T"), 1))
        super().__init__(
            problem,
            phi(problem["q"].astype(dtype)),
            phi(problem["k"].astype(dtype)),
            v,
            g,
            scale=1.0 if self.normalize else problem.scale,
            constant_gate=True,
        )

    def joined(self, parts):
        return np.concatenate([parts[0], parts[1][..., None]], axis=-1) if self.normalize else parts[0]

    def split(self, state):
        return (state[..., :-1], state[..., -1]) if self.normalize else (state,)

    def buffer(self, o):
        return np.empty(self.v.shape, self.problem.compute_dtype) if self.normalize else o

    def output(self, o, family):
        if self.normalize:
            self.z = family[..., -1]
            self.o = divide(family[..., :-1], self.z)
            o[...] = self.o

    def output_vjp(self, do):
        if not self.normalize:
            return do
        dnumerator, dz = divide_vjp(self.o, self.z, do)
        return np.concatenate([dnumerator, dz[..., None]], axis=-1)

    def gradients(self, dq, dk, dv, dg, du):
        (_, slope), dtype = FEATURES[self.problem.options["feature_map"]], self.problem.compute_dtype
        q, k = self.problem["q"].astype(dtype), self.problem["k"].astype(dtype)
        return [dq * slope(q), dk * slope(k), dv[..., : self.problem.sizes["V"]]]


class RunningMaximum(LinearAttention):
    """`LinearAttention` with feature map exp and the normaliser, for queries and keys whose exp leaves the dtype's
    range.

    It is gla on the running maximum m of each channel's keys:

        m_t = max(m_{t-1}, k_t),   g_t = m_{t-1} - m_t,   keys exp(k_t - m_t),   queries exp(q_t + m_t - n_t)

    with n_t the maximum of q_t + m_t over the channels. The gates divide all keys up to token t by exp(m_t), which the
    queries have as a factor. o is a ratio, in which exp(n_t) cancels. So neither m nor n has a gradient. The operator's
    state is exp(m_T) times the state of gla.

    first_scale, last_maximum : exp(m_0) and m_T [N, H, K], for each sequence
    """

    def __init__(self, problem):
        super().__init__(problem)
        q, k = (problem[name].astype(problem.compute_dtype) for name in "qk")
        least, count = np.finfo(k.dtype).min, problem.spans.count
        # least / 2: the gate to keys up to -least / 2 is finite
        first_maximum, self.first_scale = self.initial_maximum(least / 2)
        maximum, self.g, self.last_maximum = np.empty_like(k), np.zeros_like(k), first_maximum.copy()
        for s, (first, stop) in enumerate(problem.spans):
            tokens, before = np.s_[:, :, first:stop], first_maximum[s::count][:, :, None]
            np.maximum(np.maximum.accumulate(k[tokens], axis=2), before, out=maximum[tokens])
            self.g[tokens] = np.concatenate([before, maximum[tokens]], axis=2)[:, :, :-1] - maximum[tokens]
            self.last_maximum[s::count] = np.concatenate([before, maximum[tokens]], axis=2)[:, :, -1]
        self.constant_gate = False
        self.k = np.exp(k - maximum)
        q = q + maximum
        self.q = np.exp(q - np.maximum(q.max(-1, keepdims=True), least))

    def initial_maximum(self, least):
        """(m_0 [N, H, K], the logarithm of a channel's largest number in the initial state, or `least` if all are 0;
        exp(m_0), or 1 for the latter channels)."""
        state = super().initial_state()
        largest = np.abs(state).max(-1)
        maximum = np.where(largest > 0, np.log(largest), np.array(least, state.dtype))
        return maximum, np.where(largest == 0, state.dtype.type(1), largest)

    def initial_state(self):
        return super().initial_state() / self.first_scale[..., None]

    def split(self, state):
        return super().split(state * np.exp(self.last_maximum)[..., None])

    def state_vjp(self, dparts):
        """As in `Member`. A gradient of 0 stays 0 also if exp(m_T) is infinite."""
        dstate = self.state(dparts)
        return np.where(dstate == 0, 0, dstate * np.exp(self.last_maximum)[..., None])

    def initial_vjp(self, dstate):
        return super().split(dstate / self.first_scale[..., None])

    def gradients(self, dq, dk, dv, dg, du):
        return [self.q * dq, self.k * dk, dv[..., : self.problem.sizes["V"]]]

    def as_gla(self):
        """The problem of gla, for the computation token by token."""
        arrays = {"q": self.q, "k": self.k, "v": self.v.astype(self.k.dtype), "g": self.g}
        sizes = self.problem.sizes | {"V": self.v.shape[-1]}
        return self.problem.replace(
            op=GLA, arrays=arrays, options={}, scale=1.0, sizes=sizes, initial_state=(self.initial_state(),)
        )


def is_out_of_range(problem):
    """Whether the feature map is exp with the normaliser, and queries, keys or the initial state are so large or small
    that sums of products may leave the dtype's range."""
    if problem.options.get("feature_map") != "exp" or not problem.options["normalize"]:
        return False
    limit = np.log(np.finfo(problem.compute_dtype).max) / 3
    for x in (problem["q"], problem["k"]):
        x = np.where(np.isneginf(x), 0, x)  # padding is -inf
        if x.size and not (-limit <= x.min() and x.max() <= limit):
            return True
    return any(x.size and not np.abs(x).max() <= np.exp(limit) for x in problem.initial_state or ())


def member(problem):
    """The call as one of the gated family, for the chunked forms."""
    return (RunningMaximum if is_out_of_range(problem) else LinearAttention)(problem)
