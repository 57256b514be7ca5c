// lcm-tile: source ∩ target → tiles. Every dimension of a family, index variables included, is solved on its own: the
// source's shares of it are cut into atoms (disjoint sets of positions, usually just the shares themselves), a target
// share meets some of them, and the relation source position -> target position follows by composing the two shares
// (periodic ones by LCM tiling, ir/segments.cpp). A tile is one combination of atoms; everybody who holds it is a
// candidate source. Flat buffers are cut unlike a product: each range has boxes of its own, whose edges would cut all
// others. There the boxes themselves are met one by one.

#include "compiler/atoms.h"
#include "compiler/pass.h"
#include "compiler/views.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// Calls visit(tuple) for each combination of one entry from every list, the last fastest.
template <class Visit> void forProduct(const std::vector<llvm::ArrayRef<unsigned>> &lists, Visit visit) {
  std::vector<unsigned> tuple(lists.size());
  std::vector<size_t> at(lists.size());
  for (const auto &list : lists)
    if (list.empty())
      return;
  while (true) {
    for (size_t d = 0; d < lists.size(); ++d)
      tuple[d] = lists[d][at[d]];
    visit(tuple);
    size_t d = lists.size();
    while (d > 0 && ++at[d - 1] == lists[d - 1].size())
      at[--d] = 0;
    if (d == 0)
      return;
  }
}

/// A product of source shares, and the views that are it.
struct Box {
  std::vector<unsigned> segments; // interned, per dimension
  std::vector<unsigned> views;
  Bounds along{0, 0}; // in FamilySource::sweep
};

/// Everything the source knows of one family: holders by atoms, or disjoint boxes.
struct FamilySource {
  std::vector<View> views;
  std::vector<Box> boxes; // by where they begin along `sweep`; empty: use atoms
  size_t sweep = 0;
  std::vector<Atoms *> dimensions;            // shared between families whose dimensions are cut alike
  Interner<std::vector<unsigned>> products;   // of atoms
  std::vector<std::vector<unsigned>> holders; // views, by product
};

class Tiler {
public:
  explicit Tiler(Module &module)
      : module_(module), layout_(module.layout), sourceViews_(layout_.endpoints[0], segments_),
        families_(layout_.families.size()) {}

  std::string run() {
    if (std::string error = readSource(); !error.empty())
      return error;
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
  std::string readSource() {
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
      if (readBoxes(family))
        continue;
      for (size_t d = 0; d < layout_.families[f].rank(); ++d) {
        std::vector<unsigned> shares;
        for (const View &view : family.views)
          shares.push_back(view.segments[d]);
        std::sort(shares.begin(), shares.end());
        shares.erase(std::unique(shares.begin(), shares.end()), shares.end());
        auto at = atoms_.find(shares);
        if (at == atoms_.end())
          at = atoms_.try_emplace(shares, shares, segments_).first;
        if (at->second.tooMany())
          return tooMany(f);
        family.dimensions.push_back(&at->second);
      }
      for (unsigned v = 0; v < family.views.size(); ++v) {
        std::vector<llvm::ArrayRef<unsigned>> lists;
        for (size_t d = 0; d < family.dimensions.size(); ++d)
          lists.push_back(family.dimensions[d]->of(family.views[v].segments[d]));
        forProduct(lists, [&](const std::vector<unsigned> &atoms) {
          const unsigned product = family.products.intern(atoms);
          if (product == family.holders.size())
            family.holders.emplace_back();
          family.holders[product].push_back(v);
        });
      }
    }
    return {};
  }

  std::string tooMany(unsigned family) const {
    return "tensor '" + layout_.families[family].name +
           "' is cut into interleaved or overlapping pieces, more than 2^24 pairs of which would have to be compared; "
           "expected longer blocks or fewer ranks";
  }

  /// Whether the views of a family are disjoint or equal as boxes, though not a product of cuts of each dimension.
  bool readBoxes(FamilySource &family) {
    if (cutsOneDimension(family.views))
      return false;
    std::unordered_map<std::vector<unsigned>, size_t, ValueHash> known;
    for (unsigned v = 0; v < family.views.size(); ++v) {
      const auto [at, added] = known.try_emplace(family.views[v].segments, family.boxes.size());
      if (added)
        family.boxes.push_back({family.views[v].segments, {}, {}});
      family.boxes[at->second].views.push_back(v);
    }
    if (!separate(family))
      family.boxes.clear();
    return !family.boxes.empty();
  }

  /// Then they are a product of cuts.
  static bool cutsOneDimension(const std::vector<View> &views) {
    size_t cut = 0;
    for (size_t d = 0; !views.empty() && d < views[0].segments.size(); ++d)
      cut += std::any_of(views.begin(), views.end(),
                         [&](const View &view) { return view.segments[d] != views[0].segments[d]; });
    return cut <= 1;
  }

  bool separate(FamilySource &family) {
    std::vector<Box> &boxes = family.boxes;
    if (boxes.empty())
      return false;
    size_t product = 1, most = 0; // a product of cuts is better left to atoms
    for (size_t d = 0; d < boxes[0].segments.size(); ++d) {
      std::vector<unsigned> distinct;
      for (const Box &box : boxes)
        distinct.push_back(box.segments[d]);
      std::sort(distinct.begin(), distinct.end());
      distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
      product = std::min(product * distinct.size(), boxes.size() + 1);
      if (distinct.size() > most) {
        most = distinct.size();
        family.sweep = d;
      }
    }
    if (product <= boxes.size())
      return false;
    for (Box &box : boxes)
      box.along = bounds(segments_[box.segments[family.sweep]]);
    std::sort(boxes.begin(), boxes.end(), [](const Box &a, const Box &b) {
      return std::tie(a.along.begin, a.along.end, a.segments) < std::tie(b.along.begin, b.along.end, b.segments);
    });
    constexpr int64_t kMostPairs = 1 << 22;
    int64_t pairs = 0;
    for (size_t i = 0; i < boxes.size(); ++i)
      for (size_t j = i + 1; j < boxes.size() && boxes[j].along.begin < boxes[i].along.end; ++j)
        if (++pairs > kMostPairs || meet(boxes[i].segments, boxes[j].segments))
          return false;
    return true;
  }

  bool meet(const std::vector<unsigned> &a, const std::vector<unsigned> &b) {
    for (size_t d = 0; d < a.size(); ++d)
      if (a[d] != b[d] && disjointFrom(segments_[a[d]], segments_[b[d]]))
        return false;
    return true;
  }

  /// The interned relation source local -> target local within one atom.
  unsigned relation(const Atoms &atoms, unsigned source, unsigned atom, unsigned target) {
    if (atoms.whole())
      return relation(source, target);
    const auto [at, added] = solved_.try_emplace({source, target, reinterpret_cast<intptr_t>(&atoms), atom});
    if (added)
      at->second =
          relations_.intern(compose(inverse(restrict(segments_[source], atoms.sets()[atom])), segments_[target]));
    return at->second;
  }

  /// The same for all that both hold.
  unsigned relation(unsigned source, unsigned target) {
    const auto [at, added] = solved_.try_emplace({source, target, -1, -1});
    if (added)
      at->second = relations_.intern(compose(inverse(segments_[source]), segments_[target]));
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
    for (size_t d = 0; d < family.rank(); ++d)
      wanted *= size(segments_[view.segments[d]]);
    auto add = [&] {
      measure(tile, variables, itemBytes(family.dtype));
      found += tile.tensors * (tile.bytes / itemBytes(family.dtype));
      holders_ += static_cast<int64_t>(tile.holders.size());
      Tile &added = module_.transfers.tiles.emplace_back(std::move(tile));
      tile = {added.family, added.endpoint, added.param, added.part, view.places, {}, 1, 0};
    };
    const Bounds along = source.boxes.empty() ? Bounds{0, 0} : bounds(segments_[view.segments[source.sweep]]);
    for (const Box &box : source.boxes) {
      if (box.along.begin >= along.end)
        break;
      if (box.along.end <= along.begin)
        continue;
      std::vector<unsigned> relations;
      for (size_t d = 0; d < family.rank(); ++d) {
        relations.push_back(relation(box.segments[d], view.segments[d]));
        if (relations_[relations.back()].empty())
          break;
      }
      if (relations_[relations.back()].empty())
        continue;
      tile.holders.clear();
      for (unsigned v : box.views)
        tile.holders.push_back({source.views[v].param, source.views[v].part, source.views[v].places, relations});
      add();
    }
    std::vector<llvm::ArrayRef<unsigned>> lists;
    for (size_t d = 0; d < family.rank() && source.boxes.empty(); ++d) {
      lists.push_back(source.dimensions[d]->meeting(view.segments[d]));
      if (source.dimensions[d]->tooMany())
        return tooMany(static_cast<unsigned>(familyNumber));
    }
    if (source.boxes.empty())
      forProduct(lists, [&](const std::vector<unsigned> &atoms) {
        const auto product = source.products.find(atoms);
        if (!product)
          return;
        tile.holders.clear();
        for (unsigned v : source.holders[*product]) {
          const View &from = source.views[v];
          Holder holder{from.param, from.part, from.places, {}};
          for (size_t d = 0; d < family.rank(); ++d)
            holder.relations.push_back(relation(*source.dimensions[d], from.segments[d], atoms[d], view.segments[d]));
          tile.holders.push_back(std::move(holder));
        }
        add();
      });
    if (holders_ > kMostHolders)
      return "tensor '" + family.name +
             "' stands in so many params on both sides that more than 2^22 pairs of them have it in common";
    if (found == wanted)
      return {};
    const Endpoint &target = layout_.endpoints[endpoint];
    return target.role + " param '" + target.params[view.param].name + "' (" + target.params[view.param].origin +
           ") needs " + std::to_string(wanted) + " elements of tensor '" + family.name + "' on place " +
           std::to_string(view.places[0]) + ", of which the source holds " + std::to_string(found);
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

  static constexpr int64_t kMostHolders = 1 << 22;

  Module &module_;
  const Layout &layout_;
  int64_t holders_ = 0; // of all tiles so far
  Interner<Segments> segments_, relations_;
  Views sourceViews_;
  std::vector<FamilySource> families_;
  std::map<std::vector<unsigned>, Atoms> atoms_;
  std::unordered_map<std::array<int64_t, 4>, unsigned, ValueHash> solved_; // by source, target, atoms, atom
};

} // namespace

std::string lcmTile(Module &module) { return Tiler(module).run(); }

} // namespace reshard
