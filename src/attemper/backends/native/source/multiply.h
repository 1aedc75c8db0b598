// The one product of every pass: C[ROWS x PANEL] = keep * C + sum_k A(i, k) B[k], all of C in registers, or one part
// of its rows after the other (SPLIT_TILES). Where a tile has fewer rows (COUNT) or half a panel's columns are wanted
// (WIDE vectors), only those are computed, in the same order.
//
// A(i, k) is read as single floats, broadcast, at a[i * STEP_I + k * step_k]: packed tiles (STEP_I = 1), rows of scores
// (step_k = 1) and columns of scores (the transpose, STEP_I = 1) are one function. B is a panel [k][PANEL], contiguous.
// Per step of k: 2 loads of B, a broadcast and 2 multiply-adds a row; B's panel lives in L1, A in L1.
#pragma once
#include <type_traits>

#include "simd.h"

namespace attemper {

// Calls `with` with how many rows a product is made for, as a constant: `rows`, at most ROWS, and up to an even number.
template <int COUNT = 2, class With>
ATTEMPER_INLINE void for_rows(int64_t rows, const With& with) {
    if constexpr (COUNT >= ROWS) with(std::integral_constant<int, ROWS>());
    else if (rows <= COUNT) with(std::integral_constant<int, COUNT>());
    else for_rows<COUNT + 2>(rows, with);
}

// Keys of a piece: their products are summed one after another, pieces in their block, blocks to the running output. A
// sum of n equal terms, each rounded where the sum stands, would be off by about sqrt(n) / 5 roundings. Pieces begin at
// multiples of PIECE among all keys, so that a row's sums do not depend on which keys its neighbours see.
constexpr int64_t PIECE = 64;

constexpr int64_t AHEAD = 8;  // steps of k by which B is asked for before it is used: it comes from L2

template <int STEP_I, int COUNT, int WIDE>
ATTEMPER_INLINE void multiply(const float* __restrict a, int64_t step_k, const float* __restrict b, int64_t depth,
                              Vec (&c)[COUNT][WIDE]) {
    for (int64_t k = 0; k < depth; k++) {
        Vec column[WIDE];
#pragma GCC unroll 2
        for (int half = 0; half < WIDE; half++) {
            column[half] = load(b + half * LANES);
            __builtin_prefetch(b + AHEAD * PANEL + half * LANES, 0, 3);
        }
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) {
            Vec x = splat(a[i * STEP_I]);
#pragma GCC unroll 2
            for (int half = 0; half < WIDE; half++) c[i][half] += x * column[half];
        }
        a += step_k;
        b += PANEL;
    }
}

// Calls `with` for the rows that are summed together (SPLIT_TILES): with their number, a constant, and the first.
template <int COUNT, class With>
ATTEMPER_INLINE void for_parts(const With& with) {
    if constexpr (SPLIT_TILES && COUNT % 2 == 0) {
        with(std::integral_constant<int, COUNT / 2>(), 0);
        with(std::integral_constant<int, COUNT / 2>(), COUNT / 2);
    } else {
        with(std::integral_constant<int, COUNT>(), 0);
    }
}

template <int STEP_I, int COUNT, int WIDE>
ATTEMPER_PART_OF_TILE void part_product(const float* a, int64_t step_k, const float* b, int64_t depth, float* to,
                                        int64_t stride) {
    Vec c[COUNT][WIDE] = {};
    multiply<STEP_I>(a, step_k, b, depth, c);
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 2
        for (int half = 0; half < WIDE; half++) store(to + i * stride + half * LANES, c[i][half]);
}

// to = A B: rows of `to` are `stride` apart.
template <int STEP_I, int COUNT = ROWS, int WIDE = 2>
inline void product(const float* a, int64_t step_k, const float* b, int64_t depth, float* to, int64_t stride) {
    for_parts<COUNT>([&](auto rows, int64_t first) {
        part_product<STEP_I, decltype(rows)::value, WIDE>(a + first * STEP_I, step_k, b, depth, to + first * stride,
                                                          stride);
    });
}

template <int STEP_I, int COUNT>
ATTEMPER_PART_OF_TILE void add_part_product(const float* a, int64_t step_k, const float* b, int64_t begin,
                                            int64_t depth, float* to, int64_t stride, const float* keep) {
    Vec room[COUNT][2];
    Vec(*sums)[2] = room;
    // GCC would hold the array in registers, of which there are too few, and copy all of it with every piece. Half a
    // tile's sums fit beside half a tile's products.
    if constexpr (LANES == 16 && 4 * COUNT > 28) asm("" : "+r"(sums));
    int64_t last = 0;
    for (int64_t end = PIECE - begin % PIECE; end < depth; end += PIECE) {
        const int64_t from = last;
        last = end;
        Vec c[COUNT][2] = {};
        multiply<STEP_I>(a + from * step_k, step_k, b + from * PANEL, end - from, c);
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) sums[i][half] = from ? sums[i][half] + c[i][half] : c[i][half];
    }
    Vec c[COUNT][2] = {};
    multiply<STEP_I>(a + last * step_k, step_k, b + last * PANEL, depth - last, c);
    if (last)
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) c[i][half] += sums[i][half];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            float* at = to + i * stride + half * LANES;
            if (keep) store(at, load(at) * keep[i] + c[i][half]);
            else store(at, c[i][half]);
        }
}

// to = keep_i * to + A B, the running sum of an online softmax; without `keep`, to = A B. A B is summed by itself, in
// pieces; `begin`: the place of its first key in the block.
template <int STEP_I, int COUNT = ROWS>
inline void add_product(const float* a, int64_t step_k, const float* b, int64_t begin, int64_t depth, float* to,
                        int64_t stride, const float* keep) {
    for_parts<COUNT>([&](auto rows, int64_t first) {
        add_part_product<STEP_I, decltype(rows)::value>(a + first * STEP_I, step_k, b, begin, depth,
                                                        to + first * stride, stride, keep ? keep + first : nullptr);
    });
}

// to += A^T B for COUNT columns of A: a[k * step_k + i] is broadcast. Depth is the number of rows of a tile or a few;
// they are summed by themselves.
template <int COUNT>
inline void add_transposed(const float* __restrict a, int64_t step_k, const float* __restrict b, int64_t depth,
                           float* to, int64_t stride) {
    Vec c[COUNT][2] = {};
    for (int64_t k = 0; k < depth; k++, a += step_k, b += PANEL) {
        Vec b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) {
            Vec x = splat(a[i]);
            c[i][0] += x * b0;
            c[i][1] += x * b1;
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) {
        float* at = to + i * stride;
        store(at, load(at) + c[i][0]), store(at + LANES, load(at + LANES) + c[i][1]);
    }
}

// Which rows of A are not 0 in all of some columns: from <= k < until.
struct Depth {
    int64_t from, until;
};

// The same for `count` columns, a multiple of PANEL: whole tiles of ROWS, then what is left, two columns at a time.
// `depth_of(i, n)`: the Depth of the columns i .. i + n.
template <class DepthOf>
inline void add_transposed(const float* a, int64_t step_k, const float* b, int64_t count, float* to, int64_t stride,
                           const DepthOf& depth_of) {
    int64_t i = 0;
    const auto take = [&](auto columns) {
        constexpr int COUNT = decltype(columns)::value;
        for (; i + COUNT <= count; i += COUNT) {
            const auto [from, until] = depth_of(i, COUNT);
            if (from < until)
                add_transposed<COUNT>(a + from * step_k + i, step_k, b + from * PANEL, until - from, to + i * stride,
                                      stride);
        }
    };
    take(std::integral_constant<int, ROWS>());
    take(std::integral_constant<int, 4>());
    take(std::integral_constant<int, 2>());
}

inline void add_transposed(const float* a, int64_t step_k, const float* b, int64_t depth, int64_t count, float* to,
                           int64_t stride) {
    add_transposed(a, step_k, b, count, to, stride, [&](int64_t, int64_t) { return Depth{0, depth}; });
}

}  // namespace attemper
