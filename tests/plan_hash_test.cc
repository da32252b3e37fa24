// The hash of what plans do on a GPU: it changes with kernels, launches and rows, and with nothing else.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "cuda/export/plan_hash.h"
#include "cuda/runtime/compile.h"
#include "onepass/onepass.h"

namespace onepass {
namespace {

using cuda::without_comments;

std::string hash_of(const std::string& text, const std::string& row,
                    const std::string& architecture = "sm_90a") {
  const cuda::WithoutCompiling quickly;
  return cuda::plan_hash(plan(Problem::parse(text, Device::cuda_architecture(architecture)), {row, ""}));
}

TEST(PlanHash, DoesNotCountCommentsAndBlankLines) {
  const std::string code = "int a = 1;\n#define B 2\nchar c = '/';\n";
  EXPECT_EQ(without_comments(code), code);
  EXPECT_EQ(without_comments("// a comment\nint a = 1;  // one\n\n#define B 2\t\nchar c = '/';"), code);
  EXPECT_EQ(without_comments("/* two\n lines */\nint a = 1;\n#define B 2\nchar c = '/'; /* end */\n"), code);
  EXPECT_NE(without_comments("int a = 2;\n#define B 2\nchar c = '/';\n"), code);
  // A comment separates words.
  EXPECT_EQ(without_comments("int/**/a;"), "int a;\n");
}

TEST(PlanHash, KeepsWhatOnlyLooksLikeAComment) {
  for (const std::string code :
       {"const char* a = \"// no comment\";\n", "asm(\"add /* a */ \\\" // b\");\n",
        "char q = '\"'; int b;\n", "auto r = R\"x(// \" )x\";\n", "int n = 1'000; int m = 2'000;\n",
        "char c = '\\''; int d;\n", "int e = 4 / 2 * 3;\n"}) {
    EXPECT_EQ(without_comments(code), code);
    EXPECT_EQ(without_comments("/**/" + code + "//"), " " + code);
  }
}

TEST(PlanHash, IsThatOfRowKernelsAndLaunches) {
  const std::string text = "swish | group_norm(4) | hardswish @ 2x8x71x73";
  const std::set<std::string> different{
      hash_of(text, "tail_streamed"),
      hash_of(text, "tail_staged"),
      hash_of(text, "tail_streamed", "sm_80"),
      hash_of("swish | group_norm(4) | relu @ 2x8x71x73", "tail_streamed"),       // another chain
      hash_of("swish | group_norm(4) | hardswish @ 2x8x71x75", "tail_streamed"),  // another size
      hash_of("swish | group_norm(4) | hardswish @ 2x8x71x73 bf16", "tail_streamed"),
      hash_of(text, "direct"),
  };
  EXPECT_EQ(different.size(), 7u);
  EXPECT_EQ(hash_of(text, "tail_streamed"), hash_of(text, "tail_streamed"));
}

TEST(PlanHash, OfGradientsIsThatOfWhatIsWanted) {
  const cuda::WithoutCompiling quickly;
  BackwardProblem problem(
      Problem::parse("swish | group_norm(4) @ 2x8x71x73", Device::cuda_architecture("sm_90a")));
  const std::string all = cuda::plan_hash(plan_backward(problem, {"tail_backward", ""}));
  EXPECT_EQ(all, cuda::plan_hash(plan_backward(problem, {"tail_backward", ""})));
  EXPECT_NE(all, cuda::plan_hash(plan_backward(problem, {"tail_backward_resident", ""})));
  problem.wanted[1] = false;
  EXPECT_NE(all, cuda::plan_hash(plan_backward(problem, {"tail_backward", ""})));
}

}  // namespace
}  // namespace onepass
