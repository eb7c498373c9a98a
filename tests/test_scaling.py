"""tools/scaling.py: rates from times, the table, and a run with two workers on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import scaling
from scaling import End, Part

from gpt2block.tokenizers import tokenizer_json


def test_the_rate_is_measured_while_all_workers_are_busy() -> None:
    """Two workers with a shard per second each; early and late shards are excluded."""
    busy = [second + offset for second in range(10, 30) for offset in (0.0, 0.5)]
    ends = [End(time, 7, 70) for time in (4.0, 5.0, *busy, 40.0, 60.0)]
    part = Part("map, 2", 2, 1)
    part.take(1.0, ends[::-1])
    assert part.start_up == 3
    assert part.shards == len(busy) - 4
    assert part.seconds == pytest.approx(part.shards / 2)
    assert (part.rate, part.token_rate) == pytest.approx((14, 140))
    few = Part("map, 2", 2, 1)
    few.take(0.0, ends[:11])
    assert few.problem == "11 shards are too few"
    assert np.isnan(few.rate)


def test_the_table() -> None:
    loop = Part("loop1", 1, 1, 2.0, 10.0, 1000, 9000)
    one = Part("map, 1", 1, 1, 3.0, 10.0, 980, 8820)
    two = Part("map, 2", 2, 1, 3.5, 10.0, 1862, 16758)
    lines = scaling.table([loop, one, two, Part("map, 4", 4, 1, problem="exit code 1: no")])
    assert lines[2] == "| loop1 | 1 | 1 | 2.0 | 10.0 | 100.0 | 900 |  |"
    assert lines[3] == "| map, 1 | 1 | 1 | 3.0 | 10.0 | 98.0 | 882 | 1.000 |"
    assert lines[4].endswith("| 186.2 | 1,676 | 0.950 |")
    assert lines[6:] == ["Dask's overhead with one worker: 2.0 %", "map, 4: exit code 1: no"]


def test_records_have_the_requested_tokens_and_are_reproducible(tmp_path: Path) -> None:
    vocab = {bytes([byte]): byte for byte in range(256)} | {b" t": 256, b" o": 257, b"of": 258}
    words = [token.decode() for token in vocab if len(token) > 1 and token[0] == 32]
    encoding = tokenizer_json.by_tiktoken("test", vocab, {})
    written = []
    for name in "ab":
        scaling.write_records(tmp_path / name, 99, (2, 5), 0, words)
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1]
    texts = [json.loads(line)["text"] for line in written[0].splitlines()]
    assert {len(encoding.encode_ordinary(text)) for text in texts} == {2, 3, 4, 5}
    scaling.write_records(tmp_path / "ids", 99, (2, 5), 7)
    ids = [json.loads(line)["text"] for line in (tmp_path / "ids").read_text().splitlines()]
    assert {len(row) for row in ids} == {2, 3, 4, 5}
    assert set().union(*ids) == set(range(7))


def test_two_workers_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("distributed", reason="gpt2block map needs dask and distributed")
    monkeypatch.setattr(scaling, "WARM_SECONDS", 0.1)
    options = "--model shakespeare --dtype float32 --device cpu --seconds 1 --workers 2 "
    options += "--records 300 --lengths 2 6 --shard-size 5 --most 3000 --limit 60"
    figures = tmp_path / "figures.json"
    outputs = ["--folder", str(tmp_path / "f"), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["scaling", *options.split(), *outputs])
    scaling.main()
    printed = capsys.readouterr().out
    assert printed.count("\n| map, 2 ") == 1
    found = json.loads(figures.read_text())
    assert "NumPy" in found["device"]
    loop, two = found["parts"]
    for part in (loop, two):
        assert not part["problem"]
        assert part["records_per_s"] > 0
        assert part["start_up"] > 0
    assert two["compared"] > 10  # files that equal the loop's
