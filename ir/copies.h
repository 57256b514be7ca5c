// SPDX-License-Identifier: Apache-2.0
// Copies of a job: mesh ranks that repeat what others do. The passes plan one copy, and the schedule repeats it.
#pragma once

#include "ir/ir.h"

#include <cstdint>
#include <vector>

namespace reshard::ir {

/// A digit of the number of a mesh rank: (p / stride) mod size.
struct Digit {
  int64_t stride = 1, size = 1;
  bool operator==(const Digit &) const = default;
};

/// The copies of one endpoint: mesh ranks that differ in these digits only hold the same elements at the same places.
class EndpointCopies {
public:
  /// `digits`: by ascending strides; each stride is a multiple of stride * size of the digit before.
  explicit EndpointCopies(std::vector<Digit> digits = {}) : digits_(std::move(digits)) {}
  int64_t count() const;
  /// The mesh rank of copy 0 that has the same elements.
  int32_t first(int32_t meshRank) const;
  /// The mesh rank of a copy that has the elements of a mesh rank of copy 0.
  int32_t meshRank(int32_t first, int64_t copy) const;
  /// The copy of a mesh rank.
  int64_t copy(int32_t meshRank) const;

private:
  std::vector<Digit> digits_;
};

/// The copies of a job. A source of `sources` copies and a target of `sources * each` copies are planned as one copy of
/// each: source copy c serves target copies [c * each, (c + 1) * each), and every target copy in the same way. So the
/// overlaps, transfers and descriptors of a module name mesh ranks of copy 0 only, and each stands for all copies.
///
/// A source with replicas serves several copies of the target with fewer messages if these are planned one by one:
/// each replica then sends whole params to some of them. So `each` is 1 unless the source has hardly any replicas.
///
/// A job has one copy without Layout::foldsCopies, if ranks hold parts of both sides, if the network has nodes (bytes
/// then enter a node once, and nodes forward them), or with files, several targets, epochs (--keep), engine replicas or
/// quantized views.
class Copies {
public:
  explicit Copies(const Layout &layout);
  const EndpointCopies &source() const { return source_; }
  const EndpointCopies &target() const { return target_; }
  const EndpointCopies &of(unsigned endpoint) const { return endpoint == 0 ? source_ : target_; }
  /// Copies of the source, and copies of the target for each of them.
  int64_t sources() const { return source_.count(); }
  int64_t each() const { return target_.count() / source_.count(); }
  int64_t targets() const { return target_.count(); }

private:
  EndpointCopies source_, target_;
};

} // namespace reshard::ir
