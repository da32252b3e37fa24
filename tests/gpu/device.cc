// What the suite runs on, for results/<device>.json.
#include "cuda/runtime/gpu.h"
#include "gpu/pool.h"
#include "support/results_hash.h"

namespace onepass::testing {
namespace {

using Gpu = GpuTest;

TEST_F(Gpu, IsDescribed) {
  const cuda::Gpu& gpu = cuda::gpu_of(Device::cuda());
  RecordProperty("device", gpu.name);
  RecordProperty("architecture", gpu.architecture);
  RecordProperty("description", cuda::describe_device(0));
  RecordProperty("device_code_hash", plans_hash(gpu.architecture));
  RecordProperty("tests_hash", tests_hash());
  RecordProperty("turns_in_all", std::to_string(turns_in_all));
}

}  // namespace
}  // namespace onepass::testing
