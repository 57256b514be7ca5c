// reshard-exec: runs a plan on files or on synthesised values, and checks what came out.

#include "tools/execution.h"
#include "tools/guarded_exit.h"

#include <cstdio>

using namespace reshard::tools;

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  ExecutionOptions options;
  uint64_t threads = 0;
  std::vector<std::string> arguments;
  Command command{
      "reshard-exec",
      "PLAN ([--source=DIR] [--target=DIR] | --synthesize) [--check]",
      "Runs a plan: all of its ranks in this process, or one in each of several.",
      {{"--source", "DIR",
        "folder of the source: rank-%05d.safetensors, or a checkpoint (default: `storage` of the job's source, from "
        "the plan's folder on)",
        setText(options.source)},
       {"--target", "DIR",
        "folder to make: it appears complete or not at all; several pools: one folder each in it (default: `storage` "
        "of the job's only target)",
        setText(options.target)},
       {"--synthesize", "",
        "values made from (seed, tensor, element) in place of files; with --source alone: write them there",
        setSwitch(options.synthesize)},
       {"--check", "", "compare every target byte with what the layouts say it must be (synthesised: under two seeds)",
        setSwitch(options.check)},
       {"--check-replicas", "",
        "before anything moves, compare all that the source holds more than once; differences are named",
        setSwitch(options.checkReplicas)},
       {"--allow", "extra",
        "leave tensors of the source's files that the plan does not know where they are; the first are named, the "
        "report lists all",
        setChoice(options.allow, {"extra"})},
       {"--copy", "DIR",
        "put config.json, the tokenizer and all else of DIR but weights, folders and hidden files beside the written "
        "checkpoint",
        setText(options.copy)},
       {"--max-shard-size", "SIZE",
        "begin another file of a checkpoint before one has more than SIZE (5 GB, as Hugging Face)",
        setBytes(options.shardBytes)},
       {"--memory", "SIZE", "keep what is resident of files below SIZE (bytes, or KiB, MiB, GiB)",
        setBytes(options.memory)},
       {"--seed", "N", "the first seed (0)", setNumber(options.seed, 0, UINT64_MAX - 1)},
       {"--transport", "NAME", "threads (default), or a process for each rank: mpi under mpirun, nccl on GPUs",
        setChoice(options.transport, {"threads", "mpi", "nccl"})},
       {"--no-local-shortcut", "",
        "messages even where memory of a peer could be reached directly; with nccl a rank's to itself as well",
        setSwitch(options.noLocalShortcut)},
       {"--device", "NAME", "cpu (default), or cuda", setChoice(options.device, {"cpu", "cuda"})},
       {"--threads", "N", "workers (all cores)", setNumber(threads, 1, 4096)},
       {"--repeat", "N", "runs (1)", setNumber(options.repeat, 1, 1'000'000)},
       {"--timeout", "S",
        "deadline in seconds of each of these: joining the other processes, a run, synthesis, a comparison (none)",
        setSeconds(options.timeout)},
       {"--report", "FILE", "write a JSON report", setText(options.report)},
       {"--trace", "FILE", "write the phases for Perfetto", setText(options.trace)}},
      1};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.plan = arguments[0];
  if (refuseOutput(command.name, "--report", options.report, {options.plan}) ||
      refuseOutput(command.name, "--trace", options.trace, {options.plan}) ||
      refuseSameOutput(command.name, "--trace", options.trace, "--report", options.report))
    return kUsage;
  options.threads = static_cast<unsigned>(threads);
  const int code = execute(options);
  if (options.transport == "threads")
    return code;
  // A backend whose peers are gone may have left a thread waiting for them.
  std::fflush(nullptr);
  endProcess(code);
}
