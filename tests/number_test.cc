// Numbers of launches: their values, and the formulas that give them for other batches.
#include "cuda/runtime/number.h"

#include <gtest/gtest.h>

namespace onepass::cuda {
namespace {

TEST(Number, ConstantsAreFolded) {
  const Number four = Number(1) + 3;
  EXPECT_EQ(four.value(), 4);
  EXPECT_EQ(four.text(), "4");
  EXPECT_EQ((Number::batch(8) * 1 + 0).text(), "batch");
  EXPECT_EQ((Number::batch(8) * 0).text(), "0");
  EXPECT_EQ((Number::batch(8) * 3 * 4).text(), "batch * 12");
}

TEST(Number, FormulasHoldForOtherBatches) {
  const Number batch = Number::batch(20);
  const Number resident = Number::named(6, "resident");
  const Number units = divide_up(batch, 8);
  const Number blocks = clamp(units * 3 - 1, 1, resident) + batch / 3;
  EXPECT_EQ(blocks.value(), 6 + 6);
  EXPECT_EQ(blocks.value_at(20), blocks.value());
  EXPECT_EQ(blocks.value_at(1), 2 + 0);
  EXPECT_EQ(blocks.value_at(100), 6 + 33);
  EXPECT_EQ(round_up(batch * 4, 256).value_at(65), 512);
  EXPECT_EQ(blocks.value_at(100, "resident", 9), 9 + 33);
  EXPECT_EQ(blocks.value_at(100, "another", 9), 6 + 33);
}

TEST(Number, TextHasTheParenthesesItNeeds) {
  const Number batch = Number::batch(3);
  EXPECT_EQ(((batch + 1) * 4).text(), "(batch + 1) * 4");
  EXPECT_EQ((10 - (batch - 1)).text(), "10 - (batch - 1)");
  EXPECT_EQ((batch * 6 / 4).text(), "batch * 6 / 4");
  EXPECT_EQ(minimum(batch, 2).text(), "std::min<int64_t>(batch, 2)");
  EXPECT_EQ(clamp(batch * 2, 1, 9).text(), "clamp(batch * 2, 1, 9)");
  EXPECT_EQ((divide_up(batch + 1, 8) * 16).text(), "divide_up(batch + 1, 8) * 16");
}

TEST(Number, SharedFormulasAreWrittenOnce) {
  const Number wave = minimum(Number::batch(9) * 7, 100).called("wave");
  const Number words[] = {wave * 3, wave + 1};
  FormulaTexts texts;
  for (const Number& word : words) texts.expect(word);
  EXPECT_EQ(texts.text(words[0]), "wave * 3");
  EXPECT_EQ(texts.text(words[1]), "wave + 1");
  ASSERT_EQ(texts.constants().size(), 1u);
  EXPECT_EQ(texts.constants()[0].second, "std::min<int64_t>(batch * 7, 100)");
}

}  // namespace
}  // namespace onepass::cuda
