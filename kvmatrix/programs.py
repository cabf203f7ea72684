"""Programs for the scheduler rig: which operations there are to draw from, how a failing one is made small, how it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Operation = Sequence[int | str]
"""A name and numbers; see :class:`kvmatrix.scheduler_rig.Rig`."""
Program = list[Operation]

# Two tiers of which either may be the smaller one: a CPU tier that is always full, and one that keeps what the device lost.
SPARE_BLOCKS = (0, 8, 20)
CPU_BLOCKS = (8, 30, 60, 100, 150)
# Few prompts, so that they come again, and prefixes that end on chunk boundaries and between them.
BRANCHES = (0, 1)
CUTS = (4, 8, 12, 20, 28)
LENGTHS = (5, 9, 13, 17, 21, 25, 29, 37, 41, 44)
HEADS = (5, 9, 13, 17, 21, 25)
ANSWERS = (1, 2, 5)
BUDGETS = (16, 7, 3)


def shrink(program: Program, fails: Callable[[Program], bool], tries: int) -> Program:
    """A smaller program that still ``fails``: spans are left out, the longest first, then numbers are made small.

    Args:
        program: one that fails.
        tries: at most so many programs are tried, so that the time is bounded and the answer always the same.
    """
    left = [tries]

    def still(candidate: Program) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(candidate)

    program = list(program)
    span = len(program) // 2
    while span and left[0] > 0:
        at = len(program) - span
        removed = False
        while at >= 0:
            candidate = program[:at] + program[at + span :]
            if still(candidate):
                program, removed = candidate, True
            at -= span
        if not removed or span > len(program):
            span //= 2
    return _smaller_numbers(program, still)


def _smaller_numbers(program: Program, still: Callable[[Program], bool]) -> Program:
    for index in range(len(program)):
        for place in range(1, len(program[index])):
            for value in (0, 1):
                operation = [*program[index][:place], value, *program[index][place + 1 :]]
                if operation == list(program[index]):
                    break
                candidate = [*program[:index], operation, *program[index + 1 :]]
                if still(candidate):
                    program = candidate
                    break
    return program


def text(program: Program) -> str:
    """A program in one line, as ``name(numbers)``."""
    return " ".join(f"{name}({','.join(map(str, numbers))})" for name, *numbers in program)
