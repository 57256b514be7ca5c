// SPDX-License-Identifier: Apache-2.0
// The values of each tensor that the source sends, from synthesized values or from memory, through the layouts of the
// manifest. Quantized params contribute their dequantized elements, or the codes and scales of their own blocks if
// these are sent.
#pragma once

#include "verify/check/synthesize.h"
#include "verify/check/tensor_instances.h"
#include "verify/check/tensor_values.h"
#include "verify/layout/quantized_views.h"

#include <array>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace reshard::verify {

constexpr size_t kMaxCached = size_t{1} << 28; // bytes, where nobody states a bound

/// A thread-safe cache of computed values, of at most so many bytes and one value more. A request for a value that
/// another thread is computing waits for it.
template <class Key, class Value> class Cache {
public:
  using Pointer = std::shared_ptr<const Value>;
  explicit Cache(size_t most) : most_(most) {}
  template <class Make, class Size> Pointer get(const Key &key, Make make, Size size) {
    std::packaged_task<Pointer()> task(make);
    std::unique_lock lock(mutex_);
    const auto [at, added] = known_.try_emplace(key);
    if (added)
      at->second = task.get_future().share();
    const std::shared_future<Pointer> known = at->second;
    lock.unlock();
    if (!added)
      return known.get();
    task(); // waiting threads get its value, or the same exception
    const Pointer value = known.get();
    lock.lock();
    bytes_ += size(*value);
    if (bytes_ > most_) {
      known_.clear();
      bytes_ = 0;
    }
    return value;
  }

private:
  const size_t most_;
  std::mutex mutex_;
  std::map<Key, std::shared_future<Pointer>> known_;
  size_t bytes_ = 0;
};

class Reference {
public:
  /// For synthesized values; reads no memory of the source.
  Reference(const Plan &plan, uint64_t seed);
  /// For a source in memory, which must outlive this. `cached`: the most bytes of tensors and of dequantized matrices
  /// that are kept for further use, each.
  Reference(const Plan &plan, const RankMemories &source, size_t cached = kMaxCached);

  /// Whether values of a tensor pattern depend on quantization, so that its synthesized values alone do not determine
  /// them: a source param that holds it is quantized or is a quantized view.
  bool viewed(int pattern) const { return pattern >= 0 && tensorPatterns_.count(pattern) > 0; }
  bool synthesized() const { return !source_; }
  const PlanConversions &conversions() const { return conversions_; }
  uint64_t seed() const { return seed_; }

  /// A tensor by its full name, cached. With synthesized values, only for tensors whose pattern is viewed().
  std::shared_ptr<const TensorValues> tensor(const std::string &name);
  /// The same, not cached.
  TensorValues assemble(const std::string &name);
  /// About the bytes that assemble() copies: all of a tensor that is dequantized, transposed or in short pieces, and
  /// the dequantized values of a matrix of each param that holds it.
  uint64_t copiedBytes(const std::string &name);

  /// The amax of a whole matrix. `range` begins at an element of an `amax` view, which has the amax of one part of the
  /// matrix; `values` are those of a param that receives the matrix.
  std::optional<float> amax(const schema::ElementRange &range, const SynthesizedValues &values);

private:
  using Key = std::array<uint64_t, 4>; // mesh rank, param, instance, matrix

  /// The matrices that an `amax` view describes.
  struct AmaxMatrices {
    int pattern;         // their tensor pattern
    uint32_t dimensions; // over which the amax is; as QuantizedView.amax_dimensions
  };
  std::vector<float> amax(const std::string &name, const AmaxMatrices &of, const SynthesizedValues &values);
  bool sendsAmax(const MeshRankMemory &rankMemory, uint32_t param) const;
  void find(const RankMemories &rankMemories);
  /// What assemble() copies of a tensor in a param.
  struct Copies {
    bool elements = false;
    uint64_t tensorBytes = 0; // the largest part's
  };
  Copies copiesOf(const TensorInstance &held);
  schema::InstanceLayout layoutOf(const MeshRankMemory &rankMemory, const schema::ParamInstance &instance) const;
  bool has(const MeshRankMemory &rankMemory, uint32_t param, uint32_t instance) const;
  /// Calls visit(range, memory) for the elements of an instance's tensor, in any order. `memory` has the values at
  /// the places of the range, during the call; of a quantized view, it is a matrix.
  void forEachValue(const TensorInstance &held,
                    const std::function<void(const schema::ElementRange &, const std::byte *)> &visit);
  /// The bytes of an instance of a param that is no view.
  std::shared_ptr<const std::byte> bytes(const MeshRankMemory &rankMemory, const schema::ParamInstance &instance);
  /// The bytes that a view presents of one of its matrices.
  std::shared_ptr<const Bytes> matrix(const TensorInstance &view, int64_t number);
  std::shared_ptr<const std::vector<Bytes>> quantized(const MeshRankMemory &rankMemory,
                                                      const schema::ParamInstance &elements);

  const Plan &plan_;
  const schema::Endpoint &endpoint_; // the source
  const PlanConversions conversions_;
  const RankMemories *source_ = nullptr;
  uint64_t seed_ = 0;
  std::set<int> tensorPatterns_;
  std::vector<std::optional<BaseOf>> baseOf_;
  std::vector<MeshRankMemory> rankMemories_; // without memory if values are synthesized
  TensorInstances held_;
  std::mutex copiesMutex_;
  std::map<uint32_t, Copies> copies_; // by param
  Cache<std::string, TensorValues> tensors_;
  Cache<Key, Bytes> matrices_;
  Cache<Key, Bytes> instances_{kMaxCached}; // synthesized values, as quantized_
  Cache<Key, std::vector<Bytes>> quantized_{kMaxCached};
  std::map<int, AmaxMatrices> amaxOf_;                               // by the tensor pattern of an `amax` view
  std::map<uint32_t, std::vector<const schema::Param *>> amaxViews_; // by the param of the codes
  Cache<std::string, std::vector<float>> amax_{kMaxCached};
};

} // namespace reshard::verify
