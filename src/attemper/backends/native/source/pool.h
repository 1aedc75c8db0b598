// Runs numbered tasks on several threads: PyTorch's, or a small pool that sleeps between calls. Which thread runs a task
// never shows in a result.
#pragma once
#include "memory.h"

namespace attemper {

using Task = void (*)(void* context, int64_t task, int64_t worker);

// Runs task 0 .. tasks - 1 on at most `threads` threads, the caller among them (worker 0). Tasks are handed out in
// order. If another call holds the pool, or a thread cannot be started, the caller does the work alone.
// Returns FINE; NO_MEMORY if a task threw std::bad_alloc, BROKEN if one threw anything else: the tasks after it are
// left out, and what the others wrote is no result.
int run_tasks(int64_t tasks, int64_t threads, Task task, void* context);

}  // namespace attemper
