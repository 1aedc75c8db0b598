// Weights of rows of scores by a normalizer, and gradients of the scores: one pass over memory each.
//
//     weights    w of s (solve.h), row by row, a row in L1 or L2 while it is solved
//     gradient   ds = r (g - sum(r g) / sum r),  r = w^(2 - alpha) on the support of entmax, w of top-k and threshold;
//                sigmoid: ds = w (1 - w) g
//
// Tasks are runs of rows. Results leave by ordinary stores: where memory is new to the process, the system has just
// written zeros into it through the cache, and streaming past the cache took 1.3 times as long.
#include "pool.h"
#include "pack.h"
#include "solve.h"

using namespace attemper;

#define ATTEMPER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Rows {
    int64_t rows, n;
    Rule rule;
    const float* parameters;  // [rows], or null
    View in, grad, out;       // contiguous, of one type
    int64_t together;         // rows of a task

    Rule rule_of(int64_t row) const {
        Rule own = rule;
        if (parameters) own.parameter = parameters[row];
        return plain(own);
    }
};

struct Seen {
    float maximum;
    bool bad;  // NaN or +inf among them
};

// The largest of `n` scores, a multiple of LANES.
Seen look(const float* s, int64_t n) {
    Vec best[2] = {splat(-INFINITY), splat(-INFINITY)};
    const Vec end = splat(INFINITY);
    int64_t good = 0;
    int64_t j = 0;
    for (; j + 2 * LANES <= n; j += 2 * LANES)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const Vec v = load(s + j + half * LANES);
            best[half] = larger(best[half], v);
            good += marked(below(v, end));
        }
    for (; j < n; j += LANES) {
        const Vec v = load(s + j);
        best[0] = larger(best[0], v);
        good += marked(below(v, end));
    }
    return {lane_max(larger(best[0], best[1])), good != n};
}

// Floats from memory that ends where they end: the row itself, or padded with `fill`.
const float* row_of(const View& view, int64_t row, int64_t n, float fill, float* buffer) {
    if (view.type == FLOAT32 && n % LANES == 0) return reinterpret_cast<const float*>(view.data) + row * n;
    read_row(view, row * n, 1, n, buffer);
    for (int64_t j = n; j < up(n, LANES); j++) buffer[j] = fill;
    return buffer;
}

// Where a row of floats can be put together: in place, or in `buffer`. `whole`: n floats, no more, will be written.
float* place_for(const View& view, int64_t row, int64_t n, bool whole, float* buffer) {
    if (view.type == FLOAT32 && (whole || n % LANES == 0)) return reinterpret_cast<float*>(view.data) + row * n;
    return buffer;
}

void fill(float* to, int64_t n, float value) {
    for (int64_t j = 0; j < n; j++) to[j] = value;
}

void weights_task(void* context, int64_t task, int64_t) {
    Rows& work = *static_cast<Rows*>(context);
    const int64_t n = work.n, room = room_of(n), first = task * work.together;
    const int64_t last = first + work.together < work.rows ? first + work.together : work.rows;
    const Memory<float> owned = memory_for<float>(6 * room);
    float* memory = owned.get();
    float* buffer = memory;
    Support support{memory + 2 * room, memory + 3 * room, memory + 4 * room,
                    reinterpret_cast<int32_t*>(memory + 5 * room), 0, 0};
    for (int64_t row = first; row < last; row++) {
        const float* s = row_of(work.in, row, n, -INFINITY, buffer);
        const Seen seen = look(s, up(n, LANES));
        float* whole = place_for(work.out, row, n, true, memory + room);
        const Rule rule = work.rule_of(row);
        if (seen.bad || std::isnan(rule.parameter)) {
            fill(whole, n, NAN);
        } else if (seen.maximum == -INFINITY) {
            fill(whole, n, 0);
        } else {
            solve(s, up(n, LANES), seen.maximum, rule, support);
            spread(support, support.weight, n, whole);
        }
        if (whole == memory + room) write_row(work.out, row * n, 1, n, whole);
    }
}

// What the gradient makes of a weight: r. For alpha > 2, powers below 0, in float64: no ratio of two overflows.
struct Share {
    Normalizer normalizer;
    double power;  // 2 - alpha

    ATTEMPER_INLINE Vec operator()(Vec w) const {
        const Mask in = below(Vec{}, w);
        if (normalizer == SPARSEMAX) return keep_where(in, splat(1.0f)) + (w - w);  // NaN stays NaN
        if (normalizer == TOPK || normalizer == THRESHOLD || normalizer == SOFTMAX) return w;
        if (normalizer == ENTMAX15) {
#if defined(__AVX512F__)
            return _mm512_sqrt_ps(w);
#else
            Vec root;
            for (int i = 0; i < LANES; i++) root[i] = std::sqrt(w[i]);
            return root;
#endif
        }
        return keep_where(in, exp_negative(larger(log_of(w) * float(power), splat(VANISHED)))) + (w - w);
    }
};

constexpr double STEEPEST = 1e150;  // of w^(2 - alpha): as good as infinite, and its sums are not

// Of entmax above alpha = 2: the smallest weight may have nearly all of the sum of r. Relative to its gradient no digit
// cancels: it gives the sum of what the others take.
void steep_gradient(const float* w, const float* g, int64_t n, double power, float* to) {
    const auto steepness = [&](int64_t j) {
        const double r = std::pow(double(w[j]), power);
        return r < STEEPEST ? r : STEEPEST;
    };
    int64_t steepest = -1;
    for (int64_t j = 0; j < n; j++)
        if (w[j] > 0 && (steepest < 0 || w[j] < w[steepest])) steepest = j;
    const double base = steepest < 0 ? 0 : g[steepest];
    double share = 0, sum = 0;
    for (int64_t j = 0; j < n; j++) {
        if (!(w[j] > 0)) continue;
        const double r = steepness(j);
        share += r, sum += r * (g[j] - base);
    }
    for (int64_t j = 0; j < n; j++)
        to[j] = w[j] > 0 ? float(steepness(j) * (g[j] - base - sum / share)) : (w[j] == 0 ? 0.0f : NAN);
}

void gradient_row(const float* w, const float* g, int64_t n, const Rule& rule, float* to) {
    const Share share{rule.normalizer, 2 - rule.parameter};
    if (rule.normalizer == ENTMAX && rule.parameter > 2) return steep_gradient(w, g, n, share.power, to);
    if (rule.normalizer == SIGMOID) {
        for (int64_t j = 0; j < n; j += LANES) {
            const Vec x = load(w + j);
            store(to + j, x * (1.0f - x) * load(g + j));
        }
        return;
    }
    const Vec zero = {};
    double total = 0, sum = 0;
    for (int64_t begin = 0; begin < n; begin += STRETCH) {
        const int64_t end = begin + STRETCH < n ? begin + STRETCH : n;
        Vec shares = {}, sums = {};
        for (int64_t j = begin; j < end; j += LANES) {
            const Vec r = share(load(w + j)), above = load(g + j);
            shares += r;
            sums += r == zero ? zero : r * above;
        }
        total += lane_sum(shares), sum += lane_sum(sums);
    }
    const Vec mean = splat(total == 0 ? 0.0f : float(sum / total));
    for (int64_t j = 0; j < n; j += LANES) {
        const Vec r = share(load(w + j));
        store(to + j, r == zero ? zero : r * (load(g + j) - mean));
    }
}

void gradient_task(void* context, int64_t task, int64_t) {
    Rows& work = *static_cast<Rows*>(context);
    const int64_t n = work.n, room = room_of(n), first = task * work.together;
    const int64_t last = first + work.together < work.rows ? first + work.together : work.rows;
    const Memory<float> owned = memory_for<float>(3 * room);
    float* memory = owned.get();
    for (int64_t row = first; row < last; row++) {
        const float* w = row_of(work.in, row, n, 0, memory);
        const float* g = row_of(work.grad, row, n, 0, memory + room);
        float* to = place_for(work.out, row, n, false, memory + 2 * room);
        gradient_row(w, g, up(n, LANES), work.rule_of(row), to);
        if (to == memory + 2 * room) write_row(work.out, row * n, 1, n, to);
    }
}

int over_rows(Rows& work, Task task, int64_t threads) {
    if (!is_normalizer(work.rule.normalizer)) return UNKNOWN_NORMALIZER;
    if (work.rows * work.n == 0) return 0;
    work.together = 65536 / work.n > 1 ? 65536 / work.n : 1;
    return guarded([&] { return run_tasks((work.rows + work.together - 1) / work.together, threads, task, &work); });
}

}  // namespace

// Rows [rows, n], contiguous, of one of the types float32, bfloat16 and float16; parameters: alpha (or the bias of
// sigmoid) of each row, or null, where `parameter` is that of all.
ATTEMPER_EXPORT int attemper_weights(int64_t rows, int64_t n, int64_t normalizer, double number, double parameter,
                                     const float* parameters, int64_t type, char* scores, char* weights,
                                     int64_t threads) {
    const Rule rule{Normalizer(normalizer), number, parameter};
    Rows work{rows, n, rule, parameters, {scores, type, {}}, {}, {weights, type, {}}, 1};
    return over_rows(work, weights_task, threads);
}

// The gradient of the scores from `grad`, that of the weights.
ATTEMPER_EXPORT int attemper_gradient(int64_t rows, int64_t n, int64_t normalizer, double parameter,
                                      const float* parameters, int64_t type, char* weights, char* grad, char* gradient,
                                      int64_t threads) {
    const Rule rule{Normalizer(normalizer), 0, parameter};
    Rows work{rows, n, rule, parameters, {weights, type, {}}, {grad, type, {}}, {gradient, type, {}}, 1};
    return over_rows(work, gradient_task, threads);
}
