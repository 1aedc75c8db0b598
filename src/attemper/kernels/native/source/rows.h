// Rows of a chunk: where they stand, which keys they may see, and one law of merging for their running sums.
//
//     m' = max(m, block)   t = m - m'   r = exp(t)
//     Z = r Z + z    A = r (A + t Z) + a    B = r (B + 2 t A + t^2 Z) + b    C = r^2 C + c
//
// Sums over a block of at most KEYS keys are float32 vectors, a dozen and more partial sums each; across blocks they are
// float64. The keys that attain the maximum (e = 1) are counted apart, so that a row that is nearly one-hot keeps what
// is left of it to full precision.
#pragma once
#include "pack.h"

namespace attemper {

constexpr int64_t KEYS = 256;  // keys of a block

struct Row {
    int64_t head, query, position;  // position: the key on the row's diagonal
    int64_t low, high;              // keys it may see before masks: low <= key < high
    float maximum;
    double total, first_moment, second_moment, squares, first, distance;
    int64_t count;
    bool bad;     // a visible score is not finite
    bool poison;  // one is NaN or +inf: the output is NaN
};

// Sums over one block, relative to its `base`.
struct Sums {
    double total = 0, first_moment = 0, second_moment = 0, squares = 0, first = 0, distance = 0;
};

inline void begin(Row& row, const Arguments& call, int64_t head, int64_t query) {
    row = Row{};
    row.head = head, row.query = query;
    row.position = (call.positions ? call.positions[query] : query) + call.offset;
    row.low = row.position - call.left > 0 ? row.position - call.left : 0;
    int64_t end = row.position + call.right + 1;
    row.high = end < call.keys ? end : call.keys;
    if (row.low > call.keys) row.low = call.keys;
    if (row.high < row.low) row.high = row.low;
    row.maximum = -INFINITY;
}

// Moves the sums to a new maximum; returns the factor for the output.
inline float raise(Row& row, float maximum) {
    if (!(maximum > row.maximum)) return 1.0f;
    if (!(row.total > 0)) {  // nothing yet, and nothing to move
        row.maximum = maximum;
        return 0.0f;
    }
    double step = double(row.maximum) - double(maximum);
    if (!(step > -1000.0)) step = -1000.0;
    double shrink = std::exp(step);
    row.second_moment = shrink * (row.second_moment + step * (2 * row.first_moment + step * row.total));
    row.first_moment = shrink * (row.first_moment + step * row.total);
    row.total *= shrink, row.first *= shrink, row.distance *= shrink, row.squares *= shrink * shrink;
    row.maximum = maximum;
    return float(shrink);
}

inline void add(Row& row, const Sums& sums) {
    row.total += sums.total, row.first_moment += sums.first_moment, row.second_moment += sums.second_moment;
    row.squares += sums.squares, row.first += sums.first, row.distance += sums.distance;
}

// Joins a row over later keys into `row`; returns the factors of the two outputs.
inline void join(Row& row, Row other, float& keep, float& take) {
    keep = raise(row, other.maximum);
    take = raise(other, row.maximum);
    add(row, Sums{other.total, other.first_moment, other.second_moment, other.squares, other.first, other.distance});
    row.count += other.count;
    row.bad |= other.bad, row.poison |= other.poison;
}

inline float base_of(const Row& row) { return row.maximum == -INFINITY ? 0.0f : row.maximum; }

// exp(s - base) of one row over `n` scores (a multiple of PANEL), in place, and its sums.
template <bool MOMENTS, bool SQUARES>
ATTEMPER_INLINE Sums weigh(float* s, int64_t n, float base) {
    Vec total = {}, ties = {}, first = {}, second = {}, squares = {};
    const Vec one = splat(1.0f), least = splat(VANISHED);
    for (int64_t j = 0; j < n; j += LANES) {
        Vec d = larger(load(s + j) - base, least);
        Vec e = exp_negative(d);
        store(s + j, e);
        Ints below = d < Vec{};
        Vec rest = bits_as_float(float_as_bits(e) & below);
        ties += bits_as_float(float_as_bits(one) & ~below);
        total += rest;
        if (MOMENTS) {
            Vec moment = e * d;
            first += moment;
            second += moment * d;
        }
        if (SQUARES) squares += rest * rest;
    }
    float sum[4];
    const double top = lane_sum(ties);
    if (MOMENTS || SQUARES) lane_sums(total, first, second, squares, sum);
    else sum[0] = lane_sum(total);
    Sums sums;
    sums.total = top + sum[0];
    if (MOMENTS) sums.first_moment = sum[1], sums.second_moment = sum[2];
    if (SQUARES) sums.squares = top + sum[3];
    return sums;
}

inline Sums weigh(float* s, int64_t n, float base, bool moments, bool squares) {
    if (moments) return squares ? weigh<true, true>(s, n, base) : weigh<true, false>(s, n, base);
    return squares ? weigh<false, true>(s, n, base) : weigh<false, false>(s, n, base);
}

ATTEMPER_INLINE float highest(const float* s, int64_t n) {
    Vec best = splat(-INFINITY), other = best;
    for (int64_t j = 0; j < n; j += PANEL) {
        best = larger(best, load(s + j));
        other = larger(other, load(s + j + LANES));
    }
    return lane_max(larger(best, other));
}

// The place of a row in a [B, H, Q] tensor.
inline int64_t place_of(const Arguments& call, int64_t batch, const Row& row) {
    return (batch * call.heads + row.head) * call.queries + row.query;
}

// What a sink leaves to the keys, sigmoid(lse - sink).
inline double mass_of(const Arguments& call, const Row& row, double lse) {
    return call.sink ? 1.0 / (1.0 + std::exp(double(call.sink[row.head]) - lse)) : 1.0;
}

// Writes the letters that were asked for; returns the factor that makes the running output the output.
inline float finish(const Arguments& call, int64_t batch, const Row& row) {
    double inverse = row.total > 0 ? 1.0 / row.total : 1.0, mean = row.first_moment * inverse;
    double log_total = row.count > 0 && row.total > 0 ? std::log(row.total) : 0.0;
    double variance = row.second_moment * inverse - mean * mean;
    double letters[LETTERS];
    letters[M] = row.maximum, letters[Z] = log_total, letters[N] = double(row.count);
    letters[A] = mean == 0 ? 0.0 : -mean;
    letters[V] = variance > 0 ? variance : 0.0;
    letters[C] = row.squares * inverse * inverse;
    letters[F] = row.first * inverse, letters[T] = row.distance * inverse;
    const int64_t plane = call.batch * call.heads * call.queries, place = place_of(call, batch, row);
    for (int letter = 0; letter < LETTERS; letter++) {
        if (call.place[letter] < 0) continue;
        float value = row.bad && letter != N ? NAN : float(letters[letter]);
        call.state[call.place[letter] * plane + place] = value;
    }
    if (row.poison) return NAN;
    if (row.count == 0) return 0.0f;
    return float(inverse * mass_of(call, row, double(row.maximum) + log_total));
}

}  // namespace attemper
