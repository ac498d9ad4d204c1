//! Which CPU each shard runs on, and how much memory each gets. Pure: what the machine allows goes in, a plan or a
//! refusal comes out.

use std::time::Duration;

use narad_shards::rt::{Spin, DRIVE_SPIN};

use crate::config::{format_bytes, CpuSet, Runtime, Warning};

use super::cgroup::Limits;
use super::shard_thread::REGISTERED_BYTES_USEFUL;
use super::Refusal;

/// Where threads run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuPlan {
    /// Affinity of the process, cut down to its control group.
    pub allowed: CpuSet,
    /// One entry a shard: the CPU that it is pinned to, or `None` to float over the allowed ones.
    pub shards: Vec<Option<u32>>,
    /// `runtime.control_cpu`, or one that no pinned shard has; `None` to float.
    pub control: Option<u32>,
    pub spin: Spin,
    pub warnings: Vec<Warning>,
}

impl CpuPlan {
    /// When shards poll, in words.
    pub fn spin_words(&self) -> String {
        match self.spin {
            Spin::Never => "never".into(),
            Spin::ForDrive(limit) => format!("up to {} us while the drive works", limit.as_micros()),
            Spin::Always(limit) => format!("{} us before each sleep", limit.as_micros()),
        }
    }

    pub fn pinned(&self) -> bool {
        self.shards.iter().all(Option::is_some)
    }

    /// Allowed CPUs that no shard is pinned to, for threads that block.
    pub fn without_shard(&self) -> CpuSet {
        self.allowed.difference(&self.shards.iter().flatten().copied().collect())
    }
}

/// A process can have a wider affinity than its group (lesson P4); an empty cut means that the files speak of something
/// else, and the kernel's own mask is what counts.
pub fn allowed_cpus(affinity: &CpuSet, limits: &Limits) -> CpuSet {
    match &limits.cpus {
        Some(group) if !affinity.intersection(group).is_empty() => affinity.intersection(group),
        _ => affinity.clone(),
    }
}

/// Chooses CPUs. `affinity` was read before any thread was pinned (lesson P2).
pub fn plan_cpus(runtime: &Runtime, affinity: &CpuSet, limits: &Limits) -> Result<CpuPlan, Refusal> {
    let allowed = allowed_cpus(affinity, limits);
    if allowed.is_empty() {
        return Err(Refusal::new(
            "this process may run on no CPU",
            "check taskset, AllowedCPUs or the cpuset of its control group",
        ));
    }
    let inside = |key: &str, asked: &CpuSet| match asked.difference(&allowed) {
        outside if outside.is_empty() => Ok(()),
        outside => Err(Refusal::setting(
            format!("{key} names CPU {outside}, which this process may not use"),
            format!("choose from the allowed ones: {allowed}"),
        )),
    };
    if let Some(cpu) = runtime.control_cpu {
        inside("runtime.control_cpu", &CpuSet::from_iter([cpu]))?;
    }
    if let Some(cpus) = &runtime.cpus {
        inside("runtime.cpus", cpus)?;
    }
    let mut warnings = Vec::new();
    let pool = runtime.cpus.as_ref().unwrap_or(&allowed);
    let count = runtime.shards.map_or(pool.len(), usize::from);
    let crowded = count > pool.len();
    if crowded && !runtime.no_pin {
        warnings.push(Warning::new(
            format!("{count} shards on {} allowed CPUs ({allowed}) are not pinned", allowed.len()),
            "lower runtime.shards, or allow more CPUs; with runtime.no_pin it is meant",
        ));
    }
    let pin = !runtime.no_pin && !crowded;
    // With CPUs to spare, shards keep off the control thread's own.
    let spare = |cpu: &u32| Some(*cpu) != runtime.control_cpu || runtime.cpus.is_some() || pool.len() <= count;
    let shards: Vec<Option<u32>> = match pin {
        true => pool.iter().filter(spare).take(count).map(Some).collect(),
        false => vec![None; count],
    };
    let quota = limits.cpu_quota.filter(|quota| *quota < count as f64);
    let spin = match runtime.spin_us {
        Some(us) if pin => Spin::always(Duration::from_micros(us)),
        // A quota is for work.
        None if pin && quota.is_none() => Spin::ForDrive(DRIVE_SPIN),
        _ => Spin::Never,
    };
    if !pin && runtime.spin_us.is_some_and(|us| us > 0) {
        warnings.push(Warning::new(
            "runtime.spin_us is ignored, since only pinned shards may spin",
            "pin them, or drop runtime.spin_us",
        ));
    }
    if let Some(quota) = quota {
        warnings.push(Warning::new(
            format!(
                "the control group grants {quota:.2} CPUs' worth of time to {count} shards, which will be stopped in mid-work"
            ),
            "lower runtime.shards, or raise the quota",
        ));
        if spin != Spin::Never {
            warnings.push(Warning::new("runtime.spin_us burns the CPU quota", "drop runtime.spin_us"));
        }
    }
    // Where every shard has its CPU, the control thread keeps off them if there is one left.
    let mut plan = CpuPlan { allowed, shards, control: runtime.control_cpu, spin, warnings };
    if pin && plan.control.is_none() {
        plan.control = plan.without_shard().iter().next();
    }
    Ok(plan)
}

/// Bytes for staging, commit buffers, read cache and request bodies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    pub total_bytes: u64,
    pub per_shard_bytes: u64,
    /// What the share was taken from: the control group's limit, else the machine's memory.
    pub limit_bytes: u64,
    pub from_cgroup: bool,
}

impl MemoryPlan {
    /// Bytes that request bodies may take on the whole node, with what unpacks them and what is decoded from them. At
    /// least twice the largest and a little, so that one always passes.
    pub fn body_bytes(&self) -> u64 {
        (self.total_bytes / 4).max(34 << 20)
    }

    /// Bytes of staging memory that each shard may register with its ring (E26), after the limit of locked memory was
    /// raised; `u64::MAX` is no limit. What does not fit is used unregistered.
    pub fn registered_per_shard_bytes(&self, locked_memory_bytes: u64) -> u64 {
        let shards = (self.total_bytes / self.per_shard_bytes.max(1)).max(1);
        // The control thread has an executor too.
        let left = locked_memory_bytes.saturating_sub(EXECUTOR_LOCKED_BYTES * (shards + 1));
        (left / shards).min(REGISTERED_BYTES_USEFUL).min(self.per_shard_bytes / 4)
    }
}

/// Each executor registers a buffer of 64 KiB with three rings of its own.
const EXECUTOR_LOCKED_BYTES: u64 = 256 << 10;

/// The smallest budget that a shard works with: a full write window, a commit's buffers and some request bodies.
pub const SHARD_MEMORY_BYTES_MIN: u64 = 64 << 20;
/// The rest is for the allocator, connections, metadata and the kernel's own share of the group.
const DEFAULT_SHARE_PERCENT: u64 = 50;

pub fn plan_memory(
    runtime: &Runtime,
    shards: usize,
    limits: &Limits,
    machine_bytes: u64,
) -> Result<MemoryPlan, Refusal> {
    let shards = shards.max(1) as u64;
    let from_cgroup = limits.memory_bytes.is_some_and(|bytes| bytes < machine_bytes);
    let limit_bytes = limits.memory_bytes.map_or(machine_bytes, |bytes| bytes.min(machine_bytes));
    let source = if from_cgroup { "the control group's memory limit" } else { "the machine's memory" };
    let total_bytes = runtime.memory_bytes.unwrap_or(limit_bytes / 100 * DEFAULT_SHARE_PERCENT);
    if total_bytes > limit_bytes {
        return Err(Refusal::setting(
            format!("runtime.memory ({}) is above {source} ({})", format_bytes(total_bytes), format_bytes(limit_bytes)),
            "lower it, or raise the limit",
        ));
    }
    let per_shard_bytes = total_bytes / shards;
    if per_shard_bytes < SHARD_MEMORY_BYTES_MIN {
        let given = match runtime.memory_bytes {
            Some(bytes) => format!("runtime.memory ({})", format_bytes(bytes)),
            None => format!("{DEFAULT_SHARE_PERCENT}% of {source} ({})", format_bytes(total_bytes)),
        };
        return Err(Refusal::setting(
            format!(
                "{given} leaves {} for each of {shards} shards, and a shard needs {}",
                format_bytes(per_shard_bytes),
                format_bytes(SHARD_MEMORY_BYTES_MIN)
            ),
            "raise runtime.memory or lower runtime.shards",
        ));
    }
    Ok(MemoryPlan { total_bytes, per_shard_bytes, limit_bytes, from_cgroup })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        CpuSet::parse(text).unwrap()
    }

    fn group(cpus: Option<&str>) -> Limits {
        Limits { cpus: cpus.map(set), ..Limits::default() }
    }

    fn runtime(shards: Option<u16>, cpus: Option<&str>) -> Runtime {
        Runtime { shards, cpus: cpus.map(set), ..Runtime::default() }
    }

    #[test]
    fn lessons_p1_to_p5_cores_come_from_what_is_allowed_and_nothing_else() {
        type Case<'a> = (&'a str, Option<&'a str>, Option<u16>, Option<&'a str>, &'a [u32]);
        // affinity, group, --shards, --cpus -> CPUs of the shards
        let cases: &[Case] = &[
            ("0-3", None, None, None, &[0, 1, 2, 3]),
            ("2-5,8", None, None, None, &[2, 3, 4, 5, 8]), // never assume CPU 0
            ("0-63", Some("10-11"), None, None, &[10, 11]), // wider affinity than the group
            ("4-5", Some("0-63"), None, None, &[4, 5]),
            ("0-3", Some("8-9"), None, None, &[0, 1, 2, 3]), // files that speak of another group
            ("0-7", None, Some(2), None, &[0, 1]),
            ("0-7", None, None, Some("3,5-6"), &[3, 5, 6]),
            ("0-7", None, Some(2), Some("6-7"), &[6, 7]),
        ];
        for (affinity, cgroup, shards, cpus, expected) in cases {
            let plan = plan_cpus(&runtime(*shards, *cpus), &set(affinity), &group(*cgroup)).unwrap();
            let chosen: Vec<u32> = plan.shards.iter().flatten().copied().collect();
            assert_eq!(chosen, *expected, "{affinity} {cgroup:?} {shards:?} {cpus:?}");
            assert!(plan.pinned() && plan.warnings.is_empty());
        }
    }

    #[test]
    fn cpus_outside_are_refused_with_the_allowed_ones() {
        let error = plan_cpus(&runtime(None, Some("1,6-9")), &set("0-7"), &group(Some("0-3"))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "runtime.cpus names CPU 6-9, which this process may not use: choose from the allowed ones: 0-3"
        );
        let control = Runtime { control_cpu: Some(9), ..Runtime::default() };
        let error = plan_cpus(&control, &set("0-7"), &group(None)).unwrap_err();
        assert!(error.to_string().contains("runtime.control_cpu names CPU 9"), "{error}");
        assert!(plan_cpus(&Runtime::default(), &CpuSet::default(), &group(None)).is_err());
    }

    #[test]
    fn more_shards_than_cpus_and_no_pin_float() {
        let plan = plan_cpus(&runtime(Some(8), None), &set("0-1"), &group(None)).unwrap();
        assert_eq!(plan.shards, vec![None; 8]);
        assert!(!plan.pinned() && plan.warnings[0].cause.contains("8 shards on 2 allowed CPUs (0-1)"));
        let floating = Runtime { no_pin: true, ..Runtime::default() };
        let plan = plan_cpus(&floating, &set("0-1"), &group(None)).unwrap();
        assert_eq!((plan.shards, plan.warnings.len()), (vec![None, None], 0));
        // Spinning is for pinned shards only.
        let spinning = Runtime { spin_us: Some(20), ..runtime(Some(3), None) };
        let plan = plan_cpus(&spinning, &set("0-1"), &group(None)).unwrap();
        assert_eq!(plan.spin, Spin::Never);
        assert!(plan.warnings.iter().any(|warning| warning.cause.contains("runtime.spin_us")));
        let spin =
            |spin_us, limits| plan_cpus(&Runtime { spin_us, ..Runtime::default() }, &set("0-1"), &limits).unwrap().spin;
        assert_eq!(spin(Some(20), group(None)), Spin::Always(Duration::from_micros(20)));
        assert_eq!(spin(Some(0), group(None)), Spin::Never);
        // Unless told otherwise, while the drive works; a CPU quota is not spent on it.
        assert_eq!(spin(None, group(None)), Spin::ForDrive(DRIVE_SPIN));
        assert_eq!(spin(None, Limits { cpu_quota: Some(1.0), ..group(None) }), Spin::Never);
    }

    #[test]
    fn shards_keep_off_the_control_thread_where_there_is_room() {
        let with_control = |shards| Runtime { control_cpu: Some(0), ..runtime(shards, None) };
        let plan = plan_cpus(&with_control(Some(2)), &set("0-3"), &group(None)).unwrap();
        assert_eq!(plan.shards, vec![Some(1), Some(2)]);
        let plan = plan_cpus(&with_control(None), &set("0-1"), &group(None)).unwrap();
        assert_eq!(plan.shards, vec![Some(0), Some(1)]);
    }

    #[test]
    fn the_control_thread_keeps_off_pinned_shards_by_itself() {
        for (affinity, shards, cpus, control) in [
            ("0-3", Some(2), None, Some(2)),
            ("0-3", None, Some("1-3"), Some(0)),
            ("1-5", None, Some("2-5"), Some(1)),
            ("0-1", None, None, None),    // no CPU is left
            ("0-1", Some(3), None, None), // nobody is pinned
        ] {
            let plan = plan_cpus(&runtime(shards, cpus), &set(affinity), &group(None)).unwrap();
            assert_eq!(plan.control, control, "{affinity} {shards:?} {cpus:?}");
        }
        let floating = Runtime { no_pin: true, ..runtime(Some(1), None) };
        assert_eq!(plan_cpus(&floating, &set("0-3"), &group(None)).unwrap().control, None);
    }

    #[test]
    fn e26_registered_buffers_follow_the_limit_of_locked_memory() {
        const MIB: u64 = 1 << 20;
        let plan = |shards: u64, per_shard_bytes: u64| MemoryPlan {
            total_bytes: shards * per_shard_bytes,
            per_shard_bytes,
            limit_bytes: u64::MAX,
            from_cgroup: false,
        };
        for (shards, limit, expected) in [
            (1, u64::MAX, 8 * MIB),
            (64, u64::MAX, 8 * MIB),
            (1, 8 * MIB, 8 * MIB - 512 * 1024),
            (2, 8 * MIB, (8 * MIB - 768 * 1024) / 2),
            (3, 64 * MIB, 8 * MIB), // what is asked for: 16 MiB a shard and one more, at least 64 MiB
            (15, 256 * MIB, 8 * MIB),
            (2, 512 << 10, 0),
        ] {
            assert_eq!(plan(shards, 1 << 30).registered_per_shard_bytes(limit), expected, "{shards} {limit}");
        }
        // Never more than what records on their way may take of --memory.
        assert_eq!(plan(2, 16 * MIB).registered_per_shard_bytes(u64::MAX), 4 * MIB);
    }

    #[test]
    fn lesson_p1_a_cpu_quota_below_the_shards_is_said() {
        let limits = Limits { cpu_quota: Some(1.5), ..Limits::default() };
        let plan = plan_cpus(&Runtime::default(), &set("0-7"), &limits).unwrap();
        assert!(plan.warnings[0].cause.contains("1.50 CPUs' worth of time to 8 shards"), "{:?}", plan.warnings);
        let enough = Limits { cpu_quota: Some(8.0), ..Limits::default() };
        assert!(plan_cpus(&Runtime::default(), &set("0-7"), &enough).unwrap().warnings.is_empty());
    }

    #[test]
    fn lessons_m3_and_m5_one_number_bounds_memory_and_it_comes_from_the_group() {
        const GIB: u64 = 1 << 30;
        let with = |memory| Runtime { memory_bytes: memory, ..Runtime::default() };
        let limited = |bytes| Limits { memory_bytes: Some(bytes), ..Limits::default() };
        let plan = plan_memory(&with(None), 4, &limited(2 * GIB), 64 * GIB).unwrap();
        assert_eq!((plan.limit_bytes, plan.from_cgroup), (2 * GIB, true));
        assert!(
            plan.total_bytes <= GIB && plan.total_bytes > GIB - 100 && plan.per_shard_bytes == plan.total_bytes / 4
        );
        let plan = plan_memory(&with(None), 2, &Limits::default(), 8 * GIB).unwrap();
        assert_eq!((plan.limit_bytes, plan.from_cgroup), (8 * GIB, false));
        let plan = plan_memory(&with(Some(GIB)), 2, &limited(100 * GIB), 8 * GIB).unwrap();
        assert_eq!((plan.total_bytes, plan.limit_bytes, plan.from_cgroup), (GIB, 8 * GIB, false));

        let error = plan_memory(&with(Some(3 * GIB)), 2, &limited(2 * GIB), 64 * GIB).unwrap_err().to_string();
        assert!(error.contains("runtime.memory (3GiB) is above the control group's memory limit (2GiB)"), "{error}");
        let error = plan_memory(&with(Some(GIB)), 32, &limited(2 * GIB), 64 * GIB).unwrap_err().to_string();
        assert!(
            error.contains("leaves 32MiB for each of 32 shards") && error.contains("raise runtime.memory"),
            "{error}"
        );
        assert!(plan_memory(&with(None), 32, &limited(GIB), 64 * GIB).is_err());
    }
}
