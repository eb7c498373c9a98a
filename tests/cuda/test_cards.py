"""The card whose kernels a process chooses, and the tool that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch_recorder import recording

from benchmarks import run
from gpt2block.cuda import cards
from gpt2block.cuda.devices import reads_blocks
from gpt2block.errors import InputError

TOOL = Path(__file__).parents[2] / "tools" / "as_gpu.py"
NAMED = "from gpt2block.cuda.cards import chosen; print(*chosen())"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return an H200 whose loaded PTX and compiler are recorded, without a chosen card."""
    driver = SimpleNamespace(CUDADriverError=RuntimeError, refuses=False, loaded=[])
    device = SimpleNamespace(
        id=0,
        compute_capability="90",
        attributes={cards.MAX_SHARED: 232448, "MultiProcessorCount": 132},
    )

    def load(ptx: str) -> None:
        driver.loaded.append(ptx)
        if driver.refuses:
            raise RuntimeError("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    nvrtc = SimpleNamespace(
        createProgram=lambda *text: list(text),
        compileProgram=lambda program, options: program.append(options),
        getPTX=lambda program: program[-1],
        destroyProgram=lambda program: None,
    )
    compiler = SimpleNamespace(_get_arch_for_options_for_nvrtc=None)
    module = SimpleNamespace(Module=lambda: SimpleNamespace(load=load))
    cuda = SimpleNamespace(Device=lambda index=None: device, nvrtc=nvrtc, compiler=compiler)
    vars(cuda).update(function=module, driver=driver)
    monkeypatch.setattr(cards, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cards, "replaced", lambda: False)
    for cached in (cards.chosen, cards._capability, cards.attribute_of, cards.compiled_for):
        monkeypatch.setattr(cards, cached.__name__, cached.__wrapped__)
    monkeypatch.delenv(cards.AS_GPU, raising=False)
    return cuda


@pytest.mark.parametrize(
    ("text", "capability", "shared", "architecture"),
    [
        ("", 90, 232448, None),
        ("8.9", 89, 101376, "compute_89"),
        ("7.5 50000", 75, 50000, "compute_75"),
        ("12.0", 120, 101376, None),  # a newer card's code cannot be loaded
        ("10.0 999999", 100, 232448, None),  # the GPU has no more
    ],
)
def test_a_card_decides_instead_of_the_gpu(
    gpu: Any,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    capability: int,
    shared: int,
    architecture: str | None,
) -> None:
    monkeypatch.setenv(cards.AS_GPU, text)
    assert cards.capability_of(0) == capability
    assert cards.attribute_of(0, cards.MAX_SHARED) == shared
    assert cards.attribute_of(0, "MultiProcessorCount") == 132
    assert cards.compiled_for() == architecture
    asked = gpu.compiler._get_arch_for_options_for_nvrtc
    if architecture:
        assert asked("90") == (f"-arch={architecture}", "ptx")
        assert gpu.driver.loaded == [(f"-arch={architecture}",)]
    else:
        assert asked is None
        assert not gpu.driver.loaded


def test_a_driver_that_refuses_the_ptx_gets_code_for_its_gpu(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cards.AS_GPU, "8.9")
    gpu.driver.refuses = True
    assert cards.compiled_for() is None
    assert gpu.compiler._get_arch_for_options_for_nvrtc is None
    card = cards.chosen()
    assert card is not None
    assert card.describe() == (
        "compute capability 8.9 (RTX 4090, L4), 101,376 bytes of shared memory, compiled for the "
        "GPU at hand"
    )


@pytest.mark.parametrize("text", ["8", "8.9 -1", "8.9 many", "sm_89", "3.5"])
def test_an_unknown_card_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match=r"GPT2BLOCK_AS_GPU: expected one of 7\.5, 8\.0, 8\.6"):
        cards.parse(text)


@pytest.mark.parametrize(
    ("options", "named"), [(["8.9"], "89 101376"), (["8.0", "--shared", "70000"], "80 70000")]
)
def test_the_tool_names_the_card_to_a_command(options: list[str], named: str) -> None:
    command = [sys.executable, str(TOOL), *options, "--", sys.executable, "-c", NAMED]
    assert (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{named}\n"
    )


def test_bench_states_the_card(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cards.AS_GPU, "7.5")
    monkeypatch.setattr(run, "chosen", cards.chosen)
    version = SimpleNamespace(
        getDeviceProperties=lambda index: {"name": b"GPU", "multiProcessorCount": 132},
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
    )
    gpu.runtime, gpu.nvrtc.getVersion = version, lambda: (13, 0)
    monkeypatch.setattr(run, "cupy", SimpleNamespace(cuda=gpu, __version__="14"))
    assert run._versions()["kernels of"] == (
        "compute capability 7.5 (T4), 65,536 bytes of shared memory, PTX of this capability"
    )


def test_the_properties_are_those_of_the_emulated_gpu() -> None:
    """Emulated GPUs with one index, one after another, have their own properties."""
    found = []
    for capability in ("7.5", "8.9", "12.0"):
        with recording(capability):
            found.append((reads_blocks("cuda:0"), cards.gpu().has_clusters, cards.gpu(0).has_bf16))
    assert found == [(True, False, False), (True, False, True), (True, True, True)]
