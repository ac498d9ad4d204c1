//! Medians, spreads, and whether two results differ.

/// Middle and extent of repeated measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The middle value (the mean of the two middle ones).
    pub median: f64,
    /// The lowest.
    pub low: f64,
    /// The highest.
    pub high: f64,
    /// How many values.
    pub count: usize,
}

impl Spread {
    /// Of `values`; those that are no numbers do not count. All zero where none is left.
    pub fn of(values: &[f64]) -> Spread {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        if count == 0 {
            return Spread { median: 0.0, low: 0.0, high: 0.0, count };
        }
        let median = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2.0;
        Spread { median, low: sorted[0], high: sorted[count - 1], count }
    }

    /// Half of the extent, as a share of the median: 0.1 is "± 10 %".
    pub fn relative(&self) -> f64 {
        if self.median == 0.0 {
            return 0.0;
        }
        (self.high - self.low) / 2.0 / self.median.abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(Spread::of(&[4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Spread::of(&[9.0, 1.0, 2.0]), Spread { median: 2.0, low: 1.0, high: 9.0, count: 3 });
    }

    #[test]
    fn what_is_no_number_does_not_count() {
        assert_eq!(Spread::of(&[f64::NAN, 2.0, f64::INFINITY]), Spread { median: 2.0, low: 2.0, high: 2.0, count: 1 });
        assert_eq!(Spread::of(&[]).count, 0);
        assert_eq!(Spread::of(&[0.0, 0.0]).relative(), 0.0);
    }

    #[test]
    fn relative_spread_is_half_the_extent_over_the_median() {
        assert!((Spread::of(&[90.0, 100.0, 110.0]).relative() - 0.1).abs() < 1e-12);
    }
}
