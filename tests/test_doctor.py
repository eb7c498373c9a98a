"""The doctor distinguishes the problems of a machine, and names the command that fixes each."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2block import doctor
from gpt2block.doctor import Check, CuPy, Driver, VisibleDevice
from gpt2block.errors import DeviceError

NAMES = [
    *("gpt2block", "Python", "NumPy", "CuPy", "driver"),
    *("device", "NVRTC", "headers", "compile cache"),
]
H200 = VisibleDevice("NVIDIA H200", (9, 0), 132, 150_000_000_000)
V100 = VisibleDevice("Tesla V100", (7, 0), 80, 16 << 30)
P100 = VisibleDevice("Tesla P100", (6, 0), 56, 16 << 30)
GOOD = Driver("libcuda.so.1", cuda=(13, 0), devices=(H200,))
CUPY12 = CuPy("cupy-cuda12x", "14.2.0", None, 12, (12, 9))
CUPY13 = CuPy("cupy-cuda13x", "14.2.0", None, 13, (13, 0))

needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)
needs_cc = pytest.mark.skipif(
    shutil.which("gcc") is None or not sys.platform.startswith("linux"),
    reason="the made-up driver is compiled with gcc, on Linux",
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Isolate tests from the user's compile cache, CUDA_VISIBLE_DEVICES and remembered results."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernel_cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    doctor._first_problem.cache_clear()
    yield
    doctor._first_problem.cache_clear()


def refused(check: Check, *words: str, fix: str) -> None:
    """Assert that a check failed with a line that has all words, and a line that fixes it."""
    assert not check.ok
    for word in words:
        assert word in check.detail
    assert fix in check.fix
    assert "\n" not in check.detail + check.fix


class FakeNVRTC:
    """A fake NVRTC with a version and a log of errors for every program."""

    def __init__(self, version: tuple[int, int] | Exception, log: str = "") -> None:
        self.version, self.log = version, log
        self.compiled = self.destroyed = 0

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        if isinstance(self.version, Exception):
            raise self.version
        return self.version

    def createProgram(self, *_: Any) -> int:  # noqa: N802
        return 1

    def compileProgram(self, *_: Any) -> None:  # noqa: N802
        self.compiled += 1
        if self.log:
            raise RuntimeError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, _: int) -> str:  # noqa: N802
        return self.log

    def destroyProgram(self, _: int) -> None:  # noqa: N802
        self.destroyed += 1


def fake_cupy(nvrtc: FakeNVRTC, include: str, build: int = 12090, is_hip: bool = False) -> Any:
    """Return a fake module cupy with the attributes that the doctor reads."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            driver=SimpleNamespace(get_build_version=lambda: build),
            runtime=SimpleNamespace(is_hip=is_hip),
            nvrtc=nvrtc,
        ),
        _core=SimpleNamespace(
            core=SimpleNamespace(
                assemble_cupy_compiler_options=lambda _: ("--std=c++17", f"-I{include}")
            )
        ),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Fake a machine without problems; a test adds a problem by `machine.<fact> = ...`."""
    include = tmp_path / "include"
    include.mkdir()
    (include / doctor.HEADER).touch()
    nvrtc = FakeNVRTC((12, 9))
    here = SimpleNamespace(
        installed={"cupy-cuda12x": "14.2.0"},
        nvrtc=nvrtc,
        include=include,
        cupy=fake_cupy(nvrtc, str(include)),
        driver=GOOD,
    )
    monkeypatch.setattr(doctor, "installed_cupy", lambda: here.installed)
    monkeypatch.setattr(doctor, "import_cupy", lambda: here.cupy)
    monkeypatch.setattr(doctor, "probe_driver", lambda: here.driver)
    return here


def checks() -> dict[str, Check]:
    found = doctor.examine()
    assert [check.name for check in found if check.name != "several GPUs"] == NAMES
    return {check.name: check for check in found}


# --- a machine as a whole


@pytest.mark.usefixtures("machine")
def test_good_machine() -> None:
    found = checks()
    assert [check for check in found.values() if not check.ok] == []
    assert all(check.detail and not check.fix for check in found.values())
    assert found["CuPy"].detail == "cupy-cuda12x 14.2.0, built for CUDA 12"
    assert found["driver"].detail == "CUDA 13.0 (libcuda.so.1)"
    assert found["device"].detail == "0: NVIDIA H200 (compute capability 9.0, 139.7 GiB)"
    assert found["NVRTC"].detail == "12.9"
    assert doctor.cuda_problem() is None


def test_cuda_problem_compiles_nothing_and_is_asked_once(machine: SimpleNamespace) -> None:
    assert doctor.cuda_problem() is None
    assert machine.nvrtc.compiled == 0
    machine.installed = {}
    assert doctor.cuda_problem() is None  # the remembered answer
    doctor._first_problem.cache_clear()
    assert doctor.cuda_problem() == "CuPy is not installed"


def _lose_cache(machine: SimpleNamespace) -> None:
    os.environ["CUPY_CACHE_DIR"] = str(machine.include / doctor.HEADER)  # restored by own_cache


def _lose_header(machine: SimpleNamespace) -> None:
    (machine.include / doctor.HEADER).unlink()
    machine.nvrtc.log = f'could not open source file "{doctor.HEADER}"'


SPOILS: list[tuple[str, Callable[[SimpleNamespace], None], str]] = [
    ("CuPy", lambda m: setattr(m, "installed", {}), "not installed"),
    ("CuPy", lambda m: setattr(m, "cupy", None), "cannot be imported"),
    ("driver", lambda m: setattr(m, "driver", Driver("x", missing="x: not found")), "NVIDIA"),
    ("driver", lambda m: setattr(m, "driver", Driver("x", cuda=(11, 8))), "too old"),
    ("device", lambda m: setattr(m, "driver", Driver("x", cuda=(13, 0))), "no CUDA device"),
    ("NVRTC", lambda m: setattr(m.nvrtc, "version", OSError("libnvrtc")), "libnvrtc"),
    ("headers", _lose_header, "header cuda_fp16.h"),
    ("compile cache", _lose_cache, "compile cache"),
]


@pytest.mark.parametrize(("name", "spoil", "word"), SPOILS, ids=[case[2] for case in SPOILS])
def test_one_spoiled_part_is_the_problem(
    machine: SimpleNamespace, name: str, spoil: Callable[[SimpleNamespace], None], word: str
) -> None:
    spoil(machine)
    first = next(check for check in doctor.examine() if not check.ok)
    assert first.name == name
    assert word in first.detail
    assert first.fix
    assert doctor.cuda_problem() == first.detail


def test_what_depends_on_a_failed_check_says_so(machine: SimpleNamespace) -> None:
    machine.installed, machine.driver = {}, Driver("x", missing="x: not found")
    found = checks()
    refused(found["device"], "not examined", "driver", fix="driver")
    refused(found["NVRTC"], "not examined", "CuPy", fix="CuPy")
    refused(found["headers"], "not examined", "NVRTC", fix="NVRTC")
    refused(found["compile cache"], "not examined", "CuPy", fix="CuPy")
    assert not Path(doctor.cache_directory()).exists()  # no cache is created without CuPy


def test_the_unforeseen_becomes_a_finding(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_driver", lambda: 1 // 0)
    refused(doctor.examine()[-1], "cannot be examined", "ZeroDivisionError", fix="report")
    assert "ZeroDivisionError" in (doctor.cuda_problem() or "")
    machine.installed = {}
    doctor._first_problem.cache_clear()
    assert doctor.cuda_problem() == "CuPy is not installed"


def test_importing_the_doctor_does_not_import_cupy() -> None:
    script = "import sys; import gpt2block.doctor; sys.exit('cupy' in sys.modules)"
    root = Path(doctor.__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)


# --- Python, NumPy, gpt2block


def test_python() -> None:
    assert doctor.check_python() == Check("Python", True, ".".join(map(str, sys.version_info[:3])))
    refused(doctor.check_python((3, 9, 18)), "3.9.18", fix="3.10")


def test_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_numpy().ok
    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(__version__="1.26.4"))
    refused(doctor.check_numpy(), "1.26.4", fix="numpy>=2.0")

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    refused(doctor.check_numpy(), "No module named 'numpy'", fix="numpy>=2.0")


def test_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # as if another version were installed
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.8.7")
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    here = next(line for line in project.splitlines() if line.startswith("version = "))
    assert f'version = "{doctor.version()}"' == here
    assert doctor.check_package() == Check("gpt2block", True, doctor.version())
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "gpt2block" / "doctor.py"))
    assert doctor.version() == "9.8.7"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\nversion = "1"\n')
    assert doctor.version() == "9.8.7"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert doctor.version() == "unknown"


# --- CuPy


@pytest.mark.parametrize(
    ("installed", "words", "fix"),
    [
        ({}, ["not installed"], "pip install 'cupy-cuda12x==14.*'"),
        (
            {"cupy-cuda13x": "14.2.0", "cupy-cuda12x": "14.1.0"},
            ["cupy-cuda12x 14.1.0 and cupy-cuda13x 14.2.0", "overwrite"],
            "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install",
        ),
        *(
            ({name: "13.6.0"}, [f"{name} 13.6.0", "not built for"], f"uninstall -y {name} &&")
            for name in ("cupy-cuda11x", "cupy-rocm-7-0", "amd-cupy")
        ),
        ({"cupy-cuda12x": "13.6.0"}, ["cupy-cuda12x 13.6.0", "older than"], "cupy-cuda12x==14.*"),
    ],
)
def test_wrong_cupy(installed: dict[str, str], words: list[str], fix: str) -> None:
    check, cupy = doctor.check_cupy(installed)
    assert cupy is None
    refused(check, *words, fix=fix)


def test_plain_cupy_is_judged_by_its_build(machine: SimpleNamespace) -> None:
    for build, is_hip in ((13020, False), (11080, False), (12090, True)):
        machine.cupy.cuda.driver.get_build_version = lambda build=build: build
        machine.cupy.cuda.runtime.is_hip = is_hip
        check, cupy = doctor.check_cupy({"cupy": "14.2.0"})
        if cupy is None:
            refused(check, "not built for CUDA 12", fix="uninstall")
        else:
            assert check == Check("CuPy", True, "cupy 14.2.0, built for CUDA 13")
            assert (cupy.name, cupy.major, cupy.nvrtc) == ("cupy", 13, (12, 9))
        assert (cupy is None) == (build != 13020)


def test_broken_cupy_names_the_original_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        wrapped = ImportError("\n=====\nFailed to import CuPy.\n=====")
        raise wrapped from ImportError("libfoo.so: undefined symbol: bar\nand more")

    monkeypatch.setattr(doctor, "import_cupy", broken)
    check, _ = doctor.check_cupy({"cupy-cuda12x": "14.2.0"})
    refused(
        check,
        "cannot be imported: ImportError: libfoo.so: undefined symbol: bar",
        fix="pip uninstall -y cupy-cuda12x && pip install 'cupy-cuda12x==14.*'",
    )


@needs_cupy
def test_cupy_that_cannot_make_its_cache(tmp_path: Path) -> None:
    """CuPy creates the directory on import, so both checks name the cache as cause and fix."""
    (tmp_path / "file").touch()
    script = "from gpt2block import doctor; print(*doctor.examine(), sep='\\n')"
    here = Path(doctor.__file__).resolve().parents[1]
    environment = {**os.environ, "CUPY_CACHE_DIR": str(tmp_path / "file" / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {line.split("'")[1]: line for line in done.stdout.splitlines()}
    for name in ("CuPy", "compile cache"):
        assert "ok=False" in lines[name]
        assert "NotADirectoryError" in lines[name]
        assert "set CUPY_CACHE_DIR" in lines[name]


def test_installed_cupy_reads_the_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in [("cupy-cuda12x", "14.2.0"), ("cupy_cuda13x", "14.1.0")]:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "cupy_xarray-0.1.dist-info").mkdir()
    (tmp_path / "cupy_xarray-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cupy-xarray\nVersion: 0.1\n"
    )
    (tmp_path / "nameless-1.dist-info").mkdir()
    (tmp_path / "nameless-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\n")
    (tmp_path / "cupy_cuda11x-13.6.0.dist-info").mkdir()  # incompletely removed: no METADATA
    real = importlib.metadata.distributions
    here = [str(tmp_path)]
    monkeypatch.setattr(
        importlib.metadata, "distributions", lambda name: real(name=name, path=here)
    )
    assert doctor.installed_cupy() == {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.1.0"}


# --- the driver


@pytest.mark.parametrize(
    ("platform", "library", "fix"),
    [
        ("linux", "libcuda.so.1", "install the NVIDIA driver"),
        ("win32", "nvcuda.dll", "install the NVIDIA driver"),
        ("darwin", "libcuda.dylib", "no CUDA on macOS"),
    ],
)
def test_no_driver(monkeypatch: pytest.MonkeyPatch, platform: str, library: str, fix: str) -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file\nsecond line")

    monkeypatch.setattr(sys, "platform", platform)
    driver = doctor.probe_driver(load)
    assert driver.library == library
    refused(doctor.check_driver(driver, CUPY12), "no working NVIDIA driver", library, fix=fix)


def test_a_library_that_is_no_driver() -> None:
    driver = doctor.probe_driver(lambda _: SimpleNamespace())
    refused(doctor.check_driver(driver, None), "cuDriverGetVersion", fix="install the NVIDIA")


def test_driver_too_old() -> None:
    old = Driver("libcuda.so.1", cuda=(11, 8), devices=(H200,))
    check = doctor.check_driver(old, CUPY12)
    refused(check, "CUDA 11.8", "cupy-cuda12x 14.2.0", "CUDA 12", fix="update the NVIDIA driver")
    refused(doctor.check_driver(old, None), "CUDA 11.8", fix="update the NVIDIA driver")
    middle = Driver("libcuda.so.1", cuda=(12, 4), devices=(H200,))
    assert doctor.check_driver(middle, CUPY12).ok
    check = doctor.check_driver(middle, CUPY13)
    refused(check, "CUDA 12.4", "cupy-cuda13x 14.2.0", "CUDA 13", fix="cupy-cuda12x==14.*")
    assert "uninstall -y cupy-cuda13x nvidia-cuda-nvrtc" in check.fix


def test_driver_that_does_not_start() -> None:
    driver = Driver("x", cuda=(13, 0), code=804, error="cuInit returned 804, COMPAT")
    check = doctor.check_driver(driver, CUPY12)
    refused(check, "cuInit returned 804, COMPAT", fix="cuda-compat")


# --- the device


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_hidden_device(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    check = doctor.check_device(Driver("x", cuda=(13, 0)), CUPY12)
    refused(check, f"CUDA_VISIBLE_DEVICES={value!r}", fix="unset CUDA_VISIBLE_DEVICES")


def test_old_device() -> None:
    pascal = Driver("x", cuda=(12, 8), devices=(P100,))
    refused(doctor.check_device(pascal, CUPY12), "7.0 or more", "P100", "6.0", fix="too old")
    volta = Driver("x", cuda=(13, 0), devices=(V100,))
    assert doctor.check_device(volta, CUPY12).ok
    assert doctor.check_device(volta, None).ok
    check = doctor.check_device(volta, CUPY13)
    refused(check, "CUDA 13", "7.5 or more", "V100", "7.0", fix="cupy-cuda12x==14.*")
    stray = CuPy("cupy-cuda12x", "14.2.0", None, 12, (13, 0))
    refused(doctor.check_device(volta, stray), "7.5 or more", fix="nvidia-cuda-nvrtc")


def test_every_device_is_listed_and_the_first_decides() -> None:
    check = doctor.check_device(Driver("x", cuda=(13, 0), devices=(H200, P100)), CUPY12)
    assert check.ok
    assert "0: NVIDIA H200" in check.detail
    assert "1: Tesla P100 (compute capability 6.0, 16.0 GiB)" in check.detail
    check = doctor.check_device(Driver("x", cuda=(13, 0), devices=(P100, H200)), CUPY12)
    refused(check, "0: Tesla P100", "1: NVIDIA H200", fix="device 1 first in CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("devices", "apart", "words"),
    [
        ([H200, H200], (), "a model can be divided among 2 GPUs"),
        ([H200, H200, H200], ("0 and 2",), "no access to each other's memory: 0 and 2"),
        ([H200, V100], (), "all 2 GPUs: they are of different kinds"),
        ([V100, V100], (), "they have compute capability 7.0, less than 8.0"),
    ],
)
def test_whether_a_model_can_be_divided(
    machine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    devices: list[VisibleDevice],
    apart: tuple[str, ...],
    words: str,
) -> None:
    machine.driver = Driver("libcuda.so.1", cuda=(13, 0), devices=tuple(devices))
    monkeypatch.setattr(doctor, "probe_apart", lambda count: apart)
    check = checks()["several GPUs"]
    assert check.ok  # a fix is only a suggestion here, as one GPU can run kernels
    assert words in check.detail
    assert bool(check.fix) == ("cannot" in check.detail)


@pytest.mark.usefixtures("machine")
def test_describe_device() -> None:
    expected = "NVIDIA H200 (compute capability 9.0, 132 SMs, driver CUDA 13.0, CuPy 14.2.0)"
    assert doctor.describe_device(0) == expected
    for index in (1, -1):
        with pytest.raises(DeviceError, match=f"no CUDA device {index}: 1 visible"):
            doctor.describe_device(index)


# --- NVRTC, headers, cache


@pytest.mark.parametrize("build", [12, 13])
def test_nvrtc_missing(machine: SimpleNamespace, build: int) -> None:
    machine.nvrtc.version = RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12"\n')
    machine.cupy.cuda.driver.get_build_version = lambda: build * 1000
    found = checks()
    assert found["CuPy"].ok
    assert found["device"].ok
    fix = f"pip install '{doctor.TOOLKIT[build]}'"
    refused(found["NVRTC"], "cannot be loaded", "libnvrtc.so.12", fix=fix)
    refused(found["headers"], "not examined", "NVRTC", fix="NVRTC")


def test_nvrtc_newer_than_the_driver() -> None:
    driver = Driver("x", cuda=(12, 4), devices=(H200,))
    assert doctor.check_nvrtc(driver, CUPY12).ok  # 12.9 on 12.4: the major version suffices
    stray = CuPy("cupy-cuda12x", "14.2.0", None, 12, (13, 0))
    check = doctor.check_nvrtc(driver, stray)
    refused(check, "NVRTC 13.0 is newer", "CUDA 12.4", fix="nvidia-cuda-nvrtc")
    assert doctor.check_nvrtc(Driver("x", missing="x"), stray).ok  # no driver to compare


@pytest.mark.parametrize(
    ("cupy", "nvrtc", "fix"),
    [
        (CUPY12, (13, 0), "pip uninstall -y nvidia-cuda-nvrtc nvidia-cuda-runtime && pip install"),
        (CUPY13, (12, 9), "pip install"),
    ],
)
def test_nvrtc_of_another_major_version_than_cupy_is_a_note(
    cupy: CuPy, nvrtc: tuple[int, int], fix: str
) -> None:
    check = doctor.check_nvrtc(GOOD, replace(cupy, nvrtc=nvrtc))
    assert check.ok
    expected = f"{nvrtc[0]}.{nvrtc[1]}, but {cupy.name} 14.2.0 is built for CUDA {cupy.major}"
    assert check.detail == expected
    assert check.fix == f"{fix} '{doctor.TOOLKIT[cupy.major]}'"
    assert doctor.check_nvrtc(GOOD, cupy).fix == ""


def test_a_header_complaint_of_another_kind(machine: SimpleNamespace) -> None:
    machine.nvrtc.log = 'cuda_fp16.h(7): warning: x\ncuda_fp16.h(9): error: identifier "y"\n'
    check = checks()["headers"]
    refused(check, "does not compile", '(9): error: identifier "y"', fix=doctor.TOOLKIT[12])
    assert machine.nvrtc.destroyed == machine.nvrtc.compiled == 1


def test_a_header_found_by_compiling_only(machine: SimpleNamespace) -> None:
    """If NVRTC itself has the header, its absence from the directories is no problem."""
    (machine.include / doctor.HEADER).unlink()
    assert doctor.cuda_problem() is None
    assert machine.nvrtc.compiled == 1


def real_cupy() -> CuPy:
    installed = doctor.installed_cupy()
    if len(installed) != 1:
        pytest.skip("needs exactly one installed CuPy")
    ((name, version),) = installed.items()
    return doctor.probe_cupy(name, version)


@needs_cupy
def test_real_nvrtc_compiles_the_header() -> None:
    cupy = real_cupy()
    assert cupy.major in (12, 13)
    assert cupy.nvrtc is not None
    assert doctor.check_nvrtc(Driver("x"), cupy).ok
    assert doctor.compile_log(cupy.module, doctor.compiler_options(cupy.module)) == ""
    check = doctor.check_headers(cupy, thorough=True)
    assert check.ok
    assert Path(check.detail.removeprefix(f"{doctor.HEADER} from "), doctor.HEADER).is_file()


@needs_cupy
@pytest.mark.parametrize("thorough", [True, False])
def test_real_missing_header_is_named(monkeypatch: pytest.MonkeyPatch, thorough: bool) -> None:
    cupy = real_cupy()
    monkeypatch.setattr(doctor, "compiler_options", lambda _: ("--std=c++17",))
    check = doctor.check_headers(cupy, thorough)
    refused(
        check, "header cuda_fp16.h is in none", fix=f"pip install '{doctor.TOOLKIT[cupy.major]}'"
    )


@needs_cupy
def test_real_missing_header_further_down_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an incomplete installation the header exists, but not a header that it includes."""
    cupy = real_cupy()
    (tmp_path / doctor.HEADER).write_text('#include "vector_types.h"\n')
    monkeypatch.setattr(doctor, "compiler_options", lambda _: (f"-I{tmp_path}",))
    check = doctor.check_headers(cupy, thorough=True)
    refused(check, "header vector_types.h is in none", fix=doctor.TOOLKIT[cupy.major])


def test_cache_is_made_and_counted(tmp_path: Path) -> None:
    check = doctor.check_cache(thorough=True)
    assert check == Check("compile cache", True, f"{tmp_path / 'kernel_cache'} (0 files, 0 bytes)")
    (tmp_path / "kernel_cache" / "a.cubin").write_bytes(bytes(1500))
    (tmp_path / "kernel_cache" / "b.cubin").write_bytes(bytes(500))
    assert "(2 files, 2,000 bytes)" in doctor.check_cache(thorough=True).detail


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("CUPY_CACHE_DIR", str(path))
        refused(doctor.check_cache(True), "cannot be written", str(path), fix="set CUPY_CACHE_DIR")
    monkeypatch.setenv("CUPY_CACHE_DIR", "")
    refused(doctor.check_cache(False), "cannot be written", fix="set CUPY_CACHE_DIR")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="every directory is open to root"
)
def test_read_only_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "closed"))
    refused(doctor.check_cache(True), "cannot be written", "Permission", fix="set CUPY_CACHE_DIR")


def test_default_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR")
    assert Path(doctor.cache_directory()) == Path.home() / ".cupy" / "kernel_cache"


# --- a real shared library instead of the driver, and the real machine

FAKE_DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name, int otherwise) {
    const char *value = getenv(name);
    return value ? atoi(value) : otherwise;
}
int cuDriverGetVersion(int *version) { *version = number("FAKE_VERSION", 13000); return 0; }
int cuInit(unsigned flags) { return flags ? 1 : number("FAKE_INIT", 0); }
int cuDeviceGetCount(int *count) { *count = number("FAKE_COUNT", 1); return 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
          : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 999 ? "CUDA_ERROR_UNKNOWN" : NULL;
    return *name ? 0 : 1;
}
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device == 40 ? "Fake 9000" : "Fake 7000", size);
    return number("FAKE_NAME", 0);
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = ((size_t)(device - 39)) << 36;  /* more than 32 bits hold */
    return 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int other) {
    *can = device < 42 && other < 42;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? (device == 40 ? 9 : 7) : attribute == 76 ? device - 40
           : attribute == 16 ? 100 : -1;
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a fake driver that returns values of environment variables."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(FAKE_DRIVER)
    made = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-o", str(made), str(folder / "cuda.c")]
    subprocess.run(command, check=True)
    return made


@pytest.fixture
def probe(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Return a function that sets the fake driver's answers and probes it."""

    def ask(**answers: int) -> Driver:
        for name, value in answers.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", str(value))
        return doctor.probe_driver(lambda name: ctypes.CDLL(str(library.with_name(name))))

    return ask


@needs_cc
def test_library_with_devices(probe: Callable[..., Driver]) -> None:
    driver = probe(count=2)
    devices = (
        VisibleDevice("Fake 9000", (9, 0), 100, 1 << 36),
        VisibleDevice("Fake 7000", (7, 1), 100, 1 << 37),
    )
    assert driver == Driver("libcuda.so.1", cuda=(13, 0), devices=devices)
    assert doctor.check_driver(driver, CUPY13).ok
    assert "1: Fake 7000 (compute capability 7.1, 128.0 GiB)" in (
        doctor.check_device(driver, CUPY13).detail
    )


@needs_cc
def test_devices_without_access_to_each_other(library: Path) -> None:
    found = doctor.probe_apart(3, lambda name: ctypes.CDLL(str(library.with_name(name))))
    assert found == ("0 and 2", "1 and 2")


@needs_cc
@pytest.mark.parametrize(
    ("answers", "words", "fix"),
    [
        ({"init": 803}, "does not start: cuInit returned 803, CUDA_ERROR_SYSTEM_DRI", "restart"),
        ({"init": 999}, "does not start: cuInit returned 999, CUDA_ERROR_UNKNOWN", "restart"),
        ({"init": 12345}, "cuInit returned 12345, an error without a name", "restart"),
        ({"name": 999}, "cuDeviceGetName returned 999, CUDA_ERROR_UNKNOWN", "restart"),
        ({"version": 12040}, "too old: it supports CUDA 12.4", "cupy-cuda12x==14.*"),
        ({"init": 100}, "no CUDA device", "nvidia-smi"),
        ({"count": 0}, "no CUDA device", "nvidia-smi"),
    ],
)
def test_library_that_fails(
    probe: Callable[..., Driver], answers: dict[str, int], words: str, fix: str
) -> None:
    driver = probe(**answers)
    usable = doctor.check_driver(driver, CUPY13)
    refused(doctor.check_device(driver, CUPY13) if usable.ok else usable, words, fix=fix)
    assert usable.ok == ("no CUDA device" in words)


@needs_cc
def test_library_that_lacks_a_function(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int nothing;\n")
    made = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-o", str(made), str(tmp_path / "empty.c")], check=True)
    driver = doctor.probe_driver(lambda _: ctypes.CDLL(str(made)))
    refused(doctor.check_driver(driver, None), "cuDriverGetVersion", fix="install the NVIDIA")


def test_this_machine() -> None:
    found = checks()
    problem = doctor.cuda_problem()
    broken = [check.detail for check in found.values() if not check.ok]
    for check in found.values():
        assert check.detail
        assert "\n" not in check.detail + check.fix
        assert check.ok or check.fix
    assert problem == (broken[0] if broken else None)


@pytest.mark.skipif(not doctor.probe_driver().missing, reason="this machine has a driver")
def test_this_machine_has_no_driver() -> None:
    found = checks()
    refused(found["driver"], "no working NVIDIA driver", fix="")
    refused(found["device"], "not examined", fix="driver")
    assert doctor.cuda_problem()
    with pytest.raises(DeviceError, match="0 visible"):
        doctor.describe_device(0)
