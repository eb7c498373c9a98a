// Log-likelihood of a token: out = logits[target] - log(sum of exp(logits)) of each row
//
// One thread per row, two passes: correct but slow, because neighbouring threads read addresses a row
// apart.
//   gpt2block kernels log_likelihood --mine my.cu
//
// The launch line may use N, V and block.
// launch: grid=ceil(N / block) block=64
extern "C" __global__ void my_log_likelihood(
    const float* logits,  // (N, V)
    const int* targets,   // (N), 0 to V - 1
    float* out,           // (N)
    int N, int V) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const float* x = logits + (long long)row * V;

    float largest = x[0];
    for (int v = 1; v < V; ++v) largest = fmaxf(largest, x[v]);

    float sum = 0.0f;
    for (int v = 0; v < V; ++v) sum += expf(x[v] - largest);
    out[row] = x[targets[row]] - largest - logf(sum);
}
