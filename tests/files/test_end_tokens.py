"""Tokens that end a text, named by a tokenizer's settings, a model's configs, or GGUF keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fuzzing.gguf_writer import metadata_of, tensors_of, tokenizer_keys, write
from fuzzing.vocabularies import added_token
from gguf import TokenType

from gpt2block import GPT2, CheckpointError, GPT2Weights
from gpt2block.engine.receipts import of_tokenizer
from gpt2block.files.checkpoints import Checkpoint, save_gguf, save_pretrained
from gpt2block.files.tokenizers import tokenizer
from gpt2block.files.tokenizers.encoding import Encoding, TokenizersEncoding
from gpt2block.models.config import GPT2Config
from tests.command_line import gpt2block, printed
from tests.generating import generate
from tests.markov import MarkovEngine, cycle
from tests.refusals import cases, refused
from tests.tokenizer_files import BYTES, small_json, small_pair

SPECIAL = [added_token(258, "<|endoftext|>"), added_token(259, "</s>")]


def loaded(folder: Path, kind: str) -> Encoding:
    """Load a tokenizer with two special tokens; kind: its files, and the package that runs it."""
    if kind == "two files":
        small_pair(folder, **{"</s>": 259})
        return tokenizer.load(folder, 300)
    path = small_json(folder, added_tokens=SPECIAL, ignore_merges=kind == "tokenizers")
    encoding = tokenizer.from_path(path, 300)
    assert isinstance(encoding, TokenizersEncoding) == (kind == "tokenizers")
    return encoding


KINDS = ["tiktoken", "tokenizers", "two files"]
CONFIG, SPECIAL_MAP = "tokenizer_config.json", "special_tokens_map.json"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "settings", "end"), cases("settings of a tokenizer: its end token")
)
def test_the_token_of_the_settings_ends_a_text(
    tmp_path: Path, kind: str, name: str, settings: dict[str, Any], end: str
) -> None:
    (tmp_path / name).write_text(json.dumps(settings))
    encoding = loaded(tmp_path, kind)
    assert tokenizer.end_of_text(encoding) == int(end)
    engine = MarkovEngine(cycle(300), script=[[97, 98, int(end), 99, 100]])
    found = generate(engine, encoding, "x", max_new_tokens=5)
    assert (found.text, found.finish_reason) == ("ab", "stop")
    assert found.tokens == (97, 98, int(end))


def test_the_settings_decide_before_the_map(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / SPECIAL_MAP).write_text('{"eos_token": "</s>"}')
    assert tokenizer.end_of_text(loaded(tmp_path, "tiktoken")) == 258
    (tmp_path / SPECIAL_MAP).write_text("[]")
    with pytest.raises(CheckpointError, match=r"special_tokens_map\.json: expected a JSON object"):
        loaded(tmp_path, "tiktoken")


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_token_is_part_of_the_fingerprint(tmp_path: Path, kind: str) -> None:
    first = of_tokenizer(loaded(tmp_path, kind))
    assert of_tokenizer(loaded(tmp_path, kind)) == first
    (tmp_path / CONFIG).write_text('{"eos_token": "</s>"}')
    assert of_tokenizer(loaded(tmp_path, kind)) != first


def test_the_end_without_a_tokenizer() -> None:
    """A model with GPT-2's vocabulary size and no tokenizer uses GPT-2's BPE."""
    assert tokenizer.end_of_text(None) is None
    assert tokenizer.end_of_text(None, 50256) is None
    assert tokenizer.end_of_text(None, 50257) == 50256


SMALL = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_ctx=8, vocab_size=300)


def model(folder: Path, ends: Any, generation: Any = None) -> Path:
    save_pretrained(folder, GPT2Weights.random(1, SMALL), overwrite=True)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("ends", "generation", "expected"),
    cases("eos_token_id of config.json and generation_config.json: the ends"),
)
def test_the_ends_of_a_model(tmp_path: Path, ends: Any, generation: Any, expected: Any) -> None:
    opened = Checkpoint.open(model(tmp_path, ends, generation))
    assert tokenizer.end_tokens(opened.config, None) == {*json.loads(expected)}
    saved = Checkpoint.open(save_pretrained(tmp_path / "saved", opened))
    assert saved.config == opened.config


def test_a_config_of_gpt2s_vocabulary_is_read_as_it_was_written() -> None:
    for ends in ((), (50256,), (5, 50256)):
        config = GPT2Config(eos_token_ids=ends)
        assert GPT2Config.from_hugging_face(config.to_hugging_face()) == config
    transformers = pytest.importorskip("transformers")
    assert transformers.GPT2Config(**GPT2Config().to_hugging_face()).eos_token_id == 50256


def test_the_ends_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for generation in (None, {"eos_token_id": [9, 8]}, {"eos_token_id": 4, "top_p": 0.5}):
        folder = model(tmp_path / str(generation), 7, generation)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
        found = theirs.eos_token_id
        ours = Checkpoint.open(folder).config.eos_token_ids
        assert list(ours) == (found if isinstance(found, list) else [found])


def test_a_model_stops_at_its_end_token(tmp_path: Path) -> None:
    folder = model(tmp_path, None)
    free = GPT2.from_pretrained(folder, device="cpu").generate([1, 2], seed=3, max_new_tokens=6)
    model(tmp_path, 0, {"eos_token_id": free.tokens[3], "temperature": 5.0})
    found = GPT2.from_pretrained(folder, device="cpu").generate([1, 2], seed=3, max_new_tokens=6)
    assert found.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1]
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object, got []"),
        ('{"eos_token_id": -1}', "eos_token_ids: expected token ids, got -1"),
    ],
)
def test_a_damaged_generation_config(tmp_path: Path, generation: str, message: str) -> None:
    folder = model(tmp_path, None)
    (folder / "generation_config.json").write_text(generation)
    refused(folder, "generation_config.json", message)


def test_info_shows_the_generation_config(tmp_path: Path) -> None:
    suggested = {"temperature": 0.6, "top_k": 20, "do_sample": True, "repetition_penalty": 1.1}
    folder = model(tmp_path, 7, {"eos_token_id": [9, 8], "transformers_version": "5"} | suggested)
    found = gpt2block("info", folder, "--json").json
    assert found["config"]["eos_token_ids"] == [9, 8]
    assert suggested.items() <= found["generation_config"].items()
    shown = " ".join(printed("info", folder).split())
    assert "end tokens 9, 8 (generation_config.json)" in shown
    values = "temperature 0.6, top_k 20, do_sample true, repetition_penalty 1.1"
    assert f"suggested {values}; not applied" in shown
    (folder / "generation_config.json").unlink()
    assert "suggested" not in printed("info", folder)
    small_json(folder, added_tokens=SPECIAL)
    (folder / CONFIG).write_text('{"eos_token": "</s>"}')
    shown = " ".join(printed("info", folder).split())
    assert "end tokens 7 (config.json), 259 (the tokenizer)" in shown
    (folder / "tokenizer.json").write_text("{")
    assert gpt2block("info", folder, "--json").json["end_tokens"] == [
        {"id": 7, "source": "config.json"}
    ]


# --- GGUF

TEMPLATE = "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}<|assistant|>"


def gguf_of(folder: Path, *tokens: str, kinds: Any = (), **ids: int) -> Path:
    """Write a GGUF file whose tokens are bytes, "ab", and from id 257 `tokens` of these kinds."""
    several = [TokenType[kind] for kind in kinds] or [TokenType.CONTROL] * len(tokens)
    texts, types = [*BYTES, "ab", *tokens], [TokenType.NORMAL] * 257 + several
    named = {f"{name}_token_id": id_ for name, id_ in ids.items()}
    keys = tokenizer_keys("gpt2", texts, types, merges=["a b"], pre="gpt-2", **named)
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_ctx=32, vocab_size=len(texts))
    weights = GPT2Weights.random(1, config)
    metadata = metadata_of(weights) | keys | {"tokenizer.chat_template": TEMPLATE}
    return write(folder / "m.gguf", metadata, tensors_of(weights))


ENDS = (Path(__file__).parents[1] / "golden" / "end_tokens.txt").read_text("utf-8")


@pytest.mark.parametrize(("name", "case"), re.findall("(?m)^([^#:]+): ({.*)$", ENDS))
def test_the_end_tokens_of_a_gguf_file(name: str, case: str, tmp_path: Path) -> None:
    row = json.loads(case)
    file = gguf_of(tmp_path, *row["tokens"], kinds=row.get("kinds", ()), **row["ids"])
    expected = row["ends"]
    opened = Checkpoint.open(file)
    assert opened.config.eos_token_ids == tuple(257 + at for at in expected)
    again = save_gguf(tmp_path / "again.gguf", opened, "f32")
    assert {*Checkpoint.open(again).config.eos_token_ids} == {*opened.config.eos_token_ids}
    folder = Checkpoint.open(save_pretrained(tmp_path / "out", opened))
    assert folder.config.eos_token_ids == opened.config.eos_token_ids


def test_a_chat_ends_at_a_control_token_and_info_says_why(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    tokens = ["<|user|>", "<|assistant|>", "<|endoftext|>", "<|end|>"]
    file = gguf_of(tmp_path, *tokens, eos=259)
    model = GPT2.from_pretrained(file, device="cpu")
    question = [{"role": "user", "content": "ab"}]
    answer = model.chat(question, logit_bias={260: 90}, temperature=0, max_new_tokens=4)
    assert (answer.tokens, answer.text, answer.finish_reason) == ((260,), "", "stop")
    why = "end tokens 259 (tokenizer.ggml.eos_token_id), 260 (special token <|end|>)"
    assert why in " ".join(printed("info", file).split())


@pytest.mark.parametrize("value", [261, 2**31, 1.5, "b", True])
@pytest.mark.parametrize("name", ["eos", "bos", "padding", "mask"])
def test_an_id_outside_the_vocabulary_is_refused_by_name(
    name: str, value: Any, tmp_path: Path
) -> None:
    file = gguf_of(tmp_path, "a1", "a2", "a3", "a4", **{name: value})
    refused(file, f"tokenizer.ggml.{name}_token_id: expected a token id below 261, ", str(value))
