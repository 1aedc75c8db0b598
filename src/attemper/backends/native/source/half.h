// Products of bfloat16 numbers, summed in float32: the processor's matrix unit (AMX), or its dot products
// (AVX512-BF16).
//
//     C[rows x 32] (+)= A B      A [row][k], k a multiple of STEP;     B in panels of 16 columns, [k / 2][column][2]
//
// The two numbers of a pair stand together in both: 32 bits are what the processor multiplies at once. A product of two
// bfloat16 is exact in float32. Both units take denormal numbers for zero. A build without them compiles none of this.
//
//     halves     [row][deep]                    queries as they stand, zeros up to a multiple of STEP
//     columns    [panel of 16][deep / 2][16]    keys: 16 x 16 blocks of pairs, transposed through registers
//     pairs      [panel of 16][room / 2][16]    values: two lines laced together
#pragma once
#include "pack.h"

#if defined(__AVX512BF16__)
#define ATTEMPER_HALF 1
namespace attemper {

constexpr int64_t STEP = 32;    // numbers of a row that one step of the products takes: 64 bytes
constexpr int64_t COLUMNS = 16;  // of a panel of B
constexpr int64_t TALL = 32;    // rows of C at most

#if defined(__AMX_BF16__)
// The thread's tiles as 16 lines of 64 bytes while this lives. Outside, the unit is left clean: a thread that holds
// tiles costs more to switch.
class Tiles {
public:
    Tiles() {
        alignas(64) uint8_t shape[64] = {};
        shape[0] = 1;
        for (int tile = 0; tile < 8; tile++) shape[16 + 2 * tile] = 64, shape[48 + tile] = 16;
        asm volatile("" : : "r"(shape) : "memory");  // GCC's header tells it of the first 8 bytes only
        _tile_loadconfig(shape);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Up to 16 rows (TWO: 32) by 32 columns. `a` steps by STEP numbers along its rows, `b` by 16 lines of 64 bytes.
template <bool TWO, bool ADD>
inline void half_tile(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_panel, int64_t steps, float* c,
                      int64_t c_stride) {
    const int64_t line = a_stride * 2, out = c_stride * 4;
    asm volatile("" ::: "memory");  // the compiler does not know that tiles are loaded from memory
    if (ADD) {
        _tile_loadd(0, c, out);
        _tile_loadd(1, c + COLUMNS, out);
        if (TWO) {
            _tile_loadd(2, c + 16 * c_stride, out);
            _tile_loadd(3, c + 16 * c_stride + COLUMNS, out);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t step = 0; step < steps; step++, a += STEP, b += 16 * STEP) {
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + b_panel, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, a + 16 * a_stride, line);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, out);
    _tile_stored(1, c + COLUMNS, out);
    if (TWO) {
        _tile_stored(2, c + 16 * c_stride, out);
        _tile_stored(3, c + 16 * c_stride + COLUMNS, out);
    }
    asm volatile("" ::: "memory");
}
#else
class Tiles {
public:
    Tiles() {}
};

template <bool TWO, bool ADD>
inline void half_tile(const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_panel, int64_t steps, float* c,
                      int64_t c_stride) {
    constexpr int HIGH = 8;
    for (int64_t row = 0; row < (TWO ? 32 : 16); row += HIGH) {
        const uint16_t* from = a + row * a_stride;
        float* to = c + row * c_stride;
        Vec sum[HIGH][2] = {};
        if (ADD)
            for (int i = 0; i < HIGH; i++)
                sum[i][0] = load(to + i * c_stride), sum[i][1] = load(to + i * c_stride + COLUMNS);
        const uint16_t* column = b;
        for (int64_t k = 0; k < steps * STEP; k += 2, column += 2 * COLUMNS) {
            const __m512bh b0 = (__m512bh)_mm512_loadu_si512(column);
            const __m512bh b1 = (__m512bh)_mm512_loadu_si512(column + b_panel);
#pragma GCC unroll 16
            for (int i = 0; i < HIGH; i++) {
                int32_t pair;
                std::memcpy(&pair, from + i * a_stride + k, 4);
                const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, b0);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, b1);
            }
        }
        for (int i = 0; i < HIGH; i++)
            store(to + i * c_stride, sum[i][0]), store(to + i * c_stride + COLUMNS, sum[i][1]);
    }
}
#endif

// `rows` (at most TALL) by 32 columns; what lies past `rows` up to a multiple of 16 is computed, too.
template <bool ADD>
inline void half_product(int64_t rows, const uint16_t* a, int64_t a_stride, const uint16_t* b, int64_t b_panel,
                         int64_t steps, float* c, int64_t c_stride) {
    if (rows > 16) half_tile<true, ADD>(a, a_stride, b, b_panel, steps, c, c_stride);
    else half_tile<false, ADD>(a, a_stride, b, b_panel, steps, c, c_stride);
}

// The largest magnitude among the numbers it has seen, NaN counted as larger than inf.
class Most {
public:
    ATTEMPER_INLINE void see(__m512i numbers) {
        most_ = _mm512_max_epu16(most_, _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff)));
    }
    float value() const {
        alignas(64) uint16_t numbers[32];
        _mm512_store_si512(numbers, most_);
        uint16_t most = 0;
        for (uint16_t number : numbers) most = number > most ? number : most;
        return from_bits(uint32_t(most) << 16);
    }

private:
    __m512i most_ = _mm512_setzero_si512();
};

// Line `place` of a bfloat16 tensor where it can be read 64 bytes at a time: in place, or in `buffer`, which holds
// zeros past `n`.
ATTEMPER_INLINE const uint16_t* half_line(const View& view, int64_t place, int64_t step, int64_t n, uint16_t* buffer) {
    auto* from = reinterpret_cast<const uint16_t*>(view.data) + place;
    if (step == 1 && n % STEP == 0) return from;
    if (step == 1) std::memcpy(buffer, from, size_t(n) * 2);
    else for (int64_t i = 0; i < n; i++) buffer[i] = from[i * step];
    return buffer;
}

// One line as halves, zeros up to `deep`.
ATTEMPER_INLINE void copy_halves(const View& view, int64_t place, int64_t step, int64_t n, int64_t deep, uint16_t* to,
                                 Most& most) {
    if (n < deep) std::memset(to, 0, size_t(deep) * 2);
    const uint16_t* from = half_line(view, place, step, n, to);
    for (int64_t d = 0; d < deep; d += STEP) {
        const __m512i numbers = _mm512_loadu_si512(from + d);
        _mm512_storeu_si512(to + d, numbers);
        most.see(numbers);
    }
}

// `count` lines (line i at place + i * row_step) as columns of panels; lines up to `padded`, a multiple of 16, are
// zeros. `buffer` holds 16 * deep numbers. Returns the largest magnitude.
inline float pack_half_columns(const View& view, int64_t place, int64_t row_step, int64_t step, int64_t count,
                               int64_t depth, int64_t padded, uint16_t* buffer, uint16_t* to) {
    const int64_t deep = up(depth, STEP);
    Most most;
    if (depth < deep || count < padded) std::memset(buffer, 0, size_t(16 * deep) * 2);
    for (int64_t first = 0; first < padded; first += COLUMNS) {
        const uint16_t* lines[COLUMNS];
        for (int64_t i = 0; i < COLUMNS; i++) {
            lines[i] = buffer + i * deep;
            if (first + i < count)
                lines[i] = half_line(view, place + (first + i) * row_step, step, depth, buffer + i * deep);
            else
                std::memset(buffer + i * deep, 0, size_t(deep) * 2);
        }
        for (int64_t d = 0; d < deep; d += STEP) {
            Vec x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const __m512i numbers = _mm512_loadu_si512(lines[i] + d);
                most.see(numbers);
                x[i] = (Vec)_mm512_castsi512_ps(numbers);
            }
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512(to + (first * deep + (d / 2 + i) * 2 * COLUMNS), _mm512_castps_si512(x[i]));
        }
    }
    return most.value();
}

// `count` lines of `width` numbers as pairs: panels [panel][room / 2][16][2]; lines up to `padded` (even) and what is
// past `width` up to a multiple of 32 are zeros. `buffer` holds 2 * up(width, 32) numbers.
inline void pack_half_pairs(const View& view, int64_t place, int64_t row_step, int64_t step, int64_t count,
                            int64_t width, int64_t padded, int64_t room, uint16_t* buffer, uint16_t* to) {
    const int64_t wide = up(width, STEP);
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    std::memset(buffer, 0, size_t(2 * wide) * 2);
    for (int64_t i = 0; i < padded; i += 2) {
        const uint16_t* lines[2];
        for (int64_t t = 0; t < 2; t++) {
            lines[t] = buffer + t * wide;
            if (i + t < count) lines[t] = half_line(view, place + (i + t) * row_step, step, width, buffer + t * wide);
            else std::memset(buffer + t * wide, 0, size_t(wide) * 2);
        }
        for (int64_t e = 0; e < wide; e += STEP) {
            const __m512i a = _mm512_loadu_si512(lines[0] + e), b = _mm512_loadu_si512(lines[1] + e);
            uint16_t* at = to + e * room + i * COLUMNS;
            _mm512_storeu_si512(at, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(at + COLUMNS * room, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// Weights of two vectors as bfloat16, rounded to nearest.
ATTEMPER_INLINE void store_halves(uint16_t* to, Vec low, Vec high) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    std::memcpy(to, &both, 64);
}

// Whether the matrix products of a call are those of this file.
inline bool takes_halves(const Arguments& call) {
    return call.query.type == BFLOAT16 && call.key.type == BFLOAT16 && (call.width == 0 || call.value.type == BFLOAT16);
}

}  // namespace attemper
#endif
