//! A peer that says what the test wants it to say: a bare QUIC connection.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::task::Poll;

use narad_shards::io::ring::Udp;
use narad_shards::rt::{self};
use narad_shards::wire::{Header, HEADER_BYTES};
use quiche::RecvInfo;

use super::*;
use crate::peer::buffers::Quic;
use crate::peer::greeting;
use crate::peer::proof::{prove, Material, Role, PROOF_BYTES};
use crate::peer::tls::Tls;

pub(super) struct Raw {
    udp: Udp,
    local: SocketAddr,
    to: SocketAddr,
    pub quic: Quic,
}

impl Raw {
    pub fn dial(handle: &RingHandle, to: SocketAddr) -> Raw {
        let udp = handle.udp(loopback(0), false).expect("a free port");
        let local = udp.local_addr().expect("it is bound");
        let mut tls = Tls::new(&PeerSettings::default()).expect("a certificate");
        let quic = tls.dial(&rt::random_u64().to_le_bytes().repeat(2), local, to).expect("it can be dialled");
        Raw { udp, local, to, quic }
    }

    /// Sends and receives until `holds`. `false`: it never came about within a while.
    pub async fn pump(&mut self, mut holds: impl FnMut(&mut Quic) -> bool) -> bool {
        for _ in 0..400 {
            let mut space = vec![0; 1500];
            while let Ok((bytes, _)) = self.quic.send(&mut space) {
                self.udp.send(self.to, space[..bytes].to_vec(), None);
                poll_fn(|cx| self.udp.poll_sent(cx)).await;
            }
            if holds(&mut self.quic) {
                return true;
            }
            let _ = rt::timeout(Duration::from_millis(5), self.receive()).await;
            if self.quic.timeout().is_some_and(|after| after.is_zero()) {
                self.quic.on_timeout();
            }
        }
        false
    }

    async fn receive(&mut self) {
        let info = RecvInfo { from: self.to, to: self.local };
        let mut received = poll_fn(|cx| match self.udp.poll_receive(cx) {
            Poll::Ready(Ok(received)) => Poll::Ready(received),
            _ => Poll::Pending,
        })
        .await;
        for datagram in received.datagrams() {
            let _ = self.quic.recv(datagram, info);
        }
    }

    pub async fn handshake(&mut self) {
        assert!(self.pump(|quic| quic.is_established()).await, "TLS asks for nothing");
    }

    /// What proves `secret` on this session.
    pub fn proof(&mut self, secret: &[u8]) -> [u8; PROOF_BYTES] {
        let material = Material::of(AsMut::<boring::ssl::SslRef>::as_mut(&mut self.quic)).expect("it is established");
        prove(Some(secret), Role::Dialler, &material).expect("hmac works")
    }

    /// Proves the secret and says `hello`; `false`: it is not let in.
    pub async fn introduce(&mut self, secret: &[u8], hello: &Hello) -> bool {
        self.handshake().await;
        let proof = self.proof(secret);
        self.say(0, &proof);
        let proven = self.heard(PROOF_BYTES).await.len() == PROOF_BYTES;
        self.say(0, &greeting::encode(hello));
        proven && !self.heard(10).await.is_empty()
    }

    /// Sends all of `bytes`, unless the other side stops taking them.
    pub async fn pour(&mut self, stream: u64, bytes: &[u8]) -> usize {
        let mut sent = 0;
        for _ in 0..20 {
            let mut give = |quic: &mut Quic| {
                sent += quic.stream_send(stream, &bytes[sent..], false).unwrap_or(0);
                sent == bytes.len() || quic.peer_error().is_some()
            };
            if self.pump(&mut give).await {
                break;
            }
        }
        // What was queued leaves at the next turn.
        self.pump(|_| true).await;
        sent
    }

    /// The headers that have come on a stream, bodies left out.
    pub async fn replies(&mut self, stream: u64, count: usize) -> Vec<Header> {
        let (mut bytes, mut headers): (Vec<u8>, Vec<Header>) = Default::default();
        let mut take = |quic: &mut Quic| {
            let mut space = [0; 4096];
            while let Ok((count, _)) = quic.stream_recv(stream, &mut space) {
                bytes.extend_from_slice(&space[..count]);
            }
            while let Some(header) = bytes.first_chunk::<HEADER_BYTES>().and_then(|header| Header::decode(header).ok())
            {
                if bytes.len() < header.length as usize {
                    break;
                }
                bytes.drain(..header.length as usize);
                headers.push(header);
            }
            headers.len() >= count || quic.peer_error().is_some()
        };
        for _ in 0..20 {
            if self.pump(&mut take).await {
                break;
            }
        }
        assert!(self.quic.peer_error().is_none(), "{:?}", self.quic.peer_error());
        headers
    }

    pub fn say(&mut self, stream: u64, bytes: &[u8]) {
        assert_eq!(self.quic.stream_send(stream, bytes, false), Ok(bytes.len()));
    }

    /// How the other side ends it.
    pub async fn reason(&mut self) -> Option<String> {
        self.pump(|quic| quic.peer_error().is_some()).await;
        self.quic.peer_error().map(|error| String::from_utf8_lossy(&error.reason).into_owned())
    }

    /// Bytes that have come on stream 0.
    pub async fn heard(&mut self, bytes: usize) -> Vec<u8> {
        let mut heard = Vec::new();
        self.pump(|quic| {
            let mut space = [0; 4096];
            while let Ok((count, _)) = quic.stream_recv(0, &mut space) {
                heard.extend_from_slice(&space[..count]);
            }
            heard.len() >= bytes
        })
        .await;
        heard
    }
}
