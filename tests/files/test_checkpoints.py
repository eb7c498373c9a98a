"""Checkpoints of Hugging Face: directories, shards, hub caches, and damaged or wrong files."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import ml_dtypes
import numpy as np
import pytest
from fuzzing.gpt2 import config_json, label_of, shapes, sizes_of, write_sparse
from safetensors.numpy import save_file

from gpt2block import GPT2, BlockWeights, CheckpointError, GPT2Config, GPT2Weights, InputError
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.models.config import LIMITS, model_shapes
from tests.command_line import python
from tests.devices import slow
from tests.refusals import assert_same_tensors, cases, refused

SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=48, n_ctx=11, vocab_size=5)
CONFIG = config_json(sizes_of(SMALL))
HEAD = {"lm_head.weight": np.full((5, 48), 2, np.float32)}


WEIGHTS = GPT2Weights.random(1, SMALL)
# Tensors by their names in the original files, with the mask buffers
TENSORS: dict[str, Any] = {label_of(ours): array for ours, array, _ in WEIGHTS.tensors()}
TENSORS |= {f"h.{layer}.attn.bias": np.tri(11, dtype=np.float32)[None, None] for layer in (0, 1)}


def write_weights(folder: Path, tensors: dict[str, Any] = TENSORS, dtype: Any = None) -> Path:
    """Write model.safetensors. dtype: convert tensors to it; None: keep their dtypes."""
    arrays = {name: array.astype(dtype or array.dtype) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


def write_config(folder: Path, **changed: Any) -> None:
    """Write SMALL's config.json with these changes."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_weights(tmp_path)
    write_config(tmp_path)
    return tmp_path


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_all_tensors_in_order(tmp_path: Path, dtype: Any, prefix: str) -> None:
    """Tensors have the stored dtype, or float32 as weights; a directory or its file is opened."""
    tensors = {prefix + name: array for name, array in TENSORS.items()}
    file = write_weights(tmp_path, tensors | HEAD, dtype)
    write_config(tmp_path, tie_word_embeddings=False)
    checkpoint = Checkpoint.open(tmp_path)
    found = list(checkpoint.tensors())
    shapes = model_shapes(checkpoint.config)
    assert [name for name, _, _ in found] == list(shapes) == list(checkpoint.stored)
    assert list(shapes)[:4] == ["wte", "wpe", "h.0.gamma1", "h.0.beta1"]
    assert list(shapes)[-4:] == ["h.1.b_proj", "gamma_f", "beta_f", "lm_head"]
    for name, array, layout in found:
        kept = (TENSORS | HEAD)[label_of(name)].astype(dtype)
        assert array.dtype == (np.float32 if dtype == np.float64 else dtype)
        np.testing.assert_array_equal(array, kept)
        assert array.shape == shapes[name]
        outer = "NK" if name in ("wte", "lm_head") else None
        assert layout == ("KN" if ".w_" in name else outer)
    assert checkpoint.nbytes == np.dtype(dtype).itemsize * sum(a.size for _, a, _ in found)
    assert "h.1.mlp.c_fc.weight" in checkpoint.names
    weights = GPT2Weights.from_pretrained(checkpoint)
    assert_same_tensors(weights, checkpoint, np.float32)
    for path in (tmp_path, file):
        block = BlockWeights.from_pretrained(str(path), layer=1)
        assert block.n_head == 3
        for name, array in weights.blocks[1].tensors().items():
            np.testing.assert_array_equal(getattr(block, name), array)


def test_a_whole_model(directory: Path) -> None:
    model = GPT2Weights.from_pretrained(str(directory))
    assert model.config == SMALL
    assert model.lm_head is model.wte
    some_blocks = GPT2Weights.from_pretrained(directory, layers=[1])
    with pytest.raises(InputError, match="expected all 2 of the model, got 1"):
        list(some_blocks.tensors())
    write_config(directory, tie_word_embeddings=False)
    refused(directory, "1 tensors missing: lm_head.weight")


def sharded(folder: Path) -> dict[str, str]:
    """Write the model as three files and an index; return tensor name → file name."""
    tensors = {f"transformer.{name}": array for name, array in TENSORS.items()}
    weight_map: dict[str, str] = {}
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors"
        part = {name: tensors[name] for name in list(tensors)[i::3]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(folder)
    return weight_map


def test_missing_shards_and_wrong_indexes(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    names = sorted(set(weight_map.values()))
    (tmp_path / names[0]).unlink()
    (tmp_path / names[2]).unlink()
    refused(tmp_path, "2 of 3 files are not in its folder", f"{names[0]}, {names[2]}")
    outside = f"index.json: expected names of files in the same folder, got ../{names[0]}"
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 548105171\n"
    for name in names:
        (tmp_path / name).write_text(pointer)
    refused(tmp_path, f"{names[0]}: a Git-LFS pointer of ", "git lfs pull")
    for name in names[::2]:
        (tmp_path / name).unlink()
    for content, message in (
        ({}, "expected weight_map"),
        ({"weight_map": []}, "expected weight_map"),
        ({"weight_map": {}}, "expected weight_map"),
        ([], "expected weight_map"),
        ({"weight_map": {"wte.weight": f"../{names[0]}", "wpe.weight": names[1]}}, outside),
        ({"weight_map": {"wte.weight": names[1], "wpe.weight": 3}}, "1 of 2 files are not in"),
        ({"weight_map": {"wte.weight": "x" * 300}}, "cannot be read: File name too long"),
        ({"weight_map": {"wte.weight": "a\0b"}}, "1 of 1 files are not in its folder: a\\x00b"),
        ({"weight_map": {"wte.weight": "\ud800"}}, "1 of 1 files are not in its folder: \\ud800"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
        refused(tmp_path, message)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    refused(tmp_path, "cannot be read as JSON")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    names = sorted(set(sharded(tmp_path).values()))
    expected = {name: array for name, array, _ in Checkpoint.open(tmp_path).tensors()}
    save_file(TENSORS, tmp_path / names[0])
    found = Checkpoint.open(tmp_path)
    for name, array, _ in found.tensors():
        np.testing.assert_array_equal(array, expected[name])
    others = {name: array + 1 for name, array in TENSORS.items()}
    save_file(TENSORS | dict(list(others.items())[:9]), tmp_path / names[0])
    refused(tmp_path, "tensors are stored twice with different numbers: ")
    wpe = TENSORS["wpe.weight"]
    for other in (wpe.T.copy(), wpe.astype(np.float64), np.where(wpe == wpe[1, 1], 0, wpe)):
        write_weights(tmp_path, TENSORS | {"transformer.wpe.weight": other})
        refused(tmp_path, "1 tensors are stored twice with different numbers: wpe.weight")
    write_weights(tmp_path, TENSORS | {"transformer.wpe.weight": wpe})
    (tmp_path / "model.safetensors.index.json").unlink()
    np.testing.assert_array_equal(Checkpoint.open(tmp_path).stored["wpe"].read(), wpe)


def test_a_file_without_config_has_the_size_of_its_width(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_head=16, n_embd=1024, n_ctx=3, vocab_size=4)
    write_sparse(tmp_path / "weights.safetensors", shapes(sizes_of(config)))
    assert Checkpoint.open(tmp_path / "weights.safetensors").config == config


LLM_C = (20240326).to_bytes(4, "little") + bytes(1020)
TEXT = b"# A project\n\nThis is a text that somebody wrote.\n"
READ = "a Hugging Face directory, a .safetensors file, a file of PyTorch or llama.cpp (GGUF)"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("README.md", TEXT, (READ, "it starts with b'# A proj'", "a hub id", "'shakespeare'")),
        ("empty.txt", b"", (READ, "an empty file")),
        ("model.gguf", b"", (READ, "an empty file")),
        ("data.zip", "zip", (READ, "a zip archive of torch.save with data.pkl, found README.md")),
        ("model.safetensors", TEXT, (READ, "it starts with b'# A proj'")),
        ("model.gguf", TEXT, ("not a GGUF file that can be read: it starts with b'# A '",)),
        ("model.bin", TEXT, ("expected a file of torch.save", "'# A proj'")),
        ("gpt2_124M.bin", LLM_C, ("a model of llm.c, whose files are not read", "export_hf.py")),
        ("weights", LLM_C, ("a model of llm.c, whose files are not read", "export_hf.py")),
        ("w.safetensors", LLM_C, ("a model of llm.c, whose files are not read", "export_hf.py")),
        ("config.json", b"{}", ("expected weight_map", "to open another model give its folder")),
        ("folder/README.md", TEXT, (READ, "expected model.safetensors or pytorch_model.bin")),
        ("folder/config.json", b"{}", (READ, "in this directory, found config.json")),
        ("folder/a/b", b"", (READ, "in this directory, found a")),
    ],
)
def test_what_is_no_checkpoint_says_what_is_read(
    name: str, content: bytes | str, words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        with ZipFile(file, "w", ZIP_DEFLATED) as archive:
            archive.writestr("README.md", TEXT)
    given = tmp_path / "folder" if "/" in name else file
    message = refused(given, str(given), *words, read=GPT2.from_pretrained)
    assert "truncated" not in message
    assert "download" not in message


def test_all_wrong_tensors_are_listed(directory: Path) -> None:
    """The error comes before any tensor is read; mask buffers and a tied lm_head are allowed."""
    tensors = dict(TENSORS)
    tensors["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)
    tensors["lm_head.weight"] = tensors["wte.weight"].copy()
    write_weights(directory, tensors)
    assert len(list(Checkpoint.open(directory).tensors())) == 28
    for name in [name for name in tensors if name.startswith("h.0.ln_")] + ["wpe.weight"]:
        del tensors[name]
    tensors["h.1.mlp.c_fc.weight"] = tensors["h.1.mlp.c_fc.weight"].T.copy()
    tensors["h.1.mlp.c_fc.bias"] = np.zeros((192, 1), np.float32)
    tensors["h.1.ln_1.bias"] = np.zeros(48, np.int32)
    tensors["score.weight"] = np.zeros((2, 48), np.float32)
    write_weights(directory, tensors)
    dtypes = "float64, float32, float16, bfloat16"
    refused(
        directory,
        "5 tensors missing: wpe.weight, h.0.ln_1.weight, h.0.ln_1.bias, h.0.ln_2.weight, …; ",
        "1 tensors unexpected: score.weight; ",
        "2 tensors misshapen: h.1.mlp.c_fc.weight: expected shape (48, 192), got (192, 48), ",
        "h.1.mlp.c_fc.bias: expected shape (192,), got (192, 1); ",
        f"1 tensors of another dtype: h.1.ln_1.bias: expected one of {dtypes}, got I32",
    )


def test_a_revision_is_for_hub_ids(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    for path in (directory, str(directory), "shakespeare", checkpoint, "no/such/path"):
        with pytest.raises(InputError, match=r"revision: expected a hub id such as 'gpt2' with"):
            Checkpoint.open(path, revision="main")
    for wrong in ("", "a b", "../up", "/main", "a//b", 3, "x\0", "..", "a/../../b"):
        with pytest.raises(InputError, match="revision: expected a branch, tag or commit, got"):
            Checkpoint.open("gpt2", revision=wrong)  # type: ignore[arg-type]


def test_names_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such file or directory", "hub id")
    refused(tmp_path / "nowhere.safetensors", "no such file or directory")
    refused(tmp_path, "expected model.safetensors or pytorch_model.bin", "found nothing")
    for wrong in (None, 3, b"gpt2", ["gpt2"]):
        with pytest.raises(InputError, match="checkpoint: expected a name or a path, got"):
            Checkpoint.open(wrong)  # type: ignore[arg-type]
    refused("", "expected a name or a path, got an empty string")
    refused("x" * 400 + "/y", "cannot be read")
    refused("~nosuchuser/gpt2", "nosuchuser")
    for name in ("~\0", "~\ud800", "a\0/b", "\ud800/b"):
        for path in (name, Path(name)):
            with pytest.raises(CheckpointError):
                Checkpoint.open(path)
    refused("/proc/1/mem", "/proc/1/mem")


def test_the_bundled_model_is_found_next_to_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shakespeare").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("shakespeare").config == GPT2Config(6, 4, 256, 256, 256)
    refused("./shakespeare", "expected model.safetensors or pytorch_model.bin in this directory")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or pytorch_model\.bin"):
        Checkpoint.open(Path("shakespeare"))


@pytest.mark.parametrize("layer", [-1, 2, 100, True, 1.0, "1", None])
def test_a_layer_that_the_model_does_not_have(directory: Path, layer: Any) -> None:
    read = partial(BlockWeights.from_pretrained, layer=layer)
    words = "is out of range" if type(layer) is int else f"expected an integer, got {layer!r}"
    refused(directory, words, read=read)
    assert BlockWeights.from_pretrained(directory, layer=np.int64(1)).n_head == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *cases("config of GPT-2"),
        ({"n_head": 10**400}, "n_head: expected at most 65,536, got an integer of more"),
        ({"model_type": json.loads("[" * 900 + "]" * 900)}, "'gemma4_text', got [[["),
    ],
)
def test_a_wrong_config(directory: Path, change: dict[str, Any], message: str) -> None:
    write_config(directory, **change)
    refused(directory, "config.json", message)


GENERAL = {
    "model_type": "gpt2", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 48,
    "max_position_embeddings": 11, "vocab_size": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        GENERAL,
        GENERAL | CONFIG,
        CONFIG | {"n_ctx": 1024},
        {name: value for name, value in CONFIG.items() if name != "n_positions"} | {"n_ctx": 11},
        {name: value for name, value in CONFIG.items() if name != "model_type"}
        | {"reorder_and_upcast_attn": True, "resid_pdrop": 0.1, "summary_type": "mean", "x": 1},
    ],
    ids=["general names", "both names", "n_positions", "n_ctx", "keys without effect"],
)
def test_configs_of_one_model(directory: Path, config: dict[str, Any]) -> None:
    """General names of config keys, which all architectures share, are read: 3 heads."""
    for encoding in ("utf-8", "utf-8-sig"):
        (directory / "config.json").write_text(json.dumps(config), encoding=encoding)
        assert Checkpoint.open(directory).config == SMALL


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "part.safetensors"])
def test_a_name_that_is_not_a_file_is_not_absent(tmp_path: Path, name: str) -> None:
    """A pipe or folder with the name of a file is refused.

    For example, config.json is not taken for absent, which would mean the sizes of GPT-2 small.
    """
    config = GPT2Config(n_layer=1, n_ctx=2, vocab_size=3)
    write_sparse(tmp_path / "weights.safetensors", shapes(sizes_of(config)))
    index = {"weight_map": {"a": "weights.safetensors", "b": "part.safetensors"}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    opened = {"config.json": "weights.safetensors", "part.safetensors": "index.json"}
    path = tmp_path / opened.get(name, "")
    special = tmp_path / name
    for target, message in (("nowhere", "a link to a file that does"), (name, "cannot be read")):
        special.symlink_to(target)
        refused(path, f"{special}: {message}")
        special.unlink()
    special.mkdir()
    refused(path, f"{special}: expected a file, found a folder")
    special.rmdir()
    os.mkfifo(special)  # opening it would wait for a writer
    refused(path, f"{special}: expected a file, found a named pipe")
    if name == "model.safetensors":
        refused(special, f"{special}: expected a file, found a named pipe")


def test_the_documentation_lists_the_limits_and_the_names() -> None:
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name, limit in LIMITS.items():
        row = rows["n_positions" if name == "n_ctx" else name]
        assert f"| {getattr(GPT2Config(), name)} | {limit:,} |" in row
    for names in (("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")):
        assert f"`{names[1]}`" in rows[names[0]]


def test_a_config_that_cannot_be_read(directory: Path) -> None:
    config = directory / "config.json"
    for text in ("{", "[]", "null", "3", '"x"', "", "[" * 100_000):
        config.write_text(text)
        refused(directory, "config.json")
    with config.open("r+b") as stream:
        stream.truncate(2**40)
    refused(directory, "config.json: expected at most 100,000,000 bytes, got 1,099,511,627,776")
    config.write_text("{}")
    config.chmod(0)
    if not os.access(config, os.R_OK):  # root may read everything
        refused(directory, "config.json: cannot be read: Permission denied")
    config.unlink()
    refused(directory, "expected config.json next to it", "width 48 is not that of a GPT-2 size")


MEASURE = """
import sys
from gpt2block import GPT2
def memory(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return 1024 * int(line.split()[1])
for dtype in sys.argv[2:]:
    GPT2.from_pretrained(device="cpu", dtype=dtype)  # a small model, for all imports
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    model = GPT2.from_pretrained(sys.argv[1], device="cpu", dtype=dtype)
    print(dtype, memory("VmHWM") - before, model.nbytes)
    del model
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("stored", "dtypes"),
    [slow("float32", ["float8_e4m3fn"]), ("bfloat16", ["float32", "bfloat16"])],
)
def test_peak_memory(tmp_path: Path, stored: str, dtypes: list[str]) -> None:
    """Peak memory is at most 1.2 times the file or the requested weights, plus one tensor."""
    config = GPT2Config(n_layer=4, n_head=8, n_embd=512, vocab_size=30_000)
    save_pretrained(tmp_path, GPT2Weights.random(0, config), stored)
    checkpoint = Checkpoint.open(tmp_path)
    largest = checkpoint.stored["wte"].nbytes
    done = python(MEASURE, tmp_path, *dtypes, check=True)
    file = checkpoint.file.stat().st_size
    for line in done.stdout.splitlines():
        dtype, *numbers = line.split()
        peak, kept = map(int, numbers)
        assert max(file, kept) > 55e6
        assert peak <= 1.2 * max(file, kept) + largest, f"{dtype}: {peak:,} for {file:,}, {kept:,}"
