//! A data directory as a kill would leave it: made by the broker, filled by its own WAL and log code, closed by nobody.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use narad_shards::io::{FillBudget, Slice};
use narad_shards::log::LogShared;
use narad_shards::meta::Incarnation;
use narad_shards::rt;
use narad_shards::wal::{NewWalRecord, Wal, WalOptions};

use super::{Kind, PATIENCE};
use crate::load::admin::Admin;
use crate::load::broker::Plan;
use crate::log::{batch_of, open};
use crate::parts::cores;
use crate::run::Failure;

const TOPIC: &str = "bench";
/// Partitions of a topic whose records lie in the WAL.
const WAL_PARTITIONS: u32 = 8;
/// Records of an append or a commit.
const BATCH: usize = 256;
const DISPATCH_MAX: Duration = Duration::from_secs(30);

/// Fills `data`.
pub fn directory(plan: &Plan, data: &Path, cpu: usize, kind: &Kind, payload: usize) -> Result<(), Failure> {
    let partitions = match kind {
        Kind::Logs { partitions, .. } => (*partitions).max(WAL_PARTITIONS),
        _ => WAL_PARTITIONS,
    };
    first_life(plan, data, partitions)?;
    let root = data.to_owned();
    match *kind {
        Kind::Empty => Ok(()),
        Kind::Wal { bytes } => {
            let store_id = read_hex(&data.join("store-id"))?;
            let incarnation = Incarnation(read_hex(&data.join("topics").join(TOPIC).join("incarnation"))?);
            cores::join(cores::start("prepare", cpu, Duration::ZERO, move |handle| async move {
                let disk = handle.disk(&root, true)?;
                let options = WalOptions::new(disk, root.join("ingress/0"), 0, store_id);
                append(Wal::open(options).await?, incarnation, bytes, payload).await
            }))
        }
        Kind::Logs { partitions, bytes } => {
            cores::join(cores::start("prepare", cpu, Duration::ZERO, move |handle| async move {
                let disk = handle.disk(&root, true)?;
                let shared = LogShared::new(1 << 20, FillBudget::of_shard(1));
                let body = Slice::copy_from(&vec![0x61; payload]);
                for partition in 0..partitions {
                    let dir = root.join("topics").join(TOPIC).join(format!("p{partition:05}"));
                    let (log, combiner) = open(&disk, &dir, &shared).await?;
                    while log.size_bytes() < bytes {
                        let records = BATCH.min(((bytes - log.size_bytes()) as usize / payload).max(1));
                        let committed = combiner.commit(batch_of(&body, records, partition as usize)).await;
                        committed.map_err(|error| Failure(format!("cannot fill {}: {error}", dir.display())))?;
                    }
                }
                Ok(())
            }))
        }
    }
}

/// The broker makes the directory and the topic, and commits one record: then the topic's directory is there.
fn first_life(plan: &Plan, data: &Path, partitions: u32) -> Result<(), Failure> {
    let broker = plan.start_on(data, PATIENCE)?;
    let admin = Admin::new(&broker.target()?);
    admin.ensure_topic(TOPIC, partitions)?;
    let reply = admin.request("POST", &format!("/v1/topics/{TOPIC}/produce"), "{}")?;
    if reply.status != 202 {
        let text = String::from_utf8_lossy(&reply.body);
        return Err(Failure(format!("the broker answered a produce with {} {text}", reply.status)));
    }
    let marker = data.join("topics").join(TOPIC).join("incarnation");
    let start = Instant::now();
    while !marker.is_file() {
        if start.elapsed() > DISPATCH_MAX {
            return Err(Failure(format!("the broker made no {} within 30 s", marker.display())));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    // The record's commit and the checkpoint behind it.
    std::thread::sleep(Duration::from_millis(500));
    broker.kill();
    Ok(())
}

fn read_hex(path: &PathBuf) -> Result<u64, Failure> {
    let text = std::fs::read_to_string(path)?;
    u64::from_str_radix(text.split_whitespace().next().unwrap_or_default(), 16)
        .map_err(|error| Failure(format!("{} does not hold 16 hex digits: {error}", path.display())))
}

async fn append(wal: Wal, incarnation: Incarnation, bytes: u64, payload: usize) -> Result<(), Failure> {
    let payload = vec![0x61; payload];
    let record = |number: usize| NewWalRecord {
        topic: TOPIC,
        incarnation,
        key: b"",
        partition: number as u32 % WAL_PARTITIONS,
        accepted_at_ms: rt::wall_clock_ms(),
        payload: &payload,
    };
    let before = wal.live_bytes();
    while wal.live_bytes() < before + bytes {
        let appends = (0..4).map(|_| {
            let (wal, records) = (wal.clone(), (0..BATCH).map(record).collect::<Vec<_>>());
            Box::pin(async move { wal.append(&records).await })
        });
        for appended in rt::all(appends.collect()).await {
            appended?;
        }
    }
    Ok(())
}
