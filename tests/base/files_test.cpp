// SPDX-License-Identifier: Apache-2.0
// Atomic output files, mapped files and syncFolder(): contents, links, devices, FIFOs, failures.

#include "base/atomic_file.h"
#include "base/input_file.h"
#include "base/mapped_file.h"
#include "tests/lib/folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fcntl.h>
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
    const int nameless = ::open(folder_.path().c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0666);
    const Result<AtomicFile> file = AtomicFile::create(path("a"));
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(folder_.entries(), nameless < 0 ? 1u : 0u) << "a process that is killed leaves a file behind";
    ::close(nameless);
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

TEST_F(Files, AreReadInPieces) {
  std::string text;
  for (int i = 0; i < 20000; ++i)
    text += static_cast<char>('a' + i % 26);
  ASSERT_TRUE(writeFile(path("a"), text).ok());
  const Result<InputFile> file = InputFile::open(path("a"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->bytes(), text.size());
  EXPECT_EQ(*file->read(3, 5), text.substr(3, 5));
  FilePart part(*file, 100, 10000);
  for (const auto &[at, count] : {std::pair<size_t, size_t>{0, 10}, {4000, 200}, {9990, 10}, {0, 10000}, {17, 1}})
    EXPECT_EQ(*part.read(at, count), text.substr(100 + at, count)) << at;
  EXPECT_EQ(*part.read(9990, 100), text.substr(10090, 10)); // fewer
  EXPECT_EQ(*part.read(UINT64_MAX, UINT64_MAX), "");
  EXPECT_EQ(*readWhole(path("a"), text.size()), text);
  EXPECT_EQ(readWhole(path("a"), 100).status().message(),
            "'" + path("a") + "': too large: 20000 bytes, expected at most 100");
}

TEST_F(Files, ThatBecomeShorterAreErrors) {
  ASSERT_TRUE(writeFile(path("a"), std::string(20000, 'a')).ok());
  const Result<InputFile> file = InputFile::open(path("a"));
  ASSERT_TRUE(file.ok());
  FilePart part(*file, 0, 20000);
  ASSERT_TRUE(part.read(0, 10).ok());
  ASSERT_EQ(::truncate(path("a").c_str(), 5000), 0);
  EXPECT_EQ(*part.read(0, 10), "aaaaaaaaaa");
  EXPECT_EQ(part.read(10000, 10).status().message(),
            "'" + path("a") + "' became shorter while it was read: it had 20000 bytes and now ends at byte 10000");
  EXPECT_EQ(file->read(0, 20000).status().message(),
            "'" + path("a") + "' became shorter while it was read: it had 20000 bytes and now ends at byte 5000");
}

TEST_F(Files, ThatAreNoRegularFilesAreErrors) {
  EXPECT_FALSE(hasEntry(path("a")));
  EXPECT_EQ(InputFile::open(path("a")).status().message(),
            "cannot open '" + path("a") + "': No such file or directory");
  EXPECT_EQ(InputFile::open(folder_.path()).status().message(), "'" + folder_.path() + "' is not a regular file");
  EXPECT_EQ(InputFile::open("/dev/zero").status().message(), "'/dev/zero' is not a regular file");
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_EQ(InputFile::open(path("fifo")).status().message(), "'" + path("fifo") + "' is not a regular file");
  ASSERT_EQ(::symlink("loop", path("loop").c_str()), 0);
  ASSERT_EQ(::symlink("nowhere", path("broken").c_str()), 0);
  EXPECT_TRUE(hasEntry(path("loop")) && hasEntry(path("broken")) && hasEntry(path("fifo")));
  EXPECT_EQ(InputFile::open(path("loop")).status().message(),
            "cannot open '" + path("loop") + "': Too many levels of symbolic links");
}

TEST_F(Files, AreComparedWithAnEarlierStatus) {
  ASSERT_TRUE(writeFile(path("a"), "content").ok());
  const Result<InputFile> before = InputFile::open(path("a"));
  ASSERT_TRUE(before.ok());
  EXPECT_EQ(checkSame(before->status(), *MappedFile::open(path("a"))).message(), "");
  ASSERT_TRUE(writeFile(path("a"), "content").ok()); // another file
  EXPECT_EQ(checkSame(before->status(), *MappedFile::open(path("a"))).message(),
            "'" + path("a") + "' changed while it was opened, expected a file that nobody writes to");
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
