"""Check whether CUDA kernels can run on this machine, and name commands that fix problems.

CuPy reports most problems as "driver version is insufficient". The `probe_` functions therefore
query package metadata, the driver's library (through ctypes) and NVRTC directly. The `check_`
functions only evaluate the answers, so that tests can pass any answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

from gpt2block import cuda
from gpt2block.errors import DeviceError

TOOLKIT = {
    12: "cuda-toolkit[nvrtc,cudart]==12.*,>=12.8",
    13: "cuda-toolkit[nvrtc,cudart,crt]==13.0.*",
}
DRIVER_LIBRARY = {"win32": "nvcuda.dll", "darwin": "libcuda.dylib"}  # default: libcuda.so.1
HEADER = "cuda_fp16.h"
PROGRAM = f'#include <{HEADER}>\nextern "C" __global__ void f(__half* x) {{ *x = __half(1); }}\n'

PIP_NUMPY = "pip install 'numpy>=2.0'"
PIP_CUDA12 = f"pip install 'cupy-cuda12x==14.*' '{TOOLKIT[12]}'"
SET_CACHE = "set CUPY_CACHE_DIR to a directory that can be written"
ADVICE = "`gpt2block check` says what to do"
NO_DEVICE = 100
MIN_DIVIDED = 8, 0  # minimum compute capability of GPUs among which a model can be divided
MAX_GPUS = 8  # maximum GPUs among which a model can be divided
DRIVER_FIX = {  # fixes by error code of the driver
    34: "remove the toolkit's 'stubs' directory from LD_LIBRARY_PATH",
    802: "start the fabric manager: sudo systemctl start nvidia-fabricmanager",
    803: "restart the machine, so that the kernel module and the driver's library match",
    804: "remove the cuda-compat directory from LD_LIBRARY_PATH",
}


@dataclass(frozen=True)
class Check:
    """The result of one check: name, whether it passed, detail, and the command that fixes it.

    A check that passed but has a fix is a note: the installation works, but should be changed.
    """

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class VisibleDevice:
    """A visible device, as the driver describes it."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int

    def __str__(self) -> str:
        size = f"{self.memory / 2**30:.1f} GiB"
        return f"{self.name} (compute capability {_dotted(self.capability)}, {size})"


@dataclass(frozen=True)
class Driver:
    """Results of queries of the driver's library. missing: why the library cannot be called."""

    library: str
    missing: str = ""
    cuda: tuple[int, int] = (0, 0)  # newest CUDA version that the driver supports
    code: int = 0  # error code of the first failed call, which `error` describes
    error: str = ""
    devices: tuple[VisibleDevice, ...] = ()


@dataclass(frozen=True)
class CuPy:
    """An imported CuPy: its distribution, the CUDA major version of its build, its NVRTC."""

    name: str
    version: str
    module: Any
    major: int
    nvrtc: tuple[int, int] | None
    nvrtc_error: str = ""


# Distributions that install the package `cupy`. These distributions are looked up by name, because
# reading the metadata of all installed packages can take a tenth of a second.
_CUPY = (
    "cupy",
    "amd-cupy",
    *(f"cupy-cuda{version}" for version in ("11x", "12x", "13x", "14x", "102", "110", "111")),
    *(f"cupy-rocm-{version}" for version in ("4-2", "4-3", "5-0", "6-0", "7-0")),
)


def installed_cupy() -> dict[str, str]:
    """Return the installed distributions of CuPy with their versions."""
    packages: dict[str, str] = {}
    for name in _CUPY:
        for distribution in importlib.metadata.distributions(name=name):
            with contextlib.suppress(Exception):  # partly removed packages have no metadata
                version = distribution.metadata["Version"]
                packages |= {} if version is None else {name: packages.get(name, version)}
    return packages


def import_cupy() -> Any:
    """Import cupy, which needs no driver, but must be able to create its compile cache."""
    return importlib.import_module("cupy")


def probe_cupy(name: str, version: str) -> CuPy:
    """Import the only installed CuPy, and load its NVRTC to query the version."""
    module = import_cupy()
    major = int(module.cuda.driver.get_build_version()) // 1000
    if module.cuda.runtime.is_hip or major not in TOOLKIT:
        raise ImportError("this CuPy is not built for CUDA 12 or 13")
    try:
        return CuPy(name, version, module, major, tuple(module.cuda.nvrtc.getVersion()))
    except Exception as error:
        return CuPy(name, version, module, major, None, _line(error))


def probe_driver(load: Callable[[str], object] = ctypes.CDLL) -> Driver:
    """Query the driver's library for its version and devices, without creating a context."""
    library = DRIVER_LIBRARY.get(sys.platform, "libcuda.so.1")
    version, count = ctypes.c_int(), ctypes.c_int()
    missing, code, error = "", 0, ""
    devices: tuple[VisibleDevice, ...] = ()
    try:
        cuda = load(library)
        _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
        _call(cuda, "cuInit", 0)
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        devices = tuple(_probe_device(cuda, index) for index in range(count.value))
    except _CallError as failed:
        code, error = failed.args
    except (OSError, AttributeError) as absent:  # no library, or no such function in it
        reason = str(absent).partition("\n")[0]
        missing = f"{library} not found" if "No such file" in reason else reason
    newest = version.value // 1000, version.value % 1000 // 10  # 12040 is CUDA 12.4
    return Driver(library, missing, newest, code, error, devices)


class _CallError(Exception):
    """Raised if a driver call fails. Arguments: the error code, and a description of the error."""


def _call(cuda: Any, function: str, *arguments: object) -> None:
    code, name = int(getattr(cuda, function)(*arguments)), ctypes.c_char_p()
    if code:
        cuda.cuGetErrorName(code, ctypes.byref(name))
        known = (name.value or b"an error without a name").decode()
        raise _CallError(code, f"{function} returned {code}, {known}")


def _probe_device(cuda: object, index: int) -> VisibleDevice:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor, multiprocessors = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    # 75, 76 and 16 are values of the enum CUdevice_attribute in cuda.h.
    for value, attribute in ((major, 75), (minor, 76), (multiprocessors, 16)):
        _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    text, capability = name.value.decode(errors="replace"), (major.value, minor.value)
    return VisibleDevice(text, capability, multiprocessors.value, memory.value)


def probe_apart(count: int, load: Callable[[str], object] = ctypes.CDLL) -> tuple[str, ...]:
    """Return the pairs "0 and 1" of devices of which one cannot access the other's memory."""
    cuda, can = load(DRIVER_LIBRARY.get(sys.platform, "libcuda.so.1")), ctypes.c_int()
    devices, found = [ctypes.c_int() for _ in range(count)], dict[str, None]()
    for index, device in enumerate(devices):
        _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    for a, b in permutations(range(count), 2):
        _call(cuda, "cuDeviceCanAccessPeer", ctypes.byref(can), devices[a], devices[b])
        found |= {} if can.value else {f"{min(a, b)} and {max(a, b)}": None}
    return tuple(found)


def compiler_options(module: Any) -> tuple[str, ...]:
    """Return the options with which CuPy calls NVRTC, mainly include directories."""
    return tuple(module._core.core.assemble_cupy_compiler_options(()))


def compile_log(module: Any, options: tuple[str, ...]) -> str:
    """Return NVRTC's errors for a program that includes cuda_fp16.h, or "" if it compiles."""
    nvrtc = module.cuda.nvrtc
    program = nvrtc.createProgram(PROGRAM, "probe.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, "-arch=sm_75"))
        return ""
    except Exception as error:
        return str(nvrtc.getProgramLog(program)).strip("\0 \n") or _line(error)
    finally:
        nvrtc.destroyProgram(program)


def cache_directory() -> str:
    """Return the directory of CuPy's compiled kernels, which CuPy creates when it is imported."""
    return os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))


def cache_problem() -> str:
    """Try to create and write the compile cache; return a description of the error, or ""."""
    try:
        os.makedirs(cache_directory(), exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_directory()):
            return ""
    except OSError as error:
        return f"CuPy's compile cache cannot be written: {_line(error)}"


def version() -> str:
    """Return the version of gpt2block from pyproject.toml in a source tree, else from metadata.

    The source tree has priority because another version may be installed, too.
    """
    tree = Path(__file__).parents[2] / "pyproject.toml"
    with contextlib.suppress(OSError):  # the package may not be in a source tree
        project = tree.read_text(encoding="utf-8")
        stated = re.search(r'^name = "gpt2block"\nversion = "(.+)"$', project, re.MULTILINE)
        if stated:
            return stated[1]
    try:
        return importlib.metadata.version("gpt2block")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def check_package() -> Check:
    """Report the version of gpt2block; this check always passes."""
    return Check("gpt2block", True, version())


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> Check:
    """Check that Python is version 3.10 or newer."""
    ok = version >= (3, 10)
    return Check("Python", ok, _dotted(version), "" if ok else "install Python 3.10 or newer")


def check_numpy() -> Check:
    """Check that NumPy is version 2.0 or newer."""
    try:
        version = str(importlib.import_module("numpy").__version__)
    except Exception as error:
        return Check("NumPy", False, f"NumPy cannot be imported: {_line(error)}", PIP_NUMPY)
    ok = _major(version) >= 2
    return Check("NumPy", ok, version, "" if ok else PIP_NUMPY)


def check_cupy(installed: Mapping[str, str]) -> tuple[Check, CuPy | None]:
    """Check that exactly one CuPy is installed: 14 or newer, for CUDA 12 or 13, importable."""
    if not installed:
        return Check("CuPy", False, "CuPy is not installed", PIP_CUDA12), None
    names = sorted(installed)
    packages = " and ".join(f"{name} {installed[name]}" for name in names)
    fix = f"pip uninstall -y {' '.join(names)} && {PIP_CUDA12}"
    if len(names) > 1:
        problem = f"{packages} are both installed, and overwrite each other's files"
    elif names[0] not in ("cupy", "cupy-cuda12x", "cupy-cuda13x"):
        problem = f"{packages} is not built for CUDA 12 or 13"
    elif _major(installed[names[0]]) < 14:
        problem = f"{packages} is older than CuPy 14"
    else:
        try:
            cupy = probe_cupy(names[0], installed[names[0]])
            return Check("CuPy", True, f"{packages}, built for CUDA {cupy.major}"), cupy
        except Exception as error:
            problem = f"{packages} is installed but cannot be imported: {_line(error)}"
            fix = SET_CACHE if cache_problem() else fix
    return Check("CuPy", False, problem, fix), None


def check_driver(driver: Driver, cupy: CuPy | None) -> Check:
    """Check that the driver loads, starts, and supports the CUDA version of CuPy."""
    if driver.missing:
        fix = "install the NVIDIA driver (in a container: start it with --gpus all)"
        fix = "none: there is no CUDA on macOS" if sys.platform == "darwin" else fix
        return Check("driver", False, f"no working NVIDIA driver ({driver.missing})", fix)
    if driver.code == cuda.NOT_INITIALIZED:
        return Check("driver", False, cuda.FORKED, cuda.FORKED_FIX)
    if driver.code not in (0, NO_DEVICE):
        fix = DRIVER_FIX.get(driver.code, "run nvidia-smi to see the error; restart the machine")
        return Check("driver", False, f"the NVIDIA driver does not start: {driver.error}", fix)
    needed = cupy.major if cupy else min(TOOLKIT)
    if driver.cuda[0] < needed:
        user = f"{cupy.name} {cupy.version}" if cupy else "gpt2block"
        detail = f"the driver is too old: it supports CUDA {_dotted(driver.cuda)}, {user} needs"
        return Check("driver", False, f"{detail} CUDA {needed}", _downgrade_fix(driver, cupy))
    return Check("driver", True, f"CUDA {_dotted(driver.cuda)} ({driver.library})")


def check_device(driver: Driver, cupy: CuPy | None) -> Check:
    """Check that there is a device, and that NVRTC compiles for device 0, which CuPy uses."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not driver.devices and hidden is not None:
        detail = f"CUDA_VISIBLE_DEVICES={hidden!r} leaves no device visible"
        return Check("device", False, detail, "unset CUDA_VISIBLE_DEVICES")
    if not driver.devices:
        fix = "check that nvidia-smi lists a GPU (in a container: start it with --gpus all)"
        return Check("device", False, "the driver finds no CUDA device", fix)
    devices = "; ".join(f"{index}: {device}" for index, device in enumerate(driver.devices))
    toolkit = (cupy.nvrtc[0] if cupy.nvrtc else cupy.major) if cupy else min(TOOLKIT)
    least = (7, 5) if toolkit >= 13 else (7, 0)
    usable = [index for index, device in enumerate(driver.devices) if device.capability >= least]
    if 0 in usable:
        return Check("device", True, devices)
    if usable:
        fix = f"put device {usable[0]} first in CUDA_VISIBLE_DEVICES"
    elif driver.devices[0].capability >= (7, 0):
        fix = _downgrade_fix(driver, cupy)
    else:
        fix = "none: this GPU is too old, run on NumPy"
    detail = f"with CUDA {toolkit} device 0 must have compute capability {_dotted(least)} or more"
    return Check("device", False, f"{detail}; found {devices}", fix)


def check_several(devices: Sequence[VisibleDevice], apart: Sequence[str]) -> Check:
    """Report whether a model can be divided among all devices; if it cannot, this is a note.

    apart: pairs of devices without access to each other's memory, as `probe_apart` returns them.
    """
    count, kinds = len(devices), {(each.capability, each.multiprocessors) for each in devices}
    problem = ""
    if len(kinds) > 1:
        problem = "they are of different kinds"
    elif count > MAX_GPUS:
        problem = f"expected at most {MAX_GPUS}"
    elif devices[0].capability < MIN_DIVIDED:
        problem = f"they have compute capability {_dotted(devices[0].capability)}, less than 8.0"
    elif apart:
        problem = f"no access to each other's memory: {', '.join(apart)}"
    if problem:
        detail = f"a model cannot be divided among all {count} GPUs: {problem}"
        return Check("several GPUs", True, detail, "choose GPUs with --device, such as cuda:0,1")
    detail = f"a model can be divided among {count} GPUs: one kind, each can access the others"
    return Check("several GPUs", True, detail)


def check_nvrtc(driver: Driver, cupy: CuPy) -> Check:
    """Check that NVRTC, CUDA's run-time compiler, loads and is not newer than the driver.

    If the CUDA major versions of NVRTC and CuPy differ, the result is a note.
    """
    if cupy.nvrtc is None:
        detail = f"NVRTC, CUDA's run-time compiler, cannot be loaded: {cupy.nvrtc_error}"
        return Check("NVRTC", False, detail, f"pip install '{TOOLKIT[cupy.major]}'")
    version = _dotted(cupy.nvrtc)
    if driver.cuda > (0, 0) and driver.cuda[0] < cupy.nvrtc[0]:
        detail = f"NVRTC {version} is newer than the driver's CUDA {_dotted(driver.cuda)}"
        return Check("NVRTC", False, detail, _downgrade_fix(driver, cupy))
    if cupy.nvrtc[0] != cupy.major:
        detail = f"{version}, but {cupy.name} {cupy.version} is built for CUDA {cupy.major}"
        # CuPy prefers the NVRTC and the headers of CUDA 13 to CUDA 12's.
        removed = "pip uninstall -y nvidia-cuda-nvrtc nvidia-cuda-runtime && "
        install = f"pip install '{TOOLKIT[cupy.major]}'"
        fix = install if cupy.major == max(TOOLKIT) else removed + install
        return Check("NVRTC", True, detail, fix)
    return Check("NVRTC", True, version)


def check_headers(cupy: CuPy, thorough: bool) -> Check:
    """Check that CuPy finds CUDA's headers.

    If the header is not found, or if thorough, compile a program that includes it.
    """
    fix = f"pip install '{TOOLKIT[cupy.major]}'"
    options = compiler_options(cupy.module)
    paths = [option[2:] for option in options if option.startswith("-I")]
    headers = [path for path in paths if os.path.isfile(os.path.join(path, HEADER))]
    log = compile_log(cupy.module, options) if thorough or not headers else ""
    absent = re.search(r'(?:could not|cannot) open source file "([^"]+)"', log)
    if absent:
        detail = f"CUDA's header {absent[1]} is in none of CuPy's include directories"
        return Check("headers", False, detail, fix)
    if log:
        message = next((line for line in log.splitlines() if "error" in line), log)
        detail = f"a program that includes {HEADER} does not compile: {message}"
        return Check("headers", False, detail, fix)
    return Check("headers", True, f"{HEADER} from {headers[0] if headers else 'NVRTC'}")


def check_cache(thorough: bool) -> Check:
    """Check that the compile cache can be written. thorough: also report its size."""
    problem, content = cache_problem(), ""
    if problem:
        return Check("compile cache", False, problem, SET_CACHE)
    if thorough:
        with contextlib.suppress(OSError):  # another process may add and remove files
            sizes = [entry.stat().st_size for entry in os.scandir(cache_directory())]
            content = f" ({len(sizes)} files, {sum(sizes):,} bytes)"
    return Check("compile cache", True, cache_directory() + content)


def examine() -> list[Check]:
    """Run every check, after the checks on which it depends; return the results. Never raises."""
    return [check_package(), check_python(), check_numpy(), *_cuda_checks(thorough=True)]


def cuda_problem() -> str | None:
    """Return the reason why kernels cannot run on CUDA device 0, as a clause, or None if they can.

    Compiles nothing and creates no context; therefore does not detect a device without free memory.
    """
    return None if cuda.replaced() else _first_problem()


@functools.cache
def _first_problem() -> str | None:
    return next((check.detail for check in _cuda_checks(thorough=False) if not check.ok), None)


def require_cuda(*what: object) -> None:
    """Raise DeviceError with the reason if kernels cannot run.

    what: parts of the beginning of the message, which name the feature that needs CUDA.
    """
    problem = cuda_problem()
    if problem:
        raise DeviceError(*what, f" cannot be used: {problem}: {ADVICE}")


def describe_device(index: int) -> str:
    """Return a line about a device, its driver and CuPy. Raises DeviceError for a wrong index."""
    if cuda.replaced():
        return "the emulator on the CPU"
    driver = probe_driver()
    if not 0 <= index < len(driver.devices):
        raise DeviceError(f"there is no CUDA device {index}: {len(driver.devices)} visible")
    device = driver.devices[index]
    cupy = " and ".join(installed_cupy().values()) or "not installed"
    hardware = f"compute capability {_dotted(device.capability)}, {device.multiprocessors} SMs"
    return f"{device.name} ({hardware}, driver CUDA {_dotted(driver.cuda)}, CuPy {cupy})"


def _cuda_checks(thorough: bool) -> Iterator[Check]:
    """Yield the checks' results one by one, so that a caller can stop at the first problem."""
    try:
        installed = installed_cupy()
        found, cupy = check_cupy(installed)
        yield found
        driver = probe_driver()
        usable = check_driver(driver, cupy)
        yield usable
        yield check_device(driver, cupy) if usable.ok else _not_examined("device", "driver")
        if thorough and usable.ok and len(driver.devices) > 1:
            yield check_several(driver.devices, probe_apart(len(driver.devices)))
        nvrtc = check_nvrtc(driver, cupy) if cupy else _not_examined("NVRTC", "CuPy")
        yield nvrtc
        if cupy and nvrtc.ok:
            yield check_headers(cupy, thorough)
        else:
            yield _not_examined("headers", "NVRTC")
        yield check_cache(thorough) if installed else _not_examined("compile cache", "CuPy")
    except Exception as error:  # an unexpected error is a failed check
        yield Check("CUDA", False, f"CUDA cannot be examined: {_line(error)}", "report this line")


def _not_examined(name: str, prerequisite: str) -> Check:
    return Check(name, False, f"not examined: needs {prerequisite}", f"fix {prerequisite} first")


def _downgrade_fix(driver: Driver, cupy: CuPy | None) -> str:
    """Return the fix for an old driver or GPU: install CuPy for CUDA 12, if the driver supports it.

    The fix also uninstalls NVRTC and headers of CUDA 13, as CuPy prefers them to CUDA 12's.
    """
    if driver.cuda[0] < 12:
        return "update the NVIDIA driver: CUDA 12 needs 525 or newer"
    name = f"{cupy.name} " if cupy else ""
    return f"pip uninstall -y {name}nvidia-cuda-nvrtc nvidia-cuda-runtime && {PIP_CUDA12}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _major(version: str) -> int:
    number = re.match(r"\d+", version)
    return int(number[0]) if number else 0


def _line(error: BaseException) -> str:
    """Return type and first line of an exception's cause, or of the exception if it has none."""
    error = error.__cause__ or error
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
