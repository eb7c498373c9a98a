"""Translate single PTX instructions to calls of the functions in ptx.h."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpt2block.emulator import ptx_arithmetic, ptx_memory, ptx_threads
from gpt2block.emulator.ptx_operands import OUT_OF_REACH, Instruction, Operand

_HANDLERS = ptx_arithmetic.HANDLERS | ptx_memory.HANDLERS | ptx_threads.HANDLERS


def _separated(text: str) -> list[str]:
    """Split operands at commas outside of braces and brackets."""
    return [each.strip() for each in re.split(r",(?![^{]*\})(?![^\[]*\])", text)] if text else []


def called(code: str, operands: str, names: Mapping[str, Operand]) -> str:
    """Return C++ statements for an instruction. names: registers by their names in PTX.

    Raises UnknownPtxError.
    """
    base, *modifiers = code.split(".")
    own = Instruction(code, base, tuple(modifiers), tuple(_separated(operands)), names)
    handler = _HANDLERS.get(base)
    if handler is None or OUT_OF_REACH.match(code):
        raise own.unknown()
    return handler(own)
