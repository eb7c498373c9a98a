"""Read matrices of 4 bits in Hugging Face checkpoints of GPTQ, AWQ and compressed-tensors.

A weight is scale * (q - zero), where q is a code from 0 to 15. A group of inputs of an output, or
all its inputs, share a scale of 16 bits and an integer zero point. An int32 holds eight codes or
zero points, the first in its lowest bits. Tensors of a matrix (N, K) with G groups of inputs:

====================  ==================  =================  ==================  ==============
method                codes               scales             zero points         groups
====================  ==================  =================  ==================  ==============
gptq                  qweight (K / 8, N)  scales (G, N)      qzeros (G, N / 8)   g_idx (K,)
awq                   qweight (K, N / 8)  scales (G, N)      qzeros (G, N / 8)
compressed-tensors    weight_packed       weight_scale       weight_zero_point   weight_g_idx
                      (N, K / 8)          (N, G)             (N / 8, G)          (K,)
====================  ==================  =================  ==================  ==============

Each int32 of awq holds outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight. Files of the first version of
gptq store zero - 1. compressed-tensors omits zero points that are 8 (symmetric). The last column is
the group of each input, if the groups do not follow each other ("activation order").

Sources: `dequant_4bit_8_prep_zero(zeros[0] + zero_offset)` in vLLM's kernel gptq/q_gemm.cu;
`WQLinear_GEMM.from_linear` of AutoAWQ; `pack_to_int32` of the package compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt2block.errors import CheckpointError, shown
from gpt2block.files.checkpoints.files import first_names
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.weights.gguf import INT4, TYPES, with_zeros
from gpt2block.models.weights.gguf_packing import BlockRows

if TYPE_CHECKING:
    from typing_extensions import Self

KEY = "quantization_config"  # key of config.json
ADVICE = (
    "use a file of 4 bits of gptq, of awq in its layout gemm, or of compressed-tensors in its "
    "format pack-quantized, or convert the model to GGUF with llama.cpp"
)
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # position in an int32 of each of eight outputs
GPTQ_FORMATS = ("gptq", "gptq_v2")
_BLOCK = TYPES[INT4].size  # inputs that share a scale in blocks
_WORDS = "float32"  # dtype as which a Stored reads int32
_READ_AT_ONCE = 2**20  # number of weights that are decoded at a time
# Method → names of the tensors: codes, scales, zero points, groups, and a tensor that is not read
_TENSORS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx",
                           "weight_shape"),
}  # fmt: skip
# Method → setting → supported values. A setting that is absent has the first of these.
_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "gptq": {"bits": (4,), "checkpoint_format": GPTQ_FORMATS, "format": GPTQ_FORMATS,
             "is_marlin_format": (False,), "pack_dtype": ("int32",)},
    "awq": {"bits": (4,), "version": ("gemm",), "format": ("gemm",)},
    "compressed-tensors": {"format": ("pack-quantized",), "kv_cache_scheme": (None,),
                           "transform_config": (None, {})},
    "group": {"format": (None, "pack-quantized"), "input_activations": (None,),
                      "output_activations": (None,)},
    "weights": {"type": ("int",), "num_bits": (4,), "strategy": ("group", "channel"),
                "dynamic": (False,)},
}  # fmt: skip


class Scheme(NamedTuple):
    """How a checkpoint stores matrices of 4 bits. added: number to add to its zero points."""

    method: str
    added: int = 0

    @property
    def outputs_first(self) -> bool:
        """Whether outputs are the first axis of all tensors."""
        return self.method == "compressed-tensors"

    @classmethod
    def of(cls, config: dict[str, Any]) -> Scheme | None:
        """Remove `KEY` from a config.json and return its scheme; None if it states no method.

        Raises CheckpointError, with the setting, for a method or setting that is not supported.
        """
        settings = config.get(KEY)
        if not isinstance(settings, dict) or "quant_method" not in settings:
            return None
        method = settings["quant_method"]
        _check("quant_method", method, tuple(_TENSORS))
        _check_settings(method, settings)
        if method == "compressed-tensors":
            for group in _object("config_groups", settings.get("config_groups")).values():
                _check_settings("group", group)
                _check_settings("weights", group.get("weights"))
        del config[KEY]
        formats = settings.get("checkpoint_format"), settings.get("format")
        return cls(method, int(method == "gptq" and "gptq_v2" not in formats))

    def joined(self, tensors: Sequence[Stored]) -> list[Stored]:
        """Replace the tensors of each matrix of 4 bits by a `FourBit`. Raises CheckpointError."""
        names, modules, others = _TENSORS[self.method], dict[str, dict[str, Stored]](), []
        for tensor in tensors:
            module, _, name = tensor.label.rpartition(".")
            if name in names:
                modules.setdefault(module, {})[name] = tensor
            else:
                others.append(tensor)
        return [*others, *(self._matrix(*each) for each in modules.items())]

    def _matrix(self, module: str, tensors: Mapping[str, Stored]) -> FourBit:
        """Return the matrix of a module. Raises CheckpointError unless its tensors match."""
        codes, scales, zeros, *groups = _TENSORS[self.method]
        needed = (codes, scales) if self.outputs_first else (codes, scales, zeros)
        absent = [f"{module}.{name}" for name in needed if name not in tensors]
        if absent:
            raise CheckpointError(f"{len(absent)} tensors missing: {first_names(absent)}")
        rows, columns = (*tensors[codes].shape, 0, 0)[:2]
        K, N = (8 * rows, columns) if self.method == "gptq" else (rows, 8 * columns)
        if self.outputs_first:
            N, K = rows, 8 * columns
        G = (*tensors[scales].shape, 0, 0)[self.outputs_first]
        if not G or K % (G * _BLOCK):
            raise CheckpointError(f"{module}: {K:,} inputs in {G:,} groups: expected groups of a "
                                  f"multiple of {_BLOCK} inputs: {ADVICE}")  # fmt: skip
        shapes = {codes: (rows, columns), scales: (G, N), zeros: (G, -(-N // 8))}
        if self.outputs_first:
            shapes |= {scales: (N, G), zeros: (-(-N // 8), G)}
        found: list[Stored | None] = []
        for name, shape in {**shapes, **dict.fromkeys(groups[:1], (K,))}.items():
            dtypes = ("float16", "bfloat16") if name == scales else ("I32",)
            each = tensors.get(name)
            if each is not None and (each.shape != shape or each.dtype not in dtypes):
                raise CheckpointError(
                    f"{module}.{name}: expected {' or '.join(dtypes)} {shape}, "
                    f"got {each.dtype} {each.shape}"
                )
            dtype = None if each is None or name == scales else _WORDS
            found.append(each if each is None or dtype is None else replace(each, dtype=dtype))
        first = tensors[codes]
        whole = f"{module}.weight", first.file, first.offset, (N, K), "float32"
        return FourBit(*whole, scheme=self, tensors=tuple(found), N=N, G=G)


@dataclass(frozen=True)
class FourBit(Stored):
    """A matrix (outputs, inputs) of 4 bits in several tensors, or consecutive outputs of it.

    scheme: how the matrix is stored. tensors: its codes, scales, zero points and groups, in this
    order, those of int32 with the dtype `_WORDS`; None for absent tensors. N, G: outputs of the
    whole matrix, and groups. first: index of the first output.
    """

    scheme: Scheme = field(default_factory=lambda: Scheme(""))
    tensors: tuple[Stored | None, ...] = ()
    N: int = 0
    G: int = 1
    first: int = 0
    block_type = INT4

    @property
    def types(self) -> tuple[str, ...]:
        group = "channels" if self.G == 1 else f"groups of {self.shape[1] // self.G}"
        order = "" if self.input_order is None else " in activation order"
        return (f"{self.scheme.method} of 4 bits in {group}{order}",)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.sources) * self.shape[0] // self.N

    @property
    def sources(self) -> tuple[Stored, ...]:
        return tuple(each for each in self.tensors if each is not None)

    def rows(self, begin: int, end: int) -> Self:
        return replace(self, shape=(end - begin, self.shape[1]), first=self.first + begin)

    def read_into(self, array: np.ndarray) -> None:
        stored = self._stored()
        at_once = max(1, _READ_AT_ONCE // self.shape[1])
        for begin in range(0, len(array), at_once):
            codes, scale, zero = self._decoded(stored, begin, min(begin + at_once, len(array)))
            values = codes.astype(np.float32) - zero[..., None]
            values *= scale.astype(np.float32)[..., None]
            piece = array[begin : begin + len(values)]
            order = slice(None) if self.input_order is None else self.input_order
            piece[:, order] = values.reshape(piece.shape)

    def read_blocks(self) -> NDArray[np.uint8]:
        """Return the rows as blocks of INT4, (N, bytes per row). Raises CheckpointError."""
        return self._blocks(self._stored(), 0, self.shape[0])

    def block_rows(self) -> BlockRows:
        """Return the rows as blocks, which are computed when they are read."""
        stored = self._stored()
        kind, (N, K) = TYPES[INT4], self.shape
        of_row = K // kind.size * kind.nbytes

        def read(begin: int, array: NDArray[np.uint8]) -> None:
            row, skipped = divmod(begin, of_row)
            rows = self._blocks(stored, row, -(-(begin + len(array)) // of_row))
            array[...] = rows.reshape(-1)[skipped : skipped + len(array)]

        return BlockRows(INT4, N, 0, read)

    def _blocks(self, stored: Sequence[Any], begin: int, end: int) -> NDArray[np.uint8]:
        codes, scale, zero = self._decoded(stored, begin, end)
        halves = codes.reshape(end - begin, -1, 2, _BLOCK // 2)
        blocks = np.empty((*halves.shape[:2], TYPES[INT4].nbytes), np.uint8)
        scales = with_zeros(scale, zero)
        blocks[..., :4] = np.repeat(scales, halves.shape[1] // self.G, axis=1)
        blocks[..., 4:] = halves[:, :, 0] | halves[:, :, 1] << 4
        return blocks.reshape(end - begin, -1)

    def _stored(self) -> list[Any]:
        """Read the codes, scales and zero points as they are in the file."""
        return [None if each is None else _read(each) for each in self.tensors[:3]]

    def _decoded(
        self, stored: Sequence[Any], begin: int, end: int
    ) -> tuple[NDArray[np.uint8], np.ndarray, NDArray[np.uint8]]:
        """Return codes (n, G, inputs), scales (n, G) and zero points (n, G) of n outputs.

        Inputs are sorted by their groups. stored: the result of `_stored`.
        """
        words, scale, zeros = stored
        rows = slice(self.first + begin, self.first + end)
        eights = slice(rows.start // 8, -(-rows.stop // 8))
        inner = slice(rows.start % 8, rows.start % 8 + end - begin)
        order = AWQ_ORDER if self.scheme.method == "awq" else slice(None)
        if self.scheme.outputs_first:
            codes, scale = _eights(words[rows]), scale[rows]
            zeros = None if zeros is None else zeros[eights].T
        else:
            codes = words[:, eights] if self.scheme.method == "awq" else words[:, rows].T
            codes, scale, zeros = _eights(codes)[..., order], scale[:, rows].T, zeros[:, eights]
        codes = codes.reshape(len(codes), -1)
        codes = codes[:, inner].T if self.scheme.method == "awq" else codes
        if self.input_order is not None:
            codes = codes[:, self.input_order]
        if zeros is None:
            zero = np.full(scale.shape, 8, np.uint8)
        else:
            zero = _eights(zeros)[..., order].reshape(self.G, -1)[:, inner].T
            zero = zero + np.uint8(self.scheme.added)
        return codes.reshape(end - begin, self.G, -1), scale, zero

    @cached_property
    def input_order(self) -> NDArray[np.int32] | None:
        """Inputs sorted by their groups; None if the groups already follow each other."""
        found = self.tensors[3] if len(self.tensors) > 3 else None
        if found is None:
            return None
        groups, K = _read(found), self.shape[1]
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], np.arange(K) // (K // self.G)):
            raise CheckpointError(f"{self.file}: {found.label}: expected {K // self.G} inputs in "
                                  f"each of {self.G} groups: {ADVICE}")  # fmt: skip
        return None if np.array_equal(order, np.arange(K)) else order


def _read(tensor: Stored) -> np.ndarray:
    """Read a tensor of 16-bit floats, or of int32."""
    return tensor.read().view(np.int32) if tensor.dtype == _WORDS else tensor.read()


def _eights(words: np.ndarray) -> NDArray[np.uint8]:
    """Return the eight codes (…, 8) of each int32, the lowest bits first."""
    pairs = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4, 1)
    return np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(*words.shape, 8)


def _object(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{KEY}: {key}: expected an object, got {shown(value)}: {ADVICE}")
    return value


def _check_settings(kind: str, settings: object) -> None:
    for key, values in _SUPPORTED[kind].items():
        _check(key, _object(kind, settings).get(key, values[0]), values)


def _check(key: str, value: object, supported: tuple[object, ...]) -> None:
    if (value.lower() if isinstance(value, str) else value) not in supported:
        expected = " or ".join(map(str, supported))
        raise CheckpointError(f"{KEY}: {key}: expected {expected}, got {shown(value)}: {ADVICE}")
