"""Models of all architectures and formats of weights, and every kind of pass that they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from launch_recorder import Recorder

from gpt2block import GPT2Config, LlamaConfig, Model, RopeScaling, Sampling
from gpt2block.cuda import cupy
from gpt2block.cuda.devices import reads_blocks
from gpt2block.cuda.formats import FILE
from gpt2block.engine.model import Start
from gpt2block.models.architectures.gemma3 import Gemma3Config
from gpt2block.models.architectures.gemma4 import Gemma4Config
from gpt2block.models.architectures.lfm2 import Lfm2Config
from gpt2block.models.architectures.nanochat import NanoChatConfig
from gpt2block.models.architectures.olmo2 import Olmo2Config
from gpt2block.models.architectures.phi3 import Phi3Config
from gpt2block.models.architectures.qwen3 import Qwen3Config
from gpt2block.models.architectures.qwen3_5 import Qwen35Config
from gpt2block.models.config import TABLES, ModelConfig, model_shapes
from gpt2block.models.weights.gguf import TYPES, GgufMatrix
from gpt2block.models.weights.gguf_packing import BlockRows, packed_on_device
from gpt2block.ops.drafts import MAX_DRAFTS, RIGHT, TAKEN

IDS = np.zeros(300, np.int32)
ROWS = 1, 2, 8, 16, 17, 64, 128
SIZES: Mapping[str, Any] = {
    "n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_size": 64, "n_embd": 256, "n_ff": 512,
    "n_ctx": 1024, "vocab_size": 515,
}  # fmt: skip
GEMMA4: Mapping[str, Any] = {
    **SIZES, "n_layer": 4, "head_size": 256, "sliding_layers": (True, False) * 2, "window": 128,
    "shared_layers": 2, "use_double_wide_mlp": True, "logits_cap": 30.0,
}  # fmt: skip
LONG = RopeScaling(
    "longrope", 1.0, original_context=256, factors=(1.0,) * 24, long_factors=(2.0,) * 24
)
CONFIGS: Mapping[str, ModelConfig] = {
    "gpt2": GPT2Config(2, 4, 256, 1024, 515),
    "llama": LlamaConfig(**SIZES),
    "gemma3": Gemma3Config(**SIZES, window=128, sliding_layers=(True, False), logits_cap=30.0),
    "nanochat": NanoChatConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "phi3": Phi3Config(**SIZES, rotary=48, scaling=LONG),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3_5": Qwen35Config(
        **SIZES, delta_layers=(True, False), rotary=16, n_k_head=2, n_v_head=4, k_size=64, v_size=64
    ),
    "lfm2": Lfm2Config(**SIZES, conv_layers=(True, False)),
    "gemma4": Gemma4Config(**GEMMA4),
    "gpt2-odd": GPT2Config(2, 3, 33, 1024, 101),  # heads of 11 channels
    "gpt2-768": GPT2Config(2, 12, 768, 1024, 50257),
    "llama-2048": LlamaConfig(2, 32, 2048, 1024, 32000, n_kv_head=8, n_ff=8192),
}
FORMATS: Mapping[str, tuple[str, str | None]] = {  # dtypes of weights and of the kv_cache
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "float16/e5m2": ("float16", "float8_e5m2"),
    "e5m2": ("float8_e5m2", None),
    "e4m3/e4m3": ("float8_e4m3fn", "float8_e4m3fn"),
    "Q8_0": (FILE, None),
    "Q4_K": (FILE, None),
    "Q4_K_M": (FILE, None),
    "Q8_0/e4m3": (FILE, "float8_e4m3fn"),
}
OTHERS = "gemma3", "nanochat", "olmo2", "phi3", "qwen3", "qwen3_5", "lfm2", "gemma4"
SOME = {"gpt2-odd": ("float32",), "gpt2-768": ("float32", "bfloat16", "e4m3/e4m3")}
SOME |= dict.fromkeys(OTHERS, ("bfloat16", "Q4_K_M"))
SOME["llama-2048"] = "bfloat16", "e4m3/e4m3", "Q8_0", "Q4_K_M"
MODELS = [(name, each) for name in CONFIGS for each in SOME.get(name, FORMATS)]
IN_Q4_K_M = {"wte": "Q6_K", "lm_head": "Q6_K", "h.0.w_down": "Q6_K"}  # other matrices: Q4_K


def engine_of(
    config: ModelConfig, dtype: str, kv_dtype: str | None, types: str | None = None
) -> Any:
    """Return an engine with matrices of zeros, in layout KN for GPT-2's blocks.

    b_up is large, so that FP8 engines divide the activations. types: GGUF type of the matrices.
    """

    def tensors() -> Iterator[tuple[str, Any, str | None]]:
        for name, shape in model_shapes(config).items():
            rows = shape if name in (*TABLES, "lm_head") else shape[::-1]
            if len(shape) != 2 or name == "wpe":
                yield name, np.full(shape, 2e5 if name.endswith("b_up") else 1, np.float32), None
            elif types:
                yield name, _blocks(config, name, rows, types), "NK"
            elif isinstance(config, GPT2Config) and name.startswith("h."):
                yield name, cupy.empty(shape, "float32"), "KN"
            else:
                yield name, cupy.empty(rows, "float32"), "NK"

    return Model.from_tensors(config, tensors(), "cuda", dtype, kv_dtype).engine


def _blocks(config: ModelConfig, name: str, shape: tuple[int, ...], types: str) -> GgufMatrix:
    N, K = shape
    ranges = [(types, N)]
    if types == "Q4_K_M":
        ranges = [(IN_Q4_K_M.get(name, "Q4_K"), N)]
        if name == "h.0.w_qkv":
            ranges = [("Q4_K", N - config.kv_width), ("Q6_K", config.kv_width)]
    raw = [(t, np.zeros((n, K // TYPES[t].size * TYPES[t].nbytes), np.uint8)) for t, n in ranges]
    return packed_on_device([BlockRows.of(*each) for each in raw], K)


def generation(name: str, formats: str, to: Recorder) -> None:
    """Start prompts in every way, run steps of rows and of draft tokens, scores and a trace.

    The names of the calls are used in tests/golden/kernels.txt. The model is its own draft model.
    """
    dtype, kv_dtype = FORMATS[formats]
    types = formats.partition("/")[0] if dtype == FILE else None
    if types and not reads_blocks("cuda:0"):
        return  # GPUs of this capability convert the blocks to floats
    engine = to.call("load", engine_of, CONFIGS[name], dtype, kv_dtype, types)
    decoding = engine.decode(4, 600)
    to.call("prompts", decoding.start, [_start(0, 300), _start(3, 300)])
    to.call("prompts", decoding.extend, [_start(1, 130)])
    to.call("copies", decoding.copy, [(1, 2, 130)])
    to.call("continued", decoding.start, [_start(slot, 300, cached=130) for slot in (1, 2)])
    decoding.stop(np.arange(1))
    changed = Sampling(repetition_penalty=1.1, frequency_penalty=0.5)
    to.call("alternatives", decoding.start, [_start(0, 5, sampling=changed, alternatives=2)])
    for rows in ROWS:
        kept = engine.new_cache(rows, 64)
        to.call(f"{rows}", engine.forward, [IDS[:1]] * rows, "last", kept)
    for call, draft in (("draft", engine), ("lookup", None)):
        engine.draft = draft
        decoding = engine.decode(2, 64, speculate=True)
        to.call("prompts", decoding.start, [_start(0, 20), _start(1, 20)])
        decoding._pace.add(
            np.arange(2), np.full((2, MAX_DRAFTS), RIGHT | TAKEN)
        )  # all draft tokens were right
        to.call(call, decoding._launch)  # no result, as nothing ran
    to.call("scores", engine.log_likelihood, [IDS[:70]])
    to.call("logits", engine.forward, [IDS[:70]], "logits")
    to.call("trace", engine.trace, IDS[:9], True)


def _start(slot: int, length: int, **more: Any) -> Start:
    return Start(slot, IDS[:length], **{"sampling": Sampling(top_k=3), "steps": 5, **more})
