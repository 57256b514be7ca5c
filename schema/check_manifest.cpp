// SPDX-License-Identifier: Apache-2.0
// Checks that a manifest's references exist and its sizes are within bounds. It assumes only that the FlatBuffers
// verifier accepted the manifest. On a manifest that passes, the functions of manifest.h cannot read outside the
// manifest, overflow, or loop without end.

#include "base/formats/storage_formats.h"
#include "schema/checks.h"
#include "schema/flatbuffer_vectors.h"
#include "schema/limits.h"
#include "schema/manifest.h"

#include <algorithm>
#include <map>

namespace reshard::schema {
namespace {

/// Limit of the work of one check: mesh ranks × params, index values and the like. Real plans need less than a
/// thousandth of it.
constexpr int64_t kMaxWork = int64_t{1} << 28;
constexpr int64_t kMaxMeshRanks = int64_t{1} << 24;
constexpr size_t kMaxList = 64; // axes of a sharding, variables of a name

/// Whether the elements of a vector are aligned, which the FlatBuffers verifier does not check.
template <class T> bool aligned(const flatbuffers::Vector<T> *vector) {
  constexpr size_t alignment = alignof(std::remove_const_t<std::remove_pointer_t<T>>);
  return !vector || vector->size() == 0 || reinterpret_cast<uintptr_t>(vector->Data()) % alignment == 0;
}

/// a * b, or -1 if that exceeds kMaxSize.
int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  return a < 0 || b < 0 || __builtin_mul_overflow(a, b, &result) || result > kMaxSize ? -1 : result;
}

std::string count(size_t found, size_t expected) {
  return "found " + std::to_string(found) + ", expected " + std::to_string(expected);
}

/// The positions of the index blocks of one coordinate: upper bounds on each side, and their number.
struct Reach {
  int64_t from = 0, to = 0, size = 0;
};
using Reaches = std::vector<Reach>; // by coordinate

/// Finds the first error. A function that returns false has set it; later checks rely on earlier ones and must not run.
class ManifestCheck {
public:
  explicit ManifestCheck(const Manifest &manifest) : manifest_(manifest) {}

  Status run() {
    return general() && tensorPatterns() && endpoints() ? checkNames(manifest_, work_, kMaxWork) : error_;
  }

private:
  bool fail(std::string text) {
    error_ = badPlan(std::move(text));
    return false;
  }
  bool spend(int64_t work) {
    work_ += work;
    return work_ <= kMaxWork || fail(kTooMuch);
  }

  bool general() {
    if (manifest_.world() == 0 || manifest_.world() > kMaxSegments)
      return fail("found a world of " + std::to_string(manifest_.world()) + " ranks, expected 1 to " +
                  std::to_string(kMaxSegments));
    if (manifest_.messages() > UINT32_MAX)
      return fail("found " + std::to_string(manifest_.messages()) + " messages, expected fewer than 2^32");
    for (size_t v = 0; v < sizeOf(manifest_.variables()); ++v)
      if (manifest_.variables()->Get(v)->size() > static_cast<uint64_t>(kMaxSize))
        return fail("index variable '" + manifest_.variables()->Get(v)->name()->str() + "' has " +
                    std::to_string(manifest_.variables()->Get(v)->size()) + " values, expected at most " +
                    std::to_string(kMaxSize));
    if (sizeOf(manifest_.endpoints()) < 2)
      return fail("found " + std::to_string(sizeOf(manifest_.endpoints())) +
                  " endpoints, expected a source and at least one target");
    return lowerBounds() && (!manifest_.input() || input(*manifest_.input()));
  }

  bool lowerBounds() {
    const LowerBounds *bounds = manifest_.lower_bounds();
    for (size_t i = 0; bounds && i < sizeOf(bounds->cuts()); ++i) {
      const Cut &cut = *bounds->cuts()->Get(i);
      if (cut.kind() > CutKind::MAX)
        return fail("cut " + std::to_string(i) + " has the unknown kind " +
                    std::to_string(static_cast<int>(cut.kind())));
      if (cut.links() == 0 && cut.nics() == 0 && cut.copies() == 0)
        return fail("cut " + std::to_string(i) + " has no links, NICs or copies, expected at least one");
    }
    return true;
  }

  bool input(const JobInput &input) {
    const size_t files = sizeOf(input.files());
    if (files == 0 || files > kMaxInputFiles)
      return fail("found " + std::to_string(files) + " files of the job, expected 1 to " +
                  std::to_string(kMaxInputFiles));
    uint64_t bytes = 0;
    for (const InputFile *file : *input.files()) {
      if (file->path()->size() == 0)
        return fail("found a file of the job without a path");
      bytes += file->path()->size() + file->text()->size();
    }
    for (size_t o = 0; o < sizeOf(input.overrides()); ++o)
      bytes += input.overrides()->Get(o)->size();
    return bytes <= kMaxInputBytes || fail("found " + std::to_string(bytes) + " bytes of the job, expected at most " +
                                           std::to_string(kMaxInputBytes));
  }

  int64_t variableSize(uint32_t variable) const {
    return static_cast<int64_t>(manifest_.variables()->Get(variable)->size());
  }

  bool variables(const flatbuffers::Vector<uint32_t> *list, const std::string &owner) {
    if (sizeOf(list) > kMaxList)
      return fail(owner + " has " + std::to_string(sizeOf(list)) + " index variables, expected at most " +
                  std::to_string(kMaxList));
    for (size_t i = 0; i < sizeOf(list); ++i)
      if (list->Get(i) >= sizeOf(manifest_.variables()))
        return fail(owner + " refers to index variable " + std::to_string(list->Get(i)) + ", expected fewer than " +
                    std::to_string(sizeOf(manifest_.variables())));
    return true;
  }

  // ------------------------------------------------------------------------------------------------ tensor patterns

  bool tensorPatterns() {
    for (size_t f = 0; f < sizeOf(manifest_.tensor_patterns()); ++f)
      if (!pattern(*manifest_.tensor_patterns()->Get(f)))
        return false;
    return true;
  }

  bool pattern(const TensorPattern &pattern) {
    const std::string name = "tensor '" + pattern.name()->str() + "'";
    if (!variables(pattern.variables(), name))
      return false;
    if (pattern.dtype() > DType::MAX)
      return fail(name + " has the unknown dtype " + std::to_string(static_cast<int>(pattern.dtype())));
    if (sizeOf(pattern.exists()) != sizeOf(pattern.variables()))
      return fail(name + " has existing values of index variables: " +
                  count(sizeOf(pattern.exists()), sizeOf(pattern.variables())));
    if (!aligned(pattern.shape()))
      return fail(name + " has a shape that is not aligned in the file");
    int64_t bytes = itemBytes(pattern.dtype());
    for (size_t d = 0; d < sizeOf(pattern.shape()); ++d)
      bytes = product(bytes, static_cast<int64_t>(std::min<uint64_t>(pattern.shape()->Get(d), INT64_MAX)));
    if (bytes < 0)
      return fail(name + " has more than " + std::to_string(kMaxSize) + " bytes");
    for (size_t v = 0; v < sizeOf(pattern.exists()); ++v) {
      Reaches reaches;
      if (sizeOf(pattern.exists()->Get(v)->axes()) != 0)
        return fail(name + " has existing values that depend on a mesh axis, expected none to");
      if (!sharding(*pattern.exists()->Get(v), 1, name, reaches))
        return false;
      if (reaches[0].from > variableSize(pattern.variables()->Get(v)))
        return fail(name + " exists for values beyond the " +
                    std::to_string(variableSize(pattern.variables()->Get(v))) + " of its index variable");
    }
    return true;
  }

  // ------------------------------------------------------------------------------------------------------ shardings

  /// Well-formed index blocks for `coordinates` coordinates, all positions in [0, kMaxSize].
  bool sharding(const Sharding &sharding, int64_t coordinates, const std::string &owner, Reaches &reaches) {
    const auto &first = *sharding.first();
    const auto &blocks = *sharding.blocks();
    if (static_cast<int64_t>(first.size()) != coordinates + 1)
      return fail(owner + " has a sharding with " + std::to_string(first.size()) + " bounds, expected " +
                  std::to_string(coordinates + 1));
    if (!aligned(&first) || !aligned(&blocks))
      return fail(owner + " has a sharding that is not aligned in the file");
    if (first.Get(0) != 0 || first.Get(first.size() - 1) != blocks.size())
      return fail(owner + " has a sharding with bounds from " + std::to_string(first.Get(0)) + " to " +
                  std::to_string(first.Get(first.size() - 1)) + ", expected 0 to " + std::to_string(blocks.size()) +
                  ", the number of its index blocks");
    reaches.resize(coordinates);
    for (int64_t c = 0; c < coordinates; ++c) {
      if (first.Get(c) > first.Get(c + 1) || first.Get(c + 1) > blocks.size())
        return fail(owner + " has a sharding whose bounds do not ascend");
      for (uint32_t r = first.Get(c); r < first.Get(c + 1); ++r)
        if (!extend(reaches[c], *blocks.Get(r)))
          return fail(owner +
                      " has a sharding with an index block that is empty, overlaps itself, or is not within 0 to " +
                      std::to_string(kMaxSize));
      if (reaches[c].size > reaches[c].to) // or a few bytes of a file could ask for any amount of work
        return fail(owner + " has a sharding that maps " + std::to_string(reaches[c].size) + " positions to " +
                    std::to_string(reaches[c].to));
    }
    return true;
  }

  /// Adds the positions of a block; false if it is malformed.
  static bool extend(Reach &reach, const IndexBlock &block) {
    if (block.length() < 1 || block.length() > kMaxSize || block.count() < 1 || block.count() > kMaxSize)
      return false;
    if (block.count() > 1 && block.from_step() < block.length())
      return false;                               // repetitions overlap on the `from` side
    auto end = [&](int64_t start, int64_t step) { // past the last position, or -1
      const __int128 last = start + static_cast<__int128>(block.count() - 1) * step;
      const __int128 most = (last > start ? last : start) + block.length();
      return start < 0 || last < 0 || most > kMaxSize ? int64_t{-1} : static_cast<int64_t>(most);
    };
    const int64_t from = end(block.from(), block.from_step()), to = end(block.to(), block.to_step());
    const int64_t positions = product(block.length(), block.count());
    if (from < 0 || to < 0 || positions < 0 || positions > kMaxSize - reach.size)
      return false;
    reach.from = std::max(reach.from, from);
    reach.to = std::max(reach.to, to);
    reach.size += positions;
    return true;
  }

  /// A sharding that numbers instances must map values one to one to 0, 1, 2 …
  bool numbering(const Sharding &sharding, const Reaches &reaches, int64_t values, const std::string &owner) {
    const auto &first = *sharding.first();
    std::vector<int64_t> value;
    for (size_t c = 0; c < reaches.size(); ++c) {
      const int64_t size = reaches[c].size;
      if (size > kMaxInstances || reaches[c].to != size || reaches[c].from > values)
        return fail(owner + " does not number its instances from 0 without gaps, one for each value");
      if (!spend(size))
        return false;
      value.assign(size, -1);
      for (uint32_t r = first.Get(c); r < first.Get(c + 1); ++r) {
        const IndexBlock &block = *sharding.blocks()->Get(r);
        for (int64_t repetition = 0; repetition < block.count(); ++repetition)
          for (int64_t k = 0; k < block.length(); ++k) {
            int64_t &at = value[block.to() + repetition * block.to_step() + k];
            if (at >= 0)
              return fail(owner + " gives two index values the same instance");
            at = block.from() + repetition * block.from_step() + k;
          }
      }
      std::sort(value.begin(), value.end());
      if (std::adjacent_find(value.begin(), value.end()) != value.end())
        return fail(owner + " gives one index value two instances");
    }
    return true;
  }

  // ------------------------------------------------------------------------------------------------------ endpoints

  bool endpoints() {
    for (size_t e = 0; e < manifest_.endpoints()->size(); ++e) {
      endpoint_ = manifest_.endpoints()->Get(e);
      role_ = "endpoint '" + endpoint_->role()->str() + "'";
      if (!meshRanks() || !axes() || !shardings() || !params())
        return false;
    }
    return true;
  }

  bool meshRanks() {
    const int64_t meshRanks = static_cast<int64_t>(sizeOf(endpoint_->ranks()));
    if (meshRanks == 0 || meshRanks > kMaxMeshRanks)
      return fail(role_ + " has " + std::to_string(meshRanks) + " mesh ranks, expected 1 to " +
                  std::to_string(kMaxMeshRanks));
    std::vector<bool> seen(manifest_.world());
    for (int64_t meshRank = 0; meshRank < meshRanks; ++meshRank) {
      const uint32_t rank = endpoint_->ranks()->Get(meshRank);
      if (endpoint_->storage()) {
        if (rank != meshRank)
          return fail(role_ + " has file number " + std::to_string(rank) + ", expected " + std::to_string(meshRank));
        continue;
      }
      if (rank >= manifest_.world())
        return fail(role_ + " has rank " + std::to_string(rank) + ", expected fewer than " +
                    std::to_string(manifest_.world()));
      if (seen[rank])
        return fail(role_ + " has rank " + std::to_string(rank) + " twice");
      seen[rank] = true;
    }
    if (endpoint_->format() > StorageFormat::MAX)
      return fail(role_ + " has the storage format " + std::to_string(static_cast<int>(endpoint_->format())) +
                  ", expected at most " + std::to_string(static_cast<int>(StorageFormat::MAX)));
    const reshard::StorageFormat format = formatOf(*endpoint_);
    if (storesChunks(format) && !endpoint_->checkpoint())
      return fail(role_ + " has the storage format '" + name(format) + "', expected it in a checkpoint");
    const bool source = endpoint_ == manifest_.endpoints()->Get(0),
               chunks = source ? storesChunks(format) : writesChunks(format);
    if (endpoint_->checkpoint() && (!endpoint_->storage() || (meshRanks != 1 && !chunks)))
      return fail(role_ + " is a checkpoint with " + std::to_string(meshRanks) + " mesh ranks" +
                  (endpoint_->storage() ? "" : ", not in storage") + ", expected one, in storage");
    if (sizeOf(endpoint_->epochs()) != 0 && static_cast<int64_t>(sizeOf(endpoint_->epochs())) != meshRanks)
      return fail(role_ + " has epochs of mesh ranks: " + count(sizeOf(endpoint_->epochs()), meshRanks));
    if (endpoint_->replicas() > 0 && !pool())
      return false;
    // The check of each rank's segment visits all params of its mesh rank (of a storage endpoint: of all files).
    return spend(product(meshRanks, static_cast<int64_t>(sizeOf(endpoint_->params())) + 1) + manifest_.world() / 64);
  }

  /// A pool is the only target. Its ranks are consecutive, above those of the source, and the last of the world: the
  /// ranks of the other engine replicas follow.
  bool pool() {
    const uint32_t replicas = endpoint_->replicas();
    const Endpoint &source = *manifest_.endpoints()->Get(0);
    if (replicas > kMaxReplicas)
      return fail(role_ + " has " + std::to_string(replicas) + " engine replicas, expected at most " +
                  std::to_string(kMaxReplicas));
    if (manifest_.endpoints()->size() != 2 || endpoint_ == &source || endpoint_->storage() || source.storage())
      return fail(role_ + " has " + std::to_string(replicas) +
                  " engine replicas, expected them in the only target, with source and target on ranks");
    int64_t expected = 0;
    for (const uint32_t rank : *source.ranks())
      expected = std::max<int64_t>(expected, int64_t{rank} + 1);
    expected = std::max<int64_t>(expected, endpoint_->ranks()->Get(0));
    for (const uint32_t rank : *endpoint_->ranks())
      if (rank != expected++)
        return fail(role_ + " has engine replicas and rank " + std::to_string(rank) + ", expected " +
                    std::to_string(expected - 1) + ": consecutive ranks above those of the source");
    if (manifest_.world() != expected)
      return fail(role_ + " has engine replicas, and the world has " + std::to_string(manifest_.world()) +
                  " ranks, expected " + std::to_string(expected) + ": the ranks of replica 0 are the last");
    const int64_t size = endpoint_->ranks()->size();
    if (expected + size * (int64_t{replicas} - 1) > kMaxPoolRanks)
      return fail(role_ + " has " + std::to_string(replicas) + " engine replicas of " + std::to_string(size) +
                  " ranks, expected world ranks of at most " + std::to_string(kMaxPoolRanks - 1));
    return true;
  }

  bool axes() {
    for (size_t i = 0; i < sizeOf(endpoint_->axes()); ++i) {
      const Axis &axis = *endpoint_->axes()->Get(i);
      if (axis.size() < 1 || axis.stride() < 1 || axis.size() > INT32_MAX || axis.stride() > INT32_MAX)
        return fail(role_ + " has axis '" + axis.name()->str() + "' of size " + std::to_string(axis.size()) +
                    " and stride " + std::to_string(axis.stride()) + ", expected 1 to 2^31 - 1");
    }
    return true;
  }

  /// The number of coordinates over a list of axes; -1 after an error.
  int64_t coordinates(const flatbuffers::Vector<uint32_t> *axes, const std::string &owner) {
    int64_t count = 1;
    if (sizeOf(axes) > kMaxList) {
      fail(owner + " lists " + std::to_string(sizeOf(axes)) + " axes, expected at most " + std::to_string(kMaxList));
      return -1;
    }
    for (size_t i = 0; i < sizeOf(axes); ++i) {
      if (axes->Get(i) >= sizeOf(endpoint_->axes())) {
        fail(owner + " refers to axis " + std::to_string(axes->Get(i)) + ", expected fewer than " +
             std::to_string(sizeOf(endpoint_->axes())));
        return -1;
      }
      count = product(count, static_cast<int64_t>(endpoint_->axes()->Get(axes->Get(i))->size()));
      if (count < 0) {
        fail(owner + " lists axes with more than " + std::to_string(kMaxSize) + " coordinates");
        return -1;
      }
    }
    return count;
  }

  bool shardings() {
    reaches_.assign(sizeOf(endpoint_->shardings()), {});
    numbered_.clear();
    for (size_t s = 0; s < sizeOf(endpoint_->shardings()); ++s) {
      const Sharding &each = *endpoint_->shardings()->Get(s);
      const int64_t wanted = coordinates(each.axes(), role_);
      if (wanted < 0 || !sharding(each, wanted, role_, reaches_[s]))
        return false;
    }
    if (sizeOf(endpoint_->placement()) != sizeOf(manifest_.variables()))
      return fail(role_ + " has placements of index variables: " +
                  count(sizeOf(endpoint_->placement()), sizeOf(manifest_.variables())));
    for (size_t v = 0; v < sizeOf(endpoint_->placement()); ++v)
      if (!hasSharding(endpoint_->placement()->Get(v), role_))
        return false;
    return true;
  }

  bool hasSharding(uint32_t sharding, const std::string &owner) {
    return sharding < reaches_.size() || fail(owner + " refers to sharding " + std::to_string(sharding) +
                                              ", expected fewer than " + std::to_string(reaches_.size()));
  }

  // --------------------------------------------------------------------------------------------------------- params

  bool params() {
    for (size_t p = 0; p < sizeOf(endpoint_->params()); ++p) {
      const Param &each = *endpoint_->params()->Get(p);
      const std::string name = role_ + " param '" + each.name()->str() + "'";
      if (!variables(each.variables(), name) || !names(each, name) || !extents(each, name))
        return false;
      for (size_t i = 0; i < sizeOf(each.parts()); ++i)
        if (!part(each, *each.parts()->Get(i), name))
          return false;
    }
    error_ = checkViews(*endpoint_, endpoint_ != manifest_.endpoints()->Get(0), role_, work_);
    return error_.ok() && spend(0);
  }

  /// Checks the presence rules and the numbering of instances.
  bool names(const Param &param, const std::string &name) {
    for (size_t i = 0; i < sizeOf(param.presence()); ++i) {
      const Presence &rule = *param.presence()->Get(i);
      if (rule.axis() >= sizeOf(endpoint_->axes()))
        return fail(name + " refers to axis " + std::to_string(rule.axis()) + ", expected fewer than " +
                    std::to_string(sizeOf(endpoint_->axes())));
      if (!aligned(rule.coordinates()) || !std::is_sorted(rule.coordinates()->begin(), rule.coordinates()->end()))
        return fail(name + " has a presence rule whose coordinates do not ascend");
    }
    if (sizeOf(param.instances()) != sizeOf(param.variables()))
      return fail(name + " numbers its instances by index variables: " +
                  count(sizeOf(param.instances()), sizeOf(param.variables())));
    int64_t instances = 1;
    for (size_t v = 0; v < sizeOf(param.instances()); ++v) {
      const uint32_t sharding = param.instances()->Get(v), variable = param.variables()->Get(v);
      if (!hasSharding(sharding, name))
        return false;
      if (numbered_.emplace(std::pair(sharding, variable), true).second &&
          !numbering(*endpoint_->shardings()->Get(sharding), reaches_[sharding], variableSize(variable), name))
        return false;
      int64_t most = 0;
      for (const Reach &reach : reaches_[sharding])
        most = std::max(most, reach.size);
      instances = product(instances, most);
      if (instances < 0 || instances > kMaxInstances)
        return fail(name + " has more than " + std::to_string(kMaxInstances) + " instances on a mesh rank");
    }
    return true;
  }

  bool extents(const Param &param, const std::string &name) {
    if (param.dtype() > DType::MAX)
      return fail(name + " has the unknown dtype " + std::to_string(static_cast<int>(param.dtype())));
    auto castable = [](DType type) {
      return type == DType::fp32 || type == DType::bf16 || type == DType::fp16 || type == DType::fp8_e4m3 ||
             type == DType::fp8_e5m2;
    };
    if (param.storage_dtype() && (!castable(*param.storage_dtype()) || !castable(param.dtype()) ||
                                  *param.storage_dtype() == param.dtype() || param.view() || param.derived()))
      return fail(name +
                  " has a storage dtype to which its elements cannot be cast, expected another float dtype of 32 "
                  "bits or less, and no view");
    if (param.overflow() > OverflowRule::MAX || (param.overflow() != OverflowRule::error && !param.storage_dtype()) ||
        (param.overflow() == OverflowRule::infinity && param.storage_dtype() == DType::fp8_e4m3))
      return fail(name + " has the overflow rule " + std::to_string(static_cast<int>(param.overflow())) +
                  ", expected 0 to " + std::to_string(static_cast<int>(OverflowRule::MAX)) +
                  ", only 0 without a storage dtype, and not 2 with fp8_e4m3, which has no infinity");
    int64_t bytes = std::max(itemBytes(param.dtype()), itemBytes(storageDtypeOf(param)));
    for (size_t d = 0; d < sizeOf(param.shape()); ++d) {
      const Extent &extent = *param.shape()->Get(d);
      const int64_t wanted = coordinates(extent.axes(), name);
      if (wanted < 0)
        return false;
      if (static_cast<int64_t>(extent.at()->size()) != wanted || !aligned(extent.at()))
        return fail(name + " has lengths in dimension " + std::to_string(d) + ": " +
                    count(extent.at()->size(), wanted));
      const auto [least, most] = std::minmax_element(extent.at()->begin(), extent.at()->end());
      if (*least < 0)
        return fail(name + " has the negative length " + std::to_string(*least) + " in dimension " + std::to_string(d));
      bytes = product(bytes, std::max<int64_t>(1, *most));
      if (bytes < 0)
        return fail(name + " has more than " + std::to_string(kMaxSize) + " bytes");
    }
    return true;
  }

  bool part(const Param &param, const Part &part, const std::string &name) {
    const size_t tensorPatterns = sizeOf(manifest_.tensor_patterns());
    if (part.pattern() < -1 || part.pattern() >= static_cast<int64_t>(tensorPatterns))
      return fail(name + " holds tensor " + std::to_string(part.pattern()) + ", expected fewer than " +
                  std::to_string(tensorPatterns));
    const TensorPattern *pattern = part.pattern() < 0 ? nullptr : manifest_.tensor_patterns()->Get(part.pattern());
    if (pattern && pattern->dtype() != param.dtype()) // a tensor is sent in its own dtype
      return fail(name + " has dtype " + dtypeName(param.dtype()) + ", expected " + dtypeName(pattern->dtype()) +
                  " as in tensor '" + pattern->name()->str() + "'");
    const auto *variables = pattern ? pattern->variables() : param.variables();
    const size_t named = sizeOf(variables);
    const size_t dimensions = named + (pattern ? sizeOf(pattern->shape()) : sizeOf(param.shape()));
    if (sizeOf(part.dimensions()) != dimensions)
      return fail(name + " has a part with dimensions: " + count(sizeOf(part.dimensions()), dimensions));
    for (size_t d = 0; d < dimensions; ++d)
      if (!hasSharding(part.dimensions()->Get(d)->sharding(), name))
        return false;
    for (size_t d = 0; d < dimensions; ++d) {
      const PartDimension &dimension = *part.dimensions()->Get(d);
      if (pattern) {
        const int64_t length =
            d < named ? variableSize(variables->Get(d)) : static_cast<int64_t>(pattern->shape()->Get(d - named));
        if (!spend(static_cast<int64_t>(reaches_[dimension.sharding()].size())))
          return false;
        for (const Reach &reach : reaches_[dimension.sharding()])
          if (reach.from > length)
            return fail(name + " holds position " + std::to_string(reach.from - 1) + " of dimension " +
                        std::to_string(d) + " of '" + pattern->name()->str() + "', which has length " +
                        std::to_string(length));
      }
      if (dimension.param() < -1 || dimension.param() >= static_cast<int64_t>(sizeOf(param.shape())))
        return fail(name + " has a tensor in its dimension " + std::to_string(dimension.param()) +
                    ", expected fewer than " + std::to_string(sizeOf(param.shape())));
      if (dimension.param() >= 0) {
        if (std::any_of(part.dimensions()->begin(), part.dimensions()->begin() + d,
                        [&](const PartDimension *other) { return other->param() == dimension.param(); })) {
          if (!insideTogether(param, part, dimension.param(), name))
            return false;
          continue;
        }
        const Extent &extent = *param.shape()->Get(dimension.param());
        if (!inside(param, dimension.sharding(), extent.axes(), [&](int64_t c) { return extent.at()->Get(c); }, name))
          return false;
        continue;
      }
      // The order of the variables of a tensor pattern may differ from that of the param.
      const size_t variable = d >= named ? SIZE_MAX : pattern ? nameVariable(param, variables->Get(d)) : d;
      if (variable >= sizeOf(param.instances()))
        return fail(name + " relates dimension " + std::to_string(d) +
                    " of a tensor to its name, which does not have that index variable");
      const uint32_t numbers = param.instances()->Get(variable);
      const auto count = [&](int64_t c) { return reaches_[numbers][c].size; };
      if (!inside(param, dimension.sharding(), endpoint_->shardings()->Get(numbers)->axes(), count, name))
        return false;
    }
    return true;
  }

  /// If several dimensions of a part share one dimension of the param (a flat buffer), the sum of their positions must
  /// be inside the param.
  bool insideTogether(const Param &param, const Part &part, int32_t dimension, const std::string &name) {
    const Extent &extent = *param.shape()->Get(dimension);
    const int64_t meshRanks = static_cast<int64_t>(endpoint_->ranks()->size());
    if (!spend(meshRanks * static_cast<int64_t>(part.dimensions()->size())))
      return false;
    for (int64_t meshRank = 0; meshRank < meshRanks; ++meshRank) {
      int64_t last = 0, positions = 1; // the last position, and the number of positions
      bool empty = false;
      for (const PartDimension *each : *part.dimensions()) {
        const auto *axes = endpoint_->shardings()->Get(each->sharding())->axes();
        const Reach &reach = reaches_[each->sharding()][coordinate(*endpoint_, axes, meshRank)];
        empty = empty || reach.size == 0;
        if (each->param() == dimension) {
          last += reach.to - 1;
          positions = positions < 0 ? -1 : product(positions, reach.size);
        }
        if (last > kMaxSize)
          return fail(name + " has a part that extends beyond the length of the param's dimension");
      }
      const int64_t length = extent.at()->Get(coordinate(*endpoint_, extent.axes(), meshRank));
      if (!empty && (last >= length || positions < 0 || positions > length) &&
          instanceCount(*endpoint_, param, meshRank) > 0)
        return fail(name + " has a part that extends beyond the length of the param's dimension");
    }
    return true;
  }

  static size_t nameVariable(const Param &param, uint32_t variable) {
    for (size_t i = 0; i < sizeOf(param.variables()); ++i)
      if (param.variables()->Get(i) == variable)
        return i;
    return SIZE_MAX;
  }

  static bool sameAxes(const flatbuffers::Vector<uint32_t> *a, const flatbuffers::Vector<uint32_t> *b) {
    return sizeOf(a) == sizeOf(b) && (sizeOf(a) == 0 || std::equal(a->begin(), a->end(), b->begin()));
  }

  /// On each mesh rank that has the param, the sharding's local positions are below `length` (by coordinate over
  /// `axes`).
  template <class Length>
  bool inside(const Param &param, uint32_t sharding, const flatbuffers::Vector<uint32_t> *axes, Length length,
              const std::string &name) {
    const auto *shardingAxes = endpoint_->shardings()->Get(sharding)->axes();
    const Reaches &reaches = reaches_[sharding];
    bool good = true;
    if (sameAxes(shardingAxes, axes)) {
      if (!spend(static_cast<int64_t>(reaches.size())))
        return false;
      for (size_t c = 0; c < reaches.size(); ++c)
        good = good && reaches[c].to <= length(static_cast<int64_t>(c));
      if (good)
        return true;
    }
    // Coordinates on which no mesh rank has the param are exempt.
    const int64_t meshRanks = static_cast<int64_t>(endpoint_->ranks()->size());
    if (!spend(meshRanks))
      return false;
    for (int64_t meshRank = 0; meshRank < meshRanks; ++meshRank)
      if (reaches[coordinate(*endpoint_, shardingAxes, meshRank)].to > length(coordinate(*endpoint_, axes, meshRank)) &&
          instanceCount(*endpoint_, param, meshRank) > 0)
        return fail(name + " has a part that extends beyond the length of the param's dimension");
    return true;
  }

  const Manifest &manifest_;
  const Endpoint *endpoint_ = nullptr;
  std::string role_;
  Status error_;
  std::vector<Reaches> reaches_;                           // by sharding of the endpoint
  std::map<std::pair<uint32_t, uint32_t>, bool> numbered_; // (sharding, variable) that were checked
  int64_t work_ = 0;
};

} // namespace

Status checkManifest(const Manifest &manifest) { return ManifestCheck(manifest).run(); }

} // namespace reshard::schema
