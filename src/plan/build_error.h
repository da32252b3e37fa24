// Thrown by a row whose kernel cannot be built for an accepted problem. The plan then tries the next row.
#pragma once

#include "onepass/error.h"

namespace onepass {

class BuildError : public Error {
 public:
  using Error::Error;
};

}  // namespace onepass
