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
#include <stdexcept>

#include "memory.h"
#include "multiply.h"
#include "scores.h"

namespace attemper {

// Memory of a thread, kept between calls. Grows, never shrinks: about a megabyte at D = E = 64. Throws std::bad_alloc.
class Arena {
public:
    float* floats(int64_t n) { return static_cast<float*>(take(n * 4)); }
    template <class Thing>
    Thing* things(int64_t n) { return static_cast<Thing*>(take(n * int64_t(sizeof(Thing)))); }

    // Called before a task with what it will take at most.
    void reserve(int64_t bytes) {
        used_ = 0;
        apart_.clear();
        if (bytes <= size_ && bytes <= largest_allocation) return;
        size_ = 0, base_.reset();  // first: old and new need not fit together
        base_.reset(static_cast<char*>(allocate(bytes, 4096)));
        size_ = bytes;
    }

private:
    void* take(int64_t bytes) {
        void* at = base_.get() + used_;
        used_ += up(bytes, 64);
        if (used_ > size_) throw std::length_error("an arena was asked for more than was reserved");
#if defined(__SANITIZE_ADDRESS__)
        return apart_.add(bytes);  // each piece by itself, so that reading past one is seen
#endif
        return at;
    }
    struct Apart {
        void* pieces[64] = {};
        int count = 0;
        void* add(int64_t bytes) {
            if (count == 64) throw std::length_error("an arena was asked for more pieces than it keeps");
            return pieces[count++] = allocate(bytes);
        }
        void clear() {
            while (count) std::free(pieces[--count]);
        }
    } apart_;
    Memory<char> base_;
    int64_t size_ = 0, used_ = 0;
};

inline Arena& arena() {
    static thread_local Arena mine;
    return mine;
}

constexpr int64_t LINES = LANES > ROWS ? LANES : ROWS;  // rows that packing looks at together

inline int64_t at(const View& view, int64_t a, int64_t b, int64_t c) {
    return a * view.stride[0] + b * view.stride[1] + c * view.stride[2];
}

constexpr int64_t DESK_BYTES = 393216;  // of a chunk's queries and outputs: they stay in L2

// How the rows of a call are cut into tasks: long chunks share the packing of keys, many tasks share the work. A chunk
// begins at a multiple of a tile's rows, so that a row's tile and the order of its sums are the same however long
// chunks are.
struct Cut {
    int64_t rows;    // per key head: query heads that share it x queries
    int64_t chunk;   // rows of a task, a multiple of `tall`
    int64_t chunks;  // per key head

    Cut(const Arguments& call, int64_t tall, int64_t bytes_per_row) {
        const int64_t heads = call.batch * call.groups, tasks = call.threads > 1 ? 4 * call.threads : 1;
        rows = call.heads / call.groups * call.queries;
        chunk = DESK_BYTES / bytes_per_row / tall * tall;
        while (chunk > 4 * tall && heads * ((rows + chunk - 1) / chunk) < tasks) chunk = up(chunk / 2, tall);
        chunks = (rows + chunk - 1) / chunk;
        // Equal chunks, so that no task is a remainder.
        chunk = up((rows + chunks - 1) / chunks, tall);
        chunks = (rows + chunk - 1) / chunk;
    }
};

inline void place_rows(const Arguments& call, int64_t group, int64_t first, int64_t count, Row* rows) {
    const int64_t repeats = call.heads / call.groups;
    for (int64_t i = 0; i < count; i++)
        begin(rows[i], call, group * repeats + (first + i) / call.queries, (first + i) % call.queries);
}

inline float multiplier_of(const Arguments& call, int64_t batch, const Row& row) {
    const int64_t* stride = call.multiplier_stride;
    return call.multiplier[batch * stride[0] + row.head * stride[1] + row.query * stride[2]];
}

// A tile's lines, `line` floats apart, as [depth][ROWS]. Where a vector holds more than ROWS floats, what it writes too
// much is overwritten by the next.
ATTEMPER_INLINE void turn_tile(const float* lines, int64_t line, int64_t depth, float* to) {
    if constexpr (LANES < ROWS) {
        for (int64_t d = 0; d < depth; d++)
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) to[d * ROWS + i] = lines[i * line + d];
    } else {
        for (int64_t d = 0; d < depth; d += LANES) {
            Vec x[LANES] = {};
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; i++) x[i] = load(lines + i * line + d);
            transpose(x);
            for (int i = 0; i < LANES && d + i < depth; i++) store(to + (d + i) * ROWS, x[i]);
        }
    }
}

// Queries times their multiplier, tile by tile; rows past `count` are zeros. `lines` holds ROWS * up(depth, LANES),
// `to` LANES more than the tiles. Returns the largest magnitude.
inline float pack_queries(const Arguments& call, int64_t batch, const Row* rows, int64_t count, float* lines,
                          float* to) {
    Ints most = {};
    const int64_t depth = call.depth, wide = up(depth, LANES);
    const bool direct = call.query.type == FLOAT32 && call.query.stride[3] == 1 && depth == wide;
    for (int64_t first = 0; first < count; first += ROWS, to += depth * ROWS) {
        if (!direct || count - first < ROWS) std::memset(lines, 0, size_t(ROWS * wide) * 4);
        for (int64_t i = 0; i < ROWS && first + i < count; i++) {
            const Row& row = rows[first + i];
            const int64_t place = at(call.query, batch, row.head, row.query);
            const float factor = multiplier_of(call, batch, row);
            float* line = lines + i * wide;
            const float* from = line;
            if (direct) from = reinterpret_cast<const float*>(call.query.data) + place;
            else read_row(call.query, place, call.query.stride[3], depth, line);
            for (int64_t d = 0; d < wide; d += LANES) {
                Vec x = load(from + d) * factor;
                store(line + d, x);
                most = larger_bits(most, x);
            }
        }
        turn_tile(lines, wide, depth, to);
    }
    return largest(most);
}

// A tile's rows against a block of keys: which panels it must look at, and whether all of them see all of it.
struct Span {
    int64_t begin, end;  // of the block, multiples of PANEL; empty: nothing to see
    bool whole;
    bool within;  // all of them see all keys of the block, if a mask hides the places after its last

    Span(const Row* rows, int64_t count, int64_t low, int64_t keys) {
        int64_t least = rows[0].low, most = rows[0].high, last_low = least, first_high = most;
        for (int64_t i = 1; i < count; i++) {
            least = rows[i].low < least ? rows[i].low : least;
            most = rows[i].high > most ? rows[i].high : most;
            last_low = rows[i].low > last_low ? rows[i].low : last_low;
            first_high = rows[i].high < first_high ? rows[i].high : first_high;
        }
        begin = (least > low ? least - low : 0) / PANEL * PANEL;
        end = up(most < low + keys ? most - low : keys, PANEL);
        whole = last_low <= low + begin && first_high >= low + end;
        within = begin == 0 && last_low <= low && first_high >= low + keys;
    }
};

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

// What a tile's scores need before their maxima are sought: nothing; the mask, and no score can overflow; or all of
// shape_row.
enum class Shape { NOTHING, MASK, ALL };

inline Shape shape_of(const Arguments& call, const Span& span, bool finite) {
    if (!finite || call.softcap > 0) return Shape::ALL;
    if (call.mask.data) return span.within ? Shape::MASK : Shape::ALL;
    return span.whole ? Shape::NOTHING : Shape::ALL;
}

// A tile of scores, one row of `rows` a line; what its rows become goes back into it.
struct Tile {
    float* scores;
    int64_t apart;         // from line to line
    const float* factors;  // that the scores still lack; null: none
    uint16_t* halves;      // weights as bfloat16; null: not asked for
    int64_t halves_apart;
};

constexpr int64_t MOST_ROWS = ROWS > 32 ? ROWS : 32;  // of a tile

// One row's products become scores; returns the highest. `known`: the highest of the products, or null.
ATTEMPER_INLINE float shaped_best(const Arguments& call, Row& row, float* s, Bias& biases, int64_t block, int64_t seen,
                                  int64_t begin, int64_t n, Shape shape, const float* known,
                                  float* softcap_slope = nullptr) {
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
    }
    const float* bias = biases.row(row, block, seen);
    const Seen found = shape_row(call, row, s, bias ? bias + begin : nullptr, block + begin, n, softcap_slope);
    row.count += found.count, row.bad |= found.bad, row.poison |= found.poison;
    return highest(s, n);
}

// Scores of a tile become weights relative to their rows' new maxima; the sums take them in; `keep` gets the factors of
// the outputs so far. All maxima come first: a row then never waits for its own.
inline void take_in(const Arguments& call, int64_t batch, Row* rows, int64_t count, const Tile& tile, Bias& biases,
                    int64_t block, int64_t seen, int64_t begin, int64_t n, Shape shape, float* keep) {
    float best[MOST_ROWS];
    for (int64_t i = 0; i < count; i++) {
        float* s = tile.scores + i * tile.apart + begin;
        float known = 0;
        if (tile.factors) known = scale_row(s, n, tile.factors[i]);
        best[i] = shaped_best(call, rows[i], s, biases, block, seen, begin, n, shape, tile.factors ? &known : nullptr);
    }
    for (int64_t i = 0; i < count; i++) keep[i] = raise(rows[i], best[i]);
    const int parts = (call.place[A] >= 0 || call.place[V] >= 0 ? MOMENTS : 0) | (call.place[C] >= 0 ? SQUARES : 0) |
                      (call.place[T] >= 0 ? DISTANCE : 0) | (tile.halves ? HALVES : 0);
    const Weigh tied = weigh_of(parts | TIES), free = weigh_of(parts);
    const FirstTokens first(call, batch, block + begin, call.place[F] >= 0 ? n : 0);
    for (int64_t i = 0; i < count; i++) {
        float* s = tile.scores + i * tile.apart + begin;
        uint16_t* halves = tile.halves ? tile.halves + i * tile.halves_apart + begin : nullptr;
        Sums sums = (best[i] == rows[i].maximum ? tied : free)(s, n, base_of(rows[i]), block + begin - rows[i].position,
                                                               halves);
        if (first.begin < first.end) sums.first = first.share(call, batch, s, block + begin);
        add(rows[i], sums);
    }
}

// Asks the caches for a part of some rows of a tensor: part `number` of `parts`.
inline void prefetch(const View& view, int64_t place, int64_t row_step, int64_t count, int64_t size, int64_t number,
                     int64_t parts) {
    const int64_t width = view.type == FLOAT32 ? 4 : 2;
    for (int64_t i = count * number / parts; i < count * (number + 1) / parts; i++)
        for (int64_t byte = 0; byte < size * width; byte += 64)
            __builtin_prefetch(view.data + (place + i * row_step) * width + byte, 0, 2);
}

// The two products of a chunk in float32.
class Floats {
public:
    static constexpr int64_t TALL = ROWS;  // rows of a tile

    static int64_t bytes_per_row(const Arguments& call) { return 4 * (call.depth + up(call.width, PANEL) + 1); }

    static int64_t bytes(const Arguments& call, int64_t chunk) {
        const int64_t depth = call.depth, wide = up(call.width, PANEL);
        return 4 * (chunk * (depth + wide) + LANES + KEYS * (depth + wide + ROWS) + LINES * up(depth, LANES)) + 1024;
    }

    Floats(const Arguments& call, Arena& memory, int64_t chunk) : call_(call), wide_(up(call.width, PANEL)) {
        queries_ = memory.floats(chunk * call.depth + LANES);
        output = memory.floats(chunk * wide_);
        keys_ = memory.floats(KEYS * call.depth);
        values_ = memory.floats(KEYS * wide_);
        scores_ = memory.floats(ROWS * KEYS);
        buffer_ = memory.floats(LINES * up(call.depth, LANES));
    }

    // Returns the largest magnitude.
    float take_queries(int64_t batch, const Row* rows, int64_t count) {
        return pack_queries(call_, batch, rows, count, buffer_, queries_);
    }

    // Keys (the largest magnitude is returned) and values of a block.
    float take_keys(int64_t batch, int64_t group, int64_t block, int64_t seen) {
        const View &key = call_.key, &value = call_.value;
        const float most = pack_columns(key, at(key, batch, group, block), key.stride[2], key.stride[3], seen,
                                        call_.depth, up(seen, PANEL), buffer_, keys_);
        if (call_.width)
            pack_lines(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, call_.width,
                       up(seen, PANEL), KEYS, values_);
        return most;
    }

    Tile scores(int64_t tile, int64_t, const Span& span) {
        for (int64_t p = span.begin; p < span.end; p += PANEL)
            product<1>(queries_ + tile * call_.depth, ROWS, keys_ + p * call_.depth, call_.depth, scores_ + p, KEYS);
        return Tile{scores_, KEYS, nullptr, nullptr, 0};
    }

    // output = keep output + weights values
    void add(int64_t tile, int64_t, const Span& span, const float* keep) {
        for (int64_t p = 0; p < wide_; p += PANEL)
            add_product<KEYS>(scores_ + span.begin, 1, values_ + p * KEYS + span.begin * PANEL, span.begin,
                              span.end - span.begin, output + tile * wide_ + p, wide_, keep);
    }

    float* output;  // [row][up(width, PANEL)]

private:
    const Arguments& call_;
    int64_t wide_;
    float *queries_, *keys_, *values_, *scores_, *buffer_;
};

#if defined(ATTEMPER_HALF)
// The two products of a chunk of bfloat16: weights are rounded to it before they meet the values; scores, softmax and
// every sum are float32, the multiplier comes after the product.
class Halves {
public:
    static constexpr int64_t TALL = 32;

    static int64_t bytes_per_row(const Arguments& call) {
        return 2 * up(call.depth, STEP) + 4 * up(call.width, PANEL) + 4;
    }

    static int64_t bytes(const Arguments& call, int64_t chunk) {
        const int64_t deep = up(call.depth, STEP), wide = up(call.width, PANEL);
        return chunk * (2 * deep + 4 * wide + 4) + 2 * KEYS * (deep + wide) + TALL * (4 * APART_SCORES +
                                                                                      2 * APART_WEIGHTS) +
               2 * (16 * deep + 2 * wide) + 1024;
    }

    Halves(const Arguments& call, Arena& memory, int64_t chunk)
        : call_(call), deep_(up(call.depth, STEP)), wide_(up(call.width, PANEL)) {
        queries_ = memory.things<uint16_t>(chunk * deep_);
        output = memory.floats(chunk * wide_);
        factors_ = memory.floats(chunk);
        keys_ = memory.things<uint16_t>(KEYS * deep_);
        values_ = memory.things<uint16_t>(KEYS * wide_);
        scores_ = memory.floats(TALL * APART_SCORES);
        weights_ = memory.things<uint16_t>(TALL * APART_WEIGHTS);
        buffer_ = memory.things<uint16_t>(16 * deep_ + 2 * wide_);
        std::memset(weights_, 0, size_t(TALL * APART_WEIGHTS) * 2);
    }

    float take_queries(int64_t batch, const Row* rows, int64_t count) {
        Most most;
        float largest = 1;
        for (int64_t i = 0; i < count; i++) {
            copy_halves(call_.query, at(call_.query, batch, rows[i].head, rows[i].query), call_.query.stride[3],
                        call_.depth, deep_, queries_ + i * deep_, most);
            factors_[i] = multiplier_of(call_, batch, rows[i]);
            largest = largest >= std::fabs(factors_[i]) ? largest : std::fabs(factors_[i]);
        }
        std::memset(queries_ + count * deep_, 0, size_t((up(count, TALL) - count) * deep_) * 2);
        return most.value() * largest;
    }

    float take_keys(int64_t batch, int64_t group, int64_t block, int64_t seen) {
        const View &key = call_.key, &value = call_.value;
        const float most = pack_half_columns(key, at(key, batch, group, block), key.stride[2], key.stride[3], seen,
                                             call_.depth, up(seen, PANEL), buffer_, keys_);
        if (call_.width)
            pack_half_pairs(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, call_.width,
                            up(seen, PANEL), KEYS, buffer_, values_);
        return most;
    }

    Tile scores(int64_t tile, int64_t real, const Span& span) {
        for (int64_t p = span.begin; p < span.end; p += PANEL)
            half_product<false>(real, queries_ + tile * deep_, deep_, keys_ + p * deep_, COLUMNS * deep_, deep_ / STEP,
                                scores_ + p, APART_SCORES);
        return Tile{scores_, APART_SCORES, factors_ + tile, weights_, APART_WEIGHTS};
    }

    void add(int64_t tile, int64_t real, const Span& span, const float* keep) {
        float* to = output + tile * wide_;
        for (int64_t i = 0; i < real; i++) {
            if (keep[i] == 1.0f) continue;
            for (int64_t e = 0; e < wide_; e += LANES) store(to + i * wide_ + e, load(to + i * wide_ + e) * keep[i]);
        }
        for (int64_t p = 0; p < wide_; p += PANEL)
            half_product<true>(real, weights_ + span.begin, APART_WEIGHTS, values_ + p * KEYS + span.begin * COLUMNS,
                               COLUMNS * KEYS, (span.end - span.begin) / STEP, to + p, wide_);
    }

    float* output;

private:
    // Lines of a tile do not share few sets of L1.
    static constexpr int64_t APART_SCORES = KEYS + LANES, APART_WEIGHTS = KEYS + STEP;
    const Arguments& call_;
    int64_t deep_, wide_;
    uint16_t *queries_, *keys_, *values_, *weights_, *buffer_;
    float *factors_, *scores_;
    Tiles tiles_;
};
static_assert(PANEL == 32, "a product is 32 columns wide");
#endif

template <class Products>
inline void forward_chunk(const Arguments& call, const Cut& cut, int64_t task) {
    constexpr int64_t TALL = Products::TALL;
    // Head by head, so that the keys are still in a cache; late chunks first: under a causal mask they are the longest.
    const int64_t head = task / cut.chunks, first = (cut.chunks - 1 - task % cut.chunks) * cut.chunk;
    const int64_t batch = head / call.groups, group = head % call.groups;
    const int64_t count = cut.rows - first < cut.chunk ? cut.rows - first : cut.chunk;
    const int64_t depth = call.depth, width = call.width, wide = up(width, PANEL);

    Arena& memory = arena();
    memory.reserve(Products::bytes(call, cut.chunk) + 4 * KEYS + cut.chunk * int64_t(sizeof(Row)) + 1024);
    Products products(call, memory, cut.chunk);
    Bias biases(call, batch, memory.floats(KEYS));
    Row* rows = memory.things<Row>(cut.chunk);

    place_rows(call, group, first, count, rows);
    const float most_query = products.take_queries(batch, rows, count);
    std::memset(products.output, 0, size_t(cut.chunk * wide) * 4);
    int64_t low = call.keys, high = 0;
    for (int64_t i = 0; i < count; i++) {
        low = rows[i].low < low ? rows[i].low : low;
        high = rows[i].high > high ? rows[i].high : high;
    }
    for (int64_t block = low / KEYS * KEYS; block < high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS;
        const float most_key = products.take_keys(batch, group, block, seen);
        // Keys of the next block: its lines are asked for while this one is computed, a share with every tile.
        const int64_t later =
            block + KEYS < high ? (call.keys - block - KEYS < KEYS ? call.keys - block - KEYS : KEYS) : 0;
        const bool finite = double(most_query) * most_key * double(depth) < SAFE_PRODUCT;
        for (int64_t tile = 0; tile < count; tile += TALL) {
            const int64_t real = count - tile < TALL ? count - tile : TALL;
            const Span span(rows + tile, real, block, seen);
            if (span.begin >= span.end) continue;
            const int64_t number = tile / TALL, tiles = up(count, TALL) / TALL;
            prefetch(call.key, at(call.key, batch, group, block + seen), call.key.stride[2], later, depth, number,
                     tiles);
            if (width)
                prefetch(call.value, at(call.value, batch, group, block + seen), call.value.stride[2], later, width,
                         number, tiles);
            float keep[MOST_ROWS] = {};
            take_in(call, batch, rows + tile, real, products.scores(tile, real, span), biases, block, seen, span.begin,
                    span.end - span.begin, shape_of(call, span, finite), keep);
            products.add(tile, real, span, keep);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const float share = finish(call, batch, rows[i]);
        if (!width) continue;
        float* line = products.output + i * wide;
        for (int64_t e = 0; e < wide; e += LANES) store(line + e, load(line + e) * share);
        if (rows[i].count == 0) std::memset(line, 0, size_t(wide) * 4);
        write_row(call.output, at(call.output, batch, rows[i].head, rows[i].query), call.output.stride[3], width, line);
    }
}

}  // namespace attemper
