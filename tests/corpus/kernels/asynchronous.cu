// Kernels of asynchronous copies, clusters and wgmma: tests/emulator/test_ptx_async.py. ACROSS is true or false.
#include "lib/sm90_wgmma.cuh"

extern "C" __global__ void copy(const float* from, float* to) {
    __shared__ __align__(16) float s[2][128];
    const unsigned at = shared_address(&s[0][threadIdx.x]);
    const float* mine = from + threadIdx.x;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at), "l"(mine));
    asm volatile("cp.async.commit_group;");
    const unsigned next = shared_address(&s[1][threadIdx.x]);
    const int bytes = threadIdx.x % 2 ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(next), "l"(mine + 128), "r"(bytes));
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncthreads();  // first
    to[threadIdx.x] = s[0][127 - threadIdx.x];
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();  // second
    to[128 + threadIdx.x] = s[1][127 - threadIdx.x];
}

extern "C" __global__ void pipeline(const float* from, float* to, int stages) {
    __shared__ __align__(128) float s[2][64];
    __shared__ Barrier full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) init(full[i], 1), init(empty[i], 2);
        fence_inits();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            for (int k = 0; k < stages; ++k) {
                if (k > 1) wait(empty[k % 2], k / 2 - 1 & 1, "empty");
                arrive_and_expect(full[k % 2], 256);
                load_bytes(s[k % 2], from + 64 * k, 256, full[k % 2]);
            }
        }
    } else if (threadIdx.x < 96) {
        const int i = threadIdx.x - 32;
        float sum = 0;
        for (int k = 0; k < stages; ++k) {
            wait(full[k % 2], k / 2 & 1, "full");
            sum += s[k % 2][63 - i];
            __syncwarp();
            if (threadIdx.x % 32 == 0) arrive(empty[k % 2]);
        }
        to[i] = sum;
    }
}

extern "C" __global__ void boxes(const __grid_constant__ TensorMap from,
                                        const __grid_constant__ TensorMap to, int x, int y) {
    extern __shared__ __align__(1024) float s[];
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        init(full, 1);
        fence_inits();
        arrive_and_expect(full, 8 * 128);
        load_box(s, from, full, x, y, 1);
        wait(full, 0, "full");
        store_box(to, s, x + 1, y + 1, 0);
        end_stores();
        wait_for_reads<0>();
    }
}

extern "C" __global__ void __cluster_dims__(4, 1, 1) ring(float* to) {
    __shared__ float s[32];
    const int rank = rank_in_cluster();
    *in_block_of_cluster(&s[threadIdx.x], (rank + 1) % 4) = blockIdx.x * 100 + threadIdx.x;
    release_to_cluster();
    acquire_from_cluster();
    to[32 * blockIdx.x + threadIdx.x] = s[31 - threadIdx.x];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) late(float* to) {
    __shared__ float s[32];
    const int rank = rank_in_cluster();
    if (threadIdx.x >= 32) return arrive_in_cluster();
    *in_block_of_cluster(&s[threadIdx.x], 1 - rank) = 100 * rank + threadIdx.x;
    release_to_cluster();
    acquire_from_cluster();
    to[32 * rank + threadIdx.x] = s[31 - threadIdx.x];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) everywhere(const float* from, float* to) {
    __shared__ __align__(128) float s[128];
    __shared__ Barrier full;
    const int rank = rank_in_cluster();
    if (threadIdx.x == 0) {
        init(full, 1);
        fence_inits();
        arrive_and_expect(full, 512);
    }
    sync_cluster();
    if (threadIdx.x == 0) load_bytes_for(3, s + 64 * rank, from + 64 * rank, 256, full);
    wait<true>(full, 0, "full");
    for (int i = threadIdx.x; i < 128; i += 32) to[128 * blockIdx.x + i] = s[i];
    sync_cluster();
}

extern "C" __global__ void product(const unsigned short* a, const unsigned short* b, float* c) {
    __shared__ __align__(1024) unsigned char s[2][8192];
    for (int i = threadIdx.x; i < 4096; i += 128) {
        *(unsigned short*)(s[0] + swizzled(2 * i)) = a[i];
        *(unsigned short*)(s[1] + swizzled(2 * i)) = b[i];
    }
    show_writes();
    __syncthreads();
    float sums[32];
    for (int i = 0; i < 32; ++i) sums[i] = 1;
    fence_sums();
    for (int k = 0; k < 4; ++k) {
        multiply<ACROSS>(sums, further(matrix_at(s[0]), 32 * k),
                         further(matrix_at(s[1]), (ACROSS ? 2048 : 32) * k), true);
    }
    end_products();
    wait_for_products<0>();
    // here
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int j = 0; j < 32; ++j) {
        c[(row + 8 * (j / 2 % 2)) * 64 + column + 8 * (j / 4) + j % 2] = sums[j];
    }
}
