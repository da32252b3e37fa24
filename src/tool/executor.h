// Threads of the tool: the executor that runs plans, and loops that keep every thread busy for a measurement.
#pragma once

#include <functional>
#include <memory>

#include "onepass/executor.h"

namespace onepass::tool {

// The processors this process may run on.
int hardware_threads();

std::unique_ptr<Executor> make_executor(int threads);

// Starts body(worker) on every thread at once, each on its own; seconds from the start to the last one's end.
double seconds_on_all(int threads, const std::function<void(int worker)>& body);

}  // namespace onepass::tool
