// The pool: helpers wait on a condition variable; a call raises `generation`, everybody takes numbers from `next`.
// After fork() the child has no helpers: it forgets the pool (its locks may be held by threads that no longer exist)
// and starts a new one.
#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace attemper {
namespace {

struct Pool {
    std::mutex calls;  // one call at a time
    std::mutex lock;
    std::condition_variable wake, done;
    int64_t helpers = 0, generation = 0, wanted = 0, busy = 0;
    int64_t tasks = 0;
    std::atomic<int64_t> next{0};
    Task task = nullptr;
    void* context = nullptr;

    void work(int64_t worker) {
        for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
            task(context, number, worker);
    }

    void help(int64_t worker) {
        std::unique_lock<std::mutex> hold(lock);
        int64_t seen = 0;
        for (;;) {
            wake.wait(hold, [&] { return generation != seen; });
            seen = generation;
            if (worker > wanted) continue;
            hold.unlock();
            work(worker);
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

    void run(int64_t count, int64_t threads, Task what, void* with) {
        {
            std::lock_guard<std::mutex> hold(lock);
            grow(threads - 1);
            wanted = helpers < threads - 1 ? helpers : threads - 1;
            tasks = count, task = what, context = with, busy = wanted;
            next.store(0, std::memory_order_relaxed);
            generation++;
        }
        wake.notify_all();
        work(0);
        std::unique_lock<std::mutex> hold(lock);
        done.wait(hold, [&] { return busy == 0; });
    }
};

Pool* pool = nullptr;
std::once_flag created;

void forget() { pool = new Pool; }  // in the child of a fork; the parent's object is left as it is

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, Task task, void* context) {
    std::call_once(created, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, forget);
    });
    if (threads > tasks) threads = tasks;
    if (threads > 1) {
        std::unique_lock<std::mutex> mine(pool->calls, std::try_to_lock);
        if (mine.owns_lock()) return pool->run(tasks, threads, task, context);
    }
    for (int64_t number = 0; number < tasks; number++) task(context, number, 0);
}

}  // namespace attemper
