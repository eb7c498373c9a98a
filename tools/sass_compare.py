"""Compare the machine code of the kernels that two trees launch, without a GPU.

    python tools/sass_compare.py OLD NEW [--only TEXT] [--limit N] [--names FILE]

OLD and NEW are checkouts. Their tools/launch_lists.py list the builds: a kernel, its file,
constants and architecture. A build of OLD is paired with the build of NEW that the same program
launches in the same place, even if names and constants differ. If NEW has no such place, the build
is paired with the build of the same constants and names; --names is a file that maps names, with a
line `old new` for each file or kernel. The tool compiles each pair with NVRTC, and prints pairs
that differ:

    parameters    in nothing but the places of the kernel's parameters
    different     in the instructions; with their number, registers and spills of both

and the builds that have no counterpart. The exit status is 1 if it has printed any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import ne
from pathlib import Path
from typing import Any

Build = tuple[str, str, str, str]  # file, kernel, constants, architecture
Launches = dict[tuple[str, int], Build]
ARCHITECTURES = {"7.5": "sm_75", "8.0": "sm_80", "9.0": "sm_90a"}
PROGRAMS = ["generation", "block"]
AT_ONCE = 40  # builds per process: rarely, code depends on earlier compilations in the process
WORD = 16  # bytes per instruction
COMPILER = Path(__file__).with_name("compile_for.py")


def run(tree: Path, *command: str, given: str = "") -> list[str]:
    """Run Python with the package of a tree, and return the lines that it prints."""
    ran = subprocess.run(
        [sys.executable, *command], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
        input=given, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return ran.stdout.splitlines()


def launches(tree: Path, programs: Sequence[str]) -> Launches:
    """Return {place: build}; a place is (program, call and step; number of the launch there)."""
    builds: Launches = {}
    for (capability, arch), only in ((a, p) for a in ARCHITECTURES.items() for p in programs):
        count: Counter[str] = Counter()
        asked = "--capability", capability, "--only", f"{capability} {only}"
        for line in run(tree, "tools/launch_lists.py", *asked):
            *place, launch, constants, _ = line.split(" | ")[:6]
            if " grid " in launch:
                kernel, file, _ = launch.split(maxsplit=2)
                builds[str(place), count[str(place)]] = file, kernel, constants, arch
                count[str(place)] += 1
    return builds


def pairs_of(
    old: Launches, new: Launches, names: Mapping[str, str]
) -> list[tuple[Build | None, Build | None]]:
    """Return each build of one tree with its counterpart in the other tree, or with None."""
    pairs: set[tuple[Any, Any]] = {(old[place], new[place]) for place in old.keys() & new.keys()}
    known = set(new.values())
    for build in set(old.values()) - {a for a, _ in pairs}:
        same = *(names.get(name, name) for name in build[:2]), *build[2:]
        pairs.add((build, same if same in known else None))
    pairs |= {(None, build) for build in known - {b for _, b in pairs}}
    return sorted(pairs, key=str)


def compiled(tree: Path, builds: Sequence[Build]) -> list[tuple[bytes, str]]:
    """Return for each build its code with constants, and a text with its registers and spills."""
    codes = []
    jobs = [
        (file, arch, [each.split("=", 1) for each in constants.split()], kernel)
        for file, kernel, constants, arch in builds
    ]
    given = "\n".join(map(json.dumps, jobs))
    for _, log, cubin in map(json.loads, run(tree, str(COMPILER), given=given)):
        used = re.findall(r"Used \d+ registers|[1-9]\d* bytes spill \w+", log)
        codes.append((code_of(bytes.fromhex(cubin)), ", ".join(used)))
    return codes


def code_of(cubin: bytes) -> bytes:
    """Return the sections of an ELF file that have instructions, constants and variables."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * n) for n in range(count)]
    code = b""
    for start, _, _, _, at, length in headers:
        name = cubin[headers[names][4] + start :].partition(b"\0")[0].decode()
        if re.match(r"\.text|\.nv\.(constant[1-9]|global\.init)", name):  # bank 0: arguments
            code += cubin[at : at + length]
    return code


def without_place(word: bytes) -> bytes:
    """Return an instruction without the offset in constant bank 0 of the argument that it reads."""
    number = int.from_bytes(word, "little")
    if number >> 9 & 7 in (3, 5) and not number >> 54 & 31:  # forms with a constant
        number &= ~(0xFFFF << 38)
    return number.to_bytes(WORD, "little")


def verdict(old: tuple[bytes, str], new: tuple[bytes, str]) -> list[str]:
    """Return ["equal"], ["parameters"] or ["different", a text about the difference]."""
    if old[0] == new[0]:
        return ["equal"]
    a, b = ([code[n : n + WORD] for n in range(0, len(code), WORD)] for code, _ in (old, new))
    if list(map(without_place, a)) == list(map(without_place, b)):
        return ["parameters"]
    changed = f"{len(a)} and {len(b)} instructions, {sum(map(ne, a, b))} in their places"
    return ["different", f"({changed}; {old[1]}; {new[1]})"]


def compared(trees: Sequence[Path], pairs: Sequence[tuple[Build, Build]]) -> Iterator[list[str]]:
    """Yield the verdict on each pair of builds."""
    for first in range(0, len(pairs), AT_ONCE):
        some = pairs[first : first + AT_ONCE]
        codes = (compiled(*each) for each in zip(trees, zip(*some, strict=True), strict=True))
        for pair, *both in zip(some, *codes, strict=True):
            result = verdict(*both)
            if result[0] == "different":  # perhaps only because of earlier compilations
                alone = zip(trees, ([build] for build in pair), strict=True)
                result = verdict(*(compiled(*each)[0] for each in alone))
            yield result


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE", help="OLD and NEW")
    parser.add_argument("--only", default="", help="builds with this text, such as a file's name")
    parser.add_argument("--limit", type=int, help="number of pairs to compile, spread over all")
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, help="beginnings of names")
    parser.add_argument("--names", type=Path, help="a file with lines `old new`")
    args = parser.parse_args()
    trees = [tree.resolve() for tree in args.trees]
    names = dict(line.split() for line in args.names.read_text().splitlines()) if args.names else {}
    old, new = (launches(tree, args.programs) for tree in trees)
    pairs = pairs_of(old, new, names)
    chosen = [pair for pair in pairs if args.only in str(pair)]
    both = [(a, b) for a, b in chosen if a and b]
    both = both[:: -(-len(both) // args.limit)] if args.limit else both
    alone = [(a, b) for a, b in chosen if not (a and b)]
    for a, b in alone:
        print(f"only in {'OLD' if a else 'NEW'}:", *(a or b or ()))
    counts = Counter({"without a counterpart": len(alone)})
    for (a, b), (kind, *more) in zip(both, compared(trees, both), strict=True):
        counts[kind] += 1
        if kind != "equal":
            print(f"{kind}:", *a, *(() if a == b else ("->", *b)), *more, flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    sys.exit(sum(counts.values()) > counts["equal"])


if __name__ == "__main__":
    main()
