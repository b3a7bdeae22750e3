"""torch's tensors that are not what their memory says, and options that are written to before the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
from hypothesis import strategies as st
from reference import same_bits

from attack.calls import Call, calls, flat, given
from attack.harness import Refused, holds_for, require
from linattn_np import ContractError, vjp

ON_HOST = ("numpy",)


def small(call):
    """A call that torch's functions take, of few tokens."""
    dtype = call.dtype if call.dtype in ("float32", "float64") else "float32"
    return replace(call, dtype=dtype, gate_dtype=None, memory="plain", state_dtype=None, initial=None, loudness=1.0)


def pulled(call, function, tensors, arguments, seen=lambda x: x, written=lambda: None):
    """[o, gradients] of torch's function; `seen` makes its inputs and the gradient of o from plain tensors, and
    `written` is called between the two passes."""
    import torch

    learning = [x.detach().clone().requires_grad_() for x in tensors]
    o = flat(function(*map(seen, learning), **arguments))[0]
    written()
    do = torch.from_numpy(call.cotangents()[0].astype(call.dtype))
    do = do.swapaxes(1, 2) if call.layout == "bthd" else do
    return [o.detach(), *torch.autograd.grad(o, learning, seen(do))]


def torch_call(call, machine):
    """(torch's function, plain tensors, arguments) of a call."""
    import torch

    from linattn_np.interop import torch as interop

    arrays, arguments = given(call, machine)
    return getattr(interop, call.op.split()[0]), [torch.from_numpy(np.array(x)) for x in arrays], arguments


# -- lazy tensors ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Lazy:
    """A call, one of whose tensors is another view of the same numbers, or of none."""

    call: Call
    place: int = 0
    kind: str = "negated"


def wrapped(torch, x):
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
            return function(*arguments, **(keywords or {}))

    return torch.Tensor._make_wrapper_subclass(Wrapper, x.shape, dtype=x.dtype, strides=x.stride(), storage_offset=64)


def fake(torch, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(x)


VIEWS = {  # the numbers of `x`, through operations of torch
    "negated": lambda torch, x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "real part of a conjugate": lambda torch, x: torch.complex(x, x).conj().real,
    "with an offset": lambda torch, x: torch.cat([x.new_full((7,), 9.0), x.reshape(-1)])[7:].view(x.shape),
    "transposed twice": lambda torch, x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second": lambda torch, x: x.repeat_interleave(2, -1)[..., ::2],
}
KINDS = {  # the numbers of `x`, by themselves
    "parameter": lambda torch, x: torch.nn.Parameter(x),
    "in inference mode": lambda torch, x: inferred(torch, x),
}
OTHERS = {  # that have no such memory: only refusals are right, or for zeros the results for zeros
    "zeros": lambda torch, x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "meta": lambda torch, x: x.to("meta"),
    "fake": fake,
    "wrapper": wrapped,
    "sparse": lambda torch, x: x.to_sparse(),
    "quantised": lambda torch, x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "nested": lambda torch, x: torch.nested.nested_tensor(list(x)),
}


def inferred(torch, x):
    with torch.inference_mode():
        return x.clone()


def ordinary(machine):
    return calls(machine, plants=False, edges=False, gates=["zero", "logsigmoid", "weak"]).map(small)


def lazies(machine):
    kinds = st.sampled_from([*VIEWS, *KINDS, *OTHERS])
    return st.builds(Lazy, ordinary(machine), st.integers(0, 4), kinds)


def lazy_tensors(case, machine):
    """Refused, or with the numbers of plain tensors: o, and through views of torch's the gradients."""
    import torch

    function, tensors, arguments = torch_call(case.call, machine)
    at, kind = case.place % len(tensors), case.kind
    try:
        lazy = (VIEWS | KINDS | OTHERS)[kind](torch, tensors[at])
    except (RuntimeError, NotImplementedError, ValueError):
        return  # torch has none of such a shape
    try:
        if kind in VIEWS:
            found = pulled(case.call, function, tensors, arguments, lambda x: VIEWS[kind](torch, x))
        else:
            with torch.no_grad():
                found = flat(function(*tensors[:at], lazy, *tensors[at + 1 :], **arguments))[:1]
    except ContractError as error:
        raise Refused from error
    require(kind not in OTHERS or kind == "zeros", f"lazy: {kind} tensors are computed", case.call.op)
    if kind == "zeros":
        tensors[at] = torch.zeros_like(tensors[at])
    terms = 4 * (case.call.T + case.call.K + case.call.V)  # other strides are summed in another order
    wanted = [x.double().numpy() for x in pulled(case.call, function, tensors, arguments)]
    largest = max(abs(y).max(initial=0) for y in wanted)  # as terms of one may cancel to 0
    allowed = terms * np.finfo(case.call.dtype).eps * largest
    for x, y in zip(found, wanted):
        x = x.double().numpy()
        same = x.shape == y.shape and (abs(x - y) <= allowed).all()
        require(same, f"lazy: {kind} has other numbers", case.call.op)


def recorded_graphs(call, machine):
    """A graph that torch records holds the call and its gradients: other tensors get their own numbers."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    function, tensors, arguments = torch_call(call, machine)

    def whole(*tensors):
        inputs = [x.detach().requires_grad_() for x in tensors]
        o = flat(function(*inputs, **arguments))[0]
        return [o, *torch.autograd.grad(o.square().sum(), inputs)]

    try:
        graph = make_fx(whole)(*tensors)
        others = [x.flip(0, 2) if x.ndim > 2 else x / 2 for x in tensors]
        wanted = whole(*others)
    except ContractError as error:
        raise Refused from error
    same = all(same_bits(x.detach().numpy(), y.detach().numpy()) for x, y in zip(graph(*others), wanted, strict=True))
    require(same, "graph: other numbers", call.op)


# -- options that are written to ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Written:
    """A call, an option of it, and by whom its gradient is taken."""

    call: Call
    option: str = "mask"
    by: str = "vjp"


def writings(machine):
    names = st.sampled_from(("mask", "cu_seqlens", "gamma"))
    drawn = st.tuples(calls(machine, plants=False, edges=False), names, st.sampled_from(("vjp", "torch")))
    return drawn.map(lambda x: Written(small(x[0]), x[1], x[2] if find_spec("torch") else "vjp"))


def written_over(case):
    """(the option as an array that can be written to, what is written), or None where the call has no such option."""
    call = case.call
    if case.option == "mask" and call.masked is not None:
        return call.arguments()["mask"].copy(), False
    if case.option == "cu_seqlens" and call.lengths:
        return np.array(call.arguments()["cu_seqlens"]), 0
    if case.option == "gamma" and call.op == "retention":
        return np.full(call.H, 0.9), 0.1
    return None


@holds_for(writings, machines=ON_HOST, memory=1 << 30)  # torch's own, too
def options_written_to(case, machine):
    """What is written to an option after the forward pass changes no gradient."""
    if (found := written_over(case)) is None:
        return
    option, value = found

    def gradients(write):
        own = option.copy()

        def written():
            if write:
                own[...] = value

        if case.by == "torch":
            function, tensors, arguments = torch_call(case.call, machine)
            found = pulled(case.call, function, tensors, arguments | {case.option: own}, written=written)
            return [x.numpy() for x in found]
        arrays, arguments = given(case.call, machine)
        _, pullback = machine.run(vjp, case.call.function, *arrays, **arguments | {case.option: own})
        written()
        do, _ = case.call.cotangents()
        return flat(pullback(do.swapaxes(1, 2) if case.call.layout == "bthd" else do))

    try:
        wanted, found = gradients(False), gradients(True)
    except ContractError as error:
        raise Refused from error
    same = all(same_bits(np.asarray(x), np.asarray(y)) for x, y in zip(found, wanted, strict=True))
    require(same, f"written: {case.option} changes gradients of {case.by}", case.call.op)


if find_spec("torch"):
    holds_for(lazies, machines=ON_HOST, memory=1 << 30)(lazy_tensors)
    holds_for(ordinary, machines=ON_HOST, memory=1 << 30)(recorded_graphs)
