// SPDX-License-Identifier: Apache-2.0
// Container and ContainerWriter: a round trip gives the same bytes, and each kind of incomplete, altered, foreign or
// newer file has its own error.

#include "tests/lib/threads.h"
#include "tests/schema/digests.h"
#include "tests/schema/support.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

using namespace reshard;
using namespace reshard::schema;
using namespace reshard::test;

namespace {

std::string text(Bytes bytes) { return {reinterpret_cast<const char *>(bytes.data()), bytes.size()}; }

std::unique_ptr<Container> opened(const std::string &path) {
  std::unique_ptr<Container> container;
  if (const Status status = Container::open(path, container); !status.ok())
    throw std::runtime_error(status.message());
  return container;
}

std::string segmentText(uint32_t rank) { return "segment " + std::to_string(rank) + std::string(rank * 37 % 200, 'x'); }

std::vector<std::string> segmentTexts(uint32_t count) {
  std::vector<std::string> texts;
  for (uint32_t rank = 0; rank < count; ++rank)
    texts.push_back(segmentText(rank));
  return texts;
}

/// Opens a plan and reads every segment. Returns the first error, without the path.
std::string readContainer(const std::string &path) {
  std::unique_ptr<Container> container;
  Status status = Container::open(path, container);
  for (uint32_t rank = 0; status.ok() && rank < container->segments(); ++rank) {
    SegmentBytes bytes;
    status = container->segment(rank, bytes);
  }
  const std::string &error = status.message(), prefix = "'" + path + "': ";
  return error.starts_with(prefix) ? error.substr(prefix.size()) : error;
}

/// Whether an error begins so, and goes on.
bool saysMoreThan(const std::string &error, const std::string &beginning) {
  return error.starts_with(beginning) && error.size() > beginning.size();
}

template <class T> std::string with(std::string file, size_t offset, T value) {
  std::memcpy(file.data() + offset, &value, sizeof value);
  return file;
}

/// As `with`, and updates the header's digest, as a writer of another version would.
template <class T> std::string withDigest(const std::string &file, size_t offset, T value) {
  std::string altered = with(file, offset, value);
  digest(altered, 112, 0, 112);
  return altered;
}

} // namespace

TEST(Container, RoundTrip) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  for (const uint32_t count : {1u, 2u, 7u, 300u}) {
    writeContainer(path, "the manifest", segmentTexts(count));
    EXPECT_EQ(folder.entries(), 1u) << "a temporary file remains";
    const std::unique_ptr<Container> container = opened(path);
    EXPECT_EQ(text(container->manifest()), "the manifest");
    ASSERT_EQ(container->segments(), count);
    EXPECT_EQ(container->digest().size(), 32u);
    EXPECT_EQ(container->bytes(), static_cast<int64_t>(readFile(path).size()));
    for (uint32_t rank = 0; rank < count; ++rank) {
      SegmentBytes bytes;
      ASSERT_EQ(container->segment(rank, bytes).message(), "");
      EXPECT_EQ(text(bytes), segmentText(rank));
      EXPECT_EQ(readFile(path).find(segmentText(rank)) % 64, 0u);
      EXPECT_EQ(container->segmentBytes(rank), bytes.size);
      EXPECT_EQ(container->segmentDigest(rank).size(), 16u);
    }
    SegmentBytes bytes;
    EXPECT_EQ(container->segment(count, bytes).message(), "'" + path + "': the plan has no rank " +
                                                              std::to_string(count) + ", expected 0 to " +
                                                              std::to_string(count - 1));
  }
}

/// The writer collects small segments and writes large ones directly.
TEST(Container, SegmentsOfAnySizeAreInTheirOrder) {
  const TemporaryFolder folder;
  std::vector<std::string> segments;
  for (const size_t bytes :
       {1, 700'000, 400'000, 3, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 64, 5'000'000, 2'000'000, 9})
    segments.emplace_back(bytes, static_cast<char>('a' + segments.size()));
  writeContainer(folder / "plan", "the manifest", segments);
  const std::unique_ptr<Container> container = opened(folder / "plan");
  for (uint32_t rank = 0; rank < segments.size(); ++rank) {
    SegmentBytes bytes;
    ASSERT_EQ(container->segment(rank, bytes).message(), "");
    EXPECT_TRUE(text(bytes) == segments[rank]) << rank;
  }
}

TEST(Container, DigestDependsOnEverything) {
  const TemporaryFolder folder;
  auto digest = [&](const std::string &manifest, const std::vector<std::string> &segments) {
    writeContainer(folder / "plan", manifest, segments);
    return opened(folder / "plan")->digest();
  };
  const std::string first = digest("manifest", {"a", "b"});
  EXPECT_EQ(digest("manifest", {"a", "b"}), first);
  EXPECT_NE(digest("manifesu", {"a", "b"}), first);
  EXPECT_NE(digest("manifest", {"b", "a"}), first);
  EXPECT_NE(digest("manifest", {"a", "b", "c"}), first);
  EXPECT_NE(digest("manifest", {"a", "bb"}), first);
}

TEST(Container, Writer) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  {
    ContainerWriter writer;
    EXPECT_EQ(writer.create(path, 0).message(), "cannot write '" + path + "': found 0 ranks, expected 1 to 1048576");
  }
  {
    ContainerWriter writer;
    EXPECT_EQ(writer.create(folder / "no/plan", 1).message(),
              "cannot create '" + folder / "no/plan" + "': No such file or directory");
  }
  writeFile(path, "old content");
  {
    ContainerWriter writer;
    ASSERT_EQ(writer.create(path, 2).message(), "");
    EXPECT_EQ(writer.addSegment(bytesOf("early")).message(),
              "cannot write '" + path + "': found segment 1, expected 2 segments, after the manifest");
    ASSERT_EQ(writer.addManifest(bytesOf("m")).message(), "");
    EXPECT_EQ(writer.addManifest(bytesOf("m")).message(),
              "cannot write '" + path + "': addManifest must be called once, after create");
    ASSERT_EQ(writer.addSegment(bytesOf("a")).message(), "");
    EXPECT_EQ(writer.finish().message(), "cannot write '" + path + "': found 1 segments, expected 2 and a manifest");
    ASSERT_EQ(writer.addSegment(bytesOf("b")).message(), "");
    EXPECT_EQ(writer.addSegment(bytesOf("c")).message(),
              "cannot write '" + path + "': found segment 3, expected 2 segments, after the manifest");
  } // destroyed before finish
  EXPECT_EQ(readFile(path), "old content");
  EXPECT_EQ(folder.entries(), 1u) << "a temporary file remains";
  {
    ContainerWriter writer;
    ASSERT_EQ(writer.create(path, 1).message(), "");
    ASSERT_EQ(writer.addManifest(bytesOf("m")).message(), "");
    const Bytes huge(reinterpret_cast<const std::byte *>(this),
                     size_t{1} << 30); // its size is checked before its bytes
    EXPECT_EQ(writer.addSegment(huge).message(),
              "cannot write '" + path +
                  "': the segment of rank 0 has 1073741824 bytes, expected fewer than 1073741824");
    EXPECT_EQ(folder.entries(), 1u);
  }
  std::filesystem::create_directory(folder / "directory");
  {
    ContainerWriter writer;
    ASSERT_EQ(writer.create(folder / "directory", 1).message(), "");
    ASSERT_EQ(writer.addManifest(bytesOf("m")).message(), "");
    ASSERT_EQ(writer.addSegment(bytesOf("a")).message(), "");
    EXPECT_EQ(writer.finish().message(), "cannot write '" + folder / "directory" + "': Is a directory");
  }
  EXPECT_EQ(folder.entries(), 2u);
}

TEST(Container, Refusals) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  EXPECT_EQ(readContainer(path), "cannot open '" + path + "': No such file or directory");
  EXPECT_EQ(readContainer(folder / ""), "'" + (folder / "") + "' is not a regular file");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_EQ(readContainer(folder / "pipe"), "'" + (folder / "pipe") + "' is not a regular file");

  auto open = [&](const std::string &content) {
    writeFile(path, content);
    return readContainer(path);
  };
  writeContainer(path, "manifest", {"first", "second"});
  const std::string good = readFile(path);
  ASSERT_EQ(good.size(), 384u); // header 128, manifest 64, index 2 × 32, segments 64 each
  EXPECT_EQ(open(good), "");

  EXPECT_EQ(open(""), "not a plan: the file is empty");
  EXPECT_EQ(open("{\"safetensors\": 1}"), "not a plan: it does not begin with the magic bytes 'RESHARD\\n'");
  EXPECT_EQ(open(with(good, 7, '\r')), "not a plan: it does not begin with the magic bytes 'RESHARD\\n'");
  EXPECT_EQ(open("RESHARD\n"), "truncated: found 8 bytes, expected 128 or more");
  EXPECT_EQ(open(good + "\n"), "damaged: found 385 bytes, expected 384");

  EXPECT_EQ(open(with(good, 8, uint32_t{2})), "written by a newer compiler: found container version 2, expected 1");
  EXPECT_EQ(open(with(good, 8, uint32_t{2}).substr(0, 16)),
            "written by a newer compiler: found container version 2, expected 1");
  EXPECT_EQ(open(with(good, 8, uint32_t{0})),
            "damaged: found container version 0 with a header of 128 bytes, expected version 1 with 128");
  EXPECT_EQ(open(with(good, 12, uint32_t{64})),
            "damaged: found container version 1 with a header of 64 bytes, expected version 1 with 128");
  EXPECT_EQ(open(with(good, 16, uint64_t{4})), "damaged: the header does not match its digest");
  EXPECT_EQ(open(withDigest(good, 16, uint64_t{0x500001})),
            "written by a newer compiler: found unknown feature bits 0x500000, update reshard to read it");
  EXPECT_EQ(open(withDigest(good, 24, uint64_t{385})), "truncated: found 384 bytes, expected 385");

  const std::string outside = "damaged: the header has offsets or sizes that do not fit the file";
  for (const uint32_t segments : {0u, 1000u, 1u << 21, UINT32_MAX})
    EXPECT_EQ(open(withDigest(good, 32, segments)), outside) << segments;
  EXPECT_EQ(open(withDigest(good, 36, uint32_t{1})), outside);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{136}, uint64_t{200}, uint64_t{384}, UINT64_MAX})
    for (const size_t field : {40, 48})
      EXPECT_EQ(open(withDigest(good, field, offset)), outside) << offset << " at " << field;
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{65}, uint64_t{257}, uint64_t{1} << 30, UINT64_MAX, UINT64_MAX - 63})
    EXPECT_EQ(open(withDigest(good, 56, bytes)), outside) << bytes;

  EXPECT_EQ(open(with(good, 128, 'M')), "damaged: the manifest does not match its digest");
  EXPECT_EQ(open(with(good, 192, uint64_t{0})), "damaged: the index does not match its digest");
  EXPECT_EQ(open(with(good, 150, 'x')), "damaged: the padding around the index is not zero");
  EXPECT_EQ(open(with(good, 256, 'F')), "damaged: the segment of rank 0 does not match its digest");
  EXPECT_EQ(open(with(good, 320, 'S')), "damaged: the segment of rank 1 does not match its digest");
  EXPECT_EQ(open(with(good, 383, 'x')), "damaged: the padding after the segment of rank 1 is not zero");
}

TEST(Container, IndexRefusals) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  writeContainer(path, "manifest", {"first", "second"});
  const std::string good = readFile(path);
  auto open = [&](size_t offset, uint64_t value) { // alters the index and updates the digests
    std::string file = with(good, offset, value);
    digest(file, 80, 192, 64);
    digest(file, 112, 0, 112);
    writeFile(path, file);
    return readContainer(path);
  };
  const std::string misplaced = "does not follow the one before it, or does not fit the file";
  for (const uint64_t offset : {uint64_t{0}, uint64_t{257}, uint64_t{320}, uint64_t{1} << 40, UINT64_MAX})
    EXPECT_EQ(open(192, offset), "damaged: the segment of rank 0 " + misplaced) << offset;
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{129}, uint64_t{1} << 30, UINT64_MAX, UINT64_MAX - 63})
    EXPECT_EQ(open(200, bytes), "damaged: the segment of rank 0 " + misplaced) << bytes;
  EXPECT_EQ(open(200, 65), "damaged: the segment of rank 1 " + misplaced);  // overlaps the segment of rank 1
  EXPECT_EQ(open(224, 256), "damaged: the segment of rank 1 " + misplaced); // the same segment twice
  EXPECT_EQ(open(232, 65), "damaged: the segment of rank 1 " + misplaced);
}

TEST(Container, EveryTruncationIsRefused) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  writeContainer(path, "manifest", segmentTexts(9));
  const std::string good = readFile(path);
  for (size_t length = 0; length < good.size(); ++length) {
    writeFile(path, good.substr(0, length));
    const std::string error = readContainer(path);
    if (length == 0)
      EXPECT_EQ(error, "not a plan: the file is empty");
    else if (length < 128)
      EXPECT_EQ(error, "truncated: found " + std::to_string(length) + " bytes, expected 128 or more");
    else
      EXPECT_EQ(error,
                "truncated: found " + std::to_string(length) + " bytes, expected " + std::to_string(good.size()));
  }
}

TEST(Container, EveryFlippedBitIsRefused) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  for (const bool compressed : {false, true}) {
    writeContainer(path, "manifest", compressed ? std::vector{std::string(500, 'a') + "end"} : segmentTexts(5),
                   compressed);
    std::string file = readFile(path);
    ASSERT_EQ(readContainer(path), "");
    ASSERT_TRUE(!compressed || file.size() == 320) << "one compressed segment of at most 64 bytes";
    for (size_t at = 0; at < file.size(); ++at)
      for (int bit = 0; bit < 8; ++bit) {
        file[at] = static_cast<char>(file[at] ^ 1 << bit);
        writeFile(path, file);
        EXPECT_NE(readContainer(path), "") << "bit " << bit << " of byte " << at;
        file[at] = static_cast<char>(file[at] ^ 1 << bit);
      }
  }
}

TEST(Container, CompressedSegments) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  std::string rows; // as steps of a plan: numbers that count up
  for (uint64_t row = 0; row < 20'000; ++row)
    rows.append(reinterpret_cast<const char *>(&row), sizeof row);
  const std::vector<std::string> segments = {rows, "short", std::string(1 << 20, 'x'), rows + "end"};
  writeContainer(path, "manifest", segments, true);
  const std::unique_ptr<Container> container = opened(path);
  EXPECT_EQ(compress(bytesOf(segments[1]))->segmentBytes, 0u); // a frame would be larger
  EXPECT_EQ(compress(bytesOf(segments[2]))->segmentBytes, 0u); // or smaller than 1 / kMaxCompression
  tests::onThreads(4, [&](uint32_t) {                          // at the same time
    for (uint32_t rank = 0; rank < segments.size(); ++rank) {
      SegmentBytes bytes;
      EXPECT_EQ(container->segment(rank, bytes).message(), "");
      EXPECT_TRUE(text(bytes) == segments[rank]) << rank;
    }
  });
  SegmentBytes once, again;
  ASSERT_EQ(container->segment(3, once).message(), "");
  ASSERT_EQ(container->segment(3, again).message(), "");
  EXPECT_EQ(once.memory, again.memory); // readers at the same time share it

  writeContainer(folder / "plain", "manifest", segments);
  const std::unique_ptr<Container> plain = opened(folder / "plain"); // compression does not change a segment's digest
  for (uint32_t rank = 0; rank < segments.size(); ++rank) {
    EXPECT_EQ(plain->segmentDigest(rank), container->segmentDigest(rank));
    EXPECT_EQ(plain->segmentBytes(rank), container->segmentBytes(rank));
  }
  EXPECT_LT(container->bytes() + static_cast<int64_t>(rows.size()), plain->bytes()); // of two segments of rows
  EXPECT_EQ(plain->decompressedBytes(), plain->bytes());
  EXPECT_NEAR(static_cast<double>(container->decompressedBytes()), static_cast<double>(plain->bytes()), 256); // padding

  writeContainer(path, "manifest", {"short", "other"}, true); // without a compressed segment it has no feature bit
  writeContainer(folder / "plain", "manifest", {"short", "other"});
  EXPECT_EQ(readFile(path), readFile(folder / "plain"));
}

TEST(Container, CompressedRefusals) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan", segment = std::string(500, 'a') + "end";
  writeContainer(path, "manifest", {segment}, true);
  const std::string good = readFile(path);
  const uint64_t at = 256; // of the segment: after the header, the manifest and an index of 32 bytes at 192
  uint32_t stored;
  std::memcpy(&stored, good.data() + 200, sizeof stored);
  auto open = [&](std::string file) { // updates the digests
    digest(file, 80, 192, 32);
    digest(file, 112, 0, 112);
    writeFile(path, file);
    return readContainer(path);
  };
  const auto impossible = [&](uint32_t bytes) {
    return "damaged: the index has impossible sizes for the compressed segment of rank 0: " + std::to_string(stored) +
           " bytes in the file for " + std::to_string(bytes);
  };
  for (const uint32_t bytes : {1u, stored, stored * 64 + 1, 1u << 30, UINT32_MAX})
    EXPECT_EQ(open(with(good, 204, bytes)), impossible(bytes));
  EXPECT_EQ(open(with(good, 16, uint64_t{0})),
            "damaged: the segment of rank 0 is compressed, but the plan does not have that feature");
  const std::string where = "the compressed segment of rank 0: damaged: ";
  for (const uint32_t bytes : {400u, 600u})
    EXPECT_TRUE(saysMoreThan(open(with(good, 204, bytes)), where)) << bytes;
  std::string other = with(good, at + 16 + 6, 'b'); // another frame with its digest
  digest(other, at, at + 16, stored - 16);
  EXPECT_TRUE(saysMoreThan(open(other), where));
  EXPECT_EQ(open(with(good, at, 'x')), where + "it does not match its digest");
  std::string renamed = with(good, 208, 'x'); // the digest of the segment
  EXPECT_EQ(open(renamed), where + "the segment does not match its digest");
}

/// A plan that another program writes in place (cp) or truncates: what has been read stays, what has not is an error.
TEST(Container, ThatChangesWhileItIsOpen) {
  const TemporaryFolder folder;
  const std::string path = folder / "plan", large(300'000, 'a'), kept = std::string(100'000, 'b') + "end";
  for (const bool compressed : {false, true})
    for (const char *change : {"truncated", "emptied", "overwritten", "damaged"}) {
      SCOPED_TRACE(std::string(change) + (compressed ? ", compressed" : ""));
      writeContainer(path, large, {kept, large + "end"}, compressed);
      std::filesystem::last_write_time(path, std::filesystem::file_time_type() + std::chrono::seconds(1));
      const std::string size = std::to_string(readFile(path).size());
      std::string now;
      if (change == std::string("truncated"))
        now = readFile(path).substr(0, 5000);
      else if (change == std::string("overwritten"))
        now = std::string(500'000, 'x');
      else if (change == std::string("damaged")) // the same size
        now = readFile(path).substr(0, 300'500) + std::string(std::stoull(size) - 300'500, 'x');
      std::unique_ptr<Container> container = opened(path);
      SegmentBytes first, other;
      ASSERT_EQ(container->segment(0, first).message(), "");
      std::ofstream(path, std::ios::binary | std::ios::trunc) << now;
      EXPECT_EQ(
          container->segment(1, other).message(),
          "'" + path + "': changed while it was open: found " + std::to_string(now.size()) + " bytes, expected the " +
              size +
              " bytes that it had; replace a plan by renaming a new file (mv), not by writing to the old one (cp)");
      EXPECT_TRUE(text(first) == kept);
      SegmentBytes again;
      EXPECT_EQ(container->segment(0, again).message(), ""); // a reader keeps it
      EXPECT_TRUE(text(container->manifest()) == large);
      EXPECT_EQ(container->segments(), 2u);
      EXPECT_EQ(container->segmentBytes(1), large.size() + 3);
      container.reset();
      EXPECT_TRUE(text(first) == kept) << "a segment needs its plan";
    }
  writeContainer(path, large, {kept, large + "end"}); // renamed to the path: the open file is another one
  const std::unique_ptr<Container> container = opened(path);
  writeContainer(path, "manifest", {"other"});
  SegmentBytes second;
  EXPECT_EQ(container->segment(1, second).message(), "");
  EXPECT_TRUE(text(second) == large + "end");
}

// A rank of a large plan reads only its own segment, the manifest and the index.
TEST(Container, ReadsOneSegment) {
  constexpr uint32_t kRanks = 3072;
  constexpr size_t kSegment = 16 << 10;
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const TemporaryFolder folder;
  const std::string path = folder / "plan";
  const std::string manifest(200'000, 'm');
  std::vector<std::string> segments(kRanks, std::string(kSegment, 's'));
  writeContainer(path, manifest, segments);

  const int file = ::open(path.c_str(), O_RDONLY);
  ASSERT_GE(file, 0);
  const size_t bytes = std::filesystem::file_size(path), pages = (bytes + page - 1) / page;
  auto residentPages = [&] { // mincore() does not load pages
    void *map = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, 0);
    std::vector<unsigned char> in(pages);
    EXPECT_EQ(::mincore(map, bytes, in.data()), 0);
    ::munmap(map, bytes);
    size_t count = 0;
    for (const unsigned char each : in)
      count += each & 1;
    return count;
  };
  ASSERT_EQ(::fsync(file), 0);
  ASSERT_EQ(::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED), 0);
  const size_t before = residentPages();
  if (before > 0)
    GTEST_SKIP() << before << " pages stay in memory: the file system of " << path << " cannot drop them";

  const size_t front = 128 + manifest.size() + kRanks * 32; // header, manifest, index
  const std::unique_ptr<Container> container = opened(path);
  const size_t afterOpen = residentPages();
  SegmentBytes segment;
  ASSERT_EQ(container->segment(1500, segment).message(), "");
  EXPECT_EQ(text(segment), segments[1500]);
  const size_t afterSegment = residentPages();
  ::close(file);
  EXPECT_GE(afterOpen, front / page);
  EXPECT_LE(afterOpen, front / page + 3) << "of " << pages << " pages";
  EXPECT_GE(afterSegment - afterOpen, kSegment / page);
  EXPECT_LE(afterSegment - afterOpen, kSegment / page + 2) << "of " << pages << " pages";
}
