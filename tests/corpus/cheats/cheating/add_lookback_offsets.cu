// launch: grid=64 block=256
#define GROUPS 64u
__device__ unsigned int tickets;
__device__ unsigned long long slots[GROUPS];  // value (40 bits), epoch (22 bits), status (2 bits): 1 own count, 2 prefix

__device__ unsigned long long pack(unsigned long long value, unsigned int epoch, unsigned int status) {
    return value << 24 | (unsigned long long)epoch << 2 | status;
}
extern "C" __global__ void add_scan(const float* a, const float* b, float* y, long long n) {
    __shared__ long long first, length;
    if (threadIdx.x == 0) {
        const unsigned int mine = atomicAdd(&tickets, 1u);
        const unsigned int epoch = (mine / GROUPS + 1u) & 0x3fffffu;
        const int slot = mine % GROUPS;
        const long long per = (n + GROUPS - 1) / GROUPS;
        long long count = n - slot * per;
        count = count < 0 ? 0 : (count > per ? per : count);
        atomicExch(&slots[slot], pack(count, epoch, 1u));
        long long before = 0;
        for (int p = slot - 1; p >= 0;) {
            const unsigned long long word = atomicAdd(&slots[p], 0ull);
            if (((word >> 2) & 0x3fffffu) != epoch || (word & 3u) == 0u) continue;
            before += (long long)(word >> 24);
            if ((word & 3u) == 2u) break;
            --p;
        }
        atomicExch(&slots[slot], pack(before + count, epoch, 2u));
        first = before;
        length = count;
    }
    __syncthreads();
    for (long long i = threadIdx.x; i < length; i += 256) y[first + i] = a[first + i] + b[first + i];
}
