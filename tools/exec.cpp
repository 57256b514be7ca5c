// SPDX-License-Identifier: Apache-2.0
// reshard-exec: runs a plan on files or on synthesized values, and checks the result.

#include "command/options.h"
#include "tools/run/execution.h"
#include "tools/run/guarded_exit.h"

#include <cstdio>

using namespace reshard;
using namespace reshard::command;
using namespace reshard::tools;

namespace {

/// The help of --transport: "threads (default: …), or one process for each rank: mpi under mpirun, …".
std::string transportHelp() {
  const TransportTraits &standard = transports().front();
  std::string help = std::string(standard.name) + " (default: " + standard.about + "), or one process for each rank: ";
  const std::vector<std::string> others = transportNames(&TransportTraits::processes);
  for (const std::string &name : others)
    help += (name == others.front() ? "" : ", ") + name + " " + findTransport(name)->about;
  return help;
}

/// The help of --rendezvous.
std::string rendezvousHelp() {
  const auto optional = [](const TransportTraits &each) { return each.rendezvous && !each.needsRendezvous; };
  return "how the processes of " + oneOf(transportNames(&TransportTraits::rendezvous), "") +
         " find each other: tcp://HOST:PORT (rank 0 serves it), file:///FOLDER, or env:// (the variables of torchrun, "
         "srun or mpirun; the default of " +
         oneOf(transportNames(optional), "") + "); a secret in RESHARD_SECRET is needed between machines";
}

Command commandOf(ExecutionOptions &options) {
  static const std::string kTransport = transportHelp(), kRendezvous = rendezvousHelp();
  // For an option that is wrong beside --synthesize, with the error.
  auto notSynthesized = [&options](const char *why, std::function<std::string(const std::string &)> set) {
    return [&options, why, set = std::move(set)](const std::string &value) {
      options.notSynthesized.emplace_back(why);
      return set(value);
    };
  };
  auto leave = [&options](const std::string &value) {
    options.objects.leave.push_back(value);
    return std::string();
  };
  auto rename = [](reshard::Renames &renames) {
    return [&renames](const std::string &value) { return renames.add(value); };
  };
  return {
      "reshard-exec",
      "PLAN ([--source=DIR] [--target=DIR] | --synthesize) [--check]",
      "Runs a plan: all ranks in this process, or one rank in each of several processes.",
      {{"--source", "DIR",
        "the source: a folder of files rank-%05d.safetensors, or a checkpoint (a folder or a file; default: `storage` "
        "of the job's source, relative to the plan's folder)",
        setText(options.source)},
       {"--target", "DIR",
        "folder to create; it appears only when it is complete; several targets: one subfolder for each (default: "
        "`storage` of the job's only target)",
        notSynthesized("--synthesize keeps the target in memory, expected no --target", setText(options.target))},
       {"--synthesize", "",
        "use values computed from (seed, tensor, element) instead of files; with --source: write source files with "
        "them and exit",
        setSwitch(options.synthesize)},
       {"--check", "",
        "compare every target byte with the value that the layouts require (with --synthesize: under two seeds)",
        setSwitch(options.check)},
       {"--check-replicas", "",
        "before the run, compare all replicas of the source with each other and name those that differ",
        setSwitch(options.checkReplicas)},
       {"--allow", "extra",
        "ignore tensors in the source's files that the plan does not use, and objects that the target cannot hold; the "
        "output names them by their patterns, the report lists all",
        notSynthesized("--allow=extra applies to files, expected no --synthesize",
                       setChoice(options.allow, {"extra"}))},
       {"--leave", "GLOB",
        "leave out the objects of the source's checkpoint with such names; all others are copied to the target; may be "
        "given several times",
        notSynthesized("--leave applies to files, expected no --synthesize", leave)},
       {"--rename", "OLD=NEW",
        "names of tensors in the source's files, as for reshard-compile, which the plan was compiled with",
        notSynthesized("--rename applies to files, expected no --synthesize", rename(options.renames))},
       {"--rename-objects", "OLD=NEW", "the same for the names of objects in the target",
        notSynthesized("--rename-objects applies to files, expected no --synthesize", rename(options.objects.renames))},
       {"--copy", "DIR",
        "copy config.json, the tokenizer and all other files of DIR, except weights, folders and hidden files, into "
        "the written checkpoint",
        notSynthesized("--copy adds files to a written checkpoint, expected no --synthesize", setText(options.copy))},
       {"--max-shard-size", "SIZE",
        "the largest size of one file of a written checkpoint (default: 5 GB, as Hugging Face)",
        setBytes(options.shardBytes)},
       {"--resume", "",
        "keep an unfinished target with a journal if this process fails or is killed, and continue one that is there, "
        "of a run with the same options",
        notSynthesized("--resume continues the writing of files, expected no --synthesize", setSwitch(options.resume))},
       {"--no-sync", "",
        "do not wait until the written files are on their device: a loss of power may damage a finished target, and "
        "later errors of the device are not reported",
        notSynthesized("--no-sync applies to written files, expected no --synthesize", setSwitch(options.noSync))},
       {"--memory", "SIZE",
        "keep the resident memory of this process, with its mapped files, below SIZE (bytes, or KiB, MiB, GiB)",
        setBytes(options.memory)},
       {"--seed", "N", "the first seed (default: 0)", setNumber(options.seed, 0, UINT64_MAX - 1)},
       {"--transport", "NAME", kTransport.c_str(), setChoice(options.transport, transportNames())},
       {"--rank", "R", "the rank of this process (default: that of the launcher)",
        setNumber(options.rank, 0, UINT32_MAX)},
       {"--rendezvous", "URL", kRendezvous.c_str(), setText(options.rendezvous)},
       {"--job", "NAME", "a name that the processes have in common, for several jobs at one rendezvous",
        setText(options.job)},
       {"--insecure", "", "without a secret, accept processes of other machines and users",
        setSwitch(options.insecure)},
       {"--no-local-shortcut", "",
        "send messages even if a peer's memory could be read directly; with nccl also from a rank to itself",
        setSwitch(options.noLocalShortcut)},
       {"--private-memory", "",
        "synthesize in memory that other processes cannot map, as a program's own memory usually is",
        setSwitch(options.privateMemory)},
       {"--device", "NAME", "cpu (default), or cuda", setChoice(options.device, transportDevices())},
       {"--threads", "N", "number of worker threads (default: all cores)", setNumber(options.threads, 1, 4096)},
       {"--repeat", "N", "number of runs (default: 1)", setNumber(options.repeat, 1, 1'000'000)},
       {"--timeout", "S",
        "deadline in seconds for each of these: joining the other processes, a run, synthesis, a comparison "
        "(default: none)",
        setSeconds(options.timeout)},
       {"--report", "FILE", "write a JSON report", setText(options.report)},
       {"--trace", "FILE", "write the times of the command's activities for Perfetto", setText(options.trace)}},
      1};
}

} // namespace

/// In place of libc's, which Open MPI calls.
extern "C" void _exit(int code) { exitByPolicy(code); }

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  ExecutionOptions options;
  std::vector<std::string> arguments;
  const Command command = commandOf(options);
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  options.plan = arguments[0];
  if (refuseOutput(command.name, "--report", options.report, {options.plan}) ||
      refuseOutput(command.name, "--trace", options.trace, {options.plan}) ||
      refuseSameOutput(command.name, "--trace", options.trace, "--report", options.report))
    return kUsage;
  const int code = execute(options);
  if (!options.traits().processes)
    return code;
  // A backend whose peers are gone may have left a thread that waits for them, so skip normal termination.
  std::fflush(nullptr);
  endProcess(code);
}
