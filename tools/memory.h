// Where the params of an execution stand: anonymous memory, or mapped safetensors files.
#pragma once

#include "tools/safetensors.h"
#include "tools/synthesize.h"

#include <memory>
#include <set>
#include <string>
#include <vector>

namespace reshard::tools {

/// The memory of all endpoints of a plan, place by place.
class Memory {
public:
  explicit Memory(const Plan &plan) : plan_(plan) {}
  /// Of these world ranks alone, ascending; files belong to all.
  Memory(const Plan &plan, std::vector<uint32_t> ranks) : plan_(plan), ranks_(std::move(ranks)) {}
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;

  /// Anonymous memory for an endpoint, every page touched; `shared`: such that other processes can map it.
  std::string allocate(uint32_t endpoint, bool shared = false);
  /// The files of a folder, checked against the manifest before anything is used: missing and extra files, names,
  /// shapes, dtypes. `writable`: to be written as well. `unknown`: gets the names of tensors that the plan does not
  /// know, which are refused without it.
  std::string openFiles(uint32_t endpoint, const std::string &folder, bool writable = false,
                        std::set<std::string> *unknown = nullptr);
  /// New files in an empty folder, of their final size; of a checkpoint each of `shardBytes` at most (0: 5 GB, as
  /// Hugging Face), or of one tensor.
  std::string createFiles(uint32_t endpoint, const std::string &folder, uint64_t shardBytes);
  /// Leaves the places of an endpoint to others; its memory stays.
  void leave(uint32_t endpoint);

  /// Gives the pages of all files back (MappedFile::release).
  void release() const;
  /// Whether a file that was opened is another than then (MappedFile::changed): an error text, empty where none is.
  std::string changed() const;

  const std::vector<MeshRankMemory> &rankMemories() const { return rankMemories_; }

private:
  MeshRankMemory &addRank(uint32_t endpoint, uint32_t meshRank);
  std::string useFile(uint32_t endpoint, uint32_t meshRank, const std::string &what, Checkpoint &checkpoint,
                      std::set<std::string> *unknown = nullptr);

  bool mine(const schema::Endpoint &endpoint, uint32_t meshRank) const;

  const Plan &plan_;
  std::vector<uint32_t> ranks_; // none: all
  std::vector<MeshRankMemory> rankMemories_;
  std::vector<std::unique_ptr<Checkpoint>> checkpoints_;
  std::vector<std::pair<void *, size_t>> mappings_;
  uint64_t allocated_ = 0;
  std::vector<int> shared_; // files of mappings
};

/// All params of a place as they stand in its file.
std::vector<TensorSpec> specs(const Plan &plan, uint32_t endpoint, uint32_t meshRank);

/// Compares target memory with source memory through the layouts, tensor by tensor; padding with zeros. An element that
/// no part covers counts as a mismatch. `progress` is called by this thread.
CheckResult compare(const Plan &plan, const Memory &source, const Memory &target, unsigned threads,
                    const std::function<void(double)> &progress = {});

/// Source replicas that do not hold the same, each with the instance it was compared with. Of params that stand
/// quantised codes and scales are compared, where the blocks are the same.
struct ReplicaResult {
  uint64_t comparedBytes = 0;
  std::vector<std::string> differences; // by tensor, then by place; then those of quantised params
  std::vector<std::string>
      skipped; // tensor patterns that several params hold, one of them quantised: not compared with each other
};
ReplicaResult compareReplicas(const Plan &plan, const Memory &source, unsigned threads,
                              const std::function<void(double)> &progress = {});

} // namespace reshard::tools
