//! Frames that wait for their stream, lane by lane. What is urgent goes first, and of all else only so much is given to
//! quiche at a time as it can send at once: what it has taken cannot be overtaken any more (E41).

use std::collections::VecDeque;

use bytes::Bytes;
use narad_shards::rt::Instant;
use narad_shards::wire::{Header, Kind, Lane, Outgoing};

use super::buffers::{Piece, Quic};
use super::liveness::Progress;

/// Bytes that wait on one lane before it takes no more requests.
const LANE_BYTES_MAX: usize = 64 << 20;
/// Pieces shorter than this are copied together where several follow each other: what quiche spends on each piece that it
/// is given (a look at its stream, an entry in its buffer) takes longer than to copy so many bytes.
const SHORT_BYTES: usize = 2 << 10;

struct Frame {
    kind: Kind,
    request_id: u64,
    pieces: VecDeque<Piece>,
    /// Some of it was given to quiche: the rest must follow.
    begun: bool,
}

#[derive(Default)]
struct Waiting {
    frames: VecDeque<Frame>,
    bytes: usize,
}

#[derive(Default)]
pub(super) struct SendQueue {
    lanes: [Waiting; Lane::ALL.len()],
    progress: Progress,
}

/// What became of a frame that nobody wants to be sent any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recalled {
    /// Nothing of it has left, and nothing will.
    Unsent,
    Begun,
}

/// The stream of a lane. Stream 0 is the greeting's; all are opened by the dialler, for both directions.
pub(super) fn stream_of(lane: Lane) -> u64 {
    4 * (lane as u64 + 1)
}

pub(super) fn lane_of(stream: u64) -> Option<Lane> {
    let index = (stream / 4).checked_sub(1).filter(|_| stream.is_multiple_of(4))?;
    Lane::ALL.get(usize::try_from(index).ok()?).copied()
}

/// The next bytes, at most `bytes_max` of them: a piece or its beginning, or several short ones as one.
fn next_piece(pieces: &mut VecDeque<Piece>, bytes_max: usize) -> Option<Piece> {
    let (mut count, mut bytes) = (0, 0);
    for piece in pieces.iter() {
        if piece.len() >= SHORT_BYTES || bytes + piece.len() > bytes_max {
            break;
        }
        (count, bytes) = (count + 1, bytes + piece.len());
    }
    if count > 1 {
        let mut joined = Vec::with_capacity(bytes);
        pieces.drain(..count).for_each(|piece| joined.extend_from_slice(piece.as_ref()));
        return Some(Piece::Small(Bytes::from(joined)));
    }
    let mut piece = pieces.pop_front()?;
    if piece.len() > bytes_max {
        pieces.push_front(quiche::BufSplit::split_at(&mut piece, bytes_max));
    }
    Some(piece)
}

impl SendQueue {
    pub fn is_full(&self, lane: Lane) -> bool {
        self.lanes[lane as usize].bytes >= LANE_BYTES_MAX
    }

    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(|waiting| waiting.frames.is_empty())
    }

    /// Of all lanes.
    pub fn bytes(&self) -> usize {
        self.lanes.iter().map(|waiting| waiting.bytes).sum()
    }

    /// `header` was made from `frame`.
    pub fn push(&mut self, lane: Lane, header: &Header, frame: Outgoing) {
        let mut pieces = VecDeque::with_capacity(2 + frame.payload.len());
        pieces.push_back(Piece::Small(Bytes::copy_from_slice(&header.encode())));
        let body = std::iter::once(frame.archive).chain(frame.payload).filter(|slice| !slice.is_empty());
        pieces.extend(body.map(Piece::Slice));
        self.push_pieces(lane, header.kind, header.request_id, pieces);
    }

    /// A frame without a body.
    pub fn push_bare(&mut self, lane: Lane, header: &Header) {
        let piece = Piece::Small(Bytes::copy_from_slice(&header.encode()));
        self.push_pieces(lane, header.kind, header.request_id, VecDeque::from([piece]));
    }

    fn push_pieces(&mut self, lane: Lane, kind: Kind, request_id: u64, pieces: VecDeque<Piece>) {
        let waiting = &mut self.lanes[lane as usize];
        waiting.bytes += pieces.iter().map(Piece::len).sum::<usize>();
        waiting.frames.push_back(Frame { kind, request_id, pieces, begun: false });
    }

    /// Takes a request back, as far as that is possible.
    pub fn recall(&mut self, lane: Lane, request_id: u64) -> Recalled {
        let waiting = &mut self.lanes[lane as usize];
        let unsent = |frame: &Frame| frame.kind == Kind::Request && frame.request_id == request_id && !frame.begun;
        let Some(at) = waiting.frames.iter().position(unsent) else { return Recalled::Begun };
        if let Some(frame) = waiting.frames.remove(at) {
            waiting.bytes -= frame.pieces.iter().map(Piece::len).sum::<usize>();
        }
        if self.is_empty() {
            // Nothing is left that the other side could take: what comes next has waited for nothing yet.
            self.progress = Progress::default();
        }
        Recalled::Unsent
    }

    /// Whether the other side has taken nothing for too long of what is here.
    pub fn is_stalled(&mut self, now: Instant) -> bool {
        self.progress.is_over(now)
    }

    /// When to look again whether it is.
    pub fn next_look(&self) -> Option<Instant> {
        self.progress.next()
    }

    /// Gives quiche up to `quantum` bytes, urgent lanes first. Returns how many it took.
    pub fn feed(&mut self, quic: &mut Quic, quantum: usize, now: Instant) -> Result<usize, quiche::Error> {
        let taken = self.give(quic, quantum)?;
        self.progress.note(taken, !self.is_empty(), now);
        Ok(taken)
    }

    fn give(&mut self, quic: &mut Quic, quantum: usize) -> Result<usize, quiche::Error> {
        let mut left = quantum;
        for lane in Lane::ALL {
            let waiting = &mut self.lanes[lane as usize];
            while let Some(frame) = waiting.frames.front_mut() {
                if left == 0 {
                    return Ok(quantum);
                }
                let Some(piece) = next_piece(&mut frame.pieces, left) else {
                    waiting.frames.pop_front();
                    continue;
                };
                let offered = piece.len();
                let (taken, refused) = match quic.stream_send_zc(stream_of(lane), piece.clone(), false) {
                    Ok((taken, refused)) => (taken, refused),
                    Err(quiche::Error::Done) => (0, Some(piece)),
                    Err(error) => return Err(error),
                };
                frame.begun |= taken > 0;
                refused.into_iter().for_each(|refused| frame.pieces.push_front(refused));
                waiting.bytes -= taken;
                left -= taken;
                if taken < offered {
                    // Its window, or the path's, is full; another lane may have room in its own.
                    break;
                }
            }
        }
        Ok(quantum - left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(lengths: &[usize]) -> (VecDeque<Piece>, Vec<u8>) {
        let all: Vec<u8> = (0..lengths.iter().sum()).map(|at: usize| (at / 7) as u8).collect();
        let mut rest = &all[..];
        let pieces = lengths.iter().map(|length| {
            let (piece, behind) = rest.split_at(*length);
            rest = behind;
            Piece::Small(Bytes::copy_from_slice(piece))
        });
        (pieces.collect(), all)
    }

    #[test]
    fn short_pieces_are_joined_and_long_ones_are_handed_over_as_they_are() {
        let lengths = [32, 100, SHORT_BYTES, 1, 9000, 5, 6, 7];
        let (mut waiting, all) = pieces(&lengths);
        let whole: Vec<Piece> = std::iter::from_fn(|| next_piece(&mut waiting, 4096)).collect();
        let seen: Vec<usize> = whole.iter().map(Piece::len).collect();
        // What is left of the long one is short.
        assert_eq!(seen, [132, SHORT_BYTES, 1, 4096, 4096, 808 + 5 + 6 + 7]);
        assert_eq!(whole.iter().flat_map(|piece| piece.as_ref().to_vec()).collect::<Vec<_>>(), all);
    }

    #[test]
    fn what_is_taken_back_is_not_held_against_a_peer_and_what_comes_later_begins_anew() {
        let at = |ms: u64| Instant(0) + std::time::Duration::from_millis(ms);
        let mut queue = SendQueue::default();
        let waits = |queue: &mut SendQueue, request_id| {
            queue.push_pieces(Lane::Produce, Kind::Request, request_id, pieces(&[100]).0);
        };
        waits(&mut queue, 1);
        waits(&mut queue, 2);
        queue.progress.note(0, true, at(0));
        assert_eq!(queue.recall(Lane::Produce, 1), Recalled::Unsent);
        assert_eq!(queue.next_look(), Some(at(1_000)), "another one still waits");
        assert!((1..5).all(|second| !queue.is_stalled(at(1_000 * second))));
        assert_eq!(queue.recall(Lane::Produce, 2), Recalled::Unsent);
        assert!(queue.next_look().is_none() && !queue.is_stalled(at(60_000)), "nothing is left to be taken");
        waits(&mut queue, 3);
        queue.progress.note(0, true, at(61_000));
        assert!((1..5).all(|second| !queue.is_stalled(at(61_000 + 1_000 * second))));
        assert!(queue.is_stalled(at(66_000)));
    }
}
