"""The block of Qwen3.5 that drafts tokens: its logits in float64, its files, and its texts."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from gpt2block import Checkpoint, Model, cuda, from_pretrained
from gpt2block.apps.cli.app import application
from gpt2block.engine.cuda.caches import MIN_STREAM_ROWS
from gpt2block.engine.cuda.draft import BlockDraft
from gpt2block.engine.model import Start
from gpt2block.engine.numpy.model import NumpyModel
from gpt2block.engine.speculation import SpeculationPolicy
from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints import gguf_saving, save_gguf, save_pretrained
from gpt2block.files.checkpoints.gguf import header_of
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.qwen3_5 import Qwen35Config
from gpt2block.models.config import HALVES
from gpt2block.sampling import Sampling
from tests.devices import GPU, running_on, slow
from tests.engine.test_architectures_cuda import DELTA_HEADS, SIZES

Array = NDArray[Any]
OWN: dict[str, Any] = {"delta_layers": (True, False), "rotary": 16, "mtp": True, **DELTA_HEADS}
CONFIG = Qwen35Config(**SIZES, **OWN)
LIMIT = 5e-6


def made(device: str) -> Model[Any]:
    """Return a model of random weights, matrices ten times as large as usual."""
    random = random_model(0, CONFIG)
    wide = ((name, a * np.float32(10 if layout else 1), layout) for name, a, layout in random)
    return Model.from_tensors(CONFIG, wide, device, "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("cpu").save_pretrained(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, Array]:
    """Return the tensors of the model by the names of its file."""
    return {n: a.astype(float) for n, a in load_file(folder / "model.safetensors").items()}


def block(w: dict[str, Array], ids: Any, stream: Array) -> tuple[Array, Array]:
    """Return the block's output rows and logits in float64. ids: the token after each row."""
    T, D, R = len(ids), CONFIG.head_size, CONFIG.rotary
    angle = np.arange(T)[:, None, None] * CONFIG.theta ** (-np.arange(0, R, 2) / R)

    def norm(x: Array, name: str) -> Array:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.eps)
        return np.asarray(x / size * (1 + w[f"mtp.{name}.weight"]))

    def product(x: Array, name: str) -> Array:
        return np.asarray(x @ w[f"mtp.layers.0.{name}.weight"].T)

    def rotated(x: Array, name: str) -> Array:
        x = norm(x, f"layers.0.self_attn.{name}_norm")
        a, b, rest = np.split(x, [R // 2, R], -1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    e = norm(w["model.embed_tokens.weight"][ids], "pre_fc_norm_embedding")
    x = np.concatenate([e, norm(stream, "pre_fc_norm_hidden")], -1) @ w["mtp.fc.weight"].T
    y = norm(x, "layers.0.input_layernorm")
    q, gate = np.split(product(y, "self_attn.q_proj").reshape(T, -1, 2 * D), 2, -1)
    k, v = (product(y, f"self_attn.{n}_proj").reshape(T, -1, D) for n in "kv")
    scores = np.einsum("thd,skd->hts", rotated(q, "q"), rotated(k, "k")) / np.sqrt(D)
    p = np.exp(scores) * np.tri(T)
    y = np.einsum("hts,skd->thd", p / p.sum(-1, keepdims=True), v) / (1 + np.exp(-gate))
    x = x + product(y.reshape(T, -1), "self_attn.o_proj")
    y = norm(x, "layers.0.post_attention_layernorm")
    g = product(y, "mlp.gate_proj")
    x = x + product(g / (1 + np.exp(-g)) * product(y, "mlp.up_proj"), "mlp.down_proj")
    return x, norm(x, "norm") @ w["lm_head.weight"].T


def assert_close(logits: Array, exact: Array) -> None:
    assert np.abs(logits - exact).max() <= LIMIT * np.abs(exact).max()


def test_logits_in_numpy(weights: dict[str, Array]) -> None:
    engine, rng = made("cpu").engine, np.random.default_rng(0)
    assert CONFIG.draft_config is not None
    tensors: Any = {n: each for n, *each in engine.tensors()}
    (joined, layout), head = tensors["mtp.w_eh"], [(n, *tensors[n]) for n in ("wte", "lm_head")]
    halves = zip(HALVES, np.split(joined, 2, layout.index("K")), strict=True)
    given = [(n[4:], *each) for n, each in tensors.items() if n.startswith("mtp.")]
    given += [*head, *((n, half, layout) for n, half in halves)]
    own = NumpyModel(CONFIG.draft_config, given, engine.formats)
    ids = rng.integers(53, size=30).astype(np.int32)
    stream = rng.standard_normal((30, CONFIG.n_embd), np.float32)
    do = own.executor({**own._tensors([ids], own.new_cache(1, 30)), "stream": stream})
    assert_close(own._run(do, "logits", 30), block(weights, ids, stream)[1])


@pytest.mark.parametrize("where", ["shuffled", slow("hopper"), GPU])
def test_logits_of_draft_tokens(
    where: str, weights: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft token has the logits of the block over the text and the draft tokens before it.

    Every second step verifies the tokens of the text itself, so that it takes several rows.
    """
    follow, propose = BlockDraft.follow, BlockDraft.propose
    found: list[tuple[int, list[int], Array]] = []
    rows = cycle((1, 4, 1, 8, 4))
    monkeypatch.setattr(SpeculationPolicy, "together", lambda *_: next(rows))

    def followed(self: Any, step: Any, slots: Any, steps: Any) -> None:
        follow(self, step, slots, steps)
        found.append((int(steps.state.position[0]), [], self._steps.logits[0].get()))

    def proposed(self: Any, slots: Any, count: int, steps: Any, stream: Any) -> None:
        propose(self, slots, count, steps, stream)
        at, draft = int(steps.state.position[0]), steps.drafts.draft[0]
        found.append((at, draft[: count - 1].tolist(), self._steps.logits[0].get()))
        if len(found) % 4 == 2 and len(text) > at + 1:
            right = np.array(text[at + 1 : at + 1 + len(draft)], np.int32)
            draft[: len(right)].set(right)

    with running_on(where):
        model = made("cuda")
        prompt = np.random.default_rng(1).integers(53, size=9).tolist()
        options: Any = {"max_new_tokens": 9, "temperature": 0, "stop_ids": (), "seed": 1}
        alone = model.generate(prompt, **options)
        text = prompt + list(alone.tokens)
        monkeypatch.setattr(BlockDraft, "follow", followed)
        monkeypatch.setattr(BlockDraft, "propose", proposed)
        assert model.generate(prompt, speculate=True, **options) == alone
        (states,) = model.engine.forward([np.array(text, np.int32)], "states")
    stream = states[-2].astype(float)
    assert {len(draft) for _, draft, _ in found} == {0, 2, 6}
    for at, draft, logits in found:
        ids, rows_before = text[1 : at + 1], stream[:at]
        for token in draft:
            output, _ = block(weights, ids, rows_before)
            ids, rows_before = [*ids, token], np.concatenate([rows_before, output[-1:]])
        assert_close(logits, block(weights, ids, rows_before)[1][-1])


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
def test_files(folder: Path, weights: dict[str, Array], tmp_path: Path) -> None:
    """GGUF files have the block after the layers; `transformers` writes files without it."""
    whole = Checkpoint.open(folder)
    assert whole.config == CONFIG
    file = save_gguf(tmp_path / "a.gguf", whole, "f32")
    header = header_of(file)
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    for name, of in {**names, "shared_head_norm": "norm"}.items():
        own = np.float32(weights[f"mtp.{of}.weight"]) + np.float32("norm" in name)
        np.testing.assert_array_equal(header.tensors[f"blk.2.nextn.{name}.weight"].read(), own)
    counts = [header.metadata[f"qwen35.{key}"] for key in ("block_count", "nextn_predict_layers")]
    assert counts == [3, 1]
    saved = save_pretrained(tmp_path / "back", Checkpoint.open(file))
    for name, array in load_file(saved / "model.safetensors").items():
        if name.startswith("mtp."):
            np.testing.assert_allclose(array, weights[name], rtol=0, atol=1e-6)
    ran = CliRunner().invoke(application(), ["info", str(saved)])
    assert "a block of 65,984 parameters, 263.9 kB; with speculate, keys" in ran.output
    config = json.loads((folder / "config.json").read_text())
    every = {n: np.float32(a) for n, a in weights.items()}
    multimodal = {n.replace("model.", "model.language_model.", 1): a for n, a in every.items()}
    without = {n: a for n, a in every.items() if not n.startswith("mtp.")}
    for content, stored, found in (
        ({"model_type": "qwen3_5", "text_config": config}, multimodal, True),
        (config, without, False),
        (config | {"mtp_use_dedicated_embeddings": True}, every, False),
        (config, every | {"mtp.embed_tokens.weight": every["lm_head.weight"]}, False),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        save_file(stored, tmp_path / "model.safetensors")
        assert (Checkpoint.open(tmp_path).config.draft_config == CONFIG.draft_config) == found


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize(
    ("layers", "block_type", "products"), [("Q8_0", "F16", "fp8"), ("F16", "Q8_0", "float32")]
)
def test_float16_among_blocks(
    layers: str, block_type: str, products: str, folder: Path, tmp_path: Path
) -> None:
    """Activations that only divided weights keep in range read no float16 matrices."""
    source = Checkpoint.open(folder)
    tensors = dict(gguf_saving.tensors_of(source))
    tensors |= {name: 200 * array for name, array in tensors.items() if "ffn_up" in name}

    def kind(name: str) -> str:
        if tensors[name].ndim == 1 or "conv1d" in name or "eh_proj" in name:
            return "F32"
        return block_type if name.startswith("blk.2.") else layers

    kinds = {name: (kind(name), array.shape) for name, array in tensors.items()}
    data = (gguf_saving.encoded(n, a, kinds[n][0]) for n, a in tensors.items())
    gguf_saving.write(tmp_path / "a.gguf", gguf_saving.metadata_of(CONFIG), kinds, data)
    with running_on("shuffled"):
        engine: Any = from_pretrained(tmp_path / "a.gguf", device="cuda").engine
        assert engine.products == products


@pytest.mark.parametrize(("slots", "in_flight"), [slow(16, 0), (17, 1)])
def test_steps_in_flight(slots: int, in_flight: int) -> None:
    """The next step waits for a result only if its rows depend on right draft tokens."""
    ids = np.ones(1, np.int32)
    with running_on("shuffled", races=False):
        decoding: Any = made("cuda").engine.decode(slots, 40, speculate=True)
        decoding.start([Start(slot, ids, Sampling(seed=1), 8) for slot in range(slots)])
        assert len(decoding.next().slots) == slots
        assert len(decoding._in_flight) == in_flight


@pytest.mark.parametrize("fewer", [False, True])
def test_memory_of_ended_decodings(fewer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed if the memory for the block's rows is missing."""
    with running_on("forward"):
        engine: Any = made("cuda").engine
        engine.decode(2, 40)
        zeros, ended = cuda.cupy.zeros, engine._caches._ended
        assert ended

        def allocate(shape: Any, dtype: Any = "float64") -> Any:
            if ended and shape == (MIN_STREAM_ROWS, CONFIG.n_embd):
                raise cuda.cupy.cuda.memory.OutOfMemoryError(1, 0)
            return zeros(shape, dtype)

        monkeypatch.setattr(cuda.cupy, "zeros", allocate)
        decoding = engine.decode(2, 40, fewer, speculate=True)
        assert not ended
        cache = decoding._cache
        assert len(cache.stream_rows) == len(cache.drafting.stream_rows) == MIN_STREAM_ROWS


NEXT = "qwen35.nextn_predict_layers"


@pytest.mark.filterwarnings("ignore:.*has no tokenizer")
@pytest.mark.parametrize("own", ["embed_tokens", "shared_head_head"])
def test_own_embeddings_in_gguf(own: str, folder: Path, tmp_path: Path) -> None:
    source = Checkpoint.open(folder)
    tensors = dict(gguf_saving.tensors_of(source))
    tensors[f"blk.2.nextn.{own}.weight"] = tensors["token_embd.weight"]
    kinds = {name: ("F32", array.shape) for name, array in tensors.items()}
    metadata = gguf_saving.metadata_of(CONFIG)
    gguf_saving.write(tmp_path / "a.gguf", metadata, kinds, tensors.values())
    assert Checkpoint.open(tmp_path / "a.gguf").config.draft_config is None
    gguf_saving.write(tmp_path / "b.gguf", metadata | {NEXT: (1,)}, kinds, tensors.values())
    with pytest.raises(CheckpointError, match=f"{NEXT}: expected a number of blocks, got array"):
        Checkpoint.open(tmp_path / "b.gguf")
