//! What the kernel is set to, compared with what pinned shards want. Ids, and what is wanted, are those of
//! `kernel-tuning/`, which also says of each what it does and when not to touch it.

use std::path::PathBuf;

use super::super::placement::CpuPlan;
use super::super::topology::{self, Topology};
use super::environment::Environment;
use super::{Check, Machine};
use crate::config::CpuSet;

/// Where the shards run, and what that leaves.
struct Place<'a> {
    shards: &'a CpuSet,
    /// Online CPUs without a shard.
    others: CpuSet,
    /// Why CPUs, clocks and interrupts of this machine are not ours to judge.
    not_ours: Option<&'static str>,
    bare: &'a Topology,
}

pub(super) fn checks(
    machine: &Machine,
    topology: &Topology,
    plan: Option<&CpuPlan>,
    shards: &CpuSet,
    checks: &mut Vec<Check>,
) {
    let environment = Environment::of(machine);
    let place = Place {
        shards,
        others: topology.online().difference(shards),
        not_ours: environment.why_not_cpus(),
        bare: topology,
    };
    let remarks = plan.map(|plan| topology::remarks(topology, plan)).unwrap_or_default();
    match remarks.is_empty() {
        true => checks.push(Check::ok("cpu.topology", topology.summary())),
        false => checks.extend(remarks.iter().map(|remark| Check::warned("cpu.topology", remark))),
    }
    let kernel = checks.len();
    checks.extend(SYSCTLS.iter().map(|wanted| sysctl(machine, wanted)));
    checks.extend(DIRTY.iter().map(|wanted| dirty(machine, wanted)));
    checks.push(numa_balancing(machine, topology));
    checks.extend(["enabled", "defrag"].map(|name| huge_pages(machine, name)));
    checks.push(clock(machine));
    if environment == Environment::Container {
        let remedies = checks[kernel..].iter_mut().filter_map(|check| check.run.as_mut());
        remedies.for_each(|remedy| remedy.insert_str(0, "on the host: "));
    }
    checks.push(governor(machine, &place));
    checks.push(idle(machine, &place));
    checks.push(interrupts(machine, &place));
    checks.extend(boot(machine, &place));
}

#[derive(Clone, Copy)]
enum Rule {
    AtLeast(u64),
    AtMost(u64),
    /// Of `min default max`.
    LastAtLeast(u64),
}

struct Sysctl {
    id: &'static str,
    rule: Rule,
    why: &'static str,
}

const SYSCTLS: [Sysctl; 8] = [
    Sysctl { id: "sysctl.net.core.somaxconn", rule: Rule::AtLeast(4096), why: "cuts the accept backlog" },
    Sysctl {
        id: "sysctl.net.ipv4.tcp_max_syn_backlog",
        rule: Rule::AtLeast(4096),
        why: "half-open connections of a storm are dropped",
    },
    Sysctl {
        id: "sysctl.net.core.rmem_max",
        rule: Rule::AtLeast(4 << 20),
        why: "datagrams between nodes of a cluster are dropped",
    },
    Sysctl {
        id: "sysctl.net.core.wmem_max",
        rule: Rule::AtLeast(4 << 20),
        why: "bursts between nodes of a cluster are cut",
    },
    Sysctl {
        id: "sysctl.net.ipv4.tcp_rmem",
        rule: Rule::LastAtLeast(16 << 20),
        why: "a large batch cannot fill a fast link",
    },
    Sysctl {
        id: "sysctl.net.ipv4.tcp_wmem",
        rule: Rule::LastAtLeast(16 << 20),
        why: "a large batch consume cannot fill a fast link",
    },
    Sysctl {
        id: "sysctl.vm.swappiness",
        rule: Rule::AtMost(1),
        why: "a shard that is paged out waits for the disk twice",
    },
    Sysctl { id: "sysctl.fs.nr_open", rule: Rule::AtLeast(65_536), why: "LimitNOFILE cannot be above it" },
];

fn sysctl(machine: &Machine, wanted: &Sysctl) -> Check {
    let key = wanted.id.trim_start_matches("sysctl.");
    let Some(now) = machine.proc(PathBuf::from("sys").join(key.replace('.', "/"))) else {
        return Check::skip(wanted.id, "this kernel hides it from here");
    };
    let numbers: Vec<u64> = now.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let Some(last) = numbers.last().copied() else { return Check::skip(wanted.id, format!("{now:?} is no number")) };
    let now = now.split_whitespace().collect::<Vec<_>>().join(" ");
    let (good, value) = match wanted.rule {
        Rule::AtLeast(least) => (last >= least, least.to_string()),
        Rule::AtMost(most) => (last <= most, most.to_string()),
        Rule::LastAtLeast(least) => {
            let front: String = numbers[..numbers.len() - 1].iter().map(|number| format!("{number} ")).collect();
            (last >= least, format!("{front}{least}"))
        }
    };
    match good {
        true => Check::ok(wanted.id, now),
        false => {
            let quote = if value.contains(' ') { "\"" } else { "" };
            Check::warn(wanted.id, format!("{now}: {}", wanted.why), format!("sysctl -w {key}={quote}{value}{quote}"))
        }
    }
}

/// Buffered writes of other programs that a durable write may have to wait behind.
const DIRTY: [(&str, &str, u64); 2] =
    [("sysctl.vm.dirty_background_bytes", "dirty_background", 64 << 20), ("sysctl.vm.dirty_bytes", "dirty", 256 << 20)];

/// Two files for one thing: bytes, or a share of memory when that is 0.
fn dirty(machine: &Machine, (id, name, most): &(&'static str, &str, u64)) -> Check {
    let number = |suffix: &str| machine.proc(format!("sys/vm/{name}_{suffix}"))?.parse::<u64>().ok();
    let total = machine.proc("meminfo").and_then(|text| super::super::cgroup::parse_machine_memory(&text));
    let (shown, bytes) = match (number("bytes"), number("ratio"), total) {
        (Some(bytes), ..) if bytes > 0 => (bytes.to_string(), bytes),
        (_, Some(ratio), Some(total)) => (format!("{ratio}% of memory"), total / 100 * ratio),
        _ => return Check::skip(id, "this kernel hides it from here"),
    };
    match bytes <= *most {
        true => Check::ok(id, shown),
        false => Check::warn(
            id,
            format!("{shown}: a burst of other programs' writes may hold up durable ones"),
            format!("sysctl -w vm.{name}_bytes={most}"),
        ),
    }
}

fn numa_balancing(machine: &Machine, topology: &Topology) -> Check {
    const ID: &str = "sysctl.kernel.numa_balancing";
    let nodes: std::collections::BTreeSet<_> = topology.cpus.iter().filter_map(|cpu| cpu.node).collect();
    match machine.proc("sys/kernel/numa_balancing").as_deref() {
        None => Check::skip(ID, "this kernel has no such switch"),
        Some("0") => Check::ok(ID, "0"),
        Some(now) if nodes.len() < 2 => Check::ok(ID, format!("{now}, and there is one node only")),
        Some(now) => Check::warn(
            ID,
            format!("{now}: it takes pages from pinned shards to learn who uses them"),
            "sysctl -w kernel.numa_balancing=0",
        ),
    }
}

fn huge_pages(machine: &Machine, name: &str) -> Check {
    let id = if name == "enabled" { "thp.enabled" } else { "thp.defrag" };
    let path = format!("kernel/mm/transparent_hugepage/{name}");
    match machine.sys(&path).as_deref().and_then(chosen) {
        None => Check::skip(id, "this kernel has no transparent huge pages"),
        Some("always") => Check::warn(
            id,
            "always: making huge pages stalls a shard for milliseconds",
            format!("echo madvise > /sys/{path}"),
        ),
        Some(now) => Check::ok(id, now),
    }
}

/// The one in brackets.
pub(super) fn chosen(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

fn clock(machine: &Machine) -> Check {
    const ID: &str = "clock.source";
    match machine.sys("devices/system/clocksource/clocksource0/current_clocksource").as_deref() {
        None => Check::skip(ID, "this kernel hides it from here"),
        Some(now @ ("hpet" | "acpi_pm" | "jiffies" | "refined-jiffies")) => Check::warn(
            ID,
            format!("{now}: each look at the clock is a system call, and a shard looks at it all the time"),
            "add tsc=reliable to the boot parameters if the TSC of this machine is",
        ),
        Some(now) => Check::ok(ID, now),
    }
}

fn governor(machine: &Machine, place: &Place) -> Check {
    const ID: &str = "cpu.governor";
    if let Some(why) = place.not_ours {
        return Check::skip(ID, why);
    }
    let of = |cpu: u32| Some((cpu, machine.sys(format!("devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"))?));
    let found: Vec<(u32, String)> = place.shards.iter().filter_map(of).collect();
    let offered = |cpu: u32| {
        let path = format!("devices/system/cpu/cpu{cpu}/cpufreq/scaling_available_governors");
        machine.sys(path).is_some_and(|text| text.split_whitespace().any(|governor| governor == "performance"))
    };
    let slow = found.iter().filter(|(_, governor)| governor != "performance").map(|(cpu, _)| *cpu);
    let slow: CpuSet = slow.filter(|cpu| offered(*cpu)).collect();
    match found.iter().find(|(cpu, _)| slow.contains(*cpu)) {
        _ if found.is_empty() => Check::skip(ID, "no frequency driver: the firmware governs the clock"),
        None if found.iter().all(|(_, governor)| governor != "performance") => {
            Check::skip(ID, "the frequency driver does not offer performance")
        }
        None => Check::ok(ID, "performance"),
        Some((_, governor)) => Check::warn(
            ID,
            format!("{governor} on CPU {slow}: the first request after a pause meets a slow clock"),
            format!("cpupower -c {slow} frequency-set -g performance"),
        ),
    }
}

/// Waking from deeper states takes longer than a durable write of a fast drive.
const IDLE_US_MAX: u64 = 20;

fn idle(machine: &Machine, place: &Place) -> Check {
    const ID: &str = "cpu.idle";
    if let Some(why) = place.not_ours {
        return Check::skip(ID, why);
    }
    let mut deepest: Option<(u64, String)> = None;
    let mut deep = Vec::new();
    for cpu in place.shards.iter() {
        for state in 0..16 {
            let read = |name: &str| machine.sys(format!("devices/system/cpu/cpu{cpu}/cpuidle/state{state}/{name}"));
            let Some(latency_us) = read("latency").and_then(|text| text.parse::<u64>().ok()) else { break };
            let enabled = read("disable").is_none_or(|text| text == "0");
            if enabled && deepest.as_ref().is_none_or(|(most, _)| latency_us > *most) {
                deepest = Some((latency_us, read("name").unwrap_or_default()));
            }
            if enabled && latency_us > IDLE_US_MAX {
                deep.push(cpu);
            }
        }
    }
    let deep: CpuSet = deep.into_iter().collect();
    match deepest {
        None => Check::skip(ID, "no idle driver: the firmware or boot parameters decide"),
        Some((latency_us, name)) if deep.is_empty() => Check::ok(ID, format!("deepest is {name}, {latency_us} us")),
        Some((latency_us, name)) => Check::warn(
            ID,
            format!("CPU {deep} may sleep as deep as {name}, {latency_us} us to wake from"),
            format!("cpupower -c {deep} idle-set -D {}", IDLE_US_MAX + 1),
        ),
    }
}

/// Interrupts of devices that may come to a shard's CPU, although there are others. A drive's own queues are placed by the
/// kernel, one a CPU, and are best where they are.
fn interrupts(machine: &Machine, place: &Place) -> Check {
    const ID: &str = "irq.affinity";
    if let Some(why) = place.not_ours {
        return Check::skip(ID, why);
    }
    if place.others.is_empty() {
        return Check::skip(ID, "every CPU runs a shard: there is nowhere else to put interrupts");
    }
    let Some(table) = machine.proc("interrupts") else { return Check::skip(ID, "the kernel hides it from here") };
    let mut named = Vec::new();
    for line in table.lines().skip(1) {
        let Some((number, rest)) = line.trim_start().split_once(':') else { continue };
        let Ok(number) = number.parse::<u32>() else { continue };
        let name = rest.split_whitespace().next_back().unwrap_or_default();
        let count: u64 = rest.split_whitespace().map_while(|word| word.parse::<u64>().ok()).sum();
        let placed_by_kernel = name.starts_with("nvme") && !name.ends_with("q0");
        let cpus = machine.proc(format!("irq/{number}/smp_affinity_list")).and_then(|text| CpuSet::parse(&text).ok());
        let Some(cpus) = cpus.filter(|cpus| count > 0 && !placed_by_kernel && !cpus.is_empty()) else { continue };
        if !cpus.intersection(place.shards).is_empty() {
            named.push((number, name.to_owned()));
        }
    }
    match &named[..] {
        [] => Check::ok(ID, "devices interrupt no shard's CPU"),
        [(first, _), ..] => {
            let shown: Vec<String> = named.iter().take(4).map(|(number, name)| format!("{number} ({name})")).collect();
            let more = if named.len() > 4 { format!(" and {} more", named.len() - 4) } else { String::new() };
            Check::warn(
                ID,
                format!("interrupts {}{more} may stop a shard", shown.join(", ")),
                format!("kernel-tuning/apply --only irq --cpus {}, or echo {} > /proc/irq/{first}/smp_affinity_list and so on; keep irqbalance off those CPUs", place.shards, place.others),
            )
        }
    }
}

fn boot(machine: &Machine, place: &Place) -> Vec<Check> {
    let arguments = machine.proc("cmdline").unwrap_or_default();
    let of_cmdline = |name: &str| {
        let value = arguments.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))?;
        let cpus = value.trim_start_matches(|c: char| !c.is_ascii_digit());
        CpuSet::parse(cpus).ok()
    };
    let names: [(&'static str, &str, &str, Option<CpuSet>); 3] = [
        ("boot.isolcpus", "isolcpus", "isolcpus=domain,", Some(place.bare.isolated.clone())),
        ("boot.nohz_full", "nohz_full", "nohz_full=", Some(place.bare.tickless.clone())),
        ("boot.rcu_nocbs", "rcu_nocbs", "rcu_nocbs=", None),
    ];
    let judge = |(id, name, text, in_force): (&'static str, &str, &str, Option<CpuSet>)| {
        if let Some(why) = place.not_ours {
            return Check::skip(id, why);
        }
        if place.others.is_empty() {
            return Check::skip(id, "every CPU runs a shard: the system itself needs one");
        }
        let now = in_force.filter(|set| !set.is_empty()).or_else(|| of_cmdline(name)).unwrap_or_default();
        match place.shards.difference(&now).is_empty() {
            true => Check::ok(id, now.to_string()),
            false => Check::hint(
                id,
                "other work may run on the shards' CPUs: for the lowest tail latency keep it off",
                format!("add {text}{} to the boot parameters", place.shards),
            ),
        }
    };
    names.map(judge).into()
}
