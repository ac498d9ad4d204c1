//! What strangers may cost (E48): how many may be unproven at a time, and from when on they must first show that they
//! are where they say. Pure.

use std::net::SocketAddr;
use std::time::Duration;

use boring::hash::hmac_sha256;
use narad_shards::rt::Instant;

/// Connections that have not proven the secret yet.
pub(super) const UNPROVEN_MAX: usize = 64;
/// From so many on, a stranger's address is verified before anything is kept for him.
const UNPROVEN_UNVERIFIED_MAX: usize = 16;
pub(super) const PROVE_WITHIN: Duration = Duration::from_secs(3);
const TOKEN_LIFETIME: Duration = Duration::from_secs(5);
/// Connection ids that we choose.
pub(super) const CID_BYTES: usize = 16;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Accept,
    /// He has shown his address; the id that he had asked for first.
    AcceptVerified(Vec<u8>),
    /// Send him this token back; nothing is kept.
    Retry,
    Ignore,
}

/// Makes and checks the tokens of Retry packets.
pub(super) struct Admission {
    key: [u8; 32],
}

impl Admission {
    pub fn new(key: [u8; 32]) -> Admission {
        Admission { key }
    }

    fn code(&self, from: SocketAddr, until: &[u8], original: &[u8], chosen: &[u8]) -> Option<[u8; 32]> {
        let parts = [from.to_string().as_bytes(), &[0], until, &[original.len() as u8], original, chosen].concat();
        hmac_sha256(&self.key, &parts).ok()
    }

    /// The token for `from`, who asked for `original` and is to come back for `chosen`.
    pub fn token(&self, from: SocketAddr, original: &[u8], chosen: &[u8], now: Instant) -> Option<Vec<u8>> {
        let until = (now + TOKEN_LIFETIME).0.to_le_bytes();
        let code = self.code(from, &until, original, chosen)?;
        Some([&until[..], &code, original].concat())
    }

    /// The id that `from` had asked for first, when `token` is ours, his, and recent.
    fn original(&self, from: SocketAddr, token: &[u8], chosen: &[u8], now: Instant) -> Option<Vec<u8>> {
        let (until, rest) = token.split_first_chunk::<8>()?;
        let (code, original) = rest.split_first_chunk::<32>()?;
        let ours = original.len() <= 20 && boring::memcmp::eq(&self.code(from, until, original, chosen)?, code);
        (ours && now.0 <= u64::from_le_bytes(*until)).then(|| original.to_vec())
    }

    /// What to do with a stranger's first packet, for the connection id `chosen`, while `unproven` others are.
    pub fn judge(&self, unproven: usize, from: SocketAddr, token: &[u8], chosen: &[u8], now: Instant) -> Verdict {
        if unproven >= UNPROVEN_MAX {
            return Verdict::Ignore;
        }
        if !token.is_empty() {
            return self.original(from, token, chosen, now).map_or(Verdict::Ignore, Verdict::AcceptVerified);
        }
        match unproven >= UNPROVEN_UNVERIFIED_MAX {
            true => Verdict::Retry,
            false => Verdict::Accept,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e48_strangers_are_bounded_and_shown_to_be_where_they_say() {
        let admission = Admission::new([7; 32]);
        let (from, other) = (SocketAddr::from(([127, 0, 0, 1], 1)), SocketAddr::from(([127, 0, 0, 1], 2)));
        let now = Instant(1);
        let judge =
            |unproven, from, token: &[u8], chosen: &[u8], now| admission.judge(unproven, from, token, chosen, now);
        assert_eq!(judge(15, from, &[], b"new", now), Verdict::Accept);
        assert_eq!(judge(16, from, &[], b"new", now), Verdict::Retry);
        assert_eq!(judge(64, from, &[], b"new", now), Verdict::Ignore);
        let token = admission.token(from, b"first", b"new", now).expect("hmac works");
        assert_eq!(judge(63, from, &token, b"new", now), Verdict::AcceptVerified(b"first".to_vec()));
        assert_eq!(judge(64, from, &token, b"new", now), Verdict::Ignore);
        assert_eq!(judge(16, other, &token, b"new", now), Verdict::Ignore, "from another address");
        assert_eq!(judge(16, from, &token, b"old", now), Verdict::Ignore, "for another connection");
        assert_eq!(judge(16, from, &token, b"new", Instant(6_000_000_000)), Verdict::Ignore, "too late");
        assert_eq!(judge(16, from, &token[1..], b"new", now), Verdict::Ignore, "mangled");
    }
}
