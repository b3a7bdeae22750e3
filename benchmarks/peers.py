"""Who else computes it, on the arrays of a benchmark: flash-linear-attention (fla-core).

Its arrays lie in memory as [B, T, H, ..], which it reads without a copy. fla's first call for a shape tunes its
kernels, for up to a minute for a new dtype or head size. RWKV-7's, and gradients of heads over 128, would take many:
there each kernel is tuned over a few of the configurations that fla offers for it.
"""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import gates

WITH_STRENGTH = ("delta_rule", "gated_delta_rule", "kda")  # of whose tokens the last array says how strongly they write

FUNCTIONS = {
    "gla": ("gla", "chunk_gla"),
    "rwkv6": ("rwkv6", "chunk_rwkv6"),
    "gla_step": ("gla", "fused_recurrent_gla"),
    "rwkv6_step": ("rwkv6", "fused_recurrent_rwkv6"),
    "simple_gla": ("simple_gla", "chunk_simple_gla"),
    "retention": ("retention", "chunk_retention"),
    "linear_attention": ("linear_attn", "chunk_linear_attn"),
    "delta_rule": ("delta_rule", "chunk_delta_rule"),
    "gated_delta_rule": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("kda", "chunk_kda"),
    "rwkv7": ("rwkv7", "chunk_rwkv7"),
    "delta_rule_step": ("delta_rule", "fused_recurrent_delta_rule"),
    "gated_delta_rule_step": ("gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kda_step": ("kda", "fused_recurrent_kda"),
    "rwkv7_step": ("rwkv7", "fused_recurrent_rwkv7"),
}
MEANING = {"linear_attention": {"normalize": False}}  # what else makes its operator ours
BOUNDED = {"safe_gate": True, "lower_bound": gates.LEAST_OF_RWKV7, "chunk_size": 64}  # as its layer of RWKV-7 has them
TUNED_HEAD, MOST = 128, 6  # the widest head whose gradients are tuned over all configurations; of others so many
COMPILED_AT_ONCE = 16  # configurations
BRIEFLY = {"warmup": 5, "rep": 20}  # milliseconds; Triton's own are 25 and 100


def name(op) -> str | None:
    """Who computes an operator too."""
    return "fla" if op in FUNCTIONS else None


def absent(peer) -> str | None:
    """Why it cannot be measured."""
    try:
        import torch

        if peer == "fla":
            import fla.ops  # noqa: F401
    except ImportError as error:
        return str(error)
    warnings.filterwarnings("ignore", module="fla")  # more heads than tokens, which steps have
    return None if torch.cuda.is_available() else "torch finds no GPU"


def has(case) -> bool:
    """Other dtypes would be tuned anew for minutes."""
    return name(case.op) is not None and case.dtype == "bfloat16"


def function(op):
    import fla.ops

    module, called = FUNCTIONS[op]
    found = getattr(getattr(fla.ops, module), called)
    if op.removesuffix("_step") in WITH_STRENGTH:
        return lambda *arrays, **more: found(*arrays[:-1], beta=arrays[-1], **more)
    return found


def few_configurations(case) -> bool:
    """Whether fla's kernels are not tuned over all of theirs."""
    wide = case.backward and max(case.D, case.columns) > TUNED_HEAD
    return name(case.op) == "fla" and (wide or case.op == "rwkv7")


@cache
def every_configuration():
    from triton.runtime.autotuner import Autotuner

    return Autotuner.prune_configs


def tune_over(most):
    """Has Triton try `most` configurations of a kernel at most, from here on; all for None. They are compiled side by
    side, and each is timed for BRIEFLY."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    every = every_configuration()

    def some(tuner, arguments):
        found = every(tuner, arguments)
        found = found[:: -(-len(found) // most)] if most else found
        given = {name: x for name, x in arguments.items() if name not in ("grid", "warmup")}
        with ThreadPoolExecutor(COMPILED_AT_ONCE) as threads:
            list(threads.map(partial(compile_one, tuner, tuner.nargs | given), found))
        return found

    Autotuner.prune_configs, Autotuner.do_bench = some, staticmethod(partial(do_bench, **BRIEFLY))


def compile_one(tuner, arguments, config):
    """A kernel in one configuration; what cannot be compiled the tuner meets again, and passes over."""
    try:
        tuner.fn.warmup(grid=(1,), **arguments, **config.all_kwargs())
    except Exception:
        return


def bound(case, arrays, keywords):
    """What is to be timed."""
    if few_configurations(case) or every_configuration.cache_info().currsize:
        tune_over(MOST if few_configurations(case) else None)
    return (Pullback if case.backward else Call)(case, arrays, keywords)


class Call:
    """The peer's function bound to a case's arrays."""

    def __init__(self, case, arrays, keywords):
        import torch

        self.function = function(case.op)
        self.step, self.keywords = case.step, {"scale": case.D**-0.5, **MEANING.get(case.op, {})}
        if case.gate == "rwkv7" and not case.step:
            self.keywords |= BOUNDED
        given = {name: torch.from_dlpack(x) for name, x in arrays.items()}
        self.arrays = [x if name == "u" else self.in_its_layout(x) for name, x in given.items()]
        if case.gate == "reset":
            gate = next(n for n, name in enumerate(arrays) if name in ("g", "w"))
            self.arrays[gate] = self.arrays[gate].clamp(min=-1e30)  # it takes no -inf
        if case.step:
            self.keywords |= {"initial_state": torch.from_dlpack(keywords["state"]).clone(), "output_final_state": True}
        if case.sequences:
            self.keywords["cu_seqlens"] = torch.tensor(keywords["cu_seqlens"], device="cuda")

    def in_its_layout(self, x):
        return x[:, None] if self.step else x.transpose(1, 2).contiguous()

    def __call__(self):
        import torch

        with torch.inference_mode():
            return self.function(*self.arrays, **self.keywords)

    def results(self):
        """(o,) as ours lies, of a step (o, state)."""
        o, state = self()
        return (o[:, 0], state) if self.step else (o.transpose(1, 2),)


class Pullback(Call):
    """The gradients of all arrays, after a forward pass that leaves what they need."""

    def __init__(self, case, arrays, keywords):
        import torch

        super().__init__(case, arrays, keywords)
        self.do = self.in_its_layout(torch.from_dlpack(keywords["do"]))
        self.o, _ = self.function(*(x.requires_grad_() for x in self.arrays), **self.keywords)

    def __call__(self):
        import torch

        return torch.autograd.grad(self.o, self.arrays, self.do, retain_graph=True)

    def results(self):
        """In the order of the arrays, as ours lie."""
        return tuple(x if x.ndim == 2 else x.transpose(1, 2) for x in self())


def host(x):
    return x.float().cpu().numpy()


def captured(calls):
    """One call that does them all: a CUDA graph."""
    torch = sys.modules["torch"]
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay
