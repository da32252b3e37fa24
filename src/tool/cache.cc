// onepass cache: the compiled kernels kept on disk, listed or removed.
#include <iomanip>
#include <iostream>

#include "onepass/cuda.h"
#include "onepass/error.h"
#include "tool/commands.h"
#include "tool/output.h"
#include "tool/timing.h"

namespace onepass::tool {
namespace {

void print_list(const std::vector<cuda::CacheEntry>& entries) {
  double bytes = 0;
  for (const cuda::CacheEntry& entry : entries) {
    bytes += static_cast<double>(entry.bytes);
    std::cout << std::left << std::setw(32) << entry.kernel << ' ' << std::setw(8) << entry.architecture
              << ' ' << byte_text(static_cast<double>(entry.bytes)) << '\n';
  }
  std::cout << entries.size() << " kernels, " << byte_text(bytes) << " in " << cuda::cache_directory()
            << '\n';
}

Json list_json(const std::vector<cuda::CacheEntry>& entries) {
  Json list = Json::array();
  for (const cuda::CacheEntry& entry : entries) {
    list.push_back({{"kernel", entry.kernel},
                    {"architecture", entry.architecture},
                    {"file", entry.file},
                    {"bytes", entry.bytes}});
  }
  return {{"directory", cuda::cache_directory()}, {"kernels", list}};
}

}  // namespace

int cache(const Options& options) {
  if (options.action.empty()) throw Error("cache: give list or clear");
  if (options.action == "clear") {
    const int removed = cuda::clear_cache();
    if (options.json) {
      std::cout << Json{{"directory", cuda::cache_directory()}, {"removed", removed}}.dump(2) << '\n';
    } else {
      std::cout << removed << " kernels removed from " << cuda::cache_directory() << '\n';
    }
    return good;
  }
  const std::vector<cuda::CacheEntry> entries = cuda::cache_entries();
  if (options.json) std::cout << list_json(entries).dump(2) << '\n';
  if (!options.json) print_list(entries);
  return good;
}

}  // namespace onepass::tool
