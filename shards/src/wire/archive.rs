//! What every archive of a frame goes through: checked before it is looked at, bounded before it is believed.

use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::Failure;
use rkyv::ser::allocator::ArenaHandle;
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize};

use super::{status, Incoming, Lane, Outgoing};
use crate::io::Slice;
use std::time::Duration;

/// Version of every archive that this build writes. 0 stands for a refusal: its archive is a text.
pub const VERSION: u8 = 1;
const REFUSAL: u8 = 0;

/// A longer text of an error is cut.
const TEXT_BYTES_MAX: usize = 1024;

/// Why a frame was not answered by what it asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    pub text: String,
}

impl Refusal {
    pub fn new(status: u16, text: impl Into<String>) -> Refusal {
        Refusal { status, text: cut(text.into()) }
    }

    pub(super) fn bad(text: &str) -> Refusal {
        Refusal::new(status::BAD_REQUEST, text)
    }

    /// As the reply to a request of this operation.
    pub fn reply(&self, operation: u16, lane: Lane) -> Outgoing {
        Outgoing { version: REFUSAL, ..reply(operation, lane, self.status, &self.text, Vec::new()) }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.status, self.text)
    }
}

pub(super) fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// The reading side's `Err` when a reply is a refusal, or of a version that this build does not know.
pub(super) fn expect_version(incoming: &Incoming) -> Result<(), Refusal> {
    match incoming.header.version {
        VERSION => Ok(()),
        REFUSAL => {
            let text = read::<String>(incoming).unwrap_or_default();
            Err(Refusal::new(incoming.header.status, text))
        }
        other => Err(Refusal::bad(&format!("version {other} of an archive is not known here"))),
    }
}

/// A value that can be put into an archive, and found in one.
pub(super) trait Frame:
    Archive + for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, Failure>>
{
}

impl<T> Frame for T where T: Archive + for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, Failure>> {}

fn archive(value: &impl Frame) -> Slice {
    let bytes = rkyv::to_bytes::<Failure>(value).expect("an archive in memory has no way to fail");
    Slice::copy_from(&bytes)
}

pub(super) fn request(
    operation: u16,
    lane: Lane,
    budget: Duration,
    value: &impl Frame,
    payload: Vec<Slice>,
) -> Outgoing {
    Outgoing { operation, version: VERSION, lane, status: 0, budget, credit_bytes: 0, archive: archive(value), payload }
}

pub(super) fn reply(operation: u16, lane: Lane, status: u16, value: &impl Frame, payload: Vec<Slice>) -> Outgoing {
    let (version, budget, archive) = (VERSION, Duration::ZERO, archive(value));
    Outgoing { operation, version, lane, status, budget, credit_bytes: 0, archive, payload }
}

/// The archive of a frame, validated: nothing in it lies outside of it or twice in it, so that what it becomes is not
/// much longer than it is.
pub(super) fn read<T>(incoming: &Incoming) -> Result<T, Refusal>
where
    T: Archive,
    T::Archived: for<'a> CheckBytes<HighValidator<'a, Failure>> + Deserialize<T, HighDeserializer<Failure>>,
{
    let broken = |_| Refusal::bad("the archive of a frame is malformed");
    rkyv::from_bytes::<T, Failure>(incoming.archive()).map_err(broken)
}

/// Takes the next `bytes` of a payload as they lie: no copy.
pub(super) struct Pieces {
    payload: Slice,
    at: usize,
}

impl Pieces {
    pub fn of(incoming: &Incoming) -> Pieces {
        Pieces { payload: incoming.payload(), at: 0 }
    }

    pub fn next(&mut self, bytes: u32) -> Result<Slice, Refusal> {
        let end = self.at.checked_add(bytes as usize).filter(|end| *end <= self.payload.len());
        let end = end.ok_or_else(|| Refusal::bad("the records of a frame are longer than its payload"))?;
        let piece = self.payload.slice(self.at..end);
        self.at = end;
        Ok(piece)
    }

    pub fn finish(self) -> Result<(), Refusal> {
        match self.at == self.payload.len() {
            true => Ok(()),
            false => Err(Refusal::bad("the payload of a frame is longer than its records")),
        }
    }
}
