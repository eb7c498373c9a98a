"""Operands of tensor-core products of decoding: 16-bit numbers that replace the floats of x."""

from __future__ import annotations

from typing import NamedTuple

from gpt2block.checks import check_choice
from gpt2block.cuda.formats import GGUF
from gpt2block.cuda.kernels import FP8, HI_LO, STORAGE, Defines
from gpt2block.errors import InputError
from gpt2block.models.weights.gguf import UNIT
from gpt2block.ops.call import UncheckedCall, storage

KINDS = {"float16": 1, "bfloat16": 2, HI_LO: 3}  # dtype of terms → constant of lib/operands.cuh
LINE = 64  # channels per line of terms in the order of wgmma
IN_ORDER = 2  # Operand.width for GGUF blocks, whose codes are stored in the order of mma operands
CHUNK = 32  # channels of x per sum; minimums of GGUF blocks are multiplied by these sums
ROUNDED = "float16"  # dtype that x can be rounded to
ROUNDABLE = (ROUNDED, *FP8, GGUF)  # dtypes of weights for which x can be rounded


class Operand(NamedTuple):
    """Format of x of a product that has one or two 16-bit numbers (terms) for each float.

    Tensor-core products read such tensors (kernels_cu/lib/operands.cuh).
    """

    dtype: str  # float16, bfloat16 or hi_lo
    # 0: terms replace the floats in place; 2 (GGUF blocks), 8 or 16: in the order that wgmma reads
    width: int = 0
    scale: float = 1.0  # hi/lo terms: power of two by which all values are divided
    rounded: bool = False  # whether only the first term of each value is used
    summed: bool = False  # whether sums of CHUNK channels are stored after all terms

    @property
    def for_blocks(self) -> bool:
        """Whether products with GGUF blocks read this format."""
        return (self.dtype, self.width, self.rounded) == (ROUNDED, IN_ORDER, True)

    def with_sums(self, together: int) -> Operand:
        """Return this operand with sums, if GGUF blocks read it and the kernel can add them.

        together: neighbouring channels that the kernel computes together.
        """
        return self._replace(summed=self.for_blocks and together % CHUNK == 0)

    @property
    def x_dtype(self) -> str | None:
        """The dtype to which values are rounded, or None if they are not rounded."""
        return ROUNDED if self.rounded else None

    def __str__(self) -> str:
        kind = f"rounded {self.dtype}" if self.rounded else self.dtype
        return f"{kind} in the order of wgmma" if self.width else kind


def ordered(operand: Operand | None) -> bool:
    """Return whether an operand has the order of terms that wgmma and mma with blocks read."""
    return operand is not None and operand.width > 0


def head_multiple(operand: Operand | None) -> int:
    """Return a divisor of the channels of heads to which products of such x can apply RoPE."""
    return LINE if ordered(operand) else 16


def check_operand(operand: Operand | None, channels: int, together: int = 1) -> None:
    """Raise InputError unless rows of `channels` channels can be stored as this operand.

    together: neighbouring channels that the kernel computes together, and can therefore add.
    """
    if operand is None:
        return
    if operand.summed and (operand != operand.with_sums(together) or channels % UNIT):
        raise InputError(
            f"sums of terms of {operand}, of {together} of {channels:,} channels: expected rounded "
            f"terms of width {IN_ORDER}, {CHUNK} neighbouring channels, and rows of a multiple of "
            f"{UNIT} channels: pass terms without sums"
        )
    multiple = LINE if operand.width else 2
    if channels % multiple:
        raise InputError(
            f"terms of {operand}: expected channels in multiples of {multiple}, got {channels:,}"
        )


def written_dtype(unchecked: UncheckedCall, name: str) -> str:
    """Return the checked option dtype of a call, by default the dtype of out, or float32.

    The dtype is float32 if out is an `Operand`. name: operation, for the InputError otherwise.
    """
    dtype, to_operand = unchecked.options["dtype"], unchecked.options["to_operand"]
    if dtype is None:
        dtype = "float32" if unchecked.out is None else storage(unchecked.out)
    check_choice("dtype", dtype, STORAGE)
    if to_operand and dtype != "float32":
        raise InputError(f"{name}: terms of {to_operand}: expected out in float32, got {dtype}")
    return str(dtype)


def count_define(rounded: bool) -> Defines:
    """Return the constant of lib/operands.cuh for one term per value; () unless `rounded`."""
    return (("OPERAND_TERMS", 1),) if rounded else ()


def rounds(x_dtype: str | None, dtype: str) -> bool:
    """Return whether x is rounded to x_dtype. Raises InputError if the weights do not permit it."""
    if x_dtype is None:
        return False
    if x_dtype != ROUNDED or dtype not in ROUNDABLE:
        raise InputError(
            f"x_dtype {x_dtype!r}, weights of {dtype}: expected {ROUNDED}, and weights of "
            f"{', '.join(ROUNDABLE)}"
        )
    return True


def stored_defines(constant: str, operand: Operand | None) -> Defines:
    """Return constants for a kernel that stores an operand. constant: macro of the format."""
    if operand is None:
        return ()
    width = (("OPERAND_WIDTH", operand.width),) if operand.width else ()
    sums = (("OPERAND_SUMS", 1),) if operand.summed else ()
    return ((constant, KINDS[operand.dtype]), *width, *sums, *count_define(operand.rounded))


def stored_scale(operand: Operand | None) -> float:
    """Return the scale argument of a kernel that can store an operand; 1.0 for floats."""
    return operand.scale if operand else 1.0
