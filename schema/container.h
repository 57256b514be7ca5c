// SPDX-License-Identifier: Apache-2.0
// Writing and mapping .rplan files: a header, the manifest, an index, one segment per rank. schema/README.md describes
// every byte.
#pragma once

#include "base/hash.h"
#include "base/status.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace reshard::schema {

using Bytes = std::span<const std::byte>;

// Features of a plan, bits of the header. A reader must refuse a plan with a bit that it does not know.

/// Elements are cast when they are written to memory (Param.storage_dtype).
constexpr uint64_t kFeatureCasts = 1;
/// The plan has quantized views or derived params (Param.view, Param.derived).
constexpr uint64_t kFeatureViews = 2;
/// The caller converts params by hooks (Param.transform).
constexpr uint64_t kFeatureTransforms = 4;
/// An amax is taken over other dimensions of a tensor than the last two (QuantizedView.amax_dimensions).
constexpr uint64_t kFeatureAmaxDimensions = 8;
/// Ranks relay: they receive into the arena and send from there.
constexpr uint64_t kFeatureRelays = 16;
/// Sends share their inputs.
constexpr uint64_t kFeatureSharedOperands = 32;
/// Some segments are compressed.
constexpr uint64_t kFeatureCompressed = 64;

/// Casts do not fail at values beyond the range (Param.overflow).
constexpr uint64_t kFeatureOverflowRules = 128;

/// A segment as a plan with kFeatureCompressed stores it.
struct CompressedSegment {
  std::vector<std::byte> bytes;
  uint32_t segmentBytes; // 0: not compressed, since it would grow, or shrink to less than 1 / kMaxCompression
  Digest digest;         // covers the segment without compression
};
/// An error if libzstd cannot be loaded.
Result<CompressedSegment> compress(Bytes segment);

/// Writes a plan. finish() renames a complete temporary file to the path, so no reader sees a partial plan. If the path
/// is not a regular file (a device, a FIFO), finish() copies the bytes to it.
class ContainerWriter {
public:
  ContainerWriter();
  ~ContainerWriter();
  /// `segments`: the number of segments to add, one per rank, from rank 0.
  Status create(const std::string &path, uint32_t segments, uint64_t features = 0);
  /// Features that are known only when segments have been built.
  void addFeatures(uint64_t features);
  Status addManifest(Bytes manifest);
  /// Replaces the manifest by one of the same size: counts that are known only when segments have been built.
  Status replaceManifest(Bytes manifest);
  Status addSegment(Bytes segment);
  Status addSegment(const CompressedSegment &segment);
  /// `inspect`, if given, is called with a path at which the complete plan can be read before it has its name. If it
  /// throws, the plan is removed.
  Status finish(const std::function<void(const std::string &path)> &inspect = {});
  /// The plan's digest, 32 hexadecimal digits: XXH3-128 of the header, which contains the digests of the manifest and
  /// of the index. Valid after finish().
  const std::string &digest() const;
  /// File size. Valid after finish().
  int64_t bytes() const;

private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A segment's own copy of its bytes.
struct SegmentBytes {
  std::shared_ptr<const std::byte[]> memory;
  size_t size = 0;
  operator Bytes() const { return {memory.get(), size}; }
};

/// An open plan. open() reads the header, the manifest and the index. segment() reads one segment, decompresses it and
/// verifies its digest, so that a rank reads its own segment only. All of them are copies in memory: a file that
/// another program writes or truncates while it is open cannot change what has been checked. A segment lives as long as
/// its readers keep it; those who read it at the same time share one copy. Threads may call segment() at the same time.
class Container {
public:
  ~Container();
  /// Absent, foreign, newer, truncated and damaged files have different error texts, all of kind badPlan.
  static Status open(const std::string &path, std::unique_ptr<Container> &container);
  Bytes manifest() const;
  uint32_t segments() const;
  /// Fails, with kind `invalid`, if the plan has no such rank.
  Status segment(uint32_t rank, SegmentBytes &bytes) const;
  /// The digest of one segment (16 bytes), from the index: the segment itself is not read. Compression does not change
  /// it.
  std::string segmentDigest(uint32_t rank) const;
  /// The bytes of one segment, without compression.
  uint64_t segmentBytes(uint32_t rank) const;
  const std::string &digest() const;
  int64_t bytes() const;
  /// The bytes that the file would have without compression: at most kMaxCompression times as many.
  int64_t decompressedBytes() const;

private:
  struct State;
  explicit Container(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

} // namespace reshard::schema
