// cg::reduce over a tile by shuffles; every thread of the tile receives the result.
#pragma once

namespace cooperative_groups {

#define OPERATOR(name, result)                        \
    template <typename T>                             \
    struct name {                                     \
        T operator()(T a, T b) const { return result; } \
    };
OPERATOR(plus, a + b)
OPERATOR(less, b < a ? b : a)     // minimum of a and b, as in CUDA's header
OPERATOR(greater, a < b ? b : a)  // maximum of a and b
OPERATOR(bit_and, a & b)
OPERATOR(bit_or, a | b)
OPERATOR(bit_xor, a ^ b)
#undef OPERATOR

template <typename Tile, typename T, typename Op>
T reduce(const Tile& tile, T value, Op op, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    for (unsigned lanes = Tile::size() / 2; lanes > 0; lanes /= 2) {
        value = op(value, tile.shfl_xor(value, lanes, file, line));
    }
    return value;
}

}  // namespace cooperative_groups
