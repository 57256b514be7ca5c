#include "analysis/report/difference.h"

#include "analysis/flatbuffer_vectors.h"
#include "analysis/report/storage_forms.h"
#include "executor/load.h"
#include "support/nearest.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <set>
#include <vector>

namespace reshard::analysis {

using Json = nlohmann::ordered_json;

namespace {

using namespace schema;

constexpr const char *kName = "reshard-diff";

/// The numbers of one plan that reports show and --fail-on may use. Returns an error text, empty on success.
std::string numbers(const Plan &plan, std::map<std::string, double> &result) {
  const Manifest &m = plan.manifest();
  std::map<QuantizedBy, double> quantized; // instances of target params, all endpoints
  for (uint32_t e = 0; e < m.endpoints()->size(); ++e) {
    const QuantizedCounts counts = countQuantized(m, e);
    for (const auto &[by, formats] : counts.params)
      for (const auto &[format, count] : formats)
        quantized[by] += static_cast<double>(count);
  }
  uint64_t staged = 0;
  if (std::string error = peakStagedBytes(plan, staged); !error.empty())
    return error;
  result = {{"world", m.world()},
            {"rounds", m.rounds()},
            {"messages", static_cast<double>(m.messages())},
            {"transfers", static_cast<double>(m.transfers())},
            {"descriptors", static_cast<double>(m.descriptors())},
            {"target_bytes", static_cast<double>(m.bytes_target())},
            {"local_bytes", static_cast<double>(m.bytes_local())},
            {"remote_bytes", static_cast<double>(m.bytes_remote())},
            {"storage_bytes", static_cast<double>(m.bytes_storage())},
            {"staging_limit", static_cast<double>(m.staging_limit())},
            {"arena_bytes", static_cast<double>(m.arena_bytes())}, // of the rank with the largest arena
            {"quantized_on_arrival", quantized[QuantizedBy::arrival]},
            {"quantized_staged", quantized[QuantizedBy::staged]},
            {"quantized_by_sender", quantized[QuantizedBy::sender]},
            {"quantized_passthrough", quantized[QuantizedBy::passthrough]},
            {"staged_bytes", static_cast<double>(staged)},
            {"plan_bytes", static_cast<double>(plan.container().bytes())}};
  return {};
}

std::string describe(const Endpoint &endpoint, const Sharding &sharding) {
  std::string text = "(";
  for (uint32_t axis : orEmpty(sharding.axes()))
    text += endpoint.axes()->Get(axis)->name()->str() + ",";
  text += ")";
  for (uint32_t first : *sharding.first())
    text += std::to_string(first) + ";";
  for (const IndexBlock *run : orEmpty(sharding.blocks()))
    for (int64_t field : {run->from(), run->to(), run->length(), run->count(), run->from_step(), run->to_step()})
      text += std::to_string(field) + " ";
  return text;
}

/// Params of all endpoints by "role name", each with a text of all that determines its contents. The text of a
/// quantized view belongs to the param behind it.
std::map<std::string, std::string> params(const Plan &plan) {
  std::map<std::string, std::string> result;
  const Manifest &m = plan.manifest();
  for (const Endpoint *endpoint : *m.endpoints())
    for (const Param *param : orEmpty(endpoint->params())) {
      std::string text = dtypeName(param->dtype());
      const Param *named = param;
      for (const QuantizedView *view = param->view(); view; view = named->view()) {
        named = endpoint->params()->Get(view->codes());
        text +=
            std::string(" ") + EnumNameViewKind(view->kind()) + " " + EnumNameQuantization(view->format()) +
            (view->staged() ? " staged" : "") +
            (scaleLayoutOf(*view) == reshard::ScaleLayout::plain ? "" : std::string(" ") + name(scaleLayoutOf(*view)));
      }
      if (param->storage_dtype())
        text += std::string(" stored ") + dtypeName(*param->storage_dtype());
      for (const Extent *extent : orEmpty(param->shape()))
        for (int64_t length : *extent->at())
          text += " " + std::to_string(length);
      for (const Presence *rule : orEmpty(param->presence())) {
        text += " at " + endpoint->axes()->Get(rule->axis())->name()->str();
        for (uint64_t coordinate : orEmpty(rule->coordinates()))
          text += " " + std::to_string(coordinate);
      }
      for (uint32_t sharding : orEmpty(param->instances()))
        text += " for " + describe(*endpoint, *endpoint->shardings()->Get(sharding));
      if (param->refresh() && param->refresh()->size() > 0)
        text += " refresh " + param->refresh()->str();
      if (transformed(*param))
        text += " transform " + param->transform()->str();
      for (const Part *part : orEmpty(param->parts())) {
        text += part->pattern() < 0
                    ? " zeros"
                    : " holds " + m.tensor_patterns()->Get(static_cast<uint32_t>(part->pattern()))->name()->str();
        for (const PartDimension *dimension : orEmpty(part->dimensions()))
          text += " " + std::to_string(dimension->param()) +
                  describe(*endpoint, *endpoint->shardings()->Get(dimension->sharding()));
      }
      result[endpoint->role()->str() + " " + named->name()->str()] += text;
    }
  return result;
}

std::string number(double value) {
  char text[40];
  if (value == static_cast<double>(static_cast<int64_t>(value)))
    std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
  else
    std::snprintf(text, sizeof text, "%.4f", value);
  return text;
}

/// The grammar of expressions in YAML (docs/yaml.md) without `ceil`, over numbers with fractions: recursive descent.
class Condition {
public:
  Condition(const std::string &text, const std::map<std::string, double> &names, std::string &error)
      : text_(text), names_(names), error_(error) {}
  bool run() {
    const bool value = condition(disjunction());
    if (error_.empty() && at_ < text_.size())
      fail("unexpected '" + text_.substr(at_) + "'");
    return value;
  }

private:
  static constexpr int kMaxDepth = 64; // of parentheses, `not` and unary minus
  struct Value {
    double number = 0;
    bool condition = false; // number: whether it holds
  };

  Value fail(const std::string &message) {
    if (error_.empty())
      error_ = message + " at character " + std::to_string(at_ + 1);
    return {};
  }
  bool condition(Value value) {
    skip();
    if (!value.condition)
      fail("expected a comparison");
    return value.number != 0;
  }
  double number(Value value) {
    if (value.condition)
      fail("expected a number, found a comparison");
    return value.number;
  }
  void skip() {
    while (at_ < text_.size() && text_[at_] == ' ')
      ++at_;
  }
  std::string word() {
    skip();
    const size_t first = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '_' || text_[at_] == '.'))
      ++at_;
    return text_.substr(first, at_ - first);
  }
  bool takeWord(const char *expected) {
    const size_t before = at_;
    if (word() == expected)
      return true;
    at_ = before;
    return false;
  }
  bool takeSign(const char *expected) {
    skip();
    const size_t length = std::char_traits<char>::length(expected);
    if (!error_.empty() || text_.compare(at_, length, expected) != 0)
      return false;
    at_ += length;
    return true;
  }

  Value disjunction() {
    Value value = conjunction();
    while (error_.empty() && takeWord("or")) {
      const bool left = condition(value), right = condition(conjunction());
      value = {left || right ? 1.0 : 0.0, true};
    }
    return value;
  }
  Value conjunction() {
    Value value = negation();
    while (error_.empty() && takeWord("and")) {
      const bool left = condition(value), right = condition(negation());
      value = {left && right ? 1.0 : 0.0, true};
    }
    return value;
  }
  Value negation() {
    if (!takeWord("not"))
      return comparison();
    return deeper([&] { return Value{condition(negation()) ? 0.0 : 1.0, true}; });
  }
  Value comparison() {
    const Value left = sum();
    for (const char *sign : {"<=", ">=", "==", "!=", "<", ">"})
      if (takeSign(sign)) {
        const double a = number(left), b = number(sum());
        const std::string s = sign;
        const bool holds = s == "<="   ? a <= b
                           : s == ">=" ? a >= b
                           : s == "==" ? a == b
                           : s == "!=" ? a != b
                           : s == "<"  ? a < b
                                       : a > b;
        skip();
        return {holds ? 1.0 : 0.0, true};
      }
    return left;
  }
  Value sum() {
    Value value = product();
    while (error_.empty()) {
      const bool plus = takeSign("+");
      if (!plus && !takeSign("-"))
        break;
      const double left = number(value), right = number(product());
      value.number = plus ? left + right : left - right;
    }
    return value;
  }
  Value product() {
    Value value = unary();
    while (error_.empty()) {
      const bool times = takeSign("*");
      if (!times && !takeSign("/"))
        break;
      const double left = number(value), right = number(unary());
      if (!times && right == 0)
        return fail("found a division by zero");
      value.number = times ? left * right : left / right;
    }
    return value;
  }
  Value unary() {
    if (!takeSign("-"))
      return primary();
    return deeper([&] { return Value{-number(unary()), false}; });
  }
  Value primary() {
    if (takeSign("("))
      return deeper([&] {
        const Value value = disjunction();
        if (error_.empty() && !takeSign(")"))
          fail("expected ')'");
        return value;
      });
    skip();
    const size_t before = at_;
    const std::string token = word();
    if (!token.empty() && !std::isalpha(static_cast<unsigned char>(token[0])) && token[0] != '_') {
      double value = 0;
      const auto [end, problem] = std::from_chars(token.data(), token.data() + token.size(), value);
      if (problem == std::errc() && end == token.data() + token.size())
        return {value, false};
    } else if (const auto known = names_.find(token); known != names_.end()) {
      return {known->second, false};
    }
    at_ = before;
    if (token.empty())
      return fail("expected a number, a name or '('");
    std::vector<std::string> known;
    for (const auto &[name, ignored] : names_)
      known.push_back(name);
    return fail("unknown name '" + token + "'" + suggestion(token, known));
  }
  template <class Read> Value deeper(Read read) {
    if (++depth_ > kMaxDepth)
      return fail("the expression is nested too deeply: expected at most " + std::to_string(kMaxDepth) +
                  " levels of parentheses, 'not' and unary '-'");
    const Value value = read();
    --depth_;
    return value;
  }

  const std::string &text_;
  const std::map<std::string, double> &names_;
  std::string &error_;
  size_t at_ = 0;
  int depth_ = 0;
};

} // namespace

bool holds(const std::string &expression, const std::map<std::string, double> &names, std::string &error) {
  return Condition(expression, names, error).run();
}

int difference(const DifferenceOptions &options) {
  std::unique_ptr<Plan> before, after;
  for (const auto &[path, plan] : {std::make_pair(&options.before, &before), std::make_pair(&options.after, &after)})
    if (const std::string error = Plan::open(*path, *plan); !error.empty()) {
      printError(kName, error);
      return kUsage;
    }
  const bool equal = before->digest() == after->digest();

  std::map<std::string, double> a, b;
  for (const auto &[plan, result] : {std::make_pair(before.get(), &a), std::make_pair(after.get(), &b)})
    if (const std::string error = numbers(*plan, *result); !error.empty()) {
      printError(kName, error);
      return kUsage;
    }
  std::map<std::string, double> names;
  std::vector<std::string> added, removed, changed;
  std::vector<uint32_t> ranks;
  if (!equal) { // equal digests mean equal plans
    for (const Plan *plan : {before.get(), after.get()})
      for (uint32_t rank = 0; rank < plan->world(); ++rank) {
        const Segment *segment = nullptr;
        if (const std::string error = plan->segment(rank, segment); !error.empty()) {
          printError(kName, error);
          return kUsage;
        }
      }
    const auto pa = params(*before), pb = params(*after);
    for (const auto &[name, facts] : pb) {
      const auto at = pa.find(name);
      if (at == pa.end())
        added.push_back(name);
      else if (at->second != facts)
        changed.push_back(name);
    }
    for (const auto &[name, facts] : pa)
      if (!pb.count(name))
        removed.push_back(name);
    for (uint32_t rank = 0; rank < std::max(before->world(), after->world()); ++rank)
      if (rank >= before->world() || rank >= after->world() ||
          before->container().segmentDigest(rank) != after->container().segmentDigest(rank))
        ranks.push_back(rank);
  }
  for (const auto &[name, value] : b) {
    names[name] = value;
    names[name + "_before"] = a.at(name);
    names[name + "_delta"] = value - a.at(name);
    names[name + "_ratio"] = a.at(name) > 0 ? value / a.at(name) : value > 0 ? 1e9 : 1;
  }
  names["differ"] = !equal;
  names["params_added"] = static_cast<double>(added.size());
  names["params_removed"] = static_cast<double>(removed.size());
  names["params_changed"] = static_cast<double>(changed.size());
  names["ranks_changed"] = static_cast<double>(ranks.size());

  bool failed = !equal;
  if (!options.failOn.empty()) {
    std::string error;
    failed = holds(options.failOn, names, error);
    if (!error.empty()) {
      printError(kName, "--fail-on: " + error);
      return kUsage;
    }
  }

  if (options.format == "json") {
    Json measures = Json::object();
    for (const auto &[name, value] : b)
      measures[name] = {{"before", a.at(name)}, {"after", value}};
    std::printf("%s\n", Json{{"equal", equal},
                             {"digest", {{"before", before->digest()}, {"after", after->digest()}}},
                             {"numbers", measures},
                             {"params", {{"added", added}, {"removed", removed}, {"changed", changed}}},
                             {"ranks_changed", ranks},
                             {"failed", failed}}
                            .dump(2)
                            .c_str());
  } else if (equal) {
    std::printf("the plans are equal: %s\n", before->digest().c_str());
  } else {
    const bool markdown = options.format == "markdown";
    if (markdown)
      std::printf("| | before | after |\n|---|---:|---:|\n| digest | `%s` | `%s` |\n", before->digest().c_str(),
                  after->digest().c_str());
    else
      std::printf("%-16s %32s %32s\n", "digest", before->digest().c_str(), after->digest().c_str());
    for (const auto &[name, value] : b)
      if (value != a.at(name))
        std::printf(markdown ? "| %s | %s | %s |\n" : "%-16s %32s %32s\n", name.c_str(), number(a.at(name)).c_str(),
                    number(value).c_str());
    std::printf(markdown ? "\n%zu of %u ranks have another segment.\n\n" : "%zu of %u ranks have another segment\n",
                ranks.size(), std::max(before->world(), after->world()));
    for (const auto &[title, list] :
         {std::make_pair("added", &added), std::make_pair("removed", &removed), std::make_pair("changed", &changed)})
      for (const std::string &name : *list)
        std::printf(markdown ? "- %s `%s`\n" : "%s: %s\n", title, name.c_str());
  }
  return failed ? kNegative : kDone;
}

} // namespace reshard::analysis
