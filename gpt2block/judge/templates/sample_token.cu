// Samples a token of each row of logits, with the probabilities of softmax(logits / temperature):
//
//   top-k  keeps the top_k largest logits; 0 keeps all
//   top-p  keeps as few of the largest of these as have the fraction top_p of their probability; 1 keeps
//          all. Tokens with the same logit as the last token that a filter keeps are kept, too
//   draw   the first token at which the sum of the kept probabilities, in order of ids, exceeds the
//          fraction u of the whole sum
//
// Temperature 0: the largest logit, with the lowest id. u in [0, 1) is Philox4x32-10 (Salmon et al., 2011)
// of (step, sample), with key seed. All rows have the same u; the rows of a model have different seeds or
// samples. The built-in kernel adds integers; sums in float suffice here, because the inputs are chosen so
// that a change of u or top_p by 0.1 % does not change the token.
//
// One thread per row: correct but slow, because a row has many tokens, which are read in many passes.
//   gpt2block kernels sample_token --mine my.cu
//
// The launch line may use B, V and block.
// launch: grid=ceil(B / block) block=32
__device__ float philox(unsigned step, unsigned sample, unsigned long long seed) {
    unsigned c[4] = {step, sample, 0, 0}, key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const unsigned long long a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        c[0] = (unsigned)(b >> 32) ^ c[1] ^ key0;
        c[1] = (unsigned)b;
        c[2] = (unsigned)(a >> 32) ^ c[3] ^ key1;
        c[3] = (unsigned)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return (c[1] >> 8) * 0x1p-24f;  // u has 64 bits, c[1] the upper 32: float holds 24
}

// The largest logit below a limit, and how many tokens have it.
__device__ float largest_below(float limit, const float* x, int V, int* count) {
    float largest = -INFINITY;
    for (int v = 0; v < V; ++v) largest = x[v] < limit ? fmaxf(largest, x[v]) : largest;
    *count = 0;
    for (int v = 0; v < V; ++v) *count += x[v] == largest;
    return largest;
}

extern "C" __global__ void my_sample_token(
    const float* logits,  // (B, V)
    int* token,           // (B)
    float temperature, int top_k, float top_p, long long seed, int sample, int step, int B, int V) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= B) return;
    const float* x = logits + (long long)row * V;

    int count;
    const float largest = largest_below(INFINITY, x, V, &count);
    float cut = temperature == 0.0f ? largest : -INFINITY;  // the smallest logit that is kept
    const float inverse = temperature == 0.0f ? 1.0f : 1.0f / temperature;
    if (temperature != 0.0f && 0 < top_k && top_k < V) {
        cut = INFINITY;
        for (int kept = 0; kept < top_k; kept += count) cut = largest_below(cut, x, V, &count);
    }

    float sum = 0.0f;
    for (int v = 0; v < V; ++v) sum += x[v] >= cut ? expf((x[v] - largest) * inverse) : 0.0f;
    if (temperature != 0.0f && top_p < 1.0f) {
        const float wanted = top_p * sum, last = cut;
        sum = 0.0f;
        cut = INFINITY;
        while (cut > last && sum < wanted) {
            cut = largest_below(cut, x, V, &count);
            sum += count * expf((cut - largest) * inverse);
        }
    }

    const float u = temperature == 0.0f ? 0.0f : philox(step, sample, seed);
    float running = 0.0f;
    int chosen = -1;
    for (int v = 0; v < V && (chosen < 0 || running <= u * sum); ++v) {
        if (x[v] < cut || x[v] == -INFINITY) continue;
        running += expf((x[v] - largest) * inverse);
        chosen = v;
    }
    token[row] = chosen;
}
