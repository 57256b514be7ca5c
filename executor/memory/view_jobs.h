// SPDX-License-Identifier: Apache-2.0
// Quantized views (schema/plan.fbs): params of a plan that present quantized params as elements, or plain ones as
// quantized. Views that are converted row by row become storage forms and view bases of a LocalRank, which packing.cpp
// and chunked_copies.cpp apply. Staged views get memory here; computing them, or their bases from them, is a list of
// jobs.
#pragma once

#include "executor/interfaces/device.h"
#include "executor/memory/local_rank.h"

#include <memory>
#include <unordered_map>

namespace reshard {

/// The elements of one matrix of a part that a source param holds on a rank.
class LocalAmax {
public:
  /// Matrix `number` (in the order of the view) of the part of `view`, which has ViewKind::amax, on a mesh rank.
  LocalAmax(const schema::Endpoint &endpoint, const schema::Param &view, uint32_t meshRank, int64_t number);

  /// The amax of plain elements, or of a quantized param: 0 if there are no elements, NaN if one is not finite.
  /// Allocates nothing.
  float of(kernels::NumberFormat wide, const std::byte *elements) const;
  float of(const kernels::Quantized &matrices) const;

  /// Appends to tables the same computation on a device, with its result in *number (fp32).
  void tabulate(kernels::NumberFormat wide, const std::byte *elements, std::byte *number, Tables &tables) const;
  void tabulate(const kernels::Quantized &matrices, std::byte *number, Tables &tables) const;

private:
  struct Rectangle {
    uint64_t first, rows, columns, step; // in elements; `step` is the stride of rows
    kernels::Strided shape(uint64_t item) const;
  };
  struct Matrix;
  static Matrix matrixOf(const schema::Endpoint &endpoint, const schema::Param &view, uint32_t meshRank,
                         int64_t number);
  static void repeat(const Rectangle &rectangle, int64_t first, int64_t length, int64_t stride,
                     std::vector<Rectangle> &repeated);
  static void clear(std::byte *number, Tables &tables);
  std::vector<Rectangle> rectangles_;
};

/// The tensor scale of a matrix, from the amax values of its `count` parts.
float tensorScale(const float *amax, uint64_t count);

class Transport;

/// The quantized views of one rank.
class ViewJobs {
public:
  /// kBefore: before all copies and messages, from the rank's source; kAfter: after all of them.
  enum JobSet { kBefore, kAfter };
  static constexpr size_t kJobSets = 2;

  /// Sets the pointers, forms, view bases and jobs of `rank`, whose other buffers must be bound. A view stays unbound
  /// if its base is. Memory is the device's if the transport has one.
  Status bind(const Plan &plan, LocalRank &rank, Transport &transport);

  /// Bytes of the rank's arena that are allocated here: its head, where elements are staged until whole rows of blocks
  /// can be quantized; and its end, the memory of views.
  uint64_t headBytes() const { return headBytes_; }
  uint64_t tailBytes() const { return tailBytes_; }
  /// Whether an address is in that memory. Of device memory it is never asked.
  bool owns(const std::byte *at) const {
    return memory_ && at >= memory_.get() && at < memory_.get() + headBytes_ + tailBytes_;
  }
  /// The number of jobs of a set, each of about 1 MiB; jobs of one set are independent.
  size_t size(JobSet set) const { return jobs_[set].size(); }
  /// Runs one job; allocates nothing.
  void run(JobSet set, size_t job) const { jobs_[set][job].run(localAmax_); }
  /// Runs the step `reduce` for a buffer of a target's view `amax`: computes tensor scales from amax values.
  void reduce(uint32_t buffer) const;
  /// The same for a device: appends all jobs of a set, or the step, to tables.
  void tabulate(JobSet set, Tables &tables) const;
  void reduce(uint32_t buffer, Tables &tables) const;

  /// The matrices of an instance of a view, without their memory.
  static kernels::Quantized matricesOf(const schema::Endpoint &endpoint, uint32_t param, uint32_t meshRank);

private:
  struct Job {
    enum Kind { scales, toPlain, fromPlain, clearPadding, amax, tensorScales } kind;
    kernels::Quantized matrices;
    std::byte *memory;             // the view's memory; for `scales` and `amax`, the base's
    uint64_t first = 0, count = 0; // rows of blocks; `amax`: first is an index in localAmax_; `tensorScales`: count is
                                   // the number of amax values of each matrix
    std::byte *number = nullptr;   // `amax`: its result
    void run(const std::vector<LocalAmax> &amax) const;
    void tabulate(const std::vector<LocalAmax> &amax, Tables &tables) const;
  };
  struct FreeDeleter {
    void operator()(std::byte *memory) const;
  };
  class Binder;
  Result<std::byte *> allocate(uint64_t bytes, Transport &transport);
  /// An instance of a view: `memory` is that of its `bytes`, or for `scales` of its base; `buffer` is its number.
  struct Instance {
    bool source;
    kernels::Quantized matrices;
    std::byte *memory;
    uint64_t bytes;
    uint32_t buffer;
  };
  void addJobs(const schema::QuantizedView &view, const Instance &instance);
  void addRows(JobSet set, Job job);

  std::vector<std::vector<std::byte *>> tables_; // by BufferRange: the memory of each instance, if it is a view
  std::unique_ptr<std::byte, FreeDeleter> memory_;
  uint64_t headBytes_ = 0, tailBytes_ = 0;
  std::unordered_map<uint32_t, Job> reduces_; // by buffer
  std::vector<LocalAmax> localAmax_;
  std::vector<Job> jobs_[kJobSets];
};

} // namespace reshard
