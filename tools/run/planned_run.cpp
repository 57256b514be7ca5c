// SPDX-License-Identifier: Apache-2.0
// Opens a plan and refuses options that contradict it or each other.
#include "tools/run/planned_run.h"

#include "base/work_deadline.h"
#include "schema/flatbuffer_vectors.h"
#include "tools/run/new_folder.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <set>
#include <thread>

namespace reshard::tools {

using namespace command;

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

std::string Trace::text() const {
  Json events = Json::array();
  for (const Timed &each : activities_)
    events.push_back({{"name", each.name},
                      {"ph", "X"},
                      {"pid", 1},
                      {"tid", 1},
                      {"ts", (each.begin - start_) * 1e6},
                      {"dur", (each.end - each.begin) * 1e6}});
  return Json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump(1) + "\n";
}

void forEachRank(const Memory &memory, ProgressLine &progress,
                 const std::function<void(const verify::MeshRankMemory &)> &work) {
  const size_t ranks = memory.rankMemories().size();
  for (size_t i = 0; i < ranks; ++i) {
    work(memory.rankMemories()[i]);
    progress.at(static_cast<double>(i + 1) / static_cast<double>(ranks));
  }
}

namespace {

/// `storage` of an endpoint, as the job has it; a relative path is relative to the plan's folder.
std::string storageOf(const PlannedRun &run, uint32_t endpoint) {
  const auto *directory = run.plan->manifest().endpoints()->Get(endpoint)->directory();
  return directory && directory->size() > 0 ? (fs::path(run.options.plan).parent_path() / directory->str()).string()
                                            : std::string();
}

/// Checks that the options tell this process which rank it is, unless the launcher does.
Status checkRank(const ExecutionOptions &options, const Plan &plan) {
  const bool launched = options.rendezvous.empty() || options.rendezvous.starts_with("env://");
  if (options.traits().needsRendezvous && options.rendezvous.empty())
    return invalid("--rendezvous is missing, expected --rendezvous=URL with --transport=" + options.transport +
                   ": tcp://HOST:PORT, file:///FOLDER or env://");
  if (!options.rank && !launched)
    return invalid("--rank is missing, expected --rank=R with R from 0 to " + std::to_string(plan.world() - 1) +
                   ", another one in each process; --rendezvous=env:// reads the launcher's");
  return {};
}

/// Checks --resume, which continues a run whose result is in files only.
Status checkResume(const ExecutionOptions &options, const Plan &plan) {
  if (!options.resume)
    return {};
  if (options.noSync)
    return invalid("--resume keeps what is on the device, expected no --no-sync");
  if (options.repeat != 1 || options.device != "cpu")
    return invalid("--resume continues one run on the CPU, expected no --repeat and no --device");
  for (const schema::Endpoint *endpoint : *plan.manifest().endpoints())
    if (options.traits().processes && !endpoint->storage())
      return invalid("--resume with --transport=" + options.transport + " needs files that all processes share, but " +
                     endpoint->role()->str() + " has no 'storage'");
  return {};
}

/// Checks that the files of both sides are given and no output is among them.
Status checkFolders(const PlannedRun &run) {
  for (const auto &[option, output] :
       {std::pair("--report", run.options.report), std::pair("--trace", run.options.trace)})
    if (const Status status = checkNotStored(option, output, run.source, "source"); !status.ok())
      return invalid(status.message());
  if (run.source.empty())
    return invalid("the job names no folder for its source, expected --source=DIR or --synthesize");
  if (std::error_code unknown; run.options.source.empty() && !fs::exists(run.source, unknown))
    return invalid("'" + run.source +
                   "' does not exist: 'storage' of the job is relative to the plan's folder; --source=DIR names "
                   "another folder");
  if (run.target.empty())
    return invalid(run.plan->manifest().endpoints()->size() > 2
                       ? "the plan has several targets, expected --target=DIR, one folder for all"
                       : "the job names no folder for its target, expected --target=DIR or --synthesize");
  return {};
}

Status checkOptions(const PlannedRun &run) {
  const ExecutionOptions &options = run.options;
  if (Status status = checkRank(options, *run.plan); !status.ok())
    return status;
  if (options.synthesize && !options.notSynthesized.empty())
    return invalid(options.notSynthesized.front());
  if (Status status = checkResume(options, *run.plan); !status.ok())
    return status;
  if (Status status = options.synthesize ? Status() : checkFolders(run); !status.ok())
    return status;
  const auto &endpoints = *run.plan->manifest().endpoints();
  const bool written = !options.synthesize && std::any_of(endpoints.begin() + 1, endpoints.end(),
                                                          [](const schema::Endpoint *e) { return e->checkpoint(); });
  if (!options.copy.empty() && !written)
    return invalid("--copy adds files to a written checkpoint, expected a target with 'storage' and no mesh");
  const bool made = options.synthesize && !options.source.empty() && endpoints.Get(0)->checkpoint();
  if (options.shardBytes > 0 && !written && !made)
    return invalid(
        "--max-shard-size applies to files of a written checkpoint, expected a target with 'storage' and no mesh");
  const bool replacesCaller = options.synthesize && options.source.empty() && options.device == "cpu";
  if (const auto transforms = callbackNames(*run.plan, &schema::Param::transform);
      !transforms.empty() && !replacesCaller)
    return invalid("the plan uses the transform '" + transforms[0] +
                   "', a function of the caller: expected --synthesize without --source, and --device=cpu");
  for (const schema::Endpoint *endpoint : endpoints) {
    const bool shared = options.traits().processes && endpoint->storage() && endpoint != endpoints.Get(0);
    if (shared && options.synthesize)
      return invalid("the files of " + endpoint->role()->str() +
                     " belong to no single process, expected --source=DIR and --target=DIR instead of --synthesize");
    if (shared && options.device != "cpu")
      return invalid("the files of " + endpoint->role()->str() +
                     " are written by several processes, expected --device=cpu");
  }
  return {};
}

} // namespace

PlannedRun::PlannedRun(const ExecutionOptions &given)
    : options(given), threads(given.threads ? given.threads : std::max(1u, std::thread::hardware_concurrency())) {}

void PlannedRun::open() {
  throwOnError(Plan::open(options.plan, plan), kUsage);
  source = options.source.empty() ? storageOf(*this, 0) : options.source;
  target = options.target.empty() && plan->manifest().endpoints()->size() == 2 ? storageOf(*this, 1) : options.target;
  throwOnError(checkOptions(*this));
  if (!options.traits().processes) // this process has all ranks, thus both sides of each message
    throwOnError(checkMessages(*plan));
}

void PlannedRun::inTime(const char *what, const char *line, const char *traced,
                        const std::function<void(ProgressLine &)> &work) {
  const double begin = now();
  throwOnError(WorkDeadline::run(what, options.timeout, [&] {
    ProgressLine progress(line);
    work(progress);
    return Status();
  }));
  if (traced)
    trace.add(traced, begin);
}

std::vector<std::string> callbackNames(const Plan &plan, const flatbuffers::String *(schema::Param::*name)() const) {
  std::set<std::string> names;
  for (const schema::Endpoint *endpoint : *plan.manifest().endpoints())
    for (const schema::Param *param : orEmpty(endpoint->params()))
      if (const flatbuffers::String *text = (param->*name)(); text && text->size() > 0)
        names.insert(text->str());
  return {names.begin(), names.end()};
}

} // namespace reshard::tools
