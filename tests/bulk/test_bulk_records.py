"""Errors of single records, which must not affect other records; kept fields; Parquet.

The shards are computed in this process, without a cluster.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2block import GPT2, CheckpointError, DeviceError, GPT2Config, GPT2Weights, InputError
from gpt2block.bulk import Predictor, record_seed, records, shards
from gpt2block.bulk.job import Job
from gpt2block.bulk.records import Cell
from gpt2block.bulk.tasks import Problem, Scoring, problem_of
from gpt2block.engine.generation import scoring
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from tests import inline_cluster
from tests.inline_cluster import InlineClient

pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
from unittest.mock import Mock

from gpt2block.bulk import driver

MODEL = Path(__file__).parents[2] / "gpt2block/files/bundled/shakespeare"


class PanicException(BaseException):
    """An error like tiktoken's, which is not derived from Exception."""


class CUDARuntimeError(RuntimeError):
    """An error like CuPy's."""


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> InlineClient:
    return inline_cluster.use(monkeypatch)


def run_job(tmp_path: Path, source: str | Path, **options: Any) -> tuple[driver.Outcome, Path]:
    """Score an input, a path or the text of a JSONL file; return the outcome and the output."""
    path = Path(source)
    if isinstance(source, str):
        path = tmp_path / "in.jsonl"
        path.write_text(source)
    options = {"task": "score", "device": "cpu", **options}
    output = tmp_path / "o"
    return driver.run(Job(output=str(output), **options), [str(path)], Mock()), output


def counts(outcome: driver.Outcome) -> tuple[int, int]:
    """Return the numbers of records and errors of a job; assert that no shard failed."""
    assert outcome.failed == {}
    return outcome.records, outcome.errors


def json_texts(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def rows(output: Path, name: str = "part-00000.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / name).read_text().splitlines()]


def errors(output: Path) -> list[dict[str, Any]]:
    return rows(output, "errors/part-00000.ndjson")


@pytest.mark.parametrize(
    "error",
    [PanicException("a panic"), RecursionError("too deep"), KeyError("x"), MemoryError("7 EiB")],
)
@pytest.mark.parametrize("stage", ["_ids", "_task"])
def test_an_exception_becomes_the_error_of_its_record(
    client: InlineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException,
    stage: str,
) -> None:  # fmt: skip
    """The exception is raised while the record is tokenized or computed."""
    ids, run = Predictor._ids, Scoring.run

    def tokenize(self: Predictor, value: Any) -> Any:
        if value == "bad" and stage == "_ids":
            raise error
        return ids(self, value)

    def compute(self: Any, engine: Any, found: Any, seeds: Any) -> Any:
        if stage == "_task" and any(bytes(one.tolist()) == b"bad" for one in found):
            raise error
        return run(self, engine, found, seeds)

    monkeypatch.setattr(Predictor, "_ids", tokenize)
    monkeypatch.setattr(Scoring, "run", compute)
    outcome, output = run_job(tmp_path, json_texts("good", "bad", "fine"))
    assert counts(outcome) == (2, 1)
    assert [row["index"] for row in rows(output)] == [0, 2]
    (entry,) = errors(output)
    assert (entry["index"], entry["line"]) == (1, 2)
    reason = "not enough memory" if isinstance(error, MemoryError) else type(error).__name__
    assert entry["reason"].startswith(f"{reason}: ")
    assert client.tries == [0]


def test_the_reason_of_a_record_is_one_short_line() -> None:
    for error in (
        KeyboardInterrupt(), SystemExit(1), CUDARuntimeError("illegal address"), DeviceError("x"),
        CheckpointError("x"),
    ):  # fmt: skip
        with pytest.raises(type(error)):  # not an error of a record
            problem_of(error)
    reason = problem_of(ValueError("a\nb" * 10_000)).reason
    assert reason.isprintable()
    assert len(reason) <= 500


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (KeyError("a"), 1),
        (PanicException("b"), 1),
        (InputError("c"), 1),
        (RecursionError("d"), 1),
        (OSError("a"), 1 + driver.RETRIES),
        (MemoryError("b"), 1 + driver.RETRIES),
        (DeviceError("c"), 1 + driver.RETRIES),
    ],
)
def test_a_shard_is_retried_only_for_errors_that_a_retry_may_avoid(
    client: InlineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, tries: int
) -> None:
    monkeypatch.setattr(records, "read", Mock(side_effect=error))
    outcome, _ = run_job(tmp_path, json_texts("To be"))
    assert outcome.failed == {0: f"{type(error).__name__}: {error}"}
    assert client.tries == [0] * tries


def test_a_shard_without_memory_for_any_record_is_retried(
    client: InlineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scoring, "run", Mock(side_effect=MemoryError("no memory")))
    outcome, _ = run_job(tmp_path, json_texts("To be", "or not"))
    assert outcome.failed == {0: "MemoryError: not enough memory for any record of shard 0"}
    assert len(client.tries) == 1 + driver.RETRIES


def test_a_model_without_a_tokenizer(client: InlineClient, tmp_path: Path) -> None:
    """Inputs of text are refused at the start; a text among token ids gives an error record."""
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_ctx=16, vocab_size=20)
    model = str(save_pretrained(tmp_path / "model", GPT2Weights.random(0, config)))
    path = tmp_path / "in.txt"
    path.write_text("To be\n")
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json for a vocabulary of 20"):
        run_job(tmp_path, path, model=model)
    assert client.tries == []
    lines = '{"text": "To be"}\n{"text": [1, 2, 3]}\n'
    outcome, output = run_job(tmp_path, lines, model=model)
    assert counts(outcome) == (1, 1)
    assert errors(output)[0]["reason"].startswith("text needs a tokenizer: ")
    assert "expected tokenizer.json" in errors(output)[0]["reason"]


def test_texts_do_not_depend_on_the_size_of_shards(tmp_path: Path) -> None:
    """Equal records get different seeds; `generate` with a record's seed gives its text."""
    found = []
    for size in (3, 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        options: dict[str, Any] = {"task": "generate", "options": {"max_new_tokens": 8, "seed": 3}}
        outcome, output = run_job(folder, json_texts(*"aac"), shard_size=size, **options)
        assert counts(outcome) == (3, 0)
        parts = sorted(path.name for path in output.glob("part-*"))
        found.append([row for part in parts for row in rows(output, part)])
    assert found[0] == found[1]
    texts = [row["completion"] for row in found[0]]
    assert len({*texts}) == 3
    model = GPT2.from_pretrained(MODEL, device="cpu")
    for index, text in enumerate("aac"):
        seed = record_seed(3, index)
        assert model.generate(text, max_new_tokens=8, seed=seed).text == texts[index]


def test_a_job_with_another_end_token_is_another_job(tmp_path: Path) -> None:
    model = save_pretrained(tmp_path / "model", Checkpoint.open(MODEL))
    options = {"task": "generate", "options": {"max_new_tokens": 2}, "model": str(model)}
    run_job(tmp_path, json_texts("abc"), **options)
    run_job(tmp_path, json_texts("abc"), **options)
    (model / "tokenizer_config.json").write_text('{"eos_token": "A"}')
    with pytest.raises(InputError, match="tokenizer_sha256"):
        run_job(tmp_path, json_texts("abc"), **options)


@pytest.fixture
def pa() -> Any:
    """Import pyarrow with pyarrow.parquet."""
    pytest.importorskip("pyarrow.parquet")
    return pytest.importorskip("pyarrow")


def nested(depth: int) -> str:
    return '{"id": ' + "[" * depth + "]" * depth + ', "text": "To be"}\n'


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_kept_field_that_is_nested_too_deep(tmp_path: Path, form: str) -> None:
    """Python up to 3.11 reads this depth but cannot write it, so the record gets an error."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    depth = sys.getrecursionlimit() * 9 // 10
    lines = nested(2) + nested(depth // 2) + nested(depth)
    outcome, output = run_job(tmp_path, lines, keep=("id",), form=form)
    assert sum(counts(outcome)) == 3
    assert outcome.records >= 1
    assert outcome.errors >= (sys.version_info < (3, 12))
    for error in errors(output) if outcome.errors else ():
        assert error["index"] > 0
        assert "RecursionError" in error["reason"] or "not JSON" in error["reason"]


def test_a_text_file_has_one_field(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("To be\nor not\n")
    outcome, output = run_job(tmp_path, path, keep=("text", "text"))
    assert outcome.failed == {}
    assert [row["text"] for row in rows(output)] == ["To be", "or not"]
    other = tmp_path / "p"
    with pytest.raises(InputError, match=r"keep: .*in\.txt is a text file, whose lines have only"):
        run_job(other, path, keep=("text", "id"))
    assert not (other / "o").exists()
    _, output = run_job(tmp_path / "b", path, column="body", keep=("body",))
    assert [row["body"] for row in rows(output)] == ["To be", "or not"]
    with pytest.raises(InputError, match="only the field 'body'"):
        run_job(other, path, column="body", keep=("text",))


def test_parquet_without_pyarrow(
    client: InlineClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match="Parquet needs pyarrow, of the extra parquet: run "):
        run_job(tmp_path, json_texts("To be"), form="parquet")
    assert client.tries == []
    assert not (tmp_path / "o").exists()


def test_kept_columns_keep_their_arrow_types(pa: Any, tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["To be", "x", "or not"]),
            "int64": pa.array([2**62, 1, None], pa.int64()),
            "uint8": pa.array([1, 2, 255], pa.uint8()),
            "bool": [True, False, None],
            "float": pa.array([1.5, np.nan, None], pa.float32()),
            "list": pa.array([[1, 2], [], None], pa.list_(pa.int16())),
            "struct": [{"a": 1, "b": "x"}, None, {"a": 2, "b": "y"}],
            "ns": pa.array([1, 2, 3], pa.timestamp("ns", "Europe/Nowhere")),
            "far": pa.array([2**62, 1, -(2**62)], pa.timestamp("ms")),
            "date": pa.array([0, 1, 2], pa.date32()),
            "decimal": pa.array([1, None, 3], pa.decimal128(20, 2)),
            "words": pa.array(["a", "b", "a"]).dictionary_encode(),
            "bytes": pa.array([b"\xff", b"", None], pa.binary()),
            "null": pa.nulls(3),
        }
    )
    names = tuple(name for name in table.column_names if name != "text")
    for number in range(2):
        (tmp_path / "in").mkdir(exist_ok=True)
        pa.parquet.write_table(table, tmp_path / f"in/{number}.parquet", row_group_size=2)
    path = tmp_path / "in"
    outcome, output = run_job(tmp_path, path, keep=names, form="parquet", shard_size=5)
    assert counts(outcome) == (4, 2)
    parts = [pa.parquet.read_table(output / f"part-0000{number}.parquet") for number in range(2)]
    assert parts[0].schema == parts[1].schema
    found = pa.concat_tables(parts)
    stored = pa.parquet.read_table(tmp_path / "in/0.parquet")
    for name in names:
        assert found.schema.field(name).type == stored.schema.field(name).type
    kept = pa.concat_tables([stored, stored]).take([0, 2, 3, 5]).select(names)
    assert found.select(names).combine_chunks().equals(kept.combine_chunks()) or (
        found.select(names).drop(["float"]).equals(kept.drop(["float"]))  # NaN is not equal to NaN
    )


def test_arrow_values_that_json_output_cannot_hold_are_errors_of_their_records(
    pa: Any, tmp_path: Path
) -> None:
    kinds = {"far": pa.timestamp("ms"), "zone": pa.timestamp("us", "Europe/Nowhere")}
    for name, kind in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        values = pa.array([2**62, None, None], kind)
        pa.parquet.write_table(pa.table({"text": ["To be", "or", "not"], name: values}),
                       folder / "in.parquet")  # fmt: skip
        outcome, output = run_job(folder, folder / "in.parquet", keep=(name,))
        assert counts(outcome) == (2, 1)
        assert errors(output)[0]["reason"].startswith("its fields cannot be written: ")
        # The text itself may come from such a column.
        outcome, output = run_job(folder / "other", folder / "in.parquet", column=name)
        assert counts(outcome) == (0, 3)


def test_types_that_differ_between_files(pa: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, kind in enumerate((pa.int32(), pa.string())):
        ids = pa.array([5]).cast(kind)
        pa.parquet.write_table(
            pa.table({"text": ["To be"], "id": ids}), folder / f"{number}.parquet"
        )
    with pytest.raises(InputError, match=r"'id' is int32 in 0\.parquet and string in 1\.parquet"):
        run_job(tmp_path, folder, keep=("id",), form="parquet")
    assert not (tmp_path / "o").exists()
    (folder / "0.parquet").rename(folder / "2.parquet")
    with pytest.raises(InputError, match=r"'id' is string in 1\.parquet and int32 in 2\.parquet"):
        run_job(tmp_path, folder, keep=("id",), form="parquet")
    _, output = run_job(tmp_path, folder, keep=("id",))
    assert [row["id"] for row in rows(output)] == ["5", 5]


def test_fields_of_mixed_input_are_text_in_parquet(pa: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text(
        '{"text": "To be", "id": [1]}\n{"text": "or", "id": "\\ud800"}\n{"text": "not"}\n'
    )
    pa.parquet.write_table(pa.table({"text": ["To be"], "id": [7]}), folder / "b.parquet")
    outcome, output = run_job(tmp_path, folder, keep=("id",), form="parquet")
    assert counts(outcome) == (3, 1)
    found = pa.parquet.read_table(output / "part-00000.parquet")
    assert found["id"].to_pylist() == ["[1]", "null", "7"]
    assert "surrogates not allowed" in errors(output)[0]["reason"]


def test_parquet(pa: Any, tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"a\xff")]
    )
    file = tmp_path / "in.parquet"
    texts = pa.chunked_array([pa.array(["a", "b", "c", None, "e"]), bad])
    table = pa.table({"text": texts, "id": [{"n": n} for n in range(7)]})
    pa.parquet.write_table(table, file, row_group_size=3)
    cut = records.cut([file], 4, ["text", "id"])
    found = [entry for shard in cut for entry in records.read(shard, "text", ["id"])]
    assert [entry.index for entry in found] == [entry.line for entry in found] == list(range(7))
    assert isinstance(found[6].value, Problem)
    good = [entry for entry in found if not isinstance(entry.value, Problem)]
    assert [entry.value for entry in good] == ["a", "b", "c", None, "e", "a"]
    assert good[5].kept["id"].value() == {"n": 5}
    with pytest.raises(InputError, match="expected a column 'words', found text, id"):
        records.cut([file], 4, ["words"])
    twice = pa.table([[1], [2]], names=["text", "text"])
    pa.parquet.write_table(twice, file)
    with pytest.raises(InputError, match="expected a column 'text', found several"):
        records.cut([file], 4, ["text"])
    file.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not a Parquet file"):
        records.cut([file], 4, ["text"])


def test_a_part_as_parquet(pa: Any) -> None:
    def part() -> bytes:
        columns: Any = {"completion": "texts", "logprobs": "floats"}
        types = {"day": pa.date32()}
        writer = shards.ParquetPart(columns, ["id", "day"], types)
        day = pa.chunked_array([[datetime.date(2020, 1, 2)]])
        row = {"completion": ["a"], "logprobs": [np.ones(2, np.float32)]}
        writer.add(3, {"id": {"n": 1}, "day": Cell(day, 0)}, row)
        return writer.data()

    assert part() == part()
    assert pa.parquet.read_table(pa.BufferReader(part())).to_pylist() == [
        {"index": 3, "id": '{"n": 1}', "day": datetime.date(2020, 1, 2), "completion": ["a"],
         "logprobs": [[1.0, 1.0]]}
    ]  # fmt: skip


def test_embed_truncates(tmp_path: Path) -> None:
    """embed keeps the last tokens that fit in the context, as generate does."""
    model = GPT2.from_pretrained(device="cpu")
    long = "To be, or not to be. " * 20
    ids = model.tokenizer.encode_ordinary(long)[-256:]
    with pytest.raises(InputError, match="expected 1 to 256 tokens, got 420"):
        model.embed(long)
    np.testing.assert_array_equal(model.embed(long, overflow="truncate"), model.embed(ids))
    together = model.embed([long, "ab"], overflow="truncate")
    np.testing.assert_allclose(together[1], model.embed("ab"), atol=1e-5)
    with pytest.raises(InputError, match="overflow: expected 'error' or 'truncate', got 'x'"):
        scoring.embed(model.engine, model.tokenizer, "ab", overflow="x")  # type: ignore[arg-type]
    options = {"overflow": "truncate"}
    outcome, output = run_job(tmp_path, json_texts(long), task="embed", options=options)
    assert counts(outcome) == (1, 0)
    (row,) = rows(output)
    assert row["n_tokens"] == 256
    np.testing.assert_allclose(row["embedding"], model.embed(ids), rtol=1e-6)
