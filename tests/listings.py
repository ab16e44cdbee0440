"""Machine code by hand, from lines such as ``FADD R1, R2`` and ``@P1 BRA 0x80``."""

from cute_attn.lab.sass import BYTES, Instruction


def instructions(*lines: str, file: str = "", line: int = 0) -> tuple[Instruction, ...]:
    """One instruction a line, one after the other in memory; all from one source line."""
    made = []
    for n, text in enumerate(lines):
        predicate, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
        name, _, operands = rest.partition(" ")
        opcode, *modifiers = name.split(".")
        taken = tuple(filter(None, operands.replace(" ", "").split(",")))
        given = (tuple(modifiers), taken, predicate, 1, file, line)
        made.append(Instruction(BYTES * n, opcode, *given))
    return tuple(made)
