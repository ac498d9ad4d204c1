//! `process_*` series, from procfs. Read off the shards: files block.

use std::fs;

use super::exposition::{Exposition, Kind};

/// Appends what the kernel says of this process; what it does not say is left out.
pub fn render_process(page: &mut Exposition) {
    // Fields behind the command name, which may hold blanks and parentheses: state is the first.
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    // The unit in which procfs reports times; fixed in the kernel's interface on all platforms that we run on.
    const TICKS_PER_SECOND: f64 = 100.0;
    if let (Some(user), Some(system)) = (number(11), number(12)) {
        let seconds = (user + system) as f64 / TICKS_PER_SECOND;
        page.single("process_cpu_seconds_total", Kind::Counter, "User and system CPU time spent.", seconds);
    }
    if let Some(threads) = number(17) {
        page.single("process_threads", Kind::Gauge, "Threads of the process.", threads);
    }
    if let (Some(ticks), Some(boot)) = (number(19), boot_time_seconds()) {
        let started = boot as f64 + ticks as f64 / TICKS_PER_SECOND;
        page.single("process_start_time_seconds", Kind::Gauge, "Start time, Unix seconds.", started);
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    for (field, name, help) in [
        (RESIDENT, "process_resident_memory_bytes", "Resident memory."),
        ("VmSize:", "process_virtual_memory_bytes", "Virtual memory."),
    ] {
        if let Some(bytes) = status_bytes(&status, field) {
            page.single(name, Kind::Gauge, help, bytes);
        }
    }
    if let Ok(descriptors) = fs::read_dir("/proc/self/fd") {
        page.single("process_open_fds", Kind::Gauge, "Open file descriptors.", descriptors.count());
    }
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    for (limit, name, help) in [
        ("Max open files", "process_max_fds", "File descriptors that the process may have open."),
        ("Max address space", "process_virtual_memory_max_bytes", "Virtual memory that the process may have."),
    ] {
        if let Some(most) = soft_limit(&limits, limit) {
            page.single(name, Kind::Gauge, help, most);
        }
    }
}

const RESIDENT: &str = "VmRSS:";

/// The soft limit in a line of `/proc/self/limits`; `unlimited` is the largest number.
fn soft_limit(limits: &str, name: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_ascii_whitespace().next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    }
}

/// Resident memory of this process. Read off the shards: files block.
pub fn resident_bytes() -> Option<u64> {
    status_bytes(&fs::read_to_string("/proc/self/status").ok()?, RESIDENT)
}

fn status_bytes(status: &str, field: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.split_ascii_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

fn boot_time_seconds() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_knows_itself() {
        let mut page = Exposition::new();
        render_process(&mut page);
        let text = page.finish();
        for name in [
            "process_cpu_seconds_total",
            "process_start_time_seconds",
            "process_resident_memory_bytes",
            "process_max_fds",
        ] {
            let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).expect(name);
            let value: f64 = line.split(' ').nth(1).expect("a value").parse().expect("a number");
            assert!(value >= 0.0 && (value > 0.0 || name.contains("cpu")), "{line}");
        }
        let limits = "Limit  Soft  Hard  Units\nMax open files            1024      65536     files     \n\
                      Max address space         unlimited unlimited bytes     \n";
        assert_eq!(soft_limit(limits, "Max open files"), Some(1024));
        assert_eq!(soft_limit(limits, "Max address space"), Some(u64::MAX));
        assert_eq!(soft_limit(limits, "Max stack"), None);
    }
}
