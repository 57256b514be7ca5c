// SPDX-License-Identifier: Apache-2.0
// Cuts the strided ranges of a copy at rows, at blocks of quantized views, and at bytes of one row, and copies each
// chunk by a kernel or, into a mapped file, by system calls.
#include "executor/memory/chunked_copies.h"

#include "executor/memory/copy_progress.h"
#include "executor/memory/operands.h"
#include "kernels/cpu/transpose.h"
#include "schema/limits.h"

#include <algorithm>
#include <chrono>

namespace reshard {

using namespace schema;

namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
/// Bytes that are converted, or collected from several ranges, are written to files in parts of about this size.
constexpr uint64_t kFilePartBytes = FileCopies::kBufferBytes;
static_assert(kernels::kMaxLoops > kMaxLoops, "a row that is cut into chunks adds a loop to those of the plan");

/// Whether a copy writes memory of the rank's quantized views.
bool writesViews(const LocalRank &rank, const std::byte *target, const kernels::Conversion &conversion) {
  if (!rank.viewJobs)
    return false;
  if (conversion.write.kind != kernels::StorageForm::Kind::elements)
    return rank.viewJobs->owns(target);
  const kernels::Quantized &matrices = conversion.to->matrices;
  return rank.viewJobs->owns(matrices.codes) || rank.viewJobs->owns(matrices.scales);
}

/// Fewer bytes are stored to the mapping: a system call would take longer.
constexpr uint64_t kFileBytes = 4096;
/// The same for ranges that have other data between them. Calls of many threads for short ranges would wait for each
/// other, because each locks the file, and would read the source in small pieces.
constexpr uint64_t kRangeBytes = 64 << 10;

/// The largest n for which rows [i * n, (i + 1) * n) are contiguous on a side, for every i.
uint64_t contiguousRows(const kernels::Strided &shape, int64_t rowBytes, int64_t kernels::Loop::*stride) {
  uint64_t run = 1;
  for (size_t l = shape.loopCount; l-- > 0; run *= shape.loops[l].count)
    if (shape.loops[l].count > 1 && shape.loops[l].*stride != static_cast<int64_t>(run) * rowBytes)
      break;
  return run;
}

/// The offset of a row on a side.
int64_t offsetOf(const kernels::Strided &shape, uint64_t row, int64_t kernels::Loop::*stride) {
  int64_t offset = 0;
  for (size_t l = shape.loopCount; l-- > 0; row /= shape.loops[l].count)
    offset += static_cast<int64_t>(row % shape.loops[l].count) * shape.loops[l].*stride;
  return offset;
}

constexpr double kSeconds = 0.02; // between two reports

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

} // namespace

void ChunkedCopies::copy(const Shape &shape, const std::byte *source, std::byte *target, uint64_t first, uint64_t count,
                         bool stream) {
  if (shape.conversion)
    kernels::convertRows({target, source, shape.rows, first, count}, shape.conversion, stream);
  else if (!source)
    kernels::fillRows(target, shape.rows, first, count);
  else
    kernels::copyRows({target, source, shape.rows, first, count}, stream);
}

void ChunkedCopies::run(size_t chunk, bool stream) const {
  const Chunk &each = chunks_[chunk];
  if (each.target)
    copy(shapes_[each.shape], each.source, each.target, each.first, each.count, stream);
  else
    reduces_[each.shape].first->reduce(reduces_[each.shape].second);
}

Status ChunkedCopies::run(size_t chunk, bool stream, const FileCopies &files) const {
  const Chunk &each = chunks_[chunk];
  const Shape *shape = each.target ? &shapes_[each.shape] : nullptr;
  const auto stored = [&](uint64_t rows) {
    return static_cast<uint64_t>(shape->conversion.write.scale(static_cast<int64_t>(rows * shape->rows.rowBytes)));
  };
  if (!shape || !each.source || shape->targetContiguous == 0 ||
      stored(std::min(shape->targetContiguous, each.count)) <
          (shape->targetContiguous < shape->rows.rows() ? kRangeBytes : kFileBytes) ||
      !files.find(each.target + offsetOf(shape->rows, each.first, &kernels::Loop::targetStride), 1)) {
    run(chunk, stream);
    return {};
  }
  Chunk part = each;
  for (const uint64_t end = each.first + each.count; part.first < end; part.first += part.count) {
    part.count = std::min(end, (part.first / shape->targetContiguous + 1) * shape->targetContiguous) - part.first;
    if (stored(part.count) < kFileBytes)
      copy(*shape, each.source, each.target, part.first, part.count, stream);
    else if (Status status = copyToFile(*shape, part, files); !status.ok())
      return status;
  }
  return {};
}

/// Copies rows that are contiguous in the target to the file in which they lie.
Status ChunkedCopies::copyToFile(const Shape &shape, const Chunk &rows, const FileCopies &files) {
  const int64_t begin = offsetOf(shape.rows, rows.first, &kernels::Loop::targetStride);
  const auto bytes =
      static_cast<uint64_t>(shape.conversion.write.scale(static_cast<int64_t>(rows.count * shape.rows.rowBytes)));
  const std::optional<FileCopies::Position> place = files.find(rows.target + begin, bytes);
  if (!place) {
    copy(shape, rows.source, rows.target, rows.first, rows.count, false);
    return {};
  }
  const uint64_t last = rows.first + rows.count - 1;
  if (!shape.conversion && rows.first / shape.sourceContiguous == last / shape.sourceContiguous) {
    const std::byte *source = rows.source + offsetOf(shape.rows, rows.first, &kernels::Loop::sourceStride);
    if (Status status = files.copy(*place, source, bytes); !status.ok())
      return status;
    files.beginWriting(*place, bytes);
    return {};
  }
  thread_local std::vector<std::byte> buffer;
  const uint64_t each = kernels::chunkRows(shape.rows, kFilePartBytes);
  uint64_t written = 0;
  for (uint64_t first = rows.first; first <= last; first += each) {
    const uint64_t count = std::min(each, last + 1 - first);
    const auto part =
        static_cast<uint64_t>(shape.conversion.write.scale(static_cast<int64_t>(count * shape.rows.rowBytes)));
    if (buffer.size() < part)
      buffer.resize(part);
    copy(shape, rows.source, buffer.data() - begin - written, first, count, false);
    if (Status status = FileCopies::write({place->file, place->offset + written}, buffer.data(), part); !status.ok())
      return status;
    written += part;
  }
  files.beginWriting(*place, bytes);
  return {};
}

Status ChunkedCopies::add(const LocalRank &from, const Operand *input, const LocalRank &to, const Operand &output) {
  Expansion expansion;
  if (Status status = expand({&from, input}, {&to, &output}, expansion); !status.ok())
    return status;
  if (!input)
    castZeros(expansion);
  for (const auto &[source, target, sourceBase, targetBase] : expansion.at) {
    if (!target || (input && !source))
      return failed("rank " + std::to_string(target ? from.rank : to.rank) + " uses a buffer that was not bound");
    const kernels::Conversion conversion{expansion.source, expansion.target, sourceBase, targetBase};
    cut(expansion.shape, conversion, input ? source : nullptr, target, writesViews(to, target, conversion));
  }
  return {};
}

Status ChunkedCopies::addStep(const LocalRank &rank, const Step &step) {
  const auto operand = [&](uint32_t at) { return rank.segment->operands()->Get(at); };
  for (uint32_t i = 0; step.kind() == StepKind::reduce && i < step.input_count(); ++i)
    addReduce(rank, operand(step.first_input() + i)->buffer());
  for (uint32_t i = 0; i < step.output_count(); ++i)
    if (Status status = add(rank, step.kind() == StepKind::copy ? operand(step.first_input() + i) : nullptr, rank,
                            *operand(step.first_output() + i));
        !status.ok())
      return status;
  return {};
}

void ChunkedCopies::addReduce(const LocalRank &rank, uint32_t buffer) {
  chunks_.push_back({nullptr, nullptr, static_cast<uint32_t>(reduces_.size()), true, 0, 0});
  reduces_.emplace_back(rank.viewJobs, buffer);
}

/// Cuts staged elements, which are contiguous whole rows of blocks, into chunks of about 1 MiB inside one matrix.
void ChunkedCopies::cutBlocks(const kernels::Strided &shape, const kernels::Conversion &conversion,
                              const std::byte *source, std::byte *target, bool transient) {
  const kernels::Quantized &matrices = conversion.to->matrices;
  const uint64_t item = kernels::itemBytes(matrices.wide),
                 row = kernels::blockShape(matrices.format).rows * matrices.columns * item,
                 matrix = matrices.rows * matrices.columns * item;
  const uint64_t first = static_cast<uint64_t>(target - conversion.to->begin) * item;
  for (uint64_t at = 0; at < shape.rowBytes;) {
    const uint64_t ends = matrix - (first + at) % matrix; // bytes to the end of the matrix
    const uint64_t bytes = std::min({std::max(row, kChunkBytes / row * row), ends, shape.rowBytes - at});
    kernels::Strided part;
    part.rowBytes = bytes;
    chunks_.push_back({target + conversion.write.scale(static_cast<int64_t>(at)), source + at,
                       shapeNumber(part, conversion), transient, 0, 1});
    at += bytes;
  }
}

uint32_t ChunkedCopies::shapeNumber(const kernels::Strided &shape, const kernels::Conversion &conversion) {
  auto same = [&](const Shape &last) {
    const kernels::Strided &other = last.rows;
    return last.conversion == conversion && other.rowBytes == shape.rowBytes && other.loopCount == shape.loopCount &&
           std::equal(shape.loops, shape.loops + shape.loopCount, other.loops,
                      [](const kernels::Loop &a, const kernels::Loop &b) {
                        return a.count == b.count && a.sourceStride == b.sourceStride &&
                               a.targetStride == b.targetStride;
                      });
  };
  if (!shapes_.empty() && same(shapes_.back()))
    return static_cast<uint32_t>(shapes_.size() - 1);
  const auto row = static_cast<int64_t>(shape.rowBytes);
  const uint64_t source = contiguousRows(shape, row, &kernels::Loop::sourceStride);
  uint64_t target = contiguousRows(shape, conversion.write.scale(row), &kernels::Loop::targetStride);
  // Elements that are transposed are copied in tiles of several target ranges, unless the target is one range.
  if (conversion.write.kind == kernels::StorageForm::Kind::elements ||
      (target < shape.rows() && kernels::transposes(shape)))
    target = 0;
  shapes_.push_back({shape, conversion, source, target});
  return static_cast<uint32_t>(shapes_.size() - 1);
}

void ChunkedCopies::cut(kernels::Strided shape, const kernels::Conversion &conversion, const std::byte *source,
                        std::byte *target, bool transient) {
  bytes_ += shape.bytes();
  if (conversion.write.kind == kernels::StorageForm::Kind::elements &&
      kernels::blockShape(conversion.to->matrices.format).rows > 1)
    return cutBlocks(shape, conversion, source, target, transient);
  const auto add = [&](const kernels::Strided &rows, uint64_t at) { // from a byte of each row on
    const uint32_t number = shapeNumber(rows, conversion);
    const auto skipped = static_cast<int64_t>(at);
    const uint64_t count = rows.rows(), each = kernels::chunkRows(rows, kChunkBytes);
    for (uint64_t first = 0; first < count; first += each)
      chunks_.push_back({target + conversion.write.scale(skipped),
                         source ? source + conversion.read.scale(skipped) : nullptr, number, transient, first,
                         std::min(each, count - first)});
  };
  if (shape.rowBytes >= 2 * kChunkBytes) { // a long row becomes a loop over parts, and a rest
    kernels::Strided rest = shape;
    const uint64_t whole = shape.rowBytes / kFilePartBytes;
    if (rest.rowBytes -= whole * kFilePartBytes; rest.rowBytes > 0)
      add(rest, whole * kFilePartBytes);
    shape.loops[shape.loopCount++] = {whole, conversion.read.scale(kFilePartBytes),
                                      conversion.write.scale(kFilePartBytes)};
    shape.rowBytes = kFilePartBytes;
  }
  add(shape, 0);
}

Result<uint64_t> CopyReports::set(CopyWatch watch) {
  if (watch.done > copies_.size())
    return invalid("found " + std::to_string(watch.done) + " copies done, expected at most " +
                   std::to_string(copies_.size()));
  watch_ = std::move(watch);
  return copies_.size();
}

bool CopyReports::skips(size_t chunk) const { return chunk < watch_.done && !copies_.transient(chunk); }

void CopyReports::beginRun() {
  counted_ = 0;
  bytesDone_ = 0;
  report(std::min<uint64_t>(watch_.done, copies_.size()));
}

bool CopyReports::due() const { return wanted() && seconds() - last_ >= kSeconds; }

void CopyReports::report(size_t done) {
  if (!wanted())
    return;
  last_ = seconds();
  for (; counted_ < done; ++counted_)
    bytesDone_ += copies_.bytes(counted_);
  watch_.at(
      {done, copies_.size(), bytesDone_, copies_.bytes(), done < copies_.size() ? copies_.target(done) : nullptr});
}

} // namespace reshard
