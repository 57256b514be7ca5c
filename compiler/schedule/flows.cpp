// SPDX-License-Identifier: Apache-2.0
// Separates local descriptors from the descriptors of flows, cuts them at staged ranges, divides copies from files to
// files among the ranks, and sends part of the flows over relays.
#include "compiler/schedule/flows.h"

#include "compiler/transfer/lists.h"

#include <algorithm>
#include <numeric>

namespace reshard {

using namespace ir;

const BufferRange &bufferRange(const std::vector<BufferRange> &ranges, uint32_t buffer) {
  return *std::prev(std::upper_bound(ranges.begin(), ranges.end(), buffer,
                                     [](uint32_t number, const BufferRange &range) { return number < range.first; }));
}

RankBuffers::RankBuffers(const Layout &layout) : ranges_(ir::buffers(layout)), firsts_(ranges_.size()) {
  for (size_t rank = 0; rank < ranges_.size(); ++rank)
    for (const BufferRange &range : ranges_[rank])
      firsts_[rank].try_emplace({range.endpoint, range.meshRank}, range.first);
}

RankCopies::RankCopies(const Layout &layout) : layout_(layout), copies_(layout) {
  if (copies_.targets() == 1)
    return;
  auto meshRanks = [&](const Endpoint &endpoint) {
    std::vector<int32_t> on(static_cast<size_t>(layout.world), -1);
    for (size_t meshRank = 0; meshRank < endpoint.ranks.size(); ++meshRank)
      on[static_cast<size_t>(endpoint.ranks[meshRank])] = static_cast<int32_t>(meshRank);
    return on;
  };
  sourceOn_ = meshRanks(layout.endpoints[0]);
  targetOn_ = meshRanks(layout.endpoints[1]);
}

int32_t RankCopies::target(int32_t rank, int64_t copy) const {
  return layout_.endpoints[1].ranks[copies_.target().meshRank(targetOn(rank), copy)];
}

int32_t RankCopies::inFirstTarget(int32_t rank) const {
  const int32_t meshRank = targetOn(rank);
  return meshRank < 0 ? rank : layout_.endpoints[1].ranks[copies_.target().first(meshRank)];
}

RankCopies::First RankCopies::first(int32_t rank) const {
  if (copies_.sources() == 1)
    return {rank, 0};
  if (const int32_t meshRank = sourceOn_[static_cast<size_t>(rank)]; meshRank >= 0)
    return {layout_.endpoints[0].ranks[copies_.source().first(meshRank)], copies_.source().copy(meshRank)};
  const int32_t meshRank = targetOn(rank);
  if (meshRank < 0)
    return {rank, 0};
  const int64_t copy = copies_.target().copy(meshRank);
  const int32_t same = copies_.target().meshRank(copies_.target().first(meshRank), copy % copies_.each());
  return {layout_.endpoints[1].ranks[same], copy / copies_.each()};
}

int32_t RankCopies::repeating(int32_t first, int64_t copy) const {
  if (copy == 0)
    return first;
  if (const int32_t meshRank = sourceOn_[static_cast<size_t>(first)]; meshRank >= 0)
    return layout_.endpoints[0].ranks[copies_.source().meshRank(meshRank, copy)];
  const int32_t meshRank = targetOn(first);
  return layout_.endpoints[1].ranks[copies_.target().meshRank(copies_.target().first(meshRank),
                                                              copy * copies_.each() + copies_.target().copy(meshRank))];
}

FlowKeys::FlowKeys(const Module &module, const StagedRanges &staged, const RankBuffers &buffers)
    : layout_(module.layout), staged_(staged), buffers_(buffers), routes_(module.layout, module.transfers.routes) {
  for (const Endpoint &endpoint : layout_.endpoints)
    hasViews_.push_back(&endpoint != &layout_.endpoints[0] &&
                        std::any_of(endpoint.params.begin(), endpoint.params.end(),
                                    [](const Param &param) { return param.view.has_value(); }));
}

FlowKey FlowKeys::operator()(const Descriptor &d) const {
  const Endpoint &endpoint = layout_.endpoints[d.endpoint];
  const int32_t source = d.source < 0 ? -1 : rankOf(0, d.source),
                target = staged_.writer(d.endpoint, d.target, d.targetInstance);
  uint32_t phase = 0;
  if (const StagedRange *range = staged_.find(d.endpoint, d.target, d.targetInstance, d.targetOffset))
    phase = range->phase;
  else if (hasViews_[d.endpoint])
    phase = staged_.phaseOf(endpoint.params[staged_.paramOf(d.endpoint, d.target, d.targetInstance)]);
  return {{endpoint.epoch(d.target), phase},
          source < 0 ? target : source,
          target < 0 ? source : target,
          routes_(d.endpoint, d.route)};
}

int64_t FlowKeys::blockBytes(const Descriptor &d) const {
  if (!hasViews_[d.endpoint])
    return 0;
  const int32_t rank = rankOf(d.endpoint, d.target);
  const BufferRange &range = buffers_.targetOf(rank < 0 ? std::max((*this)(d).target, 0) : rank, d);
  const Param &param = layout_.endpoints[d.endpoint].params[range.param];
  return param.view && param.view->kind == ViewKind::elements && !param.view->staged
             ? formatOf(param.view->format).blockColumns * itemBytes(param.dtype)
             : 0;
}

namespace {

constexpr int64_t kLongRow = 1 << 20;

/// The last byte at or before `wanted` at which a cut may be.
int64_t cutBefore(int64_t wanted, int64_t rowBytes, int64_t granule) {
  const int64_t row = wanted / rowBytes * rowBytes;
  return rowBytes < kLongRow ? row : row + (wanted - row) / granule * granule;
}

} // namespace

void divideFiles(const std::vector<Descriptor> &descriptors, int64_t world, Interner<Shape> &shapes,
                 llvm::function_ref<int64_t(const Descriptor &)> granule, std::vector<LocalDescriptor> &local) {
  int64_t total = 0;
  for (const Descriptor &d : descriptors)
    total += bytesOf(shapes[d.shape]);
  // Without overflow: bytes times ranks may exceed 64 bits.
  const auto end = [&](int64_t rank) { return total / world * (rank + 1) + total % world * (rank + 1) / world; };
  DescriptorCutter cutter(shapes);
  std::vector<Descriptor> stack, taken;
  int64_t rank = 0, at = 0;
  for (const Descriptor &d : descriptors) {
    const int64_t bytes = bytesOf(shapes[d.shape]), rowBytes = shapes[d.shape].rowBytes;
    stack = {d};
    for (int64_t done = 0; done < bytes;) {
      while (rank + 1 < world && at + done >= end(rank))
        ++rank;
      const int64_t next = rank + 1 == world ? bytes : std::min(bytes, cutBefore(end(rank) - at, rowBytes, granule(d)));
      if (next <= done) { // less than a row is left of what the rank copies
        ++rank;
        continue;
      }
      taken.clear();
      cutter.take(stack, next - done, taken);
      for (const Descriptor &part : taken)
        local.push_back({part, static_cast<int32_t>(rank)});
      done = next;
    }
    at += bytes;
  }
}

Flows::Flows(const Module &module)
    : layout(module.layout), copies(layout), buffers(layout), staged(layout), cutter(shapes),
      relays(layout, shapes, cutter), keyOf(module, staged, buffers),
      descriptors(module.transfers.descriptors, shapes, cutter) {
  for (const Shape &shape : module.transfers.shapes)
    shapes.intern(shape);
}

llvm::ArrayRef<LocalDescriptor> Flows::localOf(int32_t rank) const {
  const auto first =
      std::partition_point(local.begin(), local.end(), [&](const LocalDescriptor &each) { return each.rank < rank; });
  const auto last =
      std::partition_point(first, local.end(), [&](const LocalDescriptor &each) { return each.rank == rank; });
  return llvm::ArrayRef(local).slice(static_cast<size_t>(first - local.begin()), static_cast<size_t>(last - first));
}

bool Flows::independentRanks() const {
  bool views = false;
  for (unsigned endpoint = 0; endpoint < layout.endpoints.size(); ++endpoint)
    views = views || keyOf.hasViews(endpoint);
  return layout.stagingLimit == 0 && !views &&
         std::all_of(keys.begin(), keys.end(),
                     [](const FlowKey &at) { return at.when == EpochPhase{} && !at.reads(); }) &&
         std::all_of(flows.begin(), flows.end(), [](const Flow &flow) { return flow.hops.size() == 1; });
}

namespace {

class FlowMaker {
public:
  FlowMaker(const Module &module, Flows &flows)
      : module_(module), layout_(module.layout), flows_(flows), shapes_(flows.shapes) {}

  llvm::Error run() {
    const bool anyStaged =
        std::any_of(layout_.endpoints.begin(), layout_.endpoints.end(), [](const Endpoint &endpoint) {
          return std::any_of(endpoint.params.begin(), endpoint.params.end(),
                             [](const Param &param) { return param.view && param.view->staged; });
        });
    if (llvm::Error error = flows_.staged.plan(anyStaged ? remoteBytes() : 0))
      return error;
    separate();
    relay();
    repeatLocal();
    sortUnlessSorted(flows_.local, [](const LocalDescriptor &a, const LocalDescriptor &b) { return a.rank < b.rank; });
    return llvm::Error::success();
  }

private:
  int64_t remoteBytes() const {
    int64_t bytes = 0;
    for (const Descriptor &d : module_.transfers.descriptors)
      if (const FlowKey at = flows_.keyOf(d); at.source != at.target || d.route >= 0)
        bytes += bytesOf(shapes_[d.shape]) *
                 (d.route < 0 ? 1 : static_cast<int64_t>(module_.transfers.routes[d.route].size()));
    return bytes;
  }

  /// Separates local descriptors from the descriptors of flows. Copies from files to files are divided among the ranks.
  void separate() {
    const std::vector<Descriptor> &whole = module_.transfers.descriptors;
    std::vector<uint32_t> remote;
    std::vector<Descriptor> files;
    auto put = [&](uint32_t number) {
      const Descriptor &d = flows_.descriptors[number];
      const FlowKey at = flows_.keyOf(d);
      if (at.target < 0)
        files.push_back(d);
      else if (at.source == at.target && d.route < 0)
        flows_.local.push_back({d, at.target});
      else
        remote.push_back(number);
    };
    remote.reserve(whole.size());
    std::vector<Descriptor> parts;
    for (uint32_t number = 0; number < whole.size(); ++number) {
      if (!flows_.staged.needsCut(whole[number].endpoint, whole[number].target, whole[number].targetInstance)) {
        put(number);
        continue;
      }
      parts.clear();
      cutAtStagedRanges(whole[number], flows_.staged, shapes_, parts);
      for (const Descriptor &d : parts)
        put(flows_.descriptors.addCut(d));
    }
    divideFiles(files, layout_.world, shapes_, [&](const Descriptor &d) { return granule(d); }, flows_.local);
    sortUnlessSorted(remote, [&](uint32_t a, uint32_t b) {
      return flows_.keyOf(flows_.descriptors[a]).fields() < flows_.keyOf(flows_.descriptors[b]).fields();
    });
    for (uint32_t number : remote)
      addToFlow(flows_.keyOf(flows_.descriptors[number]), number);
  }

  /// Bytes of a copy from files to files that must stay together: the size of a page, and whole blocks.
  int64_t granule(const Descriptor &d) const {
    constexpr int64_t kPage = 4096;
    const int64_t block = flows_.keyOf.blockBytes(d);
    return block > 0 ? std::lcm(kPage, block) : kPage;
  }

  /// Appends a descriptor to the last flow, or to a new one if it has another key.
  void addToFlow(const FlowKey &at, uint32_t number) {
    const Descriptor &d = flows_.descriptors[number];
    if (flows_.keys.empty() || flows_.keys.back() != at) {
      flows_.keys.push_back(at);
      flows_.descriptors.beginFlow();
      Flow &flow = flows_.flows.emplace_back();
      if (at.relay >= 0)
        flow.hops = {{at.source, at.relay, -1}, {at.relay, at.target, 0}};
      else if (at.source != at.target)
        flow.hops.push_back({at.source, at.target, -1});
      if (d.route >= 0)
        addRoute(module_.transfers.routes[d.route], d.endpoint, flow);
    }
    flows_.flows.back().bytes += bytesOf(shapes_[d.shape]);
    flows_.descriptors.add(number);
  }

  /// Appends the hops of a route to a flow.
  void addRoute(const Route &route, unsigned endpoint, Flow &flow) {
    for (const Hop &hop : route) {
      const int32_t from = flows_.keyOf.rankOf(endpoint, hop.from), to = flows_.keyOf.rankOf(endpoint, hop.to);
      auto after = static_cast<int32_t>(flow.hops.size()) - 1; // becomes -1 if `from` reads the bytes from files
      while (after >= 0 && flow.hops[after].to != from)
        --after;
      flow.hops.push_back({from, to, after});
    }
  }

  /// Replaces flows of overloaded NICs by flows that are in part sent over relays. The source ranks of a pool are no
  /// relays: they do not receive.
  void relay() {
    if (layout_.pool() || layout_.topology.ranksPerNode == 0)
      return;
    std::vector<std::pair<FlowKey, Descriptor>> all =
        flows_.relays.cut(flows_.keys, flows_.flows, flows_.descriptors.firsts(), flows_.descriptors.all());
    if (all.empty())
      return;
    flows_.keys.clear();
    flows_.flows.clear();
    flows_.descriptors.clear();
    sortUnlessSorted(all, [](const auto &a, const auto &b) { return a.first.fields() < b.first.fields(); });
    for (const auto &[at, d] : all)
      addToFlow(at, flows_.descriptors.addCut(d));
    flows_.relays.layOut(flows_.keys, flows_.flows);
  }

  /// Repeats the local descriptors of the first copy of the target for the other copies that the first copy of the
  /// source serves.
  void repeatLocal() {
    const int64_t each = flows_.copies.copies().each();
    if (each == 1)
      return;
    std::vector<LocalDescriptor> local;
    for (const auto &[d, rank] : flows_.local)
      for (int64_t copy = 0; copy < each; ++copy)
        local.push_back({d, flows_.copies.target(rank, copy)});
    flows_.local = std::move(local);
  }

  const Module &module_;
  const Layout &layout_;
  Flows &flows_;
  Interner<Shape> &shapes_;
};

} // namespace

llvm::Expected<std::unique_ptr<Flows>> makeFlows(const Module &module) {
  auto flows = std::make_unique<Flows>(module);
  if (llvm::Error error = FlowMaker(module, *flows).run())
    return error;
  return flows;
}

} // namespace reshard
