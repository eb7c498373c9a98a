"""The registry of operations: complete, consistent, and what the command and docs show of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gpt2block import InputError, cli, doctor, kernels, reference
from gpt2block.cli_kernels import draw_sweep
from gpt2block.measure import Ceilings, Measurement
from gpt2block.operations import OPERATIONS, Operation, find, markdown, parse_sizes

SMALL = {"B": 2, "T": 5, "C": 24, "N": 7, "NH": 3, "HS": 8, "V": 11, "M": 3, "K": 5}
every_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: o.name)


def small(operation: Operation) -> dict[str, int]:
    return {name: SMALL[name] for name in operation.sizes}


def test_every_kernel_belongs_to_a_variant() -> None:
    registered = {
        (variant.file, name)
        for operation in OPERATIONS.values()
        for variant in (*operation.variants, *operation.beside)
        for name in variant.kernels
    }
    there = {(file, name) for file in kernels.sources() for name in kernels.signatures(file)}
    assert registered == there


@every_operation
def test_an_operation_has_a_numpy_meaning_and_counts(operation: Operation) -> None:
    sizes = small(operation)
    inputs = operation.make(sizes, np.random.default_rng(0))
    attrs = {**operation.attrs, **({"n_head": 3} if "n_head" in operation.attrs else {})}
    out = getattr(reference, operation.name)(*inputs, **attrs)
    assert np.isfinite(out[..., 0]).all()  # of a trimat, the half that is stated
    assert operation.traffic(sizes) > 0
    assert operation.flops(sizes) > 0
    assert operation.bound in ("memory", "compute")
    assert len({variant.name for variant in operation.variants}) == len(operation.variants)
    for variant in operation.variants:
        assert variant.block in (variant.blocks or (variant.block,))


def test_the_table_of_the_kernels_is_the_registry() -> None:
    text = (kernels.SOURCE_DIR / "README.md").read_text(encoding="utf-8")
    assert markdown() in text


def test_an_unknown_operation_or_variant_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown operation 'norm': expected one of layernorm, "):
        find("norm")
    with pytest.raises(InputError, match="unknown variant '9': expected one of naive, registers"):
        find("trimat").variant("9")


def test_sizes_from_a_text() -> None:
    trimat = find("trimat")
    assert parse_sizes(trimat, None) == dict(trimat.sizes)
    assert parse_sizes(trimat, "B=1,T=129") == {**trimat.sizes, "B": 1, "T": 129}
    for text in ("Q=1", "B=0", "B=-1", "B", "B=x", "B=1;T=2", "B=1.5"):
        with pytest.raises(InputError, match="expected sizes such as B=8,T=1024,NH=12,HS=64"):
            parse_sizes(trimat, text)


def test_without_a_gpu_no_kernel_is_ever_called_ok(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "no driver today")
    with pytest.raises(SystemExit) as done:
        cli.main(["kernels", "trimat"])
    printed = capsys.readouterr().out
    assert done.value.code == 0
    assert "no kernel was run, because no driver today" in printed
    assert printed.count("kernel not run") == len(find("trimat").variants)
    assert "ok" not in printed.lower().replace("kernel", "")


def test_the_list_names_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["kernels"], ["kernels", "--json"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        printed = capsys.readouterr().out
        for operation in OPERATIONS.values():
            assert operation.name in printed
            for variant in operation.variants:
                assert all(name in printed for name in variant.kernels)
    assert [entry["operation"] for entry in json.loads(printed)] == list(OPERATIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm"], "unknown operation 'norm'"),
        (["trimat", "--variant", "9"], "unknown variant '9'"),
        (["trimat", "--shape", "B"], "expected sizes such as"),
        (["trimat", "--peer", "jax"], "--peer: expected torch, got 'jax'"),
    ],
)
def test_wrong_words_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["kernels", *arguments])
    assert done.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def sweep(rates: dict[str, list[float]]) -> list[Measurement]:
    return [
        Measurement("layernorm", name, 32 << i, {"C": 768}, 1.0, 1.0, rate, "GB/s", 1.0, 0.0, 0.0)
        for name, values in rates.items()
        for i, rate in enumerate(values)
    ]


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    rows = sweep({"1": [10.0, 20.0, 15.0], "5": [30.0, 60.0, 50.0]})
    file = tmp_path / "sweep.png"
    draw_sweep(rows, Ceilings(100.0, 50.0), "a GPU", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="--plot"):
        draw_sweep(rows, Ceilings(100.0, 50.0), "a GPU", tmp_path / "none" / "sweep.png")


@pytest.mark.gpu
@every_operation
def test_every_variant_is_right_and_timed(operation: Operation) -> None:
    from gpt2block.measure import measure  # noqa: PLC0415

    sizes = {**small(operation), "C": 48} if "C" in operation.sizes else small(operation)
    rows = measure(operation, operation.variants, sizes, Ceilings(4000.0, 50.0))
    assert [row.variant for row in rows] == [variant.name for variant in operation.variants]
    for row in rows:
        assert row.max_rel < 1e-5
        assert 0 < row.gpu_us < 1000
        assert 0 < row.call_us < 10_000
