// onepass explain: the strategy of a problem, and the costs or refusals of the others.
#include <iostream>

#include "tool/commands.h"
#include "tool/output.h"

namespace onepass::tool {
namespace {

Json plan_json(const Plan& plan) {
  Json candidates = Json::array();
  for (const Candidate& candidate : plan.candidates()) {
    Json row{{"strategy", candidate.strategy}};
    if (candidate.reason.empty()) row["seconds"] = candidate.seconds;
    if (!candidate.reason.empty()) row["reason"] = candidate.reason;
    candidates.push_back(row);
  }
  return {{"problem", plan.problem().text()},
          {"output", to_string(plan.problem().output.sizes)},
          {"device", plan.problem().device.text()},
          {"threads", plan.problem().device.threads},
          {"strategy", plan.strategy()},
          {"candidates", candidates},
          {"workspace_bytes", plan.workspace_bytes()}};
}

}  // namespace

int explain(const Options& options) {
  const Plan chosen = plan(requested_problems(options).front(), options.plan_options());
  if (options.json) {
    std::cout << plan_json(chosen).dump(2) << '\n';
  } else {
    std::cout << chosen.explain();
  }
  return good;
}

}  // namespace onepass::tool
