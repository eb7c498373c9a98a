"""Changes must not lengthen calls' ways through files, close import cycles or spread options."""

from __future__ import annotations

import re
from pathlib import Path

import house
import pytest

from tests.devices import slow

GOLDEN = Path(__file__).parent / "golden" / "house.txt"
SLACK = 1.02  # a server's threads may interleave differently
RENEW = """{got}
is more than the table has: {table}
If the change needs that:
    python tools/house.py > tests/golden/house.txt"""
TABLE = dict(line.rsplit(": ", 1) for line in GOLDEN.read_text(encoding="utf-8").splitlines())


def assert_no_more(lines: list[str]) -> None:
    """Assert that each line has the table's numbers, or smaller ones."""
    for line in lines:
        name, got = line.rsplit(": ", 1)
        table = TABLE.get(name, "nothing of it")
        most = [SLACK * int(n) for n in re.findall(r"\d+", table)]
        numbers = [int(n) for n in re.findall(r"\d+", got)]
        no_more = most and all(n <= limit for n, limit in zip(numbers, most, strict=True))
        assert no_more, RENEW.format(got=line, table=table)


REPEATED = "block, skeleton", house.USER  # most of these calls are in other walks, too


@pytest.mark.parametrize("name", [slow(n) if n in REPEATED else n for n in house.WALKS])
def test_no_walk_is_longer(name: str) -> None:
    if name == "server":
        pytest.importorskip("starlette", reason="a server needs the extra serve")
    found = house.walked(name)
    assert found
    assert_no_more(found)


def test_the_structure_has_no_more_circles_and_names() -> None:
    assert_no_more([*house.structure()])


def test_what_the_measures_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measures count imports for types and in functions, calls, and changes of file."""
    package = tmp_path / "gpt2block"
    texts = {
        "a": "import gpt2block.b\nclass Row: ...\ndef call(): ...\n",
        "b": "def late():\n    from gpt2block import c\nclass Row: ...\ndef back(): ...\n",
        "c": "if TYPE_CHECKING:\n    from gpt2block.a import call\nkv_dtype = 1\n",
        "d": "from gpt2block import a\n",
    }
    package.mkdir()
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(house, "PACKAGE", package)
    monkeypatch.setattr(house.sources, "__defaults__", (package,))
    assert house.circles() == [["gpt2block.a", "gpt2block.b", "gpt2block.c"]]
    assert house.classes_twice() == {"Row": 2}
    assert (house.files_of("kv_dtype"), house.files_of("kv")) == (1, 0)
    code = compile("def f():\n    g()\n    g()\n", str(package / "d.py"), "exec")
    other = compile("def g(): [h() for _ in 'ab']\ndef h(): ...\n", str(package / "b.py"), "exec")
    names: dict[str, object] = {}
    exec(other, names)
    exec(code, names)
    assert house.Way().of(names["f"]) == "2 files, 7 calls, 2 changes of file"  # type: ignore[arg-type]
