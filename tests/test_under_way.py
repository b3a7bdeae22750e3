"""`under_way.py` finds what is written to registers that a warpgroup product still reads, on every way through a
program, and nothing else.
"""

import pytest
import under_way

PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r2,%r3,%r4}, %rd1, accumulate, 1, 1, 1;"
)
COMMIT = "wgmma.commit_group.sync.aligned;"
OTHER = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f3,%f4}, {%r5,%r6,%r7,%r8}, %rd1, accumulate, 1, 1, 1;"


def wait(groups):
    return f"wgmma.wait_group.sync.aligned {groups};"


def writers(*body):
    code = "\n".join(
        (
            ".visible .entry other(.param .b64 x)\n{\nmov.u32 %r1, 0;\nret;\n}",
            ".visible .entry kernel(\n\t.param .align 64 .b8 x[8]\n)\n.maxntid 128, 1, 1\n{",
            *body,
            "ret;\n}",
        )
    )
    found = under_way.overwritten(code)
    assert all(one.function == "kernel" for one in found)
    return [one.by for one in found]


@pytest.mark.parametrize(
    "write",
    [
        "mov.u32 %r1, %r9",
        "ld.shared.v2.u32 {%r9, %r4}, [%r10]",
        "@%p1 mov.u32 %r2, 0",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10,%r11,%r12,%r3}, [%r9]",
        "shfl.sync.idx.b32 %r1|%p2, %r9, 0, 31, -1",
    ],
)
def test_a_write_before_the_wait_is_found(write):
    asm = "// begin inline asm\n{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %r9, 0;\n" + PRODUCT + "\n}"
    assert writers(asm, COMMIT, write + ";", wait(0)) == [write]
    assert writers(asm, write + ";", COMMIT, wait(0)) == [write]
    assert writers(write + ";", asm, COMMIT, wait(0), write + ";") == []


@pytest.mark.parametrize("text", ["mov.u32 %r9, %r1;", "st.shared.u32 [%r1], %r2;", "bar.sync %r1, 128;"])
def test_what_is_read_may_be_read(text):
    assert writers(PRODUCT, COMMIT, text, wait(0)) == []


def test_groups_are_counted():
    write = "mov.u32 %r1, 0"
    assert writers(PRODUCT, COMMIT, OTHER, COMMIT, wait(1), write + ";", wait(0)) == []
    assert writers(PRODUCT, COMMIT, wait(1), write + ";", wait(0)) == [write]
    assert writers(PRODUCT, wait(0), write + ";", COMMIT, wait(0)) == [write]  # waits for those that were committed
    assert writers(PRODUCT, OTHER, COMMIT, wait(1), write + ";", wait(0)) == [write]


def test_a_loop_is_followed():
    loop = ["$L__BB0_1:", PRODUCT, COMMIT]
    write, again = "mov.u32 %r1, %r9", "@%p1 bra $L__BB0_1;"
    assert writers(*loop, wait(0), write + ";", again) == []
    assert writers("$L__BB0_1:", write + ";", PRODUCT, COMMIT, again, wait(0)) == [write]
    assert writers(*loop, "@%p2 bra $L__BB0_2;", wait(0), "bra.uni $L__BB0_1;", "$L__BB0_2:", write + ";") == [write]


def test_an_operand_in_memory_holds_no_registers():
    product = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1,%f2}, %rd1, %rd2, accumulate, 1, 1, 0, 0;"
    assert writers(product, COMMIT, "mov.u64 %rd1, 0;", wait(0)) == []
