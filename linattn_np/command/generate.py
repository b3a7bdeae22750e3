"""Writes text with an RWKV model, version 6 or 7, that continues a prompt.

    linattn-np generate --prompt "Emma was" --tokens 500 --temperature 0.8
    linattn-np generate --prompt - --save-state novel.npz --tokens 1 < novel.txt
    linattn-np generate --load-state novel.npz --prompt " And then"
    linattn-np generate --batch-file prompts.jsonl --output written.jsonl --slots 8

After Ctrl-C, SIGTERM or SIGHUP, finished texts, lines and states are kept.
"""

import json
import os
import re
import select
import stat
import sys
import time
from pathlib import Path

from ..models import Batch, austen
from ..models.checkpoint import located
from ..models.files import check_writable, same_file
from ..models.prompt_reading import read
from ..models.text import LONGEST, Text
from .batch_texts import LINE_FIELDS, SLOTS, write_batch
from .blas_threads import blas_for
from .first_loops import begun_on_numpy, compiling, with_loops
from .option_values import DTYPES, begins_on_numpy, load, load_state, open_device_early, sampling, tokenizer_of
from .signals import Ended, deferred, forget_ctrl_c, noted
from .terminal import add_device, add_tokenizer, bar, error_line, integer, some_text, status, to_stderr, to_stdout

PROMPT = "It is a truth universally acknowledged, that "
ESCAPE = re.compile(r"\\(?:[\\abfnrtv'\"]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})")
TURN, TURN_ENDS = "User: {}\n\nAssistant:", "\n\n"  # the form of the conversations with which World models were trained
LONGEST_PROMPT = 1 << 28  # the most bytes of stdin: a device may have no end


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
    for title, add_group in (("the model", add_model), ("what is read", add_reading), ("what is written", add_writing)):
        add_group(parser.add_argument_group(title).add_argument)


def add_model(add):
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
        help="a low-rank adapter of linattn-np train --lora, or its folder; merged into the model while it is loaded",
    )
    add_tokenizer(add)


def add_reading(add):
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
        '"end", where wanted "logprobs"}, each written when its text is done, and in the end put in the order of '
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


def add_writing(add):
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
    add(
        "--bias",
        action="append",
        metavar="ID=NUMBER",
        help="added to a token's logit; -inf bans it; repeatable. In a line of --batch-file an object, such as "
        '{"0": -Infinity, "261": 1.5}',
    )
    add(
        "--logprobs",
        action="store_true",
        help="tell the natural log of the probability that the model gave each written token: on stderr, a line for "
        "each, or in --output",
    )
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
    for name in ("output", "slots", "cards"):
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
            yield name, located(path, name)


def unescaped(text: str) -> str:
    r"""`text` with its \n, \t, \\, \xNN and \uNNNN replaced by the characters that they stand for in Python."""
    result = ESCAPE.sub(lambda match: match[0].encode().decode("unicode_escape"), text)
    try:
        os.fsencode(result)
    except UnicodeEncodeError as error:
        half = ascii(result[error.start])
        raise ValueError(f"argument --escapes: {half} is half a character, expected a whole one") from None
    return result


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
            text, tokens_written, stdout_error = Text(self.tokenizer, self.options.tokens, stop), [], None
            try:
                while text.finish is None:
                    if self.loops:
                        self.loops.hasten(self.model)  # gives it Numba's loops as soon as they are compiled
                    if ended():
                        piece = text.close("interrupt")
                    else:
                        tokens_written.append(batch.step()[slot])
                        piece = text.feed(tokens_written[-1])
                    to_stdout(piece, end="")
                to_stdout()
            except OSError as error:  # stdout cannot be written; the state is saved nevertheless
                stdout_error = error
        self.state = batch.state(slot)
        self.read, self.read_s = self.read + len(tokens), self.read_s + read_time - start
        self.written, self.write_s = self.written + text.count, self.write_s + time.perf_counter() - read_time
        if stdout_error:
            raise stdout_error
        for token, logprob in zip(tokens_written, batch.sequences[slot].sampler.logprobs):
            to_stderr(f"{logprob:9.4f}  {self.tokenizer.decode([token])!r}")
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
    prompt, writer = prompt_of(options), Writer(options, model, state, loops)
    to_stdout(prompt.decode("utf-8", "replace"), end="")
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
    if options.model.resolve() in (austen(), austen(7)):
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
