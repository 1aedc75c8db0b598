// The C interface: what ctypes calls. Every function returns 0, or a number that says what is wrong.
#include "backward.h"
#include "decode.h"
#include "pool.h"
#include "rowwise_backward.h"
#include "sigmoid.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512BF16__)
#include <cpuid.h>
#endif

using namespace attemper;

#if !defined(ATTEMPER_STAMP)
#define ATTEMPER_STAMP ""
#endif
#define ATTEMPER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

bool usable() {
#if defined(__AVX512BF16__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;  // AVX512-BF16
#endif
#if defined(__AMX_BF16__)
    // AMX-BF16, AMX-TILE
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), for the whole process
    constexpr long ASK = 0x1023, TILES = 18;
    if (syscall(SYS_arch_prctl, ASK, TILES) != 0) return false;
#endif
    return true;
}

struct Forward {
    const Arguments& call;
    const float* per_head;  // as in RowwiseCall; null: none
    Cut cut;
};

template <class Products, class Normalizer>
void forward_task(void* context, int64_t task, int64_t) {
    auto& work = *static_cast<Forward*>(context);
    forward_chunk<Products, Normalizer>(work.call, work.per_head, work.cut, task);
}

template <class Products, class Normalizer>
int forward_with(const Arguments& call, const float* per_head) {
    constexpr int64_t TALL = Products::TALL;
    Forward work{call, per_head, Cut(call, TALL, DESK_BYTES / Products::bytes_per_row(call) / TALL * TALL, 4 * TALL)};
    const int64_t tasks = call.batch * call.groups * work.cut.chunks;
    return run_tasks(tasks, call.threads, forward_task<Products, Normalizer>, &work);
}

template <class Normalizer>
int decode(const Arguments& call, const float* per_head = nullptr) {
    const int64_t heads = call.batch * call.groups, split = split_of(call);
    const int64_t splits = call.keys ? (call.keys + split - 1) / split : 1;
    const int64_t rows = call.heads / call.groups * call.queries, parts = heads * splits * rows;
    const Memory<Row> of_parts = memory_for<Row>(parts);
    const auto own = memory_for<typename Normalizer::Own>(parts);
    const Memory<float> outputs = memory_for<float>(parts * up(call.width, LANES));
    Decode<Normalizer> work{call, per_head, rows, split, splits, of_parts.get(), own.get(), outputs.get()};
    const int wrong = run_tasks(heads * splits, call.threads, decode_task<Normalizer>, &work);
    return wrong ? wrong : run_tasks(heads, splits > 1 ? call.threads : 1, join_task<Normalizer>, &work);
}

int64_t rows_per_key_head(const Arguments& call) { return call.heads / call.groups * call.queries; }

template <class Normalizer>
int forward_by_tiles(const Arguments& call, const float* per_head = nullptr) {
#if defined(ATTEMPER_HALF)
    if (takes_halves(call)) return forward_with<Halves, Normalizer>(call, per_head);
#endif
    return forward_with<Floats, Normalizer>(call, per_head);
}

template <class Normalizer>
int forward(const Arguments& call, const float* per_head = nullptr) {
    if (rows_per_key_head(call) <= FEW) return decode<Normalizer>(call, per_head);
    return forward_by_tiles<Normalizer>(call, per_head);
}

// Deals out the rows of a call, sums and all, and has `run` do the tasks; returns what `run` does.
template <class Run>
int backward_in_shares(const Arguments& call, const Run& run) {
    const int64_t heads = call.batch * call.groups, rows = rows_per_key_head(call);
    Backward work{call, 1, heads, rows, true, true, up(call.keys, KEYS), nullptr, nullptr};
    if (call.grad_mask) {
        work.by_batch = call.batch == 1 || call.grad_mask_stride[0] != 0;
        work.by_group = call.heads == 1 || call.grad_mask_stride[1] != 0;
        work.units = (work.by_batch ? call.batch : 1) * (work.by_group ? call.groups : 1);
    } else if (heads < 8) {
        work.shares = (8 + heads - 1) / heads;
        work.share_rows = up((rows + work.shares - 1) / work.shares, SWEEP);
        work.shares = (rows + work.share_rows - 1) / work.share_rows;
    }
    const int64_t room = heads * work.shares * work.key_room;
    Memory<float> key_sums, value_sums;
    if (call.grad_key) key_sums = memory_for<float>(room * up(call.depth, PANEL));
    if (call.grad_value && call.width) value_sums = memory_for<float>(room * up(call.width, PANEL));
    work.key_sums = key_sums.get(), work.value_sums = value_sums.get();
    const int wrong = run(work);
    return wrong ? wrong : run_tasks(heads, call.threads, gather_task, &work);
}

int backward_by_tiles(const Arguments& call) {
    return backward_in_shares(call, [&](Backward& work) {
        return run_tasks(work.units * work.shares, call.threads, backward_task, &work);
    });
}

// Few rows: decode() adds the products of a score in another order than the backward pass, and a score of 1e6 that is
// off by its last bit makes exp(s - m) another weight. The state comes anew, from the order that backward uses.
int backward_of_few(const Arguments& call) {
    int64_t planes = 0;
    for (int64_t place : call.place) planes = place + 1 > planes ? place + 1 : planes;
    const Memory<float> state = memory_for<float>(planes * call.batch * call.heads * call.queries);
    Arguments again = call;
    again.state = state.get(), again.value = {}, again.output = {}, again.width = 0;
    if (const int wrong = forward_by_tiles<Softmax>(again)) return wrong;
    again.value = call.value, again.output = call.output, again.width = call.width;
    return backward_by_tiles(again);
}

template <class Scores>
int rowwise_forward_with(const RowwiseCall& of) {
    const Arguments& call = of.call;
    constexpr int64_t TALL = Scores::TALL;
    RowwiseForward work{of, Cut(call, TALL, rowwise_chunk(call, TALL, call.softcap > 0 ? 2 : 1), 2 * TALL)};
    return run_tasks(call.batch * call.groups * work.cut.chunks, call.threads, rowwise_forward_task<Scores>, &work);
}

template <class Scores>
int rowwise_backward_with(const RowwiseCall& of) {
    return backward_in_shares(of.call, [&](Backward& work) {
        RowwiseBackward whole{of, work};
        return run_tasks(work.units * work.shares, of.call.threads, rowwise_backward_task<Scores>, &whole);
    });
}

}  // namespace

// Hash of the sources, of the command that built this library, and the version (build.py). Compared at load
// (library.py).
ATTEMPER_EXPORT const char* attemper_stamp() { return ATTEMPER_STAMP; }

// Whether this processor, and the system for this process, let the library compute: what is not told by the name of the
// set that PyTorch found.
ATTEMPER_EXPORT int attemper_usable() { return usable(); }

ATTEMPER_EXPORT int64_t attemper_lanes() { return LANES; }

// For tests: no allocation above this many bytes succeeds from now on, and no arena above it serves.
ATTEMPER_EXPORT void attemper_limit_allocations(int64_t bytes) { largest_allocation = bytes; }

ATTEMPER_EXPORT int attemper_forward(const Arguments* call) {
    if (call->size != int64_t(sizeof(Arguments))) return OTHER_LAYOUT;
    if (call->batch * call->heads * call->queries == 0) return FINE;
    return guarded([&] { return forward<Softmax>(*call); });
}

// The forward pass of `call` on other tensors: who makes the same calls again and again describes them once.
ATTEMPER_EXPORT int attemper_forward_again(const Arguments* call, const Again* again) {
    if (call->size != int64_t(sizeof(Arguments))) return OTHER_LAYOUT;
    Arguments now = *call;
    now.query.data = again->query, now.key.data = again->key, now.value.data = again->value;
    now.output.data = again->output, now.state = again->state, now.threads = again->threads;
    now.statistics = again->statistics;
    return attemper_forward(&now);
}

ATTEMPER_EXPORT int attemper_backward(const Arguments* call) {
    if (call->size != int64_t(sizeof(Arguments))) return OTHER_LAYOUT;
    if (call->batch * call->heads * call->queries * call->keys == 0) return FINE;
    return guarded([&] { return rows_per_key_head(*call) <= FEW ? backward_of_few(*call) : backward_by_tiles(*call); });
}

// Normalizers that need all keys of a row (rowwise_forward.h), and sigmoids, which need one (sigmoid.h).
ATTEMPER_EXPORT int attemper_rowwise_forward(const RowwiseCall* of) {
    const Arguments& call = of->call;
    if (call.size != int64_t(sizeof(Arguments))) return OTHER_LAYOUT;
    if (!is_normalizer(of->normalizer)) return UNKNOWN_NORMALIZER;
    if (call.batch * call.heads * call.queries == 0) return FINE;
    if (of->normalizer == SIGMOID) return guarded([&] { return forward<Sigmoid>(call, of->per_head); });
#if defined(ATTEMPER_HALF)
    if (takes_halves(call)) return guarded([&] { return rowwise_forward_with<HalfScores>(*of); });
#endif
    return guarded([&] { return rowwise_forward_with<FloatScores>(*of); });
}

ATTEMPER_EXPORT int attemper_rowwise_backward(const RowwiseCall* of) {
    const Arguments& call = of->call;
    if (call.size != int64_t(sizeof(Arguments))) return OTHER_LAYOUT;
    if (!is_normalizer(of->normalizer)) return UNKNOWN_NORMALIZER;
    if (call.batch * call.heads * call.queries * call.keys == 0) return FINE;
#if defined(ATTEMPER_HALF)
    if (takes_halves(call)) return guarded([&] { return rowwise_backward_with<HalfScores>(*of); });
#endif
    return guarded([&] { return rowwise_backward_with<FloatScores>(*of); });
}

// Multiply-adds per second of one thread's registers: what "share of the limit" is measured against.
ATTEMPER_EXPORT double attemper_peak_flops(int64_t rounds) {
    Vec c[ROWS][2];
    for (int i = 0; i < ROWS; i++) c[i][0] = c[i][1] = lane_numbers();
    Vec x = splat(0.999f), y = splat(1e-3f);
    for (int64_t k = 0; k < rounds; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) c[i][0] = c[i][0] * x + y, c[i][1] = c[i][1] * x + y;
    }
    Vec sum = {};
    for (int i = 0; i < ROWS; i++) sum += c[i][0] + c[i][1];
    return lane_sum(sum) == 0.5f ? -1.0 : double(rounds) * ROWS * 2 * LANES * 2;
}
