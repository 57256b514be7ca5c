// SPDX-License-Identifier: Apache-2.0
#include "executor/load/load.h"

#include <algorithm>

namespace reshard {
namespace {

/// The deepest nesting of tables is manifest → endpoint → param → part; a segment is one table.
constexpr flatbuffers::uoffset_t kMaxDepth = 8;
/// A table takes at least its offset to the vtable and the offset that refers to it. With this limit a file with a
/// million tensors passes, and a hostile file that refers to the same tables many times cannot cause more work than it
/// has bytes.
constexpr size_t kMinTableBytes = 2 * sizeof(flatbuffers::uoffset_t);
/// The verifier reads prefix, root offset and identifier without a check of the size.
constexpr size_t kMinBytes = 12;

template <class CopyTable> const CopyTable *verified(schema::Bytes bytes, const char *identifier) {
  const auto tables =
      static_cast<flatbuffers::uoffset_t>(std::min<size_t>(bytes.size() / kMinTableBytes, FLATBUFFERS_MAX_BUFFER_SIZE));
  flatbuffers::Verifier verifier(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size(), kMaxDepth, tables);
  if (bytes.size() < kMinBytes || !verifier.VerifySizePrefixedBuffer<CopyTable>(identifier))
    return nullptr;
  return flatbuffers::GetSizePrefixedRoot<CopyTable>(bytes.data());
}

} // namespace

MeshRankIndex::MeshRankIndex(const schema::Manifest &manifest) {
  for (const schema::Endpoint *endpoint : *manifest.endpoints()) {
    auto &list = meshRanks_.emplace_back();
    list.reserve(endpoint->ranks()->size());
    for (uint32_t meshRank = 0; meshRank < endpoint->ranks()->size(); ++meshRank)
      list.emplace_back(endpoint->ranks()->Get(meshRank), meshRank);
    std::sort(list.begin(), list.end());
  }
}

std::optional<uint32_t> MeshRankIndex::find(uint32_t endpoint, uint32_t rank) const {
  const auto &list = meshRanks_[endpoint];
  const auto at = std::lower_bound(list.begin(), list.end(), std::pair(rank, uint32_t{0}));
  return at == list.end() || at->first != rank ? std::nullopt : std::optional(at->second);
}

Status Plan::open(const std::string &path, std::unique_ptr<Plan> &plan) {
  auto opened = std::make_unique<Plan>();
  opened->path_ = path;
  if (Status status = schema::Container::open(path, opened->container_); !status.ok())
    return status;
  opened->manifest_ = verified<schema::Manifest>(opened->container_->manifest(), schema::kManifestIdentifier);
  if (!opened->manifest_)
    return badPlan("'" + path + "': damaged: the manifest is not a valid FlatBuffer");
  const schema::Manifest &manifest = *opened->manifest_;
  if (Status status = schema::checkManifest(manifest); !status.ok())
    return std::move(status).withPrefix("'" + path + "': the manifest is inconsistent: ");
  if (manifest.world() != opened->world())
    return badPlan("'" + path + "': the manifest is inconsistent: found a world of " +
                   std::to_string(manifest.world()) + " ranks, the file has " + std::to_string(opened->world()) +
                   " segments");
  // So tables by message number cannot be larger than the plan.
  const auto planBytes = static_cast<uint64_t>(opened->container_->decompressedBytes());
  if (manifest.messages() > planBytes / (2 * sizeof(schema::Step)))
    return badPlan("'" + path + "': the manifest is inconsistent: found " + std::to_string(manifest.messages()) +
                   " messages, more than a plan of " + std::to_string(planBytes) + " bytes can describe");
  opened->meshRanks_.emplace(manifest);
  plan = std::move(opened);
  return {};
}

Status Plan::segment(uint32_t rank, std::shared_ptr<const schema::Segment> &segment) const {
  schema::SegmentBytes bytes;
  if (Status status = container_->segment(rank, bytes); !status.ok())
    return status;
  const std::string where = "'" + path_ + "': the segment of rank " + std::to_string(rank) + " ";
  const schema::Segment *root = verified<schema::Segment>(bytes, schema::SegmentIdentifier());
  if (!root)
    return badPlan(where + "is not a valid FlatBuffer");
  if (Status status = checkSegment(*manifest_, *meshRanks_, *root, rank); !status.ok())
    return std::move(status).withPrefix(where + "is inconsistent: ");
  segment = {std::move(bytes.memory), root};
  return {};
}

} // namespace reshard
