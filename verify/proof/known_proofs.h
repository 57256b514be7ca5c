// SPDX-License-Identifier: Apache-2.0
// Proofs about moves that serve again: most layers and experts of a model are moved in the same way.
#pragma once

#include "verify/proof/contents.h"
#include "verify/proof/plan_verifier.h"

#include <initializer_list>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace reshard::verify {

class KnownProofs {
public:
  /// Tags of the sets of the buffer that a move writes, and of the one that it reads.
  struct Tags {
    uint32_t wanted, found;
    bool operator==(const Tags &) const = default;
  };

  /// Begins a proof, which depends on these words and on the moves of add() alone.
  void begin(std::initializer_list<uint64_t> words) { key_ = words; }
  void add(const Move &move) {
    key_.insert(key_.end(), {move.loops.size(), move.rowBytes, move.targetOffset, move.sourceOffset});
    for (const Move::Loop &loop : move.loops)
      key_.insert(key_.end(), {static_cast<uint64_t>(loop.count), static_cast<uint64_t>(loop.target),
                               static_cast<uint64_t>(loop.source)});
  }

  /// Whether the proof is known that the moves write each byte of a buffer once.
  bool writtenOnce() const { return writtenOnce_.contains(key_); }
  void keepWrittenOnce() {
    if (room(writtenOnce_, 0))
      writtenOnce_.insert(key_);
  }

  /// The tags that must name the same tensors for the content of the move to be right; null: not known.
  const std::vector<Tags> *content() const {
    const auto known = contents_.find(key_);
    return known == contents_.end() ? nullptr : &known->second;
  }
  void keepContent(std::vector<Tags> tags) {
    if (room(contents_, tags.size()))
      contents_.insert_or_assign(key_, std::move(tags));
  }

private:
  static constexpr size_t kMaxWords = 256, kMaxProofs = 1 << 16;

  /// Makes room for a proof; returns false for one that is too long to be kept.
  template <class Proofs> bool room(Proofs &proofs, size_t more) const {
    if (proofs.size() >= kMaxProofs)
      proofs.clear();
    return key_.size() + more <= kMaxWords;
  }

  Words key_;
  std::unordered_set<Words, WordsHash> writtenOnce_;
  std::unordered_map<Words, std::vector<Tags>, WordsHash> contents_;
};

} // namespace reshard::verify
