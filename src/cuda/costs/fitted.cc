// The table of fitted costs.
#include "plan/fitted.h"

namespace onepass {
namespace {

constexpr Fitted table[] = {
    {},  // an array is not empty, the table may be
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
