"""The constants of kernels that store terms for the next product (kernels_cu/lib/terms.cuh)."""

from __future__ import annotations

from gpt2block.cuda.kernels import Defines
from gpt2block.errors import InputError
from gpt2block.plan import Terms

LINE = 64  # channels in a line of terms in the order of wgmma


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
