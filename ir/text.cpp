// SPDX-License-Identifier: Apache-2.0
// Prints the IR: one item per line. Where a line refers to a name by number, the name follows as a comment. parse.cpp
// reads the same constructs in the same order.

#include "ir/text.h"

#include <ostream>

namespace reshard::ir {

namespace {

class Printer {
public:
  Printer(const Module &module, std::ostream &out) : module_(module), layout_(module.layout), out_(out) {}

  void run() {
    const char *levels[] = {"layout", "transfer", "schedule"};
    out_ << "module " << quoted(layout_.model) << " " << levels[static_cast<int>(module_.level)] << " world "
         << layout_.world << " staging " << layout_.stagingLimit << " ranks-per-node " << layout_.topology.ranksPerNode
         << " fingerprint " << quoted(module_.fingerprint) << "\n";
    topology();
    layout();
    if (module_.level >= Level::transfer)
      transfers();
    if (module_.level >= Level::schedule)
      schedule();
  }

private:
  /// Rates in bytes per second, latencies in nanoseconds. Default values (ir.h) are not printed.
  void topology() {
    const Topology &t = layout_.topology;
    Topology usual;
    usual.ranksPerNode = t.ranksPerNode;
    if (t != usual)
      out_ << "topology link " << t.linkRate << " latency " << t.linkLatency << " nics " << t.nicsPerNode << " rate "
           << t.nicRate << " latency " << t.nicLatency << " copy " << t.copyRate << "\n";
    if (layout_.files != FileDistribution()) {
      out_ << "files" << (layout_.files.megatron ? " megatron" : "") << " exchange "
           << quoted(name(layout_.files.exchange)) << " group";
      for (const std::string &axis : layout_.files.group)
        out_ << " " << quoted(axis);
      out_ << "\n";
    }
  }

  static std::string quoted(const std::string &text) { return '"' + escaped(text) + '"'; }

  /// A name in a comment is escaped, too: a line break in it would end the comment.
  static std::string escaped(const std::string &text) {
    static const char *digits = "0123456789abcdef";
    std::string result;
    for (const char c : text) {
      if (c == '"' || c == '\\') {
        result += '\\';
        result += c;
      } else if (static_cast<unsigned char>(c) < 32 || c == 127) {
        result += "\\x";
        result += digits[static_cast<unsigned char>(c) >> 4];
        result += digits[c & 15];
      } else {
        result += c;
      }
    }
    return result;
  }

  template <class Numbers> std::string list(const Numbers &numbers) {
    std::string text = "[";
    for (size_t i = 0; i < numbers.size(); ++i)
      text += (i ? ", " : "") + std::to_string(numbers[i]);
    return text + "]";
  }

  /// Numbers; consecutive ones are printed as a range a:b, without b.
  template <class Numbers> std::string ranges(const Numbers &numbers) {
    std::string text = "[";
    for (size_t i = 0; i < numbers.size();) {
      size_t n = 1;
      while (i + n < numbers.size() && numbers[i + n] == numbers[i] + static_cast<int64_t>(n))
        ++n;
      text += (i ? ", " : "") + std::to_string(numbers[i]);
      if (n > 1)
        text += ":" + std::to_string(numbers[i] + static_cast<int64_t>(n));
      i += n;
    }
    return text + "]";
  }

  std::string indexMap(const IndexMap &list) {
    if (list.empty())
      return "none";
    std::string text;
    for (const IndexBlock &s : list) {
      text += (text.empty() ? "" : " ") + std::string("[") + std::to_string(s.from) + ":" +
              std::to_string(s.from + s.length);
      if (s.count != 1)
        text += " step " + std::to_string(s.fromStep) + " x " + std::to_string(s.count);
      text += " -> " + std::to_string(s.to);
      if (s.count != 1)
        text += " step " + std::to_string(s.toStep);
      text += "]";
    }
    return text;
  }

  std::string axes(const Endpoint &endpoint, const std::vector<unsigned> &numbers) {
    std::string text = "(";
    for (size_t i = 0; i < numbers.size(); ++i)
      text += (i ? ", " : "") + endpoint.axes[numbers[i]].name;
    return text + ")";
  }

  void layout() {
    for (const IndexVariable &variable : layout_.variables)
      out_ << "index " << variable.name << " " << variable.size << "\n";
    for (size_t n = 0; n < layout_.tensorPatterns.size(); ++n) {
      const TensorPattern &pattern = layout_.tensorPatterns[n];
      out_ << "tensor %" << n << " " << quoted(pattern.name) << " " << name(pattern.dtype) << " "
           << list(pattern.shape);
      for (size_t v = 0; v < pattern.variables.size(); ++v)
        out_ << " for " << layout_.variables[pattern.variables[v]].name << " " << indexMap(pattern.exists[v]) << ";";
      out_ << "\n";
    }
    if (layout_.foldsCopies)
      out_ << "fold-copies\n";
    for (const std::string &tensor : layout_.unused)
      out_ << "unused " << quoted(tensor) << "\n";
    for (const Endpoint &each : layout_.endpoints)
      endpoint(each);
  }

  void endpoint(const Endpoint &endpoint) {
    out_ << "\nendpoint " << quoted(endpoint.role) << " layout " << quoted(endpoint.layout) << " "
         << (endpoint.storage ? endpoint.checkpoint ? "checkpoint " : "files " : "ranks ") << ranges(endpoint.ranks);
    if (endpoint.storage)
      out_ << " in " << quoted(endpoint.directory);
    if (endpoint.format != StorageFormat::safetensors)
      out_ << " format " << quoted(name(endpoint.format));
    if (endpoint.replicas > 0)
      out_ << " replicas " << endpoint.replicas;
    out_ << "\n";
    for (const Axis &axis : endpoint.axes)
      out_ << "  axis " << axis.name << " " << axis.size << " stride " << axis.stride << "\n";
    for (size_t s = 0; s < endpoint.shardings.size(); ++s) {
      const Sharding &sharding = endpoint.shardings[s];
      out_ << "  sharding #" << s << " over " << axes(endpoint, sharding.axes);
      if (sharding.unit != 1)
        out_ << " unit " << sharding.unit;
      for (const IndexMap &at : sharding.at)
        out_ << " | " << indexMap(at);
      out_ << "\n";
    }
    for (size_t v = 0; v < endpoint.placement.size(); ++v)
      out_ << "  placement " << layout_.variables[v].name << " #" << endpoint.placement[v] << "\n";
    for (const Presence &rule : endpoint.authority)
      out_ << "  authority " << endpoint.axes[rule.axis].name << " " << list(rule.coordinates) << "\n";
    if (!endpoint.epochs.empty())
      out_ << "  epochs " << list(endpoint.epochs) << "\n";
    if (endpoint.relabeled > 0)
      out_ << "  relabeled " << endpoint.relabeled << " bytes\n";
    for (const std::string &param : endpoint.omitted)
      out_ << "  omitted " << quoted(param) << "\n";
    for (size_t p = 0; p < endpoint.params.size(); ++p) {
      out_ << "  param $" << p << " ";
      param(endpoint, endpoint.params[p]);
    }
  }

  void param(const Endpoint &endpoint, const Param &param) {
    out_ << quoted(param.name) << " " << name(param.dtype)
         << (param.storageDtype ? std::string(" storage ") + name(*param.storageDtype) : "")
         << (param.overflow == OverflowRule::error
                 ? ""
                 : std::string(" ") + kOverflowRuleNames[static_cast<size_t>(param.overflow)])
         << view(param) << " [";
    for (size_t d = 0; d < param.shape.size(); ++d) {
      out_ << (d ? ", " : "");
      if (param.shape[d].axes.empty() && param.shape[d].at.size() == 1)
        out_ << param.shape[d].at[0];
      else
        out_ << axes(endpoint, param.shape[d].axes) << " " << list(param.shape[d].at);
    }
    out_ << "]";
    for (size_t v = 0; v < param.variables.size(); ++v)
      out_ << " for " << layout_.variables[param.variables[v]].name << " #" << param.instances[v];
    for (const Presence &rule : param.presence)
      out_ << " at " << endpoint.axes[rule.axis].name << " " << list(rule.coordinates);
    if (!param.refresh.empty())
      out_ << " refresh " << quoted(param.refresh);
    if (!param.transform.empty())
      out_ << " transform " << quoted(param.transform);
    if (!param.origin.empty())
      out_ << " from " << quoted(param.origin);
    out_ << "\n";
    for (const Part &each : param.parts)
      part(each);
  }

  void part(const Part &part) {
    if (part.pattern < 0)
      out_ << "    zeros";
    else
      out_ << "    holds %" << part.pattern;
    for (const PartDimension &dimension : part.dimensions) {
      out_ << " #" << dimension.sharding << " -> ";
      if (dimension.param < 0)
        out_ << "name";
      else
        out_ << dimension.param;
    }
    if (part.pattern >= 0)
      out_ << " // " << escaped(layout_.tensorPatterns[part.pattern].name);
    out_ << "\n";
  }

  static std::string view(const Param &param) {
    if (!param.view)
      return param.derived ? " derived" : "";
    const QuantizedView &view = *param.view;
    return std::string(view.staged ? " staged" : "") + " view " + name(view.kind) + " " + formatOf(view.format).name +
           (view.scaleLayout == ScaleLayout::plain ? "" : std::string(" ") + name(view.scaleLayout)) + " of $" +
           std::to_string(view.codes) + " $" + std::to_string(view.scales) + " $" + std::to_string(view.tensorScale) +
           (view.part > 0 ? " part " + std::to_string(view.part) : "") +
           (view.amaxDimensions > 0 ? " over " + std::to_string(view.amaxDimensions) : "");
  }

  void transfers() {
    const Transfers &t = module_.transfers;
    out_ << "\n";
    for (size_t r = 0; r < t.relations.size(); ++r)
      out_ << "relation ~" << r << " " << indexMap(t.relations[r]) << "\n";
    for (size_t n = 0; n < t.overlaps.size(); ++n) {
      out_ << "overlap " << n << " ";
      overlap(t.overlaps[n]);
    }
    for (size_t r = 0; r < t.routes.size(); ++r) {
      out_ << "route " << r;
      for (const Hop &hop : t.routes[r])
        out_ << (&hop == t.routes[r].data() ? " " : ", ") << hop.from << " -> " << hop.to;
      out_ << "\n";
    }
    for (const Transfer &each : t.transfers)
      transfer(each);
    for (size_t s = 0; s < t.shapes.size(); ++s) {
      out_ << "shape ^" << s << " row " << t.shapes[s].rowBytes;
      for (const Loop &loop : t.shapes[s].loops)
        out_ << " x " << loop.count << " bytes " << loop.sourceStride << " -> " << loop.targetStride << " instances "
             << loop.sourceStep << " -> " << loop.targetStep;
      out_ << "\n";
    }
    for (const Descriptor &d : t.descriptors)
      out_ << "descriptor ^" << d.shape << " from " << d.source << " instance " << d.sourceInstance << " + "
           << d.sourceOffset << " to @" << d.endpoint << " " << d.target << " instance " << d.targetInstance << " + "
           << d.targetOffset << (d.route >= 0 ? " route " + std::to_string(d.route) : std::string()) << "\n";
  }

  void overlap(const Overlap &overlap) {
    const Endpoint &target = layout_.endpoints[overlap.endpoint];
    if (overlap.pattern < 0)
      out_ << "zeros";
    else
      out_ << "%" << overlap.pattern;
    out_ << " -> @" << overlap.endpoint << " $" << overlap.param << "." << overlap.part << " on "
         << ranges(overlap.targets) << ", " << overlap.tensors << " x " << overlap.bytes << " bytes // "
         << (overlap.pattern < 0 ? "padding" : escaped(layout_.tensorPatterns[overlap.pattern].name)) << " -> "
         << escaped(target.params[overlap.param].name) << "\n";
    for (const ReplicaGroup &replicaGroup : overlap.replicaGroups) {
      out_ << "  from $" << replicaGroup.param << "." << replicaGroup.part << " on " << ranges(replicaGroup.meshRanks)
           << " by";
      for (const unsigned relation : replicaGroup.relations)
        out_ << " ~" << relation;
      out_ << "\n";
    }
  }

  void transfer(const Transfer &transfer) {
    out_ << "transfer " << transfer.overlap << " tensors " << transfer.first << ":" << transfer.first + transfer.count;
    if (transfer.cut())
      out_ << " dimension " << transfer.dimension << " local " << transfer.begin << ":" << transfer.end;
    if (transfer.source != Transfer::kUnassigned)
      out_ << " replica-group " << transfer.replicaGroup << " from " << transfer.source;
    out_ << " to " << transfer.target;
    if (transfer.route >= 0)
      out_ << " route " << transfer.route;
    out_ << "\n";
  }

  void operands(const RankSchedule &rank, const char *what, const Operands &list) {
    for (const Operand &operand : list)
      out_ << "    " << what << " b" << operand.buffer << " + " << operand.offset << " ^" << operand.shape
           << nameComment(rank, operand.buffer) << "\n";
  }

  std::string nameComment(const RankSchedule &rank, uint32_t buffer) {
    for (const BufferRange &range : rank.buffers)
      if (buffer >= range.first && buffer - range.first < range.count) {
        const Endpoint &endpoint = layout_.endpoints[range.endpoint];
        return " // " + escaped(endpoint.role + " " +
                                instanceName(layout_, endpoint, endpoint.params[range.param], range.meshRank,
                                             buffer - range.first));
      }
    return "";
  }

  void schedule() {
    out_ << "\nschedule " << module_.schedule.rounds << " rounds, " << module_.schedule.messages << " messages\n";
    for (const RankSchedule &rank : module_.schedule.ranks) {
      out_ << "rank " << rank.rank << " arena " << rank.arenaBytes << "\n";
      for (const BufferRange &range : rank.buffers)
        out_ << "  buffers b" << range.first << " x " << range.count << " of " << range.bytes << " bytes @"
             << range.endpoint << " " << range.meshRank << " $" << range.param << " // "
             << escaped(layout_.endpoints[range.endpoint].params[range.param].name) << "\n";
      for (size_t s = 0; s < rank.shapes.size(); ++s) {
        out_ << "  shape ^" << s << " row " << rank.shapes[s].rowBytes;
        for (const OperandLoop &loop : rank.shapes[s].loops)
          out_ << " x " << loop.count << " bytes " << loop.stride << " buffers " << loop.bufferStep;
        out_ << "\n";
      }
      for (const Step &step : rank.steps) {
        out_ << "  " << name(step.kind) << " round " << step.round << " " << step.bytes << " bytes";
        if (step.chunk > 0)
          out_ << " as chunks of " << step.chunk;
        if (step.peer >= 0)
          out_ << " message " << step.message << " peer " << step.peer;
        if (step.staging >= 0)
          out_ << " staging " << step.staging;
        if (step.slot > 0)
          out_ << " slot " << static_cast<int>(step.slot);
        if (step.level > 0)
          out_ << " level " << step.level;
        if (!step.after.empty())
          out_ << " after " << list(step.after);
        out_ << "\n";
        operands(rank, "in ", step.inputs);
        operands(rank, "out", step.outputs);
      }
    }
  }

  const Module &module_;
  const Layout &layout_;
  std::ostream &out_;
};

} // namespace

void print(const Module &module, std::ostream &out) { Printer(module, out).run(); }

} // namespace reshard::ir
