// Rows of a chunk: where they stand, which keys they may see, and one law of merging for their running sums.
//
//     m' = max(m, block)   t = m - m'   r = exp(t)
//     Z = r Z + z    A = r (A + t Z) + a    B = r (B + 2 t A + t^2 Z) + b    C = r^2 C + c
//
// Sums over a block of at most KEYS keys are float32 vectors, a partial sum in each lane; across blocks they
// are float64. The keys that attain the maximum (e = 1) are counted apart, so that a row that is nearly one-hot keeps
// what is left of it to full precision.
#pragma once
#include "half.h"
#include "pack.h"

namespace attemper {

constexpr int64_t KEYS = 256;  // keys of a block

struct Row {
    int64_t head, query, position;  // position: the key on the row's diagonal
    int64_t low, high;              // keys it may see before masks: low <= key < high
    float maximum;
    double total, first_moment, second_moment, squares, first, distance, own, span;
    int64_t count;
    bool bad;     // a visible score is not finite
    bool poison;  // one is NaN or +inf: the output is NaN
};

typedef double Quad __attribute__((vector_size(32)));

// Sums over one block, relative to its `base`.
struct Sums {
    Quad four = {};  // total, first_moment, second_moment, squares: as they stand in a row
    double distance = 0;
};
static_assert(offsetof(Row, squares) == offsetof(Row, total) + 3 * sizeof(double));

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
    row.own *= shrink, row.span *= shrink;
    row.maximum = maximum;
    return float(shrink);
}

ATTEMPER_INLINE void add(Row& row, Quad four) {
    Quad sums;
    std::memcpy(&sums, &row.total, sizeof sums);
    sums += four;
    std::memcpy(&row.total, &sums, sizeof sums);
}

// What has the same law whatever the weights are.
inline void join_rest(Row& row, const Row& other) {
    row.first += other.first, row.distance += other.distance, row.own += other.own, row.span += other.span;
    row.count += other.count;
    row.bad |= other.bad, row.poison |= other.poison;
}

// Joins a row over later keys into `row`; returns the factors of the two outputs.
inline void join(Row& row, Row other, float& keep, float& take) {
    keep = raise(row, other.maximum);
    take = raise(other, row.maximum);
    add(row, Quad{other.total, other.first_moment, other.second_moment, other.squares});
    join_rest(row, other);
}

inline float base_of(const Row& row) { return row.maximum == -INFINITY ? 0.0f : row.maximum; }

// |i|, from the middle on: distances of keys from a place in their block or at its ends.
struct Distances {
    float table[2 * KEYS + LANES];
    constexpr Distances() : table() {
        for (int64_t i = 0; i < 2 * KEYS + LANES; i++) table[i] = float(i < KEYS ? KEYS - i : i - KEYS);
    }
};
inline constexpr Distances DISTANCES;

// |distance + j| of `n` keys, j = 0 .. n - 1, sums of what is >= 0:
//
//     |distance + j| = |shift + j| + |distance - shift|,   shift = distance, but within -n .. 0
struct Away {
    const float* table;  // |shift + j|
    double rest;         // |distance - shift|

    ATTEMPER_INLINE Away(int64_t distance, int64_t n) {
        const int64_t shift = distance > 0 ? 0 : (distance < -n ? -n : distance), apart = distance - shift;
        table = DISTANCES.table + KEYS + shift, rest = double(apart < 0 ? -apart : apart);
    }
};

// What of a row's block is summed besides the total, and that all of its weights are above 0 (NEAR). Neither the order
// of the sums nor a bit of them depends on NEAR. HALVES, PARTS: how many choices there are without and with bfloat16;
// ties are a matter of the row.
enum Part : int { MOMENTS = 1, SQUARES = 2, DISTANCE = 4, NEAR = 8, HALVES = 16, PARTS = 32, TIES = 32 };

// The least score whose distance to `base` is at least EXP_LOWEST, after rounding, too.
inline float lowest_of(float base) {
    const double exact = double(base) + double(EXP_LOWEST);
    const float near = float(exact);
    const int32_t up = double(near) < exact;  // no branch: half of all rows would go either way
    return from_bits(to_bits(near) + uint32_t(near > 0 ? up : -up));
}

// Scores of some vectors below their row's base, and their exponentials as far as power_of brings them.
template <int COUNT>
struct Distant {
    Mask seen[COUNT];
    Vec d[COUNT];
    Power power[COUNT];
};

// Whether a panel's exponentials begin before the sums take in those of the panel before. A processor looks some sixty
// steps ahead, and would else wait for each panel's chain of them. AVX2 has no registers for two panels.
constexpr bool READS_AHEAD = LANES != 8;

// exp(s - base) of one row over `n` scores (a multiple of PANEL), in place, and its sums. TIES: some are `base`.
// NEAR: no score is more than 87 below `base`, so none is compared: comparisons take the pipes that multiply.
// HALVES: the weights go to `halves`, too. `distance`: the first key's distance from the row's position.
template <int WHAT>
ATTEMPER_INLINE Sums weigh(float* s, int64_t n, float base, int64_t distance, uint16_t* halves) {
    Vec total = {}, ties = {}, first = {}, second = {}, squares = {}, distances = {};
    const Vec one = splat(1.0f), lowest = splat(WHAT & NEAR ? base : lowest_of(base)), zero = {}, from = splat(base);
    const Away away(distance, n);
    const auto read = [&](int64_t j, auto vectors) {
        constexpr int COUNT = decltype(vectors)::value;
        Distant<COUNT> keys;
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            const Vec score = load(s + j + i * LANES);
            keys.seen[i] = WHAT & NEAR ? others(Mask{}) : at_least(score, lowest);
            keys.d[i] = subtract_or_zero(keys.seen[i], score, from);
            keys.power[i] = power_of(keys.d[i]);
        }
        return keys;
    };
    const auto take = [&]<int COUNT>(int64_t j, const Distant<COUNT>& keys) {
        const auto& [seen, d, powers] = keys;
        Vec e[COUNT];
        exp_where(seen, powers, e);
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            store(s + j + i * LANES, e[i]);
            if (WHAT & TIES) {
                const Mask rest = below(d[i], zero);
                ties = add_where(others(rest) & seen[i], ties, one);
                total = add_where(rest, total, e[i]);
                if (WHAT & SQUARES) squares = add_square_where(rest, squares, e[i]);
            } else {
                total += e[i];
                if (WHAT & SQUARES) squares += e[i] * e[i];
            }
            if (WHAT & MOMENTS) {
                const Vec moment = e[i] * d[i];
                first += moment;
                second += moment * d[i];
            }
            if (WHAT & DISTANCE) distances += e[i] * load(away.table + j + i * LANES);
        }
#if defined(ATTEMPER_HALF)
        if (WHAT & HALVES)
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; i += 2) store_halves(halves + j + i * LANES, e[i], e[i + 1]);
#endif
    };
    constexpr std::integral_constant<int, 2> two;
    int64_t j = 0;
    if constexpr (READS_AHEAD) {
        auto next = read(0, two);
        for (; j + PANEL < n; j += PANEL) {
            const auto now = next;
            next = read(j + PANEL, two);
            take(j, now);
        }
        take(j, next);
    } else {
        for (; j + 2 * PANEL <= n; j += 2 * PANEL) take(j, read(j, std::integral_constant<int, 4>()));
        if (j < n) take(j, read(j, two));
    }
    (void)halves;
    Sums sums;
    if (WHAT & (MOMENTS | SQUARES)) sums.four = __builtin_convertvector(lane_sums(total, first, second, squares), Quad);
    else sums.four[0] = lane_sum(total);
    if (WHAT & TIES) {
        const double top = lane_sum(ties);
        sums.four += Quad{top, 0, 0, WHAT & SQUARES ? top : 0};
    }
    if (WHAT & DISTANCE) sums.distance = lane_sum(distances) + away.rest * sums.four[0];
    return sums;
}

ATTEMPER_INLINE float highest(const float* s, int64_t n) {
    Vec best = splat(-INFINITY), other = best;
    for (int64_t j = 0; j < n; j += PANEL) {
        best = larger(best, load(s + j));
        other = larger(other, load(s + j + LANES));
    }
    return lane_max(larger(best, other));
}

// Scores from products that lack their row's multiplier, in place; returns the highest.
ATTEMPER_INLINE float scale_row(float* s, int64_t n, float factor) {
    Vec best = splat(-INFINITY), other = best;
    for (int64_t j = 0; j < n; j += PANEL) {
        const Vec low = load(s + j) * factor, high = load(s + j + LANES) * factor;
        store(s + j, low);
        store(s + j + LANES, high);
        best = larger(best, low);
        other = larger(other, high);
    }
    return lane_max(larger(best, other));
}

// The place of a row in a [B, H, Q] tensor.
inline int64_t place_of(const Arguments& call, int64_t batch, const Row& row) {
    return (batch * call.heads + row.head) * call.queries + row.query;
}

// Writes the state columns that a call asked for, of rows that stand one after another, column by column: planes are
// often a multiple of 4096 bytes apart, and what is written to all of them in turns shares one set of the cache.
class StateWriter {
public:
    // `place`: of the first row.
    StateWriter(const Arguments& call, int64_t place) : place_(place) {
        const int64_t size = call.batch * call.heads * call.queries;
        for (int column = 0; column < Column::COUNT; column++)
            if (call.place[column] >= 0)
                columns_[asked_] = column, planes_[asked_++] = call.state + call.place[column] * size;
    }
    ~StateWriter() { flush(); }

    // The next row; one with a visible score that is not finite keeps its count alone.
    void add(const Row& row, const double (&columns)[Column::COUNT]) {
        if (count_ == ROOM) flush();
        for (int64_t i = 0; i < asked_; i++)
            kept_[i][count_] = row.bad && columns_[i] != Column::VISIBLE_KEYS ? NAN : float(columns[columns_[i]]);
        count_++;
    }

    void flush() {
        for (int64_t i = 0; i < asked_; i++) std::memcpy(planes_[i] + place_, kept_[i], size_t(count_) * 4);
        place_ += count_, count_ = 0;
    }

    static constexpr int64_t ROOM = 64;

private:
    int64_t asked_ = 0, place_, count_ = 0;
    int columns_[Column::COUNT];
    float* planes_[Column::COUNT];
    float kept_[Column::COUNT][ROOM];
};

// What a sink leaves to the keys, sigmoid(lse - sink).
inline double mass_of(const Arguments& call, const Row& row, double lse) {
    return call.sink ? 1.0 / (1.0 + std::exp(double(call.sink[row.head]) - lse)) : 1.0;
}

// Writes the row's state; returns the factor that makes the running output the output.
inline float finish(const Arguments& call, const Row& row, StateWriter& state) {
    double inverse = row.total > 0 ? 1.0 / row.total : 1.0, mean = row.first_moment * inverse;
    double log_total = row.count > 0 && row.total > 0 ? std::log(row.total) : 0.0;
    double variance = row.second_moment * inverse - mean * mean;
    double columns[Column::COUNT] = {};
    columns[Column::MAXIMUM] = row.maximum, columns[Column::LOG_SUM] = log_total;
    columns[Column::VISIBLE_KEYS] = double(row.count);
    columns[Column::MEAN_DEPTH] = mean == 0 ? 0.0 : -mean;
    columns[Column::VARIANCE] = variance > 0 ? variance : 0.0;
    columns[Column::SQUARED_WEIGHTS] = row.squares * inverse * inverse;
    columns[Column::FIRST_TOKENS] = row.first * inverse, columns[Column::DISTANCE] = row.distance * inverse;
    columns[Column::OWN_KEY] = row.own * inverse, columns[Column::SPAN] = row.span * inverse;
    state.add(row, columns);
    if (row.poison || (row.bad && row.maximum == -INFINITY)) return NAN;  // or every visible score is -inf
    if (row.count == 0) return 0.0f;
    return float(inverse * mass_of(call, row, double(row.maximum) + log_total));
}

}  // namespace attemper
