// Forward pass over tiles.   s = (scale/T) q.k (+ softcap, bias, masks),  o = sum e^(s-m) v / Z,  and the sums of
// rows.h
//
// A task is one (batch, key head, chunk of rows); the query heads that share the key head are more rows.
//
//     for each block of KEYS keys that the chunk can see          packed keys and values: 64 KB each at D = 64, in L2
//         for each tile of ROWS rows                              its queries and running output: L2
//             scores = q k^T by panels of keys                    ROWS x KEYS floats: L1
//             softcap, bias, masks; maximum; e = exp(s - m) and the sums, while the scores are in L1
//             output = exp(m_old - m) output + e v
//
// Panels of keys that no row of the tile may see are skipped. Every row goes through the same blocks in the same order
// whoever computes it: results are bitwise equal for any number of threads.
#pragma once
#include "products.h"
#include "scores.h"
#include "statistics.h"

namespace attemper {

// Biases of rows, read when the row's place in the mask differs from the last one's (a padding mask is read once).
class Bias {
public:
    Bias(const Arguments& call, int64_t batch, float* buffer) : call_(call), batch_(batch), buffer_(buffer) {}

    const float* row(const Row& row, int64_t low, int64_t keys) {
        const View& mask = call_.mask;
        if (!mask.data) return nullptr;
        int64_t place = at(mask, batch_, row.head, row.query) + low * mask.stride[3];
        if (place != last_ || low != low_) {
            read_bias(mask, place, mask.stride[3], keys, buffer_);
            for (int64_t i = keys; i < KEYS; i++) buffer_[i] = -INFINITY;
            last_ = place, low_ = low, told_ = false;
        }
        return buffer_;
    }

    // The same with what a whole block of keys must know of it; there must be a mask.
    const Masked& masked(const Row& row, int64_t low, int64_t keys) {
        const float* bias = this->row(row, low, keys);
        if (!told_) masked_ = masked_by(bias), told_ = true;
        return masked_;
    }

private:
    const Arguments& call_;
    int64_t batch_;
    float* buffer_;
    Masked masked_ = {};
    bool told_ = false;
    int64_t last_ = -1, low_ = -1;
};

// What a tile's scores need before their maxima are sought: nothing; that keys at its ends are hidden from some rows;
// the mask; and no score can overflow; or all of shape_row.
enum class Shape { NOTHING, ENDS, MASK, ALL };

inline Shape shape_of(const Arguments& call, const Span& span, bool finite) {
    if (!finite || call.softcap > 0) return Shape::ALL;
    if (call.mask.data) return span.within ? Shape::MASK : Shape::ALL;
    return span.whole ? Shape::NOTHING : Shape::ENDS;
}

// Hides what a row does not see at the ends of a span; returns how many keys of the span it sees.
ATTEMPER_INLINE int64_t hide_ends(const Row& row, float* s, const Span& span, int64_t block) {
    const int64_t low = row.low - block, high = row.high - block;
    const Vec first = splat(float(low)), end = splat(float(high)), hidden = splat(-INFINITY);
    const auto hide_part = [&](int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j += LANES) {
            float* at = s + j - span.begin;
            const Vec number = lane_numbers() + float(j);
            store(at, (number >= first) & (number < end) ? load(at) : hidden);
        }
    };
    hide_part(span.begin, span.inner_begin);
    hide_part(span.inner_end, span.end);
    const int64_t seen = (high < span.end ? high : span.end) - (low > span.begin ? low : span.begin);
    return seen > 0 ? seen : 0;
}

constexpr int64_t MOST_ROWS = ROWS > 32 ? ROWS : 32;  // of a tile

// One row's products become scores; returns the highest. `known`: the highest of the products, or null.
ATTEMPER_INLINE float shaped_best(const Arguments& call, Row& row, float* s, Bias& biases, int64_t block, int64_t seen,
                                  const Span& span, Shape shape, const float* known,
                                  float* softcap_gradient = nullptr) {
    const int64_t begin = span.begin, n = span.end - begin;
    if (shape == Shape::MASK) {
        const Masked& mask = biases.masked(row, block, seen);
        if (mask.most < SAFE_BIAS) {
            row.count += mask.visible;
            if (mask.visible < n || mask.most != 0) return hide(s, mask.bias, n);
            return known ? *known : highest(s, n);
        }
    } else if (shape == Shape::NOTHING) {
        row.count += n;
        return known ? *known : highest(s, n);
    } else if (shape == Shape::ENDS) {
        row.count += hide_ends(row, s, span, block);
        return highest(s, n);
    }
    const float* bias = biases.row(row, block, seen);
    const Seen found = shape_row(call, row, s, bias ? bias + begin : nullptr, block + begin, n, softcap_gradient);
    row.count += found.count, row.bad |= found.bad, row.poison |= found.poison;
    return highest(s, n);
}

// The keys of a block that a tile looks at, and which of them are summed by themselves.
struct Look {
    int64_t start, n;  // the first, and how many
    FirstTokens first;
    bool own;
    const float* marks;  // null: none

    // Of a row's weights here.
    ATTEMPER_INLINE void add(const Arguments& call, int64_t batch, const float* weights, Row& row) const {
        if (first.begin < first.end) row.first += first.share(call, batch, weights, start);
        if (own && row.position >= start && row.position - start < n) row.own += weights[row.position - start];
        if (marks) row.span += marked_sum(weights, marks, n);
    }
};

// A tile's rows with their scores against such keys.
struct Scored {
    Row* rows;
    int64_t count;
    const float* best;  // their highest scores here
    const Tile& tile;
    int64_t begin;  // of the keys, in the tile's lines
    bool near;      // no score of the block is NEAR_PRODUCT below another, and all are visible

    float* scores(int64_t i) const { return tile.scores + i * tile.apart + begin; }
    uint16_t* halves(int64_t i) const { return tile.halves + i * tile.halves_apart + begin; }
};

// What a call wants to have summed of the weights, as Part.
inline int parts_of(const Arguments& call, const Scored& of) {
    return (call.place[Column::MEAN_DEPTH] >= 0 || call.place[Column::VARIANCE] >= 0 ? MOMENTS : 0) |
           (call.place[Column::SQUARED_WEIGHTS] >= 0 ? SQUARES : 0) |
           (call.place[Column::DISTANCE] >= 0 ? DISTANCE : 0) | (of.near ? NEAR : 0) | (of.tile.halves ? HALVES : 0);
}

// Scores of a tile's rows, relative to their maxima, become weights, and the sums take them in. One function for all
// rows: constants stay in registers.
template <int WHAT>
inline void weigh_rows(const Arguments& call, int64_t batch, const Scored& of, const Look& look) {
    for (int64_t i = 0; i < of.count; i++) {
        Row& row = of.rows[i];
        float* s = of.scores(i);
        uint16_t* halves = WHAT & HALVES ? of.halves(i) : nullptr;
        const float base = base_of(row);
        const int64_t distance = look.start - row.position;
        const Sums sums = of.best[i] == row.maximum ? weigh<WHAT | TIES>(s, look.n, base, distance, halves)
                                                    : weigh<WHAT>(s, look.n, base, distance, halves);
        add(row, sums.four);
        if (WHAT & DISTANCE) row.distance += sums.distance;
        look.add(call, batch, s, row);
    }
}

// Calls `with` with a Part as a constant.
template <class With, int... WHAT>
ATTEMPER_INLINE void with_parts(int what, const With& with, std::integer_sequence<int, WHAT...>) {
    constexpr void (*all[])(const With&) = {[](const With& with) { with(std::integral_constant<int, WHAT>()); }...};
    all[what](with);
}

template <class With>
ATTEMPER_INLINE void with_parts(int what, const With& with) {
#if defined(ATTEMPER_HALF)
    with_parts(what, with, std::make_integer_sequence<int, PARTS>());
#else
    with_parts(what, with, std::make_integer_sequence<int, HALVES>());
#endif
}

// Softmax for rows that stand one after another. Sigmoid (sigmoid.h) is another class like it.
class Softmax {
public:
    struct Own {};  // what a row keeps beside its Row

    // `rows` and `own` stand one after another.
    Softmax(const Arguments& call, int64_t batch, const float*, Row* rows, Own*)
        : call_(call), batch_(batch), rows_(rows) {}

    void begin(int64_t) {}

    // Scores become weights relative to their rows' new maxima; the sums take them in; `keep` gets the factors of the
    // outputs so far. All maxima come first: a row then never waits for its own.
    void weigh(const Scored& of, const Look& look, float* keep) {
        for (int64_t i = 0; i < of.count; i++) keep[i] = raise(of.rows[i], of.best[i]);
        with_parts(parts_of(call_, of), [&](auto what) { weigh_rows<what>(call_, batch_, of, look); });
    }

    // The state of a row, to the writer; returns the factor that makes the running output the output.
    float finish(Row& row, StateWriter& state) { return attemper::finish(call_, row, state); }

    // Joins the row `other` over later keys into `number`; returns the factors of the two outputs.
    void join(int64_t number, int64_t other, float& keep, float& take) {
        attemper::join(rows_[number], rows_[other], keep, take);
    }

private:
    const Arguments& call_;
    int64_t batch_;
    Row* rows_;
};

// Scores of a tile become weights.
template <class Normalizer>
inline void take_in(const Arguments& call, int64_t batch, Normalizer& normalizer, Row* rows, int64_t count,
                    const Tile& tile, Bias& biases, int64_t block, int64_t seen, const Span& span, Shape shape,
                    bool near, float* keep) {
    const int64_t begin = span.begin, n = span.end - begin;
    float best[MOST_ROWS];
    for (int64_t i = 0; i < count; i++) {
        float* s = tile.scores + i * tile.apart + begin;
        float known = 0;
        if (tile.factors) known = scale_row(s, n, tile.factors[i]);
        best[i] = shaped_best(call, rows[i], s, biases, block, seen, span, shape, tile.factors ? &known : nullptr);
    }
    const int64_t start = block + begin, first_tokens = call.place[Column::FIRST_TOKENS] >= 0 ? n : 0;
    float marks[KEYS];
    const bool marked = call.place[Column::SPAN] >= 0 && read_marks(call, span_of(call, batch), start, n, marks);
    const Look look{start, n, {call, batch, start, first_tokens}, call.place[Column::OWN_KEY] >= 0,
                    marked ? marks : nullptr};
    normalizer.weigh(Scored{rows, count, best, tile, begin, near}, look, keep);
}

// State and outputs of at most ROOM rows. The outputs' lines are in no cache, and are written one after another: between
// the many small stores of a row's state each of them would be waited for.
template <class Normalizer>
inline void finish_rows(const Arguments& call, int64_t batch, Normalizer& normalizer, Row* rows, int64_t count,
                        float* output, int64_t wide, StateWriter& state) {
    const int64_t width = call.width;
    const bool direct = call.output.type == FLOAT32 && call.output.stride[3] == 1 && width % LANES == 0;
    float share[StateWriter::ROOM];
    for (int64_t i = 0; i < count; i++) share[i] = normalizer.finish(rows[i], state);
    for (int64_t i = 0; width && i < count; i++, output += wide) {
        const int64_t place = at(call.output, batch, rows[i].head, rows[i].query);
        float* to = direct ? reinterpret_cast<float*>(call.output.data) + place : output;
        for (int64_t e = 0; e < width; e += LANES)
            store(to + e, rows[i].count == 0 ? Vec{} : load(output + e) * share[i]);
        if (!direct) write_row(call.output, place, call.output.stride[3], width, output);
    }
}

constexpr float NEAR_PRODUCT = 80;  // well below -EXP_LOWEST: products are rounded, and so are lengths

// Of a chunk's queries and outputs, which pass through L2 with every block of keys. Where it has 1 MB, chunks that fill
// it take 2% less at D = 128, since keys are packed half as often.
constexpr int64_t DESK_BYTES = SPLIT_TILES ? 1 << 20 : 393216;

// `per_head`: the normalizer's parameter for each head, or null.
template <class Products, class Normalizer>
inline void forward_chunk(const Arguments& call, const float* per_head, const Cut& cut, int64_t task) {
    constexpr int64_t TALL = Products::TALL;
    const auto [batch, group, first, count] = Chunk(call, cut, task);
    const int64_t depth = call.depth, width = call.width, wide = up(width, PANEL);

    Arena& memory = arena();
    memory.reserve(Products::bytes(call, cut.chunk) + 4 * KEYS +
                   cut.chunk * int64_t(sizeof(Row) + sizeof(typename Normalizer::Own) + sizeof(Extent)) + 1024);
    Products products(call, memory, cut.chunk);
    Bias biases(call, batch, memory.floats(KEYS));
    Row* rows = memory.things<Row>(cut.chunk);
    Extent* tiles = memory.things<Extent>(up(cut.chunk, TALL) / TALL);

    place_rows(call, group, first, count, rows);
    Normalizer normalizer(call, batch, per_head, rows, memory.things<typename Normalizer::Own>(cut.chunk));
    normalizer.begin(count);
    int64_t low = call.keys, high = 0;
    for (int64_t tile = 0; tile < count; tile += TALL) {
        const Extent extent(rows + tile, count - tile < TALL ? count - tile : TALL);
        low = extent.least < low ? extent.least : low;
        high = extent.most > high ? extent.most : high;
        tiles[tile / TALL] = extent;
    }
    // What comes first is asked for while the queries are packed.
    const int64_t soon = low / KEYS * KEYS;
    const int64_t early = soon >= high ? 0 : (call.keys - soon < KEYS ? call.keys - soon : KEYS);
    prefetch(call.key, at(call.key, batch, group, soon), call.key.stride[2], early, depth, 0, 1);
    const Sizes queries = products.take_queries(batch, rows, count);
    float longest_key = 0;  // so far
    if (width) prefetch(call.value, at(call.value, batch, group, soon), call.value.stride[2], early, width, 0, 1);
    for (int64_t block = low / KEYS * KEYS; block < high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS;
        const Sizes keys = products.take_keys(batch, group, block, seen);
        longest_key = longest_key > keys.longest ? longest_key : keys.longest;
        // Keys of the next block: its lines are asked for while this one is computed, a share with every tile.
        const int64_t later =
            block + KEYS < high ? (call.keys - block - KEYS < KEYS ? call.keys - block - KEYS : KEYS) : 0;
        const bool finite = double(queries.most) * keys.most * double(depth) < SAFE_PRODUCT;
        // A length does not keep a NaN, and with it others are lost.
        if (!finite) longest_key = INFINITY;
        // Scores lie within -|q||k| .. |q||k|: two of a row are at most 2 |q||k| apart.
        const bool all_near = 2 * queries.longest * longest_key < NEAR_PRODUCT;
        for (int64_t tile = 0; tile < count; tile += TALL) {
            const int64_t real = count - tile < TALL ? count - tile : TALL;
            const int64_t number = tile / TALL, all = up(count, TALL) / TALL;
            prefetch(call.key, at(call.key, batch, group, block + seen), call.key.stride[2], later, depth, number,
                     all);
            if (width)
                prefetch(call.value, at(call.value, batch, group, block + seen), call.value.stride[2], later, width,
                         number, all);
            // With the last keys, the lines that the outputs will take.
            if (width && block + KEYS >= high)
                prefetch(call.output, at(call.output, batch, rows[tile].head, rows[tile].query), call.output.stride[2],
                         real, width, 0, 1);
            const Span span(tiles[number], block, seen);
            if (span.begin >= span.end) continue;
            float keep[MOST_ROWS] = {};
            const Shape shape = shape_of(call, span, finite);
            take_in(call, batch, normalizer, rows + tile, real, products.scores(tile, real, span), biases, block, seen,
                    span, shape, all_near && shape == Shape::NOTHING, keep);
            products.add(tile, real, span, keep);
        }
    }
    // The rows of a key head stand one after another, whichever of its query heads they belong to.
    const int64_t row_place = place_of(call, batch, rows[0]);
    StateWriter state(call, row_place);
    for (int64_t part = 0; part < count; part += StateWriter::ROOM)
        finish_rows(call, batch, normalizer, rows + part,
                    count - part < StateWriter::ROOM ? count - part : StateWriter::ROOM, products.output + part * wide,
                    wide, state);
    state.flush();
    derive(call, row_place, count);
}

}  // namespace attemper
