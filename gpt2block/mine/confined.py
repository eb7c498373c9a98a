"""Limit the rights and the resources of a program that g++ has compiled from a user's file.

The program's host code, such as the initializer of a global variable, runs with the user's rights.
The operating system limits its CPU time, its memory and the size of its files (to 0). The program
can read only the compiler's libraries (Landlock), starts no process and has no network (seccomp).
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from math import ceil

from gpt2block.emulator.cache import folder as cache_folder
from gpt2block.emulator.loader import confiner, readable

MEMORY = 4 << 30  # maximum bytes of memory
GRACE_S = 5  # seconds of CPU time from a launch's own limit until the program is killed
_APART = (  # separate network and process namespaces; the program is killed if unshare ends
    *("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork"),
    "--kill-child",
)
_MISSING = {
    "files": "reading this user's files (Landlock, Linux 5.13)",
    "calls": "starting processes and using the network (seccomp)",
}


def confined(races: bool, limit_s: float) -> tuple[str, ...]:
    """Return the command prefix that runs a program with all limits that this system supports.

    races: whether the program has no AddressSanitizer. Only then does prlimit limit its memory:
    shadow memory of AddressSanitizer would exceed this limit, and AddressSanitizer has an option
    that limits memory. limit_s: CPU time.
    """
    memory = (f"--data={MEMORY}",) if races else ()
    limits = ("prlimit", "--fsize=0", "--core=0", f"--cpu={ceil(limit_s) + GRACE_S}", *memory)
    return (
        *_apart(),
        *(limits if _works(*limits[:3]) else ()),
        *(() if races else ("env", f"ASAN_OPTIONS=hard_rss_limit_mb={MEMORY >> 20}")),
        *(str(confiner()), *readable(), f"r={cache_folder()}", "alone", "--"),
    )


@cache
def unconfined() -> tuple[str, ...]:
    """Return a phrase for each kind of access that this system cannot deny to a program."""
    done = subprocess.run([confiner(), "probe"], capture_output=True, text=True, check=False)
    return tuple(what for name, what in _MISSING.items() if name not in done.stdout.split())


@cache
def _apart() -> tuple[str, ...]:
    """Return the command prefix for namespaces; empty if unprivileged users cannot create them."""
    return _APART if _works(*_APART) else ()


@cache
def _works(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        return False
    done = subprocess.run([*words, "true"], capture_output=True, check=False)
    return done.returncode == 0
