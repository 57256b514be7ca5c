// SPDX-License-Identifier: Apache-2.0
// Reads a manifest: coordinates, param names, shapes and element positions of one mesh rank. The executor binds by name
// with it, and the tools verify plans with it. It shares no code with the compiler.
#pragma once

#include "base/formats/quantized_formats.h"
#include "base/formats/storage_formats.h"
#include "base/status.h"
#include "schema/plan_generated.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace reshard::schema {

/// The FlatBuffers identifier of a manifest. That of a segment is SegmentIdentifier().
inline constexpr const char *kManifestIdentifier = "RSMF";

/// In chunk c (a virtual pipeline stage) the positions of index values on a mesh rank start at c * kChunkStride.
inline constexpr int64_t kChunkStride = int64_t{1} << 20;

/// Bytes of one element.
int64_t itemBytes(DType type);
/// The dtype of a param's elements in memory. They are sent in its dtype().
inline DType storageDtypeOf(const Param &param) {
  return param.storage_dtype() ? *param.storage_dtype() : param.dtype();
}
/// The name in YAML and reports ("bf16"), and in safetensors headers ("BF16").
const char *dtypeName(DType type);
const char *safetensorsName(DType type);
std::optional<DType> dtypeFromSafetensors(std::string_view name);

/// The coordinate of a mesh rank over mesh axes (indices into Endpoint::axes, outermost first); 0 for no axes.
int64_t coordinate(const Endpoint &endpoint, const flatbuffers::Vector<uint32_t> *axes, int64_t meshRank);

/// The index blocks of a sharding on a mesh rank.
struct IndexMap {
  const IndexBlock *begin = nullptr, *end = nullptr;
  /// The number of pairs.
  int64_t size() const;
  /// The local position of a logical position; nullopt if this mesh rank does not have it.
  std::optional<int64_t> map(int64_t from) const;
};
IndexMap indexMap(const Endpoint &endpoint, const Sharding &sharding, int64_t meshRank);

/// The format of a storage endpoint's files.
inline reshard::StorageFormat formatOf(const Endpoint &endpoint) {
  return static_cast<reshard::StorageFormat>(endpoint.format());
}

/// The format of a view and the layout of its scales.
inline const QuantizedFormat &formatOf(const QuantizedView &view) {
  return reshard::formatOf(static_cast<reshard::Quantization>(view.format()));
}
inline reshard::ScaleLayout scaleLayoutOf(const QuantizedView &view) {
  return static_cast<reshard::ScaleLayout>(view.scale_layout());
}

/// Whether the caller converts the param by hooks.
inline bool transformed(const Param &param) { return param.transform() && param.transform()->size() > 0; }
/// Whether the caller binds the param, or a file holds it.
inline bool bindable(const Param &param) { return !param.view() && !transformed(param); }

/// A mesh rank in texts: "rank 3", of a storage endpoint "file 3", or "stored chunk 3" in formats with chunks.
/// `number`: its entry of Endpoint::ranks.
inline std::string meshRankText(const Endpoint &endpoint, uint32_t number) {
  return (storesChunks(formatOf(endpoint)) ? "stored chunk "
          : endpoint.storage()             ? "file "
                                           : "rank ") +
         std::to_string(number);
}
inline std::string meshRankName(const Endpoint &endpoint, uint32_t meshRank) {
  return meshRankText(endpoint, endpoint.ranks()->Get(meshRank));
}

/// Whether each instance of the param has its own memory in the arena.
inline bool inArena(const Param &param) {
  return param.view() ? param.view()->staged() && param.view()->kind() != ViewKind::elements : transformed(param);
}
/// Bytes of the arena that one such instance uses.
inline uint64_t stagedBytes(const BufferRange &range) { return (range.bytes() + 63) / 64 * 64; }

/// Whether a view of kind `amax` of a source takes the amax over dimension `d` of its part.
inline bool isAmaxDimension(const QuantizedView &view, const Part &part, uint32_t d) {
  const uint32_t fromLast = part.dimensions()->size() - 1 - d;
  return fromLast < 32 && ((view.amax_dimensions() == 0 ? 3u : view.amax_dimensions()) >> fromLast & 1) != 0;
}

/// One instance of a param on a mesh rank.
struct ParamInstance {
  uint32_t param = 0;          // into Endpoint::params
  uint32_t instance = 0;       // number within the param on this mesh rank, the last name variable fastest
  std::vector<int64_t> values; // logical value of each name variable
  std::string name;
  std::vector<int64_t> shape; // elements
  int64_t bytes = 0;          // in memory
};

/// Whether a mesh rank satisfies a param's presence rules. It may still have no instance of the param.
bool present(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Number of instances of a param on a mesh rank; 0 if it is absent.
int64_t instanceCount(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// Shape of one instance on a mesh rank, in elements.
std::vector<int64_t> localShape(const Endpoint &endpoint, const Param &param, int64_t meshRank);
/// All instances of one param on a mesh rank, by instance number.
std::vector<ParamInstance> instances(const Manifest &manifest, const Endpoint &endpoint, uint32_t param,
                                     int64_t meshRank);

/// The name of the tensor of a pattern for given index values.
std::string tensorName(const Manifest &manifest, const TensorPattern &pattern, const std::vector<int64_t> &values);

/// Checks a manifest (check_manifest.cpp): every reference exists, sizes are within bounds, every part lies inside its
/// tensor and its param, instances are numbered without gaps, names are unique. The functions above are safe only on a
/// manifest that passes; the loader calls this before anything else.
Status checkManifest(const Manifest &manifest);

} // namespace reshard::schema
