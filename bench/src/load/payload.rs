//! Messages that say who sent them: JSON objects of an exact size with run, producer, sequence number and send time.

use super::Nanos;

/// Shortest message that has room for its identity, in bytes.
pub const BYTES_MIN: usize = HEAD.len() + DIGITS + MIDDLE.len() + TAIL.len();

const HEAD: &[u8] = b"{\"id\":\"";
const MIDDLE: &[u8] = b"\",\"x\":\"";
const TAIL: &[u8] = b"\"}";
const RUN_DIGITS: usize = 8;
const PRODUCER_DIGITS: usize = 4;
const SEQUENCE_DIGITS: usize = 12;
const TIME_DIGITS: usize = 16;
const DIGITS: usize = RUN_DIGITS + PRODUCER_DIGITS + SEQUENCE_DIGITS + TIME_DIGITS;

/// Who sent a message, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub run: u32,
    pub producer: u16,
    pub sequence: u64,
    pub sent: Nanos,
}

/// Makes the messages of one run, all of one size, and reads them.
#[derive(Clone, Debug)]
pub struct Payloads {
    template: Vec<u8>,
    identified: bool,
    run: u32,
}

impl Payloads {
    /// Messages of exactly `bytes`. Shorter than [`BYTES_MIN`] they have no identity.
    pub fn new(run: u32, bytes: usize) -> Payloads {
        let identified = bytes >= BYTES_MIN;
        let mut template = Vec::with_capacity(bytes);
        if identified {
            template.extend_from_slice(HEAD);
            template.extend_from_slice(&[b'0'; DIGITS]);
            template.extend_from_slice(MIDDLE);
            fill(&mut template, run, bytes - BYTES_MIN);
            template.extend_from_slice(TAIL);
        } else if bytes >= 2 {
            template.push(b'"');
            fill(&mut template, run, bytes - 2);
            template.push(b'"');
        } else {
            template.push(b'1');
        }
        Payloads { template, identified, run }
    }

    pub fn bytes(&self) -> usize {
        self.template.len()
    }

    /// Appends one message.
    pub fn write(&self, out: &mut Vec<u8>, producer: u16, sequence: u64, sent: Nanos) {
        let start = out.len();
        out.extend_from_slice(&self.template);
        if self.identified {
            let digits = &mut out[start + HEAD.len()..][..DIGITS];
            let (run, rest) = digits.split_at_mut(RUN_DIGITS);
            let (by, rest) = rest.split_at_mut(PRODUCER_DIGITS);
            let (number, time) = rest.split_at_mut(SEQUENCE_DIGITS);
            hex(run, u64::from(self.run));
            hex(by, u64::from(producer));
            hex(number, sequence);
            hex(time, sent as u64);
        }
    }

    /// Who sent this message. `Err`: it is one of this run's, and changed. `Ok(None)`: it is somebody else's.
    pub fn read(&self, message: &[u8]) -> Result<Option<Identity>, ()> {
        let Some(identity) = identity(message).filter(|identity| identity.run == self.run) else { return Ok(None) };
        let behind = HEAD.len() + DIGITS;
        match message.get(behind..) == Some(&self.template[behind..]) {
            true => Ok(Some(identity)),
            false => Err(()),
        }
    }
}

fn identity(message: &[u8]) -> Option<Identity> {
    let digits = message.strip_prefix(HEAD)?.get(..DIGITS)?;
    let (run, rest) = digits.split_at(RUN_DIGITS);
    let (producer, rest) = rest.split_at(PRODUCER_DIGITS);
    let (sequence, sent) = rest.split_at(SEQUENCE_DIGITS);
    Some(Identity {
        run: unhex(run)? as u32,
        producer: unhex(producer)? as u16,
        sequence: unhex(sequence)?,
        sent: unhex(sent)? as Nanos,
    })
}

/// Letters that no compression makes small, the same for the same run.
fn fill(out: &mut Vec<u8>, run: u32, bytes: usize) {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut state = u64::from(run) << 1 | 1;
    for _ in 0..bytes {
        // A linear congruential generator; its high bits are good enough for filler.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.push(LETTERS[(state >> 58) as usize]);
    }
}

fn hex(out: &mut [u8], mut value: u64) {
    for digit in out.iter_mut().rev() {
        *digit = b"0123456789abcdef"[(value & 15) as usize];
        value >>= 4;
    }
}

fn unhex(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |value, digit| Some(value << 4 | u64::from(char::from(*digit).to_digit(16)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_its_size_is_json_and_says_who_sent_it() {
        for bytes in [BYTES_MIN, BYTES_MIN + 1, 256, 4096] {
            let payloads = Payloads::new(0xdead_beef, bytes);
            let mut out = Vec::new();
            payloads.write(&mut out, 7, 123_456, -5);
            assert_eq!(out.len(), bytes);
            assert!(serde_json::from_slice::<serde_json::Value>(&out).is_ok());
            let identity = Identity { run: 0xdead_beef, producer: 7, sequence: 123_456, sent: -5 };
            assert_eq!(payloads.read(&out), Ok(Some(identity)));
        }
    }

    #[test]
    fn short_messages_are_json_of_their_size() {
        for bytes in 1..BYTES_MIN {
            let mut out = Vec::new();
            Payloads::new(1, bytes).write(&mut out, 0, 0, 0);
            assert_eq!(out.len(), bytes);
            assert!(serde_json::from_slice::<serde_json::Value>(&out).is_ok(), "{bytes}");
        }
    }

    #[test]
    fn a_changed_message_is_told_from_a_foreign_one() {
        let payloads = Payloads::new(1, 100);
        let mut out = Vec::new();
        payloads.write(&mut out, 1, 1, 1);
        *out.last_mut().unwrap() = b'!';
        assert_eq!(payloads.read(&out), Err(()));
        out.pop();
        assert_eq!(payloads.read(&out), Err(()), "cut");
        let mut other = Vec::new();
        Payloads::new(2, 100).write(&mut other, 1, 1, 1);
        assert_eq!(payloads.read(&other), Ok(None));
        assert_eq!(payloads.read(b"{\"order\":1}"), Ok(None));
    }
}
