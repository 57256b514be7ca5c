// SPDX-License-Identifier: Apache-2.0
// Replicas of a target whose proof can use that of an earlier replica: the same elements arrive at the same places,
// except for pieces that are cut at other places.
#pragma once

#include "base/hash.h"
#include "verify/proof/contents.h"
#include "verify/proof/plan_verifier.h"

#include <array>
#include <map>
#include <optional>
#include <vector>

namespace reshard::verify {

class ReplicaProofs {
public:
  ReplicaProofs(const PairedPlan &paired, const schema::Manifest &manifest, Contents &contents)
      : paired_(paired), manifest_(manifest), contents_(contents) {}

  /// What was proven of a rank.
  struct Proof {
    uint64_t moves = 0, bytes = 0;
  };
  /// An output operand of a step.
  struct Output {
    uint32_t step, number;
  };
  /// An earlier rank that is proven, and the outputs that only one of both ranks has.
  struct Difference {
    uint32_t other;
    Proof proof; // the other rank's
    std::vector<Output> outputs, outputsOfOther;
  };
  /// Compares a rank with the last rank of keep() whose target buffers have the same numbers, sizes and elements. No
  /// value if there is none, if more than a fourth of the outputs differ, or if the rank writes files or quantized
  /// views or reads an arena.
  std::optional<Difference> find(uint32_t rank);
  /// Equal for ranks whose target buffers have the same numbers, sizes and elements.
  Digest digestOf(uint32_t rank) const;
  /// Keeps the proof of the rank of the last find(), which was proven as a whole.
  void keep(const Proof &proof);

private:
  /// An output that writes to a target buffer.
  struct Written {
    Output output;
    /// Buffer, offset and shape of what it writes; content number, instance, offset and shape of what it reads, or
    /// zeros if it writes zeros.
    std::array<uint64_t, 8> what;
  };
  struct Description {
    std::vector<uint64_t> buffers;
    std::vector<Written> written; // by `what`
  };
  struct Known {
    uint32_t rank;
    size_t outputs;
    Proof proof;
  };

  std::vector<uint64_t> targetBuffers(uint32_t rank) const;
  bool describe(uint32_t rank, Description &to);
  bool describeOther(uint32_t rank);
  bool addStep(uint32_t rank, uint32_t number, Description &to);
  uint32_t shapeOf(uint32_t rank, uint32_t number);

  const PairedPlan &paired_;
  const schema::Manifest &manifest_;
  Contents &contents_;
  std::vector<std::vector<uint32_t>> shapeNumbers_; // by rank and shape: the same in all segments; 0: not known yet
  std::map<std::vector<uint64_t>, uint32_t> shapes_;
  std::map<Digest, Known> known_; // by the digest of the target buffers
  Description last_, other_;
  uint32_t otherRank_ = UINT32_MAX; // the rank that `other_` describes
  Digest digest_{};                 // the target buffers' of the rank of the last find()
  uint32_t rank_ = 0;               // given to the last find()
  bool described_ = false;          // whether it has a description
};

} // namespace reshard::verify
