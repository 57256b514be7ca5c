// SPDX-License-Identifier: Apache-2.0
#include "executor/memory/bindings.h"

#include "base/text.h"
#include "executor/memory/mappings.h"
#include "schema/manifest.h"

#include <algorithm>
#include <map>

namespace reshard {

Bindable bindableOf(const Plan &plan, uint32_t endpointNumber, uint32_t meshRank) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(endpointNumber);
  Bindable result;
  result.role = endpoint.role()->str();
  result.meshRank = meshRank;
  uint32_t next = 0;
  for (uint32_t p = 0; p < (endpoint.params() ? endpoint.params()->size() : 0); ++p) {
    result.firstInstance.push_back(next);
    for (const schema::ParamInstance &instance : schema::instances(plan.manifest(), endpoint, p, meshRank)) {
      if (schema::bindable(*endpoint.params()->Get(p)))
        result.names.emplace(instance.name, std::make_pair(next, static_cast<uint64_t>(instance.bytes)));
      ++next;
    }
  }
  result.pointers.assign(next, nullptr);
  return result;
}

std::string nearest(const std::string &name, const Bindable &bindable) {
  Nearest nearest(name);
  size_t looked = 0;
  for (const auto &[known, where] : bindable.names) {
    if (++looked > 100'000)
      break;
    nearest.offer(known);
  }
  return nearest.hint();
}

std::string unboundText(const Plan &plan, const schema::BufferRange &range, const std::byte *const *memory) {
  const schema::Endpoint &endpoint = *plan.manifest().endpoints()->Get(range.endpoint());
  const auto *const end = memory + range.count(), *const first = std::find(memory, end, nullptr);
  const auto missing = std::count(first, end, nullptr);
  const std::vector<schema::ParamInstance> all =
      schema::instances(plan.manifest(), endpoint, range.param(), range.mesh_rank());
  const auto number = static_cast<size_t>(first - memory);
  return ": " + std::to_string(missing) + " of " + std::to_string(range.count()) +
         (missing == 1 ? " is not" : " are not") +
         (number < all.size() ? ", the first is '" + all[number].name + "'" : std::string());
}

namespace {

/// The error of the first two of `ranges` (ascending) that overlap, one of which is a target's. `where` is for its
/// text.
Status firstOverlap(const std::vector<BoundRange> &ranges, const char *where) {
  const BoundRange *last = nullptr, *lastTarget = nullptr; // with the greatest end
  for (const BoundRange &range : ranges) {
    const BoundRange *other = range.target ? last : lastTarget;
    if (other && other->end > range.begin && range.end > range.begin)
      return badBinding(other->name + " and " + range.name + " overlap in " + where);
    if (!last || range.end > last->end)
      last = &range;
    if (range.target && (!lastTarget || range.end > lastTarget->end))
      lastTarget = &range;
  }
  return {};
}

void sort(std::vector<BoundRange> &ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const BoundRange &a, const BoundRange &b) { return a.begin < b.begin; });
}

} // namespace

Bindable keepBound(const Bindable &before, Bindable now, const BoundPlace &place, std::vector<BoundRange> &ranges) {
  for (const auto &[name, instance] : now.names) {
    const auto [index, bytes] = instance;
    const auto old = before.names.find(name);
    if (old == before.names.end() || old->second.second != bytes || !before.pointers[old->second.first])
      continue;
    std::byte *const begin = now.pointers[index] = before.pointers[old->second.first];
    ranges.push_back({begin, begin + bytes, place.target, place.name + " param '" + name + "'"});
  }
  return now;
}

std::vector<MemoryRange> joined(const std::vector<BoundRange> &ranges) {
  std::vector<MemoryRange> result;
  for (const BoundRange &range : ranges)
    if (range.begin < range.end)
      result.push_back({range.begin, range.end});
  std::sort(result.begin(), result.end(), [](const auto &a, const auto &b) { return a.begin < b.begin; });
  size_t last = 0;
  for (size_t next = 1; next < result.size(); ++next)
    if (result[next].begin <= result[last].end)
      result[last].end = std::max(result[last].end, result[next].end);
    else
      result[++last] = result[next];
  result.resize(std::min(result.size(), last + 1));
  return result;
}

Status checkOverlaps(std::vector<BoundRange> &ranges) {
  sort(ranges);
  if (Status status = firstOverlap(ranges, "memory"); !status.ok())
    return status;
  // One file may be mapped at several addresses: compare offsets in files, as if each file were an address space.
  const SharedMappings mappings;
  std::map<std::pair<uint64_t, uint64_t>, std::vector<BoundRange>> files;
  for (const BoundRange &range : ranges)
    for (const FileRange &part : mappings.ranges(range.begin, range.end)) {
      const auto *begin =
          reinterpret_cast<const std::byte *>(part.offset); // NOLINT(performance-no-int-to-ptr): not dereferenced
      files[{part.device, part.inode}].push_back({begin, begin + part.bytes, range.target, range.name});
    }
  for (auto &[file, parts] : files) {
    sort(parts);
    if (Status status = firstOverlap(parts, "a file that is mapped more than once"); !status.ok())
      return status;
  }
  return {};
}

} // namespace reshard
