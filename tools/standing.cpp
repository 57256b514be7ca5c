#include "tools/standing.h"

#include "executor/check_segment.h"
#include "schema/limits.h"
#include "tools/quantize.h"
#include "tools/vectors.h"

#include <algorithm>

namespace reshard::tools {

using namespace schema;

namespace {

/// How tensors of codes and scales come to be, by pattern.
struct Derived {
  Quantization format;
  Quantizer by;
  bool scales;
};

std::map<int32_t, Derived> derived(const Manifest &manifest) {
  std::map<int32_t, Derived> result;
  const Endpoint &source = *manifest.endpoints()->Get(0);
  auto add = [&](uint32_t param, Derived how) {
    for (const Part *part : all(source.params()->Get(param)->parts()))
      if (part->family() >= 0)
        result[part->family()] = how;
  };
  for (uint32_t p = 0; p < all(source.params()).size(); ++p)
    if (const Face *face = source.params()->Get(p)->face()) {
      switch (face->kind()) {
      case FaceKind::elements:
        for (const uint32_t shown : shownParams(*face))
          add(shown, {face->format(), Quantizer::passed, shown != face->codes()});
        break;
      case FaceKind::plain_scales:
        add(p, {face->format(), Quantizer::passed, true});
        break;
      case FaceKind::codes:
      case FaceKind::scales:
        add(p, {face->format(), Quantizer::sender, face->kind() == FaceKind::scales});
        break;
      case FaceKind::amax:
        add(p, {face->format(), Quantizer::gathered, true});
        break; // which the receiver needs
      }
    }
  return result;
}

} // namespace

std::vector<std::optional<Standing>> standings(const Manifest &manifest, uint32_t number) {
  const Endpoint &endpoint = *manifest.endpoints()->Get(number);
  const std::map<int32_t, Derived> families = derived(manifest);
  const auto &params = all(endpoint.params());
  std::vector<std::optional<Standing>> result(params.size());
  for (uint32_t p = 0; p < params.size(); ++p)
    if (const Face *face = params.Get(p)->face(); face && face->kind() == FaceKind::elements)
      for (const uint32_t shown : shownParams(*face))
        result[shown] = {face->format(),
                         number == 0        ? Quantizer::held
                         : face->gathered() ? Quantizer::gathered
                                            : Quantizer::arrival,
                         face->swizzled(), shown == face->codes(), number == 0 ? -1 : static_cast<int32_t>(p)};
  if (number == 0)
    return result;
  // What holds codes or scales that come. Swizzled scales come by way of plain ones.
  std::map<uint32_t, int32_t> plain; // swizzled scales -> their face
  for (uint32_t p = 0; p < params.size(); ++p)
    if (const Face *face = params.Get(p)->face(); face && face->kind() == FaceKind::plain_scales)
      plain[face->codes()] = static_cast<int32_t>(p);
  for (uint32_t p = 0; p < params.size(); ++p) {
    const auto by = plain.find(p);
    const auto &parts = all(params.Get(by == plain.end() ? p : static_cast<uint32_t>(by->second))->parts());
    if (result[p] || params.Get(p)->face() || parts.size() == 0)
      continue;
    if (const auto found = families.find(parts.Get(0)->family()); found != families.end())
      result[p] = {found->second.format, found->second.by, by != plain.end(), !found->second.scales,
                   by == plain.end() ? -1 : by->second};
  }
  return result;
}

size_t derivedFamilies(const Manifest &manifest) { return derived(manifest).size(); }

QuantizedCounts countQuantized(const Manifest &manifest, uint32_t number) {
  const Endpoint &endpoint = *manifest.endpoints()->Get(number);
  const auto standing = standings(manifest, number);
  QuantizedCounts counts;
  for (uint32_t p = 0; p < standing.size(); ++p) {
    const Param &param = *endpoint.params()->Get(p);
    const bool sends = param.face() && param.face()->kind() == FaceKind::codes,
               codes = standing[p] && standing[p]->codes;
    for (uint32_t place = 0; (sends || codes) && place < endpoint.ranks()->size(); ++place)
      (codes ? counts.params[standing[p]->by][standing[p]->format] : counts.sends) +=
          instanceCount(endpoint, param, place);
  }
  return counts;
}

std::string mostGathered(const Plan &plan, uint64_t &bytes) {
  std::map<uint32_t, uint64_t> memory; // by rank: of faces that have some
  auto add = [](uint64_t &sum, uint64_t more) {
    return !__builtin_add_overflow(sum, more, &sum) && sum <= static_cast<uint64_t>(kMaxSize);
  };
  bool rows = false;
  for (uint32_t e = 0; e < plan.manifest().endpoints()->size(); ++e) {
    const Endpoint &endpoint = *plan.manifest().endpoints()->Get(e);
    for (uint32_t p = 0; p < all(endpoint.params()).size(); ++p) {
      const Param &param = *endpoint.params()->Get(p);
      if (!param.face() || !param.face()->gathered())
        continue;
      rows = rows || param.face()->kind() == FaceKind::elements;
      for (uint32_t place = 0; place < endpoint.ranks()->size() && param.face()->kind() != FaceKind::elements;
           ++place) {
        uint64_t each = static_cast<uint64_t>(itemBytes(param.dtype())), of = 0;
        for (const int64_t length : localShape(endpoint, param, place))
          each *= static_cast<uint64_t>(length); // the loader has seen that these are at most kMaxSize
        // Every rank has those of files.
        uint64_t &sum = memory[endpoint.storage() ? UINT32_MAX : endpoint.ranks()->Get(place)];
        if (__builtin_mul_overflow(static_cast<uint64_t>(instanceCount(endpoint, param, place)),
                                   gatheredBytes({e, place, p, 0, 1, 0, each}), &of) ||
            !add(sum, of))
          return "param '" + param.name()->str() + "' of endpoint '" + endpoint.role()->str() + "' gathers more than " +
                 std::to_string(kMaxSize) + " bytes on a rank with what stands before it, expected at most so many";
      }
    }
  }
  bytes = 0;
  if (!rows && memory.empty())
    return {};
  for (uint32_t rank = 0; rank < plan.world(); ++rank) {
    uint64_t sum = memory.count(rank) ? memory[rank] : 0;
    const Segment *segment = nullptr;
    if (std::string error = rows ? plan.segment(rank, segment) : std::string(); !error.empty())
      return error;
    if (!add(sum, memory[UINT32_MAX]) || !add(sum, segment ? arenaBegin(*segment) : 0))
      return "rank " + std::to_string(rank) + " gathers more than " + std::to_string(kMaxSize) +
             " bytes, expected at most so many";
    bytes = std::max(bytes, sum);
  }
  return {};
}

} // namespace reshard::tools
