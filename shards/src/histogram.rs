//! Histograms of durations and sizes.

/// Latency histograms count microseconds, three significant digits.
pub type Histogram = hdrhistogram::Histogram<u64>;

/// For series that every partition has, 6 % apart: 2 KiB where [`histogram`] takes 128. There may be 10,000 partitions.
pub fn coarse_histogram() -> Histogram {
    Histogram::new(1).expect("1 significant digit is a valid precision")
}

/// Starts small and grows with its values; fill it with [`record`].
pub fn histogram() -> Histogram {
    Histogram::new(3).expect("3 significant digits is a valid precision")
}

/// Counts a value; one above an hour in microseconds counts as that. The histogram grows for it: its own
/// `saturating_record` would not, and would count what is above its present range, at first 2047, as 2.
pub fn record(histogram: &mut Histogram, value: u64) {
    const MOST: u64 = 3_600_000_000;
    // Fails only where a table of that range cannot be addressed.
    let _ = histogram.record(value.min(MOST));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_above_the_first_range_is_counted_as_what_it_is() {
        for (mut histogram, parts) in [(histogram(), 1000), (coarse_histogram(), 16)] {
            record(&mut histogram, 5_000_000);
            assert!(histogram.max().abs_diff(5_000_000) < 5_000_000 / parts, "{}", histogram.max());
            record(&mut histogram, u64::MAX);
            assert!(histogram.max().abs_diff(3_600_000_000) < 3_600_000_000 / parts, "{}", histogram.max());
            assert_eq!(histogram.len(), 2);
        }
    }
}
