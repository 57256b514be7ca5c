// SPDX-License-Identifier: Apache-2.0
// Chooses the lengths of the chunks of each param, at most `chunk` bytes, gives the endpoint an axis for each dimension
// that is cut, and cuts the shardings along these axes.
#include "compiler/resolve/steps.h"

#include "compiler/resolve/flat_part.h"
#include "ir/index_map.h"

#include <algorithm>
#include <numeric>

namespace reshard {

namespace {

/// How a param is cut: by dimension the length of a piece, which is that of the param if it is not cut.
using Lengths = std::vector<int64_t>;

/// The largest chunk if the job states none. PyTorch and Megatron-Core read whole chunks, so that a rank that needs a
/// part of a tensor reads all chunks that overlap with it.
constexpr int64_t kChunkBytes = 64 << 20;

/// The most pieces of the grid, and the most pieces times params: the loader would take long to check a larger plan.
constexpr int64_t kMaxChunkRanks = 1 << 17, kMaxChunkParams = 1 << 25;

class ChunkCutter {
public:
  ChunkCutter(const Tensors &tensors, EndpointContext &context, const std::vector<StorageRule> &forms,
              Diagnostics &diagnostics)
      : tensors_(tensors), context_(context), endpoint_(context.endpoint()), forms_(forms), diagnostics_(diagnostics) {}

  void cut() {
    std::vector<Lengths> lengths;
    std::vector<int64_t> most = measure(lengths);
    while (!fits(most) && !context_.declaration().chunkBytes) {
      chunkBytes_ *= 2;
      most = measure(lengths);
    }
    if (!fits(most))
      return refuse(most);
    if (!addAxes(most))
      return;
    for (size_t p = 0; p < endpoint_.params.size(); ++p)
      for (size_t d = 0; d < most.size(); ++d)
        if (most[d] > 1)
          cut(endpoint_.params[p], lengths[p], d, most[d]);
  }

private:
  /// By dimension, the most pieces of a param. `lengths`: the lengths of the pieces of each param.
  std::vector<int64_t> measure(std::vector<Lengths> &lengths) const {
    std::vector<int64_t> most;
    lengths.clear();
    for (size_t p = 0; p < endpoint_.params.size(); ++p) {
      const ir::Param &param = endpoint_.params[p];
      lengths.push_back(lengthsOf(p));
      most.resize(std::max(most.size(), param.shape.size()), 1);
      for (size_t d = 0; d < param.shape.size(); ++d)
        most[d] = std::max(most[d], count(param, lengths[p], d));
    }
    return most;
  }

  int64_t limit() const {
    return std::min(kMaxChunkRanks,
                    kMaxChunkParams / std::max<int64_t>(1, static_cast<int64_t>(endpoint_.params.size())));
  }

  bool fits(const std::vector<int64_t> &most) const {
    int64_t ranks = 1;
    for (const int64_t each : most) {
      if (each > limit() / ranks)
        return false;
      ranks *= each;
    }
    return true;
  }

  /// Adds an axis for each dimension that a param is cut in, and the mesh ranks. Returns false if there is none.
  bool addAxes(const std::vector<int64_t> &most) {
    axes_.assign(most.size(), static_cast<unsigned>(endpoint_.axes.size()));
    int64_t ranks = 1;
    for (size_t d = most.size(); d-- > 0; ranks *= most[d])
      if (most[d] > 1)
        endpoint_.axes.insert(endpoint_.axes.begin() + axes_[d], {"chunk_" + std::to_string(d), most[d], ranks});
    if (ranks == 1)
      return false;
    for (size_t d = 1; d < most.size(); ++d)
      axes_[d] = axes_[d - 1] + (most[d - 1] > 1);
    endpoint_.ranks.resize(static_cast<size_t>(ranks));
    std::iota(endpoint_.ranks.begin(), endpoint_.ranks.end(), 0);
    return true;
  }

  void refuse(const std::vector<int64_t> &most) {
    std::string grid;
    for (const int64_t each : most)
      grid += (grid.empty() ? "" : " x ") + std::to_string(each);
    diagnostics_.error(context_.declaration().storageAt, "'storage': chunks of at most " + std::to_string(chunkBytes_) +
                                                             " bytes cut all tensors on a grid of " + grid +
                                                             " pieces, expected at most " + std::to_string(limit()) +
                                                             " in all; state a larger 'chunk'");
  }

  /// Pieces of a dimension of a param; 1 beyond its dimensions.
  static int64_t count(const ir::Param &param, const Lengths &lengths, size_t d) {
    return d < lengths.size() && lengths[d] > 0 ? ceilDivide(param.shape[d].at[0], lengths[d]) : 1;
  }

  Lengths lengthsOf(size_t p) const {
    const ir::Param &param = endpoint_.params[p];
    Lengths lengths;
    int64_t bytes = ir::itemBytes(param.dtype);
    for (const ir::Extent &extent : param.shape) {
      lengths.push_back(extent.at[0]);
      bytes *= extent.at[0]; // at most kMaxBytes
    }
    const auto &quantize = forms_[p].quantize;
    const bool whole = (quantize && quantize->format) || tensors_.opaque(param) ||
                       std::any_of(param.parts.begin(), param.parts.end(), sumsPositions);
    for (size_t d = 0; d < lengths.size() && bytes > chunkBytes_ && !whole; ++d) {
      bytes /= lengths[d]; // the bytes at one position of this dimension
      lengths[d] = std::max<int64_t>(1, chunkBytes_ / bytes);
    }
    return lengths;
  }

  /// Cuts dimension d of a param along its axis, which has `size` coordinates.
  void cut(ir::Param &param, const Lengths &lengths, size_t d, int64_t size) {
    const int64_t found = count(param, lengths, d);
    if (found < size) {
      ir::Presence &presence = param.presence.emplace_back();
      presence.axis = axes_[d];
      presence.coordinates.resize(static_cast<size_t>(found));
      std::iota(presence.coordinates.begin(), presence.coordinates.end(), 0);
    }
    if (found == 1)
      return;
    const int64_t length = param.shape[d].at[0];
    std::vector<Interval> intervals(static_cast<size_t>(size));
    ir::Extent &extent = param.shape[d] = {{axes_[d]}, std::vector<int64_t>(static_cast<size_t>(size))};
    for (int64_t i = 0; i < found; ++i) {
      intervals[i] = {i * lengths[d], std::min(length, (i + 1) * lengths[d])};
      extent.at[i] = intervals[i].end - intervals[i].begin;
    }
    for (ir::Part &part : param.parts)
      for (ir::PartDimension &dimension : part.dimensions)
        if (dimension.param == static_cast<int>(d))
          dimension.sharding = cutSharding(context_, dimension.sharding, intervals, axes_[d], part.pattern < 0);
  }

  const Tensors &tensors_;
  EndpointContext &context_;
  ir::Endpoint &endpoint_;
  const std::vector<StorageRule> &forms_;
  Diagnostics &diagnostics_;
  int64_t chunkBytes_ = context_.declaration().chunkBytes.value_or(kChunkBytes);
  std::vector<unsigned> axes_; // by dimension
};

} // namespace

void cutIntoChunks(const Tensors &tensors, EndpointContext &context, const std::vector<StorageRule> &forms,
                   Diagnostics &diagnostics) {
  ChunkCutter(tensors, context, forms, diagnostics).cut();
}

} // namespace reshard
