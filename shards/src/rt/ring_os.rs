//! What the ring runtime asks of the operating system besides its ring: the clock, randomness, a core.

use std::io;

pub(super) fn monotonic_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

pub(super) fn os_seed() -> io::Result<[u8; 32]> {
    let mut seed = [0u8; 32];
    // SAFETY: the buffer is valid for its length.
    let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), 0) };
    match got == seed.len() as isize {
        true => Ok(seed),
        false => Err(io::Error::other(format!("cannot get a random seed: {}", io::Error::last_os_error()))),
    }
}

pub(super) fn allowed_cpus() -> io::Result<libc::cpu_set_t> {
    // SAFETY: zeroed is the empty set.
    let mut cpus: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is valid for the stated size.
    match unsafe { libc::sched_getaffinity(0, std::mem::size_of_val(&cpus), &mut cpus) } {
        0 => Ok(cpus),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Those of `cpus` that `allowed` holds; all of it where that would be none.
pub(super) fn cut_to(allowed: &libc::cpu_set_t, cpus: &[usize]) -> libc::cpu_set_t {
    // SAFETY: zeroed is the empty set.
    let mut cut: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|cpu| **cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: both sets are valid; the bound keeps the index inside them.
        unsafe {
            if libc::CPU_ISSET(cpu, allowed) {
                libc::CPU_SET(cpu, &mut cut);
            }
        }
    }
    // SAFETY: reads a valid set.
    match unsafe { libc::CPU_COUNT(&cut) } {
        0 => *allowed,
        _ => cut,
    }
}

pub(super) fn pin_to(cpu: usize, allowed: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: reads a bit of a valid set; the bound keeps the index inside it.
    let may = cpu < libc::CPU_SETSIZE as usize && unsafe { libc::CPU_ISSET(cpu, allowed) };
    if !may {
        let text = format!("cannot pin to CPU {cpu}: this process may not use it (cpuset, taskset or AllowedCPUs)");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    // SAFETY: zeroed is the empty set; the bound was checked above.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        set
    };
    // SAFETY: the pointer is valid for the stated size.
    match unsafe { libc::sched_setaffinity(0, std::mem::size_of_val(&set), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::other(format!("cannot pin to CPU {cpu}: {}", io::Error::last_os_error()))),
    }
}
