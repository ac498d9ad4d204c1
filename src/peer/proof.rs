//! Proof of the cluster secret (K42, K43): an HMAC over keying material that only the two ends of one TLS session can
//! export. It is worth nothing on another session, and each role's is worth nothing to the other.

use boring::hash::hmac_sha256;
use boring::ssl::SslRef;

/// Bytes of a proof on the wire: what kind it is, and the code.
pub(super) const PROOF_BYTES: usize = 33;
const MATERIAL_BYTES: usize = 32;
/// RFC 8446, 7.5: both ends derive the same bytes, nobody else can.
const EXPORTER_LABEL: &str = "EXPORTER-narad-peer-proof";

const OPEN: u8 = 0;
const SECRET: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Dialler,
    Acceptor,
}

impl Role {
    pub fn other(self) -> Role {
        match self {
            Role::Dialler => Role::Acceptor,
            Role::Acceptor => Role::Dialler,
        }
    }

    fn name(self) -> &'static [u8] {
        match self {
            Role::Dialler => b"narad peer dialler",
            Role::Acceptor => b"narad peer acceptor",
        }
    }
}

/// What a session gives both its ends to prove the secret over.
pub(super) struct Material([u8; MATERIAL_BYTES]);

impl Material {
    /// After the handshake only.
    pub fn of(session: &SslRef) -> Option<Material> {
        let mut bytes = [0; MATERIAL_BYTES];
        session.export_keying_material(&mut bytes, EXPORTER_LABEL, None).ok()?;
        Some(Material(bytes))
    }

    #[cfg(test)]
    pub fn fixed(byte: u8) -> Material {
        Material([byte; MATERIAL_BYTES])
    }
}

/// The proof that `role` gives. Without a secret it says that there is none.
pub(super) fn prove(secret: Option<&[u8]>, role: Role, material: &Material) -> Option<[u8; PROOF_BYTES]> {
    let mut proof = [0; PROOF_BYTES];
    let Some(secret) = secret else {
        proof[0] = OPEN;
        return Some(proof);
    };
    proof[0] = SECRET;
    let code = hmac_sha256(secret, &[role.name(), &[0], &material.0].concat()).ok()?;
    proof[1..].copy_from_slice(&code);
    Some(proof)
}

/// Whether `proof` is what the holder of our secret gives in `role`, in constant time. Both sides must agree on whether
/// there is one at all.
pub(super) fn verify(secret: Option<&[u8]>, role: Role, material: &Material, proof: &[u8; PROOF_BYTES]) -> bool {
    prove(secret, role, material).is_some_and(|expected| boring::memcmp::eq(&expected, proof))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Option<&[u8]> = Some(b"a secret of some length");

    #[test]
    fn k42_only_the_secret_on_this_session_in_this_role_proves_it() {
        let session = Material::fixed(1);
        let proof = prove(KEY, Role::Dialler, &session).expect("hmac works");
        assert!(verify(KEY, Role::Dialler, &session, &proof));
        assert!(!verify(KEY, Role::Acceptor, &session, &proof), "reflected");
        assert!(!verify(KEY, Role::Dialler, &Material::fixed(2), &proof), "replayed on another session (K43)");
        assert!(!verify(Some(b"another secret"), Role::Dialler, &session, &proof));
        for at in 0..PROOF_BYTES {
            let mut changed = proof;
            changed[at] ^= 1;
            assert!(!verify(KEY, Role::Dialler, &session, &changed), "byte {at}");
        }
    }

    #[test]
    fn k42_both_sides_have_a_secret_or_neither() {
        let session = Material::fixed(1);
        let open = prove(None, Role::Dialler, &session).expect("nothing can fail");
        let closed = prove(KEY, Role::Dialler, &session).expect("hmac works");
        assert!(verify(None, Role::Dialler, &session, &open));
        assert!(!verify(KEY, Role::Dialler, &session, &open));
        assert!(!verify(None, Role::Dialler, &session, &closed));
    }
}
