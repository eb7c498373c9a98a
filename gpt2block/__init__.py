"""gpt2block: a standalone GPT-2 runtime of readable CUDA kernels, with a NumPy meaning of each.

`import gpt2block` touches neither CuPy nor a GPU; `gpt2block.ops` does, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpt2block import doctor, reference
from gpt2block.block import Block, Comparison, solve
from gpt2block.config import SIZES, GPT2Config
from gpt2block.errors import CheckpointError, DeviceError, InputError, KernelError
from gpt2block.model import GPT2
from gpt2block.sampling import Sampling
from gpt2block.split import SplitMatrix
from gpt2block.weight_matrix import WeightMatrix
from gpt2block.weights import BlockWeights, GPT2Weights, random_input

if TYPE_CHECKING:
    from gpt2block import ops as ops

__all__ = [
    "GPT2",
    "SIZES",
    "Block",
    "BlockWeights",
    "CheckpointError",
    "Comparison",
    "DeviceError",
    "GPT2Config",
    "GPT2Weights",
    "InputError",
    "KernelError",
    "Sampling",
    "SplitMatrix",
    "WeightMatrix",
    "random_input",
    "reference",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name == "ops":  # not in __all__, so that `import *` needs no CuPy
        problem = doctor.cuda_problem()
        if problem:
            raise AttributeError(f"gpt2block.ops cannot be used: {problem}")
        return import_module("gpt2block.ops")
    raise AttributeError(f"module 'gpt2block' has no attribute {name!r}")
