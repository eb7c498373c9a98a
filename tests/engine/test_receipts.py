"""Receipts: what they state, that every change is found, and that damaged ones are refused."""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from gpt2block import GPT2, CheckpointError, GPT2Config, from_pretrained
from gpt2block.bulk.predictor import Predictor
from gpt2block.cuda import doctor
from gpt2block.engine import receipts as module
from gpt2block.engine.chat.conversation import Conversation
from gpt2block.engine.generation.known_texts import ReceiptCheck, check_receipts
from gpt2block.engine.receipts import found_in, identity
from gpt2block.files.parameters.gpt2 import GPT2Weights
from tests.command_line import gpt2block
from tests.markov import LINES
from tests.serving import BYTES, model_of, post, serving, small

SMALL = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_ctx=48, vocab_size=11)
GIVEN: dict[str, Any] = {"max_new_tokens": 8, "stop_ids": (3,), "receipt": True}
HASHES = "weights", "code"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "receipt.schema.json").read_text())
VARIED: dict[str, tuple[Any, ...]] = {  # option: other values
    "seed": tuple(range(1, 21)),
    "temperature": (0.0, 0.01, 0.7, 1.2),
    "top_k": (1, 3, 9, 10, 50),
    "top_p": (0.2, 0.97),
    "min_p": (0.05, 0.9),
    "repetition_penalty": (1.4, 1.0001),
    "frequency_penalty": (0.5, 1e-7),
    "presence_penalty": (0.5, 1e-7),
    "logit_bias": ([[4, 3.0]], [[5, -1.0]], [[10, 1e-7]]),
    "min_new_tokens": (1, 8),
    "max_new_tokens": (4, 9, 20),
    "stop_ids": ([], [4], [3, 4], [3, 10]),
}
NOT_OF_GENERATE = "sample", "rule", "stop", "unwritten"


@pytest.fixture(scope="module")
def model() -> GPT2:
    return GPT2(GPT2Weights.random(0, SMALL), device="cpu")


@pytest.fixture(scope="module")
def receipts(model: GPT2) -> list[Any]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(11, size=rng.integers(1, 9)).tolist() for _ in range(40)]
    return [each.receipt for each in model.generate(prompts, seed=0, temperature=1.0, **GIVEN)]


def changed(receipt: dict[str, Any], name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return a receipt of which one id or digit, or one bit of a log-probability, differs."""
    value = receipt[name]
    if name == "logprobs":
        data = bytearray(base64.b64decode(value))
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        return {**receipt, name: base64.b64encode(data).decode()}
    at = int(rng.integers(len(value)))
    if name in HASHES:
        digit = "0" if value[at] != "0" else "1"
        return {**receipt, name: value[:at] + digit + value[at + 1 :]}
    other = (value[at] + int(rng.integers(1, 11))) % 11
    return {**receipt, name: [*value[:at], other, *value[at + 1 :]]}


def test_one_change_is_found_200_times(model: GPT2, receipts: list[Any]) -> None:
    rng = np.random.default_rng(1)
    assert {each.code for each in model.verify(receipts)} == {0}
    names = ("tokens", "prompt", "logprobs", *HASHES)
    damaged = [changed(each, name, rng) for each in receipts for name in names]
    codes = [each.code for each in model.verify(damaged)]
    assert codes == [1, 1, 1, 2, 2] * len(receipts)


@pytest.mark.parametrize("name", VARIED)
def test_a_changed_option_is_found_if_the_text_differs(
    name: str, model: GPT2, receipts: list[Any]
) -> None:
    values, usual = VARIED[name], dict(receipts[0]["options"])
    other = [usual | {name: values[n % len(values)]} for n in range(20)]
    given = [{**each, "options": own} for each, own in zip(receipts, other, strict=False)]
    for stated, check in zip(given, model.verify(given), strict=True):
        options = {k: v for k, v in stated["options"].items() if k not in NOT_OF_GENERATE}
        text = model.generate(stated["prompt"], **options)
        same = [*text.tokens], text.finish_reason
        assert (check.code == 0) == (same == (stated["tokens"], stated["finish_reason"]))
        assert check.code < 2


def nothing(receipt: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield receipts that cannot be compared, with the beginning of the reason."""
    options = receipt["options"]
    for name in receipt:
        rest = {key: value for key, value in receipt.items() if key != name}
        yield rest, f"{name}: expected"
        yield {**receipt, name: 1.5}, name
    for name, value in {"prompt": [[1], [2]], "gpus": "x", "model": True, "seed": 9}.items():
        yield {**receipt, name: value}, ""
    for name in options:
        rest = {key: value for key, value in options.items() if key != name}
        yield {**receipt, "options": rest}, f"{name}: expected, but missing"
        yield {**receipt, "options": {**options, name: {}}}, ""
    for name, value in {"top_a": 1, "temperature": -1, "top_p": 2.0, "top_k": 0.5, "seed": 2**64,
                        "stop_ids": [99], "stop": [1], "logit_bias": [[1]], "max_new_tokens": 0,
                        "logit_bias ": [[99, 1.0]], "unwritten": [11]}.items():  # fmt: skip
        yield {**receipt, "options": {**options, name.strip(): value}}, ""
    wrong = {**receipt, "options": {**options, "rule": "start"}, "tokenizer": None}
    yield {**wrong, "llguidance": importlib.metadata.version("llguidance")}, ""
    for name, value in {"prompt": [], "tokens": [1, -1], "dtype": "float16", "device": "sm_90",
                        "logprobs": "AAAA", "threads": "none", "gpt2block_receipt": 2,
                        "finish_reason": "zzz"
                        }.items():  # fmt: skip
        yield {**receipt, name: value}, f"{name}: "
    yield {**receipt, "more": 1}, "'more': this version has no such field"
    yield json.dumps(receipt)[: len(json.dumps(receipt)) // 2], "expected the JSON of a receipt"
    yield [], "expected a receipt, got []"


def test_a_receipt_that_cannot_be_compared(model: GPT2, receipts: list[Any]) -> None:
    for given, reason in nothing(receipts[0]):
        (check,) = model.verify([given])
        assert check.code == 2, given
        assert check.problem.startswith(reason), check.problem
        assert "\n" not in check.problem


def test_equal_bits_of_nan_are_equal(model: GPT2, receipts: list[Any]) -> None:
    """No text has NaN, but a receipt may state it: then the number differs."""
    numbers = np.full(len(receipts[0]["tokens"]), np.nan, "<f4")
    stated = {**receipts[0], "logprobs": base64.b64encode(numbers.tobytes()).decode()}
    check = model.verify(stated)
    assert (check.code, check.nan) == (1, True)
    assert check.problem.startswith("token 0: ")
    assert "nan (0x7fc00000)" in check.problem


def test_the_fields_are_those_of_the_schema() -> None:
    rule = pytest.importorskip("llguidance") and {"choice": ["To be", "Not to be"]}
    bundled = from_pretrained("shakespeare", "cpu")
    for options in ({"stop": ["e", "."], "min_new_tokens": 2, "logit_bias": {5: 1}}, rule):
        given: dict[str, Any] = {"seed": 2**64 - 1, "samples": 2, "receipt": True, **options}
        for text in bundled.generate("JULIET:", max_new_tokens=12, **given):
            receipt = json.loads(json.dumps(text.receipt))
            jsonschema.validate(receipt, SCHEMA)
            assert bundled.verify(receipt) == ReceiptCheck(0, "", len(text.tokens))
            own = {**receipt, "prompt": [], "tokens": [], "logprobs": ""}
            own["options"] |= {"rule": None, "logit_bias": [], "stop": []}
            gpu = {"nvrtc": "13.0", "kernels": "0" * 64, "blas": None, "threads": None}
            assert len(json.dumps(own | gpu, separators=(",", ":"))) <= 1024


def test_weights_that_have_changed_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of files is computed once; files that changed after loading are refused."""
    monkeypatch.setattr(module, "_hashes", {})
    source = from_pretrained("shakespeare", "cpu")
    model = from_pretrained(source.save_pretrained(tmp_path / "m"), "cpu")
    stated = identity(model.engine)
    assert stated["weights"] != identity(source.engine)["weights"]  # another config
    assert identity(model.engine) is stated
    again = from_pretrained(tmp_path / "m", "cpu")
    assert identity(again.engine)["weights"] == stated["weights"]
    assert len(module._hashes) == len({*module._hashes.values()})
    later = from_pretrained(tmp_path / "m", "cpu")
    file = tmp_path / "m" / "model.safetensors"

    def replaced(tensors: Iterable[Any]) -> Iterator[Any]:
        """Replace the file, by one of the same size and time, before its tensors are read."""
        time, other = file.stat().st_mtime_ns, file.with_name("other")
        other.write_bytes(file.read_bytes())
        os.utime(other, ns=(time, time))
        other.replace(file)
        yield from tensors

    with pytest.raises(CheckpointError, match="a file has changed since it was opened"):
        from_pretrained(tmp_path / "m", "cpu", progress=replaced)
    with pytest.raises(CheckpointError, match="a file has changed since it was opened"):
        later.generate("a", max_new_tokens=1, receipt=True)


def test_a_source_tree_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    (text,) = GPT2(GPT2Weights.random(0, SMALL), "cpu").generate([[1]], seed=1, **GIVEN)
    assert text.receipt is not None
    assert text.receipt["gpt2block"] == doctor.version()


VERIFY = ("verify", "--device", "cpu")


@pytest.mark.parametrize(
    ("formats", "problem"),
    [
        ({"kv_dtype": "x"}, ", receipt 1: kv_dtype: expected float8_e5m2"),
        ({"dtype": "file", "kv_dtype": "float16"}, "receipt 1: dtype 'file': expected a"),
    ],
)
def test_formats_that_the_model_does_not_have(
    formats: dict[str, str], problem: str, tmp_path: Path
) -> None:
    model, file = from_pretrained("shakespeare", "cpu"), tmp_path / "r.jsonl"
    receipt = dict(model.generate("a", max_new_tokens=1, receipt=True).receipt or {})
    file.write_text(json.dumps(receipt | formats))
    assert problem in gpt2block(*VERIFY, file).error


def test_parts_of_files_without_receipts(tmp_path: Path) -> None:
    """The other receipts are checked, with as many threads as the first one states."""
    module.use_threads("2")
    model = from_pretrained("shakespeare", "cpu")
    receipt = dict(model.generate("JULIET:", max_new_tokens=5, receipt=True).receipt or {})
    file = tmp_path / "r.jsonl"
    begun = [{"id": "a", "choices": [{"index": n, "finish_reason": None}]} for n in (0, 1)]
    end = {"id": "a", "choices": [{"index": 0, "finish_reason": "length", "receipt": receipt}]}
    whole = json.dumps([{"choices": [*end["choices"], {"index": 1, "finish_reason": "stop"}]}])
    events = "".join(f"data: {json.dumps(each)}\n\n" for each in (*begun, end))
    for text, out, problem in (
        (whole, "1 of 2", ", receipt 2: choice 1 has no receipt"),
        (f": ping\n\n{events}data: [DONE]", "1 of 2", ": choice 1 has no receipt"),
        (json.dumps(receipt) + "\nx" * 9_999, "1 of 101", "the 9,899 lines after line 101 are"),
    ):
        module.use_threads("1")
        file.write_text(text)
        done = gpt2block(*VERIFY, file)
        assert (done.code, done.out[: len(out)]) == (2, out)
        assert problem in done.err
    module.use_threads("1")


def test_receipts_of_a_conversation() -> None:
    """The whole prompt is computed by the kernels of prompts, not only the new message."""
    model, talk = small(), Conversation(small().engine, BYTES, LINES)
    for text in ("ab", "cd"):
        for _ in talk.stream(text, max_new_tokens=7, temperature=1.0, seed=1, receipt=True):
            pass
        assert talk.answer is not None
        assert talk.answer.reused == 0
        assert model.verify(talk.answer.result().receipt or {}).code == 0


@pytest.mark.parametrize("samples", [1, 2])
def test_receipts_of_map(samples: int) -> None:
    texts = ["JULIET:", "ROMEO:", "To be"]
    options: dict[str, Any] = {"samples": samples, "receipts": True, "max_new_tokens": 9}
    predictor = Predictor("generate", device="cpu", stop=["e"], **options)
    column = predictor({"text": texts})["receipt"].tolist()
    found = [*found_in([{"receipt": each} for each in column])]
    assert len(found) == 3 * samples
    assert {each.code for each in predictor.model.verify(found)} == {0}
    assert len({each["options"]["seed"] for each in found}) == 3  # one per record


KEYS = {name: f"{name}-0123456789abcdef" for name in ("anna", "bob")}


@pytest.mark.parametrize("reuse", [False, True])
def test_receipts_of_a_server(reuse: bool) -> None:
    """Each client's answers, whole and streamed, have receipts of their own prompts."""
    served = model_of(small().engine)
    given: dict[str, Any] = {"rows": 1, "reuse_prefixes": reuse, "keys": KEYS}
    with serving(served, **given) as running, ThreadPoolExecutor(4) as clients:

        def receipts_of(name: str, path: str, stream: bool) -> list[Any]:
            body = {"stop": ["q"], "temperature": 1.5, "seed": 3, "max_tokens": 9, "n": 2,
                    "receipt": True, "stream": stream, "prompt": name}  # fmt: skip
            if path != "completions":
                del body["prompt"]
                body["messages"] = [{"role": "user", "content": name}]
            if path == "messages":
                body = {**body, "model": "small", "temperature": 1, "stop_sequences": body["stop"]}
                del body["stop"], body["n"]
            headers = {"Authorization": f"Bearer {KEYS[name]}"}
            status, answer = post(running, f"/v1/{path}", body, **headers)
            assert status == 200
            events = re.findall("^data: ({.*)", answer, re.MULTILINE) if stream else []
            return [*found_in([*map(json.loads, events)] or answer)]

        asked = [*product(KEYS, ("completions", "chat/completions", "messages"), (False, True))]
        found = [*clients.map(lambda each: receipts_of(*each), asked)]
    for (name, path, _), receipts in zip(asked, found, strict=True):
        assert len(receipts) == (1 if path == "messages" else 2)
        for each in receipts:
            assert name in bytes(each["prompt"]).decode()
            assert each["model"] == "small"
    checks = dict(check_receipts(small().engine, BYTES, [*chain(*found)]))
    assert {each.code for each in checks.values()} == {0}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rows": 1, "no_receipts": True}, "receipt: this server was started without receipts"),
        ({"rows": 2}, "receipt: expected a model on a GPU, or a server with --rows 1"),
    ],
)
def test_a_server_without_receipts(settings: Any, problem: str) -> None:
    with serving(model_of(small().engine), **settings) as running:
        body = {"prompt": "a", "max_tokens": 1, "receipt": True}
        status, answer = post(running, "/v1/completions", body)
        assert (status, answer["error"]["message"]) == (400, problem)
        assert post(running, "/v1/completions", {**body, "receipt": False})[0] == 200
