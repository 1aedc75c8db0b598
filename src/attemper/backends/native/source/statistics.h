// Statistics of rows from their state in one pass, the formulas of call/formulas.py where no gradient is wanted:
// thirty operators of PyTorch over a few thousand rows take as long as attention over a hundred tokens.
#pragma once
#include "arguments.h"
#include "compress.h"
#include "entropies.h"

namespace attemper {

// exp(d) = 2^n p(r),  n = round(d / log 2),  r = d - n log 2,  p of degree 9, relative error 1e-11: a float of it is as
// near as a float can be. d: within 200 of 0; what is further is taken for that, and is 0 or inf as a float.
ATTEMPER_INLINE Doubles exp_of(Doubles d) {
    const Doubles far = splat_double(200.0);
    d = d < -far ? -far : d;
    d = d > far ? far : d;
    const Doubles magic = splat_double(6755399441055744.0);  // 1.5 * 2^52: as in exp_where
    const Doubles t = d * 1.4426950408889634 + magic, r = d - (t - magic) * 0.6931471805599453;
    Doubles p = splat_double(1.0 / 362880);
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    typedef int64_t Bits __attribute__((vector_size(DOUBLES * 8)));
    return reinterpret_cast<Doubles>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(t) << 52));
}

// to = exp(-z) of rows that see a key, 0 of the others.
inline void largest_weights(const float* z, const float* n, int64_t rows, float* to) {
    int64_t i = 0;
    for (; i + DOUBLES <= rows; i += DOUBLES)
        *reinterpret_cast<Narrow*>(to + i) = __builtin_convertvector(exp_of(-load_doubles(z + i)), Narrow);
    if (i < rows) {
        float last[DOUBLES] = {};
        std::memcpy(last, z + i, size_t(rows - i) * 4);
        const Narrow found = __builtin_convertvector(exp_of(-load_doubles(last)), Narrow);
        std::memcpy(to + i, &found, size_t(rows - i) * 4);
    }
    for (i = 0; i < rows; i++) to[i] = n[i] > 0 ? to[i] : 0.0f;
}

// log n of counts, row by row.
struct LogCounts {
    static constexpr int64_t ROOM = 256;
    float down[ROOM], nearest[ROOM];

    void take(const float* n, int64_t rows) {
        static thread_local Logarithms logarithm;
        for (int64_t i = 0; i < rows; i++) {
            const Logarithm of = logarithm(n[i]);
            down[i] = of.down, nearest[i] = of.nearest;
        }
    }
};

// State columns that are statistics. Copies of them cost Python less than views of the state, and keep no state alive.
struct Copied {
    Statistics::Derived statistic;
    Column::Name column;
};
constexpr Copied COPIED[] = {
    {Statistics::MAX_LOGIT, Column::MAXIMUM}, {Statistics::LOGIT_VARIANCE, Column::VARIANCE},
    {Statistics::FIRST_TOKEN_MASS, Column::FIRST_TOKENS}, {Statistics::MEAN_DISTANCE, Column::DISTANCE},
    {Statistics::GINI, Column::GINI}, {Statistics::SCORE_VARIANCE, Column::PLAIN_VARIANCE},
    {Statistics::SELF_WEIGHT, Column::OWN_KEY}, {Statistics::SPAN_MASS, Column::SPAN},
};

// columns: where each state column lies, [rows], null where the state lacks it; to: where each statistic goes, null
// where it is not wanted, which it must be where it follows from a column that is not there.
inline void derive(int64_t rows, const float* const* columns, const Statistics& to) {
    const float *m = columns[Column::MAXIMUM], *z = columns[Column::LOG_SUM], *n = columns[Column::VISIBLE_KEYS];
    const float *a = columns[Column::MEAN_DEPTH], *c = columns[Column::SQUARED_WEIGHTS];
    float* const* values = to.values;
    for (const auto [statistic, column] : COPIED)
        if (values[statistic]) std::memcpy(values[statistic], columns[column], size_t(rows) * 4);
    if (values[Statistics::LSE])
        for (int64_t i = 0; i < rows; i++) values[Statistics::LSE][i] = m[i] + z[i];
    if (values[Statistics::MASS])
        for (int64_t i = 0; i < rows; i++) {
            const float lse = m[i] + z[i];
            values[Statistics::MASS][i] = n[i] > 0 ? lse - lse + 1.0f : 0.0f;
        }
    if (values[Statistics::MEAN_LOGIT])
        for (int64_t i = 0; i < rows; i++) values[Statistics::MEAN_LOGIT][i] = (n[i] > 0 ? m[i] : 0.0f) - a[i];
    if (values[Statistics::EFFECTIVE_TOKENS])
        for (int64_t i = 0; i < rows; i++) values[Statistics::EFFECTIVE_TOKENS][i] = n[i] > 0 ? 1.0f / c[i] : 0.0f;
    if (values[Statistics::MAX_WEIGHT]) largest_weights(z, n, rows, values[Statistics::MAX_WEIGHT]);
    if (to.counts)
        for (int64_t i = 0; i < rows; i++) to.counts[i] = int64_t(n[i]);
    float *entropy = values[Statistics::ENTROPY], *normalized = values[Statistics::NORMALIZED_ENTROPY];
    if (!entropy && !normalized) return;
    LogCounts log_n;
    for (int64_t first = 0; first < rows; first += LogCounts::ROOM) {
        const int64_t count = rows - first < LogCounts::ROOM ? rows - first : LogCounts::ROOM;
        log_n.take(n + first, count);
        float entropies[LogCounts::ROOM];
        for (int64_t i = 0; i < count; i++) entropies[i] = entropy_of(z[first + i], a[first + i], log_n.down[i]);
        if (entropy) std::memcpy(entropy + first, entropies, size_t(count) * 4);
        if (normalized)
            for (int64_t i = 0; i < count; i++)
                normalized[first + i] = normalized_of(entropies[i], n[first + i], log_n.nearest[i]);
    }
}

// The statistics that a call asked for, of `rows` rows whose state stands, from this place of the planes on.
inline void derive(const Arguments& call, int64_t place, int64_t rows) {
    const Statistics& to = call.statistics;
    bool any = to.counts != nullptr;
    for (const float* value : to.values) any |= value != nullptr;
    if (!any) return;
    const int64_t plane = call.batch * call.heads * call.queries;
    const float* columns[Column::COUNT];
    for (int column = 0; column < Column::COUNT; column++)
        columns[column] = call.place[column] < 0 ? nullptr : call.state + call.place[column] * plane + place;
    Statistics from_here = to;
    for (float*& value : from_here.values) value = value ? value + place : nullptr;
    if (to.counts) from_here.counts += place;
    derive(rows, columns, from_here);
}

}  // namespace attemper
