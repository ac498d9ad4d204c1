//! The far end: a thread that answers as the owner of a partition does, over one endpoint for each way of sending.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use narad::peer::{PeerEndpoint, PeerSettings};
use narad_shards::io::{FillBudget, Slice};
use narad_shards::log::{Combiner, LogShared};
use narad_shards::peer::{Committed, LocalBoxFuture, Reply, Request};
use narad_shards::remote::{ConnectionId, Hello, Service};
use narad_shards::rt::sync::Notify;
use narad_shards::wire::{self, status, Incoming, Lane, Outgoing};

use crate::load::cpu;
use crate::log::{batch_of, open};
use crate::parts::{cores, nanos};
use crate::run::Failure;

/// Operations that only this program knows. The archive comes back.
pub const ECHO: u16 = 1000;
/// Answers with the nanoseconds that the owner's thread has been on its CPU.
pub const CPU: u16 = 1001;
/// Commits as many records as the payload's length over [`super::RECORD_BYTES`], locally; answers with the nanoseconds.
pub const COMMIT_LOCALLY: u16 = 1002;
pub const STOP: u16 = 1003;

/// The partition that has a log on the drive. Commits to any other are answered and forgotten.
pub const STORED: usize = 0;
pub const FORGOTTEN: usize = 1;

/// A frame that is neither a commit nor its answer.
pub fn frame(operation: u16, archive: &[u8], payload: Vec<Slice>) -> Outgoing {
    Outgoing {
        operation,
        version: 1,
        lane: Lane::Ack,
        status: status::OK,
        budget: Duration::from_secs(30),
        credit_bytes: 0,
        archive: Slice::copy_from(archive),
        payload,
    }
}

/// The number that an answer consists of.
pub fn number(reply: &Incoming) -> Result<u64, Failure> {
    let bytes = reply.archive().first_chunk().ok_or_else(|| Failure("an answer without a number".to_owned()))?;
    Ok(u64::from_le_bytes(*bytes))
}

struct Owner {
    combiner: Combiner,
    body: Slice,
    stop: Notify,
}

impl Owner {
    async fn answer(&self, request: Incoming) -> Option<Outgoing> {
        let header = request.header;
        let number = |number: u64| Some(frame(header.operation, &number.to_le_bytes(), Vec::new()));
        match header.operation {
            ECHO => Some(frame(ECHO, request.archive(), Vec::new())),
            CPU => number(cpu::thread_cpu().as_nanos() as u64),
            STOP => {
                self.stop.notify_one();
                number(0)
            }
            COMMIT_LOCALLY => {
                let records = u64::from_le_bytes(*request.archive().first_chunk()?);
                let start = nanos();
                self.combiner.commit(batch_of(&self.body, records as usize, STORED)).await.ok()?;
                number(nanos() - start)
            }
            operation => {
                let Ok(Request::Commit(batch)) = wire::asked(&request) else { return None };
                drop(request);
                let committed = match batch.destination.partition as usize {
                    STORED => self.combiner.commit(batch).await,
                    _ => Ok(Committed { base_offset: 0, count: batch.records.len() as u64 }),
                };
                wire::answer(operation, 0, &Reply::Commit(committed))
            }
        }
    }
}

/// The owner as a peer sees it.
struct Door(Rc<Owner>);

impl Service for Door {
    fn hello(&self) -> Hello {
        Hello { node: "owner".to_owned(), boot_id: 1, shard: Some(0), ..Hello::default() }
    }

    fn met(&self, _: ConnectionId, _: &Hello, _: SocketAddr) -> Result<(), String> {
        Ok(())
    }

    fn serve(&self, _: ConnectionId, request: Incoming) -> LocalBoxFuture<'static, Option<Outgoing>> {
        let owner = self.0.clone();
        Box::pin(async move { owner.answer(request).await })
    }

    fn cancelled_late(&self, _: ConnectionId, _: u64) {}

    fn lost(&self, _: ConnectionId) {}
}

/// Ends when it is told to stop.
type Running = JoinHandle<Result<(), Failure>>;

/// Starts an owner on `cpu` with its log in `dir`. Tells where it listens, in the order of `ways`.
pub fn start(
    cpu: usize,
    dir: PathBuf,
    record_bytes: usize,
    ways: Vec<PeerSettings>,
) -> Result<(Vec<SocketAddr>, Running), Failure> {
    let (tell, told) = mpsc::channel();
    let thread = cores::start("owner", cpu, Duration::ZERO, move |handle| async move {
        let disk = handle.disk(&dir, true)?;
        let shared = LogShared::new(64 << 20, FillBudget::of_shard(1));
        let (log, combiner) = open(&disk, &dir.join("p00000"), &shared).await?;
        let body = Slice::copy_from(&vec![0x61; record_bytes]);
        let owner = Rc::new(Owner { combiner, body, stop: Notify::new() });
        let bind = SocketAddr::from(([127, 0, 0, 1], 0));
        let listen = |way| PeerEndpoint::start(&handle, bind, Rc::new(Door(owner.clone())), way);
        let endpoints = ways.into_iter().map(listen).collect::<std::io::Result<Vec<_>>>()?;
        // Nobody listens any more when the other end has failed; then nobody says STOP either.
        if tell.send(endpoints.iter().map(|endpoint| endpoint.local_addr()).collect()).is_ok() {
            owner.stop.notified().await;
        }
        for endpoint in endpoints {
            endpoint.stop().await;
        }
        log.close().await.map_err(Failure)?;
        Ok(())
    });
    match told.recv() {
        Ok(addresses) => Ok((addresses, thread)),
        Err(_) => {
            cores::join(thread)?;
            Err(Failure("the owner's thread has ended before it listened".to_owned()))
        }
    }
}
