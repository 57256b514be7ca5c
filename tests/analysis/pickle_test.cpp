// SPDX-License-Identifier: Apache-2.0
// The values of pickles: collections that grow in turns, memo numbers in any order, values of another kind.
// tests/e2e/stored_checkpoints_test.py has pickles of Python, hostile ones too.

#include "analysis/checkpoints/pickle.h"
#include "tests/analysis/support.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::analysis;

namespace {

constexpr std::string_view kGlobals[] = {"torch Size"};

std::vector<int64_t> integersOf(const Pickle &pickle, Pickle::Value list) {
  std::vector<int64_t> found;
  for (const Pickle::Value item : pickle.items(list))
    found.push_back(pickle.integer(item));
  return found;
}

/// BININT.
std::string number(int value) {
  std::string text = "J";
  for (int byte = 0; byte < 4; ++byte)
    text += static_cast<char>(value >> (8 * byte));
  return text;
}

TEST(Pickle, CollectionsThatGrowInTurnsKeepTheirItems) {
  // Memo 0 and 1: two lists. APPENDS of i % 4 numbers, by turns, and APPEND of one.
  std::string text = "\x80\x02]q\x01]q\x02";
  std::vector<int64_t> expected[2];
  for (int i = 0; i < 300; ++i) {
    const int list = i % 2;
    text += std::string("h") + static_cast<char>(list + 1) + "(";
    for (int k = 0; k < i % 4; ++k) {
      text += number(1000 * i + k);
      expected[list].push_back(1000 * i + k);
    }
    text += "e" + number(-i) + "a0"; // and leaves the list again
    expected[list].push_back(-i);
  }
  text += "\x86."; // TUPLE2 of the lists, which are still on the stack
  const Result<Pickle> pickle = Pickle::read(text, kGlobals, "here");
  ASSERT_EQ(pickle.status().message(), "");
  const Pickle::Items lists = pickle->items(pickle->root());
  ASSERT_EQ(lists.size(), 2u);
  for (const int list : {0, 1})
    EXPECT_EQ(integersOf(*pickle, lists[list]), expected[list]);
}

TEST(Pickle, ADictionaryThatGrowsIsFoundByItsLastKeys) {
  std::string text = "\x80\x02}";
  for (int i = 0; i < 1000; ++i)
    text += std::string("X\x02") + std::string(3, '\0') + static_cast<char>('a' + i % 26) +
            static_cast<char>('a' + i / 26 % 26) + number(i) + "s";
  text += ".";
  const Result<Pickle> pickle = Pickle::read(text, kGlobals, "here");
  ASSERT_EQ(pickle.status().message(), "");
  EXPECT_EQ(pickle->items(pickle->root()).size(), 2000u);
  for (int i = 1000 - 26 * 26; i < 1000; ++i) {
    const std::string key = {static_cast<char>('a' + i % 26), static_cast<char>('a' + i / 26 % 26)};
    const Pickle::Value *value = pickle->find(pickle->root(), key);
    ASSERT_NE(value, nullptr) << key;
    EXPECT_EQ(pickle->integer(*value), i) << key;
  }
  EXPECT_EQ(pickle->find(pickle->root(), "absent"), nullptr);
}

TEST(Pickle, MemoNumbersMayHaveAnyOrder) {
  // Numbers 7, 0, 1 and 7 again; MEMOIZE takes the number of entries, which is then 3.
  const std::string text = "\x80\x04(" + number(70) + "q\x07" + number(10) + std::string("q\0", 2) + number(11) +
                           "q\x01" + number(71) + "q\x07" + number(30) + "\x94" + std::string("h\0", 2) +
                           "h\x01h\x07h\x02" + "t.";
  const Result<Pickle> missing = Pickle::read(text, kGlobals, "here");
  EXPECT_EQ(missing.status().message(), "here: damaged or hostile pickle: byte 43: no value has the number 2");
  std::string right = text;
  right[right.size() - 3] = '\x03';
  const Result<Pickle> pickle = Pickle::read(right, kGlobals, "here");
  ASSERT_EQ(pickle.status().message(), "");
  EXPECT_EQ(integersOf(*pickle, pickle->root()), (std::vector<int64_t>{70, 10, 11, 71, 30, 10, 11, 71, 30}));
}

TEST(Pickle, ValuesOfAnotherKindHaveNoItemsAndNoText) {
  const std::string text = std::string("\x80\x02(Nh") + std::string(1, '\0') + ".";
  EXPECT_EQ(Pickle::read(text, kGlobals, "here").status().message(),
            "here: damaged or hostile pickle: byte 4: no value has the number 0");
  // None, True, 5, 'ab', [], (), torch.Size with a state.
  const std::string all = std::string("\x80\x02(N\x88K\x05X\x02\0\0\0ab])ctorch\nSize\n)\x81}bt.", 36);
  const Result<Pickle> pickle = Pickle::read(all, kGlobals, "here");
  ASSERT_EQ(pickle.status().message(), "");
  const Pickle::Items values = pickle->items(pickle->root());
  ASSERT_EQ(values.size(), 7u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(pickle->items(values[i]).size(), 0u) << i;
    EXPECT_EQ(pickle->text(values[i]), i == 3 ? "ab" : "") << i;
    EXPECT_EQ(pickle->integer(values[i]), i == 1 ? 1 : i == 2 ? 5 : 0) << i;
  }
  EXPECT_TRUE(pickle->isObject(values[6], "torch Size"));
  ASSERT_NE(pickle->state(values[6]), nullptr);
  EXPECT_TRUE(pickle->is(*pickle->state(values[6]), Pickle::Kind::dictionary));
}

} // namespace
