//! Making a ring on a machine that may not want one.

use std::io;
use std::time::Duration;

/// How long a ring waits for locked memory that is on its way back: 3 s.
const SHORT_ATTEMPTS: u32 = 60;
const SHORT_PAUSE: Duration = Duration::from_millis(50);

/// Locked memory is counted per user, and the kernel gives that of a ring back some time after its process has gone: a
/// start right after a kill finds it taken (lesson U3). Nothing runs on this thread yet that sleeping would hold up.
pub(super) fn retry_while_short<T>(mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 0..SHORT_ATTEMPTS {
        match make() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => std::thread::sleep(SHORT_PAUSE),
            made => return made,
        }
    }
    make()
}

/// Lessons U1 to U4: say what stands in the way, not only what the kernel said.
pub(super) fn explain_setup(error: io::Error) -> io::Error {
    let why = match error.raw_os_error() {
        Some(libc::ENOSYS) => {
            "the kernel has no io_uring, or a seccomp profile hides it: allow the system calls io_uring_setup, \
             io_uring_enter and io_uring_register"
        }
        Some(libc::EPERM) => {
            "io_uring is forbidden here: look at `sysctl kernel.io_uring_disabled` and `kernel.io_uring_group`, and \
             at the container's seccomp profile (io_uring_setup, io_uring_enter, io_uring_register)"
        }
        Some(libc::ENOMEM) => "out of locked memory: raise the memlock limit (ulimit -l, LimitMEMLOCK=)",
        Some(libc::EINVAL) => "this kernel lacks DEFER_TASKRUN: Linux 6.1 or newer is needed",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("cannot create an io_uring: {error}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lesson_u3_locked_memory_that_comes_back_late_is_waited_for() {
        let mut attempts = 0;
        let made = retry_while_short(|| {
            attempts += 1;
            if attempts < 3 {
                Err(io::Error::from_raw_os_error(libc::ENOMEM))
            } else {
                Ok(attempts)
            }
        });
        assert_eq!(made.ok(), Some(3));
        let refused: io::Result<()> = retry_while_short(|| Err(io::Error::from_raw_os_error(libc::EPERM)));
        assert_eq!(refused.err().and_then(|error| error.raw_os_error()), Some(libc::EPERM));
    }
}
