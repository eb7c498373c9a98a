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
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.weights.gguf import INT4, INT4_128, TYPES, GgufMatrix, with_zeros
from gpt2block.models.weights.gguf_packing import BlockRows

if TYPE_CHECKING:
    from typing_extensions import Self

KEY = "quantization_config"  # key of config.json
ADVICE = (
    "use a file of 4 bits of gptq, of awq in its layout gemm, or of compressed-tensors in its "
    "format pack-quantized, or convert the model to GGUF with llama.cpp"
)
# Method → names and axes of codes, scales, zero points and groups; k and n: K / 8 and N / 8
_TENSORS: Mapping[str, Mapping[str, str]] = {
    "gptq": {"qweight": "kN", "scales": "GN", "qzeros": "Gn", "g_idx": "K"},
    "awq": {"qweight": "Kn", "scales": "GN", "qzeros": "Gn"},
    "compressed-tensors": {"weight_packed": "Nk", "weight_scale": "NG", "weight_zero_point": "nG",
                           "weight_g_idx": "K"},
}  # fmt: skip
_UNREAD = ".weight_shape"
_OPTIONAL = "g_idx", "weight_g_idx", "weight_zero_point"
_GPTQ_FORMATS = "gptq", "gptq_v2"
# Method → setting → supported values. A setting that is absent has the first of these.
_SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "gptq": {"bits": (4,), "checkpoint_format": _GPTQ_FORMATS, "format": _GPTQ_FORMATS,
             "is_marlin_format": (False,), "pack_dtype": ("int32",)},
    "awq": {"bits": (4,), "version": ("gemm",), "format": ("gemm",)},
    "compressed-tensors": {"format": ("pack-quantized",), "kv_cache_scheme": (None,),
                           "transform_config": (None, {})},
    "group": {"format": (None, "pack-quantized"), "input_activations": (None,),
              "output_activations": (None,)},
    "weights": {"type": ("int",), "num_bits": (4,), "strategy": ("group", "channel"),
                "dynamic": (False,)},
}  # fmt: skip
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # position in an int32 of each of eight outputs
_BLOCK = TYPES[INT4].size  # inputs that share a scale in blocks
_WORDS = "float32"  # dtype as which a Stored reads int32


class Scheme(NamedTuple):
    """How a checkpoint stores matrices of 4 bits. added: number to add to its zero points."""

    method: str
    added: int

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
        method = method.lower()
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
        modules, others = dict[str, dict[str, Stored]](), []
        for tensor in tensors:
            module, _, name = tensor.label.rpartition(".")
            if name in _TENSORS[self.method]:
                if modules.setdefault(module, {}).setdefault(name, tensor) is not tensor:
                    raise CheckpointError(f"{tensor.label}: stored twice")
            elif not tensor.label.endswith(_UNREAD):
                others.append(tensor)
        return [*others, *(self._matrix(*each) for each in modules.items())]

    def _matrix(self, module: str, tensors: dict[str, Stored]) -> FourBit:
        """Return the matrix of a module. Raises CheckpointError unless its tensors match."""
        axes = _TENSORS[self.method]
        absent = [name for name in axes if name not in (*tensors, *_OPTIONAL)]
        if absent:
            raise CheckpointError(f"{module}: {' and '.join(absent)} missing")
        codes, scales = (tensors[name] for name in [*axes][:2])
        known = dict.fromkeys("KkNG", 0)
        for name in [*axes][:2]:
            known |= zip(axes[name], tensors[name].shape, strict=False)
        K, N, G = known["K"] or 8 * known["k"], known["N"], known["G"]
        if not G or K % (G * _BLOCK):
            raise CheckpointError(f"{module}: {K:,} inputs in {G:,} groups: expected groups of a "
                                  f"multiple of {_BLOCK} inputs: {ADVICE}")  # fmt: skip
        sizes = {"K": K, "k": K // 8, "N": N, "n": -(-N // 8), "G": G}
        for name, each in tensors.items():
            shape = tuple(sizes[axis] for axis in axes[name])
            dtypes = ("float16", "bfloat16") if each is scales else ("I32",)
            if each.shape != shape or each.dtype not in dtypes:
                raise CheckpointError(
                    f"{module}.{name}: expected {' or '.join(dtypes)} {shape}, "
                    f"got {each.dtype} {each.shape}"
                )
            tensors[name] = each if each is scales else replace(each, dtype=_WORDS)
        whole = f"{module}.weight", codes.file, codes.offset, (N, K), "float32"
        return FourBit(*whole, scheme=self, tensors=tensors, N=N, G=G)


@dataclass(frozen=True)
class FourBit(Stored):
    """A matrix (outputs, inputs) of 4 bits in several tensors, or consecutive outputs of it.

    scheme: how the matrix is stored. tensors: its tensors by name, those of int32 with the dtype
    `_WORDS`. N, G: outputs of the whole matrix, and groups. first: index of the first output.
    """

    scheme: Any = None
    tensors: Mapping[str, Stored] = field(default_factory=dict, hash=False)
    N: int = 0
    G: int = 1
    first: int = 0

    @property
    def block_type(self) -> str:
        return INT4 if self.shape[1] // self.G % TYPES[INT4_128].size else INT4_128

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
        return tuple(self.tensors.values())

    @cached_property
    def input_order(self) -> Any:
        """Inputs, int32 (K,), sorted by groups; None if the groups already follow each other."""
        *_, (name, axes) = _TENSORS[self.scheme.method].items()
        if axes != "K" or name not in self.tensors:
            return None
        groups, K = self._read(name), self.shape[1]
        order = np.argsort(groups, kind="stable").astype(np.int32)
        if not np.array_equal(groups[order], np.arange(K) // (K // self.G)):
            raise CheckpointError(f"{self.file}: {self.label}: {name}: expected {K // self.G} "
                                  f"inputs in each of {self.G} groups: {ADVICE}")  # fmt: skip
        return None if np.array_equal(order, np.arange(K)) else order

    def rows(self, begin: int, end: int) -> Self:
        return replace(self, shape=(end - begin, self.shape[1]), first=self.first + begin)

    def read_into(self, array: np.ndarray) -> None:
        packed = GgufMatrix.pack([(self.block_type, self.read_blocks())], self.shape[1])
        for n, piece in replace(packed, input_order=self.input_order).pieces():
            array[n : n + len(piece)] = piece

    def read_blocks(self) -> NDArray[np.uint8]:
        """Return the rows as blocks, uint8 (N, bytes per row). Raises CheckpointError."""
        return self._blocks(self._stored(), 0, self.shape[0])

    def block_rows(self) -> BlockRows:
        """Return the rows as blocks, which are computed when they are read."""
        stored, (N, K) = self._stored(), self.shape
        kind = TYPES[self.block_type]
        of_row = K // kind.size * kind.nbytes

        def read(begin: int, array: NDArray[np.uint8]) -> None:
            row, skipped = divmod(begin, of_row)
            rows = self._blocks(stored, row, -(-(begin + len(array)) // of_row))
            array[...] = rows.reshape(-1)[skipped : skipped + len(array)]

        return BlockRows(self.block_type, N, 0, read)

    def _blocks(self, stored: Sequence[Any], begin: int, end: int) -> NDArray[np.uint8]:
        codes, scale, zero = self._decoded(stored, begin, end)
        kind, halves = TYPES[self.block_type], codes.reshape(end - begin, -1, 2, 16)
        blocks = np.empty((end - begin, self.shape[1] // kind.size, kind.nbytes), np.uint8)
        blocks[..., :4] = np.repeat(with_zeros(scale, zero), blocks.shape[1] // self.G, axis=1)
        blocks[..., 4:] = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(*blocks.shape[:2], -1)
        return blocks.reshape(end - begin, -1)

    def _read(self, name: str) -> np.ndarray:
        """Read a tensor as the file has it, of 16-bit floats or int32."""
        tensor = self.tensors[name]
        return tensor.read().view(np.int32) if tensor.dtype == _WORDS else tensor.read()

    def _stored(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read codes as in the file, then scales (N, G) as floats and zero points (N, G)."""
        words, scale, zeros, *_ = _TENSORS[self.scheme.method].items()
        scales = self._read(scale[0]).astype(np.float32)
        if scale[1] == "GN":
            scales = scales.T
        if zeros[0] not in self.tensors:
            return self._read(words[0]), scales, np.full(scales.shape, 8, np.uint8)
        packed = self._read(zeros[0])
        zero = self._eights(packed if zeros[1] == "Gn" else packed.T).reshape(self.G, -1)
        return self._read(words[0]), scales, zero[:, : self.N].T + np.uint8(self.scheme.added)

    def _decoded(
        self, stored: Sequence[np.ndarray], begin: int, end: int
    ) -> tuple[NDArray[np.uint8], np.ndarray, np.ndarray]:
        """Return codes (n, G, inputs), scales (n, G) and zero points (n, G) of n outputs.

        Inputs are sorted by their groups. stored: the result of `_stored`.
        """
        words, scale, zero = stored
        begin, end = self.first + begin, self.first + end
        if self.scheme.method == "awq":
            eights = self._eights(words[:, begin // 8 : -(-end // 8)]).reshape(len(words), -1)
            codes = eights[:, begin % 8 :][:, : end - begin].T
        else:
            by_outputs = words.T if self.scheme.method == "gptq" else words
            codes = self._eights(by_outputs[begin:end]).reshape(end - begin, -1)
        if self.input_order is not None:
            codes = codes[:, self.input_order]
        return codes.reshape(end - begin, self.G, -1), scale[begin:end], zero[begin:end]

    def _eights(self, words: np.ndarray) -> NDArray[np.uint8]:
        """Return the eight codes (…, 8) of each int32, in the order of inputs or outputs."""
        pairs = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4, 1)
        found = np.concatenate([pairs & 15, pairs >> 4], axis=-1).reshape(*words.shape, 8)
        return found[..., _AWQ_ORDER] if self.scheme.method == "awq" else found


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
