"""Hash a model, a tokenizer and gpt2block's sources, to compare the hashes of jobs and workers."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from functools import lru_cache
from pathlib import Path

from gpt2block.bulk import paths
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.tokenizers.encoding import Encoding, rules, special_id, tokens_of
from gpt2block.files.tokenizers.tokenizer import end_of_text


def of_model(name: str | Path, revision: str | None = None) -> str:
    """Return the SHA-256 of the checkpoint's config and weights files. Raises CheckpointError."""
    checkpoint = Checkpoint.open(name, revision)
    stored = checkpoint.stored.values()
    files = sorted({piece.file for tensor in stored for piece in tensor.pieces})
    found = ((file, file.stat()) for file in files)
    states = tuple((file, status.st_size, status.st_mtime_ns) for file, status in found)
    return _of_files(states, repr(checkpoint.config))


@lru_cache(maxsize=4)
def _of_files(states: tuple[tuple[Path, int, int], ...], config: str) -> str:
    return paths.sha256([file for file, *_ in states], config.encode()).hex()


def of_tokenizer(encoding: Encoding | None) -> str | None:
    """Return the SHA-256 of a tokenizer's rules, tokens, ids and end token; None without one."""
    if encoding is None:
        return None
    digest = hashlib.sha256(f"{rules(encoding)} {end_of_text(encoding)}".encode())
    for token_id, token in tokens_of(encoding):
        digest.update(b"%d %d " % (token_id, len(token)) + token)
    for name in sorted(encoding.special_tokens_set):
        digest.update(b"%d " % special_id(encoding, name) + name.encode())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def of_program() -> str:
    """Return the SHA-256 of gpt2block's sources, which also distinguishes unreleased versions."""
    import kernels_cu  # noqa: PLC0415

    package = Path(__file__).parent.parent
    folders = [package, *map(Path, kernels_cu.__path__)]
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Return {name: version} of software that must be equal on client, scheduler and workers."""
    by_name = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("numpy", "dask", "distributed"):
        by_name[name] = importlib.metadata.version(name)
    return {**by_name, "gpt2block": of_program()[:12]}
