"""Adapters (LoRA) in peft's format, and checkpoints with which they are merged in float64."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gpt2block import Model
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.config import ModelConfig

ALL = r"(q|k|v|o|gate|up|down|qkv|gate_up|out|in)_proj|c_attn|c_proj|c_fc|fc[12]|lm_head"
USUAL = "(q|v)_proj|c_attn"  # modules that peft adapts by default
Factors = dict[str, np.ndarray]


def save_base(folder: Path, config: ModelConfig, seed: int = 0) -> Path:
    """Write a folder with random weights."""
    model = Model[Any].from_tensors(config, random_model(seed, config), "cpu", "float32")
    return model.save_pretrained(folder)


def save_adapter(
    folder: Path, base: Path, seed: int = 1, rank: int = 3, modules: str = ALL, **settings: Any
) -> Path:
    """Write an adapter of all modules of a folder whose names end with one of `modules`."""
    rng, factors = np.random.default_rng(seed), Factors()
    tensors = load_file(base / "model.safetensors")
    if "lm_head.weight" not in tensors and "lm_head" in modules:
        tensors["lm_head.weight"] = next(
            v for k, v in tensors.items() if re.search("wte|embed_", k)
        )
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or not re.fullmatch(rf"(.*\.)?({modules})", module):
            continue
        N, K = weight.shape[::-1] if "c_" in module else weight.shape
        for factor, shape in (("A", (rank, K)), ("B", (N, rank))):
            values = rng.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[1]))
            factors[f"base_model.model.{module}.lora_{factor}.weight"] = values
    folder.mkdir()
    own = {"peft_type": "LORA", "r": rank, "lora_alpha": 2.0, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def _embedding(tensors: Factors) -> np.ndarray:
    return next(each for name, each in tensors.items() if re.search("wte|embed_tokens", name))


def merge(folder: Path, base: Path, adapter: Path, scale: float) -> Path:
    """Write a copy of a folder to whose matrices the products of an adapter's factors are added."""
    shutil.copytree(base, folder)
    tensors, factors = (
        load_file(each)
        for each in (base / "model.safetensors", adapter / "adapter_model.safetensors")
    )
    for name in factors:
        if ".lora_A." in name:
            a, b = (factors[each].astype(np.float64) for each in (name, name.replace("_A.", "_B.")))
            weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
            if weight not in tensors:  # lm_head was tied to the embedding
                tensors[weight] = _embedding(tensors).copy()
            delta = scale * (b @ a)
            own = tensors[weight]
            tensors[weight] = (own + (delta.T if "c_" in weight else delta)).astype(own.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder
