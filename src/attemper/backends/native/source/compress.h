// What solving a row needs besides simd.h: lanes packed together, vectors of doubles for sums, and logarithms.
//
//     log(1 + f) = f - f^2 / 2 + f^3 p(f),   sqrt(1/2) <= 1 + f < sqrt(2),   p of degree 7, relative error 8e-9
#pragma once
#include "convert.h"

namespace attemper {

// How many lanes are marked.
ATTEMPER_INLINE int64_t marked(Mask mask) {
#if defined(__AVX512F__)
    return __builtin_popcount(mask);
#elif defined(__AVX2__)
    return __builtin_popcount(unsigned(_mm256_movemask_ps(bits_as_float(mask))));
#else
    int64_t count = 0;
    for (int i = 0; i < LANES; i++) count -= mask[i];
    return count;
#endif
}

ATTEMPER_INLINE Ints load_places(const int32_t* p) {
    Ints v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
ATTEMPER_INLINE void store_places(int32_t* p, Ints v) { std::memcpy(p, &v, sizeof v); }

// The marked lanes, packed together, at `to`, which has room for a whole vector.
ATTEMPER_INLINE void compress(Mask mask, Vec from, float* to) {
    if (marked(mask) == LANES) return store(to, from);
#if defined(__AVX512F__)
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, from));
#else
    for (int i = 0; i < LANES; i++) {
        *to = from[i];
        to -= mask[i];
    }
#endif
}

ATTEMPER_INLINE void compress(Mask mask, Ints from, int32_t* to) {
    if (marked(mask) == LANES) return store_places(to, from);
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, reinterpret_cast<__m512i>(from)));
#else
    for (int i = 0; i < LANES; i++) {
        *to = from[i];
        to -= mask[i];
    }
#endif
}

// Lane number in every lane.
ATTEMPER_INLINE Ints lane_places() {
    Ints v;
    for (int i = 0; i < LANES; i++) v[i] = i;
    return v;
}

ATTEMPER_INLINE Vec keep_where(Mask mask, Vec v) {
#if defined(__AVX512F__)
    return _mm512_maskz_mov_ps(mask, v);
#else
    return bits_as_float(float_as_bits(v) & mask);
#endif
}

// Sums that must not lose digits: eight doubles, a quarter or more of them wider than the machine's registers.
constexpr int DOUBLES = 8;
typedef double Doubles __attribute__((vector_size(DOUBLES * 8)));
typedef float Narrow __attribute__((vector_size(DOUBLES * 4), aligned(4), may_alias));

ATTEMPER_INLINE Doubles load_doubles(const float* p) {
    return __builtin_convertvector(*reinterpret_cast<const Narrow*>(p), Doubles);
}
ATTEMPER_INLINE Doubles splat_double(double x) { return x - Doubles{}; }
ATTEMPER_INLINE double lane_sum(Doubles v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// Sum of `n` floats, in float64.
inline double sum_of(const float* from, int64_t n) {
    Doubles sum = {};
    int64_t j = 0;
    for (; j + DOUBLES <= n; j += DOUBLES) sum += load_doubles(from + j);
    double rest = 0;
    for (; j < n; j++) rest += from[j];
    return lane_sum(sum) + rest;
}

// sum a b of `n` floats, in float64.
inline double dot_of(const float* a, const float* b, int64_t n) {
    Doubles sum = {};
    int64_t j = 0;
    for (; j + DOUBLES <= n; j += DOUBLES) sum += load_doubles(a + j) * load_doubles(b + j);
    double rest = 0;
    for (; j < n; j++) rest += double(a[j]) * b[j];
    return lane_sum(sum) + rest;
}

// log(u + more) of normal u > 0, where `more` is what u lost when it was rounded.
ATTEMPER_INLINE Vec log_with(Vec u, Vec more) {
    const Ints bits = float_as_bits(u), exponent = (bits - 0x3f3504f3) >> 23;
    const Vec shrink = bits_as_float((127 - exponent) << 23);  // 2^-exponent
    const Vec f = (bits_as_float(bits - (exponent << 23)) - 1.0f) + more * shrink;
    const Vec n = __builtin_convertvector(exponent, Vec);
    Vec p = splat(-0.07634377479553223f);
    p = p * f + 0.12761546671390533f;
    p = p * f + -0.13160210847854614f;
    p = p * f + 0.14201761782169342f;
    p = p * f + -0.16623355448246002f;
    p = p * f + 0.20001226663589478f;
    p = p * f + -0.250008225440979f;
    p = p * f + 0.3333333134651184f;
    const Vec square = f * f;
    return n * 0.693147182f + (f + square * (p * f - 0.5f));
}

// Where an iteration only has to find its way: log2 u and 2^y to four digits (relative errors 5e-5, also near u = 1, and
// 1e-4), and 1 / u of normal u to two.
constexpr float ROUGH_LOWEST = -100.0f;  // of y: what is 0 beside 1

ATTEMPER_INLINE Vec rough_log2(Vec u) {
    const Ints bits = float_as_bits(u), exponent = (bits - 0x3f3504f3) >> 23;
    const Vec f = bits_as_float(bits - (exponent << 23)) - 1.0f;
    Vec p = splat(0.2547489106655121f);
    p = p * f + -0.3908917009830475f;
    p = p * f + 0.48530682921409607f;
    p = p * f + -0.7205550074577332f;
    p = p * f + 1.4426462650299072f;
    return p * f + __builtin_convertvector(exponent, Vec);
}

ATTEMPER_INLINE Vec rough_exp2(Vec y) {
    const Vec magic = splat(12582912.0f), t = y + magic, r = y - (t - magic);
    Vec p = splat(0.0550089031457901f);
    p = p * r + 0.2422109693288803f;
    p = p * r + 0.693282961845398f;
    p = p * r + 1.0f;
    return bits_as_float(float_as_bits(p) + (float_as_bits(t) << 23));
}

ATTEMPER_INLINE Vec rough_inverse(Vec u) {
    const Vec r = bits_as_float(0x7ef31000 - float_as_bits(u));
    return r * (2.0f - u * r);
}

// What rounding took of z = a b, where the processor can multiply and add at once; 0 in a portable build. Written as
// a * b - z it is 0 everywhere: the compiler has seen a * b before.
ATTEMPER_INLINE Vec lost_of(Vec a, Vec b, Vec z) {
#if defined(__AVX512F__)
    return _mm512_fmsub_ps(a, b, z);
#elif defined(__AVX2__)
    return _mm256_fmsub_ps(a, b, z);
#else
    (void)a, (void)b, (void)z;
    return Vec{};
#endif
}

// log u of u >= 2^-126; of what is smaller, zero among it, log 2^-126. AVX-512 takes u = 2^n c (1 + r),
// 3/4 <= u / 2^n < 3/2, |r| <= 1/32, with the inverses and logarithms of sixteen c from registers, and a polynomial of
// degree 4 for log(1 + r): error 8e-10 before rounding. Near u = 1, c is 1 and no digit cancels.
ATTEMPER_INLINE Vec log_of(Vec u) {
    u = larger(u, splat(1.17549435e-38f));
#if defined(__AVX512F__)
    const Vec inverses = {1.33333337f,  1.27999997f,  1.23076928f,  1.18518519f,  1.14285719f,  1.10344827f,
                          1.06666672f,  1.03225803f,  1.0f,         0.941176474f, 0.888888896f, 0.842105269f,
                          0.800000012f, 0.761904776f, 0.727272749f, 0.695652187f};
    const Vec logs = {-0.287682116f,  -0.246860057f,  -0.207639396f, -0.169899046f, -0.133531436f, -0.098440066f,
                      -0.0645385757f, -0.0317486674f, 0.0f,          0.0606246181f, 0.117783025f,  0.171850249f,
                      0.223143533f,   0.271933705f,   0.318453699f,  0.362905473f};
    const Ints bits = float_as_bits(u), near = bits + ((1 << 18) - 0x3f400000), n = near & int32_t(0xff800000);
    const __m512i sixteenth = _mm512_srli_epi32(__m512i(near), 19);
    const Vec r = _mm512_fmsub_ps(bits_as_float(bits - n), _mm512_permutexvar_ps(sixteenth, inverses), splat(1.0f));
    const Vec q = (r * -0.250228047f + 0.333504349f) * r - 0.499999940f;
    const Vec whole = __builtin_convertvector(n, Vec) * (0.693147182f / (1 << 23)) +
                      Vec(_mm512_permutexvar_ps(sixteenth, logs));
    return whole + (r * r * q + r);
#else
    return log_with(u, Vec{});
#endif
}

// 1 / u of normal u whose inverse is normal.
ATTEMPER_INLINE Vec inverse_of(Vec u) {
#if defined(__AVX512F__)
    const Vec near = _mm512_rcp14_ps(u), lost = _mm512_fnmadd_ps(u, near, splat(1.0f));
    return _mm512_fmadd_ps(near, lost, near);
#else
    return 1.0f / u;
#endif
}

}  // namespace attemper
