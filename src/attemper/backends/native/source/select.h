// The k-th largest of a row, in time linear in its length.
//
//     maxima of n / M strided groups of keys: the k-th largest of M maxima is at most the k-th largest of all,
//     since every maximum is a key of its own, and few keys reach it; they are copied together; then bits of the
//     answer, one after another, by counting how many keys reach them, on ever fewer keys
//
// Floats are compared as floats (-0 is 0) and halved as integers of the same order.
#pragma once
#include "compress.h"

namespace attemper {

// Integers in the order of the floats.
ATTEMPER_INLINE int64_t order_of(float value) {
    const int32_t bits = int32_t(to_bits(value));
    return bits >= 0 ? bits : -int64_t(bits & 0x7fffffff);
}
ATTEMPER_INLINE float float_of_order(int64_t order) {
    return from_bits(order >= 0 ? uint32_t(order) : uint32_t(-order) | 0x80000000u);
}

constexpr int EXACTLY = 64, ROUGHLY = 15;  // steps: 33 leave one float of all; 15 a share of 2^-7 of its size

// How many of `n` floats, a multiple of LANES, reach `least`.
inline int64_t count_at_least(const float* from, int64_t n, float least) {
    const Vec bound = splat(least);
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += LANES) count += marked(at_least(load(from + j), bound));
    return count;
}

inline int64_t count_above(const float* from, int64_t n, float bound) {
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += LANES) count += marked(below(splat(bound), load(from + j)));
    return count;
}

// Keeps those between two bounds, in place, padded with -inf; returns how many. `above` grows by those that are higher.
inline int64_t keep_between(float* values, int64_t n, float low, float high, int64_t& above) {
    const Vec least = splat(low), most = splat(high);
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += LANES) {
        const Vec v = load(values + j);
        const Mask over = below(most, v), in = at_least(v, least) & others(over);
        above += marked(over);
        compress(in, v, values + count);
        count += marked(in);
    }
    store(values + count, splat(-INFINITY));
    return count;
}

// The largest `low` <= x <= `high` that at least k of `n` values reach; they are overwritten, and padded with -inf to
// whole vectors with one more behind. At least k values reach `low`. After so many `steps` a bound from below will do.
inline float kth_of_few(float* values, int64_t n, int64_t k, float low, float high, int steps) {
    int64_t least = order_of(low), most = order_of(high), above = 0;
    for (int step = 1; least < most && step <= steps; step++) {
        const int64_t middle = least + (most - least + 1) / 2;
        if (above + count_at_least(values, n, float_of_order(middle)) >= k) least = middle;
        else most = middle - 1;
        if (step % 4 == 0 && n > 512) {
            n = keep_between(values, n, float_of_order(least), float_of_order(most), above);
            n = (n + LANES - 1) / LANES * LANES;
        }
    }
    return float_of_order(least);
}

// The k-th largest of `n` scores (a multiple of LANES, -inf where hidden), at least k of them visible; `maximum` is the
// largest of them and finite. `spare`: n + 2 LANES floats.
inline float kth_largest(const float* s, int64_t n, int64_t k, float maximum, float* spare) {
    float low = -INFINITY;
    const int64_t groups = (4 * k > 256 ? 4 * k : 256) / LANES;  // vectors of maxima
    if (n / LANES >= 2 * groups) {
        for (int64_t g = 0; g < groups; g++) store(spare + g * LANES, load(s + g * LANES));
        for (int64_t j = groups * LANES; j < n; j += groups * LANES)
            for (int64_t g = 0; g < groups && j + g * LANES < n; g++)
                store(spare + g * LANES, larger(load(spare + g * LANES), load(s + j + g * LANES)));
        store(spare + groups * LANES, splat(-INFINITY));
        low = kth_of_few(spare, groups * LANES, k, -INFINITY, maximum, ROUGHLY);
    }
    const Vec least = splat(low), hidden = splat(-INFINITY);
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += LANES) {
        const Vec v = load(s + j);
        const Mask in = at_least(v, least) & below(hidden, v);
        compress(in, v, spare + count);
        count += marked(in);
    }
    store(spare + count, hidden);
    return kth_of_few(spare, (count + LANES - 1) / LANES * LANES, k, low, maximum, EXACTLY);
}

}  // namespace attemper
