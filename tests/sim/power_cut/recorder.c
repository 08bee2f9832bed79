/* See recorder.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPENED = 1, WRITTEN, RESIZED, GROWN, SYNCED, NAMES_SYNCED, RENAMED, UNLINKED, LINKED, MADE, REMOVED, NOTED };
enum { MAX_FILES = 65536 };
#define REAL(name) ((__typeof__(&name))real(#name))

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[PATH_MAX];
static size_t root_size;
static struct file { int64_t inode; char *path; uint8_t kind; } files[MAX_FILES]; /* kind: 0 not ours, 1 file, 2 folder, 3 syncs itself */
static uint8_t *trace;
static size_t trace_size, trace_room;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static void note(uint8_t kind, const char *path, const char *other, const void *data, size_t size, int64_t inode, int64_t what) {
    size_t n = path ? strlen(path) : 0, m = other ? strlen(other) : 0, all = 32 + n + m + size;
    while (trace_size + all > trace_room) {
        trace_room = trace_room ? trace_room * 2 : 1 << 20;
        trace = realloc(trace, trace_room);
        if (!trace) abort();
    }
    uint8_t *at = trace + trace_size;
    uint32_t sizes[3] = {n, m, size};
    memset(at, 0, 4);
    at[0] = kind;
    memcpy(at + 4, sizes, 12);
    memcpy(at + 16, &inode, 8);
    memcpy(at + 24, &what, 8);
    if (n) memcpy(at + 32, path, n);
    if (m) memcpy(at + 32 + n, other, m);
    if (size) memcpy(at + 32 + n + m, data, size);
    trace_size += all;
}

/* The whole path, if it is below the root; else NULL. */
static char *ours(int folder, const char *path) {
    char whole[2 * PATH_MAX];
    if (!root_size || !path) return NULL;
    if (path[0] == '/') snprintf(whole, sizeof whole, "%s", path);
    else if (folder >= 0 && folder < MAX_FILES && files[folder].kind == 2) snprintf(whole, sizeof whole, "%s/%s", files[folder].path, path);
    else return NULL;
    const char *name = strrchr(whole, '/') + 1;
    if (strncmp(whole, root, root_size) || whole[root_size] != '/' || !strncmp(name, "LOG", 3)) return NULL; /* RocksDB's own tale */
    return strdup(whole);
}

static void forget(int fd) {
    if (fd < 0 || fd >= MAX_FILES || !files[fd].kind) return;
    free(files[fd].path);
    memset(&files[fd], 0, sizeof files[fd]);
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    pthread_mutex_lock(&lock);
    struct stat found;
    char *whole = ours(folder, path);
    int was = whole && !stat(whole, &found), fd = REAL(openat)(folder, path, flags, mode), error = errno;
    if (fd >= 0 && fd < MAX_FILES) forget(fd);
    if (whole && fd >= 0 && fd < MAX_FILES && !fstat(fd, &found)) {
        files[fd].inode = found.st_ino;
        files[fd].path = whole;
        files[fd].kind = S_ISDIR(found.st_mode) ? 2 : flags & O_DSYNC ? 3 : 1;
        if (files[fd].kind != 2 && (!was || flags & O_TRUNC))
            note(OPENED, whole, NULL, NULL, 0, found.st_ino, (was ? 0 : 1) | (flags & O_TRUNC ? 2 : 0));
    } else free(whole);
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

static mode_t mode_of(int flags, va_list more) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; }
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = mode_of(flags, more); va_end(more); return opened(AT_FDCWD, path, flags, mode); }
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); mode_t mode = mode_of(flags, more); va_end(more); return opened(folder, path, flags, mode); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int __open_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return opened(AT_FDCWD, path, flags, 0); }

int close(int fd) {
    pthread_mutex_lock(&lock);
    forget(fd);
    int done = REAL(close)(fd), error = errno;
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

static int is_file(int fd) { return fd >= 0 && fd < MAX_FILES && (files[fd].kind == 1 || files[fd].kind == 3); }

static void wrote(int fd, const struct iovec *parts, int count, off_t offset, ssize_t done) {
    for (int i = 0; i < count && done > 0; i++) {
        size_t size = parts[i].iov_len < (size_t)done ? parts[i].iov_len : (size_t)done;
        note(WRITTEN, NULL, NULL, parts[i].iov_base, size, files[fd].inode, offset);
        offset += size;
        done -= size;
    }
    if (files[fd].kind == 3) note(SYNCED, files[fd].path, NULL, NULL, 0, files[fd].inode, 0);
}

static ssize_t write_at(int fd, const struct iovec *parts, int count, off_t offset) {
    if (!is_file(fd)) return offset < 0 ? REAL(writev)(fd, parts, count) : REAL(pwritev)(fd, parts, count, offset);
    pthread_mutex_lock(&lock);
    ssize_t done = offset < 0 ? REAL(writev)(fd, parts, count) : REAL(pwritev)(fd, parts, count, offset);
    int error = errno;
    if (done > 0) wrote(fd, parts, count, offset < 0 ? lseek(fd, 0, SEEK_CUR) - done : offset, done);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!is_file(fd)) return REAL(write)(fd, data, size);
    struct iovec part = {(void *)data, size};
    return write_at(fd, &part, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { struct iovec part = {(void *)data, size}; return write_at(fd, &part, 1, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return pwrite(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return write_at(fd, parts, count, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return write_at(fd, parts, count, offset); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) { return write_at(fd, parts, count, offset); }

/* Copies within the system are made by reads and writes instead. */
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    if (is_file(to)) { errno = EINVAL; return -1; }
    return REAL(sendfile)(to, from, offset, size);
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { return sendfile(to, from, offset, size); }
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t size, unsigned flags) {
    if (is_file(to)) { errno = EINVAL; return -1; }
    return REAL(copy_file_range)(from, a, to, b, size, flags);
}

#define DONE(call, ...) \
    pthread_mutex_lock(&lock); \
    int done = call, error = errno; \
    if (!done) { __VA_ARGS__; } \
    pthread_mutex_unlock(&lock); \
    errno = error; \
    return done;

int ftruncate(int fd, off_t size) { DONE(REAL(ftruncate)(fd, size), if (is_file(fd)) note(RESIZED, NULL, NULL, NULL, 0, files[fd].inode, size)) }
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int fallocate(int fd, int mode, off_t offset, off_t size) {
    DONE(REAL(fallocate)(fd, mode, offset, size), if (is_file(fd) && !mode) note(GROWN, NULL, NULL, NULL, 0, files[fd].inode, offset + size))
}
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }
int posix_fallocate(int fd, off_t offset, off_t size) {
    DONE(REAL(posix_fallocate)(fd, offset, size), if (is_file(fd)) note(GROWN, NULL, NULL, NULL, 0, files[fd].inode, offset + size))
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

static int synced(int fd) {
    pthread_mutex_lock(&lock);
    int kind = fd >= 0 && fd < MAX_FILES ? files[fd].kind : 0;
    if (kind == 2) note(NAMES_SYNCED, files[fd].path, NULL, NULL, 0, files[fd].inode, 0);
    else if (kind) note(SYNCED, files[fd].path, NULL, NULL, 0, files[fd].inode, 0);
    pthread_mutex_unlock(&lock);
    return kind;
}
int fsync(int fd) { return synced(fd) ? 0 : REAL(fsync)(fd); }
int fdatasync(int fd) { return synced(fd) ? 0 : REAL(fdatasync)(fd); }

static int renamed(int from, const char *path, int to, const char *other) {
    char *a = ours(from, path), *b = ours(to, other);
    if (a && b) note(RENAMED, a, b, NULL, 0, 0, 0);
    free(a);
    free(b);
    return 0;
}
int rename(const char *a, const char *b) { DONE(REAL(rename)(a, b), renamed(AT_FDCWD, a, AT_FDCWD, b)) }
int renameat(int x, const char *a, int y, const char *b) { DONE(REAL(renameat)(x, a, y, b), renamed(x, a, y, b)) }
int renameat2(int x, const char *a, int y, const char *b, unsigned flags) { DONE(REAL(renameat2)(x, a, y, b, flags), renamed(x, a, y, b)) }

static void named(uint8_t kind, int folder, const char *path) {
    char *whole = ours(folder, path);
    if (whole) note(kind, whole, NULL, NULL, 0, 0, 0);
    free(whole);
}
int unlink(const char *path) { DONE(REAL(unlink)(path), named(UNLINKED, AT_FDCWD, path)) }
int unlinkat(int x, const char *path, int flags) { DONE(REAL(unlinkat)(x, path, flags), named(flags & AT_REMOVEDIR ? REMOVED : UNLINKED, x, path)) }
int rmdir(const char *path) { DONE(REAL(rmdir)(path), named(REMOVED, AT_FDCWD, path)) }
int mkdir(const char *path, mode_t mode) { DONE(REAL(mkdir)(path, mode), named(MADE, AT_FDCWD, path)) }
int mkdirat(int x, const char *path, mode_t mode) { DONE(REAL(mkdirat)(x, path, mode), named(MADE, x, path)) }

static void linked(int x, const char *path, int y, const char *other) {
    char *a = ours(x, path), *b = ours(y, other);
    if (a && b) note(LINKED, a, b, NULL, 0, 0, 0);
    free(a);
    free(b);
}
int link(const char *a, const char *b) { DONE(REAL(link)(a, b), linked(AT_FDCWD, a, AT_FDCWD, b)) }
int linkat(int x, const char *a, int y, const char *b, int flags) { DONE(REAL(linkat)(x, a, y, b, flags), linked(x, a, y, b)) }

/* RocksDB writes it into its tables: their sizes are the same on every machine. */
int gethostname(char *name, size_t size) {
    snprintf(name, size, "machine");
    return 0;
}

/* Called by the recorder's Python side. */
void recorder_begin(const char *folder) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", folder);
    root_size = strlen(root);
    trace_size = 0;
    pthread_mutex_unlock(&lock);
}
void recorder_note(int64_t number) {
    pthread_mutex_lock(&lock);
    note(NOTED, NULL, NULL, NULL, 0, 0, number);
    pthread_mutex_unlock(&lock);
}
size_t recorder_end(const uint8_t **found) {
    pthread_mutex_lock(&lock);
    root_size = 0;
    for (int fd = 0; fd < MAX_FILES; fd++) forget(fd);
    *found = trace;
    pthread_mutex_unlock(&lock);
    return trace_size;
}
