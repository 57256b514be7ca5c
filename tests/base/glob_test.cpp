// SPDX-License-Identifier: Apache-2.0
// Globs.

#include "base/text.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

TEST(Glob, StarsAndQuestionMarks) {
  const std::string experts = "layers.{layer}.experts.{expert}.up";
  for (const auto &[glob, name] : {std::pair<std::string, std::string>{"*", ""},
                                   {"", ""},
                                   {"*.experts.*", experts},
                                   {"a?c", "abc"},
                                   {"*a*b*", "xxaxxbxx"},
                                   {"b[0]", "b[0]"},
                                   {"a\\*", "a\\b"}})
    EXPECT_TRUE(matchesGlob(glob, name)) << glob;
  for (const auto &[glob, name] : {std::pair<std::string, std::string>{"a?c", "ac"},
                                   {"a*", "ba"},
                                   {"", "a"},
                                   {"b[0]", "b0"},
                                   {"A", "a"},
                                   {"*" + std::string(50, 'a') + "*b", std::string(100000, 'a')}})
    EXPECT_FALSE(matchesGlob(glob, name)) << glob;
}

} // namespace
