"""gla with a gate on either side of the state: one kernel, token by token, forwards and for the gradients.

`linattn_np.two_gates` says what the gradients are. `device` is where, as in `plans`.
"""

from __future__ import annotations

from ... import two_gates
from . import tiles
from .build import pack
from .gradients import like
from .operands import (FLOAT32, ceil_div, contiguous, give_back, in_rows, inputs, output, place, pointer, rows, states,
                       stored)

NAME = "gla with gv"


def unsupported(problem) -> str | None:
    """Why these kernels cannot compute a problem that others can; None when they can."""
    if problem.mode == "chunk":
        return "no mode 'chunk' with gv, which goes token by token; it has 'auto', 'recurrent'"
    return None


def kernels_of(problem, device) -> tuple[tiles.Kernel, ...]:
    """What `run` launches."""
    return (tiles.two_gates("Forwards", problem.dtype, gates_dtype(problem), problem.sizes["K"]),)


def sweeps(problem, device) -> tuple[tiles.Kernel, ...]:
    """What a pullback launches, in order."""
    T, G, (K, V) = problem.dtype, gates_dtype(problem), problem.shape("K V")
    passes = (("ForwardsApart", K), ("ForwardsApart", V), ("Backwards", K), ("Backwards", V))
    return (*(tiles.two_gates(only, T, G, C) for only, C in passes),
            *2 * (tiles.gate_sums(T, G),))


def tiles_of(problem, device) -> dict:
    return {"BK": tiles.channels(problem.sizes["K"]), "BV": tiles.TOKEN_COLUMNS}


def copies_of(problem) -> tuple[str, ...]:
    """What is copied that the kernels of other operators read as it is."""
    if problem.op.name != NAME:
        return ()
    return tuple(f"{name}: in float32, as the other gate" for name in ("g", "gv")
                 if problem[name].dtype != gates_dtype(problem))


def scratch(problem) -> int:
    """Bytes that a pullback takes besides the gradients: the results apart, and the states turned over."""
    B, N, H, T, K, V = problem.shape("B N H T K V")
    return FLOAT32.itemsize * (2 * B * H * T * (K + V) + (2 * N * H * K * V if problem.initial_state else 0))


def gates_dtype(problem):
    """One for both: the kernels'."""
    g, gv = problem["g"].dtype, problem["gv"].dtype
    return g if g == gv else FLOAT32


def operands(problem):
    q, k, v, *gates = inputs(problem)
    return q, k, v, *(gate.astype(gates_dtype(problem), copy=False) for gate in gates)


def run(problem, device):
    o = output(problem, device)
    initial, final = states(problem, device)
    launch(problem, device, "Forwards", operands(problem), initial, final, o=o)
    return give_back(problem, o), stored(problem, final)


def pullback(problem, device, do, dht):
    """(gradients in the order of the arrays, that of the initial state or None), all work enqueued."""
    do, arrays, machine = in_rows(do.astype(problem.dtype, copy=False)), operands(problem), Machine(problem, device)
    initial, dht = (parts and contiguous(parts[0]) for parts in (problem.initial_state, dht))
    last = None if dht is None else device.empty(problem.shape("N H K V"), FLOAT32)
    o = device.empty(problem.shape("B H T V"), FLOAT32)
    launch(problem, device, "ForwardsApart", arrays, initial, last, apart=o)
    found, dh0 = two_gates.gradients(machine, arrays, o, last, initial, do, dht)
    found = tuple(x.astype(given.dtype, copy=False) for x, given in zip(found, problem.arrays.values()))
    return found, None if initial is None else (dh0.astype(problem.initial_state[0].dtype, copy=False),)


class Machine:
    """What `linattn_np.two_gates` computes with."""

    def __init__(self, problem, device):
        self.problem, self.device = problem, device

    def forwards(self, *arrays):
        return self.swept("ForwardsApart", arrays, None)

    def backwards(self, q, k, v, *gates_and_last):
        final = None
        if self.problem.initial_state:
            final = self.device.empty((*self.problem.shape("N H"), k.shape[-1], v.shape[-1]), FLOAT32)
        return self.swept("Backwards", (q, k, v, *gates_and_last), final)

    def swept(self, only, arrays, final):
        *arrays, initial = arrays
        v, initial = arrays[2], None if initial is None else contiguous(initial)
        o, apart = like(v, self.device), self.device.empty(v.shape, FLOAT32)
        launch(self.problem, self.device, only, arrays, initial, final, o=o, apart=apart)
        return o, apart, final

    def gate_gradient(self, gate, x, y, last, dht):
        (x, dx), (y, dy), device = x, y, self.device
        dgate, kernel, C = like(gate, device), tiles.gate_sums(x.dtype, gate.dtype), gate.shape[-1]
        D, last_c, last_d = 0, 0, 0
        if dht is not None:
            D, last_c, last_d = last.shape[-1], *(stride // last.itemsize for stride in last.strides[2:])
        where, (N, H) = place(self.problem, device), self.problem.shape("N H")
        args = pack(**rows(device, x=x, y=y, dx=dx, dy=dy, gate=gate, dgate=dgate), last=pointer(device, last),
                    dlast=pointer(device, dht), C=C, D=D, last_c=last_c, last_d=last_d, **where.shape)
        device.launch(kernel, N * H * ceil_div(C, kernel.threads), args)
        return dgate


def launch(problem, device, only, arrays, initial, final, **results):
    """`results`: o, apart or both."""
    q, k, v, g, gv = arrays
    K, V, where = q.shape[-1], v.shape[-1], place(problem, device)
    kernel = tiles.two_gates(only, problem.dtype, g.dtype, K)
    fields = {f"{name}{axis}": None for name in ("o", "apart") for axis in ("", "_b", "_h", "_t")}
    fields |= rows(device, **results)
    args = pack(**rows(device, q=q, k=k, v=v, g=g, gv=gv), **fields, initial=pointer(device, initial),
                final=pointer(device, final), **where.shape | {"K": K, "V": V}, scale=problem.scale)
    N, H = problem.shape("N H")
    device.launch(kernel, N * H * ceil_div(V, tiles.TOKEN_COLUMNS), args, tiles.shared_bytes(kernel))
