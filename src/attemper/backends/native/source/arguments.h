// One call as the Python side describes it: addresses, strides in elements and sizes. No tensor is copied or owned.
//
// Layout (kept equal to `arguments.py` by a size check at every call): query [B, H, Q, D], key [B, G, K, D], value
// [B, G, K, E], mask [B|1, H|1, Q|1, K|1] where a broadcast dimension has stride 0, state [F, B, H, Q] float32.
#pragma once
#include <cstdint>

namespace attemper {

enum Type : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT64 = 3, BOOL = 4 };

struct View {
    char* data;  // null: absent
    int64_t type;
    int64_t stride[4];
};

// State columns: what a call leaves of each row (python: attemper/statistics.py).
struct Column {
    enum Name : int {
        MAXIMUM, LOG_SUM, VISIBLE_KEYS, THRESHOLD, MASS, SUPPORT, LARGEST_WEIGHT, MEAN_DEPTH, ENTROPY, VARIANCE,
        SQUARED_WEIGHTS, FIRST_TOKENS, DISTANCE, GINI, PLAIN_DEPTH, PLAIN_VARIANCE, OWN_KEY, SPAN,
        COUNT
    };
};

// Statistics that follow from the state (python: backends/native/rows.py), [B, H, Q] each; null: not asked for.
struct Statistics {
    enum Derived : int {
        LSE, ENTROPY, NORMALIZED_ENTROPY, EFFECTIVE_TOKENS, MAX_WEIGHT, MEAN_LOGIT, MASS,
        MAX_LOGIT, LOGIT_VARIANCE, FIRST_TOKEN_MASS, MEAN_DISTANCE, GINI, SCORE_VARIANCE, SELF_WEIGHT, SPAN_MASS,
        COUNT
    };
    float* values[COUNT];
    int64_t* counts;
};

struct Arguments {
    int64_t size;  // of this struct, as the caller knows it
    View query, key, value, mask;
    const float* multiplier;  // scale / T
    int64_t multiplier_stride[3];
    const float* sink;            // [H]
    const int64_t* positions;     // [Q], ascending
    const uint8_t* first_keys;    // [B|1, K]
    int64_t first_keys_stride[2];
    const uint8_t* span_keys;  // [B|1, K]; null: not asked for
    int64_t span_keys_stride[2];
    int64_t batch, heads, groups, queries, keys, depth, width;
    int64_t left, right, offset, first_tokens;
    double softcap;  // 0: none
    int64_t place[Column::COUNT];  // where each stands in the state; -1: not asked for
    View output;                   // forward: written; backward: read
    float* state;                  // contiguous
    int64_t threads;
    Statistics statistics;
    // Backward only. Gradients are float32 and contiguous in the shape of their tensor; null: not asked for.
    View grad_output;
    const float* grad_state;  // contiguous
    float *grad_query, *grad_key, *grad_value;
    float* grad_mask;  // zeroed by the caller
    int64_t grad_mask_stride[4];
    float *grad_multiplier, *grad_sink;  // [B, H, Q]: summed to the shape of their tensors by the caller
    int64_t maximum_gradient;
};

// What changes where a call of softmax is made again for other tensors of the same shapes and strides.
struct Again {
    char *query, *key, *value, *output;
    float* state;
    int64_t threads;
    Statistics statistics;
};

}  // namespace attemper
