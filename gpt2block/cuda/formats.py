"""Storage formats of a model's numbers: `Formats`, derived from the user's `FormatOptions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from gpt2block.checks import FLOATS, check_choice, check_flag, nearest
from gpt2block.errors import Argument, InputError, UnknownOption, shown

FP8 = ("float8_e5m2", "float8_e4m3fn")
DTYPES = (*FLOATS, *FP8)
FILE = "file"  # value of the option dtype: matrices keep their quantized types in the file
GGUF = "gguf"  # dtype of a matrix in quantized blocks, such as those of a GGUF file
CACHE_WITH_FP8 = "float16"  # dtype of KV cache and prompts' activations with FP8 weights
REMOVED = {  # explanations for the user, by removed option
    "activations": "activations is no option any more: decoding rounds what it multiplies to "
    "float16 where the weights are float16 or FP8 and the GPU is a Hopper, and keeps 22 bits "
    "elsewhere: leave it out",
    "peer": "peer is no option any more: to compare with PyTorch, run a script of the folder "
    "benchmarks/ in gpt2block's repository",
    "sweep": "sweep is no option any more: to time every block size of a variant, run "
    "python -m benchmarks.operations OPERATION --sweep in gpt2block's repository",
}


def own_cache_dtype(dtype: str) -> str:
    """Return the default dtype of the KV cache for weights of this dtype."""
    return CACHE_WITH_FP8 if dtype in (*FP8, FILE, GGUF) else dtype


def cache_option(fp8: str | None) -> dict[str, Any]:
    """Return the option of operations on a KV cache that states its FP8 format, if there is one."""
    return {} if fp8 is None else {"kv_dtype": fp8}


def dtype_option(text: str, values: tuple[str, ...] = DTYPES) -> Any:
    """Return a dataclass field for a dtype, which is also a command-line option with this help."""
    return field(default=None, metadata={"help": text, "values": values})


@dataclass(frozen=True)
class FormatOptions:
    """A user's storage options; `resolved` returns the `Formats` for a checkpoint and a device.

    dtype: dtype of the weights' matrices, or "file": matrices of 4 to 8 bits stay in blocks if
    kernels read the blocks, and other matrices become float16; None: see `resolved`.
    kv_dtype: dtype of keys and values, or None for the default of dtype. allow_nonfinite: whether
    weights may be infinite or NaN. Raises InputError.
    """

    dtype: str | None = dtype_option(
        "Dtype of the weights: float32, bfloat16, float16, float8_e5m2 or float8_e4m3fn, or file: "
        "the 4 to 8 bits of a file of GGUF, GPTQ, AWQ or compressed-tensors as they are, with "
        "activations of float16. By default file for such files on a GPU, and float32 otherwise.",
        (*DTYPES, FILE),
    )
    kv_dtype: str | None = dtype_option(
        "Dtype of keys and values: float8_e5m2 or float8_e4m3fn, with weights of 16 bits or FP8; "
        "by default that of the weights, float16 with FP8 and file.",
    )
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None or self.kv_dtype is None:
            self.resolved(in_blocks=False)
        else:  # kv_dtype is checked later, with the dtype
            check_choice("kv_dtype", self.kv_dtype, DTYPES)

    def resolved(self, in_blocks: bool) -> Formats:
        """Return the Formats of a model. Raises InputError if dtype and kv_dtype do not match.

        in_blocks: whether the checkpoint has matrices in blocks that the device's kernels read. If
        so, dtype None becomes "file", else float32.
        """
        usual = FILE if in_blocks else "float32"
        dtype = usual if self.dtype is None else self.dtype
        return Formats(dtype, self.kv_dtype, self.allow_nonfinite)

    def identity(self) -> dict[str, object]:
        """Return options for a job's manifest: both dtypes, and options not at their defaults."""
        options: dict[str, object] = {"dtype": self.dtype, "kv_dtype": self.kv_dtype}
        options["activations"] = None  # a removed option, still present in manifests
        for each in fields(self):
            value = getattr(self, each.name)
            if each.init and each.name not in options and value != each.default:
                options[each.name] = value
        return options


@dataclass(frozen=True)
class Formats(FormatOptions):
    """Storage formats of a model's numbers.

    cache_dtype: dtype of keys and values. fp8_cache: cache_dtype if it is FP8, else None.
    """

    dtype: str = "float32"
    cache_dtype: str = field(init=False, repr=False, compare=False)
    fp8_cache: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, (*DTYPES, FILE))
        check_flag("allow_nonfinite", self.allow_nonfinite)
        self._check_kv_dtype()
        kept = self.kv_dtype or own_cache_dtype(self.dtype)
        vars(self).update(cache_dtype=kept, fp8_cache=kept if kept in FP8 else None)

    def _check_kv_dtype(self) -> None:
        own, kv_dtype = own_cache_dtype(self.dtype), self.kv_dtype
        if kv_dtype is None:
            return
        if not isinstance(kv_dtype, str) or kv_dtype not in (own, *FP8):
            raise InputError(
                f"kv_dtype: expected {', '.join(FP8)}, or {own} with weights of {self.dtype}, "
                f"got {shown(kv_dtype)}{nearest(kv_dtype, (own, *FP8))}"
            )
        if kv_dtype != own and self.dtype == "float32":
            raise InputError(
                Argument("kv_dtype"),
                f" {kv_dtype!r}: expected weights of 16 bits or FP8, got float32: use ",
                Argument("dtype", "bfloat16"),
                ", or another one of them",
            )

    def __str__(self) -> str:
        """Return a text: dtype of the weights, and of the KV cache if it is not the default."""
        usual = self.cache_dtype == own_cache_dtype(self.dtype)
        return self.dtype if usual else f"{self.dtype}, kv_cache {self.cache_dtype}"

    def dtype_of(self, name: str) -> str:
        """Return the dtype to which a matrix is converted unless it stays in GGUF blocks.

        A table of embeddings for layers is read row by row, so FP8 would save no time.
        """
        dtype = CACHE_WITH_FP8 if self.dtype == FILE else self.dtype
        return "bfloat16" if name == "layer_table" and dtype in FP8 else dtype

    def facts(self) -> dict[str, str]:
        """Return the dtypes for the output of commands with --json."""
        return {"dtype": self.dtype, "kv_dtype": self.cache_dtype}


USUAL = Formats()
BY_DEFAULT = FormatOptions()


def with_cache(kv_dtype: str | None) -> Iterator[Formats]:
    """Yield Formats for weight dtypes that support kv_dtype. Raises InputError if none does."""
    found = []
    for dtype in DTYPES:
        with suppress(InputError):
            found.append(Formats(dtype, kv_dtype))
    if not found:
        check_choice("kv_dtype", kv_dtype, DTYPES)
    yield from found


def itemsize(dtype: str) -> int:
    """Return the bytes of a number in `dtype`."""
    return 1 if dtype in FP8 else int(np.dtype(FLOATS[dtype]).itemsize)


def refuse_removed(names: Iterable[str], callee: str = "") -> None:
    """Raise UnknownOption if one of these names is an option that was removed."""
    for name in names:
        if name in REMOVED:
            raise UnknownOption(f"{callee}{REMOVED[name]}")
