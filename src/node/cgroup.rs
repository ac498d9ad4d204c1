//! What the control groups of this process leave it: CPUs, CPU time and memory (lessons P4, M5, N56). Versions 1 and 2,
//! pure or mixed. Memory goes by the limit, never by what is in use: that counts page cache, which is no sign of want
//! (lesson M6). The parsers take text; [`Cgroups::of_this_process`] reads it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::config::CpuSet;

/// Limits found, `None` where there is none.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Limits {
    pub cpus: Option<CpuSet>,
    /// CPUs' worth of time a second, from the quota.
    pub cpu_quota: Option<f64>,
    pub memory_bytes: Option<u64>,
}

/// A group's directories, from the process' own up to the root of each mount.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Cgroups {
    /// Version 2, all controllers.
    pub unified: Vec<PathBuf>,
    pub cpuset: Vec<PathBuf>,
    pub cpu: Vec<PathBuf>,
    pub memory: Vec<PathBuf>,
}

impl Cgroups {
    pub fn of_this_process() -> Cgroups {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        Cgroups::parse(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
    }

    /// From the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`.
    pub fn parse(membership: &str, mountinfo: &str) -> Cgroups {
        let mut groups = Cgroups::default();
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
                continue;
            };
            if controllers.is_empty() {
                groups.unified = directories(mountinfo, "cgroup2", None, path);
                continue;
            }
            for controller in controllers.split(',') {
                let found = match controller {
                    "cpuset" => &mut groups.cpuset,
                    "cpu" => &mut groups.cpu,
                    "memory" => &mut groups.memory,
                    _ => continue,
                };
                *found = directories(mountinfo, "cgroup", Some(controller), path);
            }
        }
        groups
    }

    pub fn limits(&self) -> Limits {
        let read = |directory: &Path, file: &str| fs::read_to_string(directory.join(file)).ok();
        let cpuset_files = [
            (&self.unified, "cpuset.cpus.effective"),
            (&self.cpuset, "cpuset.effective_cpus"),
            (&self.cpuset, "cpuset.cpus"),
        ];
        let mut cpus = None;
        for (directories, file) in cpuset_files {
            // The effective set of the innermost group that has the file already honours the outer ones.
            let text = directories.iter().find_map(|directory| read(directory, file));
            let set = text.and_then(|text| CpuSet::parse(&text).ok()).filter(|set| !set.is_empty());
            cpus = cpus.or(set);
        }
        let memory_of = |directories: &[PathBuf], file: &str| {
            directories.iter().filter_map(|directory| parse_memory_limit(&read(directory, file)?)).min()
        };
        let memory = [
            memory_of(&self.unified, "memory.max"),
            memory_of(&self.unified, "memory.high"),
            memory_of(&self.memory, "memory.limit_in_bytes"),
        ];
        let quota_v2 = self.unified.iter().filter_map(|directory| parse_cpu_max(&read(directory, "cpu.max")?));
        let quota_v1 = self.cpu.iter().filter_map(|directory| {
            parse_cfs_quota(&read(directory, "cpu.cfs_quota_us")?, &read(directory, "cpu.cfs_period_us")?)
        });
        Limits {
            cpus,
            cpu_quota: quota_v2.chain(quota_v1).min_by(f64::total_cmp),
            memory_bytes: memory.into_iter().flatten().min(),
        }
    }
}

/// Directories of the group `path` and of its ancestors, as far as the mount shows them.
fn directories(mountinfo: &str, kind: &str, controller: Option<&str>, path: &str) -> Vec<PathBuf> {
    for line in mountinfo.lines() {
        // 31 23 0:28 <root> <mount point> <options> ... - <type> <source> <super options>
        let Some((front, back)) = line.split_once(" - ") else { continue };
        let front: Vec<&str> = front.split(' ').collect();
        let back: Vec<&str> = back.split(' ').collect();
        let (Some(root), Some(mount), Some(found)) = (front.get(3), front.get(4), back.first()) else { continue };
        let options = back.get(2).unwrap_or(&"");
        if *found != kind || controller.is_some_and(|controller| !options.split(',').any(|option| option == controller))
        {
            continue;
        }
        // In a container the mount's root is often the group itself; outside that subtree nothing is visible.
        let below = if *root == "/" { Some(path) } else { path.strip_prefix(root) };
        let Some(below) = below.filter(|below| below.is_empty() || below.starts_with('/')) else {
            return vec![PathBuf::from(mount)];
        };
        let top = PathBuf::from(mount);
        let innermost = top.join(below.trim_start_matches('/'));
        return innermost.ancestors().take_while(|directory| directory.starts_with(&top)).map(Path::to_owned).collect();
    }
    Vec::new()
}

/// `memory.max`, `memory.limit_in_bytes`: bytes, `max`, or a number so large that it means none.
pub(super) fn parse_memory_limit(text: &str) -> Option<u64> {
    const UNLIMITED_FROM: u64 = 1 << 60;
    text.trim().parse().ok().filter(|bytes| *bytes < UNLIMITED_FROM && *bytes > 0)
}

/// `cpu.max`: quota and period in microseconds, or `max`.
pub(super) fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.trim().split_once(' ')?;
    parse_cfs_quota(quota, period)
}

fn parse_cfs_quota(quota: &str, period: &str) -> Option<f64> {
    let quota: i64 = quota.trim().parse().ok()?;
    let period: i64 = period.trim().parse().ok()?;
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// `MemTotal` of `/proc/meminfo`, in bytes.
pub fn parse_machine_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1_MOUNTS: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const V2_MOUNTS: &str = "\
30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev shared:4 - cgroup2 cgroup2 rw,nsdelegate
";

    fn paths(texts: &[&str]) -> Vec<PathBuf> {
        texts.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn groups_are_found_from_the_innermost_to_the_root_of_the_mount() {
        let v1 = Cgroups::parse("8:cpuset:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/\n", V1_MOUNTS);
        assert_eq!(v1.cpuset, paths(&["/sys/fs/cgroup/cpuset"]));
        assert_eq!(
            v1.memory,
            paths(&["/sys/fs/cgroup/memory/docker/abc", "/sys/fs/cgroup/memory/docker", "/sys/fs/cgroup/memory"])
        );
        assert_eq!(v1.cpu.len(), 3);
        assert_eq!(v1.unified, paths(&["/sys/fs/cgroup/unified"]));

        let v2 = Cgroups::parse("0::/system.slice/narad.service\n", V2_MOUNTS);
        assert_eq!(
            v2.unified,
            paths(&["/sys/fs/cgroup/system.slice/narad.service", "/sys/fs/cgroup/system.slice", "/sys/fs/cgroup"])
        );
        assert!(v2.memory.is_empty() && v2.cpuset.is_empty());

        // A container that sees its own group as the root of the mount.
        let inner = "32 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let container = Cgroups::parse("4:memory:/docker/abc\n", inner);
        assert_eq!(container.memory, paths(&["/sys/fs/cgroup/memory"]));
        // And one whose path lies outside what it may see.
        let outside =
            Cgroups::parse("0::/../../elsewhere\n", "30 23 0:26 /mine /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
        assert_eq!(outside.unified, paths(&["/sys/fs/cgroup"]));
        assert_eq!(Cgroups::parse("", ""), Cgroups::default());
    }

    /// A tree of fixture files that goes away with the test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(test: &str, files: &[(&str, &str)]) -> Tree {
            let top = std::env::temp_dir().join(format!("narad-cgroup-{}-{test}", std::process::id()));
            for (name, text) in files {
                let path = top.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Tree(top)
        }

        fn chain(&self, below: &str) -> Vec<PathBuf> {
            self.0.join(below).ancestors().take_while(|path| path.starts_with(&self.0)).map(Path::to_owned).collect()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn lesson_m5_the_smallest_limit_on_the_way_to_the_root_counts() {
        let tree = Tree::new(
            "v2",
            &[
                ("a/b/memory.max", "max\n"),
                ("a/memory.max", "1073741824\n"),
                ("memory.max", "4294967296\n"),
                ("a/b/cpuset.cpus.effective", "2-5,8\n"),
                ("a/b/cpu.max", "150000 100000\n"),
                ("a/cpu.max", "max 100000\n"),
            ],
        );
        let groups = Cgroups { unified: tree.chain("a/b"), ..Cgroups::default() };
        let expected =
            Limits { cpus: Some(CpuSet::parse("2-5,8").unwrap()), cpu_quota: Some(1.5), memory_bytes: Some(1 << 30) };
        assert_eq!(groups.limits(), expected);
    }

    #[test]
    fn lesson_p4_version_1_files_say_the_same() {
        let tree = Tree::new(
            "v1",
            &[
                ("g/cpuset.cpus", "0-7\n"),
                ("g/cpuset.effective_cpus", "0-1\n"),
                ("g/memory.limit_in_bytes", "536870912\n"),
                ("memory.limit_in_bytes", "9223372036854771712\n"),
                ("g/cpu.cfs_quota_us", "-1\n"),
                ("g/cpu.cfs_period_us", "100000\n"),
            ],
        );
        let chain = tree.chain("g");
        let groups = Cgroups { cpuset: chain.clone(), cpu: chain.clone(), memory: chain, ..Cgroups::default() };
        let expected =
            Limits { cpus: Some(CpuSet::parse("0-1").unwrap()), cpu_quota: None, memory_bytes: Some(512 << 20) };
        assert_eq!(groups.limits(), expected);
        assert_eq!(Cgroups::default().limits(), Limits::default());
    }

    #[test]
    fn numbers_in_kernel_files() {
        assert_eq!(parse_memory_limit("max\n"), None);
        assert_eq!(parse_memory_limit("9223372036854771712\n"), None);
        assert_eq!(parse_memory_limit("4096\n"), Some(4096));
        assert_eq!(parse_cpu_max("max 100000\n"), None);
        assert_eq!(parse_cpu_max("50000 100000\n"), Some(0.5));
        assert_eq!(parse_cpu_max("garbage"), None);
        let meminfo = "MemTotal:       24684096 kB\nMemFree: 1 kB\n";
        assert_eq!(parse_machine_memory(meminfo), Some(24_684_096 * 1024));
        assert_eq!(parse_machine_memory("MemFree: 1 kB\n"), None);
    }
}
