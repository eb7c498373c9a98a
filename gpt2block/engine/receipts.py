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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

import kernels_cu
from gpt2block.cuda import cupy, doctor
from gpt2block.cuda.arrays import compute_capability
from gpt2block.cuda.formats import USUAL
from gpt2block.errors import InputError, shown
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.files.tokenizers.encoding import Encoding, rules, special_id, tokens_of
from gpt2block.files.tokenizers.lookup import of_outputs
from gpt2block.files.tokenizers.tokenizer import end_of_text
from gpt2block.sampling import Sampling

if TYPE_CHECKING:
    from gpt2block.engine.generation.rows import Row

FORMAT, VERSION = "gpt2block_receipt", 1  # field with the version of the format, and its value
# Folders of the package whose code cannot change a bit of a text.
NOT_HASHED = ("apps", "bulk", "emulator", "evaluation", "judge")
SHA256_THREADS = 8
# Fields that must be equal for a check, in the order in which they are compared.
IDENTITY = (
    *USUAL.facts(), "weights", "device", "nvrtc", "kernels", "code", "blas", "threads"
)  # fmt: skip
READERS = "tokenizer", "llguidance"  # the same, for a text with stop strings or a rule
_TEXT, _NULL, _LIST = (str,), (str, type(None)), (list,)
TYPES: Mapping[str, tuple[type, ...]] = {
    FORMAT: (int,), "gpt2block": _TEXT, "model": _NULL, "gpus": (int,), "options": (dict,),
    **dict.fromkeys((*IDENTITY, *READERS), _NULL), "prompt": _LIST, "tokens": _LIST,
    "finish_reason": _TEXT, "logprobs": _TEXT,
}  # fmt: skip
SAMPLED = tuple(each.name for each in fields(Sampling) if each.name != "end_ids")
OPTIONS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(SAMPLED, (int, float)), "max_new_tokens": (int,), "rule": _NULL,
    **dict.fromkeys(("logit_bias", "stop", "stop_ids", "unwritten"), _LIST),
}  # fmt: skip
_known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # results of `identity`
_hashes: dict[Any, str] = {}  # hashes of weights by config and states of their files


def identity(engine: Any) -> dict[str, Any]:
    """Return the fields of a receipt that state the model, its formats, the code and the device.

    The first call for an engine hashes the weights. Raises InputError if the files of the weights
    have changed since they were loaded.
    """
    if engine not in _known:
        checkpoint = getattr(engine, "checkpoint", None)
        _known[engine] = {
            FORMAT: VERSION,
            "gpt2block": doctor.version(),
            "model": None if checkpoint is None else checkpoint.name,
            "weights": _of_arrays(engine) if checkpoint is None else _of_files(engine, checkpoint),
            **engine.formats.facts(),
            "code": hash_of_sources(Path(__file__).parent.parent, NOT_HASHED),
            **_device(engine.cache_kind[3]),
        }
    return _known[engine]


def _device(device: str) -> dict[str, Any]:
    """Return the fields about a device, named as in a CacheKind; on the CPU also about its BLAS."""
    if device == "cpu":
        config: Any = np.show_config(mode="dicts")
        blas, simd = config["Build Dependencies"]["blas"], config["SIMD Extensions"]["found"]
        threads = sorted(f"{k}={v}" for k, v in os.environ.items() if k.endswith("_NUM_THREADS"))
        return {
            **dict.fromkeys(("nvrtc", "kernels")), "device": "cpu", "gpus": 0,
            "blas": f"{blas['name']} {blas['version']} NumPy {np.__version__} {simd[-1:]}",
            "threads": " ".join((*threads, f"cores={os.cpu_count()}")),
        }  # fmt: skip
    numbers = device.removeprefix("cuda:").split(",")
    with cupy.cuda.Device(int(numbers[0])):
        architecture = f"sm_{compute_capability()}"
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    found = {"device": architecture, "gpus": len(numbers), "nvrtc": nvrtc}
    kernels = hash_of_sources(Path(kernels_cu.__path__[0]))
    return {**found, "kernels": kernels, "blas": None, "threads": None}


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
    """Return the SHA-256 of the config and the stored values of weights given as arrays."""
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
    key = repr(checkpoint.config), states
    if key not in _hashes:
        digest = hashlib.sha256(key[0].encode())
        tensors = sorted(checkpoint.stored.items())
        with ThreadPoolExecutor(SHA256_THREADS) as threads:
            hashed = threads.map(_of_tensor, (stored for _, stored in tensors))
            for (name, stored), own in zip(tensors, hashed, strict=True):
                digest.update(f"{name} {stored.types} {stored.shape} {stored.head_order}".encode())
                digest.update(own)
        _hashes[key] = digest.hexdigest()
    return _hashes[key]


def _of_tensor(stored: Stored) -> bytes:
    """Return the SHA-256 of a tensor's bytes in its file."""
    digest = hashlib.sha256()
    for piece in stored.pieces:
        if piece.offset is not None:
            with piece.file.open("rb") as file:
                file.seek(piece.offset)
                digest.update(file.read(piece.nbytes))
    return digest.digest()


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


def readers(reader: Any, stop: Any, rule: Any) -> dict[str, str | None]:
    """Return the fields of READERS, the software that can change a text by reading it."""
    found: dict[str, str | None] = dict.fromkeys(READERS)
    if stop or rule:
        own: Any = of_outputs(reader)
        found["tokenizer"] = _of_text(own)
    with suppress(importlib.metadata.PackageNotFoundError):
        found["llguidance"] = importlib.metadata.version("llguidance") if rule else None
    return found


def certify(engine: Any, row: Row) -> dict[str, Any]:
    """Return the receipt of a row that has ended, which an engine has generated."""
    return receipt_of(row, identity(engine))


def receipt_of(row: Row, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the receipt of a row that has ended. known: the `identity` of its engine."""
    ends, rule = row.ends, row.rule and row.rule.source
    options = {
        **{name: getattr(row.sampling, name) for name in SAMPLED},
        "logit_bias": [list(pair) for pair in row.sampling.biases],
        "max_new_tokens": ends.max_new_tokens,
        "stop": list(ends.stop),
        "stop_ids": sorted(ends.stop_ids),
        "unwritten": sorted(row.unwritten) if ends.stop else [],
        "rule": rule,
    }
    logprobs = base64.b64encode(np.array(row.logprobs, "<f4").tobytes()).decode()
    ids = {"prompt": row.prompt.tolist(), "tokens": list(row.tokens)}
    found = {**known, **readers(row.reader, ends.stop, rule), "options": options, **ids}
    return {**found, "finish_reason": row.finish_reason, "logprobs": logprobs}


def parsed(receipt: Any) -> dict[str, Any]:
    """Return the fields of a receipt, an object or JSON text; logprobs becomes an array.

    Raises InputError, which names the field, for another version and for fields that are missing,
    unknown or of a wrong type.
    """
    given = as_object(receipt)
    if given.get(FORMAT) != VERSION:
        found = shown(given[FORMAT]) if FORMAT in given else "none"
        raise InputError(f"{FORMAT}: expected a receipt of version {VERSION}, got {found}")
    _check(given, TYPES, "")
    _check(given["options"], OPTIONS, "options.")
    try:
        logprobs = np.frombuffer(base64.b64decode(given["logprobs"], validate=True), "<f4")
    except ValueError:
        raise InputError("logprobs: expected float32 numbers in base64") from None
    if not len(logprobs) == (count := len(given["tokens"])) > 0:
        raise InputError(f"logprobs: expected one for each of {count:,} tokens: {len(logprobs):,}")
    return {**given, "logprobs": logprobs}


def as_object(receipt: Any) -> dict[str, Any]:
    """Return a receipt, which can also be JSON text, as an object. Raises InputError."""
    try:
        found = json.loads(receipt) if isinstance(receipt, (str, bytes)) else receipt
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected the JSON of a receipt: {error}") from None
    if not isinstance(found, Mapping):
        raise InputError(f"expected a receipt, got {shown(found)}")
    return dict(found)


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


def require_equal(
    stated: Mapping[str, Any], known: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Raise InputError, which names the first of these fields that differ."""
    for name in names:
        if stated[name] != known[name]:
            own, other = (str(each[name])[:24] for each in (stated, known))
            raise InputError(f"{name}: the receipt states {own}, here it is {other}")


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
