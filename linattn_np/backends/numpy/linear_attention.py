"""Linear attention with feature maps and the normaliser (Katharopoulos et al., 2020, eq. 10-12)."""

import numpy as np

from .family import Member
from .recurrent import outer, read, read_vjp, write_vjp


def feature(x, name):
    """phi(x)."""
    if name == "elu":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    if name == "relu":
        return np.maximum(x, 0)
    return np.exp(x) if name == "exp" else x


def feature_vjp(x, name, dphi):
    if name == "elu":
        return dphi * np.where(x > 0, 1, np.exp(np.minimum(x, 0)))
    if name == "relu":
        return dphi * (x > 0)
    return dphi * np.exp(x) if name == "exp" else dphi


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
    phi = problem.options["feature_map"]
    q, k = feature(q, phi), feature(k, phi)
    S = state[0] + outer(k, v)
    if not problem.options["normalize"]:
        return (S,), problem.scale * read(q, S)
    z = state[1] + k
    return (S, z), divide(read(q, S), (q * z).sum(-1))


def step_vjp(problem, state, q, k, v, dstate, do):
    phi = problem.options["feature_map"]
    fq, fk = feature(q, phi), feature(k, phi)
    S = state[0] + outer(fk, v)
    if problem.options["normalize"]:
        z = state[1] + fk
        numerator, denominator = read(fq, S), (fq * z).sum(-1)
        do, ddenominator = divide_vjp(divide(numerator, denominator), denominator, do)
        dz = dstate[1] + ddenominator[..., None] * fq
    else:
        do = problem.scale * do
    dS = dstate[0] + outer(fq, do)
    dfq, (dfk, dv) = read_vjp(S, do), write_vjp(fk, v, dS)
    dstate = (dS,)
    if problem.options["normalize"]:
        dfq, dfk, dstate = dfq + ddenominator[..., None] * z, dfk + dz, (dS, dz)
    return dstate, feature_vjp(q, phi, dfq), feature_vjp(k, phi, dfk), dv


class LinearAttention(Member):
    """No gate; the normaliser is one more value column of ones, so that the state is S | z."""

    def __init__(self, problem):
        phi, dtype = problem.options["feature_map"], problem.compute_dtype
        self.normalize = problem.options["normalize"]
        v = problem["v"]
        if self.normalize:
            v = np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)
        g = np.broadcast_to(dtype.type(0), (*problem.shape("B H T"), 1))
        super().__init__(
            problem,
            feature(problem["q"].astype(dtype), phi),
            feature(problem["k"].astype(dtype), phi),
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
        phi, dtype = self.problem.options["feature_map"], self.problem.compute_dtype
        q, k = self.problem["q"].astype(dtype), self.problem["k"].astype(dtype)
        return [feature_vjp(q, phi, dq), feature_vjp(k, phi, dk), dv[..., : self.problem.sizes["V"]]]


member = LinearAttention
