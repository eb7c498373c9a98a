"""Workload for compute-sanitizer: the ten-step block, every variant of every operation, a model.

Each result is compared with NumPy. The sizes are small and odd, so that tiles and rows are partly
filled. Only the model's decoding and the fused block use CUDA graphs, so that compute-sanitizer
reports other kernels by name.

Names of parts, such as gemm and operation:softmax, restrict the run to these parts.
--without-hopper selects the kernels of older GPUs on a Hopper GPU: initcheck does not track writes
of TMA, and reports every read of the written memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise, product
from typing import Any
from unittest.mock import patch

import cupy
import numpy as np

from gpt2block import (
    GPT2,
    Block,
    BlockWeights,
    GPT2Config,
    GPT2Weights,
    HiLoMatrix,
    InputError,
    Llama,
    LlamaConfig,
    LlamaWeights,
    Model,
    Sampling,
    WeightMatrix,
    ops,
    random_input,
    reference,
)
from gpt2block.checks import FLOATS
from gpt2block.cuda import cards
from gpt2block.cuda.formats import DTYPES, GGUF
from gpt2block.cuda.kernels import FP8
from gpt2block.engine.model import Ids, start_all
from gpt2block.engine.speculation import SpeculationPolicy
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures import ARCHITECTURES
from gpt2block.models.weights.gguf import TYPES, GgufMatrix, random_blocks
from gpt2block.models.weights.gguf_packing import BlockRows, packed_on_device
from gpt2block.ops import registry, workload
from gpt2block.ops.all_gather import (
    ALL_GATHER,
    ALL_GATHER_NORM,
    LOAD,
    STORE,
    PeerBuffers,
    PeerStores,
    normalizes,
    part_of,
)
from gpt2block.ops.attention_cached import KV_COPY
from gpt2block.ops.engines import linear_mma as _linear_mma
from gpt2block.ops.engines import linear_wgmma as _linear_wgmma
from gpt2block.ops.gemm import allocate_stream_k_workspace
from gpt2block.ops.linear import LINEAR_ROPE, MORE_ROWS
from gpt2block.ops.operands import Operand
from gpt2block.ops.registry import OPERATIONS, STEPS, Operation

SIZES = {"B": 2, "T": 70, "C": 48, "NH": 3, "HS": 20, "V": 50, "M": 70, "K": 144, "N": 37}
SIZES |= {"H": 3, "D": 34}
HI_LO = "hi_lo"


def checked(
    label: str, truth: Any, limit: float, function: Callable[..., Any], *args: Any, **options: Any
) -> None:
    """Compare a function's result with the exact result, if a kernel supports the call."""
    try:
        result = function(*args, **options)
    except InputError as refusal:
        print(f"not for {label}: {refusal}")
        return
    got = (result if isinstance(result, np.ndarray) else result.get()).astype(np.float64)
    finite = np.isfinite(truth)
    error = float(np.abs(got - truth)[finite].max() / np.abs(truth)[finite].max())
    assert error <= limit, (label, error)
    print(f"checked {label}: error {error:.1e}")


def bound_and_run(found: Operation, inputs: Any, out: Any = None, **options: Any) -> Any:
    return found.bind(inputs, out, **options).run()


def block() -> None:
    """Run blocks: causal and not, one sequence and several, GPT-2's width and another width."""
    for config in (GPT2Config(), GPT2Config(n_head=3, n_embd=48)):
        weights = BlockWeights.random(0, config)
        for causal, batch in ((False, 1), (True, 1), (True, 3)):
            x = random_input(1, (batch, 30, config.n_embd))
            block = Block(weights, causal, "cuda", kernels="skeleton", graph=False)
            truth = reference.block_forward(x.astype(np.float64), weights, causal)
            limit = 1e-5 / float(np.abs(truth).max())
            checked(f"C {config.n_embd} causal {causal} B {batch}", truth, limit, block, x)


def fused_block() -> None:
    """Run the fused block in every dtype: direct launches, and a graph of overlapping kernels."""
    weights = BlockWeights.random(0, GPT2Config(n_head=2, n_embd=128))
    shapes = (False, (1, 128)), (True, (70, 128)), (True, (3, 30, 128))
    for dtype, (causal, shape), graph in product(FLOATS, shapes, (False, True)):
        x = random_input(1, shape).astype(FLOATS[dtype])
        block = Block(weights, causal, "cuda", dtype, "fused", graph)
        on_device, out = cupy.asarray(x), cupy.empty(shape, dtype)
        for _ in range(3 if graph else 1):
            block(on_device, out=out)
        truth = reference.block_forward(x.astype(np.float64), block.weights, causal)
        label = f"fused {dtype} causal {causal} {shape} graph {graph}"
        checked(label, truth, 2 * workload.tolerance(dtype), out.get)


def operation(of: Operation) -> None:
    """Run every variant in every dtype, with weights in both layouts."""
    sizes = {name: SIZES[name] for name in of.workload.sizes}
    if of.workload.matrices:
        sizes["N"] = 256  # a multiple of the head size
    options = {**of.workload.attrs, **({"fill": 0.0} if "fill" in of.workload.attrs else {})}
    for dtype, layout in product(
        of.workload.dtypes, ("KN", "NK") if of.workload.matrices else ("KN",)
    ):
        host, truth = workload.inputs_and_truth(of, sizes, dtype, layout)
        arrays = tuple(map(workload.uploaded, host))
        for variant in of.variants:
            chosen = options | workload.options_for(of, variant)
            label = f"{of.name} {variant.name} {dtype} {layout}"
            checked(label, truth, workload.tolerance(dtype), bound_and_run, of, arrays, **chosen)


def gemm() -> None:
    """Run each epilogue of each variant at odd sizes; the residual in place, except hi/lo."""
    gemm_of, rng = OPERATIONS["gemm"], np.random.default_rng(0)
    sizes = ((70, 144), (72, 144), (72,), (70, 72))  # shapes of a, w (N, K), bias, residual
    host = [rng.standard_normal(shape, dtype=np.float32) for shape in sizes]
    wide_bias, bias = host[2].astype(np.float64), cupy.asarray(host[2])
    for dtype in (*gemm_of.workload.dtypes, HI_LO):
        own = dtype == HI_LO
        a, w = (cupy.asarray(array.astype("float32" if own else dtype)) for array in host[:2])
        matrix = HiLoMatrix.from_float32(w) if own else WeightMatrix(w, dtype, None, "NK")
        exact_a, exact_w = (array.get().astype(np.float64) for array in (a, w.T))
        for variant, gelu, added, kind in product(
            gemm_of.variants, (False, True), (False, True), (dtype, "float32")
        ):
            residual = old = None
            if added:
                residual = cupy.asarray(host[3].astype("float32" if own else kind))
                old = residual.get().astype(np.float64)
            truth = reference.gemm(exact_a, exact_w, wide_bias, old, gelu=gelu)
            out = None if own else cupy.empty((70, 72), kind) if residual is None else residual
            options = {"dtype": HI_LO, "bound": 100.0} if kind == HI_LO else {}
            checked(
                f"gemm {variant.name} {dtype} gelu {gelu} residual {added} to {kind}",
                truth, workload.tolerance("float32" if own else kind), bound_and_run, gemm_of,
                (a, matrix, bias, residual), out, gelu=gelu,
                variant=variant.name, **options,
            )  # fmt: skip


def fp8_gemm() -> None:
    """Multiply FP8 weights with and without scales, to 16 bits and to float32, in place."""
    rng = np.random.default_rng(0)
    a, values = (rng.standard_normal(shape, np.float32) for shape in ((70, 144), (72, 144)))
    on_device, bias = cupy.asarray(a.astype(np.float16)), rng.standard_normal(72, np.float32)
    for format, gelu, kind in product(FP8, (False, True), ("float16", "float32")):
        w = WeightMatrix.quantize(cupy.asarray(values), format, "NK")
        residual = cupy.asarray(rng.standard_normal((70, 72)).astype(kind))
        exact = on_device.get().astype(np.float64), w.mapped(cupy.asnumpy).dequantized()
        ends = bias.astype(np.float64), residual.get().astype(np.float64)
        truth = reference.gemm(exact[0], exact[1].astype(np.float64), *ends, gelu=gelu)
        arrays = on_device, w, cupy.asarray(bias), residual
        label = f"gemm {format} gelu {gelu} to {kind}"
        options = {"gelu": gelu, "dtype": kind}
        limit = workload.tolerance("float16")
        checked(label, truth, limit, bound_and_run, OPERATIONS["gemm"], arrays, residual, **options)


def handed_sums() -> None:
    """Multiply prompts on Hopper, with tiles divided among clusters."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2000, 1280), np.float32).astype(np.float16)
    narrow = rng.standard_normal((2312, 1280), np.float32)
    for w in (
        WeightMatrix.quantize(narrow, "float8_e5m2", "NK"),
        GgufMatrix.random([("Q4_K", 2312)], 1280),
    ):
        truth = a.astype(np.float64) @ w.dequantized().astype(np.float64)
        arrays = (
            cupy.asarray(a),
            w.mapped(cupy.asarray),
            *[None] * 4,
            allocate_stream_k_workspace(),
        )
        limit = workload.tolerance("float16")
        checked(f"handed {w}", truth, limit, bound_and_run, OPERATIONS["gemm"], arrays)


def blocks() -> None:
    """Use weights in GGUF blocks for few and many rows of decoding, prompts, and an embedding."""
    rng = np.random.default_rng(0)
    for ranges in (*(((name, 64),) for name in TYPES), (("Q4_K", 128), ("Q6_K", 128))):
        w = GgufMatrix.random(ranges, 512)
        exact, label = w.dequantized().astype(np.float64), str(w)
        rows = [BlockRows.of(name, random_blocks(name, N, w.K)) for name, N in ranges]
        packed = packed_on_device(rows, w.K)
        np.testing.assert_array_equal(packed.data.get(), w.data)
        for M, x_dtype in product((1, 6, 40), (None, "float16")):
            x = rng.standard_normal((M, w.K)).astype(np.float16).astype(np.float32)
            arrays, limit = (cupy.asarray(x), packed), workload.tolerance("float32")
            options: dict[str, Any] = {"decoding": True, "x_dtype": x_dtype}
            linear = OPERATIONS["linear"]
            checked(f"{label} {M}", x @ exact, limit, bound_and_run, linear, arrays, **options)
        narrow = cupy.asarray(x.astype(np.float16)), packed
        limit = workload.tolerance("float16")
        checked(f"{label} prompt", x @ exact, limit, bound_and_run, OPERATIONS["gemm"], narrow)
        if len(ranges) == 1:
            ids = cupy.arange(0, w.N, 5, dtype="int32")
            taken = ops.encoder_rows(ids, cupy.zeros_like(ids), packed).get()
            np.testing.assert_array_equal(taken, w[ids.get()])
        for M in (2, 20):
            rows_of_x, y = cupy.asarray(x[:M]), x[:M] @ exact
            limit, gates = workload.tolerance("float32"), reference.silu_mul(y, y)
            inputs: Any = (rows_of_x, packed, None, None, None, None, packed)
            checked(f"{label} {M} up", gates, limit, bound_and_run, linear, inputs, decoding=True)
            k, v = (cupy.zeros((M, 2, 16), "float16") for _ in range(2))
            row, heads = cupy.arange(M, dtype="int32"), {"n_head": w.N // 16 - 2}
            by = cupy.asarray(np.tile(np.array([1, 0], np.float32), (M, 8, 1)))
            inputs = rows_of_x, packed, None, by, k, v, row, cupy.zeros_like(row)
            q, turned = y[:, : w.N - 32], f"{label} {M} turned"
            checked(turned, q, limit, bound_and_run, LINEAR_ROPE, inputs, **heads)


def feed_forward_in_blocks() -> None:
    """Run layers of few rows: RMSNorm, the feed-forward and its split sums in four kernels."""
    if not cards.gpu().has_wgmma:
        return
    for name, M in product(TYPES, (1, 3)):
        C, H = (256, 1536) if TYPES[name].size > 32 else (160, 1280)
        w, up, o, qkv = (GgufMatrix.random([(name, N)], C, N) for N in (H, H, C, 128))
        down = GgufMatrix.random([(name, C)], H)
        w, up, o, qkv, down = (each.mapped(cupy.asarray) for each in (w, up, o, qkv, down))
        rng = np.random.default_rng(0)
        x, gamma = (cupy.asarray(rng.standard_normal(s, np.float32)) for s in ((M, C), (C,)))
        count = _linear_mma.splits(H)[0]
        sums = registry.bind("gated_sums", (x, gamma, w, up, down), splits=count).run()
        whole = registry.bind("linear_sums", (x, o, x, sums, down)).run().get()
        by, (k, v) = cupy.ones((M, 8, 2), "float32"), cupy.zeros((2, M, 2, 32), "float16")
        places = cupy.arange(M, dtype="int32"), cupy.zeros(M, "int32")
        inputs = x, gamma, qkv, sums, down, by, k, v, *places
        turned = registry.bind("rope_sums", inputs, n_head=4).run().get()
        normed = registry.bind("rmsnorm_sums", (x, gamma, sums, down)).run().get()
        assert all(np.isfinite(each).all() for each in (whole, turned, normed))
        print(f"checked a feed-forward of {M} rows in {name}")


def blocks_by_wgmma() -> None:
    """Run products with the same bits as few rows: two matrices, RoPE, one or two tiles of rows.

    Also run them with x from RMSNorm, attention and a gated product; where these kernels compute
    sums of chunks of x, the products read the sums.
    """
    if not cards.gpu().has_wgmma:
        return
    rng, order = np.random.default_rng(0), _linear_wgmma.operand(GGUF, rounded=True)
    for names in (*((name, name) for name in TYPES), ("Q4_K", "Q6_K"), ("Q5_1", "Q8_0")):
        ranges = tuple((name, 128) for name in dict.fromkeys(names))
        ranges = (*ranges[:-1], (ranges[-1][0], 256 - 128 * (len(ranges) - 1)))
        down = GgufMatrix.random([(names[0], 64)], 256).mapped(cupy.asarray)
        for M, K in (20, 768), (66, 768), (66, 1024):  # two sets of warps share splits of 1024
            w = GgufMatrix.random(ranges, K).mapped(cupy.asarray)
            rows = cupy.asarray(rng.standard_normal((M, w.K), np.float32))
            norm = partial(OPERATIONS["rmsnorm"].bind_on_device, (rows, cupy.ones(w.K, "float32")))
            row, by = cupy.arange(M, dtype="int32"), cupy.ones((M, 32, 2), "float32")
            queries, keys = rows[:, : w.N].copy(), rows[:, None, : w.N].astype("float16")
            results: list[list[Any]] = [[], [], []]
            for operand, to in zip((None, order, order.with_sums(64)), results, strict=True):
                options = {"operand": operand} if operand else {"x_dtype": "float16"}
                multiply: Any = partial(
                    OPERATIONS["linear"].bind_on_device, decoding=True, **options
                )
                x = norm(variant="stream", to_operand=operand).run()
                to.append(multiply((x, w)).run().get())
                gated = x, w, None, None, None, None, w
                y = multiply(gated, to_operand=operand).run()
                to.append(multiply((y, down)).run().get())
                heads = queries, keys, keys, row, cupy.zeros_like(row)
                y = registry.bind("attention_split", heads, n_head=4, to_operand=operand).run()
                to.append(multiply((y, down)).run().get())
                k, v = (cupy.zeros((M, 1, 64), "float16") for _ in range(2))
                turned = x, w, None, by, k, v, row, cupy.zeros_like(row)
                to.append(LINEAR_ROPE.bind_on_device(turned, n_head=2, **options).run().get())
                to += [k.get(), v.get()]
            for one, *others in zip(*results, strict=True):
                for other in others:
                    np.testing.assert_array_equal(one, other)
        print(f"checked {w} by wgmma")


def own_frequencies() -> None:
    """Run RoPE of rows with separate frequencies for each sequence."""
    rng, NH, NKV, HS = np.random.default_rng(0), 3, 1, 20
    row, position = np.array([2, 0, 1, 1, 2], np.int32), np.array([3, 0, 4, 6, 5], np.int32)
    own = rng.uniform(0, 1, (3, HS // 2))
    qkv = rng.standard_normal((5, (NH + 2 * NKV) * HS), np.float32)
    x, table, of, at = map(cupy.asarray, (qkv, own, row, position))
    k, v = (cupy.zeros((3, 7, NKV * HS), "float32") for _ in range(2))
    heads: dict[str, Any] = {"n_head": NH, "n_kv_head": NKV}
    turned = reference.rope_packed(qkv, position, own, row, **heads)
    rotations = reference.rotations(position, own, row)
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "rope_packed": ((x, at, table, of), turned, heads),
        "rope_append": ((x, table, k, v, of, at), turned[:, : NH * HS], {"n_head": NH}),
        "rotations": ((at, table, of), rotations, {}),
    }
    for name, (inputs, truth, options) in cases.items():
        made = registry.bind(name, inputs, **options).run().get()
        np.testing.assert_allclose(made, truth, atol=2e-6)
    print("checked own frequencies")


def prefixes() -> None:
    """Copy keys and values of a prefix to other sequences."""
    for kv_dtype in (None, "float8_e5m2"):
        held = np.random.default_rng(0).integers(0, 100, (4, 5, 40, 24)).astype("uint8")
        kv = cupy.asarray(held if kv_dtype else held.astype("float16"))
        numbers = [cupy.asarray(np.array(each, "int32")) for each in ([0, 2], [3, 4], [40, 17])]
        KV_COPY.bind((kv, *numbers), kv_dtype=kv_dtype).run()
        held[:, 3], held[:, 4, :17] = held[:, 0], held[:, 2, :17]
        np.testing.assert_array_equal(kv.get().astype("uint8"), held)
        print(f"checked kv_copy {kv_dtype}")


def attention() -> None:
    """Run attention on tensor cores: one sequence, and a ragged batch with an empty sequence.

    Hopper's kernels also run with alternate keys, and with writes to a kv_cache.
    """
    for few in (True, False):
        with patch("gpt2block.ops.engines.attention_tiles.alternates", lambda *_, few=few: few):
            _attention()
            _appending_attention()


def _attention() -> None:
    rng = np.random.default_rng(0)
    cases: list[tuple[str, str | None]] = [(HI_LO, None)]
    for variant in OPERATIONS["attention"].variants:
        cases += [(dtype, variant.name) for dtype in variant.dtypes if "float16" in variant.dtypes]
    masks: list[dict[str, Any]] = [{"causal": False}, {"causal": True}]
    masks.append({"causal": True, "window": 40})
    for (dtype, name), mask, lengths in product(cases, masks, ([70], [70, 0, 1, 300])):
        starts = np.cumsum([0, *lengths], dtype=np.int32)
        host = rng.standard_normal((starts[-1], 3 * 128)).astype(FLOATS.get(dtype, np.float32))
        rows = (host[first:last].astype(np.float64) for first, last in pairwise(starts))
        truth = np.concatenate([reference.attention(x, 2, **mask) for x in rows if len(x)])
        qkv: Any = cupy.asarray(host)
        qkv = HiLoMatrix.from_float32(qkv) if dtype == HI_LO else qkv
        options = {"cu_seqlens": cupy.asarray(starts), "max_seqlen": max(lengths)}
        label = f"attention {name} {dtype} {mask} {lengths}"
        limit = workload.tolerance("float32" if dtype == HI_LO else dtype)
        options |= {"variant": name, **mask}
        checked(label, truth, limit, ops.attention, qkv, 2, **options)


def _appending_attention() -> None:
    """Append keys and values and read the kv_cache; without a kernel for this the call fails."""
    rng = np.random.default_rng(0)
    lengths, n_ctx, heads = [70, 1, 300], 310, {"n_head": 4, "n_kv_head": 2}
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    row = np.repeat(np.arange(3, dtype=np.int32), lengths)
    position = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    for dtype, size in product(("float16", "bfloat16"), (64, 128)):
        C = 2 * size
        qkv = rng.standard_normal((starts[-1], 4 * C)).astype(FLOATS[dtype])
        kept = np.zeros((2, 3, n_ctx, C), FLOATS[dtype])
        reference.kv_append(qkv, kept[0], kept[1], row, position)
        k, v = (cupy.zeros((3, n_ctx, C), FLOATS[dtype]) for _ in range(2))
        given = (cupy.asarray(qkv), cupy.asarray(starts), k, v, *map(cupy.asarray, (row, position)))

        def cache(given: Any = given, k: Any = k, v: Any = v) -> Any:
            STEPS["attention_varlen"].bind(given, causal=True, max_seqlen=300, **heads).run()
            return np.stack([k.get(), v.get()])

        checked(
            f"kv_cache of attention, heads of {size} {dtype}", kept.astype(np.float64), 0, cache
        )


def continued_attention() -> None:
    """Run attention on tensor cores over a kv_cache, for a ragged batch with an empty sequence."""
    rng = np.random.default_rng(0)
    lengths, start = [70, 0, 1, 131], np.array([9, 3, 64, 17], np.int32)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    kinds = "float8_e5m2", "float8_e4m3fn", None
    for dtype, kind, size in product(("float16", "bfloat16"), kinds, (64, 128)):
        C = 2 * size
        numbers = (rng.standard_normal(shape) for shape in ((202, 3 * C), (4, 150, C), (4, 150, C)))
        host = [each.astype(FLOATS[dtype]) for each in numbers]
        qkv, k, v = (x.astype(np.float64) for x in host)
        if kind is not None:
            host[1:] = (reference.to_fp8(half, kind) for half in (k, v))
            k, v = (reference.from_fp8(half, kind).astype(np.float64) for half in host[1:])
        truth = reference.attention_packed(qkv, k, v, starts, start, 2)
        arrays = (*map(cupy.asarray, host), cupy.asarray(starts), cupy.asarray(start), 2, 131)
        for variant in ("mma", "wgmma"):
            label, limit = f"{variant} {dtype} {kind} {size}", workload.tolerance(dtype)
            options: dict[str, Any] = {"variant": variant, "kv_dtype": kind}
            checked(
                f"attention_packed {label}", truth, limit, ops.attention_packed, *arrays, **options
            )


def greedy(ours: Any, prompts: Sequence[Any], rows: int, steps: int) -> None:
    """Decode rows that take the prompts in turn; rows of the same prompt draw the same tokens."""
    chosen = [prompts[row % len(prompts)] for row in range(rows)]
    decoding = start_all(ours.engine, chosen, [Sampling(temperature=0)] * rows, steps)
    sampled = np.array([decoding.next().tokens for _ in range(steps)])
    assert (sampled == sampled[:, np.arange(rows) % len(prompts)]).all()


def in_chunks(ours: Any, ids: list[Ids], middle: int) -> Any:
    """Return the last logits of rows in a kv_cache: new rows, and rows that continue."""
    kv_cache = ours.new_cache(3)
    first, rest = [ids[0][:middle], ids[0][:0], ids[2][:9]], [ids[0][middle:], ids[1], ids[2][9:]]
    assert np.isfinite(np.concatenate(ours.engine.forward(first, "last", kv_cache))).all()
    last = ours.engine.forward(rest, "last", kv_cache)
    assert np.isfinite(np.concatenate(last)).all()
    assert np.isfinite(np.concatenate(ours.engine.log_likelihood(ids))).all()
    return last


def model() -> None:
    """Run prefill of a ragged batch, decoding as a graph, and likelihoods, in every dtype."""
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
    penalized = replace(samplings[1], frequency_penalty=0.5, min_new_tokens=2, end_ids=range(9))
    for weights, dtype in product((narrow, on_tensor_cores), DTYPES):
        ours, truth = (GPT2(weights, device, dtype) for device in ("cuda", "cpu"))
        pairs = zip(ours(ids), truth(ids), strict=True)
        error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        assert error <= workload.tolerance("float32" if dtype == "float32" else "bfloat16"), error
        for rows in (slice(0, 3), slice(0, 1)):
            prompts = [row[:131] for row in ids[rows]]
            for chosen in (samplings[rows], [penalized, *samplings[1:]][rows]):
                decoding = start_all(ours.engine, prompts, chosen, 5)
                sampled = np.array([decoding.next().tokens for _ in range(5)])
                assert ((sampled >= 0) & (sampled < 101)).all()
            assert sampled[:2, 0].min() > 8
        many_rows(ours, [row[:9] for row in ids])
        if dtype == "bfloat16":  # two rows reach the end of the context and restart
            for one in ours.generate(ids, max_new_tokens=12, overflow="truncate"):
                assert len(one.tokens) == 12
        in_chunks(ours, ids, 70)
        print(f"checked GPT-2 {dtype}: error {error:.1e}")


def many_rows(ours: GPT2, prompts: list[Ids]) -> None:
    """Decode enough rows that x is passed as terms, with both kinds of products."""
    linear = sys.modules["gpt2block.ops.linear"]
    for rows, most in ((MORE_ROWS + 3, linear.MAX_MMA_PRODUCTS), (MORE_ROWS + 10, 0)):
        with patch.object(linear, "MAX_MMA_PRODUCTS", most):  # 0: tiles, however small
            greedy(ours, prompts, rows, 3)


def fp8_caches() -> None:
    """Run prefill, also of rows that continue, and decoding with a kv_cache of FP8."""
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
        pairs = zip(in_chunks(ours, ids, 40), ours(ids), strict=True)
        error = max(float(np.abs(a - b[-1]).max() / np.abs(b).max()) for a, b in pairs)
        assert error <= 0.1, error  # keys near the middle of two numbers may round differently
        for rows in (3, 20):
            greedy(ours, [row[:30] for row in ids], rows, 5)
        print(f"checked {kind.__name__} with a kv_cache of {kv_dtype}: error {error:.1e}")


def large_matrices() -> None:
    """Decode by wgmma, which is the default only for larger models: one and two tiles of rows.

    K of 192 channels ends in the middle of a unit of 128 values.
    """
    gpt2 = GPT2Weights.random(0, GPT2Config(1, 2, 128, 20, 101))
    sizes: dict[str, Any] = {"n_layer": 1, "n_ff": 384, "vocab_size": 101, "n_ctx": 20}
    config = LlamaConfig(n_head=4, n_kv_head=2, n_embd=256, **sizes)
    llama = LlamaWeights.random(0, config)
    narrow = LlamaWeights.random(0, LlamaConfig(n_head=3, n_kv_head=1, n_embd=192, **sizes))
    prompts = [np.array([row, 3], np.int32) for row in range(5)]
    with patch("gpt2block.ops.linear.min_weights", return_value=1):
        for weights, dtype in product(
            (gpt2, llama, narrow), ("bfloat16", "float8_e4m3fn", "float16")
        ):
            kind: Any = GPT2 if weights is gpt2 else Llama
            ours = kind(weights, "cuda", dtype)
            for rows in (1, 7, 66):
                greedy(ours, prompts, rows, 3)
            print(f"checked decoding of large matrices {kind.__name__} {ours.dtypes}")


def few_rows() -> None:
    """Decode one to four rows, in clusters of 16 or 8 blocks or of the blocks of a head; then more.

    Heads of Qwen3 have norms; Granite scales scores by a factor; OLMo 2 and Gemma 3 have norms
    after attention and feed-forward; heads of 256 channels run a separate kernel.
    """
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_size": 64}
    sizes |= {"n_embd": 128, "n_ff": 256, "vocab_size": 101, "n_ctx": 40}
    prompts = [np.array([row, 3], np.int32) for row in range(4)]
    own: dict[str, dict[str, Any]] = {kind: {} for kind in ("llama", "qwen3", "granite", "olmo2")}
    own |= {"nanochat": {}, "gemma3_text": {"window": 7, "head_size": 256}}
    for kind, dtype in product(own, ("bfloat16", "float8_e4m3fn")):
        config = ARCHITECTURES[kind].CONFIG(**{**sizes, **own[kind]})
        ours: Model[Any] = Model.from_tensors(config, random_model(0, config), "cuda", dtype)
        for rows in (1, 2, 4) if kind == "llama" else (1, 4, 7):
            greedy(ours, prompts, rows, 3)
        in_chunks(ours, [np.arange(n, dtype=np.int32) for n in (31, 1, 20)], 17)
        drafted(ours, [np.resize(ids, 9) for ids in prompts])
        print(f"checked decoding of few rows {kind} {ours.dtypes}")


def drafted(model: Model[Any], prompts: list[Ids]) -> None:
    """Generate texts without draft tokens, and with one, four or eight rows per sequence."""
    turns = cycle((4, 1, 8))
    options: dict[str, Any] = {"max_new_tokens": 14, "temperature": 0, "stop_ids": (), "seed": 0}
    options |= {"repetition_penalty": 1.1, "frequency_penalty": 0.1}
    with patch.object(SpeculationPolicy, "together", lambda *_: next(turns)):
        found = model.generate(prompts, speculate=True, **options)
    assert found == model.generate(prompts, **options)


def gathers() -> None:
    """Gather columns with and without a norm; compare the residual streams.

    One device stands in for all GPUs. compute-sanitizer runs kernels one after another, so that a
    gather must not wait for a later one: all all-gathers send first, then all receive.
    """
    cases = [(3, (40, 24)), (16, (256, 128, 128, 64)), (2500, (64, 48)), (4, (1024, 1024))]
    for (M, widths), norm in product(cases, ("", "floats", "operand")):
        N, peers = sum(widths), PeerBuffers([0] * len(widths))
        if norm and not normalizes(M, N):
            continue
        for seed in range(3):  # the third round uses the first half of the peer buffers again
            shards = [cupy.asarray(random_input(seed + n, (M, S))) for n, S in enumerate(widths)]
            residual = cupy.asarray(random_input(9, (M, N)))
            truth = reference.all_gathered([shard.get() for shard in shards], residual.get())
            for stream in streams_after(peers, shards, residual, norm):
                checked(f"gather {M} {widths} {norm}", truth, 0, stream.copy)


def sent_columns() -> None:
    """Send the columns of products and of attention; compare what the other GPU receives."""
    columns, M, K, N = 128, 5, 256, 256
    row, position = (cupy.asarray(np.arange(n, n + M, dtype=np.int32)) for n in (0, 40))
    k, v = (cupy.asarray(random_input(n, (M, 64, columns)).astype("float16")) for n in (6, 7))
    x, q = cupy.asarray(random_input(5, (M, K))), cupy.asarray(random_input(8, (M, columns)))
    half = cupy.asarray(random_input(9, (columns, K)).astype("float16"))
    weights: dict[str, Any] = {"float16": WeightMatrix(half, "float16", None, "NK")}
    weights["Q4_K"] = GgufMatrix.random([("Q4_K", columns)], K).mapped(cupy.asarray)
    peers = PeerBuffers([0, 0])
    for kind in (*weights, "attention"):
        sent, bound = [], []
        for me in range(2):
            to_peers = PeerStores(peers.of(me), N, me * columns)
            if kind == "attention":
                options = {"n_head": 2, "to_peers": to_peers}
                made = registry.bind("attention_split", (q, k, v, row, position), **options)
            else:
                made = registry.bind("linear", (x, weights[kind]), decoding=True, to_peers=to_peers)
            sent.append(made.run())
            inputs = sent[-1], None, *peers.of(me).values()
            sizes = {"N": N, "first": me * columns, "sent": True}
            bound.append(registry.bind("all_gather", inputs, **sizes))
        truth = np.concatenate([each.get() for each in sent], axis=1)
        for each in bound:
            checked(f"sent {kind}", truth, 0, each.run)


def streams_after(peers: PeerBuffers, shards: list[Any], residual: Any, norm: str) -> list[Any]:
    """Return the residual stream of each GPU after an all-gather; norm: "", "floats" or "terms"."""
    streams, bound, first = [residual.copy() for _ in shards], list[Any](), 0
    for me, (shard, stream) in enumerate(zip(shards, streams, strict=True)):
        own, sizes = tuple(peers.of(me).values()), {"N": stream.shape[1], "first": first}
        if norm:
            options = {**sizes, "to_operand": Operand("float16") if norm == "operand" else None}
            inputs = shard, stream, residual[0], *own  # residual[0]: weights of the norm
            bound.append(ALL_GATHER_NORM.bind_on_device(inputs, **options))
        else:
            bound.append(ALL_GATHER.bind_on_device((shard, stream, *own), stream, **sizes))
        first += shard.shape[1]
    for launches in zip(*(each.launches for each in bound), strict=True):
        for parts, launch in product((STORE, LOAD), launches):
            part_of(launch, parts).run()
    return streams


def main() -> None:
    if "--without-hopper" in sys.argv[1:]:
        own = min(cards.capability_of(), 89)
        cards._capability = lambda _: own  # type: ignore[assignment]
    parts: dict[str, Callable[[], None]] = {
        f"operation:{name}": partial(operation, found) for name, found in OPERATIONS.items()
    }
    models = model, fp8_caches, large_matrices, few_rows
    for part in (
        block,
        attention,
        continued_attention,
        fused_block,
        *models,
        gemm,
        fp8_gemm,
        handed_sums,
        blocks,
        feed_forward_in_blocks,
        blocks_by_wgmma,
        own_frequencies,
        prefixes,
        gathers,
        sent_columns,
    ):
        parts[part.__name__] = part
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    for name in names or parts:
        parts[name]()
    print("all done")


if __name__ == "__main__":
    main()
