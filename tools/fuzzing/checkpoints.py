"""Weight files: randomly damaged tiny checkpoints of all layouts, opened, read, saved and run."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load_file, save_file

from fuzzing import (
    Area,
    Difference,
    Refused,
    Rng,
    accepted,
    attempt,
    check,
    check_equal,
    check_message,
    refuses,
)
from fuzzing import gpt2 as plain
from fuzzing.configs import Rules, check_logits, rules
from fuzzing.values import NUMBERS, TEXTS, damage, odd_text, odd_value, replace, spoil_json
from gpt2block import GPT2, LlamaConfig, RopeScaling, from_pretrained
from gpt2block.errors import CheckpointError
from gpt2block.files.checkpoints import Checkpoint, save_pretrained
from gpt2block.files.parameters.arrays import random_model
from gpt2block.models.architectures.gemma3 import Gemma3Config
from tests.adapters import save_adapter, save_base
from tests.four_bit import LAYOUTS, write

PICKLED = {  # files that PyTorch wrote, and the dtype of their tensors
    **{f"{kind}-{dtype}.bin": dtype for kind in ("zip", "legacy")
       for dtype in ("float32", "float16", "bfloat16")},
    "parameters.bin": "float32", "old-masks.bin": "float32", "transposed.bin": "float32",
    "nanogpt.pt": "float32", "nanogpt-legacy.pt": "float32", "nanogpt-no-bias.pt": "no-bias",
}  # fmt: skip
PICKLES = Path(__file__).parents[2] / "tests" / "data" / "pytorch"
_ENTRIES: tuple[Any, ...] = (  # values of an entry in the header of safetensors
    "F32", "F16", "BF16", "F64", "I8", "I32", "F8_E4M3", [], [0], [-1, -1], [2**62, 4], [1.5],
    [True], [[1]], [0, 4], [-4, 0], [0, 2**63], [0, 1.5],
)  # fmt: skip
_NAMES = (
    "h.99.ln_1.weight", "ln_f.weight", "transformer.wte.weight", "lm_head.weight", "h.0.attn.bias",
    "\x1b]0;x\x07", "y" * 10**5,
)  # fmt: skip
_SMALL = LlamaConfig(n_layer=1, n_head=2, n_kv_head=1, n_embd=128, n_ff=128, n_ctx=8, vocab_size=9)
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16}


def case(rng: Rng, folder: Path) -> None:
    kinds = [_hugging_face] * 6 + [_sharded] * 2 + [_rewritten] * 2
    kinds += [_odd_name, _odd_target, _hostile, _no_checkpoint, *[_pickle, _adapter, _four_bit] * 2]
    rng.pick(*kinds)(rng, folder)


def _odd_name(rng: Rng, folder: Path) -> None:
    """A name that is not a checkpoint's."""
    name = rng.pick(*TEXTS, odd_value(rng), b"bytes", folder, folder / "none", "x/y", "a/b/c", "é")
    if rng.chance(0.3):
        (folder / "model.bin").write_bytes(rng.bytes(rng.whole(40)))
        name = folder / "model.bin"
    attempt(False, Checkpoint.open, name)
    raise Difference(f"opened {name!a:.100}")


def _no_checkpoint(rng: Rng, folder: Path) -> None:
    """Text, nothing, or a zip archive of a text, of which no bytes are missing."""
    name = rng.pick("README.md", "notes", "a.zip", "model.safetensors", "m.gguf", "m.bin", "a.json")
    text = rng.pick("", "# A project\n" * rng.whole(1, 9), "twelve bytes" + odd_text(rng))
    if rng.chance(0.3):
        with zipfile.ZipFile(folder / name, "w", rng.pick(0, 8)) as archive:
            archive.writestr("README.md", text)
    else:
        (folder / name).write_text(text)
    try:
        Checkpoint.open(rng.pick(folder, folder / name))
    except CheckpointError as error:
        check_message(str(error))
        check("download" not in str(error), f"no bytes are missing: {error}")
        raise Refused from error
    raise Difference(f"opened {name} of {text!a:.60}")


def _odd_target(rng: Rng, folder: Path) -> None:
    """save_pretrained to a path that cannot be written."""
    sizes = plain.random_sizes(rng)
    plain.write(folder / "model", sizes, plain.random_tensors(rng, sizes))
    opened = accepted(Checkpoint.open, folder / "model")
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    target = rng.pick(
        "", "~nosuchuser/x", "a\0b", "\ud800", str(folder / "file"), folder / "file" / "below",
        folder / "loop", folder / ("x" * 300), "/proc/foo", "/dev/null", 3, None, b"bytes",
    )  # fmt: skip
    working_directory, before = Path.cwd(), sorted(folder.rglob("*"))
    os.chdir(folder)  # the target "" would be written there
    try:
        refused = refuses(save_pretrained, target, opened)
    finally:
        os.chdir(working_directory)
    written = [path for path in sorted(folder.rglob("*")) if path not in before]
    check(refused and not written, f"saved to {target!a:.60}: {[path.name for path in written]}")
    raise Refused


# --- writing and damaging checkpoints


def _hugging_face(rng: Rng, folder: Path) -> None:
    sizes = plain.random_sizes(rng)
    tensors = plain.random_tensors(rng, sizes, None if rng.chance(0.5) else "float32")
    if rng.chance(0.15):
        _spoil(rng, tensors)
    plain.write(folder, sizes, tensors)
    weights = folder / "model.safetensors"
    prefix = rng.pick("", "transformer.")
    weights.write_bytes(plain.to_safetensors(tensors, prefix))
    damaged = rng.chance(0.7)
    if damaged:
        rng.pick(damage, _damage_header, _damage_header, replace, _damage_config)(rng, weights)
    name = rng.pick(folder, weights, str(folder), f"{folder}/", str(weights))
    _check(rng, folder, name, sizes, tensors, damaged)


def _sharded(rng: Rng, folder: Path) -> None:
    sizes = plain.random_sizes(rng)
    tensors = plain.random_tensors(rng, sizes)
    plain.write(folder, sizes, tensors)
    (folder / "model.safetensors").unlink()
    count = rng.whole(1, 4)
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    chosen = {name: rng.whole(count) for name in tensors}
    for i, file in enumerate(files):
        part = {name: tensors[name] for name in tensors if chosen[name] == i}
        (folder / file).write_bytes(plain.to_safetensors(part))
    used = {name: files[i] for name, i in chosen.items()}
    index: Any = {"metadata": {"total_size": 1}, "weight_map": used}
    damaged = rng.chance(0.7)
    path = folder / "model.safetensors.index.json"
    if damaged and rng.chance(0.5):
        shard = folder / str(rng.pick(*sorted(set(used.values()))))
        rng.pick(damage, _damage_header, replace, _damage_config)(rng, shard)
    elif damaged:
        name, text = rng.pick(*tensors), rng.pick(*TEXTS)
        other_file: Any = rng.pick(
            text, "a" * 300, "../model.safetensors", ".", "config.json", 3, None
        )
        less = {other: used[other] for other in used if other != name}
        index["weight_map"] = rng.pick(
            used | {name: other_file}, used | {text: files[0]}, less, odd_value(rng),
            {other: odd_value(rng) for other in used},
        )  # fmt: skip
        index = rng.pick(index, index, index, odd_value(rng))
    path.write_text(json.dumps(index))
    opened_as = rng.pick(folder, path, str(folder), str(path))
    _check(rng, folder, opened_as, sizes, tensors, damaged)


def _rewritten(rng: Rng, folder: Path) -> None:
    """A Llama with YaRN, or a Gemma, as other programs write it, and then as another dtype."""
    gemma, seed = rng.chance(0.5), rng.whole(2**31)
    sizes: dict[str, Any] = {
        "n_layer": rng.whole(1, 4), "n_head": 4, "n_kv_head": rng.pick(1, 2, 4), "n_ctx": 16,
        "n_embd": 8 * rng.whole(1, 5), "vocab_size": 9, "n_ff": 12, "head_size": 8,
    }  # fmt: skip
    if gemma:
        sizes["embedding_dtype"] = rng.pick("float32", "float16", "bfloat16")
    elif rng.chance(0.7):
        options: dict[str, Any] = {
            "factor": rng.pick(0.5, 3.0, 40.0), "original_context": rng.pick(2, 8, 4096),
            "attention_factor": rng.pick(None, 1.3), "truncate": rng.chance(0.5),
            "beta_fast": rng.pick(2.0, 32.0), "beta_slow": rng.pick(0.1, 1.0),
        }  # fmt: skip
        sizes["scaling"] = RopeScaling("yarn", **options)
    made: Any = Gemma3Config if gemma else LlamaConfig
    config = made(**sizes, tie_word_embeddings=rng.chance(0.5))
    source: Any = SimpleNamespace(config=config, tensors=lambda: random_model(seed, config))
    accepted(save_pretrained, folder, source, rng.pick(None, "float16", "bfloat16"))
    file = folder / "model.safetensors"
    expected = [array.astype(np.float32) for _, array, _ in Checkpoint.open(folder).tensors()]
    stored = load_file(file)
    q, buffer = "model.layers.0.self_attn.q_proj.weight", rng.pick("model.", "layers.1.a.", "")
    if rng.chance(0.5):
        stored[q] = stored[q].astype(rng.pick(np.float32, np.float64))
    if rng.chance(0.5):
        stored[f"{buffer}rotary_emb.inv_freq"] = np.ones(4, np.float32)
    if config.tie_word_embeddings and rng.chance(0.5):
        stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    unequal, copied = rng.chance(0.3), rng.chance(0.3)
    if unequal or copied:
        stored[q.removeprefix("model.")] = stored[q] + unequal
    save_file(stored, file, {"format": "pt"})
    opened = attempt(not unequal, Checkpoint.open, folder)
    check(not unequal, "opened with two tensors of one name")
    accepted(save_pretrained, folder / "again", opened, rng.pick(None, "float32"))
    for found in (opened, accepted(Checkpoint.open, folder / "again")):
        check_equal("config", found.config, config)
        for (name, array, _), truth in zip(found.tensors(), expected, strict=True):
            check(np.array_equal(array, truth), f"{name}: other numbers")


def _adapter(rng: Rng, folder: Path) -> None:
    """An adapter of peft, most often with a changed file."""
    base = save_base(folder / "base", _SMALL)
    pattern = rng.pick(*["x", ".*(q|v)_proj"] * 4, "(.|.)*!", "a{99999999999}", "(" * 10**5)
    own = save_adapter(folder / "own", base, rank_pattern={pattern: 3}, alpha_pattern={pattern: 2})
    valid = pattern[-1].isalpha() and not _changed(rng, own)
    attempt(valid, from_pretrained, base, "cpu", adapters={"a": own})


def _four_bit(rng: Rng, folder: Path) -> None:
    """A model with matrices of 4 bits, most often with a changed file."""
    file, exact = write(folder, _SMALL, LAYOUTS[rng.pick(*LAYOUTS)])
    changed = _changed(rng, file)
    model = attempt(not changed, from_pretrained, file, "cpu", rng.pick("file", "float32"))
    pairs = zip(model.tensors(), Checkpoint.open(exact).tensors(), strict=True)
    same = all(np.array_equal(ours, truth) for (_, ours, _), (_, truth, _) in pairs)
    check(same or changed, "other numbers")


def _changed(rng: Rng, folder: Path) -> bool:
    """Change a folder's tensors or settings in most cases; return whether they are changed."""
    changes = damage, replace, *[_damage_header] * 4, *[_damage_config] * 4, None
    if change := rng.pick(*changes):
        change(rng, next(folder.glob("*.safetensors")))
    return change is not None


def _spoil(rng: Rng, tensors: plain.Tensors) -> None:
    """Set a weight to infinity, NaN, or a number too large to compute with."""
    array = tensors[rng.pick(*tensors)].reshape(-1)
    array[rng.whole(array.size)] = rng.pick(np.nan, np.inf, -np.inf, 1e38)


def _damage_header(rng: Rng, file: Path) -> None:
    """Change the JSON header of a safetensors file."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: Any = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return
    name = rng.pick(*names)
    kind, claim = rng.whole(9), None
    if kind < 3:
        entry = header[name]
        swapped = entry["shape"][::-1], entry["data_offsets"][::-1]
        spoil_json(rng, rng.pick(entry, entry, header), *_ENTRIES, *swapped)
    elif kind == 3:
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        new = str(rng.pick(*_NAMES, *TEXTS))
        header[new] = entry if rng.chance(0.3) else header.pop(name)
    elif kind == 4:
        header = rng.pick(odd_value(rng), {**header, "__metadata__": odd_value(rng)})
    elif kind == 8:
        header |= {name: header[names[0]], names[0]: header[name]}
    elif kind == 5:
        claim = int(rng.pick(0, 1, length + 1, 10**8, 2**40, 2**63, 2**64 - 1))
    text = json.dumps(header).encode()
    if kind == 6:
        text = text[:-1] + b"," + json.dumps({name: header[name]}).encode()[1:]  # twice
    elif kind == 7:
        text = rng.pick(b'{"a":' + b"[" * 10**5, b"\xff\xfe" + text)
    claim = len(text) if claim is None else claim
    file.write_bytes(claim.to_bytes(8, "little") + text + data[8 + length :])


def _damage_config(rng: Rng, file: Path) -> None:
    config = next(file.parent.glob("*config.json"))
    values = json.loads(config.read_text())
    spoil_json(rng, values.get("quantization_config", values), *NUMBERS, 4, 8, "gptq", "awq")
    contents = rng.bytes(20), b"[" * 10**5, json.dumps(odd_value(rng)).encode()
    config.write_bytes(rng.pick(*contents, *[json.dumps(values).encode()] * 9))
    if rng.chance(0.1):
        replace(rng, config)


# --- checking the results


def _check(
    rng: Rng, folder: Path, name: Any, sizes: plain.Sizes, tensors: plain.Tensors, damaged: bool
) -> None:
    """Check a Hugging Face folder: compared with safetensors, or refused if damaged."""
    opened = attempt(not damaged, Checkpoint.open, name)
    if damaged:
        stored = _read_safetensors(opened.file)
        check((folder / "config.json").is_file(), "accepted without a config.json")
        expected = rules(json.loads((folder / "config.json").read_text()))
        sizes = _sizes(expected)
        if sizes.tied and "wte.weight" not in stored and "lm_head.weight" in stored:
            stored["wte.weight"] = stored.pop("lm_head.weight")
        wte, head = stored.get("wte.weight"), stored.get("lm_head.weight")
        if sizes.tied and wte is not None and head is not None:
            both = wte.astype(np.float64), head.astype(np.float64)
            sizes = dataclasses.replace(sizes, tied=np.array_equal(*both, equal_nan=True))
        shapes = plain.shapes(sizes)
        check(set(shapes) <= set(stored), f"accepted without {sorted(set(shapes) - set(stored))}")
        tensors = {label: stored[label] for label in shapes}
        for label, shape in shapes.items():
            check_equal(f"shape of {label}", tensors[label].shape, shape)
    _check_tensors(rng, folder, opened, sizes, tensors, damaged)


def _sizes(expected: Rules) -> plain.Sizes:
    check(not expected.must_refuse, "accepted with a wrong config.json")
    named = {"tie_word_embeddings": "tied"}
    fields = {named.get(name, name): value for name, value in expected.fields.items()}
    return plain.Sizes(**fields)


def _read_safetensors(file: Path) -> plain.Tensors:
    """Return the tensors of a file or of an index's files, without the prefix `transformer.`."""
    files = [file]
    if file.suffix == ".json":
        index = json.loads(file.read_text())
        files = [file.parent / name for name in sorted(set(index["weight_map"].values()))]
    tensors = {}
    for path in files:
        try:
            entries = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise Difference(f"accepted what safetensors refuses: {error}") from error
        for name, entry in entries:
            if entry["dtype"] in _DTYPES:
                array = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]])
                tensors[name.removeprefix("transformer.")] = array.reshape(entry["shape"])
    return tensors


def _check_tensors(
    rng: Rng, folder: Path, opened: Checkpoint, sizes: plain.Sizes, tensors: plain.Tensors,
    damaged: bool,
) -> None:  # fmt: skip
    """Check an accepted checkpoint: read it, and sometimes save it or compute logits."""
    check_equal("config", plain.sizes_of(opened.config), sizes)  # type: ignore[arg-type]  # GPT-2
    _compare(opened, tensors, not damaged)
    kind = rng.random()
    if kind < 0.25:
        _saved(rng, folder / "saved", opened, tensors)
    elif kind < 0.5:
        every = [np.abs(array.astype(np.float64)).max(initial=0) for array in tensors.values()]
        largest = float(np.max(every))  # NaN if any value is NaN
        model = attempt(largest < 1e15, GPT2.from_pretrained, opened, device="cpu")
        check(np.isfinite(largest), "loaded weights that are infinity or NaN")
        exact = largest < 100 and sizes.eps >= 1e-6
        check_logits(rng, model, sizes, tensors if exact else None)


def _compare(opened: Checkpoint, tensors: plain.Tensors, valid: bool = True) -> None:
    """Raise Difference unless the checkpoint's tensors are these.

    valid: whether all can be read; a damaged float64 may be out of the range of float32.
    """
    seen = set()
    for ours, array, layout in attempt(valid, lambda: [*opened.tensors()]):
        label = plain.label_of(ours)
        theirs = tensors[label]
        usual = "NK" if ours in ("wte", "lm_head") else "KN" if theirs.ndim == 2 else None
        matrix = None if ours == "wpe" else usual
        with np.errstate(over="ignore"):
            kept = theirs.astype(np.float32) if theirs.dtype == np.float64 else theirs
        same = _same(array, kept if layout == matrix else kept.T)
        check(same, f"{ours}: other numbers than in the file")
        seen.add(label)
    check_equal("names", seen, set(tensors))


def _same(one: plain.Array, other: plain.Array) -> bool:
    """Return whether two arrays have one dtype and equal numbers; NaN equals NaN."""
    return one.dtype == other.dtype and np.array_equal(
        one.astype(np.float64), other.astype(np.float64), equal_nan=True
    )


def _saved(rng: Rng, folder: Path, opened: Checkpoint, tensors: plain.Tensors) -> None:
    """save_pretrained, read again by safetensors and by gpt2block."""
    dtype = rng.pick(None, "float32", "float16", "bfloat16")
    expected = {}
    for name, array in tensors.items():
        with np.errstate(over="ignore"):
            kept = array.astype(np.float32) if array.dtype == np.float64 else array
            expected[name] = kept if dtype is None else kept.astype(plain.DTYPES[dtype])
    fits = all(np.isfinite(array.astype(np.float64)).all() for array in expected.values())
    attempt(fits, save_pretrained, folder, opened, dtype)
    stored = _read_safetensors(folder / "model.safetensors")
    check_equal("saved names", set(stored), set(expected))
    for name, array in expected.items():
        check(_same(stored[name], array), f"{name}: saved other numbers")
    again = accepted(Checkpoint.open, folder)
    check_equal("config", again.config, opened.config)


def _pickle(rng: Rng, folder: Path) -> None:
    """A file that PyTorch wrote, compared with the stored tensors; a damaged one may be refused."""
    name = rng.pick(*PICKLED)
    file = folder / str(rng.pick(name, "pytorch_model.bin", "a.pt", "a.ckpt"))
    file.write_bytes((PICKLES / name).read_bytes())
    (folder / "config.json").write_bytes((PICKLES / "config.json").read_bytes())
    damaged = rng.chance(0.7)
    if damaged:
        rng.pick(damage, damage, replace)(rng, file)
    opened = attempt(not damaged, Checkpoint.open, file)
    if damaged:  # damage may change only numbers, so only reading is checked
        attempt(False, lambda: sum(array.size for _, array, _ in opened.tensors()))
    else:
        _compare(opened, _read_safetensors(PICKLES / f"expected-{PICKLED[name]}.safetensors"))


def _hostile(rng: Rng, folder: Path) -> None:
    """A pickle that would run a command, as a plain file and in a zip archive like PyTorch's."""
    ran, file = folder / "ran", folder / str(rng.pick("pytorch_model.bin", "a.pt", "a.ckpt"))
    command = f"touch {ran}"
    data = rng.pick(
        f"cposix\nsystem\n(S'{command}'\ntR.".encode(),
        f"cbuiltins\nexec\n(S'open({str(ran)!r}, chr(119))'\ntR.".encode(),
        pickle.dumps({"wte.weight": _Runs(command)}, rng.whole(5)),
        pickle.dumps([_Runs(command)] * 3, 2),
    )
    if rng.chance(0.5):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3\n")
    else:
        file.write_bytes(data)
    refused = refuses(Checkpoint.open, rng.pick(file, folder))
    check(not ran.exists(), "a pickle was executed")
    check(refused, "opened")
    raise Refused


class _Runs:
    """An object that is pickled as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


AREA = Area("checkpoints", 3, case)
