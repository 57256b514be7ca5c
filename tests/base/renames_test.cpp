// SPDX-License-Identifier: Apache-2.0
// The rules of --rename. python/reshard/names.py has the same ones: tests/e2e/checkpoints/convert_test.py.

#include "base/renames.h"

#include <gtest/gtest.h>

using namespace reshard;

namespace {

Renames rules(const std::vector<std::string> &texts) {
  Renames renames;
  for (const std::string &text : texts)
    EXPECT_EQ(renames.add(text), "") << text;
  return renames;
}

TEST(Renames, NamesChange) {
  struct Case {
    std::vector<std::string> rules;
    std::string name, expected;
  };
  for (const auto &[texts, name, expected] :
       {Case{{}, "a.b", "a.b"},
        {{"model.="}, "model.a", "a"},
        {{"=model."}, "a", "model.a"},
        {{"model.=x.", "model.layers.=y."}, "model.layers.0", "y.0"}, // the longest beginning, once
        {{"model.layers.=model.y.", "model.=x."}, "model.layers.0", "model.y.0"},
        {{"x=y"}, "ax", "ax"},
        {{"*._orig_mod.*=*.*"}, "layers.3._orig_mod.up.weight", "layers.3.up.weight"},
        {{"*._orig_mod.*=*.*"}, "_orig_mod.up", "_orig_mod.up"}, // nothing but a beginning
        {{"*.a.*=*.*"}, "1.a.2.a.3", "1.2.a.3"},                 // the leftmost place, once
        {{"*.a.*=*.*", "*.a.*=*.*"}, "1.a.2.a.3", "1.2.3"},
        {{"*.a=*.b"}, "a.a.a", "a.a.b"},
        {{"*a*ab=*-*"}, "xaab", "x-"},
        {{"*aa*a=*-*"}, "aaa", "-"},
        {{"aa*a=*"}, "aa", "aa"}, // the two texts may not overlap
        {{"layers.*.mlp.*=h.*.*"}, "layers.0.mlp.up", "h.0.up"},
        {{"m.=", "*.w.*=*.*"}, "m.a.w.b", "a.b"}, // globs first
        {{"a=b=c"}, "ax", "b=cx"}})
    EXPECT_EQ(rules(texts)(name), expected) << name;
  const std::string longest(100'000, 'a');
  EXPECT_EQ(rules({"*" + std::string(50, 'a') + "*b=**"})(longest), longest);
}

TEST(Renames, MapsAreRenamedAsAWhole) {
  std::map<std::string, int> map{{"m.a", 1}, {"m.b", 2}, {"c", 3}};
  EXPECT_TRUE(rules({"m.="}).apply(map, "tensors").ok());
  EXPECT_EQ(map, (std::map<std::string, int>{{"a", 1}, {"b", 2}, {"c", 3}}));
  EXPECT_EQ(rules({"a=b"}).apply(map, "tensors of 'x'").message(),
            "--rename gives 'a' and 'b' of the tensors of 'x' the name 'b'");
  EXPECT_EQ(rules({"z="}).apply(map, "tensors of 'x'").message(),
            "--rename=z=: 'z' begins no name of the tensors of 'x'");
  EXPECT_EQ(rules({"*z=*"}).apply(map, "tensors").message(), "--rename=*z=*: '*z' matches no name of the tensors");
  EXPECT_EQ(rules({"a="}).apply(map, "tensors").message(), "--rename leaves nothing of 'a' of the tensors");
  EXPECT_EQ(map.size(), 3u);
}

TEST(Renames, InvalidRules) {
  Renames renames;
  EXPECT_EQ(renames.add("a"), "invalid value 'a', expected OLD=NEW");
  EXPECT_EQ(renames.add("*a=b"), "invalid value '*a=b', expected as many '*' in NEW as in OLD");
  EXPECT_EQ(renames.add("a=*"), "invalid value 'a=*', expected as many '*' in NEW as in OLD");
  EXPECT_EQ(renames.add("a=b"), "");
  EXPECT_EQ(renames.add("a=c"), "'a' is given twice, expected once");
}

} // namespace
