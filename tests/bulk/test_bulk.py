"""`gpt2block.bulk` without Dask: results of a Predictor, reading the input, writing the output."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2block import GPT2, InputError
from gpt2block.bulk import Predictor, record_seed, records, shards
from gpt2block.bulk import job as job_module
from gpt2block.bulk.job import Job
from gpt2block.bulk.predictor import GROUP
from gpt2block.bulk.records import ChangedError, Record
from gpt2block.bulk.tasks import Problem
from gpt2block.cuda.formats import FormatOptions
from gpt2block.engine.model import in_groups
from tests.markov import MarkovEngine, cycle
from tests.refusals import cases

TEXTS = ["O Romeo, Romeo!", "", "x", "\ud800", 7, None, "Good morrow.\n", [72, 105], [256], [0.5]]
BAD = {
    1: "expected at least two tokens, got 0",
    2: "expected at least two tokens, got 1",
    3: "character 0 is U+D800, a lone surrogate",
    4: "expected text or token ids, got int",
    5: "expected text or token ids, got NoneType",
    8: "token 0 is 256: expected ids from 0 to 255",
    9: "expected text or a row of integers",
}


@pytest.fixture(scope="module")
def model() -> GPT2:
    return GPT2.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def scoring() -> Predictor:
    return Predictor("score", device="cpu", logprobs=True)


def test_scores_equal_those_of_the_model(model: GPT2, scoring: Predictor) -> None:
    long = "To be, or not to be. " * 30  # longer than the context
    column: Any = np.empty(len(TEXTS) + 1, object)
    column[:] = [*TEXTS, long]
    batch = scoring({"text": column, "id": np.arange(len(column))})
    assert list(batch) == [
        "text", "id", "log_likelihood", "perplexity", "n_tokens", "n_bytes", "logprobs", "error"
    ]  # fmt: skip
    assert batch["text"] is column
    for index, text in enumerate(column):
        if index in BAD:
            assert batch["error"][index].startswith(BAD[index])
            assert np.isnan(batch["log_likelihood"][index])
            continue
        score = model.score(text)
        assert batch["error"][index] == ""
        assert batch["n_tokens"][index] == score.n_tokens == len(batch["logprobs"][index])
        assert batch["n_bytes"][index] == score.bytes
        np.testing.assert_allclose(batch["log_likelihood"][index], score.log_likelihood, 1e-6)
        np.testing.assert_allclose(batch["perplexity"][index], score.perplexity, 1e-6)
        np.testing.assert_allclose(batch["logprobs"][index].sum(), score.log_likelihood, 1e-5)


def test_batches_fill_the_engine_s_groups(
    scoring: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last batch of a shard may have a partly filled group."""
    random = np.random.default_rng(0)
    ids = {i: np.zeros(n, np.int32) for i, n in enumerate(random.integers(16, 512, 1000))}
    ids[1000] = np.zeros(20000, np.int32)
    gpu = SimpleNamespace(engine=None)
    monkeypatch.setitem(vars(scoring), "model", gpu)
    for most in (100, GROUP - 1, GROUP, 2 * GROUP, 50000):
        monkeypatch.setattr(scoring._task, "tokens_at_once", most)
        batches = list(scoring._batches(ids))
        assert sorted(index for part in batches for index in part) == list(ids)
        assert batches[0][0] == 1000
        sizes = [[len(ids[index]) for index in part] for part in batches]
        assert all(sum(part) <= most or len(part) == 1 for part in sizes)
        if most < GROUP:
            continue
        records_of = [[ids[index] for index in part] for part in batches]
        groups = [[sum(map(len, g)) for g in in_groups(part, GROUP)] for part in records_of]
        assert all(size > GROUP - 512 for part in groups[:-1] for size in part)
        assert max(map(len, groups)) == most // GROUP


def test_group_is_the_cuda_engine_s_tokens_at_once() -> None:
    pytest.importorskip("cupy", reason="the engine needs CuPy")
    from gpt2block.engine.cuda.model import TOKENS_AT_ONCE  # noqa: PLC0415

    assert TOKENS_AT_ONCE == GROUP


def test_results_do_not_depend_on_the_rest_of_the_batch() -> None:
    """Each task gets one record, all records, the reverse order, and a pickled Predictor."""
    texts = ["ROMEO:", "O", "What light through yonder window breaks?", "Peace! Peace!"]
    for task, options in (
        ("score", {"logprobs": True}),
        ("generate", {"max_new_tokens": 5, "seed": 3, "samples": 2, "logprobs": True}),
        ("embed", {"pooling": "last"}),
    ):
        predictor = Predictor(task, device="cpu", **options)  # type: ignore[arg-type]
        seeds = [record_seed(5, index) for index in range(len(texts))]
        together = predictor({"text": texts, "seed": seeds})
        copy = pickle.loads(pickle.dumps(predictor))
        assert "model" not in vars(copy)
        reverse = copy({"text": texts[::-1], "seed": seeds[::-1]})
        for index, text in enumerate(texts):
            alone = predictor({"text": [text], "seed": [seeds[index]]})
            for name in predictor.columns:
                np.testing.assert_array_equal(alone[name][0], together[name][index])
                np.testing.assert_array_equal(alone[name][0], reverse[name][-1 - index])


def test_logits_that_are_nan_are_the_error_of_their_record(monkeypatch: pytest.MonkeyPatch) -> None:
    table = cycle(256)
    table[ord("b")] = np.nan
    predictor, engine = Predictor("score", device="cpu"), MarkovEngine(table, 256)
    stand_in = SimpleNamespace(engine=engine, config=engine.config)
    monkeypatch.setitem(vars(predictor), "model", stand_in)
    found = predictor({"tokens": [list(b"abc"), list(b"xyz")]})
    assert found["error"][0].startswith("the logits are NaN between tokens 1 and 2: the weights")
    assert found["error"][1] == ""
    assert np.isnan(found["log_likelihood"]).tolist() == [True, False]


def test_seeds(model: GPT2) -> None:
    predictor = Predictor("generate", device="cpu", max_new_tokens=12, seed=1)
    texts = ["ROMEO:\n", "ROMEO:\n", "JULIET:\n"]
    derived = predictor({"text": texts})["completion"]
    assert derived[0] == derived[1]  # equal records have equal derived seeds
    seeds = (1, 2, 2**64 - 1)
    completions = predictor({"text": texts, "seed": np.array(seeds, np.uint64)})["completion"]
    assert completions[0] != completions[1]
    for text, seed, completion in zip(texts, seeds, completions, strict=True):
        assert model.generate(text, seed=seed, max_new_tokens=12).text == completion
    assert record_seed(0, 1) != record_seed(1, 0) != record_seed(0, 0)
    assert record_seed(np.int64(7), np.int32(3)) == record_seed(7, 3)
    numbered = Predictor("generate", device="cpu", max_new_tokens=12, seed=np.int64(1))
    assert numbered({"text": texts})["completion"].tolist() == derived.tolist()


def test_embeddings(model: GPT2) -> None:
    embed = Predictor("embed", device="cpu")
    found = embed({"tokens": [[72, 105], [], [1] * 257]})
    assert found["embedding"].shape == (3, 256)
    assert found["embedding"].dtype == np.float32
    np.testing.assert_array_equal(found["embedding"][0], model.embed([72, 105]))
    assert np.isnan(found["embedding"][1:]).all()
    expected = [f"expected 1 to 256 tokens, got {count}" for count in (0, 257)]
    assert found["error"].tolist() == ["", *expected]
    assert embed({"text": []})["embedding"].shape == (0, 256)


@pytest.mark.parametrize(("task", "options", "message"), cases("options of a task"))
def test_wrong_options(task: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Predictor(task, device="cpu", **options)
    batch_tokens = options.pop("batch_tokens", 1)
    job = Job(task, output="nowhere", options=options, batch_tokens=batch_tokens)
    with pytest.raises(InputError, match=message):
        job.checked()


@pytest.mark.parametrize(("wrong", "message"), cases("arguments of a job"))
def test_wrong_arguments_of_a_job(wrong: dict[str, Any], message: str) -> None:
    stored = {name: wrong.pop(name) for name in ("dtype", "kv_dtype") if name in wrong}
    with pytest.raises(InputError, match=message):
        Job("score", output="nowhere", formats=FormatOptions(**stored), **wrong).checked()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "expected a mapping from names to columns, got NoneType"),
        (["a"], "expected a mapping from names to columns, got list"),
        ({}, "expected a column text or tokens, got none"),
        ({"words": ["a"], 1: []}, "expected a column text or tokens, got words, 1"),
        ({"text": "abc"}, "text: expected a column with an entry for each record, got str"),
        ({"text": b"abc"}, "text: expected a column"),
        ({"text": 5}, "text: expected a column"),
        ({"text": None}, "text: expected a column"),
        ({"text": iter(["ab"])}, r"text: .* read twice, got list_iterator: use list\(column\)"),
        ({"tokens": np.ma.array([[1, 2]])}, "tokens: expected an array without a mask, got a Num"),
        ({"text": ["ab"], "seed": np.ma.array([1])}, r"seed: .*: leave out .*, or use .filled\(\)"),
        ({"text": {"a": 1}}, "text: expected a column"),
        ({"tokens": np.array(5)}, "tokens: expected a column"),
        ({"text": ["ab"], "seed": 5}, "seed: expected a column"),
        ({"text": ["ab"], "seed": []}, "seed: expected one for each of the 1 records, got 0"),
    ],
)
def test_wrong_batches(scoring: Predictor, batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        scoring(batch)


def test_a_long_prompt_or_a_wrong_seed_is_the_error_of_its_record() -> None:
    predictor = Predictor("generate", device="cpu", max_new_tokens=2)
    assert predictor({"text": ["x" * 300]})["error"][0].startswith(
        "300 tokens, the model's context"
    )
    seeds: list[Any] = [1, -1, 2**64, None, 1.5, True, "7", np.uint64(2**64 - 1), np.nan]
    found = predictor({"text": ["To"] * len(seeds), "seed": np.array(seeds, object)})
    assert [index for index, error in enumerate(found["error"]) if not error] == [0, 7]
    assert found["error"][1] == "seed: expected an integer from 0 to 2**64 - 1, got -1"
    assert found["completion"][0]
    alone = predictor({"text": ["To"], "seed": [1]})
    assert alone["completion"][0] == found["completion"][0]


def read_shards(files: list[Path], size: int) -> list[list[Any]]:
    cut = records.cut(files, size, ["text"])
    assert [shard.number for shard in cut] == list(range(len(cut)))
    return [list(records.read(shard, "text")) for shard in cut]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([b"", b"a", b"bc", b"\r", "ü".encode()])), max_size=3),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 5),
)
def test_every_line_is_in_one_shard(
    tmp_path_factory: pytest.TempPathFactory,
    contents: list[list[bytes]],
    size: int,
    ended: bool,
    chunk: int,
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    files, expected = [], []
    for number, lines in enumerate(contents):
        files.append(folder / f"{number}.txt")
        data = b"\n".join(lines) + (b"\n" if ended and lines else b"")
        files[-1].write_bytes(data)
        expected += [
            (f"{number}.txt", at, line.removesuffix(b"\r").decode())
            for at, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else ())
        ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_CHUNK", chunk)
        parts = read_shards(files, size)
    flat = [(each.index, (each.file, each.line, each.value)) for part in parts for each in part]
    assert flat == [(index, each) for index, each in enumerate(expected) if each[2].strip()]
    assert len(parts) == -(-len(expected) // size)


def test_unreadable_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST", 64)
    lines = [
        b'\xef\xbb\xbf{"text": "with a BOM", "id": 1}',
        b"  ",
        b"{",
        b"[1]",
        b'{"words": 1}',
        b'{"text": "\xff"}',
        b"[" * 60,
        b'{"text": "' + b"x" * 200 + b'"}',
        b'{"text": [1, 2]}',
        b'{"text": "%s"}' % (b"y" * 52),  # LONGEST bytes
        b'{"text": [1, 2]}',
    ]
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b"\n".join(lines))
    (part,) = read_shards([file], 100)
    assert part[0] == Record(0, "lines.jsonl", 0, "with a BOM")
    assert part[-1] == Record(10, "lines.jsonl", 10, [1, 2])
    assert part[-2] == Record(9, "lines.jsonl", 9, "y" * 52)
    reasons = {
        entry.index: entry.value.reason for entry in part if isinstance(entry.value, Problem)
    }
    assert list(reasons) == [2, 3, 4, 5, 6, 7]
    assert reasons[2].startswith("not JSON: ")
    assert reasons[3] == "expected an object, got list"
    assert reasons[4] == "no field 'text'"
    assert reasons[5] == "not UTF-8: byte 10 of the line"
    assert reasons[7] == "a line of more than 64 bytes"


def test_a_file_that_changes(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\nthree\n")
    first, second = records.cut([file], 2, [])
    file.write_text("one\ntwo\nthrew\n")
    assert len(list(records.read(first, "text"))) == 2
    with pytest.raises(ChangedError, match="changed since the job began"):
        list(records.read(second, "text"))
    file.unlink()
    with pytest.raises(OSError, match="cannot be read: No such file"):
        list(records.read(first, "text"))


def test_json_lines() -> None:
    row = {"a": np.full(2, 0.1, np.float32), "b": float("inf"), "c": "ü", "d": [np.nan]}
    line = '{"a": [0.1, 0.1], "b": null, "c": "ü", "d": [null]}\n'
    assert shards.json_lines([row]).decode() == line
    assert json.loads(shards.json_lines([{"a": "\ud800"}])) == {"a": "\ud800"}


def test_float32_is_written_with_the_fewest_digits_that_identify_it() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, np.uint32)
    special = np.array([0, -0.0, 1e16, 9999999, 1e-45], np.float32)
    numbers = np.concatenate([bits.view(np.float32), special])
    expected = [float(str(n)) if np.isfinite(n) else None for n in numbers]
    written = json.loads(shards.json_lines([{"a": numbers}]))["a"]
    assert list(map(repr, written)) == list(map(repr, expected))


class CUDARuntimeError(RuntimeError):
    """An error like CuPy's."""


def test_a_worker_ends_after_a_cuda_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", Mock(side_effect=InterruptedError))
    for error, raised in (
        (CUDARuntimeError("illegal address"), InterruptedError),
        (MemoryError(), MemoryError),
    ):
        with pytest.raises(raised):
            job_module._compute(Mock(rows=Mock(side_effect=error)), [], 0, print)
