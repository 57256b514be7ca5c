// SPDX-License-Identifier: Apache-2.0
#include "compiler/compile.h"

#include "base/yaml/fields.h"
#include "schema/limits.h"
#include "schema/plan_generated.h"

#include <map>

namespace reshard {
namespace {

constexpr const char *kOverride = "--set"; // the path of an option in Diagnostics

/// The path by which the compiler looks for a file if the job is in the current folder. The folder of the job is no
/// part of it, so that plans do not depend on where they are compiled.
std::string pathOf(const Diagnostics &diagnostics, uint32_t job, uint32_t file) {
  const std::string &path = diagnostics.path(file);
  uint32_t root = file;
  while (diagnostics.from(root) != root)
    root = diagnostics.from(root);
  const std::string prefix = joinPath(folderOf(diagnostics.path(job)), "");
  return root == job && path.starts_with(prefix) ? path.substr(prefix.size()) : path;
}

} // namespace

std::optional<JobInputs> inputsOf(const Diagnostics &diagnostics, uint32_t job, const CompileOptions &options) {
  if (options.pinned || !options.passes.empty())
    return std::nullopt;
  JobInputs inputs{{}, options.overrides, options.allowed, options.relabel, options.megatron};
  std::map<std::string, std::string> known;
  uint64_t bytes = 0;
  for (const std::string &text : options.overrides)
    bytes += text.size();
  for (uint32_t file = job; file < diagnostics.files(); ++file) {
    if (diagnostics.path(file) == kOverride && diagnostics.from(file) == file)
      continue;
    std::string path = pathOf(diagnostics, job, file);
    const std::string &text = diagnostics.text(file);
    const auto [at, added] = known.emplace(path, text);
    if (!added && at->second != text)
      return std::nullopt;
    if (!added)
      continue;
    bytes += path.size() + text.size();
    inputs.files.emplace_back(std::move(path), text);
  }
  if (bytes > schema::kMaxInputBytes || inputs.files.size() > schema::kMaxInputFiles)
    return std::nullopt;
  return inputs;
}

std::optional<JobInputs> inputsOf(const schema::JobInput *stored) {
  if (!stored)
    return std::nullopt;
  JobInputs inputs;
  for (const schema::InputFile *file : *stored->files())
    inputs.files.emplace_back(file->path()->str(), file->text()->str());
  for (uint32_t o = 0; stored->overrides() && o < stored->overrides()->size(); ++o)
    inputs.overrides.push_back(stored->overrides()->Get(o)->str());
  inputs.allowed.axis = stored->allow_axis();
  inputs.allowed.gap = stored->allow_gap();
  inputs.allowed.missing = stored->allow_missing();
  inputs.relabel = stored->relabel();
  inputs.megatron = stored->megatron();
  return inputs;
}

} // namespace reshard
