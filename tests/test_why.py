"""Steps of the threads that a finding names: events, values, the table and the page."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from gpt2block import InputError, Verdict, emulator, mine
from gpt2block.mine.why import RIGHT as NOTHING_TO_SHOW
from gpt2block.mine.why import ThreadStep, Why
from tests.command_line import gpt2block
from tests.test_verdict import ADD, RIGHT, SHAPE, file_of, validate

pytestmark = pytest.mark.skipif(
    emulator.missing() is not None, reason=f"no CUDA on the CPU: {emulator.missing()}"
)
SHARED = "__shared__ float s[64];\n    "
# Kernel → body, kind of the finding, its last steps: (block and) thread, line in the body, event.
CASES: dict[str, tuple[str, str, list[str]]] = {
    "race": (
        f"{SHARED}s[threadIdx.x] = 0.5f;\n    if (i < n) y[i] = s[threadIdx.x ^ 1];",
        "race",
        ["0 2 writes s[0] = 0.5", "1 2 writes s[1] = 0.5",
         "0 3 reads s[1] = 0.5: nothing orders it after step 2"],
    ),
    "dynamic": (  # an array of another type, in one of two dimensions
        "extern __shared__ int part[];\n    __shared__ unsigned char t[2][32];\n"
        "    t[threadIdx.x / 32][threadIdx.x % 32] = 7, part[threadIdx.x] = -3;\n"
        "    __syncthreads();\n    if (threadIdx.x < 2) part[5] = part[6] + i * t[1][3];",
        "race",
        ["0 5 reads part[6] = -3", "1 5 reads part[6] = -3", "0 5 reads t[1][3] = 7",
         "1 5 reads t[1][3] = 7", "0 5 writes part[5] = -3",
         "1 5 writes part[5] = 4: nothing orders it after step 15"],
    ),
    "blocks": (
        "if (threadIdx.x == 0) y[7] = 0.25f;",
        "race",
        ["0.0 1 writes y[7] = 0.25", "0.0 2 returns",
         "1.0 1 writes y[7] = 0.25: nothing orders it after step 1"],
    ),
    "atomic": (
        "__shared__ int c[2];\n    if (threadIdx.x == 0) c[1] = 4;\n    __syncthreads();\n"
        "    if (threadIdx.x < 2) atomicAdd(&c[1], 2);\n    if (i < 2) y[i] = c[1];",
        "race",
        ["1 3 passes the barrier", "0 4 atomically changes c[1]: 4 → 6",
         "1 4 atomically changes c[1]: 6 → 8",
         "0 5 reads c[1] = 8: nothing orders it after step 7"],
    ),
    "held": (  # a race that is reported when the thread that reads ends
        "__shared__ int c;\n    if (threadIdx.x == 0) c = 0;\n    __syncthreads();\n"
        "    if (i == 1) y[i] = c;\n    if (threadIdx.x == 0) atomicAdd(&c, 1);",
        "race",
        ["1 4 reads c = 0", "1 4 writes y[1] = 0",
         "0 5 atomically changes c: 0 → 1: nothing orders it after step 6"],
    ),
    "vectors": (  # a part of a vector, whole vectors, a type that is not known
        "typedef unsigned word;\n    __shared__ float4 v[64];\n    __shared__ word w[64];\n"
        "    v[threadIdx.x] = make_float4(1, 2, 3, i), w[threadIdx.x] = 10;\n"
        "    ((float4*)y)[0] = v[threadIdx.x], y[1] = v[threadIdx.x].w + w[threadIdx.x];",
        "race",
        ["1 5 reads v[1] = (1, 2, 3, 1)", "0 5 writes y[0] to y[3] = 1, 2, 3, 0",
         "1 5 writes y[0] to y[3] = 1, 2, 3, 1: nothing orders it after step 15"],
    ),
    "local": (
        "__shared__ float* p;\n    float own[2] = {0.5f, 0.25f};\n    if (i == 0) p = own;\n"
        "    __syncthreads();\n    if (i == 1) y[0] = p[1];",
        "race",
        ["1 5 touches a local variable of another thread"],
    ),
    "unwritten_local": (
        "float own[2][3];\n    for (int k = 0; k < 6; ++k)\n"
        "        if (k != n - 55) own[k / 3][k % 3] = k;\n"
        "    if (i < n) y[i] = own[n / 60][n % 60 + 2];",
        "uninitialized",
        ["0 4 reads own[1][2] = nan, which no thread has written"],
    ),
    "read_only": (
        "if (i < n) y[i] = 0.5f;\n    __syncthreads();\n    if (i == 1) y[3] = __ldg(&y[2]);",
        "read_only",
        ["1 2 passes the barrier", "2 2 passes the barrier",
         "1 3 reads y[2] = 0.5: nothing orders it after step 2"],
    ),
    "divergent": (
        f"{SHARED}s[threadIdx.x] = 2;\n    if (threadIdx.x == 3) return;\n    __syncthreads();",
        "divergent_barrier",
        ["0 2 writes s[0] = 2", "3 2 writes s[3] = 2", "0 4 waits at the barrier", "3 5 returns"],
    ),
    "mask": (
        "if (threadIdx.x == 3) return;\n    __threadfence();\n    __syncwarp();",
        "divergent_barrier",
        ["0 2 __threadfence()", "0 3 waits for the lanes 0xffffffff", "3 4 returns"],
    ),
    "outside": (
        "if (i < n) y[i] = 0.5f;\n    if (i == 63) y[i + 1] = a[n + 2];",
        "out_of_bounds",
        ["63 2 reads a[62], outside: a has 60 elements"],
    ),
    "outside_of_shared": (
        "__shared__ float s[8], t[64];\n    t[threadIdx.x] = 0.5f;\n"
        "    for (int k = 0; k <= 8; ++k)\n        if (i == 1) s[k] = t[1];\n"
        "    if (i == 1) y[1] = s[7];",
        "out_of_bounds",
        ["1 4 writes s[7] = 0.5", "1 4 reads t[1] = 0.5",
         "1 4 writes s[8] = 0.5, outside: s has 8 elements"],
    ),
    "unwritten": (
        f"{SHARED}if (threadIdx.x != 5) s[threadIdx.x] = 1;\n    __syncthreads();\n"
        "    if (i < n) y[i] = s[threadIdx.x];",
        "uninitialized",
        ["5 3 waits at the barrier", "5 3 passes the barrier",
         "5 4 reads s[5] = nan, which no thread has written"],
    ),
    "shuffle": (
        "float v = threadIdx.x;\n    v += __shfl_xor_sync(~0u, v, 1) + __any_sync(~0u, i == 2);\n"
        "    y[0] = v;",
        "race",
        ["0 2 waits for the lanes 0xffffffff, sends 0",
         "1 2 waits for the lanes 0xffffffff, sends 1", "0 2 receives 1 from lane 1",
         "1 2 receives 0 from lane 0", "0 2 waits for the lanes 0xffffffff, sends 0",
         "1 2 waits for the lanes 0xffffffff, sends 0", "0 2 receives 1", "1 2 receives 1",
         "0 3 writes y[0] = 2", "1 3 writes y[0] = 2: nothing orders it after step 9"],
    ),
    "assertion": (
        f"{SHARED}s[threadIdx.x] = 2;\n    assert(s[threadIdx.x] < i + 2);",
        "assertion",
        ["0 2 writes s[0] = 2", "0 3 reads s[0] = 2",
         "0 3 assert: s[threadIdx.x] < i + 2"],
    ),
    "wrong_result": (
        "if (i >= n) return;\n    y[i] = 0.25f;\n    y[i] = 0.125f;",
        "wrong_result",
        ["0 2 writes y[0] = 0.25", "0 3 writes y[0] = 0.125"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def all_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file with the kernels of all cases, so that it compiles once."""
    bodies = {name: body for name, (body, *_) in CASES.items()}
    return file_of(
        tmp_path_factory.mktemp("why"), bodies | {"right": RIGHT, "loop": LOOP, "long": LONG}
    )


LONG = (
    "if (i == 0) for (int k = 0; k < 21000; ++k) y[k % n] = k;\n    __syncthreads();\n    y[0] = i;"
)
LOOP = "if (i == 0) for (int k = 0; k < 40; ++k) y[k] = a[k] + b[k];\n    y[0] = i;"


def check(file: Path, name: str, **options: Any) -> Verdict:
    options = {"shape": SHAPE, "device": "cpu", "why": True, **options}
    return mine.check(file, "add", kernel=f"k_{name}", **options)


@pytest.mark.parametrize("name", CASES)
def test_the_last_steps_before_a_problem(name: str, all_kernels: Path) -> None:
    _, kind, expected = CASES[name]
    found = check(all_kernels, name, grid="2" if name == "blocks" else None)
    text = all_kernels.read_text(encoding="utf-8")
    before = text[: text.index(f"k_{name}(")].count("\n") + 2
    assert found.problem
    assert found.problem.kind == kind
    assert found.why
    last = found.why.steps[-len(expected) :]
    threads = [".".join(re.findall(r"\((\d+)", step.thread)) for step in last]
    lines = [step.line and step.line - before for step in last]
    shown = zip(threads, lines, last, strict=True)
    assert [f"{thread} {line} {step.event}" for thread, line, step in shown] == expected
    problems = [step.thread for step in found.why.steps if step.problem]
    assert problems == list(found.why.threads if kind == "divergent_barrier" else [last[-1].thread])
    assert found.as_dict()["why"]["steps"][-1] == last[-1].as_dict()
    validate(found.as_dict())


def test_a_right_kernel_has_no_steps(all_kernels: Path) -> None:
    found = check(all_kernels, "right")
    assert found.why == Why(note=NOTHING_TO_SHOW)
    assert "why" not in check(all_kernels, "right", why=False).as_dict()
    options = ("--kernel", "k_right", "--shape", "N=3,C=20", "--device", "cpu", "--why")
    ended = gpt2block("kernels", "add", "--mine", all_kernels, *options)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, NOTHING_TO_SHOW)


def test_loops_are_folded(all_kernels: Path) -> None:
    found = check(all_kernels, "loop")
    assert found.why
    rows = found.why.rows()
    assert len(found.why.steps) == 122
    assert [row.text for row in rows if row.step is None] == [
        "… 114 steps of the same lines are left out"
    ]
    assert [row.number for row in rows] == [1, 2, 3, 0, 118, 119, 120, 121, 122]


def test_the_last_20_000_steps_are_shown(all_kernels: Path) -> None:
    found = check(all_kernels, "long").why
    assert found
    assert (len(found.steps), found.note) == (20_000, "The first 1,006 steps are left out.")
    assert found.steps[-1].event == "writes y[0] = 1: nothing orders it after step 19999"


def test_a_long_table_keeps_its_first_and_last_rows() -> None:
    why = Why(tuple(ThreadStep("thread (0, 0, 0)", i, f"my.cu:{i}", "returns") for i in range(500)))
    rows = why.rows()
    assert (len(rows), rows[0].number, rows[-1].number) == (60, 1, 500)
    assert [row.text for row in rows if row.step is None] == ["… 441 steps are left out"]


class Page(HTMLParser):
    """A parser that checks that every element is closed, and collects texts and addresses."""

    VOID = ("meta", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_has_the_source_and_the_steps(all_kernels: Path, tmp_path: Path) -> None:
    page = tmp_path / "why.html"
    options = ("--kernel", "k_race", "--shape", "N=3,C=20", "--device", "cpu")
    shown = ("--why", "--why-page", page)
    ended = gpt2block("kernels", "add", "--mine", all_kernels, *options, *shown)
    assert ended.code == 1
    assert "reads s[1] = 0.5: nothing orders it" in ended.out
    assert ended.out.splitlines()[-1] == f"The steps are in {page}."
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    assert not found.open
    assert not found.addresses
    assert not re.search(r"https?://|@import|url\(", text)
    code = all_kernels.read_text(encoding="utf-8").splitlines()
    assert all(not line or line in found.texts for line in code)
    steps = check(all_kernels, "race").why
    assert steps
    for step in steps.steps:
        assert f"{step.line}: {step.event}" in found.texts or step.event in found.texts


def test_a_browser_goes_back_to_the_first_step(all_kernels: Path, tmp_path: Path) -> None:
    if not (chromium := which("chromium")):
        pytest.skip("a browser is needed: chromium")
    options = ("--kernel", "k_race", "--shape", "N=3,C=20", "--device", "cpu")
    page = tmp_path / "why.html"
    gpt2block("kernels", "add", "--mine", all_kernels, *options, "--why-page", page)
    text = page.read_text(encoding="utf-8")
    key = 'document.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));'
    page.write_text(text.replace("show(at);\n</script>", f"show(at);\n{key}\n</script>"), "utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Step 1: thread (0, 0, 0), line" in done.stdout
    assert '<td class="changed">0.5</td>' in done.stdout


def test_steps_need_the_emulator_and_a_kernel(tmp_path: Path) -> None:
    ended = gpt2block("kernels", "add", "--why")
    assert "--why is an option of --mine: add it" in ended.error
    with pytest.raises(InputError, match="device: expected 'cpu', 'cuda'"):
        mine.check(ADD, "add", device="gpu", why=True)
