// The base of classes whose objects stay where they are made.
#pragma once

namespace onepass::cuda {

class Scoped {
 public:
  Scoped(const Scoped&) = delete;
  Scoped& operator=(const Scoped&) = delete;

 protected:
  Scoped() = default;
  ~Scoped() = default;
};

}  // namespace onepass::cuda
