"""Convert x, or x / scale, to FP8, and compute squared norms of weight rows (`row_norms`).

Kernels: fp8/convert.cu, fp8/row_norms.cu, and fp8/absmax.cu for scales (`WeightMatrix.quantize`).
"""

from __future__ import annotations

from typing import Any

from gpt2block.checks import check_choice
from gpt2block.contract import Contract
from gpt2block.cuda.arrays import CudaArray, contiguous
from gpt2block.cuda.kernels import FP8, Geometry, Launch, launch_at
from gpt2block.models.weights import conversions
from gpt2block.models.weights.conversions import ABSMAX_FILE, ELEMENTS, FP8_FILE, LAYOUTS
from gpt2block.models.weights.gguf import GgufMatrix
from gpt2block.ops import gguf
from gpt2block.ops.call import Call, UncheckedCall, refuse
from gpt2block.ops.operation import Operation, Workload, variant

NORMS_FILE = "fp8/row_norms.cu"
NORMS_BLOCK = 256
NORMS_WIDTH = 4  # weights per load of row_norms
BLOCKS = (64, 128, 256, 512, 1024)

AXES = {layout: " ".join(layout) for layout in LAYOUTS}  # axes in contracts: "K N" and "N K"
WITH_SCALES = {
    layout: Contract.parse(f"x any {axes}; scale f32 N -> out u8 {axes}")
    for layout, axes in AXES.items()
}


def _convert(c: Call, elements: int = ELEMENTS) -> Launch:
    options = c.format, c.layout, c.saturate, c.block, elements
    return conversions.to_fp8(c.x, c.scale, c.output("out"), *options)


@variant("element", FP8_FILE, "to_fp8_kernel", blocks=BLOCKS)
def _element(c: Call) -> Launch:
    return _convert(c, elements=1)


@variant("vectors", FP8_FILE, "to_fp8_kernel", blocks=BLOCKS)
def _vectors(c: Call) -> Launch:
    return _convert(c)


def _prepare(unchecked: UncheckedCall) -> Call:
    """Check a call of `to_fp8`. If `scale` (N,) is passed, x is (K, N) or, for "NK", (N, K)."""
    options = unchecked.options
    format, layout, scale = options["format"], options["layout"], options["scale"]
    check_choice("format", format, FP8)
    check_choice("layout", layout, LAYOUTS)
    contract = unchecked.contract if scale is None else WITH_SCALES[layout]
    return unchecked._replace(inputs=(*unchecked.inputs, scale)).checked(contract)


@variant("absmax", ABSMAX_FILE, "absmax_kn_kernel", "absmax_nk_kernel")
def _absmax(c: Call) -> Launch:
    return conversions.absmax(c.w, c.most, c.layout)


@variant("row_norms", NORMS_FILE, "row_norms")
def _row_norms(c: Call) -> Any:
    if isinstance(c.w, GgufMatrix):
        return gguf.row_norms.launch(c)
    refuse(c.K % NORMS_WIDTH, f"w: expected K in multiples of {NORMS_WIDTH}, got {c.K}")
    args = (c.w.data, c.gamma, c.output("squares"), c.K)
    return launch_at(
        NORMS_FILE, Geometry("row_norms", (c.N,), (NORMS_BLOCK,)), args, weights=c.w.dtype
    )


ROW_NORMS = Operation(
    name="row_norms", variants=(_row_norms,), line="w rows K N; gamma f32 K -> squares f32 N"
)


OPERATION = Operation(
    name="to_fp8",
    variants=(_element, _vectors),
    options={"format": "float8_e5m2", "saturate": True, "layout": "KN"}
    | dict.fromkeys(("scale", "variant", "block")),
    prepare=_prepare,
    parts=(_absmax, gguf.row_norms),
    steps=(ROW_NORMS,),
    workload=Workload(
        document="kernl's Llama kernels",
        idea="x as a byte, E5M2 or E4M3FN, rounded to nearest even",
        sizes={"K": 4096, "N": 11008},
        traffic=lambda s: (s["itemsize"] + 1) * s["K"] * s["N"],
        flops=lambda s: s["K"] * s["N"],
        attrs={"format": "float8_e5m2"},
        small=({"K": 1, "N": 5}, {"K": 7, "N": 33}, {"K": 3, "N": 769}),
        aliases={"size": "K*N", "K": "K", "N": "N"},
        dtypes=("float32", "float16", "bfloat16"),
    ),
)


def to_fp8(
    x: CudaArray,
    format: str = "float8_e5m2",
    saturate: bool = True,
    scale: CudaArray | None = None,
    layout: str = "KN",
    variant: str | int | None = None,
    block: int | None = None,
    out: CudaArray | None = None,
) -> CudaArray:
    """Compute `reference.to_fp8` on a float32, float16 or bfloat16 CuPy array. Raises InputError.

    format: "float8_e5m2" or "float8_e4m3fn"; the result is uint8, with the same bits as in NumPy.
    For the weights of a product, `WeightMatrix.quantize` chooses scales and rejects infinity and
    NaN. With `scale` (N,), positive normal numbers, x / scale is converted; layout: "KN" or "NK".
    """
    x, scale = contiguous(x, scale)
    options = {"format": format, "saturate": saturate, "scale": scale, "layout": layout}
    return OPERATION.bind_on_device((x,), out, variant=variant, block=block, **options).run()
