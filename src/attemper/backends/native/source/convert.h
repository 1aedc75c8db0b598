// Elements of tensors as float32 and back. bfloat16 is the upper half of a float32; float16 goes by the processor's
// own conversion where the build has it, else by bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__F16C__)
#include <immintrin.h>
#endif
#include "arguments.h"
#include "simd.h"

namespace attemper {

ATTEMPER_INLINE float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

ATTEMPER_INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

ATTEMPER_INLINE float half_to_float(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | (fraction << 13));
    if (exponent != 0) return from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
    float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -small : small;
#endif
}

ATTEMPER_INLINE uint16_t float_to_half(float value) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(value, 0));
#else
    uint32_t bits = to_bits(value), sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (bits >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (bits < 0x38800000) {  // subnormal: adding 0.5 puts the rounded fraction into the low bits
        return uint16_t(sign | (to_bits(from_bits(bits) + 0.5f) - 0x3f000000));
    }
    uint32_t odd = (bits >> 13) & 1;
    return uint16_t(sign | ((bits - 0x38000000 + 0xfff + odd) >> 13));
#endif
}

ATTEMPER_INLINE uint16_t float_to_bfloat(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// n elements at `step` apart, as float32. A float64 beyond float32 becomes its largest: it stays finite.
ATTEMPER_INLINE void read_row(const View& view, int64_t place, int64_t step, int64_t n, float* to) {
    switch (view.type) {
        case FLOAT32: {
            auto* from = reinterpret_cast<const float*>(view.data) + place;
            if (step == 1) std::memcpy(to, from, size_t(n) * 4);
            else for (int64_t i = 0; i < n; i++) to[i] = from[i * step];
            return;
        }
        case BFLOAT16: {
            auto* from = reinterpret_cast<const uint16_t*>(view.data) + place;
            if (step == 1) for (int64_t i = 0; i < n; i++) to[i] = from_bits(uint32_t(from[i]) << 16);
            else for (int64_t i = 0; i < n; i++) to[i] = from_bits(uint32_t(from[i * step]) << 16);
            return;
        }
        default: {
            auto* from = reinterpret_cast<const uint16_t*>(view.data) + place;
            int64_t i = 0;
#if defined(__AVX512F__)
            if (step == 1)
                for (; i + 16 <= n; i += 16)
                    store(to + i, Vec(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)))));
#endif
            for (; i < n; i++) to[i] = half_to_float(from[i * step]);
        }
    }
}

inline void write_row(const View& view, int64_t place, int64_t step, int64_t n, const float* from) {
    if (view.type == FLOAT32) {
        auto* to = reinterpret_cast<float*>(view.data) + place;
        for (int64_t i = 0; i < n; i++) to[i * step] = from[i];
        return;
    }
    auto* to = reinterpret_cast<uint16_t*>(view.data) + place;
    if (view.type == BFLOAT16) for (int64_t i = 0; i < n; i++) to[i * step] = float_to_bfloat(from[i]);
    else for (int64_t i = 0; i < n; i++) to[i * step] = float_to_half(from[i]);
}

}  // namespace attemper
