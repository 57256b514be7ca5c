// SPDX-License-Identifier: Apache-2.0
// Reads the job, or IR text, runs the passes in the order of passes.def, verifies their results if asked to, and counts
// what the report states.
#include "compiler/compile.h"

#include "compiler/frontend/frontend.h"
#include "compiler/frontend/reading.h"
#include "compiler/pass.h"
#include "compiler/transfer/free_memory.h"
#include "compiler/transfer/lower_bounds.h"
#include "compiler/transfer/shard_distribution.h"
#include "compiler/transfer/staging.h"
#include "ir/copies.h"
#include "ir/text.h"

#include "llvm/Support/MemoryBuffer.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <unistd.h>

namespace reshard {

using namespace ir;

namespace {

// What passes.def says of modules that have the result of a pass.
bool atTransfer(const Module &module) { return module.level >= Level::transfer; }
bool hasTransfers(const Module &module) { return !module.transfers.transfers.empty(); }
bool hasSources(const Module &module) {
  const std::vector<Transfer> &transfers = module.transfers.transfers;
  return !transfers.empty() && std::none_of(transfers.begin(), transfers.end(),
                                            [](const Transfer &t) { return t.source == Transfer::kUnassigned; });
}
bool hasDescriptors(const Module &module) { return !module.transfers.descriptors.empty(); }
bool atSchedule(const Module &module) { return module.level >= Level::schedule; }
bool never(const Module &) { return false; }

} // namespace

const std::vector<PassInfo> &passes() {
  static const std::vector<PassInfo> all = {
#define PASS(name, level, function, ...)                                                                               \
  {name, ir::Level::level, [](Lowering &lowering) { return function(lowering.module); }, __VA_ARGS__},
#define RANKS_PASS(name, level, function, ...)                                                                         \
  {name, ir::Level::level, [](Lowering &lowering) { return function(lowering.module, lowering.ranks); }, __VA_ARGS__},
#include "compiler/passes.def"
#undef PASS
#undef RANKS_PASS
  };
  return all;
}

namespace {

constexpr const char *kLevels[] = {"layout", "transfer", "schedule"}; // by Level

/// Adds the time of its lifetime to `times`.
class Stopwatch {
public:
  Stopwatch(std::string pass, std::vector<PassTime> &times) : pass_(std::move(pass)), times_(times) {}
  ~Stopwatch() {
    times_.push_back({pass_, std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count()});
  }

private:
  std::string pass_;
  std::vector<PassTime> &times_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The passes of --passes in their order there, else the passes of the default order up to `stopAfter`.
std::vector<const PassInfo *> select(const CompileOptions &options, Diagnostics &diagnostics) {
  std::vector<const PassInfo *> selected;
  std::vector<std::string> names;
  for (const PassInfo &pass : passes()) {
    names.push_back(pass.name);
    if (options.passes.empty() && pass.level <= options.stopAfter && (!pass.onRequest || options.relabel))
      selected.push_back(&pass);
  }
  for (const std::string &name : options.passes) {
    const auto at = std::find(names.begin(), names.end(), name);
    if (at == names.end())
      diagnostics.error({}, "unknown pass '" + name + "'" + suggestion(name, names));
    else
      selected.push_back(&passes()[at - names.begin()]);
  }
  return selected;
}

/// Reads a module from IR text and verifies it.
bool readText(const std::string &path, Module &module, Diagnostics &diagnostics) {
  auto unreadable = [&](const std::string &why) {
    diagnostics.error({}, "cannot read '" + path + "': " + why);
    return false;
  };
  const Result<int> file = openInput(path);
  if (!file.ok())
    return unreadable(file.status().message());
  auto buffer =
      llvm::MemoryBuffer::getOpenFile(*file, path, /*FileSize=*/-1); // -1: of the file, or to the end of a pipe
  ::close(*file);
  if (!buffer)
    return unreadable(buffer.getError().message());
  const std::string text = (*buffer)->getBuffer().str();
  llvm::Expected<Module> parsed = parse(text);
  if (!parsed) {
    llvm::handleAllErrors(parsed.takeError(), [&](const SyntaxError &error) {
      const uint32_t file = diagnostics.addFile(path, text);
      diagnostics.error({file, static_cast<uint32_t>(error.line()), static_cast<uint32_t>(error.column())},
                        error.description());
    });
    return false;
  }
  module = std::move(*parsed);
  if (llvm::Error violation = verify(module)) {
    diagnostics.error({}, "'" + path + "' is not valid IR: " + toString(std::move(violation)));
    return false;
  }
  return true;
}

/// Decides whether the copies of a job are planned as one.
void foldCopies(FoldCopies fold, Layout &layout) {
  layout.foldsCopies = fold == FoldCopies::always || (fold == FoldCopies::automatic && layout.world >= kMinFoldedRanks);
  layout.foldsCopies = Copies(layout).targets() > 1;
}

/// Makes a layout-level module of a job. `stagingAt` receives the location of options.staging.
bool readYaml(const std::string &path, const CompileOptions &options, CompileResult &result, Location &stagingAt,
              Diagnostics &diagnostics) {
  std::optional<Job> job;
  const uint32_t file = diagnostics.files();
  {
    Stopwatch watch("frontend", result.times);
    job = readJob(path, options.overrides, diagnostics, options.allowed, options.readStoredFiles);
  }
  if (!job || !diagnostics.ok())
    return false;
  stagingAt = job->stagingAt;
  result.inputs = inputsOf(diagnostics, file, options);
  Stopwatch watch("resolve", result.times);
  std::optional<Layout> layout = resolve(*job, diagnostics, options.allowed);
  if (!layout || !diagnostics.ok())
    return false;
  result.module.layout = std::move(*layout);
  const std::vector<Endpoint> &endpoints = result.module.layout.endpoints;
  const bool files = std::any_of(endpoints.begin(), endpoints.end(), [](const Endpoint &e) { return e.storage; });
  if (options.megatron && !files)
    diagnostics.error(
        {},
        "--algorithm=megatron distributes reads and writes of files, but no endpoint has files; expected an endpoint "
        "with 'storage'");
  if (!options.megatron && !job->group.empty() && !endpoints[0].storage)
    diagnostics.error(
        {}, "'group' has an effect on writing only with --algorithm=megatron; expected that option or a source with "
            "'storage'");
  if (!diagnostics.ok())
    return false;
  result.module.layout.files.megatron = options.megatron;
  if (options.pinned)
    for (Endpoint &endpoint : result.module.layout.endpoints) {
      if (&endpoint == &result.module.layout.endpoints[0] || endpoint.storage)
        continue;
      for (int32_t rank : endpoint.ranks) {
        const auto known = options.pinned->epochs.find({endpoint.role, rank});
        endpoint.epochs.push_back(known == options.pinned->epochs.end() ? options.pinned->next : known->second);
      }
      if (std::all_of(endpoint.epochs.begin(), endpoint.epochs.end(), [](uint32_t epoch) { return epoch == 0; }))
        endpoint.epochs.clear();
    }
  result.module.fingerprint = job->fingerprint;
  foldCopies(options.pinned ? FoldCopies::never : options.foldCopies, result.module.layout);
  return true;
}

/// Copies the schedules of the ranks into the module, for those who read its IR.
void storeRanks(CompileResult &result) { result.module.schedule.ranks = allOf(*result.ranks); }

/// Runs a pass and, with --verify-each, verifies its result.
llvm::Error runPass(const PassInfo &pass, const CompileOptions &options, CompileResult &result) {
  const Level before = result.module.level;
  if (pass.level < before || static_cast<int>(pass.level) > static_cast<int>(before) + 1)
    return llvm::createStringError(std::string("cannot run on IR of level '") + kLevels[static_cast<int>(before)] +
                                   "', expected '" + kLevels[std::max(static_cast<int>(pass.level) - 1, 0)] + "' or '" +
                                   kLevels[static_cast<int>(pass.level)] + "'");
  {
    Stopwatch watch(pass.name, result.times);
    if (llvm::Error error = pass.run(result))
      return error;
  }
  if (result.ranks && !options.releaseIr)
    storeRanks(result);
  if (options.verifyEach)
    if (llvm::Error violation = verify(result.module))
      return llvm::createStringError("produced invalid IR: " + toString(std::move(violation)));
  return llvm::Error::success();
}

/// Removes the incomplete result of a pass that failed while it raised the level.
void discard(Module &module, const PassInfo &failed) {
  if (failed.level == Level::transfer && module.level == Level::layout)
    module.transfers = {};
  if (failed.level == Level::schedule && module.level == Level::transfer)
    module.schedule = {};
}

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

void countSchedule(const Schedule &schedule, Statistics &s) {
  s.messages = schedule.messages;
  s.rounds = schedule.rounds;
  for (const RankSchedule &rank : schedule.ranks)
    s.steps.add(rank);
}

/// Counts of the layout and transfer levels.
Statistics transferStatistics(const Module &module) {
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
  return s;
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

bool compileJob(const std::string &path, const CompileOptions &options, CompileResult &result,
                Diagnostics &diagnostics) {
  const std::vector<const PassInfo *> selected = select(options, diagnostics);
  const bool text = path.ends_with(".rir");
  if (text && !options.overrides.empty())
    diagnostics.error({}, "--set changes keys of a YAML job, but '" + path + "' is IR text");
  if (!diagnostics.ok())
    return false;

  Location stagingAt; // none in IR text
  if (text ? !readText(path, result.module, diagnostics) : !readYaml(path, options, result, stagingAt, diagnostics))
    return false;
  if (result.module.layout.pool() && (options.pinned || options.relabel)) {
    diagnostics.error({}, std::string(options.relabel ? "--relabel-target" : "--keep") +
                              " changes which rank has which part of the target, but the ranks of engine replicas "
                              "are in the order of the mesh; remove the option or 'replicas'");
    return false;
  }
  if (result.module.level == Level::schedule) // IR text
    result.ranks = std::make_unique<StoredRanks>(result.module.schedule.ranks);
  result.lastGoodPass = text ? "parse" : "resolve";
  if (options.afterPass)
    options.afterPass(result.lastGoodPass, result.module);

  std::optional<Statistics> counted; // the statistics of the transfer level, if it was freed
  for (const PassInfo *pass : selected) {
    if (text && options.passes.empty() && pass->done(result.module))
      continue;
    if (options.releaseIr && pass->level == Level::schedule && result.module.level == Level::transfer) {
      counted = transferStatistics(result.module);
      freeMemory(result.module.transfers.transfers);
      freeMemory(result.module.transfers.overlaps);
    }
    if (llvm::Error error = runPass(*pass, options, result)) {
      discard(result.module, *pass);
      llvm::handleAllErrors(
          std::move(error), [&](const StagingLimitError &limit) { diagnostics.error(stagingAt, limit.message()); },
          [&](const llvm::ErrorInfoBase &other) {
            result.failedPass = pass->name;
            diagnostics.error({}, "pass " + result.failedPass + ": " + other.message());
          });
      return false;
    }
    result.lastGoodPass = pass->name;
    if (options.afterPass)
      options.afterPass(pass->name, result.module);
  }
  result.statistics = counted ? *counted : transferStatistics(result.module);
  countSchedule(result.module.schedule, result.statistics);
  return true;
}

Statistics statistics(const Module &module) {
  Statistics s = transferStatistics(module);
  countSchedule(module.schedule, s);
  return s;
}

} // namespace reshard
