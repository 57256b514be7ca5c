// SPDX-License-Identifier: Apache-2.0
// emit: the schedule and its layouts → one manifest, and one segment for each rank. The only file that uses both the IR
// and the plan format. The bytes depend on the module only, not on the number of threads; compressed ones also on the
// version of libzstd.

#include "base/parallel.h"
#include "compiler/compile.h"
#include "compiler/frontend/frontend.h"
#include "compiler/transfer/staging.h"
#include "schema/container.h"
#include "schema/limits.h"
#include "schema/manifest.h"

#include "llvm/Support/xxhash.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>

namespace reshard {
namespace {

namespace fbs = schema;
static_assert(kStagingAlignment % schema::kChunkAlignment == 0);
static_assert(kMaxBytes == schema::kMaxSize && kMaxInstances == schema::kMaxInstances &&
                  kMaxReplicas == schema::kMaxReplicas && kMaxPoolRanks == schema::kMaxPoolRanks,
              "the loader accepts every size that the compiler accepts");

// The IR and the schema have enumerators of the same names, which are cast. Each pair must have the same number.
#define SAME(type, value) static_assert(static_cast<uint8_t>(ir::type::value) == static_cast<uint8_t>(fbs::type::value))
SAME(DType, bf16);
SAME(DType, fp16);
SAME(DType, fp32);
SAME(DType, fp64);
SAME(DType, fp8_e4m3);
SAME(DType, fp8_e5m2);
SAME(DType, i8);
SAME(DType, i16);
SAME(DType, i32);
SAME(DType, i64);
SAME(DType, u8);
SAME(DType, u16);
SAME(DType, u32);
SAME(DType, u64);
SAME(DType, boolean);
static_assert(fbs::DType::MAX == fbs::DType::boolean, "an enumerator of schema/plan.fbs is missing above");
SAME(StepKind, copy);
SAME(StepKind, send);
SAME(StepKind, recv);
SAME(StepKind, fill);
SAME(StepKind, reduce);
static_assert(fbs::StepKind::MAX == fbs::StepKind::reduce, "an enumerator of schema/plan.fbs is missing above");
SAME(ViewKind, elements);
SAME(ViewKind, codes);
SAME(ViewKind, scales);
SAME(ViewKind, plain_scales);
SAME(ViewKind, amax);
static_assert(fbs::ViewKind::MAX == fbs::ViewKind::amax, "an enumerator of schema/plan.fbs is missing above");
#define SAME_CUT(value) static_assert(static_cast<uint8_t>(CutKind::value) == static_cast<uint8_t>(fbs::CutKind::value))
SAME_CUT(rank_ingress);
SAME_CUT(shared_nic_ingress);
SAME_CUT(node_ingress);
SAME_CUT(node_rest_ingress);
SAME_CUT(rank_egress);
SAME_CUT(node_egress);
SAME_CUT(local_copies);
SAME_CUT(replica_node_ingress);
static_assert(fbs::CutKind::MAX == fbs::CutKind::replica_node_ingress,
              "an enumerator of schema/plan.fbs is missing above");
#undef SAME_CUT
#undef SAME

using flatbuffers::FlatBufferBuilder;
using flatbuffers::Offset;

fbs::DType dtype(ir::DType type) { return static_cast<fbs::DType>(type); }

Offset<fbs::Sharding> sharding(FlatBufferBuilder &builder, const std::vector<unsigned> &axes,
                               const std::vector<ir::IndexMap> &lists) {
  std::vector<uint32_t> first = {0};
  std::vector<fbs::IndexBlock> blocks;
  for (const ir::IndexMap &list : lists) {
    for (const ir::IndexBlock &s : list)
      blocks.emplace_back(s.from, s.to, s.length, s.count, s.fromStep, s.toStep);
    first.push_back(static_cast<uint32_t>(blocks.size()));
  }
  return fbs::CreateShardingDirect(builder, &axes, &first, &blocks);
}

Offset<fbs::Param> param(FlatBufferBuilder &builder, const ir::Param &param) {
  std::vector<Offset<fbs::Presence>> presence;
  for (const ir::Presence &rule : param.presence) {
    const std::vector<uint64_t> coordinates(rule.coordinates.begin(), rule.coordinates.end());
    presence.push_back(fbs::CreatePresenceDirect(builder, rule.axis, &coordinates));
  }
  std::vector<Offset<fbs::Extent>> shape;
  shape.reserve(param.shape.size());
  for (const ir::Extent &extent : param.shape)
    shape.push_back(fbs::CreateExtentDirect(builder, &extent.axes, &extent.at));
  std::vector<Offset<fbs::Part>> parts;
  parts.reserve(param.parts.size());
  for (const ir::Part &part : param.parts) {
    std::vector<fbs::PartDimension> dimensions;
    dimensions.reserve(part.dimensions.size());
    for (const ir::PartDimension &dimension : part.dimensions)
      dimensions.emplace_back(dimension.sharding, dimension.param);
    parts.push_back(fbs::CreatePartDirect(builder, part.pattern, &dimensions));
  }
  Offset<fbs::QuantizedView> view;
  if (const auto &from = param.view)
    view = fbs::CreateQuantizedView(builder, static_cast<fbs::ViewKind>(from->kind),
                                    static_cast<fbs::Quantization>(from->format), from->staged,
                                    static_cast<fbs::ScaleLayout>(from->scaleLayout), from->codes, from->scales,
                                    from->tensorScale, from->part, from->amaxDimensions);
  return fbs::CreateParamDirect(builder, param.name.c_str(), &param.variables, &param.instances, &presence, &shape,
                                dtype(param.dtype), &parts, param.origin.c_str(), param.refresh.c_str(),
                                param.storageDtype ? flatbuffers::Optional<fbs::DType>(dtype(*param.storageDtype))
                                                   : flatbuffers::nullopt,
                                view, param.derived, param.transform.empty() ? nullptr : param.transform.c_str(),
                                static_cast<fbs::OverflowRule>(param.overflow));
}

/// Whether the predicate is true of a param of any endpoint.
template <class Is> bool any(const ir::Layout &layout, Is is) {
  return std::any_of(layout.endpoints.begin(), layout.endpoints.end(), [&](const ir::Endpoint &endpoint) {
    return std::any_of(endpoint.params.begin(), endpoint.params.end(), is);
  });
}

/// The feature bits of the layouts; SegmentBuilder adds the bits of the segments. A reader that does not know one of
/// them must reject the plan.
uint64_t features(const ir::Layout &layout) {
  return (any(layout, [](const ir::Param &param) { return param.storageDtype.has_value(); }) ? schema::kFeatureCasts
                                                                                             : 0) |
         (any(layout, [](const ir::Param &param) { return param.overflow != ir::OverflowRule::error; })
              ? schema::kFeatureOverflowRules
              : 0) |
         (any(layout, [](const ir::Param &param) { return param.view.has_value(); }) ? schema::kFeatureViews : 0) |
         (any(layout, [](const ir::Param &param) { return param.view && param.view->amaxDimensions > 0; })
              ? schema::kFeatureAmaxDimensions
              : 0) |
         (any(layout, [](const ir::Param &param) { return !param.transform.empty(); }) ? schema::kFeatureTransforms
                                                                                       : 0);
}

Offset<fbs::Endpoint> endpoint(FlatBufferBuilder &builder, const ir::Endpoint &endpoint) {
  std::vector<Offset<fbs::Axis>> axes;
  axes.reserve(endpoint.axes.size());
  for (const ir::Axis &axis : endpoint.axes)
    axes.push_back(fbs::CreateAxisDirect(builder, axis.name.c_str(), axis.size, axis.stride));
  std::vector<Offset<fbs::Sharding>> shardings;
  shardings.reserve(endpoint.shardings.size());
  for (const ir::Sharding &each : endpoint.shardings)
    shardings.push_back(sharding(builder, each.axes, each.at));
  std::vector<Offset<fbs::Param>> params;
  params.reserve(endpoint.params.size());
  for (const ir::Param &each : endpoint.params)
    params.push_back(param(builder, each));
  const std::vector<uint32_t> ranks(endpoint.ranks.begin(), endpoint.ranks.end());
  return fbs::CreateEndpointDirect(builder, endpoint.role.c_str(), endpoint.layout.c_str(), endpoint.storage,
                                   endpoint.checkpoint, endpoint.directory.c_str(), &axes, &ranks, &shardings,
                                   &endpoint.placement, &params, endpoint.epochs.empty() ? nullptr : &endpoint.epochs,
                                   static_cast<uint32_t>(endpoint.replicas),
                                   static_cast<fbs::StorageFormat>(endpoint.format));
}

Offset<fbs::JobInput> input(FlatBufferBuilder &builder, const JobInputs *inputs) {
  if (!inputs)
    return 0;
  // Two calls that write into the builder are never arguments of one call: C++ leaves their order open, and the bytes
  // of a plan must not depend on the compiler.
  std::vector<Offset<fbs::InputFile>> files;
  for (const auto &[path, text] : inputs->files) {
    const auto writtenPath = builder.CreateString(path);
    files.push_back(fbs::CreateInputFile(builder, writtenPath, builder.CreateString(text)));
  }
  const auto overrides = builder.CreateVectorOfStrings(inputs->overrides);
  return fbs::CreateJobInput(builder, builder.CreateVector(files), overrides, inputs->allowed.axis, inputs->allowed.gap,
                             inputs->allowed.missing, inputs->relabel, inputs->megatron);
}

void manifest(FlatBufferBuilder &builder, const ir::Module &module, const Statistics &counts, const JobInputs *inputs) {
  const ir::Layout &layout = module.layout;
  std::vector<Offset<fbs::Variable>> variables;
  variables.reserve(layout.variables.size());
  for (const ir::IndexVariable &variable : layout.variables)
    variables.push_back(fbs::CreateVariableDirect(builder, variable.name.c_str(), variable.size));
  std::vector<Offset<fbs::TensorPattern>> tensorPatterns;
  for (const ir::TensorPattern &pattern : layout.tensorPatterns) {
    std::vector<Offset<fbs::Sharding>> exists;
    exists.reserve(pattern.exists.size());
    for (const ir::IndexMap &values : pattern.exists)
      exists.push_back(sharding(builder, {}, {values}));
    const std::vector<uint64_t> shape(pattern.shape.begin(), pattern.shape.end());
    tensorPatterns.push_back(fbs::CreateTensorPatternDirect(builder, pattern.name.c_str(), &pattern.variables, &exists,
                                                            &shape, dtype(pattern.dtype)));
  }
  std::vector<Offset<fbs::Endpoint>> endpoints;
  endpoints.reserve(layout.endpoints.size());
  for (const ir::Endpoint &each : layout.endpoints)
    endpoints.push_back(endpoint(builder, each));
  std::vector<Offset<fbs::Cut>> cuts;
  cuts.reserve(counts.lowerBounds.cuts.size());
  for (const Cut &cut : counts.lowerBounds.cuts)
    cuts.push_back(fbs::CreateCut(builder, static_cast<fbs::CutKind>(cut.kind), static_cast<uint64_t>(cut.bytes),
                                  static_cast<uint32_t>(cut.links), static_cast<uint32_t>(cut.nics),
                                  static_cast<uint32_t>(cut.copies)));
  const Offset<fbs::LowerBounds> lowerBounds =
      fbs::CreateLowerBoundsDirect(builder, static_cast<uint32_t>(layout.topology.ranksPerNode),
                                   static_cast<uint32_t>(layout.topology.nicsPerNode), &cuts);
  const Offset<fbs::JobInput> writtenInput = input(builder, inputs);
  builder.ForceDefaults(true); // so that the size does not depend on the counts: writePlan() replaces the manifest
  builder.FinishSizePrefixed(
      fbs::CreateManifestDirect(
          builder, kCompilerVersion, module.fingerprint.c_str(), layout.model.c_str(),
          static_cast<uint32_t>(layout.world), layout.stagingLimit, static_cast<uint32_t>(layout.topology.ranksPerNode),
          &variables, &tensorPatterns, &endpoints, module.schedule.rounds, module.schedule.messages, counts.transfers,
          counts.descriptors, counts.targetBytes, counts.localBytes, counts.remoteBytes, counts.storageBytes,
          lowerBounds, static_cast<uint64_t>(counts.steps.stagingMax), writtenInput, layout.foldsCopies),
      fbs::kManifestIdentifier);
  builder.ForceDefaults(false);
}

schema::Bytes finishedBytes(const FlatBufferBuilder &builder) {
  return {reinterpret_cast<const std::byte *>(builder.GetBufferPointer()), builder.GetSize()};
}

/// Where the operands of each step of a rank are in its table. Sends of the same bytes, such as those to replicas,
/// share their inputs: a sender then has one list for each class of receivers.
class OperandPlaces {
public:
  explicit OperandPlaces(const ir::RankSchedule &rank) {
    std::unordered_map<const ir::Operands *, uint32_t, Hash, Equal> sent;
    firsts_.reserve(rank.steps.size());
    for (const ir::Step &step : rank.steps) {
      const uint64_t count = step.inputs.size() + step.outputs.size();
      uses_ += count;
      if (step.kind == ir::StepKind::send) {
        const auto [at, added] = sent.try_emplace(&step.inputs, static_cast<uint32_t>(count_));
        firsts_.push_back(at->second);
        owned_.push_back(added);
        if (!added)
          continue;
      } else {
        firsts_.push_back(static_cast<uint32_t>(count_));
        owned_.push_back(true);
      }
      count_ += count;
    }
  }

  uint32_t first(size_t step) const { return firsts_[step]; }
  /// Whether the step has operands of its own, not the operands of an earlier step.
  bool owned(size_t step) const { return owned_[step]; }
  uint64_t count() const { return count_; }
  /// The operands of all steps, the shared ones once for each step.
  uint64_t uses() const { return uses_; }

private:
  struct Hash {
    size_t operator()(const ir::Operands *list) const {
      return llvm::xxh3_64bits({reinterpret_cast<const uint8_t *>(list->data()), list->size() * sizeof(ir::Operand)});
    }
  };
  static_assert(std::has_unique_object_representations_v<ir::Operand>, "its bytes are hashed");
  struct Equal {
    bool operator()(const ir::Operands *a, const ir::Operands *b) const { return *a == *b; }
  };

  std::vector<uint32_t> firsts_; // by step
  std::vector<bool> owned_;      // by step
  uint64_t count_ = 0, uses_ = 0;
};

/// Numbers of entries of a segment's tables, counted before the segment is built: FlatBuffers do not report that they
/// grow too large.
struct Counts {
  uint64_t buffers = 0, loops = 0, shapes = 0, operands = 0, steps = 0, after = 0;

  /// As if steps shared no operands.
  explicit Counts(const ir::RankSchedule &rank) : Counts(rank, 0) {
    for (const ir::Step &step : rank.steps)
      operands += step.inputs.size() + step.outputs.size();
  }
  Counts(const ir::RankSchedule &rank, uint64_t operands)
      : buffers(rank.buffers.size()), shapes(rank.shapes.size()), operands(operands), steps(rank.steps.size()) {
    for (const ir::OperandShape &shape : rank.shapes)
      loops += shape.loops.size();
    for (const ir::Step &step : rank.steps)
      after += step.after.size();
  }
  /// An upper bound of the size of the FlatBuffer.
  uint64_t bytes() const {
    return 256 + buffers * sizeof(fbs::BufferRange) + loops * sizeof(fbs::Loop) + shapes * sizeof(fbs::Shape) +
           operands * sizeof(fbs::Operand) + steps * sizeof(fbs::Step) + after * sizeof(uint32_t);
  }
};

/// Whether the operands have at most schema::kMaxOperandRanges ranges beyond their first, counted as the loader does: a
/// loop with a buffer step begins a range in each iteration.
bool rangesWithinLimit(const ir::RankSchedule &rank) {
  std::vector<int64_t> rangesOf; // by shape
  for (const ir::OperandShape &shape : rank.shapes) {
    int64_t ranges = 0, all = 1;
    for (const ir::OperandLoop &loop : shape.loops) {
      if (__builtin_mul_overflow(all, loop.count, &all))
        all = INT64_MAX;
      ranges = loop.bufferStep != 0 ? all - 1 : ranges;
    }
    rangesOf.push_back(ranges);
  }
  int64_t left = schema::kMaxOperandRanges;
  for (const ir::Step &step : rank.steps)
    for (const auto *operands : {&step.inputs, &step.outputs})
      for (const ir::Operand &operand : *operands)
        if (__builtin_sub_overflow(left, rangesOf[static_cast<size_t>(operand.shape)], &left) || left < 0)
          return false;
  return true;
}

/// Whether messages have at most schema::kMaxChunks chunks, counted as the loader does: once more for each step that
/// the message waits for.
bool chunksWithinLimit(const ir::RankSchedule &rank) {
  int64_t left = schema::kMaxChunks;
  for (const ir::Step &step : rank.steps)
    if (step.chunk > 0) {
      const int64_t chunks = (step.bytes - 1) / step.chunk + 1, each = 1 + static_cast<int64_t>(step.after.size());
      if (chunks > left / each)
        return false;
      left -= chunks * each;
    }
  return true;
}

/// A vector of structs that is written in place: `put(next)` writes `count` structs through `next` and advances it.
template <class T, class Put>
Offset<flatbuffers::Vector<const T *>> table(FlatBufferBuilder &builder, uint64_t count, Put put) {
  T *next = nullptr;
  const auto offset = builder.CreateUninitializedVectorOfStructs<T>(count, &next);
  put(next);
  return offset;
}

/// Whether a rank sends bytes of its arena that it has received: it relays them.
bool relays(const ir::RankSchedule &rank) {
  return std::any_of(rank.steps.begin(), rank.steps.end(), [](const ir::Step &step) {
    return step.kind == ir::StepKind::send &&
           std::any_of(step.inputs.begin(), step.inputs.end(),
                       [](const ir::Operand &operand) { return operand.buffer == 0; });
  });
}

/// Builds segments, one after the other in the same buffer, which grows to the largest.
class SegmentBuilder {
public:
  /// Fails if the segment exceeds a limit of the format.
  llvm::Error build(const ir::RankSchedule &rank) {
    const OperandPlaces places(rank);
    const Counts counts(rank, places.count());
    if (llvm::Error error = checkLimits(rank, places, counts))
      return error;
    if (places.uses() > places.count())
      features_ |= schema::kFeatureSharedOperands;
    if (relays(rank))
      features_ |= schema::kFeatureRelays;
    if (!builder_ || capacity_ < counts.bytes())
      builder_.emplace(capacity_ = counts.bytes()); // the full size at once: a builder that grows copies its contents
    else
      builder_->Clear();
    tables(rank, places, counts);
    return llvm::Error::success();
  }
  schema::Bytes bytes() const { return finishedBytes(*builder_); }
  /// The feature bits of the segments that were built.
  uint64_t features() const { return features_; }

private:
  static llvm::Error checkLimits(const ir::RankSchedule &rank, const OperandPlaces &places, const Counts &counts) {
    const std::string name = "rank " + std::to_string(rank.rank);
    if (places.uses() > schema::kMaxOperandUses)
      return llvm::createStringError("the steps of " + name + " have " + std::to_string(places.uses()) +
                                     " operands, expected at most " + std::to_string(schema::kMaxOperandUses));
    if (counts.bytes() >= schema::kMaxSegmentBytes)
      return llvm::createStringError("the segment of " + name + " would have " + std::to_string(counts.bytes()) +
                                     " bytes, expected fewer than " + std::to_string(schema::kMaxSegmentBytes));
    for (const ir::OperandShape &shape : rank.shapes)
      if (shape.loops.size() > schema::kMaxLoops)
        return llvm::createStringError(name + " has an operand shape of " + std::to_string(shape.loops.size()) +
                                       " loops, expected at most " + std::to_string(schema::kMaxLoops));
    if (!rangesWithinLimit(rank))
      return llvm::createStringError(name + " has operands whose loops visit more than " +
                                     std::to_string(schema::kMaxOperandRanges) + " buffer ranges, which is the limit");
    if (!chunksWithinLimit(rank))
      return llvm::createStringError("the messages of " + name + " have more than " +
                                     std::to_string(schema::kMaxChunks) +
                                     " chunks, which is the limit; raise options.staging");
    return llvm::Error::success();
  }

  // Loops are in the order of shapes, operands in the order of the steps that own them and inputs before outputs: the
  // loader checks it.
  void tables(const ir::RankSchedule &rank, const OperandPlaces &places, const Counts &counts) {
    FlatBufferBuilder &builder = *builder_;
    const auto buffers = table<fbs::BufferRange>(builder, counts.buffers, [&](fbs::BufferRange *next) {
      for (const ir::BufferRange &range : rank.buffers)
        *next++ = {range.endpoint,
                   static_cast<uint32_t>(range.meshRank),
                   range.param,
                   range.first,
                   range.count,
                   0,
                   static_cast<uint64_t>(range.bytes)};
    });
    const auto loops = table<fbs::Loop>(builder, counts.loops, [&](fbs::Loop *next) {
      for (const ir::OperandShape &shape : rank.shapes)
        for (const ir::OperandLoop &loop : shape.loops)
          *next++ = {static_cast<uint64_t>(loop.count), loop.stride, loop.bufferStep};
    });
    const auto shapes = table<fbs::Shape>(builder, counts.shapes, [&](fbs::Shape *next) {
      uint32_t first = 0;
      for (const ir::OperandShape &shape : rank.shapes) {
        const auto count = static_cast<uint32_t>(shape.loops.size());
        *next++ = {static_cast<uint64_t>(shape.rowBytes), first, count};
        first += count;
      }
    });
    const auto operands = table<fbs::Operand>(builder, counts.operands, [&](fbs::Operand *next) {
      for (size_t s = 0; s < rank.steps.size(); ++s)
        if (places.owned(s))
          for (const ir::Operands *list : {&rank.steps[s].inputs, &rank.steps[s].outputs})
            for (const ir::Operand &operand : *list)
              *next++ = {static_cast<uint64_t>(operand.offset), operand.buffer, operand.shape};
    });
    const auto steps = this->steps(rank, places);
    uint32_t *wait = nullptr;
    const auto after = builder.CreateUninitializedVector(counts.after, &wait);
    for (const ir::Step &step : rank.steps)
      wait = std::copy(step.after.begin(), step.after.end(), wait);
    builder.FinishSizePrefixed(fbs::CreateSegment(builder, static_cast<uint32_t>(rank.rank),
                                                  static_cast<uint64_t>(rank.arenaBytes), buffers, loops, shapes,
                                                  operands, steps, after),
                               fbs::SegmentIdentifier());
  }

  Offset<flatbuffers::Vector<const fbs::Step *>> steps(const ir::RankSchedule &rank, const OperandPlaces &places) {
    return table<fbs::Step>(*builder_, rank.steps.size(), [&](fbs::Step *next) {
      uint32_t after = 0;
      for (size_t s = 0; s < rank.steps.size(); ++s) {
        const ir::Step &step = rank.steps[s];
        // A send shares its inputs only; its empty list of outputs is after them.
        const uint32_t operand = places.first(s);
        const auto in = static_cast<uint32_t>(step.inputs.size()), out = static_cast<uint32_t>(step.outputs.size());
        const auto waits = static_cast<uint32_t>(step.after.size());
        // -1 means "none" for peer and staging, in the IR and in the format.
        *next++ = {static_cast<uint64_t>(step.bytes),
                   static_cast<uint64_t>(step.staging),
                   operand,
                   in,
                   operand + in,
                   out,
                   step.round,
                   static_cast<uint32_t>(step.peer),
                   step.message,
                   after,
                   waits,
                   static_cast<fbs::StepKind>(step.kind),
                   step.slot,
                   step.level,
                   static_cast<uint64_t>(step.chunk)};
        after += waits;
      }
    });
  }

  std::optional<FlatBufferBuilder> builder_;
  uint64_t capacity_ = 0;
  uint64_t features_ = 0;
};

/// An error of the plan format's writer.
llvm::Error toError(const Status &status) {
  return status.ok() ? llvm::Error::success() : llvm::createStringError(status.message());
}

/// The segments of consecutive ranks, which one thread builds and then writes when it is their turn.
class SegmentBatch {
public:
  /// The segments of ranks [first, last).
  llvm::Error build(RankSchedules &ranks, size_t first, size_t last, bool compress) {
    bytes_.clear();
    ends_.clear();
    compressed_.clear();
    counts_ = {};
    size_t number = first;
    try { // an exception would end the thread, whose segments the other threads wait for
      for (; number < last; ++number) {
        const ir::RankSchedule &rank = ranks.get(number, made_);
        counts_.add(rank);
        if (llvm::Error error = builder_.build(rank))
          return error;
        if (compress) {
          Result<schema::CompressedSegment> segment = schema::compress(builder_.bytes());
          if (!segment.ok())
            return toError(Status(segment.status()).withPrefix("rank " + std::to_string(rank.rank) + ": "));
          compressed_.push_back(std::move(*segment));
        } else if (last - first > 1) {
          const schema::Bytes segment = builder_.bytes();
          bytes_.insert(bytes_.end(), segment.begin(), segment.end());
          ends_.push_back(bytes_.size());
        }
      }
    } catch (const std::bad_alloc &) {
      return llvm::createStringError("out of memory for the segment of rank " + std::to_string(number));
    }
    return llvm::Error::success();
  }
  const StepCounts &counts() const { return counts_; }
  llvm::Error write(schema::ContainerWriter &writer) const {
    writer.addFeatures(builder_.features());
    for (const schema::CompressedSegment &segment : compressed_)
      if (llvm::Error error = toError(writer.addSegment(segment)))
        return error;
    if (ends_.empty() && compressed_.empty())
      return toError(writer.addSegment(builder_.bytes()));
    size_t begin = 0;
    for (const size_t end : ends_) {
      if (llvm::Error error = toError(writer.addSegment(schema::Bytes(bytes_).subspan(begin, end - begin))))
        return error;
      begin = end;
    }
    return llvm::Error::success();
  }

private:
  ir::RankSchedule made_;  // kept, because its memory is reused
  SegmentBuilder builder_; // has the segment of a batch of one rank
  std::vector<std::byte> bytes_;
  std::vector<size_t> ends_; // in bytes_, by segment
  std::vector<schema::CompressedSegment> compressed_;
  StepCounts counts_;
};

/// Divides the ranks into batches of about kBatchBytes; returns the first rank of each, and the number of ranks. It
/// takes longer to hand a small segment over to the writer than to build it.
std::vector<size_t> batchesOf(RankSchedules &ranks) {
  constexpr uint64_t kBatchBytes = 256 << 10, kRankBytes = 1 << 10, kOperandBytes = 32; // with its part of a step
  std::vector<size_t> begins;
  uint64_t bytes = kBatchBytes;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const uint64_t more = kRankBytes + ranks.operands(rank) * kOperandBytes;
    if (bytes + more > kBatchBytes) {
      begins.push_back(rank);
      bytes = 0;
    }
    bytes += more;
  }
  begins.push_back(ranks.size());
  return begins;
}

/// Builds segments in several threads and writes them in rank order. Each thread holds one batch at a time, which
/// bounds the memory. Returns the counts of all steps, or the error of the lowest rank.
llvm::Expected<StepCounts> addSegments(RankSchedules &ranks, unsigned threads, bool compress,
                                       schema::ContainerWriter &writer) {
  std::mutex mutex;
  std::condition_variable turn;
  size_t written = 0; // batches
  std::optional<llvm::Error> failure;
  StepCounts counts;
  std::vector<SegmentBatch> idle; // kept, because their buffers have grown
  idle.reserve(threads);
  const std::vector<size_t> begins = batchesOf(ranks);
  parallelFor(begins.size() - 1, threads, [&](size_t number) {
    SegmentBatch batch;
    std::unique_lock lock(mutex);
    if (!idle.empty()) {
      batch = std::move(idle.back());
      idle.pop_back();
    }
    lock.unlock();
    llvm::Error error = batch.build(ranks, begins[number], begins[number + 1], compress);
    lock.lock();
    turn.wait(lock, [&] { return written == number || failure; });
    if (failure) {
      llvm::consumeError(std::move(error));
    } else {
      if (!error)
        error = batch.write(writer);
      counts.add(batch.counts());
      if (error)
        failure = std::move(error);
    }
    ++written;
    idle.push_back(std::move(batch));
    turn.notify_all();
  });
  if (failure)
    return std::move(*failure);
  return counts;
}

} // namespace

std::vector<std::byte> layoutManifest(const ir::Module &module) {
  FlatBufferBuilder builder(1 << 16);
  manifest(builder, module, {}, nullptr);
  const auto *data = reinterpret_cast<const std::byte *>(builder.GetBufferPointer());
  return {data, data + builder.GetSize()};
}

llvm::Expected<WrittenPlan> writePlan(const ir::Module &module, RankSchedules &ranks, const Statistics &counts,
                                      const std::string &path, const WriteOptions &options) {
  if (module.level != ir::Level::schedule)
    return llvm::createStringError("a plan is written from IR of level 'schedule', found level '" +
                                   std::string(module.level == ir::Level::layout ? "layout" : "transfer") + "'");
  schema::ContainerWriter writer;
  if (llvm::Error error = toError(writer.create(path, static_cast<uint32_t>(ranks.size()), features(module.layout))))
    return error;
  Statistics all = counts;
  FlatBufferBuilder builder(1 << 16);
  manifest(builder, module, all, options.inputs);
  if (llvm::Error error = toError(writer.addManifest(finishedBytes(builder))))
    return error;

  const unsigned threads = std::max(1u, options.jobs ? options.jobs : std::thread::hardware_concurrency());
  llvm::Expected<StepCounts> steps = addSegments(ranks, threads, options.compress, writer);
  if (!steps)
    return steps.takeError();
  all.steps = *steps; // known only now
  builder.Clear();
  manifest(builder, module, all, options.inputs);
  if (llvm::Error error = toError(writer.replaceManifest(finishedBytes(builder))))
    return error;
  if (llvm::Error error = toError(writer.finish(options.inspect)))
    return error;
  return WrittenPlan{writer.digest(), writer.bytes(), *steps};
}

} // namespace reshard
