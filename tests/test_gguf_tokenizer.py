"""Tokenizers of GGUF files, compared with those of `tokenizers` and `sentencepiece`."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from fuzzing.gguf_writer import metadata_of, tensors_of, tokenizer_keys, write
from gguf import TokenType
from make_golden_smollm2 import texts
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

import gpt2block
from gpt2block import CheckpointError
from gpt2block.checkpoints import Checkpoint, save_pretrained
from gpt2block.tokenizers import tokenizer
from gpt2block.tokenizers.encoding import Encoding, TokenizersEncoding
from tests.refusals import refused

CORPUS = Path(__file__).parent.parent / "kernels_cu"
NORMAL, UNKNOWN, CONTROL = TokenType.NORMAL, TokenType.UNKNOWN, TokenType.CONTROL
USER_DEFINED, UNUSED, BYTE = TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.BYTE
SIZE = 700
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus() -> list[str]:
    files = sorted(CORPUS.rglob("*.cu"))[:12]
    return [*(file.read_text() for file in files), *texts()[:300]]


WORDS, PLAIN = (pre_tokenizers.ByteLevel(False, use_regex=split) for split in (True, False))
# The pre-tokenizers of the models that llama.cpp knows by these names
STEPS: dict[str, list[Any]] = {
    "gpt-2": [WORDS],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), WORDS],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), PLAIN],
}


@lru_cache
def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A trained byte-level BPE with two special tokens and one other added token."""
    found = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    found.pre_tokenizer = pre_tokenizers.Sequence(STEPS[pre])
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(corpus(), trainer)
    found.add_tokens([tokenizers.AddedToken("<added>", normalized=False)])
    return found


def byte_level_keys(pre: str, **more: Any) -> dict[str, Any]:
    spec = json.loads(byte_level(pre).to_str())
    ids = {**spec["model"]["vocab"], "<added>": SIZE}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {"<|start|>": CONTROL, "<|end|>": CONTROL, "<added>": USER_DEFINED}
    types = [special.get(token, NORMAL) for token in tokens]
    merges = [" ".join(pair) for pair in spec["model"]["merges"]]
    named = {"bos_token_id": 0, "eos_token_id": 1}
    return tokenizer_keys("gpt2", tokens, types, merges=merges, pre=pre, **named, **more)


@lru_cache
def sentence_piece() -> sentencepiece.SentencePieceProcessor:
    """A trained SentencePiece BPE with bytes, whose settings are those of Llama 2's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in corpus() for line in text.split("\n") if line),
        model_writer=model,
        vocab_size=SIZE,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        control_symbols=["<ctrl>"],
        user_defined_symbols=["<user>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentence_piece_keys(**more: Any) -> dict[str, Any]:
    model = sentence_piece()
    ids = range(model.vocab_size())
    tokens, types = [model.id_to_piece(id_) for id_ in ids], [NORMAL] * len(ids)
    types[tokens.index("<user>")] = USER_DEFINED
    others = (UNKNOWN, model.is_unknown), (CONTROL, model.is_control), (BYTE, model.is_byte)
    for kind, is_kind in others:
        types = [kind if is_kind(id_) else known for id_, known in enumerate(types)]
    return tokenizer_keys(
        "llama",
        tokens,
        types,
        scores=[model.get_score(id_) for id_ in ids],
        **{"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more},
    )


def file_with(folder: Path, keys: dict[str, Any]) -> Path:
    """A GGUF file of a small Llama with these keys of a tokenizer."""
    config = gpt2block.LlamaConfig(
        n_layer=1, n_head=2, n_embd=8, n_ctx=64, vocab_size=len(keys["tokenizer.ggml.tokens"]),
        n_ff=16,
    )  # fmt: skip
    weights = gpt2block.LlamaWeights.random(1, config)
    source = Checkpoint.open(save_pretrained(folder / "source", weights, overwrite=True))
    return write(folder / "m.gguf", metadata_of(source) | keys, tensors_of(source))


def loaded(folder: Path, keys: dict[str, Any]) -> Encoding:
    return tokenizer.from_path(file_with(folder, keys), 10**6)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_a_byte_level_bpe_gives_the_ids_of_tokenizers(pre: str, tmp_path: Path) -> None:
    file = file_with(tmp_path, byte_level_keys(pre))
    found, expected = tokenizer.from_path(file, SIZE + 1), byte_level(pre)
    for named in (False, True):
        expected.encode_special_tokens = not named
        checked = [*texts(), "a<|end|> <added>b", "I'LL'll 1234567\r\n\n  x"]
        for text in checked:
            theirs = expected.encode(text, add_special_tokens=False).ids
            before = [0] if pre == "llama-bpe" else []
            assert tokenizer.encode(found, text, special=named) == [*before, *theirs], text
    assert tokenizer.end_of_text(found) == 1
    for text in texts()[:200]:
        assert found.decode(found.encode_ordinary(text)) == text


def test_sentence_piece_gives_the_ids_of_sentencepiece(tmp_path: Path) -> None:
    found, expected = loaded(tmp_path, sentence_piece_keys()), sentence_piece()
    differing = []
    for text in [*texts(), "   x", "trailing  ", "12 345", "\n\n a"]:
        if "\0" in text:
            continue
        ids = tokenizer.encode(found, text)
        assert ids[0] == 1
        if ids[1:] != expected.encode(text):
            differing.append(text)
        assert found.decode(ids[1:]) == expected.decode(ids[1:])
    assert differing == []
    assert tokenizer.end_of_text(found) == 2
    a, user, b = (expected.encode(text) for text in ("a", "<user>", "b"))
    assert found.encode_ordinary("a<user>b") == a + user[-1:] + b  # as llama.cpp encodes it
    ids = tokenizer.encode(found, "<s>a</s>", special=True)
    assert ids[0] == 1
    assert ids[-1] == 2


def test_sentence_piece_without_a_space_before_a_text(tmp_path: Path) -> None:
    keys = sentence_piece_keys(add_space_prefix=False, add_bos_token=False)
    found = loaded(tmp_path, keys)
    with_space = loaded(tmp_path, sentence_piece_keys(add_bos_token=False))
    for text in texts()[:300]:
        ids = tokenizer.encode(found, " " + text)
        assert ids == tokenizer.encode(with_space, text)
        assert found.decode(ids) == " " + text
        assert with_space.decode(ids) == text


def test_bos_is_added_as_the_file_says(tmp_path: Path) -> None:
    for added in (False, True):
        for keys in (byte_level_keys("gpt-2", add_bos_token=added),
                     sentence_piece_keys(add_bos_token=added)):  # fmt: skip
            found = loaded(tmp_path, keys)
            bos = keys["tokenizer.ggml.bos_token_id"]
            assert (tokenizer.encode(found, "a")[0] == bos) == added


def test_tokens_that_fill_the_vocabulary_stand_for_no_text(tmp_path: Path) -> None:
    keys = byte_level_keys("llama-bpe")
    keys["tokenizer.ggml.tokens"].append("[PAD701]")
    keys["tokenizer.ggml.token_type"].append(int(UNUSED))
    found = loaded(tmp_path, keys)
    assert SIZE + 1 not in found.encode_ordinary("[PAD701]")
    assert found.decode(found.encode_ordinary("[PAD701]")) == "[PAD701]"


def test_a_vocabulary_without_bytes_that_utf8_never_has(tmp_path: Path) -> None:
    """SmolLM2's has none for 0xC0, 0xC1 and 0xF5 to 0xFF, among others."""
    keys = byte_level_keys("smollm")
    tokens = keys["tokenizer.ggml.tokens"]
    for byte in (0xC0, 0xC1, *range(0xF5, 0x100)):
        tokens[tokens.index(chr(byte))] = f"<unused{byte}>"
    found = loaded(tmp_path, keys)
    for text in texts():
        assert found.encode_ordinary(text) == byte_level("smollm").encode(text).ids


REFUSED: dict[str, tuple[str, Any, str]] = {
    "model": ("model", "bert", "tokenizer.ggml.model: 'bert' is not supported"),
    "pre": ("pre", "deepseek-llm", "tokenizer.ggml.pre: 'deepseek-llm' is not supported"),
    "eos": ("add_eos_token", True, "tokenizer.ggml.add_eos_token: True is not supported"),
    "new": ("new_rule", "x", "tokenizer.ggml.new_rule: 'x' is not supported"),
    "charsmap": ("precompiled_charsmap", [1, 2], "tokenizer.ggml.precompiled_charsmap"),
    "types": ("token_type", [1, 1], "token_type: expected a number for each of 701 tokens"),
    "merges": ("merges", "a b", "tokenizer.ggml.merges: expected an array of strings"),
    "tokens": ("tokens", 3, "tokenizer.ggml.tokens: expected an array of strings"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_tokenizers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    key, value, message = REFUSED[name]
    keys = byte_level_keys("gpt-2")
    file = file_with(tmp_path, keys)
    source = Checkpoint.open(tmp_path / "source")
    keys = metadata_of(source) | keys | {f"tokenizer.ggml.{key}": value}
    write(file, keys, tensors_of(source))
    assert Checkpoint.open(file).config.vocab_size == SIZE + 1
    refused(file, message, read=lambda path: tokenizer.from_path(path, 10**6))
    model = gpt2block.from_pretrained(file, device="cpu")
    assert len(model.generate([1, 2], max_new_tokens=2, stop_ids=()).tokens) == 2
    with pytest.raises(CheckpointError, match=message[:20]):
        model.generate("a")


def test_sentence_piece_that_is_not_supported(tmp_path: Path) -> None:
    keys = sentence_piece_keys()
    scores, types = "tokenizer.ggml.scores", "tokenizer.ggml.token_type"
    for changes, message in (
        ({scores: keys[scores][:-1]}, "scores: expected a number for each of"),
        ({types: [int(NORMAL)] * len(keys[types])}, "expected 256 tokens for bytes"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "and an unknown token"),
    ):
        with pytest.raises(CheckpointError, match=message):
            loaded(tmp_path, keys | changes)
    tokens = [*keys["tokenizer.ggml.tokens"]]
    tokens[tokens.index("<user>")] = "▁<user>"
    with pytest.raises(CheckpointError, match="token_type: '▁<user>' is not supported"):
        loaded(tmp_path, keys | {"tokenizer.ggml.tokens": tokens})


def test_convert_writes_the_tokenizer_and_the_chat_template(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for keys in (byte_level_keys("llama-bpe"), sentence_piece_keys()):
        file = file_with(tmp_path, {**keys, "tokenizer.chat_template": template})
        folder = save_pretrained(tmp_path / "out", Checkpoint.open(file), overwrite=True)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["chat_template"] == template
        assert settings["eos_token"] in ("<|end|>", "</s>")
        found, expected = tokenizer.load(folder, 10**6), tokenizer.load(file, 10**6)
        assert isinstance(found, TokenizersEncoding)
        assert tokenizer.end_of_text(found) == tokenizer.end_of_text(expected)
        for text in texts()[:200]:
            assert tokenizer.encode(found, text) == tokenizer.encode(expected, text)
        ids = np.array([[1, 2, 3]])
        models = [gpt2block.from_pretrained(each, device="cpu") for each in (folder, file)]
        np.testing.assert_array_equal(models[0](ids), models[1](ids))


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    file = file_with(tmp_path, byte_level_keys("gpt-2"))
    source = Checkpoint.open(tmp_path / "source")
    write(file, metadata_of(source), tensors_of(source))
    refused(file, "tokenizer.ggml.tokens", read=lambda path: tokenizer.from_path(path, 10**6))
    folder = save_pretrained(tmp_path / "out", Checkpoint.open(file))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
