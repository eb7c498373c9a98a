"""Execute single PTX instructions of the engine, and round numbers exactly, for tests."""

from __future__ import annotations

import ctypes
import subprocess
from fractions import Fraction
from functools import cache
from hashlib import sha256
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import gpt2block.emulator.ptx
from gpt2block.emulator.ptx.cache import folder, lock
from gpt2block.emulator.ptx.engine import FLAGS

Rows = npt.NDArray[np.uint64]
HERE = Path(__file__).parent
HEADERS = Path(gpt2block.emulator.ptx.__file__).parent / "cpp"
LANES = 32


@cache
def _library() -> ctypes.CDLL:
    """Return a library that executes an instruction; one of several processes builds it."""
    sources = [HERE / "ptx_instruction.cpp", *sorted(HEADERS.glob("*.[ch]*"))]
    key = sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    library = folder() / f"instruction-{key[:20]}.so"
    with lock("instruction"):
        if not library.exists():
            made = library.with_suffix(".new")
            command = ("g++", *FLAGS, "-O1", "-shared", f"-I{HEADERS}", str(sources[0]))
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(library)
    return ctypes.CDLL(str(library))


def execute(opcode: str, kinds: str, registers: Rows) -> Rows:
    """Return the registers (warp, row, lane) after an instruction. kinds: see the C++ file."""
    after: Rows = np.ascontiguousarray(registers, dtype=np.uint64).copy()
    known = _library().run(
        opcode.encode(), kinds.encode(), len(after), ctypes.c_void_p(after.ctypes.data)
    )
    assert known, f"no handler knows {opcode}"
    return after


class Format(NamedTuple):
    """A binary format; `infinity`: whether it has one."""

    exponent: int
    fraction: int
    infinity: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def sign(self) -> int:
        return int(2 ** (self.exponent + self.fraction))

    @property
    def nan(self) -> int:
        return self.sign - 1

    @property
    def top(self) -> int:  # the code of infinity, or the code after the largest number
        return self.nan >> self.fraction << self.fraction if self.infinity else self.nan

    def is_nan(self, code: int) -> bool:
        return code & self.nan > (self.top if self.infinity else self.top - 1)

    def is_infinite(self, code: int) -> bool:
        return self.infinity and code & self.nan == self.top

    def flushed(self, code: int) -> int:
        return code & self.sign if code & self.nan < 1 << self.fraction else code

    def value(self, code: int) -> Fraction:
        """Return the value of a finite number."""
        exponent, part = divmod(code & self.nan, 1 << self.fraction)
        significand = part + (1 << self.fraction if exponent else 0)
        power = max(exponent, 1) - self.bias - self.fraction
        size = Fraction(significand) * Fraction(2) ** power
        return -size if code & self.sign else size

    def rounded(self, x: Fraction, mode: str = "rn", negative_zero: bool = False) -> int:
        """Return the code of a number, rounded by "rn", "rz", "rm", "rp" or "rna"."""
        negative = x < 0 or (x == 0 and negative_zero)
        size = abs(x)
        exponent = max(_floor_log2(size), 1 - self.bias) if size else 1 - self.bias
        steps = size / Fraction(2) ** (exponent - self.fraction)
        whole, rest = int(steps), steps - int(steps)
        up = {
            "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
            "rna": rest >= Fraction(1, 2),
            "rz": False,
            "rm": negative and rest > 0,
            "rp": not negative and rest > 0,
        }[mode]
        code = ((exponent + self.bias - 1) << self.fraction) + whole + up
        if code >= self.top:
            inwards = mode in ("rz", "rp" if negative else "rm")
            code = self.top - 1 if inwards or not self.infinity else self.top
        return code | (self.sign if negative else 0)


FORMATS = {
    "f64": Format(11, 52),
    "f32": Format(8, 23),
    "f16": Format(5, 10),
    "bf16": Format(8, 7),
    "tf32": Format(8, 10),
    "e4m3": Format(4, 3, infinity=False),
    "e5m2": Format(5, 2),
}


def _floor_log2(size: Fraction) -> int:
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if Fraction(2) ** guess <= size else guess - 1


def root(x: Fraction) -> Fraction:
    """Return a square root, or a number between it and the next one with 200 bits."""
    scaled = x.numerator * x.denominator << 400
    found = isqrt(scaled)
    inexact = found * found != scaled
    return (found + Fraction(inexact, 2)) / Fraction(x.denominator << 200)


def random_codes(rng: np.random.Generator, name: str, count: int) -> list[int]:
    """Return numbers of a format: special ones, any bits, and short ones of a similar size."""
    known = FORMATS[name]
    bits = known.exponent + known.fraction + 1
    one = known.bias << known.fraction
    edges = [0, 1, (1 << known.fraction) - 1, 1 << known.fraction, one, known.top - 1]
    edges += [known.top, known.nan, one + 1, one - 1]
    special = [*edges, *(each | known.sign for each in edges)]
    found: list[int] = [special[k] for k in rng.integers(len(special), size=count // 4)]
    found += map(
        int,
        rng.integers(2**bits, size=count // 4, dtype=np.uint64, endpoint=False)
        if bits < 64
        else rng.integers(2**63, size=count // 4, dtype=np.uint64) * 2 + 1,
    )
    for _ in range(count - len(found)):
        exponent = known.bias + int(rng.integers(-3, 4))
        kept = int(rng.integers(1, known.fraction + 1))
        part = int(rng.integers(2**kept)) << (known.fraction - kept)
        found.append(int(rng.integers(2)) * known.sign | exponent << known.fraction | part)
    order: Any = rng.permutation(count)
    return [found[k] for k in order]
