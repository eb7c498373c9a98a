"""`save_pretrained`: gpt2block and `transformers` read its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from gpt2block import GPT2, CheckpointError, GPT2Config, GPT2Weights, InputError, reference
from gpt2block.files import writing as files
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.models.config import SIZES
from tests.refusals import assert_same_tensors
from tests.tokenizer_files import PAIRS, pair

SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=48, n_ctx=11, vocab_size=5, eps=2e-5)
WORDS = GPT2Config(n_layer=1, n_head=1, n_embd=4, n_ctx=8, vocab_size=257)
UNTIED = replace(SMALL, tie_word_embeddings=False)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@dataclass
class Tensors:
    """A TensorSource with SMALL's config and given tensors."""

    given: Iterable[tuple[str, Any, str | None]]
    config: GPT2Config = SMALL

    def tensors(self) -> Iterable[tuple[str, NDArray[Any], str | None]]:
        return self.given


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_a_saved_model_is_read_again(tmp_path: Path, config: GPT2Config, dtype: str | None) -> None:
    weights = GPT2Weights.random(1, config)
    folder = save_pretrained(tmp_path / "some" / "where", weights, dtype)
    assert folder == tmp_path / "some" / "where"
    assert names_in(folder) == ["config.json", "model.safetensors"]
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config == config
    assert_same_tensors(checkpoint, weights, DTYPES[dtype or "float32"])
    with safe_open(checkpoint.file, "np") as reader:
        assert reader.metadata() == {"format": "pt"}
        names = reader.keys()
    assert len(names) == len(list(weights.tensors()))
    assert ("lm_head.weight" in names) == (config == UNTIED)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["torch_dtype"] == (dtype or "float32")


@pytest.fixture
def with_pair(tmp_path: Path) -> Path:
    """Save a model with a vocabulary of 257 tokens and its pair of tokenizer files."""
    folder = save_pretrained(tmp_path / "with_pair", GPT2Weights.random(1, WORDS))
    pair(folder, ["a b"])
    return folder


def test_a_checkpoint_with_its_tokenizer(tmp_path: Path) -> None:
    bundled = Checkpoint.open("shakespeare")
    again = Checkpoint.open(save_pretrained(tmp_path / "again", bundled))
    assert again.config == bundled.config
    assert_same_tensors(again, bundled)
    tokenizer = (bundled.directory / "tokenizer.json").read_bytes()
    assert (again.directory / "tokenizer.json").read_bytes() == tokenizer
    (tmp_path / "mine.json").write_text("{}")
    save_pretrained(tmp_path / "other", bundled, "float32", tokenizer=tmp_path / "mine.json")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("names", PAIRS)
def test_a_pair_of_tokenizer_files_is_copied(tmp_path: Path, names: tuple[str, str]) -> None:
    """A Checkpoint and a model copy the pair; OpenAI's also gets the names of `transformers`."""
    folder = save_pretrained(tmp_path / "first", GPT2Weights.random(1, WORDS))
    texts = [path.read_text(encoding="utf-8") for path in pair(folder, ["a b"], names)]
    (folder / "tokenizer_config.json").write_text("{}")
    by_model = GPT2.from_pretrained(folder, device="cpu").save_pretrained(tmp_path / "model")
    by_checkpoint = save_pretrained(tmp_path / "checkpoint", Checkpoint.open(folder))
    for saved in (by_model, by_checkpoint):
        assert (saved / "tokenizer_config.json").read_text() == "{}"
        for new in {names, PAIRS[1]}:
            for name, text in zip(new, texts, strict=True):
                assert (saved / name).read_text(encoding="utf-8") == text
        model = GPT2.from_pretrained(saved, device="cpu")
        assert model.tokenizer.encode_ordinary("abc") == [256, 99]
        assert len(model.generate("abc", max_new_tokens=1).tokens) == 1


def test_transformers_reads_the_tokenizer(tmp_path: Path, data: Path) -> None:
    """Both libraries read GPT-2's vocabulary, given as OpenAI's files, in the same way."""
    transformers = pytest.importorskip("transformers")
    config = replace(SMALL, n_layer=1, n_head=1, n_embd=4, vocab_size=50257)
    folder = save_pretrained(
        tmp_path / "gpt2", GPT2Weights.random(1, config), tokenizer=data / "gpt2-bpe"
    )
    assert names_in(folder) == [
        "config.json", "encoder.json", "merges.txt", "model.safetensors", "vocab.bpe", "vocab.json",
    ]  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = GPT2.from_pretrained(folder, device="cpu").tokenizer
    text = "Hello, world! It's naïve   so"
    assert theirs(text)["input_ids"] == ours.encode_ordinary(text)
    assert transformers.AutoConfig.from_pretrained(folder).vocab_size == 50257


def test_tokenizers_given_by_path(tmp_path: Path, with_pair: Path) -> None:
    weights = GPT2Weights.random(2, WORDS)
    sources: list[Any] = [with_pair, with_pair / "merges.txt", Checkpoint.open(with_pair)]
    for number, source in enumerate(sources):
        saved = save_pretrained(tmp_path / str(number), weights, tokenizer=source)
        assert {"vocab.json", "merges.txt"} < set(names_in(saved))
    (with_pair / "merges.txt").unlink()
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    for source, message in (
        (with_pair, "expected tokenizer.json, or vocab.json with merges.txt in this folder"),
        (with_pair / "vocab.json", "merges.txt: no such file: expected a tokenizer"),
        (tmp_path / "none.json", "none.json: no such file: expected a tokenizer"),
        ("x" * 300, "cannot be read: File name too long"),
        (tmp_path, "a link to a file that does not exist"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_pretrained(tmp_path / "new", weights, tokenizer=source)
    assert not (tmp_path / "new").exists()


def test_overwriting_removes_all_files_of_the_old_model(tmp_path: Path, with_pair: Path) -> None:
    folder = tmp_path / "folder"
    save_pretrained(folder, Checkpoint.open("shakespeare"))
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    pickles = ["pytorch_model-00001-of-00001.bin"]
    for index, names in (("model.safetensors", shards), ("pytorch_model.bin", pickles)):
        for name in (index, *names):
            (folder / name).write_text("old")
        weight_map = {"weight_map": {name: name for name in (*names, "missing")}}
        (folder / f"{index}.index.json").write_text(json.dumps(weight_map))
    (folder / "vocab.txt").write_text("old")
    (folder / "notes.txt").write_text("mine")
    (folder / "model-00001-of-00009.safetensors").write_text("in no index")
    save_pretrained(folder, Checkpoint.open(with_pair), overwrite=True)
    assert names_in(folder) == [
        "config.json", "merges.txt", "model-00001-of-00009.safetensors", "model.safetensors",
        "notes.txt", "vocab.json",
    ]  # fmt: skip
    assert GPT2.from_pretrained(folder, device="cpu").tokenizer.encode_ordinary("ab") == [256]
    save_pretrained(folder, GPT2Weights.random(1, SMALL), overwrite=True)
    assert not (folder / "vocab.json").exists()


def test_the_generation_config_is_copied_or_removed(tmp_path: Path, with_pair: Path) -> None:
    """The chat template is copied or removed too, as it belongs to the tokenizer."""
    others = {"generation_config.json": '{"eos_token_id": [3, 4]}', "chat_template.jinja": "{{x}}"}
    for name, text in others.items():
        (with_pair / name).write_text(text)
    model = GPT2.from_pretrained(with_pair, device="cpu")
    for folder in (
        model.save_pretrained(tmp_path / "model"),
        save_pretrained(tmp_path / "checkpoint", Checkpoint.open(with_pair)),
    ):
        assert {name: (folder / name).read_text() for name in others} == others
        config = json.loads((folder / "config.json").read_text())
        assert config["eos_token_id"] == [3, 4]
        with pytest.raises(InputError, match=r"generation_config\.json"):
            save_pretrained(folder, GPT2Weights.random(1, SMALL))
        save_pretrained(folder, GPT2Weights.random(1, SMALL), overwrite=True)
        assert names_in(folder) == ["config.json", "model.safetensors"]


def test_files_that_an_index_lists_in_other_folders_are_kept(tmp_path: Path) -> None:
    folder = save_pretrained(tmp_path / "folder", GPT2Weights.random(1, SMALL))
    (tmp_path / "mine").write_text("")
    for content in ('{"weight_map": {"x": "../mine"}}', "{", '{"weight_map": {"x": ".."}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        save_pretrained(folder, GPT2Weights.random(1, SMALL), overwrite=True)
        assert names_in(folder) == ["config.json", "model.safetensors"]
    assert (tmp_path / "mine").exists()


def test_a_tokenizer_in_a_folder_without_a_model(tmp_path: Path, with_pair: Path) -> None:
    """Weights without a tokenizer leave it; another tokenizer replaces it with overwrite only."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json already there"):
        save_pretrained(folder, Checkpoint.open(with_pair))
    save_pretrained(folder, GPT2Weights.random(1, WORDS))
    assert (folder / "tokenizer.json").read_text() == "{}"
    save_pretrained(folder, Checkpoint.open(with_pair), overwrite=True)
    assert not (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("", "directory: expected a path, got ''"),
        ("~nosuchuser/x", "Could not determine home directory"),
        ("a\0b", "null character"),
        ("a\ud800b", r"got 'a\ud800b'"),
        (None, "directory: expected a path, got None"),
        (b"x", "directory: expected a path, got b'x'"),
    ],
)
def test_directories_that_are_not_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(message)):
        save_pretrained(directory, GPT2Weights.random(1, SMALL))
    if directory is not None:
        with pytest.raises(InputError, match="tokenizer: expected a path, got"):
            save_pretrained("new", GPT2Weights.random(1, SMALL), tokenizer=directory)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    weights = GPT2Weights.random(1, SMALL)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "model" / "config.json").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for folder, message in (
        ("x" * 300, "File name too long"),
        ("loop", "cannot be written"),
        ("loop/x", "cannot be written"),
        ("file", "cannot be written"),
        ("file/below", "cannot be written"),
        ("model", "expected files, found the folders config.json"),
    ):
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match=message):
                save_pretrained(tmp_path / folder, weights, overwrite=overwrite)
    assert names_in(tmp_path) == ["file", "loop", "model"]


def test_each_tensor_may_have_its_dtype_and_layout(tmp_path: Path) -> None:
    weights = GPT2Weights.random(1, SMALL)
    kinds = [np.float64, np.float16, ml_dtypes.bfloat16, np.float32]
    tensors = [
        (name, (array if layout != "KN" else array.T).astype(kinds[i % 4]), layout and "NK")
        for i, (name, array, layout) in enumerate(weights.tensors())
    ]
    checkpoint = Checkpoint.open(save_pretrained(tmp_path, Tensors(iter(tensors))))
    for i, (found, truth) in enumerate(zip(checkpoint.tensors(), weights.tensors(), strict=True)):
        assert found[0::2] == truth[0::2]
        assert found[1].dtype == (np.float32 if i % 4 == 0 else kinds[i % 4])
        expected = truth[1].astype(kinds[i % 4]).astype(found[1].dtype)
        np.testing.assert_array_equal(found[1], expected)


def test_replaced_files_keep_their_permissions_and_links_their_targets(tmp_path: Path) -> None:
    """The hub's cache has links to files that several models share."""
    weights = GPT2Weights.random(0, SMALL)
    folder = save_pretrained(tmp_path / "model", weights)
    (folder / "model.safetensors").chmod(0o600)
    shared = (folder / "config.json").rename(tmp_path / "shared.json")
    (folder / "config.json").symlink_to(shared)
    shared.write_text("shared")
    save_pretrained(folder, weights, overwrite=True)
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o600
    assert shared.read_text() == "shared"
    assert not (folder / "config.json").is_symlink()


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is being written is locked; without locks, nothing is removed."""
    weights, left = GPT2Weights.random(1, SMALL), tmp_path / ".saving-left"
    left.mkdir()
    with files.temporary_folder(tmp_path, "saving") as writing:
        save_pretrained(tmp_path, weights)
        assert names_in(tmp_path) == [writing.name, "config.json", "model.safetensors"]
    left.mkdir()
    with monkeypatch.context() as without:
        without.setattr(files, "fcntl", None)
        save_pretrained(tmp_path, weights, overwrite=True)
        assert left.exists()
    save_pretrained(tmp_path, weights, overwrite=True)
    assert names_in(tmp_path) == ["config.json", "model.safetensors"]


def test_a_model_is_replaced_with_overwrite_only(tmp_path: Path) -> None:
    first, second = (GPT2Weights.random(seed, SMALL) for seed in (1, 2))
    save_pretrained(tmp_path, first)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"config\.json, model\.safetensors already there"):
        save_pretrained(tmp_path, second)
    np.testing.assert_array_equal(GPT2Weights.from_pretrained(tmp_path).wte, first.wte)
    save_pretrained(tmp_path, second, overwrite=True)
    np.testing.assert_array_equal(GPT2Weights.from_pretrained(tmp_path).wte, second.wte)
    save_pretrained(tmp_path, Checkpoint.open(tmp_path), "float16", overwrite=True)  # in place
    found = GPT2Weights.from_pretrained(tmp_path).wte
    np.testing.assert_array_equal(found, second.wte.astype(np.float16))
    assert len(list(tmp_path.iterdir())) == 3


def changed(index: int, *items: Any) -> Tensors:
    """Return a model with the tensor at this index replaced by others."""
    tensors = list(GPT2Weights.random(1, SMALL).tensors())
    return Tensors([*tensors[:index], *items, *tensors[index + 1 :]])


def wpe(array: Any) -> Tensors:
    """Return a model with this wpe, whose shape is (11, 48)."""
    return changed(1, ("wpe", array, None))


MORE = changed(27, ("beta_f", np.ones(48), None), ("more", np.ones(48), None))


@pytest.mark.parametrize(
    ("weights", "dtype", "message"),
    [
        (changed(1), None, "weights: expected wpe at this position, got h.0.gamma1"),
        (changed(27), None, "weights: 1 tensors missing: beta_f"),
        (MORE, None, "weights: expected no more tensors at this position, got more"),
        (wpe(np.ones((48, 11))), None, "wpe: expected shape (11, 48), got"),
        (wpe(np.ones((11, 48), int)), None, "wpe: expected a NumPy array of"),
        (wpe([[1.0]]), None, "got list"),
        (wpe(np.ma.ones((11, 48))), None, "got MaskedArray"),
        (wpe(np.full((11, 48), 1e39)), None, "wpe: 528 weights are out of the range of float32"),
        (wpe(np.full((11, 48), 1e5)), "float16", "out of the range of float16: use float32"),
        (changed(1), "float8_e5m2", "dtype: expected one of float32, float16, bfloat16, got"),
        ("gpt2", None, "weights: expected GPT2Weights, a Checkpoint or another TensorSource, got"),
    ],
)
def test_wrong_tensors(tmp_path: Path, weights: Any, dtype: str | None, message: str) -> None:
    """An existing folder does not change, and no incomplete file is left."""
    (tmp_path / "old").mkdir()
    for folder in (tmp_path / "new", tmp_path / "old"):
        with pytest.raises(InputError, match=re.escape(message)):
            save_pretrained(folder, weights, dtype)
    assert [p.name for p in tmp_path.rglob("*")] == ["old"]


@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_transformers_loads_a_saved_model(tmp_path: Path, config: GPT2Config) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    weights = GPT2Weights.random(1, config)
    save_pretrained(tmp_path, weights)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.tie_word_embeddings == config.tie_word_embeddings
    model.eval()
    ids = np.array([[3, 1, 4, 1, 0, 2], [2, 4, 4, 0, 1, 3]])
    with torch.no_grad():
        logits = model(torch.tensor(ids)).logits.numpy()
    x = reference.encoder(ids, weights.wte, weights.wpe)
    for block in weights.blocks:
        x = reference.block_forward(x, block, causal=True)
    hidden = reference.layernorm(x, weights.gamma_f, weights.beta_f, config.eps)
    expected = hidden @ weights.lm_head.T
    # Both are float32, so they differ by a few rounding errors, relative to the largest logit.
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    """All weights are random, even biases and LayerNorms, in the released shapes."""
    torch = pytest.importorskip("torch", reason="compares with transformers")
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    torch.set_float32_matmul_precision("highest")
    weights = GPT2Weights.random(0, SIZES[name])
    save_pretrained(tmp_path, weights)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).to("cuda").eval()
    ids = np.random.default_rng(0).integers(weights.config.vocab_size, size=(2, 200))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids).to("cuda")).logits.cpu().numpy()
    del theirs
    torch.cuda.empty_cache()
    ours = GPT2(weights, device="cuda")
    kv_cache = ours.new_cache(2)
    ours(ids[:, :150], cache=kv_cache)
    steps = [ours(ids[:, t : t + 1], cache=kv_cache, last=True) for t in range(150, 200)]
    pairs = (ours(ids), expected), (np.stack(steps, axis=1), expected[:, 150:])
    off = [np.abs(found - exact).max() / np.abs(expected).max() for found, exact in pairs]
    print(f"{name}: relative to transformers {off[0]:.1e}, decoded with a cache {off[1]:.1e}")
    assert max(off) <= 1e-4
