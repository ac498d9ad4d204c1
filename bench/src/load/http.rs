//! HTTP/1.1 as a client needs it: requests as bytes, and answers found in what was received. No I/O.

use std::borrow::Cow;
use std::time::Duration;

use super::protocol::{Answer, Outcome};

const HEADERS_MAX: usize = 64;
/// Bytes of a body that an error message shows.
const SHOWN_BYTES_MAX: usize = 300;

/// One whole answer.
#[derive(Debug, PartialEq)]
pub struct Response<'a> {
    pub status: u16,
    /// Without transfer coding.
    pub body: Cow<'a, [u8]>,
    /// The connection ends after it.
    pub close: bool,
    pub retry_after: Option<Duration>,
    /// Bytes of the input that it took, interim answers before it included.
    pub consumed: usize,
}

impl Response<'_> {
    /// `Refused`, in the words of the server.
    pub fn refusal(&self) -> Answer {
        let body = &self.body[..self.body.len().min(SHOWN_BYTES_MAX)];
        let text = String::from_utf8_lossy(body).trim().to_owned();
        self.answer(Outcome::Refused { kind: self.status.to_string(), text: format!("{} {text}", self.status) })
    }

    /// `result`, with what this answer says about the connection.
    pub fn answer(&self, result: Outcome) -> Answer {
        Answer { result, close: self.close, pause: self.retry_after }
    }
}

enum Length {
    None,
    Bytes(usize),
    Chunked,
}

/// Finds the first whole answer. `None`: more bytes must come.
pub fn parse(input: &[u8]) -> Result<Option<Response<'_>>, String> {
    let mut start = 0;
    loop {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut head = httparse::Response::new(&mut headers);
        let head_bytes = match head.parse(&input[start..]) {
            Ok(httparse::Status::Complete(bytes)) => bytes,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(error) => return Err(format!("the answer is not HTTP/1.1: {error}")),
        };
        let status = head.code.unwrap_or(0);
        if (100..200).contains(&status) {
            start += head_bytes;
            continue;
        }
        let mut close = head.version == Some(0);
        let mut retry_after = None;
        let mut length = None;
        for header in head.headers.iter() {
            let name = header.name;
            if name.eq_ignore_ascii_case("content-length") {
                let bytes = number(header.value).ok_or("the answer's Content-Length is not a number")?;
                length.get_or_insert(Length::Bytes(bytes));
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                length = Some(Length::Chunked);
            } else if name.eq_ignore_ascii_case("connection") {
                close |= header.value.eq_ignore_ascii_case(b"close");
            } else if name.eq_ignore_ascii_case("retry-after") {
                retry_after = number(header.value).map(|seconds| Duration::from_secs(seconds as u64));
            }
        }
        if status == 204 || status == 304 {
            length = Some(Length::None);
        }
        let body_start = start + head_bytes;
        let (body, consumed) = match length {
            Some(Length::None) => (Cow::Borrowed(&input[..0]), body_start),
            Some(Length::Bytes(bytes)) => match input.get(body_start..body_start + bytes) {
                Some(body) => (Cow::Borrowed(body), body_start + bytes),
                None => return Ok(None),
            },
            Some(Length::Chunked) => match chunked(&input[body_start..])? {
                Some((body, bytes)) => (Cow::Owned(body), body_start + bytes),
                None => return Ok(None),
            },
            None => return Err("the answer has neither Content-Length nor chunks".to_owned()),
        };
        return Ok(Some(Response { status, body, close, retry_after, consumed }));
    }
}

fn number(digits: &[u8]) -> Option<usize> {
    std::str::from_utf8(digits).ok()?.trim().parse().ok()
}

/// Decodes a chunked body: the bytes and how much of the input they took. `None`: it is not whole yet.
fn chunked(input: &[u8]) -> Result<Option<(Vec<u8>, usize)>, String> {
    let mut body = Vec::new();
    let mut at = 0;
    loop {
        let (line_bytes, bytes) = match httparse::parse_chunk_size(&input[at..]) {
            Ok(httparse::Status::Complete((line_bytes, bytes))) => (line_bytes, bytes as usize),
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err("a chunk of the answer has no size".to_owned()),
        };
        at += line_bytes;
        if bytes == 0 {
            return Ok(trailers_end(&input[at..]).map(|end| (body, at + end)));
        }
        let Some(chunk) = input.get(at..at.saturating_add(bytes).saturating_add(2)) else { return Ok(None) };
        body.extend_from_slice(&chunk[..bytes]);
        at += bytes + 2;
    }
}

/// Bytes up to and including the empty line that ends the trailers.
fn trailers_end(input: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let line = input[at..].iter().position(|byte| *byte == b'\n')? + 1;
        at += line;
        if line <= 2 {
            return Some(at);
        }
    }
}

/// Appends `value` percent-encoded for a query or a path segment.
pub fn encode_into(out: &mut Vec<u8>, value: &[u8]) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in value {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' => out.push(*byte),
            _ => out.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]),
        }
    }
}

/// Appends a decimal number.
pub fn number_into(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut rest = number;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &[u8] = b"HTTP/1.1 202 Accepted\r\ncontent-length: 5\r\nConnection: keep-alive\r\n\r\nhello";

    #[test]
    fn an_answer_is_found_only_when_it_is_whole() {
        for cut in 0..PLAIN.len() {
            assert_eq!(parse(&PLAIN[..cut]), Ok(None), "{cut} bytes");
        }
        let answer = parse(PLAIN).unwrap().unwrap();
        assert_eq!(
            (answer.status, &*answer.body, answer.close, answer.consumed),
            (202, &b"hello"[..], false, PLAIN.len())
        );
        let two = [PLAIN, PLAIN].concat();
        assert_eq!(parse(&two).unwrap().unwrap().consumed, PLAIN.len());
    }

    #[test]
    fn chunks_extensions_and_trailers_are_understood_at_every_cut() {
        let bytes =
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4;x=y\r\nwiki\r\n5\r\npedia\r\n0\r\nX-T: 1\r\n\r\n";
        for cut in 0..bytes.len() {
            assert_eq!(parse(&bytes[..cut]), Ok(None), "{cut} bytes");
        }
        let answer = parse(bytes).unwrap().unwrap();
        assert_eq!((&*answer.body, answer.consumed), (&b"wikipedia"[..], bytes.len()));
    }

    #[test]
    fn interim_answers_are_passed_over_and_bodyless_ones_end_at_their_head() {
        let bytes = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\nnext";
        let answer = parse(bytes).unwrap().unwrap();
        assert_eq!((answer.status, answer.body.len(), answer.consumed), (204, 0, bytes.len() - 4));
    }

    #[test]
    fn what_a_503_asks_for_is_kept() {
        let bytes = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nConnection: close\r\ncontent-length: 14\r\n\r\n{\"error\":\"no\"}";
        let answer = parse(bytes).unwrap().unwrap().refusal();
        assert_eq!(answer.pause, Some(Duration::from_secs(2)));
        assert!(answer.close);
        let refused = Outcome::Refused { kind: "503".into(), text: "503 {\"error\":\"no\"}".into() };
        assert_eq!(answer.result, refused);
    }

    #[test]
    fn what_is_not_http_is_an_error_and_not_a_wait() {
        assert!(parse(b"SSH-2.0-OpenSSH\r\n").is_err());
        assert!(parse(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }

    #[test]
    fn numbers_and_escapes() {
        let mut out = Vec::new();
        for number in [0, 7, 10, u64::MAX] {
            number_into(&mut out, number);
            out.push(b' ');
        }
        encode_into(&mut out, b"1:0:5 &\xff");
        assert_eq!(String::from_utf8(out).unwrap(), "0 7 10 18446744073709551615 1:0:5%20%26%FF");
    }
}
