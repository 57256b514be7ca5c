// lcm-tile: source ∩ target → tiles. Every dimension of a family, index variables included, is solved on its own: the source's
// shares of it are cut into atoms (disjoint sets of positions, usually just the shares themselves), a target share meets some of
// them, and the relation source position -> target position follows by composing the two shares (periodic ones by LCM tiling,
// ir/segments.cpp). A tile is one combination of atoms; everybody who holds it is a candidate source.

#include "compiler/interner.h"
#include "compiler/pass.h"
#include "compiler/views.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// The source's cut of one dimension of a family.
struct Atoms {
  unsigned number = 0;
  std::vector<Segments> sets;                                  // ascending by first position
  std::unordered_map<unsigned, std::vector<unsigned>> of;      // interned source share -> its atoms
  bool whole = true;                                           // every source share is one atom
  std::unordered_map<unsigned, std::vector<unsigned>> meeting; // interned target share -> atoms it meets
};

struct Bounds {
  int64_t begin, end;
};
Bounds bounds(const Segments &segments) {
  Bounds result{INT64_MAX, INT64_MIN};
  for (const Segment &s : segments) {
    result.begin = std::min(result.begin, s.from);
    result.end = std::max(result.end, s.from + (s.count - 1) * s.fromStep + s.length);
  }
  return result;
}

/// Cuts the distinct source shares of a dimension into disjoint atoms. Shares that are equal or disjoint (the rule) are atoms as
/// they stand; others (a tensor held under two shardings, or an index value placed twice) are refined by set differences.
Atoms cut(const std::vector<unsigned> &shares, const Interner<Segments> &segments) {
  std::vector<unsigned> order = shares;
  std::sort(order.begin(), order.end(), [&](unsigned a, unsigned b) {
    const Bounds x = bounds(segments[a]), y = bounds(segments[b]);
    return std::tie(x.begin, x.end, a) < std::tie(y.begin, y.end, b);
  });
  Atoms atoms;
  std::vector<Bounds> limits;
  for (unsigned share : order) {
    const Bounds mine = bounds(segments[share]);
    Segments rest = segments[share];
    for (size_t k = 0; k < atoms.sets.size() && !rest.empty(); ++k) {
      if (limits[k].end <= mine.begin || limits[k].begin >= mine.end)
        continue;
      if (sameFrom(atoms.sets[k], rest)) {
        atoms.of[share].push_back(static_cast<unsigned>(k));
        rest.clear();
        break;
      }
      if (disjointFrom(atoms.sets[k], rest))
        continue;
      // A partial overlap: the atom falls into what is shared and what is not; so does everything that holds it.
      Segments common = restrict(rest, atoms.sets[k]), other = difference(atoms.sets[k], rest);
      rest = difference(rest, atoms.sets[k]);
      if (!other.empty()) {
        const unsigned added = static_cast<unsigned>(atoms.sets.size());
        atoms.sets[k] = common;
        limits[k] = bounds(common);
        limits.push_back(bounds(other));
        atoms.sets.push_back(std::move(other));
        for (auto &[holder, list] : atoms.of)
          if (std::find(list.begin(), list.end(), k) != list.end())
            list.push_back(added);
      }
      atoms.of[share].push_back(static_cast<unsigned>(k));
    }
    if (!rest.empty()) {
      atoms.of[share].push_back(static_cast<unsigned>(atoms.sets.size()));
      limits.push_back(bounds(rest));
      atoms.sets.push_back(std::move(rest));
    }
  }
  for (const auto &[share, list] : atoms.of)
    atoms.whole = atoms.whole && list.size() == 1;
  return atoms;
}

/// Calls visit(tuple) for each combination of one entry from every list, the last fastest.
template <class Visit> void forProduct(const std::vector<const std::vector<unsigned> *> &lists, Visit visit) {
  std::vector<unsigned> tuple(lists.size());
  std::vector<size_t> at(lists.size());
  for (const auto *list : lists)
    if (list->empty())
      return;
  while (true) {
    for (size_t d = 0; d < lists.size(); ++d)
      tuple[d] = (*lists[d])[at[d]];
    visit(tuple);
    size_t d = lists.size();
    while (d > 0 && ++at[d - 1] == lists[d - 1]->size())
      at[--d] = 0;
    if (d == 0)
      return;
  }
}

/// Everything the source knows of one family.
struct FamilySource {
  std::vector<View> views;
  std::vector<Atoms *> dimensions; // shared between families whose dimensions are cut alike
  std::unordered_map<std::vector<unsigned>, std::vector<unsigned>, ValueHash> holders; // atoms -> views
};

class Tiler {
public:
  explicit Tiler(Module &module)
      : module_(module), layout_(module.layout), sourceViews_(layout_.endpoints[0], segments_),
        families_(layout_.families.size()) {}

  std::string run() {
    readSource();
    for (unsigned e = 1; e < layout_.endpoints.size(); ++e) {
      Views views(layout_.endpoints[e], segments_);
      for (unsigned p = 0; p < layout_.endpoints[e].params.size(); ++p) {
        const Param &param = layout_.endpoints[e].params[p];
        for (unsigned q = 0; q < param.parts.size(); ++q)
          for (const View &view : views.of(p, q))
            if (std::string error = tile(e, view, param.parts[q].family); !error.empty())
              return error;
      }
    }
    module_.transfers.relations = std::move(relations_).take();
    module_.level = Level::transfer;
    return {};
  }

private:
  void readSource() {
    const Endpoint &source = layout_.endpoints[0];
    for (unsigned p = 0; p < source.params.size(); ++p)
      for (unsigned q = 0; q < source.params[p].parts.size(); ++q)
        if (const int family = source.params[p].parts[q].family; family >= 0)
          for (View &view : sourceViews_.of(p, q)) {
            std::erase_if(view.places, [&](int32_t place) { return !authorised(source, place); });
            if (!view.places.empty())
              families_[family].views.push_back(std::move(view));
          }
    for (unsigned f = 0; f < families_.size(); ++f) {
      FamilySource &family = families_[f];
      for (size_t d = 0; d < layout_.families[f].rank(); ++d) {
        std::vector<unsigned> shares;
        for (const View &view : family.views)
          shares.push_back(view.segments[d]);
        std::sort(shares.begin(), shares.end());
        shares.erase(std::unique(shares.begin(), shares.end()), shares.end());
        auto at = atoms_.find(shares);
        if (at == atoms_.end()) {
          at = atoms_.emplace(shares, cut(shares, segments_)).first;
          at->second.number = static_cast<unsigned>(atoms_.size());
        }
        family.dimensions.push_back(&at->second);
      }
      for (unsigned v = 0; v < family.views.size(); ++v) {
        std::vector<const std::vector<unsigned> *> lists;
        for (size_t d = 0; d < family.dimensions.size(); ++d)
          lists.push_back(&family.dimensions[d]->of.at(family.views[v].segments[d]));
        forProduct(lists, [&](const std::vector<unsigned> &atoms) { family.holders[atoms].push_back(v); });
      }
    }
  }

  const std::vector<unsigned> &meeting(Atoms &atoms, unsigned share) {
    auto [at, added] = atoms.meeting.try_emplace(share);
    if (added) {
      const Bounds mine = bounds(segments_[share]);
      for (unsigned k = 0; k < atoms.sets.size(); ++k) {
        const Bounds other = bounds(atoms.sets[k]);
        if (other.begin < mine.end && mine.begin < other.end && !disjointFrom(atoms.sets[k], segments_[share]))
          at->second.push_back(k);
      }
    }
    return at->second;
  }

  /// The interned relation source local -> target local within one atom.
  unsigned relation(const Atoms &atoms, unsigned source, unsigned atom, unsigned target) {
    const std::vector<int64_t> key = {source, target, atoms.whole ? -1 : atoms.number, atoms.whole ? -1 : atom};
    auto [at, added] = solved_.try_emplace(key);
    if (added) {
      const Segments &from = segments_[source];
      at->second = relations_.intern(
          compose(inverse(atoms.whole ? from : restrict(from, atoms.sets[atom])), segments_[target]));
    }
    return at->second;
  }

  std::string tile(unsigned endpoint, const View &view, int familyNumber) {
    Tile tile;
    tile.family = familyNumber;
    tile.endpoint = endpoint;
    tile.param = view.param;
    tile.part = view.part;
    tile.targets = view.places;
    if (familyNumber < 0)
      return pad(std::move(tile), view);

    FamilySource &source = families_[familyNumber];
    const Family &family = layout_.families[familyNumber];
    const size_t variables = family.variables.size();
    int64_t wanted = 1, found = 0;
    std::vector<const std::vector<unsigned> *> lists;
    for (size_t d = 0; d < family.rank(); ++d) {
      wanted *= size(segments_[view.segments[d]]);
      lists.push_back(&meeting(*source.dimensions[d], view.segments[d]));
    }
    forProduct(lists, [&](const std::vector<unsigned> &atoms) {
      auto holders = source.holders.find(atoms);
      if (holders == source.holders.end())
        return;
      tile.holders.clear();
      for (unsigned v : holders->second) {
        const View &from = source.views[v];
        Holder holder{from.param, from.part, from.places, {}};
        for (size_t d = 0; d < family.rank(); ++d)
          holder.relations.push_back(relation(*source.dimensions[d], from.segments[d], atoms[d], view.segments[d]));
        tile.holders.push_back(std::move(holder));
      }
      measure(tile, variables, itemBytes(family.dtype));
      found += tile.tensors * (tile.bytes / itemBytes(family.dtype));
      module_.transfers.tiles.push_back(tile);
    });
    if (found == wanted)
      return {};
    const Endpoint &target = layout_.endpoints[endpoint];
    return target.role + " param '" + target.params[view.param].name + "' (" + target.params[view.param].origin + ") needs " +
           std::to_string(wanted) + " elements of tensor '" + family.name + "' on place " + std::to_string(view.places[0]) +
           ", of which the source holds " + std::to_string(found);
  }

  /// Padding needs no source: a tile with the place -1 as its holder.
  std::string pad(Tile tile, const View &view) {
    Holder holder{0, 0, {-1}, {}};
    for (unsigned share : view.segments) {
      Segments local = inverse(segments_[share]);
      for (Segment &s : local) {
        s.to = s.from;
        s.toStep = s.fromStep;
      }
      holder.relations.push_back(relations_.intern(normalize(std::move(local))));
    }
    tile.holders = {std::move(holder)};
    const Param &param = layout_.endpoints[tile.endpoint].params[tile.param];
    measure(tile, param.variables.size(), itemBytes(param.dtype));
    module_.transfers.tiles.push_back(std::move(tile));
    return {};
  }

  void measure(Tile &tile, size_t variables, int64_t item) {
    tile.tensors = 1;
    tile.bytes = item;
    const std::vector<unsigned> &relations = tile.holders[0].relations;
    for (size_t d = 0; d < relations.size(); ++d)
      (d < variables ? tile.tensors : tile.bytes) *= size(relations_[relations[d]]);
  }

  Module &module_;
  const Layout &layout_;
  Interner<Segments> segments_, relations_;
  Views sourceViews_;
  std::vector<FamilySource> families_;
  std::map<std::vector<unsigned>, Atoms> atoms_;
  std::unordered_map<std::vector<int64_t>, unsigned, ValueHash> solved_;
};

} // namespace

std::string lcmTile(Module &module) { return Tiler(module).run(); }

} // namespace reshard
