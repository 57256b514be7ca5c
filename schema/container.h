// The .rplan file: a fixed header, the manifest, one segment per rank, a 64-bit index. Layout of bytes:
// schema/README.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace reshard::schema {

using Bytes = std::span<const std::byte>;

/// Features of a plan, which a reader that does not know them must refuse. Casts: elements that are cast on their way
/// into memory (Param.stored).
constexpr uint64_t kFeatureCasts = 1;
/// … that shows or makes params in another form (Param.face).
constexpr uint64_t kFeatureViews = 2;
/// … that the caller fills and takes over by hooks (Param.transform).
constexpr uint64_t kFeatureTransforms = 4;
/// … with largest magnitudes over other dimensions of a tensor than the last two (Face.over).
constexpr uint64_t kFeatureAmaxDimensions = 8;
/// … with ranks that hold in their arenas what they send on (relays).
constexpr uint64_t kFeatureRelays = 16;

/// Writes a plan; the file appears complete (by rename) on finish() or not at all. What is no regular file (a device, a
/// FIFO) gets the bytes on finish(). Every call returns an error text, empty on success.
class ContainerWriter {
public:
  ContainerWriter();
  ~ContainerWriter();
  /// `segments`: how many will be added, one per rank from 0.
  std::string create(const std::string &path, uint32_t segments, uint64_t features = 0);
  std::string addManifest(Bytes manifest);
  std::string addSegment(Bytes segment);
  std::string finish();
  /// After finish: 32 hexadecimal digits (XXH3-128 over header fields, manifest digest and segment digests), file size.
  const std::string &digest() const;
  int64_t bytes() const;

private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A mapped plan. Maps header, index and manifest; a segment is mapped and its digest verified when it is asked for, so
/// that a rank touches its own part only.
class Container {
public:
  ~Container();
  /// Absent, foreign, newer, truncated and corrupt files are different errors. Empty on success.
  static std::string open(const std::string &path, std::unique_ptr<Container> &container);
  Bytes manifest() const;
  uint32_t segments() const;
  std::string segment(uint32_t rank, Bytes &bytes) const;
  /// Digest of one segment as stored in the index (16 bytes), without touching the segment.
  std::string segmentDigest(uint32_t rank) const;
  uint64_t segmentBytes(uint32_t rank) const;
  const std::string &digest() const;
  int64_t bytes() const;

private:
  struct State;
  explicit Container(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

} // namespace reshard::schema
