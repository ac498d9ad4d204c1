//! How keys, payloads and times look in a terminal, and how names look in a URL.

use std::fmt::Write as _;
use std::io::Write;

use base64::engine::general_purpose::STANDARD;
use base64::Engine as _;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Failure;
use crate::config::format_time;

/// One message as the API shows it.
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

    /// One line: the payload's own bytes, or all of it.
    pub fn print(&self, raw: bool, out: &mut dyn Write) -> Result<(), Failure> {
        match raw {
            true => out.write_all(&self.raw()?)?,
            false => out.write_all(self.line()?.as_bytes())?,
        }
        out.write_all(b"\n")?;
        Ok(out.flush()?)
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
    format_time(seconds) + "Z"
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

/// A JSON text over several lines, its members in the order in which the server sent them.
pub fn indented(json: &str) -> String {
    let (mut text, mut depth) = (String::with_capacity(json.len() * 2), 0);
    let (mut quoted, mut escaped) = (false, false);
    let new_line = |text: &mut String, depth: usize| {
        text.push('\n');
        text.extend(std::iter::repeat_n("  ", depth));
    };
    for c in json.chars() {
        if quoted {
            text.push(c);
            quoted = c != '"' || escaped;
            escaped = c == '\\' && !escaped;
            continue;
        }
        match c {
            _ if c.is_ascii_whitespace() => continue,
            '}' | ']' => {
                depth -= 1;
                // What was just opened holds nothing.
                match text.trim_end().ends_with(['{', '[']) {
                    true => text.truncate(text.trim_end().len()),
                    false => new_line(&mut text, depth),
                }
            }
            _ => {}
        }
        text.push(c);
        match c {
            '"' => quoted = true,
            '{' | '[' => {
                depth += 1;
                new_line(&mut text, depth);
            }
            ',' => new_line(&mut text, depth),
            ':' => text.push(' '),
            _ => {}
        }
    }
    text
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
    fn json_is_indented_in_its_own_order() {
        for (compact, lines) in [
            (r#"{"b":1,"a":[]}"#, "{\n  \"b\": 1,\n  \"a\": []\n}"),
            (r#"[{"k":"a{,:\"[\\"},{}]"#, "[\n  {\n    \"k\": \"a{,:\\\"[\\\\\"\n  },\n  {}\n]"),
            (" [ 1 , [ ] ] ", "[\n  1,\n  []\n]"),
            ("7", "7"),
        ] {
            assert_eq!(indented(compact), lines);
            let (before, after): (serde_json::Value, serde_json::Value) =
                (serde_json::from_str(compact).unwrap(), serde_json::from_str(lines).unwrap());
            assert_eq!(before, after);
        }
    }

    #[test]
    fn tables_align() {
        let rows = [vec!["NAME".to_owned(), "N".to_owned()], vec!["a".to_owned(), "10".to_owned()]];
        assert_eq!(table(&rows), "NAME  N\na     10\n");
    }
}
