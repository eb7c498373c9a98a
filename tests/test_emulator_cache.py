"""The folder of compiled programs, and the limit of g++."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpt2block.emulator import ShimError, cache, loader
from gpt2block.errors import KernelError

TEXT = 'extern "C" __global__ void f(float* x) { x[0] = 1.0f; }\n'
SLOW = """
template <int N, int M> struct G {
    static constexpr long a = G<N - 1, 2 * M>::a + G<N - 1, 2 * M + 1>::a;
};
template <int M> struct G<0, M> { static constexpr long a = M; };
extern "C" __global__ void f(float* x) { x[0] = G<24, 1>::a; }
"""
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def forget() -> None:
    for function in (cache.folder, cache._persistent, loader._compile, loader._runtime):
        function.cache_clear()
    loader._precompiled.cache_clear()


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    forget()
    yield
    monkeypatch.undo()
    forget()


def source(text: str, folder: Path) -> loader.Source:
    return loader.Source(str(folder / "own.cu"), text)


def test_the_folder_is_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tmp_path / "xdg" / "gpt2block" / "emulator"
    assert cache.folder() == expected
    assert expected.stat().st_mode & 0o777 == 0o700
    assert cache.lasts()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # ignored by the specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    forget()
    assert cache.folder() == tmp_path / "home" / ".cache" / "gpt2block" / "emulator"
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "named"))
    forget()
    assert cache.folder() == tmp_path / "named"


@pytest.mark.parametrize("why", ["a file", "another user"])
def test_a_folder_that_cannot_be_used(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "a file":
        (tmp_path / "xdg").write_text("", "utf-8")
    else:
        monkeypatch.setattr(os, "getuid", lambda: -1)
    assert not cache.lasts()
    assert cache.folder().is_dir()
    assert tmp_path not in cache.folder().parents


def test_the_longest_unused_programs_are_deleted() -> None:
    names = [f"{n}" for n in range(8)]
    for n, name in enumerate(names):
        (cache.folder() / name).write_bytes(bytes(100))
        os.utime(cache.folder() / name, (0, time.time() - 10 * cache.IN_USE_S + n))
    (cache.folder() / "now").write_bytes(bytes(300))
    left = cache.folder() / "tmpleft"
    left.mkdir()
    os.utime(left, (0, 0))
    cache.trim(1200)
    assert not left.exists()
    assert len(list(cache.folder().iterdir())) == 9
    assert cache.found(cache.folder() / "0")  # now the most recently used
    cache.trim(800)
    assert sorted(path.name for path in cache.folder().iterdir()) == ["0", "6", "7", "now"]
    cache.trim(1)
    assert sorted(path.name for path in cache.folder().iterdir()) == ["0", "now"]


@needs_gxx
def test_a_later_process_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loader.compile_kernel_file(source(TEXT, tmp_path))
    forget()
    monkeypatch.setattr(loader, "_compiled", lambda *_: pytest.fail("compiled again"))
    assert loader.compile_kernel_file(source(TEXT, tmp_path)) == made


@needs_gxx
def test_a_program_that_another_process_deletes_is_compiled_again(tmp_path: Path) -> None:
    made = loader.compile_kernel_file(source(TEXT, tmp_path))
    made.unlink()
    assert loader.compile_kernel_file(source(TEXT, tmp_path)) == made
    assert made.exists()


@needs_gxx
def test_a_later_process_shows_the_messages_of_the_compiler(tmp_path: Path) -> None:
    unused = source(TEXT.replace("x[0] =", "if (x = 0) x[0] ="), tmp_path)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader.compile_kernel_file(unused)
        assert "own.cu: g++ says" in str(caught[0].message)
        forget()


@needs_gxx
def test_a_file_that_takes_too_long_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_COMPILE_S", 1)
    runs: list[Any] = []
    run = subprocess.run

    def counted(*args: Any, **options: Any) -> Any:
        runs.append(args)
        return run(*args, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    monkeypatch.setattr(loader, "_runtime", lambda name="": Path(__file__))
    monkeypatch.setattr(loader, "_precompiled", lambda *_: {})
    for races in (False, True):
        with pytest.raises(KernelError, match=r"own\.cu: not judged: g\+\+ needs more than 1 s"):
            loader.compile_kernel_file(source(SLOW, tmp_path), races=races)
    assert sum("unit.cpp" in args[0] for args in runs) == 1  # not tried again
    with pytest.raises(ShimError, match="does not compile"):
        loader.compile_kernel_file(source("wrong", tmp_path / "other"))
