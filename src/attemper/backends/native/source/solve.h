// The weights of one row of scores, for softmax's alternatives. With d = s - m <= 0, q = alpha - 1, W the sum of
// weights:
//
//     sparsemax    [d - t]+                      entmax15   [d/2 - t]+^2         t: their sum is 1
//     entmax       [q d - t]+^(1/q) = w0 [1 + q d / w0^q]+^(1/q),   w0 = (-t)^(1/q) the weight of the largest score
//     top-k        exp(d) / W of the k largest   threshold  exp(d) / W where exp(d) >= number sum exp(d)
//     sigmoid      1 / (1 + exp(-s - bias))
//
// A row gives a list of its support: places, distances d and weights, in ascending order of place. Keys whose weight is
// 0 whatever the others are (entmax: d <= -1/q, since w0 <= 1) never enter it.
//
// The threshold of sparsemax and entmax15 is found by Newton's iteration from the side where it is monotone: the sum of
// weights is convex in t, and so is its (1/p)-th power, p = 1/q, which is nearer to a line. First in float32 on ever
// fewer keys, then in float64 on those that are left. Other alphas: entmax.h.
#pragma once
#include <stdexcept>

#include "entmax.h"

namespace attemper {

// python: backends/normalizers
enum Normalizer : int64_t { SOFTMAX, SPARSEMAX, ENTMAX15, ENTMAX, TOPK, THRESHOLD, SIGMOID, NORMALIZERS };

inline bool is_normalizer(int64_t code) { return code >= 0 && code < NORMALIZERS; }

// What is done with one row. number: k, or the least weight; parameter: alpha, or the bias.
struct Rule {
    Normalizer normalizer;
    double number;
    double parameter;
};

// The same rule by the name that is solved most quickly: entmax has three of its own.
inline Rule plain(Rule rule) {
    if (rule.normalizer != ENTMAX) return rule;
    if (rule.parameter == 1) rule.normalizer = SOFTMAX;
    if (rule.parameter == 1.5) rule.normalizer = ENTMAX15;
    if (rule.parameter == 2) rule.normalizer = SPARSEMAX;
    return rule;
}

// Of f(t) = sum [q d - t]+^p: p = 1 (sparsemax, q = 1) or 2 (entmax15, q = 1/2).
struct Sums2 {
    double value, derivative;  // sum r^p, sum r^(p-1)
};

template <bool SQUARE>
inline Sums2 sums_in_floats(const Support& of, float t) {
    const Vec shift = splat(t), zero = {}, one = splat(1.0f);
    Sums2 sums = {0, 0};
    for (int64_t begin = 0; begin < of.size; begin += STRETCH) {
        const int64_t end = begin + STRETCH < of.size ? begin + STRETCH : of.size;
        Vec value[2] = {}, derivative[2] = {};
        for (int64_t j = begin; j < end; j += 2 * LANES) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const Vec d = j + half * LANES < end ? load(of.distance + j + half * LANES) : splat(-INFINITY);
                const Vec r = larger(SQUARE ? d * 0.5f - shift : d - shift, zero);
                value[half] += SQUARE ? r * r : r;
                derivative[half] += SQUARE ? r : keep_where(below(zero, r), one);
            }
        }
        sums.value += lane_sum(value[0] + value[1]);
        sums.derivative += lane_sum(derivative[0] + derivative[1]);
    }
    return sums;
}

template <bool SQUARE>
inline Sums2 sums_in_doubles(const Support& of, double t) {
    const Doubles shift = splat_double(t), zero = {}, one = splat_double(1.0);
    Doubles value = {}, derivative = {};
    for (int64_t j = 0; j < of.size; j += DOUBLES) {
        const Doubles d = load_doubles(of.distance + j), gap = SQUARE ? d * 0.5 - shift : d - shift;
        const auto in = gap > zero;
        const Doubles r = in ? gap : zero;
        value += SQUARE ? r * r : r;
        derivative += SQUARE ? r : (in ? one : zero);
    }
    return {lane_sum(value), lane_sum(derivative)};
}

// Newton's step on f^(1/p) = 1.
template <bool SQUARE>
ATTEMPER_INLINE double step_of(const Sums2& sums) {
    if (!SQUARE) return (sums.value - 1) / sums.derivative;
    const double root = std::sqrt(sums.value);
    return (root - 1) * root / sums.derivative;
}

// Above what is left out in float32: the sums of a stretch are off by less.
constexpr double MARGIN = 4e-6;

template <bool SQUARE>
inline void solve_simple(const float* s, int64_t n, float maximum, Support& to) {
    const double scale = SQUARE ? 2.0 : 1.0;  // of d against t
    take_candidates(s, n, maximum, float(scale), to);
    pad(to);
    double t = -1;
    for (int round = 0; round < 50; round++) {
        const double step = step_of<SQUARE>(sums_in_floats<SQUARE>(to, float(t)));
        t += step;
        const int64_t before = to.size;
        drop_below(to, float((t - MARGIN) * scale));
        if (step < 1e-4 || (round > 2 && to.size == before)) break;
    }
    for (int round = 0; round < 50; round++) {
        const double step = step_of<SQUARE>(sums_in_doubles<SQUARE>(to, t));
        t += step;
        if (std::fabs(step) <= 1e-11 * -t) break;
    }
    // What is left of the threshold below a float is taken off by itself: where r is small, d - high is exact.
    const float high = float(t), low = float(t - double(high));
    int64_t count = 0;
    for (int64_t j = 0; j < to.size; j += LANES) {
        const Vec d = load(to.distance + j);
        const Ints place = load_places(to.place + j);
        const Vec r = ((SQUARE ? d * 0.5f : d) - high) - low;
        const Mask in = below(Vec{}, r);
        compress(in, SQUARE ? r * r : r, to.weight + count);
        compress(in, d, to.distance + count);
        compress(in, place, to.place + count);
        count += marked(in);
    }
    to.size = count, to.found = SQUARE ? t * t : -t;
}

// exp(d) of the list, divided by their sum.
inline void soften(Support& of) {
    const Vec lowest = splat(EXP_LOWEST), least = splat(VANISHED);
    pad(of);
    for (int64_t j = 0; j < of.size; j += LANES) {
        const Vec d = load(of.distance + j);
        store(of.weight + j, exp_where(at_least(d, lowest), larger(d, least)));
    }
    const float share = float(1 / sum_of(of.weight, of.size));
    for (int64_t j = 0; j < of.size; j += LANES) store(of.weight + j, load(of.weight + j) * share);
}

inline void solve_topk(const float* s, int64_t n, float maximum, double number, Support& to) {
    int64_t visible = count_at_least(s, n, -std::numeric_limits<float>::max());
    const int64_t k = number < double(visible) ? int64_t(number) : visible;
    const float last = kth_largest(s, n, k, maximum, to.spare);
    const Vec bound = splat(last), from = splat(maximum), farthest = splat(-FARTHEST);
    // Ties at the last place: the lower index. Those above it all stay.
    int64_t ties = k - count_above(s, n, last), count = 0;
    Ints place = lane_places();
    for (int64_t j = 0; j < n; j += LANES, place += LANES) {
        const Vec v = load(s + j);
        const Mask in = at_least(v, bound), over = below(bound, v);
        const int64_t more = marked(in);
        if (more == 0) continue;
        const int64_t equal = more - marked(over);
        if (equal <= ties) {
            compress(in, larger(v - from, farthest), to.distance + count);
            compress(in, place, to.place + count);
            count += more, ties -= equal;
            continue;
        }
        for (int i = 0; i < LANES; i++) {
            if (!(v[i] > last) && !(v[i] == last && ties-- > 0)) continue;
            to.distance[count] = v[i] - maximum > -FARTHEST ? v[i] - maximum : -FARTHEST;
            to.place[count++] = int32_t(j) + i;
        }
        if (ties < 0) ties = 0;
    }
    to.size = count, to.found = double(last - maximum);
    soften(to);
}

inline void solve_threshold(const float* s, int64_t n, float maximum, double number, Support& to) {
    const Vec from = splat(maximum), lowest = splat(EXP_LOWEST), least = splat(VANISHED);
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += STRETCH) {
        const int64_t end = begin + STRETCH < n ? begin + STRETCH : n;
        Vec sum = {};
        for (int64_t j = begin; j < end; j += LANES) {
            const Vec d = load(s + j) - from, e = exp_where(at_least(d, lowest), larger(d, least));
            store(to.spare + j, e);
            sum += e;
        }
        total += lane_sum(sum);
    }
    // 1/n of n equal keys is 1/n, whatever their sum was rounded to.
    const double slack = 1 - 4 * double(std::numeric_limits<float>::epsilon());
    const Vec bound = splat(float(number * total * slack)), hidden = splat(-INFINITY), one = splat(1.0f);
    const Vec farthest = splat(-FARTHEST);
    Ints place = lane_places();
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += LANES, place += LANES) {
        const Vec v = load(s + j), e = load(to.spare + j);
        const Mask in = (at_least(e, bound) & below(hidden, v)) | at_least(e, one);
        const int64_t more = marked(in);
        if (more == 0) continue;
        compress(in, larger(v - from, farthest), to.distance + count);
        compress(in, place, to.place + count);
        count += more;
    }
    to.size = count, to.found = std::log(total);
    soften(to);
}

inline void solve_sigmoid(const float* s, int64_t n, float maximum, float bias, Support& to) {
    const Vec hidden = splat(-INFINITY), from = splat(maximum), farthest = splat(-FARTHEST);
    const Vec lowest = splat(EXP_LOWEST), highest = splat(-EXP_LOWEST);
    Ints place = lane_places();
    int64_t count = 0;
    const auto take = [&](int64_t j, auto vectors) {
        constexpr int COUNT = decltype(vectors)::value;
        Vec v[COUNT], x[COUNT], e[COUNT];
        Mask in[COUNT];
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            v[i] = load(s + j + i * LANES);
            x[i] = -bias - v[i];
            in[i] = at_least(highest, x[i]);
            x[i] = smaller(larger(x[i], lowest), highest);
        }
        exp_where(in, x, e);
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++, place += LANES) {
            const Vec weight = keep_where(in[i], inverse_of(1.0f + e[i])), distance = larger(v[i] - from, farthest);
            const Mask visible = below(hidden, v[i]);
            compress(visible, weight, to.weight + count);
            compress(visible, distance, to.distance + count);
            compress(visible, place, to.place + count);
            count += marked(visible);
        }
    };
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES) take(j, std::integral_constant<int, 2>());
    if (j < n) take(j, std::integral_constant<int, 1>());
    to.size = count, to.found = 0;
}

inline void solve_softmax(const float* s, int64_t n, float maximum, Support& to) {
    take_candidates(s, n, maximum, INFINITY, to);
    soften(to);
    to.found = to.size ? to.weight[0] : 0;
    for (int64_t j = 0; j < to.size; j++) to.found = to.weight[j] > to.found ? to.weight[j] : to.found;
}

// The row s[0 .. n), n a multiple of LANES, -inf where hidden; its maximum is finite and no score is NaN or +inf.
inline void solve(const float* s, int64_t n, float maximum, const Rule& rule, Support& to) {
    switch (rule.normalizer) {
        case SPARSEMAX: return solve_simple<false>(s, n, maximum, to);
        case ENTMAX15: return solve_simple<true>(s, n, maximum, to);
        case TOPK: return solve_topk(s, n, maximum, rule.number, to);
        case THRESHOLD: return solve_threshold(s, n, maximum, rule.number, to);
        case SIGMOID: return solve_sigmoid(s, n, maximum, float(rule.parameter), to);
        case ENTMAX:
            if (rule.parameter < 2) return solve_entmax(s, n, maximum, rule.parameter, to);
            return solve_steep(s, n, maximum, rule.parameter, to);
        case SOFTMAX: return solve_softmax(s, n, maximum, to);
        case NORMALIZERS: break;
    }
    throw std::invalid_argument("no normalizer has this code");  // the C interface refuses it before
}

// What belongs to the keys of a list, as a whole row of `n`.
inline void spread(const Support& list, const float* from, int64_t n, float* to) {
    const bool first = list.size == 0 || list.place[list.size - 1] == list.size - 1;  // in ascending order of place
    const int64_t kept = first ? list.size : 0;                                       // where they are
    std::memcpy(to, from, size_t(kept) * 4);
    std::memset(to + kept, 0, size_t(n - kept) * 4);
    for (int64_t j = kept; j < list.size; j++) to[list.place[j]] = from[j];
}

}  // namespace attemper
