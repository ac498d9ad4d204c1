//! System calls of start-up and of the command line: what this process may use, asked before the first executor
//! exists. Nothing here runs on a shard.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// CPUs that the calling thread may run on, ascending (`sched_getaffinity`). Call it before any pinning (lesson P2).
pub fn allowed_cpus() -> io::Result<Vec<u32>> {
    const WORDS_MAX: usize = 8192; // half a million CPUs
    let mut words = vec![0u64; 16];
    loop {
        let bytes = std::mem::size_of_val(&words[..]);
        // SAFETY: the kernel writes at most `bytes` bytes into a buffer of that size that we own; pid 0 is this thread.
        let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, 0, bytes, words.as_mut_ptr()) };
        if written >= 0 {
            words.truncate((written as usize).div_ceil(8));
            break;
        }
        let error = io::Error::last_os_error();
        // The kernel's mask is longer than ours.
        if error.raw_os_error() == Some(libc::EINVAL) && words.len() < WORDS_MAX {
            words = vec![0u64; words.len() * 2];
            continue;
        }
        return Err(error);
    }
    let set = |cpu: &u32| words[*cpu as usize / 64] >> (cpu % 64) & 1 == 1;
    Ok((0..words.len() as u32 * 64).filter(set).collect())
}

/// Memory that the allocator holds of the kernel's, in bytes: in use, or kept for what comes next. 0 in a process whose
/// allocator is another one.
pub fn allocator_bytes() -> u64 {
    let mut figures = [0usize; 8];
    let [elapsed, user, system, resident, resident_peak, committed, committed_peak, faults] = &mut figures;
    // SAFETY: each pointer is to a `usize` of ours that lives through the call, and no two are the same.
    unsafe {
        libmimalloc_sys::mi_process_info(
            elapsed,
            user,
            system,
            resident,
            resident_peak,
            committed,
            committed_peak,
            faults,
        );
    }
    *committed as u64
}

/// What `statfs` says of the file system under a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystemFacts {
    /// `f_type`, see statfs(2).
    pub magic: u64,
    pub block_bytes: u64,
    pub total_bytes: u64,
    /// Free for an unprivileged process.
    pub available_bytes: u64,
}

pub fn file_system(path: &Path) -> io::Result<FileSystemFacts> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut facts = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `path` is NUL-terminated and lives through the call; `facts` is a statfs-sized buffer of ours.
    if unsafe { libc::statfs(path.as_ptr(), facts.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all-zero is a valid `statfs`, and the call filled it.
    let facts = unsafe { facts.assume_init() };
    let block_bytes = facts.f_bsize as u64;
    Ok(FileSystemFacts {
        // Several magics have the top bit of 32 set and come back sign-extended.
        magic: facts.f_type as u64 & 0xffff_ffff,
        block_bytes,
        total_bytes: facts.f_blocks.saturating_mul(block_bytes),
        available_bytes: facts.f_bavail.saturating_mul(block_bytes),
    })
}

/// A limit of `setrlimit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Bytes that may be locked into memory (rings, registered buffers).
    LockedMemory,
    Descriptors,
}

/// `u64::MAX` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub soft: u64,
    pub hard: u64,
}

/// Raises the soft limit to the hard one, as far as the kernel lets us, and returns what holds now.
pub fn raise_limit(resource: Resource) -> io::Result<Limit> {
    let resource = match resource {
        Resource::LockedMemory => libc::RLIMIT_MEMLOCK,
        Resource::Descriptors => libc::RLIMIT_NOFILE,
    };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit of ours.
    if unsafe { libc::getrlimit(resource, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if limit.rlim_cur != limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: limit.rlim_max, rlim_max: limit.rlim_max };
        // SAFETY: `raised` is a valid rlimit of ours. A refusal leaves the old limit, which is what we then report.
        if unsafe { libc::setrlimit(resource, &raised) } == 0 {
            limit = raised;
        }
    }
    Ok(Limit { soft: limit.rlim_cur, hard: limit.rlim_max })
}

/// Makes and drops a small ring with the flags that shards use. The error number tells what stands in the way:
/// `ENOSYS`, `EPERM`, `ENOMEM`, or `EINVAL` on a kernel before 6.1.
pub fn probe_ring() -> io::Result<()> {
    let mut builder = io_uring::IoUring::builder();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let ring: io_uring::IoUring = builder.build(8)?;
    drop(ring);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lesson_p1_the_calling_thread_may_run_somewhere_and_every_cpu_exists() {
        let cpus = allowed_cpus().unwrap();
        assert!(!cpus.is_empty());
        assert!(cpus.windows(2).all(|pair| pair[0] < pair[1]), "{cpus:?}");
        for cpu in cpus {
            assert!(Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists(), "cpu {cpu}");
        }
    }

    #[test]
    fn file_system_facts_are_of_the_path_asked_for() {
        let proc = file_system(Path::new("/proc")).unwrap();
        assert_eq!(proc.magic, 0x9fa0);
        assert!(file_system(Path::new("/")).unwrap().total_bytes > 0);
        let missing = file_system(Path::new("/nonexistent/narad")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn raising_a_limit_ends_at_the_hard_one() {
        let limit = raise_limit(Resource::Descriptors).unwrap();
        assert_eq!(limit.soft, limit.hard);
    }
}
