// Sets the state of decoding: arrays (B) of slots, and arrays (M) of the rows of a step.
//
//   begin_slots: sets sampling parameters, position and step of slots whose sequences begin
//   place_rows: sets token and position of a step's rows from the last token, the position and the draft tokens of
//       their slots
//
// grid (ceil(N / blockDim.x)) for N sequences or rows; block (any)
#include "lib/drafts.cuh"

// The numbers of N sequences in one array: N numbers of 64 bits, then N numbers of 32 bits for each further argument,
// in order.
struct Given {
    const int* numbers;
    int N;

    __device__ __forceinline__ long long wide(int i) const {
        return reinterpret_cast<const long long*>(numbers)[i];
    }
    __device__ __forceinline__ int integer(int field, int i) const { return numbers[(2 + field) * N + i]; }
    __device__ __forceinline__ float real(int field, int i) const { return __int_as_float(integer(field, i)); }
};

// Launched by operation (variant): place_rows (slots)
extern "C" __global__ void begin_slots(
    const int* numbers,         // (11 N): 64-bit seeds; slots; values for the arguments temperature to step
    long long* seed,            // (B), as all arrays after it
    float* temperature,
    float* top_p,
    float* min_p,
    float* repetition_penalty,
    int* top_k,
    int* sample,
    int* position,
    int* step,
    int N, int B) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    const Given given = {numbers, N};
    const int slot = given.integer(0, i);
    if (slot < 0 || slot >= B) return;
    seed[slot] = given.wide(i);
    temperature[slot] = given.real(1, i);
    top_p[slot] = given.real(2, i);
    min_p[slot] = given.real(3, i);
    repetition_penalty[slot] = given.real(4, i);
    top_k[slot] = given.integer(5, i);
    sample[slot] = given.integer(6, i);
    position[slot] = given.integer(7, i);
    step[slot] = given.integer(8, i);
}

// Launched by operation (variant): place_rows (slots)
extern "C" __global__ void place_rows(
    const int* row,       // (M): slot of each row; a row with a slot outside 0 ... B - 1 is not changed
    const int* token,     // (B)
    const int* position,  // (B)
    const int* draft,     // (B, K); or null: no draft tokens, a row computes its slot's last token
    const int* left,      // (B): tokens that may still be sampled
    int* of_rows,         // (M): token of each row
    int* at,              // (M): position of each row
    int together,         // rows per slot
    int M, int B, int K) {
    const int m = blockIdx.x * blockDim.x + threadIdx.x;
    if (m >= M) return;
    const int slot = row[m], i = draft ? m % together : 0;
    if (slot < 0 || slot >= B) return;
    of_rows[m] = i ? draft[(long long)slot * K + i - 1] : token[slot];
    at[m] = draft ? position_of(i, of_rows[m], position[slot], left[slot]) : position[slot];
}
