// Executes one instruction for many warps whose operands are rows of registers, without a program or memory.
#include "floats.cpp"
#include "tensor.h"

uint8_t* Machine::access(Warp&, const Instr&, int, uint64_t, unsigned, Space, unsigned) { return nullptr; }

// kinds: of the operands, a digit: so many rows of registers; "p": predicate. registers: the rows of all operands
// of the first warp, then those of the next. A predicate has one row, whose values are 0 or 1. Returns 0 if no handler
// knows the opcode.
extern "C" int run(const char* opcode, const char* kinds, int warps, uint64_t* registers) {
    Form form(opcode);
    if (!find_handler(form)) return 0;
    Program program;
    Machine machine;
    machine.program = &program;
    Block block(machine);
    Warp warp(machine, block);
    std::vector<Operand> operands;
    int rows = 0;
    for (const char* kind = kinds; *kind; ++kind) {
        const int count = *kind == 'p' ? 1 : *kind - '0';
        operands.push_back({*kind == 'p' ? Operand::predicate : Operand::row, rows, count, 0, 0});
        for (int end = rows + count; rows < end; ++rows) program.parts.push_back(rows);
    }
    warp.predicates.resize(rows);
    const Instr instruction = {&form, form.run, operands.data(), (int)operands.size(), -1, false, 0};
    for (; warps--; registers += rows * LANES) {
        warp.rows.assign(registers, registers + rows * LANES);
        for (int r = 0; r < rows; ++r) {
            warp.predicates[r] = 0;
            for (int l = 0; l < LANES; ++l) warp.predicates[r] |= (Mask)(registers[r * LANES + l] & 1) << l;
        }
        form.run(warp, instruction, ~0u);
        for (const Operand& op : operands) {
            for (int j = 0; j < op.count * LANES; ++j) {
                const int at = op.index * LANES + j;
                registers[at] = op.kind == Operand::predicate ? warp.predicates[op.index] >> j & 1 : warp.rows[at];
            }
        }
    }
    return 1;
}
