"""Bulk jobs: odd records and files in the reading, computing and writing of shards.

The cases do not use Dask, whose processes take seconds to start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fuzzing import Area, Difference, Refused, Rng, accepted, attempt, check, check_equal
from fuzzing import gpt2 as plain
from fuzzing.values import odd_argument, odd_text, odd_value
from fuzzing.vocabularies import BYTES, plain_spec
from gpt2block import GPT2
from gpt2block.bulk import records, shards
from gpt2block.bulk.job import Job, run_shard
from gpt2block.bulk.predictor import Predictor

N_CTX = 24
TASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "score": ({}, {"logprobs": True}, {"stride": 3}),
    "generate": ({"max_new_tokens": 2, "seed": 3}, {"max_new_tokens": 3, "samples": 2}),
    "embed": ({}, {"pooling": "last"}),
}
Expected = list[tuple[int, dict[str, Any] | None]]  # index, fields; None: it is no record
_folders: list[TemporaryDirectory[str]] = []


def case(rng: Rng, folder: Path) -> None:
    kinds = [_lines, _lines, _lines, _batch, _manifest, _manifest]
    if find_spec("pyarrow"):
        kinds.append(_parquet)
    rng.pick(*kinds)(rng, folder)


@lru_cache
def model_folder() -> Path:
    """Return the folder of a tiny model whose tokens are bytes; removed with the process."""
    _folders.append(TemporaryDirectory(prefix="fuzz-model-"))
    folder = Path(_folders[-1].name)
    sizes = plain.Sizes(1, 2, 4, N_CTX, 257)
    plain.write(folder, sizes, plain.random_tensors(Rng(np.random.PCG64(0)), sizes, "float32"))
    (folder / "tokenizer.json").write_text(json.dumps(plain_spec(BYTES)))
    return folder


@lru_cache
def model() -> GPT2:
    return GPT2.from_pretrained(model_folder(), device="cpu")


# --- records


def _record(rng: Rng) -> Any:
    """Return a valid or an odd record."""
    kind = rng.random()
    if kind < 0.5:
        return odd_text(rng)
    if kind < 0.7:
        return rng.integers(0, 260 if rng.chance(0.2) else 256, rng.whole(0, 30)).tolist()
    return odd_value(rng)


def _line(rng: Rng, keep: Sequence[str]) -> bytes:
    """Return a line of JSON, or of almost JSON."""
    kind = rng.random()
    if kind < 0.35:
        return rng.pick(*_ODD_LINES)
    if kind < 0.4:
        depth = int(rng.pick(50, 200, 490, 900, 3000))
        return b'{"text": "ab", "id": ' + b"[" * depth + b"]" * depth + b"}"
    if kind < 0.402:
        return json.dumps({"text": " " * 12_000}).encode()
    entry: Any = {"text": _record(rng)}
    entry |= {name: odd_value(rng) for name in keep if rng.chance(0.8)}
    entry = odd_value(rng) if kind < 0.45 else entry
    text = json.dumps(entry, ensure_ascii=rng.chance(0.5))
    return text.encode("utf-8", "surrogatepass")


_ODD_LINES = (
    b"", b"  ", b"\r", b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"null", b"[]", b"{", b"3",
    b"[" * 10**4 + b"]" * 10**4,
    b'{"text": "ab", "id": ' + b"9" * 5000 + b"}",
    b'{"text": "\\ud800", "id": "\\udfff"}',
    b'{"text": "ab", "id": NaN}',
)  # fmt: skip


def _valid(value: Any, task: str) -> bool:
    """Return whether a record must have a result."""
    if isinstance(value, str):
        try:
            count = len(value.encode())
        except UnicodeEncodeError:
            return False
        if count > 10**5:  # tiktoken fails on some of these
            return False
    elif isinstance(value, list) and all(
        type(entry) is int and 0 <= entry < 257 for entry in value
    ):
        count = len(value)
    else:
        return False
    return count >= 2 if task == "score" else 1 <= count <= N_CTX


def _simple(value: Any) -> bool:
    """Return whether a kept value can be written in both formats."""
    if isinstance(value, str):
        return value.isascii()
    return value is None or type(value) in (bool, int, float)


def _task(rng: Rng) -> tuple[Any, dict[str, Any]]:
    name = rng.pick(*TASKS)
    return name, dict(rng.pick(*TASKS[name]))


def _lines(rng: Rng, folder: Path) -> None:
    """Files of lines in a whole job, without Dask."""
    inputs = folder / "in"
    inputs.mkdir()
    expected: Expected = []
    keep = rng.pick((), ("id",), ("id", "other"))
    first = 0
    for number in range(rng.whole(1, 4)):
        suffix = (
            ".txt" if rng.chance(0.25) and not keep else rng.pick(".jsonl", ".ndjson", ".JSONL")
        )
        lines = [
            odd_text(rng).replace("\n", "").encode() if suffix == ".txt" else _line(rng, keep)
            for _ in range(rng.whole(0, 8))
        ]
        end = rng.pick(b"\n", b"\r\n")
        data = end.join(lines) + (end if rng.chance(0.7) else b"")
        if rng.chance(0.1):
            data = b"\xef\xbb\xbf" + data
        (inputs / f"{number}{suffix}").write_bytes(data)
        pieces = data.split(b"\n")
        pieces = pieces[:-1] if not pieces[-1] else pieces
        for at, piece in enumerate(pieces):
            expected += _expected(first + at, piece, at == 0, suffix == ".txt")
        first += len(pieces)
    _job(rng, folder, [inputs], expected, keep)


def _expected(index: int, line: bytes, start: bool, text: bool) -> Expected:
    """Return a line's record; nothing for a blank line."""
    line = line.removesuffix(b"\r")
    try:
        found = line.decode("utf-8-sig" if start else "utf-8")
        if not found.strip():
            return []
        entry = {"text": found} if text else json.loads(found)
    except (ValueError, RecursionError):
        return [(index, None)]
    return [(index, entry if isinstance(entry, dict) and "text" in entry else None)]


def _job(
    rng: Rng, folder: Path, inputs: list[Path], expected: Expected, keep: tuple[str, ...],
    form: str | None = None,
) -> None:  # fmt: skip
    """Check that each record appears once, in order, as a row or an error; valid ones as rows."""
    task, options = _task(rng)
    job = Job(
        task=task, output=str(folder / "out"), model=str(model_folder()), device="cpu",
        options=options, keep=keep, shard_size=rng.whole(1, 9),
        form=form or rng.pick("jsonl", "parquet") if find_spec("pyarrow") else "jsonl",
        batch_tokens=int(rng.pick(1, 100, 16384)),
    )  # fmt: skip
    job = accepted(job.checked)
    files = accepted(records.find_files, [str(path) for path in inputs])
    cut = accepted(records.cut, files, job.shard_size, [job.column, *job.keep])
    out, token = folder / "out", "a token"
    rows: dict[int, Any] = {}
    errors: dict[int, str] = {}
    order: list[int] = []
    with shards.folder_lock(out, token):
        for shard in cut:
            done = run_shard(job, shard, token)
            if not isinstance(done, shards.ShardEntry):
                raise Difference(f"shard {shard.number}: {done}")
            part = _read_part(out / shards.part_name(shard.number, job.form))
            wrong = []
            if done.errors_sha256 is not None:
                text = (out / shards.errors_name(shard.number)).read_text(encoding="utf-8")
                wrong = [json.loads(line) for line in text.splitlines()]
            check_equal("counts", (done.records, done.errors), (len(part), len(wrong)))
            order += [row["index"] for row in part]
            rows |= {row["index"]: row for row in part}
            errors |= {row["index"]: row["reason"] for row in wrong}
        check_equal("order", order, sorted(order))
        check_equal("indices", sorted([*order, *errors]), [index for index, _ in expected])
    _check_rows(rng, job, expected, rows, errors)


def _read_part(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        import pyarrow.parquet  # noqa: PLC0415

        found: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
        return found
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def _check_rows(
    rng: Rng, job: Job, expected: Expected, rows: dict[int, Any], errors: dict[int, str]
) -> None:
    right = []
    for index, entry in expected:
        if index in errors:
            kept = [entry.get(name) for name in job.keep] if entry else []
            valid = entry and _valid(entry["text"], job.task) and all(map(_simple, kept))
            check(not valid, f"record {index} refused: {errors[index]}")
            continue
        if entry is None:
            raise Difference(f"record {index}: a result for a line that is not a record")
        right.append((index, entry))
        for name in job.keep if job.form == "jsonl" else ():
            value = entry.get(name)
            if value is None or type(value) in (bool, str, int):
                check_equal(name, rows[index][name], value)
    if right and job.task == "score":
        index, entry = right[rng.whole(len(right))]
        stride = job.options.get("stride")
        truth: Any = accepted(model().score, entry["text"], stride)
        got = rows[index]["log_likelihood"]
        near = math.isclose(got, truth.log_likelihood, rel_tol=1e-4)
        check(near, f"record {index}: {got}, not {truth.log_likelihood}")
        check_equal("n_tokens", rows[index]["n_tokens"], truth.n_tokens)


# --- Parquet


def _parquet(rng: Rng, folder: Path) -> None:
    """Parquet columns of all kinds."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet  # noqa: PLC0415

    count = rng.whole(0, 9)
    texts: list[Any] = [odd_text(rng) if rng.chance(0.8) else None for _ in range(count)]
    numbers = [rng.whole(-5, 2**40) if rng.chance(0.9) else None for _ in range(count)]
    kept = _arrow_column(rng, pa, numbers)
    column = rng.pick(
        pa.array(texts, pa.string()), pa.array(texts, pa.large_string()),
        pa.array(texts, pa.string()).dictionary_encode(),
        pa.array([None if t is None else t.encode() for t in texts], pa.binary()),
        pa.array([None if t is None else [*t.encode()] for t in texts], pa.list_(pa.int64())),
        pa.array(numbers, pa.int64()),
    )  # fmt: skip
    path = folder / "in.parquet"
    table = pa.table({"text": column, "id": kept})
    damaged = rng.chance(0.1)
    try:
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    except pa.ArrowException as error:  # a type that Parquet does not have
        raise Refused from error
    keep = rng.pick((), ("id",))
    if damaged:
        data = path.read_bytes()
        path.write_bytes(data[: rng.whole(len(data))])
        attempt(False, records.cut, [path], 3, ["text", *keep])
        return
    values = column.to_pylist()
    ids = numbers if kept.type == pa.int64() else [object()] * count
    entries = zip(values, ids, strict=True)
    expected: Expected = [(i, {"text": text, "id": own}) for i, (text, own) in enumerate(entries)]
    _job(rng, folder, [path], expected, keep, "parquet" if keep else None)


def _arrow_column(rng: Rng, pa: Any, numbers: list[int | None]) -> Any:
    """Return a column to keep."""
    large = [None if n is None else n * 2**20 for n in numbers]
    kind = rng.pick(
        pa.int64(), pa.timestamp("ns"), pa.timestamp("us", "Nowhere/At_All"),
        pa.timestamp("s"), pa.timestamp("ms", "Europe/Berlin"), pa.duration("ns"),
        pa.time64("ns"), pa.date64(),
    )  # fmt: skip
    try:
        array = pa.array(rng.pick(numbers, large), pa.int64())
        if rng.chance(0.2):
            return pa.array([None if n is None else {"a": [n]} for n in numbers])
        if rng.chance(0.2):
            return pa.array([None if n is None else bytes([n % 256]) for n in numbers], pa.binary())
        return array.cast(kind, safe=False)
    except pa.ArrowException:
        return pa.array(numbers, pa.int64())


# --- Predictor and manifest


def _batch(rng: Rng, folder: Path) -> None:
    """A batch with wrong records, wrong seeds, or wrong columns."""
    task, options = _task(rng)
    predictor = Predictor(task, model_folder(), device="cpu", **options)
    values: Any = [_record(rng) for _ in range(rng.whole(0, 6))]
    batch: Any = {rng.pick("text", "tokens"): values}
    if rng.chance(0.5):
        seeds = [rng.whole(2**60) for _ in values]
        batch["seed"] = seeds if rng.chance(0.5) else [odd_argument(rng) for _ in values]
    changed = rng.chance(0.4)
    if changed:
        batch = rng.pick(
            odd_argument(rng), {}, {"text": odd_argument(rng)}, {"other": values},
            {**batch, "seed": odd_argument(rng)}, {"text": [odd_argument(rng), "ab"]},
        )  # fmt: skip
    found = attempt(not changed, predictor, batch)
    if changed:
        return
    check_equal("rows", len(found["error"]), len(values))
    for index, (value, seed) in enumerate(
        zip(values, batch.get("seed", [0] * len(values)), strict=True)
    ):
        reason, good_seed = found["error"][index], type(seed) is int and 0 <= seed < 2**64
        wrong = reason and _valid(value, task) and good_seed
        check(not wrong, f"record {index} refused: {reason}")


def _manifest(rng: Rng, folder: Path) -> None:
    """A manifest.ndjson that was changed by hand."""
    digest = "0123456789abcdef" * 4
    wrong_counts = [rng.whole(0, 3) for _ in range(rng.whole(0, 5))]
    entries: list[Any] = [
        asdict(shards.ShardEntry(i, 3 - count, count, 12, digest, digest if count else None))
        for i, count in enumerate(wrong_counts)
    ]
    lines: list[Any] = [{"gpt2block map": 2, "task": "score", "lines": 15}, *entries]
    changed = rng.chance(0.8)
    wrong = False  # whether an entry has an impossible value
    if changed and entries and rng.chance(0.7):
        entry = lines[rng.whole(1, len(lines))]
        name = rng.pick(*entry)
        value = rng.pick(odd_value(rng), -1, None, [[1]], {"a": 1}, True, 1.0)
        entry[name] = value
        wrong = not _fits(name, value)
    elif changed:
        lines[rng.whole(len(lines))] = odd_value(rng)
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    if changed and rng.chance(0.2):
        position = rng.whole(len(data))
        data = rng.pick(
            data[:position], data[:position] + b"\xff" + data[position:], b"[" * 10**5 + b"\n"
        )
        wrong = False
    (folder / shards.MANIFEST).write_bytes(data)
    manifest = attempt(not changed, shards.Manifest, folder)
    check(not wrong, f"accepted a manifest with a wrong value: {lines}")
    if not changed:
        check_equal("entries", [asdict(manifest.done[i]) for i in sorted(manifest.done)], entries)
    accepted(manifest.forget_damaged, "jsonl")


def _fits(name: str, value: Any) -> bool:
    if name == "sha256":
        return isinstance(value, str) and len(value) == 64
    if name == "errors_sha256":
        return value is None or (isinstance(value, str) and len(value) == 64)
    return type(value) is int and value >= 0


AREA = Area("bulk", 2, case)
