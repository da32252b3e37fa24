// Reading the block language: text to stages. Values are checked where the Block is built.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "block/stages.h"
#include "block/text.h"
#include "onepass/error.h"

namespace onepass {
namespace {

using Words = std::vector<std::string_view>;

// One stage as written: a name and, in parentheses, positional values followed by key=value pairs.
class StageSource {
 public:
  explicit StageSource(std::string_view text);

  std::string_view name() const { return name_; }
  [[noreturn]] void fail(const std::string& sentence) const;

  // Refuses more or fewer positional values and any other key. `signature` is shown to the user.
  void accept(size_t least, size_t most, const Words& keys, std::string_view signature) const;

  size_t positional_count() const { return positional_.size(); }
  int64_t whole(size_t index, std::string_view key) const { return whole(key, positional_[index]); }
  double real(size_t index) const { return real("the constant", positional_[index]); }
  double limit(size_t index) const;

  // The value of a key, or the default where the text does not give it.
  std::string_view word(std::string_view key, std::string_view otherwise) const;
  int64_t whole(std::string_view key, int64_t otherwise) const;
  double real(std::string_view key, double otherwise) const;
  bool truth(std::string_view key, bool otherwise) const;
  Extents extents(std::string_view key, int rank, int64_t otherwise, int64_t neutral) const;

 private:
  struct Pair {
    std::string_view key;
    std::string_view value;
  };

  void read_argument(std::string_view argument);
  std::optional<std::string_view> find(std::string_view key) const;
  int64_t whole(std::string_view key, std::string_view value) const;
  double real(std::string_view key, std::string_view value) const;

  std::string_view text_;
  std::string_view name_;
  Words positional_;
  std::vector<Pair> pairs_;
};

StageSource::StageSource(std::string_view text) : text_(trim(text)) {
  const size_t open = text_.find('(');
  name_ = trim(text_.substr(0, open));
  if (name_.empty())
    fail(text_.empty() ? "a stage is empty, a name must stand between '|'" : "the name is missing");
  if (open == std::string_view::npos) return;
  const std::string_view rest = text_.substr(open + 1);
  const size_t close = rest.find(')');
  if (close == std::string_view::npos) fail("the closing parenthesis is missing");
  if (close + 1 != rest.size()) fail("after ')' must come '|' or the end");
  const std::string_view inside = trim(rest.substr(0, close));
  if (inside.find('(') != std::string_view::npos) fail("parentheses must not nest");
  if (inside.empty()) return;
  for (const std::string_view argument : split(inside, ',')) read_argument(trim(argument));
}

void StageSource::read_argument(std::string_view argument) {
  if (argument.empty()) fail("an argument is empty");
  const size_t equals = argument.find('=');
  if (equals == std::string_view::npos) {
    if (!pairs_.empty()) fail("'" + excerpt(argument) + "' must come before the arguments with a name");
    positional_.push_back(argument);
    return;
  }
  const Pair pair{trim(argument.substr(0, equals)), trim(argument.substr(equals + 1))};
  if (pair.key.empty() || pair.value.empty()) fail("'" + excerpt(argument) + "' must be a key and a value");
  for (const Pair& earlier : pairs_) {
    if (earlier.key == pair.key) fail(excerpt(pair.key) + " is given twice");
  }
  // A stage has at most nine arguments: refusing here keeps the search above short for any text.
  if (pairs_.size() == 16) fail("too many arguments");
  pairs_.push_back(pair);
}

void StageSource::fail(const std::string& sentence) const {
  throw Error((text_.empty() ? "" : excerpt(text_) + ": ") + sentence);
}

void StageSource::accept(size_t least, size_t most, const Words& keys, std::string_view signature) const {
  for (const Pair& pair : pairs_) {
    if (std::find(keys.begin(), keys.end(), pair.key) != keys.end()) continue;
    if (keys.empty()) fail("unknown key '" + excerpt(pair.key) + "', write " + std::string(signature));
    fail("unknown key '" + excerpt(pair.key) + "', accepted are " + enumerate(keys));
  }
  const size_t count = positional_.size();
  if (count >= least && count <= most) return;
  fail(std::to_string(count) + (count == 1 ? " value" : " values") + " without a name, must be " +
       (least == most ? "" : std::to_string(least) + " to ") + std::to_string(most) + ": write " +
       std::string(signature));
}

int64_t StageSource::whole(std::string_view key, std::string_view value) const {
  const auto number = parse_whole(value);
  if (!number)
    fail(std::string(key) + " is " + excerpt(value) + ", " + std::string(whole_number_rule(value)));
  return *number;
}

double StageSource::real(std::string_view key, std::string_view value) const {
  const auto number = parse_real(value);
  if (!number) fail(std::string(key) + " is " + excerpt(value) + ", must be a finite number");
  return *number;
}

double StageSource::limit(size_t index) const {
  const auto number = parse_limit(positional_[index]);
  if (!number) fail("the limit is " + excerpt(positional_[index]) + ", must be a number, inf or -inf");
  return *number;
}

std::optional<std::string_view> StageSource::find(std::string_view key) const {
  for (const Pair& pair : pairs_) {
    if (pair.key == key) return pair.value;
  }
  return std::nullopt;
}

std::string_view StageSource::word(std::string_view key, std::string_view otherwise) const {
  return find(key).value_or(otherwise);
}

int64_t StageSource::whole(std::string_view key, int64_t otherwise) const {
  const auto value = find(key);
  return value ? whole(key, *value) : otherwise;
}

double StageSource::real(std::string_view key, double otherwise) const {
  const auto value = find(key);
  return value ? real(key, *value) : otherwise;
}

bool StageSource::truth(std::string_view key, bool otherwise) const {
  const std::string_view value = word(key, otherwise ? "true" : "false");
  if (value != "true" && value != "false") {
    fail(std::string(key) + " is " + excerpt(value) + ", must be true or false");
  }
  return value == "true";
}

Extents StageSource::extents(std::string_view key, int rank, int64_t otherwise, int64_t neutral) const {
  Extents extents{neutral, neutral, neutral};
  const auto used = extents.begin() + rank;
  std::fill(extents.begin(), used, otherwise);
  const auto value = find(key);
  if (!value) return extents;
  const Words numbers = split(*value, 'x');
  if (numbers.size() == 1) {
    std::fill(extents.begin(), used, whole(key, *value));
  } else if (numbers.size() == static_cast<size_t>(rank)) {
    std::transform(numbers.begin(), numbers.end(), extents.begin(),
                   [&](std::string_view number) { return whole(key, trim(number)); });
  } else {
    fail(std::string(key) + " is " + excerpt(*value) + ", must be one number" +
         (rank > 1 ? " or " + std::to_string(rank) + " joined by x" : ""));
  }
  return extents;
}

void read_padding(const StageSource& source, Conv& conv) {
  if (source.word("p", "0") != "same") {
    conv.padding_before = conv.padding_after = source.extents("p", conv.rank, 0, 0);
    return;
  }
  if (conv.transposed) source.fail("p is same, must be a number for a transposed convolution");
  if (conv.stride != Extents{1, 1, 1}) {
    source.fail("p is same, which needs stride 1: s is " + extents_text(conv.stride, conv.rank));
  }
  const SamePadding same = same_padding(conv);
  conv.padding_before = same.before;
  conv.padding_after = same.after;
}

Conv read_conv(const StageSource& source, int rank, bool transposed) {
  source.accept(2, 2, {"k", "s", "p", "d", "groups", "op", "bias"},
                std::string(source.name()) + "(in,out,k=3,s=1,p=0,d=1,groups=1,op=0,bias=true)");
  Conv conv;
  conv.rank = rank;
  conv.transposed = transposed;
  conv.in_channels = source.whole(size_t{0}, "in");
  conv.out_channels = source.whole(size_t{1}, "out");
  conv.kernel = source.extents("k", rank, 3, 1);
  conv.stride = source.extents("s", rank, 1, 1);
  conv.dilation = source.extents("d", rank, 1, 1);
  conv.output_padding = source.extents("op", rank, 0, 0);
  conv.groups = source.whole("groups", 1);
  conv.bias = source.truth("bias", true);
  read_padding(source, conv);
  return conv;
}

Norm read_norm_options(const StageSource& source, Norm norm) {
  norm.eps = source.real("eps", norm.eps);
  norm.affine = source.truth("affine", norm.affine);
  return norm;
}

Norm read_group_norm(const StageSource& source) {
  source.accept(1, 1, {"eps", "affine"}, "group_norm(groups,eps=1e-5,affine=true)");
  return read_norm_options(source, {Norm::Kind::group, source.whole(size_t{0}, "groups"), 1e-5, true});
}

Norm read_instance_norm(const StageSource& source) {
  source.accept(0, 0, {"eps", "affine"}, "instance_norm(eps=1e-5,affine=false)");
  return read_norm_options(source, {Norm::Kind::instance, 1, 1e-5, false});
}

// Over channels and space: a group norm of one group.
Norm read_layer_norm(const StageSource& source) {
  source.accept(0, 0, {"eps", "affine"}, "layer_norm(eps=1e-5,affine=true)");
  return read_norm_options(source, {Norm::Kind::group, 1, 1e-5, true});
}

Mean read_mean(const StageSource& source) {
  source.accept(0, 0, {}, "mean");
  return {};
}

std::string pointwise_signature(const PointwiseRow& row) {
  std::string signature(row.name);
  for (int i = 0; i < row.constants; ++i) {
    const double value = row.defaults[static_cast<size_t>(i)];
    signature += i == 0 ? "(" : ",";
    signature += std::isnan(value) ? "number" : number_text(value);
  }
  return row.constants > 0 ? signature + ')' : signature;
}

Per read_per(const StageSource& source, ArgumentKind argument) {
  const Per usual = default_per(argument);
  const std::string_view value = source.word("per", per_name(usual));
  const Per other = argument == ArgumentKind::slope ? Per::channel : Per::sample;
  for (const Per per : {usual, other}) {
    if (value == per_name(per)) return per;
  }
  source.fail("per is " + excerpt(value) + ", must be " + std::string(per_name(usual)) + " or " +
              std::string(per_name(other)));
}

Pointwise read_pointwise(const StageSource& source, Op op) {
  const PointwiseRow& row = pointwise_row(op);
  const bool has_per = row.argument == ArgumentKind::slope || row.argument == ArgumentKind::channel;
  const auto most = static_cast<size_t>(row.constants);
  const auto required = static_cast<size_t>(std::count_if(row.defaults.begin(), row.defaults.end(),
                                                          [](double value) { return std::isnan(value); }));
  source.accept(required, most, has_per ? Words{"per"} : Words{}, pointwise_signature(row));
  std::array<double, 2> constants = row.defaults;
  for (size_t i = 0; i < source.positional_count(); ++i) {
    constants[i] = has_limits(op) ? source.limit(i) : source.real(i);
  }
  return {op, constants[0], constants[1], has_per ? read_per(source, row.argument) : Per::tensor};
}

// Every name of the language with the function that reads its stage.
struct Reader {
  std::string name;
  std::function<Stage(const StageSource&)> read;
};

std::vector<Reader> make_readers() {
  std::vector<Reader> readers;
  for (const bool transposed : {false, true}) {
    for (int rank = 1; rank <= max_spatial_rank; ++rank) {
      Conv conv;
      conv.rank = rank;
      conv.transposed = transposed;
      readers.push_back(
          {conv_name(conv), [=](const StageSource& source) { return read_conv(source, rank, transposed); }});
    }
  }
  readers.push_back({"group_norm", read_group_norm});
  readers.push_back({"instance_norm", read_instance_norm});
  readers.push_back({"layer_norm", read_layer_norm});
  readers.push_back({"mean", read_mean});
  const auto add_pointwise = [&](std::string_view name, Op op) {
    readers.push_back(
        {std::string(name), [=](const StageSource& source) { return read_pointwise(source, op); }});
  };
  for (int i = 0; i < op_count; ++i) add_pointwise(name(static_cast<Op>(i)), static_cast<Op>(i));
  add_pointwise("silu", Op::swish);
  return readers;
}

const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = make_readers();
  return all;
}

// How many letters must be changed, added or left out to turn one word into the other.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// The names of the language nearest to a word that is at most two letters off, all at the same distance.
Words nearest_names(std::string_view word) {
  constexpr size_t longest_name = 32;
  if (word.size() > longest_name) return {};
  Words nearest;
  size_t least = 2;
  for (const Reader& reader : readers()) {
    const size_t distance = edit_distance(word, reader.name);
    if (distance > least) continue;
    if (distance < least) nearest.clear();
    least = distance;
    nearest.push_back(reader.name);
  }
  return nearest;
}

[[noreturn]] void fail_unknown_stage(const StageSource& source) {
  const std::string unknown = "unknown stage '" + excerpt(source.name()) + "', ";
  const Words nearest = nearest_names(source.name());
  if (!nearest.empty()) throw Error(unknown + "nearest in name: " + enumerate(nearest));
  Words all;
  for (const Reader& reader : readers()) all.push_back(reader.name);
  throw Error(unknown + "accepted are " + enumerate(all));
}

Stage read_stage(std::string_view text) {
  const StageSource source(text);
  for (const Reader& reader : readers()) {
    if (reader.name == source.name()) return reader.read(source);
  }
  fail_unknown_stage(source);
}

}  // namespace

Block Block::parse(std::string_view text) {
  if (text.size() > max_text_bytes) {
    throw Error("a block text of " + std::to_string(text.size()) + " bytes: must be at most " +
                std::to_string(max_text_bytes));
  }
  std::vector<Stage> stages;
  if (!trim(text).empty()) {
    for (const std::string_view stage : split(text, '|')) stages.push_back(read_stage(stage));
  }
  return Block(std::move(stages));
}

}  // namespace onepass
