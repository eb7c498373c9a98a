"""`Problem`: the error of one record, as opposed to an error of the model or the device."""

from __future__ import annotations

from typing import NamedTuple

from gpt2block.errors import CheckpointError, DeviceError, InputError, KernelError, printable

# Interrupts, and errors of the model or the device, which no record causes.
_NOT_FROM_RECORD = (
    KeyboardInterrupt, SystemExit, GeneratorExit, CheckpointError, DeviceError, KernelError
)  # fmt: skip


class Problem(NamedTuple):
    """Why a record has no result."""

    reason: str
    no_memory: bool = False  # the machine may be the cause rather than the record


def problem_of(error: BaseException) -> Problem:
    """Return the Problem of the record that raised `error`; re-raise an error of no single record.

    error: a BaseException, as a tokenizer written in Rust raises its panics as such.
    """
    if isinstance(error, MemoryError):
        return Problem(printable(f"not enough memory: {error}"), True)
    of_cuda = "CUDA" in type(error).__name__ or type(error).__module__.startswith("cupy")
    if isinstance(error, _NOT_FROM_RECORD) or of_cuda:
        raise error
    if isinstance(error, InputError):
        return Problem(str(error))
    return Problem(printable(f"{type(error).__name__}: {error}"))
