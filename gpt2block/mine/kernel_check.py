"""`check_kernel`: a user's kernel checked from Python, as `gpt2block kernels --mine` does."""

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
from gpt2block.mine.check import Checked
from gpt2block.mine.finding import Finding, headline, numbered
from gpt2block.mine.kernel import Kernel, matched
from gpt2block.mine.outcome import COLUMNS, RIGHT, CheckOutcome, printed, titled
from gpt2block.mine.source import OWN, read
from gpt2block.notebook import paragraph, table, text_table
from gpt2block.ops.registry import find, stated_sizes

FILE = "my.cu"  # the name of a source that is given as text
RED = "color: #c62828; font-weight: bold"


@dataclass(frozen=True, repr=False)
class KernelCheck:
    """What `check_kernel` has found: a table and a verdict, as text and in a notebook.

    `right`: whether every result is right. `checks`: the results, one for each size and kind of
    inputs, up to the first problem: `sizes`, `inputs` ("" for random numbers), `geometry` (grid,
    block, bytes of shared memory), `max_abs`, `max_rel` (relative to the largest value) and
    `bound`, the largest relative error that is rounding. `problem`: None, or what is wrong:
    `what`, the `lines` of the source, `at` which sizes, the error of a wrong result, and whether
    the kernel is only `fragile`, wrong for special inputs such as large scores. `printed`: the text
    that the kernel prints. `device`: "cpu", which is the emulator, or "cuda".
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
        """The last line of the text: what is wrong, or that nothing is."""
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
    """Check a CUDA kernel of your own, as `gpt2block kernels OPERATION --mine FILE.cu` does.

    It compares every output with float64 at several sizes, and on the emulator finds accesses out
    of bounds, races and divergent barriers, with their lines. It prints nothing, and times nothing.

    operation: such as "layernorm". source: the text of a `.cu` file, or its path. The emulator
    compiles and runs it, host code included, with your rights: run what you have read. kernel: its
    name, if there are several. grid, block, shared: expressions such as "ceil(N / 8)", in place of
    the launch line. args: the argument of each parameter, such as "x,out,N,C". shape: sizes to
    check at, alone, such as {"C": 768}. dtype, layout: of the arrays and of weights. device: "cpu"
    for the emulator, which needs g++, "cuda", or None for a GPU where there is one. Raises
    InputError for a source or argument that cannot be used, and DeviceError; what is wrong with a
    kernel, or does not compile, is in the result.
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
        if file != source:  # a text, whose folder says nothing
            parts = (p.replace(f"{file.parent}/", "") if isinstance(p, str) else p for p in parts)
        raise InputError(*parts) from None
    given = cases(user, stored[1], stated)
    problem = doctor.cuda_problem() if device != "cpu" else "the CPU was requested"
    if device == "cuda" and problem:
        raise DeviceError(f"device 'cuda': {problem}: {doctor.ADVICE}")
    if problem:
        outcome = CheckOutcome.of(on_cpu.check_kernel(user, given, timed={**found.sizes, **stated}))
    else:
        outcome = CheckOutcome.of(on_gpu.run(on_gpu.ChildJob(user, given, (), None, stored)))
    return KernelCheck(user, "cpu" if problem else "cuda", outcome.checked, outcome.problem)


def _file(source: str | Path) -> Path:
    """The path of a source; a text is written to a file."""
    if not isinstance(source, (str, Path)):
        raise InputError(
            f"source: expected the text of a .cu file or its path, got {shown(source)}"
        )
    if isinstance(source, Path) or not ("\n" in source or "__global__" in source):
        return Path(source)
    data = source.encode(errors="surrogatepass")
    folder = _folder() / hashlib.sha256(data).hexdigest()[:16]  # compiled once for each text
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_bytes(data)
    return folder / FILE


@cache
def _folder() -> Path:
    """A folder of this process for texts, which is deleted at its end."""
    folder = tempfile.mkdtemp(prefix="gpt2block-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
