/* Preloaded into a broker that runs under valgrind. valgrind runs one thread at a time and hands the turn on at system
 * calls that may block; 3.19 does not know that io_uring_enter may, so a shard that waits for another thread would wait
 * for ever. Here a wait is made of looks and short sleeps. What this file costs is not counted: the reader of the
 * profile leaves out the object that it is compiled to. */
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>

enum { GETEVENTS = 1, EXT_ARG = 8, PAUSE_NANOS = 20000, PAUSE_COST_MICROS = 100 };

struct getevents_arg { uint64_t sigmask; uint32_t sigmask_size, pad; uint64_t timespec; };

static long raw(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

/* What io_uring_enter(ring, submit, at least one, flags, arg) would do. */
static long enter_and_wait(long ring, long submit, long flags, long arg, long arg_bytes) {
    long submitted = raw(SYS_io_uring_enter, ring, submit, 0, flags, arg, arg_bytes);
    if (submitted < 0) return submitted;
    long left_micros = -1;
    if ((flags & EXT_ARG) && arg && ((struct getevents_arg *)arg)->timespec) {
        struct timespec *limit = (struct timespec *)((struct getevents_arg *)arg)->timespec;
        left_micros = limit->tv_sec * 1000000 + limit->tv_nsec / 1000;
    }
    struct pollfd look = {.fd = (int)ring, .events = POLLIN};
    while (raw(SYS_poll, (long)&look, 1, 0, 0, 0, 0) == 0) {
        if (left_micros >= 0 && (left_micros -= PAUSE_COST_MICROS) <= 0) return submitted ? submitted : -ETIME;
        struct timespec pause = {0, PAUSE_NANOS};
        raw(SYS_nanosleep, (long)&pause, 0, 0, 0, 0, 0);
        raw(SYS_io_uring_enter, ring, 0, 0, GETEVENTS, 0, 0);
    }
    raw(SYS_io_uring_enter, ring, 0, 0, GETEVENTS, 0, 0);
    return submitted;
}

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    int waits = number == SYS_io_uring_enter && c > 0;
    long result = waits ? enter_and_wait(a, b, d, e, f) : raw(number, a, b, c, d, e, f);
    if (result >= 0) return result;
    errno = (int)-result;
    return -1;
}
