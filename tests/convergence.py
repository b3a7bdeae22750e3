"""Whether a warp's threads meet again before it acts as a whole, in machine code of sm_90.

One thread of a warp starts a tensor copy, in a branch of its own. The assembler has the warp meet where all ways out of
a branch meet (BSSY names the barrier, BSYNC waits at it). If one of these ways also leaves a loop, that place is behind
the loop: then the thread that copies comes to the loop's barriers by itself, and a barrier that counts warps is never
over. The source does not show that, and so no emulator does. `__syncwarp` behind the branch mends it.
"""

import struct
from typing import NamedTuple

SIZE = 16  # bytes of an instruction
BRANCH, CALL, RETURN, EXIT = 0x947, 0x944, 0x950, 0x94D
BEGIN, MEET = 0x945, 0x941  # BSSY, BSYNC
MEET_ALL = 0x948, 0x348  # WARPSYNC of all threads, or of some; with a target it begins a collective,
END_OF_COLLECTIVE = 0x91B  # in which threads apart do together what a warp does as a whole, and are apart behind it
BY_ONE_THREAD = {0x5B4: "tensor copy", 0x3B5: "tensor store", 0x3B6: "tensor sum", 0x3BA: "bulk copy"}
BY_A_WARP = {
    **dict.fromkeys((0x31D, 0x51D, 0xB1D), "barrier"),
    **dict.fromkeys((0x9C5, 0xDF0), "warpgroup product"),
    **dict.fromkeys((0x83B, 0x844), "matrix copy"),
    **dict.fromkeys((0x23C, 0x237), "matrix product"),
    0x9C8: "change of registers",
}
ALWAYS = 7  # the predicate that is true


class Instruction(NamedTuple):
    operation: int
    predicate: int
    register: int  # of BEGIN and MEET: which barrier
    jump: int  # to the target, in instructions
    divides: bool  # of a branch that is for threads apart

    @classmethod
    def of(cls, low, high):
        words = high << 64 | low
        distance = (words >> 34 & (1 << 48) - 1) << 8 | low >> 16 & 255
        signed = distance - (distance >> 55 << 56)
        return cls(low & 0xFFF, low >> 12 & 15, low >> 16 & 15, 1 + signed * 4 // SIZE, bool(high >> 27 & 1))


def apart(cubin) -> list[str]:
    """The copies by one thread from which a way leads to what a warp does as a whole without meeting the warp."""
    found = []
    for function, text in functions(cubin).items():
        code = [Instruction.of(*words) for words in struct.iter_unpack("<QQ", text)]
        for at, one in enumerate(code):
            alone = one.operation in BY_ONE_THREAD and one.predicate == ALWAYS  # else the warp has stayed together
            reached = comes_to(code, at + 1) if alone else None
            if reached is not None:
                places = f"{SIZE * at:#x} to the {BY_A_WARP[code[reached].operation]} at {SIZE * reached:#x}"
                found.append(f"{function}: from the {BY_ONE_THREAD[one.operation]} at {places} no warp meets")
    return found


def functions(cubin):
    """The machine code of every kernel of an ELF file, by symbol."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + n * size) for n in range(count)]
    named = [(cubin[headers[names][4] + header[0] :].split(b"\0", 1)[0].decode(), *header[4:]) for header in headers]
    return {name[6:]: cubin[at : at + length] for name, at, length in named if name.startswith(".text.")}


def comes_to(code, start):
    """The first instruction of a whole warp that a thread may come to by itself; None if there is none."""
    calls = [(at, at + one.jump) for at, one in enumerate(code) if one.operation == CALL]
    todo, seen = [(start, frozenset())], set()
    while todo:
        at, begun = place = todo.pop()
        if place in seen or at >= len(code):
            continue
        seen.add(place)
        one = code[at]
        if one.operation in BY_A_WARP:
            return at
        if one.operation in MEET_ALL and one.jump == 1 or one.operation == MEET and one.register not in begun:
            continue
        if one.operation == BEGIN:
            begun |= {one.register}
        elif one.operation == MEET:
            begun -= {one.register}
        if one.operation == BRANCH:
            todo.append((at + one.jump, begun))
        if one.operation == RETURN:  # behind every call of the function, which begins at the last place that is called
            called = max((target for _, target in calls if target <= at), default=None)
            todo += [(call + 1, begun) for call, target in calls if target == called]
        stays = one.operation not in (BRANCH, RETURN, EXIT) or one.predicate != ALWAYS
        if stays and not (one.operation == BRANCH and one.divides):
            if one.operation in MEET_ALL:
                at = next(n for n in range(at, len(code)) if code[n].operation == END_OF_COLLECTIVE)
            todo.append((at + 1, begun))
    return None
