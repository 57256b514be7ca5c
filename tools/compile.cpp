// SPDX-License-Identifier: Apache-2.0
// reshard-compile: compiles a job (YAML) or IR text (.rir) into a plan or IR text, or prints errors.

#include "compiler/compile.h"
#include "base/atomic_file.h"
#include "base/text.h"
#include "base/work_deadline.h"
#include "checkpoints/describe.h"
#include "checkpoints/stored_checkpoint.h"
#include "command/common.h"
#include "command/options.h"
#include "command/terminal.h"
#include "compiler/pass.h"
#include "executor/load/load.h"
#include "ir/copies.h"
#include "ir/text.h"
#include "tools/run/new_folder.h"
#include "tools/stored_files.h"
#include "verify/proof/plan_verifier.h"

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <optional>
#include <set>
#include <sstream>

using namespace reshard;
using namespace reshard::checkpoints;
using namespace reshard::command;
using namespace reshard::tools;
using namespace reshard::verify;
using Json = nlohmann::ordered_json;

namespace {

constexpr const char *kName = "reshard-compile";
constexpr double kVerifySeconds = 10;

struct Options {
  CompileOptions compile;
  std::string output, emit = "plan", report, describe, keep, from, algorithm = "optimum", foldCopies = "automatic";
  std::vector<std::string> printAfter;
  bool printAll = false, omitJob = false, compress = false, noVerify = false;
  Renames renames; // gives tensors in the source's files other names
  uint64_t jobs = 0;
  std::optional<double> verifySeconds;
};

std::string printed(const ir::Module &module) {
  std::ostringstream out;
  ir::print(module, out);
  return out.str();
}

Json cuts(const LowerBounds &bounds) {
  Json result = Json::object();
  for (const Cut &cut : bounds.cuts)
    result[schema::EnumNameCutKind(static_cast<schema::CutKind>(cut.kind))] = {
        {"bytes", cut.bytes}, {"links", cut.links}, {"nics", cut.nics}, {"copies", cut.copies}};
  return result;
}

Json counts(const Statistics &s) {
  return {{"tensors", s.tensors},
          {"params", s.params},
          {"transfers", s.transfers},
          {"messages", s.messages},
          {"rounds", s.rounds},
          {"coalesce",
           {{"messages", {{"before", s.messagesBefore}, {"after", s.messages}}},
            {"in_place", {{"sends", s.steps.sendsInPlace}, {"receives", s.steps.receivesInPlace}}}}},
          {"descriptors", {{"before", s.descriptorsBefore}, {"after", s.descriptors}}},
          {"bytes",
           {{"target", s.targetBytes},
            {"local", s.localBytes},
            {"remote", s.remoteBytes},
            {"between_nodes", s.internodeBytes},
            {"between_nodes_bound", s.lowerBounds.betweenNodes},
            {"relayed", s.forwardedBytes},
            {"storage", s.storageBytes},
            {"padding", s.paddingBytes}}},
          {"lower_bounds", cuts(s.lowerBounds)},
          {"balance",
           {{"egress_max", s.egressMax},
            {"egress_bound", s.egressBound},
            {"egress_bound_without_relays", s.egressWithoutRelays},
            {"ingress_max", s.ingressMax},
            {"ingress_bound", s.ingressBound},
            {"storage_max", s.storageMax},
            {"storage_bound", s.storageBound},
            {"storage_megatron", s.storageMegatron}}}};
}

/// Saves the IR before the failed pass and prints the command that continues from it, so that the failure can be
/// reproduced elsewhere. `released`: the saved IR is incomplete.
void saveReproducer(const std::string &output, const CompileResult &result, bool released) {
  if (result.failedPass.empty())
    return;
  std::string before, rest; // the passes
  bool failed = false;
  for (const PassInfo &pass : passes()) {
    failed = failed || result.failedPass == pass.name;
    std::string &list = failed ? rest : before;
    list += (list.empty() ? "" : ",") + std::string(pass.name);
  }
  const std::string note = std::string(kName) + ": " + colored("note:");
  if (released) {
    std::fprintf(stderr, "%s to save the IR before the failed pass, repeat the command with --emit=ir --passes=%s\n",
                 note.c_str(), before.c_str());
    return;
  }
  const bool file = !output.empty() && !outputAt(output).direct;
  const std::string path = (file ? output : std::string("reshard")) + ".failed.rir";
  if (writeFile(path, printed(result.module)).ok())
    std::fprintf(stderr, "%s the IR before the failed pass is in '%s'; to continue from it: %s %s --passes=%s\n",
                 note.c_str(), path.c_str(), kName, path.c_str(), rest.c_str());
}

/// Whether an output would overwrite an input or the other output; if so, prints an error.
bool replaces(const Options &options, const std::vector<std::string> &inputs) {
  return refuseOutput(kName, "-o", options.output, inputs) || refuseOutput(kName, "--report", options.report, inputs) ||
         refuseSameOutput(kName, "--report", options.report, "-o", options.output);
}

/// Whether an output would overwrite a file that the job names as `storage`, such as a checkpoint's weights; if so,
/// prints an error. `folder`: which storage is relative to.
bool replacesStored(const Options &options, const std::filesystem::path &folder, const ir::Layout &layout) {
  for (const ir::Endpoint &endpoint : layout.endpoints)
    for (const auto &[option, output] : {std::pair("-o", options.output), std::pair("--report", options.report)}) {
      const std::string storage = folder / endpoint.directory;
      const Status status = endpoint.storage ? checkNotStored(option, output, storage, endpoint.role) : Status();
      if (status.ok())
        continue;
      printError(kName, status.message());
      return true;
    }
  return false;
}

/// --describe: writes a model YAML for a checkpoint to -o or standard output.
int describe(const Options &options) {
  Result<StoredCheckpoint> checkpoint = readStoredCheckpoint(options.describe);
  throwOnError(checkpoint.status(), kUsage);
  printNotes(checkpoint->notes);
  throwOnError(renameTensors(*checkpoint, options.renames, options.describe), kUsage);
  std::set<std::string> inputs{options.describe};
  for (const char *name : {"config.json", "model.safetensors.index.json", ".metadata", "metadata.json"})
    inputs.insert(options.describe + "/" + name);
  for (const auto &[name, tensor] : checkpoint->tensors)
    for (const StoredChunk &chunk : tensor.chunks)
      inputs.insert(options.describe + "/" + chunk.file);
  if (replaces(options, {inputs.begin(), inputs.end()}))
    return kUsage;
  std::error_code error;
  auto config = std::filesystem::absolute(options.describe + "/config.json", error)
                    .lexically_normal(); // valid from any folder of the YAML
  if (!std::filesystem::is_regular_file(config, error))
    config.clear();
  const std::string text = describeModel(checkpoint->tensors, options.describe, config);
  if (options.output.empty())
    std::cout << text;
  else
    throwOnError(writeFile(options.output, text), kFailure);
  return kDone;
}

/// The epochs in which the target ranks of an earlier plan joined.
Pinned pinnedOf(const Plan &plan) {
  Pinned pinned;
  const auto &endpoints = *plan.manifest().endpoints();
  for (uint32_t e = 1; e < endpoints.size(); ++e) {
    const schema::Endpoint &endpoint = *endpoints.Get(e);
    for (uint32_t meshRank = 0; meshRank < endpoint.ranks()->size() && !endpoint.storage(); ++meshRank) {
      const uint32_t epoch = endpoint.epochs() && endpoint.epochs()->size() > 0 ? endpoint.epochs()->Get(meshRank) : 0;
      pinned.epochs[{endpoint.role()->str(), static_cast<int32_t>(endpoint.ranks()->Get(meshRank))}] = epoch;
      pinned.next = std::max(pinned.next, epoch + 1);
    }
  }
  return pinned;
}

/// How many segments of an earlier plan are byte for byte the same in the new one; 0 if the new plan was written to a
/// pipe and cannot be read back.
int64_t sameSegments(const Plan &before, const std::string &path) {
  std::unique_ptr<Plan> after;
  if (outputAt(path).direct || !Plan::open(path, after).ok())
    return 0;
  int64_t same = 0;
  for (uint32_t rank = 0; rank < std::min(before.world(), after->world()); ++rank)
    same += before.container().segmentDigest(rank) == after->container().segmentDigest(rank);
  return same;
}

/// One compilation, from options to outputs.
class Compilation {
public:
  Compilation(std::string job, Options &options) : job_(std::move(job)), options_(options) {}

  /// Returns the exit code, or throws Failure.
  int run() {
    if (!options_.from.empty())
      readFrom();
    if (replaces(options_, options_.from.empty() ? std::vector{job_} : std::vector{job_, options_.from}))
      return kUsage;
    if (!options_.keep.empty()) {
      throwOnError(Plan::open(options_.keep, old_), kUsage);
      if (old_->manifest().folds_copies())
        throw Failure{kUsage, "'" + options_.keep +
                                  "' cannot be extended, because the copies of its job were planned as one; expected "
                                  "a plan compiled with --fold-copies=never"};
      options_.compile.pinned = pinnedOf(*old_);
    }
    expectLargeHeap();
    checkPassNames();
    const bool good = lower();
    printDiagnostics(diagnostics_.text());
    if (!good) {
      saveReproducer(options_.output, result_,
                     options_.compile.releaseIr && result_.module.level == ir::Level::transfer);
      return kUsage;
    }
    std::vector<std::string> inputs; // the job and all files that it includes
    inputs.reserve(diagnostics_.files());
    for (uint32_t file = 0; file < diagnostics_.files(); ++file)
      inputs.push_back(diagnostics_.path(file));
    if (replaces(options_, inputs) || replacesStored(options_, storageFolder(), result_.module.layout))
      return kUsage;
    if (!options_.renames.empty() && !result_.module.layout.endpoints.at(0).checkpoint)
      throw Failure{kUsage,
                    "--rename applies to the tensors of a checkpoint, expected a source with 'storage' and no 'mesh'"};
    write();
    if (!options_.report.empty())
      throwOnError(writeFile(options_.report, report().dump(2) + "\n"), kFailure);
    printResult();
    return kDone;
  }

private:
  /// --from: the plan holds the job, its files and its options; options of this command line are added.
  void readFrom() {
    std::unique_ptr<Plan> plan;
    throwOnError(Plan::open(options_.from, plan), kUsage);
    const std::optional<JobInputs> inputs = inputsOf(plan->manifest().input());
    if (!inputs || inputs->files[0].first.ends_with(".rir"))
      throw Failure{kUsage, "'" + options_.from +
                                "' does not hold its job: it was compiled from IR text, with --keep, --passes or "
                                "--omit-job, from more than 16 MiB of YAML, or by an earlier release; compile the job"};
    job_ = inputs->files[0].first;
    fromFormat_ = schema::formatOf(*plan->manifest().endpoints()->Get(0));
    diagnostics_.provide({inputs->files.begin(), inputs->files.end()});
    CompileOptions &compile = options_.compile;
    compile.overrides.insert(compile.overrides.begin(), inputs->overrides.begin(), inputs->overrides.end());
    compile.allowed.axis |= inputs->allowed.axis;
    compile.allowed.gap |= inputs->allowed.gap;
    compile.allowed.missing |= inputs->allowed.missing;
    compile.relabel |= inputs->relabel;
    compile.megatron |= inputs->megatron;
    if ((compile.relabel || compile.megatron) && !options_.keep.empty())
      throw Failure{kUsage, "'" + options_.from + "' was compiled with " +
                                (compile.relabel ? "--relabel-target" : "--algorithm=megatron") +
                                ", which --keep excludes: expected no --keep"};
  }

  /// The folder that storage is relative to: the job's, and with --from the plan's, as for reshard-exec.
  std::filesystem::path storageFolder() const {
    return std::filesystem::path(options_.from.empty() ? job_ : options_.from).parent_path();
  }

  void checkPassNames() {
    for (const std::string &name : options_.printAfter) {
      bool known = name == "resolve" || name == "parse";
      for (const PassInfo &pass : passes())
        known = known || name == pass.name;
      if (!known)
        diagnostics_.error({}, "option '--print-ir-after': unknown pass '" + name + "'");
    }
  }

  /// Runs the passes. False after errors, which are in diagnostics_.
  bool lower() {
    ProgressLine progress("compile");
    size_t passed = 0;
    options_.compile.afterPass = [&](const std::string &pass, const ir::Module &module) {
      progress.at(static_cast<double>(++passed) / static_cast<double>(passes().size() + 1)); // and that which resolves
      if (options_.printAll ||
          std::find(options_.printAfter.begin(), options_.printAfter.end(), pass) != options_.printAfter.end())
        std::fprintf(stderr, "// ---- IR after %s ----\n%s", pass.c_str(), printed(module).c_str());
    };
    options_.compile.readStoredFiles = [this](StoredRequest request) {
      if (!options_.from.empty())
        request.path = storageFolder() / request.path; // the job has only its own name
      return readStoredFiles(std::move(request), fromFormat_, options_.renames);
    };
    options_.compile.releaseIr =
        options_.emit == "plan" && !options_.printAll && options_.printAfter.empty() && !options_.compile.verifyEach;
    try {
      return diagnostics_.ok() && compileJob(job_, options_.compile, result_, diagnostics_);
    } catch (const std::exception &exception) { // the last entry of times is the pass that threw
      throw Failure{kFailure,
                    explain(exception, result_.times.empty() ? "" : " in '" + result_.times.back().pass + "'")};
    }
  }

  /// Writes the plan or the IR.
  void write() {
    if (options_.emit == "plan")
      return writePlanFile();
    const std::string text = printed(result_.module);
    if (options_.output.empty())
      std::cout << text;
    else
      throwOnError(writeFile(options_.output, text), kFailure);
  }

  void writePlanFile() {
    const double start = now();
    double proof = 0;
    std::optional<ElapsedLine> elapsed("write the plan");
    std::function<void(const std::string &)> inspect;
    if (!options_.noVerify)
      inspect = [&](const std::string &path) {
        elapsed.reset();
        const double begin = now();
        prove(path);
        proof = now() - begin;
      };
    try {
      WriteOptions options{options_.compile.jobs, nullptr, options_.compress, inspect};
      if (result_.inputs && !options_.omitJob)
        options.inputs = &*result_.inputs;
      llvm::Expected<WrittenPlan> written =
          writePlan(result_.module, *result_.ranks, result_.statistics, options_.output, options);
      elapsed.reset();
      if (!written)
        throw Failure{kFailure, toString(written.takeError())};
      plan_ = std::move(*written);
    } catch (const std::exception &exception) {
      throw Failure{kFailure, explain(exception, " in 'emit'")};
    }
    result_.statistics.steps = plan_.steps;
    result_.times.push_back({"emit", now() - start - proof});
    if (inspect)
      result_.times.push_back({"verify", proof});
    if (old_)
      std::fprintf(messageStream(), "  pinned: %lld of %u segments of %s are unchanged\n",
                   static_cast<long long>(sameSegments(*old_, options_.output)), old_->world(), options_.keep.c_str());
  }

  /// Proves the plan, which does not have its name yet. A wrong plan is removed. If the proof needs more time or memory
  /// than it may, a warning says so.
  void prove(const std::string &path) {
    const double seconds = options_.verifySeconds.value_or(kVerifySeconds);
    std::string unproven;
    try {
      std::unique_ptr<Plan> plan;
      if (const Status status = Plan::open(path, plan); !status.ok())
        throw Failure{kNegative,
                      "the plan cannot be opened, and was not written: " + withOwnName(status.message(), path)};
      VerifyResult result;
      const Status inTime = WorkDeadline::run("the proof", seconds, [&] {
        ProgressLine progress("verify");
        result = verifyPlan(*plan, [&](double fraction) { progress.at(fraction); }, options_.compile.jobs);
        return Status();
      });
      if (!result.error.empty() && !result.tooLarge)
        throw Failure{kNegative, "the plan is wrong, and was not written: " + withOwnName(result.error, path)};
      unproven = result.error;
      if (!inTime.ok()) {
        char text[96];
        std::snprintf(text, sizeof text, "the proof did not finish within %g s (--verify-seconds)", seconds);
        unproven = text;
      }
    } catch (const std::bad_alloc &exception) {
      unproven = explain(exception, " in 'verify'");
    }
    proven_ = unproven.empty();
    if (!proven_)
      std::fprintf(stderr, "%s: %s the plan is not proven: %s\n", kName, colored("warning:").c_str(),
                   printable(unproven).c_str());
  }

  /// A message about the plan at `path`, with its name instead.
  std::string withOwnName(std::string message, const std::string &path) const {
    if (const size_t at = message.find(path); at != std::string::npos)
      message.replace(at, path.size(), options_.output);
    return message;
  }

  /// Keeps the plan apart from messages if it is written to standard output.
  std::FILE *messageStream() const { return outputAt(options_.output).direct ? stderr : stdout; }

  Json report() const {
    const ir::Layout &layout = result_.module.layout;
    Json json = {{"digest", plan_.digest}, {"plan_bytes", plan_.bytes}, {"world", layout.world}};
    json.update(counts(result_.statistics));
    json["staging"] = {{"limit", layout.stagingLimit}, {"max", result_.statistics.steps.stagingMax}};
    Json passTimes = Json::object();
    for (const PassTime &time : result_.times)
      passTimes[time.pass] = time.seconds * 1e3;
    const ir::Copies copies(layout);
    json["copies"] = {{"source", copies.sources()}, {"target", copies.targets()}};
    json["unused"] = layout.unused;
    Json omitted = Json::object();
    for (const ir::Endpoint &endpoint : layout.endpoints)
      if (!endpoint.omitted.empty())
        omitted[endpoint.role] = endpoint.omitted;
    json["omitted"] = omitted;
    for (const ir::Endpoint &endpoint : layout.endpoints)
      if (options_.compile.relabel && &endpoint != &layout.endpoints[0] && !endpoint.storage)
        json["relabel"][endpoint.role] = {{"bytes_saved", endpoint.relabeled}, {"ranks", endpoint.ranks}};
    if (old_)
      json["pinned_segments"] = options_.emit == "plan" ? sameSegments(*old_, options_.output) : 0;
    json["proven"] = proven_;
    json["time_ms"] = {{"total", (now() - begin_) * 1e3}, {"passes", passTimes}};
    json["peak_rss_bytes"] = peakRssBytes();
    return json;
  }

  void printResult() const {
    const Statistics &s = result_.statistics;
    if (options_.emit == "plan")
      std::fprintf(messageStream(), "  %s: %lld transfers in %lld messages, %s of %s remote, plan of %s\n",
                   printable(options_.output).c_str(), static_cast<long long>(s.transfers),
                   static_cast<long long>(s.messages), humanBytes(static_cast<double>(s.remoteBytes)).c_str(),
                   humanBytes(static_cast<double>(s.targetBytes)).c_str(),
                   humanBytes(static_cast<double>(plan_.bytes)).c_str());
  }

  const double begin_ = now();
  std::string job_;
  Options &options_;
  StorageFormat fromFormat_ = StorageFormat::safetensors; // the format of --from's source
  std::unique_ptr<Plan> old_;                             // the plan of --keep
  CompileResult result_;
  Diagnostics diagnostics_;
  WrittenPlan plan_;
  bool proven_ = false;
};

/// Adds the items of a list that commas separate.
std::string append(std::vector<std::string> &list, const std::string &value) {
  for (size_t at = 0; at <= value.size();) {
    const size_t comma = std::min(value.find(',', at), value.size());
    if (comma > at)
      list.push_back(value.substr(at, comma - at));
    at = comma + 1;
  }
  return list.empty() ? "the list is empty" : "";
}

std::string allow(Allowed &allowed, const std::string &value) {
  std::vector<std::string> names;
  if (std::string error = append(names, value); !error.empty())
    return error;
  for (const std::string &name : names) {
    bool *known = name == "axis"      ? &allowed.axis
                  : name == "gap"     ? &allowed.gap
                  : name == "missing" ? &allowed.missing
                                      : nullptr;
    if (!known)
      return "found '" + name + "', expected axis, gap or missing";
    *known = true;
  }
  return {};
}

std::string addOverride(std::vector<std::string> &overrides, const std::string &value) {
  overrides.push_back(value);
  return value.find('=') == std::string::npos || value[0] == '=' ? "found '" + value + "', expected a.b=value"
                                                                 : std::string();
}

/// The help of --passes.
const std::string &passNames() {
  static const std::string text = [] {
    std::string names = "run only these passes, in this order (";
    for (const PassInfo &pass : passes())
      names += (names.back() == '(' ? "" : ", ") + std::string(pass.name);
    return names + ")";
  }();
  return text;
}

/// A setter that calls set(target, value).
template <class Set, class Target> auto setter(Set set, Target &target) {
  return [set, &target](const std::string &value) { return set(target, value); };
}

Command commandOf(Options &options) {
  return {
      kName,
      "JOB.yaml|IR.rir -o PLAN, or --from=PLAN -o NEW",
      "Compiles a job into a plan. Errors show the file, line and column.",
      {{"-o", "FILE", "write the plan to FILE, or with --emit=ir|layout the text (default: standard output)",
        setText(options.output)},
       {"--set", "a.b=c", "override a value of the job or of its model; may be repeated",
        setter(addOverride, options.compile.overrides)},
       {"--allow", "LIST",
        "turn these errors into warnings: axis (an unknown axis has size 1), gap (no source rank holds some elements, "
        "and no target needs them), missing (target params that the source lacks are omitted)",
        setter(allow, options.compile.allowed)},
       {"--emit", "KIND", "what to write: plan (default), ir (fully lowered), or layout (after resolve)",
        setChoice(options.emit, {"plan", "ir", "layout"})},
       {"--report", "FILE", "write a JSON report: counts of transfers, messages and bytes, times of the passes",
        setText(options.report)},
       {"--keep", "PLAN",
        "extend PLAN, compiled from this job with fewer target ranks: its routes and messages are pinned, and ranks "
        "whose transfers are the same keep their segments byte for byte",
        setText(options.keep)},
       {"--from", "PLAN",
        "compile again the job that PLAN holds, with the --set, --allow, --relabel-target and --algorithm of PLAN and "
        "those given here, in place of a job file. PLAN also holds the YAML files that the job names. Other files are "
        "read again, such as a folder of 'storage' with 'dtype: stored'; their paths are relative to the current "
        "folder",
        setText(options.from)},
       {"--compress", "",
        "compress the segments of the plan to about a fifth; each command and process that reads the plan then needs "
        "libzstd, and keeps in memory what it has decompressed. --from does not keep this option",
        setSwitch(options.compress)},
       {"--omit-job", "", "do not store the job in the plan: --from cannot use the plan", setSwitch(options.omitJob)},
       {"--relabel-target", "",
        "assign each target's world ranks to its mesh ranks so that most bytes stay local; the report has the "
        "assignment",
        setSwitch(options.compile.relabel)},
       {"--algorithm", "NAME",
        "how parts of a checkpoint are assigned to the ranks that read or write them: optimum (default: minimizes the "
        "bytes of the busiest rank), or megatron (whole shards, in Megatron-Core's order)",
        setChoice(options.algorithm, {"optimum", "megatron"})},
       {"--fold-copies", "WHEN",
        "plan the copies of a job as one: ranks that hold the same elements as others, on sides that share no rank, in "
        "a network without nodes. automatic (default: in jobs of 1024 ranks or more, which then compile several times "
        "as fast), always, or never (--keep extends only such a plan). --from does not keep this option",
        setChoice(options.foldCopies, {"automatic", "always", "never"})},
       {"--describe", "DIR",
        "print a first model YAML, made from the headers of the checkpoint DIR, which may also be a file; takes no job",
        setText(options.describe)},
       {"--rename", "OLD=NEW",
        "names of tensors in the files of the source, or of --describe, that begin with OLD begin with NEW in the job; "
        "with * in OLD a glob of whole names: '*._orig_mod.*=*.*'; reshard-exec needs the same option; may be given "
        "several times",
        [&options](const std::string &value) { return options.renames.add(value); }},
       {"--jobs", "N", "number of threads (default: all cores); the plan does not depend on it",
        setNumber(options.jobs, 1, 1024)},
       {"--passes", "LIST", passNames().c_str(), setter(append, options.compile.passes)},
       {"--print-ir-after", "PASS", "print the IR after these passes, on standard error",
        setter(append, options.printAfter)},
       {"--print-ir-after-all", "", "print the IR after every pass, on standard error", setSwitch(options.printAll)},
       {"--verify-seconds", "S",
        "how long the proof of the plan may take (default: 10). Every plan is proven before it has its name: each "
        "target byte is written exactly once, from the right source byte. A wrong plan is an error and leaves no file; "
        "one whose proof does not finish is written, with a warning",
        [&options](const std::string &value) { return setSeconds(options.verifySeconds.emplace())(value); }},
       {"--no-verify", "", "write the plan without a proof", setSwitch(options.noVerify)},
       {"--verify-each", "", "verify the IR after every pass", setSwitch(options.compile.verifyEach)}},
      1};
}

/// Whether options contradict each other; if so, prints an error.
bool contradict(const Options &options) {
  std::string error;
  if (!options.from.empty() && !options.describe.empty())
    error = "--from compiles a job, but --describe prints a model: expected only one of the two options";
  else if (options.compile.relabel && !options.keep.empty())
    error =
        "--relabel-target changes the assignment of ranks, but --keep pins it: expected only one of the two options";
  else if (options.algorithm == "megatron" && !options.keep.empty())
    error = "--algorithm=megatron changes the assignment of shards, but --keep pins it: expected only one of the two "
            "options";
  else if (options.emit == "plan" && options.output.empty() && options.describe.empty())
    error = "no output file: expected -o PLAN";
  else if (options.noVerify && options.verifySeconds)
    error = "--verify-seconds limits the proof that --no-verify leaves out: expected only one of the two options";
  else if ((options.noVerify || options.verifySeconds) && (options.emit != "plan" || !options.describe.empty()))
    error = std::string(options.noVerify ? "--no-verify" : "--verify-seconds") +
            " is about the proof of a plan: expected neither --emit nor --describe";
  if (!error.empty())
    printError(kName, error);
  return !error.empty();
}

} // namespace

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  Options options;
  std::vector<std::string> arguments;
  Command command = commandOf(options);
  for (int i = 1; i < argc; ++i) // --describe and --from take no job
    if (const std::string_view argument = argv[i]; argument.starts_with("--describe") || argument.starts_with("--from"))
      command.arguments = 0;
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  if (contradict(options))
    return kUsage;
  options.compile.jobs = static_cast<unsigned>(options.jobs);
  options.compile.megatron = options.algorithm == "megatron";
  options.compile.foldCopies = options.foldCopies == "always"  ? FoldCopies::always
                               : options.foldCopies == "never" ? FoldCopies::never
                                                               : FoldCopies::automatic;
  if (options.emit == "layout")
    options.compile.stopAfter = ir::Level::layout;
  return runCommand(kName, [&] {
    return options.describe.empty() ? Compilation(options.from.empty() ? arguments[0] : "", options).run()
                                    : describe(options);
  });
}
