"""Terms, which products of decoding have in the place of floats, and the constants of kernels."""

from __future__ import annotations

from typing import NamedTuple

from gpt2block.cuda.kernels import TWO_PART, Defines
from gpt2block.errors import InputError

KINDS = {"float16": 1, "bfloat16": 2, TWO_PART: 3}  # numbers of lib/terms.cuh
LINE = 64  # channels in a line of terms in the order of wgmma


class Terms(NamedTuple):
    """Two numbers of 16 bits for each value of a tensor, in the place of its floats.

    They are for products on tensor cores (kernels_cu/lib/terms.cuh).
    """

    dtype: str  # float16, bfloat16 or two_part
    width: int = 0  # 0: in the places of the floats; 8 or 16: in the order in which wgmma reads
    scale: float = 1.0  # of two-part terms: a power of two, for all values

    def __str__(self) -> str:
        return f"{self.dtype} in the order of wgmma" if self.width else self.dtype


def check_terms(terms: Terms | None, channels: int) -> None:
    """Raise InputError unless rows of so many channels can be stored as these terms."""
    if terms is None:
        return
    multiple = LINE if terms.width else 2
    if channels % multiple:
        raise InputError(
            f"terms of {terms}: expected channels in multiples of {multiple}, got {channels:,}"
        )


def order_define(terms: Terms | None) -> Defines:
    """The constant of lib/terms.cuh for a kernel that stores these terms."""
    return (("TERM_WIDTH", terms.width),) if terms and terms.width else ()


def stored_defines(constant: str, terms: Terms | None) -> Defines:
    """The constants of a kernel that stores these terms; constant: the one that has their kind."""
    if terms is None:
        return ()
    return ((constant, KINDS[terms.dtype]), *order_define(terms))


def stored_scale(terms: Terms | None) -> float:
    """What a kernel that can store terms is told of their scale."""
    return terms.scale if terms else 1.0
