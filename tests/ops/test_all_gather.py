"""All-gathers of columns that several GPUs have computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpt2block import reference
from gpt2block.cuda import replaced
from gpt2block.ops import all_gather
from gpt2block.ops.all_gather import ALL_GATHER, ALL_GATHER_NORM, LOAD, STORE, PeerBuffers, part_of
from gpt2block.ops.operands import Operand
from gpt2block.ops.rmsnorm import OPERAND
from gpt2block.ops.rmsnorm import OPERATION as RMSNORM
from tests.devices import SOMEWHERE, assert_same_bits, combinations, running_on, slow
from tests.plain import normal

Array = NDArray[Any]


def gathered(
    cupy: Any,
    peers: PeerBuffers,
    shards: Sequence[Array],
    residual: Array | None,
    norm: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Array]:
    """Return the results of all GPUs: streams of one device, or emulated GPUs that take turns.

    norm: weights and options of a norm; the results are then the sums and their norms. options: of
    an all-gather without a norm.
    """
    firsts = np.cumsum([0, *(shard.shape[1] for shard in shards)])
    found, rounds = list[Any](), []
    for me, shard in enumerate(shards):
        out = cupy.full((len(shard), int(firsts[-1])), np.nan, shard.dtype)
        to = None if residual is None else cupy.asarray(residual)
        inputs = (cupy.asarray(shard), to, *peers.of(me).values())
        sizes: dict[str, Any] = {"N": int(firsts[-1]), "first": int(firsts[me])}
        if norm is None:
            bound = ALL_GATHER.bind_on_device(inputs, out if to is None else to, **sizes, **options)
        else:
            inputs = (*inputs[:2], cupy.asarray(norm["weight"]), *inputs[2:])
            sizes |= {"eps": EPS, "to_operand": norm["to_operand"]}
            bound = ALL_GATHER_NORM.bind_on_device(inputs, out, **sizes)
            found.append(to)
        found.append(bound.out)
        rounds.append((inputs, bound.launches))
    for _, launches in rounds:  # load kernels first: loading would wait for running kernels
        for launch in launches:
            _ = launch.function.shared_size_bytes
    for launches in zip(*(each for _, each in rounds), strict=True):
        if replaced():
            for parts in (STORE, LOAD):
                for launch in launches:
                    part_of(launch, parts).run()
        else:
            for stream, launch in zip(streams(cupy, len(shards)), launches, strict=True):
                with stream:
                    launch.run()
            cupy.cuda.Device().synchronize()
    return [each.get() for each in found]


def streams(cupy: Any, count: int) -> list[Any]:
    cupy.cuda.Device().synchronize()
    return [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]


CASES = [
    (1, (5,), "float32", False),
    (1, (128, 128), "float32", True),
    (3, (1, 2, 3), "float32", False),
    (16, (22, 22, 21, 21), "float32", True),
    (7, (64, 128, 32), "float16", False),
    (2, (2, 4, 6, 8), "bfloat16", False),
    (30, (16, 32), "float32", True),  # this and later cases use flags
    slow(33, (24, 8, 40), "float16", False),
    slow(9, (128, 128, 64, 32), "float32", False),
]
EPS = 1e-5
HALVES = Operand("float16")


def few_words(patch: pytest.MonkeyPatch, words: int = 1024) -> None:
    """Make peer buffers small: 1,024 words need several rounds; the emulator copies few words."""
    for name, count in {"CAPACITY": words, "WORDS": words, "ROOM": words * 3 // 2}.items():
        patch.setattr(all_gather, name, count)


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
    few_words(monkeypatch)
    with running_on(where) as cupy:
        peers = PeerBuffers([0] * len(columns))
        for seed in range(4):  # repeats reuse each half of a peer buffer
            shards = [normal(seed + n, M, S).astype(dtype) for n, S in enumerate(columns)]
            residual = normal(99, M, sum(columns)) if adds else None
            expected = reference.all_gathered(shards, residual)
            for result in gathered(cupy, peers, shards, residual):
                np.testing.assert_array_equal(result, expected)
        assert not peers.aborted


@combinations(
    times=1,
    columns=[(128, 64, 64), (1024, 1024)],
    operand=[None, HALVES, Operand("float16", 2, 1.0, True, True)],
)
def test_a_gather_with_a_norm_has_the_bits_of_both(
    device: Any,
    columns: tuple[int, ...],
    operand: Operand | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    C, M = sum(columns), 3
    few_words(monkeypatch, words=M * C)
    peers = PeerBuffers([0] * len(columns))
    for seed in range(3):
        shards = [normal(seed + n, M, S) for n, S in enumerate(columns)]
        residual, weight = normal(99, M, C), normal(98, 1, C)[0]
        norm = {"weight": weight, "to_operand": operand}
        results = gathered(device, peers, shards, residual, norm)
        total = device.asarray(reference.all_gathered(shards, residual))
        inputs, options = (total, device.asarray(weight)), {"eps": EPS, "to_operand": operand}
        out = device.full((M, C), np.nan, "float32")  # terms do not fill the array
        RMSNORM.bind_on_device(inputs, out, variant="stream", **options).run()
        for stream, normed in zip(results[::2], results[1::2], strict=True):
            assert_same_bits(stream, total.get())
            assert_same_bits(normed, out.get())
        gathered(device, peers, shards, residual)  # both kernels use the halves in turn
    assert not peers.aborted


@pytest.mark.parametrize("where", SOMEWHERE)
@pytest.mark.parametrize(
    "operand",
    [
        Operand("bfloat16"),
        slow(Operand("bfloat16", 8)),
        Operand("float16", 16, 1.0, True),
        slow(Operand("float16", 2, 1.0, True, True)),
        Operand("hi_lo", 0, 0.25),
    ],
    ids=str,
)
def test_a_gathered_operand_has_the_bits_of_operand(
    where: str, operand: Operand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 384 columns are parts of two tiles of terms."""
    columns, M = (128, 192, 64), 67
    few_words(monkeypatch, words=M * sum(columns))
    with running_on(where) as cupy:
        peers = PeerBuffers([0] * len(columns))
        for seed in range(2):
            shards = [normal(seed + n, M, S) for n, S in enumerate(columns)]
            out = cupy.full((M, sum(columns)), np.nan, "float32")  # terms do not fill the array
            whole = cupy.asarray(np.concatenate(shards, axis=1))
            OPERAND.bind_on_device((whole,), out, to_operand=operand).run()
            for result in gathered(cupy, peers, shards, None, to_operand=operand):
                assert_same_bits(result, out.get())
        assert not peers.aborted


@pytest.mark.parametrize("where", SOMEWHERE)
def test_a_gather_ends_after_an_abort(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_words(monkeypatch)
    with running_on(where) as cupy:
        peers = PeerBuffers([0, 0])
        shard = cupy.zeros((1, 64), "float32")
        peers.abort()
        bound = ALL_GATHER.bind_on_device((shard, None, *peers.of(0).values()), N=128, first=0)
        bound.run()  # no GPU sends the other half
        cupy.cuda.Device().synchronize()
        assert peers.aborted
        peers.clear()
        assert not peers.aborted
        shards = [normal(n, 1, 64) for n in range(2)]
        for result in gathered(cupy, peers, shards, None):
            np.testing.assert_array_equal(result, np.concatenate(shards, axis=1))
