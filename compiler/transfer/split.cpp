// SPDX-License-Identifier: Apache-2.0
#include "compiler/transfer/split.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// The range [begin, end) of the `from` side if it is contiguous, else {0, 0}.
std::pair<int64_t, int64_t> contiguous(const IndexMap &relation) {
  int64_t begin = 0, end = 0;
  for (const IndexBlock &s : relation) {
    if (&s == &relation.front())
      begin = end = s.from;
    if (s.from != end || (s.count > 1 && s.fromStep != s.length))
      return {0, 0};
    end = s.from + s.count * s.length;
  }
  return {begin, end};
}

} // namespace

const Splitter::Grid &Splitter::grid(uint32_t overlap) {
  if (known_.empty()) {
    known_.resize(module_.transfers.overlaps.size());
    grids_.resize(module_.transfers.overlaps.size());
  }
  if (!known_[overlap]) {
    known_[overlap] = true;
    grids_[overlap] = find(module_.transfers.overlaps[overlap]);
  }
  return grids_[overlap];
}

Splitter::Grid Splitter::find(const Overlap &overlap) const {
  const Layout &layout = module_.layout;
  if (overlap.pattern < 0)
    return {};
  const Endpoint &target = layout.endpoints[overlap.endpoint], &source = layout.endpoints[0];
  const Part &part = target.params[overlap.param].parts[overlap.part];
  for (size_t d = layout.tensorPatterns[overlap.pattern].variables.size(); d < part.dimensions.size(); ++d) {
    Grid grid;
    grid.dimension = static_cast<int64_t>(d);
    std::tie(grid.begin, grid.end) =
        contiguous(inverse(module_.transfers.relations[overlap.replicaGroups[0].relations[d]]));
    const Sharding &sharding = target.shardings[part.dimensions[d].sharding];
    grid.unit = sharding.unit;
    bool fits = true;
    for (const ReplicaGroup &replicaGroup : overlap.replicaGroups) {
      const int64_t unit =
          source.shardings[source.params[replicaGroup.param].parts[replicaGroup.part].dimensions[d].sharding].unit;
      fits = fits && !__builtin_mul_overflow(grid.unit / std::gcd(grid.unit, unit), unit, &grid.unit);
    }
    if (fits && grid.unit > 1) {
      // Units are aligned to logical positions: find the logical position of `begin`.
      const IndexMap local = inverse(sharding.at[coordinate(target, sharding.axes, overlap.targets[0])]);
      const int64_t logical = map(local, grid.begin), last = map(local, grid.end - 1);
      fits = logical >= 0 && last - logical == grid.end - 1 - grid.begin &&
             positionCount(restrict(local, {{grid.begin, grid.begin, grid.end - grid.begin, 1, 0, 0}})) ==
                 grid.end - grid.begin;
      grid.offset = (grid.unit - logical % grid.unit) % grid.unit;
    }
    const int64_t first = grid.offset > 0 ? grid.offset : grid.unit;
    if (fits && grid.begin + first < grid.end)
      return grid;
  }
  return {};
}

void Splitter::split(const Transfer &transfer, int64_t bytes, int64_t tolerance, std::vector<Transfer> &head,
                     std::vector<Transfer> &rest) {
  const int64_t all = ir::bytes(module_.transfers, transfer), each = all / transfer.count;
  if (transfer.count == 1)
    return splitTensor(transfer, bytes, head, rest);
  const int64_t nearest = std::clamp<int64_t>((bytes + each / 2) / std::max<int64_t>(each, 1), 0, transfer.count);
  const bool inside = std::abs(nearest * each - bytes) > tolerance && grid(transfer.overlap).dimension >= 0;
  const uint32_t whole = static_cast<uint32_t>(inside ? std::min<int64_t>(bytes / each, transfer.count - 1) : nearest);
  auto rangeOf = [&](uint32_t first, uint32_t count) {
    Transfer part = transfer;
    part.first = transfer.first + first;
    part.count = count;
    return part;
  };
  if (whole > 0)
    head.push_back(rangeOf(0, whole));
  if (inside)
    splitTensor(rangeOf(whole, 1), bytes - whole * each, head, rest);
  if (whole + inside < transfer.count)
    rest.push_back(rangeOf(whole + inside, transfer.count - whole - inside));
}

void Splitter::take(std::vector<Transfer> &left, int64_t wanted, bool all, std::vector<Transfer> &part) {
  size_t i = 0;
  std::vector<Transfer> rest;
  for (; i < left.size(); ++i) {
    const int64_t size = bytes(module_.transfers, left[i]);
    if (!all && size > wanted) {
      split(left[i], wanted, wanted / 64, part, rest);
      ++i;
      break;
    }
    part.push_back(left[i]);
    wanted -= size;
  }
  rest.insert(rest.end(), left.begin() + static_cast<ptrdiff_t>(i), left.end());
  left = std::move(rest);
}

void Splitter::splitTensor(Transfer tensor, int64_t bytes, std::vector<Transfer> &head, std::vector<Transfer> &rest) {
  const int64_t all = ir::bytes(module_.transfers, tensor);
  const Grid &where = grid(tensor.overlap);
  int64_t at = bytes * 2 < all ? 0 : all; // the cut in bytes if the tensor cannot be cut inside
  if (where.dimension >= 0) {
    const int64_t begin = tensor.cut() ? tensor.begin : where.begin, end = tensor.cut() ? tensor.end : where.end;
    const int64_t row = all / (end - begin), origin = where.begin + where.offset;
    const int64_t wanted = begin + bytes / row;
    // The nearest multiple of the unit, or an end.
    const int64_t below = origin + (wanted - origin >= 0 ? (wanted - origin) / where.unit : -1) * where.unit;
    int64_t best = bytes * 2 < all ? begin : end;
    for (int64_t position : {begin, below, below + where.unit, end})
      if (position >= begin && position <= end &&
          std::abs((position - begin) * row - bytes) < std::abs((best - begin) * row - bytes))
        best = position;
    if (best > begin && best < end) {
      tensor.dimension = static_cast<uint32_t>(where.dimension);
      tensor.begin = begin;
      tensor.end = best;
      head.push_back(tensor);
      tensor.begin = best;
      tensor.end = end;
      rest.push_back(tensor);
      return;
    }
    at = best == begin ? 0 : all;
  }
  (at == 0 ? rest : head).push_back(tensor);
}

} // namespace reshard
