"""Workload for compute-sanitizer: the ten-step block, every variant of every operation, a model.

Each result is compared with NumPy. The sizes are small and odd, so that tiles and rows are partly
filled. Only the model's decoding and the fused block use CUDA graphs, so that compute-sanitizer
reports other kernels by name.

--without-hopper selects the kernels of older GPUs on a Hopper GPU: initcheck does not track writes
of the copy engine (TMA), and reports every read of them.
"""

from __future__ import annotations

import sys
from itertools import pairwise, product
from typing import Any

import cupy
import numpy as np

from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    InputError,
    Llama,
    LlamaConfig,
    LlamaWeights,
    Sampling,
    TwoPartMatrix,
    WeightMatrix,
    ops,
    random_input,
    reference,
)
from gpt2block.array_checks import FLOATS
from gpt2block.bench import measure
from gpt2block.cuda import arrays as _arrays
from gpt2block.cuda.kernels import FP8
from gpt2block.ops._tensor_cores import HOPPER_CAPABILITY
from gpt2block.ops.attention import SIXTEEN_BITS
from gpt2block.ops.linear import MORE_ROWS
from gpt2block.ops.linear import bind as bind_linear
from gpt2block.ops.registry import OPERATIONS, Operation
from gpt2block.run.model import DTYPES, Ids, start_all

SIZES = {"B": 2, "T": 70, "C": 48, "NH": 3, "HS": 20, "V": 50, "M": 70, "K": 144, "N": 37}
HEADS = {"H": 3, "D": 34}


def block() -> None:
    """Causal or not, one sequence and several, GPT-2's width and another one."""
    for config in (GPT2Config(), GPT2Config(n_head=3, n_embd=48)):
        weights = BlockWeights.random(0, config)
        for causal, batch in ((False, 1), (True, 1), (True, 3)):
            x = random_input(1, (batch, 30, config.n_embd))
            block = Block(weights, causal, "cuda", kernels="skeleton", graph=False)
            got = block(x)
            truth = reference.block_forward(x.astype(np.float64), weights, causal)
            error = float(np.abs(got - truth).max())
            assert error < 1e-5, error
            print(f"checked C {config.n_embd} causal {causal} B {batch}: error {error:.1e}")


def fused_block() -> None:
    """The fused block in every dtype, as direct launches and as a graph of overlapping kernels."""
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=128))
    for dtype in ("float32", *SIXTEEN_BITS):
        for causal, shape in ((False, (1, 128)), (True, (70, 128)), (True, (3, 30, 128))):
            x = random_input(1, shape).astype(FLOATS[dtype])
            for graph in (False, True):
                block = Block(weights, causal, "cuda", dtype, "fused", graph)
                on_device, out = cupy.asarray(x), cupy.empty(shape, dtype)
                for _ in range(3 if graph else 1):
                    block(on_device, out=out)
                truth = reference.block_forward(x.astype(np.float64), block.weights, causal)
                off = float(np.abs(out.get().astype(np.float64) - truth).max())
                error = off / float(np.abs(truth).max())
                assert error <= 2 * measure.tolerance(dtype), error
                print(f"checked fused {dtype} causal {causal} {shape} graph {graph}: {error:.1e}")


def operation(found: Operation) -> None:
    """Every variant in every dtype, with weights in both layouts."""
    sizes = {name: (SIZES | HEADS)[name] for name in found.sizes}
    if found.matrices:
        sizes["N"] = 256  # a multiple of the head size
    options = {**found.attrs, **({"fill": 0.0} if "fill" in found.attrs else {})}
    for dtype in found.dtypes:
        for layout in ("KN", "NK") if found.matrices else ("KN",):
            host, truth = measure.inputs_and_truth(found, sizes, dtype, layout)
            finite = np.isfinite(truth)
            arrays = tuple(map(measure.uploaded, host))
            for variant in found.variants:
                chosen = options | measure.options_for(found, variant)
                try:
                    bound = found.bind(arrays, **chosen)
                except InputError as error:
                    print(f"not for {found.name} {variant.name} {dtype} {layout}: {error}")
                    continue
                got = bound.run().get().astype(np.float64)
                off = float(np.abs(got - truth)[finite].max() / np.abs(truth)[finite].max())
                assert off <= measure.tolerance(dtype), (found.name, variant.name, dtype, off)
                print(f"checked {found.name} {variant.name} {dtype} {layout}: error {off:.1e}")


def gemm() -> None:
    """Each epilogue of each variant at odd sizes, the residual in place."""
    rng = np.random.default_rng(0)
    sizes = ((70, 144), (72, 144), (72,), (70, 72))  # of a, w (N, K), bias, residual
    wide = [rng.standard_normal(shape, dtype=np.float32) for shape in sizes]
    for dtype in OPERATIONS["gemm"].dtypes:
        a, w = (cupy.asarray(array.astype(np.dtype(dtype))) for array in wide[:2])
        matrix = WeightMatrix(w, dtype, None, "NK")
        exact_a, exact_w = (array.get().astype(np.float64) for array in (a, w.T))
        for variant in OPERATIONS["gemm"].variants:
            for gelu, added, kind in product((False, True), (False, True), (dtype, "float32")):
                residual = cupy.asarray(wide[3].astype(np.dtype(kind))) if added else None
                old = None if residual is None else residual.get().astype(np.float64)
                bias = wide[2].astype(np.float64)
                truth = reference.gemm(exact_a, exact_w, bias, old, gelu=gelu)
                out = cupy.empty((70, 72), kind) if residual is None else residual
                inputs = (a, matrix, cupy.asarray(wide[2]), residual)
                try:
                    bound = OPERATIONS["gemm"].bind(inputs, out, gelu=gelu, variant=variant.name)
                except InputError as error:
                    print(f"not for gemm {variant.name} {dtype}: {error}")
                    break
                got = bound.run().get().astype(np.float64)
                off = float(np.abs(got - truth).max() / np.abs(truth).max())
                assert off <= measure.tolerance(kind), (variant.name, dtype, kind, off)
                epilogue = f"gelu {gelu} residual {added} to {kind}"
                print(f"checked gemm {variant.name} {dtype} {epilogue}: error {off:.1e}")


def two_part_matrices() -> None:
    """Two-part matrices: each epilogue of each variant of gemm; attention, also ragged batches."""
    rng = np.random.default_rng(0)
    sizes = ((70, 144), (72, 144), (72,), (70, 72))  # of a, w (N, K), bias, residual
    host = [rng.standard_normal(shape, dtype=np.float32) for shape in sizes]
    exact = [each.astype(np.float64) for each in host]
    a, w, bias, residual = map(cupy.asarray, host)
    matrix = TwoPartMatrix.from_float32(w)
    for variant in OPERATIONS["gemm"].variants:
        for gelu, (added, parts) in product((False, True), ((0, 0), (0, 1), (1, 0))):
            inputs = (a, matrix, bias, residual if added else None)
            options: dict[str, Any] = {"dtype": "two_part", "bound": 100.0} if parts else {}
            try:
                bound = OPERATIONS["gemm"].bind(inputs, gelu=gelu, variant=variant.name, **options)
            except InputError as error:
                print(f"not for two-part {variant.name}: {error}")
                break
            old = exact[3] if added else None
            truth = reference.gemm(exact[0], exact[1].T, exact[2], old, gelu=gelu)
            off = float(np.abs(bound.run().get() - truth).max() / np.abs(truth).max())
            assert off <= measure.tolerance("float32"), (variant.name, off)
            epilogue = f"gelu {gelu} residual {bool(added)} two-part output {bool(parts)}"
            print(f"checked two-part {variant.name} {epilogue}: error {off:.1e}")
    for causal, lengths in product((False, True), ([70], [70, 0, 1, 131])):
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        qkv = rng.standard_normal((starts[-1], 3 * 128)).astype(np.float32)
        rows = (qkv[first:last].astype(np.float64) for first, last in pairwise(starts))
        truth = np.concatenate([reference.attention(x, 2, causal) for x in rows if len(x)])
        matrix, ends = TwoPartMatrix.from_float32(cupy.asarray(qkv)), cupy.asarray(starts)
        got = ops.attention(matrix, 2, causal, cu_seqlens=ends, max_seqlen=max(lengths)).get()
        off = float(np.abs(got - truth).max() / np.abs(truth).max())
        assert off <= measure.tolerance("float32"), off
        print(f"checked two-part attention {causal} {lengths}: error {off:.1e}")


def attention() -> None:
    """The 16-bit variants: one sequence, and a ragged batch with an empty sequence."""
    rng = np.random.default_rng(0)
    found = OPERATIONS["attention"]
    for variant in (v for v in found.variants if "float16" in v.dtypes):
        for dtype in variant.dtypes:
            for causal, lengths in product((False, True), ([70], [70, 0, 1, 131])):
                starts = np.cumsum([0, *lengths], dtype=np.int32)
                host = rng.standard_normal((starts[-1], 3 * 128)).astype(FLOATS[dtype])
                wide = host.astype(np.float64)
                truth = np.concatenate(
                    [
                        reference.attention(wide[a:b], 2, causal)
                        for a, b in pairwise(starts)
                        if b > a
                    ]
                )
                options = {"cu_seqlens": cupy.asarray(starts), "max_seqlen": max(lengths)}
                try:
                    got = ops.attention(cupy.asarray(host), 2, causal, variant.name, **options)
                except InputError as problem:
                    print(f"not for attention {variant.name} {dtype}: {problem}")
                    continue
                off = float(np.abs(got.get().astype(np.float64) - truth).max())
                error = off / float(np.abs(truth).max())
                assert error <= measure.tolerance(dtype), error
                print(f"checked attention {variant.name} {dtype} {causal} {lengths}: {error:.1e}")


def model() -> None:
    """Prefill of a ragged batch, decoding as a graph, and likelihoods, in every dtype."""
    narrow, on_tensor_cores = (
        GPT2Weights.random(0, GPT2Config(2, heads, C, 140, 101)) for heads, C in ((3, 48), (1, 64))
    )
    rng = np.random.default_rng(0)
    ids = [rng.integers(101, size=n).astype(np.int32) for n in (131, 1, 140)]
    samplings = [
        Sampling(temperature=0),
        Sampling(top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.2),
        Sampling(temperature=1.5, seed=3),
    ]
    cases = [*((dtype, narrow) for dtype in DTYPES), ("float16", on_tensor_cores)]
    for dtype, weights in (*cases, ("bfloat16", on_tensor_cores)):
        ours, truth = (GPT2(weights, device, dtype) for device in ("cuda", "cpu"))
        error = 0.0
        for got, exact in zip(ours(ids), truth(ids), strict=True):
            error = max(error, float(np.abs(got - exact).max() / np.abs(exact).max()))
        assert error <= measure.tolerance("float32" if dtype == "float32" else "bfloat16"), error
        for rows in (slice(0, 3), slice(0, 1)):
            prompts = [row[:131] for row in ids[rows]]
            decoding = start_all(ours.engine, prompts, samplings[rows], 5)
            drawn = np.array([decoding.next().tokens for _ in range(5)])
            assert ((drawn >= 0) & (drawn < 101)).all()
        many_rows(ours, ids)
        if dtype == "bfloat16":  # two rows reach the end of the context and restart
            for one in ours.generate(ids, max_new_tokens=12, overflow="truncate"):
                assert len(one.tokens) == 12
        kv_cache = ours.new_cache(3)  # new rows, and rows that continue
        for chunk in ([ids[0][:70], ids[0][:0], ids[2][:9]], [ids[0][70:], ids[1], ids[2][9:]]):
            assert np.isfinite(np.concatenate(ours.engine.forward(chunk, "last", kv_cache))).all()
        likelihoods = np.concatenate(ours.engine.log_likelihood(ids))
        assert np.isfinite(likelihoods).all()
        print(f"checked GPT-2 {dtype}: error {error:.1e}")


def many_rows(ours: GPT2, ids: list[Ids]) -> None:
    """Greedy decoding of so many rows that x is handed over as terms, with both kinds of products.

    Rows with the same prompt draw the same tokens.
    """
    linear = sys.modules[bind_linear.__module__]
    few = linear.FEW_PRODUCTS
    for rows, most in ((MORE_ROWS + 3, few), (MORE_ROWS + 10, 0)):  # 0: tiles, however small
        linear.FEW_PRODUCTS = most  # type: ignore[attr-defined]
        prompts = [ids[row % 3][:9] for row in range(rows)]
        decoding = start_all(ours.engine, prompts, [Sampling(temperature=0)] * rows, 3)
        drawn = np.array([decoding.next().tokens for _ in range(3)])
        assert (drawn == drawn[:, np.arange(rows) % 3]).all()
    linear.FEW_PRODUCTS = few  # type: ignore[attr-defined]


def fp8_caches() -> None:
    """Prefill, also of rows that continue, and decoding with a kv_cache of FP8."""
    config = LlamaConfig(
        n_layer=2, n_head=4, n_kv_head=2, n_embd=128, n_ff=96, vocab_size=101, n_ctx=80
    )
    cases: list[tuple[Any, Any]] = [
        (GPT2, GPT2Weights.random(0, GPT2Config(2, 3, 48, 80, 101))),
        (GPT2, GPT2Weights.random(0, GPT2Config(2, 1, 64, 80, 101))),
        (Llama, LlamaWeights.random(0, config)),
    ]
    rng = np.random.default_rng(0)
    ids = [rng.integers(101, size=n).astype(np.int32) for n in (70, 1, 33)]
    for (kind, weights), kv_dtype in product(cases, FP8):
        ours = kind(weights, "cuda", "float16", kv_dtype=kv_dtype)
        whole = ours(ids)
        kv_cache = ours.new_cache(3)
        for chunk in ([ids[0][:40], ids[0][:0], ids[2][:9]], [ids[0][40:], ids[1], ids[2][9:]]):
            last = ours.engine.forward(chunk, "last", kv_cache)
        error = max(
            float(np.abs(a - b[-1]).max() / np.abs(b).max())
            for a, b in zip(last, whole, strict=True)
        )
        assert error <= 0.1, error  # keys near a tie are rounded to either side
        for rows in (3, 20):
            prompts = [ids[row % 3][:30] for row in range(rows)]
            decoding = start_all(ours.engine, prompts, [Sampling(temperature=0)] * rows, 5)
            drawn = np.array([decoding.next().tokens for _ in range(5)])
            assert (drawn == drawn[:, np.arange(rows) % 3]).all()
        assert np.isfinite(np.concatenate(ours.engine.log_likelihood(ids))).all()
        print(f"checked {kind.__name__} with a kv_cache of {kv_dtype}: error {error:.1e}")


def large_matrices() -> None:
    """Decoding by wgmma, which is otherwise for larger models: rows of one tile and of two."""
    limits = ("MEDIUM_MATRIX", "LARGE_MATRIX", "LARGE_PRODUCTS")
    linear = sys.modules[bind_linear.__module__]
    before = {name: getattr(linear, name) for name in limits}
    vars(linear).update(dict.fromkeys(limits, 1))
    gpt2 = GPT2Weights.random(0, GPT2Config(1, 2, 128, 20, 101))
    config = LlamaConfig(
        n_layer=1, n_head=4, n_kv_head=2, n_embd=256, n_ff=384, vocab_size=101, n_ctx=20
    )
    llama = LlamaWeights.random(0, config)
    for weights, dtype in product((gpt2, llama), ("bfloat16", "float8_e4m3fn")):
        kind: Any = GPT2 if weights is gpt2 else Llama
        ours = kind(weights, "cuda", dtype)
        for rows in (1, 7, 66):
            prompts = [np.array([row % 5, 3], np.int32) for row in range(rows)]
            decoding = start_all(ours.engine, prompts, [Sampling(temperature=0)] * rows, 3)
            drawn = np.array([decoding.next().tokens for _ in range(3)])
            assert (drawn == drawn[:, np.arange(rows) % 5]).all()
        print(f"checked decoding of large matrices {type(ours).__name__} {dtype}")
    vars(linear).update(before)


def main() -> None:
    if "--without-hopper" in sys.argv[1:]:
        own = _arrays.compute_capability()
        _arrays._capability = lambda _: min(own, HOPPER_CAPABILITY - 1)  # type: ignore[assignment]
    block()
    attention()
    fused_block()
    two_part_matrices()
    model()
    fp8_caches()
    large_matrices()
    gemm()
    for found in OPERATIONS.values():
        operation(found)
    print("all done")


if __name__ == "__main__":
    main()
