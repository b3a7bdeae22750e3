"""The C++ text of a kernel: its `.cu` file with our own headers pasted in, and assertions that the compiler's sizes,
offsets and constants are those that the Python class declares.

NVRTC, the compile check and the CPU emulator of the tests all compile this text.
"""

import re
from functools import cache
from itertools import count
from pathlib import Path

from .arguments import WORD, offsets, size_of
from .plan import SHAPE

OPTIONS = ("-std=c++17",)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)".*$', re.MULTILINE)
# A kernel's template parameters, if it has some, and its launch bound: the threads of a block.
_BOUND = re.compile(
    r"(template <[^;{}]*>\s+)?__global__ void [^{;]*?__launch_bounds__\("
    r"((?:[^,()<>]|\([^()]*\)|<(?:[^<>]|<[^<>]*>)*>)+)"
)

# If an assertion fails, the compiler's message names both numbers, as template arguments of `Bytes`.
CHECKS = """
#line 1 "the host's declaration of sizes"
template <long long HOST, long long KERNEL> struct Bytes {
  static constexpr bool agree = HOST == KERNEL;
  static_assert(HOST == KERNEL, "the host and the kernel differ on a size, an offset or a constant");
};
template <class Kernel> struct ArgumentOf;
template <class Args> struct ArgumentOf<void(Args)> {
  using type = Args;
};
"""


@cache
def root() -> Path:
    """The folder `kernels_cu`: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"kernels_cu is neither in {package} nor in {package.parent}")


def header(name) -> Path:
    """The file of an include: a name in `kernels_cu/include`, or a path under `kernels_cu`."""
    return root() / (name if "/" in name else f"include/{name}")


def text(file, include=None) -> str:
    """The text of `file` with our own includes pasted in, each once.

    CuPy's disk cache takes the text for its key, so a changed header must change the text. `#line` directives make the
    compiler's messages name the original files. `include` maps the name of an include to a file that replaces it.
    `file` is a path under `kernels_cu`, or an absolute one, without `.cu`.
    """
    replaced = include or {}
    pasted = set()

    def paste(path):
        source = path.read_text()

        def expand(match):
            name = match[1]
            next_line = source.count("\n", 0, match.start()) + 2
            body = ""
            if name not in pasted:
                pasted.add(name)
                body = paste(replaced.get(name) or header(name))
            return f'{body}\n#line {next_line} "{path.as_posix()}"'

        return f'#line 1 "{path.as_posix()}"\n' + _INCLUDE.sub(expand, source)

    return paste(root() / f"{file}.cu")


def program(kernels, include=None) -> str:
    """The text of the kernels' file, followed by the assertions of `checks`. All kernels must be instances of templates
    in the same file."""
    (file,) = {kernel.file for kernel in kernels}
    source = text(file, include)
    bound = _BOUND.search(source)
    threads = f"{bound[1] or ''}struct LaunchBound {{ static constexpr int threads = {bound[2]}; }};\n" if bound else ""
    return source + CHECKS + threads + "".join(checks(*each, bound) for each in zip(kernels, count()))


def checks(kernel, number=0, bound=None) -> str:
    """C++ assertions that the kernel's argument struct, shared memory, constants and threads are as the class declares.
    `number`: the kernel's index in the program, for names of its own; `bound`: whether LaunchBound is defined."""
    lines = []
    if kernel.arguments:
        args = f"ArgumentsOfKernel{number}"
        lines.append(f"using {args} = ArgumentOf<decltype({kernel.expression})>::type;\n")
        lines.append(assert_equal(size_of(kernel.arguments), f"sizeof({args})"))
        lines += [assert_equal(at, f"OFFSET_OF({args}, {name})") for name, at in offsets(kernel.arguments)]
    if any(member.kind == "shape" for member in kernel.arguments):
        lines += [assert_equal(WORD * at, f"OFFSET_OF(Shape, {name})") for at, name in enumerate(SHAPE)]
    if kernel.shared_types:
        sizes = " + ".join(f"sizeof({cpp_type})" for cpp_type in kernel.shared_types)
        lines.append(assert_equal(kernel.shared_bytes, sizes))
    lines += [assert_equal(getattr(kernel, name), kernel.filled_in(cpp_name)) for cpp_name, name in kernel.constants]
    if bound:
        instance = kernel.expression.replace(kernel.name, "LaunchBound", 1)
        lines.append(assert_equal(kernel.threads, f"{instance}::threads"))
    return "".join(lines)


def assert_equal(host: int, expression: str) -> str:
    """A C++ assertion that an expression of the kernel's file has the value `host`."""
    return f"static_assert(Bytes<{host}, (long long)({expression})>::agree);\n"
