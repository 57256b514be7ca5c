// SPDX-License-Identifier: Apache-2.0
// Prints a plan: its totals, its endpoints, one param or one rank, as text or JSON. Other reports are chosen here.
#include "report/inspect/inspection.h"

#include "base/atomic_file.h"
#include "base/text.h"
#include "base/work_deadline.h"
#include "command/common.h"
#include "report/inspect/quantized_forms.h"
#include "report/page/page.h"
#include "schema/flatbuffer_vectors.h"
#include "verify/proof/staged.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

namespace reshard::report {

using namespace command;
using namespace verify;

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

std::string textOf(const flatbuffers::String *text) { return text ? text->str() : std::string(); }

/// Counts of the params that are stored quantized; empty if there are none.
Json quantizedJson(const Manifest &m, uint32_t endpoint) {
  const QuantizedCounts counts = countQuantized(m, endpoint);
  Json json = Json::object();
  for (const auto &[by, formats] : counts.params)
    for (const auto &[format, count] : formats)
      json[kQuantizedByNames[static_cast<size_t>(by)].key][reshard::formatOf(format).name] = count;
  if (counts.sends > 0)
    json["to_send"] = counts.sends;
  return json;
}

Json summary(const Plan &plan, uint64_t staged) {
  const Manifest &m = plan.manifest();
  Json endpoints = Json::array();
  for (uint32_t e = 0; e < m.endpoints()->size(); ++e) {
    const Endpoint *endpoint = m.endpoints()->Get(e);
    Json axes = Json::object();
    for (const Axis *axis : orEmpty(endpoint->axes()))
      axes[axis->name()->str()] = axis->size();
    int64_t params = 0, patterns = 0;
    for (const Param *param : orEmpty(endpoint->params())) {
      patterns += !param->view();
      for (uint32_t meshRank = 0; meshRank < endpoint->ranks()->size() && !param->view(); ++meshRank)
        params += instanceCount(*endpoint, *param, meshRank);
    }
    endpoints.push_back({{"role", textOf(endpoint->role())},
                         {"layout", textOf(endpoint->layout())},
                         {"storage", endpoint->storage()},
                         {"format", endpoint->storage() ? Json(name(formatOf(*endpoint))) : Json()},
                         {"axes", axes},
                         {"mesh_ranks", endpoint->ranks()->size()},
                         {"first_rank", endpoint->ranks()->Get(0)},
                         {"last_rank", *std::max_element(endpoint->ranks()->begin(), endpoint->ranks()->end())},
                         {"param_patterns", patterns},
                         {"params", params},
                         {"replicas", endpoint->replicas()},
                         {"quantized", quantizedJson(m, e)}});
  }
  uint32_t largestSegment = 0;
  for (uint32_t rank = 1; rank < plan.world(); ++rank)
    if (plan.container().segmentBytes(rank) > plan.container().segmentBytes(largestSegment))
      largestSegment = rank;
  return {{"model", textOf(m.model())},
          {"digest", plan.digest()},
          {"fingerprint", textOf(m.fingerprint())},
          {"compiler", textOf(m.compiler())},
          {"plan_bytes", plan.container().bytes()},
          {"decompressed_bytes", plan.container().decompressedBytes()},
          {"manifest_bytes", plan.container().manifest().size()},
          {"world", m.world()},
          {"endpoints", endpoints},
          {"tensor_patterns", orEmpty(m.tensor_patterns()).size() - derivedTensorPatterns(m)},
          {"transfers", m.transfers()},
          {"descriptors", m.descriptors()},
          {"messages", m.messages()},
          {"rounds", m.rounds()},
          {"bytes",
           {{"target", m.bytes_target()},
            {"local", m.bytes_local()},
            {"remote", m.bytes_remote()},
            {"storage", m.bytes_storage()}}},
          {"staging_limit", m.staging_limit()},
          {"staged_bytes", staged},
          {"largest_segment", {{"rank", largestSegment}, {"bytes", plan.container().segmentBytes(largestSegment)}}}};
}

void printSummary(const Json &s) {
  auto text = [](const Json &value) { return value.is_string() ? value.get<std::string>() : value.dump(); };
  auto size = [](const Json &bytes) { return humanBytes(bytes.get<double>()); };
  auto number = [](const Json &count, const char *what) { return counted(count.get<uint64_t>(), what); };
  const std::string compressed =
      s["decompressed_bytes"] == s["plan_bytes"] ? "" : " compressed from " + size(s["decompressed_bytes"]);
  std::printf(
      "model      %s\ndigest     %s\nplan       %s%s, manifest %s, largest segment %s (rank %s)\nworld      %s\n",
      text(s["model"]).c_str(), text(s["digest"]).c_str(), size(s["plan_bytes"]).c_str(), compressed.c_str(),
      size(s["manifest_bytes"]).c_str(), size(s["largest_segment"]["bytes"]).c_str(),
      text(s["largest_segment"]["rank"]).c_str(), number(s["world"], "rank").c_str());
  for (const Json &endpoint : s["endpoints"]) {
    const bool chunks = endpoint["storage"] && storesChunks(*storageFormatNamed(text(endpoint["format"])));
    std::printf("%-10s %s %s: %s, %s (%s), axes %s\n", text(endpoint["role"]).c_str(),
                chunks                ? (text(endpoint["format"]) + " chunks").c_str()
                : endpoint["storage"] ? "files"
                                      : "ranks",
                (text(endpoint["first_rank"]) + ".." + text(endpoint["last_rank"])).c_str(),
                number(endpoint["mesh_ranks"], chunks                ? "chunk"
                                               : endpoint["storage"] ? "file"
                                                                     : "mesh rank")
                    .c_str(),
                number(endpoint["params"], "param").c_str(), number(endpoint["param_patterns"], "pattern").c_str(),
                endpoint["axes"].dump().c_str());
    if (const auto replicas = endpoint["replicas"].get<uint64_t>(); replicas > 0)
      std::printf("%-10s the ranks of replica 0 of %s\n", "", counted(replicas, "engine replica").c_str());
    std::string quantized;
    const Json &counts = endpoint["quantized"];
    for (const QuantizedByName &name : kQuantizedByNames)
      if (counts.contains(name.key))
        for (const auto &[format, count] : counts[name.key].items())
          quantized += ", " + text(count) + " " + format + " " + name.words;
    if (counts.contains("to_send"))
      quantized += ", " + text(counts["to_send"]) + " for sending";
    if (!quantized.empty())
      std::printf("%-10s quantized:%s\n", "", quantized.c_str() + 1);
  }
  if (s["staged_bytes"] > 0)
    std::printf("staged     at most %s in the arena of a rank, to be quantized\n", size(s["staged_bytes"]).c_str());
  std::printf("moves      %s: local %s, remote %s, storage %s\n", size(s["bytes"]["target"]).c_str(),
              size(s["bytes"]["local"]).c_str(), size(s["bytes"]["remote"]).c_str(),
              size(s["bytes"]["storage"]).c_str());
  std::printf("by         %s, %s, %s in %s\n", number(s["transfers"], "transfer").c_str(),
              number(s["descriptors"], "descriptor").c_str(), number(s["messages"], "message").c_str(),
              number(s["rounds"], "round").c_str());
}

/// Names of a rank's buffers; the names of one buffer range are computed together.
class Names {
public:
  Names(const Plan &plan, const Segment &segment) : plan_(plan), segment_(segment) {}
  std::string of(uint32_t buffer) {
    for (const BufferRange *run : orEmpty(segment_.buffers()))
      if (buffer >= run->first() && buffer - run->first() < run->count()) {
        const Endpoint &endpoint = *plan_.manifest().endpoints()->Get(run->endpoint());
        auto [at, added] = known_.try_emplace(run->first());
        if (added)
          at->second = instances(plan_.manifest(), endpoint, run->param(), run->mesh_rank());
        return endpoint.role()->str() + " " + at->second[buffer - run->first()].name;
      }
    return "arena";
  }

private:
  const Plan &plan_;
  const Segment &segment_;
  std::map<uint32_t, std::vector<ParamInstance>> known_;
};

Json operandJson(const Segment &segment, Names &names, const Operand &operand) {
  const Shape &shape = *segment.shapes()->Get(operand.shape());
  Json loops = Json::array();
  uint64_t bytes = shape.row_bytes();
  for (uint32_t l = 0; l < shape.loop_count(); ++l) {
    const Loop &loop = *segment.loops()->Get(shape.first_loop() + l);
    bytes *= loop.count();
    loops.push_back({{"count", loop.count()}, {"stride", loop.stride()}, {"buffer_step", loop.buffer_step()}});
  }
  return {{"buffer", operand.buffer()},     {"name", names.of(operand.buffer())},
          {"offset", operand.offset()},     {"bytes", bytes},
          {"row_bytes", shape.row_bytes()}, {"loops", loops}};
}

Json stepJson(const Segment &segment, Names &names, const Step &step) {
  Json one = {{"kind", EnumNameStepKind(step.kind())}, {"round", step.round()}, {"bytes", step.bytes()}};
  if (step.peer() != UINT32_MAX)
    one.update({{"message", step.message()}, {"peer", step.peer()}});
  if (step.staging() != UINT64_MAX)
    one["staging"] = step.staging();
  for (const auto &[key, first, count] : {std::make_tuple("inputs", step.first_input(), step.input_count()),
                                          std::make_tuple("outputs", step.first_output(), step.output_count())}) {
    one[key] = Json::array();
    for (uint32_t i = 0; i < count; ++i)
      one[key].push_back(operandJson(segment, names, *segment.operands()->Get(first + i)));
  }
  return one;
}

void printStep(const Json &step) {
  std::printf("round %u %s %s", step["round"].get<uint32_t>(), step["kind"].get<std::string>().c_str(),
              humanBytes(step["bytes"].get<double>()).c_str());
  if (step.contains("peer"))
    std::printf(" %s rank %u, message %u, %s", step["kind"] == "send" ? "to" : "from", step["peer"].get<uint32_t>(),
                step["message"].get<uint32_t>(),
                step.contains("staging") ? ("staged at " + step["staging"].dump()).c_str() : "in place");
  std::printf("\n");
  for (const char *side : {"inputs", "outputs"})
    for (const Json &operand : step[side]) {
      std::printf("  %s %-70s +%-10llu %12llu bytes: rows of %llu", side[0] == 'i' ? "<-" : "->",
                  operand["name"].get<std::string>().c_str(), operand["offset"].get<unsigned long long>(),
                  operand["bytes"].get<unsigned long long>(), operand["row_bytes"].get<unsigned long long>());
      for (const Json &loop : operand["loops"])
        std::printf(loop["buffer_step"] == 0 ? " x %llu, stride %lld" : " x %llu, stride %lld bytes and %lld params",
                    loop["count"].get<unsigned long long>(), loop["stride"].get<long long>(),
                    loop["buffer_step"].get<long long>());
      std::printf("\n");
    }
}

Status inspectRank(const Plan &plan, uint32_t rank, bool json) {
  std::shared_ptr<const Segment> segment;
  if (Status status = plan.segment(rank, segment); !status.ok())
    return status;
  Names names(plan, *segment);
  Json steps = Json::array();
  for (const Step *step : orEmpty(segment->steps()))
    steps.push_back(stepJson(*segment, names, *step));
  if (json) {
    std::printf("%s\n",
                Json{{"rank", rank}, {"arena_bytes", segment->arena_bytes()}, {"steps", steps}}.dump(2).c_str());
    return {};
  }
  uint64_t buffers = 0;
  for (const BufferRange *run : orEmpty(segment->buffers()))
    buffers += run->count();
  std::printf("rank %u: %s, arena %s, %s\n", rank, counted(buffers, "buffer").c_str(),
              humanBytes(static_cast<double>(segment->arena_bytes())).c_str(), counted(steps.size(), "step").c_str());
  for (const Json &step : steps)
    printStep(step);
  return {};
}

/// Reports target params: shape, contents according to the layout, and bytes received from each rank.
class ParamReport {
public:
  ParamReport(const Plan &plan, const PairedPlan &paired, const InspectionOptions &options)
      : plan_(plan), paired_(paired), options_(options), manifest_(plan.manifest()) {
    forms_.reserve(manifest_.endpoints()->size());
    for (uint32_t e = 0; e < manifest_.endpoints()->size(); ++e)
      forms_.push_back(quantizedForms(manifest_, e));
  }

  /// Adds the matching params of a rank. Those of files are the same for all ranks, which each write a part of them.
  Status add(uint32_t rank) {
    const std::map<uint32_t, std::vector<size_t>> writtenBy = readLayout(rank);
    if (writtenBy.empty())
      return {};
    return StagedMoves(plan_, paired_).forEachMove(rank, [&](const Move &move) {
      if (const auto at = writtenBy.find(move.targetBuffer); at != writtenBy.end())
        for (const size_t param : at->second)
          params_[param].from[move.zero ? "zeros" : "rank " + std::to_string(move.sourceRank)] += move.bytes();
    });
  }

  /// All params that were added.
  Json found() {
    Json found = Json::array();
    for (PrintedParam &param : params_) {
      unsigned __int128 sum = 0;
      uint64_t assigned = 0;
      for (const auto &[source, bytes] : param.from) { // scaled to the param's bytes and rounded so that they add up
        sum += bytes;
        const auto upTo = static_cast<uint64_t>(sum * param.bytes / param.writtenBytes);
        param.json["from"][source] = upTo - assigned;
        assigned = upTo;
      }
      found.push_back(std::move(param.json));
    }
    return found;
  }

private:
  /// A param to print. Its bytes are written to its buffer, or to the quantized view from which it is derived.
  struct PrintedParam {
    Json json;
    uint64_t bytes, writtenBytes;
    std::map<std::string, uint64_t> from; // bytes written, by origin
  };

  /// Finds the params of a rank that match. Returns, by buffer that is written for them, their numbers in params_.
  std::map<uint32_t, std::vector<size_t>> readLayout(uint32_t rank) {
    std::map<uint32_t, std::vector<size_t>> writtenBy;
    const Segment &segment = paired_.segment(rank);
    for (const BufferRange *run : orEmpty(segment.buffers())) {
      const Endpoint &endpoint = *manifest_.endpoints()->Get(run->endpoint());
      if (run->endpoint() == 0 || endpoint.params()->Get(run->param())->view())
        continue;
      const BufferRange &written = writtenRange(segment, *run);
      for (const ParamInstance &instance : instances(manifest_, endpoint, run->param(), run->mesh_rank())) {
        if (!matchesGlob(options_.param, instance.name))
          continue;
        size_t number = params_.size();
        if (endpoint.storage())
          number = inFiles_.try_emplace({run->endpoint(), run->param(), run->mesh_rank(), instance.instance}, number)
                       .first->second;
        if (number == params_.size())
          params_.push_back(
              {describe(*run, written, instance), static_cast<uint64_t>(instance.bytes), written.bytes(), {}});
        writtenBy[written.first() + instance.instance].push_back(number);
      }
    }
    return writtenBy;
  }

  /// The buffers that are written for a param: its own, or those of the quantized view that it is derived from.
  const BufferRange &writtenRange(const Segment &segment, const BufferRange &run) const {
    const std::optional<QuantizedForm> &form = forms_[run.endpoint()][run.param()];
    const BufferRange *written = &run;
    for (const BufferRange *other : orEmpty(segment.buffers()))
      if (form && other->endpoint() == run.endpoint() && other->mesh_rank() == run.mesh_rank() &&
          static_cast<int32_t>(other->param()) == form->view)
        written = other;
    return *written;
  }

  Json describe(const BufferRange &run, const BufferRange &written, const ParamInstance &instance) const {
    const Endpoint &endpoint = *manifest_.endpoints()->Get(run.endpoint());
    const Param &param = *endpoint.params()->Get(run.param());
    Json holds = Json::array();
    for (const Part *part : orEmpty(endpoint.params()->Get(written.param())->parts()))
      holds.push_back(part->pattern() < 0
                          ? "zero padding"
                          : manifest_.tensor_patterns()->Get(static_cast<uint32_t>(part->pattern()))->name()->str());
    Json one = {{"endpoint", textOf(endpoint.role())},
                {"rank", endpoint.ranks()->Get(run.mesh_rank())},
                {"at", meshRankName(endpoint, run.mesh_rank())},
                {"name", instance.name},
                {"dtype", dtypeName(storageDtypeOf(param))},
                {"shape", instance.shape},
                {"bytes", instance.bytes},
                {"declared", textOf(param.origin())},
                {"refresh", textOf(param.refresh())},
                {"transform", textOf(param.transform())},
                {"holds", holds}};
    if (const std::optional<QuantizedForm> &form = forms_[run.endpoint()][run.param()])
      one["quantized"] = {
          {"format", reshard::formatOf(form->format).name},
          {"content", form->codes ? "codes"
                      : reshard::formatOf(form->format).tensorScale() && storageDtypeOf(param) == DType::fp32
                          ? "tensor scale"
                          : "scales"},
          {"scale_layout", name(form->scaleLayout)},
          {"quantized_by", kQuantizedByNames[static_cast<size_t>(form->by)].key}};
    one["from"] = Json::object();
    return one;
  }

  const Plan &plan_;
  const PairedPlan &paired_;
  const InspectionOptions &options_;
  const Manifest &manifest_;
  std::vector<std::vector<std::optional<QuantizedForm>>> forms_; // by endpoint and param
  std::vector<PrintedParam> params_;
  std::map<std::array<uint32_t, 4>, size_t> inFiles_; // by endpoint, param, mesh rank and instance: number in params_
};

void printParam(const Json &one) {
  std::printf("%s %s %s %s %s, %s (declared at %s)\n  holds", one["endpoint"].get<std::string>().c_str(),
              one["at"].get<std::string>().c_str(), one["name"].get<std::string>().c_str(),
              one["dtype"].get<std::string>().c_str(), one["shape"].dump().c_str(),
              humanBytes(one["bytes"].get<double>()).c_str(), one["declared"].get<std::string>().c_str());
  for (const Json &tensor : one["holds"])
    std::printf(" %s", tensor.get<std::string>().c_str());
  if (one.contains("quantized")) {
    const Json &quantized = one["quantized"];
    const std::string layout = quantized["scale_layout"];
    const bool plain = quantized["content"] != "scales" || layout == kScaleLayoutNames[0];
    for (const QuantizedByName &name : kQuantizedByNames)
      if (quantized["quantized_by"] == name.key)
        std::printf("\n  quantized as %s, %s%s, %s", quantized["format"].get<std::string>().c_str(),
                    plain ? "" : (layout + " ").c_str(), quantized["content"].get<std::string>().c_str(), name.words);
  }
  if (const std::string transform = one["transform"]; !transform.empty())
    std::printf("\n  then the engine's transform '%s'", transform.c_str());
  if (const std::string refresh = one["refresh"]; !refresh.empty())
    std::printf("\n  then the engine's hook '%s'", refresh.c_str());
  std::printf("\n  from ");
  for (const auto &[source, bytes] : one["from"].items())
    std::printf(" %s: %s;", source.c_str(), humanBytes(bytes.get<double>()).c_str());
  std::printf("\n");
}

Status inspectParam(const Plan &plan, const InspectionOptions &options) {
  PairedPlan paired(plan);
  if (Status status = paired.load(); !status.ok())
    return status;
  ParamReport report(plan, paired, options);
  {
    ProgressLine progress("find the params");
    for (uint32_t rank = 0; rank < plan.world(); ++rank) {
      if (Status status = report.add(rank); !status.ok())
        return status;
      progress.at(static_cast<double>(rank + 1) / plan.world());
    }
  }
  const Json found = report.found();
  if (found.empty())
    return negative("no target param matches '" + options.param + "'");
  if (options.format == "json")
    std::printf("%s\n", found.dump(2).c_str());
  else
    for (const Json &one : found)
      printParam(one);
  return {};
}

Status verify(const Plan &plan, bool json) {
  const VerifyResult result = [&] {
    ProgressLine progress("verify");
    return verifyPlan(plan, [&](double fraction) { progress.at(fraction); }, 0);
  }();
  if (json)
    std::printf(
        "%s\n",
        Json{{"right", result.error.empty()}, {"error", result.error}, {"bytes", result.bytes}, {"moves", result.moves}}
            .dump(2)
            .c_str());
  else if (result.error.empty())
    std::printf("right: all %llu target bytes are written exactly once, from the right source byte (%llu moves)\n",
                static_cast<unsigned long long>(result.bytes), static_cast<unsigned long long>(result.moves));
  return result.error.empty()
             ? Status()
             : negative((result.tooLarge ? "the plan is not proven: " : "the plan is wrong: ") + result.error);
}

Status writePage(const Plan &plan, const InspectionOptions &options) {
  const Result<std::string> page = pageOf(plan, options.topology);
  if (!page.ok())
    return ofPlan(page.status());
  if (Status status = writeFile(options.output, *page); !status.ok())
    return status;
  std::printf("%s: page of the plan\n", options.output.c_str());
  return {};
}

Status printSummaryOf(const Plan &plan, bool json) {
  const Result<uint64_t> staged = peakStagedBytes(plan);
  if (!staged.ok())
    return staged.status();
  const Json s = summary(plan, *staged);
  if (json)
    std::printf("%s\n", s.dump(2).c_str());
  else
    printSummary(s);
  return {};
}

Status printReport(const Plan &plan, const InspectionOptions &options) {
  if (options.format == "html")
    return writePage(plan, options);
  if (options.topology)
    return inspectSimulation(plan, options);
  const bool json = options.format == "json";
  return ofPlan(options.rank >= 0          ? inspectRank(plan, static_cast<uint32_t>(options.rank), json)
                : !options.param.empty()   ? inspectParam(plan, options)
                : !options.explain.empty() ? explain(plan, options.explain)
                : options.verify           ? verify(plan, json)
                                           : printSummaryOf(plan, json));
}

} // namespace

Status inspect(const InspectionOptions &options) {
  std::unique_ptr<Plan> plan;
  if (Status status = Plan::open(options.plan, plan); !status.ok())
    return ofPlan(status);
  const std::string what = options.verify             ? "the proof"
                           : options.format == "html" ? "the page"
                           : !options.explain.empty() ? "the explanation"
                           : options.topology         ? "the simulation"
                                                      : "the summary";
  return WorkDeadline::run(what, options.timeout, [&] { return printReport(*plan, options); });
}

} // namespace reshard::report
