//! How keys, payloads and times look in a terminal, and how names look in a URL.

use std::fmt::Write as _;

use base64::engine::general_purpose::STANDARD;
use base64::Engine as _;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Failure;

/// One message as the API shows it (http-api.md §15).
#[derive(Deserialize, Debug)]
pub struct Message {
    pub partition: u32,
    pub offset: u64,
    #[serde(default)]
    key: Option<String>,
    #[serde(default)]
    key_encoding: Option<String>,
    payload: Box<RawValue>,
    #[serde(default)]
    payload_encoding: Option<String>,
    /// Unix seconds.
    timestamp: u64,
    #[serde(default)]
    pub receipt_handle: Option<String>,
}

enum Payload {
    /// JSON text, verbatim, or plain text.
    Text(String),
    Binary(Vec<u8>),
}

impl Message {
    fn payload(&self) -> Result<Payload, Failure> {
        let raw = self.payload.get();
        let wrong =
            |why: String| Failure::Request(format!("p{} @{}: unreadable payload: {why}", self.partition, self.offset));
        let string = || serde_json::from_str::<String>(raw).map_err(|error| wrong(error.to_string()));
        match self.payload_encoding.as_deref() {
            // A JSON string that stands for no text (half a surrogate pair) is legal, and shown as it was sent: refusing
            // it would have the message come back for ever.
            None | Some("") if raw.starts_with('"') => Ok(Payload::Text(string().unwrap_or_else(|_| raw.to_owned()))),
            None | Some("") => Ok(Payload::Text(raw.to_owned())),
            Some("base64") => STANDARD.decode(string()?).map(Payload::Binary).map_err(|error| wrong(error.to_string())),
            Some(other) => Err(wrong(format!("encoding {other:?} is not known"))),
        }
    }

    /// `[p<p> @<off>] key=<k> <time> <payload>`.
    pub fn line(&self) -> Result<String, Failure> {
        let mut line = format!("[p{} @{}] ", self.partition, self.offset);
        if let Some(key) = &self.key {
            match self.key_encoding.as_deref() {
                Some("base64") => {
                    let key =
                        STANDARD.decode(key).map_err(|error| Failure::Request(format!("unreadable key: {error}")))?;
                    let _ = write!(line, "key={}(binary) ", hex(&key));
                }
                _ => {
                    let _ = write!(line, "key={key} ");
                }
            }
        }
        line.push_str(&utc(self.timestamp));
        line.push(' ');
        match self.payload()? {
            Payload::Text(text) => line.push_str(&text),
            Payload::Binary(bytes) => {
                let _ = write!(line, "{} ({} bytes)", hex(&bytes), bytes.len());
            }
        }
        Ok(line)
    }

    /// The payload's own bytes.
    pub fn raw(&self) -> Result<Vec<u8>, Failure> {
        Ok(match self.payload()? {
            Payload::Text(text) => text.into_bytes(),
            Payload::Binary(bytes) => bytes,
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Unix seconds as RFC 3339 in UTC.
pub fn utc(seconds: u64) -> String {
    let days = (seconds / 86_400) as i64;
    let of_day = seconds % 86_400;
    // Civil date from a day count, in eras of 400 years that begin on 1 March.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Percent-encodes everything but unreserved characters.
pub fn percent(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len()), |mut text, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => text.push(char::from(*byte)),
            other => drop(write!(text, "%{other:02X}")),
        }
        text
    })
}

/// Columns as wide as their widest cell, two blanks apart.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(fields: &str) -> Message {
        serde_json::from_str(&format!(r#"{{"topic":"t","partition":2,"offset":17,"timestamp":1767225600,{fields}}}"#))
            .unwrap()
    }

    #[test]
    fn lines_show_json_as_is_text_as_text_and_binary_as_hex() {
        let head = "[p2 @17] ";
        let at = "2026-01-01T00:00:00Z";
        let cases = [
            (r#""payload":{"a": 1, "b":[ ]}"#, format!(r#"{head}{at} {{"a": 1, "b":[ ]}}"#)),
            (r#""key":"user-1","payload":"hello \"you\"""#, format!("{head}key=user-1 {at} hello \"you\"")),
            (r#""payload":"/wBh","payload_encoding":"base64""#, format!("{head}{at} ff0061 (3 bytes)")),
            (r#""key":"/w==","key_encoding":"base64","payload":1"#, format!("{head}key=ff(binary) {at} 1")),
        ];
        for (fields, line) in cases {
            assert_eq!(message(fields).line().unwrap(), line);
        }
        assert_eq!(message(r#""payload":"/wBh","payload_encoding":"base64""#).raw().unwrap(), [0xff, 0, 0x61]);
        assert_eq!(message(r#""payload":[1, 2]"#).raw().unwrap(), b"[1, 2]");
        assert!(message(r#""payload":"x","payload_encoding":"rot13""#).line().is_err());
    }

    #[test]
    fn times_are_rfc_3339() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_164_799, "2024-02-28T23:59:59Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }

    #[test]
    fn names_and_keys_survive_a_url() {
        assert_eq!(percent(b"orders.v1-x_~"), "orders.v1-x_~");
        assert_eq!(percent(&[b'a', b' ', b'/', b'&', 0xff]), "a%20%2F%26%FF");
    }

    #[test]
    fn tables_align() {
        let rows = [vec!["NAME".to_owned(), "N".to_owned()], vec!["a".to_owned(), "10".to_owned()]];
        assert_eq!(table(&rows), "NAME  N\na     10\n");
    }
}
