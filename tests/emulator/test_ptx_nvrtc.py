"""The compiler of PTX: its text, its options, and the limits that end it."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from gpt2block.emulator.ptx import cache, nvrtc

ROOT = Path(__file__).parents[2]
KERNEL = 'extern "C" __global__ void f(float* a) { a[threadIdx.x] = a[threadIdx.x] * 2 + 1; }'
BOMB = """#define A(x) x x x x x x x x x x
#define B(x) A(A(A(A(x))))
__global__ void f() { int a = 0; B(B(++a;)) }"""


USUAL_FOLDER = cache.folder.__wrapped__


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)


@pytest.mark.parametrize(
    ("named", "of_caches", "expected"),
    [("here", "xdg", "here"), ("", "xdg", "xdg/gpt2block/emulator"),
     ("", None, "home/.cache/gpt2block/emulator"), ("file", "xdg", None)],
)  # fmt: skip
def test_the_folder_is_of_the_user_or_temporary(
    named: str,
    of_caches: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / named) if named else "")
    of_caches = str(tmp_path / of_caches) if of_caches else "relative"  # a relative path is ignored
    monkeypatch.setenv("XDG_CACHE_HOME", of_caches)
    found = USUAL_FOLDER()
    assert found.stat().st_mode & 0o777 == 0o700
    assert found == tmp_path / expected if expected else tmp_path not in found.parents


def _compile(
    source: str, arch: str = "sm_80", limits: nvrtc.Limits | None = None
) -> nvrtc.Compiled | nvrtc.Refused:
    return nvrtc.compile(source, name="mine.cu", arch=arch, limits=limits or nvrtc.Limits())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_source_becomes_ptx_with_lines_contracted_and_flushed(arch: str) -> None:
    compiled = _compile(KERNEL, arch)
    assert isinstance(compiled, nvrtc.Compiled)
    assert f".target {arch}" in compiled.ptx
    assert ".loc\t1 1 " in compiled.ptx
    assert "fma.rn.ftz.f32" in compiled.ptx


@pytest.mark.parametrize(
    "header", ["cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "mma.h", "cuda/barrier"]
)
def test_the_headers_of_cuda_are_found(header: str) -> None:
    compiled = _compile(f"#include <{header}>\n{KERNEL}")
    assert isinstance(compiled, nvrtc.Compiled), compiled


def test_the_compiler_has_no_random_addresses() -> None:
    """With them, it joins other loads in one process than in the next."""
    if subprocess.run(["setarch", "-R", "true"], check=False).returncode:
        pytest.skip("this system does not permit it")
    assert isinstance(_compile(KERNEL), nvrtc.Compiled)
    process = nvrtc._Child.idle[-1].process
    assert int(Path(f"/proc/{process.pid}/personality").read_text(), 16) & nvrtc.FIXED_ADDRESSES


def test_errors_of_the_source_are_in_the_log() -> None:
    refused = _compile(KERNEL.replace("* 2", "* two"))
    assert isinstance(refused, nvrtc.Refused)
    assert refused.reason == ""
    assert 'mine.cu(1): error: identifier "two" is undefined' in refused.log


@pytest.mark.parametrize(
    ("source", "limits", "reason"),
    [
        (BOMB, nvrtc.Limits(memory_bytes=2**29), "the compiler needs more than 0.5 GiB of memory"),
        (BOMB, nvrtc.Limits(cpu_seconds=1), "the compiler was stopped after 1 CPU seconds"),
    ],
)
def test_a_limit_refuses_the_source_and_not_the_next_one(
    source: str, limits: nvrtc.Limits, reason: str
) -> None:
    refused = _compile(source, limits=limits)
    assert isinstance(refused, nvrtc.Refused)
    assert refused.reason.startswith(reason)
    assert isinstance(_compile(KERNEL), nvrtc.Compiled)


def test_ptx_is_kept_until_a_text_changes(tmp_path: Path) -> None:
    def compiles(source: str, *options: str, file: str = "") -> bool:
        source = f'#line 1 "{file}"\n{source}' if file else source
        with patch.object(nvrtc._Child, "compile", autospec=True, side_effect=run) as ran:
            made = nvrtc.compile(source, name=str(tmp_path / "a.cu"), arch="sm_80", options=options)
        assert isinstance(made, nvrtc.Compiled), made
        assert "multiply" in made.ptx
        assert f'"{file}"' in made.ptx or not file
        return bool(ran.called)

    run = nvrtc._Child.compile
    text = '#include "lib/a.cuh"\nextern "C" __global__ void multiply(float* a) { *a *= FACTOR; }'
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.cuh").write_text('#include "b.cuh"\n', "utf-8")
    (tmp_path / "lib" / "b.cuh").write_text("#define FACTOR 2", "utf-8")
    assert [compiles(text), compiles(text)] == [True, False]
    (tmp_path / "lib" / "b.cuh").write_text("#define FACTOR 3", "utf-8")
    assert [compiles(text), compiles(text), compiles(text, "-G")] == [True, False, True]
    assert [compiles(f"#define MACRO\n{text}"), compiles(text)] == [True, False]
    files = ("/a/my.cu", "/b/my.cu", "/b/other.cu", "/other.cu")
    assert [compiles(text, file=each) for each in files] == [True, False, True, False]
    with patch.object(nvrtc, "_installed", lambda library: ["another version"]):
        assert [compiles(text), compiles(text)] == [True, False]
    for path in tmp_path.glob("*.ptx.gz"):
        path.write_bytes(path.read_bytes()[:99])  # a full disk cuts files
    assert [compiles(text), compiles(text)] == [True, False]
    unknown = text.replace('"lib/a.cuh"', "HEADER").replace("#", '#define HEADER "lib/a.cuh"\n#', 1)
    assert [compiles(unknown), compiles(unknown)] == [True, True]
    cache.trim(0)
    assert compiles(text)


def test_a_version_of_cuda_or_cupy_is_part_of_the_key(tmp_path: Path) -> None:
    library, wheels = tmp_path / "libnvrtc.so.12", tmp_path / "site-packages"
    (wheels / "nvidia").mkdir(parents=True)
    library.write_text("12.8")
    found = []
    with patch.object(nvrtc, "_folders_of_nvidia", lambda: [str(wheels / "nvidia")]):
        for change in (
            lambda: None,
            lambda: library.write_text("12.9.1"),
            (wheels / "nvidia_cuda_runtime_cu12-12.9.79.dist-info").mkdir,
            (wheels / "cupy_cuda12x-14.2.0.dist-info").mkdir,
        ):
            change()
            found.append(nvrtc._installed.__wrapped__(library))
    assert len({*map(str, found)}) == 4


def test_one_process_compiles_several_sources() -> None:
    _compile(KERNEL)
    before = nvrtc._Child.idle[-1].process.pid
    _compile(KERNEL.replace("2", "3"))
    assert nvrtc._Child.idle[-1].process.pid == before


def test_a_process_that_has_ended_is_named_and_replaced() -> None:
    _compile(KERNEL)
    nvrtc._Child.idle[-1].process.kill()
    refused = _compile(KERNEL.replace("2", "3"))
    assert isinstance(refused, nvrtc.Refused)
    assert refused.reason == "the compiler ended by SIGKILL; it may use 3.0 GiB of memory"
    assert isinstance(_compile(KERNEL), nvrtc.Compiled)


def test_a_machine_without_nvrtc_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "find_library", lambda: nvrtc.Refused(nvrtc.MISSING))
    refused = _compile(KERNEL)
    assert isinstance(refused, nvrtc.Refused)
    requirement = refused.reason.partition("pip install ")[2].strip("'")
    assert f'judge = ["{requirement}"]' in (ROOT / "pyproject.toml").read_text("utf-8")


NVRTC = (ROOT / "tests" / "corpus" / "kernels" / "nvrtc.cpp").read_text("utf-8")


def _install(folder: Path, version: str, cupy: int) -> None:
    """Install an NVRTC that needs its builtins; "13.0 alone": without them; "13": damaged.

    Headers of CUDA 13 are in its folder, and headers of CUDA 12 in another one, as in wheels. cupy:
    the version of CUDA that CuPy's wheel states.
    """
    version, alone, _ = version.partition(" alone")
    major, minor, _ = version.partition(".")
    headers = "include" if major == "13" else "../runtime12/include"
    files = {f"lib/libnvrtc.so.{major}": "damaged", f"{headers}/cuda_fp16.h": "",
             f"{headers}/cuda_runtime_api.h": f"#define CUDART_VERSION {major}000",
             "../../.data/_wheel.json": f'{{"cuda": "{cupy}.x"}}'}  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    if minor:
        library = f"libnvrtc.so.{major}"
        (folder / "lib" / library).write_bytes(_built(NVRTC, version, library))
    if minor and not alone:
        builtins = f"libnvrtc-builtins.so.{version}"
        (folder / "lib" / builtins).write_bytes(_built("", version, version))


@functools.cache
def _built(source: str, version: str, soname: str) -> bytes:
    """Return a library whose name is `soname`: NVRTC asks for builtins of its version."""
    flags = ["-shared", "-fPIC", f'-DVERSION="{version}"', f"-Wl,-soname={soname}", "-xc++", "-"]
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(["g++", *flags, "-o", file.name], input=source, text=True, check=True)
        return Path(file.name).read_bytes()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("cupy", "wheels", "said"),
    [
        (12, ["12.9", "13.0"], ["/0/lib/libnvrtc.so.12", "V12.9"]),
        (12, ["13.0", "12.9"], ["/1/lib/libnvrtc.so.12", "V12.9"]),
        (13, ["12.9", "13.0"], ["/1/lib/libnvrtc.so.13", "V13.0"]),
        (0, ["13.0", "13.2", "12.9"], ["/1/lib/libnvrtc.so.13", "V13.2"]),  # without CuPy
        (12, ["12", "13.0"], ["/1/lib/libnvrtc.so.13", "V13.0"]),
        (13, ["13.0 alone", "12.9"], ["/1/lib/libnvrtc.so.12", "V12.9"]),
        (13, ["13.0 alone"], ["/0/lib/libnvrtc.so.13 failed: FAILURE no builtins of 13.0"]),
        (0, ["12", "13.0 alone"], ["12: failed: it cannot be loaded: /", "13: failed: FAILURE no"]),
    ],
)  # fmt: skip
def test_of_several_libraries_one_that_compiles_is_chosen_once(
    cupy: int,
    wheels: list[str],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for number, version in enumerate(wheels):
        _install(tmp_path / "nvidia" / str(number), version, cupy)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(nvrtc, "TOOLKIT", tmp_path)
    monkeypatch.setattr(nvrtc, "_cupy", lambda: tmp_path)
    monkeypatch.setattr(nvrtc._Child, "idle", [])
    for _ in range(2):  # the second time is another process, which tries no library
        monkeypatch.setattr(nvrtc, "find_library", functools.cache(nvrtc.find_library.__wrapped__))
        library = nvrtc.find_library()
        found = f"{library} {_compile(KERNEL)}"
        assert all(text in found for text in said), found
        if isinstance(library, Path):
            own = library.parents[1].name if library.suffix == ".13" else "runtime12"
            assert nvrtc._includes_of_cuda(library)[0] == f"-I{tmp_path}/nvidia/{own}/include"
            monkeypatch.setattr(nvrtc, "_versions", None)


@pytest.mark.parametrize(
    ("library", "own"),
    [({"nvrtcInstallBundledHeaders": lambda *_: 0}, ["-Ih", "-Ih/cccl"]),
     ({"nvrtcInstallBundledHeaders": lambda *_: 1}, []),  # such as a full disk
     ({}, [])],
    ids=["13.3", "not installed", "12.9"],
)  # fmt: skip
def test_headers_in_nvrtc_come_before_others(
    library: dict[str, Any], own: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = SimpleNamespace(nvrtcGetErrorString=SimpleNamespace(), **library)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: functions)
    assert [*nvrtc._Library("libnvrtc.so", "h", "-Iwheel").includes] == [*own, "-Iwheel"]
