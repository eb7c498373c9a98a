"""Gathers of columns that several GPUs have computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import InputError, reference
from gpt2block.cuda import replaced
from gpt2block.cuda.requests import Launch
from gpt2block.ops import gather
from gpt2block.ops.gather import GATHER, RECEIVE, SEND, Mailboxes
from tests.devices import SOMEWHERE, running_on
from tests.plain import normal

Array = NDArray[Any]


def part(launch: Launch, parts: int) -> Launch:
    """The launch of only some parts of a gather."""
    return Launch(
        launch.name,
        launch.function,
        launch.grid,
        launch.block,
        (*launch.args[:-1], np.int32(parts)),
    )


def gathered(
    cupy: Any, mail: Mailboxes, shares: Sequence[Array], residual: Array | None
) -> list[Array]:
    """The results of all GPUs, which here are streams of one device or, emulated, take turns."""
    firsts = np.cumsum([0, *(share.shape[1] for share in shares)])
    found, rounds = [], []
    for me, share in enumerate(shares):
        out = cupy.full((len(share), int(firsts[-1])), np.nan, share.dtype)
        to = None if residual is None else cupy.asarray(residual)
        inputs = (cupy.asarray(share), to, *mail.of(me).values())
        bound = GATHER.bind_on_device(
            inputs, out if to is None else to, N=int(firsts[-1]), first=int(firsts[me])
        )
        found.append(bound.out)
        rounds.append((inputs, bound.launches))
    for _, launches in rounds:  # a kernel that is loaded later would wait for those that run
        for launch in launches:
            _ = launch.function.shared_size_bytes
    for launches in zip(*(each for _, each in rounds), strict=True):
        if replaced():
            for parts in (SEND, RECEIVE):
                for launch in launches:
                    part(launch, parts).run()
        else:
            for stream, launch in zip(streams(cupy, len(shares)), launches, strict=True):
                with stream:
                    launch.run()
            cupy.cuda.Device().synchronize()
    return [each.get() for each in found]


def streams(cupy: Any, count: int) -> list[Any]:
    cupy.cuda.Device().synchronize()
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


CASES: list[tuple[int, tuple[int, ...], str, bool]] = [
    (1, (5,), "float32", False),
    (1, (128, 128), "float32", True),
    (3, (1, 2, 3), "float32", False),
    (16, (22, 22, 21, 21), "float32", True),
    (7, (64, 128, 32), "float16", False),
    (2, (2, 4, 6, 8), "bfloat16", False),
    (30, (16, 32), "float32", True),
]


@pytest.mark.parametrize("where", SOMEWHERE)
@pytest.mark.parametrize(("M", "columns", "dtype", "adds"), CASES)
def test_all_gpus_get_all_columns(
    where: str,
    M: int,
    columns: tuple[int, ...],
    dtype: str,
    adds: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gather, "CAPACITY", 1024)  # so that some matrices take several rounds
    with running_on(where) as cupy:
        mail = Mailboxes([0] * len(columns))
        for seed in range(4):  # each half of a mailbox is used again
            shares = [normal(seed + n, M, S).astype(dtype) for n, S in enumerate(columns)]
            residual = normal(99, M, sum(columns)) if adds else None
            expected = reference.gathered(shares, residual)
            for result in gathered(cupy, mail, shares, residual):
                np.testing.assert_array_equal(result, expected)
        assert not mail.aborted


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "said"),
    [
        ((2, 3), "float16", {"N": 8, "first": 0}, "even numbers"),
        ((2, 4), "float32", {"N": 8, "first": 5}, "columns 5 to 9: expected columns of 8"),
        ((1, 4), "float32", {"N": 2**22, "first": 0}, "expected at most"),
    ],
)
def test_what_is_refused(
    shape: tuple[int, int], dtype: str, options: dict[str, int], said: str
) -> None:
    with running_on("shuffled") as cupy:
        inputs = (cupy.zeros(shape, dtype), None, *Mailboxes([0]).of(0).values())
        with pytest.raises(InputError, match=said):
            GATHER.bind_on_device(inputs, **options)


@pytest.mark.parametrize("where", SOMEWHERE)
def test_a_gather_ends_after_an_abort(where: str) -> None:
    with running_on(where) as cupy:
        mail = Mailboxes([0, 0])
        share = cupy.zeros((1, 64), "float32")
        mail.abort()
        bound = GATHER.bind_on_device((share, None, *mail.of(0).values()), N=128, first=0)
        bound.run()  # nobody sends the other half
        cupy.cuda.Device().synchronize()
        assert mail.aborted
        mail.clear()
        assert not mail.aborted
        shares = [normal(n, 1, 64) for n in range(2)]
        for result in gathered(cupy, mail, shares, None):
            np.testing.assert_array_equal(result, np.concatenate(shares, axis=1))
