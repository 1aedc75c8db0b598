// Operands of `multiply` from tensors of any strides and type, padded with zeros to whole panels.
//
//     rows    [tile][depth][ROWS]      broadcast side: queries times their multiplier
//     columns [panel][depth][PANEL]    keys transposed: 16 x 16 blocks through registers
//     lines   [panel][count][PANEL]    values (or keys, queries) as they stand, cut into panels of their last dimension
//
// A block of keys is packed when a chunk of rows meets it and lives in L2 until the next; nothing larger is kept.
#pragma once
#include <utility>

#include "convert.h"

namespace attemper {

ATTEMPER_INLINE int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

ATTEMPER_INLINE Ints larger_bits(Ints a, Vec v) {
    Ints b = float_as_bits(magnitude(v));  // as integers NaN > inf > every number
    return a > b ? a : b;
}

ATTEMPER_INLINE float largest(Ints a) {
    int32_t best = 0;
    for (int i = 0; i < LANES; i++) best = a[i] > best ? a[i] : best;
    return from_bits(uint32_t(best));
}

// How large rows are: the largest magnitude of a number, NaN counted as larger than inf, and the largest norm of a row,
// which says nothing where a number is NaN.
struct Sizes {
    float most = 0, longest = 0;
};

#if !defined(__clang__)
// Swaps the off-diagonal S x S blocks of every 2 S x 2 S block. The indices are constants: no shuffle waits for them.
template <int S, size_t... LANE>
ATTEMPER_INLINE void exchange(Vec (&x)[LANES], std::index_sequence<LANE...>) {
    const Ints first = {((LANE & S) ? LANES + int(LANE) - S : int(LANE))...};
    const Ints second = {((LANE & S) ? LANES + int(LANE) : int(LANE) + S)...};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & S) continue;
        Vec a = x[i], b = x[i + S];
        x[i] = __builtin_shuffle(a, b, first);
        x[i + S] = __builtin_shuffle(a, b, second);
    }
}
#endif

// A LANES x LANES block, transposed by swaps of ever larger blocks.
ATTEMPER_INLINE void transpose(Vec (&x)[LANES]) {
#if defined(__clang__)  // it has no shuffle by a vector of indices
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float a = x[i][j], b = x[j][i];
            x[i][j] = b, x[j][i] = a;
        }
#else
    exchange<LANES / 2>(x, std::make_index_sequence<LANES>());
    exchange<LANES / 4>(x, std::make_index_sequence<LANES>());
    if constexpr (LANES > 4) exchange<LANES / 8 ? LANES / 8 : 1>(x, std::make_index_sequence<LANES>());
    if constexpr (LANES > 8) exchange<LANES / 16 ? LANES / 16 : 1>(x, std::make_index_sequence<LANES>());
#endif
}

// Asks the caches for a part of some rows of a tensor: part `number` of `parts`.
inline void prefetch(const View& view, int64_t place, int64_t row_step, int64_t count, int64_t size, int64_t number,
                     int64_t parts) {
    const int64_t width = view.type == FLOAT32 ? 4 : 2;
    for (int64_t i = count * number / parts; i < count * (number + 1) / parts; i++)
        for (int64_t byte = 0; byte < size * width; byte += 64)
            __builtin_prefetch(view.data + (place + i * row_step) * width + byte, 0, 2);
}

// `count` rows of `depth` floats (row i at from + i * stride) into columns of panels; rows up to `padded` are zeros.
// `buffer` holds LANES * up(depth, LANES) floats.
inline Sizes pack_columns(const View& view, int64_t place, int64_t row_step, int64_t step, int64_t count,
                          int64_t depth, int64_t padded, float* buffer, float* to) {
    const int64_t line = up(depth, LANES);
    Ints most = {};
    Vec longest = {};
    for (int64_t first = 0; first < padded; first += LANES) {
        const float* rows[LANES];
        bool direct = view.type == FLOAT32 && step == 1 && first + LANES <= count && depth % LANES == 0;
        if (!direct) std::memset(buffer, 0, size_t(LANES * line) * 4);
        for (int i = 0; i < LANES; i++) {
            rows[i] = buffer + i * line;
            int64_t at = place + (first + i) * row_step;
            if (direct) rows[i] = reinterpret_cast<const float*>(view.data) + at;
            else if (first + i < count) read_row(view, at, step, depth, buffer + i * line);
        }
        float* panel = to + first / PANEL * depth * PANEL + first % PANEL;
        Vec squares[2] = {};
        for (int64_t d = 0; d < depth; d += LANES) {
            Vec x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                x[i] = load(rows[i] + d);
                most = larger_bits(most, x[i]);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) squares[i % 2] += x[i] * x[i];
            int64_t n = depth - d < LANES ? depth - d : LANES;
            if (n == LANES) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) store(panel + (d + i) * PANEL, x[i]);
            } else {
                for (int i = 0; i < n; i++) store(panel + (d + i) * PANEL, x[i]);
            }
        }
        longest = larger(longest, squares[0] + squares[1]);
    }
    return {largest(most), std::sqrt(lane_max(longest))};
}

// `count` rows of `width` floats as panels [panel][room][PANEL]; rows up to `padded` and what is past `width` are zeros.
inline void pack_lines(const View& view, int64_t place, int64_t row_step, int64_t step, int64_t count, int64_t width,
                       int64_t padded, int64_t room, float* to) {
    const int64_t panels = up(width, PANEL) / PANEL;
    float line[512 + PANEL];
    for (int64_t i = 0; i < padded; i++) {
        const float* from = line;
        if (i < count && view.type == FLOAT32 && step == 1 && width % PANEL == 0) {
            from = reinterpret_cast<const float*>(view.data) + place + i * row_step;
        } else {
            std::memset(line, 0, size_t(panels * PANEL) * 4);
            if (i < count) read_row(view, place + i * row_step, step, width, line);
        }
        for (int64_t p = 0; p < panels; p++) {
            float* at = to + (p * room + i) * PANEL;
            store(at, load(from + p * PANEL));
            store(at + LANES, load(from + p * PANEL + LANES));
        }
    }
}

}  // namespace attemper
