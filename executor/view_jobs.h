// Faces (schema/plan.fbs): params of a plan that show quantised ones as they were, or others as if they were quantised.
// Those that are read and written as bytes go become forms and matrices of a LocalRank, which packing.cpp and
// copies.cpp follow; those that are gathered get memory here, and what is to be computed from it, or into it, is a list
// of jobs.
#pragma once

#include "executor/device.h"
#include "executor/local_amax.h"

#include <memory>
#include <unordered_map>

namespace reshard {

/// Of one rank.
class ViewJobs {
public:
  /// kBefore: ahead of all copies and messages, from the rank's source; kAfter: when all is there.
  enum JobSet { kBefore, kAfter };
  static constexpr size_t kJobSets = 2;

  /// Completes `rank`, all other buffers of which are bound: runs, forms, matrices, work. What a face shows that is not
  /// bound leaves it unbound. An error text, empty on success. Memory is the device's where the transport has one.
  std::string bind(const Plan &plan, LocalRank &rank, Transport &transport);

  /// Bytes of the rank's arena that are here: of its beginning, where rows of blocks are gathered, and of its end, the
  /// memory of faces.
  uint64_t headBytes() const { return headBytes_; }
  uint64_t tailBytes() const { return tailBytes_; }
  /// Jobs of a stage, each of about a mebibyte; those of one stage do not depend on each other.
  size_t size(JobSet set) const { return jobs_[set].size(); }
  /// Does one; allocates nothing.
  void run(JobSet set, size_t job) const { jobs_[set][job].run(localAmax_); }
  /// The step `reduce` for the instances of a target's face `amax` from `buffer` on: tensor scales from the largest
  /// magnitudes.
  void reduce(uint32_t buffer) const;
  /// The same for a device: all jobs of a stage, or the step, are appended to tables.
  void tabulate(JobSet set, Tables &tables) const;
  void reduce(uint32_t buffer, Tables &tables) const;

  /// The matrices behind a face, an instance's, without their memory.
  static kernels::Quantized matricesOf(const schema::Endpoint &endpoint, uint32_t param, uint32_t meshRank);

private:
  struct Job {
    enum Kind { scales, unswizzle, swizzle, clearPadding, amax, tensorScales } kind;
    kernels::Quantized matrices;
    std::byte *memory; // of the face; of `scales` and `largest`, of what it shows
    uint64_t first = 0,
             count =
                 0; // rows of blocks; of `largest` the matrix; of `tensorScales` how many numbers there are for each
    std::byte *number = nullptr; // of `largest`, where it goes
    void run(const std::vector<LocalAmax> &amax) const;
    void tabulate(const std::vector<LocalAmax> &amax, Tables &tables) const;
  };
  struct Free {
    void operator()(std::byte *memory) const;
  };
  void addJobs(const schema::QuantizedView &view, bool source, const kernels::Quantized &matrices, std::byte *memory,
               uint64_t bytes, uint32_t buffer);
  void addRows(JobSet set, Job job);

  std::vector<std::vector<std::byte *>> tables_; // of runs that are faces
  std::unique_ptr<std::byte, Free> memory_;
  uint64_t headBytes_ = 0, tailBytes_ = 0;
  std::unordered_map<uint32_t, Job> reduces_; // by buffer
  std::vector<LocalAmax> localAmax_;
  std::vector<Job> jobs_[kJobSets];
};

} // namespace reshard
