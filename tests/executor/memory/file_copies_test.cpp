// SPDX-License-Identifier: Apache-2.0
// Copies into mapped files: which memory is a file's, copies from file to file and from memory, and their errors.

#include "base/mapped_file.h"
#include "executor/memory/file_copies.h"
#include "reshard/reshard.h"
#include "tests/verify/support.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

using namespace reshard;

namespace {

constexpr uint64_t kBytes = 3 << 20;

class FileCopiesTest : public testing::Test {
protected:
  void SetUp() override {
    for (MappedFile *file : {&source, &target}) {
      Result<MappedFile> made = MappedFile::create(folder_ / (file == &source ? "source" : "target"), kBytes);
      ASSERT_EQ(made.status().message(), "");
      *file = std::move(*made);
    }
    for (uint64_t i = 0; i < kBytes; ++i)
      source.data()[i] = static_cast<std::byte>(i * 7 + i / 251); // does not repeat after a power of two
  }

  const tests::TemporaryFolder folder_;
  MappedFile source, target;
};

} // namespace

TEST_F(FileCopiesTest, FindsMemoryThatLiesInAFile) {
  const FileCopies all({&target, &source});
  const auto place = all.find(target.data() + 5, 10);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->offset, 5u);
  const auto other = all.find(source.data() + 7, 1);
  ASSERT_TRUE(other);
  EXPECT_NE(other->file, place->file);
  EXPECT_TRUE(all.find(target.data(), kBytes));
  EXPECT_FALSE(all.find(target.data() + kBytes - 1, 2)); // ends behind the file
  std::byte outside{};
  EXPECT_FALSE(all.find(&outside, 1));
  EXPECT_FALSE(FileCopies({}).find(target.data(), 1));
}

TEST_F(FileCopiesTest, CopiesFromFilesAndFromMemory) {
  const FileCopies all({&target, &source});
  ASSERT_EQ(all.copy(*all.find(target.data() + 100, 2'000'001), source.data() + 3, 2'000'001).message(), "");
  EXPECT_EQ(std::memcmp(target.data() + 100, source.data() + 3, 2'000'001), 0);
  EXPECT_EQ(target.data()[99], std::byte{0});
  EXPECT_EQ(target.data()[100 + 2'000'001], std::byte{0});
  // At the same offset in a block, where a file system may share blocks.
  ASSERT_EQ(all.copy(*all.find(target.data() + 99, 2'000'000), source.data() + 99, 2'000'000).message(), "");
  EXPECT_EQ(std::memcmp(target.data() + 99, source.data() + 99, 2'000'000), 0);
  EXPECT_EQ(target.data()[98], std::byte{0});
  const std::vector<std::byte> memory(5000, std::byte{9});
  ASSERT_EQ(all.copy(*all.find(target.data(), 5000), memory.data(), 5000).message(), "");
  EXPECT_EQ(std::memcmp(target.data(), memory.data(), 5000), 0);
}

TEST_F(FileCopiesTest, AFileThatCannotBeWrittenIsAnErrorWithItsPath) {
  const Result<MappedFile> readOnly = MappedFile::open(folder_ / "target");
  ASSERT_EQ(readOnly.status().message(), "");
  const FileCopies all({&*readOnly, &source});
  const auto place = all.find(readOnly->data(), 100);
  ASSERT_TRUE(place);
  const std::vector<std::byte> memory(100);
  for (const std::byte *from : {static_cast<const std::byte *>(source.data()), memory.data()})
    EXPECT_THAT(all.copy(*place, from, 100).message(),
                testing::AllOf(testing::HasSubstr("cannot write '"), testing::HasSubstr("/target'")));
}

TEST_F(FileCopiesTest, AFileThatWasReplacedIsNotWritten) {
  const std::string path = folder_ / "target";
  std::filesystem::rename(path, folder_ / "elsewhere");
  EXPECT_FALSE(FileCopies({&target}).find(target.data(), 1));
  ASSERT_EQ(MappedFile::create(path, kBytes).status().message(), "");
  EXPECT_FALSE(FileCopies({&target}).find(target.data(), 1));
}

TEST_F(FileCopiesTest, OpensAtMostHalfOfTheFilesThatTheProcessMayHave) {
  std::vector<MappedFile> many(200);
  std::vector<const MappedFile *> files;
  for (MappedFile &file : many) {
    Result<MappedFile> opened = MappedFile::open(folder_ / "source");
    ASSERT_EQ(opened.status().message(), "");
    file = std::move(*opened);
    files.push_back(&file);
  }
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit fewer{160, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &fewer), 0);
  const auto found = [&] {
    const FileCopies all(files);
    return std::count_if(many.begin(), many.end(),
                         [&](const MappedFile &file) { return all.find(file.data(), 1).has_value(); });
  };
  EXPECT_EQ(found(), 80);
  EXPECT_EQ(found(), 80); // the first ones were closed
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(found(), 200);
}

// A store to a mapping that cannot be written ends the process: so all of the target is written by system calls, also
// where other rows lie between its ranges, and where it is cast.
TEST_F(FileCopiesTest, RunsWriteRangesThatAreNotAdjacent) {
  struct Case {
    std::string layouts, target; // of a [256, 2048] and b [64, 2048]
    uint64_t item;
    std::function<uint64_t(uint64_t row, uint64_t column)> from; // the element of the source, or of fp32 values
  };
  const Case cases[] = {
      // Groups of 64 rows of a and 16 of b, of 8 KiB each.
      {"{ab: {interleave: {groups: 4, of: [a, b]}}}", "{layout: t, mesh: {}}", 4,
       [](uint64_t row, uint64_t column) {
         return (row % 80 < 64 ? row / 80 * 64 + row % 80 : 256 + row / 80 * 16 + row % 80 - 64) * 2048 + column;
       }},
      // Cast to bf16 in one range each, which is written in parts.
      {"{ab: {concat: [a, b]}}", "{layout: t, mesh: {}, dtype: bf16, convert: rne}", 2,
       [](uint64_t row, uint64_t column) { return row * 2048 + column; }},
      // The first case, cast to bf16: ranges of 256 and 64 KiB.
      {"{ab: {interleave: {groups: 4, of: [a, b]}}}", "{layout: t, mesh: {}, dtype: bf16, convert: rne}", 2,
       [](uint64_t row, uint64_t column) {
         return (row % 80 < 64 ? row / 80 * 64 + row % 80 : 256 + row / 80 * 16 + row % 80 - 64) * 2048 + column;
       }},
  };
  for (const Case &each : cases) {
    const std::string plan = folder_ / "plan";
    ASSERT_NO_FATAL_FAILURE(tests::compile("version: 1\n"
                                           "model: {dtype: fp32, tensors: {a: [256, 2048], b: [64, 2048]}, layouts: {"
                                           "s: {params: same}, t: {params: " +
                                               each.layouts +
                                               "}}}\n"
                                               "source: {layout: s, mesh: {}}\ntarget: " +
                                               each.target + "\n",
                                           plan));
    std::vector<float> values(320 * 2048); // exact in bf16
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i % 251) - 100;
    std::memcpy(source.data(), values.data(), values.size() * sizeof(float));
    reshard_options options = RESHARD_OPTIONS_INITIALIZER;
    options.threads = 2;
    reshard_executor *executor = nullptr;
    ASSERT_EQ(reshard_open(plan.c_str(), nullptr, 0, &options, &executor), RESHARD_OK);
    ASSERT_EQ(reshard_bind(executor, 0, 0, "a", source.data(), 256 * 8192), RESHARD_OK);
    ASSERT_EQ(reshard_bind(executor, 0, 0, "b", source.data() + 256 * 8192, 64 * 8192), RESHARD_OK);
    ASSERT_EQ(reshard_bind(executor, 1, 0, "ab", target.data(), 320 * 2048 * each.item), RESHARD_OK);
    ASSERT_EQ(reshard_prepare(executor), RESHARD_OK) << reshard_error(executor);
    ASSERT_EQ(copyThroughFiles(*executor, {&target, &source}).message(), "");
    ASSERT_EQ(::mprotect(target.data(), kBytes, PROT_READ), 0);
    ASSERT_EQ(reshard_run(executor, 0, nullptr), RESHARD_OK) << reshard_error(executor);
    ASSERT_EQ(::mprotect(target.data(), kBytes, PROT_READ | PROT_WRITE), 0);
    reshard_close(executor);
    for (uint64_t row = 0; row < 320; ++row)
      for (uint64_t column = 0; column < 2048; ++column) {
        uint32_t bits = 0, wanted = 0;
        std::memcpy(reinterpret_cast<std::byte *>(&bits) + (4 - each.item),
                    target.data() + (row * 2048 + column) * each.item, each.item);
        std::memcpy(&wanted, &values[each.from(row, column)], 4);
        ASSERT_EQ(bits, wanted) << row << " " << column;
      }
  }
}
