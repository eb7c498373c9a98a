"""Weights in the memory of a GPU: matrices in their formats, and the weights of prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from gpt2block.cuda import cupy, is_array
from gpt2block.cuda.arrays import AnyArray, ArrayArg, CudaArray
from gpt2block.cuda.cards import gpu
from gpt2block.cuda.formats import DTYPES, FILE, Formats, itemsize
from gpt2block.cuda.kernels import IN_BYTES
from gpt2block.engine.cuda.caches import free_bytes
from gpt2block.engine.cuda.products import divided_weights, hi_lo_bytes
from gpt2block.engine.model import StoredModel, weight_bytes
from gpt2block.engine.passes.executor import hi_lo_of
from gpt2block.engine.passes.prefill_rules import Products
from gpt2block.engine.passes.shards import ModelShard
from gpt2block.errors import InputError
from gpt2block.files.checkpoints.gguf_types import InBlocks
from gpt2block.files.checkpoints.stored import Stored
from gpt2block.models.config import ModelConfig, multiplies_all
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.models.weights.hi_lo import HiLoMatrix
from gpt2block.models.weights.matrix import WeightMatrix, request
from gpt2block.ops.call import storage
from gpt2block.ops.gemm import allocate_stream_k_workspace, widens
from gpt2block.ops.products import MULTIPLE
from gpt2block.ops.stored import stored


def check_room(config: ModelConfig, formats: Formats, shard: ModelShard | None = None) -> None:
    """Raise MemoryError, before a tensor is read, if the weights do not fit on the device.

    The weights include the hi/lo copies that products on tensor cores read. Free memory affects
    neither the kind of products nor results. shard: the part of the weights on this device.
    """
    shapes = None if shard is None else shard.shapes()
    needed, free = weight_bytes(config, formats, shapes), free_bytes()
    more = hi_lo_bytes(config, formats) // (1 if shard is None else shard.count)
    if needed + more > free:
        copies = f" and {more:,} as pairs of float16 matrices" if more else ""
        raise MemoryError(
            f"Out of memory: the weights take {needed:,} bytes in {formats.dtype}{copies}, the GPU "
            f"has {free:,} bytes free: expected a narrower dtype{_narrower(formats)}, or a GPU "
            "with more memory"
        )


def _narrower(formats: Formats) -> str:
    """Return text that lists the dtypes narrower than the weights', or "" if there is none."""
    own = 0 if formats.dtype == FILE else itemsize(formats.dtype)
    names = [name for name in DTYPES if itemsize(name) < own]
    return f" ({', '.join(names)})" if names else ""


class CudaWeights(StoredModel):
    """Base class of models on a GPU: stores their weights in device memory."""

    _shard: ModelShard | None = None

    def _vector(self, name: str, array: np.ndarray) -> CudaArray:
        spans = () if self._shard is None else self._shard.spans(name)
        if spans:
            array = np.concatenate([array[begin:end] for begin, end in spans])
        return cupy.asarray(array.astype(np.float32, copy=False), order="C")

    def _matrix(self, name: str, array: Any, layout: str) -> WeightMatrix:
        """Return a matrix of a checkpoint, or this GPU's shard, as `_whole_matrix` does.

        Only the shard is uploaded; of a `Stored` or `InBlocks`, only the shard is read. `largest`
        is the largest magnitude of the whole matrix.
        """
        shard = self._shard
        spans = () if shard is None else shard.spans(name)
        if shard is None or not spans:
            return self._whole_matrix(name, _read(array), layout)
        try:
            own = self._whole_matrix(name, *_outputs(array, layout, spans))
        except InputError:
            # A message about the whole matrix has the positions of weights in the file.
            self._whole_matrix(name, _read(array), layout)
            raise
        N = array.N if isinstance(array, GgufMatrix) else array.shape[layout.index("N")]
        largest = float(np.max(shard.exchange(own.largest)))
        return own.trusted(**{**vars(own), "share_of": N, "largest": largest})

    def _take_shard_of_head(self, shard: ModelShard) -> None:
        """Replace a tied lm_head by a view of this GPU's rows; the embedding needs all rows."""
        head, spans = self._matrices["lm_head"], shard.spans("lm_head")
        if spans and head is self._matrices["wte"]:
            self._matrices["lm_head"] = head.columns(*spans[0])

    def _whole_matrix(self, name: str, array: object, layout: str) -> WeightMatrix:
        """Return a matrix of a checkpoint in device memory, in the model's dtype, layout "NK".

        GGUF blocks stay quantized if the GPU has tensor cores; else they are dequantized. The
        first matrix starts the compilation of the kernels that convert matrices. Raises InputError,
        with the tensor's name, for weights that the dtype cannot hold.
        """
        reads_blocks = gpu().has_mma
        if isinstance(array, InBlocks):
            array = array.on_device() if reads_blocks else array.on_host()
            # Else CuPy's pool would keep the memory of the file's bytes for small arrays.
            cupy.get_default_memory_pool().free_all_blocks()
        if isinstance(array, GgufMatrix):
            if not reads_blocks:
                array, layout = array.dequantized().T, "NK"
            elif array.input_order is not None:
                self._orders[f"{name}.order"] = cupy.asarray(array.input_order)
        if isinstance(array, WeightMatrix):  # blocks, or a matrix of a model on another GPU
            return array.mapped(cupy.asarray)
        rows = cupy.asarray(array)
        if not self._matrices:
            request(storage(rows), self.formats.dtype_of(name))
        if layout == "KN":
            rows = stored(rows, storage(rows), transposed=True)
        return WeightMatrix.quantize(
            rows, self.formats.dtype_of(name), "NK", name, self.formats.allow_nonfinite
        )


def _read(array: AnyArray | Stored | InBlocks) -> Any:
    return array.read() if isinstance(array, Stored) else array


def _outputs(array: object, layout: str, spans: Sequence[tuple[int, int]]) -> tuple[Any, str]:
    """Return outputs of a matrix of a checkpoint, in ranges (begin, end), and their layout.

    An array in device memory may be on another GPU. The outputs (rows) of the array are copied to
    the current GPU.
    """
    if isinstance(array, (Stored, InBlocks)):
        return _read(array.of_spans(spans)), layout
    if isinstance(array, GgufMatrix):
        return joined([array.columns(*span) for span in spans]), layout
    if isinstance(array, np.ndarray):
        columns = [slice(*span) for span in spans]
        parts = [array[each] if layout == "NK" else array[:, each] for each in columns]
        return np.concatenate(parts, axis=layout.index("N")), layout
    on_device = array if is_array(array) else cupy.asarray(array)
    with on_device.device:
        bits = on_device.view(f"u{on_device.itemsize}")  # not every CuPy can copy bfloat16
        rows = bits if layout == "NK" else bits.T
        copies = [cupy.ascontiguousarray(rows[begin:end]) for begin, end in spans]
        cupy.cuda.Device().synchronize()
    whole, at = cupy.empty((sum(map(len, copies)), rows.shape[1]), bits.dtype), 0
    for part in copies:
        whole[at : at + len(part)] = cupy.asarray(part)
        at += len(part)
    return whole.view(on_device.dtype), "NK"


def joined(shards: Sequence[GgufMatrix]) -> GgufMatrix:
    """Return shards of one matrix in host memory as one matrix, in memory of its own."""
    pairs = groupby(chain(*(each.ranges for each in shards)), itemgetter(0))
    ranges = tuple((name, sum(n for _, n in group)) for name, group in pairs)
    data = np.concatenate([each.data for each in shards])
    return shards[0].trusted(**{**vars(shards[0]), "data": data, "ranges": ranges})


class PromptWeights:
    """Weights that prefill reads, but decoding does not, and memory for converted weights.

    With products on tensor cores, or on several GPUs, lm_head for the logits of all tokens has rows
    padded to a multiple that tensor cores support. by: divisors of activations, as
    `cuda_products.divisors` returns them. on_several: whether the model is on several GPUs.
    """

    def __init__(
        self,
        config: ModelConfig,
        products: Products,
        matrices: dict[str, WeightMatrix],
        vectors: Mapping[str, CudaArray],
        by: Mapping[str, float],
        on_several: bool = False,
    ) -> None:
        self.products, self._matrices = products, matrices
        self._wide: CudaArray | None = None
        self._stream_k_workspace: CudaArray | None = None
        self._head: WeightMatrix = matrices["lm_head"]
        self._bias: CudaArray | None = None
        if products != "float32" or on_several:
            self._pad_head()
        self.hi_lo: dict[str, HiLoMatrix] = {}  # decoding reads these matrices, too
        if products == "hi_lo":
            self.hi_lo = {
                hi_lo_of(name): HiLoMatrix.from_float32(matrix.data)
                for name, matrix in matrices.items()
                if multiplies_all(name) or name == "lm_head"
            }
        self._divided = divided_weights(config, by, matrices, vectors)

    def _pad_head(self) -> None:
        """Pad lm_head, and replace matrices that share its memory by views without the padding.

        The bias of the padding is -inf, and so are its logits.
        """
        head = self._head
        added = -head.N % MULTIPLE
        if not added:
            return
        bias = np.where(np.arange(head.N + added) < head.N, 0, -np.inf)
        self._bias = cupy.asarray(bias, "float32")
        self._head, view = head.padded(added)
        same = [name for name, matrix in self._matrices.items() if matrix is head]
        self._matrices.update(dict.fromkeys(same, view))

    def of(self, head: bool) -> dict[str, ArrayArg]:
        """Return {name that prefill's steps use: array}, with memory for converted weights.

        head: whether to include the padded lm_head as "head" and its bias as "head_bias".
        """
        weights = dict(self._divided)
        if head:
            weights |= self._head_of_all()
        if self.products != "fp8":
            return weights
        used = [m for name, m in self._matrices.items() if multiplies_all(name)]
        used += [weights["head"]] if head else []
        converted = (m for m in used if m.dtype in IN_BYTES and not widens(m))
        size = max((m.N * m.K for m in converted), default=0)
        if size and (self._wide is None or self._wide.size < size):
            self._wide = cupy.empty(size, "float16")
        if size:
            weights["wide"] = self._wide
        if any(widens(m) for m in used):
            if self._stream_k_workspace is None:
                self._stream_k_workspace = allocate_stream_k_workspace()
            weights["stream_k_workspace"] = self._stream_k_workspace
        return weights

    def _head_of_all(self) -> dict[str, ArrayArg]:
        """Return lm_head for the logits of all tokens; convert a hi/lo lm_head on first use."""
        head: Any = self._head
        if self.products == "hi_lo":
            name = hi_lo_of("lm_head" if self._bias is None else "head")
            if name not in self.hi_lo:
                self.hi_lo[name] = HiLoMatrix.from_float32(head.data)
            head = self.hi_lo[name]
        return {"head": head, "head_bias": self._bias}
