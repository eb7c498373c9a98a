"""The constants of kernels that store terms for the next product (kernels_cu/lib/terms.cuh)."""

from __future__ import annotations

from gpt2block.cuda.kernels import Defines
from gpt2block.plan import Terms


def order_define(terms: Terms | None) -> Defines:
    """The constant of lib/terms.cuh for a kernel that stores these terms."""
    return (("TERM_WIDTH", terms.width),) if terms and terms.width else ()


def stored_defines(constant: str, terms: Terms | None) -> Defines:
    """The constants of a kernel that stores these terms; constant: the one that has their dtype."""
    if terms is None:
        return ()
    return ((constant, 1 + (terms.dtype == "bfloat16")), *order_define(terms))
