//! The `hwm` file: the exact boundary of a cleanly closed log, in 8 bytes. Pure.
//!
//! The low 48 bits are the boundary, the high 16 bits a check of it: a flipped bit must not hide records that were
//! confirmed. What does not verify counts as empty, which is always safe (S47). To empty the file is to write eight
//! zeros: one durable write into one sector, which, unlike a failed truncation, can be tried again honestly.

pub const FILE_NAME: &str = "hwm";
pub const BYTES: usize = 8;

/// States no boundary.
pub const EMPTY: [u8; BYTES] = [0; BYTES];

const OFFSET_BITS: u32 = 48;

fn check(offset: u64) -> u64 {
    let crc = crc32c::crc32c_append(0x6877_6d31, &offset.to_le_bytes());
    u64::from((crc ^ (crc >> 16)) as u16)
}

/// `None` for an offset that does not fit: 2^48 records in one partition, which then simply closes without a boundary.
pub fn encode(boundary: u64) -> Option<[u8; BYTES]> {
    (boundary >> OFFSET_BITS == 0).then(|| (boundary | check(boundary) << OFFSET_BITS).to_le_bytes())
}

/// The boundary that a file of exactly 8 bytes states; `None` for an empty, short, long or damaged one.
pub fn decode(bytes: &[u8]) -> Option<u64> {
    let word = u64::from_le_bytes(bytes.try_into().ok()?);
    let boundary = word & ((1 << OFFSET_BITS) - 1);
    (word >> OFFSET_BITS == check(boundary)).then_some(boundary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn s44_eight_bytes_state_a_boundary_and_nothing_else_does() {
        for boundary in [0, 1, 1 << 20, (1 << 48) - 1] {
            assert_eq!(encode(boundary).and_then(|bytes| decode(&bytes)), Some(boundary));
        }
        assert_eq!(encode(1 << 48), None);
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[0; 7]), None);
        assert_eq!(decode(&EMPTY), None, "not a boundary of 0");
        assert_eq!(decode(&[0; 9]), None);
    }

    #[test]
    fn a_flipped_bit_is_no_boundary() {
        let bytes = encode(123_456).expect("small");
        for bit in 0..64 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&damaged), None, "bit {bit}");
        }
    }
}
