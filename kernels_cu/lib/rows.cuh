// Rows kept in registers: THREADS neighbouring threads share a row and load it WIDTH elements at a time.
//
// A row is divided into vectors of WIDTH elements. Thread v % THREADS of a row loads vector v, so neighbouring threads
// load neighbouring vectors. A block consists of whole warps:
//
//   row   [ 0 1 2 ... 31 | 0 1 2 ... 31 | ... ]   thread of each vector, for THREADS = 32; VECTORS groups of THREADS
//                                                 vectors, of which the last group may be incomplete
//
// VECTORS = 0: rows do not fit in the registers, and each pass over a row reads the row again.
#pragma once
#include "lib/common.cuh"
#include "lib/storage.cuh"

template <int THREADS, int ROWS>
struct Team {  // the threads that share a row; a block has ROWS teams
    static constexpr int LANES = THREADS < 32 ? THREADS : 32;  // lanes of a warp that belong to one team
    static constexpr int WARPS = THREADS / LANES;
    static constexpr int SUMS = WARPS > 16 ? 32 : WARPS > 8 ? 16 : WARPS > 4 ? 8 : WARPS > 2 ? 4 : 2;  // SUMS >= WARPS
    static_assert((LANES & (LANES - 1)) == 0 && THREADS % LANES == 0, "threads: 1, 2, 4, 8, 16 or a multiple of 32");
    static_assert(THREADS * ROWS % 32 == 0 && THREADS * ROWS <= 1024, "a block is whole warps, 1024 threads at most");

    // Returns the sum of `value` over the team, to all threads of the team. scratch: one float per warp of the block;
    // each call needs a separate array. Every thread of the block must call this function, even without a row.
    static __device__ float sum(float value, float* scratch) {
        value = lanes_sum<LANES>(value);
        if constexpr (WARPS > 1) {
            const int part = threadIdx.x % SUMS, row = ROWS > 1 ? threadIdx.x / THREADS : 0;
            if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
            __syncthreads();
            value = lanes_sum<SUMS>(part < WARPS ? scratch[row * WARPS + part] : 0.0f);
        }
        return value;
    }
};

// A thread's part of a row: vectors of WIDTH elements at offsets 0, STEP, 2 STEP, ... from x, the address of the
// thread's first element. Only offsets less than `left` are used. each(use) calls use(offset, vector) for every vector.
// WHOLE: all vectors lie inside the row, so bounds are not checked.
template <int WIDTH, int STEP, int VECTORS, bool WHOLE = false>
struct Part {  // kept in registers; the constructor issues all loads before a value is used
    float v[VECTORS][WIDTH];
    const int left;

    __device__ Part(const T* x, int left) : left(left) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (inside(i)) Vec<T, WIDTH>::load_once(x + i * STEP).unpack(v[i]);  // x is read once; the cache is for out
        }
    }

    template <typename Use>
    __device__ void each(Use use) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            if (inside(i)) use(i * STEP, v[i]);
        }
    }

    // Only the last vector can lie beyond the end of the row, because VECTORS is the smallest number that covers the
    // row.
    __device__ bool inside(int i) const { return WHOLE || i < VECTORS - 1 || i * STEP < left; }
};

template <int WIDTH, int STEP, bool WHOLE>
struct Part<WIDTH, STEP, 0, WHOLE> {  // each call of each() reads the row again
    const T* x;
    const int left;

    __device__ Part(const T* x, int left) : x(x), left(left) {}

    template <typename Use>
    __device__ void each(Use use) {
        float v[WIDTH];
#pragma unroll 2  // a higher factor needs more registers than 1024 threads have
        for (int c = 0; c < left; c += STEP) {
            Vec<T, WIDTH>::load(x + c).unpack(v);
            use(c, v);
        }
    }
};
