//! Threads of the product's own runtime, pinned where the measurement wants them.

use std::future::Future;
use std::thread::JoinHandle;
use std::time::Duration;

use narad::config::CpuSet;
use narad_shards::io::system;
use narad_shards::rt::ring::{run_shard_thread, Options, RingHandle};
use narad_shards::rt::Spin;

use crate::run::Failure;

/// The CPUs that `--cpus` names, or the first `count` that this process may use. Exactly `count` of them.
pub fn choose(asked: Option<&[usize]>, count: usize) -> Result<Vec<usize>, Failure> {
    let allowed: CpuSet = system::allowed_cpus()?.into_iter().collect();
    choose_from(asked, count, &allowed)
}

fn choose_from(asked: Option<&[usize]>, count: usize, allowed: &CpuSet) -> Result<Vec<usize>, Failure> {
    let plural = if count == 1 { "one CPU" } else { "two CPUs" };
    let cpus: CpuSet = match asked {
        Some(cpus) => cpus.iter().filter_map(|cpu| u32::try_from(*cpu).ok()).collect(),
        None => allowed.iter().take(count).collect(),
    };
    let forbidden = cpus.difference(allowed);
    if !forbidden.is_empty() {
        return Err(Failure(format!(
            "--cpus {cpus}: this process may not run on CPU {forbidden}; it may use {allowed} (taskset, cpuset or the \
             container decides): choose among those"
        )));
    }
    if cpus.len() != count {
        return Err(Failure(match asked {
            Some(_) => format!("--cpus {cpus}: this measurement takes {plural}; this process may use {allowed}"),
            None => format!(
                "this measurement needs {plural}, and this process may use {allowed} only: run it without taskset, or \
                 give the container more CPUs"
            ),
        }));
    }
    Ok(cpus.iter().map(|cpu| cpu as usize).collect())
}

/// Starts a thread on `cpu` that runs `main` as a shard's thread would. `spin` is how long it looks for work before it
/// sleeps.
pub fn start<T, F>(
    name: &str,
    cpu: usize,
    spin: Duration,
    main: impl FnOnce(RingHandle) -> F + Send + 'static,
) -> JoinHandle<Result<T, Failure>>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Failure>> + 'static,
{
    let name = name.to_owned();
    std::thread::spawn(move || {
        let options = Options { cpu: Some(cpu), spin: Spin::always(spin), ..Options::new(&name) };
        run_shard_thread(options, main)?
    })
}

/// The thread's result.
pub fn join<T>(thread: JoinHandle<Result<T, Failure>>) -> Result<T, Failure> {
    thread.join().unwrap_or_else(|panic| Err(Failure(narad_shards::rt::panic_text(&*panic))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_is_not_ours_is_refused_with_those_that_are() {
        let allowed = CpuSet::parse("2-3").expect("a list");
        let refused = |asked: Option<&[usize]>, count| choose_from(asked, count, &allowed).expect_err("refused").0;
        assert!(refused(Some(&[3, 7][..]), 2).contains("may not run on CPU 7; it may use 2-3"));
        assert!(refused(Some(&[3]), 2).contains("takes two CPUs; this process may use 2-3"));
        let one: CpuSet = [2].into_iter().collect();
        assert!(choose_from(None, 2, &one).expect_err("one only").0.contains("needs two CPUs"));
        assert_eq!(choose_from(None, 2, &allowed).expect("enough"), [2, 3]);
        assert_eq!(choose_from(Some(&[3]), 1, &allowed).expect("ours"), [3]);
    }
}
