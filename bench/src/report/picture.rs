//! Latency by percentile and throughput over time, as SVG and as PNG with the same content. Text in the PNG is drawn
//! with a font that this program carries: a bare machine has none.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Once;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, ValueFormatter};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;

use super::hgrm::curve;
use super::text::human;
use crate::run::{Failure, Series};

const SIZE: (u32, u32) = (1280, 620);
/// Right of it stands the legend.
const CHART_WIDTH: u32 = 960;
const FONT: &str = "sans-serif";
static FONT_FILE: &[u8] = include_bytes!("../../assets/dejavu-sans-subset.ttf");
/// Lines that a picture holds; more cannot be told apart.
const LINES: usize = 8;
const COLORS: [RGBColor; LINES] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(23, 190, 207),
    RGBColor(127, 127, 127),
];

/// A drawn picture.
pub struct Picture {
    /// File name without its ending.
    pub name: String,
    /// What it shows.
    pub title: String,
    /// As SVG.
    pub svg: String,
    /// As PNG.
    pub png: Vec<u8>,
}

/// All pictures of a result: by the first word of the series' names, at most [`LINES`] lines each.
pub fn pictures(command: &str, series: &[Series]) -> Result<Vec<Picture>, Failure> {
    let mut groups: Vec<(String, Vec<&Series>)> = Vec::new();
    for one in series {
        let group = one.name.split('.').next().unwrap_or_default().to_string();
        match groups.iter_mut().rev().find(|(name, _)| *name == group) {
            Some((_, members)) if members.len() < LINES => members.push(one),
            _ => groups.push((group, vec![one])),
        }
    }
    let mut pictures = Vec::new();
    for (index, (group, members)) in groups.iter().enumerate() {
        let earlier = groups[..index].iter().filter(|(name, _)| name == group).count();
        let part = if group == command { command.to_string() } else { format!("{command}.{group}") };
        let part = if earlier == 0 { part } else { format!("{part}-{}", earlier + 1) };
        let with_latency: Vec<&Series> = members.iter().copied().filter(|one| !one.latency.is_empty()).collect();
        if !with_latency.is_empty() {
            let title = format!("{group}: latency by percentile");
            pictures.push(draw(format!("{part}.latency"), Chart::latency(title, &with_latency))?);
        }
        let with_rate: Vec<&Series> = members.iter().copied().filter(|one| !one.rate_per_s.is_empty()).collect();
        if !with_rate.is_empty() {
            let title = format!("{group}: throughput over time");
            pictures.push(draw(format!("{part}.rate"), Chart::rate(title, &with_rate))?);
        }
    }
    Ok(pictures)
}

/// Lines in plain coordinates; a logarithmic axis is one whose values are logarithms.
struct Chart {
    title: String,
    axes: [Axis; 2],
    lines: Vec<(String, Vec<(f64, f64)>)>,
}

#[derive(Clone)]
struct Axis {
    title: &'static str,
    end: (f64, f64),
    marks: Vec<f64>,
    label: fn(f64) -> String,
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let (low, high) = self.end;
        limit.0 + (f64::from(limit.1 - limit.0) * (value - low) / (high - low)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() {
            Vec::new()
        } else {
            self.marks.clone()
        }
    }

    fn range(&self) -> Range<f64> {
        self.end.0..self.end.1
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        (self.label)(*value)
    }
}

impl Chart {
    fn latency(title: String, series: &[&Series]) -> Chart {
        let lines: Vec<(String, Vec<(f64, f64)>)> = series
            .iter()
            .map(|one| {
                let points = curve(&one.latency).into_iter().map(|(inverse, ns)| (inverse.log10(), ns.log10()));
                (one.name.clone(), points.collect())
            })
            .collect();
        let points = || lines.iter().flat_map(|(_, points)| points);
        let last = points().map(|point| point.0).fold(1.0, f64::max);
        let low = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
        let high = points().map(|point| point.1).fold(0.0, f64::max);
        let (low, high) = if low < high { (low - 0.05, high + 0.05) } else { (low - 0.5, low + 0.5) };
        let steps: &[f64] = if high - low > 2.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let decades = (low.floor() as i32)..=(high.ceil() as i32);
        let marks = decades.flat_map(|decade| steps.iter().map(move |step| f64::from(decade) + step.log10()));
        let marks = marks.filter(|mark| (low..=high).contains(mark)).collect();
        let x = Axis {
            title: "percentile",
            end: (0.0, last),
            marks: (0..=last.floor() as i32).map(f64::from).collect(),
            label: percent,
        };
        let y = Axis { title: "latency", end: (low, high), marks, label: |log| human(10_f64.powf(log), "ns") };
        Chart { title, axes: [x, y], lines }
    }

    fn rate(title: String, series: &[&Series]) -> Chart {
        let lines: Vec<(String, Vec<(f64, f64)>)> = series
            .iter()
            .map(|one| {
                let points = one.rate_per_s.iter().enumerate().map(|(second, rate)| (second as f64 + 0.5, *rate));
                (one.name.clone(), points.collect())
            })
            .collect();
        let points = || lines.iter().flat_map(|(_, points)| points);
        let seconds = points().map(|point| point.0 + 0.5).fold(1.0, f64::max);
        let high = points().map(|point| point.1).fold(1.0, f64::max) * 1.08;
        let x = Axis { title: "seconds", end: (0.0, seconds), marks: rounds(seconds), label: |x| format!("{x}") };
        let label = |rate| human(rate, "1/s");
        let y = Axis { title: "operations per second", end: (0.0, high), marks: rounds(high), label };
        Chart { title, axes: [x, y], lines }
    }

    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<(), String> {
        area.fill(&WHITE).map_err(text)?;
        let [x, y] = &self.axes;
        let (left, right) = area.split_horizontally(CHART_WIDTH);
        let mut chart = ChartBuilder::on(&left)
            .caption(&self.title, (FONT, 22))
            .margin(16)
            .x_label_area_size(48)
            .y_label_area_size(96)
            .build_cartesian_2d(x.clone(), y.clone())
            .map_err(text)?;
        chart
            .configure_mesh()
            .x_desc(x.title)
            .y_desc(y.title)
            .label_style((FONT, 15))
            .axis_desc_style((FONT, 16))
            .light_line_style(TRANSPARENT)
            .bold_line_style(BLACK.mix(0.15))
            .draw()
            .map_err(text)?;
        for (index, (name, points)) in self.lines.iter().enumerate() {
            let style = COLORS[index % LINES].stroke_width(2);
            chart.draw_series(LineSeries::new(points.iter().copied(), style)).map_err(text)?;
            let y = 60 + 24 * index as i32;
            right.draw(&PathElement::new([(0, y), (24, y)], style)).map_err(text)?;
            right.draw(&Text::new(name.as_str(), (32, y - 8), (FONT, 15).into_font())).map_err(text)?;
        }
        area.present().map_err(text)
    }
}

/// `0`, `90 %`, `99 %`, ... at 0, 1, 2 decades of 1/(1-q).
fn percent(decades: f64) -> String {
    match decades.round() as i32 {
        0 => "0 %".into(),
        1 => "90 %".into(),
        2 => "99 %".into(),
        more => format!("99.{} %", "9".repeat(more.max(3) as usize - 2)),
    }
}

/// Round values from 0 to `end`, some four to ten of them.
fn rounds(end: f64) -> Vec<f64> {
    let decade = 10_f64.powf(end.log10().floor());
    let step = [0.1, 0.2, 0.5, 1.0].into_iter().find(|step| end / (step * decade) <= 10.0).unwrap_or(1.0) * decade;
    (0..).map(|index| f64::from(index) * step).take_while(|value| *value <= end).collect()
}

fn text<E: Display>(error: E) -> String {
    error.to_string()
}

fn draw(name: String, chart: Chart) -> Result<Picture, Failure> {
    static FONT_READY: Once = Once::new();
    FONT_READY.call_once(|| {
        // It was parsed when it was added; text that cannot be drawn shows as an error of the drawing below.
        let _ = register_font(FONT, FontStyle::Normal, FONT_FILE);
    });
    let failed = |reason: String| Failure(format!("cannot draw the picture {name}: {reason}"));
    let mut svg = String::new();
    chart.draw(&SVGBackend::with_string(&mut svg, SIZE).into_drawing_area()).map_err(failed)?;
    let mut pixels = vec![0; (SIZE.0 * SIZE.1 * 3) as usize];
    chart.draw(&BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area()).map_err(failed)?;
    let png = encode(&pixels).map_err(|error| failed(error.to_string()))?;
    Ok(Picture { title: chart.title, name, svg, png })
}

fn encode(pixels: &[u8]) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::histogram;

    fn series(name: &str, rate_per_s: Vec<f64>) -> Series {
        let mut latency = histogram();
        for ns in 1..=5000_u64 {
            latency.saturating_record(ns * 997 % 100_000);
        }
        Series { name: name.into(), latency, rate_per_s }
    }

    #[test]
    fn a_picture_has_text_in_both_forms_without_a_font_of_the_system() {
        let drawn = pictures("produce", &[series("produce.c1", vec![1000.0, 1200.0]), series("produce.c8", vec![])]);
        let drawn = drawn.unwrap();
        let names: Vec<&str> = drawn.iter().map(|picture| picture.name.as_str()).collect();
        assert_eq!(names, ["produce.latency", "produce.rate"]);
        for label in ["99.9 %", "produce.c8", "latency by percentile"] {
            assert!(drawn[0].svg.contains(label), "{label}");
        }
        let mut reader = png::Decoder::new(std::io::Cursor::new(&drawn[0].png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        // The caption stands in the first 50 rows, where nothing else is drawn.
        let dark = pixels[..(SIZE.0 * 50 * 3) as usize].iter().filter(|value| **value < 100).count();
        assert!(dark > 300, "{dark} dark values where the caption is");
    }

    #[test]
    fn many_series_become_several_pictures() {
        let many: Vec<Series> = (0..10).map(|index| series(&format!("device.{index}"), Vec::new())).collect();
        let names: Vec<String> = pictures("suite", &many).unwrap().into_iter().map(|picture| picture.name).collect();
        assert_eq!(names, ["suite.device.latency", "suite.device-2.latency"]);
    }

    #[test]
    fn marks_are_round() {
        assert_eq!(rounds(10.0), (0..=10).map(f64::from).collect::<Vec<_>>());
        assert_eq!(rounds(4500.0), [0.0, 500.0, 1000.0, 1500.0, 2000.0, 2500.0, 3000.0, 3500.0, 4000.0, 4500.0]);
        assert_eq!((percent(0.0), percent(2.0), percent(4.0)), ("0 %".into(), "99 %".into(), "99.99 %".into()));
    }
}
