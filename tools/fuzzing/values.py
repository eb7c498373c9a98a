"""Random values, bytes and files that a program does not expect."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fuzzing import Rng

TEXTS = (
    "", " ", "a", "12", "\x1b[31mred\x1b[0m", "a\nb", "\0", "\udc80", "naïve 🎭", "x" * 3000,
    "../..", "~nosuchuser/x", "/", "NaN", "None", "\u202egnp", "é" * 200,
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 12, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 10**30, 10**400, -(10**400), 0.0,
    0.5, 12.0, -0.0, 1e-5, 1e-400, 1e38, 1e300, math.inf, -math.inf, math.nan, True, False, None,
)  # fmt: skip


def odd_value(rng: Rng, depth: int = 0) -> Any:
    """Return a value of JSON's types: numbers, texts, null, lists and objects of these."""
    kind = rng.random()
    if kind < 0.5:
        return rng.pick(*NUMBERS)
    if kind < 0.8 or depth > 2:
        return rng.pick(*TEXTS)
    values = [odd_value(rng, depth + 1) for _ in range(rng.whole(4))]
    if kind < 0.9:
        return values
    return {rng.pick(*TEXTS): value for value in values}


class Strange:
    """An object that NumPy cannot convert to an array."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no array")

    def __repr__(self) -> str:
        return "Strange\x1b[2J" + "!" * 600


def odd_argument(rng: Rng) -> Any:
    """Return an argument passed by mistake: values of JSON, arrays of all kinds, objects."""
    if rng.chance(0.45):
        return odd_value(rng)
    return rng.pick(*_ARRAYS)(rng)


def spoil(rng: Rng, arguments: dict[str, Any], *others: str) -> None:
    """Replace one of the arguments, or set one of the others, to an odd value."""
    arguments[str(rng.pick(*arguments, *others))] = odd_argument(rng)


def spoil_json(rng: Rng, value: dict[str, Any], *others: Any) -> None:
    """Remove a field at any depth, or set it to an odd value or one of the others."""
    parent = value
    for _ in range(rng.whole(1, 4)):
        key = rng.pick(*parent)
        if not isinstance(parent[key], dict) or not parent[key]:
            break
        parent = parent[key]
    key = rng.pick(*parent)
    if rng.chance(0.3):
        del parent[key]
    else:
        parent[key] = rng.pick(odd_value(rng), *others)


def _shape(rng: Rng) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(0, 5, rng.whole(0, 5)))


_ARRAYS: tuple[Callable[[Rng], Any], ...] = (
    lambda rng: rng.standard_normal(_shape(rng)),
    lambda rng: rng.standard_normal(_shape(rng)).astype(np.float32),
    lambda rng: rng.standard_normal(_shape(rng)).astype(np.float16),
    lambda rng: rng.standard_normal(_shape(rng)).astype(rng.pick(">f2", ">f4", ">f8")),
    lambda rng: rng.integers(0, 9, _shape(rng)).astype(rng.pick(">i2", ">i8", ">u4")),
    lambda rng: rng.integers(-3, 9, _shape(rng)),
    lambda rng: rng.integers(0, 9, _shape(rng)).astype(np.uint8),
    lambda rng: rng.random(_shape(rng)) < 0.5,
    lambda rng: rng.standard_normal(_shape(rng)) * 1j,
    lambda rng: np.full(_shape(rng), "text"),
    lambda rng: np.full(_shape(rng), None, object),
    lambda rng: np.ma.masked_array(rng.standard_normal((3, 4)), rng.random((3, 4)) < 0.5),
    lambda rng: np.ma.masked_array(rng.integers(0, 4, 4), rng.random(4) < 0.5),
    lambda rng: np.zeros(3, [("a", "f4"), ("b", "i4")]),
    lambda rng: np.zeros(3, "datetime64[s]"),
    lambda rng: [[1], [2, 3]],
    lambda rng: {1, 2},
    lambda rng: range(3),
    lambda rng: b"bytes",
    lambda rng: object(),
    lambda rng: Strange(),
    lambda rng: float,
    lambda rng: (),
    lambda rng: iter([1]),
    lambda rng: np.int64(2**62),
    lambda rng: np.float32(0.5),
    lambda rng: memoryview(b"abc"),
)


def odd_text(rng: Rng) -> str:
    """Return some characters of all kinds, without lone surrogates."""
    alphabet = "ab cde'st \n\t.,1290é🎭漢Ω\u0301\xa0\0\r"
    length = int(rng.choice([0, 1, 2, 5, 20, 60]))
    return "".join(alphabet[i] for i in rng.integers(0, len(alphabet), length))


def damaged(rng: Rng, data: bytes, head: int = 400) -> bytes:
    """Return data cut off, extended or with other bytes, often only among the first `head`."""
    changed = bytearray(data)
    end = rng.pick(len(data), min(len(data), head))
    for _ in range(rng.whole(1, 6)):
        at, new = rng.whole(end), rng.pick(bytes([rng.whole(256)]), b"(", b"9", b"\xff" * 8)
        changed[at : at + len(new)] = new
    cut, longer = data[: rng.whole(len(data))], data + rng.bytes(rng.whole(1, 9))
    return rng.pick(cut, longer, bytes(changed), bytes(changed))


def damage(rng: Rng, file: Path) -> None:
    file.write_bytes(damaged(rng, file.read_bytes()))


def replace(rng: Rng, file: Path) -> str:
    """Replace a file by a folder, a link, other content or nothing; return a name of the change."""
    file.unlink(missing_ok=True)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    replacements: dict[str, Callable[[], object]] = {
        "folder": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
        "link to itself": lambda: file.symlink_to(file),
        "link to nothing": lambda: file.symlink_to(file.with_name("nothing")),
        "link to zeros": lambda: file.symlink_to("/dev/zero"),
        "pointer": lambda: file.write_bytes(pointer),
        "empty file": file.touch,
        "other file": lambda: file.write_bytes(rng.bytes(rng.whole(1, 2000))),
        "nothing": lambda: None,
    }
    name = rng.pick(*replacements)
    replacements[name]()
    return name
