//! What quiche holds until the other side has it: the caller's memory, by reference.

use bytes::Bytes;
use narad_shards::io::Slice;
use quiche::{BufFactory, BufSplit};

/// A piece of a frame.
#[derive(Clone, Debug)]
pub(super) enum Piece {
    Small(Bytes),
    Slice(Slice),
}

impl Piece {
    pub fn len(&self) -> usize {
        self.as_ref().len()
    }
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        match self {
            Piece::Small(bytes) => bytes,
            Piece::Slice(slice) => slice,
        }
    }
}

impl BufSplit for Piece {
    fn split_at(&mut self, at: usize) -> Piece {
        match self {
            Piece::Small(bytes) => Piece::Small(bytes.split_off(at)),
            Piece::Slice(slice) => {
                let rest = slice.slice(at..slice.len());
                *slice = slice.slice(0..at);
                Piece::Slice(rest)
            }
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct PeerBuffers;

impl BufFactory for PeerBuffers {
    type Buf = Piece;
    type DgramBuf = Vec<u8>;

    fn buf_from_slice(bytes: &[u8]) -> Piece {
        Piece::Small(Bytes::copy_from_slice(bytes))
    }

    fn dgram_buf_from_slice(bytes: &[u8]) -> Vec<u8> {
        bytes.to_vec()
    }
}

pub(super) type Quic = quiche::Connection<PeerBuffers>;
