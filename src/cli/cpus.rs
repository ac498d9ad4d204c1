//! `narad cpus`: the machine's CPUs, and where a start with the same flags would put its threads. Starts nothing.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use argh::{ArgsInfo, FromArgs};
use serde_json::{json, Value};

use crate::config::{self, CpuSet, Sources, Warning};
use crate::node::{self, Allowance, CpuPlan, Refusal, Topology};

use super::render::table;
use super::serve::environment;
use super::Failure;

/// Show the machine's CPUs and the placement that flags of serve would give.
#[derive(ArgsInfo, FromArgs, Debug, Default)]
#[argh(subcommand, name = "cpus")]
pub struct Cpus {
    /// settings as a JSON file
    #[argh(option)]
    config: Option<PathBuf>,
    /// number of shards, one a core (runtime.shards)
    #[argh(option)]
    shards: Option<String>,
    /// CPUs of the shards, such as 2-5,8 (runtime.cpus)
    #[argh(option)]
    cpus: Option<String>,
    /// leave the placement of threads to the kernel (runtime.no_pin)
    #[argh(switch)]
    no_pin: bool,
    /// CPU of the control thread (runtime.control_cpu)
    #[argh(option)]
    control_cpu: Option<String>,
    /// print JSON
    #[argh(switch)]
    json: bool,
}

pub fn run(cpus: Cpus, out: &mut dyn Write) -> Result<(), Failure> {
    let flags = [
        ("runtime.shards", cpus.shards),
        ("runtime.cpus", cpus.cpus),
        ("runtime.no_pin", cpus.no_pin.then(|| "true".to_owned())),
        ("runtime.control_cpu", cpus.control_cpu),
    ];
    let flags = flags.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    let sources = Sources { file: cpus.config, environment: environment(), flags, ..Sources::default() };
    let config = config::load(&sources).map_err(|error| Failure::Request(error.to_string()))?;
    let allowance = Allowance::of_this_process().map_err(|refusal| Failure::Request(refusal.line()))?;
    let topology = Topology::read(Path::new("/sys"));
    let plan = node::plan_cpus(&config.runtime, &allowance.affinity, &allowance.cgroup);
    let page = Page { topology: &topology, allowance: &allowance, plan: &plan };
    match cpus.json {
        true => writeln!(out, "{:#}", page.json())?,
        false => write!(out, "{}", page.text())?,
    }
    plan.map(drop).map_err(|refusal| Failure::Request(refusal.line()))
}

/// What is shown; pure.
struct Page<'a> {
    topology: &'a Topology,
    allowance: &'a Allowance,
    plan: &'a Result<CpuPlan, Refusal>,
}

impl Page<'_> {
    fn allowed(&self) -> CpuSet {
        self.allowance.cpus()
    }

    /// Names of the pinned threads by CPU.
    fn threads(&self) -> BTreeMap<u32, Vec<String>> {
        let mut threads: BTreeMap<u32, Vec<String>> = BTreeMap::new();
        let Ok(plan) = self.plan else { return threads };
        for (shard, cpu) in plan.shards.iter().enumerate() {
            if let Some(cpu) = cpu {
                threads.entry(*cpu).or_default().push(format!("shard {shard}"));
            }
        }
        if let Some(cpu) = plan.control {
            threads.entry(cpu).or_default().push("control".to_owned());
        }
        threads
    }

    fn remarks(&self) -> Vec<String> {
        match self.plan {
            Ok(plan) => {
                let remarks = node::remarks(self.topology, plan);
                plan.warnings.iter().chain(&remarks).map(Warning::to_string).collect()
            }
            Err(_) => Vec::new(),
        }
    }

    fn text(&self) -> String {
        let or_none = |set: &CpuSet| if set.is_empty() { "none".to_owned() } else { set.to_string() };
        let group = &self.allowance.cgroup;
        let quota = group.cpu_quota.map_or("no quota".to_owned(), |quota| format!("quota {quota:.2} CPUs"));
        let group = group.cpus.as_ref().map_or("any CPU".to_owned(), CpuSet::to_string);
        let allowed = self.allowed();
        let mut text = format!(
            "{}\nallowed   {allowed} (affinity {}; control group {group}, {quota})\nisolated  {}\n\n",
            self.topology.summary(),
            self.allowance.affinity,
            or_none(&self.topology.isolated)
        );
        let threads = self.threads();
        let shown = |number: Option<u32>| number.map_or("-".to_owned(), |number| number.to_string());
        let mut rows: Vec<Vec<String>> =
            vec![["CPU", "PACKAGE", "CORE", "NODE", "SIBLINGS", "ALLOWED", "ISOLATED", "RUNS"]
                .map(str::to_owned)
                .into()];
        for cpu in &self.topology.cpus {
            let others = cpu.siblings.difference(&CpuSet::from_iter([cpu.id]));
            let mark = |yes: bool| if yes { "yes" } else { "-" }.to_owned();
            rows.push(vec![
                cpu.id.to_string(),
                shown(cpu.package),
                shown(cpu.core),
                shown(cpu.node),
                if others.is_empty() { "-".to_owned() } else { others.to_string() },
                mark(allowed.contains(cpu.id)),
                mark(self.topology.isolated.contains(cpu.id)),
                threads.get(&cpu.id).map_or(String::new(), |names| names.join(", ")),
            ]);
        }
        text.push_str(&table(&rows));
        if let Ok(plan) = self.plan {
            let count = plan.shards.len();
            let shards = format!("{count} shard{}", if count == 1 { "" } else { "s" });
            let placed: CpuSet = plan.shards.iter().flatten().copied().collect();
            let placed = if plan.pinned() { format!("pinned to {placed}") } else { format!("floating over {allowed}") };
            let control = match plan.control {
                Some(cpu) => format!("pinned to {cpu}"),
                None => format!("floating over {allowed}"),
            };
            text.push_str(&format!("\n{shards}, {placed}; the control thread {control}\n"));
        }
        self.remarks().iter().for_each(|remark| text.push_str(&format!("warning: {remark}\n")));
        text
    }

    fn json(&self) -> Value {
        let threads = self.threads();
        let allowed = self.allowed();
        let cpus: Vec<Value> = self
            .topology
            .cpus
            .iter()
            .map(|cpu| {
                json!({
                    "cpu": cpu.id, "package": cpu.package, "core": cpu.core, "node": cpu.node,
                    "siblings": cpu.siblings.to_string(), "allowed": allowed.contains(cpu.id),
                    "isolated": self.topology.isolated.contains(cpu.id),
                    "runs": threads.get(&cpu.id).cloned().unwrap_or_default(),
                })
            })
            .collect();
        let mut page = json!({
            "cpus": cpus,
            "online": self.topology.online().to_string(),
            "isolated": self.topology.isolated.to_string(),
            "affinity": self.allowance.affinity.to_string(),
            "cgroup_cpus": self.allowance.cgroup.cpus.as_ref().map(CpuSet::to_string),
            "cgroup_cpu_quota": self.allowance.cgroup.cpu_quota,
            "allowed": allowed.to_string(),
            "warnings": self.remarks(),
        });
        match self.plan {
            Ok(plan) => {
                page["placement"] = json!({
                    "shards": plan.shards, "pinned": plan.pinned(), "control_cpu": plan.control, "spin": plan.spin_words(),
                });
            }
            Err(refusal) => page["refusal"] = json!(refusal.to_string()),
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Runtime;
    use crate::node::tests_support::Tree;

    fn page(test: &str, runtime: &Runtime, look: impl FnOnce(Page<'_>)) {
        let tree = Tree::two_packages(test);
        let topology = Topology::read(&tree.0);
        let allowance = Allowance {
            affinity: CpuSet::parse("0-7").unwrap(),
            cgroup: node::CgroupLimits { cpus: CpuSet::parse("0-5").ok(), ..node::CgroupLimits::default() },
        };
        let plan = node::plan_cpus(runtime, &allowance.affinity, &allowance.cgroup);
        look(Page { topology: &topology, allowance: &allowance, plan: &plan });
    }

    #[test]
    fn the_page_shows_the_machine_and_who_runs_where() {
        let runtime = Runtime { cpus: CpuSet::parse("0-1").ok(), control_cpu: Some(4), ..Runtime::default() };
        page("cpus-page", &runtime, |page| {
            let expected = "\
2 packages, 4 cores, 8 CPUs, 2 NUMA nodes
allowed   0-5 (affinity 0-7; control group 0-5, no quota)
isolated  none

CPU  PACKAGE  CORE  NODE  SIBLINGS  ALLOWED  ISOLATED  RUNS
0    0        0     0     4         yes      -         shard 0
1    0        1     0     5         yes      -         shard 1
2    1        0     1     6         yes      -
3    1        1     1     7         yes      -
4    0        0     0     0         yes      -         control
5    0        1     0     1         yes      -
6    1        0     1     2         -        -
7    1        1     1     3         -        -

2 shards, pinned to 0-1; the control thread pinned to 4
";
            assert_eq!(page.text(), expected);
            let json = page.json();
            assert_eq!((&json["allowed"], &json["placement"]["shards"]), (&"0-5".into(), &json!([0, 1])));
            assert_eq!(json["cpus"][4]["runs"], json!(["control"]));
        });
    }

    #[test]
    fn what_is_refused_is_refused_in_the_words_of_the_start() {
        page("cpus-refused", &Runtime { cpus: CpuSet::parse("5-6").ok(), ..Runtime::default() }, |page| {
            let refusal = page.json()["refusal"].as_str().unwrap().to_owned();
            assert!(refusal.contains("runtime.cpus names CPU 6") && refusal.contains("0-5"), "{refusal}");
            assert!(page.text().ends_with("7    1        1     1     3         -        -\n"), "{}", page.text());
        });
        page("cpus-floating", &Runtime { shards: Some(9), ..Runtime::default() }, |page| {
            let text = page.text();
            assert!(text.contains("\n9 shards, floating over 0-5; the control thread floating over 0-5\n"), "{text}");
            assert!(text.contains("warning: 9 shards on 6 allowed CPUs"), "{text}");
        });
    }
}
