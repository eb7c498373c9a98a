"""Receipts: JSON objects that state how a text was generated, so that `verify` can check it.

docs/receipt.schema.json describes a receipt, docs/proof.md the promise.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import importlib.metadata
import json
import os
import re
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
from gpt2block.checks import unique_keys
from gpt2block.cuda import cupy, doctor
from gpt2block.cuda.arrays import compute_capability
from gpt2block.engine.threads import THREADS
from gpt2block.errors import InputError, shown
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.files.tokenizers.encoding import Encoding, rules, special_id, tokens_of
from gpt2block.files.tokenizers.lookup import of_outputs
from gpt2block.files.tokenizers.tokenizer import end_of_text
from gpt2block.sampling import Sampling

if TYPE_CHECKING:
    from gpt2block.engine.generation.sequences import TokenSequence
    from gpt2block.engine.model import ModelEngine

FORMAT, VERSION = "gpt2block_receipt", 1  # field with the version of the format, and its value
# Folders of the package whose code cannot change a bit of a text.
NOT_HASHED = ("apps", "bulk", "emulator", "evaluation", "judge")
SHA256_THREADS = 8
# Fields that are for information, or that a check compares with the generated text.
NOT_COMPARED = "gpt2block", "model", "gpus", "options", "tokens", "finish_reason", "logprobs"
NAMES = "model", "finish_reason"  # fields of NOT_COMPARED that are strings or null
# Beginnings of the types of events without a receipt in a stream of /v1/messages
EVENTS = "message_start", "message_stop", "content_block_", "ping"
SAMPLED = tuple(each.name for each in fields(Sampling) if each.name != "end_ids")
_known: WeakKeyDictionary[object, dict[str, object]] = WeakKeyDictionary()  # results of `identity`
_hashes: dict[object, str] = {}  # hashes of weights by config and states of their files


def identity(engine: ModelEngine) -> dict[str, object]:
    """Return the fields of a receipt that state the model, its formats, the code and the device.

    The first call for an engine hashes the weights. Raises CheckpointError if the files of the
    weights have changed since they were opened.
    """
    if engine not in _known:
        checkpoint = getattr(engine, "checkpoint", None)
        _known[engine] = {
            FORMAT: VERSION,
            "gpt2block": doctor.version(),
            "model": None if checkpoint is None else checkpoint.name,
            "weights": _of_arrays(engine) if checkpoint is None else of_checkpoint(checkpoint),
            **engine.formats.facts(),
            "code": hash_of_sources(Path(__file__).parent.parent, NOT_HASHED),
            **_device(engine.cache_kind[3]),
        }
    return _known[engine]


def _device(device: str) -> dict[str, object]:
    """Return the fields about a device, named as in a CacheKind; on the CPU also about its BLAS."""
    facts: dict[str, object]
    if device == "cpu":
        config: Any = np.show_config(mode="dicts")
        blas = config["Build Dependencies"]["blas"]
        simd = config.get("SIMD Extensions", {}).get("found", [])[-1:]
        stated = [os.environ[name] for name in THREADS if os.environ.get(name)]
        core, threads = "", (*stated, os.cpu_count())[0]
        if library := _openblas():
            core = library.scipy_openblas_get_corename64_().decode()
            threads = library.scipy_openblas_get_num_threads64_()
        own = (core, blas.get("name"), blas.get("version"), "NumPy", np.__version__, *simd)
        facts = {"device": "cpu", "gpus": 0, "nvrtc": None, "kernels": None}
        return {**facts, "blas": " ".join(filter(None, own)), "threads": str(threads)}
    numbers = device.removeprefix("cuda:").split(",")
    with cupy.cuda.Device(int(numbers[0])):
        facts = {"device": f"sm_{compute_capability()}", "gpus": len(numbers)}
    facts["nvrtc"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    facts["kernels"] = hash_of_sources(Path(kernels_cu.__path__[0]))
    return {**facts, "blas": None, "threads": None}


def _openblas() -> Any:
    """Return the OpenBLAS that NumPy has loaded; None for another BLAS."""
    of_numpy = Path(np.__file__).parent
    for folder in (of_numpy.with_name("numpy.libs"), of_numpy / ".dylibs"):
        for path in folder.glob("libscipy_openblas*"):
            with suppress(AttributeError):  # another build of OpenBLAS
                library = ctypes.CDLL(str(path))  # loaded already
                library.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
                return library
    return None


def use_threads(stated: object) -> None:
    """Compute products with the number of threads that a receipt states, if BLAS is an OpenBLAS."""
    if re.fullmatch("[1-9][0-9]{0,3}", str(stated)) and (library := _openblas()):
        library.scipy_openblas_set_num_threads64_(int(str(stated)))


@lru_cache(maxsize=4)
def hash_of_sources(folder: Path, without: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of the Python and CUDA sources below a folder. without: its folders."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.suffix in (".py", ".cu", ".cuh") and name.parts[0] not in without:
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _of_arrays(engine: ModelEngine) -> str:
    """Return the SHA-256 of the config and the stored values of weights given as arrays."""
    digest = hashlib.sha256(repr(engine.config).encode())
    for name, array, _ in engine.tensors():
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def of_checkpoint(checkpoint: Checkpoint) -> str:
    """Return the SHA-256 of a checkpoint's config and of its tensors, sorted by name.

    Raises CheckpointError if a file has changed since the checkpoint was opened.
    """
    checkpoint.check_unchanged()
    key = repr(checkpoint.config), checkpoint.opened
    if key not in _hashes:
        digest = hashlib.sha256(key[0].encode())
        tensors = sorted(checkpoint.stored.items())
        with ThreadPoolExecutor(SHA256_THREADS) as threads:
            hashed = threads.map(_of_tensor, (stored for _, stored in tensors))
            for (name, stored), own in zip(tensors, hashed, strict=True):
                digest.update(f"{name} {stored.types} {stored.shape} {stored.head_order}".encode())
                digest.update(own)
        checkpoint.check_unchanged()  # not while its bytes were read, either
        _hashes[key] = digest.hexdigest()
    return _hashes[key]


def _of_tensor(stored: Stored) -> bytes:
    """Return the SHA-256 of a tensor's bytes in its file."""
    digest = hashlib.sha256()
    for piece in stored.sources:
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


_of_text = lru_cache(maxsize=4)(of_tokenizer)


def certify(engine: ModelEngine, sequence: TokenSequence) -> dict[str, object]:
    """Return the receipt of a sequence that has ended, which an engine has generated."""
    return receipt_of(sequence, identity(engine))


def receipt_of(sequence: TokenSequence, known: Mapping[str, object]) -> dict[str, Any]:
    """Return the receipt of a sequence that has ended. known: the `identity` of its engine."""
    ends, rule = sequence.ends, sequence.rule and sequence.rule.source
    reader: object = of_outputs(sequence.reader) if ends.stop or rule else None
    return {
        **known,
        "adapter": sequence.adapter.digest,
        "tokenizer": _of_text(reader),
        "llguidance": importlib.metadata.version("llguidance") if rule else None,
        "options": {
            **{name: getattr(sequence.sampling, name) for name in SAMPLED},
            "logit_bias": [list(pair) for pair in sequence.sampling.biases],
            "max_new_tokens": ends.max_new_tokens,
            "stop": list(ends.stop),
            "stop_ids": sorted(ends.stop_ids),
            "unwritten": sorted(sequence.unwritten) if ends.stop else [],
            "rule": rule,
        },
        "prompt": sequence.prompt.tolist(),
        "tokens": list(sequence.tokens),
        "finish_reason": sequence.finish_reason,
        "logprobs": base64.b64encode(np.array(sequence.logprobs, "<f4").tobytes()).decode(),
    }


def json_of(text: str | bytes) -> Any:
    """Return the value of JSON. Raises InputError, also for an object with a repeated key."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected the JSON of a receipt: {error}") from None


def parsed(receipt: object) -> dict[str, Any]:
    """Return a receipt, which can also be JSON text, as an object. Raises InputError.

    receipt: may also be an InputError, the reason why there is none; this function raises it.
    """
    if isinstance(receipt, InputError):
        raise receipt
    value = json_of(receipt) if isinstance(receipt, (str, bytes)) else receipt
    if not isinstance(value, Mapping):
        raise InputError(f"expected a receipt, got {shown(value)}")
    if FORMAT not in value:
        raise InputError(f"{FORMAT}: expected, but missing")
    return dict(value)


def require_equal(stated: Mapping[str, object], known: dict[str, object], before: str = "") -> None:
    """Raise InputError, which names the field, unless a receipt has the values of `known`.

    Raises KeyError for a missing field. Of fields that are not compared, the types are checked.
    """
    for name, value in known.items():
        own, kinds = stated[name], (str, type(None)) if name in NAMES else (type(value),)
        wrong = type(own) not in kinds if name in NOT_COMPARED else own != value
        if wrong or isinstance(own, bool):
            own, other = shown(own)[:24], shown(value)[:24]
            hint = ": use verify --threads" if name == "threads" else ""
            raise InputError(f"{before}{name}: the receipt states {own}, here it is {other}{hint}")


def append_receipts(path: str | Path, receipts: Iterable[object]) -> None:
    """Append receipts to a file, each as a line of JSON. Raises OSError."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(each, separators=(",", ":")) + "\n" for each in receipts)


def found_in(value: object, unended: dict[str, InputError] | None = None) -> Iterator[Any]:
    """Yield the receipts in a value or JSON: a receipt, a line of `map`, an answer, or a list.

    In the place of a receipt that is missing or cannot be read, an InputError is yielded. A choice
    in an event of a stream has its receipt in a later event: until then, it is in `unended`. Events
    of /v1/messages other than `message_delta` are skipped.
    """
    unended, waiting = {} if unended is None else unended, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict) and value.get("receipt") is not None:
            waiting.append(value["receipt"])
        elif isinstance(value, dict) and str(value.get("type")).startswith(EVENTS):
            continue
        elif isinstance(value, dict) and isinstance(choices := value.get("choices"), list):
            for number, each in reversed([*enumerate(choices)]):
                own = each if isinstance(each, dict) else {"receipt": each}
                key = shown((value.get("id"), own.get("index"), number))
                unended[key] = InputError(f"choice {shown(own.get('index'))} has no receipt")
                if own.get("receipt") is not None or own.get("finish_reason"):
                    lacks = unended.pop(key)
                    waiting.append(own.get("receipt") or lacks)
        else:
            try:
                if isinstance(value, str):
                    waiting.append(json_of(value))
                else:
                    yield parsed(value)
            except InputError as error:
                yield error
