"""Texts with a Llama that has a tokenizer: generation, streaming and tokens that end them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2block import Llama, LlamaConfig, LlamaWeights, from_pretrained
from gpt2block.files.checkpoints import save_pretrained
from tests.tokenizer_files import sentence_piece

CONFIG = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=24, n_ctx=64, vocab_size=265, n_ff=40,
    tie_word_embeddings=True,
)  # fmt: skip
TEXT = "ab a\nb ab"


WEIGHTS = LlamaWeights.random(1, CONFIG)
WEIGHTS.wte[259:] *= 10  # makes tokens of letters likely


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokens = sentence_piece(tmp_path)
    return save_pretrained(tmp_path / "model", WEIGHTS, tokenizer=tokens)


@pytest.fixture
def llama(folder: Path) -> Llama:
    model = from_pretrained(folder, device="cpu")
    assert isinstance(model, Llama)
    return model


def test_a_text_begins_with_its_token_and_pieces_are_the_text(llama: Llama) -> None:
    found = llama.generate(TEXT, max_new_tokens=20, seed=1)
    ids = [1, *llama.tokenizer.encode_ordinary(TEXT)]
    assert llama.generate(ids, max_new_tokens=20, seed=1) == found
    assert "".join(llama.stream(TEXT, max_new_tokens=20, seed=1)) == found.text
    assert set(found.text) & set(" ab")
    assert llama.generate("", max_new_tokens=5, seed=1).tokens  # the prompt is <s>


def test_the_end_token_ends_a_text(llama: Llama, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    model = from_pretrained(folder, device="cpu")
    found = model.generate(TEXT, samples=20, max_new_tokens=40, seed=0, temperature=2.0)
    ended = [one for one in found if one.finish_reason == "stop"]
    assert ended
    assert all(one.tokens[-1] == 2 and "</s>" not in one.text for one in ended)


def test_each_end_token_of_the_config_ends_a_text(llama: Llama) -> None:
    """Token 700 is outside the vocabulary: no text contains it."""
    free = [llama.generate([1, 5], seed=n, max_new_tokens=30, stop_ids=()) for n in range(6)]
    ends = {free[0].tokens[3], free[1].tokens[5]}
    config = replace(llama.config, eos_token_ids=(*ends, 700))
    model = Llama(replace(WEIGHTS, config=config), device="cpu")
    for seed, longer in enumerate(free):
        found = model.generate([1, 5], seed=seed, max_new_tokens=30)
        count = next((n for n, t in enumerate(longer.tokens, 1) if t in ends), 30)
        assert found.tokens == longer.tokens[:count]
        assert found.finish_reason == ("stop" if longer.tokens[count - 1] in ends else "length")
    assert len(model.generate([1, 5], seed=0, max_new_tokens=30, stop_ids=()).tokens) == 30
