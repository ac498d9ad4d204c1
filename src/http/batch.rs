//! The body of a batch produce: `{"messages":[...]}` into records, without building a value or a string per message.

use std::borrow::Cow;
use std::ops::Range;

use base64::alphabet;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use base64::Engine;
use bytes::Bytes;
use narad_shards::api::NewRecord;
use serde::de::{MapAccess, SeqAccess};
use serde_json::value::RawValue;

use super::config::{BATCH_KEY_BYTES_MAX, BATCH_MESSAGES_MAX, MESSAGE_BYTES_MAX};
use super::json::{self, Bounded, Element, Fields, Name, Object};
use super::reply::{ApiError, MESSAGE_REQUIRED, MESSAGE_TOO_LARGE, PARTITION_OUT_OF_RANGE};

const TOO_MANY: &str = "too many messages: more than 1000";

/// Padded, and as lenient about the bits behind the last byte as the decoders that clients were tested against.
const BASE64: GeneralPurpose =
    GeneralPurpose::new(&alphabet::STANDARD, GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true));

/// Where the bytes of a key or payload lie.
#[derive(Clone, Debug)]
enum Span {
    /// In the request body, as sent.
    Body(Range<usize>),
    /// Unescaped or decoded.
    Arena(Range<usize>),
}

impl Span {
    fn bytes(&self) -> usize {
        match self {
            Span::Body(range) | Span::Arena(range) => range.len(),
        }
    }
}

#[derive(Debug)]
struct Message {
    key: Span,
    payload: Span,
    partition: Option<u32>,
}

/// A batch whose format was checked (pass 1); partitions are checked by the shard (pass 2).
#[derive(Debug)]
pub(crate) struct Batch {
    body: Bytes,
    /// At most as long as the body.
    arena: Vec<u8>,
    messages: Vec<Message>,
}

impl Batch {
    pub fn parse(body: Bytes) -> Result<Batch, ApiError> {
        let parsed = json::parse::<Envelope<'_>>(&body)?.messages;
        if parsed.is_empty() {
            return Err(ApiError::bad_request("messages required"));
        }
        let mut arena = Vec::new();
        if parsed.iter().any(Parsed::is_encoded) {
            // At once: a buffer that doubles would be twice the body at its end.
            arena.reserve_exact(body.len());
        }
        let mut messages = Vec::with_capacity(parsed.len());
        for (index, message) in parsed.iter().enumerate() {
            let checked = message.check(&body, &mut arena).map_err(|error| error.of_message(index))?;
            messages.push(checked);
        }
        drop(parsed);
        Ok(Batch { body, arena, messages })
    }

    /// Of the body, and of what was decoded from it.
    pub fn memory_bytes(&self) -> usize {
        self.body.len() + self.arena.capacity()
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    pub fn records(&self) -> Vec<NewRecord<'_>> {
        let record = |message: &Message| NewRecord {
            key: self.bytes(&message.key),
            payload: self.bytes(&message.payload),
            partition: message.partition,
        };
        self.messages.iter().map(record).collect()
    }

    fn bytes(&self, span: &Span) -> &[u8] {
        match span {
            Span::Body(range) => &self.body[range.clone()],
            Span::Arena(range) => &self.arena[range.clone()],
        }
    }
}

#[derive(Default)]
struct Envelope<'a> {
    messages: Vec<Parsed<'a>>,
}

impl<'a> Fields<'a> for Envelope<'a> {
    fn member<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "messages" => {
                self.messages = map.next_value_seed(Bounded::new(BATCH_MESSAGES_MAX, TOO_MANY))?;
                Ok(())
            }
            other => Err(json::unknown_field(other)),
        }
    }
}

/// One message as written in the body; `null` counts as absent, except as a payload.
#[derive(Default)]
struct Parsed<'a> {
    payload: Option<&'a RawValue>,
    payload_encoding: Option<Name<'a>>,
    key: Option<Name<'a>>,
    key_encoding: Option<Name<'a>>,
    partition: Option<i64>,
}

impl<'a> Fields<'a> for Parsed<'a> {
    fn member<A: MapAccess<'a>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "payload" => self.payload = Some(map.next_value()?),
            "payload_encoding" => self.payload_encoding = map.next_value()?,
            "key" => self.key = map.next_value()?,
            "key_encoding" => self.key_encoding = map.next_value()?,
            "partition" => self.partition = map.next_value()?,
            other => return Err(json::unknown_field(other)),
        }
        Ok(())
    }
}

impl<'a> Element<'a> for Parsed<'a> {
    fn read<A: SeqAccess<'a>>(elements: &mut A) -> Result<Option<Self>, A::Error> {
        elements.next_element_seed(Object::new())
    }
}

impl Parsed<'_> {
    /// Its bytes do not lie in the body as they are to be stored.
    fn is_encoded(&self) -> bool {
        let owned_key = self.key.as_ref().is_some_and(|key| matches!(key.0, Cow::Owned(_)));
        owned_key || self.key_encoding.is_some() || self.payload_encoding.is_some()
    }

    /// Pass 1 of one message: encodings, empty payload, size, negative partition.
    fn check(&self, body: &Bytes, arena: &mut Vec<u8>) -> Result<Message, ApiError> {
        let key = match (&self.key, is_base64("key_encoding", &self.key_encoding)?) {
            (None, _) => Span::Body(0..0),
            (Some(Name(text)), true) => decode("key", text, arena)?,
            (Some(Name(Cow::Borrowed(text))), false) => within(body, text.as_bytes()),
            (Some(Name(Cow::Owned(text))), false) => push(arena, text.as_bytes()),
        };
        if key.bytes() > BATCH_KEY_BYTES_MAX {
            return Err(ApiError::bad_request("key too long: more than 65536 bytes"));
        }
        let encoded = is_base64("payload_encoding", &self.payload_encoding)?;
        let Some(raw) = self.payload else { return Err(ApiError::bad_request(MESSAGE_REQUIRED)) };
        let payload = if encoded {
            let text: Name<'_> = serde_json::from_str(raw.get())
                .map_err(|_| ApiError::bad_request("payload must be a string when payload_encoding is base64"))?;
            decode("payload", &text.0, arena)?
        } else {
            within(body, raw.get().as_bytes())
        };
        if payload.bytes() == 0 {
            return Err(ApiError::bad_request(MESSAGE_REQUIRED));
        }
        if payload.bytes() > MESSAGE_BYTES_MAX {
            return Err(ApiError::too_large(MESSAGE_TOO_LARGE));
        }
        let partition = match self.partition {
            None => None,
            // One that is too large for any topic is out of range in pass 2, like any other.
            Some(number @ 0..) => Some(u32::try_from(number).unwrap_or(u32::MAX)),
            Some(_) => return Err(ApiError::bad_request(PARTITION_OUT_OF_RANGE)),
        };
        Ok(Message { key, payload, partition })
    }
}

fn is_base64(field: &str, encoding: &Option<Name<'_>>) -> Result<bool, ApiError> {
    match encoding.as_ref().map(|name| &*name.0) {
        None | Some("") => Ok(false),
        Some("base64") => Ok(true),
        Some(_) => Err(ApiError::bad_request(format!("unsupported {field}: want base64 or none"))),
    }
}

fn decode(field: &str, text: &str, arena: &mut Vec<u8>) -> Result<Span, ApiError> {
    let start = arena.len();
    BASE64.decode_vec(text, arena).map_err(|_| ApiError::bad_request(format!("{field} is not valid base64")))?;
    Ok(Span::Arena(start..arena.len()))
}

fn push(arena: &mut Vec<u8>, bytes: &[u8]) -> Span {
    let start = arena.len();
    arena.extend_from_slice(bytes);
    Span::Arena(start..arena.len())
}

/// The place of `part`, which was borrowed from `body`.
fn within(body: &Bytes, part: &[u8]) -> Span {
    let start = (part.as_ptr() as usize).wrapping_sub(body.as_ptr() as usize);
    let range = start..start.wrapping_add(part.len());
    debug_assert!(body.get(range.clone()) == Some(part), "not a part of the body");
    Span::Body(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Expected<'a> = Result<Vec<(&'a [u8], &'a [u8], Option<u32>)>, (u16, &'a str)>;

    fn check(body: &str, expected: Expected<'_>) {
        match (Batch::parse(Bytes::copy_from_slice(body.as_bytes())), expected) {
            (Ok(batch), Ok(expected)) => {
                let records: Vec<_> = batch.records().iter().map(|r| (r.key, r.payload, r.partition)).collect();
                assert_eq!(records, expected, "{body}");
            }
            (Err(error), Err(expected)) => assert_eq!((error.status.as_u16(), &*error.text), expected, "{body}"),
            (outcome, expected) => panic!("{body}: {outcome:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn payloads_are_verbatim_keys_are_bytes() {
        check(
            r#" { "messages" : [ {"payload": { "a" : 1 } , "key":"text"}, {"payload":null},
                {"payload_encoding":"base64","payload":"aGVs\u0062G8=","key":"/w==","key_encoding":"base64","partition":2},
                {"payload":"s\n","key":"\u0000k","partition":99999999999},
                {"payload":[],"key":"","key_encoding":null,"partition":null,"payload_encoding":""},
                {"payload":1e999,"payload":2} ] } "#,
            Ok(vec![
                (b"text", br#"{ "a" : 1 }"#, None),
                (b"", b"null", None),
                (b"\xff", b"hello", Some(2)),
                (b"\0k", br#""s\n""#, Some(u32::MAX)),
                (b"", b"[]", None),
                (b"", b"2", None),
            ]),
        );
    }

    #[test]
    fn the_first_failing_message_answers() {
        let bad = |text| Err((400, text));
        for (body, expected) in [
            ("{}", bad("messages required")),
            (r#"{"messages":[]}"#, bad("messages required")),
            (r#"{"messages":null}"#, bad("messages required")),
            (r#"{"messages":{}}"#, bad("invalid json: invalid type: map, expected an array")),
            ("[]", bad("invalid json: invalid type: sequence, expected an object")),
            ("", bad("invalid json: EOF while parsing a value")),
            (r#"{"messages":[{"payload":1}]} x"#, bad("invalid json: more than one value in the body")),
            (r#"{"messages":[{"payload":1}],"a\"b":1}"#, bad(r#"invalid json: json: unknown field "a\"b""#)),
            (r#"{"messages":[{"payload":1,"Key":"x"}]}"#, bad(r#"invalid json: json: unknown field "Key""#)),
            (
                r#"{"messages":[{"payload":1,"partition":1.5}]}"#,
                bad("invalid json: invalid type: floating point `1.5`, expected i64"),
            ),
            (
                r#"{"messages":[{"payload":1,"key":5}]}"#,
                bad("invalid json: invalid type: integer `5`, expected a string"),
            ),
            (r#"{"messages":[{"payload":1},{}]}"#, bad("message 1: message required")),
            (r#"{"messages":[{"payload":"","payload_encoding":"base64"}]}"#, bad("message 0: message required")),
            (
                r#"{"messages":[{"payload":"YQ","payload_encoding":"base64"}]}"#,
                bad("message 0: payload is not valid base64"),
            ),
            (
                r#"{"messages":[{"payload":{},"payload_encoding":"base64"}]}"#,
                bad("message 0: payload must be a string when payload_encoding is base64"),
            ),
            (
                r#"{"messages":[{"payload":1,"payload_encoding":"hex"}]}"#,
                bad("message 0: unsupported payload_encoding: want base64 or none"),
            ),
            (
                r#"{"messages":[{"payload":1},{"payload":1,"key":"!","key_encoding":"base64"}]}"#,
                bad("message 1: key is not valid base64"),
            ),
            (
                r#"{"messages":[{"payload":1,"partition":-1}]}"#,
                bad("message 0: invalid argument: partition out of range"),
            ),
        ] {
            check(body, expected);
        }
    }

    #[test]
    fn limits_hold_at_the_first_element_over_them() {
        let thousand = "{\"payload\":1},".repeat(1000);
        let body = format!("{{\"messages\":[{}]}}", thousand.trim_end_matches(','));
        assert_eq!(Batch::parse(Bytes::from(body)).expect("a thousand are allowed").len(), 1000);
        // What follows the thousandth message is not even parsed.
        check(&format!("{{\"messages\":[{thousand}{{\"payload\":"), Err((400, "too many messages: more than 1000")));

        let largest = "x".repeat(MESSAGE_BYTES_MAX - 2);
        let body = |payload: &str| format!("{{\"messages\":[{{\"payload\":\"{payload}\"}}]}}");
        assert_eq!(Batch::parse(Bytes::from(body(&largest))).expect("1 MiB with its quotes").len(), 1);
        check(&body(&(largest + "x")), Err((413, "message 0: message too large")));

        let key = "k".repeat(BATCH_KEY_BYTES_MAX + 1);
        let body = format!("{{\"messages\":[{{\"payload\":1,\"key\":\"{key}\"}}]}}");
        check(&body, Err((400, "message 0: key too long: more than 65536 bytes")));
    }

    #[test]
    fn hostile_nesting_is_stored_or_refused_without_harm() {
        let deep = "[".repeat(300_000);
        let body = format!("{{\"messages\":[{{\"payload\":{deep}{}}}]}}", "]".repeat(300_000));
        assert_eq!(Batch::parse(Bytes::from(body)).expect("verbatim").records()[0].payload.len(), 600_000);
        assert!(Batch::parse(Bytes::from(format!("{{\"messages\":[{{\"payload\":{deep}"))).is_err());
        assert!(Batch::parse(Bytes::from(deep)).is_err());
        assert!(Batch::parse(Bytes::from_static(b"{\"messages\":[{\"payload\":\"\xff\"}]}")).is_err());
    }
}
