// SPDX-License-Identifier: Apache-2.0
// Counts what the report of a compilation states.
#include "compiler/compile.h"

#include "compiler/transfer/lower_bounds.h"
#include "compiler/transfer/shard_distribution.h"
#include "ir/copies.h"

#include <algorithm>
#include <set>

namespace reshard {

using namespace ir;

namespace {

/// The patterns of codes, scales and amax, which are no tensors of the model: what the source's views have, and params
/// that the source's views present as elements.
std::set<int> derivedTensorPatterns(const Layout &layout) {
  std::set<int> result;
  const std::vector<Param> &params = layout.endpoints.front().params;
  auto add = [&](const Param &param) {
    for (const Part &part : param.parts)
      if (part.pattern >= 0)
        result.insert(part.pattern);
  };
  for (const Param &param : params)
    if (param.view && param.view->kind != ViewKind::elements) {
      add(param);
    } else if (param.view) {
      add(params[param.view->codes]);
      add(params[param.view->scales]);
      if (formatOf(param.view->format).tensorScale())
        add(params[param.view->tensorScale]);
    }
  return result;
}

/// Tensors and params of the layout.
void countLayout(const Layout &layout, Statistics &s) {
  const std::set<int> derived = derivedTensorPatterns(layout);
  for (size_t f = 0; f < layout.tensorPatterns.size(); ++f) {
    int64_t count = derived.count(static_cast<int>(f)) ? 0 : 1;
    for (const IndexMap &values : layout.tensorPatterns[f].exists)
      count *= positionCount(values);
    s.tensors += count;
  }
  for (const Endpoint &endpoint : layout.endpoints)
    for (const Param &param : endpoint.params)
      for (int64_t meshRank = 0; meshRank < endpoint.meshRanks() && !param.view; ++meshRank)
        s.params += instances(endpoint, param, meshRank);
}

/// Adds the bytes of transfers to the counts, and the bytes of each rank to the maxima.
class TransferCounts {
public:
  TransferCounts(const Module &module, Statistics &s)
      : module_(module), layout_(module.layout), copies_(module.layout), s_(s), egress_(layout_.world),
        ingress_(layout_.world), files_(layout_.world) {}

  void run() {
    for (const Overlap &overlap : module_.transfers.overlaps)
      s_.transfers +=
          overlap.pattern < 0 ? 0 : overlap.tensors * static_cast<int64_t>(overlap.targets.size()) * copies_.targets();
    for (const Transfer &transfer : module_.transfers.transfers)
      add(transfer);
    if (!egress_.empty()) {
      s_.egressMax = *std::max_element(egress_.begin(), egress_.end());
      s_.ingressMax = *std::max_element(ingress_.begin(), ingress_.end());
    }
  }

private:
  void add(const Transfer &transfer) {
    const Overlap &overlap = module_.transfers.overlaps[transfer.overlap];
    const Endpoint &source = layout_.endpoints.front(), &target = layout_.endpoints[overlap.endpoint];
    const int64_t each = ir::bytes(module_.transfers, transfer), bytes = each * copies_.targets();
    const Route none, &route = transfer.route < 0 ? none : module_.transfers.routes[transfer.route];
    for (const Hop &hop : route)
      move(target.ranks[hop.from], target.ranks[hop.to], each, transfer.count);
    s_.forwardedBytes += bytes * static_cast<int64_t>(route.size());
    s_.targetBytes += bytes * static_cast<int64_t>(1 + route.size());
    if (overlap.pattern < 0) {
      s_.paddingBytes += bytes;
    } else if (source.storage || target.storage) {
      s_.storageBytes += bytes;
      if (source.storage != target.storage && transfer.source >= 0) {
        int64_t &ofRank = files_[source.storage ? target.ranks[transfer.target] : source.ranks[transfer.source]];
        s_.storageMax = std::max(s_.storageMax, ofRank += bytes);
      }
    } else if (transfer.source == Transfer::kUnassigned) {
      return;
    } else if (source.ranks[transfer.source] == target.ranks[transfer.target]) {
      s_.localBytes += bytes;
    } else {
      move(source.ranks[transfer.source], target.ranks[transfer.target], each, transfer.count);
      egress_[source.ranks[transfer.source]] += each * copies_.each();
    }
  }

  /// Bytes of some tensors that one rank sends to another, and the same in all copies.
  void move(int32_t from, int32_t to, int64_t bytes, int64_t tensors) {
    s_.remoteBytes += bytes * copies_.targets();
    s_.messagesBefore += tensors * copies_.targets();
    s_.internodeBytes += layout_.topology.node(from) != layout_.topology.node(to) ? bytes : 0;
    ingress_[to] += bytes;
  }

  const Module &module_;
  const Layout &layout_;
  const Copies copies_;
  Statistics &s_;
  std::vector<int64_t> egress_, ingress_, files_; // bytes by rank
};

/// Descriptors before and after the pass coalesce.
void countDescriptors(const Module &module, Statistics &s) {
  const int64_t copies = Copies(module.layout).targets();
  for (const Transfer &transfer : module.transfers.transfers) {
    int64_t blocks = transfer.count;
    const Overlap &overlap = module.transfers.overlaps[transfer.overlap];
    const ir::IndexMapNumbers &relations = overlap.replicaGroups[transfer.replicaGroup].relations;
    const size_t variables = overlap.pattern < 0 ? 0 : module.layout.tensorPatterns[overlap.pattern].variables.size();
    for (size_t d = variables; d < relations.size(); ++d)
      blocks *= static_cast<int64_t>(module.transfers.relations[relations[d]].size());
    s.descriptorsBefore += blocks * copies;
  }
  s.descriptors = static_cast<int64_t>(module.transfers.descriptors.size()) * copies;
}

} // namespace

void StepCounts::add(const RankSchedule &rank) {
  stagingMax = std::max(stagingMax, rank.arenaBytes);
  for (const Step &step : rank.steps)
    if (step.staging < 0 && step.peer >= 0)
      ++(step.kind == StepKind::send ? sendsInPlace : receivesInPlace);
}

void StepCounts::add(const StepCounts &other) {
  stagingMax = std::max(stagingMax, other.stagingMax);
  sendsInPlace += other.sendsInPlace;
  receivesInPlace += other.receivesInPlace;
}

Statistics statistics(const Module &module) {
  Statistics s;
  countLayout(module.layout, s);
  TransferCounts(module, s).run();
  countDescriptors(module, s);
  s.egressBound = egressBound(module.layout, module.transfers);
  s.storageBound = storageBound(module.layout, module.transfers);
  s.storageMegatron = megatronLoad(module.layout, module.transfers);
  s.lowerBounds = lowerBounds(module.layout, module.transfers);
  s.egressWithoutRelays = s.lowerBounds.egressWithoutRelays;
  s.ingressBound = s.lowerBounds.rankIngress;
  s.messages = module.schedule.messages;
  s.rounds = module.schedule.rounds;
  for (const RankSchedule &rank : module.schedule.ranks)
    s.steps.add(rank);
  return s;
}

} // namespace reshard
