"""/v1/embeddings and /v1/rerank, and files that define how a model's embeddings are computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

pytest.importorskip("starlette", reason="the extra serve is not installed")

from fuzzing.vocabularies import added_token, template

from gpt2block import GPT2, GPT2Config, from_pretrained
from gpt2block.bulk import Predictor
from gpt2block.bulk.job import Job
from gpt2block.errors import CheckpointError, InputError
from gpt2block.files.parameters.gpt2 import GPT2Weights
from gpt2block.files.tokenizers import tokenizer
from tests.serving import Running, model_of, post, serving, small
from tests.tokenizer_files import small_json

EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
SPECIAL = {"<|im_start|>": 258, "<|im_end|>": 259}
RANKS = {bytes([byte]): byte for byte in range(256)} | {b"no": 256, b"yes": 257}
ANSWERS = tiktoken.Encoding(
    "answers", pat_str="(?s:.+)", mergeable_ranks=RANKS, special_tokens=SPECIAL
)
# The prompt in the model card of Qwen3-Reranker
PROMPT = (Path(__file__).parents[1] / "golden" / "reranker.txt").read_text("utf-8")
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def vectors(found: Any) -> Any:
    return np.array([each["embedding"] for each in found["data"]])


def of_length_1(given: Any) -> Any:
    return given / np.linalg.norm(given, axis=-1, keepdims=True)


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_pooling_dimensions_and_instructions(tmp_path: Path, pooling: Any) -> None:
    """The tokenizer adds a token after texts, but not after ids."""
    small_json(tmp_path, post_processor=template("", "ab", token_id=256),
               added_tokens=[added_token(256, "ab")])  # fmt: skip
    encoding = tokenizer.load(tmp_path, 258)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=64, vocab_size=258)
    model = GPT2(GPT2Weights.random(0, config), device="cpu")
    inputs: list[Any] = ["one", "", [1, 2]]
    expected = model.embed([[*b"one", 256], [256], [1, 2]], pooling)
    query = model.embed([[*b"Instruct: Find it.\nQuery:one", 256]], pooling)
    with serving(model_of(model.engine), encoding, pooling=pooling) as running:
        status, found = post(running, EMBEDDINGS, {"input": inputs})
        short = post(running, EMBEDDINGS, {"input": inputs, "dimensions": 5})[1]
        asked = {"input": ["one"], "instruction": "Find it."}
        instructed = post(running, EMBEDDINGS, asked)[1]
    assert (status, found["usage"]["prompt_tokens"]) == (200, 4 + 1 + 2)
    np.testing.assert_allclose(vectors(found), of_length_1(expected), atol=1e-6)
    np.testing.assert_allclose(vectors(short), of_length_1(expected[:, :5]), atol=1e-6)
    np.testing.assert_allclose(vectors(instructed), of_length_1(query), atol=1e-6)


def test_instructions_of_the_library() -> None:
    model = from_pretrained(device="cpu")
    texts = ["Good morrow.", "Adieu!"]
    found = model.embed(texts, instruction="Find it.", dimensions=3, normalize=True)
    plain = model.embed([f"Instruct: Find it.\nQuery:{text}" for text in texts])
    np.testing.assert_allclose(found, of_length_1(plain[:, :3]), rtol=1e-5)
    wrong: list[Any] = [[1, 2], ["a", [1]], []]
    for given in wrong:
        with pytest.raises(InputError, match="instruction: expected a text, with texts as input"):
            model.embed(given, instruction="Find it.")
    for count in (0, 257, 1.5, True):
        with pytest.raises(InputError, match="dimensions: expected 1 to 256, the model's n_embd"):
            model.embed("a", dimensions=count)  # type: ignore[arg-type]


# --- files of sentence-transformers ---------------------------------------------------------------


def modules(*kinds: str) -> list[dict[str, Any]]:
    """Return the content of modules.json."""
    return [
        {"idx": index, "name": str(index), "type": f"sentence_transformers.models.{kind}",
         "path": "" if kind == "Transformer" else f"{index}_{kind}"}
        for index, kind in enumerate(kinds)
    ]  # fmt: skip


QWEN3 = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False,
         "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True,
         "include_prompt": True}  # fmt: skip
USUAL = ("Transformer", "Pooling", "Normalize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small().save_pretrained(path)
    (path / "1_Pooling").mkdir()
    return path


def described(folder: Path, kinds: Any, pooling: Any) -> Any:
    """Load the model from a folder with these files; None: without this file."""
    for name, content in (("modules.json", kinds), ("1_Pooling/config.json", pooling)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return from_pretrained(folder, device="cpu")


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (None, None, ("mean", False)),
        (None, QWEN3, ("last", False)),
        (modules(*USUAL), QWEN3, ("last", True)),
        (modules("Transformer", "Normalize"), None, ("mean", True)),
        (modules(*USUAL), {"pooling_mode_cls_token": True}, ("cls", True)),
        (modules("Transformer", "Pooling"), {"pooling_mode": "mean"}, ("mean", False)),
        (modules("Transformer", "Pooling"), {"pooling_mode": ["lasttoken"]}, ("last", False)),
    ],
)
def test_the_files_of_sentence_transformers(
    folder: Path, kinds: Any, pooling: Any, expected: tuple[Any, bool]
) -> None:
    model = described(folder, kinds, pooling)
    assert model.embedding_defaults == expected
    found, plain = model.embed([5, 6, 7]), model.embed([5, 6, 7], expected[0], normalize=False)
    np.testing.assert_allclose(found, of_length_1(plain) if expected[1] else plain, rtol=1e-6)
    batch = {"tokens": [[5, 6, 7]]}
    np.testing.assert_array_equal(
        Predictor("embed", folder, device="cpu")(batch)["embedding"], [found]
    )
    mean = Predictor("embed", folder, device="cpu", pooling="mean", normalize=False)
    np.testing.assert_array_equal(
        mean(batch)["embedding"], [model.embed([5, 6, 7], "mean", normalize=False)]
    )


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (modules("Transformer", "Pooling", "Dense"), QWEN3, "Normalize, got 'Dense'"),
        (modules("Transformer", "Pooling"), None, "no such file, which modules.json names"),
        ({"type": "x"}, None, "expected a list of objects with the texts type and path"),
        (None, {"pooling_mode_max_tokens": True}, r"got \['pooling_mode_max_tokens'\]: choose one"),
        (None, QWEN3 | {"pooling_mode_cls_token": True}, "expected one pooling of mean, lasttoken"),
        (None, {"pooling_mode": [["mean"]]}, "expected one pooling of mean, lasttoken"),
        (None, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt false"),
        (None, [], "expected a JSON object"),
    ],
)
def test_files_that_are_refused(folder: Path, kinds: Any, pooling: Any, words: str) -> None:
    """Models with such files refuse to embed unless the caller chooses pooling and norm."""
    model = described(folder, kinds, pooling)
    with pytest.raises(CheckpointError, match=words):
        model.embed([5, 6])
    assert model.embed([5, 6], "last", normalize=False).shape == (32,)
    with pytest.raises(CheckpointError, match=words):
        Predictor("embed", folder, device="cpu", pooling="last")
    with pytest.raises(CheckpointError, match=words):  # before a worker starts
        Job(task="embed", model=folder, output=str(folder / "out"), device="cpu").checked()
    predictor = Predictor("embed", folder, device="cpu", pooling="last", normalize=False)
    assert predictor({"tokens": [[5, 6]]})["embedding"].shape == (1, 32)


# --- rerank ---------------------------------------------------------------------------------------


JUDGE = GPT2(
    GPT2Weights.random(0, GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=512, vocab_size=260)),
    device="cpu",
)


@pytest.fixture(scope="module")
def judge() -> Iterator[Running]:
    with serving(model_of(JUDGE.engine), ANSWERS) as running:
        yield running


def expected_score(running: Running, document: str, query: str, task: str = TASK) -> float:
    ids = ANSWERS.encode(PROMPT.format(task, query, document), allowed_special="all")
    (logits,) = JUDGE.engine.forward([np.array(ids, np.int32)], "last")
    no, yes = np.exp(logits[[256, 257]].astype(np.float64))
    return float(yes / (no + yes))


@pytest.mark.parametrize("path", [RERANK, "/rerank"])
def test_rerank(judge: Running, path: str) -> None:
    """Scores are the model's probability of yes; they do not depend on the other documents."""
    texts = ["Paris is a city.", "The sun", "", "Paris is the capital."]
    asked = {"query": "capital", "documents": [texts[0], {"text": texts[1]}, *texts[2:]]}
    status, found = post(judge, path, asked)
    assert status == 200, found
    scores = [expected_score(judge, text, "capital") for text in texts]
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [each["index"] for each in found["results"]] == order
    assert [each["document"]["text"] for each in found["results"]] == [texts[i] for i in order]
    given = [each["relevance_score"] for each in found["results"]]
    np.testing.assert_allclose(given, [scores[i] for i in order], rtol=1e-5)
    two = post(judge, path, {**asked, "top_n": 2, "return_documents": False})[1]["results"]
    assert [(each["index"], each.keys() - {"index"}) for each in two] == [
        (index, {"relevance_score"}) for index in order[:2]
    ]
    for wanted in (None, 9):
        assert len(post(judge, path, {**asked, "top_n": wanted})[1]["results"]) == 4
    own = {"query": "capital", "documents": ["The sun"], "instruction": "Find it."}
    (alone,) = post(judge, path, own)[1]["results"]
    task = expected_score(judge, "The sun", "capital", "Find it.")
    assert alone["relevance_score"] == pytest.approx(task, rel=1e-5)
