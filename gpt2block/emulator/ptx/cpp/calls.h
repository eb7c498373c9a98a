// Functions of CUDA's run-time library that kernels call: printf and assert. Also trap.
#pragma once
#include "memory.h"

#include <cstdio>

namespace calls {

constexpr std::size_t MAX_PRINTED = 1 << 16;  // bytes

static uint64_t read(Warp& w, const Instr& i, int lane, uint64_t address, unsigned bytes, Space space) {
    uint64_t value = 0;
    std::memcpy(&value, w.machine.access(w, i, lane, address, bytes, space, READS), bytes);
    return value;
}
static uint64_t argument(Warp& w, const Instr& i, int k, int lane) {  // a pointer
    return read(w, i, lane, w.address(i, k, lane), 8, Space::local);
}

static std::string text_at(Warp& w, const Instr& i, int lane, uint64_t address) {
    std::string text;
    while (text.size() < MAX_PRINTED) {
        const char c = (char)read(w, i, lane, address + text.size(), 1, Space::generic);
        if (!c) break;
        text += c;
    }
    return text;
}

// Formats as printf does. The arguments lie one after the other at a generic address, each aligned to its size.
static std::string formatted(Warp& w, const Instr& i, int lane, const std::string& format, uint64_t at) {
    std::string made;
    for (std::size_t k = 0; k < format.size(); ++k) {
        if (format[k] != '%') {
            made += format[k];
            continue;
        }
        const std::size_t end = format.find_first_of("diouxXcsfFeEgGaAp%", k + 1);
        if (end == std::string::npos) break;
        std::string part = format.substr(k, end - k + 1);
        k = end;
        const auto next = [&](unsigned bytes) {
            at = (at + bytes - 1) / bytes * bytes;
            at += bytes;
            return read(w, i, lane, at - bytes, bytes, Space::generic);
        };
        std::size_t star;
        while ((star = part.find('*')) != std::string::npos) part.replace(star, 1, std::to_string((int)next(4)));
        const auto print = [&](auto value) {
            char text[512];
            std::snprintf(text, sizeof text, part.c_str(), value);
            made += text;
        };
        const char kind = part.back();
        const bool wide = kind == 'p' || part.find_first_of("lzjt") != std::string::npos;
        if (kind == '%') made += '%';
        else if (kind == 's') print(text_at(w, i, lane, next(8)).c_str());
        else if (std::strchr("fFeEgGaA", kind)) print(std::bit_cast<double>(next(8)));
        else if (wide) print((unsigned long long)next(8));
        else print((unsigned)next(4));
    }
    return made;
}

static void vprintf(Warp& w, const Instr& i, Mask active) {  // result, format, arguments
    for_lanes(active, [&](int l) {
        std::string& all = w.machine.printed;
        if (all.size() >= MAX_PRINTED) return;
        all += formatted(w, i, l, text_at(w, i, l, argument(w, i, 1, l)), argument(w, i, 2, l));
        all.resize(std::min(all.size(), MAX_PRINTED));
    });
}

static void assertfail(Warp& w, const Instr& i, Mask active) {  // condition, file, line, function, size of a character
    const int l = __builtin_ctz(active);
    w.machine.fail(w, i, l, "assert", text_at(w, i, l, argument(w, i, 0, l)));
}

static void trap(Warp& w, const Instr& i, Mask active) {
    w.machine.fail(w, i, __builtin_ctz(active), "trap", "the kernel executes a trap");
}

static const Rows rows_{{"vprintf", vprintf}, {"assertfail", assertfail}, {"trap", trap}};

}  // namespace calls
