//! Rows about one message and one lease. Consumers sit on other nodes than the one that owns the partition.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::site::{Answer, Site};

const VISIBILITY: Duration = Duration::from_millis(2_000);
/// A lapse is noticed within a second, and this machine has other things to do.
const NOTICED: Duration = Duration::from_millis(2_500);
const NOTHING: Duration = Duration::ZERO;

fn visibility_ms() -> u64 {
    VISIBILITY.as_millis() as u64
}

/// Asks once a second, as a client does, while the answer says to.
fn tried_again(ask: impl Fn() -> Answer, again: impl Fn(&Answer) -> bool) -> Answer {
    let began = Instant::now();
    let mut answer = ask();
    while again(&answer) && began.elapsed() < Duration::from_secs(15) {
        thread::sleep(Duration::from_secs(1));
        answer = ask();
    }
    answer
}

/// Node 1 owns the partition, 2 and 3 are called.
pub fn a_consumer_dies(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(visibility_ms())?;
    let partition = site.partition_of(0)?;
    site.store(1, partition, "held")?;
    let leased = Instant::now();
    let held = site.take(1, Some(partition), Duration::from_secs(5))?;
    let busy = site.consume(2, Some(partition), NOTHING);
    site.check("while it is held nobody else gets it", busy.status == 204, &busy);
    // The consumer is gone: its connection was closed with the call.
    let again = site.consume(2, Some(partition), VISIBILITY + NOTICED);
    let after = leased.elapsed();
    let same = again.message().is_some_and(|one| one.place == held.place && one.payload == held.payload);
    let in_time = after >= VISIBILITY && after <= VISIBILITY + NOTICED;
    site.check(
        "the same message comes again after its visibility timeout",
        same && in_time,
        format!("{again}; {after:.2?} after the lease"),
    );
    let Some(again) = again.message() else { return Ok(()) };
    let acked = site.ack(1, &again, "");
    site.check("its ack is taken", acked.status == 204, &acked);
    let rest = site.consume(1, Some(partition), VISIBILITY + NOTICED);
    site.check("acked, it does not come again", rest.status == 204, &rest);
    Ok(())
}

pub fn a_handler_outlives_its_lease(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(visibility_ms())?;
    let partition = site.partition_of(0)?;
    site.store(1, partition, "slow work")?;
    let late = site.take(1, Some(partition), Duration::from_secs(5))?;
    let other = site.take(2, Some(partition), VISIBILITY + NOTICED)?;
    site.check("somebody else gets the message", other.place == late.place, format!("{:?}", other.place));
    for (more, what) in [("", "ack"), ("&extend=true", "extend"), ("&extend=0", "nack")] {
        let answer = site.ack(1, &late, more);
        let kept = answer.status == 410 && answer.text.contains("receipt handle no longer matches");
        site.check(&format!("the late {what} changes nothing"), kept, &answer);
    }
    // Whoever goes on working says so.
    for _ in 0..3 {
        thread::sleep(VISIBILITY / 2);
        let extended = site.ack(2, &other, "&extend=true");
        if extended.status != 204 {
            site.check("a lease that is extended goes on", false, &extended);
        }
    }
    let busy = site.consume(1, Some(partition), NOTHING);
    site.check("a lease that is extended outlives its visibility timeout", busy.status == 204, &busy);
    let acked = site.ack(2, &other, "");
    site.check("the ack of the extended lease is taken", acked.status == 204, &acked);
    Ok(())
}

/// The owner is gone: an ack that cannot reach it is not applied.
pub fn an_ack_is_answered_503(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(visibility_ms())?;
    let partition = site.partition_of(0)?;
    site.store(1, partition, "unacked")?;
    let held = site.take(1, Some(partition), Duration::from_secs(5))?;
    site.cluster.act("kill", 0)?;
    // What was sent into a connection that has just died may have been applied, for all that its sender knows.
    let first = site.ack(1, &held, "");
    site.check("the first ack after a crash is unknown, or not applied", matches!(first.status, 502 | 503), &first);
    // Each shard of the node that is asked finds out for itself.
    let second = tried_again(|| site.ack(1, &held, ""), |answer| answer.status == 502);
    let kept =
        second.status == 503 && second.text.contains("partition owner is down") && second.retry_after().is_some();
    site.check("an ack to an owner that cannot be reached is not applied, and says when to come back", kept, &second);
    site.cluster.act("start", 0)?;
    let away = |answer: &Answer| matches!(answer.status, 502 | 503);
    let again = tried_again(|| site.consume(1, Some(partition), VISIBILITY + NOTICED), away);
    let came = again.message().is_some_and(|one| one.place == held.place);
    site.check("the message comes again", came, &again);
    let retry = tried_again(|| site.ack(1, &held, ""), away);
    site.check("the retried ack finds its lease gone", retry.status == 410, &retry);
    let Some(again) = again.message() else { return Ok(()) };
    let acked = site.ack(1, &again, "");
    site.check("the ack of the new lease is taken", acked.status == 204, &acked);
    Ok(())
}

/// The owner takes the ack and does not answer.
pub fn an_ack_is_lost(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    let partition = site.partition_of(0)?;
    site.store(1, partition, "one")?;
    let held = site.take(1, Some(partition), Duration::from_secs(5))?;
    site.cluster.act("pause", 0)?;
    let unanswered = site.ack(1, &held, "");
    site.cluster.act("resume", 0)?;
    let kept = unanswered.status == 502 && unanswered.text.contains("may have been applied");
    site.check("an ack that the owner does not answer is unknown", kept, &unanswered);
    site.check(
        "and says so within its budget",
        unanswered.took < Duration::from_secs(4),
        format!("{:.2?}", unanswered.took),
    );
    site.cluster.wait_all_ready(Duration::from_secs(30))?;
    let retry = site.ack(1, &held, "");
    site.check("the retry is taken, or finds that the first one was", matches!(retry.status, 204 | 410), &retry);
    let rest = site.consume(1, Some(partition), Duration::from_secs(12));
    site.check("either way the message is settled", rest.status == 204, &rest);
    Ok(())
}
