// SPDX-License-Identifier: Apache-2.0
// Digests of the bound memory of all processes of a run, and the check that the targets hold what the source holds.
// Every function is collective: all processes of the run call it. In pull mode no process waits for all others: the
// check is in parts, which processes combine as they need them.
#pragma once

#include "executor/digests/element_sums.h"
#include "executor/transports/transport.h"
#include "schema/holdings.h"

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace reshard {

/// The memory of this process.
struct DigestMemory {
  const Plan &plan;
  Transport &transport;
  unsigned threads;
  /// Whether a mesh rank of an endpoint is one of this process.
  std::function<bool(uint32_t endpoint, uint32_t meshRank)> local;
  /// The bound memory of an instance of a local mesh rank; null: not bound.
  std::function<const std::byte *(uint32_t endpoint, uint32_t meshRank, uint32_t param, uint32_t instance)> bound;
};

/// A tensor of an endpoint. `sum.elements` of its elements are held; each counts once.
struct SideDigest {
  std::string tensor;
  schema::DType dtype;
  std::vector<int64_t> shape;
  int64_t elements;
  CountedDigest sum;

  /// Whether the endpoint holds all elements; else the digest is none of the tensor.
  bool whole() const { return sum.elements == static_cast<uint64_t>(elements); }
};

struct CheckOptions {
  bool firstIndex = false;      // the error states the first wrong element
  bool changed = false;         // the source must differ from the last one that was checked
  bool allowUndigested = false; // params that cannot be compared are no error
};

/// What the memory of this process adds to the digests of tensors.
class ProcessDigests {
public:
  /// A holding of a target, for which the source gives one digest.
  struct Bucket {
    uint32_t endpoint, holding;
  };
  /// The memory of a holding, or of a device and then, where the device cannot compute a digest, its copy.
  struct Loaded {
    InstanceMemory memory{};
    uint64_t bytes = 0;
    std::vector<std::byte> copy;
  };

  explicit ProcessDigests(DigestMemory memory) : memory_(std::move(memory)) {}

  const DigestMemory &memory() const { return memory_; }
  const schema::Endpoint &endpoint(uint32_t number) const { return *memory_.plan.manifest().endpoints()->Get(number); }
  const schema::Holdings &holdings(uint32_t endpoint);
  /// Makes the buckets: the holdings of all targets.
  void makeBuckets();
  const std::vector<Bucket> &buckets() const { return buckets_; }
  /// By endpoint.
  const std::map<uint32_t, uint32_t> &firstBucket() const { return firstBucket_; }
  /// The holdings of its endpoint, and itself.
  const schema::Holdings &heldOf(const Bucket &bucket) const { return holdings_.at(bucket.endpoint); }
  const schema::Holding &holdingOf(const Bucket &bucket) const { return heldOf(bucket).items[bucket.holding]; }
  const schema::HeldTensor &tensorOf(const Bucket &bucket) const {
    return heldOf(bucket).tensors[holdingOf(bucket).tensor];
  }
  /// Whether the source gives the digest of all elements of a bucket.
  bool isDigested(const Bucket &bucket, const CountedDigest &expected) const {
    return expected.elements == static_cast<uint64_t>(holdingOf(bucket).grid.elements());
  }
  const schema::Param &paramOf(uint32_t endpoint, const schema::Holding &holding);
  std::string paramName(uint32_t endpoint, uint32_t param) const;
  std::string paramName(const Bucket &bucket) const {
    return paramName(bucket.endpoint, heldOf(bucket).classOf(holdingOf(bucket)).param);
  }
  /// The names of the params of an endpoint whose memory does not hold elements of tensors.
  std::vector<std::string> withoutElements(uint32_t endpoint) const;

  /// Calls work(holding) in parallel for the holdings of an endpoint, or of one tensor of it, that this process counts.
  Status forEachCounted(uint32_t endpoint, const std::string *tensor, const Deadline &deadline,
                        const std::function<Status(const schema::Holding &, Loaded &, const PlaceSet *)> &work);
  /// As addElements(), of memory of the host or of a device.
  Status add(const schema::PartGrid &grid, Loaded &loaded, const PlaceSet *except, const Pieces &pieces,
             std::vector<CountedDigest> &sums);
  /// Adds the source's elements of each bucket to its sum; or, of one bucket only, to the sums of its pieces.
  Status addSource(const Bucket *only, const Pieces &pieces, std::vector<CountedDigest> &sums,
                   const Deadline &deadline);
  Status addTarget(const Bucket &bucket, uint32_t meshRank, const Pieces &pieces, std::vector<CountedDigest> &sums);

private:
  Status load(uint32_t endpoint, uint32_t meshRank, const schema::Holding &holding, Loaded &loaded);

  DigestMemory memory_;
  std::map<uint32_t, schema::Holdings> holdings_; // by endpoint
  std::vector<Bucket> buckets_;
  std::map<uint32_t, uint32_t> firstBucket_;
};

class RunDigests {
public:
  explicit RunDigests(DigestMemory memory) : process_(std::move(memory)) {}

  /// The digests of an endpoint's tensors, in the order of its layout.
  Result<std::vector<SideDigest>> side(uint32_t endpoint, bool allowUndigested, const Deadline &deadline);

  /// Before a run: computes what each target must hold afterwards. Errors of kind `invalid` and `badBinding` leave
  /// everything as it was.
  Status expect(const CheckOptions &options, const Deadline &deadline);
  /// After it: compares every replica of every element. The error names the tensors that differ and the ranks.
  Status compare(const Deadline &deadline);

  /// What a mesh rank of the target holds. A bucket is the elements of one tensor in one instance of a param, for all
  /// mesh ranks of a rank class.
  struct RankBuckets {
    std::vector<uint32_t> numbers;
    std::vector<uint32_t> sources; // mesh ranks of the source whose partial digests add up to the digests; ascending
  };
  /// In pull mode, not collective. What the source's elements that this process counts add to the digest of each
  /// bucket.
  Result<std::vector<CountedDigest>> sourceDigests();
  /// The buckets of a mesh rank of the target. Fails, with kind `invalid`, if the target has params without a digest,
  /// unless they are allowed.
  Result<RankBuckets> bucketsOf(uint32_t meshRank, bool allowUndigested);
  /// Fails, with kind `invalid`, if the source does not give the digests of all buckets, unless that is allowed.
  Status checkDigests(const RankBuckets &buckets, const std::vector<CountedDigest> &expected, bool allowUndigested);
  /// Compares what that mesh rank, which is one of this process, holds with the digests of the source, by bucket.
  /// Returns the names of the tensors that differ, for an error text; empty if none does. Calls `poll` before each
  /// bucket.
  Result<std::string> compareRank(uint32_t meshRank, const RankBuckets &buckets,
                                  const std::vector<CountedDigest> &expected, const std::function<void()> &poll,
                                  const Deadline &deadline);

  /// The undigested params of the last call: "target param 'x'".
  const std::vector<std::string> &undigested() const { return undigested_; }

private:
  /// A mesh rank whose part of a bucket is wrong.
  struct Wrong {
    uint32_t bucket, meshRank;
  };

  /// Fails if the plan moves no bytes.
  Status checkMoves() const;
  Status reportUndigested(std::vector<std::string> names, bool allowed);
  Status findWrong(std::vector<Wrong> &wrong, const Deadline &deadline);
  /// The text of an error; `counts`: the wrong mesh ranks of each bucket.
  Result<std::string> describe(const std::vector<Wrong> &mine, const std::vector<uint64_t> &counts,
                               const Deadline &deadline);
  Result<std::string> firstIndex(const std::vector<Wrong> &mine, uint32_t bucket, const Deadline &deadline);

  Status agree(Status mine, const Deadline &deadline);
  Status reduce(std::vector<CountedDigest> &sums, const Deadline &deadline);

  ProcessDigests process_;
  std::vector<CountedDigest> expected_, last_; // by bucket; `last_` of the last check that passed
  CheckOptions options_;
  std::vector<std::string> undigested_;
};

} // namespace reshard
