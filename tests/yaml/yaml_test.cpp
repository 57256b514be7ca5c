// SPDX-License-Identifier: Apache-2.0
// Parsing of YAML into Nodes, and printing of messages. Complete messages about invalid YAML are in errors/yaml_*.yaml.

#include "base/yaml/node.h"

#include <gtest/gtest.h>

namespace reshard {
namespace {

/// A node as text: line:column, then `null`, the text, `{…}` or `[…]`.
std::string dump(const Node &node) {
  std::string result = std::to_string(node.at.line) + ":" + std::to_string(node.at.column);
  if (node.kind == Node::Kind::null)
    return result + " null";
  if (node.kind == Node::Kind::scalar)
    return result + (node.quoted ? " \"" + node.text + "\"" : " " + node.text);
  result += node.kind == Node::Kind::map ? " {" : " [";
  for (const Node &item : node.items)
    result += dump(item) + ", ";
  for (const auto &[key, value] : node.entries)
    result += dump(key) + " = " + dump(value) + ", ";
  return result + (node.kind == Node::Kind::map ? "}" : "]");
}

std::string parsed(const std::string &text, size_t begin = 0) {
  Diagnostics diagnostics;
  const auto node = parseYaml(diagnostics.addFile("x", text), diagnostics, begin);
  return node && diagnostics.ok() ? dump(*node) : diagnostics.text();
}

TEST(Yaml, TreeAndLocations) {
  EXPECT_EQ(parsed("a: 1\nb: [x, 'y', {c: ~}]\n"),
            "1:1 {1:1 a = 1:4 1, 2:1 b = 2:4 [2:5 x, 2:8 \"y\", 2:13 {2:14 c = 2:17 null, }, ], }");
  EXPECT_EQ(parsed("l.{layer}.up: [8, hidden]\n"), "1:1 {1:1 l.{layer}.up = 1:15 [1:16 8, 1:19 hidden, ], }");
  EXPECT_EQ(parsed("a:\n- b\n- c: 1\n"), "1:1 {1:1 a = 2:1 [2:3 b, 3:3 {3:3 c = 3:6 1, }, ], }");
}

TEST(Yaml, ScalarsKeepTheirText) {
  EXPECT_EQ(parsed("[010, 1_000, 0x1F, yes, 1e3, \"1\", '']"),
            "1:1 [1:2 010, 1:7 1_000, 1:14 0x1F, 1:20 yes, 1:25 1e3, 1:30 \"1\", 1:35 \"\", ]");
  EXPECT_EQ(parsed("a: |-\n x\n"), "1:1 {1:1 a = 1:4 \"x\", }");
  EXPECT_EQ(parsed("a: first_dense..layers - 1"), "1:1 {1:1 a = 1:4 first_dense..layers - 1, }");
  EXPECT_EQ(parsed("a: \"x\\ty\""), "1:1 {1:1 a = 1:4 \"x\ty\", }");
  EXPECT_EQ(parsed("a: 'it''s'"), "1:1 {1:1 a = 1:4 \"it's\", }");
}

TEST(Yaml, ColumnsAreBytes) { EXPECT_EQ(parsed("ä: [ö, x]"), "1:1 {1:1 ä = 1:5 [1:6 ö, 1:10 x, ], }"); }

TEST(Yaml, EmptyTextIsNull) {
  EXPECT_EQ(parsed(""), "1:1 null");
  EXPECT_EQ(parsed("# comment\n"), "1:1 null");
}

TEST(Yaml, ByteOrderMarkLineEndsDirective) {
  EXPECT_EQ(parsed("\xef\xbb\xbf"
                   "a: 1"),
            "1:4 {1:4 a = 1:7 1, }");
  EXPECT_EQ(parsed("a: 1\r\nb: 2\r\n"), "1:1 {1:1 a = 1:4 1, 2:1 b = 2:4 2, }");
  EXPECT_EQ(parsed("%YAML 1.2\n---\na: 1\n...\n"), "3:1 {3:1 a = 3:4 1, }");
}

TEST(Yaml, ParsingStartsInsideALine) { EXPECT_EQ(parsed("a.b={c: [1]}", 4), "1:5 {1:6 c = 1:9 [1:10 1, ], }"); }

TEST(Yaml, NestingUpTo64) {
  const auto nested = [](size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_EQ(parsed(nested(64)).find("error"), std::string::npos);
  EXPECT_NE(parsed(nested(65)).find("nested more than 64 deep"), std::string::npos);
}

TEST(Yaml, TreeAfterErrors) {
  Diagnostics diagnostics;
  const auto node = parseYaml(diagnostics.addFile("x", "a: &x !t 1\na: 2\nb: 3\n"), diagnostics);
  EXPECT_EQ(diagnostics.errors(), 3u) << diagnostics.text(); // anchor, tag, duplicate
  ASSERT_TRUE(node);
  EXPECT_EQ(node->find("a")->text, "1");
  EXPECT_EQ(node->find("b")->text, "3");
  EXPECT_EQ(node->find("c"), nullptr);
}

TEST(Yaml, ExplicitNonSpecificTagIsATag) {
  EXPECT_NE(parsed("a: ! x").find("tags are not supported"), std::string::npos);
}

TEST(Yaml, UnterminatedQuotes) {
  for (const char *text : {"a: \"b", "a: 'b", "a: \"b\n", "a: [\"b, c]\n", "a: \"b\\\"\n", "a: 'b''\n"})
    EXPECT_NE(parsed(text).find("without a closing"), std::string::npos) << text << "\n" << parsed(text);
}

TEST(Diagnostics, SortedWithNotesAndCount) {
  Diagnostics diagnostics;
  const uint32_t a = diagnostics.addFile("a", "one\ntwo\n"), b = diagnostics.addFile("b", "eins\n");
  diagnostics.error({b, 1, 2}, "third");
  diagnostics.error({a, 2, 3}, "second");
  diagnostics.note({b, 1, 1}, "of the second");
  diagnostics.warning({a, 1, 1}, "first");
  diagnostics.error({a, 2, 3}, "second"); // a repetition is dropped
  diagnostics.note({b, 1, 1}, "dropped with it");
  EXPECT_EQ(diagnostics.errors(), 2u);
  EXPECT_EQ(diagnostics.text(), "a:1:1: warning: first\none\n^\n"
                                "a:2:3: error: second\ntwo\n  ^\n"
                                "b:1:1: note: of the second\neins\n^\n"
                                "b:1:2: error: third\neins\n ^\n"
                                "2 errors\n");
}

TEST(Diagnostics, WithoutALocation) {
  Diagnostics none;
  none.error({}, "no such file");
  EXPECT_EQ(none.text(), "error: no such file\n");
  Diagnostics diagnostics;
  diagnostics.addFile("a", "x");
  diagnostics.error({}, "as a whole");
  EXPECT_EQ(diagnostics.text(), "a: error: as a whole\n");
}

TEST(Diagnostics, CaretColumnOfPrintedText) {
  Diagnostics diagnostics;
  const uint32_t file = diagnostics.addFile("a", "\tgrö\x1b[ß: x\r\n");
  diagnostics.error({file, 1, 12}, "here\x1b[0m");
  diagnostics.error({file, 9, 5}, "behind the end");
  EXPECT_EQ(diagnostics.text(),
            "a:1:12: error: here�[0m\n grö�[ß: x\n         ^\na:9:5: error: behind the end\n\n^\n2 errors\n");
}

TEST(Diagnostics, ErrorsPastTheHundredthAreCounted) {
  Diagnostics diagnostics;
  const uint32_t file = diagnostics.addFile("a", "");
  for (uint32_t i = 1; i <= 1000; ++i)
    diagnostics.error({file, i, 1}, "x");
  EXPECT_EQ(diagnostics.errors(), 1000u);
  EXPECT_NE(diagnostics.text().find("1000 errors, the first 100 found are shown\n"), std::string::npos);
}

} // namespace
} // namespace reshard
