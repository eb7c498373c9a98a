"""GPT-2 checkpoints in Hugging Face layout: a directory, a `.safetensors` file or a hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from logging import ERROR, getLogger
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors returns)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from gpt2block.config import SIZES, GPT2Config, block_shapes
from gpt2block.errors import CheckpointError

Array = NDArray[np.float32]
ON_BOARD = "shakespeare"  # the trained model that travels in the package
_MODELS = Path(__file__).parent / "models"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STORED = ("F64", "F32", "F16", "BF16")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

# Our names → Hugging Face's, inside `h.N.`
_BLOCK_NAMES = {
    "gamma1": "ln_1.weight",
    "beta1": "ln_1.bias",
    "w_qkv": "attn.c_attn.weight",
    "b_qkv": "attn.c_attn.bias",
    "w_attn": "attn.c_proj.weight",
    "b_attn": "attn.c_proj.bias",
    "gamma2": "ln_2.weight",
    "beta2": "ln_2.bias",
    "w_fc": "mlp.c_fc.weight",
    "b_fc": "mlp.c_fc.bias",
    "w_proj": "mlp.c_proj.weight",
    "b_proj": "mlp.c_proj.bias",
}


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config is known, its tensors are read when asked for."""

    name: str  # as the user gave it
    file: Path  # the .safetensors file
    config: GPT2Config
    names: Mapping[str, str]  # tensor name without the `transformer.` prefix → name in the file

    @classmethod
    def open(cls, name_or_path: str | Path | Checkpoint) -> Checkpoint:
        """Find the files, read the header and the config; no tensor data yet.

        Raises CheckpointError naming what was expected, what came and what to do.
        """
        if isinstance(name_or_path, Checkpoint):
            return name_or_path
        if isinstance(name_or_path, Path):  # never the name of a model: a path of this very file
            name_or_path = str(name_or_path.expanduser().absolute())
        file = _locate(name_or_path)
        shapes = _read_header(file)
        names = {name.removeprefix("transformer."): name for name in shapes}
        config = _read_config(file, {name: shapes[names[name]] for name in names})
        present = _layers(names)
        if present != config.n_layer:
            raise CheckpointError(
                f"{name_or_path}: config.json says n_layer {config.n_layer}, the file has blocks "
                f"for {present}"
            )
        return cls(str(name_or_path), file, config, names)

    @property
    def directory(self) -> Path:
        """Where config.json and tokenizer.json stand, beside the weights."""
        return self.file.parent

    def check_layer(self, layer: int) -> None:
        """Raise CheckpointError unless 0 ≤ layer < n_layer."""
        n_layer = self.config.n_layer
        if not isinstance(layer, int):
            raise CheckpointError(f"layer: expected an integer, got {layer!r}")
        if not 0 <= layer < n_layer:
            raise CheckpointError(
                f"{self.name}: layer {layer} is out of range: it has {n_layer} layers, "
                f"0…{n_layer - 1}"
            )

    def read_block(self, layer: int) -> dict[str, Array]:
        """The twelve tensors of block `layer`, 0 ≤ layer < n_layer, by our names, as float32."""
        self.check_layer(layer)
        shapes = block_shapes(self.config.n_embd)
        wanted = {f"h.{layer}.{_BLOCK_NAMES[name]}": shape for name, shape in shapes.items()}
        return dict(zip(shapes, self._read(wanted), strict=True))

    def read_ends(self) -> tuple[Array, Array, Array, Array, Array]:
        """wte, wpe, the final LayerNorm's γ and β, and lm_head, as float32.

        A tied lm_head is the very array wte.
        """
        c = self.config
        wanted: dict[str, tuple[int, ...]] = {
            "wte.weight": (c.vocab_size, c.n_embd),
            "wpe.weight": (c.n_ctx, c.n_embd),
            "ln_f.weight": (c.n_embd,),
            "ln_f.bias": (c.n_embd,),
        }
        if not c.tie_word_embeddings:
            wanted["lm_head.weight"] = (c.vocab_size, c.n_embd)
        wte, wpe, gamma_f, beta_f, *head = self._read(wanted)
        return wte, wpe, gamma_f, beta_f, head[0] if head else wte

    def _read(self, wanted: Mapping[str, tuple[int, ...]]) -> list[Array]:
        missing = [name for name in wanted if name not in self.names]
        if missing:
            raise CheckpointError(f"{self.name}: {len(missing)} tensors missing: {_some(missing)}")
        tensors = []
        with safe_open(self.file, "np") as reader:
            for name, shape in wanted.items():
                stored = reader.get_slice(self.names[name])
                if tuple(stored.get_shape()) != shape:
                    raise CheckpointError(
                        f"{self.name}: {name}: expected shape {shape}, "
                        f"got {tuple(stored.get_shape())}"
                    )
                if stored.get_dtype() not in _STORED:
                    raise CheckpointError(
                        f"{self.name}: {name}: expected one of {', '.join(_STORED)}, "
                        f"got {stored.get_dtype()}"
                    )
                tensors.append(reader.get_tensor(self.names[name]).astype(np.float32))
        return tensors


def _locate(name: str) -> Path:
    """The .safetensors file behind a name: the model on board, a path, or a hub id."""
    if name == ON_BOARD:  # a folder of this name is "./shakespeare"
        return _in_directory(_MODELS / ON_BOARD)
    if not name:
        raise CheckpointError("weights: expected a name or a path, got an empty string")
    try:
        return _locate_path(name, Path(name).expanduser())
    except (OSError, RuntimeError) as error:  # no permission, a name too long, no such user
        raise CheckpointError(f"{name[:80]}: cannot be read: {error}") from error


def _locate_path(name: str, path: Path) -> Path:
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{name}: a pickle ({path.suffix}) runs code when it is read, so it is refused: "
            "expected .safetensors; convert it with transformers' save_pretrained"
        )
    if path.is_dir():
        return _in_directory(path)
    if path.is_file():
        return path
    if _HUB_ID.fullmatch(name) and path.suffix != ".safetensors":
        return _from_hub(name)
    raise CheckpointError(
        f"{name}: no such file or directory: expected a Hugging Face directory, a .safetensors "
        f"file, a hub id such as 'gpt2', or '{ON_BOARD}'"
    )


def _in_directory(path: Path) -> Path:
    file = path / "model.safetensors"
    if file.is_file():
        return file
    pickles = [p.name for p in sorted(path.iterdir()) if p.suffix in _PICKLES]
    if pickles:
        raise CheckpointError(
            f"{path}: only {pickles[0]}, a pickle, which runs code when it is read: "
            "expected model.safetensors; convert it with transformers' save_pretrained"
        )
    found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
    raise CheckpointError(f"{path}: expected model.safetensors in this directory, found {found}")


def _from_hub(repo: str) -> Path:
    """Download, or take from the cache; HF_HOME and HF_HUB_OFFLINE are honoured."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (slow to import)
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
    )

    getLogger("huggingface_hub").setLevel(ERROR)  # its retries would be told one by one
    names = ("config.json", "model.safetensors")
    try:
        try:  # what is cached needs no network
            _, file = (hf_hub_download(repo, name, local_files_only=True) for name in names)
        except LocalEntryNotFoundError:
            _, file = (hf_hub_download(repo, name) for name in names)
            with suppress(EntryNotFoundError):  # GPT-2's own is not needed, others' are
                hf_hub_download(repo, "tokenizer.json")
        return Path(file)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise CheckpointError(
            f"{repo}: neither in the Hugging Face cache nor to be had from the hub "
            f"({type(error).__name__}: {reason.strip()}): check the name and the network, "
            "or give the path of a downloaded directory"
        ) from error


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor name → shape; CheckpointError for a Git-LFS pointer, a cut or a foreign file."""
    try:
        with file.open("rb") as stream:
            start = stream.read(24)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file}: a Git-LFS pointer of {file.stat().st_size} bytes, not the weights: "
            "run `git lfs pull` in that repository"
        )
    try:
        with safe_open(file, "np") as reader:
            return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file, {file.stat().st_size:,} bytes "
            f"({error}): download it again"
        ) from error


def _read_config(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> GPT2Config:
    """config.json beside the file; without one, the GPT-2 size that has the tensors' width."""
    path = file.parent / "config.json"
    if path.is_file():
        try:
            return GPT2Config.from_hugging_face(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, OSError) as error:  # JSONDecodeError and our own errors are ValueErrors
            raise CheckpointError(f"{path}: {error}") from error
    n_embd, vocab_size, n_ctx = (
        (*shapes.get(name, ()), 0)[0] for name in ("h.0.ln_1.weight", "wte.weight", "wpe.weight")
    )
    for config in SIZES.values():
        if config.n_embd == n_embd:
            return replace(
                config,
                n_layer=_layers(shapes),
                vocab_size=vocab_size or config.vocab_size,
                n_ctx=n_ctx or config.n_ctx,
                tie_word_embeddings="lm_head.weight" not in shapes,
            )
    raise CheckpointError(
        f"{file}: expected config.json beside it: the number of heads is not in the tensors, and "
        f"width {n_embd} is no GPT-2 size"
    )


def _layers(names: Iterable[str]) -> int:
    """How many blocks there are tensors for."""
    return len({found[1] for name in names if (found := re.match(r"h\.(\d+)\.", name))})


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
