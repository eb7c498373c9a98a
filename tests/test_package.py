"""The wheel has everything that a user needs, and works without the source tree."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import venv
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from gpt2block.cuda import kernels
from gpt2block.files.checkpoints import BUNDLED_NAMES
from tests.command_line import python

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    python(build, folder, check=True, cwd=ROOT)
    return next(folder.glob("*.whl"))


def test_the_wheel_has_both_packages_and_the_bundled_models(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "kernels_cu").rglob("*.cu*"):
        assert path.relative_to(ROOT).as_posix() in names
    for path in (ROOT / "gpt2block" / "judge").rglob("*.cu"):  # templates and solutions
        assert path.relative_to(ROOT).as_posix() in names
    assert "gpt2block/py.typed" in names
    for file in (ROOT / "gpt2block" / "engine" / "explain" / "template").iterdir():
        assert file.relative_to(ROOT).as_posix() in names
    for name in BUNDLED_NAMES:
        for file in (ROOT / "gpt2block" / "files" / "bundled" / name).iterdir():
            assert file.relative_to(ROOT).as_posix() in names
    folders = {name.split("/")[0] for name in names if "dist-info/" not in name}
    assert folders == {"gpt2block", "kernels_cu"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def content_of(wheel: Path, name: str) -> bytes:
    """Return the content of the only file of the wheel whose path ends with `name`."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (each for each in archive.namelist() if each.endswith(name))
        return archive.read(path)


def test_the_wheel_names_what_others_contributed(wheel: Path) -> None:
    text = content_of(wheel, "licenses/THIRD_PARTY.md").decode()
    for source in ("leetgpu-challenges", "karpathy/llm.c", "ELS-RD/kernl", "tinyshakespeare"):
        assert source in text
    assert "Copyright (c) 2024 Andrej Karpathy" in text  # llm.c's licence requires its notice


def test_the_description_has_no_relative_links_and_no_invented_address(wheel: Path) -> None:
    metadata = email.message_from_bytes(content_of(wheel, "/METADATA"))
    text = str(metadata.get_payload())
    assert "gpt2block generate" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert metadata.get_all("Project-URL") is None


def test_with_an_address_the_links_of_the_description_lead_there() -> None:
    hatch_build = pytest.importorskip("hatch_build", reason="the build hook needs hatchling")
    text = "[a](docs/a.md#b) ![c](docs/c.svg) [d](https://e.f) [g](#h)"
    assert hatch_build.description(text, "https://x.y/z") == (
        "[a](https://x.y/z/blob/main/docs/a.md#b) ![c](https://x.y/z/raw/main/docs/c.svg) "
        "[d](https://e.f) [g](#h)"
    )
    assert hatch_build.description(text, None) == "a  [d](https://e.f) [g](#h)"


def test_installed_outside_the_tree_it_finds_every_kernel_and_runs(
    wheel: Path, tmp_path: Path
) -> None:
    """A clean environment has the wheel alone; dependencies come from the current environment."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    if not python.exists():
        pytest.skip("the layout of virtual environments is another one here")
    site = next((home / "lib").glob("python*")) / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    # sys.path entries, not site folders, so that .pth files of editable installs are not read.
    present = [path for path in sys.path if path.endswith("site-packages")]
    code = (
        f"import sys; sys.path += {present!r}\n"
        "import gpt2block, kernels_cu\n"
        "from importlib.resources import files\n"
        "from gpt2block.cuda import kernels\n"
        "from hashlib import sha256\n"
        "def hash_of(text): return sha256(text.encode()).hexdigest()\n"
        f"assert gpt2block.__file__.startswith({str(site)!r}), gpt2block.__file__\n"
        f"assert kernels_cu.__file__.startswith({str(site)!r}), kernels_cu.__file__\n"
        "for file in kernels.sources():\n"
        "    text = files('kernels_cu').joinpath(file).read_text()\n"
        "    assert text in kernels.program(file)\n"
        "    print(file, *kernels.signatures(file), hash_of(kernels.program(file)))\n"
        "from gpt2block.apps.cli import main\n"
        "main(['block', '--device', 'cpu'])\n"
    )
    before = os.times()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    used = os.times().children_user - before.children_user  # CPU time of the program
    assert used < 10
    for file in kernels.sources():  # the same programs that other tests compile
        program = sha256(kernels.program(file).encode()).hexdigest()
        assert f"{file} {' '.join(kernels.signatures(file))} {program}\n" in done.stdout
    assert "Most likely next tokens" in done.stdout


IMPORTS = """
import importlib, pkgutil, socket, sys, types
def refuse(*_): raise AssertionError("a request to the network")
socket.socket.connect = socket.getaddrinfo = refuse
sys.modules["cupy"] = None
import gpt2block
folder = gpt2block.__path__[0] + "/ops"
names = sorted((m.name for m in pkgutil.iter_modules([folder])), reverse=True)
for name in names: importlib.import_module(f"gpt2block.ops.{name}")
ops = gpt2block.ops
wrong = [name for name in ops.__all__ if isinstance(getattr(ops, name), types.ModuleType)]
assert len(names) > 30 and not wrong, wrong
for module in pkgutil.walk_packages(gpt2block.__path__, "gpt2block."):
    if module.name == "gpt2block.__main__": continue
    try: importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # the extra eval may be absent
        assert error.name == "lm_eval", error
try: ops.add(1, 2)
except gpt2block.DeviceError as error: print(error)
"""


def test_every_module_imports_without_cupy_and_network() -> None:
    """Public operations are functions, although most have a module of the same name."""
    done = python(IMPORTS)
    assert done.returncode == 0, done.stderr
    assert "CuPy cannot be imported" in done.stdout
    assert "`gpt2block check`" in done.stdout
