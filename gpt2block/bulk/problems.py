"""What a record raised: its own error, or one that the worker has to hear of."""

from __future__ import annotations

from typing import NamedTuple

from gpt2block.errors import CheckpointError, DeviceError, InputError, KernelError, printable

# Interrupts, and errors of the model or the device: no record is at fault.
_OF_NO_RECORD = (
    KeyboardInterrupt, SystemExit, GeneratorExit, CheckpointError, DeviceError, KernelError
)  # fmt: skip


class Problem(NamedTuple):
    """Why a record has no result."""

    reason: str
    no_memory: bool = False  # which may be the machine's fault rather than the record's


def problem_of(error: BaseException) -> Problem:
    """The problem of the record that raised `error`, which is raised again if it is no record's.

    BaseException, as a tokenizer written in Rust raises its panics as such.
    """
    if isinstance(error, MemoryError):
        return Problem(printable(f"not enough memory: {error}"), True)
    of_cuda = "CUDA" in type(error).__name__ or type(error).__module__.startswith("cupy")
    if isinstance(error, _OF_NO_RECORD) or of_cuda:
        raise error
    if isinstance(error, InputError):
        return Problem(str(error))
    return Problem(printable(f"{type(error).__name__}: {error}"))
