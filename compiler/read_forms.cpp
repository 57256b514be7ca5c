// How a param, or all of an endpoint's, stand in memory: `dtype`, `convert`, `quantize`.

#include "compiler/reading.h"

#include <algorithm>

namespace reshard {

namespace {

/// One of a few words.
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

/// The pattern of a name of scales; in braces stands `{name}` alone, any number of times.
bool checkScaleName(const Node &node, const std::string &what, Diagnostics &diagnostics) {
  constexpr std::string_view kName = "{name}";
  const std::string &text = node.text;
  for (size_t at = text.find_first_of("{}"); at != std::string::npos; at = text.find_first_of("{}", at)) {
    if (text.compare(at, kName.size(), kName) != 0) {
      const size_t end = text[at] == '{' ? text.find('}', at) : at;
      diagnostics.error(inside(node, at),
                        what + " has '" + text.substr(at, end == std::string::npos ? end : end - at + 1) +
                            "', expected '{name}' alone in braces, which stands for the param's name");
      return false;
    }
    at += kName.size();
  }
  return true;
}

std::optional<QuantizeRule> readQuantize(const Node &node, bool endpoint, Diagnostics &diagnostics) {
  static const std::vector<std::string> kFormats = {"mxfp8", "block_fp8", "nvfp4", "none"};
  QuantizeRule rule;
  rule.at = node.at;
  std::optional<Fields> fields;
  const Node *format = &node;
  if (node.kind == Node::Kind::map) {
    fields.emplace(node, "'quantize'", diagnostics);
    if (format = fields->require("format"); !format)
      return std::nullopt;
  }
  const auto number = readChoice(*format, "format", kFormats, diagnostics);
  if (!number)
    return std::nullopt;
  if (*number < 3)
    rule.format = static_cast<ir::Quantization>(*number);
  rule.scale = rule.format == ir::Quantization::block_fp8 ? "{name}_scale_inv" : "{name}_scale";
  rule.tensorScale = "{name}_scale_2";
  if (!fields)
    return rule;
  auto name = [&](const char *key, bool has, std::string &value) {
    const Node *given = fields->find(key);
    if (given && !has)
      diagnostics.error(given->at, std::string("'") + key + "' beside another format than nvfp4, which alone has one");
    else if (given)
      if (const auto text = readText(*given, std::string("'") + key + "'", diagnostics);
          text && checkScaleName(*given, std::string("'") + key + "'", diagnostics)) {
        value = *text;
        if (endpoint && text->find("{name}") == std::string::npos)
          diagnostics.error(given->at, std::string("'") + key +
                                           "' of an endpoint lacks '{name}', which stands for a param's name");
      }
  };
  name("scale", true, rule.scale);
  name("tensor_scale", rule.format == ir::Quantization::nvfp4, rule.tensorScale);
  if (const Node *layout = fields->find("scale_layout"))
    if (const auto choice = readChoice(*layout, "scale_layout", {"plain", "swizzled"}, diagnostics)) {
      rule.swizzled = *choice == 1;
      if (rule.swizzled && rule.format == ir::Quantization::block_fp8)
        diagnostics.error(layout->at, "scales of block_fp8 are not swizzled, expected 'plain'");
    }
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

StoredForm readStoredForm(Fields &fields, bool endpoint, Diagnostics &diagnostics) {
  StoredForm form;
  if (const Node *dtype = fields.find("dtype");
      dtype && endpoint && dtype->kind == Node::Kind::scalar && dtype->text == "stored")
    form.storedAt = dtype->at;
  else if (dtype)
    if (const auto type = readDType(*dtype, "'dtype'", diagnostics))
      form.dtype.emplace(*type, dtype->at);
  if (const Node *convert = fields.find("convert")) {
    if (convert->kind != Node::Kind::scalar || convert->text != "rne")
      refuse(*convert, "'rne'", "'convert'", diagnostics);
    form.rounds = true;
  }
  if (const Node *quantize = fields.find("quantize")) {
    form.quantize = readQuantize(*quantize, endpoint, diagnostics);
    if (form.quantize && form.quantize->format && form.dtype && !endpoint)
      diagnostics.error(form.dtype->second, "'dtype' beside 'quantize', which says what the param is stored as");
  }
  return form;
}

} // namespace reshard
