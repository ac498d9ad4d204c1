//! The process: its start, its threads, its end.
//!
//! [`prepare`] checks the machine and opens the data directory, or refuses with a [`Refusal`]; [`run`] starts the threads
//! and waits for their end. `narad doctor` ([`examine`]) asks the same questions without starting anything.
//!
//! | files | what they are about |
//! |---|---|
//! | `prepare`, `refusal` | what may refuse a start, in order |
//! | `topology`, `cgroup`, `placement`, `machine`, `filesystem`, `ports` | what the machine offers |
//! | `data_dir`, `lock`, `traces` | the data directory: layout, who holds it, what a refused start takes back |
//! | `founding`, `peer_plane`, `certificates` | a lone node, or one of a cluster |
//! | `run`, `shard_thread`, `control_thread` | the threads |
//! | `serving`, `broker`, `door` | a shard's listener, what HTTP asks of it, what other nodes ask of it |
//! | `cluster`, `peer_reports`, `peer_watch` | the control plane and the other nodes, on the control thread |
//! | `figures`, `status` | what operators ask |
//! | `stopping`, `balancers`, `notify` | the end, and who is told of it |
//! | `doctor` | `narad doctor` |

mod balancers;
mod broker;
mod certificates;
mod cgroup;
mod cluster;
mod control_thread;
mod data_dir;
mod disk_state;
pub(crate) mod doctor;
mod door;
mod figures;
mod filesystem;
mod founding;
pub(crate) mod fuzz;
mod lock;
mod machine;
mod notify;
mod peer_plane;
mod peer_reports;
mod peer_watch;
mod placement;
mod ports;
mod prepare;
mod refusal;
mod run;
pub(crate) mod serving;
mod shard_thread;
mod status;
mod stopping;
mod topology;
mod traces;
mod trust;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) mod tests_support;

pub use cgroup::Limits as CgroupLimits;
pub use doctor::{examine, Report, Status};
pub use placement::{plan_cpus, CpuPlan};
pub use prepare::{prepare, Allowance, Prepared};
pub use refusal::Refusal;
pub use run::run;
pub use topology::{remarks, Topology};
