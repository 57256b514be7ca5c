// SPDX-License-Identifier: Apache-2.0
// Comparisons of memory with memory through the layouts of the manifest, tensor by tensor.
#pragma once

#include "verify/check/check.h"

#include <functional>

namespace reshard::verify {

/// What a comparison calls (each may be empty), and the memory that it may use.
struct CompareWatch {
  std::function<void(double)> progress; // on the calling thread, with the fraction that is done
  std::function<void()> accessed;       // on any thread, after accesses to about 1 MiB of memory
  /// Bytes of tensors that it copies at a time; a larger tensor is copied alone. Besides, it keeps tensors and
  /// dequantized matrices for further use, at most a quarter as many bytes of each.
  uint64_t copies = kMaxCopies;
};

/// One of several processes that compare the same files: each takes some of the tensors, the first one also quantized
/// params.
struct CompareProcess {
  size_t process = 0, processes = 1;
};

/// Compares target memory with source memory, and padding with zeros. An element that no part covers counts as a
/// mismatch. `among`: which process this is, for endpoints that are storage.
CheckResult compare(const Plan &plan, const RankMemories &source, const RankMemories &target, unsigned threads,
                    const CompareWatch &watch = {}, const CompareProcess &among = {});

/// The differences between source replicas, each with the instance it was compared with. For quantized params, also
/// tied ones, codes and scales are compared if the blocks are the same.
struct ReplicaResult {
  uint64_t comparedBytes = 0;
  std::vector<std::string> differences; // by tensor, then by mesh rank; quantized params last
  std::vector<std::string>
      skipped; // tensor patterns held by several params with other blocks: not compared with each other
};
ReplicaResult compareReplicas(const Plan &plan, const RankMemories &source, unsigned threads,
                              const CompareWatch &watch = {});

} // namespace reshard::verify
