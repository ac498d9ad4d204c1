//! Options that every load has. The parser knows no shared groups, so [`load_options`] writes them into each command.

use std::path::PathBuf;
use std::time::Duration;

use super::broker::{Broker, Plan};
use super::engine::{Pace, Timing};
use super::process::require_directory;
use super::target::{Credentials, Target};
use super::threads::Drive;
use super::{admin, cost, cpu};
use crate::parts::require;
use crate::run::{Failure, Load, Run};

/// Most connections of one run: what one thread can drive without being the limit itself.
pub const CONNECTIONS_MAX: usize = 4096;
/// Of a topic that is created: what a broker may be configured to take.
const PARTITIONS_MAX: u32 = 65_536;
/// Most rounds that a load is divided into.
pub const ROUNDS_MAX: usize = 1000;
/// Far more messages per second than one machine can send.
const RATE_MAX: f64 = 1e6;
/// With a number of messages instead of a time, a run gives up after that long.
const MESSAGES_PATIENCE: Duration = Duration::from_secs(600);

/// Seconds, or a number with `ms`, `s` or `m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time: write 10, 10s, 500ms or 2m");
    let (digits, unit_s) = match text {
        _ if text.ends_with("ms") => (&text[..text.len() - 2], 0.001),
        _ if text.ends_with('s') => (&text[..text.len() - 1], 1.0),
        _ if text.ends_with('m') => (&text[..text.len() - 1], 60.0),
        _ => (text, 1.0),
    };
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * unit_s).map_err(|_| wrong())
}

/// A list of connection counts.
pub fn counts(text: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("{text:?} is not a list of connections: write it as 1,8,64,256");
    let counts: Vec<usize> =
        text.split(',').map(|part| part.trim().parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
    match counts.iter().all(|count| (1..=CONNECTIONS_MAX).contains(count)) {
        true => Ok(counts),
        false => Err(format!("{text:?}: connections are 1 to {CONNECTIONS_MAX}")),
    }
}

/// What all loads have in common, as the commands' options say it.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    pub urls: Vec<String>,
    pub topic: String,
    pub partitions: u32,
    pub credentials: Credentials,
    pub connections: usize,
    pub payload_bytes: usize,
    pub keys: u32,
    pub batch: u32,
    pub warmup: Duration,
    pub duration: Duration,
    pub messages: Option<u64>,
    pub rate_per_s: Option<f64>,
    pub threads: usize,
    pub load_cpu: Option<Vec<usize>>,
    pub load_spin: bool,
    pub start: bool,
    pub binary: Option<PathBuf>,
    pub directory: PathBuf,
    pub broker_cpus: Option<Vec<usize>>,
    pub confine: bool,
    pub broker_args: String,
    pub broker_pid: Option<u32>,
}

/// Declares a command's options: its own first, then those of every load.
macro_rules! load_options {
    ($(#[$meta:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug)]
        pub struct $name {
            $($own)*
            /// where the broker is (default http://127.0.0.1:7942); give it several times for several nodes
            #[argh(option)]
            url: Vec<String>,
            /// topic, created if it is missing (default bench)
            #[argh(option, default = "String::from(\"bench\")")]
            topic: String,
            /// partitions of a topic that is created (default 12)
            #[argh(option, default = "12")]
            partitions: u32,
            /// user of basic authentication
            #[argh(option)]
            user: Option<String>,
            /// its password (or NARAD_PASSWORD in the environment)
            #[argh(option)]
            password: Option<String>,
            /// bearer token, for a proxy in front of the broker
            #[argh(option)]
            token: Option<String>,
            /// connections (default 8)
            #[argh(option, default = "8")]
            connections: usize,
            /// bytes of a message (default 256)
            #[argh(option, default = "256")]
            payload: usize,
            /// different keys (default 0: messages have none)
            #[argh(option, default = "0")]
            keys: u32,
            /// messages of one request (default 1: the single routes)
            #[argh(option, default = "1")]
            batch: u32,
            /// time before anything counts (default 2s)
            #[argh(option, default = "std::time::Duration::from_secs(2)", from_str_fn(crate::load::options::duration))]
            warmup: std::time::Duration,
            /// measured time (default 10s)
            #[argh(option, default = "std::time::Duration::from_secs(10)", from_str_fn(crate::load::options::duration))]
            duration: std::time::Duration,
            /// stop after that many messages instead
            #[argh(option)]
            messages: Option<u64>,
            /// messages per second over all connections, at fixed times (open loop); without it each connection sends
            /// when its last answer came (closed loop)
            #[argh(option)]
            rate: Option<f64>,
            /// load threads, at most one for each connection (default 1)
            #[argh(option, default = "1")]
            threads: usize,
            /// CPUs of the load threads, such as 1 or 2-3
            #[argh(option, from_str_fn(crate::load::cpu::parse))]
            load_cpu: Option<Vec<usize>>,
            /// the load threads poll instead of sleeping: their own waking up is not part of a latency
            #[argh(switch)]
            load_spin: bool,
            /// start a broker of our own, in a fresh directory, and stop it afterwards
            #[argh(switch)]
            start: bool,
            /// with --start: the broker's program (default: narad beside this program)
            #[argh(option)]
            binary: Option<std::path::PathBuf>,
            /// with --start: where the fresh data directory is made, and the drive is measured (default .)
            #[argh(option, default = "std::path::PathBuf::from(\".\")")]
            dir: std::path::PathBuf,
            /// with --start: CPUs of the broker's shards, such as 0
            #[argh(option, from_str_fn(crate::load::cpu::parse))]
            broker_cpus: Option<Vec<usize>>,
            /// with --start: all threads of the broker stay on --broker-cpus, not only its shards
            #[argh(switch)]
            confine: bool,
            /// with --start: more arguments of the broker, separated by spaces
            #[argh(option, default = "String::new()")]
            broker_args: String,
            /// process of a broker on this machine: its CPU time and memory are reported
            #[argh(option)]
            broker_pid: Option<u32>,
        }

        impl $name {
            /// The options that every load has.
            fn load(&self) -> crate::load::options::LoadOptions {
                crate::load::options::LoadOptions {
                    urls: self.url.clone(),
                    topic: self.topic.clone(),
                    partitions: self.partitions,
                    credentials: crate::load::target::Credentials {
                        user: self.user.clone(),
                        password: self.password.clone(),
                        token: self.token.clone(),
                    },
                    connections: self.connections,
                    payload_bytes: self.payload,
                    keys: self.keys,
                    batch: self.batch,
                    warmup: self.warmup,
                    duration: self.duration,
                    messages: self.messages,
                    rate_per_s: self.rate,
                    threads: self.threads,
                    load_cpu: self.load_cpu.clone(),
                    load_spin: self.load_spin,
                    start: self.start,
                    binary: self.binary.clone(),
                    directory: self.dir.clone(),
                    broker_cpus: self.broker_cpus.clone(),
                    confine: self.confine,
                    broker_args: self.broker_args.clone(),
                    broker_pid: self.broker_pid,
                }
            }
        }
    };
}
pub(crate) use load_options;

/// Where a load goes: a broker that runs, or one that was started for it and ends with this.
pub struct Site {
    pub target: Target,
    pub admin: admin::Admin,
    pub probe: cost::Probe,
    _broker: Option<Broker>,
}

impl Site {
    /// A broker that was started here.
    pub fn of(broker: Broker) -> Result<Site, Failure> {
        let target = broker.target()?;
        let admin = admin::Admin::new(&target);
        let probe = cost::Probe { pid: Some(broker.pid()), admin: Some(admin.clone()), directory: Some(broker.data()) };
        Ok(Site { target, admin, probe, _broker: Some(broker) })
    }
}

impl LoadOptions {
    /// Refuses what cannot be, in words.
    pub fn check(&self, batch_max: u32) -> Result<(), Failure> {
        let wrong = |text: String| Err(Failure(text));
        if !(1..=CONNECTIONS_MAX).contains(&self.connections) {
            return wrong(format!("--connections {}: give 1 to {CONNECTIONS_MAX}", self.connections));
        }
        require("--threads", self.threads, 1..=self.connections)?;
        require("--partitions", self.partitions, 1..=PARTITIONS_MAX)?;
        if !(1..=batch_max).contains(&self.batch) {
            return wrong(format!(
                "--batch {}: give 1 to {batch_max}, the most that one request may carry",
                self.batch
            ));
        }
        if !(1..=1 << 20).contains(&self.payload_bytes) {
            return wrong(format!("--payload {}: a message is 1 to 1048576 bytes", self.payload_bytes));
        }
        if self.keys > super::narad::KEYS_MAX {
            return wrong(format!("--keys {}: give at most {}", self.keys, super::narad::KEYS_MAX));
        }
        // Every operation that comes due is accounted for, also those that could not be sent.
        if self.rate_per_s.is_some_and(|rate| !(rate > 0.0 && rate <= RATE_MAX)) {
            return wrong(format!("--rate: give messages per second, more than 0 and at most {RATE_MAX}"));
        }
        if self.duration.is_zero() || self.messages == Some(0) {
            return wrong("--duration and --messages: give more than 0".into());
        }
        if self.start && (!self.urls.is_empty() || self.broker_pid.is_some()) {
            return wrong("--start starts a broker of its own: leave out --url and --broker-pid".into());
        }
        for (given, flag) in [
            (self.binary.is_some(), "--binary"),
            (self.broker_cpus.is_some(), "--broker-cpus"),
            (self.confine, "--confine"),
            (!self.broker_args.is_empty(), "--broker-args"),
        ] {
            if given && !self.start {
                return wrong(format!("{flag} is about the broker that --start starts: add --start"));
            }
        }
        if self.confine && self.broker_cpus.is_none() {
            return wrong("--confine needs --broker-cpus, the CPUs to stay on".into());
        }
        if self.load_spin && self.load_cpu.is_none() {
            return wrong("--load-spin keeps a core busy: say which with --load-cpu".into());
        }
        if self.start {
            require_directory(&self.directory)?;
        }
        if let Some(pid) = self.broker_pid {
            if !std::path::Path::new(&format!("/proc/{pid}")).exists() {
                return wrong(format!("--broker-pid {pid}: there is no such process"));
            }
        }
        Ok(())
    }

    /// Starts the broker if that was asked for, else finds it; makes sure of the topic.
    pub fn site(&self) -> Result<Site, Failure> {
        if self.start {
            let plan = Plan {
                binary: self.binary.clone(),
                directory: self.directory.clone(),
                cpus: self.broker_cpus.clone(),
                confine: self.confine,
                arguments: self.broker_args.clone(),
                environment: Vec::new(),
            };
            return Site::of(plan.start()?);
        }
        let target = match self.urls.is_empty() {
            true => Target::parse(&["http://127.0.0.1:7942".to_owned()], &self.credentials)?,
            false => Target::parse(&self.urls, &self.credentials)?,
        };
        let admin = admin::Admin::new(&target);
        let pid = self.broker_pid;
        let probe = cost::Probe { pid, admin: pid.is_some().then(|| admin.clone()), directory: None };
        Ok(Site { target, admin, probe, _broker: None })
    }

    /// When the load begins to count and when it ends; `grace` is what it may take longer.
    pub fn timing(&self, grace: Duration) -> Timing {
        match self.messages {
            Some(_) => Timing { warmup: self.warmup, duration: None, grace: MESSAGES_PATIENCE },
            None => Timing { warmup: self.warmup, duration: Some(self.duration), grace },
        }
    }

    pub fn pace(&self) -> Pace {
        match self.rate_per_s {
            Some(rate) => Pace::Open { interval: 1e9 * f64::from(self.batch.max(1)) / rate },
            None => Pace::Closed,
        }
    }

    pub fn drive(&self, title: String, timing: Timing) -> Drive {
        Drive { timing, threads: self.threads, apart: false, cpus: self.load_cpu.clone(), spin: self.load_spin, title }
    }

    /// Records the settings in a result.
    pub fn describe(&self, run: &mut Run) {
        run.load = Some(match self.rate_per_s {
            Some(rate_per_s) => Load::Open { rate_per_s },
            None => Load::Closed,
        });
        let durability = "each answer after the broker's own durability: Narad answers 202 once the message is synced";
        run.set("durability", durability);
        if self.start {
            run.set("dir", self.directory.display());
        }
        run.set("payload", self.payload_bytes);
        run.set("batch", self.batch);
        run.set("connections", self.connections);
        run.set("keys", self.keys);
        run.set("threads", self.threads);
        run.set("warmup_s", self.warmup.as_secs_f64());
        match self.messages {
            Some(messages) => run.set("messages", messages),
            None => run.set("duration_s", self.duration.as_secs_f64()),
        }
        match &self.load_cpu {
            Some(cpus) => run.set("load_cpu", cpu::list(cpus)),
            None => run.set("load_cpu", "not pinned"),
        }
        run.set("load_spin", self.load_spin);
        match (self.start, &self.broker_cpus) {
            (false, _) => run.set("broker", self.urls.join(" ")),
            (true, None) => run.set("broker", format!("started here, unpinned {}", self.broker_args)),
            (true, Some(cpus)) => {
                let confined = if self.confine { ", all threads" } else { "" };
                run.set("broker", format!("started here on CPU {}{confined} {}", cpu::list(cpus), self.broker_args));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started() -> LoadOptions {
        LoadOptions {
            urls: Vec::new(),
            topic: "bench".into(),
            partitions: 12,
            credentials: Credentials::default(),
            connections: 8,
            payload_bytes: 256,
            keys: 0,
            batch: 1,
            warmup: Duration::from_secs(1),
            duration: Duration::from_secs(1),
            messages: None,
            rate_per_s: None,
            threads: 1,
            load_cpu: None,
            load_spin: false,
            start: true,
            binary: None,
            directory: ".".into(),
            broker_cpus: None,
            confine: false,
            broker_args: String::new(),
            broker_pid: None,
        }
    }

    #[test]
    fn times_and_counts_are_read_or_explained() {
        for (text, ms) in [("10", 10_000), ("2.5", 2_500), ("500ms", 500), ("3s", 3_000), ("2m", 120_000)] {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert!(duration("soon").unwrap_err().contains("500ms") && duration("-1").is_err());
        assert_eq!(counts("1, 8,64"), Ok(vec![1, 8, 64]));
        assert!(counts("0").unwrap_err().contains("4096") && counts("x").is_err());
    }

    #[test]
    fn options_that_contradict_each_other_are_refused_by_name() {
        let good = started();
        assert!(good.check(1000).is_ok());
        let words = |options: LoadOptions| options.check(1000).unwrap_err().0;
        assert!(words(LoadOptions { batch: 1001, ..good.clone() }).contains("--batch 1001"));
        assert!(words(LoadOptions { urls: vec!["x".into()], ..good.clone() }).contains("leave out --url"));
        assert!(words(LoadOptions { start: false, confine: true, ..good.clone() }).contains("add --start"));
        assert!(words(LoadOptions { load_spin: true, ..good.clone() }).contains("--load-cpu"));
        assert!(words(LoadOptions { connections: 0, ..good.clone() }).contains("--connections 0"));
        for threads in [0, 9999] {
            let said = words(LoadOptions { threads, ..good.clone() });
            assert!(said.contains(&format!("--threads {threads}: give 1 to 8")), "{said}");
        }
        assert!(words(LoadOptions { directory: "/nowhere/at/all".into(), ..good }).contains("no such directory"));
    }
}
