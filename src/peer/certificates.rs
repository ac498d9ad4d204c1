//! Whether three files make a node that its peers trust, and until when. Asked before they are used: an endpoint that
//! nobody trusts would be up and alone.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use boring::asn1::{Asn1Time, Asn1TimeRef};
use boring::x509::X509;
use quiche::RecvInfo;

use super::buffers::Quic;
use super::tls::{named, Tls};
use super::{PeerSettings, TlsFiles, DATAGRAM_BYTES_MAX, SHARED_NAME};

/// When certificates end, in seconds since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub leaf: i64,
    /// The first of the authorities that ends.
    pub authorities: i64,
}

impl Validity {
    pub fn has_expired(&self, now: i64) -> bool {
        self.leaf <= now || self.authorities <= now
    }
}

/// Seconds since the epoch.
pub fn wall_clock() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

/// Judges a set of files. `Err` names setting and file. Certificates that have expired are no fault of this check: a
/// node that runs on them serves its clients all the same.
pub fn check_files(files: &TlsFiles) -> Result<Validity, String> {
    let leaf = read(files, Part::Certificate)?;
    let authorities = read(files, Part::Authorities)?;
    let [first, ..] = &leaf[..] else {
        return Err(named(Part::Certificate.of(files), "the file holds no certificate"));
    };
    if !first.check_host(SHARED_NAME).unwrap_or(false) {
        let why = format!("it is not for the DNS name {SHARED_NAME}, which every node's must have");
        return Err(named(Part::Certificate.of(files), why));
    }
    let ends = |certificate: &X509| seconds(certificate.not_after());
    let authorities = authorities.iter().map(ends).collect::<Result<Vec<_>, _>>();
    let authorities = authorities.map_err(|error| named(Part::Authorities.of(files), error))?;
    let Some(authorities) = authorities.into_iter().min() else {
        return Err(named(Part::Authorities.of(files), "the file holds no certificate"));
    };
    let leaf = ends(first).map_err(|error| named(Part::Certificate.of(files), error))?;
    let validity = Validity { leaf, authorities };
    let mut tls = Tls::new(&PeerSettings { tls: Some(files.clone()), ..PeerSettings::default() })?;
    // What has expired is refused by everybody, so nothing else would come to light.
    if !validity.has_expired(wall_clock()) {
        rehearse(&mut tls).map_err(|error| named(Part::Certificate.of(files), error))?;
    }
    Ok(validity)
}

#[derive(Clone, Copy)]
enum Part {
    Certificate,
    Authorities,
}

impl Part {
    fn of(self, files: &TlsFiles) -> (&'static str, &std::path::Path) {
        match self {
            Part::Certificate => ("certificate", &files.certificate),
            Part::Authorities => ("authorities", &files.authorities),
        }
    }
}

fn read(files: &TlsFiles, part: Part) -> Result<Vec<X509>, String> {
    let (_, path) = part.of(files);
    let text = std::fs::read(path).map_err(|error| named(part.of(files), error))?;
    X509::stack_from_pem(&text).map_err(|error| named(part.of(files), error))
}

fn seconds(time: &Asn1TimeRef) -> Result<i64, boring::error::ErrorStack> {
    let since = Asn1Time::from_unix(0)?.diff(time)?;
    Ok(i64::from(since.days) * 86_400 + i64::from(since.secs))
}

/// One connection between two imagined nodes that both have these files: chain, both usages and key at once, judged by
/// what judges them later.
fn rehearse(tls: &mut Tls) -> Result<(), String> {
    /// A handshake takes three.
    const ROUNDS: usize = 10;
    let refused = |error: quiche::Error| {
        format!(
            "two nodes with these files would refuse each other ({error}): it must be signed by one of the authorities, \
             be valid by now, and serve for both TLS server and TLS client"
        )
    };
    let (one, other) = (SocketAddr::from(([127, 0, 0, 1], 1)), SocketAddr::from(([127, 0, 0, 1], 2)));
    // A token of zeros would be taken for the padding of a datagram.
    let reset_token = u128::MAX / 3;
    let mut dialled = tls.dial(&[1; 16], one, other).map_err(refused)?;
    let mut accepted = tls.accept(&[2; 16], None, reset_token, other, one).map_err(refused)?;
    for _ in 0..ROUNDS {
        carry(&mut dialled, &mut accepted).map_err(refused)?;
        carry(&mut accepted, &mut dialled).map_err(refused)?;
        if dialled.is_established() && accepted.is_established() {
            return Ok(());
        }
    }
    Err(refused(quiche::Error::TlsFail))
}

fn carry(from: &mut Quic, to: &mut Quic) -> Result<(), quiche::Error> {
    let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        match from.send(&mut datagram) {
            Ok((length, sent)) => {
                to.recv(&mut datagram[..length], RecvInfo { from: sent.from, to: sent.to })?;
            }
            Err(quiche::Error::Done) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}
