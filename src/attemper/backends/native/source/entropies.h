// Entropies of rows from their state: z + a, at most log n, and their share of it.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

namespace attemper {

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
inline float at_most(float value, float bound) { return value > bound ? bound : value; }

// log_n: rounded down
inline float entropy_of(float z, float a, float log_n) { return at_most(z + a, log_n); }

// Of a row with one key it is its entropy's share of log 2.
inline float normalized_of(float entropy, float n, float log_n) {
    constexpr float least = 0.69314718f;
    return at_most(entropy / (n > 1 ? log_n : least), 1.0f);
}

}  // namespace attemper
