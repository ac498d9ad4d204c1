//! Stream 0 of a connection: the dialler's proof, the acceptor's proof, the dialler's hello, the acceptor's hello. Pure.
//!
//! Nobody says who he is before the other side has proven the secret, and no more than a proof is read before that.

use narad_shards::remote::Hello;

use super::proof::PROOF_BYTES;

/// Longest hello that is read.
const HELLO_BYTES_MAX: usize = 16 << 10;
/// In the place of a shard's number: the control endpoint.
const NO_SHARD: u32 = u32::MAX;

/// What the other side has said on stream 0 so far.
#[derive(Default)]
pub(super) struct Reader {
    bytes: Vec<u8>,
    proven: bool,
}

impl Reader {
    /// Bytes that may be read now. Never more than the proof before that was accepted (E48).
    pub fn wanted(&self) -> usize {
        let whole = match self.proven {
            false => PROOF_BYTES,
            true => PROOF_BYTES + 4 + self.hello_bytes().unwrap_or(0),
        };
        whole.saturating_sub(self.bytes.len())
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The proof, once it is whole and until it was accepted.
    pub fn proof(&self) -> Option<&[u8; PROOF_BYTES]> {
        self.bytes.first_chunk().filter(|_| !self.proven)
    }

    pub fn accept_proof(&mut self) {
        self.proven = true;
    }

    fn hello_bytes(&self) -> Option<usize> {
        let length = self.bytes.get(PROOF_BYTES..)?.first_chunk::<4>()?;
        Some((u32::from_le_bytes(*length) as usize).min(HELLO_BYTES_MAX + 1))
    }

    /// The hello, once it is whole.
    pub fn hello(&self) -> Option<Result<Hello, &'static str>> {
        let bytes = self.hello_bytes().filter(|_| self.proven)?;
        if bytes > HELLO_BYTES_MAX {
            return Some(Err("its hello is too long"));
        }
        let hello = self.bytes.get(PROOF_BYTES + 4..PROOF_BYTES + 4 + bytes)?;
        Some(decode(hello).ok_or("its hello is malformed"))
    }
}

/// Length and bytes of a hello. Lists and names beyond their bounds are cut.
pub(super) fn encode(hello: &Hello) -> Vec<u8> {
    let mut bytes = vec![0; 4];
    bytes.extend_from_slice(&hello.cluster_id.to_le_bytes());
    bytes.extend_from_slice(&hello.boot_id.to_le_bytes());
    bytes.extend_from_slice(&hello.disk_id.to_le_bytes());
    bytes.extend_from_slice(&hello.newest_command_type.to_le_bytes());
    bytes.extend_from_slice(&hello.shard.map_or(NO_SHARD, u32::from).to_le_bytes());
    bytes.extend_from_slice(&hello.commit_credit_bytes.to_le_bytes());
    for text in [&hello.node, &hello.build] {
        let cut = text.floor_char_boundary(text.len().min(1024));
        bytes.extend_from_slice(&(cut as u16).to_le_bytes());
        bytes.extend_from_slice(&text.as_bytes()[..cut]);
    }
    let ports = &hello.shard_ports[..hello.shard_ports.len().min(4096)];
    bytes.extend_from_slice(&(ports.len() as u16).to_le_bytes());
    ports.iter().for_each(|port| bytes.extend_from_slice(&port.to_le_bytes()));
    let operations = &hello.operations[..hello.operations.len().min(1024)];
    bytes.extend_from_slice(&(operations.len() as u16).to_le_bytes());
    for (operation, version) in operations {
        bytes.extend_from_slice(&operation.to_le_bytes());
        bytes.push(*version);
    }
    let length = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// `None`: not a hello. Bytes behind it are of a newer build and ignored.
pub(super) fn decode(mut bytes: &[u8]) -> Option<Hello> {
    fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
        let (front, rest) = bytes.split_first_chunk::<N>()?;
        *bytes = rest;
        Some(*front)
    }
    fn text(bytes: &mut &[u8]) -> Option<String> {
        let length = usize::from(u16::from_le_bytes(take(bytes)?));
        let (front, rest) = bytes.split_at_checked(length)?;
        *bytes = rest;
        String::from_utf8(front.to_vec()).ok()
    }
    let bytes = &mut bytes;
    let cluster_id = u64::from_le_bytes(take(bytes)?);
    let boot_id = u64::from_le_bytes(take(bytes)?);
    let disk_id = u64::from_le_bytes(take(bytes)?);
    let newest_command_type = u64::from_le_bytes(take(bytes)?);
    let shard = match u32::from_le_bytes(take(bytes)?) {
        NO_SHARD => None,
        number => Some(number.try_into().ok()?),
    };
    let commit_credit_bytes = u32::from_le_bytes(take(bytes)?);
    let (node, build) = (text(bytes)?, text(bytes)?);
    let ports = u16::from_le_bytes(take(bytes)?);
    let shard_ports = (0..ports).map(|_| take(bytes).map(u16::from_le_bytes)).collect::<Option<_>>()?;
    let count = u16::from_le_bytes(take(bytes)?);
    let operation = |_| take::<3>(bytes).map(|[low, high, version]| (u16::from_le_bytes([low, high]), version));
    let operations = (0..count).map(operation).collect::<Option<_>>()?;
    Some(Hello {
        cluster_id,
        node,
        boot_id,
        disk_id,
        shard,
        shard_ports,
        build,
        newest_command_type,
        operations,
        commit_credit_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            cluster_id: 7,
            node: "node-1".to_owned(),
            boot_id: u64::MAX,
            disk_id: 3,
            shard: None,
            shard_ports: vec![7944, 7945],
            build: "0.1.0".to_owned(),
            newest_command_type: 12,
            operations: vec![(10, 1), (66, 2)],
            commit_credit_bytes: 8 << 20,
        }
    }

    #[test]
    fn a_hello_comes_back_as_it_went_and_cut_short_it_is_none() {
        for hello in [hello(), Hello { shard: Some(3), ..hello() }, Hello::default()] {
            let bytes = encode(&hello);
            assert_eq!(decode(&bytes[4..]), Some(hello));
            assert!((4..bytes.len()).all(|end| decode(&bytes[4..end]).is_none()));
        }
    }

    #[test]
    fn e48_a_stranger_is_read_for_no_more_than_his_proof() {
        let mut reader = Reader::default();
        assert_eq!(reader.wanted(), PROOF_BYTES);
        assert!(reader.wanted() <= 64);
        reader.push(&[1; PROOF_BYTES]);
        assert_eq!((reader.wanted(), reader.proof()), (0, Some(&[1; PROOF_BYTES])));
        assert!(reader.hello().is_none());
        reader.accept_proof();
        assert_eq!((reader.wanted(), reader.proof()), (4, None));
        let bytes = encode(&hello());
        reader.push(&bytes[..4]);
        assert_eq!(reader.wanted(), bytes.len() - 4);
        reader.push(&bytes[4..]);
        assert_eq!((reader.wanted(), reader.hello()), (0, Some(Ok(hello()))));
    }

    #[test]
    fn a_hello_of_any_length_is_not_waited_for() {
        let mut reader = Reader::default();
        reader.push(&[0; PROOF_BYTES]);
        reader.accept_proof();
        reader.push(&u32::MAX.to_le_bytes());
        assert_eq!(reader.hello(), Some(Err("its hello is too long")));
    }
}
