// Statistics of rows from their state in one pass, the formulas of functional/derive.py where no gradient is wanted:
// thirty operators of PyTorch over a few thousand rows take as long as attention over a hundred tokens.
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

enum Letter { M, Z, N, A, C, LETTERS };
enum Name { LSE, ENTROPY, NORMALIZED_ENTROPY, EFFECTIVE_TOKENS, MAX_WEIGHT, MEAN_LOGIT, MASS, NAMES };

struct Logarithm {
    float down = -1;  // rounded down: no entropy exceeds the true bound by a rounding
    float nearest = 0;
};

// log n of counts, each computed once: rows of a causal call have as many counts as there are rows in a head.
class Logarithms {
  public:
    Logarithm operator()(float count) {
        const auto n = int64_t(count);
        if (n >= LARGEST) return computed(double(count));
        if (size_t(n) >= known_.size()) known_.resize(size_t(n) + 1);
        Logarithm& found = known_[size_t(n)];
        if (found.down < 0) found = computed(double(n));
        return found;
    }

  private:
    static constexpr int64_t LARGEST = 1 << 16;
    static Logarithm computed(double n) {
        const double exact = n > 1 ? std::log(n) : 0;
        const auto nearest = float(exact);
        return {double(nearest) > exact ? std::nextafter(nearest, 0.0f) : nearest, nearest};
    }
    std::vector<Logarithm> known_;
};

// Not std::min: a NaN stays one.
float at_most(float value, float bound) { return value > bound ? bound : value; }

}  // namespace

// letters: where each of them lies, [rows] float32, null where the state lacks it; values: where each statistic goes,
// null where it is not wanted, which it must be where it follows from a letter that is not there.
extern "C" __attribute__((visibility("default"))) int attemper_statistics(
    int64_t rows, const float* const* letters, float* const* values, int64_t* counts) {
    const float *m = letters[M], *z = letters[Z], *n = letters[N], *a = letters[A], *c = letters[C];
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
        const float least = float(std::log(2.0));
        for (int64_t i = 0; i < rows; i++) {
            const Logarithm of = logarithm(n[i]);
            const float entropy = at_most(z[i] + a[i], of.down);
            if (values[ENTROPY]) values[ENTROPY][i] = entropy;
            if (values[NORMALIZED_ENTROPY])
                values[NORMALIZED_ENTROPY][i] = at_most(entropy / (n[i] > 1 ? of.nearest : least), 1.0f);
        }
    }
    return 0;
}
