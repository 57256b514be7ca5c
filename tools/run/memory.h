// SPDX-License-Identifier: Apache-2.0
// The memory of the params of an execution: anonymous memory, mapped files, or memory of a device. A limit of what is
// resident, for models larger than memory.
#pragma once

#include "base/renames.h"
#include "base/status.h"
#include "checkpoints/safetensors.h"
#include "checkpoints/stored_checkpoint.h"
#include "checkpoints/stored_format.h"
#include "executor/interfaces/device.h"
#include "executor/load/load.h"
#include "verify/layout/mesh_rank_memory.h"

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace reshard::tools {

/// The memory of a plan's endpoints, by mesh rank.
class Memory {
public:
  explicit Memory(const Plan &plan) : plan_(plan) {}
  /// For these world ranks only, ascending; files of storage endpoints belong to every rank.
  Memory(const Plan &plan, std::vector<uint32_t> ranks) : plan_(plan), ranks_(std::move(ranks)) {}
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  /// Other names for the tensors of the source's files, for openFiles(); the plan has the new ones.
  void rename(Renames renames) { renames_ = std::move(renames); }
  /// Allocates anonymous memory for an endpoint and touches every page. `shared`: other processes can map it.
  Status allocate(uint32_t endpoint, bool shared = false);
  /// Maps the files of a folder, or a checkpoint that is one file. Checks them against the manifest first: missing and
  /// extra files, names, shapes, dtypes. `writable`: maps them for writing too. `unknown`: receives the names of
  /// tensors that the plan does not use; if null, such tensors are an error. Objects of a source are in objects().
  Status openFiles(uint32_t endpoint, const std::string &folder, bool writable = false,
                   std::set<std::string> *unknown = nullptr);
  /// Creates files of their final size in an empty folder. A file of a checkpoint has at most `shardBytes` (0: 5 GB, as
  /// Hugging Face) or one tensor. `objects`: also written; none that the format refuses (StoredFormat::refusal).
  Status createFiles(uint32_t endpoint, const std::string &folder, uint64_t shardBytes,
                     const std::vector<checkpoints::ObjectSpec> &objects = {});

  /// Releases the pages of all files (MappedFile::release).
  void release() const;
  /// An error if an opened file was changed since (MappedFile::unchanged).
  Status unchanged() const;
  /// What of the folders of checkpoints is not read; the user should know.
  std::vector<std::string> notes() const;

  const std::vector<verify::MeshRankMemory> &rankMemories() const { return rankMemories_; }
  /// All mapped files.
  std::vector<const MappedFile *> files() const;
  /// The objects of the source's checkpoint, by name, after openFiles().
  const std::map<std::string, checkpoints::StoredObject> &objects() const { return objects_; }
  /// The replicas in the files of the source, after openFiles().
  const std::vector<checkpoints::StoredReplica> &storedReplicas() const { return storedReplicas_; }

private:
  verify::MeshRankMemory &addRank(uint32_t endpoint, uint32_t meshRank);
  Status openTensors(uint32_t endpoint, uint32_t meshRank, const std::string &path, bool writable,
                     std::set<std::string> *unknown);
  Status openChunks(uint32_t endpoint, const std::string &path, bool writable, std::set<std::string> *unknown);
  bool mine(const schema::Endpoint &endpoint, uint32_t meshRank) const;

  const Plan &plan_;
  std::vector<uint32_t> ranks_; // empty: all
  Renames renames_;             // for the source's tensors
  std::vector<verify::MeshRankMemory> rankMemories_;
  std::vector<std::unique_ptr<checkpoints::Checkpoint>> checkpoints_;
  std::map<std::string, checkpoints::StoredObject> objects_;
  std::vector<checkpoints::StoredReplica> storedReplicas_;
  std::vector<std::pair<void *, size_t>> mappings_;
  uint64_t allocated_ = 0;
  std::vector<int> shared_; // file descriptors of shared mappings
};

/// The tensors in the file of a mesh rank.
std::vector<checkpoints::TensorSpec> specs(const Plan &plan, uint32_t endpoint, uint32_t meshRank);

/// Device memory for the params of an execution, with copies to and from host memory.
class DeviceMemory {
public:
  /// Allocates device memory for each buffer of `host`. Both arguments must outlive this.
  Status mirror(const Plan &plan, const Memory &host, Device &device);
  /// The mesh ranks of `host`, with device pointers.
  const std::vector<verify::MeshRankMemory> &rankMemories() const { return rankMemories_; }

  /// Copies all buffers.
  Status toDevice() const { return copy(true); }
  Status toHost() const { return copy(false); }

private:
  struct BufferPair {
    std::byte *host, *there;
    uint64_t bytes;
  };
  Status copy(bool toDevice) const;

  Device *device_ = nullptr;
  std::vector<verify::MeshRankMemory> rankMemories_;
  std::vector<BufferPair> pairs_; // by instance
};

/// The resident memory of this process now, in bytes.
uint64_t rssBytes();

/// Keeps the resident memory of this process below `bytes` (0: no limit) by releasing the pages of mapped files. The
/// contents remain in the files: the next access to a page reads it again. Threads that access files call check(). For
/// other accesses, a thread calls it a few hundred times a second while this object lives. With a limit, the process's
/// allocator returns large buffers to the system from now on.
class ResidentMemoryLimit {
public:
  ResidentMemoryLimit(std::vector<const Memory *> files, uint64_t bytes);
  ~ResidentMemoryLimit();
  ResidentMemoryLimit(const ResidentMemoryLimit &) = delete;
  ResidentMemoryLimit &operator=(const ResidentMemoryLimit &) = delete;

  /// Releases the files' pages if the process is at half of the limit: other threads access more before their next
  /// call. Takes microseconds if there is nothing to release. Any thread may call this, after about 1 MiB of accesses.
  void check() const;

private:
  void watch() const;

  const std::vector<const Memory *> files_;
  const uint64_t bytes_;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

} // namespace reshard::tools
