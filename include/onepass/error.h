// The one exception that the library throws: a sentence that a user can act on.
#pragma once

#include <stdexcept>

#include "onepass/export.h"

namespace onepass {

// A request that cannot be served: what() names the value and what is accepted instead.
class ONEPASS_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace onepass
