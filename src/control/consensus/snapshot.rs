//! Snapshots on their way (K15): the image in pieces, each a request of its own; with the last one goes the library's
//! message. The receiver writes them to a file of their own, and lets the library know only once that is whole,
//! verified and durable.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use narad_shards::rt::sync::{oneshot, Lock};
use narad_shards::wire::{status, Incoming, Outgoing};
use prost::Message as _;
use raft::eraftpb::Message;

use super::codec::{self, Piece};
use super::driver::Request;
use super::Consensus;

/// For a piece to arrive and to be written.
const PIECE_BUDGET: Duration = Duration::from_secs(30);

/// Sends the image that `message` speaks of, and reports how that went.
pub(super) async fn send(consensus: Rc<Consensus>, address: SocketAddr, message: Message) {
    let to = message.to;
    let sent = send_image(&consensus, address, &message).await;
    if let Err(error) = &sent {
        tracing::warn!(%address, error, "consensus: a metadata snapshot did not arrive");
    }
    consensus.request(Request::SnapshotSent { to, sent: sent.is_ok() });
}

async fn send_image(consensus: &Consensus, address: SocketAddr, message: &Message) -> Result<(), String> {
    let message = message.encode_to_vec();
    let mut offset = 0;
    loop {
        let (bytes, image_bytes) = consensus.disk.read_image(offset, consensus.settings.piece_bytes).await?;
        let is_last = offset + bytes.len() as u64 >= image_bytes;
        let message = if is_last { message.as_slice() } else { &[] };
        let piece = Piece { offset, image_bytes, message_bytes: message.len() };
        let frame = codec::snapshot_frame(PIECE_BUDGET, &piece, message, &bytes);
        let transport = consensus.settings.bulk.as_ref().unwrap_or(&consensus.transport);
        let reply = transport.call(address, frame).await.map_err(|error| error.text().to_owned())?;
        if reply.header.status != status::OK {
            return Err(codec::reply_text(&reply));
        }
        if is_last {
            return Ok(());
        }
        offset += bytes.len() as u64;
    }
}

/// The image that is being received.
#[derive(Default)]
pub(super) struct Receiving {
    lock: Lock,
    expected: Cell<u64>,
    image_bytes: Cell<u64>,
    /// Why the last one failed, for the log.
    refused: RefCell<Option<String>>,
}

impl Receiving {
    pub async fn take(&self, consensus: &Consensus, incoming: &Incoming) -> Outgoing {
        let _alone = self.lock.enter().await;
        match self.take_piece(consensus, incoming).await {
            Ok(index) => codec::number_reply(incoming, index),
            Err(error) => {
                self.expected.set(0);
                if self.refused.replace(Some(error.clone())).as_ref() != Some(&error) {
                    tracing::warn!(error, "consensus: refused a piece of a metadata snapshot");
                }
                codec::refusal(incoming, status::CONFLICT, &error)
            }
        }
    }

    async fn take_piece(&self, consensus: &Consensus, incoming: &Incoming) -> Result<u64, String> {
        let piece: Piece = serde_json::from_slice(incoming.archive()).map_err(|error| error.to_string())?;
        let payload = incoming.payload();
        if piece.message_bytes > payload.len() {
            return Err("its parts are longer than the piece".to_owned());
        }
        if piece.offset == 0 {
            self.image_bytes.set(piece.image_bytes);
        } else if piece.offset != self.expected.get() || piece.image_bytes != self.image_bytes.get() {
            return Err(format!("offset {} of another transfer", piece.offset));
        }
        let bytes = payload.slice(piece.message_bytes..payload.len());
        let end = piece.offset + bytes.len() as u64;
        let is_last = end == piece.image_bytes;
        if end > piece.image_bytes || is_last != (piece.message_bytes > 0) {
            return Err(format!("a piece up to {end} of {}", piece.image_bytes));
        }
        consensus.disk.receive(piece.offset, bytes).await?;
        self.expected.set(end);
        if !is_last {
            return Ok(0);
        }
        self.expected.set(0);
        let message = codec::decode_message(&payload[..piece.message_bytes])?;
        if !codec::is_snapshot(&message) {
            return Err("its message is none of a snapshot".to_owned());
        }
        let index = consensus.disk.finish_receiving().await?;
        let told = message.get_snapshot().get_metadata().index;
        if index != told {
            return Err(format!("the image is of entry {index}, not {told}"));
        }
        consensus.heard(&message);
        let (done, is_done) = oneshot();
        consensus.request(Request::Snapshot(message, done));
        is_done.await.ok_or("this node's consensus has stopped")?;
        *self.refused.borrow_mut() = None;
        Ok(index)
    }
}
