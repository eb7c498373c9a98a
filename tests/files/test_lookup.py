"""Look-ups of the tokenizer: once for text, and for token ids only when their text is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from gpt2block import GPT2, CheckpointError, GPT2Weights, InputError
from gpt2block.bulk.job import Job
from gpt2block.bulk.predictor import Predictor
from gpt2block.files.checkpoints import save_pretrained
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.lookup import Lookup
from gpt2block.models.config import GPT2Config
from tests.command_line import gpt2block, printed
from tests.markov import byte_encoding
from tests.tokenizer_files import small_pair

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=4, n_ctx=8, vocab_size=50257)
IDS = [1, 2, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a model without a tokenizer, for which GPT-2's BPE would be downloaded."""
    return save_pretrained(tmp_path / "model", GPT2Weights.random(1, CONFIG))


@pytest.fixture
def model(folder: Path) -> GPT2:
    return GPT2.from_pretrained(folder, device="cpu")


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a tokenizer is loaded from anywhere."""

    def load(*arguments: Any) -> Any:
        pytest.fail(f"a look-up: {arguments}")

    for name in ("load", "from_path", "_gpt2"):
        monkeypatch.setattr(tokenizer, name, load)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Let each look-up fail; return the mock that records them."""
    found = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr("tiktoken.get_encoding", found)
    return found


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Let each look-up find a byte tokenizer; return the mock that records them."""
    found = Mock(side_effect=lambda _: byte_encoding(end=False))
    monkeypatch.setattr("tiktoken.get_encoding", found)
    return found


USES: dict[str, Callable[[GPT2], Any]] = {
    "generate": lambda model: model.generate(IDS, max_new_tokens=2).tokens,
    "several": lambda model: model.generate([IDS, IDS], max_new_tokens=2, samples=2),
    "array": lambda model: model.generate(np.array([IDS]), max_new_tokens=2),
    "stop_ids": lambda model: model.generate(IDS, max_new_tokens=2, stop_ids=[4]),
    "stream": lambda model: list(model.stream(IDS, max_new_tokens=2)),
    "score": lambda model: model.score(IDS).perplexity,
    "scores": lambda model: [score.log_likelihood for score in model.score([IDS, IDS])],
    "per token": lambda model: model.score(IDS).tokens.logprobs,
    "embed": lambda model: model.embed([IDS, IDS]),
    "explain": lambda model: model.explain(IDS),
    "attention": lambda model: model.attention(IDS),
    "logit_lens": lambda model: model.logit_lens(IDS),
}


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("use", USES)
def test_nothing_is_looked_up_for_ids(model: GPT2, use: str) -> None:
    USES[use](model)
    arrays = GPT2(GPT2Weights.random(1, CONFIG), device="cpu")
    USES[use](arrays)


@pytest.mark.usefixtures("never")
def test_ids_in_a_folder_with_a_tokenizer(folder: Path) -> None:
    """No tokenizer is loaded for results without text."""
    small_pair(folder)
    model = GPT2.from_pretrained(folder, device="cpu")
    for use in ("score", "scores", "per token", "embed", "attention", "logit_lens"):
        USES[use](model)


def test_a_thread_loads_a_local_tokenizer_once(folder: Path, reachable: Mock) -> None:
    model = GPT2.from_pretrained(folder, device="cpu")
    model.lookup.begin()  # the folder has no tokenizer, and nothing is downloaded
    assert model.lookup.local_encoding is None
    assert not reachable.called
    small_pair(folder)
    (folder / "merges.txt").write_text("a b c")
    damaged = GPT2.from_pretrained(folder, device="cpu").lookup
    damaged.begin()
    with pytest.raises(CheckpointError, match="expected two tokens"):
        _ = damaged.encoding


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("task", ["score", "generate", "embed"])
def test_no_record_of_ids_looks_a_tokenizer_up(folder: Path, task: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 2} if task == "generate" else {}
    job = Job(task, folder, output=str(folder / "out"), options=options).checked()
    assert job.tokenizer_sha256 is None
    predictor = Predictor(task, folder, device="cpu", **options)
    found = predictor({"tokens": [IDS, [4, 5]]})
    assert found["error"].tolist() == ["", ""]
    assert "n_bytes" not in found
    assert found["n_tokens"].all()


@pytest.mark.usefixtures("never")
def test_commands_with_ids_look_nothing_up(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.array(IDS, np.uint16))
    model = "--model", folder, "--device", "cpu"
    generate = "generate", "1 2 3", "--ids", *model, "--max-new-tokens", "2"
    for more in ((), ("--logprobs",), ("--samples", "2")):
        assert gpt2block(*generate, *more).code == 0
    assert gpt2block(*generate, "--json").json["samples"][0]["text"] is None
    for more in ((), ("--json",), ("--per-token",), ("--bos",)):
        assert printed("score", folder / "tokens.npy", *model, *more)


def test_a_look_up_that_fails_is_remembered(model: GPT2, failing: Mock) -> None:
    found = model.generate(IDS, max_new_tokens=2)
    score = model.score(IDS)
    assert not failing.called
    assert found.text == ""
    assert (score.bytes, score.bits_per_byte, score.tokens[0].text) == (None, None, "")
    for use in (
        lambda: model.generate("abc"),
        lambda: model.generate([IDS, "abc"]),
        lambda: model.generate("abc", stop="x"),
        lambda: model.stream("abc"),
        lambda: model.score("abc"),
        lambda: model.embed("abc"),
        lambda: model.explain("abc"),
        lambda: model.logit_lens("abc"),
        lambda: model.tokenizer,
    ):
        with pytest.raises(CheckpointError, match=r"GPT-2's tokenizer.*ConnectionError"):
            use()
    with pytest.raises(InputError, match="stop: this model has no tokenizer"):
        model.generate(IDS, stop="x")
    assert model.generate(IDS, max_new_tokens=2).text == ""
    failing.assert_called_once_with("gpt2")


def test_text_is_decoded_when_it_is_read(model: GPT2, reachable: Mock) -> None:
    found = model.generate([97], max_new_tokens=4, temperature=0)
    score = model.score([97, 98, 99])
    assert not reachable.called
    assert found == model.generate([97], max_new_tokens=4, temperature=0, seed=found.seed)
    bytes_of = (bytes([token]) if token < 256 else "\ufffd".encode() for token in found.tokens)
    assert found.text == b"".join(bytes_of).decode(errors="replace")
    assert found.text in repr(found)
    assert score.bytes == 2
    assert [token.text for token in score.tokens] == ["b", "c"]
    reachable.assert_called_once_with("gpt2")


@pytest.mark.usefixtures("reachable")
def test_a_result_is_copied_with_its_text(model: GPT2) -> None:
    found = model.generate([97], max_new_tokens=3, seed=1)
    for copied in (pickle.loads(pickle.dumps(found)), deepcopy(found)):
        assert copied == found
        assert copied.text == found.text
    score = model.score([97, 98])
    assert pickle.loads(pickle.dumps(score)).bytes == score.bytes == 1
    with pytest.raises(AttributeError, match="Generation has no attribute 'words'"):
        getattr(found, "words")  # noqa: B009  (unknown to type checkers, too)


def test_a_text_after_ids(folder: Path, reachable: Mock) -> None:
    predictor = Predictor("score", folder, device="cpu")
    assert "n_bytes" not in predictor({"tokens": [IDS]})
    assert not reachable.called
    found = predictor({"text": ["abc"]})
    assert (found["error"].tolist(), found["n_bytes"].tolist()) == ([""], [2])
    again = pickle.loads(pickle.dumps(predictor))
    assert "n_bytes" not in again({"tokens": [IDS]})


def test_text_records_without_a_tokenizer(folder: Path, failing: Mock) -> None:
    predictor = Predictor("score", folder, device="cpu")
    found = predictor({"text": ["abc", "x"]})
    assert "text needs a tokenizer: GPT-2's tokenizer" in found["error"][0]
    predictor({"text": ["abc"]})
    failing.assert_called_once_with("gpt2")


def test_the_end_token_next_to_the_weights_also_ends_ids(folder: Path) -> None:
    """Equal ids have equal continuations, whether they came from a text or not."""
    small_pair(folder, **{"</s>": 259})
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    model = GPT2.from_pretrained(folder, device="cpu")
    assert model.lookup.local_encoding is model.tokenizer
    ids = model.tokenizer.encode_ordinary("abc")
    of_ids, of_text = (model.generate(each, max_new_tokens=3, seed=1) for each in (ids, "abc"))
    assert of_ids == of_text


def test_a_tokenizer_that_cannot_be_read_is_none_for_ids(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    model = GPT2.from_pretrained(folder, device="cpu")
    assert model.lookup.local_encoding is None
    assert model.generate(IDS, max_new_tokens=2).text == ""
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        model.generate("abc")


def test_a_path_must_have_a_tokenizer(tmp_path: Path) -> None:
    for name in ("local_encoding", "encoding"):
        with pytest.raises(CheckpointError, match="no tokenizer: expected tokenizer"):
            getattr(Lookup(None, 300, tmp_path), name)
    small_pair(tmp_path)
    assert Lookup(None, 300, tmp_path).local_encoding is not None
