"""Requirements of kernels on tensor cores, and how blocks share a multiprocessor's memory."""

from __future__ import annotations

MMA_CAPABILITY = 80  # of the oldest GPU that has mma.sync for 16-bit floats with 16 values of K
HOPPER_CAPABILITY = 90  # exactly: no other GPU has wgmma
MULTIPLE = 8  # of N and K of a product: rows are copied in 16 bytes
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each block


def room(most_shared: int, blocks: int) -> int:
    """Bytes of shared memory for each of `blocks` on a multiprocessor.

    most_shared: the bytes that a block may request.
    """
    return (most_shared + RESERVED) // blocks - RESERVED
