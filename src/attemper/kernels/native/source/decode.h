// Forward pass for few rows (decoding): keys and values are read once, where they lie, and not packed.
//
// A task is one (batch, key head) and SPLIT keys; all query heads that share the key head go together, so that a key is
// read once for all of them:
//
//     for each block of KEYS keys
//         scores = q k^T           a key's row from memory, the (scaled) queries in L1
//         softcap, bias, masks, e = exp(s - m), sums
//         output += e v            a value's row from memory, the outputs in L1
//
// Parts over different keys are joined in order by the law of rows.h. Where the splits lie depends on the shape only.
#pragma once
#include "forward.h"

namespace attemper {

constexpr int64_t FEW = 8;        // rows per key head, at most
constexpr int64_t SPLIT = 4 * KEYS;

struct Decode {
    const Arguments& call;
    int64_t rows, splits;
    Row* parts;      // [B * G][splits][rows]
    float* outputs;  // [B * G][splits][rows][width, padded]
};

// Where a row of a tensor can be read: in place, or converted to `buffer` and padded with zeros.
ATTEMPER_INLINE const float* row_at(const View& view, int64_t place, int64_t step, int64_t n, float* buffer) {
    if (view.type == FLOAT32 && step == 1 && n % LANES == 0) return reinterpret_cast<const float*>(view.data) + place;
    read_row(view, place, step, n, buffer);
    return buffer;
}

ATTEMPER_INLINE float dot(const float* a, const float* b, int64_t n) {
    Vec sum = {}, other = {};
    int64_t d = 0;
    for (; d + 2 * LANES <= n; d += 2 * LANES) {
        sum += load(a + d) * load(b + d);
        other += load(a + d + LANES) * load(b + d + LANES);
    }
    if (d < n) sum += load(a + d) * load(b + d);
    return lane_sum(sum + other);
}

inline void decode_task(void* context, int64_t task, int64_t) {
    const Decode& work = *static_cast<const Decode*>(context);
    const Arguments& call = work.call;
    const int64_t head = task / work.splits, start = task % work.splits * SPLIT;
    const int64_t stop = start + SPLIT < call.keys ? start + SPLIT : call.keys;
    const int64_t batch = head / call.groups, group = head % call.groups;
    const int64_t deep = up(call.depth, LANES), wide = up(call.width, LANES);
    Row* rows = work.parts + task * work.rows;
    float* output = work.outputs + task * work.rows * wide;

    Arena& memory = arena();
    memory.reserve(4 * (FEW * (deep + KEYS) + KEYS + 4 * (deep + wide)) + 1024);
    float* queries = memory.floats(FEW * deep);
    float* scores = memory.floats(FEW * KEYS);
    float* buffer = memory.floats(4 * (deep + wide));
    Bias biases(call, batch, memory.floats(KEYS));
    place_rows(call, group, 0, work.rows, rows);
    std::memset(queries, 0, size_t(FEW * deep) * 4);
    std::memset(buffer, 0, size_t(4 * (deep + wide)) * 4);
    std::memset(output, 0, size_t(work.rows * wide) * 4);
    for (int64_t i = 0; i < work.rows; i++) {
        float* line = queries + i * deep;
        read_row(call.query, at(call.query, batch, rows[i].head, rows[i].query), call.query.stride[3], call.depth, line);
        const float factor = multiplier_of(call, batch, rows[i]);
        for (int64_t d = 0; d < call.depth; d++) line[d] *= factor;
    }
    for (int64_t block = start; block < stop; block += KEYS) {
        const int64_t seen = stop - block < KEYS ? stop - block : KEYS;
        const Span span(rows, work.rows, block, seen);
        if (span.begin >= span.end) continue;
        const int64_t n = span.end - span.begin, last = span.end < seen ? span.end : seen;
        for (int64_t j = span.begin; j < last; j++) {
            const float* key = row_at(call.key, at(call.key, batch, group, block + j), call.key.stride[3], call.depth, buffer);
            for (int64_t i = 0; i < work.rows; i++) scores[i * KEYS + j] = dot(queries + i * deep, key, deep);
        }
        for (int64_t i = 0; i < work.rows; i++) {
            for (int64_t j = last; j < span.end; j++) scores[i * KEYS + j] = 0;
            const float* bias = biases.row(rows[i], block, seen);
            // Few rows: every score is looked at, so that one that is not finite is told.
            const float keep = take_in(call, batch, rows[i], scores + i * KEYS + span.begin,
                                       bias ? bias + span.begin : nullptr, block + span.begin, n, true);
            if (keep != 1.0f)
                for (int64_t e = 0; e < wide; e += LANES) store(output + i * wide + e, load(output + i * wide + e) * keep);
        }
        if (!call.width) continue;
        for (int64_t j = span.begin; j < last; j += 4) {
            const int64_t together = last - j < 4 ? last - j : 4;
            const float* value[4];
            for (int64_t t = 0; t < 4; t++)
                value[t] = row_at(call.value, at(call.value, batch, group, block + (t < together ? j + t : j)),
                                  call.value.stride[3], call.width, buffer + t * wide);
            for (int64_t i = 0; i < work.rows; i++) {
                const float* s = scores + i * KEYS + j;
                const Vec w0 = splat(s[0]), w1 = splat(together > 1 ? s[1] : 0), w2 = splat(together > 2 ? s[2] : 0),
                          w3 = splat(together > 3 ? s[3] : 0);
                float* to = output + i * wide;
                for (int64_t e = 0; e < wide; e += LANES)
                    store(to + e, load(to + e) + (w0 * load(value[0] + e) + w1 * load(value[1] + e)) +
                                      (w2 * load(value[2] + e) + w3 * load(value[3] + e)));
            }
        }
    }
}

// Joins the parts of one (batch, key head), in the order of their keys, and writes its rows.
inline void join_task(void* context, int64_t head, int64_t) {
    const Decode& work = *static_cast<const Decode*>(context);
    const Arguments& call = work.call;
    const int64_t wide = up(call.width, LANES);
    for (int64_t i = 0; i < work.rows; i++) {
        const int64_t first = head * work.splits * work.rows + i;
        Row row = work.parts[first];
        float* line = work.outputs + first * wide;
        for (int64_t split = 1; split < work.splits; split++) {
            const int64_t part = first + split * work.rows;
            float keep, take;
            join(row, work.parts[part], keep, take);
            const float* other = work.outputs + part * wide;
            for (int64_t e = 0; e < wide; e += LANES) store(line + e, load(line + e) * keep + load(other + e) * take);
        }
        const float share = finish(call, head / call.groups, row);
        if (!call.width) continue;
        for (int64_t e = 0; e < wide; e += LANES)
            store(line + e, row.count == 0 ? Vec{} : load(line + e) * share);
        write_row(call.output, at(call.output, head / call.groups, row.head, row.query), call.output.stride[3], call.width,
                  line);
    }
}

}  // namespace attemper
