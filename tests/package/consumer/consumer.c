#include <reshard/reshard_plan.h>
#include <stdio.h>
#include <stdlib.h>

static int failed(const char *why) { return fprintf(stderr, "consumer: %s\n", why), 1; }

int main(int argc, char **argv) {
  reshard_plan *plan = NULL;
  reshard_executor *executor = NULL;
  reshard_summary summary;
  if (argc < 2 || reshard_plan_open(argv[1], &plan) != RESHARD_OK || reshard_plan_summary(plan, &summary) != RESHARD_OK)
    return failed(reshard_plan_error(plan));
  if (reshard_open(argv[1], NULL, 0, NULL, &executor) != RESHARD_OK)
    return failed(reshard_error(executor));
  for (uint32_t e = 0; e < summary.endpoints; ++e) {
    reshard_endpoint endpoint;
    reshard_plan_endpoint(plan, e, &endpoint);
    for (size_t p = 0; p < endpoint.place_count; ++p) {
      const reshard_param *params;
      size_t count;
      if (reshard_plan_params(plan, e, endpoint.places[p], &params, &count) != RESHARD_OK)
        return failed("no params");
      for (size_t i = 0; i < count; ++i)
        if (reshard_bind(executor, e, endpoint.places[p], params[i].name, calloc(1, params[i].bytes), params[i].bytes) != RESHARD_OK)
          return failed(reshard_error(executor));
    }
  }
  if (reshard_prepare(executor) != RESHARD_OK || reshard_run(executor, 60) != RESHARD_OK)
    return failed(reshard_error(executor));
  printf("%llu bytes, version %llu\n", (unsigned long long)summary.target_bytes, (unsigned long long)reshard_version(executor));
  reshard_close(executor);
  reshard_plan_close(plan);
  return 0;
}
