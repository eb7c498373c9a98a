"""The doctor: what it asks of the real machine and packages.

What it says of other machines is in tests/golden/commands/check.txt.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

from gpt2block.cuda import doctor
from gpt2block.cuda.doctor import Check, CuPy, Driver
from gpt2block.errors import DeviceError
from tests.setups import Setup

needs_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None, reason="CuPy is not installed"
)


def refused(check: Check, detail: str, fix: str) -> None:
    """Assert that a check failed with a line that has `detail`, and a line that fixes it."""
    assert not check.ok
    assert detail in check.detail
    assert fix in check.fix
    assert "\n" not in check.detail + check.fix


def test_cuda_problem_compiles_nothing_and_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    nvrtc = Setup(monkeypatch, tmp_path).machine("devices=9.0,7.5")
    assert doctor.cuda_problem() is None
    assert nvrtc.compiled == 0
    monkeypatch.setattr(doctor, "installed_cupy", dict)
    assert doctor.cuda_problem() is None  # the remembered answer
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    nvrtc = Setup(monkeypatch, tmp_path).machine("header=no devices=9.0,7.5")
    assert doctor.cuda_problem() is None  # NVRTC itself has the header
    assert nvrtc.compiled == nvrtc.destroyed == 1
    hardware = "compute capability 7.5, 100 SMs, driver CUDA 13.0, CuPy 14.2.0"
    assert doctor.describe_device(1) == f"GPU 7000 ({hardware})"
    for index in (2, -1):
        with pytest.raises(DeviceError, match=f"no CUDA device {index}: 2 visible"):
            doctor.describe_device(index)


def test_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # as if another version were installed
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.8.7")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
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
    fix = f"pip install '{doctor.TOOLKIT[cupy.major]}'"
    refused(check, "header cuda_fp16.h is in none", fix)


@needs_cupy
def test_real_missing_header_further_down_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an incomplete installation the header exists, but not a header that it includes."""
    cupy = real_cupy()
    (tmp_path / doctor.HEADER).write_text('#include "vector_types.h"\n')
    monkeypatch.setattr(doctor, "compiler_options", lambda _: (f"-I{tmp_path}",))
    check = doctor.check_headers(cupy, thorough=True)
    refused(check, "header vector_types.h is in none", doctor.TOOLKIT[cupy.major])


def test_the_cache_is_in_the_home_unless_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    assert Path(doctor.cache_directory()) == Path.home() / ".cupy" / "kernel_cache"


def test_this_machine() -> None:
    doctor._first_problem.cache_clear()
    found = doctor.examine()
    assert all(check.detail and (check.ok or check.fix) for check in found)
    assert found[1] == Check("Python", True, ".".join(map(str, sys.version_info[:3])))
    assert doctor.cuda_problem() == next((each.detail for each in found if not each.ok), None)
    if doctor.probe_driver().missing:
        refused(found[4], "no working NVIDIA driver", "NVIDIA driver")
    refused(doctor.check_python((3, 9, 18)), "3.9.18", "3.10")
