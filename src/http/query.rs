//! Query strings and Go durations.

use std::borrow::Cow;
use std::time::Duration;

use super::reply::ApiError;
use crate::config::duration_nanos;

/// The raw query of a request. Pairs are looked for on demand; unknown ones are never decoded.
#[derive(Clone, Copy)]
pub(crate) struct Query<'q> {
    raw: &'q [u8],
}

impl<'q> Query<'q> {
    pub fn new(raw: Option<&'q str>) -> Query<'q> {
        Query { raw: raw.unwrap_or_default().as_bytes() }
    }

    fn pairs(self) -> impl Iterator<Item = (&'q [u8], &'q [u8])> {
        self.raw.split(|byte| *byte == b'&').filter(|pair| !pair.is_empty()).map(|pair| {
            let split = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
            (&pair[..split], pair.get(split + 1..).unwrap_or_default())
        })
    }

    /// Raw values of a parameter, in order.
    fn raw_values<'n>(self, name: &'n str) -> impl Iterator<Item = &'q [u8]> + use<'q, 'n> {
        self.pairs()
            .filter(move |(key, _)| decode(key, true).is_some_and(|key| *key == *name.as_bytes()))
            .map(|(_, value)| value)
    }

    pub fn has(self, name: &str) -> bool {
        self.raw_values(name).next().is_some()
    }

    /// The first value, percent-decoded; repetitions are ignored.
    pub fn first(self, name: &'static str) -> Result<Option<Cow<'q, [u8]>>, ApiError> {
        self.raw_values(name).next().map(|raw| decode(raw, true).ok_or_else(|| malformed(name))).transpose()
    }

    /// The only value, percent-decoded; a repetition is refused.
    pub fn only(self, name: &'static str) -> Result<Option<Cow<'q, [u8]>>, ApiError> {
        if self.raw_values(name).nth(1).is_some() {
            return Err(ApiError::bad_request(format!("query parameter {name} may be given once")));
        }
        self.first(name)
    }

    /// `true`, `false` or absent.
    pub fn flag(self, name: &'static str) -> Result<bool, ApiError> {
        match self.first(name)?.as_deref() {
            None | Some(b"false") => Ok(false),
            Some(b"true") => Ok(true),
            Some(_) => Err(ApiError::bad_request(format!("query parameter {name} must be true or false"))),
        }
    }
}

fn malformed(name: &str) -> ApiError {
    ApiError::bad_request(format!("query parameter {name} is not valid percent-encoding"))
}

/// An integer ≥ 0 of any size the type holds; an empty value counts as absent.
pub(crate) fn unsigned<T: std::str::FromStr>(name: &str, value: Option<&[u8]>) -> Result<Option<T>, ApiError> {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
    let parsed = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    parsed
        .map(Some)
        .ok_or_else(|| ApiError::bad_request(format!("query parameter {name} must be an integer of at least 0")))
}

/// Undoes percent-encoding; in a query `+` is a space. `None` when an escape is cut or not hexadecimal.
pub(crate) fn decode(raw: &[u8], plus_is_space: bool) -> Option<Cow<'_, [u8]>> {
    let special = |byte: &u8| *byte == b'%' || (plus_is_space && *byte == b'+');
    let Some(first) = raw.iter().position(special) else { return Some(Cow::Borrowed(raw)) };
    let mut decoded = Vec::with_capacity(raw.len());
    decoded.extend_from_slice(&raw[..first]);
    let mut rest = &raw[first..];
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match byte {
            b'%' => {
                let (high, low) = (hex(*tail.first()?)?, hex(*tail.get(1)?)?);
                decoded.push(high << 4 | low);
                rest = &tail[2..];
            }
            b'+' if plus_is_space => decoded.push(b' '),
            other => decoded.push(other),
        }
    }
    Some(Cow::Owned(decoded))
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

/// A Go duration that is not negative: `10s`, `+1m30s`, `1.5h`, `0`, `-0s`.
pub(crate) fn parse_duration(text: &[u8]) -> Option<Duration> {
    let text = std::str::from_utf8(text).ok()?;
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let nanos = if unsigned == "0" { 0 } else { duration_nanos(unsigned, false)? };
    (!text.starts_with('-') || nanos == 0).then(|| Duration::from_nanos(nanos))
}

/// Writes a duration as Go does: `10s`, `1m30s`, `2h0m0s`, `1.5ms`.
pub(crate) fn format_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    let decimal = |nanos: u128, unit: u128, name: &str| {
        let (whole, part) = (nanos / unit, nanos % unit);
        let width = unit.ilog10() as usize;
        let fraction = format!("{part:0width$}");
        let fraction = fraction.trim_end_matches('0');
        if fraction.is_empty() {
            format!("{whole}{name}")
        } else {
            format!("{whole}.{fraction}{name}")
        }
    };
    if nanos < 1_000 {
        return format!("{nanos}ns");
    }
    if nanos < 1_000_000 {
        return decimal(nanos, 1_000, "µs");
    }
    if nanos < 1_000_000_000 {
        return decimal(nanos, 1_000_000, "ms");
    }
    let minutes = nanos / 60_000_000_000;
    let seconds = decimal(nanos % 60_000_000_000, 1_000_000_000, "s");
    match (minutes / 60, minutes % 60) {
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_in_and_out() {
        for (text, nanos, shown) in [
            ("0", Some(0), "0s"),
            ("-0", Some(0), "0s"),
            ("0s", Some(0), "0s"),
            ("-0s", Some(0), "0s"),
            ("500ms", Some(500_000_000), "500ms"),
            ("10s", Some(10_000_000_000), "10s"),
            ("+10s", Some(10_000_000_000), "10s"),
            ("1m30s", Some(90_000_000_000), "1m30s"),
            ("2h", Some(7_200_000_000_000), "2h0m0s"),
            ("1.5h", Some(5_400_000_000_000), "1h30m0s"),
            (".5s", Some(500_000_000), "500ms"),
            ("1.s", Some(1_000_000_000), "1s"),
            ("1.000000000999s", Some(1_000_000_000), "1s"),
            ("0.3333333333333333333h", Some(1_199_999_999_999), "19m59.999999999s"),
            ("7us", Some(7_000), "7µs"),
            ("7\u{b5}s", Some(7_000), "7µs"),
            ("7\u{3bc}s", Some(7_000), "7µs"),
            ("1.5µs", Some(1_500), "1.5µs"),
            ("13ns", Some(13), "13ns"),
            ("", None, ""),
            ("-", None, ""),
            ("10", None, ""),
            ("s", None, ""),
            (".s", None, ""),
            ("1d", None, ""),
            ("-1s", None, ""),
            ("1s ", None, ""),
            ("1e3s", None, ""),
            ("99999999999999999999s", None, ""),
            ("9999999h", None, ""),
        ] {
            let parsed = parse_duration(text.as_bytes());
            let wanted = nanos.map(Duration::from_nanos);
            assert_eq!(parsed, wanted, "{text}");
            if let Some(duration) = parsed {
                assert_eq!(format_duration(duration), shown, "{text}");
            }
        }
    }

    #[test]
    fn values_are_decoded_as_forms() {
        let query = Query::new(Some("a=1&key=%ff%00+x&&key=2&b&%6bey=3&c=%zz"));
        assert_eq!(query.first("key").expect("well formed").as_deref(), Some(&b"\xff\0 x"[..]));
        assert!(query.only("key").is_err());
        assert_eq!(query.only("b").expect("well formed").as_deref(), Some(&b""[..]));
        assert!(query.first("c").is_err() && query.has("c") && !query.has("d"));
        assert_eq!(query.first("d").expect("absent"), None);
        for cut in ["%", "%4", "%g0", "a%0"] {
            assert_eq!(decode(cut.as_bytes(), true), None, "{cut}");
        }
        assert_eq!(decode(b"a+b%2B", false).as_deref(), Some(&b"a+b+"[..]));
    }
}
