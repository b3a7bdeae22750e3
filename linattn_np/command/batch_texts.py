"""The texts of `generate --batch-file`: reads a line for each text, shares the texts among processes, and writes a line
for each as soon as it is done.
"""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial

from ..models.files import json_object, lines, lock, replaced
from ..models.number_checks import shown
from ..models.text import LONGEST, Request, Text, complete
from .blas_threads import blas_for
from .cards import Cards, processes, use
from .option_values import SAMPLING, WHOLE, load, load_state, open_device_early, sampling, tokenizer_of
from .signals import Ended, deferred
from .terminal import bar, error_line, status, ticking, to_stderr

LINE_FIELDS = {"prompt": (str,), "tokens": WHOLE, **SAMPLING, "stop": (str, list)}  # {field of a line: its types}
SLOTS = 8  # texts that are written side by side, by default
LONGEST_LINE = 1 << 24  # the most bytes of a line of --batch-file
WARM_UP_TOKENS = 1024  # tokens of the prompt that warms up a batch: about as many as the first prompts have together


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


# -- the work of a process ---------------------------------------------------------------------------------------------
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
                request = self.requested[number][1]
                line = {
                    "prompt": request["prompt"],
                    "text": written,
                    "tokens": text.count,
                    "finish": text.finish,
                }
                line |= {"logprobs": text.logprobs} if request.get("logprobs", self.options.logprobs) else {}
                yield number, line | ({"error": text.error} if text.error else {})
            if number := ended():
                raise Ended(number)


def quiet(line):
    """`to_stderr`, without printing."""


@contextmanager
def no_status(first):
    """`status`, without printing."""
    yield quiet


# -- the lines that are written and read -------------------------------------------------------------------------------
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
        types = LINE_FIELDS[name]
        if not isinstance(value, types) or isinstance(value, bool) and types != (bool,):
            wanted = " or ".join(wanted_type.__name__ for wanted_type in types)
            raise ValueError(f"{name} is a {type(value).__name__}, expected {wanted}")
    for name, least, most, limit in (("tokens", 1, LONGEST, f"to {LONGEST}"), ("seed", 0, math.inf, "up")):
        if not least <= line.get(name, least) <= most:
            raise ValueError(f"{name} is {shown(line[name])}, expected a whole number from {least} {limit}")


def sampling_of_line(line) -> dict:
    """The fields of `Sampling` that a line has. JSON's keys are strings: those of `bias` become ids."""
    values = {name: line[name] for name in SAMPLING if name in line}
    if "bias" in values:
        values["bias"] = {int(id) if id.isdecimal() else id: number for id, number in values["bias"].items()}
    return values


def request(options, line, number, state) -> Request:
    """The request of a line of --batch-file, after checking it."""
    tokenizer, stop = options.vocabulary, line.get("stop", options.stop or [])
    stop = [stop] if isinstance(stop, str) else stop
    try:
        Text(tokenizer, stop=stop)  # for its check of the stop strings
        how = sampling(options, vocabulary=tokenizer.size, **sampling_of_line(line))
        return Request(tokenizer.encode(line["prompt"]), how, line.get("tokens", options.tokens), stop, state)
    except ValueError as error:
        raise ValueError(f"{options.batch_file}, line {number}: {error}") from None
