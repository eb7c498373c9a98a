"""Get files of Hugging Face hub models from the local cache, or download them into it.

HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT have
the meaning that `huggingface_hub` gives them.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from logging import ERROR, getLogger
from pathlib import Path

from gpt2block.errors import CheckpointError, InputError, shown
from gpt2block.files.checkpoints import hugging_face, tokenizer_files
from gpt2block.files.checkpoints.locating import BUNDLED_NAMES, nearest
from gpt2block.models.config import SIZES

# OpenAI's GPT-2 models, whose tokenizer needs no files
OFFICIAL = {name for size in SIZES for name in (size, f"openai-community/{size}")}
_FIRST_ANSWER = 5  # seconds to wait for the hub's first answer, unless HF_HUB_ETAG_TIMEOUT is set
_REVISION = re.compile(r"\w[\w.-]*(/[\w-][\w.-]*)*")


class _MissingError(Exception):
    """Raised with the name of a file that the cache or the repository lacks."""


def check_revision(revision: str) -> None:
    """Raise InputError unless `revision` can be a branch, a tag or a commit."""
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
        raise InputError(f"revision: expected a branch, tag or commit, got {shown(revision)}")


def fetch(repo: str, revision: str | None = None) -> Path:
    """Download a repository if it is not cached; return its weights file or index of shards.

    config.json is in the same folder. Cached files need no network. A name similar to a
    bundled model's is refused without network: the hub has few repositories without an owner. All
    downloaded files come from one commit and include the tokenizer's. Raises CheckpointError.
    """
    at = f"{repo} at revision {revision}" if revision else repo
    meant = nearest(repo)
    hint = f": did you mean {meant!r}?" if meant else ""
    try:
        try:
            return _weights(repo, revision, cached=True)
        except _MissingError as missing:
            if _offline():
                raise CheckpointError(
                    f"{at}: offline mode is set (HF_HUB_OFFLINE), and the Hugging Face cache does "
                    f"not have {missing}: unset it to download, or give the path of a folder{hint}"
                ) from None
        if meant in BUNDLED_NAMES:
            raise CheckpointError(f"{at}: no model has this name{hint}")
        _ask(repo, revision)
        file = _weights(repo, revision, cached=False)
    except CheckpointError:
        raise
    except _MissingError as missing:
        raise CheckpointError(
            f"{at}: the repository on the hub does not have {missing}: expected a GPT-2 or a Llama "
            "in Hugging Face's format"
        ) from None
    except Exception as error:  # any error of the HTTP library or the cache's file system
        raise CheckpointError(
            f"{at}: not in the Hugging Face cache, and {_reason(error)}{hint}"
        ) from error
    fetch_tokenizer(repo, file.parent, asked=True)
    return file


def fetch_tokenizer(repo: str, snapshot: Path, asked: bool = False) -> str | None:
    """Download the repository's tokenizer files into the folder of its weights.

    snapshot: folder of the cached weights, named by their commit. asked: whether the hub has just
    answered a request. No request is sent if the cache records which of the files exist. Returns
    None, or the reason why this stays unknown.
    """
    try:
        unknown = unknown_tokenizer_files(repo, snapshot)
        if not unknown:
            return None
        if _offline():
            return "offline mode is set (HF_HUB_OFFLINE)"
        if not asked:
            _ask(repo, snapshot.name)
        for name in unknown:
            _get(repo, name, snapshot.name, cached=False)
    except Exception as error:  # any error of the HTTP library or the cache's file system
        return _reason(error)
    return None


def unknown_tokenizer_files(repo: str, snapshot: Path) -> list[str]:
    """Return names of tokenizer files of which the cache does not record whether they exist.

    [] if the cache has tokenizer.json and records whether tokenizer_config.json exists.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    names = tokenizer_files.NAMES
    known = {name: try_to_load_from_cache(repo, name, revision=snapshot.name) for name in names}
    unknown = [name for name, state in known.items() if state is None]
    has_json = isinstance(known[tokenizer_files.TOKENIZER], str)
    return [] if has_json and tokenizer_files.SETTINGS not in unknown else unknown


def _ask(repo: str, revision: str | None) -> None:
    """Print a note on stderr and test the connection to the hub. Raises the HTTP library's errors.

    Sends one request with a short time-out, as `hf_hub_download` would retry for minutes.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    url = hf_hub_url(repo, hugging_face.CONFIG, revision=revision)
    print(f"asking the Hugging Face hub for {repo} …", file=sys.stderr, flush=True)
    own = os.environ.get("HF_HUB_ETAG_TIMEOUT")
    timeout = constants.HF_HUB_ETAG_TIMEOUT if own else _FIRST_ANSWER
    with suppress(HfHubHTTPError):  # the hub answered: the download reports the error or retries
        get_hf_file_metadata(url, timeout=timeout)


def _weights(repo: str, revision: str | None, cached: bool) -> Path:
    """Get the configs and a file: the weights or the index of shards. Return this file's path.

    Raises _MissingError, and errors of huggingface_hub.
    """
    config = _get(repo, hugging_face.CONFIG, revision, cached)
    if config is None:
        raise _MissingError(hugging_face.CONFIG)
    commit = config.parent.name
    found = (_get(repo, name, commit, cached) for name in hugging_face.MODEL_FILES)
    file = next(filter(None, found), None)  # lazy: no more names are requested after the first file
    if file is None:
        raise _MissingError(f"any of {', '.join(hugging_face.MODEL_FILES)}")
    for shard in hugging_face.shards_of(file) if file.suffix == ".json" else ():
        if _get(repo, shard, commit, cached) is None:
            raise _MissingError(shard)
    for name in (hugging_face.GENERATION_CONFIG, hugging_face.MODULES, hugging_face.POOLING_CONFIG):
        _get(repo, name, commit, cached)
    return file


def _get(repo: str, name: str, revision: str | None, cached: bool) -> Path | None:
    """Return a file's local path; None if the repository (with `cached`: the cache) lacks it."""
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache  # noqa: PLC0415

    getLogger("huggingface_hub").setLevel(ERROR)  # do not log every retry
    if cached:  # even for a cached file, `hf_hub_download` may request a list of agents
        found = try_to_load_from_cache(repo, name, revision=revision)
        return Path(found) if isinstance(found, str) else None
    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except errors.LocalEntryNotFoundError:  # the hub could not be reached
        raise
    except errors.EntryNotFoundError:
        return None


def _offline() -> bool:
    from huggingface_hub import constants  # noqa: PLC0415

    return bool(constants.HF_HUB_OFFLINE)


def _reason(error: Exception) -> str:
    """Return a message: why the hub did not deliver a file, and how to fix it."""
    from huggingface_hub import errors  # noqa: PLC0415

    if isinstance(error, errors.GatedRepoError):
        return "the hub restricts access to it: request access on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository: check the name; if it is private, set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository on the hub has no such revision: expected a branch, tag or commit"
    cause = error.__cause__ or error
    line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    message = f"{type(cause).__name__}: {line}" if line else type(cause).__name__
    if isinstance(error, errors.HFValidationError):
        return f"not a name of a repository on the hub ({message}): expected one, or a path"
    return (
        f"the hub cannot be reached or does not answer ({message}): check the network and try "
        "again, or give the path of a downloaded folder"
    )
