"""Terms, which products of decoding have in the place of floats, and the constants of kernels."""

from __future__ import annotations

from typing import NamedTuple

from gpt2block.config.formats import GGUF
from gpt2block.cuda.kernels import FP8, TWO_PART, Defines
from gpt2block.errors import InputError
from gpt2block.weights.gguf import UNIT

KINDS = {"float16": 1, "bfloat16": 2, TWO_PART: 3}  # numbers of lib/terms.cuh
LINE = 64  # channels in a line of terms in the order of wgmma
IN_ORDER = 2  # the width for blocks of GGUF, whose codes are stored as an mma reads them
CHUNK = 32  # inputs with one sum, for minimums of blocks of GGUF
ROUNDED = "float16"  # what x can be rounded to
ROUNDABLE = (ROUNDED, *FP8, GGUF)  # dtypes of the weights for which it can


class Terms(NamedTuple):
    """Two numbers of 16 bits for each value of a tensor, or one, in the place of its floats.

    They are for products on tensor cores (kernels_cu/lib/terms.cuh).
    """

    dtype: str  # float16, bfloat16 or two_part
    # 0: in the places of the floats; 2 (blocks of GGUF), 8 or 16: in the order in which wgmma reads
    width: int = 0
    scale: float = 1.0  # of two-part terms: a power of two, for all values
    rounded: bool = False  # to the first term of a value, the only one
    summed: bool = False  # with the sums of chunks of blocks of GGUF after them

    def with_sums(self, together: int) -> Terms:
        """These, summed where a kernel that has `together` neighbouring channels can add them."""
        of_blocks = (self.dtype, self.width, self.rounded) == (ROUNDED, IN_ORDER, True)
        return self._replace(summed=of_blocks and together % CHUNK == 0)

    @property
    def x_dtype(self) -> str | None:
        """What values are rounded to, or None."""
        return ROUNDED if self.rounded else None

    def __str__(self) -> str:
        kind = f"rounded {self.dtype}" if self.rounded else self.dtype
        return f"{kind} in the order of wgmma" if self.width else kind


def check_terms(terms: Terms | None, channels: int, together: int = 1) -> None:
    """Raise InputError unless rows of so many channels can be stored as these terms.

    together: neighbouring channels of which the kernel can store the sums.
    """
    if terms is None:
        return
    if terms.summed and (terms != terms.with_sums(together) or channels % UNIT):
        raise InputError(
            f"sums of terms of {terms}, of {together} of {channels:,} channels: expected terms in "
            f"order, {CHUNK} neighbouring channels, and rows of a multiple of {UNIT}: pass terms "
            "without sums"
        )
    multiple = LINE if terms.width else 2
    if channels % multiple:
        raise InputError(
            f"terms of {terms}: expected channels in multiples of {multiple}, got {channels:,}"
        )


def count_define(rounded: bool) -> Defines:
    """The constant of lib/terms.cuh for a kernel whose values have one term, where rounded."""
    return (("TERM_COUNT", 1),) if rounded else ()


def rounds(x_dtype: str | None, dtype: str) -> bool:
    """Whether x is rounded to x_dtype for weights of a dtype. Raises InputError."""
    if x_dtype is None:
        return False
    if x_dtype != ROUNDED or dtype not in ROUNDABLE:
        raise InputError(
            f"x_dtype {x_dtype!r}, weights of {dtype}: expected {ROUNDED}, and weights of "
            f"{', '.join(ROUNDABLE)}"
        )
    return True


def stored_defines(constant: str, terms: Terms | None) -> Defines:
    """The constants of a kernel that stores these terms; constant: the one that has their kind."""
    if terms is None:
        return ()
    width = (("TERM_WIDTH", terms.width),) if terms.width else ()
    sums = (("TERM_SUMS", 1),) if terms.summed else ()
    return ((constant, KINDS[terms.dtype]), *width, *sums, *count_define(terms.rounded))


def stored_scale(terms: Terms | None) -> float:
    """What a kernel that can store terms is told of their scale."""
    return terms.scale if terms else 1.0
