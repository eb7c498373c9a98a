"""`gpt2block generate`, `score` and `info`: what they ask of a model, and memory.

What they print is in tests/golden/commands/generate.txt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt2block.apps.cli import generate as cli_generate
from gpt2block.apps.cli.info import _print_info
from gpt2block.apps.cli.model import ModelOptions, load_model
from gpt2block.cuda.formats import FormatOptions, Formats
from gpt2block.engine.model import weight_bytes
from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints import Checkpoint
from gpt2block.sampling import DEFAULT_TEMPERATURE
from tests.command_line import gpt2block
from tests.setups import Setup


def test_options_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, asked = Setup(monkeypatch, tmp_path).model()
    options = (
        "--model=m --revision=v1 --dtype=float16 --kv-dtype=float8_e5m2 "
        "--device=cpu --max-new-tokens=9 --temperature=0.7 --top-k=4 --top-p=0.9 --min-p=0.1 "
        "--repetition-penalty=1.5 --presence-penalty=0.5 --frequency-penalty=0.25 --seed=3 "
        "--min-new-tokens=2 --samples=2 --json"
    )
    ran = gpt2block("generate", "abc", *options.split())
    gpt2block("generate", "abc", "--max-new-tokens=1")
    formats = FormatOptions("float16", "float8_e5m2")
    assert asked == [ModelOptions("m", "v1", formats, "cpu"), ModelOptions()]
    decoding, default = engine.decodings
    assert default.sampling[0].temperature == DEFAULT_TEMPERATURE
    assert len(decoding.sampling) == 2
    for sample, chosen in enumerate(decoding.sampling):
        assert vars(chosen) == {
            "temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1,
            "repetition_penalty": 1.5, "seed": 3, "sample": sample, "logit_bias": (),
            "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_new_tokens": 2,
            "end_ids": chosen.end_ids,
        }  # fmt: skip
    assert [len(found["tokens"]) for found in ran.json["samples"]] == [9, 9]
    assert ran.json["seed"] == 3


def test_a_tokenizer_is_looked_up_before_the_weights_are_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "tensors", lambda self: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=r"expected tokenizer.json .*; --ids"):
        load_model(ModelOptions(str(data / "gpt-nano-sort"), device="cpu"), "--ids")
    with pytest.raises(CheckpointError, match="no tokenizer"):  # though none is needed
        load_model(ModelOptions(device="cpu", tokenizer=tmp_path), None)


def test_tensor_names_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = Checkpoint.open("shakespeare")
    facts: dict[str, Any] = {
        "parameters": 1, "dtypes": ["float16"], "nbytes": 1, "memory": {}, "generation_config": {},
        "end_tokens": [], "default_dtype": "float32",
        "tensors": [{"name": "wte", "in_file": "w\x1b[2J", "shape": [1], "dtype": "float16"}],
    }  # fmt: skip
    _print_info(checkpoint, facts)
    out = capsys.readouterr().out
    assert "w\\x1b[2J" in out
    assert "\x1b" not in out


def test_memory_of_each_dtype() -> None:
    checkpoint = Checkpoint.open("shakespeare")
    matrices = 6 * 12 * 256 * 256 + 256 * 256
    rest = 4 * (4_870_144 - matrices)
    assert weight_bytes(checkpoint.config, Formats("bfloat16")) == 2 * matrices + rest
    assert weight_bytes(checkpoint.config, Formats("float8_e5m2")) == matrices + rest
    scales = 4 * (6 * (768 + 256 + 1024 + 256) + 256)
    assert weight_bytes(checkpoint.config, Formats("float8_e4m3fn")) == matrices + rest + scales
    more_tokens = replace(checkpoint.config, vocab_size=300)  # more than channels
    added = 44 * (256 + 4)  # rows of wte, and their scales
    assert weight_bytes(more_tokens, Formats("float8_e4m3fn")) == matrices + rest + scales + added


def test_the_rate_counts_what_came_after_the_first_step() -> None:
    clock = cli_generate.Stopwatch(begun=10.0, at_first=2, times=[12.0, 12.0, *[16.0] * 6])
    assert (clock.to_first, clock.rate) == (2.0, 1.5)
    nothing = cli_generate.Stopwatch(begun=10.0, at_first=2)
    assert (nothing.to_first, nothing.rate) == (None, None)
