"""Translate PTX instructions that access memory to C++: ld, st, atom, cp.async, fences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpt2block.emulator.ptx_operands import (
    BITS,
    CPP_NAMES,
    SCOPES,
    TYPES,
    Instruction,
    N,
    vector,
)

_CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc"}
_SPACES = {"global", "shared", "shared::cta"}
_ORDERS = {"relaxed", "acquire", "release", "acq_rel", "sc", "weak"}


def _access(i: Instruction) -> tuple[Instruction, int, bool]:
    """Check the modifiers of ld or st; return (instruction without hints, elements, strong)."""
    i = i.without_hints()
    i.allow(_CACHE, SCOPES, _ORDERS, _SPACES, "const", "volatile", "v2", "v4")
    strong = i.has("volatile", "cv") or (i.has(*_ORDERS) and not i.has("weak"))
    return i, 4 if i.has("v4") else 2 if i.has("v2") else 1, strong


def _element(type_: str) -> str:
    """Return the integer that holds a number in memory."""
    if type_[0] == "s":
        return TYPES[type_]
    return f"std::uint{BITS.get(type_) or int(type_[1:])}_t"


def _ld(i: Instruction) -> str:
    i, n, strong = _access(i)
    i.expect(2)
    to = vector(i.operands[0])
    kind = f"{N}Vector<{_element(i.type)}, {n}>"
    pointer = i.pointer(i.operands[1], kind)
    load = "load_strong" if strong else "load_constant" if i.has("nc") else ""
    loaded = f"{N}{load}({pointer})" if load else f"*{pointer}"
    lines = [i.assigned(o, f"ptx_loaded.v[{k}]") for k, o in enumerate(to)]
    return f"{{ const {kind} ptx_loaded = {loaded}; {' '.join(lines)} }}"


def _st(i: Instruction) -> str:
    i, n, strong = _access(i)
    i.expect(2)
    kind = f"{N}Vector<{_element(i.type)}, {n}>"
    type_ = f"u{BITS.get(i.type) or i.type[1:]}"
    values = ", ".join(f"({_element(i.type)}){i.value(o, type_)}" for o in vector(i.operands[1]))
    pointer = i.pointer(i.operands[0], kind)
    stored = f"{N}store_strong({pointer}, ptx_stored);" if strong else f"*{pointer} = ptx_stored;"
    return f"{{ const {kind} ptx_stored = {{{{{values}}}}}; {i.fence()}{stored} }}"


def _atom(i: Instruction) -> str:
    i = i.without_hints()
    operations = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}
    i.allow(
        operations, SCOPES, _ORDERS, "global", "shared", "shared::cta", "noftz", "ftz", "v2", "v4"
    )
    operation = next((each for each in operations if i.has(each)), None)
    target, operands = (i.operands[0], i.operands[1:]) if i.base == "atom" else ("_", i.operands)
    if operation is None or len(operands) != (3 if operation == "cas" else 2):
        raise i.unknown()
    kind = TYPES[i.type]
    if i.has("v2", "v4"):
        return _atom_of_vector(i, target, operands, operation)
    pointer = i.pointer(operands[0], kind)
    values = [i.value(each, i.type) for each in operands[1:]]
    if operation == "cas":
        return i.fence() + i.assigned(
            target, f"{N}atom_cas<{kind}>({pointer}, {', '.join(values)})"
        )
    return i.fence() + i.assigned(target, _changed(pointer, kind, operation, values[0]))


def _changed(pointer: str, kind: str, operation: str, value: str) -> str:
    result = {
        "exch": "ptx_value",
        "inc": "old >= ptx_value ? 0 : old + 1",
        "dec": "old == 0 || old > ptx_value ? ptx_value : old - 1",
    }.get(operation, f"{N}{CPP_NAMES.get(operation, operation)}<{kind}>(old, ptx_value)")
    return f"{N}atom({pointer}, [ptx_value = {value}]({kind} old) -> {kind} {{ return {result}; }})"


def _atom_of_vector(i: Instruction, target: str, operands: Sequence[str], operation: str) -> str:
    kind, values = TYPES[i.type], vector(operands[1])
    targets = vector(target) if target != "_" else ["_"] * len(values)
    code = []
    for k, (each, value) in enumerate(zip(targets, values, strict=True)):
        pointer = f"{i.pointer(operands[0], kind)} + {k}"
        code.append(i.assigned(each, _changed(pointer, kind, operation, i.value(value, i.type))))
    return i.fence() + " ".join(code)


def _cvta(i: Instruction) -> str:
    i.allow("to", "shared", "shared::cta", "global", "const", "local")
    i.expect(2)
    value = i.value(i.operands[1], "u64")
    if i.has("shared", "shared::cta"):
        to = f"cuda_on_cpu::to_shared({N}global<void>({value}))"
        value = (
            to
            if i.has("to")
            else f"(std::uint64_t)(std::uintptr_t)cuda_on_cpu::from_shared({value})"
        )
    return i.assigned(i.operands[0], value)


def _cp(i: Instruction) -> str:
    i = i.without_hints()
    if i.has("commit_group"):
        return "__pipeline_commit();"
    if i.has("wait_group"):
        i.expect(1)
        return f"__pipeline_wait_prior({i.value(i.operands[0], 'u32')});"
    if i.has("wait_all"):
        return f"{N}wait_for_copies();"
    if i.has("mbarrier"):
        # The copies complete now. Without .noinc, PTX adds 1 to the pending count before the
        # arrival, so that the count does not change.
        i.allow("async", "mbarrier", "arrive", "noinc", _SPACES)
        barrier = i.pointer(i.operands[0], f"{N}Mbarrier")
        count = 1 if i.has("noinc") else 0
        return f"{N}wait_for_copies(); (void){N}mbarrier_arrive({barrier}, {count}, 0);"
    i.allow("async", "ca", "cg", "shared", "shared::cta", "global")
    i.expect(3, 4)
    to = f"{N}shared<void>({i.address(i.operands[0])})"
    from_ = f"{N}global<void>({i.address(i.operands[1])})"
    numbers = [i.value(each, "u32") for each in i.operands[2:]]
    return f"{N}copy_async({to}, {from_}, {numbers[0]}, {numbers[-1]});"


def _fence(i: Instruction) -> str:
    if i.has("proxy"):
        return ";"
    i.allow("sc", "acq_rel", "cta", "gpu", "sys", "gl", "mbarrier_init", "release")
    return f"cuda_on_cpu::fence({'false' if i.has('cta') else 'true'});"


def _nothing(i: Instruction) -> str:
    return ";"


def _createpolicy(i: Instruction) -> str:
    return i.assigned(i.operands[0], "std::uint64_t(0)")


HANDLERS: dict[str, Callable[[Instruction], str]] = {
    "ld": _ld, "ldu": _ld, "st": _st, "atom": _atom, "red": _atom, "cvta": _cvta, "cp": _cp,
    "fence": _fence, "membar": _fence, "createpolicy": _createpolicy,
    **dict.fromkeys(("prefetch", "prefetchu", "applypriority", "discard"), _nothing),
}  # fmt: skip
