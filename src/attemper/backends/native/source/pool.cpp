// A call runs on the threads that PyTorch's own operators run on, if the process has them: those spin for milliseconds
// after each of its parallel regions, and threads of ours would have to share the processor with them (a call of a few
// milliseconds took up to half as long again). They are reached by the name that every OpenMP library for GCC's code has.
// Elsewhere, and in the child of a fork, there is a pool: helpers wait on a condition variable, and a call raises
// `generation`. After fork() the child has no helpers of either kind: it forgets OpenMP and the pool (whose locks may be
// held by threads that no longer exist) and starts a new one.
#include "pool.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace attemper {
namespace {

// The tasks of one call. No exception of theirs leaves the thread that it was thrown on. Each thread has a share of them
// that stand one after another, and whoever has done its own takes from the next: heads that stand beside each other in
// a tensor share pages and pairs of cache lines, for which two threads would wait in turns.
struct Work {
    static constexpr int64_t MOST = 64;

    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    Task task;
    void* context;
    int64_t shares;
    Share share[MOST];
    std::atomic<int> wrong{FINE};

    Work(Task task, void* context, int64_t tasks, int64_t threads)
        : task(task), context(context), shares(threads < 1 ? 1 : (threads < MOST ? threads : MOST)) {
        for (int64_t i = 0; i < shares; i++)
            share[i].next = tasks * i / shares, share[i].end = tasks * (i + 1) / shares;
    }

    void take_all(int64_t worker) {
        for (int64_t i = 0; i < shares; i++) {
            Share& from = share[(worker + i) % shares];
            for (int64_t number; (number = from.next.fetch_add(1, std::memory_order_relaxed)) < from.end;) {
                if (wrong.load(std::memory_order_relaxed) != FINE) return;
                const int ended = guarded([&] { return task(context, number, worker), int(FINE); });
                if (ended != FINE) wrong.store(ended, std::memory_order_relaxed);
            }
        }
    }
};

struct Pool {
    std::mutex calls;  // one call at a time
    std::mutex lock;
    std::condition_variable wake, done;
    int64_t helpers = 0, generation = 0, wanted = 0, busy = 0;
    Work* shared = nullptr;

    void help(int64_t worker) {
        std::unique_lock<std::mutex> hold(lock);
        int64_t seen = 0;
        for (;;) {
            wake.wait(hold, [&] { return generation != seen; });
            seen = generation;
            if (worker > wanted) continue;
            hold.unlock();
            shared->take_all(worker);
            hold.lock();
            if (--busy == 0) done.notify_one();
        }
    }

    // Called with `lock` held.
    void grow(int64_t count) {
        while (helpers < count) {
            int64_t worker = helpers + 1;
            try {
                std::thread([this, worker] { help(worker); }).detach();
            } catch (const std::system_error&) {
                return;
            }
            helpers++;
        }
    }

    void run(Work& work, int64_t threads) {
        {
            std::lock_guard<std::mutex> hold(lock);
            grow(threads - 1);
            wanted = helpers < threads - 1 ? helpers : threads - 1;
            shared = &work, busy = wanted;
            generation++;
        }
        wake.notify_all();
        work.take_all(0);
        std::unique_lock<std::mutex> hold(lock);
        done.wait(hold, [&] { return busy == 0; });
    }
};

// One call on PyTorch's own team of threads.
struct Team {
    Work& work;
    std::atomic<int64_t> members{0};
};

void join_team(void* shared) {
    auto& team = *static_cast<Team*>(shared);
    const int64_t worker = team.members.fetch_add(1, std::memory_order_relaxed);
    team.work.take_all(worker);
}

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

Pool* pool = nullptr;
Parallel parallel = nullptr;  // of the OpenMP library that this process has, if any
std::once_flag created;

void forget() {  // in the child of a fork; the parent's object is left as it is
    pool = new Pool;
    parallel = nullptr;  // its threads are the parent's
}

}  // namespace

int run_tasks(int64_t tasks, int64_t threads, Task task, void* context) {
    std::call_once(created, [] {
        pool = new Pool;
        parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
        pthread_atfork(nullptr, nullptr, forget);
    });
    if (threads > tasks) threads = tasks;
    Work work(task, context, tasks, threads);
    if (threads > 1) {
        std::unique_lock<std::mutex> mine(pool->calls, std::try_to_lock);
        if (mine.owns_lock() && parallel) {
            Team team{work};
            parallel(join_team, &team, unsigned(threads), 0);
            return work.wrong;
        }
        if (mine.owns_lock()) {
            pool->run(work, threads);
            return work.wrong;
        }
    }
    work.take_all(0);
    return work.wrong;
}

}  // namespace attemper
