// SPDX-License-Identifier: Apache-2.0
// reshard-digest: digests of the tensors in files, which are the same in every format and layout; compares two of them.

#include "checkpoints/stored_format.h"
#include "command/common.h"
#include "command/options.h"
#include "command/terminal.h"
#include "executor/load/load.h"
#include "tools/run/new_folder.h"
#include "tools/run/tensor_digests.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <thread>

using namespace reshard;
using namespace reshard::checkpoints;
using namespace reshard::command;
using namespace reshard::tools;

namespace {

struct DigestOptions {
  std::string plan, side, format = "text";
  Renames renames;
  bool model = false;
};

void print(const TensorDigests &digests, bool json) {
  using Json = nlohmann::ordered_json;
  Json list = Json::object();
  for (const auto &[name, tensor] : digests) {
    if (json) // operator[] would look at all members
      list.get_ref<Json::object_t &>().emplace_back(
          name,
          Json{{"dtype", schema::dtypeName(tensor.dtype)}, {"shape", tensor.shape}, {"digest", tensor.digest.text()}});
    else
      std::printf("%s  %s\n", tensor.digest.text().c_str(), printable(name).c_str());
  }
  if (json)
    std::printf("%s\n", list.dump(2).c_str());
}

/// The number of the endpoint of that role.
uint32_t endpointNamed(const Plan &plan, const std::string &role) {
  const auto &endpoints = *plan.manifest().endpoints();
  std::string known;
  for (uint32_t e = 0; e < endpoints.size(); ++e) {
    if (endpoints.Get(e)->role()->str() == role)
      return e;
    known += (known.empty() ? "" : ", ") + endpoints.Get(e)->role()->str();
  }
  throw Failure{kUsage,
                "the plan has no side '" + role + "'; its sides are " + printable(known) + ": name one with --side"};
}

/// Compares the files of a checkpoint with the hashes that it states, if it does.
void verifyHashes(const std::string &path) {
  if (!std::filesystem::is_directory(path))
    return;
  ProgressLine progress("compare with integrity.json");
  throwOnError(verifyIntegrity(path, std::max(1u, std::thread::hardware_concurrency()),
                               [&](double fraction) { progress.at(fraction); })
                   .status(),
               kUsage);
}

int digest(const DigestOptions &options, const std::vector<std::string> &paths) {
  std::unique_ptr<Plan> plan;
  if (!options.plan.empty())
    throwOnError(Plan::open(options.plan, plan), kUsage);
  std::vector<TensorDigests> sides;
  for (size_t i = 0; i < paths.size(); ++i) {
    const std::string side = paths.size() == 2 ? (i == 0 ? "source" : "target") : options.side;
    sides.push_back(valueOrThrow(plan ? digestsOfSide(*plan, endpointNamed(*plan, side), paths[i])
                                      : digestsOfCheckpoint(paths[i], i == 0 ? options.renames : Renames())));
    verifyHashes(paths[i]); // after the errors of the files themselves
  }
  if (options.model) {
    const std::set<std::string> others = sides.size() == 1 ? keepModel(sides[0]) : keepModels(sides[0], sides[1]);
    if (!others.empty())
      std::fprintf(stderr, "%s left out: %s beside the model: %s\n", colored("note:").c_str(),
                   counted(others.size(), "tensor").c_str(), printable(patternsOf(others)).c_str());
  }
  if (sides.size() == 1) {
    print(sides[0], options.format == "json");
    return kDone;
  }
  if (plan) // a target need not have all tensors of its source
    std::erase_if(sides[0], [&](const auto &each) { return !sides[1].contains(each.first); });
  const std::vector<std::string> lines = differences(sides[0], paths[0], sides[1], paths[1]);
  if (options.format == "json")
    std::printf("%s\n", nlohmann::ordered_json{{"tensors", sides[0].size()}, {"differences", lines}}.dump(2).c_str());
  else
    for (const std::string &line : lines)
      std::printf("%s\n", printable(line).c_str());
  if (!lines.empty()) {
    const std::string rule = plan || !options.renames.empty() ? "" : renameHint(sides[0], sides[1]);
    const bool model = rule == "model.=" || rule == "=model.";
    throw Failure{
        kNegative,
        counted(lines.size(), "tensor") + " of '" + paths[0] + "' and '" + paths[1] + "' differ" +
            (rule.empty() ? "" : ", most by name: --rename=" + rule + " renames those of '" + paths[0] + "'") +
            (model ? ", --model compares the model of dcp.save({\"model\": ...}) alone" : "")};
  }
  if (options.format != "json")
    std::printf("equal: %s\n", counted(sides[0].size(), "tensor").c_str());
  return kDone;
}

} // namespace

int main(int argc, char **argv) {
  ignoreFileSizeSignal();
  DigestOptions options;
  std::vector<std::string> arguments;
  Command command{
      "reshard-digest",
      "FILES [FILES]",
      "Prints a digest of each tensor in a checkpoint of any format, which does not depend on files, chunks "
      "or ranks; with two checkpoints, compares them. Exits with 1 if they differ.",
      {{"--plan", "PLAN",
        "FILES are those of the plan's sides: with two, of its source and of its target, compared "
        "tensor by tensor through the layouts; replicas count once, padding does not",
        setText(options.plan)},
       {"--side", "SIDE",
        "with --plan and one FILES: source, target, or of several targets target.0, target.1 and so on",
        setText(options.side)},
       {"--rename", "OLD=NEW",
        "names of tensors of the first FILES that begin with OLD begin with NEW; with * in OLD a glob of whole names: "
        "'*._orig_mod.*=*.*'; may be given several times",
        [&options](const std::string &value) { return options.renames.add(value); }},
       {"--model", "",
        "of files of dcp.save({\"model\": ..., \"optimizer\": ...}), the tensors of the model alone, without 'model.'; "
        "of "
        "two FILES, those of the sides where names then agree",
        setSwitch(options.model)},
       {"--format", "FORMAT", "text (default) or json", setChoice(options.format, {"text", "json"})}},
      1,
      1};
  if (const int code = parseFlags(command, argc, argv, arguments); code >= 0)
    return code;
  if (options.side.empty() != (options.plan.empty() || arguments.size() == 2)) {
    printError(command.name, options.side.empty() ? "--plan and one FILES need --side=source or --side=target"
                                                  : "--side needs --plan and one FILES");
    return kUsage;
  }
  if (!options.plan.empty() && (options.model || !options.renames.empty())) {
    printError(command.name, "--plan gives tensors the names of the model, expected neither --rename nor --model");
    return kUsage;
  }
  return runCommand(command.name, [&] {
    watchSignals(command.name); // a file may be truncated while it is read
    return digest(options, arguments);
  });
}
