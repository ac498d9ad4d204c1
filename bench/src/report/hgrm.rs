//! Percentile files as HdrHistogram's own tools write and read them (`.hgrm`), values in microseconds.

use std::fmt::Write;

use hdrhistogram::Histogram;

/// Steps per halving of the distance to 100 %, as the reference implementation has it.
const TICKS_PER_HALF_DISTANCE: u32 = 5;
/// Of a histogram with 3 significant digits.
const SUB_BUCKETS: u32 = 2048;
const NS_PER_UNIT: f64 = 1000.0;

/// The file's text.
pub fn percentiles(latency: &Histogram<u64>) -> String {
    let mut text = String::from("       Value     Percentile TotalCount 1/(1-Percentile)\n\n");
    let mut total = 0;
    for point in latency.iter_quantiles(TICKS_PER_HALF_DISTANCE) {
        total += point.count_since_last_iteration();
        let value = point.value_iterated_to() as f64 / NS_PER_UNIT;
        let quantile = point.quantile_iterated_to();
        let _ = write!(text, "{value:12.3} {quantile:2.12} {total:10}");
        if quantile < 1.0 {
            let _ = write!(text, " {:14.2}", 1.0 / (1.0 - quantile));
        }
        text.push('\n');
    }
    let _ = writeln!(
        text,
        "#[Mean    = {:12.3}, StdDeviation   = {:12.3}]\n#[Max     = {:12.3}, Total count    = {:12}]\n\
         #[Buckets = {:12}, SubBuckets     = {:12}]",
        latency.mean() / NS_PER_UNIT,
        latency.stdev() / NS_PER_UNIT,
        latency.max() as f64 / NS_PER_UNIT,
        latency.len(),
        latency.buckets(),
        SUB_BUCKETS,
    );
    text
}

/// Points of the curve that the picture draws: 1/(1-quantile), and nanoseconds. Ends at the last whole observation.
pub fn curve(latency: &Histogram<u64>) -> Vec<(f64, f64)> {
    let last = latency.len() as f64;
    latency
        .iter_quantiles(TICKS_PER_HALF_DISTANCE)
        .map(|point| {
            let inverse = 1.0 / (1.0 - point.quantile_iterated_to()).max(1.0 / last.max(1.0));
            (inverse.max(1.0), point.value_iterated_to().max(1) as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::histogram;

    fn thousand() -> Histogram<u64> {
        let mut latency = histogram();
        for value in 1..=1000 {
            latency.saturating_record(value * 1000);
        }
        latency
    }

    #[test]
    fn the_file_is_what_plotters_of_percentile_files_parse() {
        let text = percentiles(&thousand());
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("       Value     Percentile TotalCount 1/(1-Percentile)"));
        assert_eq!(lines.next(), Some(""));
        let rows: Vec<Vec<f64>> = lines
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().map(|word| word.parse().unwrap()).collect())
            .collect();
        let (last, others) = rows.split_last().unwrap();
        assert!(others.iter().all(|row| row.len() == 4), "{text}");
        assert_eq!(last.len(), 3, "the last row has no 1/(1-q), which would be infinite");
        assert_eq!((last[1], last[2]), (1.0, 1000.0));
        assert!((last[0] - 1000.0).abs() <= 1.0, "microseconds: {}", last[0]);
        assert!(rows.windows(2).all(|pair| pair[0][0] <= pair[1][0] && pair[0][2] <= pair[1][2]), "{text}");
        assert!(text.contains("#[Max     =") && text.contains("Total count    =         1000]"), "{text}");
    }

    #[test]
    fn a_file_without_observations_is_still_a_file() {
        assert!(percentiles(&histogram()).contains("Total count    =            0]"));
        assert!(curve(&histogram()).len() <= 1);
    }

    #[test]
    fn the_curve_ends_at_the_last_whole_observation() {
        let points = curve(&thousand());
        assert!(points.windows(2).all(|pair| pair[0].0 <= pair[1].0));
        assert_eq!(points.last().map(|point| point.0), Some(1000.0));
    }
}
