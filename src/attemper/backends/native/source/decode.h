// Forward pass for few rows (decoding): keys and values are read once, where they lie, and not packed.
//
// A task is one (batch, key head) and SPLIT keys or more; all query heads that share the key head go together, so that
// a key is read once for all of them:
//
//     for each block of KEYS keys
//         scores = q k^T           a key's row from memory, the (scaled) queries in L1
//         softcap, bias, masks, e = exp(s - m), sums
//         output += e v            a value's row from memory, the outputs in L1
//
// The keys of a block are read in four quarters at once: a processor that reads ahead follows several streams, and has
// more of memory's rate with four than with one.
//
// Parts over different keys are joined in order by the law of rows.h. Where the splits lie depends on the shape only.
#pragma once
#include "forward.h"

namespace attemper {

constexpr int64_t FEW = 8;        // rows per key head, at most
constexpr int64_t SPLIT = 4 * KEYS;

// Keys of a task: more where there are heads enough for many threads, so that memory is seldom waited for at its start.
inline int64_t split_of(const Arguments& call) {
    int64_t split = SPLIT;
    while (split < call.keys && call.batch * call.groups * (call.keys / split) > 128) split *= 2;
    return split;
}

template <class Normalizer>
struct Decode {
    const Arguments& call;
    const float* per_head;
    int64_t rows, split, splits;
    Row* parts;      // [B * G][splits][rows]
    typename Normalizer::Own* own;  // likewise
    float* outputs;  // [B * G][splits][rows][width, padded]
};

// Where a row of a tensor can be read: in place, or converted to `buffer` and padded with zeros.
ATTEMPER_INLINE const float* row_at(const View& view, int64_t place, int64_t step, int64_t n, float* buffer) {
    if (view.type == FLOAT32 && step == 1 && n % LANES == 0) return reinterpret_cast<const float*>(view.data) + place;
    read_row(view, place, step, n, buffer);
    return buffer;
}

// Asks the caches for a row that is read SOON. Past the end of a tensor that does nothing.
ATTEMPER_INLINE void ask_for(const View& view, int64_t place, int64_t n) {
    const int64_t width = view.type == FLOAT32 ? 4 : 2;
    for (int64_t byte = 0; byte < n * width; byte += 64) __builtin_prefetch(view.data + place * width + byte, 0, 2);
}

constexpr int TOGETHER = 4;  // keys, and rows, of a register tile
constexpr int64_t SOON = 4;  // rows of keys or values

// Scores of COUNT rows against TOGETHER keys, `quarter` apart: a key is loaded once for all of them.
template <int COUNT>
ATTEMPER_INLINE void dots(const float* query, const float* const (&key)[TOGETHER], int64_t n, int64_t quarter,
                          float* to) {
    Vec c[COUNT][TOGETHER] = {};
    for (int64_t d = 0; d < n; d += LANES) {
        Vec k[TOGETHER];
#pragma GCC unroll 4
        for (int t = 0; t < TOGETHER; t++) k[t] = load(key[t] + d);
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            const Vec q = load(query + i * n + d);
#pragma GCC unroll 4
            for (int t = 0; t < TOGETHER; t++) c[i][t] += q * k[t];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) {
        const Four sums = lane_sums(c[i][0], c[i][1], c[i][2], c[i][3]);
        for (int t = 0; t < TOGETHER; t++) to[i * KEYS + t * quarter] = sums[t];
    }
}

// Outputs of COUNT rows, `n` floats apart, take in TOGETHER weighted values.
template <int COUNT>
ATTEMPER_INLINE void add_values(const float* weights, int64_t quarter, const float* const (&value)[TOGETHER], int64_t n,
                                float* to) {
    for (int64_t e = 0; e < n; e += LANES) {
        Vec v[TOGETHER];
#pragma GCC unroll 4
        for (int t = 0; t < TOGETHER; t++) v[t] = load(value[t] + e);
#pragma GCC unroll 4
        for (int i = 0; i < COUNT; i++) {
            const float* w = weights + i * KEYS;
            const Vec sum = (splat(w[0]) * v[0] + splat(w[quarter]) * v[1]) +
                            (splat(w[2 * quarter]) * v[2] + splat(w[3 * quarter]) * v[3]);
            store(to + i * n + e, load(to + i * n + e) + sum);
        }
    }
}

// Calls `with` with the rows in groups of TOGETHER and a last one of 1 to TOGETHER: first row, and how many as a
// constant.
template <class With>
ATTEMPER_INLINE void by_rows(int64_t rows, const With& with) {
    int64_t i = 0;
    for (; i + TOGETHER <= rows; i += TOGETHER) with(i, std::integral_constant<int, TOGETHER>());
    if (rows - i == 3) with(i, std::integral_constant<int, 3>());
    if (rows - i == 2) with(i, std::integral_constant<int, 2>());
    if (rows - i == 1) with(i, std::integral_constant<int, 1>());
}

template <class Normalizer>
inline void decode_task(void* context, int64_t task, int64_t) {
    const auto& work = *static_cast<const Decode<Normalizer>*>(context);
    const Arguments& call = work.call;
    const int64_t head = task / work.splits, start = task % work.splits * work.split;
    const int64_t stop = start + work.split < call.keys ? start + work.split : call.keys;
    const int64_t batch = head / call.groups, group = head % call.groups;
    const int64_t deep = up(call.depth, LANES), wide = up(call.width, LANES);
    Row* rows = work.parts + task * work.rows;
    float* output = work.outputs + task * work.rows * wide;

    Arena& memory = arena();
    memory.reserve(4 * (FEW * (deep + KEYS) + KEYS + TOGETHER * (deep + wide)) + 1024);
    float* queries = memory.floats(FEW * deep);
    float* scores = memory.floats(FEW * KEYS);
    float* keys = memory.floats(TOGETHER * deep);
    float* values = memory.floats(TOGETHER * wide);
    Bias biases(call, batch, memory.floats(KEYS));
    place_rows(call, group, 0, work.rows, rows);
    Normalizer normalizer(call, batch, work.per_head, rows, work.own + task * work.rows);
    normalizer.begin(work.rows);
    std::memset(queries, 0, size_t(FEW * deep) * 4);
    std::memset(keys, 0, size_t(TOGETHER * deep) * 4);
    std::memset(values, 0, size_t(TOGETHER * wide) * 4);
    std::memset(output, 0, size_t(work.rows * wide) * 4);
    for (int64_t i = 0; i < work.rows; i++) {
        float* line = queries + i * deep;
        read_row(call.query, at(call.query, batch, rows[i].head, rows[i].query), call.query.stride[3], call.depth,
                 line);
        const float factor = multiplier_of(call, batch, rows[i]);
        for (int64_t d = 0; d < call.depth; d++) line[d] *= factor;
    }
    for (int64_t block = start; block < stop; block += KEYS) {
        const int64_t seen = stop - block < KEYS ? stop - block : KEYS;
        const Span span(rows, work.rows, block, seen);
        if (span.begin >= span.end) continue;
        const int64_t n = span.end - span.begin, last = span.end < seen ? span.end : seen;
        const int64_t quarter = n / TOGETHER;
        for (int64_t j = span.begin; j < span.begin + quarter; j++) {
            const float* key[TOGETHER];
            for (int64_t t = 0; t < TOGETHER; t++) {
                const int64_t number = block + (j + t * quarter < last ? j + t * quarter : span.begin);
                key[t] = row_at(call.key, at(call.key, batch, group, number), call.key.stride[3], call.depth,
                                keys + t * deep);
                ask_for(call.key, at(call.key, batch, group, number + SOON), call.depth);
            }
            by_rows(work.rows, [&](int64_t i, auto count) {
                dots<decltype(count)::value>(queries + i * deep, key, deep, quarter, scores + i * KEYS + j);
            });
        }
        for (int64_t i = 0; i < work.rows; i++) {
            for (int64_t j = last; j < span.end; j++) scores[i * KEYS + j] = 0;
            // Few rows: every score is looked at, so that one that is not finite is told.
            float keep;
            take_in(call, batch, normalizer, rows + i, 1, Tile{scores + i * KEYS, KEYS, nullptr, nullptr, 0}, biases,
                    block, seen, span, Shape::ALL, false, &keep);
            if (keep != 1.0f)
                for (int64_t e = 0; e < wide; e += LANES)
                    store(output + i * wide + e, load(output + i * wide + e) * keep);
        }
        if (!call.width) continue;
        for (int64_t j = span.begin; j < span.begin + quarter; j++) {
            const float* value[TOGETHER];
            for (int64_t t = 0; t < TOGETHER; t++) {
                const int64_t number = block + (j + t * quarter < last ? j + t * quarter : span.begin);
                value[t] = row_at(call.value, at(call.value, batch, group, number), call.value.stride[3], call.width,
                                  values + t * wide);
                ask_for(call.value, at(call.value, batch, group, number + SOON), call.width);
            }
            by_rows(work.rows, [&](int64_t i, auto count) {
                add_values<decltype(count)::value>(scores + i * KEYS + j, quarter, value, wide, output + i * wide);
            });
        }
    }
}

// Joins the parts of one (batch, key head), in the order of their keys, and writes its rows.
template <class Normalizer>
inline void join_task(void* context, int64_t head, int64_t) {
    const auto& work = *static_cast<const Decode<Normalizer>*>(context);
    const Arguments& call = work.call;
    const int64_t wide = up(call.width, LANES);
    const int64_t row_place = place_of(call, head / call.groups, work.parts[head * work.splits * work.rows]);
    StateWriter state(call, row_place);
    Normalizer normalizer(call, head / call.groups, work.per_head, work.parts, work.own);
    for (int64_t i = 0; i < work.rows; i++) {
        const int64_t first = head * work.splits * work.rows + i;
        Row& row = work.parts[first];
        float* line = work.outputs + first * wide;
        for (int64_t split = 1; split < work.splits; split++) {
            const int64_t part = first + split * work.rows;
            float keep, take;
            normalizer.join(first, part, keep, take);
            const float* other = work.outputs + part * wide;
            for (int64_t e = 0; e < wide; e += LANES) store(line + e, load(line + e) * keep + load(other + e) * take);
        }
        const float share = normalizer.finish(row, state);
        if (!call.width) continue;
        for (int64_t e = 0; e < wide; e += LANES)
            store(line + e, row.count == 0 ? Vec{} : load(line + e) * share);
        write_row(call.output, at(call.output, head / call.groups, row.head, row.query), call.output.stride[3],
                  call.width, line);
    }
    state.flush();
    derive(call, row_place, work.rows);
}

}  // namespace attemper
