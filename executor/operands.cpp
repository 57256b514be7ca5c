#include "executor/operands.h"

#include "schema/limits.h"

namespace reshard {

using namespace schema;

Status expand(const Side &source, const Side &target, Expansion &expansion) {
  const Side sides[2] = {source, target};
  const Shape *shapes[2] = {};
  for (int s = 0; s < 2; ++s)
    if (sides[s].operand)
      shapes[s] = sides[s].rank->segment->shapes()->Get(sides[s].operand->shape());
  const Shape &known = *(shapes[1] ? shapes[1] : shapes[0]);
  auto describe = [&](int s) { // "rank 0 has 4 × 8 × 64 bytes"
    std::string text = "rank " + std::to_string(sides[s].rank->rank) + " has ";
    for (uint32_t l = 0; l < shapes[s]->loop_count(); ++l)
      text += std::to_string(sides[s].rank->segment->loops()->Get(shapes[s]->first_loop() + l)->count()) + " × ";
    return text + std::to_string(shapes[s]->row_bytes()) + " bytes";
  };
  auto mismatch = [&] {
    return failed("operand shapes differ: " + describe(0) + ", " + describe(1) + ", expected equal ones");
  };
  if (shapes[0] && shapes[1] &&
      (shapes[0]->row_bytes() != shapes[1]->row_bytes() || shapes[0]->loop_count() != shapes[1]->loop_count()))
    return mismatch();

  // The inner loops, up to the first that changes a buffer, become the loops of each piece. That loop and those outside
  // it are run here, one piece for each iteration, in order.
  struct Both {
    uint64_t count;
    int64_t stride[2], bufferStep[2];
  };
  Both loops[schema::kMaxLoops];
  auto packed = static_cast<int64_t>(known.row_bytes());
  size_t outer = 0;
  for (uint32_t l = known.loop_count(); l-- > 0;) {
    Both &both = loops[l];
    for (int s = 0; s < 2; ++s) {
      const Loop *loop = shapes[s] ? sides[s].rank->segment->loops()->Get(shapes[s]->first_loop() + l) : nullptr;
      if (loop && s == 1 && shapes[0] && loop->count() != both.count)
        return mismatch();
      if (loop)
        both.count = loop->count();
      both.stride[s] = loop ? loop->stride() : 0;
      both.bufferStep[s] = loop ? loop->buffer_step() : 0;
    }
    for (int s = 0; s < 2; ++s)
      if (!shapes[s])
        both.stride[s] = packed;
    packed *= static_cast<int64_t>(both.count);
    if (outer == 0 && (both.bufferStep[0] != 0 || both.bufferStep[1] != 0))
      outer = l + 1;
  }
  kernels::Strided &shape = expansion.shape;
  shape.rowBytes = known.row_bytes();
  shape.loopCount = 0;
  uint64_t pieces = 1;
  for (uint32_t l = 0; l < known.loop_count(); ++l)
    if (l < outer)
      pieces *= loops[l].count;
    else
      shape.loops[shape.loopCount++] = {loops[l].count, loops[l].stride[0], loops[l].stride[1]};
  kernels::simplify(shape);

  // Offsets and strides of a plan count bytes as sent; scale them to the storage form of each side's memory.
  kernels::StorageForm forms[2];
  for (int s = 0; s < 2; ++s)
    if (sides[s].operand)
      forms[s] = sides[s].rank->form(sides[s].operand->buffer());
  if (forms[0].kind == kernels::StorageForm::Kind::cast && shapes[1])
    return failed("rank " + std::to_string(source.rank->rank) +
                  " copies from a buffer that is cast, which is not supported");
  expansion.source = forms[0];
  expansion.target = forms[1];
  for (size_t l = 0; l < shape.loopCount; ++l) {
    shape.loops[l].sourceStride = forms[0].scale(shape.loops[l].sourceStride);
    shape.loops[l].targetStride = forms[1].scale(shape.loops[l].targetStride);
  }

  expansion.at.clear();
  expansion.at.reserve(pieces);
  for (uint64_t n = 0; n < pieces; ++n) {
    std::byte *at[2];
    const kernels::ViewBase *bases[2] = {};
    for (int s = 0; s < 2; ++s) {
      int64_t buffer = sides[s].operand ? sides[s].operand->buffer() : 0;
      int64_t offset = sides[s].operand ? static_cast<int64_t>(sides[s].operand->offset()) : 0;
      uint64_t rest = n;
      for (size_t l = outer; l-- > 0; rest /= loops[l].count) {
        const auto i = static_cast<int64_t>(rest % loops[l].count);
        buffer += i * loops[l].bufferStep[s];
        offset += i * loops[l].stride[s];
      }
      std::byte *memory = sides[s].operand ? sides[s].rank->pointer(static_cast<uint32_t>(buffer)) : nullptr;
      at[s] = memory ? memory + forms[s].scale(offset) : nullptr;
      if (forms[s] && sides[s].operand)
        bases[s] = sides[s].rank->viewBase(static_cast<uint32_t>(buffer));
    }
    expansion.at.push_back({at[0], at[1], bases[0], bases[1]});
  }
  return {};
}

void castZeros(Expansion &expansion) {
  if (expansion.target.kind != kernels::StorageForm::Kind::cast)
    return;
  expansion.shape.rowBytes =
      static_cast<uint64_t>(expansion.target.scale(static_cast<int64_t>(expansion.shape.rowBytes)));
  expansion.target = {};
}

Status checkBound(const Plan &plan, const LocalRank &rank) {
  const Segment &segment = *rank.segment;
  auto check = [&](uint32_t first, uint32_t count) -> Status {
    Expansion expansion;
    for (uint32_t i = first; i < first + count; ++i) {
      const Operand &operand = *segment.operands()->Get(i);
      if (Status status = expand({&rank, &operand}, {}, expansion); !status.ok())
        return status;
      if (std::all_of(expansion.at.begin(), expansion.at.end(), [](const auto &at) { return at.source; }))
        continue;
      const size_t range = bufferRangeOf(segment, operand.buffer());
      if (range == segment.buffers()->size())
        return badBinding("rank " + std::to_string(rank.rank) + " uses a buffer that was not bound");
      const BufferRange &of = *segment.buffers()->Get(static_cast<uint32_t>(range));
      const Endpoint &endpoint = *plan.manifest().endpoints()->Get(of.endpoint());
      return badBinding(endpoint.role()->str() + (endpoint.storage() ? " file " : " rank ") +
                        std::to_string(endpoint.ranks()->Get(of.mesh_rank())) + " param '" +
                        endpoint.params()->Get(of.param())->name()->str() + "': not all instances are bound");
    }
    return {};
  };
  for (const Step *step : *segment.steps()) {
    if (Status status = check(step->first_input(), step->input_count()); !status.ok())
      return status;
    if (Status status = check(step->first_output(), step->output_count()); !status.ok())
      return status;
  }
  return {};
}

Status addCopy(const Side &source, const Side &target, Tables &tables) {
  Expansion expansion;
  if (Status status = expand(source, target, expansion); !status.ok())
    return status;
  if (!source.operand)
    castZeros(expansion);
  for (const auto &[from, to, sourceBase, targetBase] : expansion.at) {
    if (!to || (source.operand && !from))
      return failed("rank " + std::to_string(to ? source.rank->rank : target.rank->rank) +
                    " uses a buffer that was not bound");
    const auto there = reinterpret_cast<uint64_t>(to), here = source.operand ? reinterpret_cast<uint64_t>(from) : 0;
    if (const kernels::Conversion conversion{expansion.source, expansion.target, sourceBase, targetBase})
      tables.conversions.add(there, here, expansion.shape, conversion, 0, expansion.shape.bytes());
    else
      tables.copies.add(there, here, expansion.shape);
  }
  return {};
}

} // namespace reshard
