"""GGUF files: small Llamas with random tensors and a tokenizer, odd headers, and damaged files."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType

from fuzzing import Area, Rng, attempt, check, check_equal, refuses
from fuzzing.gguf_writer import metadata_of, tensors_of, tokenizer_keys, write
from fuzzing.values import damaged
from gpt2block import LlamaConfig, LlamaWeights
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.tokenizers import tokenizer

_SPECIAL = (0, 1, 2, 7, 8, 9, 12, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
_WORDS = ("<unk>", "a", "b", "ab", "▁", "▁a", "aba", "c")
_ENDS = ("<|end|>", "<|eot_id|>", "<|return|>", "<|call|>", "<end_of_turn>")


def case(rng: Rng, folder: Path) -> None:
    file = folder / "model.gguf"
    kind = rng.pick("F32", "F16")
    weights, ends, valid = _write(rng, file, kind)
    if not valid:
        check(refuses(Checkpoint.open, file), "opened a file with a wrong key")
        return
    changed = rng.chance(0.8)
    if changed:
        change = rng.pick(_overwrite, _overwrite, _overwrite, damaged, _insert)
        file.write_bytes(change(rng, file.read_bytes()))
    refused = refuses(tokenizer.from_path, file, 2**20)
    check(changed or not refused, "refused the tokenizer")
    opened = attempt(not changed, Checkpoint.open, file)
    if changed:
        for stored in opened.stored.values():
            refuses(stored.read)
        return
    check_equal("end tokens", {*opened.config.eos_token_ids}, ends)
    check_equal("config", replace(opened.config, eos_token_ids=()), weights.config)
    for (name, found, _), (_, truth, layout) in zip(
        opened.tensors(), weights.tensors(), strict=True
    ):
        stored_as = np.float16 if kind == "F16" and truth.ndim > 1 else np.float32
        expected = (truth.T if layout == "KN" else truth).astype(stored_as)
        same = found.dtype == stored_as and np.array_equal(found, expected)
        check(same, f"{name}: other values")


def _write(rng: Rng, file: Path, kind: str) -> tuple[LlamaWeights, set[int], bool]:
    """Write a random model with a tokenizer; return it, its end tokens, and whether it is valid."""
    groups, n_kv, pairs = (rng.whole(1, 4) for _ in range(3))
    words = _WORDS[: rng.whole(1, 9)]
    ends = [end for end in _ENDS if rng.chance(0.3)]
    config = LlamaConfig(
        n_layer=rng.whole(1, 3), n_head=groups * n_kv, n_embd=groups * n_kv * 2 * pairs,
        n_ctx=16, vocab_size=256 + len(words) + len(ends), n_kv_head=n_kv, n_ff=rng.whole(1, 12),
        tie_word_embeddings=rng.chance(0.5),
    )  # fmt: skip
    weights = LlamaWeights.random(rng.whole(2**31), config)
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256)), *ends]
    types = [TokenType.UNKNOWN] + [TokenType.NORMAL] * (len(words) - 1) + [TokenType.BYTE] * 256
    types += [rng.pick(TokenType.CONTROL, TokenType.USER_DEFINED) for _ in ends]
    scores = [float(-index) for index in range(len(tokens))]
    keys = tokenizer_keys("llama", tokens, types, scores=scores, unknown_token_id=0)
    keys |= metadata_of(weights)
    for change in _odd_keys(rng, keys):
        keys |= change
    valid = rng.chance(0.9)
    if not valid:
        keys |= rng.pick(
            {f"tokenizer.ggml.{rng.pick('eos', 'bos')}_token_id": len(tokens) + rng.whole(9)},
            {"llama.feed_forward_length": [*range(config.n_layer + 1)]},
            {"llama.names": [b"\xff"]}, {"llama.table": [[1], [2]]},
        )  # fmt: skip
    write(file, keys, tensors_of(weights), lambda name: kind)
    inner = "<|end|>" if {"<|return|>", "<|call|>"} <= {*ends} else None
    return weights, {tokens.index(end) for end in ends if end != inner}, valid


def _odd_keys(rng: Rng, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Return some keys as other programs write them, none of which changes the model."""
    blocks = keys["llama.block_count"]
    sizes = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    every: list[dict[str, Any]]
    every = [{f"llama.{size}": [keys[f"llama.{size}"]] * blocks} for size in sizes]
    ids = ("bos", "eos", "eot", "padding", "mask")
    every += [{f"tokenizer.ggml.{name}_token_id": 2**32 - 1} for name in ids]
    every += [{"x.names": [b"\xff", b"a"]}, {"x.deep": [[[1], [2]], [[b"\xff"]]]}]
    return [each for each in every if rng.chance(0.3)]


def _overwrite(rng: Rng, data: bytes) -> bytes:
    """Return the data with other bytes at one to three places, most of them in the header."""
    other = bytearray(data)
    for _ in range(rng.whole(1, 4)):
        at = rng.whole(min(len(data), rng.pick(32, 400, 8000, len(data))) - 8)
        width = rng.pick(1, 4, 8)
        value = rng.pick(*_SPECIAL, rng.whole(256))
        other[at : at + width] = struct.pack("<Q", value)[:width]
    return bytes(other)


def _insert(rng: Rng, data: bytes) -> bytes:
    at = rng.whole(len(data))
    return data[:at] + rng.bytes(rng.whole(1, 20)) + data[at:]


AREA = Area("gguf_files", 1.0, case, memory=2**29)
