//! What `narad-bench peer` holds the peer plane against: two QUIC connections made as an endpoint makes them, on one
//! thread, that hand each other their packets. No socket, no system call, no queue: what is left is QUIC and its crypto.

use std::net::SocketAddr;

use narad_shards::io::{AlignedBuf, Slice};
use narad_shards::wire::Lane;
use quiche::RecvInfo;

use super::admission::CID_BYTES;
use super::buffers::{Piece, Quic};
use super::queue::stream_of;
use super::tls::Tls;
use super::{PeerSettings, DATAGRAM_BYTES_MAX};

/// Bytes that one side says before the other has its turn, as with a send that the kernel cuts.
const TURN_BYTES: usize = 64 << 10;
/// Such as no packet ends in: zeros are what packets are padded with.
const RESET_TOKEN: u128 = 0x5eed_0123_4567_89ab_cdef_0123_4567_89ab;
/// Turns without any progress, after which the two will never make any.
const IDLE_TURNS_MAX: usize = 64;

/// Two connections, dialler first, that have shaken hands.
pub struct InMemory {
    ends: [Quic; 2],
    addresses: [SocketAddr; 2],
    packet: Vec<u8>,
    arrived: AlignedBuf,
}

impl InMemory {
    /// `frame_bytes`: the longest frame that will be carried.
    pub fn connect(settings: &PeerSettings, frame_bytes: usize) -> Result<InMemory, String> {
        let mut tls = Tls::new(settings)?;
        let addresses = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let failed = |error| format!("cannot make a QUIC connection: {error:?}");
        let dialler = tls.dial(&[1; CID_BYTES], addresses[0], addresses[1]).map_err(failed)?;
        let acceptor = tls.accept(&[2; CID_BYTES], None, RESET_TOKEN, addresses[1], addresses[0]).map_err(failed)?;
        let (packet, arrived) = (vec![0; DATAGRAM_BYTES_MAX], AlignedBuf::zeroed(frame_bytes));
        let mut pair = InMemory { ends: [dialler, acceptor], addresses, packet, arrived };
        for _ in 0..IDLE_TURNS_MAX {
            pair.pass(0)?;
            pair.pass(1)?;
            if pair.ends.iter().all(|end| end.is_established()) {
                return Ok(pair);
            }
        }
        Err("the handshake did not come to an end".to_owned())
    }

    /// The other end takes what end `from` has to say, up to one turn of it.
    fn pass(&mut self, from: usize) -> Result<usize, String> {
        let mut passed = 0;
        while passed < TURN_BYTES {
            let bytes = match self.ends[from].send(&mut self.packet) {
                Ok((bytes, _)) => bytes,
                Err(quiche::Error::Done) => break,
                Err(error) => return Err(format!("QUIC does not send: {error:?}")),
            };
            let info = RecvInfo { from: self.addresses[from], to: self.addresses[1 - from] };
            let taken = self.ends[1 - from].recv(&mut self.packet[..bytes], info);
            passed += taken.map_err(|error| format!("QUIC does not receive: {error:?}"))?;
        }
        Ok(passed)
    }

    /// Carries one frame from the dialler to memory of the acceptor.
    pub fn carry(&mut self, frame: &Slice) -> Result<(), String> {
        let stream = stream_of(Lane::Produce);
        let (mut given, mut arrived, mut idle) = (0, 0, 0);
        while arrived < frame.len() {
            if given < frame.len() {
                let end = frame.len().min(given + TURN_BYTES);
                match self.ends[0].stream_send_zc(stream, Piece::Slice(frame.slice(given..end)), false) {
                    Ok((taken, _)) => given += taken,
                    Err(quiche::Error::Done) => {}
                    Err(error) => return Err(format!("QUIC takes nothing: {error:?}")),
                }
            }
            let mut progress = self.pass(0)?;
            while let Ok((bytes, _)) = self.ends[1].stream_recv(stream, &mut self.arrived[arrived..frame.len()]) {
                arrived += bytes;
                if arrived == frame.len() {
                    break;
                }
            }
            progress += self.pass(1)?;
            idle = if progress == 0 { idle + 1 } else { 0 };
            if idle > IDLE_TURNS_MAX {
                return Err(format!("only {arrived} of {} bytes arrived", frame.len()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_connections_in_memory_carry_frames_of_any_length() {
        for datagram_bytes in [1452, 16_383] {
            let settings = PeerSettings { datagram_bytes, ..PeerSettings::default() };
            let mut pair = InMemory::connect(&settings, 1 << 20).expect("they understand each other");
            for bytes in [1, 5000, 1 << 20] {
                let body: Vec<u8> = (0..bytes).map(|at| (at / 251) as u8).collect();
                pair.carry(&Slice::copy_from(&body)).expect("it arrives");
                assert_eq!(&pair.arrived[..bytes], &body[..]);
            }
        }
    }
}
