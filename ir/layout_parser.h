// SPDX-License-Identifier: Apache-2.0
// Parses the layout level of the textual IR. Used by parse.cpp only.
#pragma once

#include "ir/ir.h"
#include "ir/lexer.h"

namespace reshard::ir {

class LayoutParser : protected Lexer {
protected:
  LayoutParser(std::string_view text, Layout &layout) : Lexer(text), layout_(layout) {}

  void files() {
    if (!take("files"))
      return;
    layout_.files.megatron = take("megatron");
    expect("exchange");
    const size_t at = position();
    const std::string text = string();
    const auto exchange = parseExchange(text);
    if (!exchange)
      fail(at, "expected auto, nodes, p2p, broadcast or gather-rounds, found '" + text + "'");
    layout_.files.exchange = *exchange;
    expect("group");
    while (is("\""))
      layout_.files.group.push_back(string());
  }

  void topology() {
    if (!take("topology"))
      return;
    Topology &t = layout_.topology;
    t.linkRate = after("link");
    t.linkLatency = after("latency");
    t.nicsPerNode = after("nics");
    t.nicRate = after("rate");
    t.nicLatency = after("latency");
    t.copyRate = after("copy");
  }

  DType dtype() {
    const size_t at = position();
    const std::string text = word();
    const auto type = parseDType(text);
    if (!type)
      fail(at, "expected a dtype, found '" + text + "'");
    return *type;
  }
  unsigned variable() {
    const size_t at = position();
    const std::string text = word();
    for (unsigned v = 0; v < layout_.variables.size(); ++v)
      if (layout_.variables[v].name == text)
        return v;
    fail(at, "expected an index variable, found '" + text + "'");
  }
  unsigned axis(const Endpoint &endpoint) {
    const size_t at = position();
    const std::string text = word();
    for (unsigned a = 0; a < endpoint.axes.size(); ++a)
      if (endpoint.axes[a].name == text)
        return a;
    fail(at, "expected an axis of this endpoint, found '" + text + "'");
  }
  std::vector<unsigned> axes(const Endpoint &endpoint) {
    std::vector<unsigned> result;
    expect("(");
    while (!take(")")) {
      if (!result.empty())
        expect(",");
      result.push_back(axis(endpoint));
    }
    return result;
  }
  IndexMap indexMap() {
    IndexMap result;
    if (take("none"))
      return result;
    while (take("[")) {
      IndexBlock s;
      const size_t at = position();
      s.from = number();
      expect(":");
      if (__builtin_sub_overflow(number(), s.from, &s.length) || s.length <= 0)
        fail(at, "expected a range that is not empty, found " + std::to_string(s.from) + ":…");
      const bool periodic = take("step");
      if (periodic) {
        s.fromStep = number();
        expect("x");
        s.count = number();
        if (s.count < 1)
          fail(at, "expected a count of at least 1, found " + std::to_string(s.count));
      }
      expect("->");
      s.to = number();
      if (periodic)
        s.toStep = after("step");
      expect("]");
      result.push_back(s);
    }
    if (result.empty())
      fail(position(), "expected index blocks '[…]' or 'none', found '" + std::string(peek()) + "'");
    return result;
  }
  /// Items of one kind are numbered from 0: reads the number of the next one.
  void counted(size_t have, const char *what) {
    const size_t at = position();
    const int64_t n = number();
    if (n != static_cast<int64_t>(have))
      fail(at, "expected " + std::string(what) + " " + std::to_string(have) + ", found " + std::to_string(n));
  }

  void layout() {
    while (take("index")) {
      IndexVariable variable;
      variable.name = word();
      variable.size = number();
      layout_.variables.push_back(variable);
    }
    while (take("tensor")) {
      expect("%");
      counted(layout_.tensorPatterns.size(), "tensor");
      TensorPattern pattern;
      pattern.name = string();
      pattern.dtype = dtype();
      pattern.shape = list<int64_t>();
      while (take("for")) {
        pattern.variables.push_back(variable());
        pattern.exists.push_back(indexMap());
        expect(";");
      }
      layout_.tensorPatterns.push_back(std::move(pattern));
    }
    layout_.foldsCopies = take("fold-copies");
    while (take("unused"))
      layout_.unused.push_back(string());
    while (take("endpoint"))
      endpoint();
    if (layout_.endpoints.empty())
      fail(position(), "expected 'endpoint', found '" + std::string(peek()) + "'");
  }

  void endpoint() {
    Endpoint endpoint;
    endpoint.role = string();
    expect("layout");
    endpoint.layout = string();
    endpoint.checkpoint = take("checkpoint");
    endpoint.storage = endpoint.checkpoint || take("files");
    if (!endpoint.storage)
      expect("ranks");
    endpoint.ranks = ranges();
    if (endpoint.storage) {
      expect("in");
      endpoint.directory = string();
    }
    if (take("format")) {
      const size_t at = position();
      const std::string text = string();
      const auto format = storageFormatNamed(text);
      if (!format)
        fail(at, "expected a storage format, found '" + text + "'");
      endpoint.format = *format;
    }
    if (take("replicas"))
      endpoint.replicas = number();
    while (take("axis")) {
      Axis axis;
      axis.name = word();
      axis.size = number();
      axis.stride = after("stride");
      endpoint.axes.push_back(axis);
    }
    while (take("sharding")) {
      expect("#");
      counted(endpoint.shardings.size(), "sharding");
      expect("over");
      Sharding sharding;
      sharding.axes = axes(endpoint);
      if (take("unit"))
        sharding.unit = number();
      while (take("|"))
        sharding.at.push_back(indexMap());
      endpoint.shardings.push_back(std::move(sharding));
    }
    while (take("placement")) {
      const size_t at = position();
      const unsigned number = variable();
      if (number != endpoint.placement.size())
        fail(at, "expected the placements in the order of the index variables, found that of number " +
                     std::to_string(number) + " after " + std::to_string(endpoint.placement.size()));
      expect("#");
      reference(endpoint.placement.emplace_back(), endpoint.shardings.size(), "sharding");
    }
    while (take("authority"))
      endpoint.authority.push_back(presence(endpoint));
    if (take("epochs"))
      endpoint.epochs = list<uint32_t>();
    if (take("relabeled")) {
      endpoint.relabeled = number();
      expect("bytes");
    }
    while (take("omitted"))
      endpoint.omitted.push_back(string());
    while (take("param"))
      param(endpoint);
    layout_.endpoints.push_back(std::move(endpoint));
  }

  Presence presence(const Endpoint &endpoint) {
    Presence rule;
    rule.axis = axis(endpoint);
    rule.coordinates = list<int64_t>();
    return rule;
  }

  void param(Endpoint &endpoint) {
    expect("$");
    counted(endpoint.params.size(), "param");
    Param param;
    param.name = string();
    param.dtype = dtype();
    if (take("storage"))
      param.storageDtype = dtype();
    for (const OverflowRule rule : {OverflowRule::saturate, OverflowRule::infinity})
      if (take(kOverflowRuleNames[static_cast<size_t>(rule)]))
        param.overflow = rule;
    param.derived = take("derived");
    const bool staged = take("staged");
    if (take("view"))
      view(param, staged);
    else if (staged)
      fail(position(), "expected 'view', found '" + std::string(peek()) + "'");
    expect("[");
    while (!take("]")) {
      if (!param.shape.empty())
        expect(",");
      Extent extent;
      if (is("(")) {
        extent.axes = axes(endpoint);
        extent.at = list<int64_t>();
      } else {
        extent.at = {number()};
      }
      param.shape.push_back(std::move(extent));
    }
    while (take("for")) {
      param.variables.push_back(variable());
      expect("#");
      reference(param.instances.emplace_back(), endpoint.shardings.size(), "sharding");
    }
    while (take("at"))
      param.presence.push_back(presence(endpoint));
    if (take("refresh"))
      param.refresh = string();
    if (take("transform"))
      param.transform = string();
    if (take("from"))
      param.origin = string();
    while (is("holds") || is("zeros")) {
      Part part;
      if (take("holds")) {
        expect("%");
        reference(part.pattern, layout_.tensorPatterns.size(), "tensor");
      } else {
        expect("zeros");
      }
      while (take("#")) {
        PartDimension dimension;
        reference(dimension.sharding, endpoint.shardings.size(), "sharding");
        expect("->");
        if (!take("name"))
          reference(dimension.param, param.shape.size(), "dimension");
        part.dimensions.push_back(dimension);
      }
      param.parts.push_back(std::move(part));
    }
    endpoint.params.push_back(std::move(param));
  }

  void view(Param &param, bool staged) {
    QuantizedView view;
    view.staged = staged;
    size_t at = position();
    const std::string kindName = word();
    if (const auto kind = parseViewKind(kindName))
      view.kind = *kind;
    else
      fail(at, "expected elements, codes, scales, plain_scales or amax, found '" + kindName + "'");
    at = position();
    const std::string formatName = word();
    if (const auto format = quantizationNamed(formatName))
      view.format = *format;
    else
      fail(at, "expected " + formatNames() + ", found '" + formatName + "'");
    for (size_t layout = 1; layout < std::size(kScaleLayoutNames); ++layout)
      if (take(kScaleLayoutNames[layout]))
        view.scaleLayout = static_cast<ScaleLayout>(layout);
    expect("of");
    for (unsigned *number : {&view.codes, &view.scales, &view.tensorScale}) {
      expect("$");
      *number = static_cast<unsigned>(this->number());
    }
    if (take("part"))
      view.part = static_cast<unsigned>(number());
    if (take("over"))
      view.amaxDimensions = static_cast<unsigned>(number());
    param.view = view;
  }

  /// "a, b or c"
  static std::string formatNames() {
    std::string names;
    for (const QuantizedFormat &format : kQuantizedFormats)
      names += (names.empty()                                ? ""
                : &format == std::end(kQuantizedFormats) - 1 ? " or "
                                                             : ", ") +
               std::string(format.name);
    return names;
  }

  Layout &layout_;
};

} // namespace reshard::ir
