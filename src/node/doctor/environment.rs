//! Bare metal, a virtual machine or a container: judged as `kernel-tuning/lib/machine.sh` judges it, so that both leave
//! the same things alone.

use super::Machine;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Environment {
    BareMetal,
    VirtualMachine,
    /// The kernel, its CPUs and interrupts are the host's.
    Container,
    /// Neither CPU flags nor firmware tell.
    Unknown,
}

const CONTAINER_MARKS: [&str; 3] = [".dockerenv", "run/.containerenv", "run/systemd/container"];
const CONTAINER_GROUPS: [&str; 5] = ["docker", "kubepods", "libpod", "lxc", "containerd"];
const HYPERVISOR_FIRMWARE: [&str; 8] =
    ["QEMU", "KVM", "VMware", "VirtualBox", "Xen", "Virtual Machine", "Google Compute Engine", "OpenStack"];

impl Environment {
    pub fn of(machine: &Machine) -> Environment {
        let group = machine.proc("1/cgroup").unwrap_or_default();
        if CONTAINER_MARKS.iter().any(|mark| machine.root.join(mark).exists())
            || CONTAINER_GROUPS.iter().any(|name| group.contains(name))
        {
            return Environment::Container;
        }
        if machine.sys("hypervisor/type").is_some() {
            return Environment::VirtualMachine;
        }
        // On x86 every hypervisor that does not hide sets this bit, and no real machine has it.
        let cpuinfo = machine.proc("cpuinfo").unwrap_or_default();
        if let Some(flags) = cpuinfo.lines().find(|line| line.starts_with("flags")) {
            return match flags.split_whitespace().any(|flag| flag == "hypervisor") {
                true => Environment::VirtualMachine,
                false => Environment::BareMetal,
            };
        }
        let firmware = ["sys_vendor", "product_name"].map(|name| machine.sys(format!("class/dmi/id/{name}")));
        match firmware.iter().flatten().any(|text| HYPERVISOR_FIRMWARE.iter().any(|name| text.contains(name))) {
            true => Environment::VirtualMachine,
            false => Environment::Unknown,
        }
    }

    /// Why CPUs, interrupts and boot parameters are not ours to judge, if they are not.
    pub fn why_not_cpus(self) -> Option<&'static str> {
        match self {
            Environment::BareMetal => None,
            Environment::VirtualMachine => Some("a virtual machine's CPUs are no cores: tune the host"),
            Environment::Container => Some("this is a container: look on the host"),
            Environment::Unknown => Some("neither CPU flags nor firmware tell whether this is a virtual machine"),
        }
    }
}
