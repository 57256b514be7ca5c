// coalesce: chosen transfers become strided descriptors, as few as possible. A run of tensors is a loop over layers or
// experts (instances of a param are numbered in a row), a periodic segment is a loop, rows that touch on both sides are
// one row.

#include "compiler/interner.h"
#include "compiler/pass.h"
#include "compiler/views.h"

#include <algorithm>
#include <memory>
#include <tuple>

namespace reshard {

using namespace ir;

namespace {

/// Where a param's dimensions lie on a place: bytes per position of each dimension, instances per position of each name
/// variable.
struct Geometry {
  std::vector<int64_t> strides; // per param dimension, bytes
  std::vector<int64_t> steps;   // per name variable, instances
};

Geometry geometry(const Endpoint &endpoint, const Param &param, int64_t place) {
  Geometry result;
  const std::vector<int64_t> shape = localShape(endpoint, param, place);
  result.strides.assign(shape.size(), itemBytes(param.dtype));
  for (size_t d = shape.size(); d-- > 1;)
    result.strides[d - 1] = result.strides[d] * shape[d];
  result.steps.assign(param.variables.size(), 1);
  for (size_t v = param.variables.size(); v-- > 1;) {
    const Share &share = endpoint.shares[param.instances[v]];
    result.steps[v - 1] = result.steps[v] * size(share.at[coordinate(endpoint, share.axes, place)]);
  }
  return result;
}

/// A descriptor relative to the param's first instance on each side; the same for all places of a holder and a tile's
/// targets.
struct Relative {
  int64_t sourceInstance = 0, targetInstance = 0;
  int64_t sourceOffset = 0, targetOffset = 0;
  Shape shape;
};

/// What one position along one dimension of a part costs on each side.
struct Move {
  int64_t sourceStride = 0, targetStride = 0, sourceStep = 0, targetStep = 0;
  Loop loop(int64_t count, int64_t from, int64_t to) const {
    return {count, from * sourceStride, to * targetStride, from * sourceStep, to * targetStep};
  }
};

bool contains(const Loop &outer, const Loop &inner) {
  return outer.sourceStride == inner.count * inner.sourceStride &&
         outer.targetStride == inner.count * inner.targetStride && outer.sourceStep == inner.count * inner.sourceStep &&
         outer.targetStep == inner.count * inner.targetStep;
}

/// Joins loops that continue one another, and inner ones into the row; drops loops of one step.
void simplify(Shape &shape) {
  std::vector<Loop> loops;
  for (const Loop &loop : shape.loops) {
    if (loop.count == 1)
      continue;
    if (!loops.empty() && contains(loops.back(), loop)) {
      const int64_t count = loops.back().count * loop.count;
      loops.back() = loop;
      loops.back().count = count;
    } else {
      loops.push_back(loop);
    }
  }
  while (!loops.empty() && loops.back().sourceStride == shape.rowBytes && loops.back().targetStride == shape.rowBytes &&
         loops.back().sourceStep == 0 && loops.back().targetStep == 0) {
    shape.rowBytes *= loops.back().count;
    loops.pop_back();
  }
  shape.loops = std::move(loops);
}

/// Equal pieces at constant distances become one with an outer loop. In place; `pieces` is in tensor order.
void foldRepeats(std::vector<Relative> &pieces) {
  std::vector<Relative> folded;
  for (size_t i = 0; i < pieces.size();) {
    Relative first = std::move(pieces[i]);
    size_t n = 1;
    auto distance = [&](const Relative &a, const Relative &b) {
      return std::make_tuple(b.sourceInstance - a.sourceInstance, b.targetInstance - a.targetInstance,
                             b.sourceOffset - a.sourceOffset, b.targetOffset - a.targetOffset);
    };
    if (i + 1 < pieces.size() && pieces[i + 1].shape == first.shape) {
      const auto step = distance(first, pieces[i + 1]);
      for (n = 2; i + n < pieces.size() && pieces[i + n].shape == first.shape &&
                  distance(pieces[i + n - 1], pieces[i + n]) == step;)
        ++n;
      const auto [sourceStep, targetStep, sourceStride, targetStride] = step;
      first.shape.loops.insert(first.shape.loops.begin(),
                               {static_cast<int64_t>(n), sourceStride, targetStride, sourceStep, targetStep});
      simplify(first.shape);
    }
    i += n;
    folded.push_back(std::move(first));
  }
  pieces = std::move(folded);
}

/// The descriptors of one holder of one tile, for all its tensors or for some.
class Pattern {
public:
  Pattern(const Module &module, const Tile &tile, const Holder &holder) {
    const Layout &layout = module.layout;
    const Endpoint &target = layout.endpoints[tile.endpoint];
    const Param &targetParam = target.params[tile.param];
    const Part &targetPart = targetParam.parts[tile.part];
    const Geometry targetGeometry = geometry(target, targetParam, tile.targets[0]);
    const bool padding = tile.family < 0;
    const Endpoint &source = layout.endpoints[0];
    const Geometry sourceGeometry =
        padding ? Geometry{} : geometry(source, source.params[holder.param], holder.places[0]);
    variables_ = padding ? targetParam.variables.size() : layout.families[tile.family].variables.size();
    item_ = itemBytes(targetParam.dtype);
    for (size_t d = 0; d < holder.relations.size(); ++d) {
      Move move;
      // Padding lists the param's own name variables; a family's variables may stand in another order in the name.
      const int64_t variable = d >= variables_ ? -1 : padding ? d : layout.families[tile.family].variables[d];
      place(targetGeometry, padding ? variable : nameVariable(targetParam, variable), targetPart.dimensions[d].param,
            move.targetStride, move.targetStep);
      if (padding) { // from itself, as it were, so that rows join
        move.sourceStride = move.targetStride;
        move.sourceStep = move.targetStep;
      } else {
        const Param &sourceParam = source.params[holder.param];
        place(sourceGeometry, nameVariable(sourceParam, variable), sourceParam.parts[holder.part].dimensions[d].param,
              move.sourceStride, move.sourceStep);
      }
      moves_.push_back(move);
      relations_.push_back(&module.transfers.relations[holder.relations[d]]);
    }
  }

  /// All tensors of the tile.
  std::vector<Relative> all() const {
    std::vector<Relative> pieces;
    Relative piece;
    descend(0, moves_.size(), piece, pieces);
    for (Relative &p : pieces)
      simplify(p.shape);
    return pieces;
  }

  /// Some of the tensors, the last index variable fastest; values are numbered in the target's order, which is the same
  /// for all holders of a tile. A cut one, within its cut.
  std::vector<Relative> some(const Transfer &transfer) const {
    if (transfer.cut()) {
      Pattern part = *this;
      const Segments within = {{transfer.begin, transfer.begin, transfer.end - transfer.begin, 1, 0, 0}};
      const Segments relation = inverse(restrict(inverse(*relations_[transfer.dimension]), within));
      part.relations_[transfer.dimension] = &relation;
      return part.run(transfer.first, 1);
    }
    return run(transfer.first, transfer.count);
  }

private:
  /// Tensors [first, first + count).
  std::vector<Relative> run(uint32_t first, uint32_t count) const {
    std::vector<std::vector<std::pair<int64_t, int64_t>>> values;
    for (size_t v = 0; v < variables_; ++v) {
      values.push_back(expand(*relations_[v]));
      std::sort(values.back().begin(), values.back().end(),
                [](const auto &a, const auto &b) { return a.second < b.second; });
    }
    std::vector<Relative> rows;
    Relative origin;
    descend(variables_, moves_.size(), origin, rows);
    std::vector<Relative> result;
    for (const Relative &row : rows) {
      std::vector<Relative> pieces;
      for (uint32_t tensor = first; tensor < first + count; ++tensor) {
        Relative piece = row;
        uint32_t rest = tensor;
        for (size_t v = variables_; v-- > 0;) {
          const auto &[from, to] = values[v][rest % values[v].size()];
          rest /= static_cast<uint32_t>(values[v].size());
          shift(piece, moves_[v], from, to);
        }
        simplify(piece.shape);
        pieces.push_back(std::move(piece));
      }
      foldRepeats(pieces); // over the last variable
      foldRepeats(pieces); // over the one before
      result.insert(result.end(), std::make_move_iterator(pieces.begin()), std::make_move_iterator(pieces.end()));
    }
    return result;
  }

  static int64_t nameVariable(const Param &param, int64_t variable) {
    const auto at = std::find(param.variables.begin(), param.variables.end(), variable);
    return at == param.variables.end() ? -1 : at - param.variables.begin();
  }

  /// What a step along a part's dimension means in a param: bytes along its dimension, or instances along a name
  /// variable.
  static void place(const Geometry &geometry, int64_t nameVariable, int dimension, int64_t &stride, int64_t &step) {
    if (dimension >= 0)
      stride = geometry.strides[dimension];
    else
      step = geometry.steps[nameVariable];
  }

  static void shift(Relative &piece, const Move &move, int64_t from, int64_t to) {
    piece.sourceInstance += from * move.sourceStep;
    piece.targetInstance += to * move.targetStep;
    piece.sourceOffset += from * move.sourceStride;
    piece.targetOffset += to * move.targetStride;
  }

  /// One piece for each combination of segments of dimensions [d, end); usually each has one.
  void descend(size_t d, size_t end, const Relative &outer, std::vector<Relative> &pieces) const {
    if (d == end) {
      pieces.push_back(outer);
      pieces.back().shape.rowBytes = item_;
      return;
    }
    for (const Segment &s : *relations_[d]) {
      Relative piece = outer;
      shift(piece, moves_[d], s.from, s.to);
      piece.shape.loops.push_back(moves_[d].loop(s.count, s.fromStep, s.toStep));
      piece.shape.loops.push_back(moves_[d].loop(s.length, 1, 1));
      descend(d + 1, end, piece, pieces);
    }
  }

  std::vector<Move> moves_;
  std::vector<const Segments *> relations_;
  size_t variables_ = 0;
  int64_t item_ = 1;
};

class Coalescer {
public:
  explicit Coalescer(Module &module) : module_(module) {
    for (const Endpoint &endpoint : module.layout.endpoints)
      bases_.emplace_back(endpoint);
  }

  void run() {
    const Transfers &transfers = module_.transfers;
    for (size_t i = 0; i < transfers.transfers.size();) { // all transfers of a tile
      const uint32_t tileNumber = transfers.transfers[i].tile;
      const Tile &tile = transfers.tiles[tileNumber];
      std::vector<std::unique_ptr<Pattern>> patterns(tile.holders.size());
      std::vector<std::vector<Ready>> whole(tile.holders.size());
      for (; i < transfers.transfers.size() && transfers.transfers[i].tile == tileNumber; ++i) {
        const Transfer &transfer = transfers.transfers[i];
        if (!patterns[transfer.holder])
          patterns[transfer.holder] = std::make_unique<Pattern>(module_, tile, tile.holders[transfer.holder]);
        if (transfer.count == tile.tensors && !transfer.cut()) {
          if (whole[transfer.holder].empty())
            whole[transfer.holder] = ready(patterns[transfer.holder]->all());
          put(tile, transfer, whole[transfer.holder]);
        } else {
          put(tile, transfer, ready(patterns[transfer.holder]->some(transfer)));
        }
      }
    }
    join();
    module_.transfers.shapes = std::move(shapes_).take();
  }

private:
  struct Ready {
    int64_t sourceInstance, targetInstance, sourceOffset, targetOffset;
    uint32_t shape;
  };

  std::vector<Ready> ready(std::vector<Relative> pieces) {
    std::vector<Ready> result;
    for (Relative &p : pieces)
      result.push_back(
          {p.sourceInstance, p.targetInstance, p.sourceOffset, p.targetOffset, shapes_.intern(std::move(p.shape))});
    return result;
  }

  void put(const Tile &tile, const Transfer &transfer, const std::vector<Ready> &pieces) {
    const int64_t source = transfer.source < 0 ? 0 : bases_[0](transfer.source, tile.holders[transfer.holder].param);
    const int64_t target = bases_[tile.endpoint](transfer.target, tile.param);
    for (const Ready &p : pieces)
      module_.transfers.descriptors.push_back(
          {tile.endpoint, transfer.source, transfer.target, static_cast<uint32_t>(source + p.sourceInstance),
           static_cast<uint32_t>(target + p.targetInstance), p.sourceOffset, p.targetOffset, p.shape, transfer.route});
  }

  /// Orders descriptors by pair and target position, and joins neighbours that touch on both sides.
  void join() {
    std::vector<Descriptor> &all = module_.transfers.descriptors;
    std::sort(all.begin(), all.end(), [](const Descriptor &a, const Descriptor &b) {
      return std::tie(a.source, a.endpoint, a.target, a.targetInstance, a.targetOffset, a.sourceInstance,
                      a.sourceOffset) < std::tie(b.source, b.endpoint, b.target, b.targetInstance, b.targetOffset,
                                                 b.sourceInstance, b.sourceOffset);
    });
    size_t kept = 0;
    for (size_t i = 1; i < all.size(); ++i) {
      Descriptor &last = all[kept];
      const Descriptor &next = all[i];
      const int64_t row = shapes_[last.shape].rowBytes;
      if (last.source == next.source && last.endpoint == next.endpoint && last.target == next.target &&
          last.route == next.route && last.sourceInstance == next.sourceInstance &&
          last.targetInstance == next.targetInstance && last.sourceOffset + row == next.sourceOffset &&
          last.targetOffset + row == next.targetOffset && shapes_[last.shape].loops == shapes_[next.shape].loops) {
        Shape joined = shapes_[last.shape];
        joined.rowBytes += shapes_[next.shape].rowBytes;
        simplify(joined);
        last.shape = shapes_.intern(std::move(joined));
      } else {
        all[++kept] = next;
      }
    }
    if (!all.empty())
      all.resize(kept + 1);
  }

  Module &module_;
  std::vector<InstanceBases> bases_;
  Interner<Shape> shapes_;
};

} // namespace

std::string coalesce(Module &module) {
  Coalescer(module).run();
  return {};
}

} // namespace reshard
