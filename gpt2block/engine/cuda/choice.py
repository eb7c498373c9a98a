"""Choose the kernels of decoding on a GPU by formats, architecture and GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from math import gcd
from typing import Any

from gpt2block.cuda.formats import FILE, GGUF, Formats, cache_option
from gpt2block.cuda.kernels import HI_LO
from gpt2block.engine.passes.decoding_rules import ALL_FUSED, DecodingPlan, decoding_steps
from gpt2block.engine.passes.executor import Outline, Step
from gpt2block.engine.passes.forward import Pass, forward
from gpt2block.engine.passes.rewriting import Log
from gpt2block.engine.passes.settings import PassSettings
from gpt2block.models.architectures.architecture import Architecture
from gpt2block.models.config import (
    DRAFTING,
    ModelConfig,
    multiplies_all,
    product_shapes,
    shapes_in_blocks,
)
from gpt2block.models.weights.gguf import TYPES, UNIT, GgufMatrix
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.attention_cached import fuses_norms
from gpt2block.ops.call import Refusal
from gpt2block.ops.gated_sums import Fusions, fusions, splits_of, types_of
from gpt2block.ops.linear import MORE_ROWS, can_round, normalizes, operands_of, wgmma_takes
from gpt2block.ops.operands import CHUNK, ROUNDED, Operand
from gpt2block.ops.products import same_types

MANY_ROWS = 512  # rows of which all products that can read operands do


class DecodingChoice:
    """Choose the kernels of a decoding step by its number of rows (tokens).

    matrices: in device memory, by name. bounds: upper bounds of the magnitudes of operands by name,
    with which products of float32 models read hi/lo weights; {} for other models.

    ====================================  =================================================
    rows of a step                        kernels of a layer, and us of a step (NVIDIA H200)
    ====================================  =================================================
    up to 4, clusters, Llama's block      `RULES_OF_SUMS`: four kernels, the feed-forward is one.
    without biases (`splits_of`)          SmolLM2-135M, 1 and 4 rows: 430 -> 297, 497 -> 393
    up to 16                              products that read floats, and fuse LayerNorm or, in
                                          Llama's block without biases, RMSNorm, RoPE and the
                                          gate (16 bits and FP8: `fusions`). SmolLM2-135M,
                                          8 and 16 rows: 497 -> 408, 638 -> 547. If heads have
                                          norms, these are fused too, in the product up to 4
                                          rows with clusters, also with large matrices
                                          (`operands_of`), else in attention. Qwen3-0.6B, 2 and
                                          4 rows: 743 -> 601, 798 -> 652
    more than 16, or fewer with large     norms are kernels of their own, write operands,
    matrices (`operands_of`)              which wgmma, mma tiles or mma multiply; wgmma, and mma
                                          with GGUF blocks, also fuse RoPE and the gate, and
                                          without clusters mma tiles the gate.
                                          SmolLM2-135M, 64 rows: 1,117 -> 911;
                                          Qwen3-0.6B, 32 rows: 1,546 -> 1,366
    ====================================  =================================================

    Products with the same weights have the same order of additions in all engines, so a row has
    the same bits with any number of rows.

    If a sequence of a step has an adapter (LoRA), a product that adapters change fuses no norm of
    its rows, RoPE or gate: the adapter's term is added before these. `RULES_OF_SUMS` are used if
    adapters change only products of attention and lm_head.
    """

    def __init__(
        self,
        config: ModelConfig,
        formats: Formats,
        matrices: Mapping[str, WeightMatrix],
        bounds: Mapping[str, float],
        architecture: Architecture,
        settings: PassSettings,
        divided: bool = False,
    ) -> None:
        self.divided = divided
        matrices = {n: w for n, w in matrices.items() if not n.startswith(DRAFTING)}
        self.config, self.formats, self.matrices, self.bounds = config, formats, matrices, bounds
        widths = (config.qkv_widths(layer)[0] for layer in range(config.n_layer))
        head_size = gcd(*widths) // config.n_head  # a divisor of the head sizes of all layers
        self.architecture, self.settings = architecture, settings._replace(head_size=head_size)

    @cached_property
    def x_dtype(self) -> str | None:
        """The dtype to which matrix products round their input x; None: they do not round x."""
        inputs = {K for K, _ in product_shapes(self.config).values()}
        return ROUNDED if can_round(self.formats.dtype, inputs) else None

    def operands(self, rows: int) -> dict[str, tuple[Operand, ...]]:
        """Return {name of a matrix: each `Operand` (format) in which its product can read x}.

        The result is empty for few rows if LayerNorm is fused with the products. If norms of heads
        are fused, only lm_head has operands.
        """
        fused = rows <= MORE_ROWS and self.config.NORM == "LayerNorm"
        if fused or self.config.head_size % 2:
            return {}
        matrices = self._matrix_shapes
        head = self.config.n_embd, self.config.vocab_size
        shapes = matrices | {"lm_head": head}
        if self.formats.dtype == FILE:
            shapes = {name: shape for name, shape in shapes.items() if self._in_order(name)}
            if len(shapes) < len(matrices):
                return {}
        dtype = HI_LO if self.bounds else self.formats.dtype
        fuses = self._fusions(rows)
        plain = fuses.norms and "gamma_q" not in self.config.block_shapes()
        found = operands_of(dtype, rows, shapes, self.x_dtype is not None, plain)
        stored = self.matrices["lm_head"].dtype
        if found and self.formats.dtype == FILE and stored != GGUF:  # lm_head has no blocks
            others = operands_of(stored, rows, {"w": head, "lm_head": head}, True)
            found |= {name: each for name, each in others.items() if name == "lm_head"}
        if fuses.heads:  # not measured for other models
            return {name: each for name, each in found.items() if name == "lm_head"}
        return found

    def steps(
        self,
        names: Collection[str],
        rows: int,
        operands: Mapping[str, Any] | None,
        together: int = 1,
        slots: int = 0,
        log: Log | None = None,
    ) -> list[Step]:
        """Return the steps of a decoding step of `rows` rows (tokens), up to logits.

        names: of the tensors. operands: the result of `operands`. None makes results readable, for
        traces: activations stay floats, and RMSNorm, RoPE and the gate have steps of their own.
        together: neighbouring rows of one sequence. slots: number of rows that continue after the
        layers, one of each sequence; 0 if all rows continue. log: as in `rewritten`.
        """
        do, plan = Outline(names), self.plan(names, rows, operands, together)
        o = Pass(do, self.settings)
        x = forward(o, self.architecture, self.config, "stream" if slots else "logits")
        found = decoding_steps(do.steps, plan, log)
        if slots:
            end = len(do.steps)
            o.logits(self.architecture.final(o, x, head=True))
            last = self.plan(names, slots, self.operands(slots), 1)
            found += decoding_steps(do.steps[end:], last, log)
        return found

    def plan(
        self, names: Collection[str], rows: int, operands: Mapping[str, Any] | None, together: int
    ) -> DecodingPlan:
        """Return the facts that decide the kernels of a decoding step. Arguments: see `steps`."""
        shapes, head_size = self.config.block_shapes(), self.config.head_size
        plan = DecodingPlan(
            names, self.settings.head_size, kv=cache_option(self.formats.fp8_cache),
            x_dtype=self.x_dtype, together=together,
        )  # fmt: skip
        adapted = {name for name in names if name.endswith(".lora_a")}
        many = self.operands(MANY_ROWS) if adapted else {}
        terms = {name: each[0] for name, each in many.items() if each[0].dtype != HI_LO}
        of_ffn = any(name.endswith(("w_gate_up.lora_a", "w_down.lora_a")) for name in adapted)
        if operands == {} and not self.divided and not of_ffn:
            types = self._types_of_ffn if self.formats.dtype == FILE else ()
            splits = splits_of(self.formats.dtype, rows, shapes, types, head_size)
            if splits:
                return plan._replace(fuses=ALL_FUSED, splits=splits, terms=terms)
        norms, fuses = rows <= MORE_ROWS, Fusions() if operands is None else self._fusions(rows)
        if operands is not None and self._in_blocks:
            norms = normalizes(rows, self.config.n_embd) and not operands
            fuses = Fusions(norms=True, rope=True, gate=True)
        if operands is not None and together == 1 and not self.divided and not self.settings.values:
            of_head = shapes.get("gamma_q", (head_size,)) == (head_size,)
            attention = self.settings.qk_norm and of_head and fuses_norms(head_size)
            fuses = fuses._replace(attention=attention)
        summed = {name for name in operands or () if self._reads_sums(name)}
        if not all(w.begins_at(CHUNK) for w in self._of_blocks("w_gate")):
            summed.discard("w_down")  # different warps compute the types of a chunk
        plan = plan._replace(norms=norms, known=operands or {}, bounds=self.bounds, terms=terms)
        return plan._replace(fuses=fuses, summed=summed)

    @cached_property
    def _matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """{name of a block's matrix: (K, N)}, the largest of all layers, without experts.

        K is the common divisor of the layers' K if it is no multiple of UNIT, as all others are.
        """
        shapes, found = shapes_in_blocks(self.config), dict[str, tuple[int, int]]()
        for name, shape in self.config.block_shapes().items():
            if len(shape) == 2 and multiplies_all(name):
                common = gcd(*(s[0] for n, s in shapes.items() if n.rpartition(".")[2] == name))
                found[name] = common if common % UNIT else shape[0], shape[1]
        return found

    def _fusions(self, rows: int) -> Fusions:
        """Return the operations that products by decode_mma fuse in steps of `rows` rows."""
        shapes, head_size = self.config.block_shapes(), self.config.head_size
        return fusions(self.formats.dtype, rows, shapes, head_size)

    @cached_property
    def _in_blocks(self) -> bool:
        """Whether products with GGUF matrices can fuse the gate and the RoPE of whole heads."""

        def fuses(h: str) -> bool:
            names = "w_gate", "w_up", "w_qkv"
            gate, up, qkv = (self.matrices.get(f"{h}{name}") for name in names)
            if not (isinstance(gate, GgufMatrix) and isinstance(up, GgufMatrix)):
                return False
            blocks = isinstance(qkv, GgufMatrix) and qkv.begins_at(self.config.head_size)
            return not same_types((gate, up)) and (qkv is None or blocks)

        return all(fuses(f"h.{n}.") for n in range(self.config.n_layer))

    @cached_property
    def _types_of_ffn(self) -> set[tuple[str, str]]:
        """Set of pairs (GGUF type of w_gate, GGUF type of w_down) over all layers.

        Empty if `_in_blocks` is false, if layers have short convolutions or gates of attention, if
        w_down or w_o is not a GGUF matrix, if w_gate or w_down has blocks of several types, or if a
        matrix has an `input_order`.
        """
        types: set[tuple[str, str]] = set()
        others = any(self.config.conv_layers) or "w_g" in self.config.block_shapes()
        others |= any(w.input_order is not None for w in self.matrices.values())
        for n in range(self.config.n_layer) if self._in_blocks and not others else ():
            names = (f"h.{n}.{name}" for name in ("w_gate", "w_up", "w_down", "w_o"))
            *matrices, o = (self.matrices[name] for name in names)
            pair = types_of(*matrices)
            if isinstance(pair, Refusal) or not isinstance(o, GgufMatrix):
                return set()
            types.add(pair)
        return types

    def _in_order(self, name: str) -> bool:
        """Whether products that read operands support a matrix's GGUF blocks in all layers."""
        head = self.config.head_size if name == "w_qkv" and self.settings.rope else 0
        gates = name not in ("w_gate", "w_up") or self._in_blocks
        found = self._of(name)
        return gates and all(isinstance(w, GgufMatrix) and wgmma_takes(w, head) for w in found)

    def _reads_sums(self, name: str) -> bool:
        """Whether products with the matrix `name` read sums of x: its GGUF blocks have minimums."""
        return any(TYPES[kind].minimum for w in self._of_blocks(name) for kind, _ in w.ranges)

    def _of_blocks(self, name: str) -> list[GgufMatrix]:
        """Return the matrices `name` of all layers that have GGUF blocks."""
        return [w for w in self._of(name) if isinstance(w, GgufMatrix)]

    def _of(self, name: str) -> list[WeightMatrix]:
        """Return the matrices `name` of all layers."""
        return [w for n, w in self.matrices.items() if n == name or n.endswith(f".{name}")]
