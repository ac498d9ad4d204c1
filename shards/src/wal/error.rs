//! What can go wrong, in words for whoever is woken by it.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// Why an append was not (or may not have been) accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AppendError {
    /// `500`: the log is latched, by this write or an earlier one (E11). The records may be delivered all the same.
    LogFailed(String),
    /// `503`: no segment could be made; nothing was stored, and the log is not latched (E9).
    Unavailable(String),
    /// `500`: as `Unavailable`, but the append began in the segment before, where its first records are stored (D13).
    StoredInPart(String),
    /// `503`: staging memory cannot turn over (E22). Nothing was stored.
    MemoryExhausted,
    /// A record is larger than a segment or a chunk of staging memory. Nothing was stored.
    TooLarge,
}

impl fmt::Display for AppendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AppendError::LogFailed(cause) | AppendError::Unavailable(cause) => write!(f, "{cause}"),
            AppendError::StoredInPart(cause) => write!(f, "the first records of the batch are stored, but {cause}"),
            AppendError::MemoryExhausted => {
                write!(f, "WAL staging memory is used up by records whose commits do not finish")
            }
            AppendError::TooLarge => write!(f, "the record is larger than a WAL segment or staging chunk"),
        }
    }
}

impl std::error::Error for AppendError {}

/// Why a WAL does not open. Nothing in the directory was changed, other than what recovery had already finished.
#[derive(Debug)]
pub enum WalOpenError {
    Io {
        path: PathBuf,
        doing: &'static str,
        error: io::Error,
    },
    /// Damage that a power cut does not explain (E3, E8).
    Corrupt {
        path: PathBuf,
        offset: u64,
        /// The record that should stand there; `None` when the header is damaged.
        seq: Option<u64>,
        why: String,
    },
    /// Segments that have held records are gone or empty, and what they held with them.
    Missing {
        path: PathBuf,
        why: String,
    },
    /// A newer release wrote it (lesson N58).
    UnknownFormat {
        path: PathBuf,
        offset: u64,
        format: u32,
    },
    /// The segment belongs to another data directory or to another WAL of this one (E2).
    Foreign {
        path: PathBuf,
        why: String,
    },
}

impl WalOpenError {
    pub(crate) fn io(path: impl Into<PathBuf>, doing: &'static str) -> impl FnOnce(io::Error) -> WalOpenError {
        let path = path.into();
        move |error| WalOpenError::Io { path, doing, error }
    }
}

impl fmt::Display for WalOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WalOpenError::Io { path, doing, error } => write!(
                f,
                "ingress WAL: cannot {doing} {}: {error}; check the disk, its free space and the permissions, then \
                 start again",
                path.display()
            ),
            WalOpenError::Corrupt { path, offset, seq, why } => {
                write!(f, "ingress WAL: {} is damaged at byte {offset}", path.display())?;
                if let Some(seq) = seq {
                    write!(f, ", where record {seq} should be")?;
                }
                write!(
                    f,
                    ": {why}. Accepted records would be lost, so the node does not start, and the file is untouched. \
                     Check the drive, then restore the file; or, to give up what this WAL had not dispatched, move \
                     its directory out of the data directory and start again"
                )
            }
            WalOpenError::Missing { path, why } => write!(
                f,
                "ingress WAL: {}: {why}. Accepted records would be lost, so the node does not start, and nothing was \
                 changed. Restore the file; or, to give up what this WAL had not dispatched, move its directory out of \
                 the data directory and start again",
                path.display()
            ),
            WalOpenError::UnknownFormat { path, offset, format } => write!(
                f,
                "ingress WAL: {} holds format {format} at byte {offset}, which this release does not know; start the \
                 newer release again and let it drain (narad_ingress_dispatch_backlog_records 0) before going back",
                path.display()
            ),
            WalOpenError::Foreign { path, why } => write!(
                f,
                "ingress WAL: {} does not belong here: {why}; move it back where it came from, then start again",
                path.display()
            ),
        }
    }
}

impl std::error::Error for WalOpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            WalOpenError::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}
