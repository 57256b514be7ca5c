// SPDX-License-Identifier: Apache-2.0
#include <reshard/reshard_plan.h>
#include <stdio.h>

int main(int argc, char **argv) {
  short source[2][3] = {{1, 2, 3}, {4, 5, 6}}, target[6] = {0};
  reshard_options options = RESHARD_OPTIONS_INITIALIZER;
  reshard_summary summary = RESHARD_SUMMARY_INITIALIZER;
  reshard_endpoint endpoint = RESHARD_ENDPOINT_INITIALIZER;
  reshard_transform transform = RESHARD_TRANSFORM_INITIALIZER;
  const reshard_param *params = NULL;
  size_t count = 0;
  reshard_plan *plan = NULL;
  reshard_executor *executor = NULL;
  options.threads = 1;
  if (argc < 2 || reshard_plan_open(argv[1], &plan) || reshard_plan_summary(plan, &summary) ||
      reshard_plan_endpoint(plan, 1, &endpoint) ||
      reshard_plan_params(plan, 1, 0, sizeof(reshard_param), &params, &count))
    return fprintf(stderr, "consumer: %s\n", reshard_plan_error(plan)), 1;
  printf("%d %s %s ", (int)summary.target_bytes, endpoint.role, params[count - 1].name);
  reshard_plan_close(plan);
  if (reshard_open(argv[1], NULL, 0, &options, &executor) || reshard_set_transform(executor, "none", &transform) ||
      reshard_bind(executor, 0, 0, "w", source[0], sizeof source[0]) ||
      reshard_bind(executor, 0, 1, "w", source[1], sizeof source[1]) ||
      reshard_bind(executor, 1, 0, "w", target, sizeof target) || reshard_prepare(executor) ||
      reshard_run(executor, 60, NULL))
    return fprintf(stderr, "consumer: %s\n", reshard_error(executor)), 1;
  printf("%d %d %d %d %d %d\n", target[0], target[1], target[2], target[3], target[4], target[5]);
  reshard_close(executor);
}
