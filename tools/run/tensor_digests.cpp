// SPDX-License-Identifier: Apache-2.0
// Digests the tensors of a checkpoint, or of one side of a plan, and compares two such sets by name.
#include "tools/run/tensor_digests.h"

#include "base/input_file.h"
#include "base/mapped_file.h"
#include "base/parallel.h"
#include "checkpoints/stored_checkpoint.h"
#include "command/common.h"
#include "command/terminal.h"
#include "executor/digests/run_digests.h"
#include "tools/run/memory.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <thread>

namespace reshard::tools {

using namespace checkpoints;
using namespace command;
using namespace verify;

namespace {

using namespace schema;

constexpr std::string_view kModel = "model.", kOptimizer = "optimizer."; // keys of dcp.save

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
    digest.add(data + r * run * item, item, static_cast<int64_t>(item), first, run);
    for (size_t d = inner; d-- > 0 && ++at[d] == chunk.lengths[d];)
      at[d] = 0;
  }
  return digest;
}

std::string shapeOf(const DigestedTensor &tensor) {
  std::string text;
  for (const int64_t length : tensor.shape)
    text += (text.empty() ? "" : ", ") + std::to_string(length);
  return "[" + text + "]";
}

} // namespace

Result<TensorDigests> digestsOfCheckpoint(const std::string &path, const Renames &renames) {
  Result<StoredCheckpoint> stored = readStoredCheckpoint(path);
  if (!stored.ok())
    return invalid(stored.status().message());
  printNotes(stored->notes);
  if (const Status status = renameTensors(*stored, renames, path); !status.ok())
    return invalid(status.message());
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
        const Status status = mapped.ok() ? checkSame(stored->files.at(chunk.file), *mapped) : mapped.status();
        if (!status.ok())
          return invalid(status.message());
        file->second = std::move(*mapped);
      }
      if (chunk.begin > file->second.bytes() || chunk.bytes > file->second.bytes() - chunk.begin)
        return invalid("'" + path + "': the file '" + chunk.file + "' became shorter while it was read");
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
  for (const auto &[name, file] : files)
    if (const Status status = file.unchanged(); !status.ok())
      return failed(status.message());
  return found;
}

std::set<std::string> keepModel(TensorDigests &digests) {
  std::set<std::string> others;
  TensorDigests kept;
  for (auto &[name, digest] : digests)
    if (name.starts_with(kModel))
      kept[name.substr(kModel.size())] = std::move(digest);
    else
      others.insert(name);
  digests = std::move(kept);
  return others;
}

std::set<std::string> keepModels(TensorDigests &a, TensorDigests &b) {
  const auto key = [](const std::string &name, bool below) -> std::optional<std::string> {
    if (!below)
      return name;
    return name.starts_with(kModel) ? std::optional(name.substr(kModel.size())) : std::nullopt;
  };
  const auto trained = [](const TensorDigests &side) {
    const auto first = side.lower_bound(std::string(kOptimizer));
    return first != side.end() && first->first.starts_with(kOptimizer);
  };
  const int needed = (trained(a) ? 1 : 0) | (trained(b) ? 2 : 0); // bit 0: the model of `a`, bit 1: that of `b`
  size_t most = 0;
  int best = needed;
  for (const int sides : {0, 1, 2, 3}) {
    if ((sides & needed) != needed)
      continue;
    size_t common = 0;
    for (const auto &[name, digest] : a)
      if (const auto plain = key(name, sides & 1))
        common += b.contains((sides & 2 ? std::string(kModel) : "") + *plain);
    if (common > most) {
      most = common;
      best = sides;
    }
  }
  std::set<std::string> others;
  if (best & 1)
    others.merge(keepModel(a));
  if (best & 2)
    others.merge(keepModel(b));
  return others;
}

std::string renameHint(const TensorDigests &a, const TensorDigests &b) {
  size_t unchanged = 0;
  for (const auto &[name, digest] : a)
    unchanged += b.contains(name);
  std::map<std::string, size_t> counts; // how many names a rule makes equal
  constexpr size_t kLongest = 4;        // components of a beginning
  const auto add = [&](const TensorDigests &longer, const TensorDigests &shorter, bool removes) {
    for (const auto &[name, digest] : longer) {
      size_t at = 0;
      for (size_t i = 0; i < kLongest && (at = name.find('.', at)) != std::string::npos; ++i)
        if (const std::string beginning = name.substr(0, ++at); shorter.contains(name.substr(at)))
          ++counts[removes ? beginning + "=" : "=" + beginning];
    }
  };
  add(a, b, true);
  add(b, a, false);
  const auto best =
      std::max_element(counts.begin(), counts.end(), [](const auto &x, const auto &y) { return x.second < y.second; });
  return best != counts.end() && best->second > unchanged ? best->first : "";
}

Result<TensorDigests> digestsOfSide(const Plan &plan, uint32_t endpoint, const std::string &path) {
  Memory memory(plan);
  std::set<std::string> unknown; // tensors of other models in the same files
  if (const Status status = memory.openFiles(endpoint, path, false, &unknown); !status.ok())
    return invalid(status.message());
  if (!unknown.empty())
    std::fprintf(stderr, "%s '%s' has %s that the plan does not use, among them '%s'\n", colored("note:").c_str(),
                 printable(path).c_str(), counted(unknown.size(), "name").c_str(), printable(*unknown.begin()).c_str());
  std::map<uint32_t, const MeshRankMemory *> byMeshRank;
  for (const MeshRankMemory &each : memory.rankMemories())
    byMeshRank[each.meshRank] = &each;
  const std::unique_ptr<Transport> alone = makeThreadsTransport(1);
  RunDigests digests(
      {.plan = plan,
       .transport = *alone,
       .threads = std::max(1u, std::thread::hardware_concurrency()),
       .local = [](uint32_t, uint32_t) { return true; },
       .bound = [&](uint32_t, uint32_t meshRank, uint32_t param, uint32_t instance) -> const std::byte * {
         return byMeshRank.at(meshRank)->params[param][instance];
       }});
  const ElapsedLine elapsed("digest");
  const Result<std::vector<SideDigest>> found = digests.side(endpoint, false, {});
  if (!found.ok())
    return invalid(found.status().message());
  TensorDigests result;
  for (const SideDigest &each : *found) {
    if (!each.whole())
      std::fprintf(stderr, "%s '%s' has %s of tensor '%s' of %lld, so it has no digest\n", colored("note:").c_str(),
                   printable(path).c_str(), counted(each.sum.elements, "element").c_str(),
                   printable(each.tensor).c_str(), static_cast<long long>(each.elements));
    else
      result[each.tensor] = {each.dtype, each.shape, each.sum.digest};
  }
  return result;
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

} // namespace reshard::tools
