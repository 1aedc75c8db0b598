// The gradients of a row's scores, from those of its weights and of its state. With g the gradient of a weight, g_w,
// g_p, ... those of the state columns (docs/design/0008), J the normalizer's Jacobian, p = w / W, d = s - m,
// D = sum p d:
//
//     g = dO.v + g_w + (b - sum p b) / W
//     b = -g_h log p + 2 g_c p - g_a d + g_v (d - D)^2 + g_f 1[first] + g_t distance + g_o 1[own key] + g_b 1[span]
//         + g_p 1[argmax]
//     ds = J g + p (2 g_v (d - D) - g_a) + 1[argmax] (g_m + g_a)
//     J g = r (g - sum(r g) / sum r),  r = w^(2 - alpha) (entmax), w (top-k, threshold);  w (1 - w) g (sigmoid)
//
// and of what is given per head: the bias sum J g; alpha, with l = log w, f = exp(-q l) - 1 + q l, F = sum w f,
// H = -sum w l, R = sum r, a form whose terms in 1 / q and 1 / q^2 have cancelled on paper:
//
//     dw/dalpha = w / R [ (F - f) / q^2 - (l F + f H) / q ]
//
// Above alpha = 2, r of n equal weights is n^(alpha - 2), and the ds, of sum 0, are that much larger than what they add
// up to: there each rounding of a ds is passed on to the next.
#pragma once
#include "rowwise_forward.h"

namespace attemper {

// Gradients of a row's state columns.
struct Above {
    float of[Column::COUNT];
    bool statistics;  // any that comes through p
    bool top;         // the maximum takes a gradient
};

inline Above above_of(const Arguments& call, int64_t batch, const Row& row) {
    const int64_t plane = call.batch * call.heads * call.queries, place = place_of(call, batch, row);
    Above above = {};
    for (int column = 0; column < Column::COUNT; column++)
        if (call.place[column] >= 0) above.of[column] = call.grad_state[call.place[column] * plane + place];
    if (!call.maximum_gradient) above.of[Column::LARGEST_WEIGHT] = 0;
    for (int column = Column::LARGEST_WEIGHT; column <= Column::DISTANCE; column++)
        above.statistics |= above.of[column] != 0;
    above.statistics |= above.of[Column::OWN_KEY] != 0 || above.of[Column::SPAN] != 0;
    above.top = call.maximum_gradient || call.place[Column::MEAN_DEPTH] >= 0;
    return above;
}

// Where the largest score stands in the list.
inline int64_t top_of(const Support& of) {
    int64_t j = 0;
    while (j < of.size && of.distance[j] != 0) j++;
    return j;
}

// Adds to `g`, dO.v of the list, what the statistics bring. `first_key`: the key at place 0.
inline void add_statistics(const Arguments& call, int64_t batch, const Row& row, const Above& above,
                           const Support& list, const Moments& sums, int64_t first_key, float* g) {
    const float of_mass = above.of[Column::MASS], of_depth = above.of[Column::MEAN_DEPTH];
    const float of_entropy = above.of[Column::ENTROPY], of_variance = above.of[Column::VARIANCE];
    const float of_squares = above.of[Column::SQUARED_WEIGHTS];
    const float of_distance = above.of[Column::DISTANCE], of_largest = above.of[Column::LARGEST_WEIGHT];
    if (of_mass != 0)
        for (int64_t j = 0; j < list.size; j++) g[j] += of_mass;
    if (!above.statistics || sums.share == 0) return;
    const float mean = float(sums.mean), share = float(sums.share), log_total = float(std::log(sums.total));
    const Vec zero = {};
    float* b = list.spare;
    for (int64_t j = 0; j < list.size; j += LANES) {
        const Vec w = load(list.weight + j), d = load(list.distance + j), apart = d - mean;
        Vec sum = w * (2 * of_squares * share) - d * of_depth + apart * apart * of_variance;
        if (of_entropy != 0) sum -= (log_of(w) - log_total) * of_entropy;
        store(b + j, w > zero ? sum : zero);
    }
    const auto add_marked = [&](const Marks& marks, float gradient) {
        for (int64_t j = 0; gradient != 0 && j < list.size; j++)
            if (marks[first_key + list.place[j]]) b[j] += gradient;
    };
    add_marked(first_tokens_of(call, batch), above.of[Column::FIRST_TOKENS]);
    add_marked(span_of(call, batch), above.of[Column::SPAN]);
    for (int64_t j = 0; above.of[Column::OWN_KEY] != 0 && j < list.size; j++)
        if (first_key + list.place[j] == row.position) b[j] += above.of[Column::OWN_KEY];
    if (of_distance != 0)
        for (int64_t j = 0; j < list.size; j++)
            b[j] += of_distance * float(std::abs(first_key + list.place[j] - row.position));
    if (of_largest != 0) b[top_of(list)] += of_largest;
    const double middle = dot_of(list.weight, b, list.size) * sums.share;
    for (int64_t j = 0; j < list.size; j++) g[j] += float((b[j] - middle) * sums.share);
}

// (exp(x) - 1 - x) / x^2
inline double second_order(double x) {
    if (std::fabs(x) > 0.5) return (std::expm1(x) - x) / (x * x);
    double sum = 0;
    for (int power = 16; power >= 2; power--) sum = (sum * x + 1) / power;  // 1/2 + x/6 + x^2/24 ...
    return sum;
}

// sum g dw/dalpha
inline double alpha_gradient(const Support& list, const float* g, double alpha) {
    const double q = alpha - 1;
    double total = 0, mean = 0, entropy = 0;
    for (int64_t j = 0; j < list.size; j++) {
        if (list.weight[j] == 0) continue;  // it underflowed
        const double w = list.weight[j], l = std::log(w), f = l * l * second_order(-q * l);
        total += w * std::exp(-q * l), mean += w * f, entropy -= w * l;
    }
    double sum = 0;
    for (int64_t j = 0; j < list.size; j++) {
        if (list.weight[j] == 0) continue;
        const double w = list.weight[j], l = std::log(w), f = l * l * second_order(-q * l);
        sum += g[j] * w / total * ((mean - f) - q * (l * mean + f * entropy));
    }
    return sum;
}

// w^power of a power below 0, within float32; 0 for a weight of 0.
inline float steepness(float weight, float power) {
    if (weight == 0) return 0;
    const double logarithm = std::log(double(weight)) * power;
    return float(std::exp(logarithm < 80 ? logarithm : 80));
}

// r of a list of weights, padded to whole vectors.
inline void list_shares(const Support& list, const Rule& rule, float* r) {
    const float power = float(2 - rule.parameter);
    for (int64_t j = 0; j < list.size; j += LANES) {
        const Vec w = load(list.weight + j);
        switch (rule.normalizer) {
            case SPARSEMAX: store(r + j, splat(1.0f)); break;
            case ENTMAX15:
                for (int i = 0; i < LANES; i++) r[j + i] = std::sqrt(w[i]);
                break;
            case ENTMAX:
                if (power > 0) store(r + j, exp_negative(larger(log_of(w) * power, splat(VANISHED))));
                else for (int64_t i = j; i < j + LANES && i < list.size; i++) r[i] = steepness(list.weight[i], power);
                break;
            case SOFTMAX:
            case TOPK:
            case THRESHOLD: store(r + j, w); break;
            case SIGMOID:
            case NORMALIZERS: break;  // has no such form; is none
        }
    }
}

// Whether terms of the gradient may be far larger than their sum.
inline bool is_steep(const Rule& rule) { return rule.normalizer == ENTMAX && rule.parameter > 2; }

// J g over `g`.
inline void times_jacobian(const Support& list, const Rule& rule, float* g) {
    if (rule.normalizer == SIGMOID) {
        for (int64_t j = 0; j < list.size; j += LANES) {
            const Vec w = load(list.weight + j);
            store(g + j, w * (1.0f - w) * load(g + j));
        }
        return;
    }
    float* r = list.spare;
    list_shares(list, rule, r);
    double total = sum_of(r, list.size), sum = 0, base = 0;
    const bool steep = is_steep(rule);
    if (steep) {
        // The smallest weight may have nearly all of the total: relative to its gradient no digit cancels.
        int64_t steepest = 0;
        for (int64_t j = 1; j < list.size; j++) steepest = r[j] > r[steepest] ? j : steepest;
        if (list.size) base = g[steepest];
        for (int64_t j = 0; j < list.size; j++) sum += r[j] * (g[j] - base);
    } else {
        sum = dot_of(r, g, list.size);
    }
    const double mean = total > 0 ? sum / total : 0;
    if (!steep) {
        for (int64_t j = 0; j < list.size; j++) g[j] = float(r[j] * (g[j] - base - mean));
        return;
    }
    double rest = 0;
    for (int64_t j = 0; j < list.size; j++) {
        const double exact = r[j] * (g[j] - base - mean) + rest;
        g[j] = float(exact);
        rest = std::fabs(exact) < INFINITY ? exact - double(g[j]) : 0;
    }
}

// The gradient of a row's scores over `gradient`, which holds dO.v of its list, and of what is given per head.
inline void gradient_list(const RowwiseCall& of, int64_t batch, const Row& row, const Support& list, int64_t first_key,
                          float* gradient) {
    const Arguments& call = of.call;
    const Above above = above_of(call, batch, row);
    const Rule rule = of.rule_of(row);
    const Moments sums = moments_of(list);
    add_statistics(call, batch, row, above, list, sums, first_key, gradient);
    const int64_t place = place_of(call, batch, row);
    if (of.grad_per_head && of.normalizer == ENTMAX)
        of.grad_per_head[place] = float(alpha_gradient(list, gradient, of.per_head[row.head]));
    times_jacobian(list, rule, gradient);
    if (of.grad_per_head && of.normalizer == SIGMOID) of.grad_per_head[place] = float(sum_of(gradient, list.size));
    const float of_depth = above.of[Column::MEAN_DEPTH], of_variance = above.of[Column::VARIANCE];
    if (of_depth != 0 || of_variance != 0) {
        const float mean = float(sums.mean), share = float(sums.share);
        for (int64_t j = 0; j < list.size; j++)
            gradient[j] += list.weight[j] * share * (2 * of_variance * (list.distance[j] - mean) - of_depth);
    }
    const float top = above.of[Column::MAXIMUM] + of_depth;
    const int64_t at_top = top_of(list);
    if (above.top && top != 0 && at_top < list.size) gradient[at_top] += top;
    // The gradient of sparsemax does not ask for the weights.
    for (int64_t j = 0; row.bad && j < list.size; j++) gradient[j] = NAN;
}

}  // namespace attemper
