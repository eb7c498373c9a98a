"""The tool itself: see the docstring of the package."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from gpt2block import emulator

from . import __doc__ as description
from .blocks import blocks
from .command_line import command_line, jobs
from .models import models, numpy, smollm2, texts
from .operations import operations

ON_GPU = (blocks, models, texts, operations)
AREAS = {make.__name__: make for make in (*ON_GPU, smollm2, numpy, jobs, command_line)}


def digest(result: Any) -> str:
    """The first 16 characters of the SHA-256 of a text, of bytes, or of an array's bytes."""
    data = result.encode() if isinstance(result, str) else result
    host = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    return hashlib.sha256(host).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--emulated", action="store_true", help="on the CPU, in small sizes")
    parser.add_argument("--only", choices=AREAS, help="one area")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write what commands print")
    args = parser.parse_args()
    os.environ.pop("COLUMNS", None)  # tables have their usual width
    for area, make in AREAS.items():
        if args.only not in (None, area):
            continue
        emulates = args.emulated and make in ON_GPU
        with emulator.emulated() if emulates else contextlib.nullcontext():
            for name, made in make(args.emulated):
                print(digest(made), area, name, flush=True)
                if args.texts and isinstance(made, str):
                    args.texts.mkdir(parents=True, exist_ok=True)
                    file = re.sub(r"[^\w.-]+", "_", name).strip("_") or "no_arguments"
                    (args.texts / f"{file}.txt").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
