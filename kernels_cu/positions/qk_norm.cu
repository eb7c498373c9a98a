// QK-Norm, then RoPE. QK-Norm is RMSNorm of each head of q and k, with one gamma for all heads of q and another for all
// heads of k. With QN_TEAMS, it is instead one RMSNorm over all heads of q and one over all heads of k. With QN_VALUES,
// each head of v has an RMSNorm without gamma. `normed` and `heads` are n_head for rows of queries.
//
//   n = x s gamma,   s = 1 / sqrt(mean(x^2) + eps)     over the D channels of a head, or over all channels of q or of k
//   (r, i) -> (r cos a - i sin a, r sin a + i cos a)   for channels p and p + D / 2, a = position[n] frequencies[p]
//
//   qkv (N, heads D), heads = n_head + 2 n_kv_head     q (N, n_head D)     k, v (B, n_ctx, n_kv_head D) of type KV
//
//   qk_norm: the norm alone, for rows [Q | K | V]; V is copied
//   qk_norm_rope: qk_norm and rope_qkv in one kernel, for prompts
//   qk_norm_append: decoding: qk_norm and rope_append in one kernel; K and V are written to the kv_cache in its dtype
//
// A team of QN_LANES neighbouring lanes processes a head of a row. A lane holds vectors of both halves of the head in
// registers. Shuffles add the squares in the order of lib/head_norm.cuh. For prompts, a team processes QN_HEADS heads
// of a row, which share rotations; the loads of all these heads are issued together. Row n belongs to sequence row[n],
// at position[n]; K and V of rows outside the cache are not stored. Arithmetic is float; angles are computed as in
// positions/rope_qkv.cu.
//
// With QN_TEAMS, a block processes a row in two passes. The heads of the row are distributed over the teams. In the
// first pass, each team adds the squares of its heads, and the block adds the sums of the teams. In the second pass,
// the teams read their heads again, and scale and rotate them.
//
// grid (N, ceil(moved / (blockDim.y * QN_HEADS)), B), or (N, 1, B) with QN_TEAMS. B is the number of sequences, `moved`
// the number of heads of a row that are written. Block (QN_LANES, teams): whole warps.
#include "lib/common.cuh"
#include "lib/fresh.cuh"
#include "lib/overlap.cuh"
#include "lib/head_norm.cuh"
#include "lib/rotation.cuh"

#ifndef QN_D
#define QN_D 128
#endif
#ifndef QN_WIDTH  // elements per load: a power of two that divides D / 2; arrays are aligned to a load
#define QN_WIDTH 4
#endif
#ifndef QN_LANES  // lanes per team: a power of two up to 32, at least half the number of vectors in half a head
#define QN_LANES 16
#endif
#ifndef QN_HEADS  // heads per team
#define QN_HEADS 1
#endif
#ifndef QN_TEAMS  // teams per block, for norms over all heads of q and all heads of k; 0: a norm per head
#define QN_TEAMS 0
#endif
#ifndef QN_VALUES  // 1: heads of v are normalized, without gamma
#define QN_VALUES 0
#endif
static_assert(!QN_TEAMS || !QN_VALUES, "norms over all heads leave v as it is");

constexpr int HALF = QN_D / 2, VECTORS = HALF / QN_WIDTH;
constexpr int PIECES = next_power((VECTORS + QN_LANES - 1) / QN_LANES);  // vectors of half a head per lane
static_assert(QN_D % 2 == 0 && HALF % QN_WIDTH == 0, "half a head is whole vectors");

// Calls use(piece, channel) for each of the lane's vectors of half a head.
template <typename Use>
__device__ __forceinline__ void each(Use use) {
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const int vector = p * QN_LANES + threadIdx.x;
        if (vector < VECTORS) use(p, vector * QN_WIDTH);
    }
}

// The channels of a head that a lane holds, in both halves of the head.
struct Head {
    float first[PIECES][QN_WIDTH] = {}, second[PIECES][QN_WIDTH] = {};

    template <typename E>
    __device__ __forceinline__ void load(const E* from) {
        each([&](int p, int channel) {
            load_fresh<E, QN_WIDTH>(from + channel).unpack(first[p]);
            load_fresh<E, QN_WIDTH>(from + HALF + channel).unpack(second[p]);
        });
    }

    // Returns the head's sum of squares. All lanes of a warp must call this function.
    __device__ __forceinline__ float square() const {
        float squares[PIECES];
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            float pairs[QN_WIDTH];
#pragma unroll
            for (int e = 0; e < QN_WIDTH; ++e) pairs[e] = head_square(first[p][e], second[p][e]);
            squares[p] = neighbours_sum<QN_LANES>(neighbours_sum(pairs));
        }
        return neighbours_sum(squares);
    }

    __device__ __forceinline__ void scale(float factor, const Head& gamma) {
        each([&](int p, int) {
#pragma unroll
            for (int e = 0; e < QN_WIDTH; ++e) {
                first[p][e] = head_normed(first[p][e], factor, gamma.first[p][e]);
                second[p][e] = head_normed(second[p][e], factor, gamma.second[p][e]);
            }
        });
    }

    __device__ __forceinline__ void scale(float factor) {
        each([&](int p, int) {
#pragma unroll
            for (int e = 0; e < QN_WIDTH; ++e) {
                first[p][e] = __fmul_rn(first[p][e], factor);
                second[p][e] = __fmul_rn(second[p][e], factor);
            }
        });
    }

    template <typename E>
    __device__ __forceinline__ void store(E* to) const {
        each([&](int p, int channel) {
            Vec<E, QN_WIDTH>::store(to + channel, first[p]);
            Vec<E, QN_WIDTH>::store(to + HALF + channel, second[p]);
        });
    }
};

// The rotations of a lane's pairs of channels for a position.
struct Turn {
    Rotation by[PIECES][QN_WIDTH];

    __device__ __forceinline__ Turn(double position, const double* frequencies) {
        each([&](int p, int channel) {
#pragma unroll
            for (int e = 0; e < QN_WIDTH; ++e) by[p][e] = rotation(position * frequencies[channel + e]);
        });
    }

    __device__ __forceinline__ void operator()(Head& head) const {
        each([&](int p, int) {
#pragma unroll
            for (int e = 0; e < QN_WIDTH; ++e) turn(by[p][e], head.first[p][e], head.second[p][e]);
        });
    }
};

struct NoTurn {
    __device__ __forceinline__ void operator()(Head&) const {}
};

// The first head of a team, and the gamma of this head, which is loaded before the previous kernel has ended.
template <typename G>
struct Team {
    const G* const gamma_q;
    const G* const gamma_k;
    const int n_head, normed, own = (blockIdx.y * blockDim.y + threadIdx.y) * QN_HEADS;
    Head gamma;

    // normed: number of heads of Q and K together.
    __device__ __forceinline__ Team(const G* gamma_q, const G* gamma_k, int n_head, int normed)
        : gamma_q(gamma_q), gamma_k(gamma_k), n_head(n_head), normed(normed) {
        if constexpr (QN_TEAMS == 0) load_gamma(own);
        let_next_start();
        wait_for_previous();
    }

    __device__ __forceinline__ void load_gamma(int head) {
        const G* const first = head < n_head ? gamma_q : gamma_k;
        const G* const from = QN_TEAMS ? first + (head < n_head ? head : head - n_head) * QN_D : first;
        each([&](int p, int channel) {
            load(from + channel, gamma.first[p]);
            load(from + HALF + channel, gamma.second[p]);
        });
    }

    static __device__ __forceinline__ void load(const G* from, float (&v)[QN_WIDTH]) {
        if constexpr (sizeof(G) == sizeof(float)) load_parameters<QN_WIDTH>(from).unpack(v);
        else Vec<G, QN_WIDTH>::load(from).unpack(v);
    }

    // Calls store(h, head) for each of the team's heads of a row, except heads from `moved` on. Heads of q and k are
    // normalised, and rotated by the result of turned(). All threads of a block must call this function.
    template <typename E, typename Turned, typename Store>
    __device__ __forceinline__ void run(const E* row, int moved, float eps, Turned turned, Store store) {
        if constexpr (QN_TEAMS > 0) of_rows(row, moved, eps, turned, store);
        else of_heads(row, moved, eps, turned, store);
    }

    template <typename E, typename Turned, typename Store>
    __device__ __forceinline__ void of_rows(const E* row, int moved, float eps, Turned turned, Store store) {
        __shared__ float squares[2][QN_TEAMS > 0 ? QN_TEAMS : 1];  // for q and k
        float of_q = 0.0f, of_k = 0.0f;
        for (int first = 0; first < normed; first += QN_TEAMS) {
            const int h = first + threadIdx.y;
            Head head;
            if (h < normed) head.load(row + (long long)h * QN_D);
            (h < n_head ? of_q : of_k) += head.square();
        }
        if (threadIdx.x == 0) squares[0][threadIdx.y] = of_q, squares[1][threadIdx.y] = of_k;
        __syncthreads();
        of_q = of_k = 0.0f;
        for (int team = 0; team < QN_TEAMS; ++team) of_q += squares[0][team], of_k += squares[1][team];
        const float q_factor = rsqrtf(of_q / (n_head * QN_D) + eps);
        const float k_factor = rsqrtf(of_k / ((normed - n_head) * QN_D) + eps);
        const auto by = turned();
        for (int h = threadIdx.y; h < moved; h += QN_TEAMS) {
            Head head;
            head.load(row + (long long)h * QN_D);
            if (h >= normed) {
                store(h, head);
                continue;
            }
            load_gamma(h);
            head.scale(h < n_head ? q_factor : k_factor, gamma);
            by(head);
            store(h, head);
        }
    }

    template <typename E, typename Turned, typename Store>
    __device__ __forceinline__ void of_heads(const E* row, int moved, float eps, Turned turned, Store store) {
        Head heads[QN_HEADS];
#pragma unroll
        for (int i = 0; i < QN_HEADS; ++i) {
            if (own + i < moved) heads[i].load(row + (long long)(own + i) * QN_D);
        }
        const auto by = turned();
#pragma unroll
        for (int i = 0; i < QN_HEADS; ++i) {
            const int h = own + i;
            const float factor = head_factor<QN_D>(heads[i].square(), eps);
            if (h >= moved) continue;
            if (h < normed) {
                if (i > 0 && h == n_head) load_gamma(h);
                heads[i].scale(factor, gamma);
                by(heads[i]);
            } else if (QN_VALUES) {
                heads[i].scale(factor);
            }
            store(h, heads[i]);
        }
    }
};

// Launched by operation (variant): qk_norm (heads)
extern "C" __global__ void qk_norm(
    const T* qkv,                   // (N, heads D)
    const T* __restrict__ gamma_q,  // (D), or (n_head D) with QN_TEAMS
    const T* __restrict__ gamma_k,  // (D), or (n_kv_head D) with QN_TEAMS
    T* out,                         // (N, heads D), or qkv: `moved` excludes V, which stays in place, without QN_VALUES
    int n_head,
    int normed,                     // number of heads of Q and K together
    int moved,                      // heads that are written: all heads, or only the normed ones
    int heads,                      // heads per row
    float eps) {
    Team<T> team(gamma_q, gamma_k, n_head, normed);
    const long long row = (long long)blockIdx.x * heads * QN_D;
    team.run(qkv + row, moved, eps, [] { return NoTurn(); },
             [&](int h, const Head& head) { head.store(out + row + (long long)h * QN_D); });
}

// Launched by operation (variant): qk_norm_rope (rope)
extern "C" __global__ void qk_norm_rope(
    const T* qkv,                       // (B, N, heads D)
    const int* positions,               // (N)
    const double* frequencies,          // (D / 2): radians per position
    const float* __restrict__ gamma_q,  // (D), or (n_head D) with QN_TEAMS
    const float* __restrict__ gamma_k,  // (D), or (n_kv_head D) with QN_TEAMS
    T* out,                             // (B, N, heads D), or qkv: as in qk_norm
    int n_head, int normed, int moved, int heads, float eps) {
    Team<float> team(gamma_q, gamma_k, n_head, normed);
    const double position = __ldcg(positions + blockIdx.x);
    const long long row = ((long long)blockIdx.z * gridDim.x + blockIdx.x) * heads * QN_D;
    team.run(qkv + row, moved, eps, [&] { return Turn(position, frequencies); },
             [&](int h, const Head& head) { head.store(out + row + (long long)h * QN_D); });
}

// Launched by operation (variant): qk_norm_append (append)
extern "C" __global__ void qk_norm_append(
    const float* qkv,                   // (N, heads D)
    const int* row,                     // (N)
    const int* position,                // (N)
    const double* frequencies,          // (D / 2): radians per position
    const float* __restrict__ gamma_q,  // (D), or (n_head D) with QN_TEAMS
    const float* __restrict__ gamma_k,  // (D), or (n_kv_head D) with QN_TEAMS
    KV* k,                              // (B, n_ctx, n_kv_head D)
    KV* v,                              // (B, n_ctx, n_kv_head D)
    float* q,                           // (N, n_head D)
    int n_head, int n_kv_head, int B, int n_ctx, float eps) {
    const int normed = n_head + n_kv_head, heads = normed + n_kv_head, n = blockIdx.x;
    Team<float> team(gamma_q, gamma_k, n_head, normed);
    const int b = __ldcg(row + n), at = __ldcg(position + n);
    const bool cached = b >= 0 && b < B && at >= 0 && at < n_ctx;
    const long long place = ((long long)b * n_ctx + at) * n_kv_head;
    const auto store = [&](int h, const Head& head) {
        if (h < n_head) head.store(q + ((long long)n * n_head + h) * QN_D);
        else if (cached && h < normed) head.store(k + (place + h - n_head) * QN_D);
        else if (cached) head.store(v + (place + h - normed) * QN_D);
    };
    team.run(qkv + (long long)n * heads * QN_D, heads, eps, [&] { return Turn(at, frequencies); }, store);
}
