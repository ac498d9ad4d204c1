//! From the bytes of a stream to frames. Pure: it says where the next bytes go, and what they made whole.

use narad_shards::io::AlignedBuf;
use narad_shards::wire::{BadHeader, Header, Incoming, HEADER_BYTES};

use super::intake::Room;

/// A frame without room is read in pieces of that many bytes, each over the one before.
const SKIP_BYTES: usize = 16 << 10;

/// Reads one stream. Nothing is allocated for a frame before its header has passed (K39) and there is room for it.
pub(super) struct FrameReader {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header, or of the body once that is there.
    filled: usize,
    body: Option<(Header, Body)>,
}

enum Body {
    Kept {
        body: AlignedBuf,
        _room: Room,
    },
    /// There was no room for it. What follows it on the stream must not wait, so it is read all the same.
    Skipped(Vec<u8>),
}

/// What has become whole.
pub(super) enum Arrived {
    Frame(Incoming),
    /// The header of a frame whose body was not kept.
    Refused(Header),
}

impl Default for FrameReader {
    fn default() -> FrameReader {
        FrameReader { header: [0; HEADER_BYTES], filled: 0, body: None }
    }
}

impl FrameReader {
    /// Where the next bytes of the stream belong; never empty.
    pub fn space(&mut self) -> &mut [u8] {
        match &mut self.body {
            Some((_, Body::Kept { body, .. })) => &mut body[self.filled..],
            Some((header, Body::Skipped(scratch))) => {
                let left = header.body_bytes() - self.filled;
                let bytes = left.min(scratch.len());
                &mut scratch[..bytes]
            }
            None => &mut self.header[self.filled..],
        }
    }

    /// `count` bytes were put into [`space`](Self::space). `room` is asked once a frame, for the bytes of its body. An
    /// error is the end of the stream: what follows has no known beginning.
    pub fn advance(
        &mut self,
        count: usize,
        room: impl FnOnce(usize) -> Option<Room>,
    ) -> Result<Option<Arrived>, BadHeader> {
        self.filled += count;
        if self.body.is_none() && self.filled == HEADER_BYTES {
            let header = Header::decode(&self.header)?;
            let body = match room(header.body_bytes()) {
                Some(room) => {
                    let mut body = AlignedBuf::reused(header.body_bytes());
                    body.truncate(header.body_bytes());
                    Body::Kept { body, _room: room }
                }
                None => Body::Skipped(vec![0; SKIP_BYTES]),
            };
            self.body = Some((header, body));
            self.filled = 0;
        }
        let whole = self.body.take_if(|(header, _)| self.filled == header.body_bytes());
        Ok(whole.map(|(header, body)| {
            self.filled = 0;
            match body {
                Body::Kept { body, .. } => Arrived::Frame(Incoming::new(header, body)),
                Body::Skipped(_) => Arrived::Refused(header),
            }
        }))
    }

    /// Bytes that this stream holds for a frame that is not whole yet.
    #[cfg(test)]
    fn allocated(&self) -> usize {
        self.body.as_ref().map_or(0, |(_, body)| match body {
            Body::Kept { body, .. } => body.len(),
            Body::Skipped(scratch) => scratch.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use narad_shards::wire::{Kind, Lane, FRAME_BYTES_MAX};

    fn frame(request_id: u64, body: &[u8]) -> Vec<u8> {
        let header = Header {
            length: (HEADER_BYTES + body.len()) as u32,
            operation: 7,
            version: 1,
            kind: Kind::Request,
            lane: Lane::Ack,
            status: 0,
            archive_bytes: body.len() as u32 / 2,
            request_id,
            budget_ms: 0,
            credit_bytes: 0,
        };
        [&header.encode()[..], body].concat()
    }

    fn feed(reader: &mut FrameReader, bytes: &[u8], step: usize) -> Result<Vec<Incoming>, BadHeader> {
        let arrived = feed_where(reader, bytes, step, |_| true)?;
        let frames = arrived.into_iter().map(|arrived| match arrived {
            Arrived::Frame(frame) => frame,
            Arrived::Refused(header) => panic!("there is room for {header:?}"),
        });
        Ok(frames.collect())
    }

    fn feed_where(
        reader: &mut FrameReader,
        mut bytes: &[u8],
        step: usize,
        has_room: impl Fn(usize) -> bool,
    ) -> Result<Vec<Arrived>, BadHeader> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let space = reader.space();
            let count = space.len().min(step).min(bytes.len());
            space[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            frames.extend(reader.advance(count, |bytes| has_room(bytes).then(Room::default))?);
        }
        Ok(frames)
    }

    #[test]
    fn e42_frames_come_out_whole_however_the_stream_is_cut() {
        let bytes: Vec<u8> = [frame(1, b""), frame(2, b"abcdef"), frame(3, &[9; 5000])].concat();
        for step in [1, 2, 31, 32, 33, 100_000] {
            let frames = feed(&mut FrameReader::default(), &bytes, step).expect("they are well formed");
            let seen: Vec<_> =
                frames.iter().map(|f| (f.header.request_id, f.archive().len() + f.payload().len())).collect();
            assert_eq!(seen, [(1, 0), (2, 6), (3, 5000)], "in steps of {step}");
            assert_eq!((frames[1].archive(), &frames[1].payload()[..]), (&b"abc"[..], &b"def"[..]));
        }
    }

    #[test]
    fn k39_nothing_is_allocated_for_a_header_that_does_not_pass() {
        let mut bytes = frame(1, b"");
        bytes[..4].copy_from_slice(&(FRAME_BYTES_MAX as u32 + 1).to_le_bytes());
        let mut reader = FrameReader::default();
        assert!(feed(&mut reader, &bytes[..31], 31).expect("not whole yet").is_empty());
        assert!(feed(&mut reader, &bytes[31..], 1).is_err());
        assert_eq!(reader.allocated(), 0);
    }

    #[test]
    fn a_frame_without_room_is_passed_over_and_what_follows_it_comes_out_whole() {
        let bytes: Vec<u8> = [frame(1, &[1; 100_000]), frame(2, b"abcdef")].concat();
        for step in [1, 33, 5_000, 1 << 20] {
            let mut reader = FrameReader::default();
            let begun = feed_where(&mut reader, &bytes[..90_000], step, |bytes| bytes < 100).expect("well formed");
            assert!(begun.is_empty() && reader.allocated() <= SKIP_BYTES, "in steps of {step}");
            let rest = feed_where(&mut reader, &bytes[90_000..], step, |bytes| bytes < 100).expect("well formed");
            let seen: Vec<_> = rest
                .iter()
                .map(|arrived| match arrived {
                    Arrived::Refused(header) => (header.request_id, None),
                    Arrived::Frame(frame) => (frame.header.request_id, Some(frame.payload().to_vec())),
                })
                .collect();
            assert_eq!(seen, [(1, None), (2, Some(b"def".to_vec()))], "in steps of {step}");
        }
    }
}
