// Backward pass: scores recomputed from q, k and the state; no weight is kept. With the symbols of the state columns
// (docs/design/0002), g_z, g_a, ... their gradients, X = d + a and P = exp(d - z):
//
//     dS = P [ mass dP + g_z - mass D - g_a (1 + X) + g_v (X^2 + 2 X - v) + 2 g_c (P - c) + g_f (1[first] - f)
//              + g_t (distance - t) + g_o (1[own key] - o) + g_b (1[span] - b) ] + 1[argmax] (g_m - g_z + g_a),
//     dP = dO V^T,  D = dO . O
//     dbias = dS    dx = dS softcap'(x)    dq = multiplier dx K    dK = dx^T (multiplier q)    dV = (mass P)^T dO
//
// A task is one (batch, key head) and a share of its rows; gradients of keys and values are summed in the task, in
// order.
//
//     for each chunk of rows                                       packed q, dO and the sum of dq: L2
//         for each block of KEYS keys                              packed K, K^T, V^T: L2
//             for each batch of SWEEP rows                         two squares SWEEP x KEYS: L2, row by row in L1
//                 for each tile of ROWS (bfloat16: 32): s = q k^T, dP = dO V^T of the keys it sees; P and dS in place
//                 for each tile of ROWS: dq += dS K
//                 dV += P^T dO, dK += dS^T q, of the tiles that see a key
//
// Few heads: rows are dealt to a fixed number of shares, each with sums of its own, added in order afterwards. A mask's
// gradient that several heads or samples share is summed by one task. Neither depends on the number of threads.
//
// Of bfloat16, s and dP are products of half.h: a score must be the one that forward saw, bit by bit, and both are
// exact products summed in float32. P and dS are not rounded to bfloat16: the other three products are float32.
#pragma once
#include <optional>

#include "forward.h"

namespace attemper {

constexpr int64_t SWEEP = 8 * ROWS;  // rows whose weights meet dO and q in one product
constexpr int64_t APART = KEYS + LANES;  // of rows of a square: columns of it would share few sets of L1 at KEYS

// What is constant along a row: its state, and upstream gradients.
struct Terms {
    float base, log_total, mean;  // m (0 for an empty row), z, a
    float constant, mass, dot;
    float output;  // what dP counts: mass, or 0 where all weight is on one key, to the last digit of Z
    float depth, variance, squares, first, distance, own, span;  // upstream gradients
    float top;                                                   // what falls on the maximum
    bool bad, empty;
};

struct Backward {
    const Arguments& call;
    int64_t shares;       // of the rows of a key head
    int64_t units;        // sets of (batch, key head) that one task sums
    int64_t share_rows;   // rows of a share
    bool by_batch, by_group;  // whether batches / key heads are units of their own
    int64_t key_room;     // keys, rounded up to whole blocks
    float *key_sums, *value_sums;  // [B * G * shares][K][padded size]

    int64_t sums_of(int64_t head, int64_t share) const { return head * shares + share; }
};

inline Terms terms_of(const Arguments& call, int64_t batch, const Row& row, float dot) {
    const int64_t plane = call.batch * call.heads * call.queries, place = place_of(call, batch, row);
    float value[Column::COUNT] = {}, grad[Column::COUNT] = {};
    for (int column = 0; column < Column::COUNT; column++) {
        if (call.place[column] < 0) continue;
        value[column] = call.state[call.place[column] * plane + place];
        grad[column] = call.grad_state[call.place[column] * plane + place];
    }
    Terms terms = {};
    terms.empty = value[Column::VISIBLE_KEYS] == 0;
    if (terms.empty) return terms;
    const float m = value[Column::MAXIMUM], z = value[Column::LOG_SUM];
    terms.bad = !(std::fabs(m) < INFINITY) || !(std::fabs(z) < INFINITY);
    terms.base = m, terms.log_total = z, terms.mean = value[Column::MEAN_DEPTH];
    terms.mass = float(mass_of(call, row, double(m) + double(z)));
    // Moving scores does not move such a row's output; dP - D would be the difference of two orders of summing, which a
    // tiny temperature multiplies by 1 / T^2.
    const bool settled = z == 0 && terms.mass == 1;
    terms.output = settled ? 0.0f : terms.mass;
    terms.dot = settled ? 0.0f : dot;
    terms.depth = grad[Column::MEAN_DEPTH], terms.variance = grad[Column::VARIANCE];
    terms.squares = 2 * grad[Column::SQUARED_WEIGHTS];
    terms.first = grad[Column::FIRST_TOKENS], terms.distance = grad[Column::DISTANCE];
    terms.own = grad[Column::OWN_KEY], terms.span = grad[Column::SPAN];
    terms.constant = grad[Column::LOG_SUM] - terms.mass * terms.dot - terms.variance * value[Column::VARIANCE] -
                     terms.first * value[Column::FIRST_TOKENS] - terms.distance * value[Column::DISTANCE] -
                     terms.own * value[Column::OWN_KEY] - terms.span * value[Column::SPAN] -
                     terms.depth - 2 * grad[Column::SQUARED_WEIGHTS] * value[Column::SQUARED_WEIGHTS];
    terms.top = grad[Column::MAXIMUM] - grad[Column::LOG_SUM] + terms.depth;
    return terms;
}

// P (times mass) over the scores and dS over dP, for one row and keys begin .. begin + n. `top` is the place of the
// maximum, or -1. Among the products the constants of its exponentials would take registers from them.
ATTEMPER_APART void score_gradients(const Arguments& call, int64_t batch, const Row& row, const Terms& terms,
                                    float* weight, float* gradient, int64_t begin, int64_t n, int64_t top) {
    const Vec least = splat(VANISHED), zero = {};
    const Vec shift = splat(terms.bad ? NAN : 0.0f);
    const bool squares = terms.depth != 0 || terms.variance != 0;
    const bool single = terms.first != 0 || terms.own != 0 || terms.span != 0;  // what single keys take
    const auto finish = [&](int64_t j, Vec p, Vec ds, Vec number) {
        if (terms.distance != 0) ds += magnitude(number) * terms.distance;
        store(gradient + j, p == zero ? zero : p * ds);
        store(weight + j, p * terms.mass);
    };
    const Vec start = lane_numbers() + float(begin - row.position);
    Vec number = start;
    for (int64_t j = 0; j < n; j += LANES, number += float(LANES)) {
        Vec d = larger(load(weight + j) - terms.base, least);
        Vec p = exp_negative(larger(d - terms.log_total, least)) + shift;
        Vec ds = load(gradient + j) * terms.output + terms.constant + p * terms.squares;
        if (squares) {
            Vec x = d + terms.mean;
            ds += x * (x * terms.variance + (2 * terms.variance - terms.depth));
        }
        if (!single) {
            finish(j, p, ds, number);
        } else {
            store(gradient + j, ds);
            store(weight + j, p);
        }
    }
    if (single) {
        const Marks first = first_tokens_of(call, batch), span = span_of(call, batch);
        const int64_t end = begin + n < call.keys ? begin + n : call.keys;
        for (int64_t key = begin; terms.first != 0 && key < end; key++)
            if (first[key]) gradient[key - begin] += terms.first;
        for (int64_t key = begin; terms.span != 0 && key < end; key++)
            if (span[key]) gradient[key - begin] += terms.span;
        if (row.position >= begin && row.position < end) gradient[row.position - begin] += terms.own;
        number = start;
        for (int64_t j = 0; j < n; j += LANES, number += float(LANES))
            finish(j, load(weight + j), load(gradient + j), number);
    }
    if (top >= begin && top < begin + n) gradient[top - begin] += terms.top;
}

// Rows of a tensor [B, H, Q, size], as broadcast tiles and as lines; times `factor` if not null; zeros where `skip`.
// `buffer` holds ROWS lines, `tiles` LANES floats more than it is given.
inline void pack_both(const View& view, int64_t batch, const Row* rows, const Terms* skip, const float* factor,
                      int64_t count, int64_t size, int64_t room, float* buffer, float* tiles, float* lines) {
    const int64_t wide = up(size, PANEL);
    for (int64_t tile = 0; tile < up(count, ROWS); tile += ROWS) {
        std::memset(buffer, 0, size_t(ROWS * wide) * 4);
        for (int64_t i = tile; i < tile + ROWS; i++) {
            float* line = buffer + (i - tile) * wide;
            if (i < count && !(skip && skip[i].empty)) {
                read_row(view, at(view, batch, rows[i].head, rows[i].query), view.stride[3], size, line);
                if (factor)
                    for (int64_t d = 0; d < wide; d += LANES) store(line + d, load(line + d) * factor[i]);
            }
            for (int64_t p = 0; p < wide; p += PANEL) std::memcpy(lines + p * room + i * PANEL, line + p, PANEL * 4);
        }
        turn_tile(buffer, wide, size, tiles + tile * size);
    }
}

// Everything a chunk of rows needs, cut from the thread's arena.
struct Desk {
    float *query_tiles, *query_lines, *above_tiles, *above_lines, *query_sum;
    float *key_columns, *key_lines, *value_columns;
    float *weights, *gradients, *softcap, *bias, *line, *factor, *buffer;
    Row* rows;
    Terms* terms;
    int64_t* top;
    float* best;
#if defined(ATTEMPER_HALF)
    bool halves, above_is_half;
    uint16_t *query_halves, *above_halves, *key_halves, *value_halves, *half_buffer;
    std::optional<Tiles> tiles;
#endif

    Desk(const Arguments& call, int64_t chunk) {
        const int64_t depth = call.depth, width = call.width, deep = up(depth, PANEL), wide = up(width, PANEL);
        Arena& memory = arena();
        memory.reserve(4 * (2 * LANES + chunk * (depth + 2 * deep + width + wide + 2) + KEYS * (depth + deep + width) +
                            2 * SWEEP * APART + 2 * KEYS + deep + 2 * wide + LINES * (deep + wide)) +
                       chunk * int64_t(sizeof(Row) + sizeof(Terms) + 8) + half_bytes(call, chunk) + 4096);
        query_tiles = memory.floats(chunk * depth + LANES), query_lines = memory.floats(chunk * deep);
        above_tiles = memory.floats(chunk * width + LANES), above_lines = memory.floats(chunk * wide);
        query_sum = memory.floats(chunk * deep);
        key_columns = memory.floats(KEYS * depth), key_lines = memory.floats(KEYS * deep);
        value_columns = memory.floats(KEYS * width);
        weights = memory.floats(SWEEP * APART), gradients = memory.floats(SWEEP * APART);
        softcap = memory.floats(KEYS), bias = memory.floats(KEYS), line = memory.floats(deep + 2 * wide);
        factor = memory.floats(chunk), best = memory.floats(chunk);
        buffer = memory.floats(LINES * (deep + wide));
        rows = memory.things<Row>(chunk), terms = memory.things<Terms>(chunk), top = memory.things<int64_t>(chunk);
#if defined(ATTEMPER_HALF)
        halves = takes_halves(call), above_is_half = halves && width && call.grad_output.type == BFLOAT16;
        if (!halves) return;
        const int64_t keys_deep = up(depth, STEP), values_deep = up(width, STEP);
        query_halves = memory.things<uint16_t>(chunk * keys_deep);
        above_halves = memory.things<uint16_t>(chunk * values_deep);
        key_halves = memory.things<uint16_t>(KEYS * keys_deep);
        value_halves = memory.things<uint16_t>(KEYS * values_deep);
        half_buffer = memory.things<uint16_t>(16 * (keys_deep + values_deep));
        tiles.emplace();
#endif
    }

private:
    static int64_t half_bytes(const Arguments& call, int64_t chunk) {
#if defined(ATTEMPER_HALF)
        return takes_halves(call) ? 2 * (chunk + KEYS + 16) * (up(call.depth, STEP) + up(call.width, STEP)) + 512 : 0;
#else
        return (void)call, (void)chunk, 0;
#endif
    }
};

// Products of `count` rows from row `first` of the desk with columns, at [row][APART].
inline void score_tiles(const float* tiles, const float* columns, int64_t size, int64_t first, int64_t count,
                        const Span& span, float* to) {
    for (int64_t tile = 0; tile < count; tile += ROWS)
        for (int64_t p = span.begin; p < span.end; p += PANEL)
            product<1>(tiles + (first + tile) * size, ROWS, columns + p * size, size, to + tile * APART + p, APART);
}

#if defined(ATTEMPER_HALF)
// The same of bfloat16; `factors`: what the rows still lack, or null.
inline void score_halves(const uint16_t* lines, const uint16_t* columns, int64_t deep, const float* factors,
                         int64_t first, int64_t count, const Span& span, float* to) {
    for (int64_t tile = 0; tile < count; tile += TALL)
        for (int64_t p = span.begin; p < span.end; p += PANEL)
            half_product<false>(count - tile, lines + (first + tile) * deep, deep, columns + p * deep, COLUMNS * deep,
                                deep / STEP, to + tile * APART + p, APART);
    if (!factors) return;
    for (int64_t i = 0; i < count; i++)
        for (int64_t p = span.begin; p < span.end; p += LANES) {
            float* at = to + i * APART + p;
            store(at, load(at) * factors[first + i]);
        }
}
#endif

// Rows of a product of scores.
inline int64_t tall_of(const Desk& desk) {
#if defined(ATTEMPER_HALF)
    if (desk.halves) return TALL;
#endif
    return (void)desk, ROWS;
}

// Scores q k^T of rows of the desk, times their multipliers, at [row][APART]; the softcap is left to the caller.
inline void score_rows(const Arguments& call, const Desk& desk, int64_t first, int64_t count, const Span& span,
                       float* to) {
#if defined(ATTEMPER_HALF)
    if (desk.halves)
        return score_halves(desk.query_halves, desk.key_halves, up(call.depth, STEP), desk.factor, first, count, span,
                            to);
#endif
    score_tiles(desk.query_tiles, desk.key_columns, call.depth, first, count, span, to);
}

// dP = dO V^T of the same rows; zeros where there are no values.
inline void meet_values(const Arguments& call, const Desk& desk, int64_t first, int64_t count, const Span& span,
                        float* to) {
    if (call.width == 0) {
        std::memset(to, 0, size_t(count * APART) * 4);
        return;
    }
#if defined(ATTEMPER_HALF)
    if (desk.above_is_half)
        return score_halves(desk.above_halves, desk.value_halves, up(call.width, STEP), nullptr, first, count, span,
                            to);
#endif
    score_tiles(desk.above_tiles, desk.value_columns, call.width, first, count, span, to);
}

// Keys of a block as columns.
inline void take_key_columns(const Arguments& call, int64_t batch, int64_t group, int64_t block, int64_t seen,
                             Desk& desk) {
    const View& key = call.key;
    const int64_t place = at(key, batch, group, block), padded = up(seen, PANEL);
#if defined(ATTEMPER_HALF)
    if (desk.halves) {
        pack_half_columns(key, place, key.stride[2], key.stride[3], seen, call.depth, padded, desk.half_buffer,
                          desk.key_halves);
        return;
    }
#endif
    pack_columns(key, place, key.stride[2], key.stride[3], seen, call.depth, padded, desk.buffer, desk.key_columns);
}

inline void take_value_columns(const Arguments& call, int64_t batch, int64_t group, int64_t block, int64_t seen,
                               Desk& desk) {
    if (call.width == 0) return;
    const View& value = call.value;
    const int64_t place = at(value, batch, group, block), padded = up(seen, PANEL);
#if defined(ATTEMPER_HALF)
    if (desk.above_is_half) {
        pack_half_columns(value, place, value.stride[2], value.stride[3], seen, call.width, padded, desk.half_buffer,
                          desk.value_halves);
        return;
    }
#endif
    pack_columns(value, place, value.stride[2], value.stride[3], seen, call.width, padded, desk.buffer,
                 desk.value_columns);
}

// The chunk's queries and upstream gradients in every form that its products want.
inline void take_rows(const Arguments& call, int64_t batch, int64_t chunk, int64_t count, Desk& desk) {
    pack_both(call.query, batch, desk.rows, nullptr, desk.factor, count, call.depth, chunk, desk.buffer,
              desk.query_tiles, desk.query_lines);
    if (call.width)
        pack_both(call.grad_output, batch, desk.rows, desk.terms, nullptr, count, call.width, chunk, desk.buffer,
                  desk.above_tiles, desk.above_lines);
#if defined(ATTEMPER_HALF)
    const auto take = [&](const View& view, int64_t size, uint16_t* to) {
        const int64_t deep = up(size, STEP);
        Most most;
        for (int64_t i = 0; i < count; i++)
            copy_halves(view, at(view, batch, desk.rows[i].head, desk.rows[i].query), view.stride[3], size, deep,
                        to + i * deep, most);
        std::memset(to + count * deep, 0, size_t((up(count, TALL) - count) * deep) * 2);
    };
    if (desk.halves) take(call.query, call.depth, desk.query_halves);
    if (desk.above_is_half) take(call.grad_output, call.width, desk.above_halves);
#endif
}

// Where the maximum of each row stands, the lowest index among ties: one more pass over the keys, only for calls that
// differentiate the maximum itself.
inline void find_tops(const Arguments& call, int64_t batch, int64_t group, Desk& desk, int64_t count, int64_t low,
                      int64_t high) {
    Bias biases(call, batch, desk.bias);
    for (int64_t i = 0; i < count; i++) desk.best[i] = -INFINITY;
    for (int64_t block = low / KEYS * KEYS; block < high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS;
        take_key_columns(call, batch, group, block, seen, desk);
        for (int64_t first = 0; first < count; first += SWEEP) {
            const int64_t real = count - first < SWEEP ? count - first : SWEEP;
            const Span span(desk.rows + first, real, block, seen);
            if (span.begin >= span.end) continue;
            score_rows(call, desk, first, real, span, desk.weights);
            for (int64_t i = 0; i < real; i++) {
                float* s = desk.weights + i * APART + span.begin;
                const float* bias = biases.row(desk.rows[first + i], block, seen);
                shape_row(call, desk.rows[first + i], s, bias ? bias + span.begin : nullptr, block + span.begin,
                          span.end - span.begin, nullptr);
                const float best = highest(s, span.end - span.begin);
                if (!(best > desk.best[first + i])) continue;
                desk.best[first + i] = best;
                int64_t j = 0;
                while (s[j] != best) j++;
                desk.top[first + i] = block + span.begin + j;
            }
        }
    }
}

inline void add_mask_gradient(const Arguments& call, int64_t batch, const Row& row, const float* gradient,
                              int64_t begin, int64_t n) {
    const int64_t* stride = call.grad_mask_stride;
    float* to = call.grad_mask + batch * stride[0] + row.head * stride[1] + row.query * stride[2];
    const int64_t end = begin + n < call.keys ? begin + n : call.keys;
    for (int64_t key = begin; key < end; key++) to[key * stride[3]] += gradient[key - begin];
}

// P and dS of the desk's row `number`, over its scores and dP of the keys of a span.
inline void row_gradients(const Arguments& call, int64_t batch, const Desk& desk, int64_t number, float* scores,
                          float* gradients, const Span& span, int64_t block, int64_t seen, Bias& biases) {
    const Row& row = desk.rows[number];
    const Terms& terms = desk.terms[number];
    const int64_t n = span.end - span.begin;
    float *s = scores + span.begin, *ds = gradients + span.begin;
    if (terms.empty) {
        std::memset(s, 0, size_t(n) * 4);
        std::memset(ds, 0, size_t(n) * 4);
        return;
    }
    // Where forward found no score that is not finite there is none.
    const Shape shape = shape_of(call, span, !terms.bad);
    const float* bias = biases.row(row, block, seen);
    if (shape == Shape::ENDS)
        hide_ends(row, s, span, block);
    else if (shape == Shape::MASK)
        hide(s, bias, n);
    else if (shape == Shape::ALL)
        shape_row(call, row, s, bias ? bias + span.begin : nullptr, block + span.begin, n, desk.softcap);
    score_gradients(call, batch, row, terms, s, ds, block + span.begin, n, desk.top[number]);
    if (call.grad_mask) add_mask_gradient(call, batch, row, ds, block + span.begin, n);
    if (call.softcap > 0)
        for (int64_t j = 0; j < n; j += LANES) store(ds + j, load(ds + j) * load(desk.softcap + j));
}

// Zeros at the keys of `whole` outside `part`; at all of them if `part` is empty.
inline void clear_beside(const Span& part, const Span& whole, float* line) {
    const int64_t begin = part.begin < part.end ? part.begin : whole.end;
    const int64_t end = part.begin < part.end ? part.end : whole.end;
    std::memset(line + whole.begin, 0, size_t(begin - whole.begin) * 4);
    std::memset(line + end, 0, size_t(whole.end - end) * 4);
}

// One block of keys against the rows of the desk. The rows of a tile look at the keys that one of them sees; the sums
// of a key take in the tiles that see it.
inline void backward_block(const Arguments& call, int64_t batch, int64_t group, Desk& desk, int64_t chunk,
                           int64_t count, int64_t block, float* key_sum, float* value_sum) {
    const int64_t depth = call.depth, width = call.width, deep = up(depth, PANEL), wide = up(width, PANEL);
    const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS, padded = up(seen, PANEL);
    const int64_t tall = tall_of(desk);
    float ones[ROWS];
    for (float& one : ones) one = 1.0f;
    const int64_t key_place = at(call.key, batch, group, block);
    take_key_columns(call, batch, group, block, seen, desk);
    take_value_columns(call, batch, group, block, seen, desk);
    pack_lines(call.key, key_place, call.key.stride[2], call.key.stride[3], seen, depth, padded, KEYS, desk.key_lines);
    Bias biases(call, batch, desk.bias);
    for (int64_t first = 0; first < count; first += SWEEP) {
        const int64_t real = count - first < SWEEP ? count - first : SWEEP;
        const Span span(desk.rows + first, real, block, seen);
        if (span.begin >= span.end) continue;
        int64_t begins[SWEEP / ROWS], ends[SWEEP / ROWS];  // of the keys that tiles of the sweep see
        for (int64_t tile = 0; tile < real; tile += tall) {
            const int64_t rows = real - tile < tall ? real - tile : tall;
            const Span part(desk.rows + first + tile, rows, block, seen);
            float *scores = desk.weights + tile * APART, *gradients = desk.gradients + tile * APART;
            score_rows(call, desk, first + tile, rows, part, scores);
            meet_values(call, desk, first + tile, rows, part, gradients);
            for (int64_t i = 0; i < rows; i++, scores += APART, gradients += APART) {
                if (part.begin < part.end)
                    row_gradients(call, batch, desk, first + tile + i, scores, gradients, part, block, seen, biases);
                clear_beside(part, span, scores);
                clear_beside(part, span, gradients);
            }
        }
        for (int64_t i = real; i < up(real, ROWS); i++) std::memset(desk.gradients + i * APART, 0, KEYS * 4);
        for (int64_t tile = 0; tile < real; tile += ROWS) {
            const Span part(desk.rows + first + tile, real - tile < ROWS ? real - tile : ROWS, block, seen);
            begins[tile / ROWS] = part.begin, ends[tile / ROWS] = part.end;
            if (part.begin >= part.end || (!call.grad_query && !call.grad_multiplier)) continue;
            for (int64_t p = 0; p < deep; p += PANEL)
                add_product<APART>(desk.gradients + tile * APART + part.begin, 1,
                                   desk.key_lines + p * KEYS + part.begin * PANEL, part.begin, part.end - part.begin,
                                   desk.query_sum + (first + tile) * deep + p, deep, ones);
        }
        const auto depth_of = [&](int64_t key, int64_t n) {
            const int64_t from = span.begin + key, until = from + n;
            int64_t low = 0, high = up(real, ROWS);
            while (low < high && (ends[low / ROWS] <= from || begins[low / ROWS] >= until)) low += ROWS;
            while (low < high && (ends[high / ROWS - 1] <= from || begins[high / ROWS - 1] >= until)) high -= ROWS;
            return Depth{low, high < real ? high : real};
        };
        const int64_t n = span.end - span.begin;
        if (value_sum)
            for (int64_t p = 0; p < wide; p += PANEL)
                add_transposed(desk.weights + span.begin, APART, desk.above_lines + p * chunk + first * PANEL, n,
                               value_sum + (block + span.begin) * wide + p, wide, depth_of);
        if (key_sum)
            for (int64_t p = 0; p < deep; p += PANEL)
                add_transposed(desk.gradients + span.begin, APART, desk.query_lines + p * chunk + first * PANEL, n,
                               key_sum + (block + span.begin) * deep + p, deep, depth_of);
    }
}

// D = dO . O of a row, in float64.
inline float dot_of(const Arguments& call, int64_t batch, const Row& row, float* buffer) {
    if (call.width == 0) return 0.0f;
    float* other = buffer + up(call.width, PANEL);
    read_row(call.output, at(call.output, batch, row.head, row.query), call.output.stride[3], call.width, buffer);
    read_row(call.grad_output, at(call.grad_output, batch, row.head, row.query), call.grad_output.stride[3], call.width,
             other);
    double sum = 0;
    for (int64_t e = 0; e < call.width; e++) sum += double(buffer[e]) * other[e];
    return float(sum);
}

inline void write_rows(const Arguments& call, int64_t batch, const Desk& desk, int64_t count) {
    const int64_t depth = call.depth, deep = up(depth, PANEL);
    for (int64_t i = 0; i < count; i++) {
        const Row& row = desk.rows[i];
        const int64_t place = place_of(call, batch, row);
        const float* sum = desk.query_sum + i * deep;
        if (call.grad_query)
            for (int64_t d = 0; d < depth; d++) call.grad_query[place * depth + d] = sum[d] * desk.factor[i];
        if (call.grad_multiplier) {
            read_row(call.query, at(call.query, batch, row.head, row.query), call.query.stride[3], depth, desk.line);
            double total = 0;
            for (int64_t d = 0; d < depth; d++) total += double(sum[d]) * desk.line[d];
            call.grad_multiplier[place] = desk.terms[i].empty ? 0.0f : float(total);
        }
        if (call.grad_sink)
            call.grad_sink[place] = desk.terms[i].empty ? 0.0f : (desk.terms[i].mass - 1) * desk.terms[i].dot;
    }
}

inline void backward_head(const Backward& work, int64_t batch, int64_t group, int64_t share) {
    const Arguments& call = work.call;
    const int64_t deep = up(call.depth, PANEL), wide = up(call.width, PANEL), chunk = 2 * SWEEP;
    const int64_t all = call.heads / call.groups * call.queries;
    const int64_t start = share * work.share_rows, stop = start + work.share_rows < all ? start + work.share_rows : all;
    const int64_t sums = work.sums_of(batch * call.groups + group, share);
    float* key_sum = work.key_sums ? work.key_sums + sums * work.key_room * deep : nullptr;
    float* value_sum = work.value_sums ? work.value_sums + sums * work.key_room * wide : nullptr;
    if (key_sum) std::memset(key_sum, 0, size_t(work.key_room * deep) * 4);
    if (value_sum) std::memset(value_sum, 0, size_t(work.key_room * wide) * 4);
    Desk desk(call, chunk);
    for (int64_t first = start; first < stop; first += chunk) {
        const int64_t count = stop - first < chunk ? stop - first : chunk;
        place_rows(call, group, first, count, desk.rows);
        int64_t low = call.keys, high = 0;
        bool tops = false;
        for (int64_t i = 0; i < count; i++) {
            const Row& row = desk.rows[i];
            desk.terms[i] = terms_of(call, batch, row, dot_of(call, batch, row, desk.line));
            desk.factor[i] = multiplier_of(call, batch, row);
            desk.top[i] = -1;
            tops |= call.maximum_gradient && !desk.terms[i].empty && desk.terms[i].top != 0;
            low = row.low < low ? row.low : low;
            high = row.high > high ? row.high : high;
        }
        take_rows(call, batch, chunk, count, desk);
        std::memset(desk.query_sum, 0, size_t(chunk * deep) * 4);
        if (tops) find_tops(call, batch, group, desk, count, low, high);
        for (int64_t block = low / KEYS * KEYS; block < high; block += KEYS)
            backward_block(call, batch, group, desk, chunk, count, block, key_sum, value_sum);
        write_rows(call, batch, desk, count);
    }
}

// A task: the heads of its unit one after another, its share of their rows.
inline void backward_task(void* context, int64_t task, int64_t) {
    const Backward& work = *static_cast<const Backward*>(context);
    const int64_t unit = task / work.shares, share = task % work.shares, groups = work.call.groups;
    const int64_t own_groups = work.by_group ? groups : 1;
    for (int64_t batch = 0; batch < work.call.batch; batch++)
        for (int64_t group = 0; group < groups; group++)
            if ((work.by_batch ? batch : 0) * own_groups + (work.by_group ? group : 0) == unit)
                backward_head(work, batch, group, share);
}

// Adds the shares of one head in order and writes its gradients of keys and values.
inline void gather_task(void* context, int64_t head, int64_t) {
    const Backward& work = *static_cast<const Backward*>(context);
    const Arguments& call = work.call;
    const int64_t sizes[2] = {call.depth, call.width};
    float *sums[2] = {work.key_sums, work.value_sums}, *to[2] = {call.grad_key, call.grad_value};
    for (int which = 0; which < 2; which++) {
        if (!sums[which]) continue;
        const int64_t size = sizes[which], wide = up(size, PANEL);
        for (int64_t key = 0; key < call.keys; key++) {
            float* line = sums[which] + (work.sums_of(head, 0) * work.key_room + key) * wide;
            for (int64_t share = 1; share < work.shares; share++) {
                const float* other = line + share * work.key_room * wide;
                for (int64_t d = 0; d < wide; d += LANES) store(line + d, load(line + d) + load(other + d));
            }
            std::memcpy(to[which] + (head * call.keys + key) * size, line, size_t(size) * 4);
        }
    }
}

}  // namespace attemper
