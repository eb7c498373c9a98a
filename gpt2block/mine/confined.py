"""Limit the resources of a program that g++ has compiled from a user's file.

The program's host code, such as the initializer of a global variable, runs with the user's rights.
The operating system limits its memory, the size of its files (to 0), the number of its processes
and its access to the network. The program can still read and delete the user's files.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

MEMORY = 4 << 30  # maximum bytes of memory
PROCESSES = 64  # maximum number of processes in the program's user namespace
_APART = (  # separate network and process namespaces; the program is killed if unshare ends
    *("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork"),
    "--kill-child",
)


def confined(races: bool) -> tuple[str, ...]:
    """Return the command prefix that runs a program with all limits that this system supports.

    races: whether the program is built to find races, with limited memory. Otherwise it is built
    with AddressSanitizer, whose shadow memory would exceed the limit; it limits its own memory.
    """
    memory = MEMORY if races else None
    return (
        *_apart(),
        *_limits(memory),
        *(() if races else ("env", f"ASAN_OPTIONS=hard_rss_limit_mb={MEMORY >> 20}")),
    )


@cache
def _apart() -> tuple[str, ...]:
    """Return the command prefix for namespaces; empty if unprivileged users cannot create them."""
    return _APART if _works(*_APART) else ()


@cache
def _limits(memory: int | None) -> tuple[str, ...]:
    data = () if memory is None else (f"--data={memory}",)
    # Without a namespace, the limit would count all of the user's processes.
    processes = (f"--nproc={PROCESSES}",) if _apart() else ()
    words = ("prlimit", "--fsize=0", "--core=0", *data, *processes)
    return words if _works(*words) else ()


def _works(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        return False
    done = subprocess.run([*words, "true"], capture_output=True, check=False)
    return done.returncode == 0
