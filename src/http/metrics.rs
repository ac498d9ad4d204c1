//! Counters of the HTTP layer: one set per shard, written by that shard alone, read by whoever is scraped.
//!
//! Labels come from closed sets (lesson N45): the route table, eight methods, the statuses of the API. Topics appear
//! once they exist, and go when a consume, a new topic or a scrape on the API port finds that they are gone.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use hyper::Method;
use narad_shards::api::ConsumeError;
use narad_shards::rt::{self, Instant};

use super::reply::CLIENT_LEFT;
use super::route::Route;
use super::{Broker, HttpContext};
use crate::telemetry::{Counter, DurationHistogram, Exposition, Kind};

const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "other"];
const STATUSES: [u16; 24] = [
    200, 202, 204, 201, 400, 401, 403, 404, 405, 408, 409, 410, 412, 413, 414, 415, 421, 429, 431, 499, 500, 501, 502,
    503,
];
/// Index behind the last route: requests that matched none.
const UNMATCHED: usize = Route::COUNT;

/// One shard's HTTP counters.
pub struct HttpMetrics {
    /// By route, method and status, made at first use. The last status stands for any other.
    requests: Box<[OnceLock<Box<DurationHistogram>>]>,
    bytes_in: [Counter; Route::COUNT + 1],
    bytes_out: [Counter; Route::COUNT + 1],
    in_flight: Counter,
    budget_rejections: Counter,
    memory_rejections: Counter,
    panics: Counter,
    server_errors: Counter,
    /// Locked by the shard when it meets a topic for the first time, and by a scrape.
    consumes: Mutex<Vec<Arc<ConsumeSeries>>>,
}

impl Default for HttpMetrics {
    fn default() -> HttpMetrics {
        let series = (UNMATCHED + 1) * METHODS.len() * (STATUSES.len() + 1);
        HttpMetrics {
            requests: (0..series).map(|_| OnceLock::new()).collect(),
            bytes_in: std::array::from_fn(|_| Counter::new()),
            bytes_out: std::array::from_fn(|_| Counter::new()),
            in_flight: Counter::new(),
            budget_rejections: Counter::new(),
            memory_rejections: Counter::new(),
            panics: Counter::new(),
            server_errors: Counter::new(),
            consumes: Mutex::default(),
        }
    }
}

impl HttpMetrics {
    pub(crate) fn count_budget_rejection(&self) {
        self.budget_rejections.add(1);
    }

    pub(crate) fn count_memory_rejection(&self) {
        self.memory_rejections.add(1);
    }

    pub(crate) fn count_panic(&self) {
        self.panics.add(1);
    }

    /// A request that was refused before it was understood.
    pub(crate) fn count_refused(&self, status: u16) {
        self.series(UNMATCHED, METHODS.len() - 1, status).record(std::time::Duration::ZERO);
    }

    fn series(&self, route: usize, method: usize, status: u16) -> &DurationHistogram {
        let status = STATUSES.iter().position(|known| *known == status).unwrap_or(STATUSES.len());
        let index = (route * METHODS.len() + method) * (STATUSES.len() + 1) + status;
        self.requests[index].get_or_init(Box::default)
    }

    fn known_consumes(&self) -> std::sync::MutexGuard<'_, Vec<Arc<ConsumeSeries>>> {
        self.consumes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Forgets the series of topics that do not exist (any more). For callers that know all topics: the listener of
    /// probes does not.
    pub(crate) fn retire_topics(&self, exists: impl Fn(&str) -> bool) {
        self.known_consumes().retain(|series| {
            let keep = exists(&series.topic);
            if !keep {
                series.retired.store(true, Relaxed);
            }
            keep
        });
    }
}

/// Counts one request until it is answered, or dropped because its client left.
pub(crate) struct Observed<'m> {
    metrics: &'m HttpMetrics,
    route: usize,
    method: usize,
    started: Instant,
    outcome: u16,
}

impl<'m> Observed<'m> {
    pub fn start(metrics: &'m HttpMetrics, route: Option<Route>, method: &Method, bytes_in: u64) -> Observed<'m> {
        let route = route.map_or(UNMATCHED, |route| route as usize);
        let method = METHODS.iter().position(|known| *known == method.as_str()).unwrap_or(METHODS.len() - 1);
        metrics.in_flight.add(1);
        metrics.bytes_in[route].add(bytes_in);
        Observed { metrics, route, method, started: rt::now(), outcome: CLIENT_LEFT }
    }

    pub fn finish(mut self, status: u16, bytes_out: usize) {
        self.outcome = status;
        self.metrics.bytes_out[self.route].add(bytes_out as u64);
    }
}

impl Drop for Observed<'_> {
    fn drop(&mut self) {
        self.metrics.in_flight.subtract(1);
        if self.outcome >= 500 {
            self.metrics.server_errors.add(1);
        }
        let series = self.metrics.series(self.route, self.method, self.outcome);
        series.record(rt::now() - self.started);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConsumeOutcome {
    Hit,
    Timeout,
    Cancelled,
    /// Nothing there, and the client did not want to wait.
    NoWait,
}

impl ConsumeOutcome {
    const NAMES: [&'static str; 4] = ["hit", "timeout", "cancelled", "no_wait"];
}

/// Waits of the consumes of one topic.
#[derive(Default)]
pub(crate) struct ConsumeSeries {
    topic: String,
    waits: [DurationHistogram; 4],
    empty: Counter,
    /// The topic is gone and a scrape has let go of the series.
    retired: AtomicBool,
}

/// The shard's own way to its consume series, without a lock.
#[derive(Default)]
pub(crate) struct ConsumeDirectory {
    by_topic: RefCell<HashMap<String, Arc<ConsumeSeries>>>,
}

impl ConsumeDirectory {
    fn find(&self, topic: &str) -> Option<Arc<ConsumeSeries>> {
        self.by_topic.borrow().get(topic).filter(|series| !series.retired.load(Relaxed)).cloned()
    }

    /// The topic is gone.
    fn forget(&self, topic: &str, metrics: &HttpMetrics) {
        if self.by_topic.borrow_mut().remove(topic).is_some() {
            metrics.retire_topics(|known| known != topic);
        }
    }

    fn add(&self, topic: &str, metrics: &HttpMetrics) -> Arc<ConsumeSeries> {
        let series = Arc::new(ConsumeSeries { topic: topic.to_owned(), ..ConsumeSeries::default() });
        metrics.known_consumes().push(series.clone());
        let mut by_topic = self.by_topic.borrow_mut();
        by_topic.retain(|_, known| !known.retired.load(Relaxed));
        by_topic.insert(topic.to_owned(), series.clone());
        series
    }
}

/// Times one consume; a dropped one was cancelled.
pub(crate) struct ConsumeTimer<'a, B: Broker> {
    ctx: &'a Rc<HttpContext<B>>,
    topic: &'a str,
    started: Instant,
    finished: bool,
}

impl<'a, B: Broker> ConsumeTimer<'a, B> {
    pub fn start(ctx: &'a Rc<HttpContext<B>>, topic: &'a str) -> ConsumeTimer<'a, B> {
        ConsumeTimer { ctx, topic, started: rt::now(), finished: false }
    }

    pub fn finish(mut self, outcome: ConsumeOutcome) {
        self.finished = true;
        self.record(outcome);
    }

    /// The consume was refused: nothing was waited for.
    pub fn refused(mut self, error: &ConsumeError) {
        self.finished = true;
        if *error == ConsumeError::TopicNotFound {
            self.ctx.consumes.forget(self.topic, &self.ctx.metrics);
        }
    }

    fn record(&self, outcome: ConsumeOutcome) {
        let series = match self.ctx.consumes.find(self.topic) {
            Some(series) => series,
            // Only topics get series, whatever names clients ask for.
            None if self.ctx.broker.topic(self.topic).is_none() => return,
            None => {
                // A new topic may follow a deleted one.
                self.ctx.metrics.retire_topics(|known| self.ctx.broker.topic(known).is_some());
                self.ctx.consumes.add(self.topic, &self.ctx.metrics)
            }
        };
        series.waits[outcome as usize].record(rt::now() - self.started);
        if matches!(outcome, ConsumeOutcome::Timeout | ConsumeOutcome::NoWait) {
            series.empty.add(1);
        }
    }
}

impl<B: Broker> Drop for ConsumeTimer<'_, B> {
    fn drop(&mut self) {
        if !self.finished {
            self.record(ConsumeOutcome::Cancelled);
        }
    }
}

/// Appends the HTTP families, summed over the shards. `errors` (component, kind, count) go with the
/// errors counted here: a family stands in one place.
pub(crate) fn render(page: &mut Exposition, shards: &[Arc<HttpMetrics>], errors: &[(&'static str, &'static str, u64)]) {
    let label = |route: usize| Route::LABELS.get(route).copied().unwrap_or("unmatched");
    let mut requests = Vec::new();
    for route in 0..=UNMATCHED {
        for (method, method_name) in METHODS.iter().enumerate() {
            for status in 0..=STATUSES.len() {
                let index = (route * METHODS.len() + method) * (STATUSES.len() + 1) + status;
                let recorded = shards.iter().filter_map(|shard| shard.requests[index].get().map(|series| &**series));
                if let Some((counts, sum)) = total(recorded) {
                    let status = STATUSES.get(status).map_or("other".to_owned(), u16::to_string);
                    requests.push((label(route), *method_name, status, counts, sum));
                }
            }
        }
    }
    page.family("narad_http_requests_total", Kind::Counter, "Requests answered; 499 is a client that left.");
    for (route, method, status, counts, _) in &requests {
        page.sample(&[("route", route), ("method", method), ("status", status)], counts.iter().sum::<u64>());
    }
    page.family("narad_http_request_duration_seconds", Kind::Histogram, "From the headers to the answer.");
    for (route, method, status, counts, sum) in &requests {
        let labels: [(&str, &dyn std::fmt::Display); 3] = [("route", route), ("method", method), ("status", status)];
        page.histogram(&labels, &DurationHistogram::BOUNDS, counts, *sum);
    }
    type Bytes = fn(&HttpMetrics) -> &[Counter; Route::COUNT + 1];
    let families: [(&'static str, &'static str, Bytes); 2] = [
        ("narad_http_request_bytes_in_total", "Declared request body bytes.", |m| &m.bytes_in),
        ("narad_http_response_bytes_out_total", "Response body bytes.", |m| &m.bytes_out),
    ];
    for (name, help, bytes) in families {
        page.family(name, Kind::Counter, help);
        for route in 0..=UNMATCHED {
            let sum: u64 = shards.iter().map(|shard| bytes(shard)[route].get()).sum();
            if sum > 0 {
                page.sample(&[("route", &label(route))], sum);
            }
        }
    }
    let sum = |counter: fn(&HttpMetrics) -> &Counter| shards.iter().map(|shard| counter(shard).get()).sum::<u64>();
    let in_flight = sum(|m| &m.in_flight);
    page.single("narad_http_requests_in_flight", Kind::Gauge, "Requests being served.", in_flight);
    page.single(
        "narad_http_batch_body_budget_rejections_total",
        Kind::Counter,
        "Batch bodies refused because the budget for large bodies was full.",
        sum(|m| &m.budget_rejections),
    );
    page.single(
        "narad_http_body_memory_rejections_total",
        Kind::Counter,
        "Bodies over 64 KiB refused because the memory for bodies was full.",
        sum(|m| &m.memory_rejections),
    );
    page.family("narad_errors_total", Kind::Counter, "Errors by component.");
    page.sample(&[("component", &"http"), ("kind", &"5xx")], sum(|m| &m.server_errors));
    page.sample(&[("component", &"http"), ("kind", &"panic")], sum(|m| &m.panics));
    for (component, kind, count) in errors {
        page.sample(&[("component", component), ("kind", kind)], count);
    }
    render_consumes(page, shards);
}

type Counts = [u64; DurationHistogram::BOUNDS.len() + 1];

fn total<'a>(recorded: impl Iterator<Item = &'a DurationHistogram>) -> Option<(Counts, f64)> {
    recorded.map(DurationHistogram::read).reduce(|(mut counts, sum), (more, more_sum)| {
        counts.iter_mut().zip(more).for_each(|(count, more)| *count += more);
        (counts, sum + more_sum)
    })
}

fn render_consumes(page: &mut Exposition, shards: &[Arc<HttpMetrics>]) {
    let mut topics: std::collections::BTreeMap<String, Vec<Arc<ConsumeSeries>>> = std::collections::BTreeMap::new();
    for series in shards.iter().flat_map(|shard| shard.known_consumes().clone()) {
        topics.entry(series.topic.clone()).or_default().push(series);
    }
    page.family("narad_consume_wait_seconds", Kind::Histogram, "How long consumes waited.");
    for (topic, all) in &topics {
        for (outcome, name) in ConsumeOutcome::NAMES.iter().enumerate() {
            let waits = total(all.iter().map(|series| &series.waits[outcome]));
            if let Some((counts, sum)) = waits.filter(|(counts, _)| counts.iter().any(|count| *count > 0)) {
                page.histogram(&[("topic", topic), ("outcome", name)], &DurationHistogram::BOUNDS, &counts, sum);
            }
        }
    }
    page.family("narad_consume_empty_total", Kind::Counter, "Consumes that found no message.");
    for (topic, all) in &topics {
        page.sample(&[("topic", topic)], all.iter().map(|series| series.empty.get()).sum::<u64>());
    }
}
