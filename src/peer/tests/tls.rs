//! Certificates on both sides (E49).

use std::path::{Path, PathBuf};

use boring::asn1::Asn1Time;
use boring::bn::BigNum;
use boring::ec::{EcGroup, EcKey};
use boring::hash::MessageDigest;
use boring::nid::Nid;
use boring::pkey::{PKey, Private};
use boring::x509::extension::{BasicConstraints, ExtendedKeyUsage, SubjectAlternativeName};
use boring::x509::{X509Extension, X509Name, X509};

use super::*;
use crate::peer::{check_files, wall_clock, TlsFiles, SHARED_NAME};

struct Authority {
    certificate: X509,
    key: PKey<Private>,
}

fn key() -> PKey<Private> {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).expect("a curve");
    PKey::from_ec_key(EcKey::generate(&group).expect("a key")).expect("a key")
}

/// A certificate for `name`, signed by `by`, or an authority that signs itself.
fn certificate(name: &str, by: Option<&Authority>) -> Authority {
    let both = ExtendedKeyUsage::new().server_auth().client_auth().build().expect("extension");
    certificate_for(name, by, both, 2)
}

/// The same for one usage, or one that ends in `days`.
fn certificate_for(name: &str, by: Option<&Authority>, usage: X509Extension, days: u32) -> Authority {
    let key = key();
    let mut subject = X509Name::builder().expect("a name");
    subject.append_entry_by_text("CN", name).expect("a name");
    let subject = subject.build();
    let mut builder = X509::builder().expect("a certificate");
    builder.set_version(2).expect("version");
    let serial = BigNum::from_u32(7).and_then(|serial| serial.to_asn1_integer()).expect("a serial");
    builder.set_serial_number(&serial).expect("serial");
    builder.set_subject_name(&subject).expect("subject");
    builder.set_issuer_name(by.map_or(&subject, |by| by.certificate.subject_name())).expect("issuer");
    let (before, after) = (Asn1Time::days_from_now(0).expect("now"), Asn1Time::days_from_now(days).expect("later"));
    builder.set_not_before(&before).expect("dates");
    builder.set_not_after(&after).expect("dates");
    builder.set_pubkey(&key).expect("key");
    let extension = match by {
        None => BasicConstraints::new().critical().ca().build().expect("extension"),
        Some(_) => {
            builder.append_extension(&usage).expect("extension");
            let context = builder.x509v3_context(None, None);
            SubjectAlternativeName::new().dns(name).build(&context).expect("extension")
        }
    };
    builder.append_extension(&extension).expect("extension");
    builder.sign(by.map_or(&key, |by| &by.key), MessageDigest::sha256()).expect("signature");
    Authority { certificate: builder.build(), key }
}

fn write(folder: &Path, leaf: &Authority, authority: &Authority) -> TlsFiles {
    let file = |name: &str, bytes: Vec<u8>| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("the temporary directory is writable");
        path
    };
    TlsFiles {
        certificate: file("node.pem", leaf.certificate.to_pem().expect("pem")),
        key: file("node.key", leaf.key.private_key_to_pem_pkcs8().expect("pem")),
        authorities: file("ca.pem", authority.certificate.to_pem().expect("pem")),
    }
}

/// Three files in a folder of their own, removed at the end.
struct Files(PathBuf, TlsFiles);

impl Files {
    fn new(name: &str, leaf: &Authority, authority: &Authority) -> Files {
        let folder = std::env::temp_dir().join(format!("narad-peer-tls-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the temporary directory is writable");
        let files = write(&folder, leaf, authority);
        Files(folder, files)
    }

    fn settings(&self) -> PeerSettings {
        PeerSettings { tls: Some(self.1.clone()), ..secret(SECRET) }
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whether a call from an endpoint with one set-up reaches one with the other.
fn reaches(mine: PeerSettings, theirs: PeerSettings) -> Result<(), CallError> {
    run(move |handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, mine), start(&handle, &other, theirs));
        let outcome = ask(&a, b.local_addr()).await.map(drop);
        assert_eq!(outcome.is_ok(), !other.met.borrow().is_empty());
        outcome
    })
}

#[test]
fn k44_a_peer_that_does_not_chain_to_the_authorities_is_refused_in_either_direction() {
    let (ours, foreign) = (certificate("ours", None), certificate("foreign", None));
    let good = Files::new("good", &certificate(SHARED_NAME, Some(&ours)), &ours);
    let twin = Files::new("twin", &certificate(SHARED_NAME, Some(&ours)), &ours);
    let stranger = Files::new("stranger", &certificate(SHARED_NAME, Some(&foreign)), &ours);
    let misnamed = Files::new("misnamed", &certificate("client.example", Some(&ours)), &ours);
    assert_eq!(reaches(good.settings(), twin.settings()), Ok(()));
    for (name, bad) in [("stranger", stranger.settings()), ("misnamed", misnamed.settings()), ("none", secret(SECRET))]
    {
        for (mine, theirs) in [(good.settings(), bad.clone()), (bad, good.settings())] {
            let outcome = reaches(mine, theirs);
            assert!(matches!(&outcome, Err(CallError::NotSent(_))), "{name}: {outcome:?}");
        }
    }
    // The secret is asked for all the same.
    let guessed = PeerSettings { secret: Some(b"guessed"[..].into()), ..twin.settings() };
    assert!(reaches(good.settings(), guessed).is_err());
}

#[test]
fn e49_new_certificates_are_for_new_connections_and_a_bad_set_changes_nothing() {
    let (ours, next) = (certificate("ours", None), certificate("next", None));
    let files = Files::new("reload", &certificate(SHARED_NAME, Some(&ours)), &ours);
    let peer = Files::new("reload-peer", &certificate(SHARED_NAME, Some(&ours)), &ours);
    let (settings, theirs) = (files.settings(), peer.settings());
    run(move |handle| async move {
        let (one, other) = (Counting::new("one", 1), Counting::new("other", 2));
        let (a, b) = (start(&handle, &one, settings), start(&handle, &other, theirs.clone()));
        ask(&a, b.local_addr()).await.expect("both are of one authority");
        std::fs::write(&files.1.key, b"no key").expect("writable");
        let error = a.reload().expect_err("it cannot be used");
        assert!(error.contains("node.key"), "{error}");
        let c = start(&handle, &Counting::new("third", 3), theirs.clone());
        ask(&a, c.local_addr()).await.expect("the former set is still in use");
        write(&files.0, &certificate(SHARED_NAME, Some(&next)), &next);
        a.reload().expect("it is whole again");
        ask(&a, b.local_addr()).await.expect("a connection that is up stays up");
        let d = start(&handle, &Counting::new("fourth", 4), theirs);
        ask(&a, d.local_addr()).await.map(drop).expect_err("a new one is of another authority");
    });
}

#[test]
fn operations_3_7_files_that_no_peer_would_trust_are_refused_by_setting() {
    let (ours, foreign) = (certificate("ours", None), certificate("foreign", None));
    let good = Files::new("check-good", &certificate(SHARED_NAME, Some(&ours)), &ours);
    let validity = check_files(&good.1).expect("peers trust it");
    let two_days = 2 * 86_400;
    assert!((validity.leaf - wall_clock() - two_days).abs() < 60, "{validity:?}");
    assert!((validity.authorities - wall_clock() - two_days).abs() < 60, "{validity:?}");

    let server = || ExtendedKeyUsage::new().server_auth().build().expect("extension");
    let stranger = Files::new("check-stranger", &certificate(SHARED_NAME, Some(&foreign)), &ours);
    let misnamed = Files::new("check-misnamed", &certificate("client.example", Some(&ours)), &ours);
    let half = Files::new("check-half", &certificate_for(SHARED_NAME, Some(&ours), server(), 2), &ours);
    for (files, says) in [(&stranger, "refuse each other"), (&misnamed, SHARED_NAME), (&half, "TLS client")] {
        let error = check_files(&files.1).expect_err(says);
        assert!(error.starts_with("security.cluster_tls_cert_file: cannot use ") && error.contains(says), "{error}");
    }
    let over = Files::new("check-over", &certificate_for(SHARED_NAME, Some(&ours), server(), 0), &ours);
    assert!(check_files(&over.1).expect("a node whose certificate has expired starts").has_expired(wall_clock()));
    std::fs::write(&good.1.key, b"no key").expect("writable");
    let error = check_files(&good.1).expect_err("no key");
    assert!(error.starts_with("security.cluster_tls_key_file: "), "{error}");
    std::fs::remove_file(&good.1.authorities).expect("it is there");
    let error = check_files(&good.1).expect_err("no authorities");
    assert!(error.starts_with("security.cluster_tls_ca_file: ") && error.contains("ca.pem"), "{error}");
}
