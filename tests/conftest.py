"""Options and fixtures shared by the tests."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from tests.devices import device  # noqa: F401  (a fixture of every test file)

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=25, database=None
)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    """With --gpu a machine without a usable device is a failure, never a silent skip."""
    if config.getoption("--gpu"):
        from gpt2block import doctor  # noqa: PLC0415

        problem = doctor.cuda_problem()
        if problem:
            raise pytest.UsageError(f"--gpu: no CUDA device can be used: {problem}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: run pytest --gpu")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data that is not part of the project: $GPT2BLOCK_DATA."""
    folder = os.environ.get("GPT2BLOCK_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("GPT2BLOCK_DATA names no folder of test data")
    return Path(folder)
