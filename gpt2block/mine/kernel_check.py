"""`check_kernel` checks a user's kernel from Python, as `gpt2block kernels --mine` does."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path

from gpt2block import doctor
from gpt2block.bench import measure
from gpt2block.errors import DeviceError, InputError, shown
from gpt2block.mine import on_cpu, on_gpu
from gpt2block.mine.cases import cases
from gpt2block.mine.comparison import Checked
from gpt2block.mine.finding import Finding, headline, numbered
from gpt2block.mine.kernel import Kernel, matched
from gpt2block.mine.outcome import COLUMNS, RIGHT, CheckOutcome, printed, titled
from gpt2block.mine.source import OWN, read
from gpt2block.notebook import paragraph, table, text_table
from gpt2block.ops.registry import find, stated_sizes

FILE = "my.cu"  # file name of a source that is passed as text
RED = "color: #c62828; font-weight: bold"


@dataclass(frozen=True, repr=False)
class KernelCheck:
    """The result of `check_kernel`. Text and notebooks show it as a table and a verdict.

    `right`: whether every result is correct. `checks`: the results, one for each size and kind of
    inputs, up to the first problem, with `sizes`, `inputs` ("" for random numbers), `geometry`
    (grid, block, bytes of shared memory), `max_abs`, `max_rel` (relative to the largest value) and
    `bound`, the largest relative error that rounding explains. `problem`: None, or the problem,
    with its description `what`, `lines` of the source, sizes `at` which it occurs, the error of a
    wrong result, and `fragile`, true if the kernel is wrong only for special inputs such as large
    scores. `printed`: text that the kernel printed. `device`: "cpu" (the emulator) or "cuda".
    """

    kernel: Kernel
    device: str
    checks: Sequence[Checked]
    problem: Finding | None

    @property
    def right(self) -> bool:
        return self.problem is None

    @property
    def printed(self) -> str:
        return printed(self.checks, self.problem)

    @property
    def verdict(self) -> str:
        """The last lines of the text: the problem and source lines, or that the kernel is right."""
        if self.problem is None:
            return RIGHT if self.device == "cpu" else "Right."
        source = self.kernel.source
        lines = (headline(source, self.problem), *numbered(source, self.problem), self.problem.at)
        return "\n".join(filter(None, lines))

    def __str__(self) -> str:
        parts = [self._title]
        if self.printed:
            parts.append(f"{self.kernel.source.name} prints:\n{self.printed.rstrip()}")
        if self.checks:
            parts.append(text_table(COLUMNS, self._rows()))
        return "\n".join((*parts, self.verdict))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [paragraph(self._title)]
        if self.printed:
            parts.append(paragraph(f"{self.kernel.source.name} prints:\n{self.printed.rstrip()}"))
        if self.checks:
            parts.append(table(COLUMNS, self._rows()))
        style = "" if self.right else RED
        said = f'<pre style="white-space: pre-wrap; {style}">{escape(self.verdict)}</pre>'
        return "\n".join((*parts, said))

    @property
    def _title(self) -> str:
        return titled(self.kernel, self.device == "cpu")

    def _rows(self) -> list[tuple[str | int | float, ...]]:
        return [(row.label, *row.launched, row.max_abs, row.max_rel) for row in self.checks]


def check_kernel(
    operation: str,
    source: str | Path,
    *,
    kernel: str | None = None,
    grid: str | None = None,
    block: str | None = None,
    shared: str | None = None,
    args: str | None = None,
    shape: Mapping[str, int] | None = None,
    dtype: str | None = None,
    layout: str | None = None,
    device: str | None = None,
) -> KernelCheck:
    """Check a user's CUDA kernel, as `gpt2block kernels OPERATION --mine FILE.cu` does.

    Compares every output with float64 at several sizes. The emulator also finds accesses out of
    bounds, races and divergent barriers, with their lines. Prints nothing, and times nothing.

    operation: name of an operation, such as "layernorm". source: the text of a `.cu` file, or its
    path. The emulator compiles and runs the file, including its host code, with your rights: do not
    run a file that you have not read. kernel: name of the kernel, if the file has several. grid,
    block, shared: expressions such as "ceil(N / 8)", which replace the launch line's. args: the
    argument of each parameter, such as "x,out,N,C". shape: the only sizes to check, such as
    {"C": 768}. dtype: dtype of the arrays. layout: layout of weights. device: "cpu" for the
    emulator, which needs g++; "cuda"; or None for a GPU if there is one, else the emulator. Raises
    InputError for an invalid source or argument, and DeviceError. Errors of the kernel, including
    compiler errors, are in the result.
    """
    found = find(operation)
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device: expected 'cpu', 'cuda' or None, got {shown(device)}")
    stated = (
        stated_sizes(found, ",".join(f"{name}={n}" for name, n in shape.items())) if shape else {}
    )
    stored = measure.check_storage(found, dtype, layout)
    file = _file(source)
    try:
        text = read(file, kernel, grid, block, shared)
        user = matched(text, found, stored, args)
    except InputError as error:
        parts = ("source" if part == OWN else part for part in error.parts)
        if file != source:  # source is a text: leave out the temporary folder
            parts = (p.replace(f"{file.parent}/", "") if isinstance(p, str) else p for p in parts)
        raise InputError(*parts) from None
    given = cases(user, stored[1], stated)
    problem = doctor.cuda_problem() if device != "cpu" else "the CPU was requested"
    if device == "cuda" and problem:
        raise DeviceError(f"device 'cuda': {problem}: {doctor.ADVICE}")
    if problem:
        outcome = CheckOutcome.of(
            on_cpu.check_kernel(
                user, given, timed=on_cpu.Timed({**found.workload.sizes, **stated}, stored[1])
            )
        )
    else:
        outcome = CheckOutcome.of(on_gpu.run(on_gpu.ChildJob(user, given, (), None, stored)))
    return KernelCheck(user, "cpu" if problem else "cuda", outcome.checked, outcome.problem)


def _file(source: str | Path) -> Path:
    """Return the path of a source; a source passed as text is written to a temporary file."""
    if not isinstance(source, (str, Path)):
        raise InputError(
            f"source: expected the text of a .cu file or its path, got {shown(source)}"
        )
    if isinstance(source, Path) or not ("\n" in source or "__global__" in source):
        return Path(source)
    data = source.encode(errors="surrogatepass")
    folder = _folder() / hashlib.sha256(data).hexdigest()[:16]  # equal texts compile once
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(data)
    return folder / FILE


@cache
def _folder() -> Path:
    """Create a temporary folder for sources passed as text; delete it when this process ends."""
    folder = tempfile.mkdtemp(prefix="gpt2block-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
