// SPDX-License-Identifier: Apache-2.0
// coalesce: turns transfers into strided descriptors, as few as possible. Consecutive tensors are a loop over layers or
// experts (instances of a param are numbered consecutively), a periodic block is a loop, and rows that are adjacent on
// both sides are one row.

#include "compiler/pass.h"
#include "compiler/resolve/interner.h"
#include "compiler/transfer/lists.h"
#include "compiler/transfer/rank_classes.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// How a param is stored on a mesh rank: bytes per position of each dimension, instances per position of each index
/// variable in the param's name.
struct Geometry {
  std::vector<int64_t> strides; // by param dimension, in bytes
  std::vector<int64_t> steps;   // by name variable, in instances
};

Geometry geometry(const Endpoint &endpoint, const Param &param, int64_t meshRank) {
  Geometry result;
  const std::vector<int64_t> shape = localShape(endpoint, param, meshRank);
  result.strides.assign(shape.size(), itemBytes(param.dtype));
  for (size_t d = shape.size(); d-- > 1;)
    result.strides[d - 1] = result.strides[d] * shape[d];
  result.steps.assign(param.variables.size(), 1);
  for (size_t v = param.variables.size(); v-- > 1;) {
    const Sharding &sharding = endpoint.shardings[param.instances[v]];
    result.steps[v - 1] = result.steps[v] * positionCount(sharding.at[coordinate(endpoint, sharding.axes, meshRank)]);
  }
  return result;
}

/// A descriptor relative to the param's first instance on each side. It is the same for all mesh ranks of a replica
/// group and for all targets of an overlap.
struct RelativeDescriptor {
  int64_t sourceInstance = 0, targetInstance = 0;
  int64_t sourceOffset = 0, targetOffset = 0;
  Shape shape;
};

/// The distance of adjacent positions of one dimension of a part on each side: in bytes (stride) or instances (step).
struct DimensionStride {
  int64_t sourceStride = 0, targetStride = 0, sourceStep = 0, targetStep = 0;
  Loop loop(int64_t count, int64_t from, int64_t to) const {
    return {count, from * sourceStride, to * targetStride, from * sourceStep, to * targetStep};
  }
};

bool contains(const Loop &outer, const Loop &inner) {
  return outer.sourceStride == inner.count * inner.sourceStride &&
         outer.targetStride == inner.count * inner.targetStride && outer.sourceStep == inner.count * inner.sourceStep &&
         outer.targetStep == inner.count * inner.targetStep;
}

/// Joins nested loops that are one longer loop, joins inner loops into the row, and drops loops of one iteration.
void simplify(Shape &shape) {
  std::vector<Loop> loops;
  for (const Loop &loop : shape.loops) {
    if (loop.count == 1)
      continue;
    if (!loops.empty() && contains(loops.back(), loop)) {
      const int64_t count = loops.back().count * loop.count;
      loops.back() = loop;
      loops.back().count = count;
    } else {
      loops.push_back(loop);
    }
  }
  while (!loops.empty() && loops.back().sourceStride == shape.rowBytes && loops.back().targetStride == shape.rowBytes &&
         loops.back().sourceStep == 0 && loops.back().targetStep == 0) {
    shape.rowBytes *= loops.back().count;
    loops.pop_back();
  }
  shape.loops = std::move(loops);
}

/// Replaces descriptors of equal shape at constant distances by one with an outer loop. `descriptors` is in tensor
/// order.
void foldRepeats(std::vector<RelativeDescriptor> &descriptors) {
  std::vector<RelativeDescriptor> folded;
  for (size_t i = 0; i < descriptors.size();) {
    RelativeDescriptor first = std::move(descriptors[i]);
    size_t n = 1;
    auto distance = [&](const RelativeDescriptor &a, const RelativeDescriptor &b) {
      return std::make_tuple(b.sourceInstance - a.sourceInstance, b.targetInstance - a.targetInstance,
                             b.sourceOffset - a.sourceOffset, b.targetOffset - a.targetOffset);
    };
    if (i + 1 < descriptors.size() && descriptors[i + 1].shape == first.shape) {
      const auto step = distance(first, descriptors[i + 1]);
      for (n = 2; i + n < descriptors.size() && descriptors[i + n].shape == first.shape &&
                  distance(descriptors[i + n - 1], descriptors[i + n]) == step;)
        ++n;
      const auto [sourceStep, targetStep, sourceStride, targetStride] = step;
      first.shape.loops.insert(first.shape.loops.begin(),
                               {static_cast<int64_t>(n), sourceStride, targetStride, sourceStep, targetStep});
      simplify(first.shape);
    }
    i += n;
    folded.push_back(std::move(first));
  }
  descriptors = std::move(folded);
}

/// Makes the descriptors of one replica group of one overlap, for all tensors or for some.
class DescriptorBuilder {
public:
  DescriptorBuilder(const Module &module, const Overlap &overlap, const ReplicaGroup &replicaGroup) {
    const Layout &layout = module.layout;
    const Endpoint &target = layout.endpoints[overlap.endpoint];
    const Param &targetParam = target.params[overlap.param];
    const Part &targetPart = targetParam.parts[overlap.part];
    const Geometry targetGeometry = geometry(target, targetParam, overlap.targets[0]);
    const bool padding = overlap.pattern < 0;
    const Endpoint &source = layout.endpoints[0];
    const Geometry sourceGeometry =
        padding ? Geometry{} : geometry(source, source.params[replicaGroup.param], replicaGroup.meshRanks[0]);
    variables_ = padding ? targetParam.variables.size() : layout.tensorPatterns[overlap.pattern].variables.size();
    item_ = itemBytes(targetParam.dtype);
    for (size_t d = 0; d < replicaGroup.relations.size(); ++d) {
      DimensionStride stride;
      // Padding lists the variables of the param's name; a tensor pattern may have them in another order.
      const int64_t variable = d >= variables_ ? -1 : padding ? d : layout.tensorPatterns[overlap.pattern].variables[d];
      setStride(targetGeometry, padding ? variable : nameVariable(targetParam, variable),
                targetPart.dimensions[d].param, stride.targetStride, stride.targetStep);
      if (padding) { // pretend that the source is the target, so that rows join
        stride.sourceStride = stride.targetStride;
        stride.sourceStep = stride.targetStep;
      } else {
        const Param &sourceParam = source.params[replicaGroup.param];
        setStride(sourceGeometry, nameVariable(sourceParam, variable),
                  sourceParam.parts[replicaGroup.part].dimensions[d].param, stride.sourceStride, stride.sourceStep);
      }
      dimensionStrides_.push_back(stride);
      relations_.push_back(&module.transfers.relations[replicaGroup.relations[d]]);
    }
  }

  /// All tensors of the overlap.
  std::vector<RelativeDescriptor> all() const {
    std::vector<RelativeDescriptor> descriptors;
    RelativeDescriptor descriptor;
    descend(0, dimensionStrides_.size(), descriptor, descriptors);
    for (RelativeDescriptor &each : descriptors)
      simplify(each.shape);
    return descriptors;
  }

  /// The tensors of a transfer, or the part of its one tensor that it is cut to. Tensors are numbered with the last
  /// index variable fastest, and its values in the target's order, which is the same for all replica groups of an
  /// overlap.
  std::vector<RelativeDescriptor> some(const Transfer &transfer) const {
    if (transfer.cut()) {
      DescriptorBuilder restricted = *this;
      const IndexMap within = {{transfer.begin, transfer.begin, transfer.end - transfer.begin, 1, 0, 0}};
      const IndexMap relation = inverse(restrict(inverse(*relations_[transfer.dimension]), within));
      restricted.relations_[transfer.dimension] = &relation;
      return restricted.tensorRange(transfer.first, 1);
    }
    return tensorRange(transfer.first, transfer.count);
  }

private:
  /// Tensors [first, first + count).
  std::vector<RelativeDescriptor> tensorRange(uint32_t first, uint32_t count) const {
    std::vector<std::vector<std::pair<int64_t, int64_t>>> values;
    for (size_t v = 0; v < variables_; ++v) {
      values.push_back(expand(*relations_[v]));
      std::sort(values.back().begin(), values.back().end(),
                [](const auto &a, const auto &b) { return a.second < b.second; });
    }
    std::vector<RelativeDescriptor> rows;
    RelativeDescriptor origin;
    descend(variables_, dimensionStrides_.size(), origin, rows);
    std::vector<RelativeDescriptor> result;
    for (const RelativeDescriptor &row : rows) {
      std::vector<RelativeDescriptor> descriptors;
      for (uint32_t tensor = first; tensor < first + count; ++tensor) {
        RelativeDescriptor descriptor = row;
        uint32_t rest = tensor;
        for (size_t v = variables_; v-- > 0;) {
          const auto &[from, to] = values[v][rest % values[v].size()];
          rest /= static_cast<uint32_t>(values[v].size());
          shift(descriptor, dimensionStrides_[v], from, to);
        }
        simplify(descriptor.shape);
        descriptors.push_back(std::move(descriptor));
      }
      foldRepeats(descriptors); // over the last variable
      foldRepeats(descriptors); // over the one before
      result.insert(result.end(), std::make_move_iterator(descriptors.begin()),
                    std::make_move_iterator(descriptors.end()));
    }
    return result;
  }

  static int64_t nameVariable(const Param &param, int64_t variable) {
    const auto at = std::find(param.variables.begin(), param.variables.end(), variable);
    return at == param.variables.end() ? -1 : at - param.variables.begin();
  }

  /// Sets the distance of adjacent positions of a part's dimension: `stride` bytes along a dimension of the param, or
  /// `step` instances along a variable of its name.
  static void setStride(const Geometry &geometry, int64_t nameVariable, int dimension, int64_t &stride, int64_t &step) {
    if (dimension >= 0)
      stride = geometry.strides[dimension];
    else
      step = geometry.steps[nameVariable];
  }

  static void shift(RelativeDescriptor &descriptor, const DimensionStride &stride, int64_t from, int64_t to) {
    descriptor.sourceInstance += from * stride.sourceStep;
    descriptor.targetInstance += to * stride.targetStep;
    descriptor.sourceOffset += from * stride.sourceStride;
    descriptor.targetOffset += to * stride.targetStride;
  }

  /// Appends one descriptor for each combination of index blocks of dimensions [d, end). Usually a dimension has one
  /// block.
  void descend(size_t d, size_t end, const RelativeDescriptor &outer,
               std::vector<RelativeDescriptor> &descriptors) const {
    if (d == end) {
      descriptors.push_back(outer);
      descriptors.back().shape.rowBytes = item_;
      return;
    }
    for (const IndexBlock &s : *relations_[d]) {
      RelativeDescriptor descriptor = outer;
      shift(descriptor, dimensionStrides_[d], s.from, s.to);
      descriptor.shape.loops.push_back(dimensionStrides_[d].loop(s.count, s.fromStep, s.toStep));
      descriptor.shape.loops.push_back(dimensionStrides_[d].loop(s.length, 1, 1));
      descend(d + 1, end, descriptor, descriptors);
    }
  }

  std::vector<DimensionStride> dimensionStrides_;
  std::vector<const IndexMap *> relations_;
  size_t variables_ = 0;
  int64_t item_ = 1;
};

class Coalescer {
public:
  explicit Coalescer(Module &module) : module_(module) {
    for (const Endpoint &endpoint : module.layout.endpoints)
      bases_.emplace_back(endpoint);
  }

  void run() {
    findRelative();
    put();
    sort();
    join();
    module_.transfers.shapes = std::move(shapes_).take();
  }

private:
  struct InternedDescriptor {
    int64_t sourceInstance, targetInstance, sourceOffset, targetOffset;
    uint32_t shape;
  };
  /// Descriptors [first, end) of relative_.
  struct RelativeRange {
    size_t first = 0, end = 0;
  };

  /// Sets ofTransfer_. Transfers of all tensors of one overlap from one replica group have the same range.
  void findRelative() {
    const Transfers &transfers = module_.transfers;
    ofTransfer_.reserve(transfers.transfers.size());
    for (size_t i = 0; i < transfers.transfers.size();) { // all transfers of one overlap
      const uint32_t overlapNumber = transfers.transfers[i].overlap;
      const Overlap &overlap = transfers.overlaps[overlapNumber];
      std::vector<std::unique_ptr<DescriptorBuilder>> builders(overlap.replicaGroups.size());
      std::vector<RelativeRange> whole(overlap.replicaGroups.size());
      for (; i < transfers.transfers.size() && transfers.transfers[i].overlap == overlapNumber; ++i) {
        const Transfer &transfer = transfers.transfers[i];
        std::unique_ptr<DescriptorBuilder> &builder = builders[transfer.replicaGroup];
        if (!builder)
          builder = std::make_unique<DescriptorBuilder>(module_, overlap, overlap.replicaGroups[transfer.replicaGroup]);
        if (transfer.count == overlap.tensors && !transfer.cut()) {
          RelativeRange &range = whole[transfer.replicaGroup];
          if (range.first == range.end)
            range = interned(builder->all());
          ofTransfer_.push_back(range);
        } else {
          ofTransfer_.push_back(interned(builder->some(transfer)));
        }
      }
    }
  }

  RelativeRange interned(std::vector<RelativeDescriptor> descriptors) {
    const size_t first = relative_.size();
    for (RelativeDescriptor &each : descriptors)
      relative_.push_back({each.sourceInstance, each.targetInstance, each.sourceOffset, each.targetOffset,
                           shapes_.intern(std::move(each.shape))});
    return {first, relative_.size()};
  }

  /// Writes the descriptors of all transfers, source by source. Sets firsts_.
  void put() {
    const std::vector<Transfer> &transfers = module_.transfers.transfers;
    auto slot = [](const Transfer &transfer) { return static_cast<size_t>(transfer.source + 1); }; // padding first
    firsts_.assign(static_cast<size_t>(module_.layout.endpoints[0].meshRanks()) + 2, 0);
    for (size_t i = 0; i < transfers.size(); ++i)
      firsts_[slot(transfers[i]) + 1] += ofTransfer_[i].end - ofTransfer_[i].first;
    std::partial_sum(firsts_.begin(), firsts_.end(), firsts_.begin());
    module_.transfers.descriptors.resize(firsts_.back());
    std::vector<size_t> next = firsts_;
    for (size_t i = 0; i < transfers.size(); ++i)
      put(transfers[i], ofTransfer_[i], module_.transfers.descriptors.data() + next[slot(transfers[i])],
          next[slot(transfers[i])]);
    freeMemory(ofTransfer_);
    freeMemory(relative_);
  }

  /// Writes the descriptors of one transfer at `at`, and adds their number to `count`.
  void put(const Transfer &transfer, const RelativeRange &range, Descriptor *at, size_t &count) {
    const Overlap &overlap = module_.transfers.overlaps[transfer.overlap];
    const int64_t source =
        transfer.source < 0 ? 0 : bases_[0](transfer.source, overlap.replicaGroups[transfer.replicaGroup].param);
    const int64_t target = bases_[overlap.endpoint](transfer.target, overlap.param);
    for (size_t i = range.first; i < range.end; ++i) {
      const InternedDescriptor &each = relative_[i];
      *at++ = {overlap.endpoint,
               transfer.source,
               transfer.target,
               static_cast<uint32_t>(source + each.sourceInstance),
               static_cast<uint32_t>(target + each.targetInstance),
               each.sourceOffset,
               each.targetOffset,
               each.shape,
               transfer.route};
    }
    count += range.end - range.first;
  }

  /// Sorts the descriptors of each source by target and target position.
  void sort() {
    std::vector<size_t> firstTarget; // by endpoint: the mesh ranks of the endpoints before it
    size_t targets = 0;
    for (const Endpoint &endpoint : module_.layout.endpoints) {
      firstTarget.push_back(targets);
      targets += endpoint.ranks.size();
    }
    auto target = [&](const Descriptor &d) { return firstTarget[d.endpoint] + static_cast<size_t>(d.target); };
    auto before = [](const Descriptor &a, const Descriptor &b) {
      return std::tie(a.targetInstance, a.targetOffset, a.sourceInstance, a.sourceOffset) <
             std::tie(b.targetInstance, b.targetOffset, b.sourceInstance, b.sourceOffset);
    };
    std::vector<Descriptor> unsorted;
    for (size_t source = 0; source + 1 < firsts_.size(); ++source) {
      Descriptor *const first = module_.transfers.descriptors.data() + firsts_[source];
      unsorted.assign(first, first + (firsts_[source + 1] - firsts_[source]));
      Descriptor *end = first;
      for (const uint32_t number : orderBy(unsorted.size(), targets, [&](uint32_t i) { return target(unsorted[i]); }))
        *end++ = unsorted[number];
      for (Descriptor *begin = first, *next = first; begin < end; begin = next) {
        while (next < end && target(*next) == target(*begin))
          ++next;
        if (!std::is_sorted(begin, next, before))
          std::sort(begin, next, before);
      }
    }
  }

  /// Joins descriptors that are adjacent on both sides.
  void join() {
    std::vector<Descriptor> &all = module_.transfers.descriptors;
    size_t tail = 0;
    for (size_t i = 1; i < all.size(); ++i) {
      Descriptor &last = all[tail];
      const Descriptor &next = all[i];
      const int64_t row = shapes_[last.shape].rowBytes;
      if (last.source == next.source && last.endpoint == next.endpoint && last.target == next.target &&
          last.route == next.route && last.sourceInstance == next.sourceInstance &&
          last.targetInstance == next.targetInstance && last.sourceOffset + row == next.sourceOffset &&
          last.targetOffset + row == next.targetOffset && shapes_[last.shape].loops == shapes_[next.shape].loops) {
        Shape joined = shapes_[last.shape];
        joined.rowBytes += shapes_[next.shape].rowBytes;
        simplify(joined);
        last.shape = shapes_.intern(std::move(joined));
      } else {
        all[++tail] = next;
      }
    }
    if (!all.empty())
      all.resize(tail + 1);
  }

  Module &module_;
  std::vector<InstanceBases> bases_;
  Interner<Shape> shapes_;
  std::vector<InternedDescriptor> relative_;
  std::vector<RelativeRange> ofTransfer_; // by transfer
  std::vector<size_t> firsts_;            // by source mesh rank + 1: its first descriptor, then the end
};

} // namespace

llvm::Error coalesce(Module &module) {
  Coalescer(module).run();
  return llvm::Error::success();
}

} // namespace reshard
