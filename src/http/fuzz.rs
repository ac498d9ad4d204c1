//! What fuzzers feed: bytes as a client may send them, or as a disk may hold them for a client.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use hyper::Method;
use narad_shards::api::{Delivery, SettleMode};
use narad_shards::io::Slice;
use narad_shards::meta::Incarnation;

use super::ack::Handles;
use super::batch::Batch;
use super::config::{Surface, TopicDefaults, BATCH_MESSAGES_MAX};
use super::decode::{Coding, Decoder};
use super::json;
use super::message::{parse_handle, write_message};
use super::produce::partition_number;
use super::query::{decode, format_duration, parse_duration, unsigned, Query};
use super::route;
use super::topics::CreateTopic;

/// The body of a batch produce.
pub(crate) fn batch(data: &[u8]) {
    if let Ok(batch) = Batch::parse(Bytes::copy_from_slice(data)) {
        let records = batch.records();
        assert!((1..=BATCH_MESSAGES_MAX).contains(&records.len()));
        assert!(records.iter().all(|record| !record.payload.is_empty()));
        let bytes: usize = records.iter().map(|record| record.key.len() + record.payload.len()).sum();
        assert!(bytes <= 2 * data.len(), "a batch takes no more memory than its body twice");
    }
}

/// The bodies of a create and of an ack.
pub(crate) fn bodies(data: &[u8]) {
    if let Ok(create) = json::parse::<CreateTopic<'_>>(data) {
        let defaults = TopicDefaults::default();
        if let Ok(topic) = create.check(&defaults, |_| true) {
            assert!((1..=defaults.partitions_max).contains(&topic.partitions));
            assert!(topic.max_in_flight_per_partition > 0 && topic.visibility_timeout_ms > 0);
        }
    }
    if let Ok(handles) = json::parse::<Handles<'_>>(data) {
        handles.handles.iter().for_each(|handle| receipt_handle(handle.0.as_bytes()));
    }
}

/// A receipt handle, and one made of what it says.
pub(crate) fn receipt_handle(data: &[u8]) {
    let Some(settle) = parse_handle(data, SettleMode::Ack) else { return };
    let text = format!("{}:{}:{}", settle.partition, settle.offset, settle.nonce);
    assert_eq!(parse_handle(text.as_bytes(), SettleMode::Ack), Some(settle));
}

/// A Go duration.
pub(crate) fn duration(data: &[u8]) {
    if let Some(duration) = parse_duration(data) {
        assert_eq!(parse_duration(format_duration(duration).as_bytes()), Some(duration));
    }
}

/// A query string, and a path: the bytes in front of the first `?`.
pub(crate) fn query(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (path, raw) = text.split_once('?').unwrap_or((&text, ""));
    for method in [Method::GET, Method::POST] {
        route::find(&method, path, Surface::Api { metrics: true });
    }
    let query = Query::new(Some(raw));
    for name in ["key", "partition", "offset", "wait", "receipt_handle", "extend"] {
        let first = query.first(name).unwrap_or_default();
        let only = query.only(name).unwrap_or_default();
        assert!(only.is_none() || only == first);
        let value = first.unwrap_or_default();
        assert!(value.len() <= raw.len());
        let _ = (partition_number(Some(&value)), unsigned::<u64>(name, Some(&value)), query.flag(name));
    }
    let escaped = data.iter().fold(String::new(), |text, byte| text + &format!("%{byte:02X}"));
    assert_eq!(decode(escaped.as_bytes(), true).as_deref(), Some(data));
}

/// A compressed body: one byte for the coding and the size of the pieces that it comes in, the rest.
pub(crate) fn content_encoding(data: &[u8]) {
    /// Far less than a bomb of this size would come to.
    const DECODED_BYTES_MAX: usize = 1 << 20;
    /// One step's worth, and what the codec may have pending.
    const STEP_BYTES_MAX: usize = 256 << 10;
    let Some((options, packed)) = data.split_first() else { return };
    let coding = if options & 1 == 0 { Coding::Gzip } else { Coding::Zstd };
    let Some(mut decoder) = Decoder::new(coding) else { return };
    let mut decoded = Vec::new();
    for piece in packed.chunks(1 + usize::from(options >> 1)) {
        let mut rest = piece;
        loop {
            let before = (rest.len(), decoded.len());
            match decoder.step(&mut rest, &mut decoded) {
                Err(_) => return,
                Ok(false) => break,
                Ok(true) => assert_ne!((rest.len(), decoded.len()), before, "a step that does nothing never ends"),
            }
            assert!(decoded.len() - before.1 <= STEP_BYTES_MAX, "one step is bounded");
            if decoded.len() > DECODED_BYTES_MAX {
                return;
            }
        }
    }
    let _ = decoder.finish(&mut decoded);
}

/// A record on its way to a consumer: one byte of key length, key, payload. Any bytes become one JSON text that says
/// them all.
pub(crate) fn message(data: &[u8]) {
    let Some((key_bytes, body)) = data.split_first() else { return };
    let key_bytes = u32::from(*key_bytes).min(body.len() as u32);
    let delivery = Delivery {
        topic: Arc::from("orders"),
        incarnation: Incarnation(1),
        partition: 3,
        offset: u64::MAX,
        timestamp_ms: u64::MAX,
        body: Slice::copy_from(body),
        key_bytes,
        nonce: 7,
    };
    let mut out = Vec::new();
    write_message(&mut out, &delivery);
    let text = std::str::from_utf8(&out).expect("an answer is UTF-8");
    assert!(json::is_json(text), "an answer is JSON");
    let read = crate::cli::fuzz::payload(text).expect("the command line reads what the server writes");
    match std::str::from_utf8(delivery.payload()) {
        // A JSON string is passed on as it is, and then means what it says.
        Ok(text) if json::is_json(text) => {}
        _ => assert_eq!(Cow::from(read), delivery.payload()),
    }
}
