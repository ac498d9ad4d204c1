//! Numbers as people write them: durations with units, sizes in bytes.

use std::time::Duration;

/// Parses `500ms`, `10s`, `1m30s`, `1.5h`: one or more numbers, each with a unit (`ns us µs ms s m h`, and `d` for
/// days, which only makes sense for retention). A bare number is refused, `0` is not.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("{text:?} is not a duration: write numbers with units, such as \"10s\", \"500ms\" or \"1m30s\"");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("{text:?} has no unit: write \"{text}s\" or \"{text}ms\""));
    }
    duration_nanos(text, true).map(Duration::from_nanos).ok_or_else(wrong)
}

/// Nanoseconds of a duration in the notation of Go, without a sign: one or more decimal numbers, each with a unit
/// (`ns us µs ms s m h`, and `d` only with `days`). At most about 292 years, as in Go.
pub fn duration_nanos(text: &str, days: bool) -> Option<u64> {
    let (mut rest, mut total) = (text, 0u128);
    while !rest.is_empty() {
        let (number, behind) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.')?);
        let unit_bytes = behind.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(unit_bytes);
        let unit_nanos: u128 = match unit {
            "ns" => 1,
            "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "d" if days => 86_400_000_000_000,
            _ => return None,
        };
        total = total.checked_add(scaled(number, unit_nanos)?)?;
        rest = behind;
    }
    let bounded = i64::try_from(total).ok().filter(|_| !text.is_empty())?;
    u64::try_from(bounded).ok()
}

/// `number` (decimal, perhaps with a fraction) times `unit`, rounded down.
fn scaled(number: &str, unit: u128) -> Option<u128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return None;
    }
    let whole: u128 = if whole.is_empty() { 0 } else { u128::from(whole.parse::<u64>().ok()?) };
    // More digits than these change nothing at a resolution of one nanosecond.
    let digits = &fraction[..fraction.len().min(18)];
    let fraction: u128 = if digits.is_empty() { 0 } else { u128::from(digits.parse::<u64>().ok()?) };
    let below = fraction * unit / 10u128.pow(digits.len() as u32);
    whole.checked_mul(unit)?.checked_add(below)
}

/// Writes a duration the shortest way that [`parse_duration`] reads back: `10s`, `1m30s`, `500ms`.
pub fn format_duration(duration: Duration) -> String {
    let mut nanos = duration.as_nanos();
    if nanos == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    for (unit, unit_nanos) in [
        ("h", 3_600_000_000_000),
        ("m", 60_000_000_000),
        ("s", 1_000_000_000),
        ("ms", 1_000_000),
        ("us", 1_000),
        ("ns", 1),
    ] {
        if nanos >= unit_nanos {
            text.push_str(&format!("{}{unit}", nanos / unit_nanos));
            nanos %= unit_nanos;
        }
    }
    text
}

/// Parses `512MiB`, `2GiB`, `1.5GiB`, `100MB`, `4096B`. A bare number is refused, as with durations.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size: write a number with a unit, such as \"512MiB\" or \"2GiB\"");
    let number_bytes = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let (number, unit) = text.split_at(number_bytes);
    let unit: u128 = match unit.trim_start() {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    scaled(number, unit).and_then(|bytes| u64::try_from(bytes).ok()).ok_or_else(wrong)
}

/// Writes a size for people: `512MiB`, `1.5GiB`, `12B`.
pub fn format_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        None => format!("{bytes}B"),
        Some((name, unit)) if bytes.is_multiple_of(*unit) => format!("{}{name}", bytes / unit),
        Some((name, unit)) => format!("{:.1}{name}", bytes as f64 / *unit as f64),
    }
}

/// Unix seconds as date and time in UTC, as RFC 3339 has them, without the zone.
pub fn format_time(seconds: u64) -> String {
    let (days, of_day) = ((seconds / 86_400) as i64, seconds % 86_400);
    // Days since the epoch into a date of the proleptic Gregorian calendar, counted from 1 March of the year 0, so
    // that the leap day is the last one of its year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t20_durations_need_units() {
        let cases = [
            ("10s", 10_000_000_000u64),
            ("500ms", 500_000_000),
            ("1m30s", 90_000_000_000),
            ("2h0m0s", 7_200_000_000_000),
            ("1.5h", 5_400_000_000_000),
            (".5s", 500_000_000),
            ("7d", 604_800_000_000_000),
            ("3\u{b5}s", 3_000),
            ("3\u{3bc}s", 3_000),
            ("0", 0),
            ("0s", 0),
        ];
        for (text, nanos) in cases {
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        for text in ["", "10", "s", "10 s", "10sec", "-1s", "1..5s", "1.s.", ".", "99999999999h", "1s2"] {
            assert!(parse_duration(text).is_err(), "{text} was accepted");
        }
        assert!(parse_duration("10").unwrap_err().contains("no unit"));
    }

    #[test]
    fn durations_are_written_as_they_are_read() {
        let cases = [(10_000_000_000, "10s"), (90_000_000_000, "1m30s"), (1_500_000, "1ms500us"), (0, "0s")];
        for (nanos, text) in cases {
            assert_eq!(format_duration(Duration::from_nanos(nanos)), text);
            assert_eq!(parse_duration(text), Ok(Duration::from_nanos(nanos)));
        }
    }

    #[test]
    fn sizes_need_units_too() {
        let cases = [("2GiB", 2u64 << 30), ("1.5KiB", 1536), ("100MB", 100_000_000), ("7B", 7), ("512 MiB", 512 << 20)];
        for (text, bytes) in cases {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "2", "GiB", "2 gib", "-1GiB", "99999999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text} was accepted");
        }
        assert_eq!(format_bytes(2 << 30), "2GiB");
        assert_eq!(format_bytes(1536), "1.5KiB");
        assert_eq!(format_bytes(12), "12B");
    }
}
