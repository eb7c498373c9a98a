"""Match a user's kernel with the arguments of an operation, and bind it like a built-in variant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Any

import numpy as np

from gpt2block.cuda import CudaArray, cupy, kernels, replaced
from gpt2block.cuda.arrays import Bound, compute_capability, device_attribute
from gpt2block.cuda.kernels import Parameter
from gpt2block.cuda.launch_lines import evaluated, split
from gpt2block.cuda.requests import Launch
from gpt2block.errors import LINE, Argument, InputError
from gpt2block.judge import arguments
from gpt2block.judge.arguments import Output, Values
from gpt2block.judge.source import TEMPLATE, UserSource
from gpt2block.ops import workload
from gpt2block.ops.call import UncheckedCall
from gpt2block.ops.operation import Operation, Sizes, Variant
from gpt2block.ops.registry import find

MINE = "mine"  # variant name of the user's kernel
THREADS = 1024  # maximum threads per block
GRID = (2**31 - 1, 65535, 65535)
# Dtype → C++ element types; type T has the activations' dtype.
ELEMENTS: Mapping[str, tuple[str, ...]] = {
    "float32": ("float",),
    "float16": ("__half", "half"),
    "bfloat16": ("__nv_bfloat16", "nv_bfloat16"),
    "int32": ("int", "int32_t"),
    "uint8": ("unsigned char", "uint8_t"),
}
_LONG = "long", "long long", "long long int", "int64_t", "size_t", "unsigned long long", "uint64_t"
INTEGERS: dict[str, type[np.generic]] = {
    **dict.fromkeys(("int", "int32_t"), np.int32),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t"), np.uint32),
    **dict.fromkeys(_LONG, np.int64),  # np.uint64, of the same bytes, marks pointers
    "bool": np.bool_,
}
REALS: dict[str, type[np.generic]] = {"float": np.float32, "double": np.float64}
Allocate = Callable[[Output], CudaArray]
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # (grid, block, bytes of shared memory)


@dataclass(frozen=True)
class Kernel:
    """A user's kernel for an operation."""

    source: UserSource
    operation_name: str  # name only, as an Operation holds functions that cannot be pickled
    dtype: str  # dtype of the activations
    names: tuple[str, ...]  # names of the arguments, in the order of the parameters

    @property
    def operation(self) -> Operation:
        return find(self.operation_name)

    def bind(
        self,
        inputs: tuple[object, ...],
        out: object = None,
        allocate: Allocate = lambda output: cupy.empty(output.shape, output.dtype),
        **attrs: object,
    ) -> Bound:
        """Bind the kernel to arrays on the current device; `extra` has all outputs but the result.

        allocate: returns the array for an output; not called for the result if `out` is passed.
        Raises InputError if the launch exceeds the limits of the device.
        """
        values = arguments.values(self.operation, inputs, attrs)
        result, *others = self.outputs(values)
        arrays = dict(values.inputs) | ({} if out is None else {result: out})
        for name in (result, *others):
            if name not in arrays:
                arrays[name] = allocate(values.outputs[name])
        grid, block, shared = self.geometry(values.sizes)
        function = kernels.load(str(self.source.path), self.source.name, self.defines)
        function.allow_shared(shared)
        kinds: Mapping[str, Any] = INTEGERS | REALS
        args = tuple(
            np.uintp(arrays[name].data.ptr)
            if name in arrays
            else kinds[parameter.ctype](values.numbers[name])
            for parameter, name in zip(self.source.parameters, self.names, strict=True)
        )
        launch = Launch(self.source.name, function, grid, block, args, shared)
        return Bound(arrays[result], (launch,), tuple(arrays[name] for name in others))

    def outputs(self, values: Values) -> list[str]:
        """Return the names of the outputs that the kernel writes, the result first."""
        return [name for name in values.outputs if name in self.names]

    @property
    def defines(self) -> kernels.Defines:
        """Macros for NVRTC: type T, and a hash of the source, so that edited files are compiled."""
        hashed = hashlib.sha256(self.source.text.encode()).hexdigest()[:16]
        return *kernels.stored_as(self.dtype), (f"GPT2BLOCK_SOURCE_{hashed}", 1)

    def geometry(self, sizes: Mapping[str, int]) -> Geometry:
        """Return grid, block and shared memory for these sizes. Raises InputError if invalid."""
        grid, block, shared = self.stated_geometry(sizes)
        most = int(device_attribute("MaxSharedMemoryPerBlockOptin"))
        if not 0 <= shared <= most:
            raise InputError(
                *self.source.setting("shared", self.source.launch.shared),
                f" is {shared:,} bytes at {described(sizes)}: expected 0 to {most:,}{_device()}",
            )
        return grid, block, shared

    def stated_geometry(self, sizes: Mapping[str, int]) -> Geometry:
        """Do the same as `geometry`, but for a device of any size of shared memory."""
        text, setting = self.source.launch, self.source.setting
        block = self._extents("block", text.block, sizes)
        threads, allowed = prod(block), self.source.max_threads
        bounds = f"at most {THREADS}"
        if allowed is not None and allowed < threads <= THREADS:
            bounds = f"__launch_bounds__ of {self.source.name} allows {allowed}"
        if threads > min(THREADS, THREADS if allowed is None else allowed):
            raise InputError(*setting("block", text.block), f": {threads} threads: {bounds}")
        named = {**sizes, "block": threads}
        grid = self._extents("grid", text.grid, named)
        if any(extent > most for extent, most in zip(grid, GRID, strict=False)):
            what = f" is {grid} at {described(sizes)}: at most {GRID}"
            raise InputError(*setting("grid", text.grid), what)
        return grid, block, self._value("shared", text.shared, named)

    def _extents(self, option: str, text: str, sizes: Sizes) -> tuple[int, ...]:
        extents = tuple(self._value(option, part, sizes) for part in split(text))
        if len(extents) > 3 or any(extent < 1 for extent in extents):
            at = described({name: size for name, size in sizes.items() if name != "block"})
            raise InputError(
                *self.source.setting(option, text),
                f" is {extents} at {at}: expected one to three numbers of at least 1",
            )
        return extents

    def _value(self, option: str, text: str, sizes: Sizes) -> int:
        try:
            return evaluated(text, sizes)
        except InputError as error:
            raise InputError(*self.source.setting(option), f": {error}") from None

    def as_operation(self) -> Operation:
        """Return the operation with this kernel as a further variant "mine", for benchmarks."""
        names, own = (self.source.name,), self.operation
        mine = Variant(MINE, self.source.file, names, self.bind, own=True)

        def prepare(asked: UncheckedCall) -> Bound:
            if asked.options["variant"] == MINE:
                attrs = {name: asked.options[name] for name in own.workload.attrs}
                return self.bind(asked.inputs, asked.out, **attrs)
            options = {name: asked.options[name] for name in own.options}
            return own.bind_on_device(asked.inputs, asked.out, **options)

        options = {"variant": None, **own.options}
        return replace(own, variants=(*own.variants, mine), options=options, prepare=prepare)


def matched(
    source: UserSource, operation: Operation, stored: tuple[str, str], args: str | None = None
) -> Kernel:
    """Match each parameter of a kernel with an argument of the operation, by name or by `args`.

    stored: (dtype, layout), as `workload.check_storage` returns them. args: names of arguments in
    the order of the parameters. Raises InputError for a parameter without a matching argument.
    """
    dtype, layout = stored
    if dtype in kernels.FP8:
        plain = ", ".join(each for each in operation.workload.dtypes if each not in kernels.FP8)
        raise InputError(
            Argument("dtype"), f" {dtype}: for a user's kernel expected one of {plain}"
        )
    arguments.check_known(operation)
    sizes, attrs = operation.cases[0]
    all_attrs = {**operation.workload.attrs, **attrs}
    own = operation.with_workload(attrs=all_attrs)
    host, _ = workload.inputs_and_truth(own, sizes, dtype, layout)
    values = arguments.values(operation, host, all_attrs)
    label = f"{source.place()}: {source.name}"
    texts = [p.name for p in source.parameters] if args is None else [*split(args)]
    problems: list[Sequence[object]] = [*source.problems]
    names: list[str] = []
    told: list[object] = []
    if len(texts) != len(source.parameters):
        count = f"{label} has {len(source.parameters)} parameters, not {len(texts)}"
        problems.append((Argument("args"), f" {args}: {count}"))
        texts = []
    for parameter, text in zip(source.parameters, texts, strict=False):
        at = f"{source.place(parameter.name)}: {source.name}"
        try:
            names.append(_known(at, text, operation, values))
            _check_type(at, parameter, names[-1], dtype, values)
        except InputError as error:
            problems.append([part for part in error.parts if part not in told])  # advice once
            told += error.parts
    result = next(iter(values.outputs))
    if result not in names and len(names) == len(source.parameters):
        problems.append((f"{label} has no parameter {result}, the result: see {TEMPLATE}",))
    _raise(source, problems)
    return Kernel(source, operation.name, dtype, tuple(names))


def _raise(source: UserSource, problems: list[Sequence[object]]) -> None:
    """Raise one InputError with all problems of a file, if there are any."""
    host = source.host_code
    if host and (problems or not host[0].startswith("#")):
        what = "gpt2block allocates the arrays and launches the kernel: delete the host code: "
        problems.append((f"{source.file}: {what}{', '.join(host)}",))
    if len(problems) == 1:
        raise InputError(*problems[0])
    if problems:
        lines = (part for each in problems for part in (LINE, *each))
        raise InputError(f"{source.file}: {len(problems)} changes are needed:", *lines)


def _device() -> str:
    """Return a phrase for messages: the compute capability whose limits apply."""
    major, minor = divmod(compute_capability(), 10)
    emulated = ", which the emulator has" if replaced() else ""
    return f" for a block of compute capability {major}.{minor}{emulated}"


def described(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _known(label: str, name: str, operation: Operation, values: Values) -> str:
    known = dict.fromkeys((*values.inputs, *values.outputs, *values.numbers))
    if name in known:
        return name
    if name in values.aliases:
        return values.aliases[name]
    same = [each for each in known if each.lower() == name.lower()]
    near = same or get_close_matches(name, (*known, *values.aliases), 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise InputError(
        f"{label}: {operation.name} has no argument {name!r}{hint}",
        f": expected {', '.join(known)}; or name the argument of each parameter with ",
        Argument("args"),
    )


def _check_type(label: str, parameter: Parameter, name: str, dtype: str, values: Values) -> None:
    ctype = parameter.ctype
    if name in values.numbers:
        number = values.numbers[name]
        whole, large = isinstance(number, int), abs(number) >= 2**31
        known_types: Mapping[str, type[np.generic]] = INTEGERS if whole else REALS
        if ctype not in known_types or (whole and large and known_types[ctype] is not np.int64):
            kinds = ("int", "long long")[large:] if whole else ("float", "double")
            either = " or ".join(f"{kind} {parameter.name}" for kind in kinds)
            raise InputError(f"{label}: {ctype} {parameter.name}: expected {either}")
        return
    output = values.outputs.get(name)
    wanted = output.dtype if output else str(values.inputs[name].dtype.name)
    element = ctype.removesuffix("*")
    types = (*ELEMENTS[wanted], *(("T", "W") if wanted == dtype else ()))
    if not ctype.endswith("*") or element not in types:
        known = "T" if wanted == dtype != "float32" else types[0]
        const = "" if output else "const "
        expected = f"expected {const}{known}* {parameter.name}"
        chosen = (f" ({dtype}: ", Argument("dtype"), " chooses another)")
        advice = () if dtype == "float32" else chosen
        raise InputError(f"{label}: {ctype} {parameter.name}: {expected}", *advice)
    if output and parameter.const:
        raise InputError(f"{label}: {parameter.name} is const, but the kernel must write to it")
