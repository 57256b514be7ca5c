// SPDX-License-Identifier: Apache-2.0
// Hints for misspelled names.

#include "base/text.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

TEST(Nearest, SuggestsSimilarNames) {
  EXPECT_EQ(suggestion("hiden", {"heads", "hidden"}), ", did you mean 'hidden'?");
  EXPECT_EQ(suggestion("wieght", {"weight", "bias"}), ", did you mean 'weight'?");
  EXPECT_EQ(suggestion("TP", {"pp", "tp"}), ", did you mean 'tp'?");
  EXPECT_EQ(suggestion("layer", {"layers", "LAYER"}), ", did you mean 'LAYER'?");
  EXPECT_EQ(suggestion("abc", {"abd", "abe"}), ", did you mean 'abd'?"); // the first of several
}

TEST(Nearest, ListsAFewNamesIfNoneIsSimilar) {
  EXPECT_EQ(suggestion("ep", {"pp", "tp"}), "; known here: pp, tp");
  EXPECT_EQ(suggestion("x", {}), "");
  EXPECT_EQ(suggestion("zzz", std::vector<std::string>(9, "abc")), "");
  Nearest nearest("norm");
  nearest.offer("weight");
  EXPECT_EQ(nearest.hint(), "");
}

TEST(Nearest, LongNamesAreNotCompared) {
  EXPECT_EQ(suggestion(std::string(300, 'a'), std::vector<std::string>(9, std::string(300, 'a'))), "");
}

} // namespace
