"""GGUF files as gpt2block writes them, of which a test may change metadata, tensors and types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, TokenType, quant_shape_from_byte_shape
from numpy.typing import NDArray

from gpt2block.files.checkpoints import Checkpoint, TensorSource, gguf_saving


def tensors_of(model: TensorSource) -> dict[str, NDArray[Any]]:
    """The tensors by GGUF's names, matrices (outputs, inputs), as llama.cpp stores them."""
    return dict(gguf_saving.tensors_of(model))


def metadata_of(model: TensorSource) -> dict[str, Any]:
    """Return a model's metadata without a tokenizer; a test may change values."""
    return gguf_saving.metadata_of(model.config)


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any]],
    kind: Callable[[str], str] = lambda name: "F32",
) -> Path:
    """Write a file. kind: the type of a matrix by its name; uint8 is written as it is."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    data = []
    for name, array in tensors.items():
        stored, shape = kind(name) if array.ndim > 1 else "F32", array.shape
        if array.dtype == np.uint8:
            shape = tuple(quant_shape_from_byte_shape(shape, GGMLQuantizationType[stored]))
            data.append(array)
        elif stored == "F64":
            data.append(np.ascontiguousarray(array, np.float64))
        else:
            rows = np.ascontiguousarray(array, np.float32)
            data.append(gguf_saving.encoded(name, rows, stored))
        kinds[name] = stored, shape
    gguf_saving.write(path, metadata, kinds, data)
    return path


def save(path: Path, source: Path, kind: Callable[[str], str] = lambda name: "F32") -> Path:
    """Write a Hugging Face checkpoint as GGUF."""
    checkpoint = Checkpoint.open(source)
    return write(path, metadata_of(checkpoint), tensors_of(checkpoint), kind)


def tokenizer_keys(
    model: str, tokens: Sequence[str], types: Sequence[TokenType], **more: Any
) -> dict[str, Any]:
    """The keys of a tokenizer."""
    keys = {"model": model, "tokens": list(tokens), "token_type": [int(kind) for kind in types]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**keys, **more}.items()}
