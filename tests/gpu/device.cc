// What the suite runs on, for results/<device>.json.
#include "cuda/gpu.h"
#include "gpu/pool.h"

namespace onepass::testing {
namespace {

using Gpu = GpuTest;

TEST_F(Gpu, IsDescribed) {
  RecordProperty("device", cuda::gpu_of(Device::cuda()).name);
  RecordProperty("description", cuda::describe_device(0));
  RecordProperty("device_code_hash", cuda::device_code_hash());
  RecordProperty("turns_in_all", std::to_string(turns_in_all));
}

}  // namespace
}  // namespace onepass::testing
