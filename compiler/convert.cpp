// convert: where values are quantised that come as they are. A target's face takes them on arrival if each run of them
// is whole blocks; else, as where several senders share a block, it is gathered in the arena and quantised when all is
// there.

#include "compiler/blocks.h"
#include "compiler/pass.h"

namespace reshard {

using namespace ir;

namespace {

/// Whether both sides of a tile have whole blocks side by side, along the last dimension of the param.
bool wholeBlocks(const Module &module, const Tile &tile) {
  const Layout &layout = module.layout;
  const Param &target = layout.endpoints[tile.endpoint].params[tile.param];
  const int64_t block = blockOf(target.face->format).columns;
  const int last = static_cast<int>(target.shape.size()) - 1;
  const std::vector<PartDimension> &dimensions = target.parts[tile.part].dimensions;
  for (size_t d = 0; d < dimensions.size(); ++d) {
    if (dimensions[d].param != last)
      continue;
    if (d + 1 != dimensions.size()) // rows would be single elements
      return false;
    for (const Holder &holder : tile.holders) {
      if (tile.family >= 0) {
        const Param &source = layout.endpoints[0].params[holder.param];
        if (source.parts[holder.part].dimensions[d].param != static_cast<int>(source.shape.size()) - 1)
          return false;
      }
      for (const Segment &s : module.transfers.relations[holder.relations[d]])
        if (s.to % block != 0 || s.length % block != 0 || s.toStep % block != 0)
          return false;
    }
    return true;
  }
  return false;
}

} // namespace

std::string convert(Module &module) {
  for (const Tile &tile : module.transfers.tiles) {
    Endpoint &endpoint = module.layout.endpoints[tile.endpoint];
    Param &param = endpoint.params[tile.param];
    if (!param.face || param.face->gathered || param.face->kind != FaceKind::elements || wholeBlocks(module, tile))
      continue;
    param.face->gathered = true;
  }
  return {};
}

} // namespace reshard
