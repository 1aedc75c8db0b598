// The list of a row's keys that may have weight, and how it grows shorter while a solver comes nearer.
#pragma once
#include "select.h"

namespace attemper {

// Each with room for `room_of` elements.
struct Support {
    float *weight, *distance, *spare;
    int32_t* place;
    int64_t size;
    double found;  // the column THRESHOLD: w0 of entmax; the k-th largest d; log sum exp(d) (threshold); 0 (sigmoid)
};

inline int64_t room_of(int64_t n) { return (n + LANES - 1) / LANES * LANES + 2 * LANES; }

// For a difference of scores that overflows: 0 times it is 0.
constexpr float FARTHEST = std::numeric_limits<float>::max();

constexpr int64_t STRETCH = 1024;  // floats that are summed in float32 before their sum goes to float64

// Keys nearer to the maximum than `window`, and no hidden one.
inline void take_candidates(const float* s, int64_t n, float maximum, float window, Support& to) {
    const Vec from = splat(maximum), least = splat(-window);
    Ints place = lane_places();
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += LANES, place += LANES) {
        const Vec d = load(s + j) - from;
        const Mask in = below(least, d);
        const int64_t more = marked(in);
        if (more == 0) continue;
        compress(in, d, to.distance + count);
        compress(in, place, to.place + count);
        count += more;
    }
    to.size = count;
}

// Out of every support, and finite, so that what is computed of it is never NaN times 0.
constexpr float OUTSIDE = -1e9f;

// Fills the last vector of distances, of floats or doubles.
ATTEMPER_INLINE void pad(Support& of) {
    for (int i = 0; i < (LANES > DOUBLES ? LANES : DOUBLES); i += LANES)
        store(of.distance + of.size + i, splat(OUTSIDE));
}

// The marked keys from `j` on stay, as those from `count` on: they are there unless one before them was dropped.
ATTEMPER_INLINE int64_t keep_marked(Support& of, int64_t j, Mask in, int64_t count) {
    const int64_t more = marked(in);
    if (more < LANES || count < j) {
        compress(in, load(of.distance + j), of.distance + count);
        compress(in, load_places(of.place + j), of.place + count);
    }
    return count + more;
}

// Drops keys whose distance is at most `least`, in place.
inline void drop_below(Support& of, float least) {
    const Vec bound = splat(least);
    int64_t count = 0;
    for (int64_t j = 0; j < of.size; j += LANES) count = keep_marked(of, j, below(bound, load(of.distance + j)), count);
    of.size = count;
    pad(of);
}

}  // namespace attemper
