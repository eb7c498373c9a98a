"""Scores and checks of generated texts have the bits of generation, many tokens per step."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import GPT2, GPT2Config, Model
from gpt2block.cuda.formats import FILE, Formats
from gpt2block.engine.cuda.steps import InFlight
from gpt2block.engine.generation.known_texts import ReceiptCheck, check_receipts, score_generated
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.sequences import Generation
from gpt2block.engine.model import Sampled
from gpt2block.files.checkpoints import save_gguf
from gpt2block.files.parameters.arrays import random_model
from gpt2block.files.parameters.gpt2 import GPT2Weights
from tests.devices import GPU, ORDERS, edited, on_one_of_each, running_on, slow, with_source
from tests.engine.test_architectures_cuda import FORMATS, OWN
from tests.engine.test_architectures_cuda import made as of_architecture
from tests.engine.test_decoding import random_prompts
from tests.engine.test_several import config_of, one_and_several
from tests.generating import generate

SMALL = GPT2Config(n_layer=1, n_head=2, n_embd=32, n_ctx=96, vocab_size=7)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "stop_ids": [3]},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "max_new_tokens": 90},
    "changed": {
        "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1,
        "logit_bias": {3: 0.5}, "min_new_tokens": 5, "stop_ids": [2],
    },
}  # fmt: skip


def bits(logprobs: Any) -> NDArray[np.int32]:
    return np.array(logprobs, np.float32).view(np.int32)


def generated(model: Any, prompts: Any, **options: Any) -> list[Generation]:
    given = {"max_new_tokens": 40, "seed": 5, "stop_ids": (), "top_logprobs": 2, "receipt": True}
    found: list[Generation] = model.generate(prompts, **given | options)
    return found


def agrees(model: Any, prompts: Any, texts: list[Generation], **options: Any) -> None:
    """Assert that scores and checks of texts, together and alone, have the bits of generation."""
    together = model.score_generated(prompts, texts, top_logprobs=2, **options)
    alone = [model.score_generated(prompts[0], list(texts[0].tokens), top_logprobs=2, **options)]
    for scores in (together, alone):
        for score, text in zip(scores, texts, strict=False):
            assert score.ids.tolist() == list(text.tokens)
            np.testing.assert_array_equal(bits(score.logprobs), bits(text.logprobs))
            assert score.top_logprobs == text.top_logprobs
    receipts = [text.receipt for text in texts]
    assert model.verify(receipts) == [ReceiptCheck(0, "", len(each.tokens)) for each in texts]
    assert model.verify(receipts[0]).code == 0


@on_one_of_each
def test_a_known_text_has_the_bits_of_generation(where: str) -> None:
    with nullcontext() if where == "numpy" else running_on(where):
        model = GPT2(GPT2Weights.random(0, SMALL), "cpu" if where == "numpy" else "cuda")
        prompts, few = random_prompts([9, 20, 3], SMALL), where == ORDERS[-1].values[0]
        for name in ("sampled",) if few else OPTIONS:
            options = OPTIONS[name]
            more = {"max_new_tokens": 12} if few else {}
            texts = generated(model, prompts[: 2 if few else 3], **options | more)
            agrees(model, prompts[: len(texts)], texts)
            ids = np.array(texts[0].tokens)
            ids[4] = (ids[4] + 1) % 7  # another token, which sampling would not have drawn
            forced = bits(model.score_generated(prompts[0], ids).logprobs)
            same = forced == bits(texts[0].logprobs)
            assert same[:4].all()
            assert not same[4:].all(), name
            check = model.verify({**texts[0].receipt, "tokens": ids.tolist()})  # type: ignore[dict-item]
            assert check.code == 1
            assert check.problem.startswith(f"token 4: the receipt states {ids[4]} ")


@pytest.mark.parametrize("where", ["shuffled", GPU])
def test_a_step_computes_64_tokens(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, read = list[int](), InFlight.accepted

    def noted(result: InFlight) -> Sampled:
        found = read(result)
        counts.append(len(found.slots))
        return found

    with running_on(where):
        model = GPT2(GPT2Weights.random(0, SMALL), "cuda")
        prompts = random_prompts([9, 20, 3], SMALL)
        texts = generated(model, prompts, max_new_tokens=74, top_logprobs=0)
        monkeypatch.setattr(InFlight, "accepted", noted)
        model.score_generated(prompts[0], texts[0])
        assert counts == [1, 64, 9]  # the first token comes from the prompt
        counts.clear()
        model.verify([each.receipt for each in texts])
        assert counts == [3, 48, 48, 48, 48, *[27]]


def cases() -> list[Any]:
    """Return architectures and formats: some on the emulator, all on a GPU."""
    some = [slow("shuffled", "mistral", "float8_e5m2"), slow("shuffled", "qwen3_5", "bfloat16")]
    every = product(OWN, FORMATS)
    return some + [pytest.param("gpu", *case, marks=GPU.marks) for case in every]


@pytest.mark.parametrize(("where", "name", "dtype"), cases())
def test_known_texts_of_an_architecture(where: str, name: str, dtype: str) -> None:
    with running_on(where):
        model, few = of_architecture((name, dtype, False), "cuda"), where != "gpu"
        prompts = random_prompts([9, 22] if few else [9, 1, 38, 22, 5, 30, 16, 7, 8], model.config)
        for options in list(OPTIONS.values())[1 if few else 0 : 2 if few else 3]:
            new = {"max_new_tokens": 6} if few else {}
            agrees(model, prompts, generated(model, prompts, **options | new))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_known_texts_of_a_gguf_file(kind: str, tmp_path: Any) -> None:
    config = config_of("llama", 2, head_size=128, n_embd=256, n_ff=256)
    source: Model[Any] = Model.from_tensors(config, random_model(3, config), "cpu", "float32")
    path = save_gguf(tmp_path / "m.gguf", source, kind)
    model: Model[Any] = Model.from_pretrained(path, "cuda", FILE)
    prompts = random_prompts([9, 1, 22, 30], config)
    for options in OPTIONS.values():
        agrees(model, prompts, generated(model, prompts, **options | {"max_new_tokens": 30}))


@pytest.mark.parametrize(
    ("where", "count"),
    [slow("shuffled", 2), *(pytest.param("gpu", n, marks=GPU.marks) for n in (2, 4))],
)
def test_known_texts_on_several_gpus(where: str, count: int) -> None:
    """A receipt of one GPU is checked on several GPUs: their number changes no bit."""
    config = config_of("llama", 1)
    with one_and_several(where, config, Formats("float16"), count) as (one, several):
        given = {"max_new_tokens": 9, "seed": 5, "stop_ids": (), "receipt": True}
        prompts = random_prompts([9, 4], config)
        texts = generate(one, None, prompts, **given)
        found = dict(check_receipts(several, None, [each.receipt for each in texts]))
        assert found == dict.fromkeys(range(2), ReceiptCheck(0, "", 9))
        scores: Any = score_generated(several, None, prompts, texts, Options.of({}))
        for score, text in zip(scores, texts, strict=True):
            np.testing.assert_array_equal(bits(score.logprobs), bits(text.logprobs))


@on_one_of_each
@pytest.mark.parametrize("rule", ["schema", "choice", "stop"])
def test_a_text_with_a_rule(where: str, rule: str) -> None:
    pytest.importorskip("llguidance")
    from tests.engine.test_grammars import CONFIG, ENCODING, RULES  # noqa: PLC0415

    options = RULES.get(rule, {"stop": ["e", "\x07"], "temperature": 0.5})
    with nullcontext() if where == "numpy" else running_on(where):
        engine = GPT2(GPT2Weights.random(0, CONFIG), "cpu" if where == "numpy" else "cuda").engine
        prompts = [[1, 2, 3], [5] * 9]
        texts = generate(engine, ENCODING, prompts, receipt=True, seed=2, max_new_tokens=30,
                         **options)  # fmt: skip
        receipts: list[Any] = [each.receipt for each in texts]
        found = dict(check_receipts(engine, ENCODING, receipts))
        assert {n: (each.code, each.problem) for n, each in found.items()} == {
            0: (0, ""),
            1: (0, ""),
        }
        scores: Any = score_generated(engine, ENCODING, prompts, texts, Options.of({}))
        for score, text in zip(scores, texts, strict=True):
            np.testing.assert_array_equal(bits(score.logprobs), bits(text.logprobs))
        ids = [*receipts[0]["tokens"]]
        ids[-1] = (ids[-1] + 1) % 250
        changed = {**receipts[0], "tokens": ids}
        without = {**receipts[0], "tokenizer": "0" * 64}
        ((_, check), (_, other)) = sorted(check_receipts(engine, ENCODING, [changed, without]))
        assert check.code == 1
        assert check.problem.startswith(f"token {len(ids) - 1}: ")
        assert (other.code, other.problem[:10]) == (2, "tokenizer:")


@pytest.mark.parametrize("where", ["forward"])
def test_a_kernel_that_adds_otherwise_is_found_in_the_first_text(where: str) -> None:
    """One unit in the last place of a sum differs; the kernels' hash is that of the files."""
    with running_on(where, races=False):
        (prompt,) = random_prompts([9], SMALL)
        (text,) = generated(GPT2(GPT2Weights.random(0, SMALL), "cuda"), [prompt], max_new_tokens=4)
        file, sum_ = "tokens/sample.cu", "raw - online.max - logf(online.sum)"
        one_more = f"__int_as_float(__float_as_int({sum_}) + 1)"
        with with_source(file, edited(file, sum_, one_more)):
            check = GPT2(GPT2Weights.random(0, SMALL), "cuda").verify(text.receipt or {})
    assert (check.code, check.problem[:8]) == (1, "token 0:")
