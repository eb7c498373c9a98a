// cg::reduce over a tile, by shuffles: every thread of the tile receives the result.
#pragma once

namespace cooperative_groups {

template <typename T>
struct plus {
    T operator()(T a, T b) const { return a + b; }
};

template <typename T>
struct greater {  // the larger of two, as in CUDA's header
    T operator()(T a, T b) const { return a < b ? b : a; }
};

template <typename Tile, typename T, typename Op>
T reduce(const Tile& tile, T value, Op op, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    for (unsigned lanes = Tile::size() / 2; lanes > 0; lanes /= 2) {
        value = op(value, tile.shfl_xor(value, lanes, file, line));
    }
    return value;
}

}  // namespace cooperative_groups
