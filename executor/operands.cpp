#include "executor/operands.h"

#include "schema/limits.h"

namespace reshard {

using namespace schema;

std::string expand(const Side &source, const Side &target, Expansion &expansion) {
  const Side sides[2] = {source, target};
  const Shape *shapes[2] = {};
  for (int s = 0; s < 2; ++s)
    if (sides[s].operand)
      shapes[s] = sides[s].rank->segment->shapes()->Get(sides[s].operand->shape());
  const Shape &known = *(shapes[1] ? shapes[1] : shapes[0]);
  auto mismatch = [&] {
    return "an operand of rank " + std::to_string(source.rank->rank) + " is unlike its partner on rank " +
           std::to_string(target.rank->rank);
  };
  if (shapes[0] && shapes[1] &&
      (shapes[0]->row_bytes() != shapes[1]->row_bytes() || shapes[0]->loop_count() != shapes[1]->loop_count()))
    return mismatch();

  // From the innermost loop out, as long as no side changes its buffer; from there on loops are run here, so that the
  // order stays.
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

  // Offsets and strides of a plan are those of what goes; those of memory that has another form follow.
  kernels::StorageForm forms[2];
  for (int s = 0; s < 2; ++s)
    if (sides[s].operand)
      forms[s] = sides[s].rank->form(sides[s].operand->buffer());
  if (forms[0].kind == kernels::StorageForm::Kind::cast && shapes[1])
    return "rank " + std::to_string(source.rank->rank) + " passes on what it has cast";
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

std::string checkBound(const Plan &plan, const LocalRank &rank) {
  const Segment &segment = *rank.segment;
  auto check = [&](uint32_t first, uint32_t count) {
    Expansion expansion;
    for (uint32_t i = first; i < first + count; ++i) {
      const Operand &operand = *segment.operands()->Get(i);
      if (std::string error = expand({&rank, &operand}, {}, expansion); !error.empty())
        return error;
      if (std::all_of(expansion.at.begin(), expansion.at.end(), [](const auto &at) { return at.source; }))
        continue;
      const size_t run = bufferRunOf(segment, operand.buffer());
      if (run == segment.buffers()->size())
        return "a buffer of rank " + std::to_string(rank.rank) + " is used and stands nowhere";
      const BufferRange &of = *segment.buffers()->Get(static_cast<uint32_t>(run));
      const Endpoint &endpoint = *plan.manifest().endpoints()->Get(of.endpoint());
      return endpoint.role()->str() + (endpoint.storage() ? " file " : " rank ") +
             std::to_string(endpoint.ranks()->Get(of.mesh_rank())) + " param '" +
             endpoint.params()->Get(of.param())->name()->str() + "' is used, and not bound on every instance";
    }
    return std::string();
  };
  for (const Step *step : *segment.steps()) {
    std::string error = check(step->first_input(), step->input_count());
    if (error.empty())
      error = check(step->first_output(), step->output_count());
    if (!error.empty())
      return error;
  }
  return {};
}

std::string addCopy(const Side &source, const Side &target, Tables &tables) {
  Expansion expansion;
  if (std::string error = expand(source, target, expansion); !error.empty())
    return error;
  if (!source.operand)
    castZeros(expansion);
  for (const auto &[from, to, sourceBase, targetBase] : expansion.at) {
    if (!to || (source.operand && !from))
      return "a buffer of rank " + std::to_string(to ? source.rank->rank : target.rank->rank) +
             " is used but not bound";
    const auto there = reinterpret_cast<uint64_t>(to), here = source.operand ? reinterpret_cast<uint64_t>(from) : 0;
    if (const kernels::Conversion conversion{expansion.source, expansion.target, sourceBase, targetBase})
      tables.conversions.add(there, here, expansion.shape, conversion, 0, expansion.shape.bytes());
    else
      tables.copies.add(there, here, expansion.shape);
  }
  return {};
}

} // namespace reshard
