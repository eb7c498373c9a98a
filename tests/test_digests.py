"""tools/digests: the same output twice."""

from __future__ import annotations

from pathlib import Path

from digests.__main__ import digest
from digests.command_line import normal
from digests.models import calls, made, prompts


def test_the_same_calls_have_the_same_digests() -> None:
    found = []
    for _ in range(2):
        name, dtype, model = next(iter(made(True, "cpu", [("float32", None)])))
        made_now = calls(f"{name} {dtype}", model, prompts(model, (11, 1, 7, 5, 16)))
        found.append([(name, digest(array)) for name, array in made_now])
    assert found[0] == found[1]
    names = [name for name, _ in found[0]]
    assert len({*names}) == len(names) > 50
    assert len({digest for _, digest in found[0]}) > len(names) / 2


def test_times_and_places_do_not_differ(tmp_path: Path) -> None:
    texts = (
        '{"file": "%s/a", "ms": 0.25, "seconds_to_first_token": 1e-3, "n": 25}\n'
        " qkv  3x4    0.0812  1.0e-06\nready after 2.5 s, 1,234.5 tokens/s\n",
        '{"file": "%s/a", "ms": 12.0, "seconds_to_first_token": 2.25, "n": 25}\n'
        " qkv  3x4  127.1234  1.0e-06\nready after 12 s, 4.5 tokens/s\n",
    )
    first, second = (normal(text % tmp_path, str(tmp_path)) for text in texts)
    assert first == second
    assert all(kept in first for kept in ("FILES/a", '"n": 25', "1.0e-06"))
