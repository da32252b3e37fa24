// What a row throws that has no kernel for a problem it accepted: others may have one.
#pragma once

#include "onepass/error.h"

namespace onepass {

class BuildError : public Error {
 public:
  using Error::Error;
};

}  // namespace onepass
