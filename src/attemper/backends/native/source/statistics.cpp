// Statistics of rows whose state a call has left, whenever they are asked for.
#include "memory.h"
#include "statistics.h"

// rows: [rows] float32 each, as `derive` takes them.
extern "C" __attribute__((visibility("default"))) int attemper_statistics(
    int64_t rows, const float* const* columns, const attemper::Statistics* to) {
    return attemper::guarded([&] { return attemper::derive(rows, columns, *to), int(attemper::FINE); });
}
