// SPDX-License-Identifier: Apache-2.0
// The format: PKWARE's APPNOTE.TXT 6.3.10. The directory at the end lists the members; each member has a header of its
// own before its data. Fields that do not fit in 32 bits are in a zip64 record.

#include "analysis/checkpoints/stored_zip.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

namespace reshard::analysis {

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

/// The part [begin, begin + bytes), if it lies in the text.
std::optional<std::string_view> part(std::string_view text, uint64_t begin, uint64_t bytes) {
  if (begin > text.size() || bytes > text.size() - begin)
    return std::nullopt;
  return text.substr(begin, bytes);
}

struct Directory {
  uint64_t begin = 0, bytes = 0, members = 0;
};

/// An entry of the directory.
struct Entry {
  std::string_view name;
  uint64_t header = 0, bytes = 0, stored = 0; // where its local header begins; its length; its length in the archive
  uint64_t length = 0;                        // of this entry
};

/// Finds the directory. torch.save writes no comment, so the record at the end has a fixed place.
std::optional<Directory> findDirectory(std::string_view archive) {
  if (archive.size() < kEndBytes)
    return std::nullopt;
  const std::string_view end = archive.substr(archive.size() - kEndBytes);
  if (numberAt<uint32_t>(end, 0) != kEnd || numberAt<uint16_t>(end, 20) != 0)
    return std::nullopt;
  Directory found{numberAt<uint32_t>(end, 16), numberAt<uint32_t>(end, 12), numberAt<uint16_t>(end, 10)};
  const uint64_t at = archive.size() - kEndBytes;
  if (at < kLocatorBytes || numberAt<uint32_t>(archive, at - kLocatorBytes) != kEnd64Locator)
    return found;
  const auto end64 = part(archive, numberAt<uint64_t>(archive, at - kLocatorBytes + 8), kEnd64Bytes);
  if (!end64 || numberAt<uint32_t>(*end64, 0) != kEnd64)
    return std::nullopt;
  return Directory{numberAt<uint64_t>(*end64, 48), numberAt<uint64_t>(*end64, 40), numberAt<uint64_t>(*end64, 32)};
}

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

std::optional<std::string_view> dataOf(std::string_view archive, const Entry &entry) {
  const auto header = part(archive, entry.header, kLocalHeaderBytes);
  if (!header || numberAt<uint32_t>(*header, 0) != kLocalHeader)
    return std::nullopt;
  const uint64_t name = numberAt<uint16_t>(*header, 26), extra = numberAt<uint16_t>(*header, 28);
  return part(archive, entry.header + kLocalHeaderBytes + name + extra, entry.bytes);
}

} // namespace

Result<std::map<std::string_view, std::string_view>> readStoredZip(std::string_view archive, const std::string &where) {
  const auto refuse = [&](const std::string &why) { return failed(where + ": damaged zip archive: " + why); };
  const std::optional<Directory> directory = findDirectory(archive);
  if (!directory)
    return refuse("it does not end with a directory");
  const auto entries = part(archive, directory->begin, directory->bytes);
  if (!entries || directory->members > std::min(kMaxMembers, directory->bytes / kEntryBytes))
    return refuse("its directory lies outside the archive");
  std::map<std::string_view, std::string_view> members;
  std::string_view rest = *entries;
  for (uint64_t i = 0; i < directory->members; ++i) {
    Entry entry;
    if (const std::string problem = readEntry(rest, entry); !problem.empty())
      return refuse(problem);
    const auto data = dataOf(archive, entry);
    if (!data)
      return refuse("'" + std::string(entry.name) + "' lies outside the archive");
    if (!members.emplace(entry.name, *data).second)
      return refuse("'" + std::string(entry.name) + "' is repeated");
    rest.remove_prefix(entry.length);
  }
  return members;
}

} // namespace reshard::analysis
