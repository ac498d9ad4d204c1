//! What the bytes per second of a peer connection are held against: QUIC without sockets, and TCP without QUIC.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use narad::peer::ceiling::InMemory;
use narad::peer::PeerSettings;
use narad_shards::io::Slice;

use crate::load::cpu;
use crate::parts::nanos;
use crate::run::Failure;

/// Bytes that one read of the TCP stream takes at most.
const READ_BYTES: usize = 256 << 10;

/// Bytes per second, and per second that the threads which moved them were on a CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rate {
    pub per_second: f64,
    /// Of all threads together.
    pub per_cpu_second: f64,
    /// Of the thread that needed most: what they would reach with a CPU each and nothing to wait for.
    pub per_busiest_cpu_second: f64,
}

impl Rate {
    /// `cpu_nanos`: of each thread.
    pub fn of(bytes: u64, nanos: u64, cpu_nanos: &[u64]) -> Rate {
        let per = |nanos: u64| bytes as f64 * 1e9 / nanos.max(1) as f64;
        Rate {
            per_second: per(nanos),
            per_cpu_second: per(cpu_nanos.iter().sum()),
            per_busiest_cpu_second: per(cpu_nanos.iter().copied().max().unwrap_or_default()),
        }
    }
}

/// Two QUIC connections that hand each other their packets on this thread, for about `each`.
pub fn in_memory(settings: &PeerSettings, frame: &Slice, each: Duration) -> Result<Rate, Failure> {
    let mut pair = InMemory::connect(settings, frame.len()).map_err(Failure)?;
    // Windows have grown by then.
    pair.carry(frame).map_err(Failure)?;
    let (start, cpu_start, mut bytes) = (nanos(), cpu::thread_cpu(), 0);
    while bytes == 0 || nanos() - start < each.as_nanos() as u64 {
        pair.carry(frame).map_err(Failure)?;
        bytes += frame.len() as u64;
    }
    Ok(Rate::of(bytes, nanos() - start, &[(cpu::thread_cpu() - cpu_start).as_nanos() as u64]))
}

/// A TCP stream over loopback, between a thread on either CPU.
pub fn tcp(cpus: [usize; 2], frame: &Slice, each: Duration) -> Result<Rate, Failure> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    let (start, bytes) = (nanos(), frame.to_vec());
    let sender = std::thread::spawn(move || -> Result<u64, Failure> {
        cpu::pin(&[cpus[0]], "--cpus")?;
        let mut stream = TcpStream::connect(address)?;
        stream.write_all(&bytes)?;
        while nanos() - start < each.as_nanos() as u64 {
            stream.write_all(&bytes)?;
        }
        Ok(cpu::thread_cpu().as_nanos() as u64)
    });
    let receiver = std::thread::spawn(move || -> Result<(u64, u64), Failure> {
        cpu::pin(&[cpus[1]], "--cpus")?;
        let (mut stream, _) = listener.accept()?;
        let (mut space, mut bytes) = (vec![0; READ_BYTES], 0);
        loop {
            match stream.read(&mut space)? {
                0 => return Ok((bytes, cpu::thread_cpu().as_nanos() as u64)),
                count => bytes += count as u64,
            }
        }
    });
    let panicked = |_| Failure("a thread of the TCP stream has panicked".to_owned());
    let sender_cpu = sender.join().map_err(panicked)??;
    let (bytes, receiver_cpu) = receiver.join().map_err(panicked)??;
    Ok(Rate::of(bytes, nanos() - start, &[sender_cpu, receiver_cpu]))
}
