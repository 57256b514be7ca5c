// SPDX-License-Identifier: Apache-2.0
// Atomic output files, mapped files and syncFolder(): contents, links, devices, FIFOs, failures.

#include "support/atomic_file.h"
#include "support/mapped_file.h"
#include "support/sync_folder.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

using namespace reshard;
namespace fs = std::filesystem;

namespace {

class Files : public testing::Test {
protected:
  std::string path(const char *name) const { return folder_ / name; }
  std::string content(const char *name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const tests::TemporaryFolder folder_;
};

TEST_F(Files, AreReplacedAsAWhole) {
  EXPECT_TRUE(writeFile(path("a"), "one").ok());
  Result<AtomicFile> file = AtomicFile::create(path("a"));
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file->write("two", 3, 2).ok());
  EXPECT_EQ(content("a"), "one");
  EXPECT_TRUE(file->commit(6).ok());
  EXPECT_FALSE(file->open());
  EXPECT_EQ(content("a"), std::string("\0\0two\0", 6));
  EXPECT_EQ(folder_.entries(), 1u);
}

TEST_F(Files, ThatAreNotCommittedAreRemoved) {
  {
    const Result<AtomicFile> file = AtomicFile::create(path("a"));
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(folder_.entries(), 1u);
  }
  EXPECT_EQ(folder_.entries(), 0u);
  fs::create_directory(path("b"));
  EXPECT_EQ(writeFile(path("b"), "x").message(), "cannot write '" + path("b") + "': Is a directory");
  EXPECT_EQ(folder_.entries(), 1u);
  EXPECT_EQ(writeFile(path("none/x"), "x").message(),
            "cannot create '" + path("none/x") + "': No such file or directory");
}

TEST_F(Files, LinksAreKept) {
  fs::create_directory(path("b"));
  fs::create_symlink("b/file", path("link"));
  EXPECT_TRUE(writeFile(path("link"), "text").ok());
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(content("b/file"), "text");
  EXPECT_TRUE(sameFile(path("link"), path("b/file")));
  EXPECT_FALSE(sameFile(path("link"), path("none")));
}

TEST_F(Files, DevicesAndFifosAreWrittenTo) {
  EXPECT_TRUE(outputAt("/dev/null").direct);
  EXPECT_TRUE(writeFile("/dev/null", "x").ok());
  EXPECT_EQ(writeFile("/dev/full", "x").message(), "cannot write '/dev/full': No space left on device");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  std::string read;
  std::thread reader([&] { read = content("fifo"); });
  EXPECT_TRUE(writeFile(path("fifo"), "through").ok());
  reader.join();
  EXPECT_EQ(read, "through");
  EXPECT_TRUE(fs::is_fifo(path("fifo")));
}

TEST_F(Files, AreMapped) {
  ASSERT_TRUE(writeFile(path("a"), "content").ok());
  Result<MappedFile> file = MappedFile::open(path("a"));
  ASSERT_TRUE(file.ok());
  ASSERT_EQ(file->bytes(), 7u);
  EXPECT_EQ(std::memcmp(file->data(), "content", 7), 0);
  file->readOnDemand();
  file->willNeed(3, 4);
  const MappedFile moved = std::move(*file);
  EXPECT_EQ(std::memcmp(moved.data(), "content", 7), 0);
}

TEST_F(Files, ThatAreEmptyHaveNoData) {
  ASSERT_TRUE(writeFile(path("a"), "").ok());
  const Result<MappedFile> file = MappedFile::open(path("a"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->bytes(), 0u);
  EXPECT_EQ(file->data(), nullptr);
  file->release();
}

TEST_F(Files, ThatCannotBeMappedAreErrors) {
  EXPECT_EQ(MappedFile::open(path("a")).status().message(),
            "cannot open '" + path("a") + "': No such file or directory");
  EXPECT_EQ(MappedFile::open(folder_.path()).status().message(), "'" + folder_.path() + "' is not a regular file");
  EXPECT_EQ(MappedFile::open("/dev/null").status().message(), "'/dev/null' is not a regular file");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(MappedFile::open(path("fifo")).status().message(), "'" + path("fifo") + "' is not a regular file");
}

TEST_F(Files, AreCreatedAndMappedForWriting) {
  {
    Result<MappedFile> file = MappedFile::create(path("a"), 5000);
    ASSERT_TRUE(file.ok());
    EXPECT_TRUE(std::all_of(file->data(), file->data() + 5000, [](std::byte b) { return b == std::byte{0}; }));
    std::memcpy(file->data(), "new", 3);
    file->release();
    EXPECT_EQ(std::memcmp(file->data(), "new", 3), 0);
    EXPECT_TRUE(file->unchanged().ok());
  }
  EXPECT_EQ(content("a"), "new" + std::string(4997, '\0'));
  EXPECT_EQ(MappedFile::create(path("a"), 5).status().message(), "cannot create '" + path("a") + "': File exists");
  Result<MappedFile> again = MappedFile::open(path("a"), MappedFile::Access::write);
  ASSERT_TRUE(again.ok());
  again->data()[0] = std::byte{'N'};
  EXPECT_EQ(content("a").substr(0, 3), "New");
}

TEST_F(Files, ThatChangeWhileTheyAreMappedAreErrors) {
  ASSERT_TRUE(writeFile(path("a"), "content").ok());
  const Result<MappedFile> file = MappedFile::open(path("a"));
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file->unchanged().ok());
  fs::last_write_time(path("a"), fs::last_write_time(path("a")) + std::chrono::seconds(2));
  EXPECT_EQ(file->unchanged().message(), "'" + path("a") + "' changed during the run: its modification time differs");
  fs::resize_file(path("a"), 3);
  EXPECT_EQ(file->unchanged().message(),
            "'" + path("a") + "' changed during the run: its size was 7 bytes and is now 3 bytes");
  ASSERT_TRUE(writeFile(path("a"), "replaced").ok());
  EXPECT_TRUE(file->unchanged().ok()); // the mapping is of the old file
}

TEST_F(Files, OfAFolderThatIsSyncedMayBeRenamedMeanwhile) {
  for (int n = 0; n < 20; ++n) // syncing these takes a while after the folder has been listed
    ASSERT_TRUE(writeFile(path(("file" + std::to_string(n)).c_str()), "x").ok());
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) {
      std::ofstream(path("a.new")) << "x";
      fs::rename(path("a.new"), path("a"));
    }
  });
  for (int n = 0; n < 50; ++n) {
    const Status status = syncFolder(folder_.path());
    EXPECT_TRUE(status.ok()) << status.message();
  }
  done = true;
  other.join();
}

} // namespace
