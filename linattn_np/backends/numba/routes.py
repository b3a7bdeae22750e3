"""Which kernels compute what; known without Numba."""

MODES = ("auto", "staged", "recurrent")
LONGEST_KEY = 256  # the recurrence keeps the state's columns in registers, up to this many channels
STAGES = {
    "chunk_cumsum": ("chunk_cumsum",),
    "gated_qk": ("gated_qk",),
    "inter_chunk": ("inter_chunk",),
    "intra_chunk": ("intra_chunk_below", "intra_chunk_diagonal"),
    "combine": ("combine",),
}
STAGED = tuple(kernel for stage in STAGES.values() for kernel in stage)
KERNELS = {"gla": STAGED, "rwkv6": STAGED, **STAGES, "gla_step": ("recurrent",), "rwkv6_step": ("recurrent",)}


def mode(problem) -> str:
    return "recurrent" if problem.mode == "recurrent" else "staged"
