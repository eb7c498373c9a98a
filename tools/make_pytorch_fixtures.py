"""Make tests/data/pytorch: small models saved by PyTorch, and the same numbers as safetensors.

    python tools/make_pytorch_fixtures.py

Every model has one layer of width 8. `expected-*.safetensors` hold the tensors that must be read
from the other files, under Hugging Face's names; they are written from the original tensors.

The committed files were made with torch 2.13.0. The tests do not need it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

FOLDER = Path(__file__).parent.parent / "tests" / "data" / "pytorch"
C, HEADS, N_CTX, V = 8, 2, 4, 5
CONFIG = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_head": HEADS,
    "n_embd": C,
    "n_positions": N_CTX,
    "vocab_size": V,
}
MODEL_ARGS = {"n_layer": 1, "n_head": HEADS, "n_embd": C, "block_size": N_CTX, "vocab_size": V}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Tensors = dict[str, torch.Tensor]


def main() -> None:
    torch.manual_seed(0)
    (FOLDER / "sharded").mkdir(parents=True, exist_ok=True)
    for folder in (FOLDER, FOLDER / "sharded"):
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    model = nanogpt(bias=True)
    tensors = as_hugging_face(model.state_dict())
    for name, dtype in DTYPES.items():
        stored = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        save_file(stored, FOLDER / f"expected-{name}.safetensors")
        save(stored, f"zip-{name}.bin")
        save(stored, f"legacy-{name}.bin", legacy=True)
    save({key: nn.Parameter(tensor) for key, tensor in tensors.items()}, "parameters.bin")
    save_old(tensors)
    save_strided(tensors)
    save_sharded(tensors)
    save_nanogpt(model)
    save_nanogpt_without_bias()


def save(value: Any, name: str, legacy: bool = False) -> None:
    torch.save(value, FOLDER / name, _use_new_zipfile_serialization=not legacy)


def save_old(tensors: Tensors) -> None:
    """Save files like those of old models: prefixes, a tied lm_head, integer and boolean masks."""
    old = {f"module.transformer.{name}": tensor for name, tensor in tensors.items()}
    old["module.lm_head.weight"] = old["module.transformer.wte.weight"]
    mask = torch.ones(N_CTX, N_CTX).tril().view(1, 1, N_CTX, N_CTX)
    old["module.transformer.h.0.attn.bias"] = mask.to(torch.uint8)
    old["module.transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save(old, "old-masks.bin", legacy=True)
    old["module.transformer.h.0.attn.bias"] = mask.to(torch.bool).expand(2, 1, N_CTX, N_CTX)
    save(old, "old-masks-zip.bin")


def save_strided(tensors: Tensors) -> None:
    """Save transposed matrices of blocks in one storage, and matrices that are not contiguous."""
    packed = torch.cat(
        [t.t().reshape(-1) if in_block(n, t) else t.reshape(-1) for n, t in tensors.items()]
    )
    begin, views = 0, {}
    for name, tensor in tensors.items():
        part = packed[begin : begin + tensor.numel()]
        begin += tensor.numel()
        transposed = in_block(name, tensor)
        views[name] = part.view(tensor.t().shape).t() if transposed else part.view(tensor.shape)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    save(views, "transposed.bin")
    save(views, "transposed-legacy.bin", legacy=True)
    wide = torch.zeros(C, 8 * C)
    wide[:, ::2] = tensors["h.0.mlp.c_fc.weight"]
    save({**tensors, "h.0.mlp.c_fc.weight": wide[:, ::2]}, "scattered.bin")
    save({**tensors, "wte.weight": tensors["wte.weight"].t().contiguous().t()}, "turned-wte.bin")


def save_sharded(tensors: Tensors) -> None:
    names = list(tensors)
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save({name: tensors[name] for name in part}, f"sharded/{file}")
    weight_map = {name: files[i % 2] for i, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": weight_map}
    (FOLDER / "sharded" / "pytorch_model.bin.index.json").write_text(
        json.dumps(index, indent=2) + "\n"
    )


def save_nanogpt(model: nn.Module) -> None:
    """Save a checkpoint whose optimizer has made one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": {**MODEL_ARGS, "bias": True, "dropout": 0.1},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "device": "cuda", "learning_rate": 6e-4, "compile": True},
    }
    save(checkpoint, "nanogpt.pt")
    save(checkpoint, "nanogpt-legacy.pt", legacy=True)


def save_nanogpt_without_bias() -> None:
    """Save a compiled model without biases, in bfloat16."""
    model = nanogpt(bias=False).to(torch.bfloat16)
    compiled: Any = torch.compile(model)
    checkpoint = {
        "model": compiled.state_dict(),
        "model_args": {**MODEL_ARGS, "bias": False, "dropout": 0.0},
        "iter_num": 0,
        "best_val_loss": 1e9,
    }
    save(checkpoint, "nanogpt-no-bias.pt")
    tensors = as_hugging_face(model.state_dict())
    for name in [name for name in tensors if name.startswith(("h.", "ln_f."))]:
        zeros = torch.zeros(tensors[name].shape[-1], dtype=torch.bfloat16)
        tensors[name.removesuffix("weight") + "bias"] = zeros
    save_file(tensors, FOLDER / "expected-no-bias.safetensors")


def nanogpt(bias: bool) -> nn.Module:
    """Return a model with nanoGPT's modules and names; every parameter is random."""
    attention = {"c_attn": nn.Linear(C, 3 * C, bias), "c_proj": nn.Linear(C, C, bias)}
    mlp = {"c_fc": nn.Linear(C, 4 * C, bias), "c_proj": nn.Linear(4 * C, C, bias)}
    block = {
        "ln_1": nn.LayerNorm(C, bias=bias),
        "attn": nn.ModuleDict(attention),
        "ln_2": nn.LayerNorm(C, bias=bias),
        "mlp": nn.ModuleDict(mlp),
    }
    transformer = {
        "wte": nn.Embedding(V, C),
        "wpe": nn.Embedding(N_CTX, C),
        "h": nn.ModuleList([nn.ModuleDict(block)]),
        "ln_f": nn.LayerNorm(C, bias=bias),
    }
    head: Any = nn.Linear(C, V, bias=False)
    head.weight = transformer["wte"].weight
    model = nn.ModuleDict({"transformer": nn.ModuleDict(transformer), "lm_head": head})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def as_hugging_face(state: dict[str, Any]) -> Tensors:
    """Return copies with Hugging Face's names; matrices of blocks are (inputs, outputs)."""
    out = {}
    for label, tensor in state.items():
        name = label.removeprefix("transformer.")
        if name != "lm_head.weight":
            out[name] = (tensor.t() if in_block(name, tensor) else tensor).clone().contiguous()
    return out


def in_block(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a matrix of a block."""
    return name.startswith("h.") and tensor.dim() == 2


if __name__ == "__main__":
    main()
