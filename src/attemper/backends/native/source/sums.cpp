// Statistics of rows as sums per head, the layout of backends/sums.py, from their state in one pass: what a reading
// keeps of a call of softmax without a sink. In float64, rows in their order: the same bits for any number of threads.
#include <cstring>

#include "entropies.h"
#include "pool.h"

namespace {

using namespace attemper;

// python: backends/sums.py
enum Summed { MAXIMUM, LOG_SUM, VISIBLE_KEYS, MEAN_DEPTH, VARIANCE, SQUARED_WEIGHTS, FIRST_TOKENS, SUMMED };
enum Sum {
    ROWS, EMPTY, NONFINITE, MAX_LOGIT, ENTROPY, NORMALIZED_ENTROPY, EFFECTIVE_TOKENS, MAX_WEIGHT, LOGIT_VARIANCE, MASS,
    FIRST_TOKEN_MASS, ROWS_OF_NORMALIZED_ENTROPY, ROWS_OF_FIRST_TOKEN_MASS, SUMS
};
enum Group { HISTOGRAM, CURVE_ROWS, CURVE_ENTROPY, CURVE_NORMALIZED_ENTROPY, CURVE_FIRST_TOKEN_MASS, GROUPS };
constexpr int64_t BINS = 32;

}  // namespace

// python: backends/native/rows.py
struct AttemperSums {
    int64_t batch, heads, rows, first_tokens, threads;
    const float* state;       // [F, B, H, R], its first columns those of Summed
    const uint8_t* included;  // which rows count, or null
    int64_t included_stride[3];
    double* sums;  // [H, SUMS + GROUPS * BINS]
};

namespace {

void sum_head(void* context, int64_t head, int64_t) {
    const AttemperSums& call = *static_cast<const AttemperSums*>(context);
    double* sum = call.sums + head * (SUMS + GROUPS * BINS);
    const auto bin = [&](Group group, int64_t number) -> double& { return sum[SUMS + group * BINS + number]; };
    std::memset(sum, 0, sizeof(double) * (SUMS + GROUPS * BINS));
    sum[MAX_LOGIT] = -INFINITY;
    const int64_t plane = call.batch * call.heads * call.rows;
    Logarithms logarithm;
    for (int64_t batch = 0; batch < call.batch; batch++) {
        const float* of[SUMMED];
        for (int column = 0; column < SUMMED; column++)
            of[column] = call.state + column * plane + (batch * call.heads + head) * call.rows;
        const uint8_t* included = call.included;
        if (included) included += batch * call.included_stride[0] + head * call.included_stride[1];
        for (int64_t i = 0; i < call.rows; i++) {
            if (included && !included[i * call.included_stride[2]]) continue;
            const float m = of[MAXIMUM][i], z = of[LOG_SUM][i], n = of[VISIBLE_KEYS][i];
            if (n == 0) {
                sum[EMPTY]++;
                continue;
            }
            const float lse = m + z;
            if (!std::isfinite(lse)) {
                sum[NONFINITE]++;
                continue;
            }
            const int64_t bucket = std::ilogb(n);
            const Logarithm log_n = logarithm(n);
            const float entropy = entropy_of(z, of[MEAN_DEPTH][i], log_n.down);
            sum[ROWS]++, bin(CURVE_ROWS, bucket)++;
            sum[MAX_LOGIT] = m > sum[MAX_LOGIT] ? m : sum[MAX_LOGIT];
            sum[ENTROPY] += entropy, bin(CURVE_ENTROPY, bucket) += entropy;
            sum[EFFECTIVE_TOKENS] += 1.0f / of[SQUARED_WEIGHTS][i];
            sum[MAX_WEIGHT] += std::exp(-z);
            sum[LOGIT_VARIANCE] += of[VARIANCE][i];
            sum[MASS]++;
            if (n > 1) {
                const float share = normalized_of(entropy, n, log_n.nearest);
                const auto place = int64_t(share * BINS);
                sum[NORMALIZED_ENTROPY] += share, bin(CURVE_NORMALIZED_ENTROPY, bucket) += share;
                sum[ROWS_OF_NORMALIZED_ENTROPY]++;
                bin(HISTOGRAM, place < 0 ? 0 : place < BINS ? place : BINS - 1)++;
            }
            if (n > float(call.first_tokens)) {
                const float share = of[FIRST_TOKENS][i];
                sum[FIRST_TOKEN_MASS] += share, bin(CURVE_FIRST_TOKEN_MASS, bucket) += share;
                sum[ROWS_OF_FIRST_TOKEN_MASS]++;
            }
        }
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int attemper_sums(const AttemperSums* call) {
    return guarded([&] { return run_tasks(call->heads, call->threads, sum_head, const_cast<AttemperSums*>(call)); });
}
