"""Compiles kernels to cubins with NVRTC from pip wheels alone: no driver, no toolkit, no header directory."""

import io
import re
from dataclasses import dataclass

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions


@dataclass(frozen=True)
class Usage:
    registers: int
    spilled: int  # bytes stored and loaded


ADVICE = re.compile(
    r"\((C75\d\d)\)([^\n]*)"
)  # of warpgroup products: waits inserted, products serialised, budgets ignored


def compile_text(text, expressions, arch) -> dict[str, Usage]:
    """What each instantiation of one program uses on `arch`, with the options CuPy compiles it with.

    RuntimeError where the assembler says that warpgroup products will not run as they are written.
    """
    options = ProgramOptions(arch=arch, std="c++17", ftz=True, ptxas_options=["-v"])
    log = io.StringIO()
    code = Program(text, "c++", options).compile("cubin", name_expressions=expressions, logs=log)
    if advice := ADVICE.findall(log.getvalue()):
        raise RuntimeError("\n".join(code + text for code, text in advice))
    usage = _usage_by_symbol(log.getvalue())
    return {expression: usage[code.symbol_mapping[expression].decode()] for expression in expressions}


def translate_text(text, expressions, arch):
    """Compiles without optimising or assembling; RuntimeError with the compiler's log where it refuses."""
    options = ["-std=c++17", "-G", f"-arch={arch.replace('sm', 'compute')}"]
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"", 0, [], [])
    for expression in expressions:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(log.decode())


def _usage_by_symbol(log):
    found = {}
    for entry in log.split("Compiling entry function '")[1:]:
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        registers = re.search(r"Used (\d+) registers", entry)
        found[entry.split("'", 1)[0]] = Usage(int(registers[1]), int(spills[1]) + int(spills[2]))
    return found
