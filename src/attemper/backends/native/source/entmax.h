// Entmax of any alpha but 1, 1.5 and 2. With q = alpha - 1, p = 1/q, w0 the largest weight, T = w0^q and L = log w0:
//
//     w = [T + q d]+^p = w0 u^p,   u = [1 + q d / T]+
//
// Below 2: Newton's iteration for (sum w)^q = 1, a norm, which is convex in T and the nearer to a line the nearer alpha
// is to 1. With A, B, C = sum u^p, sum u^(p-1), sum u^(p-2), all from one power of each key:
//
//     z = L + log A                    log sum w
//     eta = (exp(-q z) - 1) A / B      Newton's step, as a share of T:  L becomes L + log(1 + eta) / q
//     eta (1 - bend)                   the step of third order,  bend = (p - 1) / 2 (C / B - B / A) eta
//
// A sample of the keys says where to begin. The first steps take powers with four digits, since they only have to come
// near; what they find decides about no digit of the result. The last ones take all digits: one, mostly.
//
// Above 2 the derivative of the sum is infinite at every key: w0 is bracketed, in float64.
#pragma once
#include "candidates.h"

namespace attemper {

// u of a vector, to more digits than a float has: near the border of the support it is small, and there are rows that
// have most of their keys there.
struct Parts {
    Vec most, rest;
    Mask in;  // the support; what is said of other keys means nothing
};

constexpr float BORDER = 5.9604645e-8f;  // 2^-24: no float 1 + z is smaller, but 0

struct Inside {
    float factor, rest;

    Inside(double q, double level) {
        const double exact = q * std::exp(-q * level);
        factor = float(exact), rest = float(exact - double(factor));
    }

    // Finite for every key.
    ATTEMPER_INLINE Parts operator()(Vec d) const {
        const Vec z = d * factor, lost = lost_of(d, splat(factor), z) + d * rest;
        const Vec u = larger(1.0f + z, splat(BORDER));
        return {u, (z - (u - 1.0f)) + lost, below(splat(-1.0f), z)};
    }
};

struct Sums3 {
    double value, first, second;  // A, B, C
};

constexpr int64_t SHORT = 16 * LANES;  // keys that are summed in float32: 16 in a lane

// u^p stay in the list as its weights, for what comes after the last step. Keys at the maximum are counted apart: a row that is nearly one-hot keeps
// its digits.
inline Sums3 exact_sums(Support& of, double q, double level) {
    const Inside inside(q, level);
    const float less = float(1 / q - 1);
    const Vec lowest = splat(EXP_LOWEST), least = splat(VANISHED);
    Sums3 sums = {0, 0, 0};
    int64_t ties = 0;
    for (int64_t begin = 0; begin < of.size; begin += SHORT) {
        const int64_t end = begin + SHORT < of.size ? begin + SHORT : of.size;
        Vec values = {}, firsts = {}, seconds = {};
        for (int64_t j = begin; j < end; j += LANES) {
            const Vec d = load(of.distance + j);
            const Mask rest = below(d, Vec{});
            const Parts u = inside(d);
            const Vec exponent = log_with(u.most, u.rest) * less;
            const Vec e = exp_where(u.in & at_least(exponent, lowest), larger(exponent, least));
            const Vec power = e * (u.most + u.rest);
            store(of.weight + j, power);
            firsts = add_where(rest, firsts, e);
            values = add_where(rest, values, power);
            seconds = add_where(rest, seconds, e * rough_inverse(u.most));
            ties += marked(others(rest));
        }
        sums.value += lane_sum(values), sums.first += lane_sum(firsts), sums.second += lane_sum(seconds);
    }
    sums.value += double(ties), sums.first += double(ties), sums.second += double(ties);
    return sums;
}

// The same to four digits.
inline Sums3 rough_sums(const Support& of, double q, double level) {
    const float factor = float(q * std::exp(-q * level)), less = float(1 / q - 1);
    const Vec border = splat(BORDER), lowest = splat(ROUGH_LOWEST);
    Sums3 sums = {0, 0, 0};
    for (int64_t begin = 0; begin < of.size; begin += STRETCH) {
        const int64_t end = begin + STRETCH < of.size ? begin + STRETCH : of.size;
        Vec values = {}, firsts = {}, seconds = {};
        for (int64_t j = begin; j < end; j += LANES) {
            const Vec u = larger(load(of.distance + j) * factor + 1.0f, border);
            const Vec e = keep_where(below(border, u), rough_exp2(larger(rough_log2(u) * less, lowest)));
            firsts += e;
            values += e * u;
            seconds += e * rough_inverse(u);
        }
        sums.value += lane_sum(values), sums.first += lane_sum(firsts), sums.second += lane_sum(seconds);
    }
    return sums;
}

struct Step {
    double level;  // after it
    double error;  // about how far that is from the root
};

// `most`: keys of the list; `share`: how many keys each stands for.
inline Step step_from(double level, double q, const Sums3& sums, double share, int64_t most) {
    const double p = 1 / q, z = level + std::log(share * sums.value);
    const double eta = std::expm1(-q * z) * sums.value / sums.first;
    const double bend = 0.5 * (p - 1) * (sums.second / sums.first - sums.first / sums.value) * eta;
    Step step{level + std::log1p(eta) * p, std::fabs(z) / 16};
    if (!(std::fabs(bend) < 0.25 && std::fabs(eta) < 0.25)) return step;
    step.level = level + std::log1p(eta - bend * eta) * p;
    // What C lacks of its digits is p / 2 as much in the bend.
    const double moved = std::fabs(eta) * p, error = (4 * bend * bend + 2e-3 * moved) * moved;
    if (error >= step.error) return step;
    // A key that is nearer to the border of the support than the step is long is in no derivative: at most its weight.
    const double border = share * double(most) * std::exp(level + p * std::log(4 * std::fabs(eta) + 1e-30));
    step.error = error + border < step.error ? error + border : step.error;
    return step;
}

struct Root {
    double level, from;  // L, and where the last step began
};

constexpr double NONE = 1;  // no L: those are at most 0

// Steps from `level` on until the error is at most `enough`; NONE where the root is above `bound`, so that the list may
// lack keys.
template <class Take>
inline Root fall(Support& of, double q, double level, double bound, double share, double enough,
                 const Take& take) {
    double from = level;
    for (int round = 0; round < 60; round++) {
        const Step step = step_from(level, q, take(of, q, level), share, of.size);
        from = level;
        if (!(step.level <= bound)) {  // NaN, too: no key of a sample is inside
            if (level == bound) return {NONE, from};
            level = bound;
            continue;
        }
        level = step.level;
        if (step.error <= enough) break;
    }
    return {level, from};
}

// How far keys count whose largest weight is at most exp(level); a little more, for what rounding takes.
inline float window_of(double q, double level) { return float(std::exp(q * level) / q * 1.000002); }

constexpr int64_t SAMPLE = 16;  // of so many vectors of a long row, one

// L as a sample suggests it; 0 where it says nothing.
inline double level_of_sample(const float* s, int64_t n, float maximum, double q, Support& to) {
    if (n < 64 * LANES) return 0;
    int64_t count = 0;
    for (int64_t j = 0; j + LANES <= n; j += SAMPLE * LANES, count += LANES) store(to.spare + count, load(s + j));
    take_candidates(to.spare, count, maximum, window_of(q, 0), to);
    pad(to);
    const double level = fall(to, q, -1, 0, double(SAMPLE), 0.05, rough_sums).level;
    return level == NONE ? 0 : level;
}

// Above a sample's L, and above that of rough steps: keys beyond are left out. Wrong now and then, and then found out.
constexpr double ABOVE_SAMPLE = 0.7, ABOVE_ROUGH = 0.02;
constexpr double NEARLY = 1e-2, WHOLLY = 2e-8;  // errors of L

// L from `start` on, with a list of all keys that may have weight, in which exact_sums leaves powers of the last step;
// NONE where L is above `bound`.
inline Root root_below(const float* s, int64_t n, float maximum, double q, double start, double bound, Support& to) {
    take_candidates(s, n, maximum, window_of(q, bound), to);
    pad(to);
    const double near = fall(to, q, start, bound, 1, NEARLY, rough_sums).level;
    if (near == NONE) return {NONE, start};
    const double above = std::fmin(near + ABOVE_ROUGH, bound);
    drop_below(to, -window_of(q, above));
    return fall(to, q, near, above, 1, WHOLLY, exact_sums);
}

// L of a row, with its list.
inline Root root_of(const float* s, int64_t n, float maximum, double q, Support& to) {
    const double guess = level_of_sample(s, n, maximum, q, to), bound = std::fmin(guess + ABOVE_SAMPLE, 0);
    Root root = root_below(s, n, maximum, q, guess, bound, to);
    if (root.level == NONE && bound < 0) root = root_below(s, n, maximum, q, bound, 0, to);
    if (root.level != NONE) return root;
    take_candidates(s, n, maximum, window_of(q, 0), to);
    pad(to);
    root = fall(to, q, 0, 0, 1, WHOLLY, exact_sums);
    return root.level == NONE ? Root{0, 0} : root;  // one key, whose weight was rounded below 1
}

// Weights. From T to T (1 + eta), u becomes (u + eta) / (1 + eta), and with w0 and u of before the last step
//
//     w = w0 u^p (1 + eta / u)^p = w0 u^p (1 + x + (1 - q) / 2 x^2 + (1 - q) (1 - 2 q) / 6 x^3 + ...),   x = p eta / u
//
// whose powers that step has left. Keys near the border of the support are computed anew.
class Weights {
  public:
    Weights(double q, Root root)
        : old_(q, root.from), inside_(q, root.level), old_top_(float(std::exp(root.from))),
          top_(float(std::exp(root.level))), power_(float(1 / q)) {
        const double eta = std::expm1(q * (root.level - root.from));
        moved_ = float(eta / q), second_ = float((1 - q) / 2), third_ = float((1 - q) * (1 - 2 * q) / 6);
        near_ = float(std::fabs(eta) * (32 / q));  // (1/32)^4 / 24 is less than what rounding takes
    }

    // `powers`: u^p of before the step
    ATTEMPER_INLINE Vec operator()(Vec d, Vec powers) const {
        const Vec u = d * old_.factor + 1.0f;
        if (marked(below(magnitude(u), splat(near_))) > 0) return anew(d);
        const Vec x = moved_ / larger(u, splat(BORDER)), weight = powers * old_top_;
        return weight + weight * (x + x * x * (x * third_ + second_));
    }

  private:
    Vec anew(Vec d) const {
        const Parts u = inside_(d);
        const Vec exponent = log_with(u.most, u.rest) * power_;
        return exp_where(u.in & at_least(exponent, splat(EXP_LOWEST)), larger(exponent, splat(VANISHED))) * top_;
    }

    Inside old_, inside_;
    float old_top_, top_, power_;
    float moved_, second_, third_;  // p eta, and what stands before powers of it
    float near_;  // the border: where |u| is smaller
};

inline void solve_entmax(const float* s, int64_t n, float maximum, double alpha, Support& to) {
    const Root root = root_of(s, n, maximum, alpha - 1, to);
    const Weights weights(alpha - 1, root);
    const Vec least = splat(std::numeric_limits<float>::min());
    int64_t count = 0;
    for (int64_t j = 0; j < to.size; j += LANES) {
        const Vec weight = weights(load(to.distance + j), load(to.weight + j));
        const Mask in = at_least(weight, least);
        compress(in, weight, to.weight + count);
        count = keep_marked(to, j, in, count);
    }
    to.size = count, to.found = std::exp(root.level);
}

// [w0^q + q d]+^(1/q) of one key; keys at the maximum have w0 whatever w0^q underflows to.
inline double steep_weight(double top, double q, float distance) {
    if (distance == 0) return top;
    const double z = q * double(distance) * std::exp(-q * std::log(top));
    return z > -1 ? top * std::exp(std::log1p(z) / q) : 0.0;
}

// alpha > 2. The root is between two numbers; where they meet, and a weight still jumps between them, it is mixed.
inline void solve_steep(const float* s, int64_t n, float maximum, double alpha, Support& to) {
    const double q = double(alpha) - 1;
    const float window = float(1 / q);
    take_candidates(s, n, maximum, window > 1e-30f ? window : 1e-30f, to);
    const auto sum = [&](double top) {
        double total = 0;
        for (int64_t j = 0; j < to.size; j++) total += steep_weight(top, q, to.distance[j]);
        return total;
    };
    double low = 1 / double(to.size), high = 1, of_low = sum(low), of_high = sum(high);
    bool secant = true;
    for (int round = 0; round < 200 && of_low < 1 && of_high > 1; round++) {
        double top = 0.5 * (low + high);
        if (secant) top = low + (high - low) * (1 - of_low) / (of_high - of_low);
        if (!(top > low && top < high)) top = 0.5 * (low + high);
        if (!(top > low && top < high)) break;
        const double total = sum(top), width = high - low;
        if (total < 1) low = top, of_low = total;
        else high = top, of_high = total;
        // A secant that leaves more than half of the bracket is followed by a bisection.
        secant = !secant || high - low < 0.5 * width;
    }
    const double share = of_low >= 1 ? 0.0 : (of_high <= 1 ? 1.0 : (1 - of_low) / (of_high - of_low));
    int64_t count = 0;
    for (int64_t j = 0; j < to.size; j++) {
        const float d = to.distance[j];
        const double below = steep_weight(low, q, d), weight = below + share * (steep_weight(high, q, d) - below);
        if (!(float(weight) > 0)) continue;
        to.weight[count] = float(weight), to.distance[count] = d, to.place[count] = to.place[j];
        count++;
    }
    to.size = count;
    to.found = low + share * (high - low);
}

}  // namespace attemper
