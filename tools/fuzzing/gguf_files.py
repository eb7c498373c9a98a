"""GGUF files: small Llamas with random tensors and a tokenizer, and damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from fuzzing import Area, Difference, Outcome, accepted, refused_or
from fuzzing.values import pick
from gpt2block.checkpoints import Checkpoint
from gpt2block.text import tokenizer

_SPECIAL = (0, 1, 2, 7, 8, 9, 12, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
_WORD = "tokenizer.ggml."


def case(rng: np.random.Generator, folder: Path) -> Outcome:
    file = folder / "model.gguf"
    tensors, heads = _write(rng, file)
    whole = file.read_bytes()
    damaged = rng.random() < 0.8
    if damaged:
        file.write_bytes(pick(rng, _overwrite, _overwrite, _overwrite, _cut, _insert)(rng, whole))
    opened = refused_or(lambda: Checkpoint.open(file))
    encoding = refused_or(lambda: tokenizer.from_path(file, 2**20))
    if not damaged:
        if "refused" in (opened, encoding):
            accepted(lambda: Checkpoint.open(file))
            accepted(lambda: tokenizer.from_path(file, 2**20))
        _check(opened, tensors, heads)
        return "right"
    if isinstance(opened, str):
        return "refused"
    for stored in opened.stored.values():
        refused_or(stored.read)
    return "right"


def _check(opened: Any, tensors: dict[str, NDArray[Any]], heads: tuple[int, int]) -> None:
    """Raise Difference unless all tensors are those of the file, Q and K in half-split order."""
    for stored in opened.stored.values():
        rows = []
        for piece in stored.pieces:
            expected = tensors[piece.label]
            for part, count in zip("qk", heads, strict=True):
                if f"attn_{part}.weight" in piece.label:
                    size = len(expected) // count
                    order = [h * size + 2 * k + odd for h in range(count) for odd in (0, 1)
                             for k in range(size // 2)]  # fmt: skip
                    expected = expected[order]
            rows.append(expected)
        if not np.array_equal(stored.read(), np.concatenate(rows)):
            raise Difference(f"{stored.label}: other values")


def _write(rng: np.random.Generator, file: Path) -> tuple[dict[str, NDArray[Any]], tuple[int, int]]:
    """Write a random model; return its tensors by name, and its heads of Q, and of K and V."""
    groups, n_kv, size = (int(rng.integers(1, 4)) for _ in range(3))
    n_head, size, n_layer = groups * n_kv, 2 * size, int(rng.integers(1, 3))
    C, FF, V = n_head * size, int(rng.integers(1, 12)), 256 + int(rng.integers(1, 9))
    dtype = pick(rng, np.float32, np.float16)
    writer = GGUFWriter(file, "llama")
    for key, value in (
        ("block_count", n_layer), ("context_length", 16), ("embedding_length", C),
        ("feed_forward_length", FF), ("attention.head_count", n_head),
        ("attention.head_count_kv", n_kv),
    ):  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_string(f"{_WORD}model", "llama")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", "a", "b", "ab", "▁", "▁a", "aba", "c"][: V - 256]
    writer.add_array(f"{_WORD}tokens", words + bytes_)
    writer.add_array(f"{_WORD}scores", [float(-i) for i in range(V)])
    writer.add_array(f"{_WORD}token_type", [2] + [1] * (len(words) - 1) + [6] * 256)
    writer.add_uint32(f"{_WORD}unknown_token_id", 0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, C), "output_norm.weight": (C,)}
    for layer in range(n_layer):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in (
            ("attn_norm", (C,)), ("ffn_norm", (C,)), ("attn_q", (C, C)),
            ("attn_k", (n_kv * size, C)), ("attn_v", (n_kv * size, C)), ("attn_output", (C, C)),
            ("ffn_gate", (FF, C)), ("ffn_up", (FF, C)), ("ffn_down", (C, FF)),
        )}  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        kind = dtype if len(shape) > 1 else np.float32
        tensors[name] = rng.standard_normal(shape).astype(kind)
        stored = GGMLQuantizationType.F16 if kind is np.float16 else GGMLQuantizationType.F32
        writer.add_tensor(name, tensors[name], raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors, (n_head, n_kv)


def _overwrite(rng: np.random.Generator, data: bytes) -> bytes:
    """Other numbers at one to three places, most of them in the header."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(min(len(data), pick(rng, 32, 400, 8000, len(data))) - 8))
        width = pick(rng, 1, 4, 8)
        value = pick(rng, *_SPECIAL, int(rng.integers(256)))
        changed[at : at + width] = struct.pack("<Q", value)[:width]
    return bytes(changed)


def _cut(rng: np.random.Generator, data: bytes) -> bytes:
    return data[: int(rng.integers(len(data)))]


def _insert(rng: np.random.Generator, data: bytes) -> bytes:
    at = int(rng.integers(len(data)))
    return data[:at] + rng.bytes(int(rng.integers(1, 20))) + data[at:]


AREA = Area("gguf_files", 1.0, case, memory=2**29)
