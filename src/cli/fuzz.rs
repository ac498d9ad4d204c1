//! What fuzzers feed: what a server, or what merely listens on its port, may answer the command line.

use super::client::{read_answer, Endpoint};
use super::render::Message;

/// A whole answer as it comes from the socket.
pub(crate) fn answer(data: &[u8]) {
    for method in ["GET", "POST"] {
        if let Ok(response) = read_answer(data, method) {
            assert!(response.body.len() <= data.len());
            let _ = (response.error_text(), response.retry_after(), response.json::<Message>());
        }
    }
}

/// One message of an answer, and a server's address.
pub(crate) fn message(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(message) = serde_json::from_str::<Message>(&text) {
        let _ = (message.line(), message.raw());
    }
    let _ = Endpoint::parse(&text);
}

/// The payload's bytes, as `narad sub --raw` prints them.
pub(crate) fn payload(text: &str) -> Option<Vec<u8>> {
    serde_json::from_str::<Message>(text).ok()?.raw().ok()
}
