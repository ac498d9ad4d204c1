//! `Content-Encoding` of batch bodies: streaming decoders that work in small, bounded steps, so that neither a bomb
//! nor a large honest body holds the core or more memory than the cap.

use std::io::{self, Write};

use flate2::write::MultiGzDecoder;
use zstd::zstd_safe::{get_error_name, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective};

/// Bytes that one step may add at most.
pub(crate) const STEP_BYTES: usize = 64 << 10;
/// What gzip needs: its window of 32 KiB, its tables, and the buffer that it writes to.
const GZIP_BYTES: usize = 80 << 10;
/// Tables and input of a zstd context.
const ZSTD_FIXED_BYTES: usize = 384 << 10;
/// Frames that want a larger window are refused: it would be memory beside the decoded body. No body may decode to
/// more than 16 MiB, so no honest one needs more.
const ZSTD_WINDOW_LOG_MAX: u32 = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Identity,
    Gzip,
    Zstd,
}

impl Coding {
    /// From the values of `Content-Encoding`, one per line that the request has. Lists are refused, and several lines
    /// are one; `identity` is accepted in any case.
    pub fn parse<'v>(mut values: impl Iterator<Item = &'v [u8]>) -> Option<Coding> {
        let value = values.next().unwrap_or_default().trim_ascii();
        if values.next().is_some() {
            return None;
        }
        if value.is_empty() || value.eq_ignore_ascii_case(b"identity") {
            Some(Coding::Identity)
        } else if value.eq_ignore_ascii_case(b"gzip") {
            Some(Coding::Gzip)
        } else if value.eq_ignore_ascii_case(b"zstd") {
            Some(Coding::Zstd)
        } else {
            None
        }
    }
}

pub(crate) enum Decoder {
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    Zstd {
        context: DCtx<'static>,
        scratch: Vec<u8>,
        /// A frame has begun and not ended.
        in_frame: bool,
        frames: u64,
    },
    /// The context could not be made; every step says so.
    Broken,
}

impl Decoder {
    /// `None` when nothing has to be decoded.
    pub fn new(coding: Coding) -> Option<Decoder> {
        match coding {
            Coding::Identity => None,
            Coding::Gzip => Some(Decoder::Gzip(Box::new(MultiGzDecoder::new(Vec::new())))),
            Coding::Zstd => Some(Decoder::zstd().unwrap_or(Decoder::Broken)),
        }
    }

    fn zstd() -> io::Result<Decoder> {
        let mut context = DCtx::try_create().ok_or(io::ErrorKind::OutOfMemory)?;
        context.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX)).map_err(refused)?;
        Ok(Decoder::Zstd { context, scratch: vec![0; STEP_BYTES], in_frame: false, frames: 0 })
    }

    /// Memory that it holds beside the `decoded` bytes that it has given. zstd reserves a frame's whole window, megabytes for
    /// a body of a few KiB, and touches as much of it as it has decoded.
    pub fn memory_bytes(&self, decoded: usize) -> usize {
        match self {
            Decoder::Gzip(_) => GZIP_BYTES,
            Decoder::Zstd { context, scratch, .. } => context.sizeof().min(ZSTD_FIXED_BYTES + decoded) + scratch.len(),
            Decoder::Broken => 0,
        }
    }

    /// Consumes some of `input` and appends at most about [`STEP_BYTES`] to `decoded`. `false`: feed more input.
    pub fn step(&mut self, input: &mut &[u8], decoded: &mut Vec<u8>) -> io::Result<bool> {
        match self {
            Decoder::Gzip(gzip) => {
                let taken = gzip.write(input)?;
                *input = &input[taken..];
                decoded.append(gzip.get_mut());
                Ok(!input.is_empty())
            }
            Decoder::Zstd { context, scratch, in_frame, frames } => {
                if !*in_frame {
                    if input.is_empty() {
                        return Ok(false);
                    }
                    context.reset(ResetDirective::SessionOnly).map_err(refused)?;
                    *in_frame = true;
                }
                let mut source = InBuffer::around(input);
                let mut target = OutBuffer::around(&mut scratch[..]);
                let hint = context.decompress_stream(&mut target, &mut source).map_err(refused)?;
                let (taken, written) = (source.pos(), target.pos());
                decoded.extend_from_slice(&scratch[..written]);
                *input = &input[taken..];
                if hint == 0 {
                    *in_frame = false;
                    *frames += 1;
                }
                // A full target may hide more output even when all input was taken.
                Ok(!input.is_empty() || (*in_frame && written == STEP_BYTES))
            }
            Decoder::Broken => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    /// Checks that the data ended where a frame or member ends, and appends the last of it.
    pub fn finish(self, decoded: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Decoder::Gzip(mut gzip) => {
                gzip.try_finish()?;
                decoded.append(gzip.get_mut());
                Ok(())
            }
            Decoder::Zstd { in_frame: false, frames: 1.., .. } => Ok(()),
            Decoder::Zstd { .. } => Err(io::ErrorKind::UnexpectedEof.into()),
            Decoder::Broken => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }
}

fn refused(code: usize) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, get_error_name(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(coding: Coding, data: &[u8], piece_bytes: usize) -> io::Result<Vec<u8>> {
        let mut decoder = Decoder::new(coding).expect("a compressing coding");
        let mut decoded = Vec::new();
        for piece in data.chunks(piece_bytes) {
            let mut rest = piece;
            loop {
                let before = decoded.len();
                let more = decoder.step(&mut rest, &mut decoded)?;
                assert!(decoded.len() - before <= STEP_BYTES, "one step is bounded");
                if !more {
                    break;
                }
            }
        }
        decoder.finish(&mut decoded)?;
        Ok(decoded)
    }

    fn gzip(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(data).expect("into memory");
        encoder.finish().expect("into memory")
    }

    fn zstd(data: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(data, 3).expect("into memory")
    }

    #[test]
    fn whole_cut_and_joined_streams() {
        let text: Vec<u8> = (0..200_000u32).flat_map(|i| (i * 7919).to_le_bytes()).collect();
        for (coding, packed) in [(Coding::Gzip, gzip(&text)), (Coding::Zstd, zstd(&text))] {
            for piece_bytes in [1 << 20, 4096, 7] {
                assert!(decode(coding, &packed, piece_bytes).expect("whole") == text, "{coding:?} by {piece_bytes}");
            }
            for cut in [1, 5, packed.len() / 2, packed.len() - 1] {
                assert!(decode(coding, &packed[..cut], 4096).is_err(), "{coding:?} cut at {cut}");
            }
            let joined = [&packed[..], &packed[..]].concat();
            assert_eq!(decode(coding, &joined, 4096).expect("two members").len(), 2 * text.len(), "{coding:?}");
            let trailing = [&packed[..], b"garbage"].concat();
            assert!(decode(coding, &trailing, 4096).is_err(), "{coding:?} with garbage behind it");
            let mut flipped = packed.clone();
            flipped[packed.len() / 2] ^= 0x40;
            let flipped = decode(coding, &flipped, 4096);
            assert!(flipped.is_err() || coding == Coding::Zstd, "gzip carries a checksum");
        }
    }

    #[test]
    fn nothing_and_noise_do_not_decode() {
        for coding in [Coding::Gzip, Coding::Zstd] {
            for data in [&b""[..], b"{\"messages\":[]}", &[0u8; 64]] {
                assert!(decode(coding, data, 16).is_err(), "{coding:?} of {data:?}");
            }
        }
    }

    #[test]
    fn n82_a_window_of_128_mib_is_refused() {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).expect("into memory");
        encoder.set_parameter(zstd::zstd_safe::CParameter::WindowLog(27)).expect("valid");
        encoder.include_contentsize(false).expect("valid");
        encoder.write_all(&vec![7u8; 3 << 20]).expect("into memory");
        let packed = encoder.finish().expect("into memory");
        assert!(decode(Coding::Zstd, &packed, 4096).is_err());
    }

    #[test]
    fn gap_7_codings() {
        for (value, coding) in [
            (None, Some(Coding::Identity)),
            (Some(""), Some(Coding::Identity)),
            (Some("Identity"), Some(Coding::Identity)),
            (Some("GZIP"), Some(Coding::Gzip)),
            (Some(" zstd "), Some(Coding::Zstd)),
            (Some("gzip, zstd"), None),
            (Some("br"), None),
            (Some("deflate"), None),
        ] {
            assert_eq!(Coding::parse(value.map(str::as_bytes).into_iter()), coding, "{value:?}");
        }
    }
}
