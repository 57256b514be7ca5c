// SPDX-License-Identifier: Apache-2.0
// The formats of storage_formats.def as a table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard {

/// By the number that plans store.
enum class StorageFormat : uint8_t {
#define STORAGE_FORMAT(format, number, ...) format = number,
#include "base/formats/storage_formats.def"
};

/// A row of the table.
struct StorageFormatRow {
  StorageFormat format;
  const char *name, *title;
  bool stored, chunks, file, split; // as in storage_formats.def
};
inline constexpr StorageFormatRow kStorageFormats[] = {
#define STORAGE_FORMAT(format, number, ...) {StorageFormat::format, __VA_ARGS__},
#include "base/formats/storage_formats.def"
};

constexpr const StorageFormatRow &rowOf(StorageFormat format) {
  const StorageFormatRow *row = kStorageFormats;
  while (row->format != format)
    ++row;
  return *row;
}
constexpr const char *name(StorageFormat format) { return rowOf(format).name; }
constexpr const char *titleOf(StorageFormat format) { return rowOf(format).title; }
constexpr bool storesChunks(StorageFormat format) { return rowOf(format).stored; }
constexpr bool writesChunks(StorageFormat format) { return rowOf(format).chunks; }

/// The format of a name; nullopt if there is none.
constexpr std::optional<StorageFormat> storageFormatNamed(std::string_view name) {
  for (const StorageFormatRow &row : kStorageFormats)
    if (name == row.name)
      return row.format;
  return std::nullopt;
}

/// A text of each row, by number; with `which` of the rows that have this property.
inline std::vector<std::string> storageFormatTexts(const char *StorageFormatRow::*text,
                                                   bool StorageFormatRow::*which = nullptr) {
  std::vector<std::string> texts;
  for (size_t number = 0; number < std::size(kStorageFormats); ++number)
    if (const StorageFormatRow &row = rowOf(static_cast<StorageFormat>(number)); !which || row.*which)
      texts.emplace_back(row.*text);
  return texts;
}

} // namespace reshard
