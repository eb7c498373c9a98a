// A product by WMMA of the types TYPE and LAYOUT: tests/emulator/test_ptx_tensor.py.
#include <mma.h>
using namespace nvcuda::wmma;
extern "C" __global__ void product(const half* a, const half* b, TYPE* c, int n) {
    fragment<matrix_a, 16, 16, 16, half, row_major> left;
    fragment<matrix_b, 16, 16, 16, half, LAYOUT> right;
    fragment<accumulator, 16, 16, 16, TYPE> sum;
    fill_fragment(sum, TYPE(1));
    for (int k = 0; k < n; k += 16) {
        load_matrix_sync(left, a + k, n);
        load_matrix_sync(right, b + (ROWS ? 16 * k : k), ROWS ? 16 : n);
        mma_sync(sum, left, right, sum);
    }
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] = sum.x[i] * TYPE(2);
    store_matrix_sync(c, sum, 16, mem_row_major);
}
