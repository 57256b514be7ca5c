// SPDX-License-Identifier: Apache-2.0
// The values of pickles: collections that grow in turns, memo numbers in any order, values of another kind.
// tests/e2e/checkpoints/stored_checkpoints_test.py has pickles of Python, hostile ones too.

#include "checkpoints/pickle.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

using namespace reshard;
using namespace reshard::checkpoints;

namespace {

constexpr std::string_view kGlobals[] = {"torch Size"};

std::vector<int64_t> integersOf(const Pickle &pickle, Pickle::Value list) {
  std::vector<int64_t> found;
  for (const Pickle::Value item : pickle.items(list))
    found.push_back(pickle.integer(item));
  return found;
}

/// The opcode BININT with its number.
std::string number(int value) {
  std::string text = "J";
  for (int byte = 0; byte < 4; ++byte)
    text += static_cast<char>(value >> (8 * byte));
  return text;
}

TEST(Pickle, CollectionsThatGrowInTurnsKeepTheirItems) {
  // Memo 1 and 2: two lists. APPENDS of i % 4 numbers, by turns, and APPEND of one.
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
  // Two keys of each name. Only a dictionary with as many keys as attributes of an instance is searched.
  for (const int keys : {64, 66}) {
    std::string text = "\x80\x02}";
    for (int i = 0; i < keys; ++i)
      text += std::string("X\x01") + std::string(3, '\0') + static_cast<char>('A' + i % (keys / 2)) + number(i) + "s";
    text += ".";
    const Result<Pickle> pickle = Pickle::read(text, kGlobals, "here");
    ASSERT_EQ(pickle.status().message(), "");
    EXPECT_EQ(pickle->items(pickle->root()).size(), static_cast<size_t>(2 * keys));
    for (int i = keys / 2; i < keys; ++i) {
      const Pickle::Value *value =
          pickle->find(pickle->root(), std::string(1, static_cast<char>('A' + i % (keys / 2))));
      ASSERT_EQ(value != nullptr, keys == 64) << i;
      if (value) {
        EXPECT_EQ(pickle->integer(*value), i);
      }
    }
    EXPECT_EQ(pickle->find(pickle->root(), "absent"), nullptr);
  }
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
  const std::string all = std::string("\x80\x02(N\x88K\x05X\x02\0\0\0ab])ctorch\nSize\n)\x81}bt.", 34);
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

TEST(Pickle, ValuesThatNeverChangeAreNotChanged) {
  const auto problem = [](const std::string &opcodes) {
    return Pickle::read("\x80\x02" + opcodes + ".", kGlobals, "here").status().message();
  };
  EXPECT_EQ(problem(")K\x01"
                    "a"),
            "here: damaged or hostile pickle: byte 5: expected a list");
  EXPECT_EQ(problem("N(K\x01K\x02u"),
            "here: damaged or hostile pickle: byte 8: expected a dictionary, and a value for each key");
  EXPECT_EQ(problem(")}b"), "here: damaged or hostile pickle: byte 4: expected an instance without a state");
  EXPECT_EQ(problem("ctorch\nSize\n)R}b}b"),
            "here: damaged or hostile pickle: byte 19: expected an instance without a state");
}

TEST(Pickle, MemoryHasABound) {
  constexpr size_t kMaxBytes = 1 << 20;
  const std::string marks(1 << 19, '('), lists(1 << 17, ']'), integers = [] {
    std::string text;
    for (int i = 0; i < 1 << 17; ++i)
      text += number(i);
    return text;
  }();
  std::string memo = "N";
  for (int i = 0; i < 1 << 17; ++i)
    memo += "r" + number(2 * i + 2).substr(1);
  for (const std::string &values : {marks, lists, integers, memo})
    EXPECT_NE(Pickle::read("\x80\x02" + values + ".", kGlobals, "here", kMaxBytes)
                  .status()
                  .message()
                  .find("its values need more than 1048576 bytes"),
              std::string::npos);
}

TEST(Pickle, MemoryIsBoundedByTheLength) {
  const std::string lists(4 << 20, ']');
  EXPECT_NE(Pickle::read("\x80\x02" + lists + ".", kGlobals, "here").status().message().find("values need more than"),
            std::string::npos);
}

TEST(Pickle, AShapeHasAtMost64Numbers) {
  for (const size_t count : {64, 65}) {
    std::string text = "\x80\x02(";
    for (size_t i = 0; i < count; ++i)
      text += number(7);
    const Result<Pickle> pickle = Pickle::read(text + "t.", kGlobals, "here");
    ASSERT_EQ(pickle.status().message(), "");
    EXPECT_EQ(pickle->integers(pickle->root()).has_value(), count == 64);
  }
}

TEST(Pickle, NumbersOfEqualHashesTakeNoTime) {
  // In a table by the number itself, these would all have one place.
  std::string text = "\x80\x02(";
  for (int i = 0; i < 1 << 20; ++i)
    text += "\x8a\x08" + number(0).substr(1) + number(i).substr(1);
  for (int i = 0; i < 1 << 18; ++i)
    text += "r" + number(i << 12).substr(1) + "j" + number(i << 12).substr(1);
  text += "t.";
  const Result<Pickle> pickle = Pickle::read(text, kGlobals, "here");
  ASSERT_EQ(pickle.status().message(), "");
  const Pickle::Items items = pickle->items(pickle->root());
  ASSERT_EQ(items.size(), (1u << 20) + (1u << 18));
  for (int64_t i = 0; i < 1 << 20; ++i)
    ASSERT_EQ(pickle->integer(items[static_cast<size_t>(i)]), i << 32);
}

} // namespace
