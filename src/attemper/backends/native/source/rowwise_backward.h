// Backward pass of rowwise_forward.h and sigmoid.h: scores and supports computed anew, bit by bit those of forward, but for
// sigmoids that decode, whose scores were added up in another order. With ds of jacobian.h, x the score before the
// softcap:
//
//     dx = ds softcap'(x)    dq = multiplier dx K    dK = dx^T (multiplier q)    dV = w^T dO
//
// Tasks, shares and sums as in backward.h. Rows of small support go value by value, key by key. In runs of tiles with
// much support, dP is one product, and so are the three sums, as there. Where ds are far larger than what they add up
// to (entmax above alpha = 2), dq is summed in float64, key by key.
#pragma once
#include "backward.h"
#include "jacobian.h"

namespace attemper {

struct RowwiseBackward {
    const RowwiseCall& of;
    const Backward& work;
};

// Where the buffers of a chunk lie.
struct RowwiseDesk {
    float *queries, *above;  // [row][up(size, PANEL)]: multiplier q, dO; zeros for rows that take no gradient
    float *query_sum;
    float* gradient;     // of a list's scores
    float *values, *key, *line;  // TOGETHER values and a key, zeros past their sizes; a query
    double* exact;       // sums over keys
    Support support;
};

// dO.v of a list, value by value.
inline void meet_list(const View& view, int64_t base, int64_t width, const Support& list, const float* above,
                      float* buffer, float* to) {
    const int64_t wide = up(width, LANES), apart = up(width, PANEL);
    for (int64_t j = 0; j < list.size; j += TOGETHER) {
        const float* value[TOGETHER];
        for (int64_t t = 0; t < TOGETHER; t++) {
            const int64_t place = list.place[j + t < list.size ? j + t : j];
            value[t] = row_at(view, base + place * view.stride[2], view.stride[3], width, buffer + t * apart);
        }
        Vec c[TOGETHER] = {};
        for (int64_t e = 0; e < wide; e += LANES) {
            const Vec x = load(above + e);
#pragma GCC unroll 4
            for (int t = 0; t < TOGETHER; t++) c[t] += x * load(value[t] + e);
        }
        const Four sums = lane_sums(c[0], c[1], c[2], c[3]);
        std::memcpy(to + j, &sums, sizeof sums);
    }
}

// to [up(width, LANES)] = sum w k, as gather() of rowwise_forward.h, in float64.
inline void gather_in_doubles(const View& view, int64_t base, int64_t width, const Support& list, const float* weight,
                              float* buffer, double* sums, float* to) {
    const int64_t wide = up(width, LANES);
    for (int64_t e = 0; e < wide; e++) sums[e] = 0;
    for (int64_t j = 0; j < list.size; j++) {
        const float* k = row_at(view, base + list.place[j] * view.stride[2], view.stride[3], width, buffer);
        for (int64_t e = 0; e < wide; e++) sums[e] += double(weight[j]) * k[e];
    }
    for (int64_t e = 0; e < wide; e++) to[e] = float(sums[e]);
}

// sums[place] += factor line, for every key of a list.
inline void scatter(const Support& list, const float* factors, const float* line, int64_t wide, float* sums) {
    for (int64_t j = 0; j < list.size; j++) {
        float* to = sums + list.place[j] * wide;
        const Vec factor = splat(factors[j]);
        for (int64_t e = 0; e < wide; e += LANES) store(to + e, load(to + e) + factor * load(line + e));
    }
}

// Of a row with a visible score that is not finite, the keys whose scores are not -inf: NaN for all of them. Where it
// has none, all that it sees but for a mask: -inf does not tell whether that hides them. `first_key`: of the line.
inline void list_bad(const Row& row, const float* s, int64_t first_key, Support& to) {
    const int64_t begin = row.low - first_key, end = row.high - first_key;
    bool any = false;
    for (int64_t j = begin; j < end; j++) any |= s[j] != -INFINITY;
    to.size = 0;
    for (int64_t j = begin; j < end; j++) {
        if (any && s[j] == -INFINITY) continue;
        to.weight[to.size] = to.distance[to.size] = NAN;
        to.place[to.size++] = int32_t(j);
    }
}

// Mask and softcap: what the gradient of a row's scores becomes on its way to the products.
inline void pass_shape(const Arguments& call, int64_t batch, const Row& row, const Support& list, int64_t first_key,
                       const float* softcap_gradients, float* gradient) {
    if (call.grad_mask) {
        const int64_t* stride = call.grad_mask_stride;
        float* to = call.grad_mask + batch * stride[0] + row.head * stride[1] + row.query * stride[2];
        for (int64_t j = 0; j < list.size; j++) to[(first_key + list.place[j]) * stride[3]] += gradient[j];
    }
    if (softcap_gradients)
        for (int64_t j = 0; j < list.size; j++) gradient[j] *= softcap_gradients[list.place[j]];
}

// Key and value sums of a share; null: not asked for.
struct KeySums {
    float *keys, *values;
};

// A row whose support is taken key by key.
inline void backward_list(const RowwiseCall& of, int64_t batch, int64_t group, const Lines& lines, int64_t i,
                          RowwiseDesk& desk, const KeySums& sums) {
    const Arguments& call = of.call;
    const int64_t deep = up(call.depth, PANEL), wide = up(call.width, PANEL);
    const Line& line = lines.lines[i];
    const int64_t first_key = lines.base + line.begin;
    const Support& list = desk.support;
    if (call.width)
        meet_list(call.value, at(call.value, batch, group, first_key), call.width, list, desk.above + i * wide,
                  desk.values, desk.gradient);
    else
        std::memset(desk.gradient, 0, size_t(list.size) * 4);
    gradient_list(of, batch, lines.rows[i], list, first_key, desk.gradient);
    pass_shape(call, batch, lines.rows[i], list, first_key, lines.softcap_gradients_of(i, line.begin), desk.gradient);
    if (sums.values) scatter(list, list.weight, desk.above + i * wide, wide, sums.values + first_key * wide);
    if (sums.keys) scatter(list, desk.gradient, desk.queries + i * deep, deep, sums.keys + first_key * deep);
    if (!call.grad_query && !call.grad_multiplier) return;
    const int64_t keys = at(call.key, batch, group, first_key);
    float* sum = desk.query_sum + i * deep;
    if (is_steep(of.rule_of(lines.rows[i])))
        gather_in_doubles(call.key, keys, call.depth, list, desk.gradient, desk.key, desk.exact, sum);
    else
        gather(call.key, keys, call.depth, first_key, desk.gradient, list.place, list.size, desk.key, sum);
}

// Solves row i anew; false where it has nothing to do.
inline bool list_again(const RowwiseCall& of, const Lines& lines, int64_t i, Support& support) {
    const Row& row = lines.rows[i];
    const Line& line = lines.lines[i];
    support.size = 0;
    if (row.count == 0) return false;
    if (row.bad) list_bad(row, lines.line(i) + line.begin, lines.base + line.begin, support);
    else solve_line(of, lines, i, support);
    return true;
}

// Buffers of the products of a run of tiles.
struct RunDesk {
    float *value_columns, *key_lines, *above_tiles, *above_lines, *query_lines, *weights, *gradients, *buffer;
    float* products;  // [row][apart]: dP, then dx
};

// A run of tiles, rows start .. stop, all with much support: the rows marked `large` of it.
inline void backward_run(const RowwiseCall& of, int64_t batch, int64_t group, const Lines& lines, int64_t start,
                         int64_t stop, RowwiseDesk& desk, const RunDesk& run, const KeySums& sums) {
    const Arguments& call = of.call;
    const int64_t depth = call.depth, width = call.width, deep = up(depth, PANEL), wide = up(width, PANEL);
    const int64_t count = stop - start;
    for (int64_t tile = 0; width && tile < count; tile += ROWS)
        turn_tile(desk.above + (start + tile) * wide, wide, width, run.above_tiles + tile * width);
    for (int64_t i = 0; i < up(count, ROWS); i++) {
        for (int64_t p = 0; p < wide; p += PANEL)
            std::memcpy(run.above_lines + p * SWEEP + i * PANEL, desk.above + (start + i) * wide + p, PANEL * 4);
        for (int64_t p = 0; p < deep; p += PANEL)
            std::memcpy(run.query_lines + p * SWEEP + i * PANEL, desk.queries + (start + i) * deep + p, PANEL * 4);
    }
    for (int64_t block = lines.base; width && block < lines.high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS;
        const View& value = call.value;
        pack_columns(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, width,
                     up(seen, PANEL), run.buffer, run.value_columns);
        for (int64_t tile = 0; tile < count; tile += ROWS) {
            const Span span(lines.rows + start + tile, count - tile < ROWS ? count - tile : ROWS, block, seen);
            for (int64_t p = span.begin; p < span.end; p += PANEL)
                product<1>(run.above_tiles + tile * width, ROWS, run.value_columns + p * width, width,
                           run.products + (start + tile) * lines.apart + block - lines.base + p, lines.apart);
        }
    }
    for (int64_t i = start; i < stop; i++) {
        Line& line = lines.lines[i];
        if (!line.kept || !list_again(of, lines, i, desk.support)) continue;
        float* products = run.products + i * lines.apart + line.begin;
        const Support& list = desk.support;
        const int64_t first_key = lines.base + line.begin, n = line.end - line.begin;
        if (!width) std::memset(desk.gradient, 0, size_t(list.size) * 4);
        else if (list.size == n) std::memcpy(desk.gradient, products, size_t(n) * 4);
        else for (int64_t j = 0; j < list.size; j++) desk.gradient[j] = products[list.place[j]];
        gradient_list(of, batch, lines.rows[i], list, first_key, desk.gradient);
        pass_shape(call, batch, lines.rows[i], list, first_key, lines.softcap_gradients_of(i, line.begin),
                   desk.gradient);
        spread(list, list.weight, n, lines.line(i) + line.begin);
        spread(list, desk.gradient, n, products);
    }
    Lines gradients = lines;
    gradients.scores = run.products;
    float ones[ROWS];
    for (float& one : ones) one = 1.0f;
    for (int64_t block = lines.base; block < lines.high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS, place = block - lines.base;
        const Span span(lines.rows + start, count, block, seen);
        if (span.begin >= span.end) continue;
        const int64_t n = span.end - span.begin;
        pack_lines(call.key, at(call.key, batch, group, block), call.key.stride[2], call.key.stride[3], seen, depth,
                   up(seen, PANEL), KEYS, run.key_lines);
        const size_t rest = size_t((up(count, ROWS) - count) * APART) * 4;
        std::memset(run.weights + count * APART, 0, rest);
        std::memset(run.gradients + count * APART, 0, rest);
        for (int64_t i = 0; i < count; i++) {
            copy_line(lines, start + i, place + span.begin, n, run.weights + i * APART);
            copy_line(gradients, start + i, place + span.begin, n, run.gradients + i * APART);
        }
        if (sums.values)
            for (int64_t p = 0; p < wide; p += PANEL)
                add_transposed(run.weights, APART, run.above_lines + p * SWEEP, count, n,
                               sums.values + (block + span.begin) * wide + p, wide);
        if (sums.keys)
            for (int64_t p = 0; p < deep; p += PANEL)
                add_transposed(run.gradients, APART, run.query_lines + p * SWEEP, count, n,
                               sums.keys + (block + span.begin) * deep + p, deep);
        if (call.grad_query || call.grad_multiplier)
            for (int64_t tile = 0; tile < count; tile += ROWS)
                for (int64_t p = 0; p < deep; p += PANEL)
                    add_product<APART>(run.gradients + tile * APART, 1, run.key_lines + p * KEYS + span.begin * PANEL,
                                       span.begin, n, desk.query_sum + (start + tile) * deep + p, deep, ones);
    }
}

inline void write_row_gradients(const Arguments& call, int64_t batch, const Row& row, float factor, const float* sum,
                                float* line) {
    const int64_t place = place_of(call, batch, row), depth = call.depth;
    if (call.grad_query)
        for (int64_t d = 0; d < depth; d++) call.grad_query[place * depth + d] = sum[d] * factor;
    if (!call.grad_multiplier) return;
    read_row(call.query, at(call.query, batch, row.head, row.query), call.query.stride[3], depth, line);
    double total = 0;
    for (int64_t d = 0; d < depth; d++) total += double(sum[d]) * line[d];
    call.grad_multiplier[place] = row.count ? float(total) : 0.0f;
}

// A support is large from a share of the keys on: until then, gathering is cheaper than the product for all of them. A
// tile takes the product when its large supports make up for it.
constexpr int64_t LARGE = 8, PAYS = 5;

inline bool pays(const Lines& of, int64_t tile, int64_t stop, int64_t much) {
    int64_t least = of.lines[tile].begin, most = of.lines[tile].end;
    for (int64_t i = tile; i < stop; i++) {
        least = of.lines[i].begin < least ? of.lines[i].begin : least;
        most = of.lines[i].end > most ? of.lines[i].end : most;
    }
    return much * PAYS > ROWS * (most - least);
}

template <class Scores>
inline void rowwise_backward_chunk(const RowwiseCall& of, int64_t batch, int64_t group, int64_t first, int64_t count,
                                   int64_t chunk, const KeySums& sums) {
    const Arguments& call = of.call;
    const int64_t depth = call.depth, width = call.width, deep = up(depth, PANEL), wide = up(width, PANEL);
    const int64_t tall = up(chunk, Scores::TALL), all = tall + ROWS, tiles = tall / ROWS + 1;
    static thread_local std::vector<Row> rows;
    static thread_local std::vector<Line> line_of;
    rows.resize(size_t(tall)), line_of.resize(size_t(tall));
    Lines lines = lines_of(call, group, first, count, Scores::TALL, rows.data(), line_of.data());
    const bool capped = call.softcap > 0;
    Arena& memory = arena();
    memory.reserve(Scores::bytes(call, tall) + 4 * all * ((capped ? 3 : 2) * lines.apart + 2 * deep + wide) +
                   support_bytes(lines.apart) +
                   4 * (KEYS + room_of(lines.apart) + (TOGETHER + 2) * (deep + wide) + 2 * SWEEP * APART +
                        KEYS * (width + deep) + (SWEEP + ROWS) * (width + wide + deep) + LANES +
                        LINES * (deep + wide)) +
                   8 * deep + tiles + 16384);
    lines.scores = memory.floats(all * lines.apart);
    lines.softcap_gradients = capped ? memory.floats(all * lines.apart) : nullptr;
    RunDesk run{};
    run.products = memory.floats(all * lines.apart);
    RowwiseDesk desk{};
    desk.queries = memory.floats(all * deep), desk.above = memory.floats(all * wide);
    desk.query_sum = memory.floats(all * deep);
    Scores scores(call, memory, tall);
    Bias biases(call, batch, memory.floats(KEYS));
    desk.support = support_from(memory, lines.apart), desk.gradient = memory.floats(room_of(lines.apart));
    desk.values = memory.floats(TOGETHER * wide), desk.key = memory.floats(deep), desk.line = memory.floats(deep);
    desk.exact = memory.things<double>(deep);
    run.weights = memory.floats(SWEEP * APART), run.gradients = memory.floats(SWEEP * APART);
    run.value_columns = memory.floats(KEYS * width), run.key_lines = memory.floats(KEYS * deep);
    run.above_tiles = memory.floats((SWEEP + ROWS) * width + LANES);
    run.above_lines = memory.floats(SWEEP * wide), run.query_lines = memory.floats(SWEEP * deep);
    run.buffer = memory.floats(LINES * (deep + wide));
    bool* dense = memory.things<bool>(tiles);

    std::memset(desk.values, 0, size_t(TOGETHER * wide) * 4);
    std::memset(desk.key, 0, size_t(deep) * 4);
    std::memset(desk.queries, 0, size_t(all * deep) * 4);
    std::memset(desk.above, 0, size_t(all * wide) * 4);
    std::memset(desk.query_sum, 0, size_t(all * deep) * 4);
    fill_lines(call, batch, group, scores, scores.take_queries(batch, rows.data(), count).most, biases, lines);
    spoil(of, lines);
    for (int64_t i = 0; i < count; i++) {
        const Row& row = rows[size_t(i)];
        if (row.count == 0) continue;
        const float factor = multiplier_of(call, batch, row);
        float* query = desk.queries + i * deep;
        read_row(call.query, at(call.query, batch, row.head, row.query), call.query.stride[3], depth, query);
        for (int64_t d = 0; d < depth; d++) query[d] *= factor;
        if (width)
            read_row(call.grad_output, at(call.grad_output, batch, row.head, row.query), call.grad_output.stride[3],
                     width, desk.above + i * wide);
    }
    for (int64_t tile = 0; tile < count; tile += ROWS) {
        const int64_t stop = tile + ROWS < count ? tile + ROWS : count;
        int64_t much = 0;
        for (int64_t i = tile; i < stop; i++) {
            Line& line = lines.lines[i];
            if (!list_again(of, lines, i, desk.support)) continue;
            const bool large = desk.support.size * LARGE > line.end - line.begin && !is_steep(of.rule_of(lines.rows[i]));
            line.kept = large ? Line::WEIGHTS : Line::NOTHING;
            if (large) much += desk.support.size;
            else backward_list(of, batch, group, lines, i, desk, sums);
        }
        dense[tile / ROWS] = pays(lines, tile, stop, much);
        if (dense[tile / ROWS] || much == 0) continue;
        for (int64_t i = tile; i < stop; i++)
            if (lines.lines[i].kept && list_again(of, lines, i, desk.support))
                backward_list(of, batch, group, lines, i, desk, sums), lines.lines[i].kept = Line::NOTHING;
    }
    for (int64_t tile = 0; tile < count;) {
        int64_t stop = tile;
        while (stop < count && stop - tile < SWEEP && dense[stop / ROWS]) stop += ROWS;
        if (stop > tile) backward_run(of, batch, group, lines, tile, stop < count ? stop : count, desk, run, sums);
        tile = stop > tile ? stop : tile + ROWS;
    }
    for (int64_t i = 0; i < count; i++)
        write_row_gradients(call, batch, rows[size_t(i)], multiplier_of(call, batch, rows[size_t(i)]),
                            desk.query_sum + i * deep, desk.line);
}

template <class Scores>
inline void rowwise_backward_head(const RowwiseBackward& whole, int64_t batch, int64_t group, int64_t share) {
    const Backward& work = whole.work;
    const Arguments& call = work.call;
    const int64_t deep = up(call.depth, PANEL), wide = up(call.width, PANEL);
    const int64_t all = call.heads / call.groups * call.queries;
    const int64_t start = share * work.share_rows, stop = start + work.share_rows < all ? start + work.share_rows : all;
    const int64_t own = work.sums_of(batch * call.groups + group, share);
    const KeySums sums{work.key_sums ? work.key_sums + own * work.key_room * deep : nullptr,
                       work.value_sums ? work.value_sums + own * work.key_room * wide : nullptr};
    if (sums.keys) std::memset(sums.keys, 0, size_t(work.key_room * deep) * 4);
    if (sums.values) std::memset(sums.values, 0, size_t(work.key_room * wide) * 4);
    const int64_t chunk = rowwise_chunk(call, Scores::TALL, 1);
    for (int64_t first = start; first < stop; first += chunk)
        rowwise_backward_chunk<Scores>(whole.of, batch, group, first, stop - first < chunk ? stop - first : chunk,
                                       chunk, sums);
}

// A task, as in backward.h: the heads of its unit one after another, its share of their rows.
template <class Scores>
void rowwise_backward_task(void* context, int64_t task, int64_t) {
    const RowwiseBackward& whole = *static_cast<const RowwiseBackward*>(context);
    const Backward& work = whole.work;
    const int64_t unit = task / work.shares, share = task % work.shares, groups = work.call.groups;
    const int64_t own_groups = work.by_group ? groups : 1;
    for (int64_t batch = 0; batch < work.call.batch; batch++)
        for (int64_t group = 0; group < groups; group++)
            if ((work.by_batch ? batch : 0) * own_groups + (work.by_group ? group : 0) == unit)
                rowwise_backward_head<Scores>(whole, batch, group, share);
}

}  // namespace attemper
