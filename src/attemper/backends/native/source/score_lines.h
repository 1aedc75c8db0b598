// The rows of a chunk that need all their keys at once: a line of scores each, in which something of the row stays.
#pragma once
#include "decode.h"

namespace attemper {

constexpr int64_t LINE_BYTES = 1 << 20;  // of the lines of a chunk: half of L2

// A row as the solver left it.
struct Line {
    enum Kept { NOTHING, LIST, WEIGHTS };
    int64_t begin, end;   // whole panels that hold the keys it may see, as places in the line: its own, not its tile's
    int64_t size = 0;     // of its support
    Kept kept = NOTHING;  // of the support, in the place of the scores
    int64_t next = 0;     // of the list: the first key that has not been met
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
        lines[i] = {begin - of.base, (end > begin ? end : begin) - of.base};
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
        const float most_key = scores.take_keys(batch, group, block, seen).most;
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

// Rows of a chunk whose lines stay in L2, whatever the threads. `lines`: how many floats a key takes in a row's lines.
inline int64_t rowwise_chunk(const Arguments& call, int64_t tall, int64_t lines) {
    int64_t keys = call.keys;
    if (call.left + call.right < keys - 2 * KEYS) keys = call.left + call.right + 2 * KEYS;
    const int64_t chunk = LINE_BYTES / (4 * lines * (keys + LANES)) / tall * tall, most = 128 / tall * tall;
    return chunk < tall ? tall : (chunk > most ? most : chunk);
}

// Weights at the places begin .. begin + n of a line, of which some may lie outside of what was computed: zeros there.
inline void copy_line(const Lines& of, int64_t i, int64_t begin, int64_t n, float* to) {
    const Line& line = of.lines[i];
    const int64_t from = begin > line.begin ? begin : line.begin, end = begin + n < line.end ? begin + n : line.end;
    const bool any = line.kept == Line::WEIGHTS && from < end;
    if (!any || end - from < n) std::memset(to, 0, size_t(n) * 4);
    if (any) std::memcpy(to + (from - begin), of.line(i) + from, size_t(end - from) * 4);
}

}  // namespace attemper
