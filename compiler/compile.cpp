// SPDX-License-Identifier: Apache-2.0
// Reads the job, or IR text, runs the passes in the order of passes.def and verifies their results if asked to.
#include "compiler/compile.h"

#include "compiler/frontend/frontend.h"
#include "compiler/frontend/reading.h"
#include "compiler/pass.h"
#include "compiler/resolve/steps.h"
#include "compiler/transfer/lists.h"
#include "compiler/transfer/staging.h"
#include "ir/copies.h"
#include "ir/text.h"

#include "llvm/Support/MemoryBuffer.h"

#include <algorithm>
#include <chrono>
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

} // namespace

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

  std::optional<Statistics> counted; // counts made before the transfer level was freed
  for (const PassInfo *pass : selected) {
    if (text && options.passes.empty() && pass->done(result.module))
      continue;
    if (options.releaseIr && pass->level == Level::schedule && result.module.level == Level::transfer) {
      counted = statistics(result.module);
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
  result.statistics = counted ? *counted : statistics(result.module);
  result.statistics.messages = result.module.schedule.messages;
  result.statistics.rounds = result.module.schedule.rounds;
  return true;
}

} // namespace reshard
