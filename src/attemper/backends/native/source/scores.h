// What stands between the product q.k and the softmax, for one row and one block of keys:
//
//     s = softcap(x) + bias on visible keys, -inf on the others;   softcap(x) = c tanh(x / c)
//
// A hidden key's score never matters, whatever it is: NaN there becomes -inf. A visible score that is not finite is
// told.
#pragma once
#include "rows.h"

namespace attemper {

// The mask's row as a bias of `n` keys: 0 or its value where visible, -inf where hidden. Floating entries at or below
// half of their type's lowest number are masks; a float64 bias beyond float32 stays finite.
inline void read_bias(const View& mask, int64_t place, int64_t step, int64_t n, float* to) {
    if (mask.type == BOOL) {
        auto* from = reinterpret_cast<const uint8_t*>(mask.data) + place;
        if (step == 1) for (int64_t i = 0; i < n; i++) to[i] = from[i] ? 0.0f : -INFINITY;
        else for (int64_t i = 0; i < n; i++) to[i] = from[i * step] ? 0.0f : -INFINITY;
        return;
    }
    if (mask.type == FLOAT64) {
        auto* from = reinterpret_cast<const double*>(mask.data) + place;
        const double lowest = -std::numeric_limits<double>::max() / 2, floor = -std::numeric_limits<float>::max();
        for (int64_t i = 0; i < n; i++) {
            double x = from[i * step];
            to[i] = x <= lowest ? -INFINITY : float(x < floor ? floor : x);
        }
        return;
    }
    read_row(mask, place, step, n, to);
    float lowest = -std::numeric_limits<float>::max() / 2;
    if (mask.type == BFLOAT16) lowest = from_bits(0xff7f0000) / 2;
    if (mask.type == FLOAT16) lowest = -65504.0f / 2;
    for (int64_t i = 0; i < n; i++) to[i] = to[i] <= lowest ? -INFINITY : to[i];
}

// Products and biases below these cannot overflow, nor can their sum.
constexpr double SAFE_PRODUCT = 8e37;
constexpr float SAFE_BIAS = 1e38f;

// What a row of the mask does to a block of keys.
struct Masked {
    const float* bias;  // of KEYS keys, -inf where hidden and where there is no key
    int64_t visible;
    float most;  // the largest magnitude on visible keys; NaN or inf where a bias is
};

inline Masked masked_by(const float* bias) {
    const Vec hidden = splat(-INFINITY), one = splat(1.0f);
    Vec count = {};
    Ints most = {};
    for (int64_t j = 0; j < KEYS; j += LANES) {
        const Vec b = load(bias + j);
        const Ints visible = b != hidden;
        count += visible ? one : Vec{};
        most = larger_bits(most, visible ? b : Vec{});
    }
    return Masked{bias, int64_t(lane_sum(count)), largest(most)};
}

// Adds a mask to scores of which the visible ones are finite, also together with it (by masked_by(...).most in forward,
// by forward in backward); returns the highest.
ATTEMPER_INLINE float hide(float* s, const float* bias, int64_t n) {
    const Vec hidden = splat(-INFINITY);
    Vec best = hidden;
    for (int64_t j = 0; j < n; j += LANES) {
        const Vec b = load(bias + j), x = b != hidden ? load(s + j) + b : hidden;
        store(s + j, x);
        best = larger(best, x);
    }
    return lane_max(best);
}

struct Seen {
    int64_t count;
    bool bad, poison;
};

// One row of products over the keys `begin` <= key < begin + n (n a multiple of LANES), in place. `bias` may be null.
// `softcap_gradient`: the softcap's derivative is written there, if not null.
ATTEMPER_INLINE Seen shape_row(const Arguments& call, const Row& row, float* s, const float* bias, int64_t begin,
                               int64_t n, float* softcap_gradient) {
    const float c = float(call.softcap);
    const Vec low = splat(float(row.low > begin ? row.low - begin : 0));
    const Vec high = splat(float(row.high < begin + n ? (row.high > begin ? row.high - begin : 0) : n));
    const Vec hidden = splat(-INFINITY), one = splat(1.0f);
    Vec number = lane_numbers(), count = {}, bad = {}, poison = {};
    for (int64_t j = 0; j < n; j += LANES, number += float(LANES)) {
        Vec x = load(s + j);
        if (c > 0) {
            Vec t = tanh_of(x / c);
            if (softcap_gradient) store(softcap_gradient + j, 1.0f - t * t);
            x = t * c;
        }
        Ints visible = (number >= low) & (number < high);
        if (bias) {
            Vec b = load(bias + j);
            visible &= b != hidden;
            x += b;
        }
        x = visible ? x : hidden;
        store(s + j, x);
        count += visible ? one : Vec{};
        bad += (visible & ~(magnitude(x) < splat(INFINITY))) ? one : Vec{};
        poison += (visible & ~(x < splat(INFINITY))) ? one : Vec{};
    }
    return Seen{int64_t(lane_sum(count)), lane_sum(bad) > 0, lane_sum(poison) > 0};
}

// Marks of the keys of a batch; without any, those below `limit`.
struct Marks {
    const uint8_t* data;
    int64_t step, limit;

    bool operator[](int64_t key) const { return data ? data[key * step] != 0 : key < limit; }
};

inline Marks first_tokens_of(const Arguments& call, int64_t batch) {
    const int64_t* step = call.first_keys_stride;
    return {call.first_keys ? call.first_keys + batch * step[0] : nullptr, step[1], call.first_tokens};
}

inline Marks span_of(const Arguments& call, int64_t batch) {
    const int64_t* step = call.span_keys_stride;
    return {call.span_keys ? call.span_keys + batch * step[0] : nullptr, step[1], 0};
}

// 1 at the marked ones of `n` keys from `start` on, 0 elsewhere; returns whether there is one.
inline bool read_marks(const Arguments& call, const Marks& marks, int64_t start, int64_t n, float* to) {
    bool any = false;
    for (int64_t i = 0; i < n; i++) {
        const bool marked = start + i < call.keys && marks[start + i];
        to[i] = marked ? 1.0f : 0.0f, any |= marked;
    }
    return any;
}

// Sum of the weights of marked keys, n a multiple of LANES.
inline double marked_sum(const float* weights, const float* marks, int64_t n) {
    Vec sum = {};
    for (int64_t j = 0; j < n; j += LANES) sum += load(weights + j) * load(marks + j);
    return lane_sum(sum);
}

// Where among the keys begin, begin + 1, ... first tokens are: all of them between `begin` and `end`.
struct FirstTokens {
    int64_t begin, end;

    FirstTokens(const Arguments& call, int64_t batch, int64_t start, int64_t n) : begin(start), end(start + n) {
        if (!call.first_keys) {
            end = call.first_tokens < end ? call.first_tokens : end;
            return;
        }
        end = end < call.keys ? end : call.keys;
        const int64_t step = call.first_keys_stride[1];
        const uint8_t* first = call.first_keys + batch * call.first_keys_stride[0];
        if (step == 1)
            for (uint64_t eight; begin + 8 <= end; begin += 8)
                if (std::memcpy(&eight, first + begin, 8); eight) break;
        while (begin < end && !first[begin * step]) begin++;
        if (step == 1)
            for (uint64_t eight; end - 8 >= begin; end -= 8)
                if (std::memcpy(&eight, first + end - 8, 8); eight) break;
        while (begin < end && !first[(end - 1) * step]) end--;
    }

    // Sum of their weights; `weights` are those of the keys `start`, start + 1, ...
    double share(const Arguments& call, int64_t batch, const float* weights, int64_t start) const {
        double sum = 0;
        const uint8_t* first = call.first_keys ? call.first_keys + batch * call.first_keys_stride[0] : nullptr;
        for (int64_t key = begin; key < end; key++)
            if (!first || first[key * call.first_keys_stride[1]]) sum += weights[key - start];
        return sum;
    }
};

}  // namespace attemper
