// The row "banded": a 16-bit convolution whose groups have few inputs, on tensor cores (direct/banded.cuh).
#include "cuda/direct/banded_numbers.h"
#include "cuda/direct/cell_row.h"
#include "cuda/gemm/gemm.h"

namespace onepass {
namespace cuda {
namespace {

struct BandedRow {
  using Numbers = BandedNumbers;
  static constexpr const char* kernel = "onepass_banded";
  static constexpr const char* header = "direct/banded.cuh";
  static constexpr const char* agent = "Banded";

  static std::shared_ptr<const Numbers> numbers(const Problem& problem) {
    return searched<Numbers>(problem, 0,
                             [&] { return Numbers(problem, shape(problem), gpu_of(problem.device)); });
  }
  static ThinShape shape(const Problem& problem) { return banded_shape(problem); }

  static std::string refusal(const Problem& problem) {
    const DType dtype = problem.input.dtype;
    if (byte_size(dtype) != 2) return "the input does not have 16 bits";
    if (problem.parameters[0].dtype != dtype) return "the weights are of another type than the input";
    if (numbers(problem)->products_x > BandedNumbers::most_products_x)
      return "eight outputs along x read more than " + std::to_string(BandedNumbers::most_products_x * 16) +
             " inputs";
    return "";
  }
  static int64_t cut_terms(const Problem& problem, const ThinShape& shape) {
    return cuda::cut_terms(problem, shape);
  }

  static void describe(std::ostringstream& out, const Numbers& n) {
    out << ", a warp has " << n.outputs << " channels of 16 segments of " << n.rows << "x" << n.positions
        << " cells\n";
    describe_tile(out, n);
    out << "window: " << n.window[0] << "x" << n.window[1] << "x" << n.window[2] << " of " << n.inputs
        << " input channels a group, " << n.products_x << " products for all taps of x, " << n.items()
        << " of 16 segments on " << n.threads / 32 << " warps\n";
  }
};

using Row = CellKernel<BandedRow>;

}  // namespace
}  // namespace cuda

extern const Strategy cuda_banded = cuda::row_of<cuda::Row>("banded");

}  // namespace onepass
