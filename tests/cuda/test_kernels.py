"""The loader: prototypes, typed arguments, compilation for every architecture without a GPU."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compile_for import compile_for

from gpt2block import KernelError
from gpt2block.cuda import kernels
from gpt2block.cuda.kernels import Parameter, Signature
from gpt2block.cuda.launch_lines import stated_geometry
from gpt2block.ops.registry import OPERATIONS, STEPS
from tests.compiling import assert_clean
from tests.devices import running_on

ROOT = Path(__file__).parents[2]
# The H200's architecture, and a CUDA version's oldest and newest, the one that the other version
# lacks first. CI compiles with both versions.
WITH_CUDA_12 = ("sm_90", "sm_70", "sm_120")
WITH_CUDA_13 = ("sm_90", "sm_100", "sm_75")
CONSTANTS: dict[str, dict[str, list[str]]] = {"odd": {}, "epilogue": {}}
for line in (ROOT / "tests" / "golden" / "constants.txt").read_text("ascii").splitlines():
    if line[0] != "#":
        kind, file, constants = line.split(" ", 2)
        CONSTANTS[kind].setdefault(file, []).append(constants)


def test_every_kernel_is_in_the_table_and_names_the_variants_that_launch_it() -> None:
    table = (kernels.SOURCE_DIR / "README.md").read_text(encoding="utf-8")
    launched: dict[tuple[str, str], list[str]] = {}
    for operation in (*OPERATIONS.values(), *STEPS.values()):
        for each in (*operation.variants, *operation.parts):
            for name in each.kernels:
                launched.setdefault((each.file, name), []).append(f"{operation.name} ({each.name})")
    for file in kernels.sources():
        assert f"`{file}`" in table
        text = " ".join(kernels.read_source(file).replace("\n//", "").split())
        for name in kernels.signatures(file):
            assert f"`{name}`" in table
            stated = f"Launched by operation (variant): {', '.join(launched[file, name])} extern"
            assert "learn/" in file or re.search(rf"{re.escape(stated)} [^;{{]*\b{name}\(", text)


def test_signatures_are_the_prototypes() -> None:
    file, name = "learn/matmul/skeleton.cu", "matmul_bias_tiled"
    arrays = [Parameter("float*", each, const=True, restrict=True) for each in ("A", "B", "bias")]
    sizes = [Parameter("int", each) for each in "MKN"]
    expected = (*arrays, Parameter("float*", "C", restrict=True), *sizes)
    assert kernels.signatures(file)[name] == Signature(file, name, expected)
    parameters = kernels.signatures("learn/elementwise/gelu.cu")["gelu_kernel"].parameters
    assert parameters[1].ctype == "long long"


# (name of the kernel or "", text): parts of a source, some with misleading braces.
CONFUSING = (
    ("", "#define BEGIN {\n"),
    ("declared", 'extern "C" __global__ void declared(int n);'),
    ("", ' // extern "C" __global__ void comment() {\n'),
    ("", '__device__ const char* text() { return "// { \\" /*"; }\n'),
    (
        "first",
        r"""extern "C" __global__ void first(int n) {  // }
    if (n) { int i = '{' + '\''; /* } */ }
    const char* s = "}}"; const char c = '}';
#define OPEN for (;;) { \
        if (n) {
#if 1  // '
    n = 1'000'000;
#endif
}""",
    ),
    ("", " // second\n"),
    ("second", 'extern "C" __global__ void __launch_bounds__(32)\n  second(int n) { text(); }'),
    ("", " __device__ int after;\n"),
    ("third", 'extern "C" __global__ void third()\n{ }'),
    ("", "\n"),
)
WHOLE = "".join(text for _, text in CONFUSING)


@pytest.mark.parametrize("name", ["declared", "first", "second", "third"])
def test_other_kernels_are_cut_to_their_last_brace(name: str) -> None:
    assert kernels.with_only(name, WHOLE) == "".join(
        text if kernel in ("", name) else "\n" * text.count("\n") for kernel, text in CONFUSING
    )


def test_a_kernel_without_its_last_brace_stays() -> None:
    """The text stays unchanged, so that the compiler names the line of the error."""
    text = 'extern "C" __global__ void f() { if (1) {}\nextern "C" __global__ void g() {}\n'
    assert kernels.with_only("g", text) == text


@pytest.mark.parametrize("file", kernels.sources())
def test_a_program_has_the_requested_kernel_and_no_other(file: str) -> None:
    whole = kernels.program(file)
    for name in kernels.signatures(file):
        alone = kernels.program(file, (), name)
        assert kernels.parse(alone, file) == {name: kernels.signatures(file)[name]}
        lines = list(zip(whole.splitlines(), alone.splitlines(), strict=True))
        assert all(line in (each, "") for each, line in lines)
        others = [each for each, line in lines if line != each]
        assert sum("__global__" in each for each in others) == len(kernels.signatures(file)) - 1


def test_kernels_of_a_file_share_no_variables() -> None:
    """Each kernel is compiled to a separate module, so they cannot share variables."""
    variable = re.compile(
        r"^(?:static |extern |inline )*__(?:device__|constant__|managed__)(?! constexpr)[^(]*[;={]",
        re.MULTILINE,
    )
    assert variable.search("static __device__ unsigned count;")
    assert variable.search("__constant__ float table[4] = {1};")
    for path in kernels.SOURCE_DIR.rglob("*.cu*"):
        plain = kernels.without_comments(path.read_text("ascii"))
        assert not variable.search(plain), path.name


def test_a_users_file_is_compiled_whole(tmp_path: Path) -> None:
    file = tmp_path / "my.cu"
    file.write_text(WHOLE)
    assert WHOLE in kernels.program(str(file), (), "first")


def test_an_unknown_file_lists_the_known_ones() -> None:
    with pytest.raises(
        KernelError, match=r"expected one of attention/cache/kv_cache\.cu, .*elementwise/cap\.cu, "
    ):
        kernels.read_source("flash.cu")


class DeviceArray:
    """A substitute for a CuPy array with the attributes that a launch reads."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.data = type("Memory", (), {"ptr": 4096})()


PROTOTYPE = 'extern "C" __global__ void f(float* x, int n, float eps, long long size)'
SIGNATURE = kernels.parse(PROTOTYPE, "f.cu")["f"]
X = DeviceArray(np.float32)


def test_arguments_get_exactly_the_types_of_the_prototype() -> None:
    typed = kernels.typed_arguments(SIGNATURE, (X, 7, 0.5, 2**40))
    assert typed == (4096, 7, 0.5, 2**40)
    assert [type(a) for a in typed] == [np.uintp, np.int32, np.float32, np.int64]
    assert kernels.typed_arguments(SIGNATURE, (None, 7, 0.5, 1))[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, 7, 0.5), r"expected \(float\* x, int n, float eps, long long size\), got 3 arguments"),
        ((DeviceArray(np.float64), 7, 0.5, 1), r"float\* x: got float64"),
        ((4096, 7, 0.5, 1), r"float\* x: got int"),
        ((X, 2**31, 0.5, 1), "int n: 2147483648 does not fit"),
        ((X, X, 0.5, 1), "int n: expected an integer, got DeviceArray"),
        ((X, 1.5, 0.5, 1), "int n: expected an integer, got float"),
        ((X, 1, "0.5", 1), "float eps: expected a number, got str"),
        ((X, True, 0.5, 1), "int n: expected an integer, got bool"),
    ],
)
def test_wrong_arguments_are_refused(args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        kernels.typed_arguments(SIGNATURE, args)


def test_storage_types_are_checked() -> None:
    signature = Signature("f.cu", "f", (Parameter("T*", "x"), Parameter("float*", "mean")))
    half = DeviceArray(ml_dtypes.bfloat16)
    assert kernels.typed_arguments(signature, (half, X), "bfloat16") == (4096, 4096)
    assert kernels.typed_arguments(signature, (X, None)) == (4096, 0)
    for args, storage, message in (
        ((X, X), "bfloat16", r"T\* x, where T is bfloat16: got float32"),
        ((half, X), "float16", r"T\* x, where T is float16: got bfloat16"),
        ((half, half), "bfloat16", r"float\* mean: got bfloat16"),
    ):
        with pytest.raises(KernelError, match=message):
            kernels.typed_arguments(signature, args, storage)


@pytest.mark.parametrize("grid", [(0,), (2**31,), (1, 2**16), (1, 1, 2**16)])
def test_a_grid_beyond_cudas_limits_is_refused(grid: tuple[int, ...]) -> None:
    with running_on("forward") as device:
        args = (device.zeros(1, "float32"), 1)
        with pytest.raises(KernelError, match="exceeds CUDA's limits"):
            kernels.launch_at(
                "learn/elementwise/gelu.cu", kernels.Geometry("gelu_kernel", grid, (32,)), args
            )


def test_a_type_the_loader_does_not_know_is_refused() -> None:
    signature = Signature("f.cu", "f", (Parameter("half*", "x"),))
    with pytest.raises(KernelError, match="does not know this type"):
        kernels.typed_arguments(signature, (X,))


def test_a_changed_header_changes_the_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = []
    for name, header in (
        ("a", "// one text\n"),
        ("b", "// another text\n"),
        ("c", "// one text\n"),
    ):
        shutil.copytree(kernels.SOURCE_DIR, tmp_path / name)
        (tmp_path / name / "lib/common.cuh").write_text(header)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "SOURCE_DIR", tmp_path / name)
            programs.append(kernels.program("learn/elementwise/gelu.cu", (("N", 3),)))
    assert programs[0] != programs[1]
    assert programs[0] == programs[2]
    assert programs[0].splitlines()[1] == "#define N 3"


def test_a_file_states_the_architecture_that_it_needs() -> None:
    file = "learn/elementwise/gelu.cu"
    assert kernels.architecture(file) is None
    assert kernels.options(file, 90) == kernels.options(file, 75)
    assert kernels.architecture("matmul/prompt/wgmma.cu") == "sm_90a"
    assert "-arch=sm_90a" in kernels.options("matmul/prompt/wgmma.cu", 90)
    with pytest.raises(KernelError, match=r"expected .* 9\.0, Hopper\), got 12\.0"):
        kernels.options("matmul/prompt/wgmma.cu", 120)
    newer = "matmul/decode/ffn_mma.cu"
    assert "-arch=sm_90a" in kernels.options(newer, 90)
    assert kernels.options(newer, 120) == kernels.options(file, 120)
    with pytest.raises(KernelError, match=r"expected .* 9\.0 or newer\), got 8\.9"):
        kernels.options(newer, 89)


def test_compile_message_without_a_reason() -> None:
    assert "gave no reason" in kernels.compile_message("f.cu", "")
    missing = 'f.cu(3): catastrophic error: cannot open source file "cuda_fp16.h"\n'
    message = kernels.compile_message("f.cu", missing)
    assert message.splitlines()[1] == 'f.cu:3: cannot open source file "cuda_fp16.h"'
    assert "gpt2block check" in message


# --- with NVRTC, without a GPU -------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc() -> tuple[int, int]:
    """Return NVRTC's version; skip tests that compile if CuPy is missing."""
    pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC")
    from cupy.cuda import nvrtc as compiler  # noqa: PLC0415

    version: tuple[int, int] = compiler.getVersion()
    return version


@pytest.mark.parametrize(("file", "place"), [  # one architecture of a file; others are slow
    pytest.param(file, place, marks=[pytest.mark.slow] * (place != (0, 1, 0, 2)[n % 4]))
    for (n, file), place in product(enumerate(kernels.sources()), range(3))
])  # fmt: skip
def test_compiles_without_spills_and_warnings(
    nvrtc: tuple[int, int], file: str, place: int
) -> None:
    """All kernels of a file are compiled at once: with its default constants for the H200.

    A file's odd constants, if any, are compiled for both ends of the architectures. Without --slow,
    a file is compiled for one of these three architectures. When a kernel is loaded, it is compiled
    alone, to the same code, as the next test shows.
    """
    known: tuple[str, ...] = WITH_CUDA_12 if nvrtc[0] < 13 else WITH_CUDA_13
    # On tensor cores, tiles of sm_75 have constants of their own.
    if any("mma" in name for name in (file, *kernels.signatures(file))):
        known = tuple("sm_80" if arch in ("sm_70", "sm_75") else arch for arch in known)
    if required := kernels.architecture(file):
        known = (required,) * 3

    def of(constants: str) -> Any:
        return tuple(tuple(each.split("=")) for each in constants.split())

    epilogues = ["", *CONSTANTS["epilogue"].get(file, [])]
    constants = CONSTANTS["odd"].get(file, [""]) if place else epilogues
    assert_clean([(file, known[place], of(each)) for each in constants])


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_by_itself_is_compiled_as_with_the_others() -> None:
    """A kernel compiled alone has the same registers and shared memory as with others."""
    file, arch = "norms/rmsnorm_stream.cu", "sm_80"
    resources = re.compile(r"Function properties for (\w+)\n(.*\n.*)")
    together = dict(resources.findall(compile_for(file, arch).log))
    assert together.keys() >= kernels.signatures(file).keys()
    for name in kernels.signatures(file):
        alone = dict(resources.findall(compile_for(file, arch, (), name).log))
        assert alone.keys() & kernels.signatures(file).keys() == {name}
        assert alone[name] == together[name]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break learn/elementwise/gelu.cu: a mistake in line 9, and a header that does not exist."""
    text = kernels.read_source("learn/elementwise/gelu.cu").splitlines()
    text[8] = "    undeclared = 3;"
    monkeypatch.setattr(kernels, "read_source", lambda file: "\n".join(text))


@pytest.mark.usefixtures("broken", "nvrtc")
def test_a_compile_error_names_file_and_line() -> None:
    with pytest.raises(KernelError) as caught:
        compile_for("learn/elementwise/gelu.cu", "sm_80", (("N", 3), ("M", 4)))
    lines = str(caught.value).splitlines()
    assert lines[0] == "learn/elementwise/gelu.cu does not compile:"
    assert lines[1] == 'learn/elementwise/gelu.cu:9: identifier "undeclared" is undefined'
    assert "fix it there" in lines[-1]


@pytest.mark.usefixtures("nvrtc")
def test_constants_that_make_no_sense_do_not_compile() -> None:
    with pytest.raises(KernelError, match="HS <= 256"):
        compile_for("learn/attention/skeleton.cu", "sm_80", (("HS", 257),))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("size", "compiles"), [(32, True), (96, False), (0, False)])
def test_block_reductions_take_powers_of_two_only(
    monkeypatch: pytest.MonkeyPatch, size: int, compiles: bool
) -> None:
    text = (
        '#include "lib/common.cuh"\n'
        'extern "C" __global__ void f(float* x) {\n'
        f"    __shared__ float scratch[{max(size, 1)}];\n"
        f"    x[threadIdx.x] = block_reduce_sum<{size}>(x[threadIdx.x], scratch);\n}}\n"
    )
    monkeypatch.setattr(kernels, "read_source", lambda file: text)
    if compiles:
        assert compile_for("f.cu", "sm_80").cubin
    else:
        with pytest.raises(KernelError, match="must be a power of two"):
            compile_for("f.cu", "sm_80")


def test_kernel_sources_are_readable() -> None:
    for path in sorted(kernels.SOURCE_DIR.rglob("*.cu*")):
        lines = path.read_text(encoding="ascii").splitlines()
        assert lines[0].startswith("// "), f"{path.name} opens with what it computes"
        assert len(lines) <= 400
        assert max(map(len, lines)) <= 120, path.name


def test_an_idea_is_the_first_sentence_about_a_kernel_in_the_head_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = """// architecture: sm_90a
// Sums of x.
//
//   first, second: two kernels, E[x^2] at
//       once. More about them
//   third (fast): by shuffles.
//       y = sum of x
//   x (N): no kernel
//   third: a tree

//   fourth: not in the head
"""
    monkeypatch.setattr(kernels, "read_source", lambda file: text)
    found = kernels.ideas.__wrapped__("f.cu")
    assert found == {
        "first": "two kernels, E[x^2] at once",
        "second": "two kernels, E[x^2] at once",
        "third (fast)": "by shuffles",
        "x (N)": "no kernel",
        "third": "a tree",
    }
    monkeypatch.setattr(kernels, "ideas", lambda file: found)
    assert kernels.idea_of("f.cu", "third", "fast") == "by shuffles"
    assert kernels.idea_of("f.cu", "third", "slow") == "a tree"
    with pytest.raises(
        KernelError, match=r"f\.cu: kernel fourth has no idea: state it in .*//   fo"
    ):
        kernels.idea_of("f.cu", "fourth", "fast")


@pytest.mark.parametrize(
    ("file", "kernel", "sizes", "threads", "expected"),
    [
        ("trimat/ladder.cu", "matmul_tri3", "T=130 B=2 NH=3", 64, ((3, 3, 6), (8, 8), 0)),
        ("matmul/skeleton.cu", "matmul_bias_tiled", "M=17 N=33", None, ((3, 2), (16, 16), 0)),
        ("layernorm/gelu.cu", "layernorm_gelu_optimized", "batch_size=5", 64, ((5,), (64,), 512)),
    ],
)
def test_the_launch_line_above_a_kernel_is_its_launch(
    file: str, kernel: str, sizes: str, threads: int | None, expected: tuple[Any, ...]
) -> None:
    named = tuple((name, int(n)) for name, n in (each.split("=") for each in sizes.split()))
    found = stated_geometry(f"learn/{file}", kernel, named, threads)
    assert found == kernels.Geometry(kernel, *expected)
