"""The race: ours and PyTorch's on the same buffers, taking turns, each checked against float64."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from math import ceil, isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2block import doctor
from gpt2block.bench import measure
from gpt2block.bench.ceilings import Ceilings, ceilings
from gpt2block.bench.works import Host, Truth, Work
from gpt2block.block import resolve_device
from gpt2block.cuda import cupy, timing
from gpt2block.errors import InputError, KernelError
from gpt2block.weights.matrix import WeightMatrix

REPLAY_MS = 3.0  # of one contender; a graph's own launch is then nothing
MOST_CALLS = 2000  # captured in one graph
TF32 = "tf32"
REFUSALS = (InputError, KernelError, MemoryError)  # of ours: anything else is a fault

DeviceArray = Any  # cupy.ndarray, which has no type stubs


class Run(NamedTuple):
    """A captured graph: what replays it, and some of the outputs it then has written."""

    replay: Callable[[], None]
    outs: tuple[DeviceArray, ...]


@dataclass(frozen=True)
class Contender:
    """One way to do a work. `capture(rounds)`: a graph that goes so often over all copies."""

    name: str
    peer: bool
    capture: Callable[[int], Run]
    arithmetic: str  # a dtype, or "tf32": what it is held to, and whose ceiling
    note: Callable[[], str] = str


@dataclass(frozen=True)
class Row:
    """One contender at one work."""

    what: str
    work: str
    dtype: str
    sizes: Mapping[str, int]
    contender: str
    peer: bool
    arithmetic: str  # of its products: the dtype, or "tf32"
    us: float
    tflop_s: float
    gb_s: float
    percent_matmul: float  # of cuBLAS on large matrices in the same arithmetic
    percent_copy: float
    intensity: float  # operations for each byte that has to move
    max_abs: float  # off from float64
    max_rel: float  # by the largest value
    right: bool  # whether that is rounding
    copies: int  # of the data, taken in turn
    note: str = ""
    # × each peer: how many times as long that one takes. Only of ours, only between right ones.
    peers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    versions: Mapping[str, str]
    ceilings: Ceilings
    rows: list[Row]
    skipped: list[str]  # a line for each contender that did not run

    @property
    def right(self) -> bool:
        """Whether all that is ours is."""
        return all(row.right for row in self.rows if not row.peer)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(
    works: Iterable[Work],
    device: str | None = None,
    peer: str | None = None,
    progress: Callable[[list[Work]], Iterable[Work]] = iter,
) -> Report:
    """Time every work. peer: "torch" or None. Raises InputError, DeviceError."""
    if peer not in (None, "torch"):
        raise InputError(f"--peer: expected torch, got {peer!r}")
    doctor.require_cuda("the bench")
    index = resolve_device(device)
    if index is None:
        raise InputError(f"--device {device}: the bench times a GPU")
    from gpt2block.bench import ours, torch_peers  # noqa: PLC0415

    rows: list[Row] = []
    skipped: list[str] = []
    with cupy.cuda.Device(index):
        torch = torch_peers.TorchPeers(index) if peer else None  # first: it brings cuBLAS
        best = ceilings()
        for work in progress(list(works)):
            try:
                sets = rotated(work)
                peers = torch.contenders(work, sets) if torch else ()
                entrants = [*ours.contenders(work, sets, index), *peers]
                found, lines = race(work, entrants, len(sets), best)
            except MemoryError as error:
                found, lines = [], [f"{work.what} {work.dtype} {work.name}: {first_line(error)}"]
            rows += found
            skipped += lines
            sets, entrants = [], []  # nobody holds their memory any more
            cupy.get_default_memory_pool().free_all_blocks()
            if torch:
                torch.tidy()
        versions = _versions(index, torch.versions if torch else {})
    return Report(versions, best, rows, list(dict.fromkeys(skipped)))


def rotated(work: Work) -> list[Host]:
    """The inputs on the GPU, in so many copies that a round is several times the L2 cache."""
    cache = cupy.cuda.Device().attributes["L2CacheSize"]
    count = copies_for(work.traffic, cache)
    first = {name: _uploaded(array) for name, array in work.host().items()}
    more = [{name: copied(array) for name, array in first.items()} for _ in range(count - 1)]
    return [first, *more]


def copies_for(traffic: int, cache: int) -> int:
    return min(measure.MOST_SETS, max(1, ceil(measure.CACHES * cache / traffic)))


def _uploaded(array: Any) -> Any:
    if isinstance(array, WeightMatrix):
        return WeightMatrix(cupy.asarray(array.data), array.dtype, None, array.layout)
    return cupy.asarray(array)


def copied(array: Any) -> Any:
    """Another place for an array or a matrix on the GPU."""
    if isinstance(array, WeightMatrix):
        scale = None if array.scale is None else array.scale.copy()
        return WeightMatrix(array.data.copy(), array.dtype, scale, array.layout)
    return array.copy()


def race(
    work: Work, contenders: Iterable[Contender], copies: int, best: Ceilings
) -> tuple[list[Row], list[str]]:
    """A row for each that can run, the first of ours being what is used unasked; and the others."""
    graphs: dict[str, Run] = {}
    ran: list[tuple[Contender, tuple[float, float]]] = []
    calls: dict[str, int] = {}
    skipped = []
    truth = work.truth()
    for each in contenders:
        try:
            graph = each.capture(1)
            rounds = rounds_for(timing.interleaved_ms({"": graph.replay}, count=1)[""], copies)
            if rounds > 1:
                graph = each.capture(rounds)
            off = _check(graph, truth)
        except Exception as error:
            if not each.peer and not isinstance(error, REFUSALS):
                raise
            skipped.append(f"{work.what} {work.dtype}: {each.name}: {first_line(error)}")
            continue
        graphs[each.name] = graph
        calls[each.name] = rounds * copies
        ran.append((each, off))
    times = timing.interleaved_ms({name: graph.replay for name, graph in graphs.items()})
    rows = [
        row_of(work, each, 1e3 * times[each.name] / calls[each.name], off, copies, best)
        for each, off in ran
    ]
    return with_peers(rows), skipped


def rounds_for(once_ms: float, copies: int) -> int:
    """How often a graph goes over all copies, when that once takes `once_ms`."""
    return max(1, min(ceil(REPLAY_MS / max(once_ms, 1e-3)), MOST_CALLS // copies))


def _check(graph: Run, truth: Truth) -> tuple[float, float]:
    """Errors of what the graph writes when it is replayed, over outputs that were NaN before."""
    for out in graph.outs:
        measure.poison(out, ())
    graph.replay()
    found = [errors(out, truth) for out in graph.outs]
    return max((off for off in found), key=lambda off: off[1] if isfinite(off[1]) else np.inf)


def errors(out: DeviceArray, truth: Truth) -> tuple[float, float]:
    """Largest difference of row i from row i mod n of the truth, and that by its largest value.

    On the device where `out` is. NaN as soon as one value is not finite.
    """
    xp = _library(out)
    n, columns = truth.shape
    narrow = out.dtype.name == "bfloat16"  # whose bits are shifted here, on whatever CuPy
    rows = (out.view("uint16") if narrow else out).reshape(-1, columns)
    exact = xp.asarray(truth[: len(rows)])
    worst, finite = xp.zeros((), "float64"), xp.ones((), "bool")
    for start in range(0, len(rows), n):
        part = rows[start : start + n]
        if narrow:
            part = (part.astype("uint32") << np.uint32(16)).view("float32")
        off = xp.abs(part.astype("float64") - exact[: len(part)])
        worst = xp.maximum(worst, off.max())
        finite = finite & xp.isfinite(off).all()
    if not bool(finite):
        return nan, nan
    largest = float(np.abs(truth[: len(rows)]).max())
    return float(worst), float(worst) / largest


def _library(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return np
    return cupy


def row_of(
    work: Work,
    each: Contender,
    us: float,
    off: tuple[float, float],
    copies: int,
    best: Ceilings,
) -> Row:
    """What a time means."""
    tflop_s, gb_s = 1e-6 * work.flops / us, 1e-3 * work.traffic / us
    return Row(
        what=work.what,
        work=work.name,
        dtype=work.dtype,
        sizes=work.sizes,
        contender=each.name,
        peer=each.peer,
        arithmetic=each.arithmetic,
        us=us,
        tflop_s=tflop_s,
        gb_s=gb_s,
        percent_matmul=100 * tflop_s / best.tflop_s[each.arithmetic],
        percent_copy=100 * gb_s / best.copy_gb_s,
        intensity=work.flops / work.traffic,
        max_abs=off[0],
        max_rel=off[1],
        right=off[1] <= tolerance(work, each.arithmetic),  # False for NaN
        copies=copies,
        note=each.note(),
    )


def tolerance(work: Work, arithmetic: str) -> float:
    """The largest error, by the largest value, that counts as rounding."""
    dtype = "float16" if arithmetic == TF32 else arithmetic  # as many bits in both
    return work.roundings * measure.tolerance(dtype)


def with_peers(rows: list[Row]) -> list[Row]:
    """Beside each of ours how it stands against every peer; a wrong result counts for nothing."""
    peers = {row.contender: row.us for row in rows if row.peer and row.right}
    return [
        row
        if row.peer or not row.right
        else replace(row, peers={name: us / row.us for name, us in peers.items()})
        for row in rows
    ]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _versions(index: int, torch: Mapping[str, str]) -> dict[str, str]:
    properties = cupy.cuda.runtime.getDeviceProperties(index)
    runtime = cupy.cuda.runtime.runtimeGetVersion()
    nvrtc = cupy.cuda.nvrtc.getVersion()
    found = {
        "GPU": properties["name"].decode(),
        "SMs": str(properties["multiProcessorCount"]),
        "driver": _driver(),
        "driver's CUDA": _dotted(cupy.cuda.runtime.driverGetVersion()),
        "CUDA": _dotted(runtime),
        "NVRTC": ".".join(map(str, nvrtc)),
        "CuPy": cupy.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        **torch,
    }
    with suppress(PackageNotFoundError):
        found["gpt2block"] = version("gpt2block")
    return found


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's own version, where the kernel module shows it."""
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else "unknown"
