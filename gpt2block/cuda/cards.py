"""GPUs by compute capability, their properties, and the card whose kernels this process runs.

`tools/as_gpu.py` names another card in the environment variable GPT2BLOCK_AS_GPU. The package then
chooses kernels as on that card, within its shared memory, and runs them on the GPU at hand. CuPy
compiles PTX for a card that is older than this GPU, and the driver translates the PTX. Kernels of a
newer card are compiled for the GPU at hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from gpt2block.cuda import cupy, replaced
from gpt2block.errors import InputError

AS_GPU = "GPT2BLOCK_AS_GPU"  # such as "8.9" or "8.9 101376", with the bytes of shared memory
MAX_SHARED = "MaxSharedMemoryPerBlockOptin"


class Card(NamedTuple):
    """A GPU. max_shared: bytes of shared memory that a block may request.

    gb_s: the memory's bandwidth in GB/s, as NVIDIA states it, for the first card that is named.
    """

    name: str
    sms: int
    max_shared: int
    gb_s: float


CARDS: Mapping[int, Card] = {  # compute capability: card
    75: Card("T4", 40, 64 << 10, 320),
    80: Card("A100", 108, 163 << 10, 2039),
    86: Card("RTX 3090", 82, 99 << 10, 936),
    89: Card("RTX 4090, L4", 128, 99 << 10, 1008),
    90: Card("H200", 132, 227 << 10, 4800),
    100: Card("B200", 148, 227 << 10, 8000),
    120: Card("RTX 5090", 170, 99 << 10, 1792),
}


class Properties(NamedTuple):
    """Properties of the GPUs of a compute capability, by which kernels are chosen.

    has_mma: mma.sync of float16. has_bf16: mma.sync of bfloat16 and of tf32, and asynchronous
    copies to shared memory; without them, bfloat16 is rounded to float16. has_overlap: launches
    that overlap the previous kernel. has_wgmma: products of warpgroups, and the architecture
    sm_90a. most_clustered: maximum blocks per cluster.
    """

    has_mma: bool = False
    has_bf16: bool = False
    has_overlap: bool = False
    has_wgmma: bool = False
    most_clustered: int = 1

    @property
    def has_clusters(self) -> bool:
        return self.most_clustered > 1


AMPERE = Properties(has_mma=True, has_bf16=True)
PROPERTIES = (  # from this compute capability on
    (75, Properties(has_mma=True)),
    (80, AMPERE),
    (90, AMPERE._replace(has_overlap=True, has_wgmma=True, most_clustered=16)),
    (100, AMPERE._replace(has_overlap=True, most_clustered=8)),
)


def properties(capability: int) -> Properties:
    """Return the properties of the GPUs of a compute capability."""
    return next((has for least, has in reversed(PROPERTIES) if capability >= least), Properties())


def gpu(device: int | None = None) -> Properties:
    """Return the properties of a device, by default of the current device."""
    return properties(capability_of(device))


class Chosen(NamedTuple):
    """The card whose kernels this process runs."""

    capability: int
    max_shared: int

    def describe(self) -> str:
        """Return the card, its shared memory, and the GPU for which its kernels are compiled."""
        own = f"compute capability {dotted(self.capability)} ({CARDS[self.capability].name})"
        code = "PTX of this capability" if compiled_for() else "compiled for the GPU at hand"
        return f"{own}, {self.max_shared:,} bytes of shared memory, {code}"


def dotted(capability: int) -> str:
    """Return a compute capability as text, such as "8.9"."""
    return f"{capability // 10}.{capability % 10}"


@cache
def chosen() -> Chosen | None:
    """Return the card that the environment names, or None for the GPU at hand."""
    text = os.environ.get(AS_GPU)
    return parse(text) if text else None


def parse(text: str) -> Chosen:
    """Return the card of a text such as "8.9" or "8.9 101376". Raises InputError."""
    known = {dotted(capability): capability for capability in CARDS}
    name, _, nbytes = text.partition(" ")
    if name not in known or not (nbytes.isdecimal() or not nbytes):
        raise InputError(
            f"{AS_GPU}: expected one of {', '.join(known)}, and perhaps the bytes of shared memory "
            f"of a block, got {text!r}"
        )
    return Chosen(known[name], int(nbytes or CARDS[known[name]].max_shared))


def capability_of(device: int | None = None) -> int:
    """Return the compute capability, such as 90, for which kernels of a device are chosen.

    device: by default the current device.
    """
    return _capability(cupy.cuda.Device(device).id)  # an emulated device has another index


@cache
def _capability(device: int) -> int:
    own = int(cupy.cuda.Device(device).compute_capability)
    card = None if replaced() else chosen()
    if card is None:
        return own
    pairs = zip(properties(card.capability), properties(own), strict=True)
    if any(needed > there for needed, there in pairs):
        raise InputError(
            f"{AS_GPU}: a GPU of compute capability {dotted(own)} cannot run the kernels of "
            f"{dotted(card.capability)}: name an older card"
        )
    return card.capability


@cache
def attribute_of(device: int, name: str) -> int:
    """Return an attribute of a device, such as "MultiProcessorCount", with a card's limits."""
    own = int(cupy.cuda.Device(device).attributes[name])
    card = None if replaced() else chosen()
    return min(own, card.max_shared) if card and name == MAX_SHARED else own


@cache
def compiled_for() -> str | None:
    """Let CuPy compile PTX for the chosen card, and return its architecture.

    Return None if there is no such card, if the card is not older than the GPU, or if the driver
    does not take PTX of this version of NVRTC.
    """
    card = None if replaced() else chosen()
    if card is None or card.capability >= int(cupy.cuda.Device().compute_capability):
        return None
    nvrtc, flag = cupy.cuda.nvrtc, f"-arch=compute_{card.capability}"
    program = nvrtc.createProgram('extern "C" __global__ void f() {}', "card.cu", (), ())
    nvrtc.compileProgram(program, (flag,))
    try:
        cupy.cuda.function.Module().load(nvrtc.getPTX(program))
    except cupy.cuda.driver.CUDADriverError:  # CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        return None
    finally:
        nvrtc.destroyProgram(program)
    # The architecture is a part of the key in CuPy's cache of compiled kernels.
    cupy.cuda.compiler._get_arch_for_options_for_nvrtc = lambda arch=None: (flag, "ptx")
    return flag.removeprefix("-arch=")
