"""Names in examples/Containerfile exist: files, extras, options, the address of the check.

No image is built.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra serve is not installed")
pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from tests.command_line import gpt2block
from tests.serving import model_of, serving, small

tomllib = pytest.importorskip("tomllib", reason="Python before 3.11 reads no TOML")
ROOT = Path(__file__).parents[2]
LINES = (ROOT / "examples" / "Containerfile").read_text().splitlines()


def instructions(name: str) -> list[str]:
    """Return the arguments of each instruction of this name."""
    return [line.partition(" ")[2] for line in LINES if line.split(" ")[0] == name]


def test_copied_files_are_what_the_package_is_built_from() -> None:
    copied = {name for line in instructions("COPY") for name in line.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["license-files"], "README.md", "hatch_build.py", "pyproject.toml"]
    needed += project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert copied == set(needed)


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[(.*?)\]"', instructions("RUN")[0])
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_options_are_those_of_the_command(tmp_path: Path) -> None:
    """The command accepts them; without the key, it refuses the address."""
    (tmp_path / "key").write_text("0123456789abcdef\n")
    (entry,) = map(json.loads, instructions("ENTRYPOINT"))
    entry += "--model", "shakespeare"  # the default model may not be installed
    program, *arguments = [tmp_path / "key" if "/" in each else each for each in entry]
    assert program == "gpt2block"
    assert gpt2block(*arguments, "--port", 2**16).error.startswith("--port: expected")
    at = arguments.index("--api-key-file")
    assert "expected --api-key-file" in gpt2block(*arguments[:at], *arguments[at + 2 :]).error


def test_the_check_of_its_health() -> None:
    (line,) = instructions("HEALTHCHECK")
    python, flag, code = json.loads(line.partition("CMD ")[2])
    assert python == "python"
    (port,) = instructions("EXPOSE")
    assert code.count(f"127.0.0.1:{port}/") == 1

    def ended(at: int) -> int:
        changed = code.replace(f":{port}/", f":{at}/")
        return subprocess.run([sys.executable, flag, changed], check=False,
                              stderr=subprocess.DEVNULL).returncode  # fmt: skip

    with serving(model_of(small().engine), rows=1, keys={"one": "0123456789abcdef"}) as running:
        assert ended(running.port) == 0
        running.service.failure = "of this test"
        assert ended(running.port) == 1
    assert ended(running.port) == 1
