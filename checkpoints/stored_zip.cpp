// SPDX-License-Identifier: Apache-2.0
// The format: PKWARE's APPNOTE.TXT 6.3.10. The directory at the end lists the members; each member has a header of its
// own before its data. Fields that do not fit in 32 bits are in a zip64 record.

#include "checkpoints/torch_file.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

namespace reshard::checkpoints {

namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kDirectoryEntry = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50,
                   kEnd64Locator = 0x07064b50;
constexpr size_t kLocalHeaderBytes = 30, kEntryBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocatorBytes = 20;
constexpr uint32_t kIn64 = UINT32_MAX; // a 32-bit field whose value is in the zip64 record
constexpr uint16_t kZip64Record = 1;
constexpr uint64_t kMaxMembers = uint64_t{1} << 24;

/// A little-endian number in a text that is long enough.
template <class T> T numberAt(std::string_view text, size_t at) {
  T number = 0;
  std::memcpy(&number, text.data() + at, sizeof number);
  return number;
}

/// The part [begin, begin + bytes) of an archive, if it lies in it. Valid until the next read.
Result<std::optional<std::string_view>> part(FilePart &archive, uint64_t begin, uint64_t bytes) {
  if (begin > archive.bytes() || bytes > archive.bytes() - begin)
    return std::optional<std::string_view>();
  const Result<std::string_view> read = archive.read(begin, bytes);
  return read.ok() ? Result(std::optional(*read)) : Result<std::optional<std::string_view>>(read.status());
}

struct CentralDirectory {
  uint64_t begin = 0, bytes = 0, members = 0;
};

/// An entry of the directory.
struct Entry {
  std::string_view name;
  uint64_t header = 0, bytes = 0, stored = 0; // where its local header begins; its length; its length in the archive
  uint64_t length = 0;                        // the bytes of this entry
};

/// Finds the directory. torch.save writes no comment, so the record at the end has a fixed place.
Result<std::optional<CentralDirectory>> findDirectory(FilePart &archive) {
  constexpr uint64_t kTail = 4096; // most archives of one tensor have their directory in it
  const std::optional<CentralDirectory> none;
  const uint64_t bytes = archive.bytes(), tailAt = bytes - std::min(bytes, kTail);
  if (bytes < kEndBytes)
    return none;
  const Result<std::string_view> tail = archive.read(tailAt, bytes - tailAt);
  if (!tail.ok())
    return tail.status();
  const std::string_view end = tail->substr(tail->size() - kEndBytes);
  if (numberAt<uint32_t>(end, 0) != kEnd || numberAt<uint16_t>(end, 20) != 0)
    return none;
  const CentralDirectory found{numberAt<uint32_t>(end, 16), numberAt<uint32_t>(end, 12), numberAt<uint16_t>(end, 10)};
  if (tail->size() < kEndBytes + kLocatorBytes)
    return std::optional(found);
  const std::string_view locator = tail->substr(tail->size() - kEndBytes - kLocatorBytes);
  if (numberAt<uint32_t>(locator, 0) != kEnd64Locator)
    return std::optional(found);
  const auto end64 = part(archive, numberAt<uint64_t>(locator, 8), kEnd64Bytes);
  if (!end64.ok())
    return end64.status();
  if (!*end64 || numberAt<uint32_t>(**end64, 0) != kEnd64)
    return none;
  return std::optional(CentralDirectory{numberAt<uint64_t>(**end64, 48), numberAt<uint64_t>(**end64, 40),
                                        numberAt<uint64_t>(**end64, 32)});
}

bool byName(const StoredZip::Member &a, const StoredZip::Member &b) { return a.name < b.name; }

/// Replaces the fields that are in the entry's zip64 record.
bool readZip64(std::string_view extra, Entry &entry) {
  while (extra.size() >= 4) {
    const uint16_t kind = numberAt<uint16_t>(extra, 0), length = numberAt<uint16_t>(extra, 2);
    if (length > extra.size() - 4)
      return false;
    std::string_view record = extra.substr(4, length);
    for (uint64_t *field : {&entry.bytes, &entry.stored, &entry.header})
      if (kind == kZip64Record && *field == kIn64) {
        if (record.size() < 8)
          return false;
        *field = numberAt<uint64_t>(record, 0);
        record.remove_prefix(8);
      }
    extra.remove_prefix(4 + length);
  }
  return true;
}

/// The entry at the beginning of `rest`; an error text if there is none.
std::string readEntry(std::string_view rest, Entry &entry) {
  if (rest.size() < kEntryBytes || numberAt<uint32_t>(rest, 0) != kDirectoryEntry)
    return "the directory ends within an entry";
  const uint16_t flags = numberAt<uint16_t>(rest, 8), method = numberAt<uint16_t>(rest, 10);
  const uint64_t name = numberAt<uint16_t>(rest, 28), extra = numberAt<uint16_t>(rest, 30);
  const uint64_t comment = numberAt<uint16_t>(rest, 32);
  entry.length = kEntryBytes + name + extra + comment;
  if (entry.length > rest.size())
    return "the directory ends within an entry";
  entry.name = rest.substr(kEntryBytes, name);
  entry.stored = numberAt<uint32_t>(rest, 20);
  entry.bytes = numberAt<uint32_t>(rest, 24);
  entry.header = numberAt<uint32_t>(rest, 42);
  if (!readZip64(rest.substr(kEntryBytes + name, extra), entry))
    return "the zip64 record of '" + std::string(entry.name) + "' is too short";
  if (method != 0 || flags & 1 || entry.stored != entry.bytes)
    return "'" + std::string(entry.name) + "' is compressed or encrypted, expected stored bytes";
  return {};
}

} // namespace

Result<StoredZip> StoredZip::read(FilePart &archive, const std::string &where) {
  const auto refuse = [&](const std::string &why) { return failed(where + ": damaged zip archive: " + why); };
  const auto directory = findDirectory(archive);
  if (!directory.ok())
    return directory.status();
  if (!*directory)
    return refuse("it does not end with a directory");
  const auto &[begin, bytes, count] = **directory;
  const auto entries = part(archive, begin, bytes);
  if (!entries.ok())
    return entries.status();
  if (!*entries || count > std::min(kMaxMembers, bytes / kEntryBytes))
    return refuse("its directory lies outside the archive");
  StoredZip zip;
  zip.directory_.assign((*entries)->begin(), (*entries)->end());
  zip.members_.reserve(count);
  std::string_view rest(zip.directory_.data(), zip.directory_.size());
  for (uint64_t i = 0; i < count; ++i) {
    Entry entry;
    if (const std::string problem = readEntry(rest, entry); !problem.empty())
      return refuse(problem);
    if (entry.header > archive.bytes() || entry.bytes > archive.bytes() - entry.header)
      return refuse("'" + std::string(entry.name) + "' lies outside the archive");
    zip.members_.push_back({entry.name, entry.header, entry.bytes});
    rest.remove_prefix(entry.length);
  }
  std::sort(zip.members_.begin(), zip.members_.end(), byName);
  const auto repeated = std::adjacent_find(zip.members_.begin(), zip.members_.end(),
                                           [](const Member &a, const Member &b) { return a.name == b.name; });
  if (repeated != zip.members_.end())
    return refuse("'" + std::string(repeated->name) + "' is repeated");
  return zip;
}

const StoredZip::Member *StoredZip::find(std::string_view name) const {
  const auto at = std::lower_bound(members_.begin(), members_.end(), Member{name, 0, 0}, byName);
  return at != members_.end() && at->name == name ? &*at : nullptr;
}

Result<uint64_t> StoredZip::dataAt(FilePart &archive, const Member &member, const std::string &where) {
  const auto header = part(archive, member.header, kLocalHeaderBytes);
  if (!header.ok())
    return header.status();
  if (*header && numberAt<uint32_t>(**header, 0) == kLocalHeader) {
    const uint64_t name = numberAt<uint16_t>(**header, 26), extra = numberAt<uint16_t>(**header, 28);
    const uint64_t begin = member.header + kLocalHeaderBytes + name + extra;
    if (begin <= archive.bytes() && member.bytes <= archive.bytes() - begin)
      return begin;
  }
  return failed(where + ": damaged zip archive: '" + std::string(member.name) + "' lies outside the archive");
}

} // namespace reshard::checkpoints
