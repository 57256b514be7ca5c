// SPDX-License-Identifier: Apache-2.0
// The values of each tensor that the source sends, from synthesized values or from memory, through the layouts of the
// manifest. Quantized params contribute their dequantized elements, or the codes and scales of their own blocks if
// these are sent.
#pragma once

#include "analysis/layout/quantized_views.h"
#include "analysis/verify/synthesize.h"
#include "analysis/verify/tensor_instances.h"

#include <array>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace reshard::analysis {

/// Zero-initialized bytes whose pages take memory only when written: a plan may declare a tensor that is much larger
/// than all shards of it.
class LazyBuffer {
public:
  LazyBuffer() = default;
  LazyBuffer(LazyBuffer &&other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LazyBuffer &operator=(LazyBuffer &&) = delete;
  ~LazyBuffer();

  std::byte &operator[](int64_t at) { return data_[at]; }
  const std::byte &operator[](int64_t at) const { return data_[at]; }
  /// Throws Failure if the address space is exhausted, std::bad_alloc if memory is.
  void grow(size_t bytes);

private:
  std::byte *data_ = nullptr;
  size_t bytes_ = 0;
};

/// The values of a tensor, assembled from several instances.
class TensorValues {
public:
  /// Copies elements from an instance. `agree`: elements that are known already must be equal (see
  /// conflict()).
  void put(const ElementRange &range, const std::byte *memory, int64_t item, bool agree);
  void put(int64_t element, const std::byte *from, int64_t item);
  bool known(int64_t element) const {
    return element < room_ && (std::to_integer<int>(known_[element / 8]) >> (element % 8) & 1) != 0;
  }
  /// The value of a known element.
  const std::byte *at(int64_t element, int64_t item) const { return &bytes_[element * item]; }
  /// An element for which two instances have different values; -1: none.
  int64_t conflict() const { return conflict_; }
  /// The number of bytes of known elements.
  size_t size() const { return size_; }

private:
  void set(int64_t element, const std::byte *from, int64_t item);
  void grow(int64_t end, int64_t item);

  LazyBuffer bytes_, known_; // a bit for each element
  int64_t room_ = 0, conflict_ = -1;
  size_t size_ = 0;
};

/// A thread-safe cache of computed values. A request for a value that another thread is computing waits for it.
template <class Key, class Value> class Cache {
public:
  using Pointer = std::shared_ptr<const Value>;
  template <class Make, class Size> Pointer get(const Key &key, Make make, Size size) {
    std::promise<Pointer> promise;
    std::shared_future<Pointer> known;
    {
      const std::lock_guard lock(mutex_);
      const auto [at, added] = known_.try_emplace(key);
      if (added)
        at->second = promise.get_future().share();
      else
        known = at->second;
    }
    if (known.valid())
      return known.get();
    Pointer value;
    try {
      value = make();
    } catch (...) { // waiting threads get the same exception
      promise.set_exception(std::current_exception());
      throw;
    }
    promise.set_value(value);
    const std::lock_guard lock(mutex_);
    bytes_ += size(*value);
    if (bytes_ > kMaxBytes) {
      known_.clear();
      bytes_ = 0;
    }
    return value;
  }

private:
  static constexpr size_t kMaxBytes = size_t{1} << 28;
  std::mutex mutex_;
  std::map<Key, std::shared_future<Pointer>> known_;
  size_t bytes_ = 0;
};

class Reference {
public:
  /// For synthesized values; reads no memory of the source.
  Reference(const Plan &plan, uint64_t seed);
  /// For a source in memory, which must outlive this.
  Reference(const Plan &plan, const Memory &source);

  /// Whether values of a tensor pattern depend on quantization, so that its synthesized values alone do not determine
  /// them: a source param that holds it is quantized or is a quantized view.
  bool viewed(int pattern) const { return pattern >= 0 && tensorPatterns_.count(pattern) > 0; }
  bool synthesized() const { return !source_; }
  uint64_t seed() const { return seed_; }

  /// A tensor by its full name, cached. With synthesized values, only for tensors whose pattern is viewed().
  std::shared_ptr<const TensorValues> tensor(const std::string &name);
  /// The same, not cached.
  TensorValues assemble(const std::string &name);

  /// The amax of a whole matrix. `range` begins at an element of an `amax` view, which has the amax of one part of the
  /// matrix; `values` are those of a param that receives the matrix.
  std::optional<float> amax(const ElementRange &range, const SynthesizedValues &values);

private:
  using Key = std::array<uint32_t, 3>; // mesh rank, param, instance

  /// The matrices that an `amax` view describes.
  struct AmaxMatrices {
    int pattern;         // their tensor pattern
    uint32_t dimensions; // over which the amax is; as QuantizedView.amax_dimensions
  };
  std::vector<float> amax(const std::string &name, const AmaxMatrices &of, const SynthesizedValues &values);
  bool sendsAmax(const MeshRankMemory &rankMemory, uint32_t param) const;
  void find(const std::vector<MeshRankMemory> &rankMemories);
  InstanceLayout layoutOf(const MeshRankMemory &rankMemory, const schema::ParamInstance &instance) const;
  bool has(const MeshRankMemory &rankMemory, uint32_t param, uint32_t instance) const;
  std::shared_ptr<const std::byte> bytes(const MeshRankMemory &rankMemory, const schema::ParamInstance &instance);
  std::shared_ptr<const std::vector<Bytes>> quantized(const MeshRankMemory &rankMemory,
                                                      const schema::ParamInstance &elements);

  const Plan &plan_;
  const schema::Endpoint &endpoint_; // the source
  const Memory *source_ = nullptr;
  uint64_t seed_ = 0;
  std::set<int> tensorPatterns_;
  std::vector<std::optional<BaseOf>> baseOf_;
  std::vector<MeshRankMemory> rankMemories_; // without memory if values are synthesized
  InstancesByTensor instancesByTensor_;
  Cache<std::string, TensorValues> tensors_;
  Cache<Key, Bytes> instances_;
  Cache<Key, std::vector<Bytes>> quantized_;
  std::map<int, AmaxMatrices> amaxOf_; // by the tensor pattern of an `amax` view
  Cache<std::string, std::vector<float>> amax_;
};

} // namespace reshard::analysis
