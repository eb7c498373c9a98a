"""`bench --decode`: bytes and operations of steps and prompts, checks of results, and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gpt2block import GPT2, GPT2Config, InputError, bench
from gpt2block.bench import Report, Work, tasks, token_works
from gpt2block.bench import report as reports
from gpt2block.bench.models import RandomGPT2
from gpt2block.bench.plots import draw_decoding, floor, points
from gpt2block.bench.tasks import Continuations, Steps
from gpt2block.bench.token_works import ManyPrompts, decode, first_token, generate, prompt
from gpt2block.bench.works import GeneratedSequences
from gpt2block.cli.bench import print_report
from gpt2block.config import SIZES, model_shapes
from gpt2block.cuda import timing
from gpt2block.run import cuda_decoding
from tests import benches
from tests.benches import BEST, row
from tests.command_line import gpt2block
from tests.devices import running_on

TINY = GPT2Config(n_layer=1, n_head=1, n_embd=64, n_ctx=24, vocab_size=53)


def tiny(dtype: str = "float32") -> RandomGPT2:
    return RandomGPT2(TINY, dtype)


# Bytes and operations


def test_bytes_and_operations() -> None:
    """GPT-2 small has 124 million parameters, and 36,864 bytes of cache per token in bfloat16."""
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    shapes = model_shapes(model.config)
    parameters = sum(int(np.prod(shape)) for name, shape in shapes.items() if name != "wpe")
    vectors = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
    assert model.matrix_elements == parameters - vectors
    assert model.weight_bytes == 2 * parameters + 2 * vectors
    assert model.token_bytes == 36_864
    step = decode(model, 8)
    assert step.traffic == model.weight_bytes + 8 * 512 * 36_864
    assert step.flops == 2 * 8 * (parameters - vectors) + 8 * 4 * 12 * 768 * 512
    assert step.tokens == 8
    assert step.sizes == {"rows": 8, "position": 512, "n_layer": 12, "n_embd": 768}
    narrow = RandomGPT2(SIZES["gpt2"], "float8_e5m2")
    assert narrow.weight_bytes == parameters + 3 * vectors
    assert narrow.token_bytes == 36_864
    assert RandomGPT2(SIZES["gpt2"], "float32").token_bytes == 73_728


def test_the_position_is_the_middle_of_the_timed_steps() -> None:
    steps = Steps(RandomGPT2(SIZES["gpt2"], "bfloat16"), 1)
    timed = tasks.STEPS * tasks.TURNS
    assert steps.end - timed / 2 == 512  # an untimed first turn checks results
    assert steps.end - steps.start == timed + tasks.STEPS


def test_a_new_token_sees_all_before_it() -> None:
    model = tiny()
    work = generate(model, ManyPrompts(3, 16, 18, 2))
    lengths = np.random.default_rng(1).integers(16, 19, size=3).tolist()
    seen = sum(n + n + 1 for n in lengths)
    assert work.traffic == 2 * model.weight_bytes + seen * model.token_bytes
    tokens = sum(lengths) + 6
    assert work.flops == 2 * tokens * model.matrix_elements + 4 * 64 * seen
    assert work.tokens == 6
    assert generate(model).tokens == 512 * 128


def test_the_works_and_their_order() -> None:
    works = bench.model_works("gpt2")
    assert [work.name for work in works[:2]] == ["1 row", "2 rows"]
    assert [w.sizes["rows"] for w in works[:-4]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [work.what for work in works[-4:]] == ["prompt", "first", "first", "generate"]
    assert [work.name for work in works[-3:-1]] == ["1x480", "1x1000"]
    assert {work.dtype for work in works} == {"bfloat16"}
    some = bench.model_works("gpt2", "float32", "3, 3,16", "gpt2-xl")
    assert [work.sizes["rows"] for work in some[:-4]] == [3, 16]
    assert some[0].sizes["n_layer"] == 48
    assert len({id(getattr(work.truth, "__self__", None)) for work in some[:-4]}) == 1  # one model


@pytest.mark.parametrize("rows", ["", "0", "1,", "x", "-1", "1.5", "4097", "9" * 5000, "²"])
def test_numbers_of_rows_that_there_are_not(rows: str) -> None:
    with pytest.raises(InputError, match="--rows: expected numbers from 1 to 4,096 such as 1,8,64"):
        token_works.parse_rows(rows)


# Checks of results


def last_token(model: RandomGPT2, ids: Any) -> tuple[int, float]:
    """Return the most likely token after ids, and its log-probability."""
    logits = GPT2(model.weights, device="cpu")(ids, last=True).astype(np.float64)
    return int(logits.argmax()), float(logits.max() - np.log(np.exp(logits).sum()))


@pytest.fixture
def checked() -> Callable[..., tuple[float, float]]:
    """Return a function that checks given results after one replay and returns their errors."""
    work = decode(tiny(), 2, position=12)

    def check(*written: Any) -> tuple[float, float]:
        replays: list[int] = []
        errors = work.check(lambda: replays.append(1), (lambda: GeneratedSequences(*written),))
        assert replays == [1]
        return errors

    return check


def test_the_error_of_a_token_is_the_difference_from_the_best(checked: Any) -> None:
    model = tiny()
    (ids,) = model.prompts([9])
    token, logprob = last_token(model, ids)
    right, other = (np.append(ids, np.int32((token + n) % 53)) for n in (0, 1))
    assert checked([right]) == (0, 0)
    assert checked([right], [logprob])[0] < 1e-6
    assert checked([right], [logprob - 0.25])[0] == pytest.approx(0.25, abs=1e-6)
    logits = model.last_logits(ids)
    off, relative = checked([right, other])
    assert off == pytest.approx(logits[token] - logits[(token + 1) % 53])
    assert relative == pytest.approx(off / np.abs(logits).max())
    assert relative > reports.tolerance(decode(model, 2), "float32")
    # A sampled token need not be the most likely one; only its log-probability is checked.
    own = logprob - off
    assert checked([other], [own], False)[0] < 1e-6
    assert checked([other], [logprob], False)[0] == pytest.approx(off, abs=1e-6)
    assert all(map(isnan, checked([right, right], [logprob, nan])))


def test_a_continuation_of_a_wrong_length_is_refused() -> None:
    model = tiny()
    prompts = model.prompts([17, 16, 18, 16])
    many = Continuations(model, prompts, 2)
    written = many.written([[1, 2]] * 4)
    assert [ids[-2:].tolist() for ids in written.sequences] == [[1, 2]] * 3
    assert written.sequences[1][:-2].tolist() == prompts[2].tolist()
    with pytest.raises(InputError, match=r"expected 2 new tokens for each prompt, got \[1, 2"):
        many.written([[1, 2], [1], [1, 2], [1, 2]])


# Contenders


def few(dtype: str = "float32") -> list[Work]:
    model = tiny(dtype)
    return [
        decode(model, 4, position=10),
        prompt(model, T=11),
        first_token(model, 11),
        generate(model, ManyPrompts(4, 16, 17, 2)),
    ]


def test_all_is_measured_on_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of a decoding start in several groups; each group's first tokens are a result."""
    monkeypatch.setattr(tasks, "STEPS", 1)
    monkeypatch.setattr(tasks, "TURNS", 1)
    steps = Steps(tiny("bfloat16"), 4, 10)
    monkeypatch.setattr(cuda_decoding, "PREFILL_TOKENS", steps.start)
    report = Report({"GPU": "a GPU"}, BEST, [], [])
    with running_on("shuffled"):
        for work in few("bfloat16"):
            rows, lines = reports.rows_of(work, work.ours([{}], 0), 1, BEST)
            report.rows.extend(rows)
            report.skipped.extend(lines)
        many = Continuations(tiny("bfloat16"), tiny().prompts([5, 9]), 12)
        sampled, again = (many.generated(0, token_works.SAMPLED, 1) for _ in range(2))
        greedy = many.generated(0, token_works.GREEDY, 1)
        texts = []
        for one in (sampled, again, greedy):
            one.replay()
            texts.append([ids.tolist() for ids in one.outs[0]().sequences])
        assert texts[0] == texts[1] != texts[2]
        assert [one.outs[0]().greedy for one in (sampled, greedy)] == [False, True]
        run = steps.decoded(0, token_works.GREEDY, 1)
        run.replay()
        assert {len(ids) for ids in run.outs[0]().sequences} == {steps.start + 2}
    assert report.skipped == []
    assert [(row.work, row.contender) for row in report.rows] == [
        ("4 rows", "gpt2block"),
        ("4 rows", "sampled"),
        ("1x11", "gpt2block"),
        ("1x11", "gpt2block"),
        ("4 prompts", "gpt2block"),
        ("4 prompts", "sampled"),
    ]
    for each in report.rows:
        assert each.right, each
        assert each.max_rel < 0.01
        assert each.us > 0
        assert each.percent_copy == pytest.approx(100 * each.gb_s / 4000)
    rates = [row.tokens_s for row in report.rows]
    assert rates[0] == pytest.approx(4e6 / report.rows[0].us)
    assert rates[2] is None
    assert rates[3] == pytest.approx(1e6 / report.rows[3].us)
    assert rates[4] == pytest.approx(8e6 / report.rows[4].us)


@pytest.fixture
def report() -> Report:
    """Return a report of steps with four numbers of rows."""
    works = [decode(tiny(), rows, position=10) for rows in (1, 4, 8, 64)]
    us = {"gpt2block": 50.0, "sampled": 60.0}
    rows = [row(work, by, us[by]) for work in works for by in us]
    return Report({"GPU": "none"}, BEST, rows, [])


# Tables and plots


def test_the_table_fits_eighty_columns(report: Report) -> None:
    model = RandomGPT2(SIZES["gpt2"], "bfloat16")
    step, many = decode(model, 256), generate(model)
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


def test_json_has_everything(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []

    def works(*arguments: Any) -> list[Work]:
        requested.append(arguments)
        return few()

    monkeypatch.setattr(bench, "model_works", works)
    monkeypatch.setattr(bench, "run", lambda *arguments: report)
    ended = gpt2block("bench", "--decode", "--rows", "1,4", "--dtype", "float32", "--json")
    assert ended.code == 0
    assert requested == [("gpt2", "float32", "1,4", None, None, None)]
    found = ended.json
    assert list(found) == ["versions", "ceilings", "rows", "skipped"]
    steps = found["rows"]
    assert [entry["contender"] for entry in steps] == ["gpt2block", "sampled"] * 4
    assert steps[2]["sizes"] == {"rows": 4, "position": 10, "n_layer": 1, "n_embd": 64}
    assert steps[2]["tokens_s"] == pytest.approx(4e6 / 50)


def test_the_picture_is_of_the_given_rows(report: Report, tmp_path: Path) -> None:
    figure = benches.drawn(draw_decoding, tmp_path / "decoding.png", report)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.text import Text  # noqa: PLC0415

    (ax,) = figure.axes
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    ours, limit = points(report.rows), floor(report.rows)
    assert [n for n, _ in ours] == [1, 4, 8, 64]
    assert limit[3][1] == pytest.approx(64 / (report.rows[-1].gb_s * 60e-6 / 4000))
    assert [list(zip(*line.get_data(), strict=True)) for line in ax.lines] == [limit, ours]
    assert [text.get_text().split(", ")[0] for text in ax.texts] == ["floor", "gpt2block"]
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    one, other = (Text.get_window_extent(text) for text in ax.texts)
    assert not one.overlaps(other)
    width = figure.get_size_inches()[0] * figure.dpi
    assert all(box.x0 >= 0 and box.x1 <= width for box in (one, other))


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
        decode(model, 1),
        decode(model, 8),
        prompt(model, 1024),
        generate(model, ManyPrompts(20, 16, 256, 8)),
    ]
    report = bench.run(works)
    assert report.right
    assert report.skipped == []
    us = {(row.work, row.contender): row.us for row in report.rows}
    # Times are not compared, as other tests may use the GPU at the same time.
    assert {"1 row", "8 rows"} <= {work for work, by in us if by == "gpt2block"}
    assert all(0 < row.percent_copy < 100 for row in report.rows)
