// SPDX-License-Identifier: Apache-2.0
// reshard-inspect: shows what a plan contains, what one rank does and where a param comes from; verifies and simulates
// plans. Also lists the tensors of a checkpoint.

#include "base/text.h"
#include "base/work_deadline.h"
#include "base/yaml/topology.h"
#include "checkpoints/stored_checkpoint.h"
#include "command/common.h"
#include "command/options.h"
#include "command/terminal.h"
#include "compiler/compile.h"
#include "executor/load/load.h"
#include "report/diff/difference.h"
#include "report/inspect/inspection.h"
#include "schema/limits.h"
#include "tools/stored_files.h"

#include <cstdio>

using namespace reshard::checkpoints;
using namespace reshard::command;
using namespace reshard::report;
using namespace reshard::tools;

namespace {

constexpr const char *kName = "reshard-inspect";

/// The command line.
struct CommandLine {
  InspectionOptions report;
  std::string topology, job; // files
};

/// --job: compiles the layouts of the job, with the options that the plan holds, and compares them with the plan's.
reshard::Status verifyJob(const std::string &path, const std::string &job) {
  std::unique_ptr<reshard::Plan> plan;
  throwOnError(reshard::Plan::open(path, plan), kUsage);
  reshard::CompileOptions options;
  const auto inputs = reshard::inputsOf(plan->manifest().input());
  if (inputs) {
    options.overrides = inputs->overrides;
    options.allowed = inputs->allowed;
    options.relabel = inputs->relabel;
    options.megatron = inputs->megatron;
  }
  options.readStoredFiles = [&](reshard::StoredRequest request) {
    return readStoredFiles(std::move(request), formatOf(*plan->manifest().endpoints()->Get(0)));
  };
  options.passes = {"overlap", "convert"}; // `convert` completes the layouts
  if (options.relabel)
    options.passes.emplace_back("relabel");
  reshard::CompileResult result;
  reshard::Diagnostics diagnostics;
  const bool good = compileJob(job, options, result, diagnostics);
  printDiagnostics(diagnostics.text());
  if (!good)
    return reshard::invalid("cannot compile '" + job + "'");
  const std::vector<std::byte> manifest = reshard::layoutManifest(result.module);
  const std::string found =
      layoutDifference(plan->manifest(), *flatbuffers::GetSizePrefixedRoot<reshard::schema::Manifest>(manifest.data()));
  return found.empty() ? reshard::Status()
                       : reshard::negative("the plan is not that of '" + job + "': " + found +
                                           (inputs ? "" : "; the plan does not hold the --set and --allow of its job"));
}

Command commandOf(CommandLine &options) {
  return {
      kName,
      "PLAN|CHECKPOINT",
      "Prints a summary of a plan, or one of the reports below; or the tensors and objects of a checkpoint, which is a "
      "folder or a file (--list-formats: of which formats). No pickle is run.",
      {{"--rank", "N", "print every step of one rank, with param names",
        setNumber(options.report.rank, 0, UINT32_MAX - 1)},
       {"--param", "GLOB",
        "print the target params whose names match: their contents, and the ranks that send them; of a checkpoint: the "
        "tensors whose names match, with all their chunks",
        setText(options.report.param)},
       {"--explain", "PARAM[@RANK]",
        "print where each part of a target param comes from, and why from there; without a rank, on the first one that "
        "has it",
        setText(options.report.explain)},
       {"--format", "FORMAT",
        "text (default), json, or html: a page that shows the plan, with a time line if --simulate names a cluster; "
        "needs -o",
        setChoice(options.report.format, {"text", "json", "html"})},
       {"-o", "FILE", "with --format=html: write the page to FILE", setText(options.report.output)},
       {"--verify", "", "prove that every target byte is written exactly once, from the right source byte",
        setSwitch(options.report.verify)},
       {"--job", "JOB", "with --verify: also prove that the plan has the layouts of this YAML file",
        setText(options.job)},
       {"--simulate", "TOPOLOGY",
        "estimate the time on the cluster that a topology file describes, with the lower bound of all plans",
        setText(options.topology)},
       {"--replicas", "N",
        "simulate a plan with engine replicas for N of them (default: the number in the job); needs --simulate",
        setNumber(options.report.replicas, 1, reshard::schema::kMaxReplicas)},
       {"--trace", "FILE", "write the simulated activities for Perfetto; needs --simulate",
        setText(options.report.trace)},
       {"--timeout", "S", "deadline in seconds for --verify, --param, --explain and --simulate (default: none)",
        setSeconds(options.report.timeout)}},
      1};
}

/// Throws Failure if options contradict each other or the kind of the file.
void refuseContradictions(const CommandLine &options, FileKind kind) {
  const InspectionOptions &report = options.report;
  const auto refuse = [](const std::string &message) { throw Failure{kUsage, message}; };
  const bool simulate = !options.topology.empty(), checkpoint = kind == FileKind::checkpoint;
  const int reports = (report.rank >= 0) + !report.param.empty() + !report.explain.empty() + simulate + report.verify;
  if (reports > 1)
    refuse("found " + std::to_string(reports) +
           " of --rank, --param, --explain, --simulate and --verify, expected at most one");
  if (!report.explain.empty() && report.format == "json")
    refuse("--explain is text, found --format=json; --param=PARAM --format=json has the numbers");
  if (kind == FileKind::unknown) {
    const std::string what = unreadFile(report.plan);
    refuse("'" + report.plan + "' is neither a plan nor a checkpoint: expected a folder, or a file of " +
           reshard::oneOf(
               reshard::storageFormatTexts(&reshard::StorageFormatRow::title, &reshard::StorageFormatRow::file), "") +
           (what.empty() ? "" : "; found " + what));
  }
  if (checkpoint && (report.rank >= 0 || !report.explain.empty() || simulate || report.verify || report.replicas > 0))
    refuse("'" + report.plan + "' is a checkpoint; --rank, --explain, --simulate, --replicas and --verify need a plan");
  const bool page = report.format == "html";
  if (page && report.output.empty())
    refuse("--format=html needs -o=FILE");
  if (!page && !report.output.empty())
    refuse("-o needs --format=html");
  if (page && (checkpoint || report.rank >= 0 || !report.param.empty() || !report.explain.empty() || report.verify ||
               report.replicas > 0 || !report.trace.empty()))
    refuse("--format=html is a page of a plan: expected only -o, --simulate and --timeout beside it");
  if (!simulate && (!report.trace.empty() || report.replicas > 0))
    refuse(std::string(report.replicas > 0 ? "--replicas" : "--trace") + " needs --simulate=TOPOLOGY");
  if (!options.job.empty() && !report.verify)
    refuse("--job needs --verify");
}

int run(CommandLine &options) {
  InspectionOptions &report = options.report;
  const FileKind kind = fileKindOf(report.plan);
  refuseContradictions(options, kind);
  if (refuseOutput(kName, "--trace", report.trace, {report.plan, options.topology}) ||
      refuseOutput(kName, "-o", report.output, {report.plan, options.topology}))
    return kUsage;
  if (!options.topology.empty()) {
    reshard::Diagnostics diagnostics;
    report.topology = reshard::readTopologyFile(options.topology, diagnostics);
    if (!report.topology) {
      printDiagnostics(diagnostics.text());
      return kUsage;
    }
  }
  if (!options.job.empty())
    throwOnError(reshard::WorkDeadline::run("the comparison with the job", report.timeout,
                                            [&] { return verifyJob(report.plan, options.job); }));
  if (kind == FileKind::checkpoint)
    throwOnError(inspectCheckpoint(report.plan, report.param, report.format == "json"), kUsage);
  else
    throwOnError(inspect(report));
  return kDone;
}

} // namespace

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  CommandLine options;
  std::vector<std::string> arguments;
  Command command = commandOf(options);
  command.flags.push_back({"--list-formats", "",
                           "print the formats of checkpoints as JSON; takes no PLAN or CHECKPOINT",
                           [&command](const std::string &) {
                             command.arguments = 0;
                             return std::string();
                           }});
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  if (command.arguments == 0)
    return runCommand(kName, [] {
      listFormats();
      return kDone;
    });
  options.report.plan = arguments[0];
  return runCommand(kName, [&] { return run(options); });
}
