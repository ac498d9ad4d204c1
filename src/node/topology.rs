//! What the machine's CPUs are and how they hang together, from sysfs, and what that says of a placement. `sys` is
//! `/sys`, or a test's imitation of it. What a kernel or a container hides is left out, never guessed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::config::{CpuSet, Warning};

use super::placement::CpuPlan;

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Topology {
    /// Online ones, ascending.
    pub cpus: Vec<Cpu>,
    /// Out of the scheduler's hands (`isolcpus=`).
    pub isolated: CpuSet,
    /// Without a tick while one task runs (`nohz_full=`).
    pub tickless: CpuSet,
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Cpu {
    pub id: u32,
    pub package: Option<u32>,
    /// Within its package.
    pub core: Option<u32>,
    pub node: Option<u32>,
    /// Hardware threads of the same core, itself included.
    pub siblings: CpuSet,
}

impl Topology {
    pub fn read(sys: &Path) -> Topology {
        let base = sys.join("devices/system/cpu");
        let text = |path: &Path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let set = |name: &str| text(&base.join(name)).and_then(|text| CpuSet::parse(&text).ok()).unwrap_or_default();
        let nodes = numa_nodes(&sys.join("devices/system/node"));
        let cpu = |id: u32| {
            let topology = base.join(format!("cpu{id}/topology"));
            let number = |name: &str| text(&topology.join(name)).and_then(|text| text.parse().ok());
            let siblings = text(&topology.join("thread_siblings_list")).and_then(|text| CpuSet::parse(&text).ok());
            Cpu {
                id,
                package: number("physical_package_id"),
                core: number("core_id"),
                node: nodes.iter().find(|(_, cpus)| cpus.contains(id)).map(|(node, _)| *node),
                siblings: siblings.filter(|set| set.contains(id)).unwrap_or_else(|| CpuSet::from_iter([id])),
            }
        };
        Topology {
            cpus: set("online").iter().map(cpu).collect(),
            isolated: set("isolated"),
            tickless: set("nohz_full"),
        }
    }

    pub fn online(&self) -> CpuSet {
        self.cpus.iter().map(|cpu| cpu.id).collect()
    }

    pub fn find(&self, id: u32) -> Option<&Cpu> {
        self.cpus.iter().find(|cpu| cpu.id == id)
    }

    /// `2 packages, 16 cores, 32 CPUs, 2 NUMA nodes`; what is hidden counts as one.
    pub fn summary(&self) -> String {
        let distinct = |mut keys: Vec<(Option<u32>, Option<u32>)>| {
            keys.sort_unstable();
            keys.dedup();
            keys.len()
        };
        let packages = distinct(self.cpus.iter().map(|cpu| (cpu.package, None)).collect());
        let cores = distinct(self.cpus.iter().map(|cpu| (cpu.siblings.iter().next(), None)).collect());
        let nodes = distinct(self.cpus.iter().map(|cpu| (cpu.node, None)).collect());
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let parts =
            [many(packages, "package"), many(cores, "core"), many(self.cpus.len(), "CPU"), many(nodes, "NUMA node")];
        parts.join(", ")
    }
}

fn numa_nodes(base: &Path) -> Vec<(u32, CpuSet)> {
    let Ok(entries) = fs::read_dir(base) else { return Vec::new() };
    let mut nodes: Vec<(u32, CpuSet)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let node = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let cpus = CpuSet::parse(&fs::read_to_string(entry.path().join("cpulist")).ok()?).ok()?;
            Some((node, cpus))
        })
        .collect();
    nodes.sort_unstable_by_key(|(node, _)| *node);
    nodes
}

/// What a person would say about this placement on this machine.
pub fn remarks(topology: &Topology, plan: &CpuPlan) -> Vec<Warning> {
    let mut remarks = Vec::new();
    let placed: Vec<(usize, u32)> =
        plan.shards.iter().enumerate().filter_map(|(shard, cpu)| Some((shard, (*cpu)?))).collect();
    let mut cores: BTreeMap<u32, Vec<(usize, u32)>> = BTreeMap::new();
    let mut nodes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (shard, cpu) in &placed {
        let Some(found) = topology.find(*cpu) else { continue };
        cores.entry(found.siblings.iter().next().unwrap_or(*cpu)).or_default().push((*shard, *cpu));
        if let Some(node) = found.node {
            nodes.entry(node).or_default().push(*cpu);
        }
    }
    let names = |shards: &[(usize, u32)]| {
        shards.iter().map(|(shard, cpu)| format!("{shard} (CPU {cpu})")).collect::<Vec<_>>().join(" and ")
    };
    for shared in cores.values().filter(|shards| shards.len() > 1) {
        remarks.push(Warning::new(
            format!("shards {} are hardware threads of one core and slow each other down", names(shared)),
            "name one thread of each core in --cpus",
        ));
    }
    if nodes.len() > 1 {
        let nodes: Vec<String> =
            nodes.iter().map(|(node, cpus)| format!("{node}: {}", CpuSet::from_iter(cpus.iter().copied()))).collect();
        remarks.push(Warning::new(
            format!("shards are spread over NUMA nodes ({})", nodes.join("; ")),
            "one node's CPUs in --cpus keep messages between shards local",
        ));
    }
    let on_a_shard = plan.control.and_then(|control| placed.iter().find(|(_, cpu)| *cpu == control));
    if let Some((shard, cpu)) = on_a_shard {
        remarks.push(Warning::new(
            format!(
                "the control thread shares CPU {cpu} with shard {shard}, which metadata changes and probes interrupt"
            ),
            "give it another --control-cpu, or none",
        ));
    }
    let out_of_reach = topology.isolated.difference(&plan.allowed);
    if !out_of_reach.is_empty() {
        remarks.push(Warning::new(
            format!("CPUs {out_of_reach} are isolated and outside of what this process may use"),
            "start it with CPUAffinity= (systemd) or taskset -c to put shards there",
        ));
    }
    remarks
}

#[cfg(test)]
mod tests {
    use narad_shards::rt::Spin;

    use super::*;
    use crate::node::tests_support::Tree;

    fn plan(shards: &[u32], control: Option<u32>, allowed: &str) -> CpuPlan {
        CpuPlan {
            allowed: CpuSet::parse(allowed).unwrap(),
            shards: shards.iter().copied().map(Some).collect(),
            control,
            spin: Spin::Never,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn packages_cores_siblings_and_nodes_are_read() {
        let tree = Tree::two_packages("topology");
        let topology = Topology::read(&tree.0);
        assert_eq!(topology.summary(), "2 packages, 4 cores, 8 CPUs, 2 NUMA nodes");
        let six = topology.find(6).unwrap();
        assert_eq!(
            (six.package, six.core, six.node, six.siblings.to_string()),
            (Some(1), Some(0), Some(1), "2,6".into())
        );
        assert!(topology.isolated.is_empty() && topology.tickless.is_empty());
    }

    #[test]
    fn what_is_hidden_is_left_out() {
        let tree = Tree::new("hidden", &[("devices/system/cpu/online", "2-3")]);
        let topology = Topology::read(&tree.0);
        assert_eq!(topology.online().to_string(), "2-3");
        assert_eq!(topology.cpus[0], Cpu { id: 2, siblings: CpuSet::from_iter([2]), ..Cpu::default() });
        assert_eq!(Topology::read(Path::new("/nonexistent")), Topology::default());
        assert!(remarks(&topology, &plan(&[2, 3], None, "2-3")).is_empty());
    }

    #[test]
    fn a_placement_that_costs_is_remarked_upon() {
        let tree = Tree::two_packages("remarks");
        tree.write("devices/system/cpu/isolated", "3");
        let topology = Topology::read(&tree.0);
        assert!(remarks(&topology, &plan(&[0, 1], None, "0-7")).is_empty());
        let said: Vec<String> =
            remarks(&topology, &plan(&[0, 4, 2], Some(2), "0-2,4-7")).iter().map(Warning::to_string).collect();
        assert_eq!(said.len(), 4, "{said:?}");
        assert!(said[0].starts_with("shards 0 (CPU 0) and 1 (CPU 4) are hardware threads of one core"), "{said:?}");
        assert!(said[1].contains("NUMA nodes (0: 0,4; 1: 2)"), "{said:?}");
        assert!(said[2].contains("shares CPU 2 with shard 2"), "{said:?}");
        assert!(said[3].contains("CPUs 3 are isolated") && said[3].contains("CPUAffinity="), "{said:?}");
    }
}
