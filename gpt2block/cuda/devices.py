"""Names of devices: "cpu", "cuda", "cuda:1", and "cuda:0,1" for several GPUs."""

from __future__ import annotations

from gpt2block.cuda import cupy, doctor
from gpt2block.cuda.cards import gpu
from gpt2block.errors import Argument, DeviceError, InputError, shown


def resolve_device(device: str | None) -> int | None:
    """Return the CUDA device index of a name such as "cuda:1"; None for the CPU.

    device None: the GPU if CUDA works, else the CPU. Raises DeviceError with the reason if CUDA
    cannot be used, InputError for an unknown name, and for several GPUs.
    """
    indices = resolve_devices(device)
    if len(indices) > 1:
        raise InputError(Argument("device"), f" {device!r}: expected one GPU here")
    return indices[0] if indices else None


def resolve_devices(device: str | None) -> tuple[int, ...]:
    """Return the CUDA device indices of a name such as "cuda:1" or "cuda:0,1"; () for the CPU.

    device None: the GPU if CUDA works, else the CPU. Raises as `resolve_device` does.
    """
    if device is not None and not isinstance(device, str):
        raise InputError(f"device: expected a string such as 'cuda:0', got {shown(device)}")
    if device == "cpu" or (device is None and doctor.cuda_problem()):
        return ()
    device = "cuda" if device is None else device
    kind, colon, index = device.partition(":")
    indices = index.split(",") if colon else []
    if kind != "cuda" or not all(each.isdecimal() and len(each) < 10 for each in indices):
        raise InputError(
            "device: expected 'cuda', 'cuda:N', 'cuda:N,M' for several GPUs, or 'cpu' (by default "
            f"the GPU if there is one), got {device!r}"
        )
    doctor.require_cuda(Argument("device"), f" {device!r}")
    count = cupy.cuda.runtime.getDeviceCount()
    numbers = tuple(map(int, indices)) or (int(cupy.cuda.Device().id),)
    if len(set(numbers)) < len(numbers):
        raise InputError(Argument("device"), f" {device!r}: expected each GPU once")
    if max(numbers) >= count:
        here = f"this machine has {count}, cuda:0…cuda:{count - 1}"
        raise DeviceError(Argument("device"), f" {device!r}: {here}")
    return numbers


def reads_blocks(device: str | None) -> bool:
    """Return whether `device` is a GPU that supports GGUF weights. Raises like `resolve_device`."""
    indices = resolve_devices(device)
    return bool(indices) and all(gpu(each).has_mma for each in indices)
