// cg::reduce over a group of lanes by shuffles; every thread of the group receives the result.
#pragma once
#include <cooperative_groups.h>

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

template <typename Group, typename T, typename Op>
T reduce(const Group& group, T value, Op op, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if constexpr (std::is_same_v<Group, coalesced_group>) {
        T total = group.shfl(value, 0, file, line);
        for (unsigned rank = 1; rank < group.size(); ++rank) total = op(total, group.shfl(value, rank, file, line));
        return total;
    } else {
        for (unsigned lanes = Group::size() / 2; lanes > 0; lanes /= 2) {
            value = op(value, group.shfl_xor(value, lanes, file, line));
        }
        return value;
    }
}

}  // namespace cooperative_groups
