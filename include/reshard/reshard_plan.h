/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a plan without running it: its sizes, its endpoints, and the params of each rank. No exception crosses this
   API: every failure is a status and an error text. */
#ifndef RESHARD_PLAN_H
#define RESHARD_PLAN_H

#include "reshard.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opaque, and immutable once open. The caller owns it from reshard_plan_open to reshard_plan_close; threads may use it
   concurrently. Returned pointers belong to it and are valid until close. */
typedef struct reshard_plan reshard_plan;

typedef struct {
  size_t size;          /* set by RESHARD_SUMMARY_INITIALIZER; by the library to the number of bytes filled */
  const char *digest;   /* 32 hexadecimal digits: plans with equal digests are equal */
  const char *compiler; /* name and version of the compiler that wrote it */
  const char *model;    /* "" if the model has no name */
  uint64_t plan_bytes;  /* of the file */
  uint32_t world;       /* ranks */
  uint32_t endpoints;   /* 0 is the source, the others are targets */
  uint32_t rounds;
  uint64_t messages;
  uint64_t transfers;
  uint64_t target_bytes;  /* of all targets; the next three are parts of it */
  uint64_t local_bytes;   /* copied within a rank */
  uint64_t remote_bytes;  /* sent in messages */
  uint64_t storage_bytes; /* read from files or written to them */
  uint64_t arena_bytes;   /* of the rank with the largest arena, which prepare allocates */
} reshard_summary;
#define RESHARD_SUMMARY_INITIALIZER {sizeof(reshard_summary), NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

typedef struct {
  size_t size;           /* set by RESHARD_ENDPOINT_INITIALIZER; by the library to the number of bytes filled */
  const char *role;      /* "source", "target", "target.0" … */
  const char *layout;    /* "" if it has none */
  int storage;           /* not 0: files, not ranks */
  const uint32_t *ranks; /* the world ranks, or the numbers of the files */
  size_t rank_count;
} reshard_endpoint;
#define RESHARD_ENDPOINT_INITIALIZER {sizeof(reshard_endpoint), NULL, NULL, 0, NULL, 0}

/* An element of the array of reshard_plan_params. */
typedef struct {
  size_t size; /* the `param_size` of reshard_plan_params */
  const char *name;
  const char *dtype;     /* bf16 fp16 fp32 fp64 fp8_e4m3 fp8_e5m2 i8 i16 i32 i64 u8 u16 u32 u64 bool */
  const char *refresh;   /* name of the hook to call after a run (reshard_set_hook); "": none */
  const char *transform; /* name of its transform (reshard_set_transform): then it must not be bound; "": none */
  const int64_t *shape;  /* elements; row-major without gaps */
  size_t dimensions;
  uint64_t bytes;
} reshard_param;

/* Opens the file and checks its manifest; segments are not read. On failure *plan is set unless memory is exhausted, so
   that reshard_plan_error returns the cause; close it. */
reshard_status reshard_plan_open(const char *path, reshard_plan **plan);

/* The error text of open; "" if it succeeded. */
const char *reshard_plan_error(const reshard_plan *plan);

/* RESHARD_INVALID if the plan is not open, or if summary->size was not set by the initializer. */
reshard_status reshard_plan_summary(const reshard_plan *plan, reshard_summary *summary);

/* RESHARD_INVALID if the plan is not open or has no such endpoint, or if description->size was not set by the
   initializer. */
reshard_status reshard_plan_endpoint(const reshard_plan *plan, uint32_t endpoint, reshard_endpoint *description);

/* *params: the *count params that a rank of an endpoint holds (a world rank, or the number of a file), in the order of
   the plan. A target with `replicas` also has the ranks of all replicas (reshard.h, pull mode), not only those of
   replica 0. param_size: sizeof(reshard_param), by which the elements are spaced whatever the version of the library;
   fields that the library's version lacks are 0. RESHARD_INVALID if the endpoint does not have that rank, or if
   param_size is not the size of any version; RESHARD_FAILED if memory is exhausted. The first call for a rank and a
   param_size builds the list, later calls return the same one. */
reshard_status reshard_plan_params(const reshard_plan *plan, uint32_t endpoint, uint32_t rank, size_t param_size,
                                   const reshard_param **params, size_t *count);

/* Frees the plan; NULL is allowed. */
void reshard_plan_close(reshard_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
