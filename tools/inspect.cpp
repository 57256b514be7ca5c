// SPDX-License-Identifier: Apache-2.0
// reshard-inspect: shows what a plan contains, what one rank does and where a param comes from; verifies and simulates
// plans. Also lists the tensors of a checkpoint.

#include "base/glob.h"
#include "base/work_deadline.h"
#include "base/yaml/topology.h"
#include "checkpoints/unread_weights.h"
#include "command/options.h"
#include "command/terminal.h"
#include "compiler/compile.h"
#include "executor/load/load.h"
#include "report/diff/layout_difference.h"
#include "report/inspect/checkpoint_listing.h"
#include "report/inspect/inspection.h"
#include "schema/limits.h"
#include "command/common.h"
#include "tools/stored_files.h"

#include <cstdio>

using namespace reshard::analysis;
using namespace reshard::tools;

namespace {

/// --job: compiles the layouts of the job, with the options that the plan holds, and compares them with the plan's.
void verifyJob(const InspectionOptions &inspection, const std::string &job) {
  const WorkDeadline deadline("the comparison with the job", inspection.timeout);
  std::unique_ptr<reshard::Plan> plan;
  throwOnError(reshard::Plan::open(inspection.plan, plan), kUsage);
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
    throw Failure{kUsage, "cannot compile '" + job + "'"};
  const std::vector<std::byte> manifest = reshard::layoutManifest(result.module);
  const std::string found =
      layoutDifference(plan->manifest(), *flatbuffers::GetSizePrefixedRoot<reshard::schema::Manifest>(manifest.data()));
  if (!found.empty())
    throw Failure{kNegative, "the plan is not that of '" + job + "': " + found +
                                 (inputs ? "" : "; the plan does not hold the --set and --allow of its job")};
}

} // namespace

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  InspectionOptions options;
  std::vector<std::string> arguments;
  auto rank = [&](const std::string &value) {
    uint64_t number = 0;
    const std::string error = setNumber(number, 0, UINT32_MAX - 1)(value);
    options.rank = static_cast<int64_t>(number);
    return error;
  };
  auto replicas = [&](const std::string &value) {
    uint64_t number = 0;
    const std::string error = setNumber(number, 1, reshard::schema::kMaxReplicas)(value);
    options.replicas = static_cast<uint32_t>(number);
    return error;
  };
  std::string topology, job;
  Command command{
      "reshard-inspect",
      "PLAN|CHECKPOINT",
      "Prints a summary of a plan, or one of the reports below; or the tensors and objects of a checkpoint: a folder "
      "or "
      "file of safetensors, torch.distributed.checkpoint, Megatron-Core's torch_dist, or torch.save. No pickle is run.",
      {{"--rank", "N", "print every step of one rank, with param names", rank},
       {"--param", "GLOB",
        "print the target params whose names match: their contents, and the ranks that send them; of a checkpoint: the "
        "tensors whose names match, with all their chunks",
        setText(options.param)},
       {"--explain", "PARAM[@RANK]",
        "print where each part of a target param comes from, and why from there; without a rank, on the first one that "
        "has it",
        setText(options.explain)},
       {"--format", "FORMAT",
        "text (default), json, or html: a page that shows the plan, with a time line if --simulate names a cluster; "
        "needs -o",
        setChoice(options.format, {"text", "json", "html"})},
       {"-o", "FILE", "with --format=html: write the page to FILE", setText(options.output)},
       {"--verify", "", "prove that every target byte is written exactly once, from the right source byte",
        setSwitch(options.verify)},
       {"--job", "JOB", "with --verify: also prove that the plan has the layouts of this YAML file", setText(job)},
       {"--simulate", "TOPOLOGY",
        "estimate the time on the cluster that a topology file describes, with the lower bound of all plans",
        setText(topology)},
       {"--replicas", "N",
        "simulate a plan with engine replicas for N of them (default: the number in the job); needs --simulate",
        replicas},
       {"--trace", "FILE", "write the simulated activities for Perfetto; needs --simulate", setText(options.trace)},
       {"--timeout", "S", "deadline in seconds for --verify, --param, --explain and --simulate (default: none)",
        setSeconds(options.timeout)}},
      1};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.plan = arguments[0];
  if (const int count =
          (options.rank >= 0) + !options.param.empty() + !options.explain.empty() + !topology.empty() + options.verify;
      count > 1) {
    printError(command.name, "found " + std::to_string(count) +
                                 " of --rank, --param, --explain, --simulate and --verify, expected at most one");
    return kUsage;
  }
  if (!options.explain.empty() && options.format == "json") {
    printError(command.name, "--explain is text, found --format=json; --param=PARAM --format=json has the numbers");
    return kUsage;
  }
  const FileKind kind = fileKindOf(options.plan);
  if (kind == FileKind::unknown) {
    const std::string what = unreadFile(options.plan);
    printError(command.name,
               "'" + options.plan +
                   "' is neither a plan nor a checkpoint: expected a folder, or a file of safetensors or torch.save" +
                   (what.empty() ? "" : "; found " + what));
    return kUsage;
  }
  const bool checkpoint = kind == FileKind::checkpoint;
  if (checkpoint &&
      (options.rank >= 0 || !options.explain.empty() || !topology.empty() || options.verify || options.replicas > 0)) {
    printError(command.name,
               "'" + options.plan +
                   "' is a checkpoint; --rank, --explain, --simulate, --replicas and --verify need a plan");
    return kUsage;
  }
  if (refuseOutput(command.name, "--trace", options.trace, {options.plan, topology}) ||
      refuseOutput(command.name, "-o", options.output, {options.plan, topology}))
    return kUsage;
  const bool page = options.format == "html";
  if (page != !options.output.empty() ||
      (page && (checkpoint || options.rank >= 0 || !options.param.empty() || !options.explain.empty() ||
                options.verify || options.replicas > 0 || !options.trace.empty()))) {
    printError(command.name,
               page && options.output.empty() ? "--format=html needs -o=FILE"
               : page ? "--format=html is a page of a plan: expected only -o, --simulate and --timeout beside it"
                      : "-o needs --format=html");
    return kUsage;
  }
  if (!topology.empty()) {
    reshard::Diagnostics diagnostics;
    options.topology = reshard::readTopologyFile(topology, diagnostics);
    if (!options.topology) {
      printDiagnostics(diagnostics.text());
      return kUsage;
    }
  } else if (!options.trace.empty() || options.replicas > 0) {
    printError("reshard-inspect",
               std::string(options.replicas > 0 ? "--replicas" : "--trace") + " needs --simulate=TOPOLOGY");
    return kUsage;
  }
  if (!job.empty() && !options.verify) {
    printError(command.name, "--job needs --verify");
    return kUsage;
  }
  try {
    if (!job.empty())
      verifyJob(options, job);
    return checkpoint ? inspectCheckpoint(options.plan, options.param, options.format == "json") : inspect(options);
  } catch (const Failure &failure) {
    printError("reshard-inspect", failure.message);
    return failure.code;
  } catch (const std::exception &exception) {
    printError("reshard-inspect", explain(exception));
    return kFailure;
  }
}
