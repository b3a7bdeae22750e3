"""Writes text with an RWKV-6 model: reads the prompt in one pass, then goes on token by token. No torch.

    python examples/rwkv6_decode.py --prompt "Emma was" --tokens 500 --temperature 0.8
"""

import argparse
import codecs
import os
import sys
import time
from itertools import islice
from pathlib import Path

from linattn_np import NotSupported
from linattn_np.models import RWKV6

MODEL = Path(__file__).parent / "data" / "austen-x060" / "model.safetensors"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, where argparse would print its usage too."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main():
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: cuda where CuPy can use it, else cpu (default)")
    parser.add_argument("--model", default=MODEL, help="a byte-level .safetensors file (default: Austen's, in data/)")
    parser.add_argument("--prompt", type=prompt, default="It is a truth universally acknowledged, that ")
    parser.add_argument("--tokens", type=whole(1), default=400, help="how many to write (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.9,
                        help="draw from the likeliest that hold this probability together (default: %(default)s)")
    parser.add_argument("--seed", type=whole(0), help="equal seeds write equal text")
    options = parser.parse_args()
    try:
        model = load(options.model, options.device)
        tokens = model.generate(options.prompt, temperature=options.temperature, top_p=options.top_p,
                                seed=options.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    write(options.prompt, islice(tokens, options.tokens))


def prompt(text) -> bytes:
    if not text:
        raise argparse.ArgumentTypeError("is empty, expected some text")
    return os.fsencode(text)


def whole(least):
    def number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"is {text!r}, expected a whole number from {least} up")
        return int(text)
    return number


def load(path, device):
    try:
        model = RWKV6.from_file(path, "cuda" if device == "auto" else device)
        say(f"device {'cuda' if device == 'auto' else device}")
    except NotSupported as why:
        if device == "cuda":
            raise
        model = RWKV6.from_file(path, "cpu")
        say(f"device cpu: {why}")
    if model.sizes["V"] != 256:
        raise ValueError(f"{path} has a vocabulary of {model.sizes['V']} tokens, expected 256: this example reads bytes")
    return model


def write(prompt, tokens):
    """The prompt and what follows, on stdout as it comes, never half a character; speeds on stderr."""
    sys.stdout.reconfigure(encoding="utf-8")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    start = time.perf_counter()
    print(decoder.decode(prompt), end="", flush=True)
    written = 0
    for token in tokens:
        if not written:
            first = time.perf_counter()
        print(decoder.decode(bytes([token])), end="", flush=True)
        written += 1
    print(decoder.decode(b"", final=True))
    decode = time.perf_counter() - first
    say(f"prefill {len(prompt)} tokens at {len(prompt) / (first - start):.0f} tokens/s")
    if written > 1:
        say(f"decode {written - 1} tokens at {(written - 1) / decode:.0f} tokens/s")


def say(line):
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:                     # whoever read has left: leave too, and let Python flush into nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
