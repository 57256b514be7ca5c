#include "compiler/bands.h"

#include "compiler/blocks.h"
#include "compiler/cutter.h"
#include "compiler/staging.h"

#include <algorithm>

namespace reshard {

using namespace ir;

namespace {

constexpr int64_t kMostBytes = 256 << 20; // at a time, where there is no limit
constexpr int64_t kMostChunks = 1 << 24;  // as round_limits.cpp has it

bool isGathered(const Param &param) {
  return param.face && param.face->kind == FaceKind::elements && param.face->gathered;
}

} // namespace

Bands::Bands(const Layout &layout) : layout_(layout), bands_(layout.world), bytes_(layout.world) {
  firsts_.resize(layout.endpoints.size());
  for (size_t e = 1; e < layout.endpoints.size(); ++e) {
    const Endpoint &endpoint = layout.endpoints[e];
    const bool faces = std::any_of(endpoint.params.begin(), endpoint.params.end(),
                                   [](const Param &param) { return param.face.has_value(); });
    for (int64_t place = 0; faces && place < endpoint.places(); ++place) {
      std::vector<uint32_t> &firsts = firsts_[e].emplace_back();
      uint32_t next = 0;
      for (const Param &param : endpoint.params) {
        firsts.push_back(next);
        next += static_cast<uint32_t>(instances(endpoint, param, place));
      }
    }
  }
}

unsigned Bands::paramOf(unsigned endpoint, int32_t place, uint32_t instance) const {
  const std::vector<uint32_t> &firsts = firsts_[endpoint][static_cast<size_t>(place)];
  return static_cast<unsigned>(std::upper_bound(firsts.begin(), firsts.end(), instance) - firsts.begin()) - 1;
}

int32_t Bands::writer(unsigned e, int32_t place, uint32_t instance) const {
  const Endpoint &endpoint = layout_.endpoints[e];
  if (!endpoint.storage)
    return endpoint.ranks[place];
  if (firsts_[e].empty())
    return -1;
  const unsigned param = paramOf(e, place, instance);
  const Face *face = endpoint.params[param].face ? &*endpoint.params[param].face : nullptr;
  if (!face || face->kind == FaceKind::codes ||
      (face->kind == FaceKind::elements && !face->gathered && face->format != Quantization::nvfp4))
    return -1;
  // Largest magnitudes go where the elements go.
  const unsigned codes = face->kind == FaceKind::amax ? endpoint.params[face->codes].face->codes : face->codes;
  return static_cast<int32_t>(
      (codes + static_cast<int64_t>(instance) - firsts_[e][static_cast<size_t>(place)][param] + place) % layout_.world);
}

uint32_t Bands::phaseOf(const Param &param) const {
  return param.face && param.face->kind == FaceKind::elements && param.face->format == Quantization::nvfp4
             ? 1
             : 0; // behind the largest magnitudes
}

const Band *Bands::find(unsigned endpoint, int32_t place, uint32_t instance, int64_t offset) const {
  const auto at = byInstance_.find({endpoint, place, instance});
  if (at == byInstance_.end())
    return nullptr;
  return &*std::prev(std::upper_bound(at->second.begin(), at->second.end(), offset,
                                      [](int64_t o, const Band &band) { return o < band.begin; }));
}

std::vector<std::vector<Bands::Rows>> Bands::rows() const {
  std::vector<std::vector<Rows>> result(layout_.world);
  for (unsigned e = 1; e < layout_.endpoints.size(); ++e) {
    const Endpoint &endpoint = layout_.endpoints[e];
    for (unsigned p = 0; p < endpoint.params.size(); ++p) {
      const Param &param = endpoint.params[p];
      if (!isGathered(param))
        continue;
      for (int32_t place = 0; place < endpoint.places(); ++place) {
        const std::vector<int64_t> shape = localShape(endpoint, param, place);
        const int64_t bytes = localBytes(endpoint, param, place), count = instances(endpoint, param, place);
        const int64_t width = shape.back() * itemBytes(param.dtype), height = shape[shape.size() - 2];
        for (int64_t i = 0; i < count && bytes > 0; ++i) {
          const uint32_t instance = firsts_[e][static_cast<size_t>(place)][p] + static_cast<uint32_t>(i);
          result[static_cast<size_t>(writer(e, place, instance))].push_back(
              {{e, place, instance, 0, bytes, 0, 0},
               std::min(blockOf(param.face->format).rows, height) * width,
               height * width,
               phaseOf(param) > 0,
               endpoint.params[param.face->codes].name});
        }
      }
    }
  }
  return result;
}

std::string Bands::plan(int64_t remote) {
  std::vector<std::vector<Rows>> all = rows();
  if (std::all_of(all.begin(), all.end(), [](const std::vector<Rows> &rows) { return rows.empty(); }))
    return {};
  const std::vector<std::vector<BufferRun>> runs = buffers(layout_);
  const int64_t staging = remote > 0 ? 8 * (2 * kStagingAlignment + remote / kMostChunks) : 0; // for messages
  int64_t least = 0;
  const Rows *largest = nullptr;
  for (int32_t rank = 0; rank < layout_.world; ++rank) {
    if (all[rank].empty())
      continue;
    const Rows &row = *std::max_element(all[rank].begin(), all[rank].end(),
                                        [](const Rows &a, const Rows &b) { return a.row < b.row; });
    const int64_t fixed = gatheredBytes(layout_, runs[rank]), needs = fixed + staged(row.row) + staging;
    if (needs > least) {
      least = needs;
      largest = &row;
    }
    if (layout_.stagingLimit == 0 || needs <= layout_.stagingLimit)
      planRank(rank, all[rank],
               layout_.stagingLimit == 0
                   ? kMostBytes
                   : std::min((layout_.stagingLimit - fixed) / 2, layout_.stagingLimit - fixed - staging));
  }
  if (layout_.stagingLimit > 0 && least > layout_.stagingLimit)
    return stagingTooSmall(layout_.stagingLimit) + " to gather a row of blocks of param '" + largest->name + "', " +
           std::to_string(largest->row) + " bytes, beside what else a rank stages, expected at least " +
           std::to_string(least) + " bytes";
  return {};
}

/// Rows one after the other into the arena, and from its beginning again where they do not fit; what must come later
/// behind all else.
void Bands::planRank(int32_t rank, std::vector<Rows> &rows, int64_t limit) {
  int64_t budget = limit;
  for (const Rows &each : rows)
    budget = std::max(budget, staged(each.row));
  std::stable_sort(rows.begin(), rows.end(), [](const Rows &a, const Rows &b) { return a.later < b.later; });
  uint32_t phase = 0;
  int64_t used = 0;
  for (const Rows &each : rows) {
    if (each.later && phase == 0) {
      phase = 1;
      used = 0;
    }
    for (int64_t at = 0; at < each.all.end;) {
      // As many rows as fit; the last one of a matrix may be shorter.
      int64_t end = at;
      auto next = [&](int64_t from) { return std::min(from + each.row, (from / each.matrix + 1) * each.matrix); };
      while (end < each.all.end && used + staged(next(end) - at) <= budget)
        end = next(end);
      if (end == at) {
        ++phase;
        used = 0;
        continue;
      }
      Band band = each.all;
      band.begin = at;
      band.end = end;
      band.phase = phase;
      band.offset = used;
      used += staged(end - at);
      bytes_[rank] = std::max(bytes_[rank], used);
      bands_[rank].push_back(band);
      byInstance_[{band.endpoint, band.place, band.instance}].push_back(band);
      at = end;
    }
  }
}

void cutByBands(const Descriptor &d, const Bands &bands, Interner<Shape> &shapes, std::vector<Descriptor> &parts) {
  std::vector<Descriptor> left = {d};
  while (!left.empty()) {
    const Descriptor next = left.back();
    const Shape shape = shapes[next.shape];
    left.pop_back();
    int64_t low = next.targetOffset, high = low + shape.rowBytes - 1;
    const Loop *longest = nullptr; // the loop that reaches furthest, over instances before all
    auto reach = [](const Loop &loop) {
      return std::make_pair(std::abs(loop.targetStep) * (loop.count - 1),
                            std::abs(loop.targetStride) * (loop.count - 1));
    };
    bool one = true;
    for (const Loop &loop : shape.loops) {
      one = one && loop.targetStep == 0;
      (loop.targetStride < 0 ? low : high) += loop.targetStride * (loop.count - 1);
      if (!longest || reach(loop) > reach(*longest))
        longest = &loop;
    }
    const Band *band = one ? bands.find(next.endpoint, next.target, next.targetInstance, low) : nullptr;
    if (one && (!band || high < band->end)) {
      parts.push_back(next);
      continue;
    }
    auto put = [&](int64_t at, const Loop &step, Shape part) {
      left.push_back(stepped(next, at, step, shapes.intern(std::move(part))));
    };
    if (!longest) {
      put(band->end - low, {shape.rowBytes, 1, 1, 0, 0}, {high + 1 - band->end, {}});
      put(0, {shape.rowBytes, 1, 1, 0, 0}, {band->end - low, {}});
      continue;
    }
    const size_t number = static_cast<size_t>(longest - shape.loops.data());
    const int64_t half = longest->count / 2;
    for (const auto &[from, count] : {std::pair(half, longest->count - half), std::pair(int64_t{0}, half)}) {
      Shape part = shape;
      part.loops[number].count = count;
      if (count == 1)
        part.loops.erase(part.loops.begin() + static_cast<ptrdiff_t>(number));
      put(from, shape.loops[number], std::move(part));
    }
  }
}

} // namespace reshard
