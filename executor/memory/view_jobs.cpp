// SPDX-License-Identifier: Apache-2.0
// Binds each instance of a view to its own memory or to that of its base param, and makes the jobs that convert between
// them.
#include "executor/memory/view_jobs.h"

#include "executor/load/load.h"
#include "executor/transports/transport.h"
#include "schema/manifest.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <tuple>

namespace reshard {

using namespace schema;

namespace {

constexpr uint64_t kJobBytes = 1 << 20;

/// The view of a range's param; null if it has none.
const QuantizedView *viewOf(const Plan &plan, const BufferRange &range) {
  return plan.manifest().endpoints()->Get(range.endpoint())->params()->Get(range.param())->view();
}

/// Whether a view has memory of its own, at the end of the arena.
bool hasMemory(const QuantizedView *view) { return view && view->staged() && view->kind() != ViewKind::elements; }

/// The buffers that steps of a segment may read: disjoint ascending ranges [first, last], which may contain more.
class ReadBuffers {
public:
  explicit ReadBuffers(const Segment &segment) {
    std::vector<std::pair<int64_t, int64_t>> all;
    for (const Step *step : *segment.steps())
      for (uint32_t i = 0; i < step->input_count(); ++i) {
        const Operand &operand = *segment.operands()->Get(step->first_input() + i);
        const Shape &shape = *segment.shapes()->Get(operand.shape());
        int64_t first = operand.buffer(), last = first;
        for (uint32_t l = 0; l < shape.loop_count(); ++l) {
          const Loop &loop = *segment.loops()->Get(shape.first_loop() + l);
          (loop.buffer_step() < 0 ? first : last) += loop.buffer_step() * static_cast<int64_t>(loop.count() - 1);
        }
        all.emplace_back(first, last);
      }
    std::sort(all.begin(), all.end());
    for (const auto &range : all)
      if (ranges_.empty() || range.first > ranges_.back().second + 1)
        ranges_.push_back(range);
      else
        ranges_.back().second = std::max(ranges_.back().second, range.second);
  }
  bool has(int64_t buffer) const {
    const auto after = std::upper_bound(ranges_.begin(), ranges_.end(), buffer,
                                        [](int64_t b, const auto &range) { return b < range.first; });
    return after != ranges_.begin() && std::prev(after)->second >= buffer;
  }

private:
  std::vector<std::pair<int64_t, int64_t>> ranges_;
};

} // namespace

void ViewJobs::FreeDeleter::operator()(std::byte *memory) const { std::free(memory); }

void ViewJobs::Job::run(const std::vector<LocalAmax> &all) const {
  switch (kind) {
  case amax: {
    const float value = matrices.codes ? all[first].of(matrices) : all[first].of(matrices.wide, memory);
    std::memcpy(number, &value, sizeof value);
    return;
  }
  case tensorScales:
    for (uint64_t m = 0; m < matrices.matrices; ++m) {
      const float value = tensorScale(reinterpret_cast<const float *>(memory) + m * count, count);
      std::memcpy(matrices.scales + m * sizeof value, &value, sizeof value);
    }
    return;
  case scales:
    return kernels::scaleRows(matrices, memory, first, count);
  case toPlain:
    return kernels::toPlainScales(matrices, memory);
  case fromPlain:
    return kernels::fromPlainScales(matrices, memory);
  case clearPadding:
    return kernels::clearScalePadding(matrices);
  }
}

void ViewJobs::Job::tabulate(const std::vector<LocalAmax> &all, Tables &tables) const {
  const auto there = reinterpret_cast<uint64_t>(memory);
  switch (kind) {
  case amax:
    return matrices.codes ? all[first].tabulate(matrices, number, tables)
                          : all[first].tabulate(matrices.wide, memory, number, tables);
  case tensorScales:
    return tables.conversions.addTensorScales(reinterpret_cast<uint64_t>(matrices.scales), there, count,
                                              matrices.matrices);
  case scales:
    return first == 0 ? tables.conversions.addScales(matrices, there) : void(); // one entry has all rows of blocks
  case toPlain:
    return tables.conversions.addToPlain(matrices, there);
  case fromPlain:
    return tables.conversions.addFromPlain(matrices, there);
  case clearPadding:
    return tables.conversions.addPadding(matrices);
  }
}

/// Sets the memory, the bases and the jobs of the views of one rank.
class ViewJobs::Binder {
public:
  Binder(ViewJobs &jobs, const Plan &plan, LocalRank &rank)
      : jobs_(jobs), plan_(plan), rank_(rank), ranges_(*rank.segment->buffers()), reads_(*rank.segment) {
    for (uint32_t r = 0; r < ranges_.size(); ++r) {
      const BufferRange &range = *ranges_.Get(r);
      numbers_[{range.endpoint(), range.mesh_rank(), range.param()}] = r;
      if (const QuantizedView *view = paramOf(range).view(); view && view->kind() == ViewKind::codes)
        readers_[{range.endpoint(), range.mesh_rank(), view->scales()}] = &range;
    }
  }

  /// Gives each instance of a view its memory: from `next` on, if it has its own, or else that of its base.
  void assignMemory(std::byte *next) {
    jobs_.tables_.resize(ranges_.size());
    // Views with memory of their own first, since they may be the base of others.
    for (const bool own : {true, false})
      for (uint32_t r = 0; r < ranges_.size(); ++r) {
        const BufferRange &range = *ranges_.Get(r);
        const QuantizedView *view = paramOf(range).view();
        if (!view || hasMemory(view) != own)
          continue;
        for (uint32_t i = 0; i < range.count(); ++i) {
          jobs_.tables_[r].push_back(own ? next : sibling(range, view->codes(), i));
          next += own ? stagedBytes(range) : 0;
        }
        rank_.memory[r] = jobs_.tables_[r].data();
      }
  }

  /// Sets the view bases, and adds the jobs.
  void addViews() {
    rank_.viewBases.resize(ranges_.size());
    for (uint32_t r = 0; r < ranges_.size(); ++r)
      if (paramOf(*ranges_.Get(r)).view())
        for (uint32_t i = 0; i < ranges_.Get(r)->count(); ++i)
          addView(r, i);
  }

private:
  const Endpoint &endpointOf(const BufferRange &range) const {
    return *plan_.manifest().endpoints()->Get(range.endpoint());
  }
  const Param &paramOf(const BufferRange &range) const { return *endpointOf(range).params()->Get(range.param()); }

  /// The memory of instance i of another param of the same mesh rank, which has as many instances.
  std::byte *sibling(const BufferRange &range, uint32_t param, uint32_t i) const {
    const auto found = numbers_.find({range.endpoint(), range.mesh_rank(), param});
    return found == numbers_.end() ? nullptr : rank_.memory[found->second][i];
  }

  bool isRead(const BufferRange &range, uint32_t i) const {
    const auto reader = readers_.find({range.endpoint(), range.mesh_rank(), range.param()});
    return reads_.has(int64_t{range.first()} + i) ||
           (reader != readers_.end() && reads_.has(int64_t{reader->second->first()} + i));
  }

  /// The matrices of instance i of a view.
  struct BaseMatrices {
    kernels::Quantized matrices;
    bool bound; // whether all its bases are
  };
  BaseMatrices matricesAt(const BufferRange &range, std::byte *memory, uint32_t i) const {
    const QuantizedView &view = *paramOf(range).view();
    kernels::Quantized matrices = matricesOf(endpointOf(range), range.param(), range.mesh_rank());
    std::byte *codes = sibling(range, view.codes(), i), *scales = sibling(range, view.scales(), i);
    matrices.codes = view.kind() == ViewKind::elements ? codes : nullptr;
    matrices.scales = view.kind() == ViewKind::scales ? memory : scales;
    const bool tensorScaled = view.kind() == ViewKind::elements && formatOf(view).tensorScale();
    if (tensorScaled)
      matrices.tensorScales = sibling(range, view.tensor_scale(), i);
    return {matrices, codes && scales && (matrices.tensorScales || !tensorScaled)};
  }

  /// Sets the base of instance i of a view, and adds its jobs.
  void addView(uint32_t r, uint32_t i) {
    const BufferRange &range = *ranges_.Get(r);
    const QuantizedView &view = *paramOf(range).view();
    std::byte *&memory = jobs_.tables_[r][i];
    const auto [matrices, bound] = matricesAt(range, memory, i);
    if (!bound)
      memory = nullptr;
    rank_.viewBases[r].push_back({matrices, memory});
    const bool source = range.endpoint() == 0;
    if (!bound || range.bytes() == 0 || (source && !isRead(range, i)))
      return;
    if (view.kind() == ViewKind::amax && source)
      addAmax(range, i, matrices);
    else
      jobs_.addJobs(view, {.source = source,
                           .matrices = matrices,
                           .memory = view.kind() == ViewKind::scales ? sibling(range, view.codes(), i) : memory,
                           .bytes = range.bytes(),
                           .buffer = range.first() + i});
  }

  /// Adds the jobs of instance i of a source's view `amax`: one for each number. `matrices` are those of a plain base.
  void addAmax(const BufferRange &range, uint32_t i, kernels::Quantized matrices) {
    const Endpoint &source = endpointOf(range);
    const Param &view = paramOf(range);
    const uint32_t codes = view.view()->codes();
    const BufferRange &base = *ranges_.Get(numbers_.at({0, range.mesh_rank(), codes})); // exists, since it is bound
    if (paramOf(base).view())
      matrices = matricesAt(base, nullptr, i).matrices;
    const auto shards = static_cast<uint64_t>(localShape(source, view, range.mesh_rank()).back());
    std::byte *number = jobs_.tables_[numbers_.at({0, range.mesh_rank(), range.param()})][i];
    for (uint64_t k = 0; k < range.bytes() / sizeof(float); ++k, number += sizeof(float)) {
      if (k % shards == 0)
        jobs_.localAmax_.emplace_back(source, view, range.mesh_rank(), static_cast<int64_t>(k / shards));
      jobs_.jobs_[kBefore].push_back(
          {Job::amax, matrices, sibling(range, codes, i), jobs_.localAmax_.size() - 1, 0, number});
    }
  }

  using Key = std::tuple<uint32_t, uint32_t, uint32_t>; // endpoint, mesh rank, param
  ViewJobs &jobs_;
  const Plan &plan_;
  LocalRank &rank_;
  const flatbuffers::Vector<const BufferRange *> &ranges_;
  const ReadBuffers reads_;
  std::map<Key, uint32_t> numbers_;            // index of the BufferRange
  std::map<Key, const BufferRange *> readers_; // view `scales` -> the view `codes` that uses them
};

Status ViewJobs::bind(const Plan &plan, LocalRank &rank, Transport &transport) {
  rank.forms = formsOf(plan, *rank.segment);
  bool any = false;
  for (const BufferRange *range : *rank.segment->buffers()) {
    const QuantizedView *view = viewOf(plan, *range);
    any = any || view;
    tailBytes_ += hasMemory(view) ? range->count() * stagedBytes(*range) : 0;
  }
  headBytes_ = arenaHeadBytes(*rank.segment);
  if (!any && headBytes_ == 0)
    return {};
  const Result<std::byte *> memory = allocate(headBytes_ + tailBytes_, transport);
  if (!memory.ok())
    return Status(memory.status())
        .withPrefix("cannot allocate " + std::to_string(headBytes_ + tailBytes_) +
                    " bytes to stage quantized params: ");
  rank.arena = headBytes_ > 0 ? *memory : nullptr;
  Binder binder(*this, plan, rank);
  binder.assignMemory(*memory + headBytes_);
  binder.addViews();
  rank.viewJobs = this;
  return {};
}

/// Zeroed memory, the device's if the transport has one; null for 0 bytes.
Result<std::byte *> ViewJobs::allocate(uint64_t bytes, Transport &transport) {
  if (bytes == 0)
    return nullptr;
  Result<std::byte *> memory = transport.allocate(bytes);
  if (!memory.ok() || *memory)
    return memory;
  memory_.reset(static_cast<std::byte *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
  if (!memory_)
    return failed("out of memory");
  std::memset(memory_.get(), 0, bytes); // page faults now, not in the first run
  return memory_.get();
}

kernels::Quantized ViewJobs::matricesOf(const Endpoint &endpoint, uint32_t number, uint32_t meshRank) {
  const Param &param = *endpoint.params()->Get(number);
  const QuantizedView &view = *param.view();
  // A view plain_scales has a row and a column for each row and column of blocks of the matrices.
  const bool itself = view.kind() == ViewKind::elements || view.kind() == ViewKind::plain_scales;
  const Param &wide = itself ? param : *endpoint.params()->Get(view.codes());
  const std::vector<int64_t> shape = localShape(endpoint, wide, meshRank);
  kernels::Quantized matrices;
  const QuantizedFormat &format = formatOf(view);
  matrices.format = format.number;
  matrices.layout = scaleLayoutOf(view);
  matrices.columns = static_cast<uint64_t>(shape.back());
  matrices.rows = static_cast<uint64_t>(shape[shape.size() - 2]);
  if (view.kind() == ViewKind::plain_scales) {
    const std::vector<int64_t> stored = localShape(endpoint, *endpoint.params()->Get(view.codes()), meshRank);
    matrices.columns *= static_cast<uint64_t>(format.blockColumns);
    matrices.rows = static_cast<uint64_t>(
        matrixRows(format, scaleLayoutOf(view), static_cast<int64_t>(matrices.rows), stored.back()));
  } else if (const auto number = kernels::numberFormatNamed(dtypeName(wide.dtype()))) {
    matrices.wide = *number;
  }
  for (size_t d = 0; d + 2 < shape.size(); ++d)
    matrices.matrices *= static_cast<uint64_t>(shape[d]);
  return matrices;
}

void ViewJobs::addJobs(const QuantizedView &view, const Instance &instance) {
  const auto &[source, matrices, memory, bytes, buffer] = instance;
  if (view.kind() == ViewKind::scales)
    addRows(kBefore, {Job::scales, matrices, memory});
  else if (view.kind() == ViewKind::plain_scales)
    jobs_[source ? kBefore : kAfter].push_back({source ? Job::toPlain : Job::fromPlain, matrices, memory});
  else if (view.kind() == ViewKind::amax)
    reduces_[buffer] = {Job::tensorScales, matrices, memory, 0, bytes / sizeof(float) / matrices.matrices};
  else if (view.kind() == ViewKind::elements && !source && scaleLayoutOf(view) != reshard::ScaleLayout::plain)
    jobs_[kAfter].push_back({Job::clearPadding, matrices, memory});
}

void ViewJobs::reduce(uint32_t buffer) const {
  if (const auto at = reduces_.find(buffer); at != reduces_.end())
    at->second.run(localAmax_);
}

void ViewJobs::tabulate(JobSet set, Tables &tables) const {
  for (const Job &job : jobs_[set])
    job.tabulate(localAmax_, tables);
}

void ViewJobs::reduce(uint32_t buffer, Tables &tables) const {
  if (const auto at = reduces_.find(buffer); at != reduces_.end())
    at->second.tabulate(localAmax_, tables);
}

/// Adds a job on all matrices, cut by rows of blocks into jobs of about 1 MiB.
void ViewJobs::addRows(JobSet set, Job job) {
  const uint64_t rows = job.matrices.blockRows();
  const uint64_t bytes = std::max<uint64_t>(1, kernels::blockShape(job.matrices.format).rows * job.matrices.columns *
                                                   kernels::itemBytes(job.matrices.wide));
  const uint64_t each = std::max<uint64_t>(1, kJobBytes / bytes);
  for (job.first = 0; job.first < rows; job.first += each) {
    job.count = std::min(each, rows - job.first);
    jobs_[set].push_back(job);
  }
}

} // namespace reshard
