//! Stream 0 of one connection: what this side has heard on it, and what it still has to say. `link` decides when.

use std::sync::Arc;

use boring::ssl::SslRef;
use narad_shards::remote::Hello;

use super::buffers::Quic;
use super::greeting::{self, Reader};
use super::proof::{prove, verify, Material, Role};

pub(super) struct Greeter {
    role: Role,
    secret: Option<Arc<[u8]>>,
    /// From the end of the TLS handshake on.
    material: Option<Material>,
    heard: Reader,
    to_say: Vec<u8>,
}

impl Greeter {
    pub fn new(role: Role, secret: Option<Arc<[u8]>>) -> Greeter {
        Greeter { role, secret, material: None, heard: Reader::default(), to_say: Vec::new() }
    }

    /// The TLS handshake is done.
    pub fn established(&mut self, quic: &mut Quic) {
        self.material = Material::of(AsMut::<SslRef>::as_mut(quic));
    }

    pub fn say_proof(&mut self) -> Result<(), &'static str> {
        let material = self.material.as_ref();
        let proof = material.and_then(|material| prove(self.secret.as_deref(), self.role, material));
        self.to_say.extend_from_slice(&proof.ok_or("the TLS library gives no keying material")?);
        Ok(())
    }

    pub fn say_hello(&mut self, hello: &Hello) {
        self.to_say.extend_from_slice(&greeting::encode(hello));
    }

    /// Whether the other side knows the secret; `None` until its proof has arrived.
    pub fn hear_proof(&mut self, quic: &mut Quic) -> Option<bool> {
        self.hear(quic);
        let proof = self.heard.proof()?;
        let role = self.role.other();
        let proven =
            self.material.as_ref().is_some_and(|material| verify(self.secret.as_deref(), role, material, proof));
        if proven {
            self.heard.accept_proof();
        }
        Some(proven)
    }

    /// What the other side says of itself; `None` until it has arrived.
    pub fn hear_hello(&mut self, quic: &mut Quic) -> Option<Result<Hello, &'static str>> {
        self.hear(quic);
        self.heard.hello()
    }

    fn hear(&mut self, quic: &mut Quic) {
        loop {
            let mut space = [0; 1024];
            let wanted = self.heard.wanted().min(space.len());
            if wanted == 0 {
                return;
            }
            match quic.stream_recv(0, &mut space[..wanted]) {
                Ok((count, _)) if count > 0 => self.heard.push(&space[..count]),
                _ => return,
            }
        }
    }

    /// Gives QUIC as much of what is to be said as it takes.
    pub fn transmit(&mut self, quic: &mut Quic) -> Result<(), quiche::Error> {
        while !self.to_say.is_empty() {
            match quic.stream_send(0, &self.to_say, false) {
                Ok(count @ 1..) => drop(self.to_say.drain(..count)),
                Ok(_) | Err(quiche::Error::Done) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
