//! A load on one or several threads, and somebody who looks on at its edges.

use std::sync::{Arc, Barrier, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::engine::{Engine, Group, Pace, Timing};
use super::tally::Tally;
use super::{cpu, Clock, Protocol};
use crate::report::Progress;
use crate::run::Failure;

/// How often the looker-on sees whether the load is over.
const LOOK: Duration = Duration::from_millis(5);

/// How a load runs.
#[derive(Clone, Debug)]
pub struct Drive {
    pub timing: Timing,
    /// Load threads, at least 1.
    pub threads: usize,
    /// Each group has threads of its own, those behind the first at a lower priority: a group that is overdriven does
    /// not keep the first one's answers waiting in here.
    pub apart: bool,
    /// CPUs that they are pinned to.
    pub cpus: Option<Vec<usize>>,
    /// They poll instead of sleeping: their own waking up is not part of a latency.
    pub spin: bool,
    /// For the progress line.
    pub title: String,
}

/// A moment of a run at which costs are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The measured time begins.
    Start,
    /// It is over, or there was nothing left to do.
    End,
}

/// What a load did, by group, and the protocols that did it.
pub struct Driven<P> {
    pub tallies: Vec<Tally>,
    pub protocols: Vec<P>,
}

type ThreadResult<P> = Result<(Vec<Tally>, Vec<P>), Failure>;

/// Runs the groups' connections, spread over the threads. `observe` is called on this thread at both edges of the
/// measured time.
pub fn drive<P: Protocol + Send + 'static>(
    drive: &Drive,
    groups: Vec<Group<P>>,
    observe: &mut dyn FnMut(Edge) -> Result<(), Failure>,
) -> Result<Driven<P>, Failure> {
    let shares = match drive.apart {
        true => split_apart(groups, drive.threads),
        false => split(groups, drive.threads),
    };
    let threads = shares.len();
    let barrier = Arc::new(Barrier::new(threads + 1));
    let clock: Arc<OnceLock<Clock>> = Arc::default();
    let mut handles = Vec::new();
    for (number, share) in shares.into_iter().enumerate() {
        let (barrier, clock, timing, spin) = (barrier.clone(), clock.clone(), drive.timing, drive.spin);
        let cpus = drive.cpus.clone();
        let gives_way = drive.apart && number >= drive.threads.max(1);
        handles.push(std::thread::spawn(move || -> ThreadResult<P> {
            let pinned = cpus.map_or(Ok(()), |cpus| cpu::pin(&cpus[number % cpus.len()..][..1], "--load-cpu"));
            if gives_way {
                cpu::lower_priority();
            }
            let engine = pinned.and_then(|()| Engine::connect(share, spin));
            barrier.wait();
            barrier.wait();
            let clock = clock.get().copied().ok_or_else(|| Failure("the run has no start".into()))?;
            Ok(engine?.run(clock, &timing))
        }));
    }
    barrier.wait();
    let start = Clock::new(Instant::now() + drive.timing.warmup);
    let _ = clock.set(start);
    barrier.wait();

    let mut watch = Watch::new(drive);
    let end = drive.timing.end();
    let over = |handles: &[JoinHandle<ThreadResult<P>>]| handles.iter().all(JoinHandle::is_finished);
    while start.now() < 0 && !over(&handles) {
        std::thread::sleep(LOOK.min(Duration::from_nanos(start.now().min(0).unsigned_abs())));
        watch.show(start.now());
    }
    let mut observed = observe(Edge::Start);
    while start.now() < end && !over(&handles) {
        std::thread::sleep(LOOK);
        watch.show(start.now());
    }
    observed = observed.and_then(|()| observe(Edge::End));
    drop(watch);

    let mut driven: Option<Driven<P>> = None;
    let mut failure = observed.err();
    for handle in handles {
        match handle.join() {
            Ok(Ok((tallies, protocols))) => match &mut driven {
                None => driven = Some(Driven { tallies, protocols }),
                Some(sum) => {
                    sum.tallies.iter_mut().zip(&tallies).for_each(|(sum, more)| sum.merge(more));
                    sum.protocols.extend(protocols);
                }
            },
            Ok(Err(error)) => failure = failure.or(Some(error)),
            Err(_) => failure = failure.or_else(|| Some(Failure("a load thread panicked".into()))),
        }
    }
    match (failure, driven) {
        (Some(failure), _) => Err(failure),
        (None, Some(driven)) => Ok(driven),
        (None, None) => Err(Failure("no load thread ran".into())),
    }
}

/// Deals the connections out to the threads; an open loop's rate goes with them. Every share has all groups, some of them
/// perhaps empty.
fn split<P>(groups: Vec<Group<P>>, threads: usize) -> Vec<Vec<Group<P>>> {
    let connections: usize = groups.iter().map(|group| group.protocols.len()).sum();
    let threads = threads.clamp(1, connections.max(1));
    let mut shares: Vec<Vec<Group<P>>> = (0..threads).map(|_| Vec::new()).collect();
    for (first, group) in groups.into_iter().enumerate() {
        let total = group.protocols.len().max(1) as f64;
        let base: Vec<usize> = shares.iter().map(Vec::len).collect();
        for share in &mut shares {
            let addresses = group.addresses.clone();
            let (name, until) = (group.name.clone(), group.until);
            share.push(Group { name, addresses, protocols: Vec::new(), pace: Pace::Closed, until });
        }
        for (number, protocol) in group.protocols.into_iter().enumerate() {
            let thread = (first + number) % threads;
            let part = &mut shares[thread][base[thread]];
            // Each thread begins at another address, so that they are used alike.
            if part.protocols.is_empty() {
                part.addresses.rotate_left(number % group.addresses.len());
            }
            part.protocols.push(protocol);
        }
        for (share, base) in shares.iter_mut().zip(base) {
            let part = &mut share[base];
            if let (Pace::Open { interval }, false) = (group.pace, part.protocols.is_empty()) {
                part.pace = Pace::Open { interval: interval * total / part.protocols.len() as f64 };
            }
        }
    }
    shares
}

/// As [`split`], `threads` for each group.
fn split_apart<P>(groups: Vec<Group<P>>, threads: usize) -> Vec<Vec<Group<P>>> {
    let empty = |group: &Group<P>| Group {
        name: group.name.clone(),
        addresses: group.addresses.clone(),
        protocols: Vec::new(),
        pace: Pace::Closed,
        until: group.until,
    };
    let outline: Vec<Group<P>> = groups.iter().map(empty).collect();
    let of_one = |(at, group): (usize, Group<P>)| {
        let mut all: Vec<Group<P>> = outline.iter().map(empty).collect();
        all[at] = group;
        split(all, threads)
    };
    groups.into_iter().enumerate().flat_map(of_one).collect()
}

/// Says how far a load is, once a second.
struct Watch {
    progress: Progress,
    title: String,
    total_s: Option<f64>,
    shown_s: i64,
}

impl Watch {
    fn new(drive: &Drive) -> Watch {
        let total_s = drive.timing.duration.map(|duration| duration.as_secs_f64());
        Watch { progress: Progress::new(), title: drive.title.clone(), total_s, shown_s: i64::MIN }
    }

    fn show(&mut self, now: i64) {
        let second = now.div_euclid(1_000_000_000);
        if second == self.shown_s {
            return;
        }
        self.shown_s = second;
        let what = match self.total_s {
            _ if second < 0 => "warming up".to_owned(),
            Some(total) => format!("{second} of {total:.0} s"),
            None => format!("{second} s"),
        };
        self.progress.show(&format!("{}: {what}", self.title));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Until;

    #[test]
    fn connections_rate_and_addresses_are_dealt_out_evenly() {
        let addresses = ["127.0.0.1:1", "127.0.0.1:2"].map(|text| text.parse().unwrap()).to_vec();
        let pace = Pace::Open { interval: 100.0 };
        let group = |n: usize| Group {
            name: "g".into(),
            addresses: addresses.clone(),
            protocols: (0..n).collect::<Vec<usize>>(),
            pace,
            until: Until::End,
        };
        let shares = split(vec![group(4), group(1)], 2);
        let sizes: Vec<Vec<usize>> =
            shares.iter().map(|share| share.iter().map(|group| group.protocols.len()).collect()).collect();
        assert_eq!(sizes, [[2, 0], [2, 1]], "the second group begins at the second thread");
        let rate: f64 = shares.iter().map(|share| &share[0].pace).map(per_ns).sum();
        assert!((rate - 0.01).abs() < 1e-12);
        assert_eq!((shares[0][1].pace, shares[1][1].pace), (Pace::Closed, pace));
        assert_ne!(shares[0][0].addresses[0], shares[1][0].addresses[0]);
    }

    #[test]
    fn apart_means_that_no_thread_has_connections_of_two_groups() {
        let group = |name: &str, n: usize| Group {
            name: name.into(),
            addresses: vec!["127.0.0.1:1".parse().unwrap()],
            protocols: (0..n).collect::<Vec<usize>>(),
            pace: Pace::Closed,
            until: Until::End,
        };
        let shares = split_apart(vec![group("a", 3), group("b", 1)], 2);
        let sizes: Vec<Vec<usize>> =
            shares.iter().map(|share| share.iter().map(|group| group.protocols.len()).collect()).collect();
        assert_eq!(sizes, [[2, 0], [1, 0], [0, 1]]);
    }

    fn per_ns(pace: &Pace) -> f64 {
        match pace {
            Pace::Open { interval } => 1.0 / interval,
            Pace::Closed => 0.0,
        }
    }
}
