// Attention by a normalizer that needs all keys of a row:   s as in scores.h,  w of s as in solve.h,  o = sum w v
//
//     for each chunk of rows                                   lines of scores, rows x keys: L2
//         for each block of KEYS keys                          packed keys: L2
//             for each tile of rows: scores q k^T, softcap, bias, masks, maxima       while they are in L1
//         for each row: weights, a list of the support; statistics over the list      L1
//             small support: output += w v, value by value, where they lie
//         tiles with much support: lines become weights, blocks of values are packed, output += W V as a product
//
// Memory beyond the tensors: rows x keys of one chunk for each thread. A row's results depend on nothing but its tile.
#pragma once
#include <vector>

#include "decode.h"
#include "solve.h"

namespace attemper {

// A call without a sink, and what only these normalizers have (python: backends/native/arguments.py).
struct RowwiseCall {
    Arguments call;
    int64_t normalizer;
    double number;          // k, or the least weight
    const float* per_head;  // [H]: alpha of entmax, the bias of sigmoid; null: none
    float* grad_per_head;   // [B, H, Q], as grad_sink

    Rule rule_of(const Row& row) const {
        return plain({Normalizer(normalizer), number, per_head ? per_head[row.head] : 0.0});
    }
};

constexpr int64_t LINE_BYTES = 1 << 20;  // of the lines of a chunk: half of L2

// A row as the solver left it.
struct Line {
    int64_t begin, end;  // whole panels that hold the keys it may see, as places in the line: its own, not its tile's
    int64_t size;        // of its support
    bool large;          // its weights are in its line
};

// Rows of a chunk and their lines of scores.
struct Lines {
    Row* rows;
    Line* lines;
    float *scores, *softcap_gradients;  // [row][apart]; derivatives of the softcap, or null
    int64_t apart, low, high, base;  // keys that the rows may see, and the key at place 0 of a line
    int64_t count, tall;

    float* line(int64_t i) const { return scores + i * apart; }
    float* softcap_gradients_of(int64_t i, int64_t place) const {
        return softcap_gradients ? softcap_gradients + i * apart + place : nullptr;
    }
};

// Where the rows stand and what they may see.
inline Lines lines_of(const Arguments& call, int64_t group, int64_t first, int64_t count, int64_t tall, Row* rows,
                      Line* lines) {
    Lines of{rows, lines, nullptr, nullptr, 0, call.keys, 0, 0, count, tall};
    place_rows(call, group, first, count, rows);
    for (int64_t i = 0; i < count; i++) {
        of.low = rows[i].low < of.low ? rows[i].low : of.low;
        of.high = rows[i].high > of.high ? rows[i].high : of.high;
    }
    of.base = of.low / KEYS * KEYS;
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = rows[i].low / PANEL * PANEL, end = up(rows[i].high, PANEL);
        lines[i] = {begin - of.base, (end > begin ? end : begin) - of.base, 0, false};
    }
    of.apart = (of.high > of.base ? up(of.high - of.base, KEYS) : 0) + LANES;  // + LANES: not the same sets of L1
    return of;
}

// Scores of all rows, shaped, with the rows' maxima and counts.
template <class Scores>
inline void fill_lines(const Arguments& call, int64_t batch, int64_t group, Scores& scores, float most_query,
                       Bias& biases, Lines& of) {
    for (int64_t block = of.base; block < of.high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS;
        const float most_key = scores.take_keys(batch, group, block, seen);
        const bool finite = double(most_query) * most_key * double(call.depth) < SAFE_PRODUCT;
        for (int64_t tile = 0; tile < of.count; tile += of.tall) {
            const int64_t real = of.count - tile < of.tall ? of.count - tile : of.tall;
            const Span span(of.rows + tile, real, block, seen);
            if (span.begin >= span.end) continue;
            const int64_t place = block - of.base + span.begin;
            const Shape shape = shape_of(call, span, finite);
            scores.write(tile, real, span, of.line(tile) + block - of.base, of.apart);
            for (int64_t i = tile; i < tile + real; i++) {
                Row& row = of.rows[i];
                float* s = of.line(i) + place;
                const float best = shaped_best(call, row, s, biases, block, seen, span, shape, nullptr,
                                               of.softcap_gradients_of(i, place));
                row.maximum = best > row.maximum ? best : row.maximum;
            }
        }
    }
}

// Buffers of one row's support, from the arena.
inline int64_t support_bytes(int64_t n) { return 16 * room_of(n) + 512; }

inline Support support_from(Arena& memory, int64_t n) {
    const int64_t room = room_of(n);
    Support of{};
    of.weight = memory.floats(room), of.distance = memory.floats(room), of.spare = memory.floats(room);
    of.place = memory.things<int32_t>(room);
    return of;
}

// What the statistics of a row need, summed over its support in float64.
struct Moments {
    double total = 0, mean = 0;  // W, sum p d
    double share = 0;            // 1 / W, or 0
};

inline Moments moments_of(const Support& of) {
    Doubles total = {}, first = {};
    int64_t j = 0;
    for (; j + DOUBLES <= of.size; j += DOUBLES) {
        const Doubles w = load_doubles(of.weight + j);
        total += w, first += w * load_doubles(of.distance + j);
    }
    Moments sums{lane_sum(total), lane_sum(first), 0};
    for (; j < of.size; j++) sums.total += of.weight[j], sums.mean += double(of.weight[j]) * of.distance[j];
    sums.share = sums.total > 0 ? 1 / sums.total : 0;
    sums.mean *= sums.share;
    return sums;
}

// sum w log w; `logs` gets the logarithms, padded to whole vectors.
inline double weighted_logs(const Support& of, float* logs) {
    for (int64_t j = 0; j < of.size; j += LANES) store(logs + j, log_of(load(of.weight + j)));
    return dot_of(of.weight, logs, of.size);
}

// sum w (d - mean)^2
inline double spread_of(const Support& of, double mean) {
    Doubles sum = {};
    int64_t j = 0;
    for (; j + DOUBLES <= of.size; j += DOUBLES) {
        const Doubles d = load_doubles(of.distance + j) - splat_double(mean);
        sum += load_doubles(of.weight + j) * d * d;
    }
    double rest = 0;
    for (; j < of.size; j++) rest += of.weight[j] * (of.distance[j] - mean) * (of.distance[j] - mean);
    return lane_sum(sum) + rest;
}

// Sum of the weights of the marked keys of a list. `first_key`: the key at place 0.
inline double marked_sum(const Support& of, const Marks& marks, int64_t first_key) {
    double sum = 0;
    for (int64_t j = 0; j < of.size; j++)
        if (marks[first_key + of.place[j]]) sum += of.weight[j];
    return sum;
}

// What a row's support tells, of the state columns that were asked for.
inline void describe(const Arguments& call, int64_t batch, const Row& row, const Support& support, int64_t first_key,
                     double (&columns)[Column::COUNT]) {
    columns[Column::THRESHOLD] = support.found;
    bool more = false;
    for (int column = Column::MASS; column < Column::COUNT; column++) more |= call.place[column] >= 0;
    if (!more) return;
    const Moments sums = moments_of(support);
    const double share = sums.share;
    columns[Column::MASS] = sums.total, columns[Column::MEAN_DEPTH] = sums.mean < 0 ? -sums.mean : 0.0;
    float most = 0;
    int64_t size = 0;
    for (int64_t j = 0; j < support.size; j++) {
        most = support.weight[j] > most ? support.weight[j] : most;
        size += support.weight[j] > 0;
    }
    columns[Column::LARGEST_WEIGHT] = most * share, columns[Column::SUPPORT] = double(size);
    if (call.place[Column::FIRST_TOKENS] >= 0)
        columns[Column::FIRST_TOKENS] = marked_sum(support, first_tokens_of(call, batch), first_key) * share;
    if (call.place[Column::SPAN] >= 0)
        columns[Column::SPAN] = marked_sum(support, span_of(call, batch), first_key) * share;
    if (call.place[Column::OWN_KEY] >= 0)
        for (int64_t j = 0; j < support.size; j++)
            if (first_key + support.place[j] == row.position) columns[Column::OWN_KEY] = support.weight[j] * share;
    if (call.place[Column::DISTANCE] >= 0)
        for (int64_t j = 0; j < support.size; j++)
            columns[Column::DISTANCE] +=
                support.weight[j] * share * std::fabs(double(first_key + support.place[j] - row.position));
    if (call.place[Column::ENTROPY] >= 0 && sums.total > 0) {
        const double entropy = std::log(sums.total) - weighted_logs(support, support.spare) * share;
        columns[Column::ENTROPY] = entropy > 0 ? entropy : 0.0;
    }
    if (call.place[Column::VARIANCE] >= 0) columns[Column::VARIANCE] = spread_of(support, sums.mean) * share;
    if (call.place[Column::SQUARED_WEIGHTS] >= 0)
        columns[Column::SQUARED_WEIGHTS] = dot_of(support.weight, support.weight, support.size) * share * share;
}

// Writes the row's state. `first_key`: the key at place 0.
inline void write_row_state(const Arguments& call, int64_t batch, const Row& row, const Support& support,
                            int64_t first_key) {
    double columns[Column::COUNT] = {};
    columns[Column::MAXIMUM] = row.maximum, columns[Column::VISIBLE_KEYS] = double(row.count);
    if (row.count > 0 && !row.bad) describe(call, batch, row, support, first_key, columns);
    StateWriter(call, place_of(call, batch, row)).add(row, columns);
}

// to += sum w v over a list of keys, WIDE vectors of the width from `from` on, summed as by add_product. `first`: the
// key at place 0.
template <int WIDE>
inline void gather(const View& view, int64_t base, int64_t width, int64_t first, const float* weight,
                   const int32_t* place, int64_t size, int64_t from, float* buffer, float* to) {
    for (int64_t j = 0; j < size;) {
        const int64_t block = (first + place[j]) / KEYS;
        Vec whole[WIDE] = {};
        while (j < size && (first + place[j]) / KEYS == block) {
            const int64_t piece = (first + place[j]) / PIECE;
            Vec sum[WIDE] = {};
            for (; j < size && (first + place[j]) / PIECE == piece; j++) {
                const float* v = row_at(view, base + place[j] * view.stride[2], view.stride[3], width, buffer) + from;
                const Vec w = splat(weight[j]);
#pragma GCC unroll 8
                for (int e = 0; e < WIDE; e++) sum[e] += w * load(v + e * LANES);
            }
#pragma GCC unroll 8
            for (int e = 0; e < WIDE; e++) whole[e] += sum[e];
        }
#pragma GCC unroll 8
        for (int e = 0; e < WIDE; e++) store(to + from + e * LANES, load(to + from + e * LANES) + whole[e]);
    }
}

// to [up(width, LANES)] += sum w v; `base`: the place of the value of key 0 of the list. `buffer` holds zeros past the
// width.
inline void gather(const View& view, int64_t base, int64_t width, int64_t first, const float* weight,
                   const int32_t* place, int64_t size, float* buffer, float* to) {
    const int64_t wide = up(width, LANES);
    for (int64_t from = 0; from < wide;) {
        const int64_t left = (wide - from) / LANES;
        if (left >= 8) gather<8>(view, base, width, first, weight, place, size, from, buffer, to), from += 8 * LANES;
        else if (left >= 4)
            gather<4>(view, base, width, first, weight, place, size, from, buffer, to), from += 4 * LANES;
        else if (left >= 2)
            gather<2>(view, base, width, first, weight, place, size, from, buffer, to), from += 2 * LANES;
        else gather<1>(view, base, width, first, weight, place, size, from, buffer, to), from += LANES;
    }
}

// The support of a line of weights.
inline void list_line(const float* line, const Line& of, Support& to) {
    Ints place = lane_places() + int32_t(of.begin);
    int64_t count = 0;
    for (int64_t j = of.begin; j < of.end; j += LANES, place += LANES) {
        const Vec w = load(line + j);
        const Mask in = below(Vec{}, w);
        compress(in, w, to.weight + count);
        compress(in, place, to.place + count);
        count += marked(in);
    }
    to.size = count;
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

// Solves one row; its list counts places from the line's begin.
inline void solve_line(const RowwiseCall& of, const Lines& lines, int64_t i, Support& support) {
    const Row& row = lines.rows[i];
    const Line& line = lines.lines[i];
    solve(lines.line(i) + line.begin, line.end - line.begin, row.maximum, of.rule_of(row), support);
}

// Rows of a chunk whose lines stay in L2, whatever the threads. `lines`: how many floats a key takes in a row's lines.
inline int64_t rowwise_chunk(const Arguments& call, int64_t tall, int64_t lines) {
    int64_t keys = call.keys;
    if (call.left + call.right < keys - 2 * KEYS) keys = call.left + call.right + 2 * KEYS;
    const int64_t chunk = LINE_BYTES / (4 * lines * (keys + LANES)) / tall * tall, most = 128 / tall * tall;
    return chunk < tall ? tall : (chunk > most ? most : chunk);
}

struct RowwiseForward {
    const RowwiseCall& of;
    Cut cut;
};

// Weights at the places begin .. begin + n of a line, of which some may lie outside of what was computed: zeros there.
inline void copy_line(const Lines& of, int64_t i, int64_t begin, int64_t n, float* to) {
    const Line& line = of.lines[i];
    const int64_t from = begin > line.begin ? begin : line.begin, end = begin + n < line.end ? begin + n : line.end;
    const bool any = line.large && from < end;
    if (!any || end - from < n) std::memset(to, 0, size_t(n) * 4);
    if (any) std::memcpy(to + (from - begin), of.line(i) + from, size_t(end - from) * 4);
}

// Weighted values of the tiles that take them as a product: `dense` marks them.
inline void add_blocks(const Arguments& call, int64_t batch, int64_t group, const Lines& of, const bool* dense,
                       float* values, float* square, float* output) {
    const int64_t wide = up(call.width, PANEL);
    float ones[ROWS];
    for (float& one : ones) one = 1.0f;
    for (int64_t block = of.base; block < of.high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS, place = block - of.base;
        const View& value = call.value;
        pack_lines(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, call.width,
                   up(seen, PANEL), KEYS, values);
        for (int64_t tile = 0; tile < of.count; tile += ROWS) {
            if (!dense[tile / ROWS]) continue;
            const int64_t real = of.count - tile < ROWS ? of.count - tile : ROWS;
            const Span span(of.rows + tile, real, block, seen);
            if (span.begin >= span.end) continue;
            const int64_t n = span.end - span.begin;
            if (real < ROWS) std::memset(square + real * KEYS, 0, size_t((ROWS - real) * KEYS) * 4);
            for (int64_t i = 0; i < real; i++) copy_line(of, tile + i, place + span.begin, n, square + i * KEYS);
            for (int64_t p = 0; p < wide; p += PANEL)
                add_product<KEYS>(square, 1, values + p * KEYS + span.begin * PANEL, span.begin, n,
                                  output + tile * wide + p, wide, ones);
        }
    }
}

template <class Scores>
inline void rowwise_forward_chunk(const RowwiseCall& of, const Cut& cut, int64_t task) {
    const Arguments& call = of.call;
    const auto [batch, group, first, count] = Chunk(call, cut, task);
    const int64_t width = call.width, wide = up(width, PANEL), tall = up(cut.chunk, Scores::TALL);
    const int64_t tiles = tall / ROWS + 1;

    static thread_local std::vector<Row> rows;
    static thread_local std::vector<Line> line_of;
    rows.resize(size_t(tall)), line_of.resize(size_t(tall));
    Lines lines = lines_of(call, group, first, count, Scores::TALL, rows.data(), line_of.data());
    Arena& memory = arena();
    memory.reserve(Scores::bytes(call, tall) + 4 * tall * (lines.apart + wide) + support_bytes(lines.apart) +
                   4 * (2 * KEYS + ROWS * KEYS + 2 * wide + ROWS * wide + KEYS * wide) + tiles + 8192);
    lines.scores = memory.floats(tall * lines.apart);
    float* output = memory.floats((tall + ROWS) * wide);
    Scores scores(call, memory, tall);
    Bias biases(call, batch, memory.floats(KEYS));
    Support support = support_from(memory, lines.apart);
    float* buffer = memory.floats(wide + LANES);
    float* values = memory.floats(KEYS * wide);
    float* square = memory.floats(ROWS * KEYS);
    bool* dense = memory.things<bool>(tiles);
    std::memset(buffer, 0, size_t(wide + LANES) * 4);
    std::memset(output, 0, size_t((tall + ROWS) * wide) * 4);
    fill_lines(call, batch, group, scores, scores.take_queries(batch, rows.data(), count), biases, lines);
    bool any = false;
    for (int64_t tile = 0; tile < count; tile += ROWS) {
        const int64_t stop = tile + ROWS < count ? tile + ROWS : count;
        int64_t much = 0;
        for (int64_t i = tile; i < stop; i++) {
            const Row& row = lines.rows[i];
            Line& line = lines.lines[i];
            support.size = 0, support.found = 0;
            const bool empty = row.count == 0 || row.poison || row.maximum == -INFINITY;
            if (!empty) solve_line(of, lines, i, support);
            const int64_t start = lines.base + line.begin, n = line.end - line.begin;
            write_row_state(call, batch, row, support, start);
            if (empty || !width) continue;
            line.size = support.size, line.large = support.size * LARGE > n;
            if (line.large) {
                much += line.size;
                spread(support, support.weight, n, lines.line(i) + line.begin);
                continue;
            }
            gather(call.value, at(call.value, batch, group, start), width, start, support.weight, support.place,
                   support.size, buffer, output + i * wide);
        }
        dense[tile / ROWS] = pays(lines, tile, stop, much);
        any |= dense[tile / ROWS];
        if (dense[tile / ROWS] || much == 0) continue;
        for (int64_t i = tile; i < stop; i++) {
            if (!lines.lines[i].large) continue;
            list_line(lines.line(i), lines.lines[i], support);
            gather(call.value, at(call.value, batch, group, lines.base), width, lines.base, support.weight,
                   support.place, support.size, buffer, output + i * wide);
        }
    }
    if (any) add_blocks(call, batch, group, lines, dense, values, square, output);
    if (!width) return;
    for (int64_t i = 0; i < count; i++) {
        const Row& row = rows[size_t(i)];
        float* line = output + i * wide;
        if (row.poison)
            for (int64_t e = 0; e < width; e++) line[e] = NAN;
        if (row.count == 0) std::memset(line, 0, size_t(wide) * 4);
        write_row(call.output, at(call.output, batch, row.head, row.query), call.output.stride[3], width, line);
    }
}

template <class Scores>
void rowwise_forward_task(void* context, int64_t task, int64_t) {
    auto& work = *static_cast<RowwiseForward*>(context);
    rowwise_forward_chunk<Scores>(work.of, work.cut, task);
}

}  // namespace attemper
