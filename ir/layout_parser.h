// The layout level of the textual IR: what transfers and schedules stand on. Used by parse.cpp alone.
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
    const size_t at = place();
    const std::string text = string();
    const auto exchange = parseExchange(text);
    if (!exchange)
      fail(at, "expected auto, p2p, broadcast or gather-rounds, found '" + text + "'");
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
    const size_t at = place();
    const std::string text = word();
    const auto type = parseDType(text);
    if (!type)
      fail(at, "expected a dtype, found '" + text + "'");
    return *type;
  }
  unsigned variable() {
    const size_t at = place();
    const std::string text = word();
    for (unsigned v = 0; v < layout_.variables.size(); ++v)
      if (layout_.variables[v].name == text)
        return v;
    fail(at, "expected an index variable, found '" + text + "'");
  }
  unsigned axis(const Endpoint &endpoint) {
    const size_t at = place();
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
  Segments segments() {
    Segments result;
    if (take("none"))
      return result;
    while (take("[")) {
      Segment s;
      const size_t at = place();
      s.from = number();
      expect(":");
      if (__builtin_sub_overflow(number(), s.from, &s.length) || s.length <= 0)
        fail(at, "expected a range that is not empty");
      const bool periodic = take("step");
      if (periodic) {
        s.fromStep = number();
        expect("x");
        s.count = number();
        if (s.count < 1)
          fail(at, "expected a count of at least 1");
      }
      expect("->");
      s.to = number();
      if (periodic)
        s.toStep = after("step");
      expect("]");
      result.push_back(s);
    }
    if (result.empty())
      fail(place(), "expected segments or 'none', found '" + std::string(peek()) + "'");
    return result;
  }
  void counted(size_t have, const char *what) {
    const size_t at = place();
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
      counted(layout_.families.size(), "tensor");
      Family family;
      family.name = string();
      family.dtype = dtype();
      family.shape = list<int64_t>();
      while (take("for")) {
        family.variables.push_back(variable());
        family.exists.push_back(segments());
        expect(";");
      }
      layout_.families.push_back(std::move(family));
    }
    while (take("untaken"))
      layout_.untaken.push_back(string());
    while (take("endpoint"))
      endpoint();
    if (layout_.endpoints.empty())
      fail(place(), "expected 'endpoint', found '" + std::string(peek()) + "'");
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
    while (take("axis")) {
      Axis axis;
      axis.name = word();
      axis.size = number();
      axis.stride = after("stride");
      endpoint.axes.push_back(axis);
    }
    while (take("share")) {
      expect("#");
      counted(endpoint.shares.size(), "share");
      expect("over");
      Share share;
      share.axes = axes(endpoint);
      if (take("unit"))
        share.unit = number();
      while (take("|"))
        share.at.push_back(segments());
      endpoint.shares.push_back(std::move(share));
    }
    while (take("place")) {
      const size_t at = place();
      if (variable() != endpoint.placement.size())
        fail(at, "expected the index variables in order");
      expect("#");
      reference(endpoint.placement.emplace_back(), endpoint.shares.size(), "share");
    }
    while (take("authority"))
      endpoint.authority.push_back(presence(endpoint));
    if (take("generations"))
      endpoint.generations = list<uint32_t>();
    if (take("relabelled")) {
      endpoint.relabelled = number();
      expect("bytes");
    }
    while (take("without"))
      endpoint.leftOut.push_back(string());
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
    if (take("stored"))
      param.stored = dtype();
    param.made = take("made");
    const bool gathered = take("gathered");
    if (take("face"))
      face(param, gathered);
    else if (gathered)
      fail(place(), "expected 'face', found '" + std::string(peek()) + "'");
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
      reference(param.instances.emplace_back(), endpoint.shares.size(), "share");
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
        reference(part.family, layout_.families.size(), "tensor");
      } else {
        expect("zeros");
      }
      while (take("#")) {
        PartDimension dimension;
        reference(dimension.share, endpoint.shares.size(), "share");
        expect("->");
        if (!take("name"))
          reference(dimension.param, param.shape.size(), "dimension");
        part.dimensions.push_back(dimension);
      }
      param.parts.push_back(std::move(part));
    }
    endpoint.params.push_back(std::move(param));
  }

  void face(Param &param, bool gathered) {
    Face face;
    face.gathered = gathered;
    size_t at = place();
    if (const auto kind = parseFaceKind(std::string(word())))
      face.kind = *kind;
    else
      fail(at, "expected what a face shows");
    at = place();
    if (const auto format = parseQuantization(std::string(word())))
      face.format = *format;
    else
      fail(at, "expected a format of quantised params");
    face.swizzled = take("swizzled");
    expect("of");
    for (unsigned *number : {&face.codes, &face.scales, &face.tensorScale}) {
      expect("$");
      *number = static_cast<unsigned>(this->number());
    }
    if (take("part"))
      face.part = static_cast<unsigned>(number());
    if (take("over"))
      face.over = static_cast<unsigned>(number());
    param.face = face;
  }

  Layout &layout_;
};

} // namespace reshard::ir
