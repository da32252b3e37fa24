// The row "narrow": a convolution whose groups have few inputs, on CUDA cores (direct/narrow.cuh).
#include "cuda/direct/cell_row.h"
#include "cuda/direct/narrow_numbers.h"

namespace onepass {
namespace cuda {
namespace {

struct NarrowRow {
  using Numbers = NarrowNumbers;
  static constexpr const char* kernel = "onepass_narrow";
  static constexpr const char* header = "direct/narrow.cuh";
  static constexpr const char* agent = "Narrow";

  static std::shared_ptr<const Numbers> numbers(const Problem& problem) { return narrow_numbers(problem); }
  static ThinShape shape(const Problem& problem) { return ThinShape(problem); }
  static std::string refusal(const Problem&) { return ""; }
  static int64_t cut_terms(const Problem&, const ThinShape&) { return 0; }

  static void describe(std::ostringstream& out, const Numbers& n) {
    out << ", a thread has " << n.outputs << " channels of " << n.rows << "x" << n.positions << " cells\n";
    describe_tile(out, n);
    out << "window: " << n.window[0] << "x" << n.window[1] << "x" << n.window[2] << " of " << n.inputs
        << " input channels a group, vectors of " << n.input_vector << " and " << n.output_vector
        << " elements\n";
  }
};

using Row = CellKernel<NarrowRow>;

}  // namespace
}  // namespace cuda

extern const Strategy cuda_narrow = cuda::row_of<cuda::Row>("narrow");

}  // namespace onepass
