"""Translate PTX instructions of several threads to C++: barriers, exchanges, matrix products."""

from __future__ import annotations

import re
from collections.abc import Callable

from gpt2block.emulator.ptx_operands import BF16, F16, SCOPES, Instruction, N, vector


def _bar(i: Instruction) -> str:
    i.allow("sync", "arrive", "warp", "aligned", "cta")
    if i.has("warp"):
        i.expect(1)
        return f"__syncwarp({i.value(i.operands[0], 'u32')});"
    if i.has("sync") == i.has("arrive"):
        raise i.unknown()
    i.expect(*((1, 2) if i.has("sync") else (2,)))
    numbers = [i.value(each, "s32") for each in i.operands] + ["-1"]
    return f"{N}bar({numbers[0]}, {numbers[1]}, {'true' if i.has('sync') else 'false'});"


def _shfl(i: Instruction) -> str:
    i.allow("sync", "up", "down", "bfly", "idx")
    i.expect(5)
    kind = next(each for each in ("up", "down", "bfly", "idx") if i.has(each))
    first, _, second = i.operands[0].partition("|")
    values = ", ".join(i.value(each, "u32") for each in i.operands[1:])
    code = [
        f"const auto ptx_got = {N}shfl('{kind[0]}', {values});",
        i.assigned(first, "ptx_got.value"),
    ]
    if second:
        code.append(i.assigned(second, "ptx_got.inside"))
    return f"{{ {' '.join(code)} }}"


def _vote(i: Instruction) -> str:
    i.allow("sync", "any", "all", "ballot")
    i.expect(3)
    kind = next((each for each in ("any", "all", "ballot") if i.has(each)), None)
    if kind is None:
        raise i.unknown()
    arguments = f"{i.value(i.operands[2], 'u32')}, {i.raw(i.operands[1])}"
    result = (
        f"(std::uint32_t)__ballot_sync({arguments})"
        if kind == "ballot"
        else f"(bool)__{kind}_sync({arguments})"
    )
    return i.assigned(i.operands[0], result)


def _match(i: Instruction) -> str:
    i.allow("sync", "any")
    i.expect(3)
    value, mask = i.value(i.operands[1], f"u{i.type[1:]}"), i.value(i.operands[2], "u32")
    return i.assigned(i.operands[0], f"__match_any_sync({mask}, {value})")


def _redux(i: Instruction) -> str:
    operations = ("add", "min", "max", "and", "or", "xor")
    i.allow("sync", set(operations))
    i.expect(3)
    operation = next(each for each in operations if i.has(each))
    if i.type not in ("s32", "u32", "b32"):
        raise i.unknown()
    value, mask = i.value(i.operands[1], i.type), i.value(i.operands[2], "u32")
    return i.assigned(i.operands[0], f"__reduce_{operation}_sync({mask}, {value})")


def _activemask(i: Instruction) -> str:
    return i.assigned(i.operands[0], "__activemask()")


def _mbarrier(i: Instruction) -> str:
    kinds = ("init", "inval", "arrive", "expect_tx", "complete_tx", "test_wait", "try_wait")
    scopes = SCOPES | {"relaxed", "acquire", "release"}
    i.allow({*kinds, "parity", "shared", "shared::cta"}, scopes)
    kind = next((each for each in kinds if i.has(each)), None)
    has_target = kind in ("test_wait", "try_wait") or (
        kind == "arrive" and not i.operands[0].startswith("[")
    )
    target, operands = (i.operands[0], i.operands[1:]) if has_target else ("_", i.operands)
    barrier = i.pointer(operands[0], f"{N}Mbarrier")
    numbers = [i.value(each, "u32") for each in operands[1:]]
    if kind == "init" and len(numbers) == 1:
        return f"{N}mbarrier_init({barrier}, {numbers[0]});"
    if kind == "inval":
        return f"*{barrier} = {{}};"
    if kind == "arrive":
        number = numbers[0] if numbers else "1"
        arguments = f"1, {number}" if i.has("expect_tx") else f"{number}, 0"
        return i.assigned(target, f"{N}mbarrier_arrive({barrier}, {arguments})")
    if kind in ("expect_tx", "complete_tx") and len(numbers) == 1:
        sign = "-" if kind == "complete_tx" else ""
        return f"{N}mbarrier_arrive({barrier}, 0, {sign}(int){numbers[0]});"
    if kind in ("test_wait", "try_wait") and numbers:
        return i.assigned(target, f"{N}mbarrier_test({barrier}, {numbers[0]})")
    raise i.unknown()


def _ldmatrix(i: Instruction) -> str:
    i.allow("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta")
    i.expect(2)
    to = vector(i.operands[0])
    n = next((int(each[1]) for each in ("x1", "x2", "x4") if i.has(each)), 0)
    if len(to) != n or i.type != "b16" or not i.has("m8n8"):
        raise i.unknown()
    row = f"{N}shared<const std::uint16_t>({i.address(i.operands[1])})"
    loaded = f"{N}ldmatrix<{n}, {'true' if i.has('trans') else 'false'}>({row})"
    lines = [i.assigned(o, f"ptx_rows.v[{k}]") for k, o in enumerate(to)]
    return f"{{ const auto ptx_rows = {loaded}; {' '.join(lines)} }}"


_MMA_TYPES = {
    "f16": F16, "bf16": BF16, "tf32": f"{N}TF32", "e4m3": f"{N}FP8<3>", "e5m2": f"{N}FP8<2>",
    "s8": "std::int8_t", "u8": "std::uint8_t",
}  # fmt: skip


def _mma(i: Instruction) -> str:
    found = re.fullmatch(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::f8f6f4)?\.(f32|f16|s32)\.(\w+)\.(\w+)\.\2",
        i.code,
    )
    if not found or not {found[3], found[4]} <= _MMA_TYPES.keys():
        raise i.unknown()
    i.expect(4)
    size = 4 if found[3] == "tf32" else 1 if found[3][-1] in "238" else 2
    registers = int(found[1]) * size // 8
    sums = {"f32": "float", "f16": "float", "s32": "std::int32_t"}[found[2]]
    d, a, b, c = map(vector, i.operands)
    fits = (found[2] == "s32") == (found[3] in ("s8", "u8")) and registers in (2, 4)
    if (
        not fits
        or (len(a), len(b)) != (registers, registers // 2)
        or len(c) != (2 if found[2] == "f16" else 4)
    ):
        raise i.unknown()

    def given(operands: list[str]) -> str:
        values = ", ".join(i.value(each, "u32") for each in operands)
        return f"{N}Registers<{len(operands)}>{{{{{values}}}}}"

    call = f"{N}mma_sync<{_MMA_TYPES[found[3]]}, {_MMA_TYPES[found[4]]}, {sums}, {registers}>"
    lines = [i.assigned(o, f"ptx_sums.v[{k}]") for k, o in enumerate(d)]
    return (
        f"{{ const auto ptx_sums = {call}({given(a)}, {given(b)}, {given(c)}); {' '.join(lines)} }}"
    )


def _griddepcontrol(i: Instruction) -> str:
    i.allow("wait", "launch_dependents")
    return "cuda_on_cpu::wait_for_previous();" if i.has("wait") else ";"


HANDLERS: dict[str, Callable[[Instruction], str]] = {
    "bar": _bar, "barrier": _bar, "shfl": _shfl, "vote": _vote, "match": _match, "redux": _redux,
    "activemask": _activemask, "mbarrier": _mbarrier, "ldmatrix": _ldmatrix, "mma": _mma,
    "griddepcontrol": _griddepcontrol,
    "nanosleep": lambda i: "__nanosleep(0);",
    "trap": lambda i: "__trap();",
}  # fmt: skip
