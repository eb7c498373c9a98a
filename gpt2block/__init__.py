"""gpt2block: GPT-2, Llama, Qwen, Gemma and others on readable CUDA kernels, with NumPy references.

`import gpt2block` imports no other module: each name is imported when it is first used. Only
`gpt2block.ops` needs CuPy and a GPU.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # True for type checkers; importing typing would be slow
if TYPE_CHECKING:
    from typing import Any

    from gpt2block import block as block
    from gpt2block import cuda as cuda
    from gpt2block import emulator as emulator
    from gpt2block import engine as engine
    from gpt2block import errors as errors
    from gpt2block import files as files
    from gpt2block import judge as judge
    from gpt2block import model as model
    from gpt2block import models as models
    from gpt2block import ops as ops
    from gpt2block import reference
    from gpt2block.block import Block, LlamaBlock, solve
    from gpt2block.bulk.predictor import Predictor
    from gpt2block.engine.explain import Page
    from gpt2block.engine.generation.scoring import Score, ScoredToken, ScoredTokens
    from gpt2block.engine.generation.sequences import Generation
    from gpt2block.engine.inspect.compare import Comparison, Comparisons
    from gpt2block.engine.inspect.lens import LogitLens
    from gpt2block.engine.model import KVCache
    from gpt2block.errors import (
        CheckpointError,
        DeviceError,
        InputError,
        KernelError,
        UnknownOption,
    )
    from gpt2block.files.checkpoints import Checkpoint
    from gpt2block.files.parameters.gpt2 import BlockWeights, GPT2Weights, random_input
    from gpt2block.files.parameters.llama import LlamaBlockWeights, LlamaWeights
    from gpt2block.judge.kernel_check import check_kernel
    from gpt2block.judge.verdict import Verdict
    from gpt2block.model import GPT2, Llama, Model, from_pretrained
    from gpt2block.models.config import SIZES, GPT2Config
    from gpt2block.models.config.llama import LlamaConfig, RopeScaling
    from gpt2block.models.weights.hi_lo import HiLoMatrix
    from gpt2block.models.weights.matrix import WeightMatrix
    from gpt2block.sampling import Sampling

    __version__: str

__all__ = [
    "GPT2",
    "SIZES",
    "Block",
    "BlockWeights",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "Comparisons",
    "DeviceError",
    "GPT2Config",
    "GPT2Weights",
    "Generation",
    "HiLoMatrix",
    "InputError",
    "KVCache",
    "KernelError",
    "Llama",
    "LlamaBlock",
    "LlamaBlockWeights",
    "LlamaConfig",
    "LlamaWeights",
    "LogitLens",
    "Model",
    "Page",
    "Predictor",
    "RopeScaling",
    "Sampling",
    "Score",
    "ScoredToken",
    "ScoredTokens",
    "UnknownOption",
    "Verdict",
    "WeightMatrix",
    "check_kernel",
    "from_pretrained",
    "random_input",
    "reference",
    "solve",
]

_NAMES = {  # module → names that the package exports from the module
    "files.parameters.gpt2": "BlockWeights GPT2Weights random_input",
    "files.parameters.llama": "LlamaBlockWeights LlamaWeights",
    "block": "Block LlamaBlock solve",
    "bulk.predictor": "Predictor",
    "files.checkpoints": "Checkpoint",
    "engine.inspect.compare": "Comparison Comparisons",
    "models.config": "SIZES GPT2Config",
    "models.config.llama": "LlamaConfig RopeScaling",
    "errors": "CheckpointError DeviceError InputError KernelError UnknownOption",
    "engine.explain": "Page",
    "engine.inspect.lens": "LogitLens",
    "judge.kernel_check": "check_kernel",
    "judge.verdict": "Verdict",
    "model": "GPT2 Llama Model from_pretrained",
    "engine.model": "KVCache",
    "sampling": "Sampling",
    "engine.generation.sequences": "Generation",
    "engine.generation.scoring": "Score ScoredToken ScoredTokens",
    "models.weights.matrix": "WeightMatrix",
    "models.weights.hi_lo": "HiLoMatrix",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = (  # submodules that are imported on attribute access
    *("block", "cuda", "emulator", "engine", "errors", "files", "judge", "model", "models"),
    *("ops", "reference"),
)


if not TYPE_CHECKING:  # __getattr__ would hide unknown names from type checkers

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value: object = import_module("gpt2block.cuda.doctor").version()
        elif name in _MODULE_OF:
            value = getattr(import_module(f"gpt2block.{_MODULE_OF[name]}"), name)
        elif name in _MODULES:
            return import_module(f"gpt2block.{name}")  # import_module sets the attribute
        else:
            raise _no_attribute(name)
        globals()[name] = value
        return value


def _no_attribute(name: str) -> Exception:
    """Return the AttributeError for an unknown name; for an operation's name, suggest modules."""
    instead = None
    if not name.startswith("_") and name in import_module("gpt2block.reference").CONTRACTS:
        on_gpu = name in import_module("gpt2block.ops").__all__
        instead = f"gpt2block.reference.{name} with NumPy"
        instead += f", gpt2block.ops.{name} with CuPy" if on_gpu else ""
    errors = import_module("gpt2block.errors")
    error: Exception = errors.no_attribute("", sys.modules[__name__], name, instead)
    return error


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_MODULES})
