// RoPE's rotation of pair k of a head with D channels. The angle is position / theta^(2 k / D) radians, or the caller
// passes it as a double.
//
// Near 100,000 radians, neighbouring floats are about a hundredth of a radian apart, and the rounding of the frequency
// theta^(-2 k / D) to float adds an error of the same size. Therefore the angle and the frequency are each the sum of
// two floats (high part and low part). The angle then has a relative error of about 2^-27.
//
//   frequency   2^(-k step), step = 2 log2(theta) / D: a power of two times a polynomial of the fraction of k step
//   angle       position / pi * frequency, in half turns. Whole quarter turns are subtracted exactly; the remainder, at
//               most an eighth of a turn plus the angle's low part, is the argument of polynomials for sine and cosine
//
// Positions are integers below 2^20. For such positions, the low part of the angle is at most a 128th of a turn. The
// polynomials are minimax fits with an error of less than half the rounding error of a float.
#pragma once

struct Pair {  // represents high + low; |low| <= half a unit in the last place of high
    float high, low;
};

struct Rotation {
    float cos, sin;
};

// Returns the product of a and b. __fmul_rn keeps the compiler from fusing the product with the next operation, which
// needs the rounded product.
__device__ __forceinline__ Pair times(float a, Pair b) {
    const float high = __fmul_rn(a, b.high);
    return {high, fmaf(a, b.low, fmaf(a, b.high, -high))};
}

__device__ __forceinline__ Pair frequency(int k, float step, float step_low) {
    const Pair exponent = times((float)k, {step, step_low});
    const float whole = rintf(exponent.high), f = whole - exponent.high;  // result: 2^(f - low) / 2^whole, |f| <= 1/2
    const Pair ln2 = {0.69314718f, -1.9046542e-9f};
    Pair z = times(f, ln2);  // 2^f = 1 + z + f^2 (...)
    z.low = fmaf(-exponent.low, ln2.high, z.low);
    float tail = fmaf(f, 1.5312004e-5f, 1.54669388e-4f);
    tail = fmaf(f, tail, 1.33334478e-3f);
    tail = fmaf(f, tail, 9.61803756e-3f);
    tail = fmaf(f, tail, 5.55041093e-2f);
    tail = fmaf(f, tail, 2.40226511e-1f);
    const float sum = 1.0f + z.high, rest = (1.0f - sum) + z.high + fmaf(f * f, tail, z.low);
    const float high = sum + rest, low = (sum - high) + rest;
    const float scale = __int_as_float((127 - (int)whole) << 23);
    return {high * scale, low * scale};
}

// Returns position / pi. Times the frequency of a pair, it is the pair's angle in half turns.
__device__ __forceinline__ Pair half_turns(int position) {
    return times((float)position, {0.31830987f, 1.2841276e-8f});
}

// Returns the rotation by q quarter turns plus r half turns; |r| is at most slightly above 1/4.
__device__ __forceinline__ Rotation rotation(int q, float r) {
    const float z = r * r;
    const float s = fmaf(r * z, fmaf(z, fmaf(z, -0.58819857f, 2.5497116f), -5.16770751f), 3.14159265f * r);
    float c = fmaf(z, fmaf(z, 0.2309187f, -1.33500128f), 4.05870601f);
    c = fmaf(z, fmaf(z, c, -4.93480216f), 1.0f);
    const float sin = q & 1 ? c : s, cos = q & 1 ? s : c;
    return {(q + 1) & 2 ? -cos : cos, q & 2 ? -sin : sin};
}

__device__ __forceinline__ Rotation rotation(Pair half_turns, Pair frequency) {
    Pair angle = times(half_turns.high, frequency);
    angle.low = fmaf(half_turns.low, frequency.high, angle.low);
    const float quarters = rintf(2.0f * angle.high);
    return rotation((int)quarters, fmaf(-0.5f, quarters, angle.high) + angle.low);
}

// Returns the rotation by an angle of any size, in radians. The reduction of the angle uses double arithmetic, a few
// operations per pair.
__device__ __forceinline__ Rotation rotation(double radians) {
    const double half_turns = radians * 0.31830988618379067154, quarters = rint(2.0 * half_turns);
    const double within = fma(-4.0, rint(0.25 * quarters), quarters);  // modulo a whole turn (4 quarters)
    return rotation((int)within, (float)fma(-0.5, quarters, half_turns));
}

// Returns the rotation at a position, for a frequency in radians per position. If ROPE_FACTOR is defined, as for some
// models, rotated pairs are also multiplied by ROPE_FACTOR, except pairs with frequency 0.
__device__ __forceinline__ Rotation rotation_at(double position, double frequency) {
    Rotation by = rotation(position * frequency);
#ifdef ROPE_FACTOR
    if (frequency != 0.0) by.cos *= ROPE_FACTOR, by.sin *= ROPE_FACTOR;
#endif
    return by;
}

// Returns the factor of a query at a position: 1 + ROPE_GROWTH log(1 + floor(position / ROPE_SPAN)) with ROPE_GROWTH,
// else 1. Both numbers are constants of a model.
__device__ __forceinline__ float query_factor(int position) {
#ifdef ROPE_GROWTH
    return fmaf(ROPE_GROWTH, logf(1.0f + position / ROPE_SPAN), 1.0f);
#else
    return 1.0f;
#endif
}

// Returns a rotation that also multiplies pairs by `factor`.
__device__ __forceinline__ Rotation grown(const Rotation& by, float factor) {
    return {by.cos * factor, by.sin * factor};
}

// Returns the address of the frequencies of sequence b. `frequencies` is (B, pairs). Padding rows (b = -1) use the
// frequencies of sequence 0.
__device__ __forceinline__ const double* frequencies_of(int b, const double* frequencies, int B, int pairs) {
    return frequencies + (long long)(b >= 0 && b < B ? b : 0) * pairs;
}

// Rotates the pair (real, imaginary). Explicit roundings give all kernels the same bits.
__device__ __forceinline__ void turn(const Rotation& by, float& real, float& imaginary) {
    const float r = real, i = imaginary;
    real = fmaf(r, by.cos, -__fmul_rn(i, by.sin));
    imaginary = fmaf(r, by.sin, __fmul_rn(i, by.cos));
}
