// SPDX-License-Identifier: Apache-2.0
// Asks the formats in turn whether a file or a folder is theirs, and calls the reader of the one that says so. Checks,
// for every format, that the chunks of each tensor cover the tensor once.
#include "checkpoints/stored_checkpoint.h"

#include "base/hash.h"
#include "base/input_file.h"
#include "base/random.h"
#include "base/text.h"
#include "checkpoints/stored_format.h"

#include <algorithm>
#include <filesystem>
#include <set>

namespace reshard::checkpoints {

namespace fs = std::filesystem;

namespace {

/// In the order in which they are asked.
constexpr std::pair<StorageFormat, const StoredFormat *> kFormats[] = {
#define STORAGE_FORMAT(format, ...) {StorageFormat::format, &formats::format},
#include "base/formats/storage_formats.def"
};

bool overlap(const StoredChunk &a, const StoredChunk &b) {
  for (size_t d = 0; d < a.offsets.size(); ++d)
    if (a.offsets[d] + a.lengths[d] <= b.offsets[d] || b.offsets[d] + b.lengths[d] <= a.offsets[d])
      return false;
  return true;
}

/// The product of lengths, or nothing if it does not fit.
std::optional<int64_t> elements(const std::vector<int64_t> &lengths) {
  int64_t product = 1;
  for (const int64_t length : lengths)
    if (__builtin_mul_overflow(product, length, &product))
      return std::nullopt;
  return product;
}

/// The dimension in which the chunks begin at the most positions: few chunks have a position of it in common.
size_t sweepDimension(const StoredTensor &tensor) {
  size_t best = 0, most = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    std::set<int64_t> positions;
    for (const StoredChunk &chunk : tensor.chunks)
      positions.insert(chunk.offsets[d]);
    if (positions.size() > most)
      std::tie(best, most) = std::pair(d, positions.size());
  }
  return best;
}

/// Whether each element of a tensor is in one chunk, in time that is linear in the numbers of the chunks. A chunk is
/// the alternating sum of its corners, and chunks tile a tensor exactly if their corners cancel out but for those of
/// the tensor. Each position of each dimension stands for a random number here, a corner for the product of its
/// positions, and a chunk for the product of the differences of its ends. So chunks that are no tiling have another sum
/// than the tensor, but for a chance of dimensions / 2^61 (Schwartz and Zippel), which a writer cannot know.
bool tile(const StoredTensor &tensor) {
  __extension__ using Wide = unsigned __int128;
  constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;
  static const uint64_t seed = randomNumber();
  const auto numberOf = [](size_t dimension, int64_t position) {
    const uint64_t key[] = {seed, dimension, static_cast<uint64_t>(position)};
    return hashOf({reinterpret_cast<const char *>(key), sizeof key}) % kPrime;
  };
  const auto productOf = [&](const std::vector<int64_t> &offsets, const std::vector<int64_t> &lengths) {
    uint64_t product = 1;
    for (size_t d = 0; d < lengths.size(); ++d) {
      const uint64_t difference = (numberOf(d, offsets[d] + lengths[d]) + kPrime - numberOf(d, offsets[d])) % kPrime;
      product = static_cast<uint64_t>(Wide{product} * difference % kPrime);
    }
    return product;
  };
  uint64_t sum = 0;
  for (const StoredChunk &chunk : tensor.chunks)
    sum = (sum + productOf(chunk.offsets, chunk.lengths)) % kPrime;
  return sum == productOf(std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape);
}

/// Two chunks that overlap, to name them; nothing if many would have to be compared. Empty chunks overlap with none.
std::optional<std::pair<const StoredChunk *, const StoredChunk *>> findOverlap(const StoredTensor &tensor) {
  const size_t d = sweepDimension(tensor);
  std::vector<const StoredChunk *> order;
  for (const StoredChunk &chunk : tensor.chunks)
    if (elements(chunk.lengths) != 0)
      order.push_back(&chunk);
  if (tensor.shape.empty())
    return order.size() > 1 ? std::optional(std::pair(order[0], order[1])) : std::nullopt;
  std::sort(order.begin(), order.end(),
            [&](const StoredChunk *a, const StoredChunk *b) { return a->offsets[d] < b->offsets[d]; });
  std::vector<const StoredChunk *> open; // the chunks that reach the position of the next one
  size_t left = 1'000'000;
  for (const StoredChunk *chunk : order) {
    if (left < open.size())
      return std::nullopt;
    left -= open.size();
    std::erase_if(open,
                  [&](const StoredChunk *other) { return other->offsets[d] + other->lengths[d] <= chunk->offsets[d]; });
    for (const StoredChunk *other : open)
      if (overlap(*chunk, *other))
        return std::pair(other, chunk);
    open.push_back(chunk);
  }
  return std::nullopt;
}

/// Sorts chunks by their offsets and removes those without elements, or all but one of them.
void sortChunks(StoredTensor &tensor) {
  std::stable_sort(tensor.chunks.begin(), tensor.chunks.end(),
                   [](const StoredChunk &a, const StoredChunk &b) { return a.offsets < b.offsets; });
  const auto empty = [](const StoredChunk &chunk) { return chunk.bytes == 0; };
  if (!std::all_of(tensor.chunks.begin(), tensor.chunks.end(), empty)) {
    std::erase_if(tensor.chunks, empty);
  } else if (!tensor.chunks.empty()) {
    tensor.chunks.resize(1);
    tensor.chunks[0].offsets.assign(tensor.shape.size(), 0);
    tensor.chunks[0].lengths = tensor.shape;
  } else {
    tensor.chunks.push_back({std::vector<int64_t>(tensor.shape.size(), 0), tensor.shape, {}, 0, 0});
  }
}

std::string prefixed(const std::string &prefix, const std::string &text) {
  return text.empty() ? std::string() : prefix + text;
}

} // namespace

std::string boxOf(const StoredChunk &chunk) {
  std::string text = "[";
  for (size_t d = 0; d < chunk.offsets.size(); ++d)
    text += (d ? ", " : "") + std::to_string(chunk.offsets[d]) + ".." +
            std::to_string(chunk.offsets[d] + chunk.lengths[d] - 1);
  return text + "]";
}

Status checkChunks(const std::string &name, const StoredTensor &tensor, const std::string &where) {
  const auto refuse = [&](const std::string &why) { return failed(where + ": tensor '" + name + "': " + why); };
  const std::optional<int64_t> wanted = elements(tensor.shape);
  if (!wanted || std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t length) { return length < 0; }))
    return refuse("its shape is negative or too large");
  int64_t found = 0;
  for (const StoredChunk &chunk : tensor.chunks) {
    bool inside = chunk.offsets.size() == tensor.shape.size() && chunk.lengths.size() == tensor.shape.size();
    for (size_t d = 0; inside && d < tensor.shape.size(); ++d)
      inside = chunk.offsets[d] >= 0 && chunk.lengths[d] >= 0 && chunk.lengths[d] <= tensor.shape[d] &&
               chunk.offsets[d] <= tensor.shape[d] - chunk.lengths[d];
    if (!inside)
      return refuse("a chunk in '" + chunk.file + "' lies outside the tensor");
    const int64_t chunkElements = *elements(chunk.lengths); // no more than the tensor has
    if (chunk.bytes != static_cast<uint64_t>(chunkElements) * static_cast<uint64_t>(schema::itemBytes(tensor.dtype)))
      return refuse("a chunk in '" + chunk.file + "' has " + std::to_string(chunk.bytes) + " bytes for " +
                    std::to_string(chunkElements) + " elements");
    if (__builtin_add_overflow(found, chunkElements, &found))
      return refuse("its chunks overlap");
  }
  if (tile(tensor))
    return {};
  if (const auto pair = findOverlap(tensor))
    return refuse("the chunks " + boxOf(*pair->first) + " in '" + pair->first->file + "' and " + boxOf(*pair->second) +
                  " in '" + pair->second->file + "' overlap");
  if (found != *wanted)
    return refuse("its chunks have " + std::to_string(found) + " of " + std::to_string(*wanted) + " elements");
  return refuse("its chunks overlap");
}

const StoredFormat &storedFormat(StorageFormat format) {
  const auto *each = kFormats;
  while (each->first != format)
    ++each;
  return *each->second;
}

bool isCheckpoint(const std::string &folder) {
  return std::any_of(std::begin(kFormats), std::end(kFormats), [&](const auto &each) {
    const Result<bool> fits = each.second->fits(folder, true);
    return fits.ok() && *fits;
  });
}

std::optional<StorageFormat> formatOfBytes(std::string_view file) {
  for (const auto &[number, format] : kFormats)
    if (format->begins && format->begins(file))
      return number;
  return std::nullopt;
}

Result<StorageFormat> recognizeCheckpoint(const std::string &path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    constexpr uint64_t kBeginning = 16; // bytes that formatOfBytes() looks at
    const Result<InputFile> file = InputFile::open(path);
    if (!file.ok())
      return file.status();
    const Result<std::string> begin = file->read(0, std::min(file->bytes(), kBeginning));
    if (!begin.ok())
      return begin.status();
    if (const std::optional<StorageFormat> format = formatOfBytes(*begin))
      return *format;
    std::string files;
    for (const auto &[number, format] : kFormats)
      if (format->begins)
        files += (files.empty() ? "neither a file of " : " nor one of ") + std::string(format->fileText);
    return failed("'" + path + "' is " + files + prefixed(": found ", unreadFile(path)));
  }
  std::vector<std::string> expected;
  for (const auto &[number, format] : kFormats) {
    const Result<bool> fits = format->fits(path, false);
    if (!fits.ok())
      return fits.status();
    if (*fits)
      return number;
    for (const char *text : format->folderTexts)
      if (text)
        expected.emplace_back(text);
  }
  return failed("'" + path + "': not a checkpoint: expected " + oneOf(expected, "") +
                prefixed("; ", unreadWeights(path)));
}

Result<StoredCheckpoint> readStoredCheckpoint(const std::string &path, std::optional<StorageFormat> preferred) {
  const Result<bool> fits = preferred ? storedFormat(*preferred).fits(path, true) : Result(false);
  const Result<StorageFormat> format = fits.ok() && *fits ? *preferred : recognizeCheckpoint(path);
  if (!format.ok())
    return format.status();
  StoredCheckpoint checkpoint;
  checkpoint.format = *format;
  if (Status status = storedFormat(*format).read(path, checkpoint); !status.ok())
    return status;
  for (auto &[name, tensor] : checkpoint.tensors)
    sortChunks(tensor);
  return checkpoint;
}

std::vector<TensorSpec> NewCheckpoint::chunks() const {
  std::vector<TensorSpec> all;
  for (const ChunkedTensor &tensor : tensors)
    for (const ChunkedTensor::Chunk &chunk : tensor.chunks) {
      int64_t bytes = schema::itemBytes(tensor.dtype);
      for (const int64_t length : chunk.lengths)
        bytes *= length;
      all.push_back({tensor.name, tensor.dtype, chunk.lengths, bytes});
    }
  return all;
}

std::vector<std::vector<TensorSpec>> NewCheckpoint::files() const {
  std::vector<std::vector<TensorSpec>> files(1);
  int64_t filled = 0;
  for (TensorSpec &chunk : chunks()) {
    if (filled > 0 && filled + chunk.bytes > fileBytes) {
      files.emplace_back();
      filled = 0;
    }
    filled += chunk.bytes;
    files.back().push_back(std::move(chunk));
  }
  return files;
}

Status renameTensors(StoredCheckpoint &checkpoint, const Renames &renames, const std::string &path) {
  for (StoredReplica &replica : checkpoint.replicas)
    replica.tensor = renames(replica.tensor);
  return renames.apply(checkpoint.tensors, "tensors of '" + path + "'");
}

} // namespace reshard::checkpoints
