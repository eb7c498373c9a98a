"""Adapters (LoRA): their files, merged weights, and the bits that a text has alone."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gpt2block import CheckpointError, InputError, Model, from_pretrained
from gpt2block.engine.generation.batching import Batch
from gpt2block.engine.generation.generate import Run
from gpt2block.engine.generation.options import Options
from gpt2block.engine.recording import Recording
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.files.checkpoints.adapters import Adapter
from tests.adapters import ALL, USUAL, merge, save_adapter, save_base
from tests.command_line import gpt2block
from tests.devices import GPU, running_on, slow
from tests.engine.test_architectures_cuda import FORMATS, GPT2, OWN, SIZES
from tests.serving import get, model_of, post, serving

NAMES = [
    "gpt2", "llama", "qwen3-bias", "granite", "smollm3", "phi3", "olmo2", "gemma3", "gemma4",
    "lfm2",
]  # fmt: skip


def config_of(name: str) -> Any:
    if name == "gpt2":
        return GPT2
    kind, own = OWN[name]
    return kind(**{**SIZES, **own})


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_computes_as_merged_weights(name: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", config_of(name))
    adapter = save_adapter(tmp_path / "a", base, use_rslora=name == "llama")
    scale = 2 / (3**0.5 if name == "llama" else 3)
    merged = from_pretrained(merge(tmp_path / "merged", base, adapter, scale), "cpu")
    own = from_pretrained(base, "cpu", adapters={"a": adapter, "b": adapter})
    plain = from_pretrained(base, "cpu")
    prompt, text = np.arange(1, 10), np.arange(20, 28)
    found = [
        model.score_generated(prompt, text, adapter=which).logprobs
        for model, which in ((own, "b"), (merged, None), (own, None), (plain, None))
    ]
    assert np.abs(found[0] - found[1]).max() < 2e-5
    assert np.array_equal(found[2], found[3])
    assert np.abs(found[0] - found[3]).max() > 0.1


def prompts(count: int) -> list[np.ndarray]:
    return [np.arange(3 + n, 12 + n + n % 5) for n in range(count)]


def texts(model: Model[Any], adapters: Sequence[str | None], together: bool) -> list[Any]:
    """Return tokens and log-probabilities of a text for each adapter; some texts are shorter."""
    given = {"max_new_tokens": 5, "temperature": 0.0, "rows_at_once": max(len(adapters) - 2, 2)}
    options = Options.of(given)
    indices, found = range(len(adapters)), list[Any]()
    for own in [indices] if together else [[n] for n in indices]:
        starts = prompts(len(adapters))
        run = Run(model.engine, None, [starts[n] for n in own], options)
        for n, sequence in zip(own, run.sequences, strict=True):
            sequence.adapter = model.engine.adapters.named(adapters[n])
            if n % 5 % 2 == 0:
                sequence.ends = replace(sequence.ends, max_new_tokens=2)
        run.finish()
        found += [(each.tokens, each.logprobs) for each in run.sequences]
    return found


ATTENTION = "(q|k|v|o)_proj"
ON_CPU = [
    ("shuffled", ("gpt2", "bfloat16", ALL)), slow("hopper", ("qwen3", "float16", ATTENTION)),
    *(slow("forward", (name, dtype, ALL)) for name, dtype in (
        ("llama", "float32"), ("qwen3", "bfloat16"), ("gpt2", "float8_e4m3fn"), ("gpt2", "float32"),
    )),
]  # fmt: skip
SMALL: dict[str, Any] = {"shuffled": {"n_layer": 1}, "hopper": {"n_layer": 1, "n_ff": 64}}
ON_GPU = [
    pytest.param("gpu", case, marks=GPU.marks)
    for case in product(("gpt2", "llama", "qwen3", "phi3", "lfm2"), FORMATS, (ALL, ATTENTION))
]


@pytest.mark.parametrize(("where", "case"), ON_CPU + ON_GPU)
def test_a_text_has_the_bits_that_it_has_alone(
    where: str, case: tuple[str, str, str], tmp_path: Path
) -> None:
    """Steps of one, few, and on a GPU many rows have other kernels, but the same bits.

    Steps have other kernels, too, when no text with an adapter is left.
    """
    name, dtype, modules = case
    config = replace(config_of(name), **SMALL.get(where, {}))
    base = save_base(tmp_path / "base", config)
    folders = {"a": save_adapter(tmp_path / "a", base, modules=f"{modules}|c_(attn|proj)")}
    folders["b"] = save_adapter(tmp_path / "b", base, 2, 17, f"{USUAL}|in_proj|qkv_proj")
    given: Any = {"dtype": dtype, "kv_dtype": FORMATS[dtype]}
    adapters = ["a", None, "b", None, "a"] * 4 if where == "gpu" else ["a", None, "b"]
    with running_on(where):
        model: Any = from_pretrained(base, "cuda", **given, adapters=folders)
        ran = list[Recording]()
        model.engine.recordings.watch = ran.append
        together = texts(model, adapters, True)
        kinds = [any(s.step.op == "add_low_rank" for s in r.steps.values()) for r in ran]
        assert (kinds[0], kinds[-1]) == (True, False)
        assert together == texts(model, adapters, False)
        without = texts(from_pretrained(base, "cuda", **given), [None] * len(adapters), True)
    same = [own == other for own, other in zip(together, without, strict=True)]
    assert same == [name is None for name in adapters]
    if FORMATS[dtype]:  # FP8 keys near a tie are rounded to either side: see test_kv_cache_fp8.py
        return
    exact = from_pretrained(base, "cpu", dtype=dtype, adapters=folders)
    for prompt, which, (tokens, logprobs) in zip(prompts(3), adapters, together, strict=False):
        found = exact.score_generated(prompt, tokens, adapter=which)
        assert np.abs(found.logprobs - logprobs).max() < (1e-4 if dtype == "float32" else 0.05)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model's folder, and folders of two of its adapters."""
    at = tmp_path_factory.mktemp("adapters")
    found = {"base": save_base(at / "base", config_of("llama"))}
    found["a"] = save_adapter(at / "a", found["base"])
    return found | {"b": save_adapter(at / "b", found["base"], 2, modules=USUAL)}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "LOHA"}, "peft_type: expected 'LORA', got 'LOHA'"),
    "dora": ({"use_dora": True}, "use_dora: expected False, got True: merge"),
    "saved": ({"modules_to_save": ["lm_head"]}, r"modules_to_save: expected \[\], got"),
    "bias": ({"bias": "all"}, "bias: expected 'none', got 'all'"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights: expected 'eva', got 'pissa'"),
    "rank": ({"r": 4}, "r: 4 for .*, whose A has 3 rows"),
    "alpha": ({"lora_alpha": None}, "lora_alpha: expected a number, got None"),
    "slow": ({"rank_pattern": {"(.|.)*!": 3}}, r"rank_pattern: expected short .*, got '\(.*!'"),
    "infinite": ({"lora_alpha": float("inf")}, "lora_alpha: expected a number, got inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_are_refused(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    settings, problem = WRONG[case]
    folder = save_adapter(tmp_path / "a", folders["base"], **settings)
    with pytest.raises(CheckpointError, match=rf"^{folder}: adapter_config.json: {problem}"):
        from_pretrained(folders["base"], "cpu", adapters={"a": folder})


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


@pytest.mark.parametrize(("changes", "problem"), [
    ({f"{Q}A.weight": np.zeros((3, 9), np.float32)}, r"q_proj: expected A \(r, 64\)"),
    ({f"{Q}B.weight": np.zeros((9, 3), np.float32)}, r"B \(128, r\) with r from 1 to 256"),
    ({f"{Q}B.weight": None}, "layers.1.self_attn.q_proj: expected A .*, got {'A': "),
    ({f"{Q}A.weight": np.full((3, 64), np.nan, np.float32)}, f"{Q}A.weight: expected finite numb"),
    ({f"{Q}A.weight": np.zeros((3, 64), np.int8)}, f"{Q}A.weight: expected one of float64"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 5), np.float32)},
     "expected lora_A and lora_B of modules named q_proj, k_proj.*, got base_model.*embedding_A"),
    (dict.fromkeys((f"{Q.replace('1', '9')}{n}.weight" for n in "AB"), np.zeros((3, 64), "f4")),
     "expected lora_A .*, got base_model.model.model.layers.9"),
])  # fmt: skip
def test_tensors_that_are_refused(
    changes: dict[str, Any], problem: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = save_adapter(tmp_path / "a", folders["base"])
    tensors = {**load_file(folder / "adapter_model.safetensors"), **changes}
    own = {name: each for name, each in tensors.items() if each is not None}
    save_file(own, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{folder}: adapter_model.safetensors: .*{problem}"):
        from_pretrained(folders["base"], "cpu", adapters={"a": folder})


def test_other_wrong_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    base, a, b = folders.values()
    checkpoint = replace(Checkpoint.open(base), repo="qwen/Qwen3-0.6B")
    with pytest.raises(CheckpointError, match="empty: expected an adapter of peft, a folder with"):
        Adapter.read(tmp_path / "empty", checkpoint.config)
    for own in ("qwen/Qwen3-0.6B", "unsloth/qwen3-0.6b-unsloth-bnb-4bit", "./qwen", None):
        folder = save_adapter(tmp_path / str(len(own or "")), base, base_model_name_or_path=own)
        assert Adapter.read(folder, checkpoint.config, checkpoint).factors.keys()
    other = save_adapter(tmp_path / "c", base, base_model_name_or_path="qwen/Qwen3-1.7B")
    with pytest.raises(CheckpointError, match=r"of qwen/Qwen3-1\.7B: expected one of qwen/Q"):
        Adapter.read(other, checkpoint.config, checkpoint)
    model = from_pretrained(base, "cpu", adapters={"a": a, "b": b})
    with pytest.raises(InputError, match="adapter: expected one of a, b, got 'A'"):
        model.generate([1], adapter="A")
    with pytest.raises(InputError, match="adapter: expected None without adapters, got 'a'"):
        from_pretrained(base, "cpu").generate([1], adapter="a")
    several = {"b": b, "a": a, "c": a}
    with pytest.raises(InputError, match=r"2 of 3 take 0\.00 GB: expected at most 5e-05 GB"):
        from_pretrained(base, "cpu", adapters=several, adapters_memory=5e-5)


def test_scales_of_modules(folders: dict[str, Path], tmp_path: Path) -> None:
    config = config_of("llama")
    own = save_adapter(tmp_path / "a", folders["base"], alpha_pattern={"1.self_attn.q_proj": 4.0})
    pairs = zip(*(Adapter.read(each, config).factors.items() for each in (folders["a"], own)),
                strict=True)  # fmt: skip
    for (name, usual), (_, changed) in pairs:
        for one, other in zip(usual, changed, strict=True):
            factor = 2 if (name, one.column) == ("h.1.w_qkv", 0) else 1
            assert np.array_equal(factor * one.b, other.b)


def test_a_prefix_belongs_to_its_adapter(folders: dict[str, Path]) -> None:
    base, a, b = folders.values()
    engine = from_pretrained(base, "cpu", adapters={"a": a, "b": b}).engine
    batch, reused = Batch(engine, 3, 40, reuse=True), list[int]()
    for name in ("a", "b", None, "a", "b", None):
        run = Run(engine, None, np.arange(9), Options.of({"max_new_tokens": 2, "adapter": name}))
        run.batch = batch
        run.finish()
        reused.append(run.sequences[0].reused)
    assert reused == [0, 0, 0, 8, 8, 8]


def test_a_sequence_takes_its_adapter_to_another_process(folders: dict[str, Path]) -> None:
    base, a, b = folders.values()
    engine = from_pretrained(base, "cpu", adapters={"a": a, "b": b}).engine
    (sequence,) = Run(engine, None, np.arange(9), Options.of({"adapter": "b"})).sequences
    copied = pickle.loads(pickle.dumps(sequence.without_text()))
    assert copied.adapter == sequence.adapter == engine.adapters.named("b")


def test_a_receipt_states_the_adapter(folders: dict[str, Path]) -> None:
    base, a, b = folders.values()
    model = from_pretrained(base, "cpu", adapters={"x": b, "y": a})
    options: Any = {"receipt": True, "max_new_tokens": 4}
    receipts = [model.generate([1, 2], adapter=name, **options).receipt for name in ("y", None)]
    assert receipts[0]["adapter"] == Adapter.read(a, model.config).digest
    assert receipts[1]["adapter"] is None
    assert [check.code for check in model.verify(receipts)] == [0, 0]
    assert [check.code for check in model.verify([{**each, "adapter": None} for each in receipts])
            ] == [1, 0]  # fmt: skip
    own, other = from_pretrained(base, "cpu", adapters={"z": b}).verify(receipts)
    assert (own.code, other.code) == (2, 0)
    assert own.problem.startswith("adapter: the receipt states '")


def test_a_request_selects_an_adapter(folders: dict[str, Path]) -> None:
    base, a, b = folders.values()
    model = from_pretrained(base, "cpu", adapters={"a": a, "b": b})
    served = model_of(model.engine, adapters=model.adapters)
    body: Any = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    with serving(served, rows=1) as running:
        listed = [each["id"] for each in get(running, "/v1/models")[1]["data"]]
        found = {}
        for name in ("small", "a", "b"):
            status, answer = post(running, "/v1/completions", {**body, "model": name})
            assert (status, answer["model"]) == (200, name)
            found[name] = answer["choices"][0]["token_ids"]
        echo = {**body, "model": "a", "echo": True, "logprobs": 1}
        problems = [post(running, "/v1/embeddings", {"input": "a", "model": "a"}),
                    post(running, "/v1/completions", echo)]  # fmt: skip
    for name, tokens in found.items():
        own = model.generate([5, 6, 7], max_new_tokens=4, temperature=0.0,
                             adapter=None if name == "small" else name)  # fmt: skip
        assert list(own.tokens) == tokens
    assert listed == ["small", "a", "b"]
    assert [status for status, _ in problems] == [404, 400]


def test_commands(folders: dict[str, Path], tmp_path: Path) -> None:
    base, a, b = folders.values()
    model, receipts = ("--model", base, "--device", "cpu"), tmp_path / "receipts.jsonl"
    given = ("1 2 3", "--ids", *model, "--max-new-tokens", 4, "--temperature", 0)
    found = gpt2block("generate", *given, "--adapter", a, "--receipt", receipts, "--json")
    expected = from_pretrained(base, "cpu", adapters={"x": a}).generate(
        [1, 2, 3], max_new_tokens=4, temperature=0.0, adapter="x"
    )
    assert tuple(json.loads(found.out)["samples"][0]["tokens"]) == expected.tokens
    adapters = ("--adapter", f"x={b}", "--adapter", f"y={a}")
    assert gpt2block("verify", receipts, *model, *adapters).code == 0
    assert gpt2block("verify", receipts, *model, *adapters[:2]).code == 2
    assert gpt2block("generate", *given, *adapters).error.startswith("--adapter: expected one ada")
    twice = gpt2block("verify", receipts, *model, "--adapter", f"x={a}", "--adapter", f"x={b}")
    assert twice.error.startswith("--adapter: expected NAME=FOLDER with a name of its own")
    few = gpt2block("generate", *given, "--adapter", a, "--adapters-memory", 1e-5).error
    assert few.endswith("use fewer, or raise --adapters-memory")
