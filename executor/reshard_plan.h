/* What a plan says, without running it: its sizes, its endpoints, and what each rank holds under which name. No
   exceptions cross this API; every failure is a status and a text. */
#ifndef RESHARD_PLAN_H
#define RESHARD_PLAN_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opaque, and never changed once open. Owned by the caller from reshard_plan_open to reshard_plan_close; any number of
   threads may ask it at once. All that it points to is its own and lives until close. */
typedef struct reshard_plan reshard_plan;

typedef struct {
  const char *digest;   /* 32 hexadecimal digits: plans of one digest are one plan */
  const char *compiler; /* what wrote it */
  const char *model;    /* "" where the model has no name */
  uint64_t plan_bytes;  /* of the file */
  uint32_t world;       /* ranks */
  uint32_t endpoints;   /* 0 is the source, the others are targets */
  uint32_t rounds;
  uint64_t messages;
  uint64_t transfers;
  uint64_t target_bytes;  /* what all targets hold; the next three say where it comes from */
  uint64_t local_bytes;   /* from the same rank */
  uint64_t remote_bytes;  /* from others, by messages */
  uint64_t storage_bytes; /* read from files or written to them */
  uint64_t arena_bytes;   /* what prepare allocates on the rank that needs most */
} reshard_summary;

typedef struct {
  const char *role;      /* "source", "target", "target.0" … */
  const char *layout;    /* "" where it has none */
  int storage;           /* not 0: files, not ranks */
  const uint32_t *ranks; /* the world ranks, or the numbers of the files */
  size_t rank_count;
} reshard_endpoint;

typedef struct {
  const char *name;
  const char *dtype;     /* bf16 fp16 fp32 fp64 fp8_e4m3 fp8_e5m2 i8 i16 i32 i64 u8 u16 u32 u64 bool */
  const char *refresh;   /* the hook that is called after a run (reshard_set_hook); "" where there is none */
  const char *transform; /* whose memory it is instead of the caller's (reshard_set_transform), who then does not bind
                            it; "" where there is none */
  const int64_t *shape;  /* elements; row-major without gaps */
  size_t dimensions;
  uint64_t bytes;
} reshard_param;

/* Maps and checks the plan's manifest; of the segments nothing is read. On failure *plan is still set where memory
   allows, so that reshard_plan_error can tell why; close it. */
reshard_status reshard_plan_open(const char *path, reshard_plan **plan);

/* Why open failed; "" where it did not. */
const char *reshard_plan_error(const reshard_plan *plan);

/* RESHARD_INVALID where the plan is not open. */
reshard_status reshard_plan_summary(const reshard_plan *plan, reshard_summary *summary);

/* RESHARD_INVALID where the plan is not open or has no such endpoint. */
reshard_status reshard_plan_endpoint(const reshard_plan *plan, uint32_t endpoint, reshard_endpoint *description);

/* *params: the *count params that a place of an endpoint holds, in the order of the plan. RESHARD_INVALID where there
   is no such place; RESHARD_FAILED where memory is short. The first call for a place makes the list, later ones find
   it. */
reshard_status reshard_plan_params(const reshard_plan *plan, uint32_t endpoint, uint32_t rank,
                                   const reshard_param **params, size_t *count);

void reshard_plan_close(reshard_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
