//! Can this kernel give us what shards need? Asked before the first executor, whose own complaints are panics. Each
//! refusal is one line: cause, then remedy.

use std::fs;
use std::io;

use narad_shards::io::system::{self, Limit, Resource};

use crate::config::{format_bytes, Warning};

use super::Refusal;

/// glommio refuses below this, whether the kernel needs it or not (lesson U3, E26).
const LOCKED_MEMORY_BYTES_MIN: u64 = 512 << 10;
/// Descriptors beside client connections: segments, listeners, rings, metadata.
const DESCRIPTORS_BESIDE_CLIENTS: u64 = 1024;

/// What else the kernel says when it refuses a ring.
#[derive(Clone, Debug, Default)]
pub struct RingContext {
    /// `/proc/sys/kernel/io_uring_disabled`; absent before 6.6.
    pub disabled: Option<String>,
    /// `Seccomp:` of `/proc/self/status`; `2` means that a filter is active.
    pub seccomp: Option<String>,
    pub kernel: String,
    pub locked_memory_bytes: u64,
}

impl RingContext {
    pub(super) fn read(kernel: &str, locked_memory_bytes: u64) -> RingContext {
        let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let seccomp = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
        RingContext {
            disabled: disabled.map(|text| text.trim().to_owned()),
            seccomp: seccomp.map(|text| text.trim().to_owned()),
            kernel: kernel.to_owned(),
            locked_memory_bytes,
        }
    }
}

const SECCOMP_REMEDY: &str = "allow exactly io_uring_setup, io_uring_enter and io_uring_register in the container's \
     seccomp profile (Docker: --security-opt seccomp=<file>; Kubernetes: securityContext.seccompProfile, type Localhost)";

/// Why a ring could not be made (lessons U1 to U5).
pub fn explain_ring_error(error: &io::Error, context: &RingContext) -> Refusal {
    let kernel = &context.kernel;
    let filtered = context.seccomp.as_deref() == Some("2");
    match error.raw_os_error() {
        Some(libc::ENOSYS) if filtered => {
            Refusal::new("io_uring is hidden from this process by a seccomp filter (ENOSYS)", SECCOMP_REMEDY)
        }
        Some(libc::ENOSYS) => Refusal::new(
            format!("kernel {kernel} has no io_uring, or a seccomp filter hides it (ENOSYS)"),
            format!("run kernel 6.1 or newer with CONFIG_IO_URING; in a container, {SECCOMP_REMEDY}"),
        ),
        Some(libc::EPERM | libc::EACCES) => match context.disabled.as_deref() {
            Some("1") => Refusal::new(
                "io_uring is for privileged processes only (kernel.io_uring_disabled is 1)",
                "sysctl kernel.io_uring_disabled=0, or set kernel.io_uring_group to a group of the broker's user",
            ),
            Some("2") => Refusal::new(
                "io_uring is switched off on this machine (kernel.io_uring_disabled is 2)",
                "sysctl kernel.io_uring_disabled=0, or 1 together with kernel.io_uring_group set to a group of the broker's user",
            ),
            _ => Refusal::new(
                "io_uring is forbidden to this process (EPERM) by a seccomp filter or a security module such as SELinux or AppArmor",
                SECCOMP_REMEDY,
            ),
        },
        Some(libc::ENOMEM) => Refusal::new(
            format!("the kernel has no memory for an io_uring (ENOMEM; locked memory limit {})", format_bytes(context.locked_memory_bytes)),
            "raise the limit: systemd LimitMEMLOCK=infinity, Docker --ulimit memlock=-1, or memlock in /etc/security/limits.conf",
        ),
        Some(libc::EINVAL) => Refusal::new(
            format!("kernel {kernel} does not know the io_uring modes that shards use (SINGLE_ISSUER with DEFER_TASKRUN)"),
            "run kernel 6.1 or newer",
        ),
        _ => Refusal::new(format!("io_uring cannot be set up on kernel {kernel}: {error}"), "see the kernel log"),
    }
}

/// `kernel.osrelease`, for messages and the start line (lesson U5).
pub fn kernel_release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// What the limits are after they were raised as far as they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessLimits {
    pub locked_memory_bytes: u64,
    pub descriptors: u64,
}

/// Raises the limits and makes a trial ring.
pub fn check_machine(
    kernel: &str,
    connections_max: u64,
    warnings: &mut Vec<Warning>,
) -> Result<ProcessLimits, Refusal> {
    let unreadable =
        |error: io::Error| Refusal::new(format!("cannot read the process limits: {error}"), "see prlimit(1)");
    let locked = system::raise_limit(Resource::LockedMemory).map_err(unreadable)?;
    judge_locked_memory(locked)?;
    let descriptors = system::raise_limit(Resource::Descriptors).map_err(unreadable)?;
    warnings.extend(judge_descriptors(descriptors, connections_max));
    system::probe_ring().map_err(|error| explain_ring_error(&error, &RingContext::read(kernel, locked.soft)))?;
    Ok(ProcessLimits { locked_memory_bytes: locked.soft, descriptors: descriptors.soft })
}

pub(super) fn judge_locked_memory(limit: Limit) -> Result<(), Refusal> {
    if limit.soft >= LOCKED_MEMORY_BYTES_MIN {
        return Ok(());
    }
    Err(Refusal::new(
        format!(
            "the locked memory limit is {}, and rings need at least {}",
            format_bytes(limit.soft),
            format_bytes(LOCKED_MEMORY_BYTES_MIN)
        ),
        "raise it: systemd LimitMEMLOCK=infinity, Docker --ulimit memlock=-1, or memlock in /etc/security/limits.conf",
    ))
}

pub(super) fn judge_descriptors(limit: Limit, connections_max: u64) -> Option<Warning> {
    let wanted = connections_max.saturating_add(DESCRIPTORS_BESIDE_CLIENTS);
    (limit.soft < wanted).then(|| {
        Warning::new(
            format!(
                "the descriptor limit is {}, and http.max_connections ({connections_max}) wants {wanted}",
                limit.soft
            ),
            "raise it (systemd LimitNOFILE, Docker --ulimit nofile), or lower http.max_connections",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(disabled: Option<&str>, seccomp: &str) -> RingContext {
        RingContext {
            disabled: disabled.map(str::to_owned),
            seccomp: Some(seccomp.to_owned()),
            kernel: "5.15.0-1".to_owned(),
            locked_memory_bytes: 65536,
        }
    }

    #[test]
    fn lessons_u1_to_u4_each_ring_error_has_cause_and_remedy() {
        let cases: &[(i32, RingContext, &[&str])] = &[
            (
                libc::ENOSYS,
                context(None, "2"),
                &["seccomp filter (ENOSYS)", "io_uring_setup, io_uring_enter and io_uring_register"],
            ),
            (libc::ENOSYS, context(None, "0"), &["kernel 5.15.0-1 has no io_uring", "6.1 or newer", "seccomp"]),
            (libc::EPERM, context(Some("2"), "0"), &["kernel.io_uring_disabled is 2", "kernel.io_uring_group"]),
            (
                libc::EPERM,
                context(Some("1"), "2"),
                &["kernel.io_uring_disabled is 1", "sysctl kernel.io_uring_disabled=0", "kernel.io_uring_group"],
            ),
            (libc::EPERM, context(Some("0"), "2"), &["EPERM", "seccomp", "io_uring_register"]),
            (libc::EPERM, context(None, "0"), &["EPERM", "AppArmor"]),
            (libc::ENOMEM, context(None, "0"), &["ENOMEM", "64KiB", "LimitMEMLOCK", "--ulimit memlock"]),
            (libc::EINVAL, context(None, "0"), &["5.15.0-1", "DEFER_TASKRUN", "6.1 or newer"]),
            (libc::EMFILE, context(None, "0"), &["cannot be set up", "5.15.0-1"]),
        ];
        for (errno, context, expected) in cases {
            let text = explain_ring_error(&io::Error::from_raw_os_error(*errno), context).to_string();
            for part in *expected {
                assert!(text.contains(part), "{errno}: {part:?} is missing in {text}");
            }
            assert!(!text.contains('\n'));
        }
    }

    #[test]
    fn e26_locked_memory_is_refused_only_below_512_kib() {
        let limit = |soft| Limit { soft, hard: soft };
        assert!(judge_locked_memory(limit(8 << 20)).is_ok());
        assert!(judge_locked_memory(limit(512 << 10)).is_ok());
        assert!(judge_locked_memory(limit(u64::MAX)).is_ok());
        let text = judge_locked_memory(limit((512 << 10) - 1)).unwrap_err().to_string();
        assert!(text.contains("LimitMEMLOCK") && text.contains("512KiB"), "{text}");
    }

    #[test]
    fn few_descriptors_are_a_warning_with_a_remedy() {
        let limit = |soft| Limit { soft, hard: soft };
        assert_eq!(judge_descriptors(limit(20_000), 4096), None);
        let text = judge_descriptors(limit(1024), 4096).unwrap().to_string();
        assert!(text.contains("1024") && text.contains("5120") && text.contains("LimitNOFILE"), "{text}");
    }
}
