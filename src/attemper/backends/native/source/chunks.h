// How the rows of a call are cut into tasks, and what a task has for itself: memory, its rows, and the keys that each
// tile of them can see.
#pragma once
#include <stdexcept>

#include "memory.h"
#include "rows.h"

namespace attemper {

// Memory of a thread, kept between calls. Grows, never shrinks: about a megabyte at D = E = 64. Throws std::bad_alloc.
class Arena {
public:
    float* floats(int64_t n) { return static_cast<float*>(take(n * 4)); }
    template <class Thing>
    Thing* things(int64_t n) { return static_cast<Thing*>(take(n * int64_t(sizeof(Thing)))); }

    // Called before a task with what it will take at most.
    void reserve(int64_t bytes) {
        used_ = 0;
        apart_.clear();
        if (bytes <= size_ && bytes <= largest_allocation) return;
        size_ = 0, base_.reset();  // first: old and new need not fit together
        base_.reset(static_cast<char*>(allocate(bytes, 4096)));
        size_ = bytes;
    }

private:
    void* take(int64_t bytes) {
        void* at = base_.get() + used_;
        used_ += up(bytes, 64);
        if (used_ > size_) throw std::length_error("an arena was asked for more than was reserved");
#if defined(__SANITIZE_ADDRESS__)
        return apart_.add(bytes);  // each piece by itself, so that reading past one is seen
#endif
        return at;
    }
    struct Apart {
        void* pieces[64] = {};
        int count = 0;
        void* add(int64_t bytes) {
            if (count == 64) throw std::length_error("an arena was asked for more pieces than it keeps");
            return pieces[count++] = allocate(bytes);
        }
        void clear() {
            while (count) std::free(pieces[--count]);
        }
    } apart_;
    Memory<char> base_;
    int64_t size_ = 0, used_ = 0;
};

inline Arena& arena() {
    static thread_local Arena mine;
    return mine;
}

inline int64_t at(const View& view, int64_t a, int64_t b, int64_t c) {
    return a * view.stride[0] + b * view.stride[1] + c * view.stride[2];
}

// How the rows of a call are cut into tasks: long chunks share the packing of keys, many tasks share the work. A chunk
// begins at a multiple of a tile's rows, so that a row's tile and the order of its sums are the same however long
// chunks are.
struct Cut {
    int64_t rows;    // per key head: query heads that share it x queries
    int64_t chunk;   // rows of a task, a multiple of `tall`
    int64_t chunks;  // per key head

    // Chunks of `most` rows, halved while threads would have no work and they are above `least`.
    Cut(const Arguments& call, int64_t tall, int64_t most, int64_t least) {
        const int64_t heads = call.batch * call.groups, tasks = call.threads > 1 ? 4 * call.threads : 1;
        rows = call.heads / call.groups * call.queries;
        chunk = most;
        while (chunk > least && heads * ((rows + chunk - 1) / chunk) < tasks) chunk = up(chunk / 2, tall);
        chunks = (rows + chunk - 1) / chunk;
        // Equal chunks, so that no task is a remainder.
        chunk = up((rows + chunks - 1) / chunks, tall);
        chunks = (rows + chunk - 1) / chunk;
    }
};

// A task: rows first .. first + count of a key head. Head by head, so that the keys are still in a cache; late chunks
// first: under a causal mask they are the longest.
struct Chunk {
    int64_t batch, group, first, count;

    Chunk(const Arguments& call, const Cut& cut, int64_t task) {
        const int64_t head = task / cut.chunks;
        batch = head / call.groups, group = head % call.groups;
        first = (cut.chunks - 1 - task % cut.chunks) * cut.chunk;
        count = cut.rows - first < cut.chunk ? cut.rows - first : cut.chunk;
    }
};

inline void place_rows(const Arguments& call, int64_t group, int64_t first, int64_t count, Row* rows) {
    const int64_t repeats = call.heads / call.groups;
    for (int64_t i = 0; i < count; i++)
        begin(rows[i], call, group * repeats + (first + i) / call.queries, (first + i) % call.queries);
}

inline float multiplier_of(const Arguments& call, int64_t batch, const Row& row) {
    const int64_t* stride = call.multiplier_stride;
    return call.multiplier[batch * stride[0] + row.head * stride[1] + row.query * stride[2]];
}

// Which keys a tile's rows see, before masks. One row at least sees the keys from `least` to `most`, all rows see those
// from `last_low` to `first_high`.
struct Extent {
    int64_t least, most, last_low, first_high;

    Extent(const Row* rows, int64_t count)
        : least(rows[0].low), most(rows[0].high), last_low(least), first_high(most) {
        for (int64_t i = 1; i < count; i++) {
            least = rows[i].low < least ? rows[i].low : least;
            most = rows[i].high > most ? rows[i].high : most;
            last_low = rows[i].low > last_low ? rows[i].low : last_low;
            first_high = rows[i].high < first_high ? rows[i].high : first_high;
        }
    }
};

// A tile's rows against a block of keys: which panels it must look at, and whether all of them see all of it.
struct Span {
    int64_t begin, end;  // of the block, multiples of PANEL; empty: nothing to see
    bool first;  // none of them sees a key before the block
    bool whole;
    bool within;  // all of them see all keys of the block, if a mask hides the places after its last
    int64_t from;  // the first key of the block that one of them sees
    int64_t last;  // before which stand all keys of the block that one of them sees
    int64_t inner_begin, inner_end;  // between which all of them see all, multiples of LANES

    Span(const Row* rows, int64_t count, int64_t low, int64_t keys) : Span(Extent(rows, count), low, keys) {}

    Span(const Extent& tile, int64_t low, int64_t keys) {
        const auto [least, most, last_low, first_high] = tile;
        first = least >= low;
        from = least > low ? least - low : 0;
        begin = from / PANEL * PANEL;
        last = most < low + keys ? most - low : keys;
        end = up(last, PANEL);
        whole = last_low <= low + begin && first_high >= low + end;
        within = begin == 0 && last_low <= low && first_high >= low + keys;
        inner_begin = up(last_low > low ? last_low - low : 0, LANES);
        inner_begin = inner_begin < end ? inner_begin : end;
        inner_end = (first_high < low + keys ? first_high - low : keys) / LANES * LANES;
        inner_end = inner_end > inner_begin ? inner_end : inner_begin;
    }
};

}  // namespace attemper
