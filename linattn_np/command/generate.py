"""Writes text with an RWKV model, version 6 or 7, that continues a prompt.

    linattn-np generate --prompt "Emma was" --tokens 500 --temperature 0.8
    linattn-np generate --prompt - --save-state novel.npz --tokens 1 < novel.txt
    linattn-np generate --load-state novel.npz --prompt " And then"
    linattn-np generate --batch-file prompts.jsonl --output written.jsonl --slots 8

After Ctrl-C, SIGTERM or SIGHUP, finished texts, lines and states are kept.
"""

import json
import math
import os
import re
import select
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from .. import NotSupported, models
from ..cupy_folder import folder_for_cupy
from ..models import Batch, Bytes, Sampling, State, World, austen
from ..models.checkpoint import located
from ..models.devices import open_beside
from ..models.files import check_writable, json_object, lines, lock, replaced, same_file
from ..models.number_checks import shown
from ..models.prompt_reading import read
from ..models.rwkv.model import Model
from ..models.text import LONGEST, Request, Text, complete
from ..models.tokenizers import VOCABULARY
from .blas_threads import blas_for, where
from .cards import Cards, processes, use
from .first_loops import begun_on_numpy, compiling, with_loops
from .signals import Ended, deferred, forget_ctrl_c, noted
from .terminal import (
    add_device,
    add_tokenizer,
    bar,
    details,
    error_line,
    integer,
    some_text,
    status,
    ticking,
    to_stderr,
    to_stdout,
)

DTYPES = {"cuda": ("float32", "float16", "bfloat16", "int8"), "cpu": ("float32", "bfloat16", "int8", "int4")}
PROMPT = "It is a truth universally acknowledged, that "
ESCAPE = re.compile(r"\\(?:[\\abfnrtv'\"]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})")
TURN, TURN_ENDS = "User: {}\n\nAssistant:", "\n\n"  # the form of the conversations with which World models were trained
# {field of a line of --batch-file: its types}: the fields of `Sampling`, then all.
REAL, WHOLE = (int, float), (int,)
SAMPLING = {"temperature": REAL, "top_p": REAL, "top_k": WHOLE, "min_p": REAL, "presence": REAL, "frequency": REAL}
SAMPLING |= {"fading": REAL, "repetition": REAL, "seed": WHOLE}
LINE_FIELDS = {"prompt": (str,), "tokens": WHOLE, **SAMPLING, "stop": (str, list)}
SLOTS = 8
LONGEST_LINE = 1 << 24  # the most bytes of a line of --batch-file
MAX_LOADED_TWICE = 1 << 26  # the most bytes of a checkpoint that is loaded twice, see `begins_on_numpy`
LONGEST_PROMPT = 1 << 28  # the most bytes of stdin: a device may have no end
WARM_UP_TOKENS = 1024  # tokens of the prompt that warms up a batch: about as many as the first prompts have together


def run(options):
    options.model = Path(options.model) if options.model else austen()
    if options.words:
        if options.prompt:
            raise ValueError("argument PROMPT: does not go with --prompt, which is another one")
        options.prompt = some_text(" ".join(options.words))
    if options.escapes:
        options.prompt = options.prompt and unescaped(options.prompt)
        options.stop = options.stop and [unescaped(stop) for stop in options.stop]
    check_combination(options)
    if options.batch_file:
        write_batch(options)
        return
    open_device_early(options.device, 0)
    model, loops = load(options, make_on_cpu=begun_on_numpy if begins_on_numpy(options) else with_loops)
    options.vocabulary = tokenizer_of(options, model)  # the tokenizer itself; `options.tokenizer` is its kind
    state = load_state(options, model)
    with blas_for(model.device, model.sizes):
        (converse if options.chat else write)(options, model, state, loops)


def add_options(parser):
    add = parser.add_argument_group("the model").add_argument
    add_device(add)
    add(
        "--dtype",
        choices=("auto", *dict.fromkeys(sum(DTYPES.values(), ()))),
        default="auto",
        help="of the matrices; float16 on cuda only, int4 on the cpu only, where all but float32 need Numba; int8 on "
        "cuda needs a Hopper card. auto: the checkpoint's if that has fewer bits than 32, else float32 (default)",
    )
    add(
        "--model",
        metavar="PATH",
        help="a checkpoint, .pth, .safetensors or .gguf, or a folder of Hugging Face "
        "(default: a small model of Jane Austen's novels that comes with the package)",
    )
    add(
        "--adapter",
        metavar="FILE",
        help="a low-rank adapter of linattn-np train --lora, which is merged into the model while it is loaded",
    )
    add_tokenizer(add)

    add = parser.add_argument_group("what is read").add_argument
    add("words", nargs="*", metavar="PROMPT", help="the same as --prompt, and the same as one in quotation marks")
    add(
        "-p",
        "--prompt",
        type=some_text,
        help="- reads stdin, as does a pipe or a file there when no prompt is given; "
        f"one line end at its end is left out (default: {PROMPT!r})",
    )
    add(
        "--chat",
        action="store_true",
        help='answer the lines of stdin as an assistant, from "User:" to the stop '
        "string (default: an empty line); --prompt goes before. It wants a World model that was taught to converse: "
        "the default model is no chat model, it carries on like a novel. Ctrl-C stops an answer, and between "
        "answers the chat",
    )
    add(
        "--batch-file",
        metavar="IN.jsonl",
        help='a line {"prompt": ...} for each text, with '
        f"{', '.join(map(json.dumps, [*LINE_FIELDS][1:]))} where it differs from the options; wants --output",
    )
    add(
        "--output",
        metavar="OUT.jsonl",
        help='lines {"prompt", "text", "tokens", "finish": "stop", "length" or '
        '"end", with --logprobs "logprobs"}, each written when its text is done, and in the end put in the order of '
        "--batch-file. A text that "
        'could not go on has "finish": "error" and an "error"',
    )
    add(
        "--slots",
        type=integer(1),
        help=f"texts of --batch-file that are written side by side, on each card (default: {SLOTS})",
    )
    add(
        "--cards",
        type=integer(1),
        help="cards of this host that share --batch-file, with a process and a copy of the model each; on the cpu, "
        "processes (default: all cards for which there are texts enough, on the cpu one)",
    )
    add(
        "--load-state",
        metavar="FILE",
        help="go on from a state of --save-state: it has read everything up to the "
        "last token written. It holds no next token, so it wants a --prompt, --chat or --batch-file to read",
    )
    add(
        "--save-state",
        metavar="FILE",
        help="write the state (.npz) in the end: it has read the prompt and all that "
        "was written, a stop string too; Ctrl-C stops the text and writes the state",
    )

    add = parser.add_argument_group("what is written").add_argument
    add(
        "-n", "--tokens", type=integer(1, LONGEST), default=400, help="how many to write at most (default: %(default)s)"
    )
    add(
        "--stop",
        action="append",
        type=some_text,
        metavar="STRING",
        help="ends the text, and is not written; repeatable",
    )
    add("-e", "--escapes", action="store_true", help=r"read \n, \t, \\ and the like in --prompt and --stop")
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="0 takes the likeliest, a number near 0 draws among the likeliest; "
        "it comes before --top-k, --top-p and --min-p (default: %(default)s)",
    )
    add(
        "--temperature-last",
        action="store_true",
        help="it comes after them, as in RWKV's own program and llama.cpp: a high one then draws from no more tokens",
    )
    add(
        "--top-p",
        type=float,
        default=0.9,
        help="draw from the likeliest that hold this probability together (default: %(default)s)",
    )
    add("--top-k", type=integer(0), default=0, help="draw from so many of the likeliest; 0 is all (default)")
    add(
        "--min-p",
        type=float,
        default=0.0,
        help="draw from tokens with this part of the likeliest one's probability; 0 is all (default)",
    )
    add("--presence", type=float, default=0.0, help="lowers the logit of a token written before, once (default: 0)")
    add("--frequency", type=float, default=0.0, help="lowers it as many times as it was written (default: 0)")
    add("--fading", type=float, default=1.0, help="the factor by which both fade with every token (default: 1)")
    add(
        "--repetition",
        type=float,
        default=1.0,
        help="divides the logit of a token written before, or multiplies one below 0 (default: 1)",
    )
    add("--bias", action="append", metavar="ID=NUMBER", help="added to a token's logit; -inf bans it; repeatable")
    add("--logprobs", action="store_true", help="with --batch-file, the log of every written token's probability")
    add("--seed", type=integer(0), help="equal seeds write equal text")


def check_combination(options):
    """ValueError for options that do not go together, or files that cannot be written, before a model is loaded."""

    def conflict(which, why):
        raise ValueError(f"argument {which}: {why}")

    if options.batch_file:
        for name in ("chat", "prompt", "save_state"):
            if getattr(options, name):
                conflict("--batch-file", f"does not go with --{name.replace('_', '-')}")
        if not options.output:
            conflict("--batch-file", "wants --output")
    for name in ("output", "slots", "cards", "logprobs"):
        if getattr(options, name) and not options.batch_file:
            conflict(f"--{name}", "goes with --batch-file only")
    if options.chat and options.prompt == "-":
        conflict("--chat", "reads its lines from stdin, so --prompt cannot be -")
    dtypes = DTYPES.get(options.device)
    if dtypes and options.dtype not in ("auto", *dtypes):
        conflict(
            "--dtype", f"{options.dtype} does not go with --device {options.device}, which takes {', '.join(dtypes)}"
        )
    if options.vocab and options.tokenizer == "bytes":
        conflict("--vocab", "does not go with --tokenizer bytes")
    for name in ("output", "save_state"):
        path = getattr(options, name)
        if path:
            flag = f"--{name.replace('_', '-')}"
            try:
                check_writable(path)
            except OSError as error:
                why = error_line(error).removeprefix(path)  # ": ..."
                conflict(flag, f"{path} cannot be written{why}")
            for read_name, read_path in inputs(options):
                if same_file(path, read_path) and (name, read_name) != ("save_state", "load_state"):
                    conflict(flag, f"is the file of --{read_name.replace('_', '-')}, which would be lost")
    sampling(options)


def inputs(options):
    """Yields (name of an option, the file of it that is read)."""
    for name in ("model", "adapter", "vocab", "batch_file", "load_state"):
        if path := getattr(options, name):
            yield name, located(path) if name == "model" else path


def sampling(options, **line):
    """The `Sampling` of the options, with the values `line` in place of theirs."""
    values = {name: getattr(options, name) for name in (*SAMPLING, "temperature_last", "logprobs")}
    values["bias"] = dict(map(bias_of, options.bias or []))
    return Sampling(**values | line)


def bias_of(word) -> tuple[int, float]:
    """(id, number) from a word ID=NUMBER."""
    id, _, number = word.partition("=")
    try:
        return int(id), float(number)
    except ValueError:
        raise ValueError(f"argument --bias: is {shown(word)}, expected ID=NUMBER, as in 0=-inf") from None


def unescaped(text: str) -> str:
    r"""`text` with its \n, \t, \\, \xNN and \uNNNN replaced by the characters that they stand for in Python."""
    result = ESCAPE.sub(lambda match: match[0].encode().decode("unicode_escape"), text)
    try:
        os.fsencode(result)
    except UnicodeEncodeError as error:
        half = ascii(result[error.start])
        raise ValueError(f"argument --escapes: {half} is half a character, expected a whole one") from None
    return result


def load(options, to_stderr=to_stderr, status=status, make_on_cpu=with_loops) -> tuple:
    """(the model, a `first_loops.LoopsBeside` or None).

    to_stderr, status : the functions of `terminal`, or others that print nothing
    make_on_cpu : the function of `first_loops` that makes the model on the CPU
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
                to_stderr(where(model.device, ""))
                return model, None
            except NotSupported as why:
                if device != "auto":
                    raise
                details(str(why))
        model, loops = make_on_cpu(partial(on_the_cpu, path, dtype, options.adapter), progress, show)
    names = {"NumpyLayers": "NumPy", "NumbaLayers": "Numba"}
    library = "NumPy until Numba's loops are compiled" if loops else names[type(model.layers).__name__]
    to_stderr(where("cpu", library))
    return model, loops


def on_the_cpu(path, dtype, adapter, progress=None) -> Model:
    """The model on the CPU, after a first run, so that the speeds that are printed do not include compiling."""
    model = models.load(path, "cpu", dtype, progress, adapter=adapter)
    model.warm_up((1,), 2)
    return model


def begins_on_numpy(options) -> bool:
    """Whether NumPy may write the first tokens, while Numba's loops are compiled. Not if the checkpoint is large, since
    the model is then loaded twice; not with --seed, since NumPy's rounding differs from the loops'."""
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


# -- one text, and a conversation -------------------------------------------------------------------------------------
class Writer:
    """Reads prompts and writes answers, one after the other, of a single sequence.

    state : the sequence's state after the last answer
    loops : a `first_loops.LoopsBeside` or None
    read, read_s, written, write_s : the numbers of tokens that were read and written, and the seconds that this took
    """

    def __init__(self, options, model, state, loops):
        self.options, self.model, self.state, self.loops = options, model, state, loops
        self.tokenizer = options.vocabulary
        self.how = sampling(options, vocabulary=self.tokenizer.size)
        self.read = self.written = self.read_s = self.write_s = 0

    def answer(self, prompt: bytes, stop) -> Text:
        """Reads a prompt, and prints the text that follows token by token; `stop`: the strings that end the text.

        Raises `Ended` for a signal while the prompt is read. A later one ends the text, whose `finish` is "interrupt".
        """
        tokens, start = self.tokenizer.encode(prompt), time.perf_counter()
        with deferred() as ended:
            with status("reading ...") as show, compiling(show):

                def progress(done):
                    if number := ended():
                        raise Ended(number)
                    show(f"reading {bar(done / len(tokens))} {done} of {len(tokens)} tokens")

                # `read` leaves the last tokens, `rest`, which the batch reads; `state` is that before them.
                rest, state = read(self.model, tokens, self.state, progress)
                batch = Batch(self.model, 1)
                (slot,) = batch.join([rest], self.how, [state])
            read_time = time.perf_counter()
            text, stdout_error = Text(self.tokenizer, self.options.tokens, stop), None
            try:
                while text.finish is None:
                    if self.loops:
                        self.loops.hasten(self.model)  # gives it Numba's loops as soon as they are compiled
                    to_stdout(text.close("interrupt") if ended() else text.feed(batch.step()[slot]), end="")
                to_stdout()
            except OSError as error:  # stdout cannot be written; the state is saved nevertheless
                stdout_error = error
        self.state = batch.state(slot)
        self.read, self.read_s = self.read + len(tokens), self.read_s + read_time - start
        self.written, self.write_s = self.written + text.count, self.write_s + time.perf_counter() - read_time
        if stdout_error:
            raise stdout_error
        return text

    def save(self):
        """Writes the state of --save-state, if anything has been read."""
        if self.options.save_state and self.read:
            self.state.save(self.options.save_state)

    def tell(self):
        """Prints the speeds."""
        for phase, tokens, seconds in (("prefill", self.read, self.read_s), ("decode", self.written, self.write_s)):
            if tokens:
                to_stderr(f"{phase} {tokens} tokens at {tokens / seconds:.0f} tokens/s")


def write(options, model, state, loops):
    """Prints the prompt and the text that follows on stdout, and the speeds on stderr."""
    prompt = prompt_of(options)
    to_stdout(prompt.decode("utf-8", "replace"), end="")
    writer = Writer(options, model, state, loops)
    try:
        writer.answer(prompt, options.stop or ())
    finally:
        writer.save()
    if noted.number:  # also if the signal came with the last token
        raise Ended(noted.number)
    writer.tell()
    if loops:
        loops.wait()


def prompt_of(options) -> bytes:
    """The prompt of the options or of stdin, or the default one; ValueError if it is empty or too long."""
    if options.prompt and options.prompt != "-":
        return os.fsencode(options.prompt)
    if options.prompt == "-" or piped():
        prompt = from_stdin(lambda stdin: stdin.read(LONGEST_PROMPT + 1))
        if len(prompt) > LONGEST_PROMPT:
            raise ValueError(
                f"argument --prompt: stdin has more than {LONGEST_PROMPT:,} bytes, expected a text that ends"
            )
        prompt = prompt.removesuffix(b"\n").removesuffix(b"\r")
        if prompt:
            return prompt
        if options.prompt == "-":
            raise ValueError("argument --prompt: stdin is empty, expected some text")
    if options.load_state:
        raise ValueError("argument --load-state: wants a --prompt to read, as a state holds no next token")
    return PROMPT.encode()


def piped() -> bool:
    """Whether stdin is a file, or a pipe in which something arrives within a second. Without this limit, a pipe to
    which nothing is written would block a text with the default prompt. With `--prompt -` there is no limit."""
    kind = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISREG(kind) or stat.S_ISFIFO(kind) and bool(select.select([sys.stdin], [], [], 1)[0])


def converse(options, model, state, loops):
    """Answers the lines of stdin, until its end."""
    to_stderr(about(options, model))
    writer = Writer(options, model, state, loops)
    before = f"{options.prompt}{TURN_ENDS}" if options.prompt else ""
    try:
        while line := ask():
            if not line.strip():
                continue
            turn = before + TURN.format(line.strip())
            try:
                text = writer.answer(os.fsencode(turn), options.stop or (TURN_ENDS,))
            except Ended:  # while the prompt is read, or by a second Ctrl-C: the state is that before the turn
                to_stdout()
                continue
            finally:
                forget_ctrl_c()  # after SIGTERM or SIGHUP it raises Ended, which ends the chat
            # If the state has read the stop string, the turn has ended; after other answers its end must still be read.
            before = "" if text.finish == "stop" else TURN_ENDS
    finally:
        writer.save()
    writer.tell()


def about(options, model) -> str:
    """The first line of a chat: the model, and how it answers."""
    size = "{L} layers, {D} channels, {V:,} tokens".format(**model.sizes)
    if options.model == austen():
        kind = "which has read Jane Austen's novels alone. It carries on like one of them, and answers nothing"
    else:
        kind = f'which answers if it was taught to: "{TURN.format("...")}"'.replace("\n", "\\n")
    return f"{options.model.name}: {model.version.title}, {size}, {kind}. Ctrl-D or Ctrl-C ends the chat"


def ask() -> str:
    """The next line of stdin, "" at its end."""
    if sys.stdin.isatty():
        to_stderr("> ", end="")
    return from_stdin(lambda stdin: stdin.readline(LONGEST_PROMPT)).decode("utf-8", "surrogateescape")


def from_stdin(read) -> bytes:
    """read(stdin's bytes); an OSError names stdin."""
    try:
        return read(sys.stdin.buffer)
    except OSError as error:
        raise OSError(f"stdin cannot be read: {error.strerror or error}") from error


# -- many texts -------------------------------------------------------------------------------------------------------
class Texts:
    """The texts of --batch-file. `write_batch` passes an object to `cards.Cards.spread` as its argument `prepare`, or
    calls it directly if there is one process.

    requested : [(number of a line, its checked object)]. A text's number is its index here
    slots : the most texts that a process writes side by side
    """

    def __init__(self, options, requested):
        self.options, self.requested = options, requested
        self.slots = min(options.slots or SLOTS, len(requested))

    def __call__(self, process=0, count=1):
        """Loads the model, and checks the texts of process number `process` of `count`: every `count`-th from `process`
        on. Returns `write` for the model. Only the first process prints messages."""
        options = self.options
        if count == 1:
            open_device_early(options.device, 0)
        if process or options.cards:
            use(process, options)
        model, _ = load(options, *([quiet, no_status] if process else []))
        options.vocabulary = tokenizer_of(options, model)
        self.state = load_state(options, model)
        numbers = range(process, len(self.requested), count)
        with ThreadPoolExecutor(1) as other_thread:
            has_warm_up = model.device == "cuda" and self.slots
            warm_up = other_thread.submit(self.warm_up, model, process) if has_warm_up else None
            self.requests = {number: self.request(number) for number in numbers}
            if warm_up:
                warm_up.result()
        return partial(self.write, model)

    def warm_up(self, model, process):
        """Warms up the model. This runs in another thread, for which the device of the process must be set again."""
        if process or self.options.cards:
            use(process, self.options)
        model.warm_up((self.slots,), WARM_UP_TOKENS)

    def request(self, number):
        """The checked `Request` of text number `number`."""
        return request(self.options, self.requested[number][1], self.requested[number][0], self.state)

    def write(self, model, numbers):
        """Yields (number, object of its line of --output) of the texts `numbers`, in the order in which they are done.
        A number may be any text's, also of another process's part."""
        taken_numbers = []

        def requests():
            for number in numbers:
                taken_numbers.append(number)
                yield self.requests.pop(number, None) or self.request(number)

        slots = max(1, self.slots)
        with blas_for(model.device, model.sizes), deferred() as ended:
            for index, written, text in complete(model, self.options.vocabulary, requests(), slots, ended):
                number = taken_numbers[index]
                line = {
                    "prompt": self.requested[number][1]["prompt"],
                    "text": written,
                    "tokens": text.count,
                    "finish": text.finish,
                }
                line |= {"logprobs": text.logprobs} if self.options.logprobs else {}
                yield number, line | ({"error": text.error} if text.error else {})
            if number := ended():
                raise Ended(number)


def quiet(line):
    """`to_stderr`, without printing."""


@contextmanager
def no_status(first):
    """`status`, without printing."""
    yield quiet


def open_device_early(device, process):
    """Begins, when a process has just started, what loading the model on a GPU would wait for. `open_beside` opens the
    device of process number `process` in another thread, while this thread imports the modules that use it."""
    if device == "cpu":
        return
    folder_for_cupy()
    open_beside(process)
    with suppress(ImportError, RuntimeError):  # loading the model will raise it again
        from cupy.cuda import cublas, nvrtc  # noqa: F401

        from ..models.rwkv import cuda_layers  # noqa: F401

        nvrtc.getVersion()


def write_batch(options):
    """Writes a line of --output for every line of --batch-file, in their order. If the work ends early, the texts that
    are done are written."""
    with Cards(partial(open_device_early, options.device)) as cards:
        if (options.cards or 1) > 1:
            cards.begin(min(options.cards, os.cpu_count()))  # if there are fewer texts or cards, some will have no work
        requested = list(read_lines(options))
        count = processes(options, len(requested), options.slots or SLOTS)
        prepare = Texts(options, requested)
        texts = cards.spread(prepare, count, len(requested)) if count > 1 else prepare()(range(len(requested)))
        write_texts(options, requested, texts)


def write_texts(options, requested, texts):
    """Writes the lines of --output from `texts`, an iterator of (number, line); prints progress and errors."""
    output, errors, count, start = Output(options.output), {}, 0, time.perf_counter()

    def draw():
        done, seconds = len(output.lines), time.perf_counter() - start
        show(f"writing {bar(done / max(1, len(requested)))} {done} of {len(requested)} texts, {seconds:.0f} s")

    try:
        with status("writing ...") as show, closing(texts), ticking(draw):
            for number, line in texts:
                output.add(number, line)
                count += line["tokens"]
                if "error" in line:
                    errors[number] = line["error"]
    finally:
        done = output.finish(len(requested))
        if done < len(requested):
            to_stderr(
                f"{done} of {len(requested)} texts are done, "
                + (f"{options.output} has them" if done else f"{options.output} is not written")
            )
    speed = count / (time.perf_counter() - start)
    to_stderr(f"{done} texts, {count} tokens written at {speed:.0f} tokens/s, with the time of the prompts")
    if errors:
        number = min(errors)
        place = f"{options.batch_file}, line {requested[number][0]}"
        raise ValueError(f"{place}: {errors[number]}; the other texts are in {options.output}")


class Output:
    """The file of --output. A text is written as soon as it is done; at the end the texts are sorted by their numbers.

    The first text replaces an older file. If --output is no regular file, all texts are written at the end.
    """

    def __init__(self, path):
        self.path, self.lines, self.file, self.size = path, {}, None, 0
        self.regular = not os.path.exists(path) or os.path.isfile(path)
        if self.regular and os.path.exists(path):
            with open(path, "ab") as file:
                lock(file.fileno(), path)  # OSError if another process writes its texts there

    def add(self, number, line):
        """Adds the line of text number `number`."""
        encoded = f"{json.dumps(line, ensure_ascii=False)}\n".encode()
        if self.regular:
            self.append(encoded)
        self.lines[number] = encoded

    def append(self, encoded):
        """Appends a line to the file; OSError, without a part of the line, if it cannot be written."""
        if self.file is None:
            with replaced(self.path):  # makes an empty file in place of an older one
                pass
            self.file = open(self.path, "ab", buffering=0)
            lock(self.file.fileno(), self.path)
        try:
            written = self.file.write(encoded)
            while written < len(encoded):
                written += self.file.write(encoded[written:])
            self.size += written
        except OSError as error:
            self.file.truncate(self.size)
            raise OSError(error.errno, error.strerror, self.path) from None

    def finish(self, count) -> int:
        """Sorts the texts in the file; returns their number. Writes the file again if somebody has removed it.

        count : the number of texts that were asked for; if it is 0, the file will be empty
        """
        exists = False
        if self.file:
            os.fsync(self.file.fileno())
            with suppress(FileNotFoundError):
                exists = os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno()))
            self.file.close()
        if (self.lines or not count) and not (exists and list(self.lines) == sorted(self.lines)):
            try:
                with replaced(self.path) as file:
                    file.writelines(self.lines[number] for number in sorted(self.lines))
            except OSError as error:
                if not exists:
                    raise
                to_stderr(f"{error_line(error)}: the texts stay in the order in which they were done")
        return len(self.lines)


def read_lines(options):
    """Yields ``(number, object)`` of all lines of --batch-file that are not blank, after checking them."""
    try:
        with open(options.batch_file, "rb") as file:
            for number, raw in lines(file, LONGEST_LINE):
                if raw.strip():
                    yield number, line_of(raw, number)
    except ValueError as error:
        raise ValueError(f"{options.batch_file}, {error}") from None


def line_of(raw, number):
    """The checked object of a line; a ValueError has the number of the line."""
    try:
        line = json_object(raw)
        check_line(line)
        return line
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def check_line(line):
    """ValueError if the object of a line is wrong."""
    if not line.get("prompt"):
        raise ValueError('expected an object {"prompt": "some text", ...}')
    for name, value in line.items():
        if name not in LINE_FIELDS:
            raise ValueError(f"has an unknown {shown(name)}, expected {', '.join(LINE_FIELDS)}")
        if not isinstance(value, LINE_FIELDS[name]) or isinstance(value, bool):
            wanted = " or ".join(wanted_type.__name__ for wanted_type in LINE_FIELDS[name])
            raise ValueError(f"{name} is a {type(value).__name__}, expected {wanted}")
    for name, least, most, limit in (("tokens", 1, LONGEST, f"to {LONGEST}"), ("seed", 0, math.inf, "up")):
        if not least <= line.get(name, least) <= most:
            raise ValueError(f"{name} is {shown(line[name])}, expected a whole number from {least} {limit}")


def request(options, line, number, state) -> Request:
    """The request of a line of --batch-file, after checking it."""
    tokenizer, stop = options.vocabulary, line.get("stop", options.stop or [])
    stop = [stop] if isinstance(stop, str) else stop
    try:
        Text(tokenizer, stop=stop)  # for its check of the stop strings
        how = sampling(options, vocabulary=tokenizer.size, **{name: line[name] for name in SAMPLING if name in line})
        return Request(tokenizer.encode(line["prompt"]), how, line.get("tokens", options.tokens), stop, state)
    except ValueError as error:
        raise ValueError(f"{options.batch_file}, line {number}: {error}") from None
