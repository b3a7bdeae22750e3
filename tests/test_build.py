"""The text of a kernel and its argument, before any compiler sees them."""

import subprocess
import sys

import numpy as np
import pytest

from linattn_np.backends.cupy.build import Kernel, pack, text


def test_importing_build_does_not_import_cupy():
    program = "import sys, linattn_np.backends.cupy.build; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_kernel_without_template_arguments_is_its_bare_name():
    assert Kernel("stages/gated_qk", (), 128).expression == "gated_qk"
    assert Kernel("stages/gated_qk", ("float", "Gla", "64"), 128).expression == "gated_qk<float, Gla, 64>"


def test_includes_are_pasted_once_and_the_others_left_alone(tmp_path):
    inner, outer = tmp_path / "inner.cuh", tmp_path / "outer.cuh"
    inner.write_text("int inner;\n")
    outer.write_text('#include "inner.cuh"\nint outer;\n')
    (tmp_path / "kernel.cu").write_text(
        '#include "inner.cuh"  // first\n#include "outer.cuh"\n#include <system.h>\nint kernel;\n')
    program = text(tmp_path / "kernel", {"inner.cuh": inner, "outer.cuh": outer})
    lines = [line for line in program.splitlines() if line]
    assert lines == [
        f'#line 1 "{tmp_path}/kernel.cu"',
        f'#line 1 "{inner}"',
        "int inner;",
        f'#line 2 "{tmp_path}/kernel.cu"',
        f'#line 1 "{outer}"',
        f'#line 2 "{outer}"',
        "int outer;",
        f'#line 3 "{tmp_path}/kernel.cu"',
        "#include <system.h>",
        "int kernel;",
    ]


def test_pack_types_each_field_by_its_value():
    args = pack(q=0x7F00_0000_0000, initial_state=None, T=np.int32(64), scale=np.float64(0.125), forward=True)
    assert args.shape == (1,) and args.nbytes == 40
    assert [args.dtype[name].str[1:] for name in args.dtype.names] == ["i8", "i8", "i8", "f8", "i8"]
    assert args[0].item() == (0x7F00_0000_0000, 0, 64, 0.125, 1)


def test_pack_refuses_what_is_neither_integer_nor_float():
    with pytest.raises(Exception, match="required argument is not an integer"):
        pack(scale=np.float32(0.5))
