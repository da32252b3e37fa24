// The list of SIMD targets: what this CPU runs, filled in by the files compiled per target.
#include "cpu/isa.h"

#include "cpu/targets.h"
//
#include <hwy/highway.h>

#include <algorithm>
#include <cctype>
#include <memory>

#include "cpu/dispatch.h"
#include "cpu/supported_targets.h"
#include "onepass/error.h"

namespace onepass::cpu {

// In the files compiled once per target.
ONEPASS_DECLARE_FOR_TARGETS(void fill_steps(Isa& isa); void fill_statistics(Isa& isa);
                            void fill_transfers(Isa& isa); void fill_gradient(Isa& isa);
                            void fill_norm_gradient(Isa& isa); void fill_slab_norm(Isa& isa);
                            void fill_slab_gradient(Isa& isa); void fill_convolution(Isa& isa);
                            void fill_dot_tile(Isa& isa); void fill_indirect_tile(Isa& isa);
                            void fill_group_tile(Isa& isa);)

namespace {

std::string lower_case_name(int64_t target) {
  std::string name = hwy::TargetName(target);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

std::vector<const Isa*> make_isas() {
  static std::vector<std::unique_ptr<Isa>> owned;
  std::vector<const Isa*> result;
  for (const int64_t target : supported_targets()) {
    auto isa = std::make_unique<Isa>();
    isa->name = lower_case_name(target);
    ONEPASS_FOR_TARGET(target, fill_steps(*isa));
    ONEPASS_FOR_TARGET(target, fill_statistics(*isa));
    ONEPASS_FOR_TARGET(target, fill_transfers(*isa));
    ONEPASS_FOR_TARGET(target, fill_gradient(*isa));
    ONEPASS_FOR_TARGET(target, fill_norm_gradient(*isa));
    ONEPASS_FOR_TARGET(target, fill_slab_norm(*isa));
    ONEPASS_FOR_TARGET(target, fill_slab_gradient(*isa));
    ONEPASS_FOR_TARGET(target, fill_convolution(*isa));
    ONEPASS_FOR_TARGET(target, fill_dot_tile(*isa));
    ONEPASS_FOR_TARGET(target, fill_indirect_tile(*isa));
    ONEPASS_FOR_TARGET(target, fill_group_tile(*isa));
    if (isa->load == nullptr) continue;
    result.push_back(isa.get());
    owned.push_back(std::move(isa));
  }
  return result;
}

}  // namespace

const std::vector<const Isa*>& isas() {
  static const std::vector<const Isa*> list = make_isas();
  return list;
}

const Isa& find_isa(std::string_view name) {
  std::string names;
  for (const Isa* isa : isas()) {
    if (name.empty() || isa->name == name) return *isa;
    names += (names.empty() ? "" : ", ") + isa->name;
  }
  throw Error("target \"" + std::string(name) + "\" is not available: this CPU and build have " +
              (names.empty() ? "none" : names));
}

}  // namespace onepass::cpu
