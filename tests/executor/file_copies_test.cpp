// SPDX-License-Identifier: Apache-2.0
// Copies into mapped files: which memory is a file's, copies from file to file and from memory, and their errors.

#include "executor/chunked_copies.h"
#include "executor/file_copies.h"
#include "support/mapped_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

using namespace reshard;

namespace {

constexpr uint64_t kBytes = 3 << 20;

class FileCopiesTest : public testing::Test {
protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "file-copies-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    for (MappedFile *file : {&source, &target}) {
      Result<MappedFile> made = MappedFile::create(folder_ + (file == &source ? "/source" : "/target"), kBytes);
      ASSERT_EQ(made.status().message(), "");
      *file = std::move(*made);
      ASSERT_GE(file->descriptor(), 0);
    }
    for (uint64_t i = 0; i < kBytes; ++i)
      source.data()[i] = static_cast<std::byte>(i * 7 + i / 256);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  FileCopies files() const {
    return FileCopies(
        {{target.data(), target.bytes(), target.descriptor()}, {source.data(), source.bytes(), source.descriptor()}});
  }

  std::string folder_;
  MappedFile source, target;
};

} // namespace

TEST_F(FileCopiesTest, FindsMemoryThatLiesInAFile) {
  const FileCopies all = files();
  const auto place = all.find(target.data() + 5, 10);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->file, target.descriptor());
  EXPECT_EQ(place->offset, 5u);
  EXPECT_TRUE(all.find(target.data(), kBytes));
  EXPECT_FALSE(all.find(target.data() + kBytes - 1, 2)); // ends behind the file
  std::byte other{};
  EXPECT_FALSE(all.find(&other, 1));
  EXPECT_FALSE(FileCopies({}).find(target.data(), 1));
}

TEST_F(FileCopiesTest, CopiesFromFilesAndFromMemory) {
  const FileCopies all = files();
  ASSERT_EQ(all.copy(*all.find(target.data() + 100, 2'000'001), source.data() + 3, 2'000'001).message(), "");
  EXPECT_EQ(std::memcmp(target.data() + 100, source.data() + 3, 2'000'001), 0);
  EXPECT_EQ(target.data()[99], std::byte{0});
  EXPECT_EQ(target.data()[100 + 2'000'001], std::byte{0});
  const std::vector<std::byte> memory(5000, std::byte{9});
  ASSERT_EQ(all.copy(*all.find(target.data(), 5000), memory.data(), 5000).message(), "");
  EXPECT_EQ(std::memcmp(target.data(), memory.data(), 5000), 0);
}

TEST_F(FileCopiesTest, AFileThatCannotBeWrittenIsAnErrorWithItsPath) {
  const int file = ::open((folder_ + "/target").c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_GE(file, 0);
  const FileCopies all({{target.data(), kBytes, file}, {source.data(), kBytes, source.descriptor()}});
  for (const std::byte *from :
       {static_cast<const std::byte *>(source.data()), reinterpret_cast<const std::byte *>(this)})
    EXPECT_THAT(all.copy(*all.find(target.data(), 100), from, 100).message(),
                testing::AllOf(testing::HasSubstr("cannot write '"), testing::HasSubstr("/target'")));
  ::close(file);
}

TEST_F(FileCopiesTest, ManyFilesKeepTheirMappingsOnly) {
  std::vector<MappedFile> many;
  const auto open = [&] {
    return std::count_if(many.begin(), many.end(), [](const auto &f) { return f.descriptor() >= 0; });
  };
  const long limit = ::sysconf(_SC_OPEN_MAX);
  if (limit > 100'000)
    GTEST_SKIP() << "this process may have " << limit << " open files";
  for (long i = 0; i < limit / 2 + 10; ++i) {
    Result<MappedFile> file = MappedFile::open(folder_ + "/source");
    ASSERT_EQ(file.status().message(), "") << i;
    many.push_back(std::move(*file));
  }
  EXPECT_LT(open(), limit / 2);
  EXPECT_EQ(many.back().descriptor(), -1);
  many.clear();
  Result<MappedFile> again = MappedFile::open(folder_ + "/source");
  ASSERT_EQ(again.status().message(), "");
  EXPECT_GE(again->descriptor(), 0); // descriptors are given back
}
