// Attention by a normalizer that needs all keys of a row:   s as in scores.h,  w of s as in solve.h,  o = sum w v
//
//     for each chunk of rows                                   lines of scores, rows x keys: L2
//         for each block of KEYS keys                          packed keys: L2
//             for each tile of rows: scores q k^T, softcap, bias, masks, maxima       while they are in L1
//         for each row: weights, a list of the support; statistics over the list      L1
//             few keys: output += w v, value by value, where they lie
//             up to half of them: the list takes the place of the line;   more: the line becomes weights
//         for each block of KEYS keys                          packed values: L2
//             lists: output += w v, value by value;   lines: output += W V as a product
//
// Memory beyond the tensors: rows x keys of one chunk for each thread. A row's results depend on nothing but its tile.
#pragma once
#include <algorithm>
#include <vector>

#include "score_lines.h"
#include "solve.h"

namespace attemper {

// A call without a sink, and what only these normalizers and sigmoids have (python: backends/native/arguments.py).
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

// Rows of a head whose alpha or bias is NaN are as one with a visible score that is not finite.
inline void spoil(const RowwiseCall& of, const Lines& lines) {
    for (int64_t i = 0; i < lines.count; i++) {
        Row& row = lines.rows[i];
        row.bad |= row.count > 0 && of.per_head && std::isnan(of.per_head[row.head]);
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

// What the statistics of a row need.
struct Moments {
    double total = 0, mean = 0;  // W, sum p d
    double share = 0;            // 1 / W, or 0
    float most = 0;              // the largest weight
    int64_t size = 0;            // weights above 0: others underflowed
    bool peaked = false;         // the largest is so large that small ones would be rounded away beside it
};

// Calls `with` for the vectors of a list, in runs of at most SHORT keys, which are summed in float32: with the number
// of the first key and marks of those that are in the list. `after` ends a run.
template <class With, class After>
ATTEMPER_INLINE void for_runs(int64_t size, const With& with, const After& after) {
    for (int64_t begin = 0; begin < size; begin += SHORT) {
        const int64_t end = begin + SHORT < size ? begin + SHORT : size;
        int64_t j = begin;
        for (; j + LANES <= end; j += LANES) with(j, others(Mask{}));
        if (j < end) with(j, below(lane_numbers(), splat(float(end - j))));
        after();
    }
}

inline Moments moments_of(const Support& of) {
    Moments sums;
    Vec total = {}, first = {}, most = {};
    for_runs(
        of.size,
        [&](int64_t j, Mask in) {
            const Vec w = keep_where(in, load(of.weight + j)), d = keep_where(in, load(of.distance + j));
            total += w, first += w * d, most = larger(most, w);
            sums.size += marked(below(Vec{}, w));
        },
        [&] {
            sums.total += lane_sum(total), sums.mean += lane_sum(first);
            total = first = Vec{};
        });
    sums.most = lane_max(most);
    sums.peaked = sums.most > 0.25 * sums.total;
    if (sums.peaked)
        sums.total = sum_of(of.weight, of.size), sums.mean = dot_of(of.weight, of.distance, of.size);
    sums.share = sums.total > 0 ? 1 / sums.total : 0;
    sums.mean *= sums.share;
    return sums;
}

// With M the largest weight: sum w log (w / M), sum w (d - mean)^2, sum w^2. With log w in place of log (w / M) the first
// would lose its digits where M is nearly all of W.
struct Spread {
    double logarithms = 0, squares = 0, weights = 0;
};

inline Spread spread_of(const Support& of, const Moments& moments) {
    Spread sums;
    const Vec mean = splat(float(moments.mean)), top = log_of(splat(moments.most));
    Vec logarithms = {}, squares = {}, weights = {};
    for_runs(
        of.size,
        [&](int64_t j, Mask in) {
            const Vec w = keep_where(in, load(of.weight + j));
            const Vec apart = subtract_or_zero(in, load(of.distance + j), mean);
            logarithms += w * (log_of(w) - top);
            squares += w * apart * apart;
            weights += w * w;
        },
        [&] {
            sums.logarithms += lane_sum(logarithms), sums.squares += lane_sum(squares);
            sums.weights += lane_sum(weights);
            logarithms = squares = weights = Vec{};
        });
    if (moments.peaked) sums.weights = dot_of(of.weight, of.weight, of.size);
    return sums;
}

// Sum of the weights of the marked keys of a list. `first_key`: the key at place 0.
inline double marked_sum(const Support& of, const Marks& marks, int64_t first_key) {
    double sum = 0;
    const int32_t* last = of.place + of.size;
    if (!marks.data) last = std::lower_bound(of.place, of.place + of.size, marks.limit - first_key);
    const int64_t end = last - of.place;
    for (int64_t j = 0; j < end; j++) sum += marks[first_key + of.place[j]] ? double(of.weight[j]) : 0.0;
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
    columns[Column::LARGEST_WEIGHT] = sums.most * share, columns[Column::SUPPORT] = double(sums.size);
    // Sums are rounded in other orders: a share of them is at most 1, and no more keys take part than have weight.
    const auto share_of = [&](const Marks& marks) {
        return std::fmin(marked_sum(support, marks, first_key) * share, 1);
    };
    if (call.place[Column::FIRST_TOKENS] >= 0) columns[Column::FIRST_TOKENS] = share_of(first_tokens_of(call, batch));
    if (call.place[Column::SPAN] >= 0) columns[Column::SPAN] = share_of(span_of(call, batch));
    if (call.place[Column::OWN_KEY] >= 0) {
        const int32_t* end = support.place + support.size;
        const int32_t* own = std::lower_bound<const int32_t*>(support.place, end, row.position - first_key);
        if (own < end && *own == row.position - first_key)
            columns[Column::OWN_KEY] = support.weight[own - support.place] * share;
    }
    if (call.place[Column::DISTANCE] >= 0)
        for (int64_t j = 0; j < support.size; j++)
            columns[Column::DISTANCE] +=
                support.weight[j] * share * std::fabs(double(first_key + support.place[j] - row.position));
    if (call.place[Column::ENTROPY] < 0 && call.place[Column::VARIANCE] < 0 && call.place[Column::SQUARED_WEIGHTS] < 0)
        return;
    const Spread spread = spread_of(support, sums);
    if (sums.total > 0) {
        const double entropy = std::log(sums.total / sums.most) - spread.logarithms * share;
        columns[Column::ENTROPY] = entropy > 0 ? entropy : 0.0;
    }
    columns[Column::VARIANCE] = spread.squares * share;
    columns[Column::SQUARED_WEIGHTS] = std::fmax(spread.weights * share * share, sums.size ? 1 / double(sums.size) : 0);
}

// The row's state, to the writer. `first_key`: the key at place 0.
inline void write_row_state(const Arguments& call, int64_t batch, const Row& row, const Support& support,
                            int64_t first_key, StateWriter& state) {
    double columns[Column::COUNT] = {};
    columns[Column::MAXIMUM] = row.maximum, columns[Column::VISIBLE_KEYS] = double(row.count);
    if (row.count > 0 && !row.bad) describe(call, batch, row, support, first_key, columns);
    state.add(row, columns);
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

// Solves one row; its list counts places from the line's begin.
inline void solve_line(const RowwiseCall& of, const Lines& lines, int64_t i, Support& support) {
    const Row& row = lines.rows[i];
    const Line& line = lines.lines[i];
    solve(lines.line(i) + line.begin, line.end - line.begin, row.maximum, of.rule_of(row), support);
}

struct RowwiseForward {
    const RowwiseCall& of;
    Cut cut;
};

constexpr int64_t SHARED = 64;  // rows whose lists make up for packing a value

// A list in the place of its line: weights, then places.
inline void keep_list(const Support& of, float* line) {
    std::memmove(line, of.weight, size_t(of.size) * 4);
    std::memcpy(line + of.size, of.place, size_t(of.size) * 4);
}

// to += sum w v over those keys of a list, from the j-th on, that stand in a block, summed as by add_product; returns the
// first behind it. `values`: PANELS packed panels of the block, whose first key has the place `first`.
template <int PANELS>
ATTEMPER_INLINE int64_t add_listed(const float* weight, const int32_t* place, int64_t size, int64_t j, int64_t first,
                                   const float* values, float* to) {
    Vec whole[2 * PANELS] = {};
    while (j < size && place[j] < first + KEYS) {
        const int64_t stop = (place[j] - first) / PIECE * PIECE + PIECE + first;
        Vec sum[2 * PANELS] = {};
        for (; j < size && place[j] < stop; j++) {
            const float* v = values + (place[j] - first) * PANEL;
            const Vec w = splat(weight[j]);
#pragma GCC unroll 8
            for (int e = 0; e < 2 * PANELS; e++) sum[e] += w * load(v + (e / 2 * KEYS) * PANEL + e % 2 * LANES);
        }
#pragma GCC unroll 8
        for (int e = 0; e < 2 * PANELS; e++) whole[e] += sum[e];
    }
#pragma GCC unroll 8
    for (int e = 0; e < 2 * PANELS; e++) store(to + e * LANES, load(to + e * LANES) + whole[e]);
    return j;
}

// A block's values to the rows that kept a list.
inline void add_lists(const Lines& of, int64_t block, int64_t wide, const float* values, float* output) {
    for (int64_t i = 0; i < of.count; i++) {
        Line& line = of.lines[i];
        if (line.kept != Line::LIST || line.next == line.size) continue;
        const float* weight = of.line(i) + line.begin;
        const auto* place = reinterpret_cast<const int32_t*>(weight + line.size);
        const int64_t size = line.size, start = line.next, first = block - line.begin;
        for (int64_t p = 0; p < wide;) {
            float* to = output + i * wide + p;
            const float* from = values + p * KEYS;
            const int64_t panels = (wide - p) / PANEL >= 4 ? 4 : (wide - p) / PANEL >= 2 ? 2 : 1;
            if (panels == 4) line.next = add_listed<4>(weight, place, size, start, first, from, to);
            else if (panels == 2) line.next = add_listed<2>(weight, place, size, start, first, from, to);
            else line.next = add_listed<1>(weight, place, size, start, first, from, to);
            p += panels * PANEL;
        }
    }
}

inline void add_to(float* to, const float* from, int64_t n) {
    for (int64_t e = 0; e < n; e += LANES) store(to + e, load(to + e) + load(from + e));
}

// Rows of a tile whose weights are in their lines, against a block of values, as a product.
inline void add_lines(const Lines& of, int64_t tile, int64_t block, int64_t seen, int64_t wide, const float* values,
                      float* square, float* sums, float* output) {
    int64_t rows[ROWS], count = 0;
    for (int64_t i = tile; i < tile + ROWS && i < of.count; i++)
        if (of.lines[i].kept == Line::WEIGHTS) rows[count++] = i;
    if (count == 0) return;
    const Span span(of.rows + tile, (of.count - tile < ROWS ? of.count - tile : ROWS), block, seen);
    if (span.begin >= span.end) return;
    const int64_t n = span.end - span.begin;
    for (int64_t i = 0; i < count; i++)
        copy_line(of, rows[i], block - of.base + span.begin, n, square + i * KEYS);
    std::memset(square + count * KEYS, 0, size_t(up(count, 2) - count) * KEYS * 4);
    for_rows(count, [&](auto number) {
        for (int64_t p = 0; p < wide; p += PANEL)
            add_product<KEYS, decltype(number)::value>(square, 1, values + p * KEYS + span.begin * PANEL, span.begin,
                                                       n, sums + p, wide, nullptr);
    });
    for (int64_t i = 0; i < count; i++) add_to(output + rows[i] * wide, sums + i * wide, wide);
}

// Weighted values of the rows that kept a list, or their line.
inline void add_values(const Arguments& call, int64_t batch, int64_t group, const Lines& of, float* values,
                       float* square, float* sums, float* output) {
    const int64_t wide = up(call.width, PANEL);
    const View& value = call.value;
    for (int64_t block = of.base; block < of.high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS, place = block - of.base;
        pack_lines(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, call.width,
                   up(seen, PANEL), KEYS, values);
        add_lists(of, place, wide, values, output);
        for (int64_t tile = 0; tile < of.count; tile += ROWS)
            add_lines(of, tile, block, seen, wide, values, square, sums, output);
    }
}

// What stays of a row until the values come, packed, in the place of its scores; whether anything does. Where `rows` like
// it, those of a key head, would not read each packed value once, they are read where they lie. A list has room in its
// line up to half of the keys; it has the bits of a product, and meets no value that it leaves out.
inline bool keep(const Support& of, int64_t n, int64_t rows, float* scores, Line& line) {
    line.size = of.size;
    if (of.size * (rows < SHARED ? rows : SHARED) <= n) return false;
    line.kept = 2 * of.size <= n ? Line::LIST : Line::WEIGHTS;
    if (line.kept == Line::LIST) keep_list(of, scores);
    else spread(of, of.weight, n, scores);
    return true;
}

template <class Scores>
inline void rowwise_forward_chunk(const RowwiseCall& of, const Cut& cut, int64_t task) {
    const Arguments& call = of.call;
    const auto [batch, group, first, count] = Chunk(call, cut, task);
    const int64_t width = call.width, wide = up(width, PANEL), tall = up(cut.chunk, Scores::TALL);

    static thread_local std::vector<Row> rows;
    static thread_local std::vector<Line> line_of;
    rows.resize(size_t(tall)), line_of.resize(size_t(tall));
    Lines lines = lines_of(call, group, first, count, Scores::TALL, rows.data(), line_of.data());
    Arena& memory = arena();
    memory.reserve(Scores::bytes(call, tall) + 4 * tall * (lines.apart + wide) + support_bytes(lines.apart) +
                   4 * (2 * KEYS + ROWS * KEYS + 2 * wide + 2 * ROWS * wide + KEYS * wide) + 8192);
    lines.scores = memory.floats(tall * lines.apart);
    float* output = memory.floats((tall + ROWS) * wide);
    Scores scores(call, memory, tall);
    Bias biases(call, batch, memory.floats(KEYS));
    Support support = support_from(memory, lines.apart);
    float* buffer = memory.floats(wide + LANES);
    float* values = memory.floats(KEYS * wide);
    float* square = memory.floats(ROWS * KEYS);
    float* sums = memory.floats(ROWS * wide);
    std::memset(buffer, 0, size_t(wide + LANES) * 4);
    std::memset(output, 0, size_t((tall + ROWS) * wide) * 4);
    fill_lines(call, batch, group, scores, scores.take_queries(batch, rows.data(), count).most, biases, lines);
    spoil(of, lines);
    bool any = false;
    StateWriter state(call, place_of(call, batch, rows[0]));
    for (int64_t i = 0; i < count; i++) {
        const Row& row = lines.rows[i];
        Line& line = lines.lines[i];
        support.size = 0, support.found = 0;
        const bool empty = row.count == 0 || row.bad || row.maximum == -INFINITY;
        if (!empty) solve_line(of, lines, i, support);
        const int64_t start = lines.base + line.begin, n = line.end - line.begin;
        write_row_state(call, batch, row, support, start, state);
        if (empty || !width) continue;
        any |= keep(support, n, cut.rows, lines.line(i) + line.begin, line);
        if (line.kept == Line::NOTHING)
            gather(call.value, at(call.value, batch, group, start), width, start, support.weight, support.place,
                   support.size, buffer, output + i * wide);
    }
    if (any) add_values(call, batch, group, lines, values, square, sums, output);
    if (!width) return;
    for (int64_t i = 0; i < count; i++) {
        const Row& row = rows[size_t(i)];
        float* line = output + i * wide;
        if (row.bad)
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
