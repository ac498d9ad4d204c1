//! A client that knows every node of a cluster and tries again as the API tells clients to: four attempts in all, round
//! robin over the nodes, those first that this call has not tried, full-jitter backoff from 50 ms to 5 s, `Retry-After`
//! obeyed once no other node is left to try, and a node that failed five times in a row left alone for 2 s.

use std::io;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Client, Response};
use crate::random::Random;

const ATTEMPTS: u32 = 4;
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
const FAULTS_IN_A_ROW: u32 = 5;
const LEFT_ALONE: Duration = Duration::from_secs(2);

struct Node {
    client: Client,
    faults: u32,
    left_alone_until: Option<Instant>,
}

const NOBODY: &str = "no node to ask: each has failed five times in a row, and is left alone";

pub struct Nodes {
    nodes: Vec<Node>,
    /// Who is asked first by the next call.
    next: usize,
    random: Random,
}

/// How a call ended.
pub struct Done {
    /// The last answer; without one, why there is none.
    pub last: Result<Response, String>,
    /// An attempt before the last one ended without saying whether it was carried out.
    pub may_have_landed: bool,
    pub attempts: u32,
}

impl Done {
    /// What the caller sees as success. `gone`: an ack whose lease is gone was carried out before, if an earlier attempt
    /// may have been.
    pub fn is_success(&self) -> bool {
        match &self.last {
            Ok(answer) => matches!(answer.status, 200..=299) || (answer.status == 410 && self.may_have_landed),
            Err(_) => false,
        }
    }

    pub fn status(&self) -> u16 {
        self.last.as_ref().map_or(0, |answer| answer.status)
    }

    pub fn text(&self) -> String {
        match &self.last {
            Ok(answer) => format!("{} {}", answer.status, answer.text().trim()),
            Err(why) => why.clone(),
        }
    }
}

fn is_retried(status: u16) -> bool {
    matches!(status, 408 | 421 | 429 | 500 | 502 | 503 | 504)
}

/// Longest wait before attempt `attempt` (from 1, the second one): a random part of it is waited.
fn backoff_max(attempt: u32) -> Duration {
    (BACKOFF_MIN * 2u32.saturating_pow(attempt - 1)).min(BACKOFF_MAX)
}

impl Nodes {
    /// `timeout` is that of one attempt.
    pub fn new(addresses: &[SocketAddr], timeout: Duration, seed: u64) -> Nodes {
        let node = |address: &SocketAddr| Node {
            client: Client::new(*address).with_timeout(timeout),
            faults: 0,
            left_alone_until: None,
        };
        let mut random = Random::new(seed);
        let next = random.draw() as usize % addresses.len().max(1);
        Nodes { nodes: addresses.iter().map(node).collect(), next, random }
    }

    /// The next node in turn, of those that this call has not tried if there is one. `None`: all are left alone.
    fn pick(&mut self, tried: &[bool]) -> Option<usize> {
        let now = Instant::now();
        let count = self.nodes.len();
        let in_turn = (0..count).map(|offset| (self.next + offset) % count);
        let asked: Vec<usize> = in_turn.filter(|node| self.nodes[*node].is_asked(now)).collect();
        let picked = asked.iter().find(|node| !tried[**node]).or(asked.first()).copied()?;
        self.next = (picked + 1) % count;
        Some(picked)
    }

    /// For the text of a failed call.
    fn left_alone(&self) -> String {
        let now = Instant::now();
        let alone = self.nodes.iter().filter(|node| !node.is_asked(now));
        let alone: Vec<String> = alone.map(|node| node.client.address().to_string()).collect();
        if alone.is_empty() {
            String::new()
        } else {
            format!(" (left alone: {})", alone.join(", "))
        }
    }

    pub fn call(&mut self, method: &str, target: &str, headers: &[(&str, &str)], body: &[u8]) -> Done {
        let (mut tried, mut may_have_landed) = (vec![false; self.nodes.len()], false);
        for attempt in 1.. {
            let Some(picked) = self.pick(&tried) else {
                return Done { last: Err(NOBODY.to_owned()), may_have_landed, attempts: attempt };
            };
            tried[picked] = true;
            let node = &mut self.nodes[picked];
            let answer = node.client.request(method, target, headers, body);
            let status = answer.as_ref().map_or(0, |answer| answer.status);
            node.note(matches!(status, 0 | 500 | 502 | 503 | 504));
            let again = status == 0 || is_retried(status);
            if !again || attempt == ATTEMPTS {
                let why = |error| format!("no answer from {}: {error}", node.client.address());
                let last = answer.map_err(why).map_err(|why| why + &self.left_alone());
                return Done { last, may_have_landed, attempts: attempt };
            }
            may_have_landed |= match &answer {
                Ok(_) => matches!(status, 500 | 502),
                Err(error) => error.kind() != io::ErrorKind::ConnectionRefused,
            };
            let now = Instant::now();
            let untried = self.nodes.iter().zip(&tried).any(|(node, tried)| !tried && node.is_asked(now));
            let asked =
                answer.ok().and_then(|answer| answer.header("retry-after")?.parse().ok()).map(Duration::from_secs);
            let wait = match asked {
                Some(wait) if !(status == 503 && untried) => wait,
                _ => backoff_max(attempt).mul_f64(self.random.range(0, 1001) as f64 / 1000.0),
            };
            thread::sleep(wait);
        }
        unreachable!("the last attempt returns")
    }
}

impl Node {
    fn is_asked(&self, now: Instant) -> bool {
        self.left_alone_until.is_none_or(|until| until <= now)
    }

    fn note(&mut self, fault: bool) {
        self.faults = if fault { self.faults + 1 } else { 0 };
        // One probe after that: its failure leaves the node alone again.
        self.left_alone_until = (self.faults >= FAULTS_IN_A_ROW).then(|| Instant::now() + LEFT_ALONE);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    /// Answers one request with each of `answers`, in turn, on one connection each.
    fn server(answers: &'static [&'static str]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for answer in answers {
                let (stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream);
                let mut line = String::new();
                while reader.read_line(&mut line).unwrap() > 2 {
                    line.clear();
                }
                let text = format!("HTTP/1.1 {answer}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
                reader.get_mut().write_all(text.as_bytes()).unwrap();
            }
        });
        address
    }

    #[test]
    fn a_refusal_moves_on_to_the_next_node_at_once_and_the_last_one_is_waited_for() {
        let addresses = [server(&["503 x\r\nRetry-After: 1", "202 x"]), server(&["503 x\r\nRetry-After: 1"])];
        let mut nodes = Nodes::new(&addresses, Duration::from_secs(5), 1);
        nodes.next = 0;
        let began = Instant::now();
        let done = nodes.call("POST", "/", &[], b"");
        assert_eq!((done.status(), done.attempts, done.may_have_landed), (202, 3, false));
        let took = began.elapsed();
        assert!(
            took >= Duration::from_secs(1) && took < Duration::from_secs(2),
            "one of the two is waited for: {took:?}"
        );
    }

    #[test]
    fn what_ends_a_call_and_what_it_may_have_done() {
        let nodes = |answers| Nodes::new(&[server(answers)], Duration::from_secs(5), 1);
        let done = nodes(&["404 x"]).call("POST", "/", &[], b"");
        assert_eq!((done.status(), done.attempts, done.is_success()), (404, 1, false));
        let done = nodes(&["502 x", "410 x"]).call("POST", "/", &[], b"");
        assert!(done.may_have_landed && done.is_success(), "the ack was carried out the first time");
        let done = nodes(&["503 x", "410 x"]).call("POST", "/", &[], b"");
        assert!(!done.is_success(), "the lease is gone and nothing was acked");
    }

    #[test]
    fn nodes_that_are_back_but_still_left_alone_leave_a_call_only_the_one_that_is_down() {
        let down = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let up: &[&str] = &["202 x"];
        let mut nodes = Nodes::new(&[server(up), server(up), down], Duration::from_secs(5), 1);
        for restarted in 0..2 {
            (0..FAULTS_IN_A_ROW).for_each(|_| nodes.nodes[restarted].note(true));
        }
        let done = nodes.call("POST", "/", &[], b"");
        assert_eq!((done.status(), done.attempts), (0, ATTEMPTS), "{}", done.text());
        assert!(done.text().contains(&down.to_string()), "{}", done.text());
        let done = nodes.call("POST", "/", &[], b"");
        assert_eq!((done.status(), done.attempts), (0, 2), "its fifth failure: {}", done.text());
        assert_eq!(done.text(), NOBODY);
        // Restarts that wait until clients ask the nodes before again.
        thread::sleep(LEFT_ALONE);
        nodes.next = 2;
        let done = nodes.call("POST", "/", &[], b"");
        assert_eq!((done.status(), done.attempts), (202, 2), "{}", done.text());
    }

    #[test]
    fn backoff_doubles_up_to_five_seconds() {
        assert_eq!([1, 2, 3].map(backoff_max), [50, 100, 200].map(Duration::from_millis));
        assert_eq!(backoff_max(30), BACKOFF_MAX);
    }
}
