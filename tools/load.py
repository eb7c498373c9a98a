"""Load a server of OpenAI's protocol, and print how fast it answers.

    python -m tools.load http://127.0.0.1:8000/v1 --rate 5 --seconds 20

Requests arrive at random (a Poisson process), or as fast as `--at-once` of them are answered. Each
is a stream of a completion, of ids drawn at random. Any server of the protocol can be loaded, as a
peer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from openai import APIError, AsyncOpenAI

PERCENTILES = (50, 95, 99)


@dataclass
class Seen:
    """What clients saw. first, between: seconds to the first piece, and between pieces."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    pieces: int = 0
    answered: int = 0
    closed: int = 0
    refused: int = 0


@dataclass(frozen=True)
class Load:
    """What is asked for. lengths: of prompts, the fewest and the most tokens."""

    url: str
    model: str
    key: str
    rate: float
    at_once: int
    seconds: float
    lengths: tuple[int, int]
    new: int
    vocab_size: int
    closing: float
    seed: int


async def ask(client: AsyncOpenAI, load: Load, number: int, seen: Seen) -> None:
    """One request; some are closed after a few pieces, as by a client that goes."""
    rng = np.random.default_rng((load.seed, number))
    prompt = rng.integers(load.vocab_size, size=rng.integers(*load.lengths, endpoint=True)).tolist()
    last, leave = perf_counter(), int(rng.integers(1, 9)) if rng.random() < load.closing else 0
    pieces = 0
    try:
        async with await client.completions.create(
            model=load.model, prompt=prompt, max_tokens=load.new, stream=True, seed=number
        ) as stream:
            async for _ in stream:
                now = perf_counter()
                (seen.between if pieces else seen.first).append(now - last)
                last, pieces = now, pieces + 1
                if pieces == leave:
                    seen.closed += 1
                    return
        seen.answered += 1
    except APIError:
        seen.refused += 1
    finally:
        seen.pieces += pieces


async def run(load: Load) -> tuple[Seen, float]:
    """Ask until the time is over, and wait for all answers. Returns the seconds it took, too."""
    rng, seen, begun = np.random.default_rng(load.seed), Seen(), perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    number = 0
    async with AsyncOpenAI(base_url=load.url, api_key=load.key, max_retries=0) as client:
        while perf_counter() - begun < load.seconds:
            if load.rate:
                await asyncio.sleep(rng.exponential(1 / load.rate))
            elif len(tasks) >= load.at_once:
                _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                continue
            tasks.add(asyncio.create_task(ask(client, load, number, seen)))
            number += 1
            tasks = {task for task in tasks if not task.done()}
        if tasks:
            await asyncio.wait(tasks)
    return seen, perf_counter() - begun


def report(seen: Seen, seconds: float) -> dict[str, object]:
    """Counts, rates, and percentiles in milliseconds."""
    found: dict[str, object] = {
        "answered": seen.answered,
        "closed": seen.closed,
        "refused": seen.refused,
        "seconds": round(seconds, 2),
        "pieces per second": round(seen.pieces / seconds, 1),
    }
    for name, values in (("first", seen.first), ("between", seen.between)):
        for percent in PERCENTILES:
            ms = float(np.percentile(values, percent)) * 1e3 if values else None
            found[f"{name} p{percent} ms"] = None if ms is None else round(ms, 2)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of the server, with /v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--key", default="any")
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0: --at-once")
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--lengths", type=int, nargs=2, default=(16, 256), metavar="TOKENS")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer, at most")
    parser.add_argument("--vocab-size", type=int, default=256, help="ids are below this")
    parser.add_argument("--closing", type=float, default=0, help="share of clients that go")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    load = Load(**{**given, "lengths": tuple(given["lengths"])})
    print(json.dumps(report(*asyncio.run(run(load))), indent=2))


if __name__ == "__main__":
    main()
