// SPDX-License-Identifier: Apache-2.0
// Ranks that have most of a proof in common: replicas of a target, to which equal operands bring equal elements, but
// for those that end where another message ends.
#pragma once

#include "analysis/verify/contents.h"
#include "analysis/verify/plan_verifier.h"
#include "support/hash.h"

#include <map>
#include <optional>
#include <vector>

namespace reshard::analysis {

class AlikeRanks {
public:
  AlikeRanks(const PairedPlan &paired, const schema::Manifest &manifest, Contents &contents)
      : paired_(paired), manifest_(manifest), contents_(contents) {}

  /// What was proven of a rank.
  struct Proof {
    uint64_t moves = 0, bytes = 0;
  };
  /// An output operand of a step.
  struct Output {
    uint32_t step, number;
  };
  /// An earlier rank, and the outputs of both that the other one does not have.
  struct Difference {
    uint32_t other;
    Proof proof; // of the other rank
    std::vector<Output> outputs, outputsOfOther;
  };
  /// Compares a rank with the first one that was proven and whose target buffers have the same numbers, sizes and
  /// elements. None if there is no such rank, if many outputs differ, or if the rank writes files or quantized views or
  /// reads an arena: then the caller proves the rank by itself and calls keep().
  std::optional<Difference> find(uint32_t rank);
  /// Keeps the proof of the rank of the last find().
  void keep(const Proof &proof);

private:
  using Words = std::vector<uint64_t>;
  /// An output that writes to a target buffer: its words say where, what it reads, and how.
  struct Written {
    Output output;
    size_t begin, end;
  };
  struct Description {
    Words buffers, words;
    std::vector<Written> written; // by words
  };
  struct Known {
    uint32_t rank;
    Proof proof;
  };

  bool describe(uint32_t rank, Description &to);
  bool addStep(uint32_t rank, uint32_t number, Description &to);
  bool addInput(uint32_t rank, const schema::Operand &input, Words &words);
  uint64_t contentOf(uint32_t rank, const schema::BufferRange &range);

  const PairedPlan &paired_;
  const schema::Manifest &manifest_;
  Contents &contents_;
  std::vector<std::vector<uint64_t>> numbers_; // contents by rank and buffer range; 0: not known yet
  std::map<Digest, Known> known_;              // by the digest of the target buffers
  Description last_, other_;
  Digest digest_{};        // of the target buffers of the rank of the last find()
  uint32_t rank_ = 0;      // of the last find()
  bool described_ = false; // whether it has a description
};

} // namespace reshard::analysis
