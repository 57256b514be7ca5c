// SPDX-License-Identifier: Apache-2.0
// Reads the job: the file, included files, --set, endpoints and options.

#include "base/hash.h"
#include "base/text.h"
#include "base/yaml/topology.h"
#include "compiler/frontend/reading.h"

#include "llvm/ADT/STLFunctionalExtras.h"

#include <algorithm>
#include <unordered_set>

namespace reshard {

namespace {

/// XXH3-128 of the texts of all files from number `first` on, in hexadecimal. Each --set option is such a file. Paths
/// are not included.
std::string fingerprint(const Diagnostics &diagnostics, uint32_t first) {
  Digester digester;
  for (uint32_t file = first; file < diagnostics.files(); ++file) {
    const std::string &text = diagnostics.text(file);
    unsigned char size[8];
    for (int i = 0; i < 8; ++i)
      size[i] = static_cast<unsigned char>(static_cast<uint64_t>(text.size()) >> (8 * i));
    digester.add(size, sizeof(size));
    digester.add(text.data(), text.size());
  }
  return hexadecimal(digester.digest());
}

/// Reads a number of bytes, quoted or not.
std::optional<int64_t> readBytes(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  const Result<int64_t> bytes = parseBytes(node.kind == Node::Kind::scalar ? node.text : "");
  if (bytes.ok())
    return *bytes;
  refuse(node, bytes.status().message(), what, diagnostics);
  return std::nullopt;
}

/// The first key of a path: the longest key of the map that is a prefix of the path, because keys such as tensor names
/// may contain dots; if there is none, the text before the first dot.
std::string firstKey(const Node &map, const std::string &path) {
  std::string best;
  for (const auto &[key, value] : map.entries)
    if (key.text.size() > best.size() && path.starts_with(key.text) &&
        (path.size() == key.text.size() || path[key.text.size()] == '.'))
      best = key.text;
  return best.empty() ? path.substr(0, path.find('.')) : best;
}

/// Applies `--set a.b=c` to the tree of a job. `include` replaces the path of an included file by the map in that file;
/// it returns false after an error.
void setOverride(Node &job, const std::string &assignment,
                 llvm::function_ref<bool(Node &node, std::string_view path)> include, Diagnostics &diagnostics) {
  const uint32_t file = diagnostics.addFile("--set", assignment);
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) {
    diagnostics.error({file, 1, 1}, "expected KEY=VALUE, found '" + assignment + "'");
    return;
  }
  const auto value = parseYaml(file, diagnostics, equals + 1);
  if (!value)
    return;
  const std::string path = assignment.substr(0, equals);
  Node *node = &job;
  for (size_t begin = 0; begin <= path.size();) {
    const Location at{file, 1, static_cast<uint32_t>(begin + 1)};
    const std::string before = path.substr(0, begin == 0 ? 0 : begin - 1);
    if (node->kind == Node::Kind::scalar && !include(*node, before))
      return;
    if (node->kind == Node::Kind::null && begin > 0)
      node->kind = Node::Kind::map;
    if (node->kind != Node::Kind::map) {
      diagnostics.error(at, "expected a map at " + (before.empty() ? "the top of the job" : "'" + before + "'") +
                                ", found " + describe(*node));
      return;
    }
    const std::string key = firstKey(*node, path.substr(begin));
    if (key.empty()) {
      diagnostics.error(at, "expected a key, found '" + path.substr(begin) + "'");
      return;
    }
    Node *next = node->find(key);
    if (!next) {
      Node name{Node::Kind::scalar, at, false, key, {}, {}};
      next = &node->entries.emplace_back(Node::Entry{std::move(name), {Node::Kind::null, at, false, {}, {}, {}}}).value;
    }
    node = next;
    begin += key.size() + 1;
  }
  *node = std::move(*value);
}

class JobReader {
public:
  JobReader(const std::string &path, const Allowed &allowed, const ReadStoredFiles &readStoredFiles,
            Diagnostics &diagnostics)
      : allowed_(allowed), readStoredFiles_(readStoredFiles), diagnostics_(diagnostics) {
    job_.path = path;
  }

  std::optional<Job> read(const std::vector<std::string> &overrides) {
    const size_t errorsBefore = diagnostics_.errors();
    const uint32_t firstFile = diagnostics_.files();
    const auto file = readFile(job_.path, {firstFile, 0, 0}, diagnostics_);
    const auto root = file ? parseYaml(*file, diagnostics_) : nullptr;
    if (!root)
      return std::nullopt;
    job_.at = root->at;
    for (const std::string &assignment : overrides)
      setOverride(
          *root, assignment, [this](Node &node, std::string_view at) { return this->include(node, at); }, diagnostics_);
    readTop(*root);
    if (diagnostics_.errors() > errorsBefore)
      return std::nullopt;
    job_.fingerprint = fingerprint(diagnostics_, firstFile);
    return std::move(job_);
  }

private:
  /// Replaces the path of the model file or topology file by the map in that file. False after an error.
  bool include(Node &node, std::string_view at) {
    const bool model = at == "model";
    if (!model && at != "options.topology")
      return true;
    if (failed_) // the error was already reported
      return false;
    failed_ = true;
    const auto path = readText(node, "'" + std::string(at) + "'", diagnostics_);
    const auto file = path ? readFile(joinPath(folderOf(diagnostics_.path(node.at.file)), *path), node.at, diagnostics_)
                           : std::nullopt;
    const auto root = file ? parseYaml(*file, diagnostics_) : nullptr;
    if (!root)
      return false;
    if (root->kind != Node::Kind::map) {
      refuse(*root, "a map", "'" + std::string(at) + "'", diagnostics_);
      return false;
    }
    node = std::move(*root);
    if (model)
      job_.model.path = diagnostics_.path(*file);
    failed_ = false;
    return true;
  }

  void readTop(Node &root) {
    Fields fields(root, "the job", diagnostics_);
    if (!fields.isMap())
      return;
    if (const Node *version = fields.require("version"))
      readInteger(*version, "'version'", 1, 1, diagnostics_);
    const bool model = fields.require("model") && readModelOf(*root.find("model"));
    const Node *source = fields.require("source"), *target = fields.require("target"), *world = fields.find("world");
    if (fields.find("options"))
      readOptions(*root.find("options"));
    fields.finish();
    if (!model) // without a model, every name in the endpoints would be an error
      return;
    if (source)
      readEndpoint(*source, "source");
    if (target && target->kind == Node::Kind::sequence) {
      if (target->items.empty())
        diagnostics_.error(target->at, "'target' is an empty list, expected at least one endpoint");
      for (size_t i = 0; i < target->items.size(); ++i)
        readEndpoint(target->items[i], "target." + std::to_string(i));
    } else if (target) {
      readEndpoint(*target, "target");
    }
    if (job_.endpoints.size() < 2 || !axesKnown_)
      return;
    readSwitches();
    checkReplicas();
    readWorld(world);
    checkFiles();
    checkReferences(job_, allowed_, diagnostics_);
  }

  bool readModelOf(Node &model) {
    if ((model.kind == Node::Kind::scalar && !include(model, "model")) || !checkMap(model, "'model'", diagnostics_) ||
        !extendModel(model, diagnostics_))
      return false;
    const std::string path = job_.model.path;
    job_.model = readModel(model, folderOf(path.empty() ? job_.path : path), diagnostics_);
    job_.model.path = path;
    return true;
  }

  void readOptions(Node &options) {
    Fields fields(options, "'options'", diagnostics_);
    if (!fields.isMap())
      return;
    if (const Node *staging = fields.find("staging")) {
      job_.stagingAt = staging->at;
      job_.stagingLimit = readBytes(*staging, "'staging'", diagnostics_).value_or(0);
    }
    Node *topology = fields.find("topology") ? options.find("topology") : nullptr;
    if (topology && (topology->kind != Node::Kind::scalar || include(*topology, "options.topology")))
      job_.topology = readTopology(*topology, diagnostics_).value_or(ir::Topology{});
    if (const Node *exchange = fields.find("exchange")) {
      exchangeAt_ = exchange;
      const auto known = exchange->kind == Node::Kind::scalar ? ir::parseExchange(exchange->text) : std::nullopt;
      if (known)
        job_.exchange = *known;
      else
        refuse(*exchange, "auto, nodes, p2p, broadcast or gather-rounds", "'exchange'", diagnostics_);
    }
    if (const Node *group = fields.find("group")) {
      groupAt_ = valueOrItems(*group);
      for (const Node *axis : groupAt_)
        if (const auto name = readText(*axis, "an axis of 'group'", diagnostics_))
          job_.group.push_back(*name);
    }
    fields.finish();
  }

  /// Checks that `exchange` and `group` are used only with files, and that `group` names axes of endpoints with ranks.
  void checkFiles() {
    const bool sourceFiles = job_.endpoints[0].storage;
    const bool files = sourceFiles || std::any_of(job_.endpoints.begin(), job_.endpoints.end(),
                                                  [](const auto &e) { return e.storage; });
    if (exchangeAt_ && !sourceFiles)
      diagnostics_.error(exchangeAt_->at, "'exchange' applies to a source that is read from files, but this source has "
                                          "no 'storage'; remove 'exchange'");
    if (!groupAt_.empty() && !files)
      diagnostics_.error(
          groupAt_[0]->at,
          "'group' distributes the reading and writing of files, but no endpoint has 'storage'; remove 'group'");
    std::vector<std::string> known;
    for (const EndpointDeclaration &endpoint : job_.endpoints)
      for (const ir::Axis &axis : endpoint.axes)
        if (!endpoint.storage)
          known.push_back(axis.name);
    for (const Node *axis : groupAt_)
      if (std::find(known.begin(), known.end(), axis->text) == known.end())
        diagnostics_.error(axis->at, "unknown axis '" + axis->text + "' in 'group'" + suggestion(axis->text, known));
  }

  /// Reads `storage`: a path, or {folder, format, chunk}. Returns the format, if it is stated.
  std::optional<StorageFormat> readStorage(const Node &node, EndpointDeclaration &endpoint) {
    endpoint.storage = true;
    endpoint.storageAt = node.at;
    if (node.kind != Node::Kind::map) {
      endpoint.directory = readText(node, "'storage'", diagnostics_).value_or("");
      return std::nullopt;
    }
    Fields fields(node, "'storage'", diagnostics_);
    if (const Node *folder = fields.require("folder"))
      endpoint.directory = readText(*folder, "'folder' of 'storage'", diagnostics_).value_or("");
    std::optional<StorageFormat> format;
    if (const Node *named = fields.find("format")) {
      format = storageFormatNamed(named->kind == Node::Kind::scalar ? named->text : "");
      if (!format)
        refuse(*named, oneOf(storageFormatTexts(&StorageFormatRow::name), ""), "'format' of 'storage'", diagnostics_);
    }
    if (const Node *chunk = fields.find("chunk")) {
      if (endpoint.role == "source" || (!fields.find("format")) || (format && !writesChunks(*format)))
        diagnostics_.error(chunk->at,
                           "unexpected 'chunk': only a target of format " +
                               oneOf(storageFormatTexts(&StorageFormatRow::name, &StorageFormatRow::chunks), "") +
                               " is written in chunks");
      else
        endpoint.chunkBytes = readBytes(*chunk, "'chunk'", diagnostics_);
    }
    fields.finish();
    return format;
  }

  /// Reads what the files of a source contain: for `dtype: stored`, and to find the chunks of other formats than
  /// Hugging Face's.
  void readStoredFiles(std::optional<StorageFormat> format, EndpointDeclaration &endpoint) {
    const bool other = format && storesChunks(*format);
    if (endpoint.form.storedAt && (!endpoint.storage || endpoint.role != "source"))
      return diagnostics_.error(
          *endpoint.form.storedAt,
          "'dtype: stored' reads dtypes from file headers and needs a source with 'storage', found it in the " +
              endpoint.role);
    if (other && !endpoint.checkpoint)
      return diagnostics_.error(endpoint.storageAt, std::string("'format: ") + name(*format) +
                                                        "' and 'mesh' cannot be combined: the files of a source state "
                                                        "its chunks, and 'chunk' limits those of a target; remove "
                                                        "'mesh'");
    endpoint.format = format.value_or(StorageFormat::safetensors);
    if (endpoint.role != "source" || endpoint.directory.empty() || (!endpoint.form.storedAt && !endpoint.checkpoint))
      return;
    const Location at = endpoint.form.storedAt.value_or(endpoint.storageAt);
    const std::string what = endpoint.form.storedAt ? "'dtype: stored'" : "'storage'";
    if (!readStoredFiles_) {
      if (endpoint.form.storedAt || other)
        diagnostics_.error(at, what + ": this program does not read stored files");
      return;
    }
    llvm::Expected<StoredFiles> files = readStoredFiles_({.path = joinPath(folderOf(job_.path), endpoint.directory),
                                                          .checkpoint = endpoint.checkpoint,
                                                          .meshRanks = endpoint.meshSize,
                                                          .format = format,
                                                          .required = endpoint.form.storedAt || other});
    if (!files)
      return diagnostics_.error(at, what + ": " + toString(files.takeError()));
    endpoint.format = files->format;
    endpoint.files = std::make_shared<StoredFiles>(std::move(*files));
    if (endpoint.form.storedAt)
      endpoint.form.stored = std::make_shared<StoredTypes>(*endpoint.files, at);
  }

  void readEndpoint(const Node &node, const std::string &role) {
    EndpointDeclaration &endpoint = job_.endpoints.emplace_back();
    nodes_.push_back(&node);
    endpoint.role = role;
    endpoint.at = node.at;
    Fields fields(node, "'" + role + "'", diagnostics_);
    if (!fields.isMap()) {
      axesKnown_ = false;
      return;
    }
    endpoint.form = readStorageRule(fields, true, diagnostics_);
    if (const Node *layout = fields.find("layout"))
      readLayoutName(*layout, endpoint);
    const Node *storage = fields.find("storage");
    const std::optional<StorageFormat> format = storage ? readStorage(*storage, endpoint) : std::nullopt;
    const Node *mesh = storage ? fields.find("mesh") : fields.require("mesh");
    endpoint.checkpoint = storage && (!mesh || (mesh->kind == Node::Kind::map && mesh->entries.empty()));
    endpoint.meshAt = node.at;
    const bool meshed = mesh ? readMesh(*mesh, job_.model.let, endpoint, diagnostics_) : storage != nullptr;
    axesKnown_ = axesKnown_ && meshed && (!endpoint.layout || endpoint.layoutDeclaration);
    readStoredFiles(format, endpoint);
    if (const Node *replicas = fields.find("replicas"))
      readReplicas(*replicas, endpoint);
    const Node *ranks = fields.find("ranks");
    if (ranks && storage)
      diagnostics_.error(ranks->at,
                         "'ranks' and 'storage' cannot be combined, because files have no ranks; remove one of them");
    else if (ranks)
      readRanks(*ranks, meshed, endpoint);
    else
      for (int64_t meshRank = 0; meshRank < endpoint.meshSize; ++meshRank)
        endpoint.ranks.push_back(static_cast<int32_t>(meshRank + (endpoint.replicas > 0 ? sourceRanks() : 0)));
    endpoint.ranksAt = ranks ? ranks->at : endpoint.meshAt;
    if (const Node *placement = fields.find("place"))
      endpoint.placement = readPlacement(*placement, job_.model, diagnostics_);
    if (const Node *switches = fields.find("switches"); switches && checkMap(*switches, "'switches'", diagnostics_))
      checkSwitches(*switches, endpoint);
    if (const Node *only = fields.find("only"))
      endpoint.only = readGlobs(*only, "'only'", diagnostics_);
    if (const Node *ignore = fields.find("ignore"))
      endpoint.ignore = readGlobs(*ignore, "'ignore'", diagnostics_);
    if (const Node *authority = fields.find("authority")) {
      if (role != "source")
        diagnostics_.error(
            authority->at,
            "'authority' selects the ranks from which the source is read; it is not allowed on a target");
      endpoint.authority = readAxisRules(*authority, "'authority'", diagnostics_);
    }
    fields.finish();
  }

  void readLayoutName(const Node &node, EndpointDeclaration &endpoint) {
    const auto name = readText(node, "'layout'", diagnostics_);
    if (!name)
      return;
    endpoint.layout.emplace(*name, node.at);
    std::vector<std::string> known;
    for (const LayoutDeclaration &layout : job_.model.layouts) {
      known.push_back(layout.name);
      if (layout.name == *name)
        endpoint.layoutDeclaration = &layout;
    }
    if (!endpoint.layoutDeclaration)
      diagnostics_.error(node.at, known.empty() ? "unknown layout '" + *name + "'; the model has no layouts"
                                                : "unknown layout '" + *name + "'" + suggestion(*name, known));
  }

  void readRanks(const Node &node, bool meshed, EndpointDeclaration &endpoint) {
    std::vector<IntegerRange> ranges;
    int64_t count = 0;
    bool ok = true;
    for (const Node *item : valueOrItems(node)) {
      const auto range = readIntegerRange(*item, "'ranks'", job_.model.let, kMaxWorld, diagnostics_);
      ok = ok && range;
      if (range) {
        ranges.push_back(*range);
        count += range->last - range->first + 1;
      }
    }
    if (!ok)
      return;
    if (meshed && count != endpoint.meshSize) {
      diagnostics_.error(node.at, "'ranks' lists " + std::to_string(count) + (count == 1 ? " rank" : " ranks") +
                                      ", expected " + std::to_string(endpoint.meshSize) + ", the size of the mesh");
      diagnostics_.note(endpoint.meshAt, "mesh defined here");
      return;
    }
    std::unordered_set<int64_t> seen;
    for (const IntegerRange &range : ranges)
      for (int64_t rank = range.first; rank <= range.last; ++rank) {
        if (!seen.insert(rank).second) {
          diagnostics_.error(node.at, "'ranks' lists rank " + std::to_string(rank) + " twice");
          return;
        }
        endpoint.ranks.push_back(static_cast<int32_t>(rank));
      }
  }

  /// The highest rank of the source + 1; 0 if the source is files or had an error.
  int64_t sourceRanks() const {
    const EndpointDeclaration &source = job_.endpoints[0];
    return source.role != "source" || source.storage || source.ranks.empty()
               ? 0
               : int64_t{*std::max_element(source.ranks.begin(), source.ranks.end())} + 1;
  }

  void readReplicas(const Node &node, EndpointDeclaration &endpoint) {
    endpoint.replicas = readInteger(node, "'replicas'", 1, kMaxReplicas, diagnostics_).value_or(0);
    endpoint.replicasAt = node.at;
    if (endpoint.role == "source")
      diagnostics_.error(node.at, "'replicas' is the number of engine replicas of a target; it is not allowed on the "
                                  "source");
    else if (endpoint.storage)
      diagnostics_.error(node.at, "'replicas' and 'storage' cannot be combined, because engine replicas are processes "
                                  "with ranks; remove one of them");
  }

  /// A target with `replicas` is the only one. The ranks of its other engine replicas follow those of replica 0, so
  /// nothing else may have them.
  void checkReplicas() {
    const EndpointDeclaration &source = job_.endpoints[0], &target = job_.endpoints[1];
    for (const EndpointDeclaration &endpoint : job_.endpoints)
      if (endpoint.replicas > 0 && job_.endpoints.size() > 2)
        return diagnostics_.error(endpoint.replicasAt, "'replicas' needs a job with one target, found " +
                                                           std::to_string(job_.endpoints.size() - 1) +
                                                           "; give each target a job of its own");
    if (target.replicas == 0 || target.ranks.empty() || target.storage)
      return;
    if (source.storage)
      return diagnostics_.error(target.replicasAt, "'replicas' needs a source with ranks, from which engine replicas "
                                                   "pull; found a source with 'storage'");
    if (const int64_t first = target.ranks[0]; first < sourceRanks()) {
      diagnostics_.error(target.ranksAt, "a target with 'replicas' has ranks above those of the source: found rank " +
                                             std::to_string(first) + ", expected " + std::to_string(sourceRanks()) +
                                             " or more");
      return diagnostics_.note(source.ranksAt, "ranks of the source");
    }
    for (size_t i = 1; i < target.ranks.size(); ++i)
      if (target.ranks[i] != target.ranks[i - 1] + 1)
        return diagnostics_.error(
            target.ranksAt, "a target with 'replicas' has consecutive ranks, in order: found rank " +
                                std::to_string(target.ranks[i]) + " after rank " + std::to_string(target.ranks[i - 1]));
    if (const int64_t end = target.ranks[0] + target.replicas * target.meshSize; end > kMaxPoolRanks)
      diagnostics_.error(target.replicasAt, "the engine replicas have " + std::to_string(target.meshSize) +
                                                " ranks each, up to rank " + std::to_string(end - 1) +
                                                ", expected fewer than " + std::to_string(kMaxPoolRanks) + " ranks");
  }

  void checkSwitches(const Node &switches, const EndpointDeclaration &endpoint) {
    if (!endpoint.layout) {
      diagnostics_.error(switches.at, "'switches' requires 'layout', because layouts declare switches");
      return;
    }
    std::vector<std::string> known;
    if (endpoint.layoutDeclaration)
      for (const auto &[name, value] : endpoint.layoutDeclaration->switches)
        known.push_back(name);
    for (const auto &[key, value] : switches.entries)
      if (endpoint.layoutDeclaration && std::find(known.begin(), known.end(), key.text) == known.end())
        diagnostics_.error(key.at, "unknown switch '" + key.text + "' of layout '" + endpoint.layout->first + "'" +
                                       (known.empty() ? "; the layout has no switches" : suggestion(key.text, known)));
  }

  /// Evaluates switches. Their expressions may use all axes, so this runs after all meshes are read.
  void readSwitches() {
    for (size_t e = 0; e < job_.endpoints.size(); ++e) {
      EndpointDeclaration &endpoint = job_.endpoints[e];
      if (!endpoint.layoutDeclaration)
        continue;
      Environment names = job_.model.let;
      if (endpoint.layoutDeclaration->axes)
        for (const auto &[axis, at] : *endpoint.layoutDeclaration->axes)
          names[axis] = 1;
      else
        for (const EndpointDeclaration &each : job_.endpoints)
          for (const ir::Axis &axis : each.axes)
            names[axis.name] = 1;
      for (const ir::Axis &axis : endpoint.axes)
        names[axis.name] = axis.size;
      for (const auto &[name, expression] : endpoint.layoutDeclaration->switches)
        endpoint.switches[name] = evaluate(expression, names, diagnostics_).value_or(0);
      if (const Node *stated = nodes_[e]->find("switches"))
        for (const auto &[key, value] : stated->entries) {
          if (!endpoint.switches.contains(key.text))
            continue; // reported by checkSwitches
          if (const auto number =
                  readValue(value, "switch '" + key.text + "'", names, {INT64_MIN + 1, INT64_MAX}, diagnostics_))
            endpoint.switches[key.text] = *number;
        }
    }
  }

  void readWorld(const Node *node) {
    int64_t used = 1;
    const EndpointDeclaration *highest = nullptr;
    for (const EndpointDeclaration &endpoint : job_.endpoints)
      if (!endpoint.storage)
        for (int32_t rank : endpoint.ranks)
          if (rank + 1 > used || !highest) {
            used = std::max<int64_t>(used, rank + 1);
            highest = &endpoint;
          }
    job_.world = used;
    if (!node)
      return;
    const auto world = readInteger(*node, "'world'", 1, kMaxWorld, diagnostics_);
    if (!world)
      return;
    job_.world = *world;
    if (*world < used) {
      diagnostics_.error(node->at, "'world' is " + std::to_string(*world) + ", but rank " + std::to_string(used - 1) +
                                       " is used, expected at least " + std::to_string(used));
      diagnostics_.note(highest->ranksAt, "used by the " + highest->role);
    } else if (*world > used && job_.endpoints[1].replicas > 0) {
      diagnostics_.error(node->at, "'world' is " + std::to_string(*world) + ", but ranks from " + std::to_string(used) +
                                       " on are those of engine replicas; expected " + std::to_string(used) +
                                       ", or no 'world'");
      diagnostics_.note(job_.endpoints[1].replicasAt, "engine replicas defined here");
    }
  }

  const Allowed &allowed_;
  const ReadStoredFiles &readStoredFiles_;
  Diagnostics &diagnostics_;
  Job job_;
  std::vector<const Node *> nodes_;   // the YAML of job_.endpoints
  bool failed_ = false;               // whether an included file could not be read
  const Node *exchangeAt_ = nullptr;  // options.exchange
  std::vector<const Node *> groupAt_; // the axes of options.group
  bool axesKnown_ = true;             // whether every mesh and every layout could be read
};

} // namespace

std::optional<Job> readJob(const std::string &path, const std::vector<std::string> &overrides, Diagnostics &diagnostics,
                           const Allowed &allowed, const ReadStoredFiles &readStoredFiles) {
  return JobReader(path, allowed, readStoredFiles, diagnostics).read(overrides);
}

} // namespace reshard
