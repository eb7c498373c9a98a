"""Send requests to a server of OpenAI's protocol, and print its latencies and rates.

    python -m tools.load http://127.0.0.1:8000/v1 --rate 5 --seconds 20

Requests arrive at random (a Poisson process), or as fast as `--at-once` of them are answered. Each
is a completion of ids drawn at random: a stream or, with `--whole`, an answer in one piece. Several
processes ask, so that they do not limit the server. With `--large-every`, one more process sends
the largest requests that gpt2block's server reads, to compare the gaps of streams with and without
such requests. With `--chats N`, one more process keeps N conversations of `--messages` messages
waiting, with the key `--chats-key`. With `--probe-every S`, one more process sends a small request
to /tokenize and one to /v1/embeddings every S seconds. Other servers of the protocol can be
measured, too, over HTTP without TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import numpy as np

PERCENTILES = (50, 95, 99)
TIMES = ("first", "between", "answer", "tokenize", "embeddings")
COUNTS = ("pieces", "tokens", "answered", "closed", "refused", "cut")
MAX_BODY, MAX_VALUES = 2**22, 2**14  # limits of gpt2block's server: bytes, entries of lists
LINE = 2**20  # bytes per line of an answer at most


@dataclass
class Seen:
    """Measurements of clients.

    first, between: seconds to the first piece of a stream, and between pieces. answer: seconds to
    the end of an answer. tokenize, embeddings: seconds to the answers of small requests. tokens:
    number of tokens in whole answers. cut: number of answers that began but did not end. large:
    number of the largest requests and long chats by status.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)
    tokenize: list[float] = field(default_factory=list)
    embeddings: list[float] = field(default_factory=list)
    pieces: int = 0
    tokens: int = 0
    answered: int = 0
    closed: int = 0
    refused: int = 0
    cut: int = 0
    large: Counter[str] = field(default_factory=Counter)
    begun: float = float("inf")
    ended: float = 0.0

    def add(self, other: Seen) -> None:
        for name in (*TIMES, *COUNTS, "large"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.begun, self.ended = min(self.begun, other.begun), max(self.ended, other.ended)


@dataclass(frozen=True)
class Load:
    """The requests to send. lengths: minimum and maximum number of tokens of prompts.

    requests: total number; None: requests are sent for `seconds`. large_every: seconds between two
    of the largest requests; 0: none are sent. chats: number of long conversations that wait at a
    time, each of `messages` messages of `characters` characters, with the key `chats_key`.
    probe_every: seconds between two small requests; 0: none are sent. numbers: number of this
    process's first request, and the step to the next number.
    """

    url: str
    model: str
    key: str
    rate: float
    at_once: int
    seconds: float
    requests: int | None
    lengths: tuple[int, int]
    new: int
    temperature: float
    vocab_size: int
    whole: bool
    closing: float
    seed: int
    large_every: float = 0
    chats: int = 0
    messages: int = 5000
    characters: int = 700
    chats_key: str = "any"
    probe_every: float = 0
    numbers: tuple[int, int] = (0, 1)

    def prompt(self, number: int) -> list[int]:
        rng = np.random.default_rng((self.seed, number))
        length = rng.integers(*self.lengths, endpoint=True)
        ids: list[int] = rng.integers(self.vocab_size, size=length).tolist()
        return ids

    def leaves_after(self, number: int) -> int | None:
        """Number of pieces after which a client disconnects; None: it stays connected."""
        rng = np.random.default_rng((self.seed, number, 1))
        return int(rng.integers(1, 9)) if rng.random() < self.closing else None

    def body(self, number: int) -> bytes:
        fields = {
            "model": self.model,
            "prompt": self.prompt(number),
            "max_tokens": self.new,
            "temperature": self.temperature,
            "seed": number,
            "stream": not self.whole,
        }
        return json.dumps(fields).encode()

    def large(self) -> list[tuple[str, bytes]]:
        """Return the addresses and bodies of the largest requests."""
        text = "All work and no play. " * (MAX_BODY // 22 - 16)  # with room for the other fields
        message = {"role": "user", "content": "Hello"}  # counts as three values
        base = urlsplit(self.url).path
        bodies: list[tuple[str, dict[str, Any]]] = [
            (f"{base}/completions", {"prompt": text}),
            (base.removesuffix("/v1") + "/tokenize", {"prompt": text}),
            (f"{base}/chat/completions", {"messages": [message] * (MAX_VALUES // 3)}),
            (f"{base}/chat/completions", {"messages": [message] * MAX_VALUES}),
            (f"{base}/completions", {"prompt": [1], "max_tokens": 1,
                                     "logit_bias": dict.fromkeys(map(str, range(MAX_VALUES)), 1)}),
        ]  # fmt: skip
        return [(at, json.dumps({"model": self.model, **body}).encode()) for at, body in bodies]

    def chat(self) -> bytes:
        """A long conversation."""
        roles = cycle(("user", "assistant"))
        text = ("All work and no play. " * self.characters)[: self.characters]
        messages = [{"role": next(roles), "content": text} for _ in range(self.messages)]
        return json.dumps({"model": self.model, "messages": messages, "max_tokens": 1}).encode()

    def of_process(self, index: int, processes: int) -> Load:
        """Return the part of the load that one of several processes sends."""
        share = len(range(index, self.at_once, processes))
        numbers = index, processes
        return replace(self, rate=self.rate / processes, at_once=share, numbers=numbers)


class Refused(Exception):  # noqa: N818  (it is counted)
    """The server answered with an error status, or with an error event in a stream."""


class Cut(Exception):  # noqa: N818
    """The connection was closed before the end of an answer."""


class Client:
    """HTTP/1.1 to a server, on connections that stay open from request to request."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port or 80
        self._completions = f"{parts.path}/completions"
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._head = (
            f"HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        )

    async def post(self, body: bytes, address: str | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the parts of an answer as they arrive. address: by default the path of completions.

        Raises Refused for a status other than 200, Cut for an answer without its end.
        """
        reader, writer = await self._connection()
        ended = False
        try:
            head = f"POST {address or self._completions} {self._head}Content-Length: {len(body)}"
            writer.write(f"{head}\r\n\r\n".encode() + body)
            begun = await reader.readuntil(b"\r\n\r\n")
            async for part in _parts(reader, begun):
                if (status := begun.split()[1]) != b"200":
                    raise Refused(status.decode())
                yield part
            ended = True
        finally:
            if ended:
                self._free.append((reader, writer))
            else:
                writer.close()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._free:
            reader, writer = self._free.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(*self._address, limit=LINE)

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


async def _parts(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    """Yield the chunks of a body, or the whole body."""
    try:
        if length := re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE):
            yield await reader.readexactly(int(length[1]))
            return
        while size := int(await reader.readuntil(), 16):
            yield await reader.readexactly(size)
            await reader.readuntil()
        await reader.readuntil()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise Cut from error


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events. Raises Refused for an error, Cut without an end."""
    rest, done = b"", False
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b'data: {"error"'):
                raise Refused(line)
            if line.startswith(b"data: {"):
                yield line
            done = done or line.rstrip() == b"data: [DONE]"
    if not done:
        raise Cut


async def ask(client: Client, load: Load, number: int, seen: Seen) -> None:
    """Send one request. Some are closed after a few pieces, as if the client disconnected."""
    body, leave = load.body(number), load.leaves_after(number)
    begun = last = perf_counter()
    pieces = 0
    try:
        async with aclosing(client.post(body)) as parts:
            if load.whole:
                answer = b"".join([part async for part in parts])
                seen.tokens += json.loads(answer)["usage"]["completion_tokens"]
            else:
                async for _ in events(parts):
                    now = perf_counter()
                    (seen.between if pieces else seen.first).append(now - last)
                    last, pieces = now, pieces + 1
                    if pieces == leave:
                        seen.closed += 1
                        return
        seen.answered += 1
        seen.answer.append(perf_counter() - begun)
    except (Refused, OSError, asyncio.IncompleteReadError):
        seen.refused += 1
    except Cut:
        seen.cut += 1
    finally:
        seen.pieces += pieces


async def ask_large(load: Load) -> Seen:
    """Send the largest requests in turn until the time is over."""
    client, seen = Client(load.url, load.key), Seen(begun=perf_counter())
    for turn, (address, body) in enumerate(cycle(load.large())):
        await asyncio.sleep(max(0.0, seen.begun + turn * load.large_every - perf_counter()))
        if perf_counter() - seen.begun >= load.seconds:
            break
        seen.large[f"{address} {await _status(client, address, body)}"] += 1
    client.close()
    seen.ended = perf_counter()
    return seen


async def _status(client: Client, address: str, body: bytes) -> str:
    """Wait for all of an answer, and return its status."""
    try:
        async with aclosing(client.post(body, address)) as parts:
            async for _ in parts:
                pass
    except Refused as error:
        return str(error)
    except (Cut, OSError, asyncio.IncompleteReadError):
        return "cut"
    return "200"


async def ask_chats(load: Load) -> Seen:
    """Keep long conversations waiting until the time is over."""
    client, seen = Client(load.url, load.chats_key), Seen(begun=perf_counter())
    address, body = f"{urlsplit(load.url).path}/chat/completions", load.chat()

    async def one_after_another() -> None:
        while perf_counter() - seen.begun < load.seconds:
            seen.large[f"long chat {await _status(client, address, body)}"] += 1

    await asyncio.gather(*(one_after_another() for _ in range(load.chats)))
    client.close()
    seen.ended = perf_counter()
    return seen


async def ask_small(load: Load) -> Seen:
    """Send small requests until the time is over."""
    client, seen = Client(load.url, load.key), Seen(begun=perf_counter())
    base = urlsplit(load.url).path
    small = (
        ("tokenize", base.removesuffix("/v1") + "/tokenize", {"prompt": "Hello"}),
        ("embeddings", f"{base}/embeddings", {"input": "Hello"}),
    )
    for turn in count():
        await asyncio.sleep(max(0.0, seen.begun + turn * load.probe_every - perf_counter()))
        if perf_counter() - seen.begun >= load.seconds:
            break
        for name, address, given in small:
            begun, body = perf_counter(), json.dumps({"model": load.model, **given}).encode()
            if (status := await _status(client, address, body)) == "200":
                getattr(seen, name).append(perf_counter() - begun)
            else:
                seen.large[f"{address} {status}"] += 1
    client.close()
    seen.ended = perf_counter()
    return seen


async def run(load: Load) -> Seen:
    """Send requests until the time is over or all are sent, and wait for all answers."""
    client, rng = Client(load.url, load.key), np.random.default_rng((load.seed, *load.numbers))
    seen = Seen(begun=perf_counter())
    tasks: set[asyncio.Task[None]] = set()
    next_at = seen.begun
    for number in _numbers(load):
        if load.rate:
            next_at += rng.exponential(1 / load.rate)
            await asyncio.sleep(max(0.0, next_at - perf_counter()))
        elif len(tasks) >= load.at_once:
            _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if load.requests is None and perf_counter() - seen.begun >= load.seconds:
            break
        tasks.add(asyncio.create_task(ask(client, load, number, seen)))
        tasks = {task for task in tasks if not task.done()}
    if tasks:
        await asyncio.wait(tasks)
    client.close()
    seen.ended = perf_counter()
    return seen


def _numbers(load: Load) -> Iterable[int]:
    """Return the numbers of the requests of this process."""
    first, step = load.numbers
    return count(first, step) if load.requests is None else range(first, load.requests, step)


_together: Any = None  # the barrier of the processes


def _joined(together: Any) -> None:
    global _together  # noqa: PLW0603  (each process has its own)
    _together = together


def _run_together(load: Load, ask: Callable[[Load], Coroutine[Any, Any, Seen]]) -> Seen:
    _together.wait()
    return asyncio.run(ask(load))


def run_all(load: Load, processes: int = 1) -> Seen:
    """Send the requests from several processes, which start at the same time."""
    spawn = multiprocessing.get_context("spawn")  # clocks of processes agree on Linux and Windows
    parts = [load.of_process(index, processes) for index in range(processes)]
    asks: list[Any] = [run] * processes
    others = ((load.large_every, ask_large), (load.chats, ask_chats), (load.probe_every, ask_small))
    asks += [ask for wanted, ask in others if wanted]
    parts += [load] * (len(asks) - processes)
    joined = (spawn.Barrier(len(parts)),)
    with ProcessPoolExecutor(len(parts), spawn, _joined, joined) as pool:
        seen = Seen()
        for each in pool.map(_run_together, parts, asks):
            seen.add(each)
    return seen


def report(seen: Seen) -> dict[str, object]:
    """Return counts, rates, and percentiles in milliseconds."""
    seconds = seen.ended - seen.begun
    counts: dict[str, object] = {name: getattr(seen, name) for name in COUNTS[2:]}
    counts["seconds"] = round(seconds, 3)
    counts["requests per second"] = round(seen.answered / seconds, 1)
    for name in ("pieces", "tokens"):
        if total := getattr(seen, name):
            counts[f"{name} per second"] = round(total / seconds, 1)
    for name in TIMES:
        if values := getattr(seen, name):
            for percent in PERCENTILES:
                ms = float(np.percentile(values, percent)) * 1e3
                counts[f"{name} p{percent} ms"] = round(ms, 3)
            counts[f"{name} max ms"] = round(max(values) * 1e3, 3)
    if seen.large:
        counts["large"] = dict(seen.large)
    return counts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="address of the server, with /v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--key", default="any")
    parser.add_argument("--rate", type=float, default=0, help="requests per second; 0: --at-once")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--requests", type=int, help="total number, instead of --seconds")
    parser.add_argument("--lengths", type=int, nargs=2, default=(16, 256), metavar="TOKENS")
    parser.add_argument("--new", type=int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--vocab-size", type=int, default=256, help="ids are below this")
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not streams")
    parser.add_argument("--closing", type=float, default=0, help="share of clients that leave")
    parser.add_argument("--large-every", type=float, default=0, metavar="SECONDS",
                        help="also send one of the largest requests per interval")  # fmt: skip
    parser.add_argument("--chats", type=int, default=0, help="long chats that wait at a time")
    parser.add_argument("--messages", type=int, default=5000, help="messages per long chat")
    parser.add_argument("--characters", type=int, default=700, help="characters per message there")
    parser.add_argument("--chats-key", default="any")
    parser.add_argument("--probe-every", type=float, default=0, metavar="SECONDS",
                        help="also send a small request of each kind per interval")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="number of client processes")
    options = vars(parser.parse_args(arguments))
    processes = options.pop("processes")
    load = Load(**{**options, "lengths": tuple(options["lengths"])})
    print(json.dumps(report(run_all(load, processes)), indent=2))


if __name__ == "__main__":
    main()
