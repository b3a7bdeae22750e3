"""Compiles kernels with NVRTC and ptxas from pip wheels alone: no driver, no toolkit, no header directory."""

import json
import multiprocessing
import re
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import convergence
import disk
import under_way
from cuda.bindings import nvrtc

OPTIONS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space")  # what CuPy compiles with

# Of warpgroup products: waits inserted, products serialised, budgets ignored.
ADVICE = re.compile(r"\(C75\d\d\)[^\n]*")


@dataclass(frozen=True)
class Usage:
    registers: int
    spilled: int  # bytes stored and loaded
    stack: int  # bytes of a thread: what was spilled, and arrays whose places are not known when it is compiled


SIZES = tuple(field.name for field in fields(Usage))


@dataclass(frozen=True)
class Ptx:
    code: str
    symbols: dict  # of expressions


@cache
def ptxas() -> str:
    """The path of the assembler; FileNotFoundError where its wheel is not installed."""
    try:
        wheel = distribution("nvidia-cuda-nvcc")
    except PackageNotFoundError:
        raise FileNotFoundError("the wheel nvidia-cuda-nvcc is not installed") from None
    (path,) = (file for file in wheel.files if file.name == "ptxas")
    return str(wheel.locate_file(path))


@cache
def versions() -> str:
    """Of the translator and the assembler."""
    assembler = subprocess.run([ptxas(), "--version"], capture_output=True, text=True, check=True).stdout
    return f"{release()}\n{assembler}"


def release() -> tuple[int, int]:
    """NVRTC's."""
    status, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def translate(text, expressions, arch, *options) -> Ptx:
    """PTX of some instances of one program, for the virtual `arch`, such as compute_80; RuntimeError with the
    compiler's log where it refuses.
    """
    program, _ = _compiled(text, expressions, f"-arch={arch}", *options)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    code = bytearray(size)
    nvrtc.nvrtcGetPTX(program, code)
    symbols = {}
    for expression in expressions:
        _, symbol = nvrtc.nvrtcGetLoweredName(program, expression.encode())
        symbols[expression] = symbol.decode()
    nvrtc.nvrtcDestroyProgram(program)
    return Ptx(code.rstrip(b"\0").decode(), symbols)


def read(text, expressions, arch):
    """RuntimeError with the compiler's log where its front end refuses some instances of one program. Code for the
    linker to optimise is what comes out of it: nothing else is made of it, which takes a tenth of the time at most.
    """
    program, _ = _compiled(text, expressions, f"-arch={arch}", "-dlto")
    nvrtc.nvrtcDestroyProgram(program)


def assemble(ptx, arch, expressions=None) -> dict[str, Usage]:
    """What these instances, or all, use on `arch`; RuntimeError where the assembler refuses or advises, or a warp's
    threads do not meet.
    """
    asked = expressions or list(ptx.symbols)
    entries = [word for expression in asked if expressions for word in ("--entry", ptx.symbols[expression])]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernels.ptx"
        source.write_text(ptx.code)
        made = Path(folder) / "kernels.cubin"
        command = [ptxas(), "-v", f"-arch={arch}", *entries, "-o", str(made), str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
        log = result.stdout + result.stderr
        if result.returncode:
            raise RuntimeError(log)
        _check_convergence(made.read_bytes(), arch)
    return _usages(log, {expression: ptx.symbols[expression] for expression in asked})


def compile_text(text, expressions, arch) -> dict[str, Usage]:
    """What each instance of one program uses on `arch`, translated and assembled by NVRTC as CuPy asks it to.
    RuntimeError as `assemble`.
    """
    program, log = _compiled(text, expressions, f"-arch={arch}", "--ptxas-options=-v")
    symbols = {name: nvrtc.nvrtcGetLoweredName(program, name.encode())[1].decode() for name in expressions}
    made = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, made)
    nvrtc.nvrtcDestroyProgram(program)
    _check_convergence(bytes(made), arch)
    return _usages(log, symbols)


def measured(program, targets) -> dict[str, dict[str, Usage]]:
    """What instances of one file use, by target and expression: `targets` has, for each virtual architecture to
    translate for, the real ones to assemble for and the instances that are asked of them; `program` makes the text of
    some. RuntimeError where something is written to registers that products under way read, and as `assemble`.

    Read from the disk where the same instance was compiled before by the same compiler.
    """
    usage = defaultdict(dict)
    for virtual, cards in targets.items():
        # No other has products that are under way, or copies by one thread.
        modules = (under_way, convergence) if virtual == "compute_90a" else ()
        checks = [Path(module.__file__).read_text() for module in modules]
        key = partial(disk.key, versions(), *OPTIONS, *SIZES, *checks, virtual)
        missing = {}  # where it goes, by target and instance
        for arch, kernels in cards.items():
            for kernel in kernels:
                stored = disk.folder("compiled") / f"{key(arch, kernel.expression, program([kernel]))}.json"
                if stored.exists():
                    usage[arch][kernel.expression] = Usage(*json.loads(stored.read_text()))
                else:
                    missing[arch, kernel] = stored
        if not missing:
            continue
        instances = [*dict.fromkeys(kernel for _, kernel in missing)]
        ptx = translate(program(instances), [kernel.expression for kernel in instances], virtual)
        if found := under_way.overwritten(ptx.code):
            raise RuntimeError("\n".join(map(str, found)))
        for arch in dict.fromkeys(arch for arch, _ in missing):
            asked = {kernel.expression: stored for (other, kernel), stored in missing.items() if other == arch}
            for name, used in assemble(ptx, arch, [*asked]).items():
                usage[arch][name] = used
                disk.write(asked[name], json.dumps(astuple(used)))
    return usage


def same_on(text, expressions, virtual, other) -> bool:
    """Whether the compiler's front end makes the same functions of a program for two virtual architectures: only then
    does the code, or a header, not ask which one it is, but to say how many blocks share a multiprocessor.
    """
    return _front_end().submit(_same_on, text, expressions, virtual, other).result()


@cache
def _front_end():
    """A process of its own: once NVRTC was told not to optimise, its later translations in the process may spill."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _same_on(text, expressions, virtual, other):
    return len({_functions(translate(text, expressions, arch, "-Ofc=max").code) for arch in (virtual, other)}) == 1


def _functions(code):
    """PTX up to the debugger's data, without what names the target or the place in the source. Nor with how many blocks
    share a multiprocessor, which bounds registers alone, or constants, whose uses are numbers.
    """
    lines = code.split(".section", 1)[0].splitlines()
    names = ".version", ".target", ".loc", ".file", "//", ".minnctapersm", ".global"
    return "\n".join(line for line in lines if not line.lstrip().startswith(names))


def _compiled(text, expressions, *options):
    """(the program, the compiler's log)."""
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"", 0, [], [])
    for expression in expressions:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    every = [option.encode() for option in (*OPTIONS, *options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(every), every)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    log = log.rstrip(b"\0").decode()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        nvrtc.nvrtcDestroyProgram(program)
        raise RuntimeError(log)
    return program, log


def _check_convergence(cubin, arch):
    """RuntimeError where a copying thread does not meet its warp."""
    if arch == "sm_90a" and (found := convergence.apart(cubin)):
        raise RuntimeError("\n".join(found))


def _usages(log, symbols):
    """From the assembler's log. RuntimeError where it says that warpgroup products will not run as they are written."""
    if advice := ADVICE.findall(log):
        raise RuntimeError("\n".join(advice))
    found = {}
    for entry in log.split("Compiling entry function '")[1:]:
        memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry)
        stack, *spills = map(int, memory.groups())
        registers = re.search(r"Used (\d+) registers", entry)
        found[entry.split("'", 1)[0]] = Usage(int(registers[1]), sum(spills), stack)
    return {expression: found[symbol] for expression, symbol in symbols.items()}
