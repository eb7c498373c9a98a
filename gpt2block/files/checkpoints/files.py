"""Check and read the files of checkpoints; error messages begin with the name of the file."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt2block.errors import CheckpointError, InputError, shown

READ = "a Hugging Face directory, a .safetensors file, a file of PyTorch or llama.cpp (GGUF)"
_MAX_NAMED = 4
_LONGEST_JSON = 100_000_000  # bytes, the limit that safetensors sets for a file's header
_LLM_C = {20240326: "a model", 20240328: "a tokenizer"}  # first int32 of a file of llm.c → kind
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


@contextmanager
def about(
    subject: object, damage: tuple[type[Exception], ...] = (), words: str = "{}"
) -> Iterator[None]:
    """Convert errors of the `with` block to CheckpointErrors whose text begins with `subject`.

    Errors of gpt2block, OSError, and the exceptions in `damage`, which a parser raises for damaged
    content, are converted. words: message for exceptions in `damage`; {} stands for the
    parser's message. Errors of gpt2block that already begin with `subject`, or with a file in it,
    pass unchanged.
    """
    try:
        yield
    except (CheckpointError, InputError) as error:
        if str(error).startswith((f"{subject}: ", f"{subject}/")):
            raise
        raise CheckpointError(f"{subject}: {error}") from error
    except damage as error:
        # Without its type, the message of a KeyError is only a name such as 'merges'.
        bare = isinstance(error, (KeyError, TypeError, AttributeError))
        reason = repr(error) if bare else str(error)
        raise CheckpointError(f"{subject}: {words.replace('{}', reason)}") from error
    except OSError as error:
        raise CheckpointError(f"{subject}: cannot be read: {error.strerror or error}") from error


def is_file(path: Path) -> bool:
    """Return True for a regular file or a link to a regular file, False if the path is absent.

    Raises CheckpointError for any other path: a folder, a named pipe, a broken link, or a path that
    cannot be accessed.
    """
    with about(path):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if not path.is_symlink():
                return False
            raise CheckpointError(f"{path}: a link to a file that does not exist") from None
        except ValueError:  # no file name has a null character or a lone surrogate
            return False
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise CheckpointError(f"{path}: expected a file, found {kind}")
    return True


def file_size(file: Path) -> int:
    """Return the size of a regular file in bytes. Raises CheckpointError for any other path."""
    is_file(file)  # raises CheckpointError for folders, pipes and broken links
    with about(file):
        return file.stat().st_size


def read_start(file: Path, length: int = -1) -> bytes:
    """Return up to `length` first bytes of a file, or with -1 all bytes. Raises CheckpointError."""
    is_file(file)  # refuses a named pipe: opening it would wait for a writer
    with about(file), file.open("rb") as stream:
        return stream.read(length)


def check_supported(file: Path, start: bytes) -> None:
    """Raise CheckpointError for a Git-LFS pointer and for a model or tokenizer of llm.c.

    start: the file's first bytes.
    """
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{file}: a Git-LFS pointer of {file_size(file)} bytes, not the weights: "
            "run `git lfs pull` in that repository"
        )
    kind = _LLM_C.get(int.from_bytes(start[:4], "little"))
    if kind:
        raise CheckpointError(
            f"{file}: {kind} of llm.c, whose files are not read: convert the model to a Hugging "
            "Face directory: in llm.c's repository, run python dev/eval/export_hf.py --input "
            "MODEL.bin --output DIRECTORY --dtype float32"
        )


def read_json(file: Path) -> Any:
    """Return the content of a JSON file. Raises CheckpointError if the file cannot be read."""
    size = file_size(file)
    if size > _LONGEST_JSON:
        raise CheckpointError(f"{file}: expected at most {_LONGEST_JSON:,} bytes, got {size:,}")
    with about(file, (ValueError, RecursionError), "cannot be read as JSON: {}"):
        return json.loads(read_start(file).decode("utf-8-sig"))


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if the file does not exist. Raises CheckpointError."""
    content = read_json(file) if is_file(file) else {}
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {shown(content)}")
    return content


def first_names(names: Iterable[str]) -> str:
    """Join the first names for a message; "…" stands for further names."""
    listed = list(names)
    rest = ", …" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + rest
