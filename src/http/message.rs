//! Messages as a consumer reads them, and receipt handles.

use base64::engine::general_purpose::STANDARD as BASE64;
use base64::Engine;
use narad_shards::api::{Delivery, Settle, SettleMode};

use super::json::{is_json, nests_within, write_name, write_number, write_string};

/// What a message takes in an answer on top of key and payload, if nothing in it has to be escaped.
pub(crate) const MESSAGE_OVERHEAD_BYTES: usize = 192;

/// Readers of JSON bound the nesting of what they take, many at 128 levels, three of which are the batch's own. One message
/// that is deeper would make the answer around it unreadable, with all others in it.
const NESTING_MAX: usize = 128 - 4;

/// Appends one message as a JSON object; with a receipt handle unless it was read without a lease.
pub(crate) fn write_message(out: &mut Vec<u8>, delivery: &Delivery) {
    let payload = delivery.payload();
    out.reserve(delivery.body.len() + MESSAGE_OVERHEAD_BYTES);
    out.push(b'{');
    write_name(out, "topic");
    write_string(out, &delivery.topic);
    write_name(out, "partition");
    write_number(out, delivery.partition.into());
    write_name(out, "offset");
    write_number(out, delivery.offset);
    if let Some(key) = delivery.key() {
        write_name(out, "key");
        match std::str::from_utf8(key) {
            Ok(text) => write_string(out, text),
            Err(_) => {
                write_base64(out, key);
                out.extend_from_slice(b",\"key_encoding\":\"base64\"");
            }
        }
    }
    write_name(out, "payload");
    match std::str::from_utf8(payload) {
        Ok(text) if is_json(text) && nests_within(text, NESTING_MAX) => out.extend_from_slice(payload),
        Ok(text) => write_string(out, text),
        Err(_) => {
            write_base64(out, payload);
            out.extend_from_slice(b",\"payload_encoding\":\"base64\"");
        }
    }
    write_name(out, "timestamp");
    write_number(out, delivery.timestamp_ms / 1000);
    if delivery.nonce != 0 {
        write_name(out, "receipt_handle");
        out.push(b'"');
        for (number, end) in [(delivery.partition.into(), b':'), (delivery.offset, b':'), (delivery.nonce, b'"')] {
            write_number(out, number);
            out.push(end);
        }
    }
    out.push(b'}');
}

fn write_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'"');
    let start = out.len();
    let encoded_bytes = bytes.len().div_ceil(3) * 4;
    out.resize(start + encoded_bytes, 0);
    BASE64.encode_slice(bytes, &mut out[start..]).expect("four characters for each three bytes were reserved");
    out.push(b'"');
}

/// Reads `partition:offset:nonce`. `None` when it is not one: three decimal integers, the nonce in `1..2^63`.
///
/// A partition number that no topic can have becomes the largest one, so that it is refused like any other that the
/// topic lacks.
pub(crate) fn parse_handle(handle: &[u8], mode: SettleMode) -> Option<Settle> {
    let mut parts = handle.split(|byte| *byte == b':').map(|digits| {
        let decimal = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
        decimal.then(|| std::str::from_utf8(digits).ok()?.parse::<u64>().ok()).flatten()
    });
    let (partition, offset, nonce) = (parts.next()??, parts.next()??, parts.next()??);
    let well_formed = parts.next().is_none() && nonce > 0 && i64::try_from(nonce).is_ok();
    let partition = u32::try_from(partition).unwrap_or(u32::MAX);
    well_formed.then_some(Settle { partition, offset, nonce, mode })
}

/// The settle that hands a delivery back at once.
pub(crate) fn nack(delivery: &Delivery) -> Settle {
    Settle { partition: delivery.partition, offset: delivery.offset, nonce: delivery.nonce, mode: SettleMode::Nack }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use narad_shards::io::Slice;
    use narad_shards::meta::Incarnation;

    use super::*;

    fn encode(key: &[u8], payload: &[u8], nonce: u64) -> String {
        let delivery = Delivery {
            topic: Arc::from("t"),
            incarnation: Incarnation(1),
            partition: 2,
            offset: 7,
            timestamp_ms: 1_700_000_000_999,
            body: Slice::copy_from(&[key, payload].concat()),
            key_bytes: key.len() as u32,
            nonce,
        };
        let mut out = Vec::new();
        write_message(&mut out, &delivery);
        String::from_utf8(out).expect("JSON is UTF-8")
    }

    #[test]
    fn n40_every_key_and_payload_makes_valid_json() {
        let cases: [(&[u8], &[u8], &str); 11] = [
            (b"", b"{ \"a\" : [1, 2] }", r#""payload":{ "a" : [1, 2] }"#),
            (b"", b" 12 ", r#""payload": 12 "#),
            (b"", b"\"quoted\"", r#""payload":"quoted""#),
            (b"", b"plain \"text\"\n", r#""payload":"plain \"text\"\n""#),
            (b"", b"\xff\x00\x01", r#""payload":"/wAB","payload_encoding":"base64""#),
            (b"", b"\xff\x00\x01\x02", r#""payload":"/wABAg==","payload_encoding":"base64""#),
            (b"", b"[1", r#""payload":"[1""#),
            (b"k\x00\x1f\"", b"1", r#""key":"k\u0000\u001f\"","payload":1"#),
            (b"\xff", b"1", r#""key":"/w==","key_encoding":"base64","payload":1"#),
            ("ключ".as_bytes(), b"1", r#""key":"ключ","payload":1"#),
            (b"", b"\"\xff\"", r#""payload":"Iv8i","payload_encoding":"base64""#),
        ];
        for (key, payload, middle) in cases {
            let text = encode(key, payload, 9);
            let (head, tail) = (r#"{"topic":"t","partition":2,"offset":7,"#, r#","timestamp":1700000000"#);
            assert_eq!(text, format!(r#"{head}{middle}{tail},"receipt_handle":"2:7:9"}}"#));
            serde_json::from_str::<serde_json::Value>(&text).expect("valid");
            assert_eq!(encode(key, payload, 0), format!("{head}{middle}{tail}}}"), "replay has no handle");
        }
    }

    #[test]
    fn a_payload_that_nests_too_deep_for_readers_is_a_string() {
        for (levels, verbatim) in [(124, true), (125, false), (50_000, false)] {
            let payload = "[".repeat(levels) + &"]".repeat(levels);
            let batch = format!("{{\"messages\":[{}]}}", encode(b"", payload.as_bytes(), 9));
            let read: serde_json::Value = serde_json::from_str(&batch).expect("any reader can read it");
            let delivered = &read["messages"][0]["payload"];
            assert_eq!(delivered.is_array(), verbatim, "{levels} levels");
            assert!(verbatim || delivered.as_str() == Some(&payload));
        }
    }

    #[test]
    fn handles_are_three_decimal_integers() {
        let settle = |partition, offset, nonce| Some(Settle { partition, offset, nonce, mode: SettleMode::Ack });
        for (handle, parsed) in [
            ("1:0:181499699661178901", settle(1, 0, 181_499_699_661_178_901)),
            ("0:18446744073709551615:9223372036854775807", settle(0, u64::MAX, i64::MAX as u64)),
            ("99999999999:0:1", settle(u32::MAX, 0, 1)),
            ("0:0:9223372036854775808", None),
            ("0:0:0", None),
            ("0:18446744073709551616:1", None),
            ("", None),
            ("1:2", None),
            ("1:2:3:4", None),
            ("1:2:", None),
            ("-1:2:3", None),
            ("+1:2:3", None),
            ("1: 2:3", None),
            ("1:2:3\n", None),
            ("0x1:2:3", None),
            ("a:b:c", None),
        ] {
            assert_eq!(parse_handle(handle.as_bytes(), SettleMode::Ack), parsed, "{handle:?}");
        }
    }
}
