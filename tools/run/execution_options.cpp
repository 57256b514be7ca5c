// SPDX-License-Identifier: Apache-2.0
#include "tools/run/execution_options.h"

#include "schema/flatbuffer_vectors.h"
#include "tools/run/new_folder.h"

#include <algorithm>
#include <filesystem>
#include <set>

namespace reshard::tools {

namespace fs = std::filesystem;

namespace {

/// The `storage` path of an endpoint, as the job has it; a relative path is relative to the plan's folder.
std::string storageOf(const ExecutionOptions &options, const Plan &plan, uint32_t endpoint) {
  const auto *directory = plan.manifest().endpoints()->Get(endpoint)->directory();
  return directory && directory->size() > 0 ? (fs::path(options.plan).parent_path() / directory->str()).string()
                                            : std::string();
}

} // namespace

std::string sourceFolder(const ExecutionOptions &options, const Plan &plan) {
  return options.source.empty() ? storageOf(options, plan, 0) : options.source;
}

std::string targetFolder(const ExecutionOptions &options, const Plan &plan) {
  return options.target.empty() && plan.manifest().endpoints()->size() == 2 ? storageOf(options, plan, 1)
                                                                            : options.target;
}

namespace {

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

} // namespace

Status checkOptions(const ExecutionOptions &options, const Plan &plan) {
  if (Status status = checkRank(options, plan); !status.ok())
    return status;
  if (options.synthesize && !options.notSynthesized.empty())
    return invalid(options.notSynthesized.front());
  if (Status status = checkResume(options, plan); !status.ok())
    return status;
  if (!options.synthesize)
    for (const auto &[option, output] : {std::pair("--report", options.report), std::pair("--trace", options.trace)})
      if (const Status status = checkNotStored(option, output, sourceFolder(options, plan), "source"); !status.ok())
        return invalid(status.message());
  if (!options.synthesize && sourceFolder(options, plan).empty())
    return invalid("the job names no folder for its source, expected --source=DIR or --synthesize");
  std::error_code unknown;
  if (const std::string folder = sourceFolder(options, plan);
      !options.synthesize && options.source.empty() && !fs::exists(folder, unknown))
    return invalid("'" + folder +
                   "' does not exist: 'storage' of the job is relative to the plan's folder; --source=DIR "
                   "names another folder");
  if (!options.synthesize && targetFolder(options, plan).empty())
    return invalid(plan.manifest().endpoints()->size() > 2
                       ? "the plan has several targets, expected --target=DIR, one folder for all"
                       : "the job names no folder for its target, expected --target=DIR or --synthesize");
  const auto &endpoints = *plan.manifest().endpoints();
  const bool written = !options.synthesize && std::any_of(endpoints.begin() + 1, endpoints.end(),
                                                          [](const schema::Endpoint *e) { return e->checkpoint(); });
  if (!options.copy.empty() && !written)
    return invalid("--copy adds files to a written checkpoint, expected a target with 'storage' and no mesh");
  const bool made = options.synthesize && !options.source.empty() && endpoints.Get(0)->checkpoint();
  if (options.shardBytes > 0 && !written && !made)
    return invalid(
        "--max-shard-size applies to files of a written checkpoint, expected a target with 'storage' and no mesh");
  const bool replacesCaller = options.synthesize && options.source.empty() && options.device == "cpu";
  if (const auto transforms = namesOf(plan, &schema::Param::transform); !transforms.empty() && !replacesCaller)
    return invalid("the plan uses the transform '" + transforms[0] +
                   "', a function of the caller: expected --synthesize without --source, and --device=cpu");
  for (const schema::Endpoint *endpoint : *plan.manifest().endpoints()) {
    const bool shared =
        options.traits().processes && endpoint->storage() && endpoint != plan.manifest().endpoints()->Get(0);
    if (shared && options.synthesize)
      return invalid("the files of " + endpoint->role()->str() +
                     " belong to no single process, expected --source=DIR and --target=DIR instead of --synthesize");
    if (shared && options.device != "cpu")
      return invalid("the files of " + endpoint->role()->str() +
                     " are written by several processes, expected --device=cpu");
  }
  return {};
}

reshard_options openOptions(const ExecutionOptions &options, unsigned threads) {
  reshard_options opening = RESHARD_OPTIONS_INITIALIZER;
  opening.transport = options.transport.c_str();
  opening.device = options.device.c_str();
  opening.threads = threads;
  opening.join_seconds = options.timeout;
  opening.no_local_shortcut = options.noLocalShortcut;
  opening.rendezvous = options.rendezvous.empty() ? nullptr : options.rendezvous.c_str();
  opening.job = options.job.c_str();
  opening.insecure = options.insecure;
  return opening;
}

std::vector<std::string> namesOf(const Plan &plan, const flatbuffers::String *(schema::Param::*name)() const) {
  std::set<std::string> names;
  for (const schema::Endpoint *endpoint : *plan.manifest().endpoints())
    for (const schema::Param *param : orEmpty(endpoint->params()))
      if (const flatbuffers::String *text = (param->*name)(); text && text->size() > 0)
        names.insert(text->str());
  return {names.begin(), names.end()};
}

} // namespace reshard::tools
