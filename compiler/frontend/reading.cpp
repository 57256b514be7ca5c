// SPDX-License-Identifier: Apache-2.0
// Readers that several files of the frontend use: identifiers, dtypes, expressions, ranges, placeholders, globs, and
// the rules by which a param is stored.
#include "compiler/frontend/reading.h"

#include <algorithm>
#include <llvm/ADT/StringExtras.h>

namespace reshard {

namespace {

bool isLetter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

std::vector<std::string> namesOf(const std::vector<ir::IndexVariable> &variables) {
  std::vector<std::string> names;
  names.reserve(variables.size());
  for (const ir::IndexVariable &variable : variables)
    names.push_back(variable.name);
  return names;
}

} // namespace

// ------------------------------------------------------------------------------------------------------- scalars

std::optional<std::string> readIdentifier(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  auto name = readText(node, what, diagnostics);
  if (!name)
    return std::nullopt;
  if (!isLetter((*name)[0]) ||
      !std::all_of(name->begin(), name->end(), [](char c) { return isLetter(c) || llvm::isDigit(c); })) {
    refuse(node, "a name of letters, digits and '_'", what, diagnostics);
    return std::nullopt;
  }
  for (const char *word : {"and", "or", "not", "true", "false", "ceil"})
    if (*name == word) {
      diagnostics.error(node.at,
                        "'" + *name + "' is a reserved word in expressions, expected another name for " + what);
      return std::nullopt;
    }
  return name;
}

std::optional<int64_t> readDimensionKey(Node key, Diagnostics &diagnostics) {
  key.quoted = false;
  return readInteger(key, "a dimension", 0, kMaxDimensions - 1, diagnostics);
}

std::optional<bool> readBoolean(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  if (node.kind == Node::Kind::scalar && !node.quoted && (node.text == "true" || node.text == "false"))
    return node.text == "true";
  refuse(node, "true or false", what, diagnostics);
  return std::nullopt;
}

std::optional<ir::DType> readDType(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  const auto text = readText(node, what, diagnostics);
  if (!text)
    return std::nullopt;
  if (const auto type = ir::parseDType(*text))
    return type;
  std::vector<std::string> known;
  for (int i = 0; i <= static_cast<int>(ir::DType::boolean); ++i)
    known.push_back(ir::name(static_cast<ir::DType>(i)));
  std::string hint = suggestion(*text, known);
  if (hint.empty())
    for (const std::string &each : known)
      hint += (hint.empty() ? "; known here: " : ", ") + each;
  diagnostics.error(node.at, "unknown dtype '" + *text + "'" + hint);
  return std::nullopt;
}

std::optional<Expression> readExpression(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  if (node.kind != Node::Kind::scalar || node.text.empty()) {
    refuse(node, "a number or an expression", what, diagnostics);
    return std::nullopt;
  }
  Expression expression{node.text, locationIn(node, 0)};
  return checkSyntax(expression, diagnostics) ? std::optional(std::move(expression)) : std::nullopt;
}

std::optional<int64_t> readValue(const Node &node, const std::string &what, const Environment &names,
                                 const IntegerRange &range, Diagnostics &diagnostics) {
  const auto expression = readExpression(node, what, diagnostics);
  const auto value = expression ? evaluate(*expression, names, diagnostics) : std::nullopt;
  if (!value || (*value >= range.first && *value <= range.last))
    return value;
  const std::string number = std::to_string(*value);
  diagnostics.error(node.at, what + " is " + number + (node.text == number ? "" : " (" + node.text + ")") +
                                 ", expected " + interval(range.first, range.last));
  return std::nullopt;
}

std::optional<IntegerRange> readIntegerRange(const Node &node, const std::string &what, const Environment &names,
                                             int64_t size, Diagnostics &diagnostics) {
  if (node.kind != Node::Kind::scalar || node.text.empty()) {
    refuse(node, "a number or a range 'a..b'", what, diagnostics);
    return std::nullopt;
  }
  constexpr std::string_view kDots = "..";
  const size_t dots = node.text.find(kDots);
  IntegerRange range;
  auto read = [&](size_t begin, size_t end, int64_t &value) {
    begin = std::min(node.text.find_first_not_of(' ', begin), end);
    const Expression part{node.text.substr(begin, end - begin), locationIn(node, begin)};
    const auto read = evaluate(part, names, diagnostics);
    value = read.value_or(0);
    return read.has_value();
  };
  if (dots == std::string::npos) {
    if (!read(0, node.text.size(), range.first))
      return std::nullopt;
    range.last = range.first;
  } else {
    const bool first = read(0, dots, range.first);
    if (!read(dots + kDots.size(), node.text.size(), range.last) || !first)
      return std::nullopt;
    if (range.last == range.first - 1)
      return range;
    if (range.last < range.first) {
      diagnostics.error(node.at, what + ": range " + std::to_string(range.first) + ".." + std::to_string(range.last) +
                                     " ends before it begins");
      return std::nullopt;
    }
  }
  if (size == kUnknownValue || (range.first >= 0 && range.last < size))
    return range;
  diagnostics.error(node.at, what + ": " + std::to_string(range.first < 0 ? range.first : range.last) +
                                 " is out of range, " +
                                 (size == 0 ? "because there are no values" : "expected " + interval(0, size - 1)));
  return std::nullopt;
}

// ------------------------------------------------------------------------------------------------- index variables

constexpr const char *kNameBraces =
    ": braces in a name are index variables; --rename of reshard-compile and reshard-exec "
    "gives a tensor of a checkpoint a name without them";

bool checkVariable(const std::string &name, Location at, const std::vector<ir::IndexVariable> &variables,
                   Diagnostics &diagnostics) {
  const std::vector<std::string> known = namesOf(variables);
  if (std::find(known.begin(), known.end(), name) != known.end())
    return true;
  const std::string hint = suggestion(name, known);
  diagnostics.error(at, "unknown index variable '" + name + "'" +
                            (known.empty() ? std::string(", and the model has no 'index'") + kNameBraces : hint));
  return false;
}

std::optional<std::vector<Placeholder>> readPlaceholders(const Node &name,
                                                         const std::vector<ir::IndexVariable> &variables, bool local,
                                                         Diagnostics &diagnostics) {
  std::vector<Placeholder> result;
  const std::string &text = name.text;
  bool ok = true;
  auto error = [&](size_t offset, const std::string &message) {
    diagnostics.error(locationIn(name, offset), message);
    ok = false;
  };
  for (size_t at = text.find_first_of("{}"); at != std::string::npos; at = text.find_first_of("{}", at)) {
    const size_t end = text.find_first_of("{}", at + 1);
    if (text[at] == '}' || end == std::string::npos || text[end] == '{') {
      error(at, (text[at] == '}' ? "'}' without a '{' in '" : "'{' without a '}' in '") + text + "'" + kNameBraces);
      break;
    }
    using Kind = Placeholder::Kind;
    Placeholder placeholder{text.substr(at + 1, end - at - 1), Kind::value};
    const size_t dot = placeholder.variable.find('.');
    const std::string suffix = dot == std::string::npos ? "" : placeholder.variable.substr(dot);
    placeholder.variable.resize(std::min(dot, placeholder.variable.size()));
    placeholder.kind = suffix == ".local" ? Kind::local : suffix == ".chunk" ? Kind::chunk : Kind::value;
    if (placeholder.kind != Kind::value && !local)
      error(at + 1, "'{" + placeholder.variable + suffix + "}' is not allowed in the name of a tensor, expected '{" +
                        placeholder.variable + "}'");
    else if (!suffix.empty() && placeholder.kind == Kind::value)
      error(at + 1, "unknown suffix '" + suffix + "' in a placeholder, expected '.local', '.chunk' or none");
    else if (std::any_of(result.begin(), result.end(), [&](const Placeholder &p) {
               return p.variable == placeholder.variable &&
                      (p.kind == Kind::chunk) == (placeholder.kind == Kind::chunk);
             }))
      error(at + 1, "index variable '" + placeholder.variable + "' occurs twice in one name");
    else
      ok = checkVariable(placeholder.variable, locationIn(name, at + 1), variables, diagnostics) && ok;
    result.push_back(std::move(placeholder));
    at = end + 1;
  }
  for (const Placeholder &each : result)
    if (each.kind == Placeholder::Kind::chunk && std::none_of(result.begin(), result.end(), [&](const Placeholder &p) {
          return p.variable == each.variable && p.kind != Placeholder::Kind::chunk;
        }))
      error(0, "'{" + each.variable + ".chunk}' requires '{" + each.variable + "}' or '{" + each.variable + ".local}'");
  return ok ? std::optional(std::move(result)) : std::nullopt;
}

Node withValues(Node name, const Model &model) {
  for (size_t at = name.text.find('{'); at != std::string::npos; at = name.text.find('{', at + 1)) {
    const size_t end = name.text.find('}', at);
    if (end == std::string::npos)
      break;
    const auto value = model.let.find(name.text.substr(at + 1, end - at - 1));
    if (value != model.let.end() && !model.variablesAt.contains(value->first) && value->second != kUnknownValue)
      name.text.replace(at, end + 1 - at, std::to_string(value->second));
  }
  return name;
}

// ------------------------------------------------------------------------------------------------ axes, globs

AxisRules readAxisRules(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  AxisRules result;
  if (!checkMap(node, what, diagnostics))
    return result;
  for (const auto &[axis, value] : node.entries) {
    const auto name = readIdentifier(axis, "an axis", diagnostics);
    AxisCoordinates rule;
    rule.at = axis.at;
    if (value.kind == Node::Kind::sequence && value.items.empty())
      diagnostics.error(value.at, what + " has an empty list of coordinates, expected at least one" +
                                      (what == "'at'" ? "; to omit a param, use 'when: false'" : ""));
    for (const Node *item : valueOrItems(value))
      if (auto coordinate = readExpression(*item, "a coordinate", diagnostics))
        rule.coordinates.push_back(std::move(*coordinate));
    if (name)
      result.emplace_back(*name, std::move(rule));
  }
  return result;
}

std::vector<Glob> readGlobs(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  std::vector<Glob> result;
  if (node.items.size() > kMaxGlobs) {
    diagnostics.error(node.at, what + " has " + std::to_string(node.items.size()) + " globs, expected at most " +
                                   std::to_string(kMaxGlobs));
    return result;
  }
  for (const Node *item : valueOrItems(node))
    if (const auto glob = readText(*item, what, diagnostics))
      result.push_back({*glob, item->at});
  return result;
}

// ------------------------------------------------------------------------------------------------ storage rules

namespace {

/// The index in `choices` of the node's text; any other text is an error. `what`: "format".
std::optional<size_t> readChoice(const Node &node, const std::string &what, const std::vector<std::string> &choices,
                                 Diagnostics &diagnostics) {
  const auto text = readText(node, what, diagnostics);
  if (!text)
    return std::nullopt;
  const auto found = std::find(choices.begin(), choices.end(), *text);
  if (found == choices.end())
    diagnostics.error(node.at, "unknown " + what + " '" + *text + "'" + suggestion(*text, choices));
  return found == choices.end() ? std::nullopt : std::optional<size_t>(found - choices.begin());
}

/// Checks that the only placeholder in a name pattern for codes or scales is `{name}`, any number of times.
bool checkNamePattern(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  constexpr std::string_view kName = "{name}";
  const std::string &text = node.text;
  for (size_t at = text.find_first_of("{}"); at != std::string::npos; at = text.find_first_of("{}", at)) {
    if (text.compare(at, kName.size(), kName) != 0) {
      const size_t end = text[at] == '{' ? text.find('}', at) : at;
      diagnostics.error(locationIn(node, at),
                        what + " has '" + text.substr(at, end == std::string::npos ? end : end - at + 1) +
                            "', expected only the placeholder '{name}', which is the param's name");
      return false;
    }
    at += kName.size();
  }
  return true;
}

/// The names of the formats with a property.
template <class Property> std::string namesOf(Property has) {
  std::string names;
  for (const QuantizedFormat &format : kQuantizedFormats)
    if (has(format))
      names += (names.empty() ? "" : ", ") + std::string(format.name);
  return names;
}

void readScaleLayout(const Node &node, const QuantizedFormat &format, ir::ScaleLayout &layout,
                     Diagnostics &diagnostics) {
  const auto choice =
      readChoice(node, "scale_layout", {std::begin(kScaleLayoutNames), std::end(kScaleLayoutNames)}, diagnostics);
  if (!choice)
    return;
  layout = static_cast<ir::ScaleLayout>(*choice);
  if (format.allows(layout))
    return;
  const std::string other =
      format.layout == ir::ScaleLayout::plain ? "" : std::string(" or '") + name(format.layout) + "'";
  diagnostics.error(node.at, std::string("format ") + format.name + " has no " + name(layout) +
                                 " scales, expected 'plain'" + other);
}

std::optional<QuantizeRule> readQuantize(const Node &node, bool endpoint, Diagnostics &diagnostics) {
  std::vector<std::string> formats;
  for (const QuantizedFormat &format : kQuantizedFormats)
    formats.push_back(format.name);
  formats.push_back("none");
  QuantizeRule rule;
  rule.at = node.at;
  std::optional<Fields> fields;
  const Node *format = &node;
  if (node.kind == Node::Kind::map) {
    fields.emplace(node, "'quantize'", diagnostics);
    if (format = fields->require("format"); !format)
      return std::nullopt;
  }
  const auto number = readChoice(*format, "format", formats, diagnostics);
  if (!number)
    return std::nullopt;
  const QuantizedFormat *found = *number < std::size(kQuantizedFormats) ? &kQuantizedFormats[*number] : nullptr;
  if (found) {
    rule.format = found->number;
    rule.codes = std::string("{name}") + found->codeSuffix;
    rule.scale = std::string("{name}") + found->scaleSuffix;
    rule.tensorScale = "{name}_scale_2";
  }
  if (!fields)
    return rule;
  auto name = [&](const char *key, const std::string &missing, std::string &value) {
    const Node *given = fields->find(key);
    if (given && !missing.empty())
      diagnostics.error(given->at, std::string("'") + key + "' requires a format with " + missing);
    else if (given)
      if (const auto text = readText(*given, std::string("'") + key + "'", diagnostics);
          text && checkNamePattern(*given, std::string("'") + key + "'", diagnostics)) {
        value = *text;
        if (endpoint && text->find("{name}") == std::string::npos)
          diagnostics.error(given->at,
                            std::string("'") + key +
                                "' of an endpoint must contain the placeholder '{name}', which is the param's name");
      }
  };
  name("codes", "", rule.codes);
  name("scale", "", rule.scale);
  name("tensor_scale",
       found && found->tensorScale() ? "" : "tensor scales: " + namesOf([](const QuantizedFormat &format) {
                                              return format.tensorScale();
                                            }),
       rule.tensorScale);
  name("shape", "", rule.shape);
  if (const Node *codes = fields->find("codes_shape"))
    if (const auto choice = readChoice(*codes, "codes_shape", {"rows", "blocks"}, diagnostics);
        choice && *choice == 1) {
      rule.codeBlocks = true;
      if (found && !found->codeBlocks())
        diagnostics.error(codes->at, std::string("format ") + found->name + " has no 'codes_shape: blocks', expected " +
                                         namesOf([](const QuantizedFormat &format) { return format.codeBlocks(); }));
    }
  if (const Node *layout = fields->find("scale_layout"); layout && found)
    readScaleLayout(*layout, *found, rule.scaleLayout, diagnostics);
  if (const Node *by = fields->find("by"))
    if (const auto choice = readChoice(*by, "side", {"receiver", "sender"}, diagnostics)) {
      rule.by = *choice == 1 ? QuantizeRule::By::sender : QuantizeRule::By::receiver;
    }
  for (const auto &[key, globs] : {std::pair("only", &rule.only), std::pair("ignore", &rule.ignore)})
    if (endpoint)
      if (const Node *list = fields->find(key))
        *globs = readGlobs(*list, std::string("'") + key + "'", diagnostics);
  fields->finish();
  return rule;
}

} // namespace

StorageRule readStorageRule(Fields &fields, bool endpoint, Diagnostics &diagnostics) {
  StorageRule form;
  if (const Node *dtype = fields.find("dtype");
      dtype && endpoint && dtype->kind == Node::Kind::scalar && dtype->text == "stored")
    form.storedAt = dtype->at;
  else if (dtype)
    if (const auto type = readDType(*dtype, "'dtype'", diagnostics))
      form.dtype.emplace(*type, dtype->at);
  if (const Node *convert = fields.find("convert")) {
    const auto rule =
        readChoice(*convert, "convert", {std::begin(kOverflowRuleNames), std::end(kOverflowRuleNames)}, diagnostics);
    form.convert.emplace(static_cast<ir::OverflowRule>(rule.value_or(0)), convert->at);
  }
  if (const Node *quantize = fields.find("quantize")) {
    form.quantize = readQuantize(*quantize, endpoint, diagnostics);
    if (form.quantize && form.quantize->format && form.dtype && !endpoint)
      diagnostics.error(
          form.dtype->second,
          "'dtype' cannot be combined with 'quantize', which sets the dtype of the param; remove 'dtype'");
  }
  return form;
}

} // namespace reshard
