// Runs numbered tasks on several threads: PyTorch's, or a small pool that sleeps between calls. Which thread runs a task
// never shows in a result.
#pragma once
#include <cstdint>

namespace attemper {

using Task = void (*)(void* context, int64_t task, int64_t worker);

// Runs task 0 .. tasks - 1 on at most `threads` threads, the caller among them (worker 0). Tasks are handed out in
// order. If another call holds the pool, or a thread cannot be started, the caller does the work alone.
void run_tasks(int64_t tasks, int64_t threads, Task task, void* context);

}  // namespace attemper
