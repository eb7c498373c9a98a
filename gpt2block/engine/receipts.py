"""Receipts: JSON objects that state how a text was generated, so that `verify` can check it.

docs/receipt.schema.json describes a receipt, docs/proof.md the promise.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from gpt2block.cuda import cupy
from gpt2block.cuda.arrays import compute_capability
from gpt2block.engine.grammars import Grammar
from gpt2block.engine.model import Floats, Ids
from gpt2block.errors import InputError, shown
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.checkpoint import FileStates
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.files.tokenizers.encoding import Encoding, rules, special_id, tokens_of
from gpt2block.files.tokenizers.lookup import of_outputs
from gpt2block.files.tokenizers.tokenizer import end_of_text
from gpt2block.sampling import Sampling

if TYPE_CHECKING:
    from gpt2block.engine.generation.rows import Row

FORMAT = "gpt2block_receipt"  # field with the version of the format
VERSION = 1
# Folders of the package whose code cannot change a bit of a text.
NOT_HASHED = ("apps", "bulk", "emulator", "evaluation", "judge")
CHUNK = 2**24  # bytes of a file that are hashed at a time
# Fields that must be equal for a check, in the order in which they are compared.
IDENTITY = (
    "dtype", "kv_dtype", "weights", "device", "nvrtc", "kernels", "code", "blas", "threads"
)  # fmt: skip
_TEXT, _NULL = (str,), (str, type(None))
TYPES: Mapping[str, tuple[type, ...]] = {
    FORMAT: (int,), "gpt2block": _TEXT, "model": _NULL, "gpus": (int,),
    **dict.fromkeys(("dtype", "kv_dtype", "weights", "code", "device"), _TEXT),
    **dict.fromkeys(("nvrtc", "kernels", "blas", "threads", "tokenizer", "llguidance"), _NULL),
    "options": (dict,), "prompt": (list,), "tokens": (list,), "finish_reason": _TEXT,
    "logprobs": _TEXT,
}  # fmt: skip
SAMPLED = tuple(each.name for each in fields(Sampling) if each.name != "end_ids")
OPTIONS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(SAMPLED, (int, float)), "logit_bias": (list,), "max_new_tokens": (int,),
    "stop": (list,), "stop_ids": (list,), "unwritten": (list,), "rule": _NULL,
}  # fmt: skip
_known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # results of `identity`


def identity(engine: Any) -> dict[str, Any]:
    """Return the fields of a receipt that state the model, its formats, the code and the device.

    The first call for an engine hashes the weights. Raises InputError if the files of the weights
    have changed since they were loaded.
    """
    if engine not in _known:
        checkpoint: Checkpoint | None = getattr(engine, "checkpoint", None)
        _known[engine] = {
            FORMAT: VERSION,
            "gpt2block": importlib.metadata.version("gpt2block"),
            "model": None if checkpoint is None else checkpoint.name,
            "weights": _of_arrays(engine) if checkpoint is None else _of_files(engine, checkpoint),
            "dtype": engine.formats.dtype,
            "kv_dtype": engine.formats.cache_dtype,
            "code": hash_of_sources(Path(__file__).parent.parent, NOT_HASHED),
            **_device(engine.cache_kind[3]),
        }
    return _known[engine]


def _device(device: str) -> dict[str, Any]:
    """Return the fields about a device, named as in a CacheKind."""
    if device == "cpu":
        return dict.fromkeys(("nvrtc", "kernels")) | {"device": "cpu", "gpus": 0, **_blas()}
    import kernels_cu  # noqa: PLC0415

    numbers = device.removeprefix("cuda:").split(",")
    with cupy.cuda.Device(int(numbers[0])):
        architecture = f"sm_{compute_capability()}"
    (folder,) = map(Path, kernels_cu.__path__)
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    found = {"device": architecture, "gpus": len(numbers), "nvrtc": nvrtc}
    return {**found, "kernels": hash_of_sources(folder), "blas": None, "threads": None}


def _blas() -> dict[str, Any]:
    """Return NumPy's BLAS with the instructions of this CPU, and the numbers of its threads."""
    config: Any = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    found = config["SIMD Extensions"]["found"][-1:]
    threads = sorted(f"{k}={v}" for k, v in os.environ.items() if k.endswith("_NUM_THREADS"))
    return {
        "blas": " ".join((blas["name"], str(blas["version"]), "NumPy", np.__version__, *found)),
        "threads": " ".join((*threads, f"cores={os.cpu_count()}")),
    }


@lru_cache(maxsize=4)
def hash_of_sources(folder: Path, without: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of the Python and CUDA sources below a folder. without: its folders."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in (".py", ".cu", ".cuh") and name.parts[0] not in without:
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _of_arrays(engine: Any) -> str:
    """Return the SHA-256 of the config and the stored tensors of weights given as arrays."""
    digest = hashlib.sha256(repr(engine.config).encode())
    for name, array, _ in engine.tensors():
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _of_files(engine: Any, checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of a checkpoint's config and of its tensors, sorted by name."""
    states = checkpoint.file_states()
    if states != engine.file_states:
        raise InputError(f"{checkpoint.name}: a file has changed since the model was loaded")
    pieces = tuple(
        (f"{name} {each.types} {each.shape} {stored.head_order}", each)
        for name, stored in sorted(checkpoint.stored.items())
        for each in stored.pieces
    )
    return _of_pieces(repr(checkpoint.config), pieces, states)


@lru_cache(maxsize=4)
def _of_pieces(config: str, pieces: tuple[tuple[str, Stored], ...], states: FileStates) -> str:
    """Hash tensors of files. states: the files' states, for which the hash is kept."""
    digest = hashlib.sha256(config.encode())
    for name, piece in pieces:
        digest.update(name.encode())
        with piece.file.open("rb") as file:
            file.seek(piece.offset or 0)
            left = 0 if piece.offset is None else piece.nbytes
            while left and (data := file.read(min(left, CHUNK))):
                digest.update(data)
                left -= len(data)
    return digest.hexdigest()


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


@lru_cache(maxsize=4)
def _of_text(encoding: Any) -> str | None:
    return of_tokenizer(encoding)


def readers(encoding: Encoding | None, stop: Any, rule: Any) -> dict[str, str | None]:
    """Return the fields about the software that reads the text, where it can change the text."""
    own: Any = encoding
    return {
        "tokenizer": _of_text(own) if stop or rule else None,
        "llguidance": _version("llguidance") if rule else None,
    }


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def certify(engine: Any, row: Row) -> dict[str, Any]:
    """Return the receipt of a row that has ended, which an engine has generated."""
    return receipt_of(row, identity(engine))


def receipt_of(row: Row, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipt of a row that has ended. known: the `identity` of its engine."""
    ends, rule = row.ends, row.rule and row.rule.source
    return {
        **known,
        **readers(of_outputs(row.reader) if ends.stop or rule else None, ends.stop, rule),
        "options": {
            **{name: getattr(row.sampling, name) for name in SAMPLED},
            "logit_bias": [list(pair) for pair in row.sampling.biases],
            "max_new_tokens": ends.max_new_tokens,
            "stop": list(ends.stop),
            "stop_ids": sorted(ends.stop_ids),
            "unwritten": sorted(row.unwritten) if ends.stop else [],
            "rule": rule,
        },
        "prompt": row.prompt.tolist(),
        "tokens": list(row.tokens),
        "finish_reason": row.finish_reason,
        "logprobs": base64.b64encode(np.array(row.logprobs, "<f4").tobytes()).decode(),
    }


@dataclass(frozen=True)
class Stated:
    """The contents of a receipt whose fields have the right types."""

    fields: Mapping[str, Any]
    prompt: Ids
    tokens: Ids
    logprobs: Floats
    sampling: Sampling
    rule: Grammar | None

    @classmethod
    def of(cls, receipt: Any) -> Stated:
        """Read a receipt, an object or JSON text. Raises InputError, which names the field."""
        given = as_object(receipt)
        if given.get(FORMAT) != VERSION:
            found = shown(given[FORMAT]) if FORMAT in given else "none"
            raise InputError(f"{FORMAT}: expected a receipt of version {VERSION}, got {found}")
        _check(given, TYPES, "")
        _check(options := given["options"], OPTIONS, "options.")
        if not all(isinstance(each, str) and each for each in options["stop"]):
            raise InputError(f"options.stop: expected texts, got {shown(options['stop'])}")
        sampled = {name: options[name] for name in SAMPLED}
        ends = options["stop_ids"] if options["min_new_tokens"] else ()
        try:
            logprobs = np.frombuffer(base64.b64decode(given["logprobs"], validate=True), "<f4")
        except ValueError:
            raise InputError("logprobs: expected float32 numbers in base64") from None
        if not len(logprobs) == len(given["tokens"]) > 0:
            raise InputError(f"logprobs: expected one for each of {len(given['tokens']):,} tokens, "
                             f"got {len(logprobs):,}")  # fmt: skip
        return cls(
            given,
            _ids("prompt", given["prompt"]),
            _ids("tokens", given["tokens"]),
            logprobs,
            Sampling(**sampled, end_ids=_ids("stop_ids", ends).tolist()),
            None if options["rule"] is None else Grammar(options["rule"], "options.rule"),
        )

    def difference(self, known: Mapping[str, Any], names: Iterable[str] = IDENTITY) -> str:
        """Return a sentence about the first field that differs from `known`, or ""."""
        for name in names:
            if self.fields[name] != known[name]:
                own, other = (_brief(each[name]) for each in (self.fields, known))
                return f"{name}: the receipt states {own}, here it is {other}"
        return ""


def _brief(value: Any) -> str:
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)


def as_object(receipt: Any) -> dict[str, Any]:
    """Return a receipt, which can also be JSON text, as an object. Raises InputError."""
    if isinstance(receipt, (str, bytes)):
        try:
            receipt = json.loads(receipt)
        except (ValueError, RecursionError) as error:
            raise InputError(f"expected the JSON of a receipt: {error}") from None
    if not isinstance(receipt, Mapping):
        raise InputError(f"expected a receipt, got {shown(receipt)}")
    return dict(receipt)


def _check(given: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], before: str) -> None:
    """Raise InputError unless an object has the fields of `types`, and no others."""
    if missing := [name for name in types if name not in given]:
        raise InputError(f"{before}{missing[0]}: expected, but missing")
    if unknown := [name for name in given if name not in types]:
        raise InputError(f"{before}{shown(unknown[0])}: this version has no such field")
    for name, kinds in types.items():
        if isinstance(given[name], bool) or not isinstance(given[name], kinds):
            expected = " or ".join(kind.__name__.replace("NoneType", "null") for kind in kinds)
            raise InputError(f"{before}{name}: expected {expected}, got {shown(given[name])}")


def _ids(name: str, given: Any) -> Ids:
    """Return token ids as an array. Raises InputError unless they are integers of 31 bits."""
    if not all(type(each) is int and 0 <= each < 2**31 for each in given):
        raise InputError(f"{name}: expected token ids, got {shown(given)}")
    return np.array(given, np.int32)


def append_receipts(path: str | Path, receipts: Iterable[Any]) -> None:
    """Append receipts to a file, each as a line of JSON. Raises OSError."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(each, separators=(",", ":")) + "\n" for each in receipts)


def found_in(value: Any) -> Iterator[Any]:
    """Yield the receipts in JSON: a receipt, a line of `map`, a server's answer, or a list."""
    if isinstance(value, list):
        for each in value:
            yield from found_in(each)
    elif isinstance(value, dict) and value.get("receipt") is not None:
        yield from found_in(value["receipt"])
    elif isinstance(value, dict) and "choices" in value:
        yield from found_in([each for each in value["choices"] if "receipt" in each])
    else:
        yield value
