//! From the bytes of a stream to frames. Pure: it says where the next bytes go, and what they made whole.

use narad_shards::io::AlignedBuf;
use narad_shards::wire::{BadHeader, Header, Incoming, HEADER_BYTES};

/// Reads one stream. Nothing is allocated for a frame before its header has passed (K39).
pub(super) struct FrameReader {
    header: [u8; HEADER_BYTES],
    /// Bytes of the header, or of the body once that is there.
    filled: usize,
    body: Option<(Header, AlignedBuf)>,
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
            Some((_, body)) => &mut body[self.filled..],
            None => &mut self.header[self.filled..],
        }
    }

    /// `count` bytes were put into [`space`](Self::space). An error is the end of the stream: what follows has no known
    /// beginning.
    pub fn advance(&mut self, count: usize) -> Result<Option<Incoming>, BadHeader> {
        self.filled += count;
        if self.body.is_none() && self.filled == HEADER_BYTES {
            let header = Header::decode(&self.header)?;
            let mut body = AlignedBuf::reused(header.body_bytes());
            body.truncate(header.body_bytes());
            self.body = Some((header, body));
            self.filled = 0;
        }
        match self.body.take_if(|(header, _)| self.filled == header.body_bytes()) {
            Some((header, body)) => {
                self.filled = 0;
                Ok(Some(Incoming::new(header, body)))
            }
            None => Ok(None),
        }
    }

    /// Bytes that this stream holds for a frame that is not whole yet.
    #[cfg(test)]
    fn allocated(&self) -> usize {
        self.body.as_ref().map_or(0, |(_, body)| body.len())
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

    fn feed(reader: &mut FrameReader, mut bytes: &[u8], step: usize) -> Result<Vec<Incoming>, BadHeader> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let space = reader.space();
            let count = space.len().min(step).min(bytes.len());
            space[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            frames.extend(reader.advance(count)?);
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
}
