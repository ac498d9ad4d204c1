//! Judgements on imitated machines, and one look at this one.

use std::collections::BTreeMap;
use std::process::Command;

use narad_shards::io::system::Limit;
use narad_shards::rt::Spin;

use super::environment::Environment;
use super::start::{self, judge_io_uring_switch, judge_kernel, judge_open_files, judge_registered, judge_space};
use super::*;
use crate::node::placement::CpuPlan;
use crate::node::tests_support::Tree;

fn machine(tree: &Tree) -> Machine {
    Machine { root: tree.0.clone(), proc: tree.0.join("proc"), sys: tree.0.clone() }
}

fn tuned(tree: &Tree, shards: &str) -> Vec<Check> {
    let shards = CpuSet::parse(shards).unwrap();
    let machine = machine(tree);
    let plan = CpuPlan {
        allowed: shards.clone(),
        shards: shards.iter().map(Some).collect(),
        control: None,
        spin: Spin::Never,
        warnings: Vec::new(),
    };
    let mut checks = Vec::new();
    tuning::checks(&machine, &Topology::read(&machine.sys), Some(&plan), &shards, &mut checks);
    checks
}

fn find<'a>(checks: &'a [Check], id: &str) -> &'a Check {
    checks.iter().find(|check| check.id == id).unwrap_or_else(|| panic!("no check {id}"))
}

/// A bare machine on which nothing has been done.
fn stock(test: &str) -> Tree {
    let tree = Tree::two_packages(test);
    for (name, text) in [
        ("proc/sys/net/core/somaxconn", "128"),
        ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456"),
        ("proc/sys/net/core/rmem_max", "4194304"),
        ("proc/sys/vm/swappiness", "60"),
        ("proc/sys/vm/dirty_bytes", "0"),
        ("proc/sys/vm/dirty_ratio", "20"),
        ("proc/sys/vm/dirty_background_bytes", "1048576"),
        ("proc/sys/vm/dirty_background_ratio", "0"),
        ("proc/sys/kernel/numa_balancing", "1"),
        ("proc/meminfo", "MemTotal:       24684096 kB"),
        ("proc/cpuinfo", "flags : fpu sse2 nohypervisor"),
        ("proc/cmdline", "quiet rcu_nocbs=0-1"),
        ("kernel/mm/transparent_hugepage/enabled", "[always] madvise never"),
        ("kernel/mm/transparent_hugepage/defrag", "always defer [madvise] never"),
        ("devices/system/clocksource/clocksource0/current_clocksource", "hpet"),
        ("devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance"),
        ("devices/system/cpu/cpu1/cpufreq/scaling_governor", "schedutil"),
        ("devices/system/cpu/cpu1/cpufreq/scaling_available_governors", "performance schedutil"),
        ("devices/system/cpu/cpu1/cpuidle/state0/latency", "0"),
        ("devices/system/cpu/cpu1/cpuidle/state1/latency", "133"),
        ("devices/system/cpu/cpu1/cpuidle/state1/name", "C6"),
        ("devices/system/cpu/cpu1/cpuidle/state1/disable", "0"),
        (
            "proc/interrupts",
            "     CPU0 CPU1\n 41: 6670 0 PCI-MSIX eth0-rx\n 42: 9 9 PCI-MSIX nvme0q1\n 43: 0 0 PCI idle\n 44: 1 1 PCI far",
        ),
        ("proc/irq/41/smp_affinity_list", "0"),
        ("proc/irq/41/eth0-rx/x", ""),
        ("proc/irq/42/smp_affinity_list", "1"),
        ("proc/irq/43/smp_affinity_list", "0"),
        ("proc/irq/44/smp_affinity_list", "2-3"),
    ] {
        tree.write(name, text);
    }
    tree
}

#[test]
fn an_untuned_machine_is_told_setting_by_setting_what_to_run() {
    let tree = stock("stock");
    let checks = tuned(&tree, "0-1");
    for (id, status, run) in [
        ("sysctl.net.core.somaxconn", Status::Warn, "sysctl -w net.core.somaxconn=4096"),
        ("sysctl.net.ipv4.tcp_rmem", Status::Warn, "sysctl -w net.ipv4.tcp_rmem=\"4096 131072 16777216\""),
        ("sysctl.net.core.rmem_max", Status::Ok, ""),
        ("sysctl.net.core.wmem_max", Status::Skip, ""),
        ("sysctl.vm.swappiness", Status::Warn, "sysctl -w vm.swappiness=1"),
        ("sysctl.vm.dirty_bytes", Status::Warn, "sysctl -w vm.dirty_bytes=268435456"),
        ("sysctl.vm.dirty_background_bytes", Status::Ok, ""),
        ("sysctl.kernel.numa_balancing", Status::Warn, "sysctl -w kernel.numa_balancing=0"),
        ("thp.enabled", Status::Warn, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        ("thp.defrag", Status::Ok, ""),
        ("clock.source", Status::Warn, "tsc=reliable"),
        ("cpu.governor", Status::Warn, "cpupower -c 1 frequency-set -g performance"),
        ("cpu.idle", Status::Warn, "cpupower -c 1 idle-set -D 21"),
        ("irq.affinity", Status::Warn, "echo 2-7 > /proc/irq/41/smp_affinity_list"),
        ("boot.isolcpus", Status::Hint, "add isolcpus=domain,0-1 to the boot parameters"),
        ("boot.nohz_full", Status::Hint, "nohz_full=0-1"),
        ("boot.rcu_nocbs", Status::Ok, ""),
        ("cpu.topology", Status::Ok, ""),
    ] {
        let check = find(&checks, id);
        assert_eq!(check.status, status, "{check:?}");
        assert!(check.run.as_deref().unwrap_or_default().contains(run), "{check:?}");
    }
    let interrupts = find(&checks, "irq.affinity");
    assert!(
        interrupts.found.starts_with("interrupts 41 (eth0-rx) may"),
        "not the drive's, nor others': {interrupts:?}"
    );
}

#[test]
fn what_a_tuned_machine_has_is_left_alone() {
    let tree = stock("tuned");
    for (name, text) in [
        ("proc/sys/vm/swappiness", "1"),
        ("proc/cmdline", "isolcpus=domain,managed_irq,0-1 rcu_nocbs=0-7"),
        ("devices/system/cpu/nohz_full", "0-3"),
        ("devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance"),
        ("devices/system/cpu/cpu1/cpuidle/state1/disable", "1"),
        ("proc/irq/41/smp_affinity_list", "2-7"),
    ] {
        tree.write(name, text);
    }
    let checks = tuned(&tree, "0-1");
    for id in [
        "sysctl.vm.swappiness",
        "boot.isolcpus",
        "boot.nohz_full",
        "boot.rcu_nocbs",
        "cpu.governor",
        "cpu.idle",
        "irq.affinity",
    ] {
        assert_eq!(find(&checks, id).status, Status::Ok, "{:?}", find(&checks, id));
    }
}

#[test]
fn what_cannot_be_seen_or_is_not_ours_is_skipped() {
    let nothing = Tree::new("nothing", &[]);
    let checks = tuned(&nothing, "0");
    let judged: Vec<_> = checks.iter().filter(|check| check.status > Status::Ok).collect();
    assert!(judged.is_empty(), "{judged:?}");
    // A virtual CPU is no core; and without CPUs to spare there is nothing to keep off.
    let tree = stock("virtual");
    tree.write("proc/cpuinfo", "flags : fpu hypervisor sse2");
    for id in ["cpu.governor", "cpu.idle", "irq.affinity", "boot.isolcpus"] {
        assert_eq!(find(&tuned(&tree, "0-1"), id).status, Status::Skip);
    }
    tree.write("proc/cpuinfo", "flags : fpu");
    for id in ["irq.affinity", "boot.isolcpus"] {
        assert!(find(&tuned(&tree, "0-7"), id).found.contains("every CPU runs a shard"));
    }
}

/// The worst status of each id that `kernel-tuning/check` knows, instances put together; what it skips counts least.
fn kernel_tuning(tree: &Tree, cpus: &str) -> BTreeMap<String, String> {
    // It looks for sys/ where the doctor's imitation has none.
    let _ = std::os::unix::fs::symlink(".", tree.0.join("sys"));
    let check = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernel-tuning/check");
    let output = Command::new(check).args(["--json", "--cpus", cpus, "--root"]).arg(&tree.0).output().unwrap();
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let severity = |status: &str| ["skip", "ok", "hint", "warn", "fail"].iter().position(|name| *name == status);
    let mut worst: BTreeMap<String, String> = BTreeMap::new();
    for row in rows.as_array().unwrap() {
        let (id, status) = (row["id"].as_str().unwrap(), row["status"].as_str().unwrap());
        let known = worst.entry(id.to_owned()).or_insert_with(|| status.to_owned());
        if severity(status) > severity(known) {
            *known = status.to_owned();
        }
    }
    worst
}

/// Two programs that look at one machine must not contradict each other.
#[test]
fn the_doctor_and_kernel_tuning_judge_alike() {
    type Change = (&'static str, &'static str);
    let cases: [(&str, &[Change], &str); 7] = [
        ("alike-stock", &[], "0-1"),
        (
            "alike-tuned",
            &[
                ("proc/sys/vm/swappiness", "1"),
                ("proc/sys/kernel/numa_balancing", "0"),
                ("proc/cmdline", "isolcpus=domain,managed_irq,0-1 nohz_full=0-3 rcu_nocbs=0-7"),
                ("devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance"),
                ("devices/system/cpu/cpu1/cpuidle/state1/disable", "1"),
                ("proc/irq/41/smp_affinity_list", "2-7"),
            ],
            "0-1",
        ),
        (
            "alike-one-node",
            &[("devices/system/node/node0/cpulist", "0-7"), ("devices/system/node/node1/cpulist", "")],
            "0-1",
        ),
        ("alike-virtual", &[("proc/cpuinfo", "flags : fpu hypervisor sse2")], "0-1"),
        ("alike-container", &[(".dockerenv", "")], "0-1"),
        ("alike-pod", &[("proc/1/cgroup", "0::/kubepods/burstable/x")], "0-1"),
        ("alike-unknown", &[("proc/cpuinfo", "CPU implementer : 0x41")], "0-1"),
    ];
    for (name, changes, cpus) in cases {
        let tree = stock(name);
        changes.iter().for_each(|(path, text)| tree.write(path, text));
        let (doctor, tuning) = (tuned(&tree, cpus), kernel_tuning(&tree, cpus));
        let both: Vec<(&Check, &String)> =
            doctor.iter().filter_map(|check| Some((check, tuning.get(check.id)?))).collect();
        assert!(both.len() >= 16, "{name}: only {} are known to both", both.len());
        for (check, status) in both {
            assert_eq!(check.status.name(), status, "{name}: {check:?}");
        }
    }
    // Of limits, which are a process's, the bounds are compared.
    let script = include_str!("../../../kernel-tuning/lib/settings.sh");
    for (name, value) in [
        ("MEMLOCK_BYTES", start::LOCKED_BYTES),
        ("MEMLOCK_THREAD_BYTES", start::LOCKED_BYTES_PER_THREAD),
        ("NOFILE", start::DESCRIPTORS),
    ] {
        assert!(script.contains(&format!("\n{name}={value}")), "{name} is not {value} in kernel-tuning");
    }
}

#[test]
fn in_a_container_remedies_are_for_the_host() {
    let tree = stock("container");
    tree.write("run/.containerenv", "");
    assert_eq!(Environment::of(&machine(&tree)), Environment::Container);
    let checks = tuned(&tree, "0-1");
    assert_eq!(find(&checks, "sysctl.vm.swappiness").run.as_deref(), Some("on the host: sysctl -w vm.swappiness=1"));
    let governor = find(&checks, "cpu.governor");
    assert!(governor.status == Status::Skip && governor.found.contains("on the host"), "{governor:?}");
}

#[test]
fn the_drive_is_found_below_partitions_and_stripes() {
    let tree = Tree::new(
        "drives",
        &[
            ("devices/pci/nvme0n1/queue/scheduler", "none [mq-deadline]"),
            ("devices/pci/nvme0n1/queue/write_cache", "write back"),
            ("devices/pci/nvme0n1/queue/fua", "1"),
            ("devices/pci/nvme0n1/nvme0n1p2/partition", "2"),
            ("devices/pci/sda/queue/rotational", "1"),
            ("devices/virtual/md0/queue/x", ""),
            ("block/x", ""),
            ("dev/block/x", ""),
            ("devices/virtual/md0/slaves/x", ""),
        ],
    );
    let link = |from: &str, to: &str| std::os::unix::fs::symlink(tree.0.join(to), tree.0.join(from)).unwrap();
    std::fs::remove_file(tree.0.join("devices/virtual/md0/slaves/x")).unwrap();
    link("dev/block/259:2", "devices/pci/nvme0n1/nvme0n1p2");
    link("dev/block/9:0", "devices/virtual/md0");
    link("devices/virtual/md0/slaves/nvme0n1p2", "devices/pci/nvme0n1/nvme0n1p2");
    link("devices/virtual/md0/slaves/sda", "devices/pci/sda");
    link("block/nvme0n1", "devices/pci/nvme0n1");
    link("block/sda", "devices/pci/sda");
    let machine = machine(&tree);
    assert_eq!(block::drives(&machine, 259, 2), ["nvme0n1"]);
    assert_eq!(block::drives(&machine, 9, 0), ["nvme0n1", "sda"]);
    assert!(block::drives(&machine, 0, 24).is_empty());
    let scheduler = block::scheduler(&machine, "nvme0n1");
    assert_eq!(scheduler.run.as_deref(), Some("echo none > /sys/block/nvme0n1/queue/scheduler"));
    assert!(block::write_cache(&machine, "nvme0n1").found.contains("with FUA"));
    assert_eq!(block::write_cache(&machine, "sda").status, Status::Warn);
    tree.write("proc/self/mountinfo", "1 1 259:2 / /data rw,noatime - xfs /dev/x rw,nobarrier");
    let mount = block::mount(&machine, 259, 2);
    assert_eq!(mount.status, Status::Fail, "{mount:?}");
    tree.write("proc/self/mountinfo", "1 1 259:2 / /data rw,lazytime - xfs /dev/x rw");
    assert_eq!(block::mount(&machine, 259, 2).status, Status::Ok);
}

#[test]
fn start_checks_judge_as_the_start_does() {
    for (release, status) in [
        ("5.15.0-91-generic", Status::Fail),
        ("6.0.19", Status::Fail),
        ("6.1.0-18-amd64", Status::Ok),
        ("6.1.141-1", Status::Warn),
        ("6.11.3", Status::Warn),
        ("6.12.8", Status::Ok),
        ("10.0.1", Status::Ok),
        ("unknown", Status::Fail),
    ] {
        assert_eq!(judge_kernel(release).status, status, "{release}");
    }
    assert_eq!(judge_io_uring_switch(None, true).status, Status::Skip);
    assert_eq!(judge_io_uring_switch(Some("0"), true).status, Status::Ok);
    assert_eq!(judge_io_uring_switch(Some("2"), true).status, Status::Ok);
    let refused = judge_io_uring_switch(Some("2"), false);
    assert!(refused.status == Status::Fail && refused.run.unwrap().contains("sysctl -w kernel.io_uring_disabled=0"));
    for (soft, status, part) in [
        (5_119, Status::Warn, "http.max_connections (4096) wants 5120"),
        (20_000, Status::Warn, "65536 is wanted"),
        (65_536, Status::Ok, "65536"),
    ] {
        let check = judge_open_files(Limit { soft, hard: soft }, 4096);
        assert!(check.status == status && check.found.contains(part), "{check:?}");
    }
    assert_eq!(judge_registered(u64::MAX, 64).found, "unlimited");
    assert_eq!(judge_registered(64 << 20, 3).status, Status::Ok);
    assert!(judge_registered(64 << 20, 4).run.unwrap().contains("LimitMEMLOCK"));
    assert_eq!(judge_registered(8 << 20, 1).status, Status::Warn);
    for (free, status) in [(100, Status::Fail), (300, Status::Warn), (401, Status::Ok)] {
        assert_eq!(judge_space(free << 20, 100 << 20).status, status);
    }
}

#[test]
fn sentences_of_the_start_keep_cause_and_remedy_apart() {
    // Colons and semicolons stand in causes as well as in remedies.
    let (cause, remedy) = ("on tmpfs, which is memory: all is lost; spread (0: 0; 1: 2)", "use ext4: or XFS; at once");
    let check = Check::warned("x", &Warning::new(cause, remedy));
    assert_eq!((check.status, check.found.as_str(), check.run.as_deref()), (Status::Warn, cause, Some(remedy)));
    let report = Report::of_bad_settings("narad: config: http.addr: wrong");
    assert_eq!((report.worst(), report.checks[0].found.as_str()), (Status::Fail, "http.addr: wrong"));
}

#[test]
fn the_probe_measures_and_leaves_nothing_behind() {
    let directory = Tree::new("probe", &[]);
    let figures = probe::durable_writes(&directory.0, false, Duration::from_millis(20)).unwrap();
    assert!(figures.writes > 0 && figures.p50_us <= figures.p99_us && figures.p99_us <= figures.max_us, "{figures:?}");
    assert_eq!(std::fs::read_dir(&directory.0).unwrap().count(), 0);
    let failed = probe::durable_writes(Path::new("/nonexistent"), false, Duration::from_millis(1));
    assert_eq!(probe::judge(&failed, false).status, Status::Fail);
    let slow = Figures { writes: 10, p50_us: 9_000, p99_us: 20_000, max_us: 20_000, writes_per_second: 100.0 };
    assert_eq!(probe::judge(&Ok(slow), false).status, Status::Warn);
    assert!(probe::judge(&Ok(slow), true).found.contains("beside the running broker"));
}
