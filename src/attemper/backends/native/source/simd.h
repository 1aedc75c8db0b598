// Vectors of floats through the compiler's vector extensions, as wide as the build's registers, and the functions of
// them that attention needs. One source for AVX-512, AVX2 and portable builds: only LANES and ROWS differ.
//
//     exp(d) = 2^n p(r),  n = round(d / log 2),  r = d - n log 2,  p of degree 6, relative error 4e-9
//
// before rounding; the float nearest to log 2 adds 2e-9 |n| to that. AVX-512 rounds n to parts of 32, takes 2^(n mod 1)
// from two registers, and has p of degree 2, 5e-8, as often above as below. The polynomials were fitted for this file
// (of degree 6: weighted least squares on Chebyshev nodes). What is below EXP_LOWEST is exactly 0, so that no
// exponential is a denormal number, which not every processor keeps.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace attemper {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 14;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
#define ATTEMPER_INLINE inline __attribute__((always_inline))
#define ATTEMPER_APART inline __attribute__((noinline))  // it has all registers for itself

constexpr int PANEL = 2 * LANES;  // columns of a register tile: ROWS x 2 accumulators, 2 loads and a broadcast
// Whether a product takes the rows of a tile in two parts. A Zen 4 keeps multiplying while it stores 14 vectors of 64
// bytes; with 28 it stops and waits. The pieces of a part add up in registers, too. Measured on a Zen 4 alone: Zen 5 and
// Intel's Cooper Lake take this library and were not. A product of seven rows has 11 loads to 14 multiply-adds.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool SPLIT_TILES = true;
#define ATTEMPER_PART_OF_TILE ATTEMPER_APART  // both in one function: 1% slower
#else
constexpr bool SPLIT_TILES = false;
#define ATTEMPER_PART_OF_TILE inline
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));  // sums of exponents, which wrap where a row is spoiled
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

ATTEMPER_INLINE Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
ATTEMPER_INLINE void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }
ATTEMPER_INLINE Vec splat(float x) { return x - Vec{}; }  // x - 0 is x, also for -0
ATTEMPER_INLINE Vec bits_as_float(Ints i) { return reinterpret_cast<Vec>(i); }
ATTEMPER_INLINE Ints float_as_bits(Vec v) { return reinterpret_cast<Ints>(v); }

// The larger of each lane; the second operand where one is NaN.
ATTEMPER_INLINE Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// The smaller, likewise.
ATTEMPER_INLINE Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
    return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
    return _mm256_min_ps(a, b);
#else
    return a < b ? a : b;
#endif
}

ATTEMPER_INLINE Vec magnitude(Vec v) { return bits_as_float(float_as_bits(v) & 0x7fffffff); }

ATTEMPER_INLINE Vec lane_numbers() {
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = float(i);
    return v;
}

// Sum of the lanes, as a tree of fixed shape.
ATTEMPER_INLINE float lane_sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float part[LANES];
    std::memcpy(part, &v, sizeof v);
#pragma GCC unroll 8
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
#endif
}

typedef float Four __attribute__((vector_size(16)));

// Sums of the lanes of four vectors.
ATTEMPER_INLINE Four lane_sums(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));  // a b a b in each quarter
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));  // a b c d
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    return Four{lane_sum(a), lane_sum(b), lane_sum(c), lane_sum(d)};
#endif
}

ATTEMPER_INLINE float lane_max(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(v);
#else
    float part[LANES];
    std::memcpy(part, &v, sizeof v);
#pragma GCC unroll 8
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
#endif
}

constexpr float EXP_LOWEST = -87.0f;

constexpr float VANISHED = -88.0f;  // a distance whose exp is 0, finite so that 0 times it is 0

// Which lanes of two vectors compare so; false where one is NaN. What follows takes the lanes that are marked.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
ATTEMPER_INLINE Mask below(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
ATTEMPER_INLINE Mask at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
ATTEMPER_INLINE Mask others(Mask mask) { return Mask(~mask); }
ATTEMPER_INLINE Vec add_where(Mask mask, Vec a, Vec b) { return _mm512_mask_add_ps(a, mask, a, b); }
ATTEMPER_INLINE Vec subtract_or_zero(Mask mask, Vec a, Vec b) { return _mm512_maskz_sub_ps(mask, a, b); }
ATTEMPER_INLINE Vec add_square_where(Mask mask, Vec a, Vec b) { return _mm512_mask3_fmadd_ps(b, b, a, mask); }
#else
typedef Ints Mask;
ATTEMPER_INLINE Mask below(Vec a, Vec b) { return a < b; }
ATTEMPER_INLINE Mask at_least(Vec a, Vec b) { return a >= b; }
ATTEMPER_INLINE Mask others(Mask mask) { return ~mask; }
ATTEMPER_INLINE Vec add_where(Mask mask, Vec a, Vec b) { return a + bits_as_float(float_as_bits(b) & mask); }
ATTEMPER_INLINE Vec subtract_or_zero(Mask mask, Vec a, Vec b) { return bits_as_float(float_as_bits(a - b) & mask); }
ATTEMPER_INLINE Vec add_square_where(Mask mask, Vec a, Vec b) { return a + bits_as_float(float_as_bits(b) & mask) * b; }
#endif

// exp(d) = power p(rest), of a finite d: the power of two, and what is left for the polynomial.
struct Power {
    Vec rest, power;
};

ATTEMPER_INLINE Power power_of(Vec d) {
#if defined(__AVX512F__)
    const Vec magic = splat(393216.0f);  // 1.5 * 2^18: adding it rounds to parts of 32, whose number is in the low bits
    // 2^(j / 32)
    const Vec low = {1.0f, 1.0218972f, 1.0442737f, 1.0671405f, 1.0905077f, 1.1143868f, 1.1387886f, 1.1637249f,
                     1.1892071f, 1.2152474f, 1.2418578f, 1.269051f, 1.2968396f, 1.3252367f, 1.3542556f, 1.38391f};
    const Vec high = {1.4142135f, 1.4451808f, 1.4768262f, 1.5091645f, 1.5422108f, 1.5759809f, 1.6104903f, 1.6457555f,
                      1.6817929f, 1.7186193f, 1.7562522f, 1.7947091f, 1.8340081f, 1.8741677f, 1.9152066f, 1.9571441f};
    const Vec t = d * 1.44269504f + magic, n = t - magic;
    const Vec root = _mm512_permutex2var_ps(low, __m512i(float_as_bits(t)), high);
    return {d - n * 0.693147182f, _mm512_scalef_ps(root, n)};  // root times 2^floor(n)
#else
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Vec t = d * 1.44269504f + magic;
    return {d - (t - magic) * 0.693147182f, bits_as_float(Ints(Words(float_as_bits(t)) << 23))};
#endif
}

// The exponentials in the lanes of the masks, 0 in the others; d was within EXP_LOWEST .. -EXP_LOWEST in those of the
// masks.
template <int COUNT>
ATTEMPER_INLINE void exp_where(const Mask (&mask)[COUNT], const Power (&of)[COUNT], Vec (&e)[COUNT]) {
#if defined(__AVX512F__)
    Vec p[COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) p[i] = of[i].rest * 0.500004888f + 1.00001466f;
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++)
        e[i] = _mm512_maskz_fmadd_ps(mask[i], of[i].power * of[i].rest, p[i], of[i].power);
#else
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) {
        const Vec r = of[i].rest;
        Vec p = splat(0.0013950536958873272f);
        p = p * r + 0.008368917740881443f;
        p = p * r + 0.04166620597243309f;
        p = p * r + 0.166665181517601f;
        p = p * r + 0.5f;
        p = p * r + 1.0f;
        p = p * r + 1.0f;
        e[i] = bits_as_float(Ints(Words(float_as_bits(p)) + Words(float_as_bits(of[i].power))) & mask[i]);
    }
#endif
}

// The same of several vectors side by side: one alone is a chain of steps that each wait for the last.
template <int COUNT>
ATTEMPER_INLINE void exp_where(const Mask (&mask)[COUNT], const Vec (&d)[COUNT], Vec (&e)[COUNT]) {
    Power powers[COUNT];
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) powers[i] = power_of(d[i]);
    exp_where(mask, powers, e);
}

ATTEMPER_INLINE Vec exp_where(Mask mask, Vec d) {
    const Mask masks[1] = {mask};
    const Vec distances[1] = {d};
    Vec e[1];
    exp_where(masks, distances, e);
    return e[0];
}

// exp of VANISHED <= d <= 0.
ATTEMPER_INLINE Vec exp_negative(Vec d) { return exp_where(at_least(d, splat(EXP_LOWEST)), d); }

// tanh, odd polynomial near 0 and 1 - 2 / (exp(2 |y|) + 1) elsewhere; NaN stays NaN.
ATTEMPER_INLINE Vec tanh_of(Vec y) {
    Vec size = magnitude(y);
    Vec e = exp_negative(larger(size * -2.0f, splat(VANISHED)));
    Vec large = (1.0f - e) / (1.0f + e);
    Vec s = y * y;
    Vec q = splat(-0.005704042501747608f);
    q = q * s + 0.020637862384319305f;
    q = q * s + -0.05373915657401085f;
    q = q * s + 0.133314311504364f;
    q = q * s + -0.3333328068256378f;
    Vec small = y + y * s * q;
    Vec far = bits_as_float(float_as_bits(large) | (float_as_bits(y) & int32_t(0x80000000)));
    return size > 0.625f ? far : small;
}

}  // namespace attemper
