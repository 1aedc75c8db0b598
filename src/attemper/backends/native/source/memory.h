// Memory beyond the tensors of a call, and what a call returns when there is none. An allocation that fails throws
// std::bad_alloc: run_tasks (pool.h) ends its tasks with NO_MEMORY, and so does `guarded`. Nothing leaves the C
// interface.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace attemper {

// python: backends/native/library.py
enum Wrong : int { FINE = 0, OTHER_LAYOUT = 1, NO_MEMORY = 2, BROKEN = 3, UNKNOWN_NORMALIZER = 4 };

// Bytes of one allocation; lowered by tests, to see what a call does without memory.
inline std::atomic<int64_t> largest_allocation{INT64_MAX};

inline void* allocate(int64_t bytes, int64_t alignment = 64) {
    const int64_t whole = (bytes / alignment + 1) * alignment;
    void* at = bytes < 0 || whole > largest_allocation.load(std::memory_order_relaxed)
                   ? nullptr
                   : std::aligned_alloc(size_t(alignment), size_t(whole));
    if (!at) throw std::bad_alloc();
    return at;
}

struct Free {
    void operator()(void* at) const { std::free(at); }
};

template <class Thing>
using Memory = std::unique_ptr<Thing[], Free>;

template <class Thing>
Memory<Thing> memory_for(int64_t n) {
    return Memory<Thing>(static_cast<Thing*>(allocate(n * int64_t(sizeof(Thing)))));
}

// What `run` returns, or why it did not come to its end.
template <class Run>
int guarded(const Run& run) noexcept {
    try {
        return run();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (...) {
        return BROKEN;
    }
}

}  // namespace attemper
