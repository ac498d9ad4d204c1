//! The header of every result: what it ran on. Whatever cannot be read is "unknown", never left out.

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::block::{self, Mount};

/// What a result ran on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// `model name` of `/proc/cpuinfo`.
    pub cpu_model: String,
    /// CPUs that are online, as a list (`0-3`).
    pub cpus_online: String,
    /// CPUs that this program may use: taskset, cpuset and container limits show here.
    pub cpus_allowed: String,
    /// Isolated from the scheduler at boot; empty where none.
    pub cpus_isolated: String,
    /// Frequency governors in use.
    pub governor: String,
    /// Whether a hypervisor is below.
    pub virtual_machine: bool,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Programs that wanted to run when this one started (one minute's load average).
    pub load_average: f64,
    /// Directory whose drive is described.
    pub directory: String,
    /// `ext4`, ...
    pub file_system: String,
    /// Options of the mount.
    pub mount_options: String,
    /// Name of the drive: `nvme0n1`; of a composed one with those below it: `dm-0 (sda, sdb)`.
    pub drive: String,
    /// Vendor and model.
    pub drive_model: String,
    /// `rotational` or `solid state`.
    pub drive_kind: String,
    /// `write back` (needs flushes) or `write through`.
    pub write_cache: String,
    /// Whether a single write can be forced to the medium, without a flush of everything.
    pub fua: String,
    /// I/O scheduler.
    pub io_scheduler: String,
    /// Whether the write cache survives a power cut.
    pub power_loss_protection: String,
}

const UNKNOWN: &str = "unknown";

fn line(path: &str) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_string()).unwrap_or_default()
}

fn or_unknown(text: Option<String>) -> String {
    text.filter(|text| !text.is_empty()).unwrap_or_else(|| UNKNOWN.into())
}

fn field(text: &str, name: &str) -> Option<String> {
    let value = |line: &str| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_string())
    };
    text.lines().find_map(value)
}

impl Machine {
    /// Reads it, for results whose data is in `dir`.
    pub fn read(dir: &Path) -> Machine {
        let cpuinfo = line("/proc/cpuinfo");
        let mount = block::mount_of(dir).unwrap_or_else(|| Mount { file_system: UNKNOWN.into(), ..Mount::default() });
        let mut machine = Machine {
            cpu_model: or_unknown(field(&cpuinfo, "model name").or_else(|| field(&cpuinfo, "CPU implementer"))),
            cpus_online: or_unknown(Some(line("/sys/devices/system/cpu/online"))),
            cpus_allowed: or_unknown(field(&line("/proc/self/status"), "Cpus_allowed_list")),
            cpus_isolated: line("/sys/devices/system/cpu/isolated"),
            governor: governors(),
            virtual_machine: field(&cpuinfo, "flags").is_some_and(|flags| flags.split(' ').any(|f| f == "hypervisor")),
            memory_bytes: memory_bytes(),
            kernel: or_unknown(Some(line("/proc/sys/kernel/osrelease"))),
            load_average: note_load(),
            directory: dir.display().to_string(),
            file_system: mount.file_system.clone(),
            mount_options: mount.options.clone(),
            ..Machine::default()
        };
        machine.read_drive(&mount);
        machine
    }

    fn read_drive(&mut self, mount: &Mount) {
        let drive = block::drive_of(mount);
        let attribute = |name: &str| drive.as_deref().and_then(|drive| block::attribute(drive, name));
        let name = drive.as_deref().and_then(|drive| Some(drive.file_name()?.to_string_lossy().into_owned()));
        let below = drive.as_deref().map(block::below).unwrap_or_default();
        self.drive = match (name, below.is_empty()) {
            (Some(name), true) => name,
            (Some(name), false) => format!("{name} ({})", below.join(", ")),
            (None, _) if mount.source.is_empty() => UNKNOWN.into(),
            (None, _) => format!("none that the kernel names ({})", mount.source),
        };
        let words = [attribute("device/vendor"), attribute("device/model")];
        let model = words.into_iter().flatten().filter(|word| !word.starts_with("0x")).collect::<Vec<_>>().join(" ");
        self.drive_model = match (model.is_empty(), self.drive.starts_with("vd")) {
            (false, _) => model,
            (true, true) => "virtio disk (the host's drive is not visible)".into(),
            (true, false) => UNKNOWN.into(),
        };
        self.drive_kind = match attribute("queue/rotational").as_deref() {
            Some("0") => "solid state as far as the kernel knows".into(),
            Some("1") => "rotational as far as the kernel knows".into(),
            _ => UNKNOWN.into(),
        };
        self.write_cache = or_unknown(attribute("queue/write_cache"));
        self.fua = match attribute("queue/fua").as_deref() {
            Some("1") => "yes".into(),
            Some("0") => "no: a durable write is a write and a flush".into(),
            _ => UNKNOWN.into(),
        };
        let scheduler = or_unknown(attribute("queue/scheduler"));
        let chosen = scheduler.split('[').nth(1).and_then(|text| text.split(']').next());
        self.io_scheduler = chosen.map_or(scheduler.clone(), str::to_string);
        self.power_loss_protection = match self.write_cache.as_str() {
            "write through" => "not needed: the drive reports no volatile write cache".into(),
            _ => "unknown: drives do not tell; look for it in the data sheet".into(),
        };
    }

    /// Label and text of each line of the header.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let isolated = if self.cpus_isolated.is_empty() { "none" } else { &self.cpus_isolated };
        let below = if self.virtual_machine { ", virtual machine" } else { "" };
        vec![
            ("CPU", format!("{}{below}", self.cpu_model)),
            ("CPUs", format!("online {}, allowed {}, isolated {isolated}", self.cpus_online, self.cpus_allowed)),
            ("governor", self.governor.clone()),
            ("memory", super::text::human(self.memory_bytes as f64, "B")),
            ("kernel", self.kernel.clone()),
            ("load average", format!("{:.2} at the start", self.load_average)),
            ("directory", self.directory.clone()),
            ("file system", format!("{} ({})", self.file_system, self.mount_options)),
            ("drive", format!("{}, {}, {}", self.drive, self.drive_model, self.drive_kind)),
            ("write cache", format!("{}; FUA {}; scheduler {}", self.write_cache, self.fua, self.io_scheduler)),
            ("power-loss protection", self.power_loss_protection.clone()),
        ]
    }

    /// What of it makes numbers doubtful, one sentence each.
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        if self.load_average > 0.5 {
            doubts.push(format!(
                "other programs were running (load average {:.2}): trust ratios of one run, not times",
                self.load_average
            ));
        }
        if self.governor.contains("powersave") || self.governor.contains("ondemand") {
            doubts.push(format!("the CPU governor is {}: set it to performance before you compare", self.governor));
        }
        if matches!(self.file_system.as_str(), "tmpfs" | "ramfs") {
            doubts.push(format!("{} is in memory: nothing measured on it is durable", self.directory));
        }
        if self.virtual_machine {
            doubts.push(
                "on a virtual machine the host decides what a flush means, and neighbours share the drive".into(),
            );
        }
        doubts
    }
}

/// The load average when this was first called: later ones contain this program's own load.
pub fn note_load() -> f64 {
    static AT_START: OnceLock<f64> = OnceLock::new();
    let now = || line("/proc/loadavg").split(' ').next().and_then(|text| text.parse().ok());
    *AT_START.get_or_init(|| now().unwrap_or(0.0))
}

fn governors() -> String {
    let mut found: Vec<String> = fs::read_dir("/sys/devices/system/cpu")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("cpufreq/scaling_governor")).ok())
        .map(|text| text.trim().to_string())
        .collect();
    found.sort();
    found.dedup();
    if found.is_empty() {
        return "unknown (the kernel shows no frequency scaling)".into();
    }
    found.join(", ")
}

fn memory_bytes() -> u64 {
    let total = field(&line("/proc/meminfo"), "MemTotal").unwrap_or_default();
    total.split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_the_header_is_left_blank() {
        let machine = Machine::read(&std::env::temp_dir());
        for (label, text) in machine.lines() {
            assert!(!text.trim().is_empty(), "{label} is blank");
        }
        assert!(machine.memory_bytes > 0);
    }

    #[test]
    fn a_directory_that_is_not_there_gives_unknown() {
        let machine = Machine::read(Path::new("/nowhere/at/all"));
        assert_eq!((machine.file_system.as_str(), machine.drive.as_str()), (UNKNOWN, UNKNOWN));
    }

    #[test]
    fn memory_is_no_drive() {
        let machine = Machine { file_system: "tmpfs".into(), ..Machine::default() };
        assert!(machine.doubts().iter().any(|doubt| doubt.contains("durable")));
    }
}
