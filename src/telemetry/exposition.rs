//! The Prometheus text format, version 0.0.4.

use std::fmt::{Display, Write};

use narad_shards::histogram::Histogram;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A page of metrics in the making. Samples belong to the family that was begun last.
#[derive(Default)]
pub struct Exposition {
    text: String,
    family: &'static str,
}

impl Exposition {
    pub fn new() -> Exposition {
        Exposition::default()
    }

    pub fn finish(self) -> String {
        self.text
    }

    /// Begins a family; all samples of one name stand together, as the format demands.
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &'static str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.family = name;
        self.put(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    pub fn sample(&mut self, labels: &[(&str, &dyn Display)], value: impl Display) {
        self.line("", labels, None, value);
    }

    /// A family of one sample without labels.
    pub fn single(&mut self, name: &'static str, kind: Kind, help: &'static str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(&[], value);
    }

    /// A histogram from counts per bucket; `counts` has one entry more than `bounds`, for what is above all of them.
    pub fn histogram(&mut self, labels: &[(&str, &dyn Display)], bounds: &[f64], counts: &[u64], sum: f64) {
        let mut below = 0;
        for (bound, count) in bounds.iter().zip(counts) {
            below += count;
            self.line("_bucket", labels, Some(bound), below);
        }
        let total = below + counts.get(bounds.len()).copied().unwrap_or(0);
        self.line("_bucket", labels, Some(&"+Inf"), total);
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, total);
    }

    /// A shard's own histogram, cut into buckets. `per_unit` is how many of its units make one of the series'
    /// (1,000,000 for microseconds shown as seconds).
    pub fn recorded(&mut self, labels: &[(&str, &dyn Display)], bounds: &[f64], recorded: &Histogram, per_unit: f64) {
        let mut counts = vec![0; bounds.len() + 1];
        let mut sum = 0.0;
        for value in recorded.iter_recorded() {
            let shown = value.value_iterated_to() as f64 / per_unit;
            counts[bounds.partition_point(|bound| *bound < shown)] += value.count_since_last_iteration();
            sum += shown * value.count_since_last_iteration() as f64;
        }
        self.histogram(labels, bounds, &counts, sum);
    }

    fn line(
        &mut self,
        suffix: &str,
        labels: &[(&str, &dyn Display)],
        bound: Option<&dyn Display>,
        value: impl Display,
    ) {
        let family = self.family;
        self.put(format_args!("{family}{suffix}"));
        let mut separator = '{';
        for (name, label) in labels {
            self.put(format_args!("{separator}{name}=\""));
            let start = self.text.len();
            self.put(format_args!("{label}"));
            escape_from(&mut self.text, start);
            self.text.push('"');
            separator = ',';
        }
        if let Some(bound) = bound {
            self.put(format_args!("{separator}le=\"{bound}\""));
            separator = ',';
        }
        if separator == ',' {
            self.text.push('}');
        }
        self.put(format_args!(" {value}\n"));
    }

    fn put(&mut self, text: std::fmt::Arguments<'_>) {
        let _ = self.text.write_fmt(text); // into memory: it cannot fail
    }
}

/// Escapes what was written from `start` on as a label value.
fn escape_from(text: &mut String, start: usize) {
    if text[start..].contains(['\\', '"', '\n']) {
        let escaped = text[start..].replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        text.truncate(start);
        text.push_str(&escaped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format() {
        let mut page = Exposition::new();
        page.single("narad_up", Kind::Gauge, "Always 1.", 1);
        page.family("narad_x_total", Kind::Counter, "Things.");
        page.sample(&[("topic", &"a\"b\\c\nd"), ("partition", &3)], 7u64);
        page.family("narad_y_seconds", Kind::Histogram, "Times.");
        page.histogram(&[("op", &"z")], &[0.5, 1.0], &[1, 0, 2], 6.25);
        page.histogram(&[], &[1.0], &[0, 0], 0.0);
        assert_eq!(
            page.finish(),
            "# HELP narad_up Always 1.\n# TYPE narad_up gauge\nnarad_up 1\n\
             # HELP narad_x_total Things.\n# TYPE narad_x_total counter\n\
             narad_x_total{topic=\"a\\\"b\\\\c\\nd\",partition=\"3\"} 7\n\
             # HELP narad_y_seconds Times.\n# TYPE narad_y_seconds histogram\n\
             narad_y_seconds_bucket{op=\"z\",le=\"0.5\"} 1\nnarad_y_seconds_bucket{op=\"z\",le=\"1\"} 1\n\
             narad_y_seconds_bucket{op=\"z\",le=\"+Inf\"} 3\nnarad_y_seconds_sum{op=\"z\"} 6.25\n\
             narad_y_seconds_count{op=\"z\"} 3\n\
             narad_y_seconds_bucket{le=\"1\"} 0\nnarad_y_seconds_bucket{le=\"+Inf\"} 0\n\
             narad_y_seconds_sum 0\nnarad_y_seconds_count 0\n"
        );
    }

    #[test]
    fn recorded_histograms_keep_their_counts() {
        let mut recorded = narad_shards::histogram::histogram();
        for micros in [90, 900, 900, 5_000_000] {
            recorded.record(micros).expect("resizes");
        }
        let mut page = Exposition::new();
        page.family("h", Kind::Histogram, "Times.");
        page.recorded(&[], &[0.0001, 0.001], &recorded, 1e6);
        let text = page.finish();
        assert!(
            text.contains("h_bucket{le=\"0.0001\"} 1\nh_bucket{le=\"0.001\"} 3\nh_bucket{le=\"+Inf\"} 4\n"),
            "{text}"
        );
    }
}
