// Statistics of rows from their state in one pass, the formulas of call/formulas.py where no gradient is wanted:
// thirty operators of PyTorch over a few thousand rows take as long as attention over a hundred tokens.
#include <cstring>

#include "arguments.h"
#include "entropies.h"
#include "memory.h"

namespace {

using namespace attemper;

// python: backends/native/rows.py
enum Derived { LSE, ENTROPY, NORMALIZED_ENTROPY, EFFECTIVE_TOKENS, MAX_WEIGHT, MEAN_LOGIT, MASS, COUNT };

// log n of counts, row by row.
struct LogCounts {
    static constexpr int64_t ROOM = 256;
    float down[ROOM], nearest[ROOM];

    void take(const float* n, int64_t rows, Logarithms& logarithm) {
        for (int64_t i = 0; i < rows; i++) {
            const Logarithm of = logarithm(n[i]);
            down[i] = of.down, nearest[i] = of.nearest;
        }
    }
};

// columns: where each state column lies, [rows] float32, null where the state lacks it; values: where each statistic
// goes, null where it is not wanted, which it must be where it follows from a column that is not there.
void derive(int64_t rows, const float* const* columns, float* const* values, int64_t* counts) {
    const float *m = columns[Column::MAXIMUM], *z = columns[Column::LOG_SUM], *n = columns[Column::VISIBLE_KEYS];
    const float *a = columns[Column::MEAN_DEPTH], *c = columns[Column::SQUARED_WEIGHTS];
    if (values[LSE])
        for (int64_t i = 0; i < rows; i++) values[LSE][i] = m[i] + z[i];
    if (values[MASS])
        for (int64_t i = 0; i < rows; i++) {
            const float lse = m[i] + z[i];
            values[MASS][i] = n[i] > 0 ? lse - lse + 1.0f : 0.0f;
        }
    if (values[MEAN_LOGIT])
        for (int64_t i = 0; i < rows; i++) values[MEAN_LOGIT][i] = (n[i] > 0 ? m[i] : 0.0f) - a[i];
    if (values[EFFECTIVE_TOKENS])
        for (int64_t i = 0; i < rows; i++) values[EFFECTIVE_TOKENS][i] = n[i] > 0 ? 1.0f / c[i] : 0.0f;
    if (values[MAX_WEIGHT])
        for (int64_t i = 0; i < rows; i++) values[MAX_WEIGHT][i] = n[i] > 0 ? std::exp(-z[i]) : 0.0f;
    if (counts)
        for (int64_t i = 0; i < rows; i++) counts[i] = int64_t(n[i]);
    if (values[ENTROPY] || values[NORMALIZED_ENTROPY]) {
        Logarithms logarithm;
        LogCounts log_n;
        for (int64_t first = 0; first < rows; first += LogCounts::ROOM) {
            const int64_t count = rows - first < LogCounts::ROOM ? rows - first : LogCounts::ROOM;
            log_n.take(n + first, count, logarithm);
            float entropies[LogCounts::ROOM];
            for (int64_t i = 0; i < count; i++)
                entropies[i] = entropy_of(z[first + i], a[first + i], log_n.down[i]);
            if (values[ENTROPY]) std::memcpy(values[ENTROPY] + first, entropies, size_t(count) * 4);
            if (values[NORMALIZED_ENTROPY])
                for (int64_t i = 0; i < count; i++)
                    values[NORMALIZED_ENTROPY][first + i] =
                        normalized_of(entropies[i], n[first + i], log_n.nearest[i]);
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int attemper_statistics(
    int64_t rows, const float* const* columns, float* const* values, int64_t* counts) {
    return guarded([&] { return derive(rows, columns, values, counts), int(FINE); });
}
