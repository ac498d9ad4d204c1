//! `narad serve` and `narad server start`: flags to settings, checks, then the node.

use std::io::{self, Write};
use std::path::PathBuf;

use argh::{ArgsInfo, FromArgs};

use crate::config::{self, Sources};
use crate::node;
use crate::telemetry;

use super::Failure;

/// Declares a command that takes the settings of one node as flags, and more of its own.
macro_rules! with_node_flags {
    ($(#[$attribute:meta])* pub struct $name:ident { $($more:tt)* }) => {
        $(#[$attribute])*
        pub struct $name {
            $($more)*
            /// settings as a JSON file
            #[argh(option)]
            config: Option<std::path::PathBuf>,
            /// address of the client API (http.addr)
            #[argh(option)]
            addr: Option<String>,
            /// port of the client API; leaves the host of http.addr as it is
            #[argh(option)]
            port: Option<String>,
            /// UDP port of the peer plane; leaves the host of cluster.addr as it is
            #[argh(option)]
            cluster_port: Option<String>,
            /// everything the node stores (storage.data_dir)
            #[argh(option)]
            data_dir: Option<String>,
            /// identity of the node (cluster.node_id)
            #[argh(option)]
            node_id: Option<String>,
            /// debug, info, warn or error (log.level)
            #[argh(option)]
            log_level: Option<String>,
            /// json or text (log.format)
            #[argh(option)]
            log_format: Option<String>,
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
            /// microseconds to poll before each sleep of a shard; default: only
            /// while its drive works (runtime.spin_us)
            #[argh(option)]
            spin_us: Option<String>,
            /// shard i also listens on this port plus i (runtime.shard_ports)
            #[argh(option)]
            shard_ports: Option<String>,
            /// memory of all shards together, such as 2GiB (runtime.memory)
            #[argh(option)]
            memory: Option<String>,
        }

        impl $name {
            /// The settings among the flags, taken out.
            fn node_flags(&mut self) -> $crate::cli::serve::NodeFlags {
                $crate::cli::serve::NodeFlags {
                    config: std::mem::take(&mut self.config),
                    addr: std::mem::take(&mut self.addr),
                    port: std::mem::take(&mut self.port),
                    cluster_port: std::mem::take(&mut self.cluster_port),
                    data_dir: std::mem::take(&mut self.data_dir),
                    node_id: std::mem::take(&mut self.node_id),
                    log_level: std::mem::take(&mut self.log_level),
                    log_format: std::mem::take(&mut self.log_format),
                    shards: std::mem::take(&mut self.shards),
                    cpus: std::mem::take(&mut self.cpus),
                    no_pin: std::mem::take(&mut self.no_pin),
                    control_cpu: std::mem::take(&mut self.control_cpu),
                    spin_us: std::mem::take(&mut self.spin_us),
                    shard_ports: std::mem::take(&mut self.shard_ports),
                    memory: std::mem::take(&mut self.memory),
                }
            }
        }
    };
}
pub(super) use with_node_flags;

with_node_flags! {
    /// Run the broker.
    #[derive(ArgsInfo, FromArgs, Debug, Default)]
    #[argh(subcommand, name = "serve")]
    pub struct Serve {
        /// this start follows a restore of the data directory from a backup: set its consensus files aside, once
        #[argh(switch)]
        restored: bool,
    }
}

/// Flags as they were given.
#[derive(Debug, Default)]
pub struct NodeFlags {
    pub config: Option<PathBuf>,
    pub addr: Option<String>,
    pub port: Option<String>,
    pub cluster_port: Option<String>,
    pub data_dir: Option<String>,
    pub node_id: Option<String>,
    pub log_level: Option<String>,
    pub log_format: Option<String>,
    pub shards: Option<String>,
    pub cpus: Option<String>,
    pub no_pin: bool,
    pub control_cpu: Option<String>,
    pub spin_us: Option<String>,
    pub shard_ports: Option<String>,
    pub memory: Option<String>,
}

/// Run the broker with defaults, or report on one that runs.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "server")]
pub struct Server {
    #[argh(subcommand)]
    pub command: ServerCommand,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
pub enum ServerCommand {
    Start(Start),
    Report(super::report::Report),
}

/// Start a broker; --dev for a laptop.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "start")]
pub struct Start {
    /// loopback only, no authentication, data in ~/.narad/data, readable logs
    #[argh(switch)]
    dev: bool,
    /// port of the client API
    #[argh(option)]
    port: Option<String>,
    /// everything the node stores
    #[argh(option)]
    data_dir: Option<String>,
}

impl NodeFlags {
    pub fn sources(self, environment: Vec<(String, String)>) -> Result<Sources, Failure> {
        if self.addr.is_some() && self.port.is_some() {
            return Err(Failure::Usage("--addr and --port both name the port: give one of them".to_owned()));
        }
        let number = |flag: &str, text: &Option<String>| match text {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| {
                Failure::Usage(format!("{flag} {text:?} is not a port: write 1 to 65535, or 0 for any that is free"))
            }),
        };
        let (port, cluster_port) = (number("--port", &self.port)?, number("--cluster-port", &self.cluster_port)?);
        let no_pin = self.no_pin.then(|| "true".to_owned());
        let flags = [
            ("http.addr", self.addr),
            ("storage.data_dir", self.data_dir),
            ("cluster.node_id", self.node_id),
            ("log.level", self.log_level),
            ("log.format", self.log_format),
            ("runtime.shards", self.shards),
            ("runtime.cpus", self.cpus),
            ("runtime.no_pin", no_pin),
            ("runtime.control_cpu", self.control_cpu),
            ("runtime.spin_us", self.spin_us),
            ("runtime.shard_ports", self.shard_ports),
            ("runtime.memory", self.memory),
        ];
        let flags = flags.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        Ok(Sources { file: self.config, environment, flags, port, cluster_port, ..Sources::default() })
    }
}

/// Variables that are not UTF-8 cannot be ours.
pub(super) fn environment() -> Vec<(String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

pub fn serve(mut serve: Serve) -> Result<(), Failure> {
    run(Sources { restored: serve.restored, ..serve.node_flags().sources(environment())? })
}

pub fn start(command: Start) -> Result<(), Failure> {
    let flags = NodeFlags { port: command.port, data_dir: command.data_dir, ..NodeFlags::default() };
    let mut sources = flags.sources(environment())?;
    if command.dev {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
        let home = home.ok_or_else(|| Failure::Usage("HOME is not set: say where to store with --data-dir".to_owned()));
        sources.dev = true;
        sources.dev_data_dir = match sources.flags.iter().any(|(key, _)| *key == "storage.data_dir") {
            true => None,
            false => Some(PathBuf::from(home?).join(".narad/data")),
        };
    }
    run(sources)
}

fn run(sources: Sources) -> Result<(), Failure> {
    let config = config::load(&sources).map_err(|error| Failure::Request(error.to_string()))?;
    let dev = config.dev;
    telemetry::install_logging(config.log.level, config.log.format).map_err(Failure::Request)?;
    let mut say = |text: String| drop(writeln!(io::stderr(), "narad: {text}"));
    let prepared = node::prepare(config, &mut say).map_err(|refusal| Failure::Request(refusal.line()))?;
    if dev {
        let banner = banner(&prepared.http_addr.to_string(), &prepared.data.root.display().to_string());
        writeln!(io::stdout(), "{banner}")?;
    }
    let ended = node::run(prepared).map_err(Failure::Request);
    telemetry::say_the_rest(); // above the last line, which says why
    ended
}

fn banner(address: &str, data_dir: &str) -> String {
    format!(
        "narad  dev mode: auth OFF, bound to loopback only\n\
         \x20 api   http://{address}\n\
         \x20 data  {data_dir}\n\
         \x20 try   narad -s http://{address} topic add hello && narad -s http://{address} pub hello 'first message'"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> NodeFlags {
        Serve::from_args(&["narad", "serve"], args).unwrap().node_flags()
    }

    #[test]
    fn every_flag_reaches_its_setting() {
        let serve = parse(&[
            "--addr",
            "127.0.0.1:1",
            "--data-dir",
            "/d",
            "--node-id",
            "n",
            "--log-level",
            "warn",
            "--log-format",
            "text",
            "--cpus",
            "2-3",
            "--control-cpu",
            "1",
            "--spin-us",
            "5",
            "--memory",
            "2GiB",
            "--shard-ports",
            "9001",
        ]);
        let config = config::load(&serve.sources(Vec::new()).unwrap()).unwrap();
        assert_eq!(config.http.addr.to_string(), "127.0.0.1:1");
        assert_eq!(config.storage.data_dir, PathBuf::from("/d"));
        assert_eq!(config.cluster.node_id.as_deref(), Some("n"));
        assert_eq!((config.log.level, config.log.format), (config::LogLevel::Warn, config::LogFormat::Text));
        assert_eq!(config.runtime.cpus.unwrap().to_string(), "2-3");
        assert_eq!((config.runtime.control_cpu, config.runtime.spin_us), (Some(1), Some(5)));
        assert_eq!((config.runtime.memory_bytes, config.runtime.shard_ports), (Some(2 << 30), Some(9001)));
        let config =
            config::load(&parse(&["--shards", "4", "--no-pin", "--port", "9"]).sources(Vec::new()).unwrap()).unwrap();
        assert_eq!((config.runtime.shards, config.runtime.no_pin, config.http.addr.port), (Some(4), true, 9));
        assert!(matches!(parse(&["--addr", ":1", "--port", "2"]).sources(Vec::new()), Err(Failure::Usage(_))));
        let Err(Failure::Usage(text)) = parse(&["--port", "70000"]).sources(Vec::new()) else { panic!("accepted") };
        assert!(text.starts_with("--port \"70000\" is not a port: write 1 to 65535"), "{text}");
    }

    #[test]
    fn every_flag_is_on_the_page_of_settings_and_every_flag_there_exists() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md");
        let page = std::fs::read_to_string(path).unwrap();
        let flags: Vec<&str> = Serve::get_args_info().flags.iter().map(|flag| flag.long).collect();
        for flag in flags.iter().filter(|flag| **flag != "--help") {
            assert!(page.contains(&format!("`{flag}`")) || page.contains(&format!("`{flag} ")), "{flag} is missing");
        }
        for row in page.lines().filter(|line| line.starts_with("| `")) {
            let key = row.split('`').nth(1).unwrap();
            let column = row.split('|').nth(3).unwrap().trim().trim_matches('`');
            assert!(column.is_empty() || flags.contains(&column), "{key}: there is no {column}");
            let own = format!("--{}", key.split_once('.').map_or(key, |(_, name)| name).replace('_', "-"));
            let own = if key.starts_with("log.") { format!("--{}", key.replace('.', "-")) } else { own };
            // Of the peer plane there is only a flag for the port.
            let has_flag = flags.contains(&own.as_str()) && key != "cluster.addr";
            assert_eq!(column, if has_flag { own } else { String::new() }, "{key}");
        }
    }

    #[test]
    fn the_banner_begins_as_documented() {
        assert!(banner("127.0.0.1:7942", "/d").starts_with("narad  dev mode: auth OFF, bound to loopback only\n"));
    }
}
