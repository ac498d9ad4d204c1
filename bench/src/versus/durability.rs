//! Is what was acknowledged still there after kill -9? Produces with a ledger, kills all of the server's processes under
//! load, starts it again, reads everything, and counts.
//!
//! A killed process loses what it kept in its own memory, not what it had written and not synced: that the machine keeps.
//! So the device's flushes for each acknowledged message stand beside it: an answer that waited for the device has a share
//! in a flush (or in a write with FUA, which no counter shows).

use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::measure::Bench;
use super::peer::{Peer, Role};
use super::worker::Stop;
use crate::load::ledger::Ledger;
use crate::load::narad::lock;
use crate::load::Timing;
use crate::run::Failure;

const CONNECTIONS: usize = 8;
/// The kill comes in the middle of the load.
const LOAD: Duration = Duration::from_secs(2);
const KILL_AFTER: Duration = Duration::from_millis(1500);
/// How long everything may take to come back.
const DRAIN: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proof {
    pub acknowledged: u64,
    /// Of these, read back after the kill.
    pub missing: u64,
    /// Stored and not acknowledged: legal.
    pub beyond: u64,
    pub duplicates: u64,
    /// Whose bytes had changed, or that nobody had sent: never legal.
    pub wrong: u64,
    /// Flushes of the device until the kill, everybody's.
    pub flushes: Option<f64>,
    /// From the start of the killed server until it answered.
    pub ready_after: Duration,
}

/// Kills a broker of ours and looks. `None` for one that somebody else runs.
pub fn prove(bench: &Bench, peer: &mut Peer) -> Result<Option<Proof>, Failure> {
    if peer.server.is_none() {
        return Ok(None);
    }
    let ledger = Arc::new(Mutex::new(Ledger::new(CONNECTIONS)));
    let role = Role::Produce { ledger: Some(ledger.clone()) };
    let group = peer.group(&role, CONNECTIONS, 1, bench.payloads(), &Stop::Never);
    let timing = Timing { warmup: Duration::ZERO, duration: Some(LOAD), grace: Duration::from_secs(1) };
    let before = bench.flushes();
    let begin = Instant::now();
    let (server, counter) = (peer.server.as_ref(), bench.flush_counter());
    let (loaded, killed) = std::thread::scope(|scope| {
        let killer = scope.spawn(move || {
            std::thread::sleep(KILL_AFTER);
            let after = counter();
            server.map_or(Ok(after), |server| server.kill().map(|()| after))
        });
        let loaded = bench.load(group, timing, format!("{}: kill -9 under load", peer.name), &mut |_| {});
        (loaded, killer.join().unwrap_or_else(|_| Err(Failure("the thread that kills panicked".into()))))
    });
    let (after, tally) = (killed?, loaded?);
    lock(&ledger).producing = 0;
    if lock(&ledger).confirmed == 0 {
        let why = tally.troubles().unwrap_or_else(|| format!("no answer within {} s", begin.elapsed().as_secs()));
        return Err(Failure(format!("{}: not one message was acknowledged: {why}", peer.name)));
    }
    let again = Instant::now();
    peer.server.as_mut().map_or(Ok(()), |server| server.restart())?;
    let ready_after = again.elapsed();
    peer.settle()?;

    let stop = Stop::Drained(ledger.clone(), Arc::new(AtomicI64::new(0)));
    let group = peer.group(&Role::Drain(ledger.clone()), CONNECTIONS, 1, bench.payloads(), &stop);
    let timing = Timing { warmup: Duration::ZERO, duration: Some(DRAIN), grace: Duration::ZERO };
    bench.load(group, timing, format!("{}: counting again", peer.name), &mut |_| {})?;
    // What was stored and not acknowledged may still be there.
    peer.stock.empty();
    let ledger = lock(&ledger);
    Ok(Some(Proof {
        acknowledged: ledger.confirmed,
        missing: ledger.missing,
        beyond: (ledger.seen + ledger.missing).saturating_sub(ledger.confirmed),
        duplicates: ledger.duplicates,
        wrong: ledger.damaged + ledger.invented + ledger.foreign,
        flushes: after.zip(before).map(|(after, before)| (after - before) as f64),
        ready_after,
    }))
}
