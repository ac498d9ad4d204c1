//! What the suite measures, as command lines: whoever wonders about one figure runs its line alone.

use std::path::PathBuf;

/// Where and with what to measure.
#[derive(Clone, Debug)]
pub struct Place {
    /// Directory on the drive.
    pub dir: PathBuf,
    /// The broker's program; `None`: beside this one.
    pub binary: Option<PathBuf>,
    /// The CPUs that may be used. The broker gets the first and the load the second; alone, they share it unpinned.
    pub cpus: Vec<usize>,
    /// Everything shorter: to see that it works, not to measure.
    pub quick: bool,
}

/// Commands that take turns.
#[derive(Clone, Debug)]
pub struct Part {
    /// What `--only` names.
    pub name: &'static str,
    /// How often the turns go round.
    pub rounds: usize,
    /// Whether the drive is sampled before and after each step, so that ratios to it can be taken.
    pub paired: bool,
    /// The commands.
    pub steps: Vec<Step>,
}

/// One command.
#[derive(Clone, Debug)]
pub struct Step {
    /// First words of its figures' names in the suite's result, instead of the command's name.
    pub label: String,
    /// Words of the command line.
    pub words: Vec<String>,
}

impl Step {
    fn new(label: &str, words: &str) -> Step {
        Step { label: label.into(), words: words.split_whitespace().map(String::from).collect() }
    }

    fn and(mut self, words: &[String]) -> Step {
        self.words.extend_from_slice(words);
        self
    }

    /// The subcommand.
    pub fn command(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }

    /// As one types it.
    pub fn line(&self) -> String {
        let quote = |word: &String| if word.contains(' ') { format!("'{word}'") } else { word.clone() };
        format!("narad-bench {}", self.words.iter().map(quote).collect::<Vec<_>>().join(" "))
    }
}

impl Place {
    fn dir(&self) -> Vec<String> {
        vec!["--dir".into(), self.dir.display().to_string()]
    }

    /// Options of a load on a broker of its own.
    fn start(&self) -> Vec<String> {
        let mut words = vec!["--start".to_string()];
        words.extend(self.dir());
        if let Some(binary) = &self.binary {
            words.extend(["--binary".to_string(), binary.display().to_string()]);
        }
        if let [broker, load, ..] = self.cpus[..] {
            words.extend(["--broker-cpus", &broker.to_string(), "--load-cpu", &load.to_string()].map(String::from));
        }
        words
    }

    /// How long a load warms up and counts.
    fn times(&self) -> Vec<String> {
        let (warmup, duration) = if self.quick { ("200ms", "500ms") } else { ("1s", "2s") };
        ["--warmup", warmup, "--duration", duration].map(String::from).to_vec()
    }

    /// The whole plan, in the order in which it runs.
    pub fn parts(&self) -> Vec<Part> {
        let single = |part: &'static str, step: Step| Part { name: part, rounds: 1, paired: false, steps: vec![step] };
        let (start, dir) = (self.start(), self.dir());
        let rounds = if self.quick { 1 } else { 4 };
        let long = |text: &str, short: &str| if self.quick { short.to_string() } else { text.to_string() };
        let cpu = self.cpus.first().map(|cpu| vec!["--cpus".to_string(), cpu.to_string()]).unwrap_or_default();
        let both = match self.cpus[..] {
            [one, two, ..] => vec!["--cpus".to_string(), format!("{one},{two}")],
            _ => Vec::new(),
        };
        let load = |label: &str, words: &str| Step::new(label, words).and(&start).and(&self.times());
        // The ceiling has no broker, only the broker's HTTP stack on the broker's CPU.
        let http = |connections: usize| {
            let mut words = self.times();
            if let [server, load, ..] = self.cpus[..] {
                words.extend(["--cpus", &server.to_string(), "--load-cpu", &load.to_string()].map(String::from));
            }
            Step::new("http", &format!("http --connections {connections}")).and(&words)
        };
        let mut recover =
            Step::new("recover", &long("recover --rounds 2", "recover --rounds 1 --wal 64MiB --partitions 8x1MiB"));
        recover = recover.and(&dir).and(&cpu);
        if let Some(binary) = &self.binary {
            recover = recover.and(&["--binary".into(), binary.display().to_string()]);
        }
        // Its duration is that of all its phases together.
        let fairness =
            Step::new("fairness", &long("fairness", "fairness --rounds 1 --prefill 100000 --warmup 100ms")).and(&start);
        let fairness = fairness.and(&["--duration".into(), long("9s", "1s")]);
        let mut idle = Step::new("idle", &long("idle", "idle --warmup 1s --duration 1s")).and(&dir);
        if let Some(binary) = &self.binary {
            idle = idle.and(&["--binary".into(), binary.display().to_string()]);
        }
        // Of four rounds those can be left out in which the drive changed.
        let mut versus = "versus --quick".to_string();
        versus.push_str(match self.quick {
            true => " --connections 8 --batches 1 --rounds 1 --duration 200ms",
            false => " --rounds 4",
        });
        let mut versus = Step::new("versus", &versus).and(&dir);
        if let Some(binary) = &self.binary {
            versus = versus.and(&["--binary".into(), binary.display().to_string()]);
        }
        if let [broker, load, ..] = self.cpus[..] {
            versus =
                versus.and(&["--broker-cpus", &broker.to_string(), "--load-cpu", &load.to_string()].map(String::from));
        }
        let produce = |label: &str, words: &str| load(label, &format!("produce --rounds 1 {words}"));
        let mut parts = vec![
            single(
                "device",
                Step::new("device", &long("device --cell-seconds 0.3", "device --quick --seconds 1")).and(&dir),
            ),
            single("ring", Step::new("ring", &long("ring --seconds 1.5", "ring --seconds 0.2")).and(&both)),
            single("wal", Step::new("wal", &long("wal --seconds 2", "wal --seconds 0.2")).and(&dir).and(&cpu)),
            single("log", Step::new("log", &long("log --seconds 1", "log --seconds 0.1")).and(&dir).and(&cpu)),
            Part {
                name: "accept",
                rounds,
                paired: true,
                steps: vec![
                    http(64),
                    produce("produce", "--connections 64"),
                    http(256),
                    produce("produce", "--connections 256"),
                    produce("produce", "--connections 8"),
                    produce("produce", "--connections 1"),
                    produce("produce.spin", "--connections 1 --load-spin")
                        .and(&["--broker-args".into(), "--spin-us 1000".into()]),
                    produce("produce.parked", "--connections 1").and(&["--broker-args".into(), "--spin-us 0".into()]),
                    produce("produce.one_cpu", "--connections 64 --confine"),
                ],
            },
            Part {
                name: "batch",
                rounds: rounds.min(3),
                paired: true,
                steps: vec![
                    produce("produce.batch", "--connections 8 --batch 1000"),
                    load("flow", "flow --connections 8 --batch 100"),
                    load("consume", "consume --connections 8"),
                ],
            },
            single("fairness", fairness),
            single("recover", recover),
            single("idle", idle),
            single("versus", versus),
        ];
        if self.cpus.len() < 2 {
            parts.retain(|part| part.name != "ring" && part.name != "versus");
            for step in parts.iter_mut().flat_map(|part| &mut part.steps) {
                step.words.retain(|word| word != "--load-spin" && word != "--confine");
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(cpus: &[usize], quick: bool) -> Place {
        Place { dir: "/data".into(), binary: Some("/opt/narad".into()), cpus: cpus.to_vec(), quick }
    }

    #[test]
    fn every_line_of_the_plan_is_one_that_the_commands_understand() {
        for place in [place(&[0, 1], false), place(&[0, 1], true), place(&[3], false)] {
            for step in place.parts().iter().flat_map(|part| &part.steps) {
                assert!(crate::parse(&step.words).is_ok(), "{}: {:?}", step.line(), crate::parse(&step.words).err());
            }
        }
    }

    #[test]
    fn labels_tell_loads_apart_that_have_the_same_command_and_connections() {
        for part in place(&[0, 1], false).parts() {
            let mut keys: Vec<(String, String)> = part
                .steps
                .iter()
                .map(|step| {
                    let connections = step.words.iter().position(|word| word == "--connections");
                    (step.label.clone(), connections.map(|at| step.words[at + 1].clone()).unwrap_or_default())
                })
                .collect();
            keys.sort();
            keys.dedup();
            assert_eq!(keys.len(), part.steps.len(), "{}", part.name);
        }
    }

    #[test]
    fn a_lone_cpu_is_shared_without_pinning() {
        let parts = place(&[0], false).parts();
        assert!(parts.iter().all(|part| part.name != "ring" && part.name != "versus"));
        let words = parts.iter().flat_map(|part| &part.steps).flat_map(|step| &step.words);
        assert!(words.clone().all(|word| word != "--load-cpu" && word != "--confine"));
    }
}
