"""`bench --decode`: what a step, a prompt and many prompts cost, how they are checked and shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import GPT2, GPT2Config, InputError, bench, cli, doctor, emulator
from gpt2block.bench import (
    Ceilings,
    DecodeWork,
    GenerateWork,
    PromptWork,
    Report,
    Work,
    measure,
    token_contenders,
    token_peers,
    token_works,
)
from gpt2block.bench import report as reports
from gpt2block.bench.contenders import Contender, Run
from gpt2block.bench.decode_plot import draw_decoding, floor, points
from gpt2block.bench.race import Timed
from gpt2block.bench.token_works import RandomGPT2, Written
from gpt2block.cli.bench import print_report
from gpt2block.config import SIZES, model_shapes
from gpt2block.cuda import timing
from gpt2block.emulator import loader
from gpt2block.run import cuda_decoding

BEST = Ceilings(4000.0, {"float32": 50.0, "tf32": 400.0, "float16": 700.0, "bfloat16": 800.0})
TINY = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=24, vocab_size=53)


# What there is to do


def test_bytes_and_operations() -> None:
    """Those of GPT-2 small: 124 million parameters, and 36,864 bytes for a token in bfloat16."""
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    shapes = model_shapes(model.config)
    parameters = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "wpe")
    vectors = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert model.matrix_elements == parameters - vectors
    assert model.weight_bytes == 2 * parameters + 2 * vectors
    assert model.token_bytes == 36_864
    step = DecodeWork("bfloat16", model, 8)
    assert step.traffic == model.weight_bytes + 8 * 512 * 36_864
    assert step.flops == 2 * 8 * (parameters - vectors) + 8 * 4 * 12 * 768 * 512
    assert step.tokens == 8
    assert step.sizes == {"rows": 8, "position": 512, "n_layer": 12, "n_embd": 768}
    narrow = RandomGPT2(SIZES["gpt2"], "float8_e5m2")
    assert narrow.weight_bytes == parameters + 3 * vectors
    assert narrow.token_bytes == 36_864
    assert RandomGPT2(SIZES["gpt2"], "float32").token_bytes == 73_728


def test_the_position_is_the_middle_of_the_timed_steps() -> None:
    work = DecodeWork("bfloat16", RandomGPT2(SIZES["gpt2"], "bfloat16"), 1)
    first = work.start + work.rounds  # the first turn checks the results
    assert (first + work.end) / 2 == 512
    assert work.end - first == work.rounds * work.turns


def test_a_new_token_sees_all_before_it() -> None:
    model = RandomGPT2(TINY, "float32")
    work = GenerateWork("float32", model, prompts=3, new=2, longest=18)
    seen = sum(n + n + 1 for n in work.lengths)
    assert all(16 <= n <= 18 for n in work.lengths)
    assert work.traffic == 2 * model.weight_bytes + seen * model.token_bytes
    tokens = sum(work.lengths) + 6
    assert work.flops == 2 * tokens * model.matrix_elements + 4 * 64 * seen
    assert work.tokens == 6
    assert GenerateWork("float32", model).tokens == 512 * 128


def test_the_works_and_their_order() -> None:
    works = bench.decode_works()
    assert [work.name for work in works[:2]] == ["1 row", "2 rows"]
    assert [w.rows for w in works if isinstance(w, DecodeWork)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
    ]
    assert [w.rows for w in works if isinstance(w, DecodeWork) and w.peers] == [1, 8, 64, 256]
    assert [work.what for work in works[-2:]] == ["prompt", "generate"]
    assert {work.dtype for work in works} == {"bfloat16"}
    some = bench.decode_works("float32", "3, 3,16", "gpt2-xl")
    assert [(w.rows, w.peers) for w in some if isinstance(w, DecodeWork)] == [(3, True), (16, True)]
    assert some[0].sizes["n_layer"] == 48
    assert len({id(work.model) for work in some if isinstance(work, DecodeWork)}) == 1


@pytest.mark.parametrize("rows", ["", "0", "1,", "x", "-1", "1.5", "4097", "9" * 5000, "²"])
def test_numbers_of_rows_that_there_are_not(rows: str) -> None:
    with pytest.raises(InputError, match="--rows: expected numbers from 1 to 4,096 such as 1,8,64"):
        token_works.parse_rows(rows)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn of two steps after the one that is checked."""
    monkeypatch.setattr(DecodeWork, "rounds", 2)
    monkeypatch.setattr(DecodeWork, "turns", 1)
    monkeypatch.setattr(PromptWork, "rounds", 1)
    monkeypatch.setattr(PromptWork, "turns", 1)


# Whether a result is right


@pytest.fixture
def work(short: None) -> DecodeWork:
    return DecodeWork("float32", RandomGPT2(TINY, "float32"), 2, position=12)


def last_token(work: DecodeWork, ids: Any) -> tuple[int, float]:
    """The most likely token after ids, and its log-probability."""
    assert isinstance(work.model, RandomGPT2)
    logits = GPT2(work.model.weights, device="cpu")(ids, last=True).astype(np.float64)
    return int(logits.argmax()), float(logits.max() - np.log(np.exp(logits).sum()))


def checked(work: DecodeWork, *written: Any) -> tuple[float, float]:
    replays: list[int] = []
    errors = work.check(lambda: replays.append(1), (lambda: Written(*written),))
    assert replays == [1]
    return errors


def test_a_right_token_has_no_error(work: DecodeWork) -> None:
    ids = work.prompts()[1]
    token, logprob = last_token(work, ids)
    right = np.append(ids, np.int32(token))
    assert checked(work, [right]) == (0, 0)
    assert checked(work, [right], [logprob])[0] < 1e-6
    assert checked(work, [right], [logprob - 0.25])[0] == pytest.approx(0.25, abs=1e-6)


def test_a_token_that_is_not_the_best_has_the_difference(work: DecodeWork) -> None:
    ids = work.prompts()[0]
    token, logprob = last_token(work, ids)
    other = np.append(ids, np.int32((token + 1) % 53))
    right = np.append(ids, np.int32(token))
    logits = work.model.last_logits(ids)
    off, relative = checked(work, [right, other])
    assert off == pytest.approx(logits[token] - logits[(token + 1) % 53])
    assert relative == pytest.approx(off / np.abs(logits).max())
    assert relative > reports.tolerance(work, "float32")
    # A sampled token may be another one, but its log-probability is known.
    own = logprob - off
    assert checked(work, [other], [own], False)[0] < 1e-6
    assert checked(work, [other], [logprob], False)[0] == pytest.approx(off, abs=1e-6)


def test_a_log_probability_that_is_nan_is_an_error(work: DecodeWork) -> None:
    ids = work.prompts()[0]
    token, logprob = last_token(work, ids)
    right = np.append(ids, np.int32(token))
    assert all(map(isnan, checked(work, [right, right], [logprob, nan])))


def test_a_continuation_of_a_wrong_length_is_refused() -> None:
    work = GenerateWork("float32", RandomGPT2(TINY, "float32"), prompts=4, new=2, longest=18)
    prompts = work.ids()
    written = token_contenders.continued(work, prompts, [[1, 2]] * 4)
    assert [ids[-2:].tolist() for ids in written.sequences] == [[1, 2]] * 3
    assert written.sequences[1][:-2].tolist() == prompts[2].tolist()
    with pytest.raises(InputError, match=r"2 new tokens of each prompt were requested, got \[1, 2"):
        token_contenders.continued(work, prompts, [[1, 2], [1], [1, 2], [1, 2]])


# Contenders


def few(dtype: str) -> list[Work]:
    model = RandomGPT2(TINY, dtype)
    return [
        DecodeWork(dtype, model, 1, position=10),
        DecodeWork(dtype, model, 4, position=10),
        PromptWork(dtype, model, T=11),
        GenerateWork(dtype, model, prompts=2, new=2, longest=17),
    ]


def raced(works: list[Work]) -> Report:
    report = Report({"GPU": "a GPU"}, BEST, [], [])
    for work in works:
        entrants = reports._entrants(work, work.sets(), 0, None)
        rows, lines = reports.rows_of(work, entrants, 1, BEST)
        report.rows.extend(rows)
        report.skipped.extend(lines)
    return report


@pytest.mark.usefixtures("short")
def test_all_is_measured_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.missing():
        pytest.skip(f"no CUDA on the CPU: {emulator.missing()}")
    monkeypatch.setattr(DecodeWork, "rounds", 1)
    for kind in (DecodeWork, PromptWork, GenerateWork):
        monkeypatch.setattr(kind, "turns", 1)
    with emulator.emulated():
        report = raced(few("bfloat16")[1:])
    assert report.skipped == []
    assert [(row.work, row.contender) for row in report.rows] == [
        ("4 rows", "gpt2block"),
        ("4 rows", "sampled"),
        ("1x11", "gpt2block"),
        ("2 prompts", "gpt2block"),
    ]
    for row in report.rows:
        assert row.right, row
        assert row.max_rel < 0.01
        assert row.us > 0
        assert row.percent_copy == pytest.approx(100 * row.gb_s / 4000)
    rates = [row.tokens_s for row in report.rows]
    assert rates[0] == pytest.approx(4e6 / report.rows[0].us)
    assert rates[2] is None
    assert rates[3] == pytest.approx(4e6 / report.rows[3].us)


def test_prompts_that_start_in_several_groups(
    monkeypatch: pytest.MonkeyPatch, work: DecodeWork
) -> None:
    """The first tokens of each group are a result of their own."""
    if problem := loader.missing():
        pytest.skip(problem)
    monkeypatch.setattr(cuda_decoding, "PREFILL_TOKENS", work.start)
    with emulator.emulated():
        ours = next(iter(token_contenders.contenders(replace(work, rows=3), 0)))
        run = ours.capture(work.rounds)
        assert work.check(run.replay, run.outs)[1] < 1e-5
        (written,) = run.outs
        assert {len(ids) for ids in written().sequences} == {work.start + 1 + work.rounds}


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    """NumPy in place of the GPU."""
    monkeypatch.setattr(RandomGPT2, "on", lambda model, device: model._reference)
    if find_spec("cupy") is None or doctor.cuda_problem():
        monkeypatch.setattr(token_contenders, "cupy", Idle())
    monkeypatch.setattr(measure, "gpu_index", lambda device: 0)
    monkeypatch.setattr(reports, "measured", lambda: BEST)
    monkeypatch.setattr(reports, "_versions", lambda index, more: {"GPU": "none", **more})
    monkeypatch.setattr(reports, "cupy", Idle())


class Idle:
    """A device that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return Idle()

    def __call__(self, *arguments: Any) -> Any:
        return Idle()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def report(on_numpy: None) -> Report:
    """Of four numbers of rows, with a peer at two of them."""
    works = few("float32")
    found = bench.run(works)
    assert found.right
    first, second = (work for work in works if isinstance(work, DecodeWork))
    more = [replace(second, rows=rows) for rows in (8, 64)]
    found.rows.extend(row(work, "gpt2block", us=50.0) for work in more)
    found.rows.append(row(first, "torch.compile", us=20.0, peer=True))
    found.rows.append(row(more[1], "torch.compile", us=200.0, peer=True))
    return found


def row(work: Work, contender: str, us: float, peer: bool = False, right: bool = True) -> Any:
    each = Contender(contender, peer, lambda rounds: Run(lambda: None, ()), "float32")
    error = 0.0 if right else 1.0
    return reports.row_of(work, Timed(each, us, (error, error)), 1, BEST)


# What is shown


def test_the_table_fits_eighty_columns(report: Report) -> None:
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    works = [DecodeWork("bfloat16", model, 256), GenerateWork("bfloat16", model)]
    step, many = works
    rows = [row(step, "gpt2block", 2500.0), row(step, "sampled", 2600.0)]
    rows += [row(step, "torch.compile", 52_000.0, True)]
    rows += [row(many, "gpt2block", 2e6), row(many, "transformers, paged", 1.5e7, True)]
    console = Console(width=80)
    with console.capture() as shown:
        print_report(console, replace(report, rows=rows))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "GPT-2 of 12 layers of 768 channels, random weights in bfloat16" in lines
    cells = [line.split() for line in lines]
    first = next(line for line in cells if line[:2] == ["256", "rows"])
    floor_us = step.traffic / 4000e3
    assert first[2:] == ["gpt2block", "2500.0", "102,400", f"{floor_us / 25:.1f}", "1.00",
                         "0.0e+00", "ok"]  # fmt: skip
    peer = next(line for line in cells if line[:1] == ["torch.compile"])
    assert peer[1:3] == ["52000.0", "4,923"]
    assert peer[4] == "20.80"
    last = next(line for line in cells if line[:2] == ["transformers,", "paged"])
    assert last[2:4] == ["15.000", "4,369"]
    assert sum("new tokens for each" in line for line in lines) == 1


def test_json_has_everything(
    on_numpy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def works(*arguments: Any) -> list[Work]:
        asked.append(arguments)
        return few("float32")

    monkeypatch.setattr(bench, "decode_works", works)
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--decode", "--rows", "1,4", "--dtype", "float32", "--json"])
    assert done.value.code == 0
    assert asked == [("float32", "1,4", None, None)]
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["versions", "ceilings", "rows", "skipped"]
    assert found["skipped"] == []
    steps = [entry for entry in found["rows"] if entry["what"] == "decode"]
    assert [entry["contender"] for entry in steps] == ["gpt2block", "sampled"] * 2
    assert steps[2]["sizes"] == {"rows": 4, "position": 10, "n_layer": 1, "n_embd": 64}
    assert steps[2]["tokens_s"] == pytest.approx(4e6 / steps[2]["us"])
    assert found["rows"][-1]["sizes"]["prompts"] == 2


def drawn(report: Report, file: Path) -> Any:
    """The axes of the plot."""
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    from matplotlib.figure import Figure  # noqa: PLC0415

    figures: list[Any] = []
    honest = Figure.savefig

    def savefig(figure: Any, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        honest(figure, *arguments, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", savefig)
        draw_decoding(report, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    return figures[0]


def test_the_picture_is_of_the_given_rows(report: Report, tmp_path: Path) -> None:
    figure = drawn(report, tmp_path / "decoding.png")
    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    steps = [r for r in report.rows if r.what == "decode"]
    ours, peers = points(steps, "gpt2block"), points(steps, "torch.compile")
    assert [n for n, _ in ours] == [1, 4, 8, 64]
    assert [n for n, _ in peers] == [1, 64]
    limit = floor(steps)
    assert limit[3][1] == pytest.approx(64 / (steps[-1].gb_s * 200e-6 / 4000))
    lines = [list(zip(*line.get_data(), strict=True)) for line in ax.lines]
    assert lines == [limit, ours, peers]
    texts = [text.get_text() for text in ax.texts]
    assert f"{ours[0][1] / peers[0][1]:.2f}x" in texts
    assert "4.00x" in texts
    assert (
        sum(text.startswith(("floor, ", "gpt2block, ", "torch.compile, ")) for text in texts) == 3
    )


def test_no_label_touches_another(report: Report, tmp_path: Path) -> None:
    figure = drawn(report, tmp_path / "decoding.png")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(box.x0 >= 0 and box.x1 <= width for box in boxes)


def test_a_picture_of_nothing(tmp_path: Path, work: DecodeWork) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    wrong = Report({}, BEST, [row(work, "gpt2block", 3.0, right=False)], [])
    with pytest.raises(InputError, match="there is no right result to draw"):
        draw_decoding(wrong, tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "--what", "all"], "--what chooses kernels, --decode times whole models"),
        (["--decode", "--only", "8x"], "--only chooses kernels, --decode times whole models"),
        (["--decode", "--rows", "8;9"], "--rows: expected numbers from 1 to 4,096 such as 1,8,64"),
        (["--decode", "--dtype", "int8"], "--dtype: expected one of float32, "),
        (["--decode", "--size", "gpt3"], "unknown --size 'gpt3': expected one of gpt2, "),
        (["--decode", "--peer", "jax"], "--peer: expected torch, got 'jax'"),
        (["--decode", "--plot", "no/such/place.png"], "there is no directory no/such"),
        (["--decode", "--llama"], "--decode times GPT-2, --llama a Llama: leave out one"),
        (["--llama", "--what", "all"], "--what chooses kernels, --llama times whole models"),
        (["--llama", "--plot", "x.png"], "--plot: expected --decode or kernels with it"),
        (["--llama", "--size", "70b"], "--size: expected one of 7b, 1b, small with --llama"),
        (["--llama", "--rows", "x"], "--rows: expected numbers from 1 to 4,096 such as 1,8,64"),
        (["--llama", "--dtype", "int8"], "--dtype: expected one of float32, "),
        (["--llama", "--peer", "jax"], "--peer: expected torch, got 'jax'"),
        (["--rows", "8"], "--rows is an option of --decode and --llama: add one"),
        (["--size", "gpt2"], "--size is an option of --decode and --llama: add one"),
    ],
)
def test_options_that_do_not_apply_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="without it --plot says that first")
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", *arguments])
    assert done.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_without_a_gpu_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "cuda_problem", lambda: "no driver today")
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--decode", "--rows", "1"])
    assert done.value.code == 2
    assert "error: the bench cannot be used: no driver today" in capsys.readouterr().err


# PyTorch and transformers


def test_pytorch_decodes_the_same(monkeypatch: pytest.MonkeyPatch, short: None) -> None:
    """The step that is compiled on a GPU, called on the CPU, for a row whose tokens differ."""
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    config = GPT2Config(n_layer=2, n_head=2, n_embd=128, n_ctx=128, vocab_size=211)
    monkeypatch.setattr(DecodeWork, "rounds", 4)
    work = DecodeWork("float32", RandomGPT2(config, "float32"), 4, position=60)

    def repeated(step: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
        with torch.no_grad():
            step(*arguments)  # as a capture runs it first: what it leaves must not count
        return lambda: step(*arguments)

    run = token_peers.steps(work, "cpu", repeated, 4)
    run.replay()
    off, relative = work.check(run.replay, run.outs)
    assert off > 0
    assert relative <= reports.tolerance(work, "float32")
    sequences = run.outs[0]().sequences
    assert [len(ids) for ids in sequences] == [work.start + 9] * 4
    assert len(set(sequences[1][work.start :].tolist())) == 3


def test_transformers_generates_the_same() -> None:
    pytest.importorskip("torch", reason="compares with transformers")
    pytest.importorskip("transformers", reason="compares with transformers")
    work = GenerateWork("float32", RandomGPT2(TINY, "float32"), prompts=3, new=3, longest=18)
    run = token_peers._generate(work, "cpu", 1)
    _, relative = work.check(run.replay, run.outs)
    assert relative <= reports.tolerance(work, "float32")


def test_a_peer_without_fp8_says_so(short: None) -> None:
    work = DecodeWork("float8_e5m2", RandomGPT2(TINY, "float8_e5m2"), 1, position=12)
    if find_spec("torch"):
        with pytest.raises(InputError, match="no PyTorch operation here takes float8_e5m2 weights"):
            token_peers.steps(work, "cpu", lambda step, arguments: lambda: None, 2)
    names = [each.name for each in token_peers.contenders(work, None)]  # type: ignore[arg-type]
    assert names == ["torch.compile"]
    without = replace(work, peers=False)
    assert list(token_peers.contenders(without, None)) == []  # type: ignore[arg-type]


def test_replays_on_the_host_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 7.0, 7.0, 9.0, 9.0, 10.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(seconds))
    turns: list[str] = []
    replays = {name: (lambda name=name: turns.append(name)) for name in "ab"}
    assert timing.interleaved_host_ms(replays, 3) == {"a": 2000.0, "b": 1000.0}
    assert turns == ["a", "b"] * 3


# On the GPU


@pytest.mark.gpu
def test_a_small_race() -> None:
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    works: list[Work] = [
        DecodeWork("bfloat16", model, 1),
        DecodeWork("bfloat16", model, 8),
        PromptWork("bfloat16", model),
        GenerateWork("bfloat16", model, prompts=20, new=8),
    ]
    report = bench.run(works)
    assert report.right
    assert report.skipped == []
    us = {(row.work, row.contender): row.us for row in report.rows}
    assert us["1 row", "gpt2block"] > 0
    assert us["8 rows", "gpt2block"] < 4 * us["1 row", "gpt2block"]
    assert all(0 < row.percent_copy < 100 for row in report.rows)


@pytest.mark.gpu
def test_a_small_race_against_pytorch() -> None:
    pytest.importorskip("torch", reason="races against PyTorch")
    pytest.importorskip("transformers", reason="races against transformers")
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    works: list[Work] = [
        DecodeWork("bfloat16", model, 2),
        GenerateWork("bfloat16", model, prompts=20, new=8),
    ]
    report = bench.run(works, peer="torch")
    assert report.skipped == []
    assert {row.contender for row in report.rows if row.peer and row.right} == {
        "torch.compile",
        "transformers",
        "transformers, paged",
    }
