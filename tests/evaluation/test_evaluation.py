"""The model type of lm_eval: its results, on local tasks and for single requests, and its errors.

The tasks are the examples of docs/evaluation.md. Models have byte tokenizers, so that tests can
count the tokens of a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from gpt2block import InputError, Llama, from_pretrained
from gpt2block.errors import CheckpointError, PrintableError, UnknownOption
from gpt2block.evaluation import __main__ as command
from gpt2block.evaluation.language_model import EvaluatedModel
from gpt2block.files.parameters.llama import LlamaWeights
from tests.devices import GPU, running_on
from tests.engine.test_llama_cuda import CORES
from tests.refusals import cases

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "gpt2block" / "files" / "bundled" / "shakespeare-llama"
NEWLINE = 10
LITTLE = {"until": [], "max_gen_toks": 12}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def evaluated(model: str | Path = LLAMA, **more: Any) -> EvaluatedModel:
    given = {"device": "cpu", "prefix_token_id": NEWLINE, **more}
    return EvaluatedModel(model=str(model), **given)


@pytest.fixture(scope="module")
def llama() -> EvaluatedModel:
    return evaluated()


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def sums(model: EvaluatedModel, ids: list[int], count: int) -> tuple[float, bool]:
    """Return the log-likelihood of the last `count` ids in float64, and whether they are greedy."""
    logits = model.model(np.array(ids, np.int32)).astype(np.float64)[-count - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    last = ids[-count:]
    return logprobs[np.arange(count), last].sum(), logits.argmax(-1).tolist() == last


@pytest.mark.parametrize(
    ("context", "continuation", "row", "count"),
    [
        ("ROMEO:\nO, speak", " again", b"ROMEO:\nO, speak again", 6),
        ("My lord, ", "I", b"My lord, I", 2),  # the space belongs to the continuation
        ("", "First", b"\nFirst", 5),  # the context is the prefix token
        ("  ", "a", b"\n  a", 3),
        ("", "\nab", b"\nab", 2),  # the continuation begins with the prefix token
        ("x" * 300, "yz", b"x" * 254 + b"yz", 2),  # the start of the context is cut
        ("To b", "e", b"To be", 1),  # a greedy continuation
    ],
)
def test_a_continuation_after_a_context(
    llama: EvaluatedModel, context: str, continuation: str, row: bytes, count: int
) -> None:
    (found,) = llama.loglikelihood(requests("loglikelihood", (context, continuation)), True)
    total, greedy = sums(llama, list(row), count)
    assert found == (pytest.approx(total, abs=1e-4), greedy)


def test_each_token_of_a_long_text_is_predicted_once(llama: EvaluatedModel) -> None:
    """Windows have 256 tokens, and the last two overlap; an empty text has no tokens."""
    text = (LLAMA / "passage.txt").read_text(encoding="utf-8") * 2
    ids = [NEWLINE, *text.encode()]
    found = llama.loglikelihood_rolling(requests("loglikelihood_rolling", (text,), ("",)), True)
    rows = [(0, 256, 255), (255, 511, 255), (len(ids) - 256, len(ids), len(ids) - 511)]
    expected = sum(sums(llama, ids[first:end], count)[0] for first, end, count in rows)
    assert found == [pytest.approx(expected, abs=1e-3), 0]


def test_results_come_in_the_order_of_the_requests(llama: EvaluatedModel) -> None:
    pairs = [("a" * n, " b") for n in (3, 50, 1, 7)]
    together = llama.loglikelihood(requests("loglikelihood", *pairs), True)
    alone = [llama.loglikelihood(requests("loglikelihood", pair), True)[0] for pair in pairs]
    assert together == alone
    assert len(set(together)) == 4


def test_texts_are_those_of_generate(llama: EvaluatedModel) -> None:
    given = {"until": ["\n", ""], "max_gen_toks": 20}
    prompts = ["ROMEO:\nO, ", "x" * 400, "My lord"]
    pairs = [(prompt, given) for prompt in prompts]
    found = llama.generate_until(requests("generate_until", *pairs), True)
    expected = [
        llama.model.generate(prompt[-236:], max_new_tokens=20, stop="\n", temperature=0).text
        for prompt in prompts
    ]
    assert found == expected
    assert all(0 < len(text) <= 20 for text in found)


def test_equal_requests_are_sampled_differently_and_repeatably(llama: EvaluatedModel) -> None:
    given = {**LITTLE, "do_sample": True, "top_k": 50}
    again = [("O ", given), ("O ", given), ("O ", {**given, "seed": 7})]
    again += 2 * [("O ", {**given, "seed": 0})]
    found, repeated = (
        llama.generate_until(requests("generate_until", *again), True) for _ in range(2)
    )
    assert found == repeated
    assert len(set(found)) == 5


def test_receipts_of_generated_texts(tmp_path: Path) -> None:
    model = evaluated(model=str(LLAMA), receipts=str(tmp_path / "r.jsonl"))
    given = {**LITTLE, "do_sample": True}
    model.generate_until(requests("generate_until", ("O ", given), ("To", LITTLE)), True)
    receipts = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [each.code for each in model.model.verify(receipts)] == [0, 0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_gen_toks": 256}, InputError, r"max_gen_toks: expected less than 256, .* got 256"),
        ({"max_new_token": 3}, UnknownOption, "unknown keyword 'max_new_token'"),
        ({"do_sample": True, "top_p": 2}, InputError, "top_p: expected"),
    ],
)
def test_generation_arguments_that_are_refused(
    llama: EvaluatedModel, given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llama.generate_until(requests("generate_until", ("a", {**LITTLE, **given})), True)


@pytest.mark.parametrize(("given", "message"), cases("model arguments of lm_eval"))
def test_model_arguments_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PrintableError, match=message):
        evaluated(**{"model": str(LLAMA), **given})


def test_a_model_without_a_first_token_asks_for_one() -> None:
    model = evaluated(prefix_token_id=None)
    with pytest.raises(InputError, match="expected prefix_token_id=ID"):
        model.loglikelihood(requests("loglikelihood", ("", "a")), True)
    with pytest.raises(InputError, match=r"continuation: expected 1 to 255 tokens, .* got 256"):
        model.loglikelihood(requests("loglikelihood", ("a", "b" * 256)), True)
    with pytest.raises(InputError, match=r"got 0 for \('a', ''\)"):
        model.loglikelihood(requests("loglikelihood", ("a", "")), True)


@pytest.fixture
def chatting(tmp_path: Path) -> EvaluatedModel:
    """Return a model with a chat template, and "~" as the token that begins a text."""
    pytest.importorskip("jinja2", reason="a chat template needs the extra serve")
    folder = from_pretrained(LLAMA, device="cpu").save_pretrained(tmp_path / "chatting")
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] = [{"id": ord("~"), "content": "~", "special": True, **flags}]
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    settings = {"chat_template": TEMPLATE, "bos_token": "~"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return evaluated(folder, prefix_token_id=None)


def test_conversations_are_written_by_the_chat_template(chatting: EvaluatedModel) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert chatting.apply_chat_template(messages[:1]) == "<user>Hi\n<assistant>"
    assert chatting.apply_chat_template(messages, add_generation_prompt=False).endswith("t>Ho")
    assert chatting.chat_template(True) == chatting.chat_template("default") == TEMPLATE
    assert chatting.chat_template(False) is None
    assert chatting.tokenizer_name.endswith("__chatting")
    with pytest.raises(InputError, match=r"expected no name, .* got 'rag'"):
        chatting.chat_template("rag")
    assert chatting.prefix_token_id == ord("~")
    with pytest.raises(CheckpointError, match="it has no chat template"):
        evaluated().chat_template(True)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run the example tasks with a model; return all results and samples."""
    import datasets  # noqa: PLC0415

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    manager = TaskManager(include_path="examples/evaluation", include_defaults=False)

    def run(model: EvaluatedModel, *names: str, **more: Any) -> Any:
        options = {"limit": 2, "bootstrap_iters": 0, **more}
        found = lm_eval.simple_evaluate(model, tasks=[*names], task_manager=manager, **options)
        samples = {
            (name, each["doc_id"]): each["filtered_resps"]
            for name in names
            for each in found["samples"][name]
        }
        return found["results"], samples

    return run


def test_every_batch_size_gives_the_same_digits(tasks: Callable[..., Any]) -> None:
    found = [
        tasks(evaluated(batch_size=size), "capitals", "verse", "capitals_written")
        for size in (1, "auto")
    ]
    assert found[0] == found[1]
    results, samples = found[0]
    assert 1 < results["verse"]["bits_per_byte,none"] < 3
    assert len(samples) == 6


def test_few_shot_examples_are_turns_of_a_conversation(
    tasks: Callable[..., Any], chatting: EvaluatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model gets the text that its chat template writes."""
    texts: list[str] = []
    encode = chatting.tok_encode

    def noted(text: str) -> list[int]:
        texts.append(text)
        return encode(text)

    monkeypatch.setattr(chatting, "tok_encode", noted)
    more = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 1}
    tasks(chatting, "capitals_written", limit=1, **more)
    assert [text.count("<user>Question: What is") for text in texts] == [2]
    assert texts[0].startswith("<user>Question: ")


@pytest.mark.parametrize("device", ["emulator", GPU])
def test_every_batch_size_gives_the_same_bits_on_a_gpu(device: str, tmp_path: Path) -> None:
    """The emulated GPU runs the kernels of a GPU; rows have different lengths."""
    weights = LlamaWeights.random(0, replace(CORES, vocab_size=256))
    small = Llama(weights, device="cpu")
    folder = small.save_pretrained(tmp_path / "small")
    (folder / "tokenizer.json").write_bytes((LLAMA / "tokenizer.json").read_bytes())
    pairs = [("abcdefgh"[:n], " y" * (n % 3 + 1)) for n in (3, 8, 1, 5)]
    with running_on("forward" if device == "emulator" else "gpu"):
        models = [
            evaluated(folder, device="cuda", dtype="bfloat16", batch_size=size) for size in (1, 3)
        ]
        one, three = (
            model.loglikelihood(requests("loglikelihood", *pairs), True) for model in models
        )
        tokens = models[0].model.score("abcdefgh", likeliest=True).tokens
        logits = models[0].model([*b"abcdefgh"])[:-1]
    assert one == three
    np.testing.assert_array_equal(tokens.likeliest, logits.argmax(axis=-1))
    for (total, _), (context, continuation) in zip(one, pairs, strict=True):
        ids = [*(context + continuation).encode()]
        expected, _ = sums(evaluated(folder), ids, len(continuation))
        assert total == pytest.approx(expected, abs=0.05)


def test_a_gguf_file_is_evaluated_as_any_model(smollm2_files: Path) -> None:
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    model = evaluated(smollm2_files, prefix_token_id=None)
    # "France" is a single token: after "Fran", "ce" has the ids of a text alone.
    pairs = [("The capital of France is", " Paris"), ("The capital of Fran", "ce")]
    found = model.loglikelihood(requests("loglikelihood", *pairs), True)
    for each, pair in zip(found, pairs, strict=True):
        expected, greedy = sums(model, [id for text in pair for id in model.tok_encode(text)], 1)
        assert each == (pytest.approx(expected, abs=1e-4), greedy)
    assert model.model.tokenizer.decode([model.prefix_token_id]) == "<|im_start|>"


def test_lm_eval_finds_the_model_type() -> None:
    """lm_eval finds the entry point's name; model arguments replace lm_eval's own options."""
    tomllib = pytest.importorskip("tomllib", reason="Python before 3.11 reads no TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["lm_eval.models"] == {command.NAME: command.TARGET}
    command.register()
    command.register()
    assert get_model(command.NAME) is EvaluatedModel
    given = {"model": str(LLAMA), "device": "cpu", "max_length": 9}
    made = get_model("gpt2block").create_from_arg_obj(given, {"device": "cuda:0", "batch_size": 2})
    assert (made.max_length, made.batch_size) == (9, 2)


def test_the_command_says_in_a_line_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        assert get_model("gpt2block") is EvaluatedModel
        raise InputError("model: no such file")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    with pytest.raises(SystemExit, match=r"^error: model: no such file$"):
        command.main()
