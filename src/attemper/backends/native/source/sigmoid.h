// Attention by a sigmoid, w = 1 / (1 + exp(-s - bias)), for forward.h and decode.h: a weight depends on its own score
// alone, so that no row needs all its keys at once, and no output is ever moved to a new maximum.
//
// Statistics are those of p = w / W. A block's weights give their sum b and their mean distance d from the row's
// maximum m; a second pass around that mean, while they are in L1, gives what joins the row by the law of moments:
//
//     W' = W + b    mean' = mean + (d - mean) b / W'    spread' = spread + sum w (s - m - d)^2 + (d - mean)^2 W b / W'
//     L = sum w log (w / M),   M the weight of the largest score;   entropy = log (W / M) - L / W
//
// Scores may lie anywhere around the maximum, where those of softmax that count are near it: squares of distances from
// the maximum would lose the digits of the spread. As in rows.h, sums are float32 in a block and float64 across, and
// keys that attain the maximum are counted apart.
#pragma once
#include "forward.h"

namespace attemper {

// What a row keeps beside its Row, of which first_moment is `mean` and second_moment is `spread`.
struct SigmoidRow {
    float turned = 0;       // -bias
    float top = 0;          // log M
    double most = 0;        // M
    double logarithms = 0;  // L
    int64_t size = 0;       // weights above 0: others underflowed
};

// Moves the sums to a new maximum.
inline void raise(Row& row, SigmoidRow& own, float maximum) {
    if (!(maximum > row.maximum)) return;
    const float x = own.turned - maximum;
    own.most = x <= -EXP_LOWEST ? 1 / (1 + std::exp(double(x > EXP_LOWEST ? x : EXP_LOWEST))) : 0;
    const float top = own.most > 0 ? float(std::log(own.most)) : 0;
    if (row.total > 0) {
        own.logarithms += row.total * (double(own.top) - double(top));
        row.first_moment += double(row.maximum) - double(maximum);
    }
    row.maximum = maximum, own.top = top;
}

// Joins weights with this sum, mean and spread.
ATTEMPER_INLINE void join_moments(Row& row, double total, double mean, double spread) {
    const double whole = row.total + total, share = whole > 0 ? total / whole : 0, step = mean - row.first_moment;
    row.second_moment += spread + step * step * row.total * share;
    row.first_moment += step * share;
    row.total = whole;
}

// Scores of a panel, below the row's maximum, and what their exponentials begin with.
struct Turned {
    Mask in[2];  // those with weight
    Vec d[2];
    Power power[2];
};

// Scores of one row become weights, and with MOMENTS its sums take them in: all of them, whatever is asked for. NEAR:
// no weight underflows, and all keys are visible. `distances`: room for `n` floats.
template <int WHAT>
ATTEMPER_INLINE void weigh(float* s, int64_t n, Row& row, SigmoidRow& own, float* distances, uint16_t* halves) {
    const Vec one = splat(1.0f), zero = {}, from = splat(row.maximum), turned = splat(own.turned);
    const Vec lowest = splat(EXP_LOWEST), highest = splat(-EXP_LOWEST), farthest = splat(-FARTHEST);
    Vec total = {}, first = {}, ties = {};
    const auto read = [&](int64_t j) {
        Turned keys;
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const Vec score = load(s + j + i * LANES);
            Vec x = turned - score;
            if (WHAT & NEAR) {
                keys.in[i] = others(Mask{}), keys.d[i] = score - from;
            } else {
                keys.in[i] = at_least(highest, x), x = smaller(larger(x, lowest), highest);
                keys.d[i] = keep_where(keys.in[i], larger(score - from, farthest));
            }
            keys.power[i] = power_of(x);
        }
        return keys;
    };
    const auto take = [&](int64_t j, const Turned& keys) {
        Vec w[2];
        exp_where(keys.in, keys.power, w);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const Vec inverse = inverse_of(one + w[i]);
            w[i] = WHAT & NEAR ? inverse : keep_where(keys.in[i], inverse);
            store(s + j + i * LANES, w[i]);
            if (!(WHAT & MOMENTS)) continue;
            store(distances + j + i * LANES, keys.d[i]);
            first += w[i] * keys.d[i];
            if (WHAT & TIES) {
                const Mask rest = below(keys.d[i], zero);
                ties = add_where(others(rest) & keys.in[i], ties, one);
                total = add_where(rest, total, w[i]);
            } else {
                total += w[i];
            }
        }
#if defined(ATTEMPER_HALF)
        if (WHAT & HALVES) store_halves(halves + j, w[0], w[1]);
#endif
    };
    if constexpr (READS_AHEAD) {
        auto next = read(0);
        int64_t j = 0;
        for (; j + PANEL < n; j += PANEL) {
            const auto now = next;
            next = read(j + PANEL);
            take(j, now);
        }
        take(j, next);
    } else {
        for (int64_t j = 0; j < n; j += PANEL) take(j, read(j));
    }
    (void)halves;
    if (!(WHAT & MOMENTS)) return;
    const Four sums = lane_sums(total, first, ties, zero);
    const double tied = WHAT & TIES ? double(sums[2]) * own.most : 0, block = double(sums[0]) + tied;
    double mean = sums[1];
    if (!(WHAT & NEAR) && !(std::fabs(mean) < INFINITY)) mean = dot_of(s, distances, n);  // near the largest float
    mean = block > 0 ? mean / block : 0;
    // Weights as parts of M: products of small ones would be no floats.
    const Vec middle = splat(float(mean)), top = splat(own.top);
    const Vec part = splat(own.most > 0 ? float(1 / own.most) : 0.0f);
    Vec spread = {}, logarithms = {}, squares = {}, count = {};
    for (int64_t j = 0; j < n; j += PANEL) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const Vec w = load(s + j + i * LANES), d = load(distances + j + i * LANES), apart = d - middle;
            const Vec u = w * part, logarithm = u * (log_of(w) - top);
            spread += u * apart * apart;
            if (WHAT & TIES) {
                const Mask rest = below(d, zero);
                logarithms = add_where(rest, logarithms, logarithm);
                squares = add_square_where(rest, squares, u);
            } else {
                logarithms += logarithm;
                squares += u * u;
            }
            if (!(WHAT & NEAR)) count = add_where(below(zero, w), count, one);
        }
    }
    const Four more = lane_sums(spread, logarithms, squares, count);
    double around = more[0] * own.most;
    if (!(WHAT & NEAR) && !(around < INFINITY)) {  // distances whose squares are no floats
        around = 0;
        for (int64_t j = 0; j < n; j++) around += s[j] * (distances[j] - mean) * (distances[j] - mean);
    }
    join_moments(row, block, mean, around);
    own.logarithms += more[1] * own.most;
    row.squares += more[2] * own.most * own.most + tied * own.most;
    own.size += WHAT & NEAR ? n : int64_t(more[3]);
}

// sum w |distance + j| of `n` keys whose weights are `total` in all; `distance` as for weigh of rows.h.
inline double distance_sum(const float* weights, int64_t n, int64_t distance, double total) {
    const Away away(distance, n);
    Vec sum = {};
    for (int64_t j = 0; j < n; j += LANES) sum += load(weights + j) * load(away.table + j);
    return lane_sum(sum) + away.rest * total;
}

// Sigmoids for rows that stand one after another, as Softmax in forward.h.
class Sigmoid {
public:
    using Own = SigmoidRow;

    // `biases`: of the heads; null: 0.
    Sigmoid(const Arguments& call, int64_t batch, const float* biases, Row* rows, Own* own)
        : call_(call), batch_(batch), biases_(biases), rows_(rows), own_(own) {
        for (int column = Column::MASS; column < Column::COUNT; column++) moments_ |= call.place[column] >= 0;
    }

    void begin(int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            own_[i] = Own{};
            if (biases_) own_[i].turned = -biases_[rows_[i].head];
            tame_ &= std::fabs(own_[i].turned) < TAME;
        }
    }

    void weigh(const Scored& of, const Look& look, float* keep) {
        Own* own = own_ + (of.rows - rows_);
        for (int64_t i = 0; i < of.count; i++) keep[i] = 1, raise(of.rows[i], own[i], of.best[i]);
        const int parts = (of.near && tame_ ? NEAR : 0) | (of.tile.halves ? HALVES : 0) | (moments_ ? MOMENTS : 0);
        with_parts(parts, [&](auto what) { weigh_all<what & (NEAR | HALVES | MOMENTS)>(of, look, own); });
    }

    float finish(Row& row, StateWriter& state) {
        const Own& own = own_[&row - rows_];
        row.bad |= row.count > 0 && std::isnan(own.turned);
        double columns[Column::COUNT] = {};
        columns[Column::MAXIMUM] = row.maximum, columns[Column::VISIBLE_KEYS] = double(row.count);
        if (row.count > 0 && !row.bad) describe(row, own, columns);
        state.add(row, columns);
        return row.bad ? NAN : 1.0f;
    }

    // Joins the row `other` over later keys into `number`.
    void join(int64_t number, int64_t other, float& keep, float& take) {
        Row &row = rows_[number], later = rows_[other];
        Own &own = own_[number], its = own_[other];
        keep = take = 1;
        raise(row, own, later.maximum), raise(later, its, row.maximum);
        join_moments(row, later.total, later.first_moment, later.second_moment);
        row.squares += later.squares, own.logarithms += its.logarithms, own.size += its.size;
        join_rest(row, later);
    }

private:
    static constexpr float TAME = 46;  // a bias that with scores of NEAR stays within EXP_LOWEST
    static_assert(TAME + NEAR_PRODUCT / 2 < -EXP_LOWEST);

    template <int WHAT>
    void weigh_all(const Scored& of, const Look& look, Own* own) {
        const bool far = call_.place[Column::DISTANCE] >= 0;
        for (int64_t i = 0; i < of.count; i++) {
            Row& row = of.rows[i];
            float* s = of.scores(i);
            uint16_t* halves = WHAT & HALVES ? of.halves(i) : nullptr;
            const double before = row.total;
            if ((WHAT & MOMENTS) && of.best[i] == row.maximum)
                attemper::weigh<WHAT | TIES>(s, look.n, row, own[i], distances_, halves);
            else attemper::weigh<WHAT>(s, look.n, row, own[i], distances_, halves);
            if (far) row.distance += distance_sum(s, look.n, look.start - row.position, row.total - before);
            look.add(call_, batch_, s, row);
        }
    }

    static void describe(const Row& row, const Own& own, double (&columns)[Column::COUNT]) {
        const double share = row.total > 0 ? 1 / row.total : 0;
        // Sums are rounded in other orders: a share of them is at most 1.
        const auto share_of = [&](double sum) { return std::fmin(sum * share, 1); };
        columns[Column::MASS] = row.total, columns[Column::SUPPORT] = double(own.size);
        columns[Column::LARGEST_WEIGHT] = share_of(own.most);
        columns[Column::MEAN_DEPTH] = row.first_moment < 0 ? -row.first_moment : 0.0;
        columns[Column::VARIANCE] = row.second_moment * share;
        const double least = own.size ? 1 / double(own.size) : 0;
        columns[Column::SQUARED_WEIGHTS] = std::fmax(row.squares * share * share, least);
        if (row.total > 0)
            columns[Column::ENTROPY] = std::fmax(std::log(row.total / own.most) - own.logarithms * share, 0);
        columns[Column::FIRST_TOKENS] = share_of(row.first), columns[Column::SPAN] = share_of(row.span);
        columns[Column::OWN_KEY] = share_of(row.own), columns[Column::DISTANCE] = row.distance * share;
    }

    const Arguments& call_;
    int64_t batch_;
    const float* biases_;
    Row* rows_;
    Own* own_;
    bool moments_ = false;  // whether any of them is asked for
    bool tame_ = true;      // all biases are TAME
    float distances_[KEYS];
};

}  // namespace attemper
