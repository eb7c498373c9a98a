"""Keep programs of the emulator running between launches.

Starting a program takes longer than most launches. A program ends with the first launch that fails.
If a launch may leave values in the program's variables, the program forks for each launch.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

MOST = 32  # maximum number of waiting programs; a model's decoding step has fewer kernels
Ended = subprocess.CompletedProcess[bytes]


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    names = set(os.environ) - {"ASAN_OPTIONS", "UBSAN_OPTIONS"}  # the program sets both itself
    return {name: os.environ[name] for name in names} | dict(own)


class _Program:
    """A process that waits for launches; two files receive its stdout and stderr."""

    def __init__(self, program: Path, own: Mapping[str, str]) -> None:
        self._outputs = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (close)
        self._socket, theirs = socket.socketpair()
        out, err = self._outputs
        with theirs:
            self._process = subprocess.Popen(
                [str(program)], stdin=theirs.fileno(), stdout=out, stderr=err, env=_environment(own)
            )

    def launch(self, words: bytes, message: bytes, timeout_s: float) -> Ended:
        for file in self._outputs:
            file.seek(0)
            file.truncate()
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(struct.pack("<q", len(words)) + words)
            self._socket.sendall(message)
            well = self._socket.recv(1)
        except ConnectionError:
            well = b""  # the program has ended before reading the whole message
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(self._process.args, timeout_s) from error
        for file in self._outputs:
            file.seek(0)
        out, err = (file.read() for file in self._outputs)
        return Ended(self._process.args, 0 if well else self._process.wait(), out, err)

    @property
    def waits(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()  # also ends a running launch
        self._process.wait()
        self._socket.close()
        for file in self._outputs:
            file.close()


_confined: set[subprocess.Popen[bytes]] = set()  # running programs that serve one launch each


def stop_confined() -> None:
    """Kill the programs that run within a command prefix. Their launches end with an error."""
    for process in list(_confined):
        process.kill()


def _run_within(
    command: Sequence[str], message: bytes, env: Mapping[str, str], timeout_s: float
) -> Ended:
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
    ) as process:  # fmt: skip
        _confined.add(process)
        try:
            out, err = process.communicate(message, timeout_s)
        finally:
            process.kill()
            _confined.discard(process)
    return Ended(command, process.returncode, out, err)


_Key = tuple[int, Path, tuple[tuple[str, str], ...]]
_waiting: dict[_Key, _Program] = {}  # processes, ordered by last launch, oldest first


def launch(
    program: Path,
    words: Sequence[object],
    message: bytes,
    own: Mapping[str, str],
    timeout_s: float,
    within: Sequence[str] = (),
) -> Ended:
    """Run a launch in a waiting process of the program, or if there is none in a new process.

    words: description of the launch. message: bytes of the arguments. own: additional environment
    variables of the program. within: command prefix that runs the program; it is then started for
    this launch only. Raises subprocess.TimeoutExpired.
    """
    if within:
        command = (*within, str(program), *map(str, words))
        return _run_within(command, message, _environment(own), timeout_s)
    key = os.getpid(), program, tuple(sorted(own.items()))
    process = _waiting.pop(key, None)
    if process is None or not process.waits:  # the operating system may have killed it
        process = _Program(program, own)
    try:
        ended = process.launch("".join(f"{word}\0" for word in words).encode(), message, timeout_s)
    except BaseException:
        process.close()
        raise
    if not process.waits:
        process.close()
        return ended
    others = [_waiting.pop(key, None)]  # a process of this program that another thread stored
    _waiting[key] = process
    others += [_waiting.pop(oldest, None) for oldest in list(_waiting)[:-MOST]]
    for other in others:
        if other:
            other.close()
    return ended


@atexit.register
def _close_all() -> None:
    for key in [key for key in _waiting if key[0] == os.getpid()]:
        _waiting.pop(key).close()
