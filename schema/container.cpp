// SPDX-License-Identifier: Apache-2.0
// Writes and reads .rplan files. schema/README.md describes every byte.
#include "schema/container.h"

#include "base/atomic_file.h"
#include "base/hash.h"
#include "base/libraries.h"
#include "base/system_error.h"
#include "schema/limits.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <new>
#include <sys/stat.h>

namespace reshard::schema {
namespace {

static_assert(std::endian::native == std::endian::little, "the header's bytes in the file are those in memory");

constexpr char kMagic[8] = {'R', 'E', 'S', 'H', 'A', 'R', 'D', '\n'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kKnownFeatures = kFeatureCasts | kFeatureViews | kFeatureTransforms | kFeatureAmaxDimensions |
                                    kFeatureRelays | kFeatureSharedOperands | kFeatureCompressed |
                                    kFeatureOverflowRules; // any other bit was set by a newer compiler
constexpr uint64_t kAlignment = 64;

/// The first 32 bytes have the same meaning in every version, so that each reader can tell foreign, newer and truncated
/// files apart.
struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t headerBytes;
  uint64_t features;
  uint64_t fileBytes;
  uint32_t segments;
  uint32_t reserved;
  uint64_t indexOffset;
  uint64_t manifestOffset;
  uint64_t manifestBytes;
  Digest manifestDigest;
  Digest indexDigest;
  uint8_t padding[16];
  Digest digest; // covers the bytes before it and, through the two digests above, the whole plan
};
static_assert(sizeof(FileHeader) == 128 && offsetof(FileHeader, version) == 8 &&
              offsetof(FileHeader, headerBytes) == 12 && offsetof(FileHeader, features) == 16 &&
              offsetof(FileHeader, fileBytes) == 24 && offsetof(FileHeader, segments) == 32 &&
              offsetof(FileHeader, reserved) == 36 && offsetof(FileHeader, indexOffset) == 40 &&
              offsetof(FileHeader, manifestOffset) == 48 && offsetof(FileHeader, manifestBytes) == 56 &&
              offsetof(FileHeader, manifestDigest) == 64 && offsetof(FileHeader, indexDigest) == 80 &&
              offsetof(FileHeader, padding) == 96 && offsetof(FileHeader, digest) == 112);

struct IndexEntry {
  uint64_t offset;
  uint32_t bytes;        // in the file
  uint32_t segmentBytes; // the length without compression; 0: not compressed
  Digest digest;         // covers the segment without compression
};
static_assert(sizeof(IndexEntry) == 32 && offsetof(IndexEntry, bytes) == 8 &&
              offsetof(IndexEntry, segmentBytes) == 12 && offsetof(IndexEntry, digest) == 16);

bool hasDigest(const void *data, size_t bytes, const Digest &expected) { return digestOf(data, bytes) == expected; }

uint64_t aligned(uint64_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

} // namespace

Result<CompressedSegment> compress(Bytes segment) {
  if (segment.size() >= kMaxSegmentBytes)
    return failed("a segment has " + std::to_string(segment.size()) + " bytes, expected fewer than " +
                  std::to_string(kMaxSegmentBytes));
  const Result<std::vector<std::byte>> frame = compressed(segment);
  if (!frame.ok())
    return Status(frame.status()).withPrefix("cannot compress a segment: ");
  CompressedSegment result{{}, 0, digestOf(segment.data(), segment.size())};
  const size_t bytes = sizeof(Digest) + frame->size();
  if (bytes >= segment.size() || segment.size() > kMaxCompression * bytes) {
    result.bytes.assign(segment.begin(), segment.end());
    return result;
  }
  const Digest digest = digestOf(frame->data(), frame->size());
  result.bytes.resize(bytes);
  std::memcpy(result.bytes.data(), digest.data(), sizeof digest);
  std::memcpy(result.bytes.data() + sizeof digest, frame->data(), frame->size());
  result.segmentBytes = static_cast<uint32_t>(segment.size());
  return result;
}

struct ContainerWriter::State {
  std::string path;
  AtomicFile file;
  FileHeader header{};
  std::vector<IndexEntry> index;
  size_t added = 0;
  uint64_t at = 0;                // the position of the next segment
  std::vector<std::byte> pending; // the segments before it that are not written yet: one call writes many small ones
  std::string digest;

  /// Adds the bytes of one segment. `compressed`: the compressed segment that has these bytes, or null.
  Status add(Bytes stored, const CompressedSegment *compressed);
  Status write(Bytes segment);
  Status writePending();
};

Status ContainerWriter::State::writePending() {
  const Status status = file.write(pending.data(), pending.size(), at - pending.size());
  pending.clear();
  return status;
}

Status ContainerWriter::State::write(Bytes segment) {
  constexpr size_t kWriteBytes = 1 << 20;
  if (pending.size() + segment.size() > kWriteBytes)
    if (Status status = writePending(); !status.ok())
      return status;
  if (segment.size() > kWriteBytes) {
    if (Status status = file.write(segment.data(), segment.size(), at); !status.ok())
      return status;
    at = aligned(at + segment.size());
    return {};
  }
  pending.insert(pending.end(), segment.begin(), segment.end());
  at += segment.size();
  pending.resize(pending.size() + aligned(at) - at);
  at = aligned(at);
  return {};
}

ContainerWriter::ContainerWriter() : state_(std::make_unique<State>()) {}
ContainerWriter::~ContainerWriter() = default;

Status ContainerWriter::create(const std::string &path, uint32_t segments, uint64_t features) {
  State &s = *state_;
  s.path = path;
  if (segments == 0 || segments > kMaxSegments)
    return failed("cannot write '" + path + "': found " + std::to_string(segments) + " ranks, expected 1 to " +
                  std::to_string(kMaxSegments));
  Result<AtomicFile> file = AtomicFile::create(path);
  if (!file.ok())
    return file.status();
  s.file = std::move(*file);
  std::memcpy(s.header.magic, kMagic, sizeof kMagic);
  s.header.version = kVersion;
  s.header.headerBytes = sizeof(FileHeader);
  s.header.segments = segments;
  s.header.features = features;
  s.index.resize(segments);
  s.at = sizeof(FileHeader);
  return {};
}

void ContainerWriter::addFeatures(uint64_t features) { state_->header.features |= features; }

Status ContainerWriter::addManifest(Bytes manifest) {
  State &s = *state_;
  if (!s.file.open() || s.header.manifestOffset != 0)
    return failed("cannot write '" + s.path + "': addManifest must be called once, after create");
  s.header.manifestOffset = s.at;
  s.header.manifestBytes = manifest.size();
  s.header.manifestDigest = digestOf(manifest.data(), manifest.size());
  if (Status status = s.file.write(manifest.data(), manifest.size(), s.at); !status.ok())
    return status;
  s.header.indexOffset = aligned(s.at + manifest.size());
  s.at = aligned(s.header.indexOffset + s.index.size() * sizeof(IndexEntry));
  return {};
}

Status ContainerWriter::replaceManifest(Bytes manifest) {
  State &s = *state_;
  if (!s.file.open() || s.header.manifestOffset == 0 || manifest.size() != s.header.manifestBytes)
    return failed("cannot write '" + s.path + "': found another manifest of " + std::to_string(manifest.size()) +
                  " bytes, expected as many as the first has (" + std::to_string(s.header.manifestBytes) + ")");
  s.header.manifestDigest = digestOf(manifest.data(), manifest.size());
  return s.file.write(manifest.data(), manifest.size(), s.header.manifestOffset);
}

Status ContainerWriter::addSegment(Bytes segment) { return state_->add(segment, nullptr); }

Status ContainerWriter::addSegment(const CompressedSegment &segment) { return state_->add(segment.bytes, &segment); }

Status ContainerWriter::State::add(Bytes stored, const CompressedSegment *compressed) {
  if (!file.open() || header.manifestOffset == 0 || added == index.size())
    return failed("cannot write '" + path + "': found segment " + std::to_string(added + 1) + ", expected " +
                  std::to_string(index.size()) + " segments, after the manifest");
  if (stored.size() >= kMaxSegmentBytes) {
    file.abandon();
    return failed("cannot write '" + path + "': the segment of rank " + std::to_string(added) + " has " +
                  std::to_string(stored.size()) + " bytes, expected fewer than " + std::to_string(kMaxSegmentBytes));
  }
  index[added++] = {at, static_cast<uint32_t>(stored.size()), compressed ? compressed->segmentBytes : 0,
                    compressed ? compressed->digest : digestOf(stored.data(), stored.size())};
  if (compressed && compressed->segmentBytes > 0)
    header.features |= kFeatureCompressed;
  return write(stored);
}

Status ContainerWriter::finish(const std::function<void(const std::string &path)> &inspect) {
  State &s = *state_;
  if (!s.file.open() || s.header.manifestOffset == 0 || s.added != s.index.size())
    return failed("cannot write '" + s.path + "': found " + std::to_string(s.added) + " segments, expected " +
                  std::to_string(s.index.size()) + " and a manifest");
  if (Status status = s.writePending(); !status.ok())
    return status;
  const size_t indexBytes = s.index.size() * sizeof(IndexEntry);
  s.header.fileBytes = s.at;
  s.header.indexDigest = digestOf(s.index.data(), indexBytes);
  s.header.digest = digestOf(&s.header, offsetof(FileHeader, digest));
  s.digest = hexadecimal(s.header.digest);
  if (Status status = s.file.write(s.index.data(), indexBytes, s.header.indexOffset); !status.ok())
    return status;
  if (Status status = s.file.write(&s.header, sizeof s.header, 0); !status.ok())
    return status;
  if (inspect) {
    const Result<std::string> path = s.file.complete(s.at);
    if (!path.ok())
      return path.status();
    inspect(*path);
  }
  // No fsync: a plan that a power failure leaves incomplete does not match its digests, and can be compiled again.
  return s.file.commit(s.at);
}

const std::string &ContainerWriter::digest() const { return state_->digest; }
int64_t ContainerWriter::bytes() const { return static_cast<int64_t>(state_->at); }

namespace {

using Memory = std::shared_ptr<std::byte[]>;

/// Memory that is not set. Null if there is none.
Memory allocate(size_t bytes) { return Memory(new (std::nothrow) std::byte[bytes]); }

Status outOfMemory(uint64_t bytes) { return failed("out of memory for " + std::to_string(bytes) + " bytes"); }

/// Whether all bytes are zero. Padding must be, so that no byte of a plan can change without an error.
bool zero(const std::byte *begin, const std::byte *end) {
  return std::all_of(begin, end, [](std::byte b) { return b == std::byte{0}; });
}

} // namespace

struct Container::State {
  std::string path;
  int file = -1;
  struct stat opened{}; // the file then
  size_t bytes = 0;     // the file's length
  FileHeader header{};
  Memory front; // the header, the manifest, the index, and the padding after each
  const IndexEntry *index = nullptr;
  std::string digest;
  uint64_t decompressedBytes = 0;
  std::mutex mutex;                                       // protects `segments`
  std::vector<std::weak_ptr<const std::byte[]>> segments; // by rank: the segments that a reader keeps

  State() = default;
  State(const State &) = delete;
  State &operator=(const State &) = delete;
  ~State() {
    if (file >= 0)
      ::close(file);
  }

  Status openFile();
  /// Checks all but the bytes of the segments. Each check reads only bytes that the checks before it proved to exist.
  Status check();
  Status checkBeginning();
  Status checkHeader() const;
  Status readFront();
  Status checkIndex();
  Status truncated(const std::string &expected) const {
    return badPlan("truncated: found " + std::to_string(bytes) + " bytes, expected " + expected);
  }
  uint64_t indexBytes() const { return uint64_t{header.segments} * sizeof(IndexEntry); }
  /// Reads bytes that the file had when it was opened.
  Status read(std::byte *memory, uint64_t size, uint64_t offset) const;
  /// `damage`, or that another program has written to the file since it was opened.
  Status damagedOrChanged(Status damage) const;
  Result<Memory> readSegment(uint32_t rank) const;
  Result<Memory> decompress(const IndexEntry &entry, const std::byte *stored) const;
};

Status Container::State::openFile() {
  // Without O_NONBLOCK, opening a FIFO would block.
  file = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
  if (file < 0)
    return badPlan(systemError("open", path).message());
  if (::fstat(file, &opened) != 0)
    return badPlan(systemError("read", path).message());
  if (!S_ISREG(opened.st_mode))
    return badPlan("'" + path + "' is not a regular file");
  bytes = static_cast<size_t>(opened.st_size);
  if (bytes == 0)
    return badPlan("'" + path + "': not a plan: the file is empty");
  ::posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM); // no read-ahead into other ranks' segments
  return {};
}

Status Container::State::read(std::byte *memory, uint64_t size, uint64_t offset) const {
  const ssize_t done = readAll(file, memory, size, offset);
  if (done < 0)
    return failed(std::string("cannot be read: ") + std::strerror(errno));
  return static_cast<uint64_t>(done) == size
             ? Status()
             : damagedOrChanged(truncated("a file that is not written while it is open"));
}

Status Container::State::damagedOrChanged(Status damage) const {
  struct stat now{};
  if (::fstat(file, &now) != 0 || (now.st_size == opened.st_size && now.st_mtim.tv_sec == opened.st_mtim.tv_sec &&
                                   now.st_mtim.tv_nsec == opened.st_mtim.tv_nsec))
    return damage;
  return badPlan("changed while it was open: found " + std::to_string(now.st_size) + " bytes, expected the " +
                 std::to_string(opened.st_size) +
                 " bytes that it had; replace a plan by renaming a new file (mv), not by writing to the old one (cp)");
}

Status Container::State::check() {
  if (Status status = checkBeginning(); !status.ok())
    return status;
  if (Status status = checkHeader(); !status.ok())
    return status;
  if (Status status = readFront(); !status.ok())
    return status;
  if (Status status = checkIndex(); !status.ok())
    return damagedOrChanged(std::move(status));
  digest = hexadecimal(header.digest);
  return {};
}

/// Checks the fields that each version has, and that the file has a whole header. Sets `header`.
Status Container::State::checkBeginning() {
  if (Status status = read(reinterpret_cast<std::byte *>(&header), std::min(bytes, sizeof header), 0); !status.ok())
    return status;
  if (std::memcmp(&header, kMagic, std::min(bytes, sizeof kMagic)) != 0)
    return badPlan("not a plan: it does not begin with the magic bytes 'RESHARD\\n'");
  const std::string wholeHeader = std::to_string(sizeof(FileHeader)) + " or more";
  if (bytes < offsetof(FileHeader, features))
    return truncated(wholeHeader);
  const FileHeader &h = header;
  if (h.version > kVersion)
    return badPlan("written by a newer compiler: found container version " + std::to_string(h.version) + ", expected " +
                   std::to_string(kVersion));
  if (h.version != kVersion || h.headerBytes != sizeof(FileHeader))
    return badPlan("damaged: found container version " + std::to_string(h.version) + " with a header of " +
                   std::to_string(h.headerBytes) + " bytes, expected version " + std::to_string(kVersion) + " with " +
                   std::to_string(sizeof(FileHeader)));
  return bytes < sizeof(FileHeader) ? truncated(wholeHeader) : Status();
}

/// Checks digest, features, and that each part is where the writer puts it: no gaps, no overlaps.
Status Container::State::checkHeader() const {
  const FileHeader &h = header;
  if (!hasDigest(&h, offsetof(FileHeader, digest), h.digest))
    return badPlan("damaged: the header does not match its digest");
  if (h.features & ~kKnownFeatures) {
    return badPlan("written by a newer compiler: found unknown feature bits 0x" +
                   hexadecimal(h.features & ~kKnownFeatures, 1) + ", update reshard to read it");
  }
  if (bytes < h.fileBytes)
    return truncated(std::to_string(h.fileBytes));
  if (bytes > h.fileBytes)
    return badPlan("damaged: found " + std::to_string(bytes) + " bytes, expected " + std::to_string(h.fileBytes));
  const bool fits = h.segments > 0 && h.segments <= kMaxSegments && h.reserved == 0 &&
                    h.manifestOffset == sizeof(FileHeader) && h.manifestBytes > 0 &&
                    h.manifestBytes < kMaxSegmentBytes && h.manifestBytes <= bytes - sizeof(FileHeader) &&
                    h.indexOffset == aligned(sizeof(FileHeader) + h.manifestBytes) && h.indexOffset <= bytes &&
                    indexBytes() <= bytes - h.indexOffset;
  return fits ? Status() : badPlan("damaged: the header has offsets or sizes that do not fit the file");
}

/// Sets `front`. The file has room for the manifest and the index, but perhaps not for the padding after it.
Status Container::State::readFront() {
  const uint64_t size = std::min<uint64_t>(aligned(header.indexOffset + indexBytes()), bytes);
  front = allocate(size);
  if (!front)
    return outOfMemory(size);
  std::memcpy(front.get(), &header, sizeof header);
  return read(front.get() + sizeof header, size - sizeof header, sizeof header);
}

/// Checks the digests of manifest and index, the position of each segment, and the padding around the index. Sets
/// `index`.
Status Container::State::checkIndex() {
  const FileHeader &h = header;
  const std::byte *data = front.get();
  const uint64_t indexEnd = h.indexOffset + indexBytes(), firstSegment = aligned(indexEnd);
  index = reinterpret_cast<const IndexEntry *>(data + h.indexOffset);
  if (!hasDigest(data + h.manifestOffset, h.manifestBytes, h.manifestDigest))
    return badPlan("damaged: the manifest does not match its digest");
  if (!hasDigest(index, indexBytes(), h.indexDigest))
    return badPlan("damaged: the index does not match its digest");
  uint64_t at = firstSegment;
  decompressedBytes = bytes;
  for (uint32_t rank = 0; rank < h.segments; ++rank) {
    const IndexEntry &entry = index[rank];
    if (entry.offset != at || at > bytes || entry.bytes == 0 || entry.bytes >= kMaxSegmentBytes ||
        entry.bytes > bytes - at)
      return badPlan("damaged: the segment of rank " + std::to_string(rank) +
                     " does not follow the one before it, or does not fit the file");
    if (entry.segmentBytes > 0 && (h.features & kFeatureCompressed) == 0)
      return badPlan("damaged: the segment of rank " + std::to_string(rank) +
                     " is compressed, but the plan does not have that feature");
    if (entry.segmentBytes > 0 &&
        (entry.bytes <= sizeof(Digest) || entry.segmentBytes <= entry.bytes || entry.segmentBytes >= kMaxSegmentBytes ||
         entry.segmentBytes > kMaxCompression * entry.bytes))
      return badPlan("damaged: the index has impossible sizes for the compressed segment of rank " +
                     std::to_string(rank) + ": " + std::to_string(entry.bytes) + " bytes in the file for " +
                     std::to_string(entry.segmentBytes));
    decompressedBytes += entry.segmentBytes > 0 ? entry.segmentBytes - entry.bytes : 0;
    at = aligned(at + entry.bytes);
  }
  if (at != bytes)
    return badPlan("damaged: found " + std::to_string(bytes) + " bytes, expected " + std::to_string(at) +
                   ", where the last segment of the index ends");
  if (!zero(data + h.manifestOffset + h.manifestBytes, data + h.indexOffset) ||
      !zero(data + indexEnd, data + firstSegment))
    return badPlan("damaged: the padding around the index is not zero");
  return {};
}

Container::Container(std::unique_ptr<State> state) : state_(std::move(state)) {}
Container::~Container() = default;

Status Container::open(const std::string &path, std::unique_ptr<Container> &container) {
  auto state = std::make_unique<State>();
  state->path = path;
  if (Status status = state->openFile(); !status.ok())
    return status;
  if (Status status = state->check(); !status.ok())
    return std::move(status).withPrefix("'" + path + "': ");
  state->segments.resize(state->header.segments);
  container.reset(new Container(std::move(state)));
  return {};
}

Bytes Container::manifest() const {
  return {state_->front.get() + state_->header.manifestOffset, state_->header.manifestBytes};
}
uint32_t Container::segments() const { return state_->header.segments; }

Status Container::segment(uint32_t rank, SegmentBytes &bytes) const {
  State &s = *state_;
  if (rank >= segments())
    return invalid("'" + s.path + "': the plan has no rank " + std::to_string(rank) + ", expected 0 to " +
                   std::to_string(segments() - 1));
  const auto size = static_cast<size_t>(segmentBytes(rank));
  std::unique_lock lock(s.mutex);
  if (std::shared_ptr<const std::byte[]> kept = s.segments[rank].lock()) {
    bytes = {std::move(kept), size};
    return {};
  }
  lock.unlock(); // other threads read other segments meanwhile
  Result<Memory> segment = s.readSegment(rank);
  if (!segment.ok())
    return Status(segment.status()).withPrefix("'" + s.path + "': ");
  lock.lock();
  bytes = {s.segments[rank].lock(), size};
  if (!bytes.memory) { // not by another thread
    bytes.memory = std::move(*segment);
    s.segments[rank] = bytes.memory;
  }
  return {};
}

Result<Memory> Container::State::readSegment(uint32_t rank) const {
  const IndexEntry &entry = index[rank];
  const std::string name = "the segment of rank " + std::to_string(rank);
  const uint64_t size = aligned(entry.offset + entry.bytes) - entry.offset;
  Memory stored = allocate(size);
  if (!stored)
    return outOfMemory(size);
  if (Status status = read(stored.get(), size, entry.offset); !status.ok())
    return status;
  if (entry.segmentBytes == 0 && !hasDigest(stored.get(), entry.bytes, entry.digest))
    return damagedOrChanged(badPlan("damaged: " + name + " does not match its digest"));
  if (!zero(stored.get() + entry.bytes, stored.get() + size))
    return damagedOrChanged(badPlan("damaged: the padding after " + name + " is not zero"));
  if (entry.segmentBytes == 0)
    return stored;
  Result<Memory> segment = decompress(entry, stored.get());
  if (!segment.ok())
    return damagedOrChanged(
        Status(segment.status()).withPrefix("the compressed segment of rank " + std::to_string(rank) + ": "));
  return segment;
}

Result<Memory> Container::State::decompress(const IndexEntry &entry, const std::byte *stored) const {
  const Bytes frame(stored + sizeof(Digest), entry.bytes - sizeof(Digest));
  if (std::memcmp(digestOf(frame.data(), frame.size()).data(), stored, sizeof(Digest)) != 0)
    return badPlan("damaged: it does not match its digest");
  if (Status status = needLibzstd(); !status.ok())
    return status;
  Memory segment = allocate(entry.segmentBytes);
  if (!segment)
    return outOfMemory(entry.segmentBytes);
  if (Status status = reshard::decompress(frame, {segment.get(), entry.segmentBytes}); !status.ok())
    return badPlan("damaged: " + status.message());
  if (!hasDigest(segment.get(), entry.segmentBytes, entry.digest))
    return badPlan("damaged: the segment does not match its digest");
  return segment;
}

std::string Container::segmentDigest(uint32_t rank) const {
  return {reinterpret_cast<const char *>(state_->index[rank].digest.data()), sizeof(Digest)};
}
uint64_t Container::segmentBytes(uint32_t rank) const {
  const IndexEntry &entry = state_->index[rank];
  return entry.segmentBytes > 0 ? entry.segmentBytes : entry.bytes;
}
const std::string &Container::digest() const { return state_->digest; }
int64_t Container::bytes() const { return static_cast<int64_t>(state_->bytes); }
int64_t Container::decompressedBytes() const { return static_cast<int64_t>(state_->decompressedBytes); }

} // namespace reshard::schema
