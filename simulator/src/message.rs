//! The content of a simulated record: every byte follows from its number, so that one wrong byte shows.

use narad_shards::rt::sim::Rng;

/// A payload of at least this length starts with the number; a shorter one has it in the key.
const NUMBER_BYTES: usize = 8;

/// What a record was produced with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    pub number: u64,
    pub payload_bytes: usize,
    /// Empty: no key.
    pub key: Vec<u8>,
    pub partition: Option<u32>,
}

impl Content {
    /// Draws size, key and pin. Sizes are 1 B to 64 KiB, mostly small.
    pub fn draw(number: u64, partitions: u32, rng: &mut Rng) -> Content {
        let payload_bytes = match rng.below(20) {
            0..=12 => rng.range(1, 200),
            13..=17 => rng.range(200, 5_000),
            18 => rng.range(4_000, 4_200),
            _ => rng.range(5_000, (64 << 10) + 1),
        } as usize;
        let key = if payload_bytes < NUMBER_BYTES {
            format!("#{number:x}").into_bytes()
        } else if rng.chance(1, 2) {
            format!("key-{}", rng.below(8)).into_bytes()
        } else {
            Vec::new()
        };
        let partition = rng.chance(1, 4).then(|| rng.below(u64::from(partitions)) as u32);
        Content { number, payload_bytes, key, partition }
    }

    pub fn payload(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.payload_bytes + 8);
        if self.payload_bytes >= NUMBER_BYTES {
            bytes.extend_from_slice(&self.number.to_le_bytes());
        }
        let mut fill = Rng::new(self.number);
        while bytes.len() < self.payload_bytes {
            bytes.extend_from_slice(&fill.next_u64().to_le_bytes());
        }
        bytes.truncate(self.payload_bytes);
        bytes
    }

    /// Whether these are exactly the bytes that were produced.
    pub fn is(&self, key: Option<&[u8]>, payload: &[u8]) -> bool {
        key.unwrap_or_default() == self.key && payload == self.payload()
    }
}

/// The number of the record that these bytes claim to be.
pub fn number_of(key: Option<&[u8]>, payload: &[u8]) -> Option<u64> {
    match payload.first_chunk::<NUMBER_BYTES>() {
        Some(number) => Some(u64::from_le_bytes(*number)),
        None => {
            let text = std::str::from_utf8(key?.strip_prefix(b"#")?).ok()?;
            u64::from_str_radix(text, 16).ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_drawn_record_names_itself_and_shows_one_wrong_byte() {
        let mut rng = Rng::new(1);
        for number in 0..2_000 {
            let content = Content::draw(number, 3, &mut rng);
            let mut payload = content.payload();
            let key = (!content.key.is_empty()).then_some(&content.key[..]);
            assert_eq!((number_of(key, &payload), payload.len()), (Some(number), content.payload_bytes));
            assert!(content.is(key, &payload));
            let at = rng.below(payload.len() as u64) as usize;
            payload[at] ^= 1 << rng.below(8);
            assert!(!content.is(key, &payload));
        }
    }
}
