// The products of a chunk's rows: scores with blocks of keys, and outputs with blocks of values. In float32, or of
// bfloat16, where weights are rounded to it before they meet the values, and scores, softmax and every sum are float32.
#pragma once
#include "chunks.h"
#include "multiply.h"

namespace attemper {

constexpr int64_t LINES = LANES > ROWS ? LANES : ROWS;  // rows that packing looks at together

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
// `to` LANES more than the tiles.
inline Sizes pack_queries(const Arguments& call, int64_t batch, const Row* rows, int64_t count, float* lines,
                          float* to) {
    Ints most = {};
    float longest = 0;
    const int64_t depth = call.depth, wide = up(depth, LANES);
    const bool direct = call.query.type == FLOAT32 && call.query.stride[3] == 1 && depth == wide;
    for (int64_t first = 0; first < count; first += ROWS, to += depth * ROWS) {
        for (int64_t i = first + 2 * ROWS; i < first + 3 * ROWS && i < count; i++)
            prefetch(call.query, at(call.query, batch, rows[i].head, rows[i].query), 0, 1, depth, 0, 1);
        if (!direct || count - first < ROWS) std::memset(lines, 0, size_t(ROWS * wide) * 4);
        for (int64_t i = 0; i < ROWS && first + i < count; i++) {
            const Row& row = rows[first + i];
            const int64_t place = at(call.query, batch, row.head, row.query);
            const float factor = multiplier_of(call, batch, row);
            float* line = lines + i * wide;
            const float* from = line;
            if (direct) from = reinterpret_cast<const float*>(call.query.data) + place;
            else read_row(call.query, place, call.query.stride[3], depth, line);
            Vec squares = {};
            for (int64_t d = 0; d < wide; d += LANES) {
                Vec x = load(from + d) * factor;
                store(line + d, x);
                most = larger_bits(most, x);
                squares += x * x;
            }
            const float square = lane_sum(squares);
            longest = square > longest ? square : longest;
        }
        turn_tile(lines, wide, depth, to);
    }
    return {largest(most), std::sqrt(longest)};
}

// A tile of scores, one row of `rows` a line; what its rows become goes back into it.
struct Tile {
    float* scores;
    int64_t apart;         // from line to line
    const float* factors;  // that the scores still lack; null: none
    uint16_t* halves;      // weights as bfloat16; null: not asked for
    int64_t halves_apart;
};

// Scores of a chunk's rows in float32.
class FloatScores {
public:
    static constexpr int64_t TALL = ROWS;  // rows of a tile

    static int64_t bytes(const Arguments& call, int64_t chunk) {
        return 4 * (chunk * call.depth + LANES + KEYS * call.depth + LINES * up(call.depth, LANES)) + 1024;
    }

    FloatScores(const Arguments& call, Arena& memory, int64_t chunk) : call_(call) {
        queries_ = memory.floats(chunk * call.depth + LANES);
        keys_ = memory.floats(KEYS * call.depth);
        buffer_ = memory.floats(LINES * up(call.depth, LANES));
    }

    Sizes take_queries(int64_t batch, const Row* rows, int64_t count) {
        return pack_queries(call_, batch, rows, count, buffer_, queries_);
    }
    Sizes take_keys(int64_t batch, int64_t group, int64_t block, int64_t seen) {
        const View& key = call_.key;
        return pack_columns(key, at(key, batch, group, block), key.stride[2], key.stride[3], seen, call_.depth,
                            up(seen, PANEL), buffer_, keys_);
    }

    // Of a tile's rows against the panels of a block, `apart` from row to row.
    void write(int64_t tile, int64_t real, const Span& span, float* to, int64_t apart) const {
        multiply(tile, real, span.begin, span.end, to, apart);
    }

protected:
    // Of `real` rows against the keys begin <= key < end of a block, multiples of LANES. Past an odd begin half a panel is
    // computed in any case.
    void multiply(int64_t tile, int64_t real, int64_t begin, int64_t end, float* to, int64_t apart) const {
        const float* rows = queries_ + tile * call_.depth;
        for_rows(real, [&](auto count) {
            constexpr int COUNT = decltype(count)::value;
            int64_t p = begin;
            if (p % PANEL) {
                product<1, COUNT, 1>(rows, ROWS, keys_ + (p - LANES) * call_.depth + LANES, call_.depth, to + p, apart);
                p += LANES;
            }
            for (; p + PANEL <= end; p += PANEL)
                product<1, COUNT>(rows, ROWS, keys_ + p * call_.depth, call_.depth, to + p, apart);
            if (p < end) product<1, COUNT, 1>(rows, ROWS, keys_ + p * call_.depth, call_.depth, to + p, apart);
        });
    }

    const Arguments& call_;
    float *queries_, *keys_, *buffer_;
};

// And the products of their weights with the values.
class Floats : public FloatScores {
public:
    static int64_t bytes_per_row(const Arguments& call) { return 4 * (call.depth + up(call.width, PANEL) + 1); }

    static int64_t bytes(const Arguments& call, int64_t chunk) {
        const int64_t wide = up(call.width, PANEL);
        return FloatScores::bytes(call, chunk) + 4 * (chunk * wide + KEYS * wide + ROWS * APART);
    }

    Floats(const Arguments& call, Arena& memory, int64_t chunk)
        : FloatScores(call, memory, chunk), wide_(up(call.width, PANEL)) {
        output = memory.floats(chunk * wide_);
        values_ = memory.floats(KEYS * wide_);
        scores_ = memory.floats(ROWS * APART);
    }

    // Keys, whose sizes are returned, and values of a block.
    Sizes take_keys(int64_t batch, int64_t group, int64_t block, int64_t seen) {
        const View& value = call_.value;
        const Sizes sizes = FloatScores::take_keys(batch, group, block, seen);
        if (call_.width)
            pack_lines(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, call_.width,
                       up(seen, PANEL), KEYS, values_);
        return sizes;
    }

    Tile scores(int64_t tile, int64_t real, const Span& span) {
        // What stands before the first visible key and after the last is hidden, whatever it is.
        multiply(tile, real, span.from / LANES * LANES, up(span.last, LANES), scores_, APART);
        return Tile{scores_, APART, nullptr, nullptr, 0};
    }

    // output = keep output + weights values; there is none before the first keys.
    void add(int64_t tile, int64_t real, const Span& span, const float* keep) {
        const float *weights = scores_ + span.from, *values = values_ + span.from * PANEL;
        for_rows(real, [&](auto count) {
            for (int64_t p = 0; p < wide_; p += PANEL)
                add_product<APART, decltype(count)::value>(weights, 1, values + p * KEYS, span.from,
                                                           span.last - span.from, output + tile * wide_ + p, wide_,
                                                           span.first ? nullptr : keep);
        });
    }

    float* output;  // [row][up(width, PANEL)]

private:
    static constexpr int64_t APART = KEYS;  // lines of a tile do not share few sets of L1
    int64_t wide_;
    float *values_, *scores_;
};

#if defined(ATTEMPER_HALF)
// The same of bfloat16: the multiplier comes after the product.
class HalfScores {
public:
    static constexpr int64_t TALL = 32;

    static int64_t bytes(const Arguments& call, int64_t chunk) {
        return 2 * (chunk + KEYS + 16) * up(call.depth, STEP) + 4 * chunk + 1024;
    }

    HalfScores(const Arguments& call, Arena& memory, int64_t chunk) : call_(call), deep_(up(call.depth, STEP)) {
        queries_ = memory.things<uint16_t>(chunk * deep_);
        keys_ = memory.things<uint16_t>(KEYS * deep_);
        buffer_ = memory.things<uint16_t>(16 * deep_);
        factors_ = memory.floats(chunk);
    }

    Sizes take_queries(int64_t batch, const Row* rows, int64_t count) {
        Most most;
        float largest = 1;
        for (int64_t i = 0; i < count; i++) {
            copy_halves(call_.query, at(call_.query, batch, rows[i].head, rows[i].query), call_.query.stride[3],
                        call_.depth, deep_, queries_ + i * deep_, most);
            factors_[i] = multiplier_of(call_, batch, rows[i]);
            largest = largest >= std::fabs(factors_[i]) ? largest : std::fabs(factors_[i]);
        }
        std::memset(queries_ + count * deep_, 0, size_t((up(count, TALL) - count) * deep_) * 2);
        return sizes_of(most.value() * largest);
    }

    Sizes take_keys(int64_t batch, int64_t group, int64_t block, int64_t seen) {
        const View& key = call_.key;
        return sizes_of(pack_half_columns(key, at(key, batch, group, block), key.stride[2], key.stride[3], seen,
                                          call_.depth, up(seen, PANEL), buffer_, keys_));
    }

    void write(int64_t tile, int64_t real, const Span& span, float* to, int64_t apart) const {
        multiply(tile, real, span, to, apart);
        for (int64_t i = 0; i < real; i++)
            for (int64_t p = span.begin; p < span.end; p += LANES) {
                float* line = to + i * apart + p;
                store(line, load(line) * factors_[tile + i]);
            }
    }

protected:
    // No row is longer than if all its numbers were the largest.
    Sizes sizes_of(float most) const { return {most, most * std::sqrt(float(call_.depth))}; }

    // Scores that lack their row's factor.
    void multiply(int64_t tile, int64_t real, const Span& span, float* to, int64_t apart) const {
        for (int64_t p = span.begin; p < span.end; p += PANEL)
            half_product<false>(real, queries_ + tile * deep_, deep_, keys_ + p * deep_, COLUMNS * deep_, deep_ / STEP,
                                to + p, apart);
    }

    const Arguments& call_;
    int64_t deep_;
    uint16_t *queries_, *keys_, *buffer_;
    float* factors_;
    Tiles tiles_;
};

class Halves : public HalfScores {
public:
    static int64_t bytes_per_row(const Arguments& call) {
        return 2 * up(call.depth, STEP) + 4 * up(call.width, PANEL) + 4;
    }

    static int64_t bytes(const Arguments& call, int64_t chunk) {
        const int64_t wide = up(call.width, PANEL);
        return HalfScores::bytes(call, chunk) + wide * (4 * chunk + 2 * KEYS + 4) +
               TALL * (4 * APART_SCORES + 2 * APART_WEIGHTS) + 512;
    }

    Halves(const Arguments& call, Arena& memory, int64_t chunk)
        : HalfScores(call, memory, chunk), wide_(up(call.width, PANEL)) {
        output = memory.floats(chunk * wide_);
        values_ = memory.things<uint16_t>(KEYS * wide_);
        pair_ = memory.things<uint16_t>(2 * wide_);
        scores_ = memory.floats(TALL * APART_SCORES);
        weights_ = memory.things<uint16_t>(TALL * APART_WEIGHTS);
        std::memset(weights_, 0, size_t(TALL * APART_WEIGHTS) * 2);
    }

    Sizes take_keys(int64_t batch, int64_t group, int64_t block, int64_t seen) {
        const View& value = call_.value;
        const Sizes sizes = HalfScores::take_keys(batch, group, block, seen);
        if (call_.width)
            pack_half_pairs(value, at(value, batch, group, block), value.stride[2], value.stride[3], seen, call_.width,
                            up(seen, PANEL), KEYS, pair_, values_);
        return sizes;
    }

    Tile scores(int64_t tile, int64_t real, const Span& span) {
        multiply(tile, real, span, scores_, APART_SCORES);
        return Tile{scores_, APART_SCORES, factors_ + tile, weights_, APART_WEIGHTS};
    }

    void add(int64_t tile, int64_t real, const Span& span, const float* keep) {
        float* to = output + tile * wide_;
        if (span.first) std::memset(to, 0, size_t(real * wide_) * 4);
        for (int64_t i = 0; i < real && !span.first; i++) {
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
    int64_t wide_;
    uint16_t *values_, *weights_, *pair_;
    float* scores_;
};
static_assert(PANEL == 32, "a product is 32 columns wide");
#endif

}  // namespace attemper
