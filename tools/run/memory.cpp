// SPDX-License-Identifier: Apache-2.0
// Allocates the memory of params, maps or creates the files of storage endpoints, mirrors memory on a device, and
// releases pages of files.
#include "tools/run/memory.h"

#include "base/input_file.h"
#include "base/text.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/layout/quantized_views.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <malloc.h>
#include <set>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <unistd.h>

namespace reshard::tools {

using namespace checkpoints;
using namespace verify;

namespace {

std::string dimensionsText(const std::vector<int64_t> &shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d)
    text += (d ? ", " : "") + std::to_string(shape[d]);
  return text + "]";
}

/// Whether another param of the endpoint holds every tensor of a param too: then a checkpoint may omit it (tied weights
/// are usually stored once). For a quantized param, the tensors of its elements count.
bool heldElsewhere(const schema::Endpoint &endpoint, uint32_t number) {
  if (const auto by = elementViews(endpoint)[number])
    number = by->view;
  for (const schema::Part *part : orEmpty(endpoint.params()->Get(number)->parts())) {
    bool found = false;
    for (uint32_t p = 0; p < number && !found; ++p)
      for (const schema::Part *other : orEmpty(endpoint.params()->Get(p)->parts()))
        found = found || (part->pattern() >= 0 && other->pattern() == part->pattern());
    if (!found)
      return false;
  }
  return true;
}

std::string locationOf(const schema::Endpoint &endpoint, uint32_t meshRank) {
  return endpoint.checkpoint() ? "the checkpoint" : schema::meshRankName(endpoint, meshRank);
}

/// The grid of the chunks of a target's param: where each begins in the whole tensor, and the shape of that.
class ChunkGrid {
public:
  /// An error if a dimension is cut along several axes, or if its length does not fit.
  static Result<ChunkGrid> of(const schema::Endpoint &endpoint, const schema::Param &param) {
    ChunkGrid grid(endpoint, param);
    for (const schema::Extent *extent : orEmpty(param.shape())) {
      std::vector<int64_t> &begins = grid.begins_.emplace_back();
      int64_t end = 0;
      for (const int64_t length : *extent->at()) { // 0 at coordinates without a piece
        begins.push_back(end);
        if (__builtin_add_overflow(end, length, &end) || schema::orEmpty(extent->axes()).size() > 1)
          return failed("the chunks of param '" + param.name()->str() + "' of " + endpoint.role()->str() +
                        " do not form a grid: cut each dimension at one set of offsets");
      }
      grid.shape_.push_back(end);
    }
    return grid;
  }

  const std::vector<int64_t> &shape() const { return shape_; }
  std::vector<int64_t> offsets(uint32_t meshRank) const {
    std::vector<int64_t> offsets;
    for (size_t d = 0; d < begins_.size(); ++d)
      offsets.push_back(begins_[d][static_cast<size_t>(
          schema::coordinate(endpoint_, param_.shape()->Get(static_cast<uint32_t>(d))->axes(), meshRank))]);
    return offsets;
  }

private:
  ChunkGrid(const schema::Endpoint &endpoint, const schema::Param &param) : endpoint_(endpoint), param_(param) {}

  const schema::Endpoint &endpoint_;
  const schema::Param &param_;
  std::vector<std::vector<int64_t>> begins_; // by dimension and coordinate
  std::vector<int64_t> shape_;
};

/// The tensors of a checkpoint, one chunk for each mesh rank that has a part of the tensor.
Result<std::vector<ChunkedTensor>> chunkedTensors(const Plan &plan, uint32_t endpointNumber) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(endpointNumber);
  std::vector<ChunkedTensor> tensors;
  std::map<std::string, size_t> numbers;
  for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p) {
    const schema::Param &param = *endpoint.params()->Get(p);
    if (!schema::bindable(param))
      continue;
    const Result<ChunkGrid> grid = ChunkGrid::of(endpoint, param);
    if (!grid.ok())
      return grid.status();
    for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size(); ++meshRank) {
      if (!schema::present(endpoint, param, meshRank))
        continue;
      const std::vector<int64_t> offsets = grid->offsets(meshRank);
      for (schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, meshRank)) {
        const auto [at, added] = numbers.try_emplace(instance.name, tensors.size());
        if (added)
          tensors.push_back({instance.name, schema::storageDtypeOf(param), grid->shape(), {}});
        std::vector<ChunkedTensor::Chunk> &chunks = tensors[at->second].chunks;
        if (!chunks.empty() && chunks.back().offsets >= offsets)
          return failed("the chunks of tensor '" + instance.name + "' of " + endpoint.role()->str() +
                        " are not in row-major order");
        chunks.push_back({offsets, std::move(instance.shape)});
      }
    }
  }
  return tensors;
}

std::vector<std::string> namesOf(const StoredCheckpoint &checkpoint) {
  std::vector<std::string> names;
  for (const auto &[tensorName, tensor] : checkpoint.tensors)
    names.push_back(tensorName);
  return names;
}

/// Adds the names of tensors that the plan does not use to `unknown`, or refuses them if it is null.
Status reportLeft(uint32_t endpoint, const std::string &what, std::set<std::string> left,
                  std::set<std::string> *unknown) {
  if (unknown)
    unknown->merge(left);
  else if (!left.empty())
    return failed(what + " has tensor '" + *left.begin() + "', which the plan does not use" +
                  (left.size() > 1 ? " (and " + std::to_string(left.size() - 1) + " more)" : "") +
                  (endpoint == 0 ? "; --allow=extra ignores such tensors" : ""));
  return {};
}

} // namespace

Memory::~Memory() {
  for (const auto &[data, bytes] : mappings_)
    ::munmap(data, bytes);
  for (const int file : shared_)
    ::close(file);
}

std::vector<const MappedFile *> Memory::files() const {
  std::vector<const MappedFile *> all;
  for (const auto &checkpoint : checkpoints_)
    for (const MappedFile &file : checkpoint->files)
      all.push_back(&file);
  return all;
}

void Memory::release() const {
  for (const MappedFile *file : files())
    file->release();
}

Status Memory::unchanged() const {
  for (const MappedFile *file : files())
    if (Status status = file->unchanged(); !status.ok())
      return status;
  return {};
}

std::vector<std::string> Memory::notes() const {
  std::vector<std::string> all;
  for (const auto &checkpoint : checkpoints_)
    all.insert(all.end(), checkpoint->notes.begin(), checkpoint->notes.end());
  return all;
}

MeshRankMemory &Memory::addRank(uint32_t endpointNumber, uint32_t meshRank) {
  const schema::Endpoint &endpoint = *plan_.manifest().endpoints()->Get(endpointNumber);
  MeshRankMemory &memory = rankMemories_.emplace_back();
  memory.endpoint = endpointNumber;
  memory.meshRank = meshRank;
  for (const schema::Param *param : orEmpty(endpoint.params()))
    memory.params.emplace_back(schema::instanceCount(endpoint, *param, meshRank), nullptr);
  return memory;
}

std::vector<TensorSpec> specs(const Plan &plan, uint32_t endpointNumber, uint32_t meshRank) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(endpointNumber);
  std::vector<TensorSpec> result;
  for (uint32_t p = 0; p < orEmpty(endpoint.params()).size(); ++p)
    if (schema::bindable(*endpoint.params()->Get(p)))
      for (schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, meshRank))
        result.push_back({std::move(instance.name), schema::storageDtypeOf(*endpoint.params()->Get(p)),
                          std::move(instance.shape), instance.bytes});
  return result;
}

bool Memory::mine(const schema::Endpoint &endpoint, uint32_t meshRank) const {
  return ranks_.empty() || endpoint.storage() ||
         std::binary_search(ranks_.begin(), ranks_.end(), endpoint.ranks()->Get(meshRank));
}

Status Memory::allocate(uint32_t endpointNumber, bool shared) {
  constexpr int64_t kAlignment = 64;
  const schema::Endpoint &endpoint = *plan_.manifest().endpoints()->Get(endpointNumber);
  // Every page is touched, and a system that promises more memory than it has ends processes where it runs out.
  struct sysinfo system{};
  ::sysinfo(&system);
  const uint64_t machine = (uint64_t{system.totalram} + system.totalswap) * system.mem_unit;
  for (uint32_t p = 0; p < endpoint.ranks()->size(); ++p) {
    if (!mine(endpoint, p))
      continue;
    MeshRankMemory &memory = addRank(endpointNumber, p);
    int64_t total = 0;
    auto forEach = [&](auto visit) {
      for (uint32_t i = 0; i < memory.params.size(); ++i) {
        const schema::Param &param = *endpoint.params()->Get(i);
        if (param.view())
          continue;
        int64_t bytes = schema::itemBytes(schema::storageDtypeOf(param));
        for (int64_t length : schema::localShape(endpoint, param, p))
          bytes *= length;
        for (std::byte *&pointer : memory.params[i])
          visit(pointer, (bytes + kAlignment - 1) / kAlignment * kAlignment);
      }
    };
    bool fits = true;
    forEach([&](std::byte *&, int64_t bytes) { fits = fits && !__builtin_add_overflow(total, bytes, &total); });
    allocated_ += fits ? static_cast<uint64_t>(total) : 0;
    if (!fits || allocated_ > machine)
      return failed("cannot allocate the params of " + endpoint.role()->str() + ": ranks up to " +
                    locationOf(endpoint, p) + " need " +
                    (fits ? humanBytes(static_cast<double>(allocated_)) : "more than 2^63 bytes") +
                    ", but this machine has " + humanBytes(static_cast<double>(machine)));
    if (total == 0)
      total = kAlignment;
    const int file = shared ? ::memfd_create("reshard-params", MFD_CLOEXEC) : -1;
    if (file >= 0)
      shared_.push_back(file);
    const bool sized = !shared || (file >= 0 && ::ftruncate(file, static_cast<off_t>(total)) == 0);
    const int kind = shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *map = sized
                    ? ::mmap(nullptr, static_cast<size_t>(total), PROT_READ | PROT_WRITE, kind | MAP_POPULATE, file, 0)
                    : MAP_FAILED;
    if (map == MAP_FAILED)
      return failed("cannot allocate " + humanBytes(static_cast<double>(total)) + " for " + endpoint.role()->str() +
                    " " + locationOf(endpoint, p) + ": " + std::strerror(errno));
    mappings_.emplace_back(map, static_cast<size_t>(total));
    auto *next = static_cast<std::byte *>(map);
    forEach([&](std::byte *&pointer, int64_t bytes) {
      pointer = next;
      next += bytes;
    });
  }
  return {};
}

/// Opens a file of safetensors, or the folder of a checkpoint, and binds a mesh rank to its tensors. Refuses missing
/// tensors, other dtypes and other shapes. Tensors that the plan does not use are added to `unknown`, or refused if it
/// is null.
Status Memory::openTensors(uint32_t endpointNumber, uint32_t meshRankNumber, const std::string &path, bool writable,
                           std::set<std::string> *unknown) {
  const schema::Endpoint &endpoint = *plan_.manifest().endpoints()->Get(endpointNumber);
  const std::string what = (endpoint.checkpoint() ? "checkpoint '" : "'") + path + "'";
  Checkpoint &checkpoint = *checkpoints_.emplace_back(std::make_unique<Checkpoint>());
  std::error_code error;
  if (Status status = endpoint.checkpoint() && std::filesystem::is_directory(path, error)
                          ? readCheckpoint(path, checkpoint, writable)
                          : readSafetensors(path, checkpoint, writable);
      !status.ok())
    return status;
  MeshRankMemory &memory = addRank(endpointNumber, meshRankNumber);
  if (endpointNumber == 0)
    if (Status status = renames_.apply(checkpoint.tensors, "tensors of " + what); !status.ok())
      return status;
  const auto views = elementViews(endpoint);
  std::set<std::string> left;
  for (const auto &[name, view] : checkpoint.tensors)
    left.insert(name);
  for (uint32_t p = 0; p < memory.params.size(); ++p) {
    const schema::Param &param = *endpoint.params()->Get(p);
    if (!schema::bindable(param))
      continue;
    for (const schema::ParamInstance &instance : schema::instances(plan_.manifest(), endpoint, p, meshRankNumber)) {
      const auto found = checkpoint.tensors.find(instance.name);
      if (found == checkpoint.tensors.end()) {
        if (endpoint.checkpoint() && endpointNumber == 0 && heldElsewhere(endpoint, p))
          continue;
        return failed(what + " has no tensor '" + instance.name + "'" +
                      suggestion(instance.name, {left.begin(), left.end()}));
      }
      const TensorView &view = found->second;
      if (view.dtype != schema::storageDtypeOf(param))
        return failed(what + ": tensor '" + instance.name + "' is " + schema::dtypeName(view.dtype) + ", expected " +
                      schema::dtypeName(schema::storageDtypeOf(param)) +
                      (views[p] ? std::string(", as format ") +
                                      schema::formatOf(*endpoint.params()->Get(views[p]->view)->view()).name +
                                      " has it: expected a checkpoint in this format"
                       : endpointNumber == 0 ? "; 'dtype: stored' in the job's source uses the dtypes of its files"
                                             : ""));
      if (view.shape != instance.shape)
        return failed(what + ": tensor '" + instance.name + "' has shape " + dimensionsText(view.shape) +
                      ", expected " + dimensionsText(instance.shape));
      left.erase(instance.name);
      memory.params[p][instance.instance] = view.data;
    }
  }
  return reportLeft(endpointNumber, what, std::move(left), unknown);
}

/// Opens a checkpoint in a format with chunks. The mesh ranks that have a param are bound to its chunks in order. The
/// lengths of all chunks in order, which tile the tensor, determine their offsets: it is enough to compare the lengths
/// with the plan's.
Status Memory::openChunks(uint32_t endpointNumber, const std::string &path, bool writable,
                          std::set<std::string> *unknown) {
  const schema::Endpoint &endpoint = *plan_.manifest().endpoints()->Get(endpointNumber);
  const reshard::StorageFormat format = schema::formatOf(endpoint);
  const char *const remedy = endpointNumber == 0 ? "; compile the plan with this source" : "";
  Result<StoredCheckpoint> stored = readStoredCheckpoint(path, format);
  if (!stored.ok())
    return stored.status();
  if (endpointNumber == 0)
    if (Status status = renameTensors(*stored, renames_, path); !status.ok())
      return status;
  if (stored->format != format)
    return failed("'" + path + "' has the format '" + name(stored->format) + "', but the plan was compiled for '" +
                  name(format) + "'" + remedy);
  const bool folder = std::filesystem::is_directory(path);
  checkpoints_.push_back(std::make_unique<Checkpoint>());
  std::vector<MappedFile> &files = checkpoints_.back()->files;
  std::map<std::string, size_t> opened;
  std::map<std::string, size_t> used; // chunks of each tensor that the plan has
  for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size(); ++meshRank) {
    MeshRankMemory &memory = addRank(endpointNumber, meshRank);
    for (uint32_t p = 0; p < memory.params.size(); ++p) {
      const schema::Param &param = *endpoint.params()->Get(p);
      if (!schema::bindable(param))
        continue;
      for (const schema::ParamInstance &instance : schema::instances(plan_.manifest(), endpoint, p, meshRank)) {
        const std::string title = "'" + path + "': tensor '" + instance.name + "'";
        const auto found = stored->tensors.find(instance.name);
        if (found == stored->tensors.end() && endpointNumber == 0 && heldElsewhere(endpoint, p))
          continue;
        if (found == stored->tensors.end())
          return failed("'" + path + "' has no tensor '" + instance.name + "'" +
                        suggestion(instance.name, namesOf(*stored)));
        const StoredTensor &tensor = found->second;
        if (tensor.dtype != schema::storageDtypeOf(param))
          return failed(title + " is " + schema::dtypeName(tensor.dtype) + ", expected " +
                        schema::dtypeName(schema::storageDtypeOf(param)));
        const size_t number = used[instance.name]++;
        if (number >= tensor.chunks.size() || tensor.chunks[number].lengths != instance.shape)
          return failed(title + ": chunk " + std::to_string(number) + " " +
                        (number >= tensor.chunks.size()
                             ? "does not exist"
                             : "has shape " + dimensionsText(tensor.chunks[number].lengths)) +
                        ", expected shape " + dimensionsText(instance.shape) + ", that of the plan" + remedy);
        const StoredChunk &chunk = tensor.chunks[number];
        if (chunk.bytes == 0) { // it may be in no file, and its memory is not accessed
          static std::byte empty{};
          memory.params[p][instance.instance] = &empty;
          continue;
        }
        const auto [file, added] = opened.try_emplace(chunk.file, files.size());
        if (added) {
          Result<MappedFile> mapped = MappedFile::open(folder ? path + "/" + chunk.file : path,
                                                       writable ? MappedFile::Access::write : MappedFile::Access::read);
          if (!mapped.ok())
            return mapped.status();
          if (Status status = writable ? Status() : checkSame(stored->files.at(chunk.file), *mapped); !status.ok())
            return status;
          files.push_back(std::move(*mapped));
        }
        const MappedFile &mapped = files[file->second];
        if (chunk.begin > mapped.bytes() || chunk.bytes > mapped.bytes() - chunk.begin)
          return failed(title + ": the file '" + chunk.file + "' became shorter while it was opened");
        memory.params[p][instance.instance] = const_cast<std::byte *>(mapped.data()) + chunk.begin;
      }
    }
  }
  for (const auto &[tensorName, count] : used)
    if (const size_t chunks = stored->tensors.at(tensorName).chunks.size(); chunks != count)
      return failed("'" + path + "': tensor '" + tensorName + "' has " + std::to_string(chunks) +
                    " chunks, but the plan was compiled for " + std::to_string(count) + remedy);
  std::set<std::string> left;
  for (const auto &[tensorName, tensor] : stored->tensors)
    if (!used.contains(tensorName))
      left.insert(tensorName);
  if (endpointNumber == 0) {
    objects_ = stored->objects;
    for (const StoredReplica &each : stored->replicas)
      if (used.contains(each.tensor))
        storedReplicas_.push_back(each);
  }
  return reportLeft(endpointNumber, "checkpoint '" + path + "'", std::move(left), unknown);
}

Status Memory::openFiles(uint32_t endpointNumber, const std::string &folder, bool writable,
                         std::set<std::string> *unknown) {
  const schema::Endpoint &endpoint = *plan_.manifest().endpoints()->Get(endpointNumber);
  if (storesChunks(schema::formatOf(endpoint)))
    return openChunks(endpointNumber, folder, writable, unknown);
  if (endpoint.checkpoint())
    return openTensors(endpointNumber, 0, folder, writable, unknown);
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))
    return failed("'" + folder + "' is not a folder");
  if (endpointNumber == 0 && !renames_.empty())
    return failed("--rename applies to the tensors of a checkpoint, but the source has a file for each rank");
  std::set<std::string> files;
  for (const auto &entry : std::filesystem::directory_iterator(folder, error))
    if (const std::string name = entry.path().filename(); name.starts_with("rank-") && name.ends_with(".safetensors"))
      files.insert(name);
  for (uint32_t p = 0; p < endpoint.ranks()->size(); ++p) {
    const std::vector<TensorSpec> expected = specs(plan_, endpointNumber, p);
    if (expected.empty())
      continue;
    const std::string name = rankFile(endpoint.ranks()->Get(p)), path = folder + "/" + name;
    if (files.erase(name) == 0)
      return failed("'" + folder + "' has no file '" + name + "' for the params of " + endpoint.role()->str() + " " +
                    locationOf(endpoint, p));
    if (!mine(endpoint, p))
      continue;
    if (Status status = openTensors(endpointNumber, p, path, writable, unknown); !status.ok())
      return status;
  }
  if (!files.empty())
    return failed("'" + folder + "' contains '" + *files.begin() + "', but the " + endpoint.role()->str() +
                  " has no params on that rank");
  return {};
}

Status Memory::createFiles(uint32_t endpointNumber, const std::string &folder, uint64_t shardBytes,
                           const std::vector<ObjectSpec> &objects) {
  constexpr int64_t kShardBytes = 5'000'000'000;
  const schema::Endpoint &endpoint = *plan_.manifest().endpoints()->Get(endpointNumber);
  const reshard::StorageFormat format = schema::formatOf(endpoint);
  if (endpointNumber == 0 && storesChunks(format))
    return failed(std::string("a source of format '") + name(format) + "' cannot be written, expected 'safetensors'");
  if (endpoint.checkpoint()) {
    const Result<std::vector<ChunkedTensor>> tensors = chunkedTensors(plan_, endpointNumber);
    if (!tensors.ok())
      return tensors.status();
    const int64_t fileBytes = shardBytes ? static_cast<int64_t>(shardBytes) : kShardBytes;
    if (Status status = storedFormat(format).create(folder, {*tensors, objects, fileBytes}); !status.ok())
      return status;
    return openFiles(endpointNumber, folder, true);
  }
  for (uint32_t p = 0; p < endpoint.ranks()->size(); ++p) {
    if (!mine(endpoint, p))
      continue;
    const std::vector<TensorSpec> tensors = specs(plan_, endpointNumber, p);
    if (tensors.empty())
      continue;
    const std::string path = folder + "/" + rankFile(endpoint.ranks()->Get(p));
    if (Status status = createSafetensors(path, tensors); !status.ok())
      return status;
    if (Status status = openTensors(endpointNumber, p, path, true, nullptr); !status.ok())
      return status;
  }
  return {};
}

Status DeviceMemory::mirror(const Plan &plan, const Memory &host, Device &device) {
  constexpr uint64_t kAlignment = 256;
  device_ = &device;
  rankMemories_ = host.rankMemories();
  for (MeshRankMemory &rankMemory : rankMemories_) {
    const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(rankMemory.endpoint);
    const size_t first = pairs_.size();
    uint64_t total = 0;
    for (uint32_t p = 0; p < rankMemory.params.size(); ++p)
      for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, rankMemory.meshRank))
        if (std::byte *at = rankMemory.params[p][instance.instance]) {
          pairs_.push_back({at, nullptr, static_cast<uint64_t>(instance.bytes)});
          total += (pairs_.back().bytes + kAlignment - 1) / kAlignment * kAlignment;
        }
    std::byte *next = nullptr;
    if (pairs_.size() > first) { // empty params need an address too
      const Result<std::byte *> memory = device.allocate(std::max(total, kAlignment));
      if (!memory.ok())
        return Status(memory.status())
            .withPrefix("cannot allocate " + humanBytes(static_cast<double>(total)) + " of device memory: ");
      next = *memory;
    }
    size_t pair = first;
    for (auto &instances : rankMemory.params)
      for (std::byte *&at : instances)
        if (at) {
          pairs_[pair].there = at = next;
          next += (pairs_[pair++].bytes + kAlignment - 1) / kAlignment * kAlignment;
        }
  }
  return {};
}

Status DeviceMemory::copy(bool toDevice) const {
  for (const BufferPair &pair : pairs_)
    if (pair.bytes > 0)
      if (Status status = toDevice ? device_->copy(pair.there, pair.host, pair.bytes)
                                   : device_->copy(pair.host, pair.there, pair.bytes);
          !status.ok())
        return status;
  return {};
}

uint64_t rssBytes() {
  unsigned long long total = 0, resident = 0;
  if (std::FILE *file = std::fopen("/proc/self/statm", "re")) {
    if (std::fscanf(file, "%llu %llu", &total, &resident) != 2)
      resident = 0;
    std::fclose(file);
  }
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

ResidentMemoryLimit::ResidentMemoryLimit(std::vector<const Memory *> files, uint64_t bytes)
    : files_(std::move(files)), bytes_(bytes) {
  if (bytes == 0)
    return;
  // Else each thread keeps freed buffers of up to 32 MiB for its next ones.
  mallopt(M_MMAP_THRESHOLD, 1 << 20);
  thread_ = std::thread([this] { watch(); });
}

ResidentMemoryLimit::~ResidentMemoryLimit() {
  done_ = true;
  if (thread_.joinable())
    thread_.join();
}

void ResidentMemoryLimit::check() const {
  if (bytes_ > 0 && rssBytes() > bytes_ / 2)
    for (const Memory *memory : files_)
      memory->release();
}

void ResidentMemoryLimit::watch() const {
  while (!done_) {
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

} // namespace reshard::tools
