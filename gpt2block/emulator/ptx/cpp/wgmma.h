// Products of matrices by a warpgroup: wgmma. A product is computed when it is issued; its reads of shared memory count
// until the wait for it, so that overwriting them before is a race. It may read bytes that nobody has written: the rows
// and columns beyond those that are used.
#pragma once
#include "async.h"
#include "tensor.h"

namespace tensor {

struct Described {
    uint32_t start, leading, stride, row;  // bytes; row: of a swizzled atom, or 16
    explicit Described(uint64_t code)
        : start((uint32_t)(code & 0x3fff) << 4),
          leading((uint32_t)(code >> 16 & 0x3fff) << 4),
          stride((uint32_t)(code >> 32 & 0x3fff) << 4),
          row((uint32_t[]){16, 128, 64, 32}[code >> 62]) {}

    // Returns the address of the 16 bytes of element (r, k) of the matrix (rows, depth). across: k is the slower index.
    uint32_t unit(int r, int k, int item, bool across) const {
        const int slow = across ? k : r, fast = (across ? r : k) * item;
        const uint32_t line = slow % 8 * row, group = slow / 8, inner = fast % row, outer = fast / row;
        const bool swapped = row == 16 && across;  // without swizzle, the two distances change places
        const uint32_t slower = swapped ? leading : stride, faster = swapped ? stride : leading;
        const uint32_t at = start + line + group * slower + inner + outer * faster;
        return (at ^ (at >> 3 & (row - 16))) & ~15u;
    }
};

// Reads rows `first` to `first + count` - 1 of a described matrix (rows, depth) into `to`, which is transposed for b.
// units: gets the addresses of the 16 bytes that are read together.
inline void read_described(Warp& w, const Instr& i, uint64_t code, int first, int count, bool across, char matrix,
                           const Product& p, Numbers& to, std::vector<uint32_t>& units) {
    const Described from(code);
    const int item = (int)p.width / 8, per = 16 / item, depth = p.shape.depth;
    const Decode decode = matrix == 'a' ? p.a : p.b;
    to.resize(count * depth);
    for (int r = 0; r < count; r += across ? per : 1) {
        for (int k = 0; k < depth; k += across ? 1 : per) {
            const uint32_t address = from.unit(first + r, k, item, across);
            const uint8_t* data = memory::touch_once(w, i, 0, address, 16, Space::shared, READS | UNWRITTEN, 16);
            units.push_back(address);
            for (int e = 0; e < per; ++e) {
                const int row = across ? r + e : r, column = across ? k : k + e;
                const int at = matrix == 'a' ? row * depth + column : column * count + row;
                uint32_t bits_of = 0;
                std::memcpy(&bits_of, data + e * item, item);
                decode(bits_of, to.value[at], to.exponent[at]);
            }
        }
    }
}

inline void negate(Numbers& numbers, bool negative) {
    if (negative) for (double& x : numbers.value) x = -x;
}

// d, a, b, whether to add to d, signs of a and b, then whether a (if in shared memory) and b are stored across. A warp
// computes its 16 rows of the 64.
inline void wgmma_product(Warp& w, const Instr& i, std::vector<uint32_t>& units) {
    static thread_local Numbers a, b;
    static thread_local std::vector<double> sums;
    const Product& p = product_of(i);
    const auto constant = [&](int k) { return k < i.count ? (int32_t)w.in(i, k)[0] : 0; };
    const bool registers = i.op[1].count > 1;
    if (registers) read_matrix('a', w, i, 1, p, a);
    else read_described(w, i, w.in(i, 1)[0], w.first / LANES % 4 * 16, 16, constant(6), 'a', p, a, units);
    read_described(w, i, w.in(i, 2)[0], 0, p.shape.columns, constant(registers ? 6 : 7), 'b', p, b, units);
    negate(a, constant(4) < 0), negate(b, constant(5) < 0);
    if (w.predicate(i, 3) & 1) read_sums(w, i, 0, p, sums);
    else sums.assign(p.shape.rows * p.shape.columns, 0.0);
    add_products(a, b, p.shape.rows, p.shape.columns, p.shape.depth, p.block, sums.data(), p.sums);
    write_sums(w, i, 0, p, sums);
}

static void multiply(Warp& w, const Instr& i, Mask active) {
    whole_warp(w, i, active);
    async::Product made{&i, {}};
    wgmma_product(w, i, made.units);
    async::of(w).products.add(std::move(made));
}

static Handler pick_product(Form& f) {
    auto product = std::make_shared<Product>();
    if (f.types.size() != 3 || (f.type(1).bits == 8 && f.type(1).kind == 'f')) return nullptr;
    if (!describe(*product, f, f.type(1), f.type(2), f.type(0))) return nullptr;
    product->shape.rows = 16;
    f.details = product;
    return multiply;
}

static void commit(Warp& w, const Instr&, Mask) { ++async::of(w).products.group; }

static void wait(Warp& w, const Instr& i, Mask) {
    auto& products = async::of(w).products;
    const uint32_t later = (uint32_t)w.in(i, 0)[0];
    products.each_before(later, [&](const async::Product& product) {
        for (uint32_t unit : product.units) {
            memory::touch_once(w, *product.i, 0, unit, 16, Space::shared, READS | UNWRITTEN, 16);
        }
    });
    products.drop_before(later);
}

static const Rows wgmma_{
    {"wgmma.mma_async", pick_product, WHOLE_WARP},
    {"wgmma.commit_group", commit, WHOLE_WARP},
    {"wgmma.wait_group", wait, WHOLE_WARP},
    {"wgmma.fence", nothing, WHOLE_WARP},
};

}  // namespace tensor
