"""The values that options of `generate` and other subcommands stand for: the model, its tokenizer, the state from which
a text goes on, and how tokens are drawn.

`options` is the namespace of a subcommand's parsed options; `options.model` is a path.
"""

import os
from contextlib import suppress
from functools import partial

from .. import NotSupported, models
from ..cupy_folder import folder_for_cupy
from ..models import Bytes, Sampling, State, World
from ..models.devices import open_beside
from ..models.number_checks import shown
from ..models.rwkv.model import Model
from ..models.tokenizers import VOCABULARY
from .blas_threads import computes_on
from .first_loops import with_loops
from .terminal import bar, details, status, to_stderr

# {device: the values of --dtype that go with it}
DTYPES = {"cuda": ("float32", "float16", "bfloat16", "int8"), "cpu": ("float32", "bfloat16", "int8", "int4")}
LIBRARIES = {"NumpyLayers": "NumPy", "NumbaLayers": "Numba"}  # {class of a model's layers on the CPU: what computes}
# {field of `Sampling` that is an option: its types in a line of --batch-file}
REAL, WHOLE = (int, float), (int,)
SAMPLING: dict[str, tuple[type, ...]] = {
    **{"temperature": REAL, "top_p": REAL, "top_k": WHOLE, "min_p": REAL, "presence": REAL, "frequency": REAL},
    **{"fading": REAL, "repetition": REAL, "seed": WHOLE},
    **{"temperature_last": (bool,), "bias": (dict,), "logprobs": (bool,)},
}
MAX_LOADED_TWICE = 1 << 26  # bytes; a smaller checkpoint may be loaded twice: `begins_on_numpy`
SHORTEST_PROMPT = 2  # tokens; one token alone is read by a step, which takes other loops


# -- the model --------------------------------------------------------------------------------------------------------
def open_device_early(device, process):
    """Does, first of all in a process, what `load` on a GPU would wait for: another thread opens the device, while this
    one imports the modules that use it. It may be left out, and it raises nothing: `load` then says what is wrong.

    device : the value of --device; of "cpu" nothing is done
    process : the number of the process among those that share a batch, and of the device that it opens
    """
    if device == "cpu":
        return
    with suppress(NotSupported, ImportError, RuntimeError):
        folder_for_cupy()  # before an import of CuPy
        open_beside(process)
        from cupy.cuda import cublas, nvrtc  # noqa: F401

        from ..models.rwkv import cuda_layers  # noqa: F401

        nvrtc.getVersion()  # loads NVRTC's library


def load(options, to_stderr=to_stderr, status=status, make_on_cpu=with_loops) -> tuple:
    """(the model of --model, --adapter, --device and --dtype; a `first_loops.LoopsBeside` or None). "auto" takes the
    GPU if it can be used, and has such a dtype, else the CPU.

    to_stderr, status : the functions of `terminal`, or others that print nothing
    make_on_cpu : `with_loops` or `begun_on_numpy` of `first_loops`, which call `on_the_cpu`
    """
    path, device = options.model, options.device
    if device == "auto" and options.dtype not in ("auto", *DTYPES["cuda"]):
        device = "cpu"
    dtype = None if options.dtype == "auto" else options.dtype
    with status(f"loading {path.name} ...") as show:

        def progress(done, total):
            show(f"loading {path.name} {bar(done / total)} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

        if device != "cpu":
            try:
                model = models.load(path, "cuda", dtype, progress, adapter=options.adapter)
                to_stderr(computes_on(model.device))
                return model, None
            except NotSupported as why:
                if device != "auto":
                    raise
                details(str(why))
        model, loops = make_on_cpu(partial(on_the_cpu, path, dtype, options.adapter), progress, show)
    library = "NumPy until Numba's loops are compiled" if loops else LIBRARIES[type(model.layers).__name__]
    to_stderr(computes_on("cpu", library))
    return model, loops


def on_the_cpu(path, dtype, adapter, progress=None) -> Model:
    """The model on the CPU, after a first prompt and step, which compile the loops: so the speeds that are printed do
    not include that."""
    model = models.load(path, "cpu", dtype, progress, adapter=adapter)
    model.warm_up(batches=(1,), prompt=SHORTEST_PROMPT)
    return model


def begins_on_numpy(options) -> bool:
    """Whether NumPy may write the first tokens while another process loads the model, too, and compiles Numba's loops.
    Not if the checkpoint is large, as it is loaded twice; not with --seed, as NumPy's rounding is not the loops'."""
    return options.seed is None and os.path.isfile(options.model) and os.path.getsize(options.model) < MAX_LOADED_TWICE


def tokenizer_of(options, model):
    """The tokenizer of --tokenizer and --vocab for this model; ValueError if it does not fit the model."""
    size, kind = model.sizes["V"], options.tokenizer
    if kind == "auto":
        kind = "world" if options.vocab else {256: "bytes", 65536: "world"}.get(size)
        if kind is None:
            raise ValueError(
                f"{options.model} has a vocabulary of {size} tokens, expected 256 (bytes) or 65536 "
                "(World); --tokenizer says which it is"
            )
    beside = options.model / VOCABULARY
    vocabulary = options.vocab or (beside if beside.is_file() else None)
    tokenizer = Bytes() if kind == "bytes" else World.from_file(vocabulary) if vocabulary else World.installed()
    if tokenizer.size > size:
        raise ValueError(
            f"{options.model} has a vocabulary of {size} tokens, expected at least {tokenizer.size} "
            f"for --tokenizer {kind}"
        )
    return tokenizer


def load_state(options, model) -> State | None:
    """The state of --load-state on the model's device, or None."""
    if not options.load_state:
        return None
    state = State.load(options.load_state)
    if (rows := state.att_shift.shape[1]) != 1:
        raise ValueError(f"{options.load_state} holds {rows} sequences, expected one")
    try:
        return model.on_device(state)
    except ValueError as error:
        raise ValueError(f"{options.load_state} is the state of another model: {error}") from None


# -- how tokens are drawn ---------------------------------------------------------------------------------------------
def sampling(options, **instead):
    """The `Sampling` of the options, with these values instead of theirs: fields of a line of --batch-file, and the
    tokenizer's `vocabulary`, which no option has."""
    values = {name: getattr(options, name) for name in SAMPLING}
    values["bias"] = dict(map(bias_of, options.bias or []))
    return Sampling(**values | instead)


def bias_of(word) -> tuple[int, float]:
    """(id, number) from a word ID=NUMBER."""
    id, _, number = word.partition("=")
    try:
        return int(id), float(number)
    except ValueError:
        raise ValueError(f"argument --bias: is {shown(word)}, expected ID=NUMBER, as in 0=-inf") from None
