// Forward pass over tiles.   s = (scale/T) q.k (+ softcap, bias, masks),  o = sum e^(s-m) v / Z,  and the sums of rows.h
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
#include <cstdlib>

#include "multiply.h"
#include "scores.h"

namespace attemper {

// Memory of a thread, kept between calls. Grows, never shrinks: about a megabyte at D = E = 64.
class Arena {
public:
    float* floats(int64_t n) { return static_cast<float*>(take(n * 4)); }
    template <class Thing>
    Thing* things(int64_t n) { return static_cast<Thing*>(take(n * int64_t(sizeof(Thing)))); }

    // Called before a task with what it will take at most.
    void reserve(int64_t bytes) {
        used_ = 0;
        apart_.clear();
        if (bytes <= size_) return;
        std::free(base_);
        base_ = static_cast<char*>(std::aligned_alloc(4096, size_t(up(bytes, 4096))));
        size_ = base_ ? bytes : 0;
        if (!base_) std::abort();
    }

private:
    void* take(int64_t bytes) {
        void* at = base_ + used_;
        used_ += up(bytes, 64);
        if (used_ > size_) std::abort();
#if defined(__SANITIZE_ADDRESS__)
        return apart_.add(bytes);  // each piece by itself, so that reading past one is seen
#endif
        return at;
    }
    struct Apart {
        void* pieces[64] = {};
        int count = 0;
        void* add(int64_t bytes) {
            if (count == 64) std::abort();
            return pieces[count++] = std::aligned_alloc(64, size_t(up(bytes, 64)));
        }
        void clear() {
            while (count) std::free(pieces[--count]);
        }
    } apart_;
    char* base_ = nullptr;
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

constexpr int64_t DESK_FLOATS = 98304;  // of a chunk's queries and outputs: they stay in L2

// How the rows of a call are cut into tasks: long chunks share the packing of keys, many tasks share the work. A chunk
// begins at a multiple of ROWS, so that a row's tile and the order of its sums are the same however long chunks are.
struct Cut {
    int64_t rows;    // per key head: query heads that share it x queries
    int64_t chunk;   // rows of a task, a multiple of ROWS
    int64_t chunks;  // per key head

    explicit Cut(const Arguments& call) {
        const int64_t heads = call.batch * call.groups, tasks = call.threads > 1 ? 4 * call.threads : 1;
        rows = call.heads / call.groups * call.queries;
        chunk = DESK_FLOATS / (call.depth + up(call.width, PANEL) + 1) / ROWS * ROWS;
        while (chunk > 4 * ROWS && heads * ((rows + chunk - 1) / chunk) < tasks) chunk = up(chunk / 2, ROWS);
        chunks = (rows + chunk - 1) / chunk;
        // Equal chunks, so that no task is a remainder.
        chunk = up((rows + chunks - 1) / chunks, ROWS);
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

// Queries times their multiplier, tile by tile; rows past `count` are zeros. `lines` holds ROWS * up(depth, LANES), `to`
// LANES more than the tiles. Returns the largest magnitude.
inline float pack_queries(const Arguments& call, int64_t batch, const Row* rows, int64_t count, float* lines, float* to) {
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
            last_ = place, low_ = low;
        }
        return buffer_;
    }

private:
    const Arguments& call_;
    int64_t batch_;
    float* buffer_;
    int64_t last_ = -1, low_ = -1;
};

// Scores of a tile become weights relative to their rows' new maxima; the sums take them in; `keep` gets the factors of
// the outputs so far. Rows of scores are KEYS apart. All maxima come first: a row then never waits for its own.
inline void take_in(const Arguments& call, int64_t batch, Row* rows, int64_t count, float* scores, Bias& biases,
                    int64_t block, int64_t seen, int64_t begin, int64_t n, bool shaped, float* keep) {
    float best[ROWS];
    for (int64_t i = 0; i < count; i++) {
        float* s = scores + i * KEYS + begin;
        if (shaped) {
            const float* bias = biases.row(rows[i], block, seen);
            Seen found = shape_row(call, rows[i], s, bias ? bias + begin : nullptr, block + begin, n, nullptr);
            rows[i].count += found.count, rows[i].bad |= found.bad, rows[i].poison |= found.poison;
        } else {
            rows[i].count += n;
        }
        best[i] = highest(s, n);
    }
    for (int64_t i = 0; i < count; i++) keep[i] = raise(rows[i], best[i]);
    const bool moments = call.place[A] >= 0 || call.place[V] >= 0, squares = call.place[C] >= 0;
    const bool first = call.place[F] >= 0 && any_first(call, batch, block + begin, n);
    for (int64_t i = 0; i < count; i++) {
        float* s = scores + i * KEYS + begin;
        Sums sums = weigh(s, n, base_of(rows[i]), moments, squares);
        if (first) sums.first = first_share(call, batch, s, block + begin, n);
        if (call.place[T] >= 0) sums.distance = distance_share(rows[i], s, block + begin, n);
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

inline void forward_chunk(const Arguments& call, const Cut& cut, int64_t task) {
    // Head by head, so that the keys are still in a cache; late chunks first: under a causal mask they are the longest.
    const int64_t head = task / cut.chunks, first = (cut.chunks - 1 - task % cut.chunks) * cut.chunk;
    const int64_t batch = head / call.groups, group = head % call.groups;
    const int64_t count = cut.rows - first < cut.chunk ? cut.rows - first : cut.chunk;
    const int64_t depth = call.depth, width = call.width, wide = up(width, PANEL);

    Arena& memory = arena();
    memory.reserve(4 * (cut.chunk * (depth + wide) + LANES + KEYS * (up(depth, PANEL) + wide) + (ROWS + 1) * KEYS +
                        LINES * up(depth, LANES) + wide) + cut.chunk * int64_t(sizeof(Row)) + 1024);
    float* queries = memory.floats(cut.chunk * depth + LANES);
    float* output = memory.floats(cut.chunk * wide);
    float* keys = memory.floats(KEYS * depth);
    float* values = memory.floats(KEYS * wide);
    float* scores = memory.floats(ROWS * KEYS);
    float* buffer = memory.floats(LINES * up(depth, LANES));
    Bias biases(call, batch, memory.floats(KEYS));
    Row* rows = memory.things<Row>(cut.chunk);

    place_rows(call, group, first, count, rows);
    const float most_query = pack_queries(call, batch, rows, count, buffer, queries);
    std::memset(output, 0, size_t(cut.chunk * wide) * 4);
    int64_t low = call.keys, high = 0;
    for (int64_t i = 0; i < count; i++) {
        low = rows[i].low < low ? rows[i].low : low;
        high = rows[i].high > high ? rows[i].high : high;
    }
    const bool float_mask = call.mask.data && call.mask.type != BOOL;
    for (int64_t block = low / KEYS * KEYS; block < high; block += KEYS) {
        const int64_t seen = call.keys - block < KEYS ? call.keys - block : KEYS;
        const float most_key = pack_columns(call.key, at(call.key, batch, group, block), call.key.stride[2],
                                            call.key.stride[3], seen, depth, up(seen, PANEL), buffer, keys);
        if (width)
            pack_lines(call.value, at(call.value, batch, group, block), call.value.stride[2], call.value.stride[3], seen,
                       width, up(seen, PANEL), KEYS, values);
        // Keys of the next block: its lines are asked for while this one is computed, a share with every tile.
        const int64_t later = block + KEYS < high ? (call.keys - block - KEYS < KEYS ? call.keys - block - KEYS : KEYS) : 0;
        const bool finite = double(most_query) * most_key * double(depth) < 8e37;
        const bool always = !finite || float_mask || call.mask.data || call.softcap > 0;
        for (int64_t tile = 0; tile < count; tile += ROWS) {
            const int64_t real = count - tile < ROWS ? count - tile : ROWS;
            const Span span(rows + tile, real, block, seen);
            if (span.begin >= span.end) continue;
            const int64_t n = span.end - span.begin;
            prefetch(call.key, at(call.key, batch, group, block + seen), call.key.stride[2], later, depth, tile / ROWS, up(count, ROWS) / ROWS);
            if (width)
                prefetch(call.value, at(call.value, batch, group, block + seen), call.value.stride[2], later, width, tile / ROWS,
                         up(count, ROWS) / ROWS);
            for (int64_t p = span.begin; p < span.end; p += PANEL)
                product<1>(queries + tile * depth, ROWS, keys + p * depth, depth, scores + p, KEYS);
            float keep[ROWS] = {};
            take_in(call, batch, rows + tile, real, scores, biases, block, seen, span.begin, n, always || !span.whole, keep);
            for (int64_t p = 0; p < wide; p += PANEL)
                add_product<KEYS>(scores + span.begin, 1, values + p * KEYS + span.begin * PANEL, n,
                                  output + tile * wide + p, wide, keep);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const float share = finish(call, batch, rows[i]);
        if (!width) continue;
        float* line = output + i * wide;
        for (int64_t e = 0; e < wide; e += LANES) store(line + e, load(line + e) * share);
        if (rows[i].count == 0) std::memset(line, 0, size_t(wide) * 4);
        write_row(call.output, at(call.output, batch, rows[i].head, rows[i].query), call.output.stride[3], width, line);
    }
}

}  // namespace attemper
