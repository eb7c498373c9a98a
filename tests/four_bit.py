"""Write checkpoints with matrices of 4 bits in the layouts of GPTQ, AWQ and compressed-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from gpt2block import LlamaConfig, LlamaWeights
from gpt2block.files.checkpoints import save_pretrained

Array = NDArray[Any]


class Layout(NamedTuple):
    """How the matrices are stored. group: inputs that share a scale, 0 for all of them."""

    method: str
    group: int = 32
    dtype: Any = np.float16
    symmetric: bool = False
    ordered: bool = False  # whether groups are those of activation order
    format: str = "gptq"

    @property
    def config(self) -> dict[str, Any]:
        """The quantization_config, as the packages GPTQModel, AutoAWQ and llmcompressor write."""
        if self.method == "gptq":
            return {"quant_method": "gptq", "bits": 4, "group_size": self.group or -1, "sym": False,
                    "desc_act": self.ordered, "checkpoint_format": self.format}  # fmt: skip
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group or -1,
                    "zero_point": True, "version": "gemm"}  # fmt: skip
        weights = {"num_bits": 4, "type": "int", "symmetric": self.symmetric, "dynamic": False,
                   "strategy": "group" if self.group else "channel",
                   "group_size": self.group or None}  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None,
                 "output_activations": None}  # fmt: skip
        return {"quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip


LAYOUTS = {
    "gptq": Layout("gptq"),
    "gptq of all inputs": Layout("gptq", group=0),
    "gptq in activation order": Layout("gptq", ordered=True),
    "gptq_v2": Layout("gptq", format="gptq_v2"),
    "awq": Layout("awq", group=128),
    "symmetric": Layout("compressed-tensors", dtype=ml_dtypes.bfloat16, symmetric=True),
    "asymmetric": Layout("compressed-tensors", dtype=ml_dtypes.bfloat16),
    "channels": Layout("compressed-tensors", group=0, symmetric=True),
    "activation order": Layout("compressed-tensors", ordered=True),
}


def words(codes: Array, axis: int, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Array:
    """Pack each eight codes along an axis into an int32. order: the code in each four bits."""
    last = np.moveaxis(codes.astype(np.uint32), axis, -1)
    last = np.pad(last, ((0, 0), (0, -last.shape[-1] % 8)))
    total = np.zeros((len(last), last.shape[-1] // 8), np.uint32)
    for i, at in enumerate(order):
        total |= last[:, at::8] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(total, -1, axis)).view(np.int32)


def stored(layout: Layout, name: str, N: int, K: int) -> tuple[dict[str, Array], Array]:
    """Return the tensors of a random matrix, and its weights (N, K) in float64."""
    rng = np.random.default_rng([N, K, len(name)])
    size = layout.group or K
    q, first = rng.integers(16, size=(N, K)), int(layout.format == "gptq" == layout.method)
    zero = rng.integers(first, 16 + first, size=(N, K // size))
    zero = np.full_like(zero, 8) if layout.symmetric else zero
    scale = (0.01 * rng.standard_normal(zero.shape)).astype(layout.dtype)
    g = np.arange(K) // size
    if layout.ordered:
        g = np.random.default_rng(K).permutation(g)  # the same for q, k and v, and for gate and up
    exact = scale.astype(np.float64)[:, g] * (q - zero[:, g]) + 0.0  # zeros have no sign
    if layout.method == "compressed-tensors":
        found = {"weight_packed": words(q, 1), "weight_scale": scale,
                 "weight_shape": np.array([N, K])}  # fmt: skip
        found |= {} if layout.symmetric else {"weight_zero_point": words(zero, 0)}
        found |= {"weight_g_idx": g.astype(np.int32)} if layout.ordered else {}
    elif layout.method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found = {"qweight": words(q.T, 1, order), "qzeros": words(zero.T, 1, order),
                 "scales": scale.T}  # fmt: skip
    else:
        found = {"qweight": words(q.T, 0), "qzeros": words(zero.T - first, 1), "scales": scale.T,
                 "g_idx": g.astype(np.int32), "bias": np.zeros(N, np.float16)}  # fmt: skip
    return {f"{name}.{kind}": np.ascontiguousarray(each) for kind, each in found.items()}, exact


def write(folder: Path, config: LlamaConfig, layout: Layout) -> tuple[Path, Path]:
    """Write a random Llama with matrices of 4 bits, and a Llama of the same weights in float32.

    Other weights are float32 numbers that float16 represents exactly.
    """
    folder.mkdir(exist_ok=True)
    plain = save_pretrained(folder / "float32", LlamaWeights.random(1, config))
    exact = load_file(plain / "model.safetensors")
    tensors: dict[str, Array] = {}
    for name, array in exact.items():
        if not name.endswith("_proj.weight"):
            exact[name] = tensors[name] = array.astype(np.float16).astype(np.float32)
            continue
        of_matrix, weights = stored(layout, name.removesuffix(".weight"), *array.shape)
        tensors |= of_matrix
        exact[name] = weights.astype(np.float32)
        np.testing.assert_array_equal(exact[name], weights)
    save_file(exact, plain / "model.safetensors")
    narrow = folder / "narrow"
    narrow.mkdir()
    save_file(tensors, narrow / "model.safetensors")
    settings = json.loads((plain / "config.json").read_text())
    settings |= {"quantization_config": layout.config}
    (narrow / "config.json").write_text(json.dumps(settings))
    return narrow, plain
