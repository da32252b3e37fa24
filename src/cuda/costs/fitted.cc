// The table of fitted costs.
#include "plan/fitted.h"

#include <initializer_list>

namespace onepass {
namespace {

constexpr std::initializer_list<Fitted> table{
#include "cuda/costs/fitted.inc"
};

}  // namespace

const Fitted* fitted(std::string_view what, int64_t element_bytes) {
  for (const Fitted& row : table) {
    if (row.what == what && row.element_bytes == element_bytes) return &row;
  }
  return nullptr;
}

}  // namespace onepass
