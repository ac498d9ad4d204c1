//! Rows about a node, a disk or a quorum. Node 1 is the one that suffers.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::site::{Answer, Site};
use crate::load::VISIBILITY_MS;
use crate::rolling;

/// Records of an owner that does not answer go to its siblings after 3 s, and then have to be committed and handed out.
const REROUTED: Duration = Duration::from_secs(10);
/// A node is dead when it has been silent for 30 s; its verdict is made on a round of 10 s.
const MARKED_DEAD: Duration = Duration::from_secs(45);
const QUIET: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_secs(5);

fn names(prefix: &str, count: usize) -> BTreeSet<String> {
    (0..count).map(|number| format!("{prefix}-{number}")).collect()
}

fn statuses(answers: &[Answer]) -> String {
    let others: Vec<String> = answers.iter().filter(|answer| answer.status != 202).map(Answer::to_string).collect();
    format!("{} of {} answered 202 {}", answers.len() - others.len(), answers.len(), others.join("; "))
}

/// Produces each of `payloads` through one of `nodes`, in turn, and checks that all are accepted.
fn accept(site: &mut Site<'_>, nodes: &[usize], payloads: &BTreeSet<String>, promise: &str) {
    let turn = payloads.iter().enumerate();
    let answers: Vec<Answer> = turn.map(|(at, text)| site.produce(nodes[at % nodes.len()], None, text)).collect();
    site.check(promise, answers.iter().all(|answer| answer.status == 202), statuses(&answers));
}

/// Takes everything through `node` and checks that all of `wanted` came.
fn arrive(site: &mut Site<'_>, node: usize, wanted: &BTreeSet<String>, quiet: Duration, promise: &str) {
    let began = Instant::now();
    let came: Vec<String> = site.drain(node, quiet);
    let missing: Vec<&String> = wanted.iter().filter(|one| !came.contains(one)).collect();
    let twice = came.len() - came.iter().collect::<BTreeSet<_>>().len();
    let took = began.elapsed().saturating_sub(quiet);
    let seen = format!("{} of {}, {twice} twice, within {took:.1?}", wanted.len() - missing.len(), wanted.len());
    site.check(promise, missing.is_empty(), format!("{seen} {missing:?}"));
}

/// What comes until all of `wanted` has, or nothing more does.
fn drain_all(site: &Site<'_>, node: usize, wanted: &BTreeSet<String>) -> BTreeSet<String> {
    let enough = |came: &[String]| wanted.iter().all(|one| came.contains(one));
    site.drain_until(node, REROUTED, enough).into_iter().collect()
}

pub fn a_produce_times_out(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    site.cluster.act("pause", 0)?;
    let began = Instant::now();
    let mut impatient = site.client(0, Duration::from_secs(1));
    let target = format!("/v1/topics/{}/produce", site.topic);
    let first = Answer::of(began, impatient.post(&target, b"paid"));
    site.check("a node that hangs does not answer", first.status == 0, &first);
    let retry = site.produce(1, None, "paid");
    site.check("the retry on another node is accepted", retry.status == 202, &retry);
    site.cluster.act("resume", 0)?;
    site.cluster.wait_all_ready(Duration::from_secs(30))?;
    let came = site.drain(2, SOON);
    let kept = matches!(came.len(), 1 | 2) && came.iter().all(|one| one == "paid");
    site.check("the message comes, and at most once for each attempt", kept, format!("{} copies", came.len()));
    Ok(())
}

pub fn a_process_crashes(site: &mut Site<'_>) -> io::Result<()> {
    // No lease lapses here by itself.
    site.make_topic(60_000)?;
    let partition = site.partition_of(0)?;
    for text in ["acked", "leased", "stored"] {
        site.store(1, partition, text)?;
    }
    let acked = site.take(1, Some(partition), SOON)?;
    let answer = site.ack(1, &acked, "");
    site.check("before the crash one message is acked", answer.status == 204, &answer);
    let leased = site.take(2, Some(partition), SOON)?;
    thread::sleep(Duration::from_millis(400));
    // Of another topic, where nothing comes: a message that is on its way to the request is leased when the node dies.
    site.make_another("idle")?;
    let in_flight = {
        let (topic, mut client) = (format!("{}-idle", site.topic), site.client(0, Duration::from_secs(20)));
        thread::spawn(move || {
            let began = Instant::now();
            Answer::of(began, client.get(&format!("/v1/topics/{topic}/consume?wait=10s")))
        })
    };
    thread::sleep(Duration::from_millis(200));
    site.cluster.act("kill", 0)?;
    let in_flight = in_flight.join().map_err(|_| io::Error::other("a client thread panicked"))?;
    site.check("a request in flight to it fails", in_flight.status == 0, &in_flight);
    let wanted = names("during", 20);
    accept(site, &[1, 2], &wanted, "the other nodes accept");
    let pinned = site.consume(1, Some(partition), Duration::ZERO);
    site.check("its partitions wait", matches!(pinned.status, 502 | 503), &pinned);
    site.cluster.act("start", 0)?;
    let came = site.drain(1, REROUTED);
    let kept = came.contains(&leased.payload) && came.iter().any(|one| one == "stored");
    site.check("what was leased or stored comes after the restart", kept, format!("{} messages", came.len()));
    let again = came.iter().any(|one| one == "acked");
    site.check("what was acked 400 ms before does not", !again, again);
    let missing: Vec<&String> = wanted.iter().filter(|one| !came.contains(one)).collect();
    site.check("no accepted message is missing", missing.is_empty(), format!("{missing:?} missing"));
    Ok(())
}

pub fn a_node_stays_down(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    let partition = site.partition_of(0)?;
    site.store(1, partition, "waits")?;
    let killed = Instant::now();
    site.cluster.act("kill", 0)?;
    let wanted = names("sibling", 60);
    accept(site, &[1, 2], &wanted, "the other nodes accept");
    let fell = Instant::now();
    let came: BTreeSet<String> = drain_all(site, 1, &wanted);
    let missing = wanted.difference(&came).count();
    site.check(
        "what was accepted for it goes to siblings",
        missing == 0,
        format!("{missing} missing after {:.1?}", fell.elapsed()),
    );
    let first = site.consume(1, Some(partition), Duration::ZERO);
    let (mut saw_502, mut last) = (first.status == 502, first.clone());
    site.check("a consume pinned to its partition gets no message", matches!(first.status, 502 | 503), &first);
    // The same figure that routes consumes says when it was marked dead.
    while killed.elapsed() < MARKED_DEAD && !marked_dead(site, 1)? {
        last = site.consume(1, Some(partition), Duration::ZERO);
        saw_502 |= last.status == 502;
        if !matches!(last.status, 502 | 503) {
            break;
        }
        thread::sleep(Duration::from_millis(500));
    }
    site.check("502 while nobody knows that it is dead", saw_502, &last);
    // Its shards hear of it a moment after the node does.
    let marked = Instant::now();
    let mut dead = site.consume(1, Some(partition), Duration::ZERO);
    while dead.status != 503 && marked.elapsed() < Duration::from_secs(2) {
        thread::sleep(Duration::from_millis(50));
        dead = site.consume(1, Some(partition), Duration::ZERO);
    }
    let kept = dead.status == 503 && dead.text.contains("partition owner is down");
    site.check("503 once it is marked dead", kept, format!("{dead}; {:.0?} after the crash", killed.elapsed()));
    let at_once = Instant::now();
    let more = names("at-once", 12);
    accept(site, &[1, 2], &more, "still the others accept");
    let came: BTreeSet<String> = drain_all(site, 2, &more);
    let missing = more.difference(&came).count();
    let kept = missing == 0 && at_once.elapsed() < QUIET;
    site.check(
        "what they accept for it goes to siblings at once",
        kept,
        format!("{missing} missing after {:.2?}", at_once.elapsed()),
    );
    site.cluster.act("start", 0)?;
    arrive(site, 1, &BTreeSet::from(["waits".to_owned()]), SOON, "what it had stored comes with it");
    Ok(())
}

fn marked_dead(site: &Site<'_>, by: usize) -> io::Result<bool> {
    let members = site.cluster.client(by).get("/v1/cluster/members")?.json();
    let listed = members["members"].as_array().cloned().unwrap_or_default();
    Ok(listed.iter().any(|one| one["id"] == "n1" && one["status"] == "dead"))
}

pub fn a_volume_is_destroyed(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    let (lost, other) = (site.partition_of(0)?, site.partition_of(1)?);
    site.store(1, lost, "on the volume")?;
    site.store(1, other, "elsewhere")?;
    site.cluster.act("kill", 0)?;
    for entry in fs::read_dir(site.cluster.data(0))? {
        let path = entry?.path();
        if path.is_dir() {
            fs::remove_dir_all(&path)?
        } else {
            fs::remove_file(&path)?
        }
    }
    let wanted = names("during", 20);
    accept(site, &[1, 2], &wanted, "produce goes on");
    let began = Instant::now();
    site.cluster.act("start", 0)?;
    site.check("the node rejoins empty under its id", true, format!("ready after {:.1?}", began.elapsed()));
    let mut wanted = wanted;
    wanted.insert("elsewhere".to_owned());
    let came = site.drain(1, REROUTED);
    let missing = wanted.iter().filter(|one| !came.contains(one)).count();
    site.check("nothing else is lost", missing == 0, format!("{missing} of {} missing", wanted.len()));
    let there = came.iter().any(|one| one == "on the volume");
    site.check("what lay on the volume never comes", !there, there);
    site.store(1, lost, "new")?;
    let new = site.take(2, Some(lost), SOON)?;
    site.check("its partitions serve again", new.payload == "new", format!("{:?} at {:?}", new.payload, new.place));
    let acked = site.ack(2, &new, "");
    site.check("and are acked", acked.status == 204, &acked);
    Ok(())
}

/// A log whose files are gone cannot keep what it takes: the broker treats it as failed, like one with a write error. The
/// remedy is what an operator does: the files come back from a copy, and the node is restarted.
pub fn an_ingress_log_fails(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    let partition = site.partition_of(0)?;
    site.store(0, partition, "before")?;
    thread::sleep(Duration::from_millis(500));
    let (log, copy) = (site.cluster.data(0).join("ingress"), site.cluster.data(0).join("ingress-copy"));
    copy_all(&log, &copy)?;
    fs::remove_dir_all(&log)?;
    thread::sleep(Duration::from_millis(1_500));
    let refused: Vec<Answer> = (0..5).map(|_| site.produce(0, None, "refused")).collect();
    let kept = refused.iter().all(|answer| answer.status == 500);
    site.check("every produce to that node is answered 500", kept, &refused[0]);
    fs::rename(&copy, &log)?;
    thread::sleep(Duration::from_millis(1_500));
    let still = site.produce(0, None, "refused");
    site.check("also once the cause is gone", still.status == 500, &still);
    let gauge = site.cluster.client(0).get("/metrics")?.text();
    let latched = gauge.lines().any(|line| line.starts_with("narad_ingress_wal_failed") && line.ends_with(" 1"));
    site.check("a metric shows it", latched, latched);
    let ready = site.cluster.is_ready(0);
    site.check("readiness is not touched", ready, ready);
    let wanted = names("elsewhere", 10);
    accept(site, &[1, 2], &wanted, "the other nodes accept, for its partitions too");
    let mut wanted = wanted;
    wanted.insert("before".to_owned());
    arrive(site, 0, &wanted, QUIET, "consume and ack through it go on");
    site.cluster.stop(0)?;
    site.cluster.act("start", 0)?;
    let healed = site.produce(0, None, "after");
    site.check("a restart mends it", healed.status == 202, &healed);
    arrive(site, 1, &BTreeSet::from(["after".to_owned()]), QUIET, "and what it takes comes");
    Ok(())
}

fn copy_all(from: &Path, to: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(to)?;
    for entry in fs::read_dir(from)? {
        let (from, to) = (entry?.path(), to);
        let to = to.join(from.file_name().unwrap_or_default());
        if from.is_dir() {
            copy_all(&from, &to)?;
        } else {
            fs::copy(&from, &to)?;
        }
    }
    Ok(())
}

/// What holds while the disk is full is looked at while it is full.
pub fn a_disk_is_full(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    let partition = site.partition_of(0)?;
    let before = names("before", 6);
    for text in &before {
        site.store(1, partition, text)?;
    }
    site.cluster.act("fill", 0)?;
    thread::sleep(Duration::from_millis(1_500));
    let refused = site.produce(0, None, "refused");
    let kept = refused.status == 503 && refused.retry_after().is_some();
    site.check("produce to that node is refused, and nothing stored", kept, &refused);
    let stored = site.committed(partition)?;
    let others = names("others", 6);
    accept(site, &[1, 2], &others, "the other nodes accept");
    let pinned = names("for-its-partition", 6);
    let answers: Vec<Answer> = pinned.iter().map(|text| site.produce(1, Some(partition), text)).collect();
    let kept = answers.iter().all(|answer| answer.status == 202);
    site.check("and what is meant for its partition as well", kept, statuses(&answers));
    let wanted: BTreeSet<String> = before.iter().chain(&others).chain(&pinned).cloned().collect();
    let began = Instant::now();
    let came = drain_all(site, 0, &wanted);
    let missing = wanted.difference(&came).count();
    let seen = format!("{missing} of {} missing after {:.1?}", wanted.len(), began.elapsed());
    site.check("all that is accepted or stored is handed out and acked through it, still full", missing == 0, seen);
    let now = site.committed(partition)?;
    site.check("it takes no commit of another node: those go to siblings", now == stored, format!("{stored}, {now}"));
    let still = site.produce(0, None, "refused");
    site.check("it is full to the end of that", still.status == 503, &still);
    // Longer than an ack may stay in memory: it has to be on the disk that is full.
    thread::sleep(Duration::from_millis(1_500));
    site.cluster.act("kill", 0)?;
    site.cluster.act("unfill", 0)?;
    site.cluster.act("start", 0)?;
    let again: Vec<String> = site.drain(1, QUIET).into_iter().filter(|one| wanted.contains(one)).collect();
    site.check("what was acked while it was full does not come back", again.is_empty(), format!("{again:?}"));
    site.cluster.act("fill", 0)?;
    thread::sleep(Duration::from_millis(1_500));
    site.cluster.act("unfill", 0)?;
    let freed = Instant::now();
    let mut healed = site.produce(0, None, "healed");
    while healed.status != 202 && freed.elapsed() < SOON {
        thread::sleep(Duration::from_millis(100));
        healed = site.produce(0, None, "healed");
    }
    site.check(
        "it heals by itself when there is room",
        healed.status == 202,
        format!("{healed}, {:.1?} after", freed.elapsed()),
    );
    let direct = site.store(1, partition, "direct");
    site.check("and takes commits of the others again", direct.is_ok(), format!("{direct:?}"));
    let wanted = BTreeSet::from(["healed".to_owned(), "direct".to_owned()]);
    let came = site.drain(2, REROUTED);
    let missing = wanted.iter().filter(|one| !came.contains(one)).count();
    site.check("nothing accepted is missing", missing == 0, format!("{missing} missing"));
    let refused = came.iter().any(|one| one == "refused");
    site.check("what was refused with 503 never comes", !refused, refused);
    Ok(())
}

pub fn the_quorum_is_lost(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(10_000)?;
    let own = site.partition_of(0)?;
    site.store(1, own, "own")?;
    // Node 1 survives.
    for node in 1..site.nodes() {
        site.cluster.act("kill", node)?;
    }
    let lost = Instant::now();
    let wanted = names("alone", 20);
    accept(site, &[0], &wanted, "the survivor goes on accepting what reaches it");
    let mut ready = Answer::of(Instant::now(), site.cluster.client(0).get("/readyz"));
    while ready.status == 200 && lost.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(100));
        ready = Answer::of(Instant::now(), site.cluster.client(0).get("/readyz"));
    }
    site.check("it is not ready any more", ready.status == 503, format!("{ready}; {:.1?} after", lost.elapsed()));
    let json = [("Content-Type", "application/json")];
    let began = Instant::now();
    let mut client = site.client(0, Duration::from_secs(20));
    let admin = Answer::of(began, client.request("POST", "/v1/topics", &json, b"{\"name\":\"no-quorum\"}"));
    site.check("a topic change is refused with 503", admin.status == 503, &admin);
    let after = site.produce(0, None, "alone-late");
    site.check("and a produce is still accepted", after.status == 202, &after);
    let taken = site.take(0, Some(own), SOON)?;
    let acked = site.ack(0, &taken, "");
    site.check("its own partitions are served", acked.status == 204, format!("{:?}, ack {acked}", taken.payload));
    site.cluster.spawn_all(1..site.nodes())?;
    let took = site.cluster.wait_all_ready(Duration::from_secs(60))?;
    site.check("it heals by itself when the voters are back", true, format!("all ready after {took:.1?}"));
    let mut wanted = wanted;
    wanted.extend(["alone-late".to_owned(), "own".to_owned()]);
    wanted.remove(&taken.payload);
    arrive(site, 1, &wanted, SOON, "nothing accepted is missing");
    Ok(())
}

pub fn a_rolling_restart(site: &mut Site<'_>) -> io::Result<()> {
    site.make_topic(VISIBILITY_MS)?;
    let (seen, restarts) = rolling::roll(site.cluster, &site.topic, site.rounds)?;
    for one in &restarts {
        println!(
            "    node {} stopped in {:.2?}, ready again {:.2?} later; {} calls ended well meanwhile",
            one.node + 1,
            one.stop,
            one.start,
            one.calls
        );
    }
    // A run in which nobody noticed anything proves nothing.
    let (calls, turns) = (seen.produces + seen.consumes + seen.acks, site.rounds as usize * site.nodes());
    let evidence =
        restarts.len() == turns && restarts.iter().all(|one| one.calls >= 20) && seen.retries >= turns as u64;
    let seen_text = format!("{calls} calls, {} retries, {} restarts", seen.retries, restarts.len());
    site.check("there is evidence", evidence && seen.accepted.len() >= 100 * turns, seen_text);
    let failed = seen.failed.iter().take(10).cloned().collect::<Vec<_>>().join("; ");
    site.check(
        "no call fails for a client that knows all nodes and tries again",
        seen.failed.is_empty(),
        format!("{} failed {failed}", seen.failed.len()),
    );
    let lost = seen.lost();
    site.check("nothing accepted is missing", lost == 0, format!("{lost} of {} missing", seen.accepted.len()));
    site.check(
        "nothing acked comes back",
        seen.came_back_after_ack == 0,
        format!("{} came back", seen.came_back_after_ack),
    );
    site.check("every message is whole", seen.damaged == 0, format!("{} damaged", seen.damaged));
    let share = seen.leases_returned as f64 / seen.acks.max(1) as f64;
    let (late, away) = (seen.leases_returned, seen.owners_away);
    let text = format!("{late} of {} acks came too late for their lease, {away} of them with 503", seen.acks);
    site.check("leases of the node that restarts return, and few of them", share < 0.02, text);
    Ok(())
}
