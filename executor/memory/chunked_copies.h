// SPDX-License-Identifier: Apache-2.0
// Copies within the memory of this process, from operand to operand, cut into chunks of about 1 MiB.
#pragma once

#include "executor/memory/file_copies.h"
#include "executor/memory/view_jobs.h"
#include "kernels/kernels.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reshard {

class ChunkedCopies {
public:
  /// Appends the chunks of a copy from operand `input` of rank `from` to `output` of rank `to`; `input` null: of zeros.
  /// Fails if the operands' shapes differ or a buffer is not bound.
  Status add(const LocalRank &from, const schema::Operand *input, const LocalRank &to, const schema::Operand &output);

  /// Appends a step `reduce` on a buffer (a quantized view `amax`) of a rank.
  void addReduce(const LocalRank &rank, uint32_t buffer);

  /// Appends what a step `copy`, `fill` or `reduce` of a rank does. Fails as add.
  Status addStep(const LocalRank &rank, const schema::Step &step);

  /// The number of chunks, and their bytes.
  size_t size() const { return chunks_.size(); }
  uint64_t bytes() const { return bytes_; }

  /// The bytes of a chunk, and its target memory; 0 and null for a step `reduce`.
  uint64_t bytes(size_t chunk) const {
    const Chunk &each = chunks_[chunk];
    return each.target ? each.count * shapes_[each.shape].rows.rowBytes : 0;
  }
  const std::byte *target(size_t chunk) const { return chunks_[chunk].target; }
  /// Whether a chunk writes memory that later chunks or jobs read and that lives in this process only.
  bool transient(size_t chunk) const { return chunks_[chunk].transient; }

  /// Copies a chunk; allocates nothing. `stream`: as for kernels::copyRows.
  void run(size_t chunk, bool stream) const;
  /// As run; a target of 4 KiB or more without gaps, and ranges of 64 KiB or more between gaps, are written to the file
  /// in which they lie. Each thread allocates a buffer of 256 KiB, or of one row, when it first needs one.
  Status run(size_t chunk, bool stream, const FileCopies &files) const;

private:
  /// Rows [first, first + count) of a shape. Source null: zeros. Target null: `shape` is an index in reduces_.
  struct Chunk {
    std::byte *target;
    const std::byte *source;
    uint32_t shape;
    bool transient;
    uint64_t first, count;
  };
  /// What a chunk copies. On either side, rows [i * n, (i + 1) * n) follow each other without gaps; `targetContiguous`
  /// is 0 if the target is not written in ranges.
  struct Shape {
    kernels::Strided rows;
    kernels::Conversion conversion;
    uint64_t sourceContiguous, targetContiguous;
  };
  static Status copyToFile(const Shape &shape, const Chunk &rows, const FileCopies &files);
  static void copy(const Shape &shape, const std::byte *source, std::byte *target, uint64_t first, uint64_t count,
                   bool stream);
  uint32_t shapeNumber(const kernels::Strided &shape, const kernels::Conversion &conversion);
  void cutBlocks(const kernels::Strided &shape, const kernels::Conversion &conversion, const std::byte *source,
                 std::byte *target, bool transient);
  void cut(kernels::Strided shape, const kernels::Conversion &conversion, const std::byte *source, std::byte *target,
           bool transient);

  std::vector<Shape> shapes_;
  std::vector<Chunk> chunks_;
  std::vector<std::pair<const ViewJobs *, uint32_t>> reduces_;
  uint64_t bytes_ = 0;
};

} // namespace reshard
