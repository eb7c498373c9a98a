"""The file behind a name: the model on board, a path, or a hub id."""

from __future__ import annotations

import re
from contextlib import suppress
from logging import ERROR, getLogger
from pathlib import Path

from gpt2block.checkpoints import llm_c
from gpt2block.checkpoints.hugging_face import CONFIG, INDEX, TOKENIZER, WEIGHTS, shards_of
from gpt2block.config import ALIASES
from gpt2block.errors import CheckpointError

ON_BOARD = "shakespeare"  # the trained model that travels in the package
_MODELS = Path(__file__).parent.parent / "models"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(name: str) -> Path:
    """A .safetensors file, an index of several or a .bin of llm.c. Raises CheckpointError."""
    if name == ON_BOARD:  # a folder of this name is "./shakespeare"
        return _in_directory(_MODELS / ON_BOARD)
    if not name:
        raise CheckpointError("weights: expected a name or a path, got an empty string")
    try:
        return _locate_path(name, Path(name).expanduser())
    except (OSError, RuntimeError) as error:  # no permission, a name too long, no such user
        raise CheckpointError(f"{name[:80]}: cannot be read: {error}") from error


def _locate_path(name: str, path: Path) -> Path:
    if path.is_dir():
        return _in_directory(path)
    if path.is_file() and llm_c.is_model(path):
        return path
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{name}: a pickle ({path.suffix}) runs code when it is read, so it is refused: "
            "expected .safetensors or a model of llm.c; convert it with transformers' "
            "save_pretrained"
        )
    if path.is_file():
        return path
    repo = ALIASES.get(name, name)
    if _HUB_ID.fullmatch(repo) and path.suffix != ".safetensors":
        return _from_hub(repo)
    raise CheckpointError(
        f"{name}: no such file or directory: expected a Hugging Face directory, a .safetensors "
        f"file, a .bin of llm.c, a hub id such as 'gpt2', or '{ON_BOARD}'"
    )


def _in_directory(path: Path) -> Path:
    for name in (WEIGHTS, INDEX):
        if (path / name).is_file():
            return path / name
    pickles = [p for p in sorted(path.iterdir()) if p.suffix in _PICKLES and p.is_file()]
    models = [p for p in pickles if llm_c.is_model(p)]
    if models:
        raise CheckpointError(
            f"{path}: expected {WEIGHTS} in this directory; for a model of llm.c give the path of "
            f"the file: {models[0]}"
        )
    if pickles:
        raise CheckpointError(
            f"{path}: only {pickles[0].name}, a pickle, which runs code when it is read: "
            f"expected {WEIGHTS}; convert it with transformers' save_pretrained"
        )
    found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
    raise CheckpointError(f"{path}: expected {WEIGHTS} in this directory, found {found}")


def _from_hub(repo: str) -> Path:
    """Download, or take from the cache; HF_HOME and HF_HUB_OFFLINE are honoured."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (slow to import)
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
    )

    getLogger("huggingface_hub").setLevel(ERROR)  # its retries would be told one by one

    def fetch(cached: bool) -> Path:
        def get(name: str) -> Path:
            return Path(hf_hub_download(repo, name, local_files_only=cached))

        get(CONFIG)
        try:
            return get(WEIGHTS)
        except EntryNotFoundError as no_weights:
            try:
                index = get(INDEX)
            except EntryNotFoundError:
                raise no_weights from None
        for shard in shards_of(index):
            get(shard)
        return index

    try:
        try:  # what is cached needs no network
            return fetch(cached=True)
        except LocalEntryNotFoundError:
            file = fetch(cached=False)
            with suppress(EntryNotFoundError):  # GPT-2's own is not needed, others' are
                hf_hub_download(repo, TOKENIZER)
            return file
    except (HfHubHTTPError, OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise CheckpointError(
            f"{repo}: neither in the Hugging Face cache nor to be had from the hub "
            f"({type(error).__name__}: {reason.strip()}): check the name and the network, "
            "or give the path of a downloaded directory"
        ) from error
