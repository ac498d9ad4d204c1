//! Why connections end and frames are refused, as the other side is told and as it is told to us.

use super::buffers::Quic;

// Application error codes of a close.
pub(super) const STOPPED: u64 = 0;
pub(super) const REFUSED: u64 = 1;
pub(super) const MALFORMED: u64 = 2;
pub(super) const SILENT: u64 = 3;
pub(super) const LATE: u64 = 4;

/// Why a frame is refused on a connection that goes on.
pub(super) const NO_ROOM: &str = "too much else is on its way to this endpoint, try again";

/// For a person, of a connection that was not ended here.
pub(super) fn why_closed(quic: &Quic) -> String {
    if let Some(error) = quic.peer_error() {
        let reason = String::from_utf8_lossy(&error.reason);
        return match (error.is_app, error.error_code) {
            (true, _) => format!("the peer ended it: {reason}"),
            (false, code @ 0x100..0x200) => format!("the peer refused our certificate (TLS alert {})", code - 0x100),
            (false, code) => format!("the peer ended it with QUIC error {code:#x}: {reason}"),
        };
    }
    match quic.local_error() {
        Some(error) if (0x100..0x200).contains(&error.error_code) => {
            format!("its certificate is refused (TLS alert {})", error.error_code - 0x100)
        }
        Some(error) => format!("QUIC error {:#x}: {}", error.error_code, String::from_utf8_lossy(&error.reason)),
        None if quic.is_timed_out() => "nothing was heard for too long".to_owned(),
        None => "the peer does not know it any more".to_owned(),
    }
}
