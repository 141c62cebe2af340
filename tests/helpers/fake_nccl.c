/* NCCL for threads of one process: what our binding calls, with NCCL's own types, in host memory.
   A rank that enters a collective is "in progress" until all have, as with a non-blocking communicator. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID = 4, REMOTE = 6, IN_PROGRESS = 7, MAX = 64 };
typedef struct { char internal[128]; } id_t_;
typedef struct { size_t size; unsigned magic, version; int blocking; } config_t;
typedef struct { char id[128]; int world, joined, gone; int ins, outs; float sum; char *data; size_t count; long turn; } group_t;
typedef struct { group_t *group; int rank, waits; long turn; void *buffer; size_t count; int kind; } comm_t;

static group_t groups[MAX];
static int used, counter;
static char last[256] = "";
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int ncclGetVersion(int *version) { *version = 22809; return SUCCESS; }
const char *ncclGetErrorString(int code) {
  return code == SUCCESS ? "no error" : code == INVALID ? "invalid argument" : code == REMOTE ? "remote process exited" : "other";
}
const char *ncclGetLastError(void *comm) { (void)comm; return last; }

int ncclGetUniqueId(id_t_ *id) {
  memset(id, 0xA5, sizeof *id);  /* no byte is 0: a copy that stops at one would not arrive whole */
  pthread_mutex_lock(&lock);
  snprintf(id->internal, 16, "id-%d-%d", (int)getpid(), counter++);
  id->internal[15] = (char)0xA5; id->internal[127] = 0x5A;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int ncclCommInitRankScalable(void **comm, int world, int rank, int count, id_t_ *ids, config_t *config) {
  id_t_ id = ids[0];
  if (count != 1) { snprintf(last, sizeof last, "one id is known here"); return INVALID; }
  if (config->magic != 0xcafebeef || config->version < 22300 || config->blocking != 0 || config->size < 20) {
    snprintf(last, sizeof last, "config was not initialised");
    return INVALID;
  }
  if (id.internal[127] != 0x5A) { snprintf(last, sizeof last, "the id is cut"); return INVALID; }
  pthread_mutex_lock(&lock);
  group_t *group = NULL;
  for (int i = 0; i < used; i++) if (!memcmp(groups[i].id, id.internal, 128)) group = &groups[i];
  if (!group) { group = &groups[used++]; memset(group, 0, sizeof *group); memcpy(group->id, id.internal, 128); group->world = world; }
  group->joined++;
  comm_t *made = calloc(1, sizeof *made);
  made->group = group; made->rank = rank;
  *comm = made;
  int result = group->joined < group->world ? IN_PROGRESS : SUCCESS;
  pthread_mutex_unlock(&lock);
  return result;
}

int ncclCommUserRank(void *comm, int *rank) { *rank = ((comm_t *)comm)->rank; return SUCCESS; }

static int progress(comm_t *comm) {
  group_t *group = comm->group;
  if (group->gone) { snprintf(last, sizeof last, "peer hung up"); return REMOTE; }
  if (group->joined < group->world) return IN_PROGRESS;
  if (!comm->waits) return SUCCESS;
  if (comm->turn == group->turn && group->ins == group->world) {
    if (comm->kind == 1) *(float *)comm->buffer = group->sum;
    else if (comm->buffer != group->data) memcpy(comm->buffer, group->data, comm->count);
    comm->waits = 0;
    if (++group->outs == group->world) { group->ins = group->outs = 0; group->sum = 0; group->turn++; }
    return SUCCESS;
  }
  return IN_PROGRESS;
}

int ncclCommGetAsyncError(void *comm, int *state) {
  pthread_mutex_lock(&lock);
  *state = progress(comm);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

static int enter(comm_t *comm, void *buffer, size_t count, int kind, int root) {
  pthread_mutex_lock(&lock);
  group_t *group = comm->group;
  comm->waits = 1; comm->buffer = buffer; comm->count = count; comm->kind = kind; comm->turn = group->turn;
  if (kind == 1) group->sum += *(float *)buffer;
  else if (comm->rank == root) { group->data = buffer; group->count = count; }
  group->ins++;
  int result = progress(comm);
  pthread_mutex_unlock(&lock);
  return result;
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, void *comm, void *stream) {
  if (type != 7 || op != 0 || count != 1 || send != receive || stream != (void *)77) return INVALID;
  return enter(comm, receive, count, 1, 0);
}

int ncclBroadcast(const void *send, void *receive, size_t count, int type, int root, void *comm, void *stream) {
  comm_t *mine = comm;
  if (type != 1 || root != 0 || stream != (void *)77) return INVALID;
  if (mine->rank == root && send != receive) return INVALID;
  return enter(comm, receive, count, 2, root);
}

int ncclCommAbort(void *comm) {
  pthread_mutex_lock(&lock);
  ((comm_t *)comm)->group->gone = 1;
  memset(comm, 0xEE, sizeof(comm_t));  /* whoever uses it after this crashes */
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
