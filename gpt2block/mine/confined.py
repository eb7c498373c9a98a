"""Limits of a program that g++ has compiled from a user's file.

Its host code, such as the initializer of a global variable, runs with the user's rights. What the
system offers limits it: memory, the size of files (none can be written), processes, and no
network. It can still read and delete the user's files.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

MEMORY = 4 << 30  # bytes
PROCESSES = 64  # of the program's own user namespace
_APART = (  # a network and processes of its own, which end with it
    *("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork"),
    "--kill-child",
)


def confined(races: bool) -> tuple[str, ...]:
    """The words of a command that runs a program within limits, as far as they work here.

    races: the program is the one that finds races. The other one is under AddressSanitizer, whose
    table of all memory would count as data: it watches its own memory.
    """
    memory = MEMORY if races else None
    return (
        *_apart(),
        *_limits(memory),
        *(() if races else ("env", f"ASAN_OPTIONS=hard_rss_limit_mb={MEMORY >> 20}")),
    )


@cache
def _apart() -> tuple[str, ...]:
    """Namespaces; nothing where unprivileged users may not make any."""
    return _APART if _works(*_APART) else ()


@cache
def _limits(memory: int | None) -> tuple[str, ...]:
    data = () if memory is None else (f"--data={memory}",)
    processes = (f"--nproc={PROCESSES}",) if _apart() else ()  # else all of the user's count
    words = ("prlimit", "--fsize=0", "--core=0", *data, *processes)
    return words if _works(*words) else ()


def _works(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        return False
    done = subprocess.run([*words, "true"], capture_output=True, check=False)
    return done.returncode == 0
