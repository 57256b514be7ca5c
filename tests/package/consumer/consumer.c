#include <reshard/reshard.h>
#include <stdio.h>

int main(int argc, char **argv) {
  short source[2][3] = {{1, 2, 3}, {4, 5, 6}}, target[6] = {0};
  reshard_executor *executor = NULL;
  if (argc < 2 || reshard_open(argv[1], NULL, 0, NULL, &executor) ||
      reshard_bind(executor, 0, 0, "w", source[0], sizeof source[0]) ||
      reshard_bind(executor, 0, 1, "w", source[1], sizeof source[1]) ||
      reshard_bind(executor, 1, 0, "w", target, sizeof target) || reshard_prepare(executor) ||
      reshard_run(executor, 60))
    return fprintf(stderr, "consumer: %s\n", reshard_error(executor)), 1;
  printf("%d %d %d %d %d %d\n", target[0], target[1], target[2], target[3], target[4], target[5]);
  reshard_close(executor);
}
