/* SPDX-License-Identifier: Apache-2.0 */
/* The executor's C API: open → bind → prepare → run … → close. No exception crosses it: every failure is a status and
   an error text (reshard_error).

   Structs. Each begins with `size`, its size in bytes in the header with which the program was compiled. Later versions
   append fields, so that a program and a library of different versions work together:
   - A struct that the caller passes starts as its RESHARD_…_INITIALIZER, which sets `size` and sets all other fields to
     0. A field that the program's version lacks counts as 0. If the program's version is newer than the library, the
     fields that the library lacks must be 0; otherwise the call returns RESHARD_INVALID.
   - A struct that the library fills starts as its initializer, too. The library writes only the fields that both
     versions have and sets `size` to the number of bytes that it wrote.
   - The elements of an array that the library returns have the size that the caller passes to the function.
   - A struct that the library passes to a hook has the library's `size`. A hook that was compiled with a newer header
     must not read fields beyond it. */
#ifndef RESHARD_H
#define RESHARD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Opaque. The caller owns it from reshard_open to reshard_close. Any thread may call functions with it, one at a time;
   several threads may use several executors concurrently. A hook must not call its executor: functions with a status
   return RESHARD_INVALID, and after reshard_close in a hook the call in progress returns RESHARD_FAILED, and the
   executor stays open. In a process that was forked from the one that opened it, functions with a status return
   RESHARD_INVALID, the others 0, RESHARD_EMPTY or NULL, and reshard_close has no effect; a transport between
   processes or device "cuda" cannot be opened there if the other process has used it. Returned pointers belong to the
   executor and are valid until close; the text of reshard_error is valid until the next call. Arguments are read only
   during the call, except bound memory and hooks with their `user`, which are used until close. */
typedef struct reshard_executor reshard_executor;

typedef enum {
  RESHARD_OK = 0,
  RESHARD_INVALID = 1,  /* wrong argument or call order; nothing changed */
  RESHARD_BAD_PLAN = 2, /* the plan file is missing, damaged, inconsistent, or of a newer version */
  /* A param is not bound, is unknown, has the wrong size, is not accessible by the device, or overlaps another. */
  RESHARD_BAD_BINDING = 3,
  RESHARD_FAILED = 4, /* a failure of open or prepare; or of a run, and then the targets are torn */
  RESHARD_TIMEOUT = 5 /* the deadline passed; otherwise as RESHARD_FAILED */
} reshard_status;

typedef enum {
  RESHARD_EMPTY = 0,    /* no run has completed */
  RESHARD_COMPLETE = 1, /* the targets hold what the last run moved */
  RESHARD_TORN = 2      /* a run failed while it wrote the targets: do not use them until a later run completes */
} reshard_state;

/* How bytes reach a process. */
typedef enum {
  RESHARD_LOCAL = 0,         /* copied within the process */
  RESHARD_SHARED_MEMORY = 1, /* copied out of the memory of another process of its host */
  RESHARD_MESSAGES = 2,      /* received as messages: over MPI, UCX or NCCL, or packed in memory of this host */
  /* The part of RESHARD_MESSAGES from processes of its host, because their memory cannot be mapped. 0 with
     no_local_shortcut. */
  RESHARD_MESSAGES_INSIDE_HOST = 3
} reshard_method;

/* A key-value store of the caller, with which the processes of a job find each other. Keys are printable ASCII, at most
   4096 bytes; values are any bytes, at most 16 MiB. Both functions are called by the thread that calls reshard_open,
   reshard_prepare, reshard_replace, reshard_pull or reshard_replicas. They must return at once, since the deadline is
   checked before each call: the library looks for a key repeatedly until it is set. Keys may be left over from earlier
   jobs. */
typedef struct {
  size_t size; /* set by RESHARD_STORE_INITIALIZER */
  void *user;  /* valid until close, as are the functions */
  /* Sets a key, or replaces its value as a whole. Returns RESHARD_OK, or RESHARD_FAILED or RESHARD_TIMEOUT, with which
     the call fails. */
  reshard_status (*set)(void *user, const char *key, const void *value, size_t bytes);
  /* Writes the size of a key's value to *bytes, and the value to `buffer` if `capacity` suffices; otherwise it is
     called again with a larger buffer. Returns RESHARD_OK, RESHARD_TIMEOUT if the key is not set, or RESHARD_FAILED. */
  reshard_status (*get)(void *user, const char *key, void *buffer, size_t capacity, size_t *bytes);
} reshard_store;
#define RESHARD_STORE_INITIALIZER {sizeof(reshard_store), NULL, NULL, NULL}

typedef struct {
  size_t size; /* set by RESHARD_OPTIONS_INITIALIZER */
  /* "threads" (default, also NULL): all ranks of the plan in this process. Others, which reshard_transport lists and
     docs/api.md ("Transports") compares, such as "mpi": one rank in each process.
     With "mpi", only one thread of a process may call executors at a time, unless the program has called
     MPI_Init_thread with MPI_THREAD_MULTIPLE. If the program has not called MPI_Init, the first open calls it, and the
     last close calls MPI_Finalize; after that no open succeeds. After RESHARD_FAILED or RESHARD_TIMEOUT of a run, MPI
     may write to bound memory until the process ends: do not use that memory for anything else. */
  const char *transport;
  /* "cpu" (default, also NULL); "cuda", with transports that run there: all bound memory is a GPU's. */
  const char *device;
  uint32_t threads; /* worker threads of transport "threads"; 0: one for each core */
  /* Deadline of open, prepare and reshard_all_reduce_min, which wait for the other processes, and of close; 0: none. */
  double join_seconds;
  /* Not 0: send messages even if a peer's memory can be mapped; with "nccl", also for copies within a rank. */
  int no_local_shortcut;
  /* Not 0: a rendezvous without a secret accepts processes of other machines and users. Only for networks and folders
     whose users all are trusted. */
  int insecure;
  /* For "nccl": the caller's ncclComm_t, with as many ranks as the plan, or NULL. It stays the caller's, but a failed
     run aborts it. */
  void *communicator;
  /* The rendezvous of a transport that has one (of "nccl" without a communicator): how processes that no common
     launcher started find each other.
     "tcp://host:port": rank 0 serves a store there, as long as its executor is open. Without a secret the host must be
     this machine ("127.0.0.1", "localhost"), and only processes of rank 0's user are accepted.
     "file:///folder": a folder that all processes share.
     "env://": tcp:// at a host and port from the variables of torchrun, srun or mpirun, which also give the rank and
     the number of processes (docs/api.md). With "nccl" it is the default, unless NCCL_COMM_ID is set.
     NULL: `store`. */
  const char *rendezvous;
  /* The caller's store for the rendezvous, or NULL. */
  const reshard_store *store;
  /* A name that the processes of one job have in common, for several jobs with one store; NULL: none. */
  const char *job;
  /* A secret that the processes of one job have in common, 1 to 4096 bytes; all messages of the rendezvous prove it. It
     needs libcrypto (OpenSSL 3 or 1.1). NULL: the environment variable RESHARD_SECRET; if it is not set, no secret. */
  const char *secret;
  /* Not 0: pull mode, with a transport that has it and a plan whose target has `replicas`. Processes join and leave at
     any time: open and prepare wait for no other process, and reshard_publish, reshard_release and reshard_pull replace
     reshard_run. */
  int pull;
  int reserved; /* 0 */
  /* NULL, or a function that calls of the executor ask while they wait, on their own thread and about 20 times a
     second, whether they shall end, for example because the user has pressed Ctrl-C. If it does not return 0, the call
     ends as at its deadline: with RESHARD_TIMEOUT, unless it was complete. It is valid until close, as is its `user`,
     and must not call the executor. */
  int (*interrupted)(void *user);
  void *interrupt_user;
} reshard_options;
#define RESHARD_OPTIONS_INITIALIZER                                                                                    \
  {sizeof(reshard_options), NULL, NULL, 0, 0, 0, 0, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL}

/* The size in bytes of a struct of this API in the library, for example of "reshard_options"; 0: there is no such
   struct. For bindings in other languages, which check their own declarations with it. */
size_t reshard_struct_size(const char *name);

/* Opens the plan file for world ranks `ranks`, which this process runs. NULL: every rank of the plan, or with a
   transport between processes this process's own rank: that of the launcher, of the communicator or of env://; with
   another rendezvous "ucx" needs one rank here. `options` NULL: the defaults.
   With processes on device "cpu" all open or none: if one fails, all return its status, also if its plan cannot be
   opened. A process that fails before it joins waits for the others to tell them so, 5 seconds at most. On failure
   *executor is set unless memory is exhausted, so that reshard_error returns the cause; close it. */
reshard_status reshard_open(const char *path, const uint32_t *ranks, size_t rank_count, const reshard_options *options,
                            reshard_executor **executor);

/* Between runs, replaces the plan by that of another file, for example because the trainer has lost a node and has
   another mesh now. All processes of the new plan call it, each with the rank that it has there; a process that is not
   in the new plan closes its executor or has ended. Afterwards the caller binds the missing params, and calls prepare
   and run as after open. Only for transports that can replace a plan (docs/api.md, "Transports").
   ranks: the ranks of this process in the new plan. NULL: all ranks of the plan, or the present rank of a process that
   has one.
   rendezvous: a URL as in reshard_options, if the transport has one. NULL: the store that is open now, which must still
   be served: a store of tcp:// ends with the process that was rank 0 of the plan that was opened with it.
   Kept are hooks, transforms, options, state and version, and the bound memory of params whose endpoint, name and bytes
   are in both plans: the i-th of `ranks` keeps the memory of the i-th present rank, a file that of the same file. Other
   memory is the caller's again. With "ucx" also kept are UCX's context, the registrations of that memory, and the
   connections to processes that are in both plans; after a failed run all of these are made anew.
   If it fails, the old plan stays as it is; if it fails on one process, the others fail at their deadline. */
reshard_status reshard_replace(reshard_executor *executor, const char *path, const uint32_t *ranks, size_t rank_count,
                               const char *rendezvous);

/* The world ranks of this process; *count is their number. Valid until close or replace. */
const uint32_t *reshard_ranks(const reshard_executor *executor, size_t *count);

/* The digest of the plan that was opened, 32 hexadecimal digits: that of reshard_summary, if the file at the path was
   still the same. "": no plan is open. Valid until close or replace. */
const char *reshard_opened_digest(const reshard_executor *executor);

/* Binds memory to a param instance. endpoint: 0 is the source, targets follow in the order of the job. rank: the world
   rank, or the file number of a storage endpoint (of a checkpoint 0, or the stored chunk). pointer: row-major elements
   without gaps, the caller's, which must stay valid and in place until close. bytes: must be the exact size. */
reshard_status reshard_bind(reshard_executor *executor, uint32_t endpoint, uint32_t rank, const char *param,
                            void *pointer, uint64_t bytes);

/* A hook for params that the plan marks `refresh: NAME`, to update derived weights or caches after each run.
   reshard_run calls it once for each name and each rank with such params, after the last byte of this process's ranks
   has arrived. If it does not return 0, the run fails. With device "cuda" reshard_prepare calls it instead, once,
   during the capture of the refit: the work that it enqueues on reshard_stream becomes part of every run, after the
   last byte. It may allocate, and must not wait for the stream. If it does not return 0, prepare fails. */
typedef int (*reshard_hook)(void *user, const char *name, uint32_t rank);

/* The cudaStream_t of the executor's work; NULL with device "cpu". */
void *reshard_stream(const reshard_executor *executor);

/* Sets the hook of a name. Must be called before prepare, which fails if a name of its ranks has no hook. */
reshard_status reshard_set_hook(reshard_executor *executor, const char *name, reshard_hook hook, void *user);

/* An instance of a param that the plan marks `transform: NAME`, as given to hooks. Its pointers are valid until close
   and equal in every run. */
typedef struct {
  size_t size;           /* set by the library */
  const char *transform; /* NAME */
  const char *name;      /* of the instance, as for reshard_bind */
  uint32_t endpoint;     /* 0 is the source */
  uint32_t rank;
  const char *dtype;    /* bf16 fp16 fp32 …, as sent */
  const int64_t *shape; /* elements; row-major without gaps */
  size_t dimensions;
  void *memory; /* owned by the executor, on its device; each run overwrites a target's */
  uint64_t bytes;
  void *stream; /* reshard_stream; NULL with device "cpu" */
} reshard_transformed;

/* The caller's conversion between its own storage and such params, which are not bound. reshard_run calls each hook
   once for each instance on each rank of this process, in the order of ranks, then of the plan. If a hook does not
   return 0, the run fails. With device "cuda" reshard_prepare calls the hooks instead, as it does a reshard_hook: the
   work that they enqueue on `stream` becomes part of every run, in the order given here. */
typedef struct {
  size_t size; /* set by RESHARD_TRANSFORM_INITIALIZER */
  /* On a source: writes `memory`, before anything is sent. */
  int (*prepare_send)(void *user, const reshard_transformed *param);
  /* On a target, before anything is received; may be NULL. */
  int (*prepare_receive)(void *user, const reshard_transformed *param);
  /* On a target: reads `memory`, after the last byte and before the hooks of `refresh`. */
  int (*finalize)(void *user, const reshard_transformed *param);
  void *user;
} reshard_transform;
#define RESHARD_TRANSFORM_INITIALIZER {sizeof(reshard_transform), NULL, NULL, NULL, NULL}

/* Sets the transform of a name; the struct is copied. Must be called before prepare, which fails if a source of its
   ranks needs prepare_send, or a target finalize, that is not set. If prepare_send or prepare_receive fails on one
   rank, the other processes wait for it until their deadline, or until it runs again. */
reshard_status reshard_set_transform(reshard_executor *executor, const char *name, const reshard_transform *transform);

/* Checks that all used params are bound and do not overlap, synchronizes with the other processes, and allocates all
   that runs need. Afterwards bindings are fixed. After RESHARD_INVALID or RESHARD_BAD_BINDING it may be called again,
   for example with the missing binding; after RESHARD_FAILED or RESHARD_TIMEOUT it may not. Either all processes are
   prepared or none: the others wait for a process with a missing binding until their deadline. */
reshard_status reshard_prepare(reshard_executor *executor);

/* A check by digests, of reshard_run or reshard_pull. */
typedef struct {
  size_t size; /* set by RESHARD_CHECK_INITIALIZER */
  /* Of a run, not 0: the error states the first wrong index of the first wrong tensor. */
  int first_index;
  int changed; /* of a run, not 0: a source equal to that of the last checked run is an error */
  /* Not 0: permits target params that cannot be compared, since they or their sources are quantized or transformed
     (reshard_undigested); otherwise they are an error, RESHARD_INVALID. */
  int allow_undigested;
  int reserved; /* 0 */
} reshard_check;
#define RESHARD_CHECK_INITIALIZER {sizeof(reshard_check), 0, 0, 0, 0}

/* Moves every byte; returns when all have arrived. timeout_seconds <= 0: no deadline. With device "cuda", work on other
   streams that writes the sources or reads the targets must be complete before the call. RESHARD_FAILED if a value is
   beyond the range of the dtype to which a param of this process is cast, unless the job says what becomes of it
   (`convert`); the error names the param. Hooks that follow a run are not called then.
   check: NULL: none; the call allocates nothing. Otherwise checks by digests that each target rank, every replica
   included, holds the source's elements, after a cast those of the cast. Every process of the run must call it with the
   same fields; the conditions are those of reshard_digest. The source is read once before the run, the targets once
   after it, before the hooks; it allocates memory. Source replicas must be equal: the first rank that holds an element
   counts. On a mismatch returns RESHARD_FAILED on all processes; the error names the tensors and the ranks that hold
   wrong elements, the targets are torn, and the executor can run again. RESHARD_INVALID and RESHARD_BAD_BINDING:
   nothing was moved. */
reshard_status reshard_run(reshard_executor *executor, double timeout_seconds, const reshard_check *check);

/* A tensor of an endpoint, as returned by reshard_digest. */
typedef struct {
  size_t size; /* the `element_size` of reshard_digest */
  const char *tensor;
  const char *dtype;    /* in memory: bf16 fp16 fp32 … */
  const int64_t *shape; /* elements */
  size_t dimensions;
  uint64_t elements;  /* of the tensor that the endpoint holds; each counts once */
  const char *digest; /* 32 hexadecimal digits, equal to that of reshard-digest for files with these elements; "" if the
                         endpoint does not hold all elements */
} reshard_tensor_digest;

/* Digests of the tensors that an endpoint holds now: the same in every layout and on every number of ranks. An element
   that several ranks hold counts on the first of them; padding does not count. Every process of the run must call it,
   after prepare; all params of the endpoint must be bound. Not in pull mode (use a checked reshard_pull), and for a
   storage endpoint only with transport "threads" (use reshard-digest for files). With device "cuda" memory is copied to
   the host. allow_undigested: not 0: permits params without a digest, which are quantized or transformed
   (reshard_undigested); otherwise they are an error, RESHARD_INVALID. timeout_seconds <= 0: no deadline; with several
   processes, after RESHARD_TIMEOUT or RESHARD_FAILED no run is possible. *digests: an array of *count elements of
   `element_size` bytes (sizeof(reshard_tensor_digest)), in the order of the layout, valid until the next call of this
   function. */
reshard_status reshard_digest(reshard_executor *executor, uint32_t endpoint, int allow_undigested,
                              double timeout_seconds, size_t element_size, const reshard_tensor_digest **digests,
                              size_t *count);

/* The params that the last reshard_digest, checked reshard_run or checked reshard_pull permitted without a digest, as
   "target param 'x'". Sets *count to their number. Valid until the next such call, or replace. */
const char *const *reshard_undigested(const reshard_executor *executor, size_t *count);

/* With device "cuda": enqueues a refit on the caller's cudaStream_t and returns. It starts after earlier work of the
   stream; later work sees the new weights. If the stream is being captured, the refit becomes part of the caller's
   graph and runs with each launch of it. All ranks must enqueue or launch it equally often; refits of one executor must
   not overlap. There is no deadline, state and version do not change, values beyond the range of a dtype are not
   reported, and the executor must not be closed before the last refit is complete. */
reshard_status reshard_enqueue(reshard_executor *executor, void *stream);

/* All-reduce min: *result is the least `value` of all processes. Every process of the run must call it. Use it, for
   example, to learn whether all processes succeeded. May be called at any time after open; the deadline is
   join_seconds. */
reshard_status reshard_all_reduce_min(reshard_executor *executor, int64_t value, int64_t *result);

/* Pull mode (options.pull). The source's processes publish versions of the weights in their bound memory. Engine
   replicas of the target, each with as many processes as the target has ranks in the plan, pull a version when they
   want it. World rank of rank i of replica k: that of rank i of replica 0, plus k * the number of ranks of a replica;
   k < 65536. No process waits for another in open or prepare. The bytes are read from the sources or from other engine
   replicas; a thread of the executor serves them from prepare to close. */

/* Of a source rank: offers its bound memory as `version`, which must be greater than all versions that it has published
   before. The caller must not change the memory until reshard_release. Calls the hooks prepare_send first, and waits
   for no process: the version can be pulled when all source ranks have published it. RESHARD_INVALID if a version is
   published already. digests: not 0: computes those that a checked reshard_pull compares. The memory is read once,
   during the call; all params must be bound. All source ranks pass the same. */
reshard_status reshard_publish(reshard_executor *executor, uint64_t version, int digests);

/* Of a source rank: ends the publication; whatever it returns, the bound memory is the caller's afterwards. No pull
   begins to read the version during the call. Waits until the pulls that read it are done. At the deadline it revokes
   their leases and returns RESHARD_TIMEOUT; the error names the ranks that held one, which discard what they have read.
   timeout_seconds <= 0: no deadline. RESHARD_INVALID if no version is published. */
reshard_status reshard_release(reshard_executor *executor, double timeout_seconds);

/* Of a target rank: waits for a published version of at least `min_version` and pulls it; sets *version (may be NULL)
   to it. All ranks of a replica call it, and obtain the same version. If the replica holds the newest version already,
   and it is at least `min_version`, returns at once. If the sources release the version meanwhile, the pull is repeated
   with a later one. After RESHARD_OK the state is RESHARD_COMPLETE, and reshard_version is the version. From the first
   byte that is written until then the state is RESHARD_TORN. RESHARD_TIMEOUT: the error names what the pull waited for;
   the next call continues. timeout_seconds <= 0: no deadline. Other engine replicas may read the version out of this
   one's memory, so the caller must not change it until its next pull.
   check: NULL: none. Otherwise checks by digests that this rank then holds the version's elements, after a cast those
   of the cast, also if it held the version already. It asks the source ranks that hold these elements, before it moves
   anything, and compares when its leases have ended. The ranks of a replica should all check: a rank that forwards
   wrong bytes to another keeps them until its own check finds them. On a mismatch returns RESHARD_FAILED; the error
   names the tensors, the state is RESHARD_TORN, no replica reads from this rank, and the next pull moves all bytes
   again, from the sources; the other ranks of the replica wait for it until their deadline. RESHARD_FAILED, too, if the
   version was published without digests. Then, and if the params cannot be compared, nothing was moved. */
reshard_status reshard_pull(reshard_executor *executor, uint64_t min_version, double timeout_seconds,
                            const reshard_check *check, uint64_t *version);

typedef enum {
  RESHARD_REPLICA_PULLING = 0,  /* it pulls `version` */
  RESHARD_REPLICA_COMPLETE = 1, /* all its ranks hold `version` */
  RESHARD_REPLICA_LOST = 2      /* a process of it has ended or is unreachable; it last pulled `version` */
} reshard_replica_state;

/* A replica of the target in pull mode. */
typedef struct {
  size_t size; /* set by the library */
  uint32_t replica;
  uint32_t ranks; /* the ranks of it that are connected */
  uint64_t version;
  reshard_replica_state state;
  uint32_t reserved; /* 0 */
} reshard_replica;

/* In pull mode: the replicas that have pulled since the source's rank 0 began to run, in ascending order. Asks that
   rank; the deadline is join_seconds. Writes the first `capacity` of them to `replicas`, in elements of `element_size`
   bytes (sizeof(reshard_replica)), and the number of all to *count. */
reshard_status reshard_replicas(reshard_executor *executor, reshard_replica *replicas, size_t element_size,
                                size_t capacity, size_t *count);

/* The state of the targets of this process's ranks. */
reshard_state reshard_target_state(const reshard_executor *executor);
/* The number of completed runs; in pull mode the version that was published or pulled last. */
uint64_t reshard_version(const reshard_executor *executor);
/* Pull mode, of a target rank: the number of completed pulls that have written its memory and called its hooks. A pull
   of a version that the rank holds already does neither; a pull of an equal version of a source that has started again
   does. */
uint64_t reshard_pulls(const reshard_executor *executor);
/* The error text of the last call; "" if it succeeded. Valid until the next call. */
const char *reshard_error(const reshard_executor *executor);
/* Bytes that one run moves to this process's ranks, padding included; known after prepare. */
uint64_t reshard_bytes(const reshard_executor *executor);
/* Of these, the bytes that reach this process's ranks by one method; known after prepare. */
uint64_t reshard_bytes_by(const reshard_executor *executor, reshard_method method);
/* Before prepare: this process cannot take part, for a reason that is not an error of the library. The processes that
   wait for it fail with the reason at once; the executor can only be closed. After prepare it does nothing. */
reshard_status reshard_fail(reshard_executor *executor, const char *reason);
/* Checks options without a plan and without waiting for another process, for a program that starts something long
   before reshard_open, such as an engine: their values, the form of the rendezvous, the variables of env://, the
   secret, that a host without one is this machine, and that the folder of file:/// is there; as reshard_open, it makes
   the folder if its parent exists. Writes the error, or "", to `error`, at most `capacity` bytes with its end; NULL, 0:
   nowhere. */
reshard_status reshard_check_options(const reshard_options *options, char *error, size_t capacity);
/* The name of transport number `index`, from 0 on, of those that connect processes on a device (NULL: "cpu"). NULL:
   there are no more. */
const char *reshard_transport(const char *device, size_t index);
/* Instead of reshard_open, with its options and rank (NULL: that of env://): this process cannot call it, for a reason
   that is not an error of the library. With a rendezvous, also the default one of "nccl", the processes that wait for
   it there fail with the reason at once. Returns when they know, after 5 seconds or at the deadline at the latest. */
reshard_status reshard_fail_open(const uint32_t *rank, const reshard_options *options, const char *reason);
/* Frees the executor; NULL is allowed. If bind or prepare has failed, it gives that as reason to reshard_fail first. */
void reshard_close(reshard_executor *executor);

#ifdef __cplusplus
}
#endif
#endif
