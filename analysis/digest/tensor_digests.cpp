// SPDX-License-Identifier: Apache-2.0
#include "analysis/digest/tensor_digests.h"

#include "analysis/checkpoints/stored_checkpoint.h"
#include "analysis/common.h"
#include "analysis/files/memory.h"
#include "analysis/files/new_folder.h"
#include "analysis/layout/element_ranges.h"
#include "analysis/terminal.h"
#include "schema/flatbuffer_vectors.h"
#include "support/mapped_file.h"
#include "support/parallel.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <set>
#include <thread>

namespace reshard::analysis {

namespace {

using namespace schema;

/// Adds a chunk of a tensor: a box, row-major.
TensorDigest digestOf(const StoredTensor &tensor, const StoredChunk &chunk, const std::byte *data) {
  const size_t rank = tensor.shape.size(), item = static_cast<size_t>(itemBytes(tensor.dtype));
  // Dimensions from `inner` on lie together in the tensor too.
  size_t inner = rank;
  uint64_t run = 1;
  while (inner > 0) {
    run *= static_cast<uint64_t>(chunk.lengths[--inner]);
    if (chunk.lengths[inner] != tensor.shape[inner])
      break;
  }
  std::vector<uint64_t> strides(rank, 1);
  for (size_t d = rank; d-- > 1;)
    strides[d - 1] = strides[d] * static_cast<uint64_t>(tensor.shape[d]);
  TensorDigest digest;
  std::vector<int64_t> at(inner, 0);
  const uint64_t runs = run == 0 ? 0 : chunk.bytes / item / run;
  for (uint64_t r = 0; r < runs; ++r) {
    uint64_t first = 0;
    for (size_t d = 0; d < rank; ++d)
      first += static_cast<uint64_t>(chunk.offsets[d] + (d < inner ? at[d] : 0)) * strides[d];
    digest.add(data + r * run * item, item, first, 1, run);
    for (size_t d = inner; d-- > 0 && ++at[d] == chunk.lengths[d];)
      at[d] = 0;
  }
  return digest;
}

/// The elements of a tensor that have been added.
class Added {
public:
  explicit Added(int64_t elements) : elements_(elements), words_((static_cast<size_t>(elements) + 63) / 64) {}

  int64_t elements() const { return elements_; }
  int64_t count() const { return count_; }

  /// Calls visit(k, count) for the runs of a range whose elements are new, and marks them.
  template <class Visit> void take(const ElementRange &range, const Visit &visit) {
    int64_t begin = 0, length = 0;
    for (int64_t k = 0; k < range.count; ++k) {
      const auto index = static_cast<uint64_t>(range.logical + k * range.logicalStep);
      uint64_t &word = words_[index / 64];
      const uint64_t bit = uint64_t{1} << index % 64;
      if (word & bit) {
        if (length > 0)
          visit(begin, length);
        length = 0;
        continue;
      }
      word |= bit;
      ++count_;
      if (length++ == 0)
        begin = k;
    }
    if (length > 0)
      visit(begin, length);
  }

private:
  const int64_t elements_;
  int64_t count_ = 0;
  std::vector<uint64_t> words_;
};

/// Adds the params of an endpoint's files.
class SideDigests {
public:
  SideDigests(const Plan &plan, uint32_t endpoint)
      : manifest_(plan.manifest()), endpoint_(*manifest_.endpoints()->Get(endpoint)) {}

  void add(const MeshRankMemory &memory) {
    for (uint32_t p = 0; p < memory.params.size(); ++p) {
      const Param &param = *endpoint_.params()->Get(p);
      if (param.view() || (param.transform() && param.transform()->size() > 0))
        throw Failure{kUsage, "param '" + param.name()->str() +
                                  "' is quantized or transformed: its elements are not those of a tensor, "
                                  "expected plain params"};
      // Mesh ranks of one class hold the same.
      std::pair<uint32_t, std::vector<int64_t>> key(p, rankClassKey(endpoint_, p, memory.meshRank));
      if (classes_.contains(key))
        continue;
      bool any = false;
      for (const ParamInstance &instance : instances(manifest_, endpoint_, p, memory.meshRank))
        if (const std::byte *data = memory.params[p][instance.instance]) {
          addInstance(instance, storageDtypeOf(param), memory.meshRank, data);
          any = true;
        }
      if (any)
        classes_.insert(std::move(key));
    }
  }

  /// The tensors of which all elements were added. Prints the others.
  TensorDigests take(const std::string &path) {
    for (const auto &[name, added] : added_)
      if (added.count() < added.elements()) {
        std::fprintf(stderr, "%s '%s' has %s of tensor '%s' of %lld, so it has no digest\n", coloured("note:").c_str(),
                     printable(path).c_str(), counted(static_cast<uint64_t>(added.count()), "element").c_str(),
                     printable(name).c_str(), static_cast<long long>(added.elements()));
        found_.erase(name);
      }
    return std::move(found_);
  }

private:
  void addInstance(const ParamInstance &instance, DType dtype, uint32_t meshRank, const std::byte *data) {
    const auto item = static_cast<size_t>(itemBytes(dtype));
    forEachRange({manifest_, endpoint_, meshRank, instance}, [&](const ElementRange &range) {
      if (!range.tensor)
        return; // padding
      const auto [at, added] = found_.try_emplace(*range.tensor);
      DigestedTensor &tensor = at->second;
      if (added) {
        int64_t elements = 1;
        for (const uint64_t length :
             orEmpty(manifest_.tensor_patterns()->Get(static_cast<uint32_t>(range.pattern))->shape())) {
          tensor.shape.push_back(static_cast<int64_t>(length));
          elements *= tensor.shape.back();
        }
        tensor.dtype = dtype;
        added_.emplace(*range.tensor, elements);
      } else if (tensor.dtype != dtype) {
        throw Failure{kUsage, "tensor '" + *range.tensor + "' is " + dtypeName(tensor.dtype) + " in one param and " +
                                  dtypeName(dtype) + " in '" + instance.name + "', expected one dtype"};
      }
      added_.at(*range.tensor).take(range, [&](int64_t begin, int64_t count) {
        const auto first = static_cast<uint64_t>(range.logical + begin * range.logicalStep);
        const std::byte *from = data + static_cast<size_t>(range.local + begin * range.localStep) * item;
        if (range.localStep == 1)
          return tensor.digest.add(from, item, first, static_cast<uint64_t>(range.logicalStep),
                                   static_cast<uint64_t>(count));
        for (int64_t k = 0; k < count; ++k)
          tensor.digest.add(from + static_cast<size_t>(k * range.localStep) * item, item,
                            first + static_cast<uint64_t>(k * range.logicalStep), 0, 1);
      });
    });
  }

  const Manifest &manifest_;
  const Endpoint &endpoint_;
  std::set<std::pair<uint32_t, std::vector<int64_t>>> classes_;
  TensorDigests found_;
  std::map<std::string, Added> added_;
};

std::string shapeOf(const DigestedTensor &tensor) {
  std::string text;
  for (const int64_t length : tensor.shape)
    text += (text.empty() ? "" : ", ") + std::to_string(length);
  return "[" + text + "]";
}

} // namespace

TensorDigests digestsOfCheckpoint(const std::string &path) {
  const Result<StoredCheckpoint> stored = readStoredCheckpoint(path);
  throwOnError(stored.status(), kUsage);
  const bool folder = std::filesystem::is_directory(path);
  std::map<std::string, MappedFile> files;
  struct Item {
    const std::string *name;
    const StoredTensor *tensor;
    const StoredChunk *chunk;
    const MappedFile *file;
  };
  std::vector<Item> items;
  TensorDigests found;
  for (const auto &[name, tensor] : stored->tensors) {
    found[name] = {tensor.dtype, tensor.shape, {}};
    for (const StoredChunk &chunk : tensor.chunks) {
      if (chunk.bytes == 0)
        continue;
      const auto [file, added] = files.try_emplace(chunk.file);
      if (added) {
        Result<MappedFile> mapped = MappedFile::open(folder ? path + "/" + chunk.file : path);
        throwOnError(mapped.status(), kUsage);
        file->second = std::move(*mapped);
      }
      if (chunk.begin > file->second.bytes() || chunk.bytes > file->second.bytes() - chunk.begin)
        throw Failure{kUsage, "'" + path + "': the file '" + chunk.file + "' became shorter while it was read"};
      items.push_back({&name, &tensor, &chunk, &file->second});
    }
  }
  std::mutex mutex;
  ProgressLine progress("digest");
  parallelFor(
      items.size(), std::max(1u, std::thread::hardware_concurrency()),
      [&](size_t i) {
        const TensorDigest digest =
            digestOf(*items[i].tensor, *items[i].chunk, items[i].file->data() + items[i].chunk->begin);
        const std::lock_guard lock(mutex);
        found.at(*items[i].name).digest.add(digest);
      },
      [&](double fraction) { progress.at(fraction); });
  return found;
}

TensorDigests digestsOfSide(const Plan &plan, uint32_t endpoint, const std::string &path) {
  Memory memory(plan);
  std::set<std::string> unknown; // tensors of other models in the same files
  throwOnError(memory.openFiles(endpoint, path, false, &unknown), kUsage);
  if (!unknown.empty())
    std::fprintf(stderr, "%s '%s' has %s that the plan does not use, among them '%s'\n", coloured("note:").c_str(),
                 printable(path).c_str(), counted(unknown.size(), "name").c_str(), printable(*unknown.begin()).c_str());
  SideDigests digests(plan, endpoint);
  {
    ProgressLine progress("digest");
    for (size_t i = 0; i < memory.rankMemories().size(); ++i) {
      digests.add(memory.rankMemories()[i]);
      progress.at(static_cast<double>(i + 1) / static_cast<double>(memory.rankMemories().size()));
    }
  }
  return digests.take(path);
}

std::vector<std::string> differences(const TensorDigests &a, const std::string &one, const TensorDigests &b,
                                     const std::string &other) {
  std::vector<std::string> lines;
  for (const auto &[name, tensor] : a) {
    const auto found = b.find(name);
    if (found == b.end()) {
      lines.push_back(name + ": only in " + one);
      continue;
    }
    const DigestedTensor &second = found->second;
    auto differ = [&](const std::string &what, const std::string &x, const std::string &y) {
      lines.push_back(name + ": " + what + " " + x + " in " + one + ", " + y + " in " + other);
    };
    if (tensor.dtype != second.dtype)
      differ("dtype", dtypeName(tensor.dtype), dtypeName(second.dtype));
    else if (tensor.shape != second.shape)
      differ("shape", shapeOf(tensor), shapeOf(second));
    else if (tensor.digest != second.digest)
      differ("digest", tensor.digest.text(), second.digest.text());
  }
  for (const auto &[name, tensor] : b)
    if (!a.contains(name))
      lines.push_back(name + ": only in " + other);
  return lines;
}

} // namespace reshard::analysis
