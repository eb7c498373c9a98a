"""Epilogues of the products of decoding: what a kernel of matmul/decode/ does with its sums.

kernels_cu/lib/decode/epilogues.cuh contains the code of the epilogues. A call of an operation
determines the epilogue, and the engine, a module such as `linear_mma`, determines the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpt2block.cuda.arrays import check
from gpt2block.cuda.kernels import Defines, Geometry, Launch, cache_dtype, float_define, launch_at
from gpt2block.errors import InputError
from gpt2block.models.weights.matrix import WeightMatrix
from gpt2block.ops.call import Call, Parts, refuse
from gpt2block.ops.products import storage_of


class Epilogue(NamedTuple):
    """An epilogue and its arguments.

    name: value of the macro EPILOGUE, without "EPILOGUE_". args: the kernel's arguments that only
    the epilogue reads, by name. head: channels of a head, with RoPE, else 0. splits: partial sums
    per value that the kernel adds to x or to the residual stream. T: the kernel's type `T`, if the
    weights are FP8 or hi/lo. fp8_cache: the FP8 format of the kv_cache, or None. defines: macros
    of the epilogue.
    """

    name: str
    args: Mapping[str, object]
    head: int = 0
    splits: int = 0
    T: str = "float32"
    fp8_cache: str | None = None
    defines: Defines = ()

    def launch(
        self,
        file: str,
        geometry: Geometry,
        defines: Defines,
        args: Mapping[str, object],
        w: WeightMatrix | Parts,
    ) -> Launch:
        """Return the launch of a kernel for weights w with this epilogue.

        defines: macros in addition to the geometry's macros. args: the kernel's other arguments, by
        name.
        """
        chosen: Defines = () if self.name == "ADD" else (("EPILOGUE", f"EPILOGUE_{self.name}"),)
        geometry = geometry._replace(defines=(*geometry.defines, *defines, *chosen, *self.defines))
        storage = storage_of(w, self.T)
        return launch_at(file, geometry, {**args, **self.args}, *storage, self.fp8_cache)


Ends = Callable[[Call], Epilogue]  # chooses the epilogue of a call


def add(c: Call) -> Epilogue:
    """Return the epilogue of `linear`: [residual +] [gelu] sum, also sent with `to_peers`."""
    args = {"out": c.output("out"), "gelu": int(c.gelu)}
    if c.to_peers is None:
        return Epilogue("ADD", {**args, "residual": c.residual})
    refuse(c.residual is not None or c.to_operand, "sends floats, without residual")
    return Epilogue("PEERS", {**args, **c.to_peers.args}, defines=c.to_peers.defines)


def add_sums(c: Call) -> Epilogue:
    """Return the epilogue of `linear_sums`, which also adds partial sums to the residual stream."""
    args = {**_sums(c), "residual": c.residual, "out": c.output("out")}
    return Epilogue("ADD_SUMS", args, splits=_splits(c))


def append(c: Call) -> Epilogue:
    """Return the epilogue of `linear_qkv`, which appends k and v to the kv_cache."""
    args = {**_cache(c), "out": c.output("q"), "C": c.C, "n_ctx": c.P}
    return Epilogue("APPEND", args, T=c.T, fp8_cache=c.fp8_cache)


def append_rope(c: Call) -> Epilogue:
    """Return the epilogue of `linear_rope`, which rotates q and k, and appends k and v."""
    D: int = c.head
    heads = {"n_head": c.n_head, "n_kv_head": c.C // D, "n_ctx": c.k.shape[1]}
    args = {**_cache(c), **heads, "out": c.output("out"), "rotations": c.by}
    T, grows = cache_dtype(c.w.dtype), growth_defines(c.growth)
    return Epilogue("APPEND_ROPE", args, D, T=T, fp8_cache=c.fp8_cache, defines=grows)


def check_rope_heads(c: Call) -> None:
    """Set the channels per head, 2P, as c.head, after a check of the outputs of w and of the cache.

    Raises InputError unless w has the outputs of whole heads, and the kv_cache the usual dtype. A
    kv_cache of FP8 has any weights.
    """
    if c.fp8_cache is None:
        check("k", c.k, dtype=cache_dtype(c.w.dtype))
    c.head = D = 2 * c.P
    N = c.n_head * D + 2 * c.C
    if c.C % D or c.N != N:
        raise InputError(
            f"w of {c.N:,} outputs, k of {c.C:,} channels: expected {N:,} outputs, {c.n_head} "
            f"heads of q and whole heads of k and v, of {D} channels as by has"
        )


def growth_defines(growth: tuple[float, int] | None) -> Defines:
    """Return the macros of a query's factor by position, or () for None."""
    if growth is None:
        return ()
    beta, span = growth
    return (*float_define("ROPE_GROWTH", beta), ("ROPE_SPAN", span))


def append_sums(c: Call) -> Epilogue:
    """Return the epilogue of `rope_sums`: `append_rope`, with partial sums of x and head norms."""
    norms = {} if c.gamma_q is None else {"gamma_q": c.gamma_q, "gamma_k": c.gamma_k}
    end = append_rope(c)
    return end._replace(args={**end.args, **_sums(c), **norms}, splits=_splits(c))


def _cache(c: Call) -> dict[str, object]:
    places = {"row": c.row, "position": c.position, "B": c.B}
    return {**places, "k_cache": c.k, "v_cache": c.v}


def _sums(c: Call) -> dict[str, object]:
    """Return the partial sums that the kernel must add up, and the scales of w_down's outputs."""
    scale = None if c.w_down is None else c.w_down.scale
    return {"sums": c.sums} if scale is None else {"sums": c.sums, "sum_scale": scale}


def _splits(c: Call) -> int:
    return 0 if c.sums is None else int(c.S)
