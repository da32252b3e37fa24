// Compiled kernels on disk.
//
// A file is a text head and the image. Its checksum tells a file that a full disk or a crash cut short.
#include "cuda/runtime/cache.h"

#include <pwd.h>
#include <unistd.h>

#include <sstream>
#include <string_view>
#include <utility>

#include "cuda/runtime/cache_folder.h"
#include "cuda/runtime/library.h"
#include "cuda/runtime/sha256.h"
#include "onepass/cuda.h"
#include "onepass/error.h"

namespace onepass::cuda {
namespace {

constexpr std::string_view format = "onepass cubin 1";

std::string home_directory() {
  if (std::string home = environment("HOME"); !home.empty()) return home;
  const passwd* user = getpwuid(geteuid());
  return user == nullptr || user->pw_dir == nullptr ? "" : user->pw_dir;
}

// What a file says of itself.
struct Entry {
  CacheKey key;
  Cubin cubin;
};

std::string serialise(const Entry& entry) {
  std::ostringstream body;
  body << entry.key.kernel << ' ' << entry.key.architecture << ' ' << entry.key.hash << ' '
       << entry.cubin.registers << ' ' << entry.cubin.spilled_bytes << ' ' << entry.cubin.shared_bytes << '\n'
       << entry.cubin.image;
  return std::string(format) + ' ' + Sha256().add(body.str()).hex() + '\n' + body.str();
}

// Empty where the file is damaged, or of another version of this format.
std::optional<Entry> parse(const std::string& bytes) {
  const size_t head = format.size() + 1 + 64 + 1;
  if (bytes.size() < head || !bytes.starts_with(format)) return {};
  const std::string body = bytes.substr(head);
  if (bytes.substr(format.size() + 1, 64) != Sha256().add(body).hex()) return {};
  const size_t line = body.find('\n');
  if (line == std::string::npos) return {};
  std::istringstream words(body.substr(0, line));
  Entry entry;
  words >> entry.key.kernel >> entry.key.architecture >> entry.key.hash >> entry.cubin.registers >>
      entry.cubin.spilled_bytes >> entry.cubin.shared_bytes;
  if (!words) return {};
  entry.cubin.image = body.substr(line + 1);
  return entry;
}

CacheEntry listed(int folder, const std::string& name) {
  CacheEntry entry{"damaged", "", cache_directory() + '/' + name, 0};
  try {
    const Descriptor file = open_file(folder, name);
    const std::string bytes = file ? read_all(file.get(), name) : "";
    entry.bytes = static_cast<int64_t>(bytes.size());
    if (const std::optional<Entry> parsed = parse(bytes)) {
      entry.kernel = parsed->key.kernel;
      entry.architecture = parsed->key.architecture;
    }
  } catch (const Fault&) {  // stays "damaged"
  }
  return entry;
}

}  // namespace

std::optional<Cubin> read_cached(const CacheKey& key) {
  try {
    if (!folder_exists()) return {};
    const Descriptor folder = open_folder();
    const std::string name = file_name(key);
    const Descriptor file = open_file(folder.get(), name);
    if (!file) return {};
    std::optional<Entry> entry = parse(read_all(file.get(), name));
    if (!entry || entry->key.hash != key.hash) raise(name + " is damaged");
    return std::move(entry->cubin);
  } catch (const Fault& fault) {
    warn_once(fault);
    return {};
  }
}

void write_cached(const CacheKey& key, const Cubin& cubin) {
  try {
    const Descriptor folder = open_or_make_folder();
    write_file(folder.get(), file_name(key), serialise({key, cubin}));
  } catch (const Fault& fault) {
    warn_once(fault);
  }
}

std::string cache_directory() {
  if (std::string folder = environment("ONEPASS_CACHE_DIR"); !folder.empty()) return folder;
  if (const std::string folder = environment("XDG_CACHE_HOME"); folder.starts_with('/')) {
    return folder + "/onepass";
  }
  const std::string home = home_directory();
  return home.empty() ? "" : home + "/.cache/onepass";
}

std::vector<CacheEntry> cache_entries() {
  std::vector<CacheEntry> entries;
  if (!folder_exists()) return entries;
  try {
    const Descriptor folder = open_folder();
    for (const std::string& name : names_in(folder.get())) {
      if (name.ends_with(cubin_suffix)) entries.push_back(listed(folder.get(), name));
    }
  } catch (const Fault& fault) {
    throw Error("the cache of compiled kernels cannot be listed: " + fault.text);
  }
  return entries;
}

int clear_cache() {
  if (!folder_exists()) return 0;
  int removed = 0;
  try {
    const Descriptor folder = open_folder();
    for (const std::string& name : names_in(folder.get())) {
      if (unlinkat(folder.get(), name.c_str(), 0) == 0 && name.ends_with(cubin_suffix)) ++removed;
    }
  } catch (const Fault& fault) {
    throw Error("the cache of compiled kernels cannot be cleared: " + fault.text);
  }
  return removed;
}

}  // namespace onepass::cuda
