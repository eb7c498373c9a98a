"""Terms, which products of decoding have in the place of floats, and the constants of kernels."""

from __future__ import annotations

from typing import NamedTuple

from gpt2block.cuda.kernels import Defines
from gpt2block.errors import InputError

LINE = 64  # channels in a line of terms in the order of wgmma


class Terms(NamedTuple):
    """Two numbers of 16 bits for each value of a tensor, in the place of its floats.

    They are for products on tensor cores (kernels_cu/lib/terms.cuh).
    """

    dtype: str  # float16 or bfloat16
    width: int = 0  # 0: in the places of the floats; 8 or 16: in the order in which wgmma reads

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
    """The constants of a kernel that stores these terms; constant: the one that has their dtype."""
    if terms is None:
        return ()
    return ((constant, 1 + (terms.dtype == "bfloat16")), *order_define(terms))
