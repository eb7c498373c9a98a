"""Files written by `torch.save`, read without PyTorch: the same bits, and no code is executed."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import pickletools
import shutil
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from fuzzing import gpt2 as plain
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2block import CheckpointError, GPT2Config
from gpt2block.files.checkpoints import Checkpoint, pytorch
from tests.refusals import assert_same_tensors, cases, refused

FIXTURES = Path(__file__).parents[1] / "data" / "pytorch"  # from tools/make_pytorch_fixtures.py
CONFIG = GPT2Config(n_layer=1, n_head=2, n_embd=8, n_ctx=4, vocab_size=5)


# Files that PyTorch wrote


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((f"{kind}-{dtype}.bin", dtype) for kind in ("zip", "legacy")
          for dtype in ("float32", "float16", "bfloat16")),
        ("parameters.bin", "float32"),
        ("old-masks.bin", "float32"),
        ("old-masks-zip.bin", "float32"),
        ("transposed.bin", "float32"),
        ("transposed-legacy.bin", "float32"),
        ("sharded", "float32"),
        ("sharded/pytorch_model.bin.index.json", "float32"),
        ("nanogpt.pt", "float32"),
        ("nanogpt-legacy.pt", "float32"),
        ("nanogpt-no-bias.pt", "no-bias"),
    ],
)  # fmt: skip
def test_the_bits_are_those_that_pytorch_wrote(name: str, expected: str) -> None:
    checkpoint = Checkpoint.open(FIXTURES / name)
    assert checkpoint.config == CONFIG
    assert_same_tensors(checkpoint, Checkpoint.open(FIXTURES / f"expected-{expected}.safetensors"))


@pytest.mark.parametrize("name", ["zip-float16.bin", "legacy-float16.bin"])
def test_by_any_name_and_from_a_directory(tmp_path: Path, name: str) -> None:
    shutil.copy(FIXTURES / "config.json", tmp_path)
    expected = Checkpoint.open(FIXTURES / "expected-float16.safetensors")
    for saved_as in ("a.pt", "a.pth", "a.ckpt", "a"):
        shutil.copy(FIXTURES / name, tmp_path / saved_as)
        assert_same_tensors(Checkpoint.open(tmp_path / saved_as), expected)
    refused(tmp_path, "expected model.safetensors or pytorch_model.bin in this directory")
    shutil.copy(FIXTURES / name, tmp_path / "pytorch_model.bin")
    assert_same_tensors(Checkpoint.open(tmp_path), expected)
    shutil.copy(FIXTURES / "expected-float32.safetensors", tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).file.name == "model.safetensors"


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    """Data that is changed after opening is read, from the offsets found when opening."""
    for name in ("zip-float32.bin", "legacy-float32.bin"):
        file = tmp_path / name
        shutil.copy(FIXTURES / name, file)
        shutil.copy(FIXTURES / "config.json", tmp_path)
        checkpoint = Checkpoint.open(file)
        content = bytearray(file.read_bytes())
        for tensor in checkpoint.stored.values():
            assert tensor.offset is not None
            content[tensor.offset : tensor.offset + tensor.nbytes] = b"\x01" * tensor.nbytes
        file.write_bytes(content)
        for _, array, _ in checkpoint.tensors():
            assert set(array.tobytes()) == {1}


def test_tensors_that_are_not_contiguous_are_refused_by_name() -> None:
    refused(FIXTURES / "scattered.bin", "1 tensors not contiguous", "h.0.mlp.c_fc.weight")
    refused(FIXTURES / "turned-wte.bin", "1 tensors not contiguous", "wte.weight")


def views_of(torch: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Slices, transposes and reshapes of a few storages of every dtype."""
    dtypes = ("float64", "float32", "float16", "bfloat16", "int64", "int8", "uint8", "uint16")
    bases = [
        torch.arange(120).to(getattr(torch, dtype)).reshape(shape)
        for dtype in dtypes
        for shape in ((120,), (10, 12), (4, 5, 6))
    ]
    views = {}
    for i in range(200):
        view = bases[rng.integers(len(bases))]
        for _ in range(rng.integers(4)):
            axes = rng.permutation(view.dim()).tolist()
            begin, step = rng.integers(3), rng.integers(1, 3)
            view = [view.permute(axes), view[begin::step], view[..., begin:], view[:1]][
                rng.integers(4)
            ]
        views[str(i)] = view
    return views


@pytest.mark.parametrize("zipped", [True, False])
def test_views_have_the_offset_and_order_of_pytorch(tmp_path: Path, zipped: bool) -> None:
    torch = pytest.importorskip("torch")
    file = tmp_path / "views.pt"
    views = views_of(torch, np.random.default_rng(0))
    torch.save(views, file, _use_new_zipfile_serialization=zipped)
    content, found = file.read_bytes(), pytorch.read(file).tensors
    assert list(found) == list(views)
    orders = []
    for name, view in views.items():
        entry = found[name]
        assert entry.shape == tuple(view.shape)
        assert f"torch.{entry.dtype}" == str(view.dtype)
        transposed = view.dim() == 2 and view.t().is_contiguous()
        assert entry.order == ("C" if view.is_contiguous() else "F" if transposed else None)
        orders.append(entry.order)
        if entry.order is not None and view.numel():
            stored = (view if entry.order == "C" else view.t()).contiguous()
            data = stored.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert entry.offset is not None
            assert content[entry.offset : entry.offset + len(data)] == data
    assert {"C", "F", None} == set(orders)


# Files written by hand, in PyTorch's two layouts

MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
SYSTEM = b"\x80\x02}X\x0d\0\0\0little_endian\x88s."


def put(value: Any) -> bytes:
    """Return the opcodes that push a value; bytes within it are inserted as opcodes."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, tuple):
        return b"(" + b"".join(map(put, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(put, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(map(put, itertools.chain(*value.items()))) + b"u"
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]  # without PROTO and STOP


def name(module: str, attribute: str) -> bytes:
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def storage(key: Any, numel: Any, kind: bytes = name("torch", "FloatStorage")) -> bytes:
    return put(("storage", kind, key, "cpu", numel)) + b"Q"


def tensor(
    view: bytes, shape: Any, strides: Any = None, offset: Any = 0, *rest: Any, call: str = "_v2"
) -> bytes:
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    hooks = name("collections", "OrderedDict") + b")R"
    arguments = (view, offset, shape, strides, False, hooks, *rest)
    return name("torch._utils", f"_rebuild_tensor{call}") + put(arguments) + b"R"


def program(value: Any) -> bytes:
    return b"\x80\x02" + put(value) + b"."


def zipped(pickled: bytes, storages: Mapping[str, bytes] | None = None, **entries: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for entry, content in entries.items():
            archive.writestr(f"archive/{entry}", content)
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return buffer.getvalue()


def legacy(pickled: bytes, storages: Mapping[str, bytes], width: int = 4) -> bytes:
    data = b"".join(struct.pack("<q", len(each) // width) + each for each in storages.values())
    return MAGIC + program(1001) + SYSTEM + pickled + program(list(storages)) + data


ONE = program({"x": tensor(storage("0", 6), (2, 3))})
DATA = {"0": bytes(range(24))}
SMALL_FILES = {"zip": zipped(ONE, DATA, byteorder=b"little"), "legacy": legacy(ONE, DATA)}


def opened(file: Path, content: bytes) -> pytorch.Content:
    file.write_bytes(content)
    return pytorch.read(file)


def rejected(file: Path, content: bytes, *words: str) -> None:
    file.write_bytes(content)
    assert refused(file, *words, read=pytorch.read).startswith(str(file))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.pt"


def test_handwritten_files_are_read(file: Path) -> None:
    """The files that the following tests change are valid."""
    for content in (zipped(ONE, DATA), *SMALL_FILES.values()):
        (entry,) = opened(file, content).tensors.values()
        assert (entry.shape, entry.dtype, entry.order) == ((2, 3), "float32", "C")
        assert entry.offset is not None
        assert content[entry.offset : entry.offset + 24] == DATA["0"]


KINDS = ["Double", "Long", "Int", "Short", "Char", "Byte", "Bool"]
DTYPES = ["float64", "int64", "int32", "int16", "int8", "uint8", "bool"]


@pytest.mark.parametrize(("kind", "dtype"), list(zip(KINDS, DTYPES, strict=True)))
def test_storages_of_other_dtypes(file: Path, kind: str, dtype: str) -> None:
    width = np.dtype(dtype).itemsize
    typed = storage("0", 6, name("torch", f"{kind}Storage"))
    content = zipped(program({"x": tensor(typed, (3,), (2,), 1)}), {"0": bytes(6 * width)})
    (entry,) = opened(file, content).tensors.values()
    assert (entry.dtype, entry.order) == (dtype, None)
    aligned = opened(file, zipped(program({"x": tensor(typed, (3,))}), {"0": bytes(6 * width)}))
    assert entry.offset == (aligned.tensors["x"].offset or 0) + width


def test_an_untyped_storage_with_a_dtype_of_its_own(file: Path) -> None:
    untyped = storage("0", 12, name("torch.storage", "UntypedStorage"))
    dtype = name("torch", "uint16")
    content = program({"x": tensor(untyped, (2, 2), (1, 2), 2, dtype, call="_v3")})
    (entry,) = opened(file, zipped(content, {"0": bytes(12)})).tensors.values()
    assert (entry.shape, entry.dtype, entry.order) == ((2, 2), "uint16", "F")
    beyond = program({"x": tensor(untyped, (2, 2), (1, 2), 3, dtype, call="_v3")})
    rejected(file, zipped(beyond, {"0": bytes(12)}), "goes beyond its storage of 12 bytes")


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (tensor(storage("0", 6), (2, 3), (3, 1), 1), "goes beyond its storage of 24 bytes"),
        (tensor(storage("0", 6), (2, 3), (-3, 1)), "integers of at least 0, got -3"),
        (tensor(storage("0", 6), (2, True), (3, 1)), "integers of at least 0, got True"),
        (tensor(storage("0", 6), (2, 3), (3,)), "strides"),
        (tensor(storage("0", 6), [2, 3], (3, 1)), "expected up to 8 integers"),
        (tensor(storage("0", 6), (2**62, 2**62), (2**62, 2**62)), "goes beyond its storage"),
        (tensor(storage("0", 6), (2, 3), (3, 1), 0, {"neg": True}), "no metadata"),
        (tensor(storage("0", 6), (2, 3), (3, 1), 0, None, None), "expected 6 arguments"),
        (tensor(put(None), (2, 3)), "expected a storage, got NoneType"),
        (tensor(storage("0", 6), (2, 3), call="_v3"), "expected 7 arguments"),
        (tensor(storage("0", 6), (1,), (1,), 0, "torch.bool", call="_v3"), "expected a dtype"),
        (tensor(storage("0", 2**62), (2, 3)), "storage 0: expected 18,446,744,073,709,551,616"),
        (tensor(storage("1", 6), (2, 3)), "storage 1: expected 24 bytes, it is missing"),
        (tensor(storage("0", 5), (1,)), "storage 0: expected 20 bytes, got 24"),
        (tensor(storage(0, 6), (2, 3)), "persistent id"),
        (tensor(storage("0", 6, put("FloatStorage")), (2, 3)), "persistent id"),
        (tensor(put("0") + b"Q", (2, 3)), "persistent id"),
        (name("torch._utils", "_rebuild_parameter") + put((1, False, None)) + b"R", "a parameter"),
        (name("torch._utils", "_rebuild_tensor") + put((1, 2)) + b"R", "expected 4 arguments"),
        (name("collections", "OrderedDict") + put(([],)) + b"R", "expected no arguments"),
        (name("collections", "OrderedDict") + put([]) + b"R", "calls collections.OrderedDict"),
        (name("torch", "Size") + b")R", "torch.Size: expected one argument"),
        (name("torch", "device") + b")R", "torch.device: expected a name"),
        (put("os.system") + put(("true",)) + b"R", "calls 'os.system', which is refused"),
    ],
)
def test_an_impossible_tensor(file: Path, view: bytes, words: str) -> None:
    rejected(file, zipped(program({"x": view}), DATA), words)


@pytest.mark.parametrize("value", [3, "x", None, [], (), {}, {"a": 1}, {"model": {}}])
def test_a_pickle_of_something_else(file: Path, value: Any) -> None:
    words = "model_args" if value == {"model": {}} else "state dict"
    rejected(file, zipped(program(value), DATA), words)
    rejected(file, legacy(program(value), {}), words)


# Inconsistent zip archives and legacy files


def deflated() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", ONE)
        archive.writestr("archive/data/0", bytes(1 << 20))
    return buffer.getvalue()


TWICE = zipped(ONE, DATA, **{"data/a": b"", "data/b": b""}).replace(b"data/b", b"data/a")
TWO_SIZES = {"x": tensor(storage("0", 6), (2, 3)), "y": tensor(storage("0", 5), (5,))}
NO_SIZES = {"model": {"wte.weight": tensor(storage("0", 6), (2, 3))}}


def directory_entry(content: bytes, entry: str) -> int:
    """Return the offset of an entry in an archive's directory."""
    return content.rindex(b"PK\x01\x02", 0, content.rindex(entry.encode()))


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (42, 2**31, "beyond the end"),
        (42, 0, "overlaps"),
        (42, 1, "overlaps"),
        (20, 23, "its two sizes differ"),
        (24, 2**31, "its two sizes differ"),
        (24, 2**32 - 1, ""),
        (42, 2**32 - 1, ""),
        (8, 1, "encrypted"),
        (10, 99, "compressed"),
    ],
)
def test_an_inconsistent_zip_entry(file: Path, offset: int, value: int, words: str) -> None:
    content = bytearray(zipped(ONE, DATA))
    at = directory_entry(bytes(content), "archive/data/0") + offset
    width = 2 if offset < 20 else 4
    content[at : at + width] = value.to_bytes(width, "little")
    rejected(file, bytes(content), words)


def zip64(content: bytes, size: int, count: int = 2) -> bytes:
    """Return the archive with an end record that gives the directory's size in 64 bits."""
    end = content.rindex(b"PK\x05\x06")
    begin = struct.unpack("<I", content[end + 16 : end + 20])[0]
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, begin)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    old = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return content[:end] + record + locator + old


def test_a_directory_of_64_bits(file: Path) -> None:
    content = zipped(ONE, DATA)
    end = content.rindex(b"PK\x05\x06")
    right = end - struct.unpack("<I", content[end + 16 : end + 20])[0]
    assert opened(file, zip64(content, right)).tensors.keys() == {"x"}
    for wrong in (0, right - 1, right + 1, 2**40, 2**63, 2**64 - 1):
        rejected(file, zip64(content, wrong))


def test_a_directory_larger_than_any_checkpoint_has(file: Path) -> None:
    """The file is sparse; its directory is never read."""
    content = zipped(ONE, DATA)
    end = content.rindex(b"PK\x05\x06")
    with file.open("wb") as stream:
        stream.write(content[:end])
        stream.seek(1 << 32)
        size = (1 << 32) - content.index(b"PK\x01\x02")
        stream.write(content[end : end + 12] + struct.pack("<IIH", size, end, 0))
    with bounded():
        refused(file, "expected a part of at most 4,194,304 bytes", read=pytorch.read)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (deflated(), "zip entry archive/data.pkl: compressed or encrypted"),
        (zipped(ONE, {}).replace(b"data.pkl", b"deta.pkl"), "found archive/deta.pkl"),
        (TWICE, "two entries of one name"),
        (zipped(ONE, DATA, byteorder=b"big"), "byte order 'little'"),
        (zipped(ONE, DATA, byteorder=b" " * 10000), "byte order 'little'"),
        (zipped(program(TWO_SIZES), DATA), "two types or sizes"),
        (zipped(program({1: tensor(storage("0", 6), (2, 3))}), DATA), "got other entries: 1"),
        (zipped(program(NO_SIZES), DATA), "expected model_args, a dictionary of sizes, next to"),
        (b"", "starts with b''"),
        (MAGIC, "truncated"),
        (MAGIC + program(1000) + SYSTEM, "legacy layout 1001, got 1000"),
        (MAGIC + program(1001) + program({"little_endian": False}), "byte order"),
        (MAGIC + program(1001) + SYSTEM + ONE + program([0]), "the names of the storages"),
        (MAGIC + program(1001) + SYSTEM + ONE + program([]), "1 storages missing: 0"),
        (legacy(ONE, {"1": DATA["0"]}), "storage 1: it does not match the pickle"),
        (legacy(ONE, {"0": bytes(24), "1": b""}), "storage 1: it does not match the pickle"),
        (legacy(ONE, DATA)[:-1], "truncated: storage 0 of 24 bytes goes beyond the end"),
        (legacy(ONE, DATA)[:-25], "storage 0: it does not match the pickle"),
        (pickle.dumps({"a": 1}), "expected a file of torch.save"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    ],
    ids=itertools.count(),  # zip files hold the time
)
def test_an_inconsistent_file(file: Path, content: bytes, words: str) -> None:
    rejected(file, content, words)


# Pickles that would execute code


class Hostile:
    """An object that creates a folder when Python unpickles it."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


class WithState(Hostile):
    def __reduce__(self) -> Any:
        return OrderedDict, (), Hostile(self.canary)


class WithItems(Hostile):
    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter([("a", Hostile(self.canary))])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("hostile", [Hostile, WithState, WithItems])
def test_no_code_of_a_pickle_is_executed(
    file: Path, tmp_path: Path, protocol: int, hostile: type[Hostile]
) -> None:
    canary = tmp_path / "canary"
    pickled = pickle.dumps({"x": hostile(canary)}, protocol)
    for content in (zipped(pickled, DATA), legacy(pickled, DATA), pickled):
        rejected(file, content)
        assert not canary.exists()
    pickle.loads(pickled)  # Python's own unpickler executes it
    assert canary.exists()


SHELL = put("touch canary")
ALLOWED = b".\x80N\x88\x89KMJ\x8aGX()\x85\x86\x87t]ae}sucRbQqrhj"
OPCODES_REFUSED = [
    (code.code.encode("latin-1") + bytes(8), f"opcode {code.name} of the pickle is refused")
    for code in pickletools.opcodes
    if code.code.encode("latin-1") not in ALLOWED
]


@pytest.mark.parametrize(
    ("opcodes", "words"),
    [
        *OPCODES_REFUSED,
        (name("os", "system") + SHELL + b"\x85R", "refers to os.system, which is refused"),
        (name("builtins", "getattr") + SHELL + b"\x85R", "refers to builtins.getattr"),
        (name("torch", "FloatStorage.from_file") + b")R", "refers to torch.FloatStorage.from_file"),
        (name("torch._utils", "sys.modules") + b".", "refers to torch._utils.sys.modules"),
        (name("os\x1b[31m", "system"), "refers to os\\x1b[31m.system"),
        (name(r"t\x6frch", r"load\xZZ"), r"refers to t\x6frch.load\xZZ"),  # not an escape
        (name("o" * 300, "system"), "a name that does not end within 256 bytes"),
        (b"c\xff\xfe\nsystem\n", "damaged pickle"),
        (b"\xff", "opcode 0xff of the pickle is refused"),
        (b"\x80\x04", "expected a pickle of protocol 2, got protocol 4"),
        (b"\x8a\xff" + b"\x7f" * 255, "an integer of 255 bytes in the pickle is refused"),
        (b"X" + struct.pack("<I", 2**32 - 1), "truncated: its pickle goes beyond the end"),
        (b"X\x02\0\0\0\xff\xff", "damaged pickle"),
        (b"r\xff\xff\xff\xffj\xff\xff\xff\xff", "got other entries: x"),
        *((opcodes, "damaged pickle") for opcodes in (b"h\x07", b"u", b"(R", b"(b", b"\x87", b"t")),
        (b"]" + put(1) + put(1) + b"s", "sets items of list"),
        (b"}" + put(1) + b"a", "appends to dict"),
        (b"}(" + put(1) + b"u", "a key of a dictionary has no value"),
        (b"}" + put((1,)) + put(1) + b"s", "as keys of dictionaries, got tuple"),
        (b"}" + put(1.5) + put(1) + b"s", "as keys of dictionaries, got 1.5"),
        (name("torch", "Size") + b"}b", "sets attributes of torch.Size"),
        (name("collections", "OrderedDict") + b")R" + b"Nb", "sets attributes of OrderedDict"),
        (storage("0", 6) + b"}b", "sets attributes of Storage"),
        (storage("0", 6) + put(1) + b"a", "appends to Storage"),
    ],
)
def test_an_opcode_or_a_name_that_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opcodes: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled = b"\x80\x02}" + put("x") + opcodes + b"s."
    for content in (zipped(pickled, DATA), legacy(pickled, {})):
        with bounded():
            rejected(file, content, words)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


class bounded:  # noqa: N801  (used as a statement)
    """Assert that the block allocates at most 5 MB."""

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *_: object) -> None:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e6


def doubled(times: int) -> bytes:
    """Return opcodes of t = (), then `times` times t = (t, t)."""
    return b")" + b"".join(b"q\x00h\x00\x86" for _ in range(times))


BOMBS: dict[str, bytes] = {
    "tuples in tuples": program(b")" + b"\x85" * 20_000),
    "tuples that double": program(doubled(200)),
    "a name that doubles": program({doubled(200): 1}),
    "a value that doubles": program({"x": doubled(200)}),
    "a shape that doubles": program({"x": tensor(storage("0", 6), doubled(200), (1,))}),
    "an argument that doubles": program(name("torch", "Size") + doubled(200) + b"\x85R"),
    "a size that doubles": program({"model": {}, "model_args": {"n_layer": doubled(200)}}),
    "marks": program(b"(" * 20_000),
    "lists": program(b"]" * 20_000),
    "a list in itself": program(b"]q\x00" + b"h\x00a" * 20_000),
    "a dictionary in itself": program(b"}q\x00" + put("model") + b"h\x00s"),
    "a memo of 2^32 entries": program(b")r\xff\xff\xff\xff"),
    "text": program(put("x" * 500_000) * 8),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_time(file: Path, bomb: str) -> None:
    for content in (zipped(BOMBS[bomb], DATA), legacy(BOMBS[bomb], {})):
        file.write_bytes(content)
        begin = process_time()
        refused(file)
        assert process_time() - begin < 5


def test_more_opcodes_than_any_checkpoint_has(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2block.files.checkpoints.pickles.MAX_OPCODES", 1000)
    rejected(file, zipped(program(b"N" * 2000)), "at most 1,000 opcodes, got more")
    monkeypatch.setattr("gpt2block.files.checkpoints.pickles.MAX_BYTES", 1000)
    rejected(file, legacy(ONE * 10, {}))
    rejected(file, zipped(program(put("x" * 100) * 99)), "at most 1,000 bytes, got more")


def test_messages_bound_and_escape_names(tmp_path: Path) -> None:
    """One name is almost a megabyte long, and another has control characters."""
    long = "module." * 100_000
    state = {long + "x": tensor(storage("0", 6), (2, 3)), "\x1b[31m": tensor(storage("0", 6), (6,))}
    shutil.copy(FIXTURES / "config.json", tmp_path)
    (tmp_path / "a.pt").write_bytes(zipped(program(state), DATA))
    with bounded():
        assert len(refused(tmp_path / "a.pt")) <= 500


# Damaged files


OPCODES = st.one_of(
    st.binary(max_size=8),
    st.sampled_from([b"(", b"t", b"u", b"R", b"b", b"s", b"a", b"e", b"Q", b"}", b"]", b")"]),
    st.sampled_from([put("x"), put(3), put(("storage", 1)), storage("0", 6), b"q\x00", b"h\x00"]),
    st.just(tensor(storage("0", 6), (2, 3))),
    st.just(name("collections", "OrderedDict") + b")R"),
)


@settings(max_examples=100)
@given(opcodes=st.lists(OPCODES, max_size=12))
def test_random_opcodes_result_in_data_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, opcodes: Iterable[bytes]
) -> None:
    file = tmp_path_factory.getbasetemp() / "program.pt"
    for start in (b"\x80\x02", b"\x80\x02}"):
        try:
            content = opened(file, zipped(start + b"".join(opcodes) + b".", DATA))
        except CheckpointError:
            continue
        assert all(entry.file == file for entry in content.tensors.values())


# nanoGPT


def model(vocabulary: int, C: int = 2, **changed: Any) -> tuple[bytes, dict[str, bytes]]:
    """Return the pickle of a nanoGPT checkpoint whose tensors share one storage, and its data."""
    numel = vocabulary * C
    half = storage("0", numel, name("torch", "HalfStorage"))
    state = {}
    for key, shape in plain.shapes(plain.Sizes(1, 1, C, 3, vocabulary, tied=False)).items():
        stored = shape[::-1] if key.startswith("h.") else shape  # nn.Linear stores (N, K)
        state[key if "lm_head" in key else f"transformer.{key}"] = tensor(half, stored)
    args: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": C, "block_size": 3}
    args |= {"vocab_size": vocabulary, "bias": True, "dropout": 0.0}
    args = {key: value for key, value in (args | changed).items() if value != "absent"}
    data = {"0": np.arange(numel, dtype=np.float16).tobytes()}
    return program({"model": state, "model_args": args}), data


def nanogpt(file: Path, vocabulary: int = 50, **changed: Any) -> Path:
    file.write_bytes(zipped(*model(vocabulary, **changed)))
    return file


def test_the_padding_of_the_vocabulary_is_dropped(file: Path) -> None:
    checkpoint = Checkpoint.open(nanogpt(file, 50304))
    assert checkpoint.config == GPT2Config(1, 1, 2, 3, 50257)
    wte = checkpoint.stored["wte"].read()
    np.testing.assert_array_equal(wte.ravel(), np.arange(2 * 50257, dtype=np.float16))
    for vocabulary in (50257, 50303, 50432):  # older files have no key `bias`
        checkpoint = Checkpoint.open(nanogpt(file, vocabulary, bias="absent", dropout="absent"))
        assert checkpoint.config.vocab_size == vocabulary
        assert checkpoint.stored["wte"].shape == (vocabulary, 2)


@pytest.mark.parametrize(("changed", "words"), cases("model_args of nanoGPT"))
def test_wrong_model_args(file: Path, changed: dict[str, Any], words: str) -> None:
    refused(nanogpt(file, **changed), words)
