// Products of matrices by the lanes of a warp (mma, wmma), and loads and stores of their fragments.
//
// Products of numbers are exact. Sums in f32 or f16 are computed as Hopper's tensor cores were found to compute them: a
// sum and at most 16 products (8 of tf32) are aligned to the largest exponent among them, cut off 25 bits below it, and
// added exactly; the total is cut off to f32, or rounded to the nearest f16. An exponent of a product is the sum of
// those of its factors. Sums of f64 are chains of fma, and sums of integers are exact.
#pragma once
#include "machine.h"

namespace tensor {

using namespace numbers;

constexpr int KEPT = 25;           // bits of fraction of aligned terms
constexpr int NOTHING = -20000;    // exponent of zero
constexpr int ENDLESS = 20000;     // exponent of infinity and NaN

struct Numbers {  // a matrix, row by row
    std::vector<double> value;
    std::vector<int> exponent;
    void resize(int count) { value.resize(count), exponent.resize(count); }
};

inline int exponent_of(double x, int least) {
    const int exponent = (int)(bit_cast<uint64_t>(x) >> 52 & 2047) - F64::BIAS;
    return x == 0 ? NOTHING : exponent > F64::BIAS ? ENDLESS : exponent < least ? least : exponent;
}

using Decode = void (*)(uint32_t code, double& value, int& exponent);

template <class F>
void decode_float(uint32_t code, double& x, int& exponent) {
    x = value<F>(code);
    exponent = exponent_of(x, F::EXPONENT == 8 ? F::MIN_EXPONENT : F16::MIN_EXPONENT);
}
template <class T>
void decode_integer(uint32_t code, double& x, int&) {
    x = (T)code;
}

inline Decode decoder(const Type& type) {
    if (type.is("f16")) return decode_float<F16>;
    if (type.is("bf16")) return decode_float<BF16>;
    if (type.is("tf32")) return [](uint32_t code, double& x, int& e) { decode_float<TF32>(code >> 13, x, e); };
    if (type.is("e4m3")) return decode_float<E4M3>;
    if (type.is("e5m2")) return decode_float<E5M2>;
    if (type.is("s8")) return decode_integer<int8_t>;
    return type.is("u8") ? decode_integer<uint8_t> : nullptr;
}

// --- sums of products

enum class Sums { f32, f16, f64, s32, s32_limited };

inline double cut_off(double x) {  // towards zero, to f32
    if (std::fabs(x) < 0x1p-126) return value<F32>(narrow<F32>(x, {Round::zero}));
    return std::fabs(x) < 0x1p128 ? bit_cast<double>(bit_cast<uint64_t>(x) >> 29 << 29) : x * INFINITY;
}

// Adds the products of one block of terms to 8 sums. a: a row; b: 8 columns, whose rows have `columns` values.
inline void add_block(const double* a, const int* ea, const double* b, const int* eb, int columns, int depth,
                      double* sums, Sums kind) {
    constexpr int N = 8;
    int top[N];
    for (int j = 0; j < N; ++j) top[j] = std::max(exponent_of(sums[j], F32::MIN_EXPONENT), -900);
    for (int k = 0; k < depth; ++k) {
        for (int j = 0; j < N; ++j) top[j] = std::max(top[j], ea[k] + eb[k * columns + j]);
    }
    double scale[N], total[N];
    for (int j = 0; j < N; ++j) {
        scale[j] = bit_cast<double>((uint64_t)(F64::BIAS + KEPT - std::min(top[j], 900)) << 52);
        total[j] = std::trunc(sums[j] * scale[j]);
    }
    for (int k = 0; k < depth; ++k) {
        for (int j = 0; j < N; ++j) total[j] += std::trunc(a[k] * b[k * columns + j] * scale[j]);
    }
    for (int j = 0; j < N; ++j) {
        double sum = total[j] / scale[j];
        if (top[j] > 900) {  // a term is infinite or NaN
            sum = sums[j];
            for (int k = 0; k < depth; ++k) sum += a[k] * b[k * columns + j];
        }
        sums[j] = kind == Sums::f16 ? value<F16>(narrow<F16>(sum)) : cut_off(sum);
    }
}

// sums (rows, columns) += a (rows, depth) b (depth, columns); columns: a multiple of 8.
inline void add_products(const Numbers& a, const Numbers& b, int rows, int columns, int depth, int block, double* sums,
                         Sums kind) {
    for (int m = 0; m < rows; ++m) {
        for (int n = 0; n < columns; n += 8) {
            double* row = sums + m * columns + n;
            if (kind == Sums::f32 || kind == Sums::f16) {
                for (int k = 0; k < depth; k += block) {
                    const int at = m * depth + k, other = k * columns + n;
                    add_block(&a.value[at], &a.exponent[at], &b.value[other], &b.exponent[other], columns,
                              std::min(block, depth - k), row, kind);
                }
                continue;
            }
            for (int k = 0; k < depth; ++k) {
                for (int j = 0; j < 8; ++j) {
                    row[j] = std::fma(a.value[m * depth + k], b.value[k * columns + n + j], row[j]);
                }
            }
        }
    }
}

// --- fragments: which elements of a matrix the registers of the lanes hold

// Calls visit(register, lane, part, row, column) for each element. matrix: 'a', 'b' or 'c'. parts: elements in a
// register. rows: of a and c, 8 or 16. depth: columns of a, rows of b.
template <class Visit>
inline void each_element(char matrix, int registers, int parts, int rows, int depth, Visit visit) {
    const int halves = rows / 8, of_tile = std::max(1, depth / (4 * parts));
    for (int r = 0; r < registers; ++r) {
        for (int lane = 0; lane < LANES; ++lane) {
            const int g = lane / 4, t = lane % 4;
            for (int e = 0; e < parts; ++e) {
                if (matrix == 'a') {
                    visit(r, lane, e, g + 8 * (r % halves), (4 * (r / halves) + t) * parts + e);
                } else if (matrix == 'b') {
                    visit(r, lane, e, (4 * (r % of_tile) + t) * parts + e, 8 * (r / of_tile) + g);
                } else {
                    const int at = r * parts + e, j = at % (2 * halves), tile = at / (2 * halves);
                    visit(r, lane, e, g + 8 * (j / 2), 8 * tile + 2 * t + j % 2);
                }
            }
        }
    }
}

struct Shape {
    int rows = 0, columns = 0, depth = 0;
};
inline Shape shape_of(const Form& f) {
    Shape s;
    for (const std::string& word : f.words) {
        if (std::sscanf(word.c_str(), "m%dn%dk%d", &s.rows, &s.columns, &s.depth) == 3) break;
    }
    return s;
}

// What a product of matrices needs to know; made once per form and never freed.
struct Product {
    Shape shape;
    Decode a = nullptr, b = nullptr;
    unsigned width = 16;  // bits of an element of a and b
    int block = 16;
    Sums sums = Sums::f32;
    int parts() const { return width < 32 ? 32 / (int)width : 1; }
    int sums_per_register() const { return sums == Sums::f16 ? 2 : 1; }
};

inline bool describe(Product& p, const Form& f, const Type& a, const Type& b, const Type& d) {
    p.shape = shape_of(f);
    p.width = a.bits;
    p.block = a.is("tf32") ? 8 : 16;
    p.a = decoder(a), p.b = decoder(b);
    if (d.is("f32")) p.sums = Sums::f32;
    else if (d.is("f16")) p.sums = Sums::f16;
    else if (d.is("f64")) p.sums = Sums::f64;
    else if (d.is("s32")) p.sums = f.has("satfinite") ? Sums::s32_limited : Sums::s32;
    else return false;
    const bool floats = p.sums == Sums::f32 || p.sums == Sums::f16;
    const bool integers = p.sums == Sums::s32 || p.sums == Sums::s32_limited;
    return p.shape.rows && (a.is("f64") ? p.sums == Sums::f64 : p.a && p.b && (a.kind == 'f' ? floats : integers));
}

inline const Product& product_of(const Instr& i) { return *static_cast<const Product*>(i.form->details.get()); }

inline double sum_from(uint64_t bits_of, const Product& p, int part) {
    switch (p.sums) {
        case Sums::f32: return value<F32>((uint32_t)bits_of);
        case Sums::f16: return value<F16>(bits_of >> 16 * part & 0xffff);
        case Sums::f64: return value<F64>(bits_of);
        default: return (int32_t)bits_of;
    }
}
inline uint64_t sum_to(double x, const Product& p) {
    switch (p.sums) {
        case Sums::f32: return narrow<F32>(x);
        case Sums::f16: return narrow<F16>(x);
        case Sums::f64: return bit_cast<uint64_t>(x);
        case Sums::s32: return (uint32_t)(int64_t)x;
        default: return (uint32_t)(int32_t)std::fmax(INT32_MIN, std::fmin(INT32_MAX, x));
    }
}

// Reads matrix 'a' or 'b' from the registers of operand k.
inline void read_matrix(char matrix, const Warp& w, const Instr& i, int k, const Product& p, Numbers& to) {
    const Shape& s = p.shape;
    const int columns = matrix == 'a' ? s.depth : s.columns;
    const int elements = (matrix == 'a' ? s.rows : s.columns) * s.depth, parts = p.parts();
    to.resize(elements);
    const Decode decode = matrix == 'a' ? p.a : p.b;
    const uint32_t mask = p.width >= 32 ? ~0u : (1u << p.width) - 1;
    const int registers = elements / LANES / parts;
    each_element(matrix, registers, parts, s.rows, s.depth, [&](int r, int lane, int e, int row, int column) {
        const uint64_t code = w.in(i, k, r)[lane];
        const int at = row * columns + column;
        if (p.sums == Sums::f64) to.value[at] = value<F64>(code);
        else decode(code >> p.width * e & mask, to.value[at], to.exponent[at]);
    });
}

inline void read_sums(const Warp& w, const Instr& i, int k, const Product& p, std::vector<double>& sums) {
    const int parts = p.sums_per_register(), count = p.shape.rows * p.shape.columns;
    sums.resize(count);
    each_element('c', count / LANES / parts, parts, p.shape.rows, 0, [&](int r, int lane, int e, int row, int column) {
        sums[row * p.shape.columns + column] = sum_from(w.in(i, k, r)[lane], p, e);
    });
}

inline void write_sums(Warp& w, const Instr& i, int k, const Product& p, const std::vector<double>& sums) {
    const int parts = p.sums_per_register(), count = p.shape.rows * p.shape.columns;
    each_element('c', count / LANES / parts, parts, p.shape.rows, 0, [&](int r, int lane, int e, int row, int column) {
        const uint64_t made = sum_to(sums[row * p.shape.columns + column], p);
        uint64_t& to = w.out(i, k, r)[lane];
        to = e ? to | made << 16 : made;
    });
}

inline void whole_warp(const Warp& w, const Instr& i, Mask active) {
    if (active != ~0u) w.machine.fail(w, i, __builtin_ctz(active), "mask", "all 32 lanes of a warp must execute this");
}

// d, a, b, c
static void mma(Warp& w, const Instr& i, Mask active) {
    static thread_local Numbers a, b;
    static thread_local std::vector<double> sums;
    whole_warp(w, i, active);
    const Product& p = product_of(i);
    read_matrix('a', w, i, 1, p, a);
    read_matrix('b', w, i, 2, p, b);
    read_sums(w, i, 3, p, sums);
    add_products(a, b, p.shape.rows, p.shape.columns, p.shape.depth, p.block, sums.data(), p.sums);
    write_sums(w, i, 0, p, sums);
}

// mma names the types of d, a, b, c. wmma names only d and c if a and b are f16.
static Handler pick_mma(Form& f) {
    auto product = std::make_shared<Product>();
    const Type f16 = type_named("f16");
    const bool short_form = f.types.size() == 2;
    if (!short_form && f.types.size() != 4) return nullptr;
    if (!describe(*product, f, short_form ? f16 : f.type(1), short_form ? f16 : f.type(2), f.type(0))) return nullptr;
    if (f.type(0).name != f.types.back().name) return nullptr;
    const Shape& s = product->shape;
    if (s.columns != (f.name == "wmma" ? 16 : 8) || s.rows > 16) return nullptr;
    if (s.rows == 8 && product->width == 16) return nullptr;
    f.details = product;
    return mma;
}

// --- ldmatrix, stmatrix: matrices of 8 rows of 8 numbers of 16 bits. Lane 8 i + r has the address of row r of matrix i

template <bool STORES>
static void move_matrices(Warp& w, const Instr& i, Mask active) {
    whole_warp(w, i, active);
    const int where = STORES ? 0 : 1, registers = 1 - where, count = i.op[registers].count;
    const bool across = i.form->has("trans");
    const Space space = i.form->space;
    uint16_t rows[32][8];
    const auto element = [&](int r, int lane, int e) -> uint16_t& {
        const int g = lane / 4, column = 2 * (lane % 4) + e;
        return across ? rows[8 * r + column][g] : rows[8 * r + g][column];
    };
    const auto each_lane = [&](auto visit) {
        for (int r = 0; r < count; ++r) {
            for (int lane = 0; lane < LANES; ++lane) visit(r, lane);
        }
    };
    if (STORES) {
        each_lane([&](int r, int lane) {
            const uint64_t pair = w.in(i, registers, r)[lane];
            for (int e = 0; e < 2; ++e) element(r, lane, e) = (uint16_t)(pair >> 16 * e);
        });
    }
    for (int row = 0; row < 8 * count; ++row) {
        uint8_t* at = w.machine.access(w, i, row, w.address(i, where, row), 16, space, STORES ? WRITES : READS);
        STORES ? std::memcpy(at, rows[row], 16) : std::memcpy(rows[row], at, 16);
    }
    if (!STORES) {
        each_lane([&](int r, int lane) {
            w.out(i, registers, r)[lane] = element(r, lane, 0) | (uint32_t)element(r, lane, 1) << 16;
        });
    }
}

// --- wmma.load, wmma.store: all lanes pass the address of a matrix and the distance of its rows or columns

struct Fragment {
    char matrix;
    Shape shape;
    unsigned bytes;
    bool by_columns;
};

static void wmma_move(Warp& w, const Instr& i, Mask active) {
    whole_warp(w, i, active);
    const Fragment& f = *static_cast<const Fragment*>(i.form->details.get());
    const bool stores = i.form->has("store");
    const int where = stores ? 0 : 1, registers = 1 - where;
    const int rows = f.matrix == 'b' ? f.shape.depth : f.shape.rows;
    const int columns = f.matrix == 'a' ? f.shape.depth : f.shape.columns;
    const int parts = f.bytes < 4 ? 4 / (int)f.bytes : 1, distinct = rows * columns / LANES / parts;
    const int bits_of = 8 * (int)f.bytes;
    const Shape& s = f.shape;
    each_element(f.matrix, distinct, parts, s.rows, s.depth, [&](int r, int lane, int e, int row, int column) {
        const int64_t distance = i.count > 2 ? (int32_t)w.in(i, 2)[lane] : f.by_columns ? rows : columns;
        const int64_t at = f.by_columns ? column * distance + row : row * distance + column;
        const uint64_t address = w.address(i, where, lane) + at * f.bytes;
        uint8_t* data = w.machine.access(w, i, lane, address, f.bytes, i.form->space, stores ? WRITES : READS);
        if (stores) {
            const uint64_t code = w.in(i, registers, r)[lane] >> bits_of * e;
            std::memcpy(data, &code, f.bytes);
            return;
        }
        uint64_t code = 0;
        std::memcpy(&code, data, f.bytes);
        for (int copy = r; copy < i.op[registers].count; copy += distinct) {  // f16: registers hold each element twice
            uint64_t& to = w.out(i, registers, copy)[lane];
            to = e ? to | code << bits_of * e : code;
        }
    });
}

static Handler pick_wmma(Form& f) {
    const char matrix = f.has("a") ? 'a' : f.has("b") ? 'b' : 'c';
    const Shape s = shape_of(f);
    if (s.rows != 16 || s.columns != 16 || f.type().bits < 8) return nullptr;
    f.details = std::make_shared<Fragment>(Fragment{matrix, s, f.type().bits / 8, f.has("col")});
    return wmma_move;
}

static const Rows rows_{
    {"mma wmma.mma", pick_mma, WHOLE_WARP},
    {"wmma.load wmma.store", pick_wmma, WHOLE_WARP},
    {"ldmatrix.m8n8.b16", move_matrices<false>, WHOLE_WARP},
    {"stmatrix.m8n8.b16", move_matrices<true>, WHOLE_WARP},
};

}  // namespace tensor
