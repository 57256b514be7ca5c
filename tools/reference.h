// What the source shows of each tensor: of params that stand quantised their elements as dequantised, of codes and
// scales that go those of the source's own blocks. From synthesised values or from memory, through the layouts of the
// manifest.
#pragma once

#include "tools/quantized_views.h"
#include "tools/tensor_instances.h"

#include <array>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace reshard::tools {

struct SynthesizedValues; // tools/synthesized_values.h

/// Zeros that take memory where they are written: a plan may declare a tensor that is far larger than what anybody
/// holds of it.
class LazyBuffer {
public:
  LazyBuffer() = default;
  LazyBuffer(LazyBuffer &&other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  LazyBuffer &operator=(LazyBuffer &&) = delete;
  ~LazyBuffer();

  std::byte &operator[](int64_t at) { return data_[at]; }
  const std::byte &operator[](int64_t at) const { return data_[at]; }
  /// Throws where there are no such addresses.
  void grow(size_t bytes);

private:
  std::byte *data_ = nullptr;
  size_t bytes_ = 0;
};

/// A tensor as some instances hold it.
class TensorValues {
public:
  /// Takes a run of elements over from an instance. `agree`: what is known already must be the same.
  void put(const ElementRun &run, const std::byte *memory, int64_t item, bool agree);
  void put(int64_t element, const std::byte *from, int64_t item);
  bool known(int64_t element) const {
    return element < room_ && (std::to_integer<int>(known_[element / 8]) >> (element % 8) & 1) != 0;
  }
  /// Where an element that is known stands.
  const std::byte *at(int64_t element, int64_t item) const { return &bytes_[element * item]; }
  /// An element of which two holders show different values; -1: none.
  int64_t conflict() const { return conflict_; }
  /// Bytes that are known.
  size_t size() const { return size_; }

private:
  void set(int64_t element, const std::byte *from, int64_t item);
  void grow(int64_t end, int64_t item);

  LazyBuffer bytes_, known_; // a bit for each element
  int64_t room_ = 0, conflict_ = -1;
  size_t size_ = 0;
};

/// Remembers what was made last, for several threads; who asks for what is being made waits for it.
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
    } catch (...) { // who waits for it gets the same
      promise.set_exception(std::current_exception());
      throw;
    }
    promise.set_value(value);
    const std::lock_guard lock(mutex_);
    if ((bytes_ += size(*value)) > kMaxBytes) {
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
  /// Of synthesised values: none of the source's memory is looked at.
  Reference(const Plan &plan, uint64_t seed);
  /// Of a source in memory, which must outlive this.
  Reference(const Plan &plan, const Memory &source);

  /// Of a tensor pattern, whether synthesised values are not all: some param of the source that holds it stands
  /// quantised, or a face shows it.
  bool viewed(int pattern) const { return pattern >= 0 && tensorPatterns_.count(pattern) > 0; }
  bool synthesized() const { return !source_; }
  uint64_t seed() const { return seed_; }

  /// A tensor by its full name: of synthesised values only of a pattern that is shown. Remembered for a while.
  std::shared_ptr<const TensorValues> tensor(const std::string &name);
  /// The same, made anew.
  TensorValues assemble(const std::string &name);

  /// The largest magnitude of the whole matrix whose parts have theirs in an element, the first of a run, of a face of
  /// kind amax; `values`: of a param that has the matrix as it comes.
  std::optional<float> amax(const ElementRun &run, const SynthesizedValues &values);

private:
  using Key = std::array<uint32_t, 3>; // place, param, instance

  struct Over {
    int pattern;         // pattern of a tensor
    uint32_t dimensions; // as in Face.over
  };
  std::vector<float> amax(const std::string &name, const Over &of, const SynthesizedValues &values);
  bool sendsAmax(const MeshRankMemory &rankMemory, uint32_t param) const;
  void find(const std::vector<MeshRankMemory> &rankMemories);
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
  std::vector<MeshRankMemory> rankMemories_; // without memory, where values are synthesised
  InstancesByTensor holders_;
  Cache<std::string, TensorValues> tensors_;
  Cache<Key, Bytes> instances_;
  Cache<Key, std::vector<Bytes>> quantized_;
  std::map<int, Over> amaxOf_; // by the pattern of largest magnitudes, what they are of
  Cache<std::string, std::vector<float>> amax_;
};

} // namespace reshard::tools
