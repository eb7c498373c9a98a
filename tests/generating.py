"""`generate`, `stream` and `Run` with options given as keywords, which is shorter in tests."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from gpt2block.engine.generation import generate as generation
from gpt2block.engine.generation.options import Options
from gpt2block.engine.generation.sequences import Generation
from gpt2block.engine.model import ModelEngine


class Run(generation.Run):
    def __init__(self, engine: ModelEngine, encoding: Any, prompts: Any, **keywords: Any) -> None:
        super().__init__(engine, encoding, prompts, Options.of(keywords))


def generate(engine: ModelEngine, encoding: Any, prompts: Any, **keywords: Any) -> Any:
    return generation.generate(engine, encoding, prompts, Options.of(keywords))


def stream(
    engine: ModelEngine, encoding: Any, prompt: Any, **keywords: Any
) -> Generator[str, None, Generation]:
    return generation.stream(engine, encoding, prompt, Options.of(keywords))
